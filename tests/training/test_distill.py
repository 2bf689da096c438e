"""Distillation: a student of four steps comes closer to its teacher's full result than the teacher's own four steps do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.factories.fields import Fields
from tests.factories.tiny_training import weights
from voxtune.diffusion import TIMESTEP_SPACINGS, noise_source, spaced_steps
from voxtune.errors import InputError
from voxtune.reading import file_sha256
from voxtune.runtime.model import Model
from voxtune.runtime.storage import load
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.config import DataSettings, DistillSettings, ModelSettings, TrainConfig
from voxtune.training.data import open_source
from voxtune.training.distill import (
    TrajectoryMatching,
    learn_timesteps,
    load_teacher,
    prepared,
    sample_by,
    student_diffusion,
)
from voxtune.training.folder import read_run
from voxtune.training.loop import train
from voxtune.training.plan_step import StepInputs

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SIZE = (4, 4, 4)
QUIET = {
    "accumulation": 1,
    "ema_start": 0,
    "ema_every": 1,
    "ema_decay": 0.9,
    "checkpoint_every": 1000,
    "log_every": 10,
    "sample_every": 0,
    "tensorboard": False,
    "loss": "l2",
}


def teacher_config(**model) -> TrainConfig:
    settings = {"size": SIZE, "base": 32, "multipliers": (1,), "attention": (), "diffusion_steps": 24} | model
    return TrainConfig(model=ModelSettings(**settings), steps=200, batch=8, learning_rate=2e-3, decay="cosine", **QUIET)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """The model folder of a small model of v that was trained for a few seconds."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    config = teacher_config(prediction="v", zero_terminal_snr=True)
    torch.set_num_threads(1)
    return train(config, Fields(), out).model


def student_config(teacher: Path, **changes) -> TrainConfig:
    distill = {"steps": 4, "teacher_steps": 12} | changes.pop("distill", {})
    settings = {"steps": 40, "batch": 4, "learning_rate": 1e-3, "decay": "cosine"} | QUIET | changes
    return TrainConfig(model=ModelSettings(init=str(teacher)), distill=DistillSettings(**distill), **settings)


def held_out(count):
    """Masks that were not trained with, and noise of sampling."""
    masks = torch.stack([torch.from_numpy(Fields()[1000 + i][1]) for i in range(count)])
    return masks, noise_source(77, range(count), (1, *SIZE))(0)


@torch.no_grad()
def distance(model: Model, timesteps, full, masks, noise) -> float:
    """Root mean square difference of the results in these steps from the teacher's full results."""
    return float((sample_by(model, model.network, masks, noise, timesteps) - full).square().mean().sqrt())


def compare(teacher: Model, student: Model, masks, noise) -> dict[str, float]:
    """The distance of the student, and of the teacher in as many steps by every spacing and by the student's timesteps."""
    total = teacher.available_steps
    with torch.no_grad():
        full = sample_by(teacher, teacher.network, masks, noise, spaced_steps(total, total))
    settings = student.resolve()
    grids = {name: spaced_steps(total, settings.steps, name, teacher.schedule) for name in TIMESTEP_SPACINGS}
    grids["learned"] = list(settings.timesteps)
    distances = {name: distance(teacher, grid, full, masks, noise) for name, grid in grids.items()}
    return {"student": distance(student, settings.timesteps, full, masks, noise), **distances}


@pytest.fixture(scope="module")
def student(teacher, tmp_path_factory) -> Path:
    """The run folder of a student, with a checkpoint in the middle."""
    out = tmp_path_factory.mktemp("student") / "run"
    torch.set_num_threads(1)
    config = prepared(student_config(teacher, checkpoint_every=20), Fields(), CPU, lambda line: None)
    train(config, Fields(), out, command="voxtune distill teacher -o run")
    return out


def test_a_student_is_closer_to_the_full_result_than_its_teachers_own_steps(teacher, student):
    """On masks and noise that neither was trained with, against each spacing and against the learned timesteps."""
    masks, noise = held_out(12)
    distances = compare(load(teacher), load(student), masks, noise)
    own = min(value for name, value in distances.items() if name != "student")
    assert distances["student"] < 0.8 * own, distances


def test_a_student_is_sampled_in_its_own_steps(teacher, student):
    model = load(student)
    masks, _ = held_out(2)
    settings = model.resolve()
    assert (settings.sampler, settings.steps, len(settings.timesteps)) == ("ddim", 4, 4)
    assert model.resolve(steps="auto") == model.resolve(steps=4, sampler="ddim", clip=True) == settings
    seen = []
    x = model.sample(masks, seed=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(n, 4) for n in (1, 2, 3, 4)]
    noise = model.noise(3, [0, 1], (1, *SIZE), CPU)(0)
    with torch.no_grad():
        assert torch.equal(x, sample_by(model, model.network, masks, noise, settings.timesteps))
    refused = [{"steps": 10}, {"sampler": "ddpm"}, {"timestep_spacing": "logsnr"}, {"cache": 2}, {"clip": False}]
    for options in refused:
        with pytest.raises(
            InputError, match=r"this model was distilled to ddim, 4 steps, timesteps 23 .*sample its teacher"
        ):
            model.resolve(**options)
    record = settings.record()
    assert record["timesteps"] == list(settings.timesteps)
    assert record["distilled_from"]["model_sha256"] == file_sha256(teacher / "model.safetensors")


def test_a_student_is_a_second_file_with_its_own_card(teacher, student):
    card = (student / "model" / "README.md").read_text()
    sha256 = file_sha256(teacher / "model.safetensors")
    for fact in ("A model distilled with voxtune", sha256, "to 4 steps of ddim at timesteps 23,", "ddim in 12 steps"):
        assert fact in card
    stored = json.loads((student / "model" / "config.json").read_text())["sampling"]["distilled"]
    assert stored["teacher_sha256"] == sha256 and stored["teacher"] == "model"
    assert file_sha256(student / "model" / "model.safetensors") != sha256
    with pytest.raises(InputError, match=r"is distilled itself; distil its teacher model"):
        load_teacher(student_config(student))


def test_a_distillation_is_resumed_with_the_same_bits(teacher, tmp_path):
    config = student_config(teacher, steps=6, batch=2, distill={"timesteps": (23, 15, 8, 2)})
    config = prepared(config, Fields(), CPU, print)
    train(config, Fields(), tmp_path / "whole")
    train(config, Fields(), tmp_path / "run", stop=Stop(4))
    assert len(read_run(tmp_path / "run").distill.timesteps) == 4
    result = train(read_run(tmp_path / "run"), Fields(), tmp_path / "run", resume=True)
    assert result.resumed_from == 3 and weights(tmp_path / "run") == weights(tmp_path / "whole")


class Stop:
    """Asks a run to stop when it is called for the `calls`-th time, the first time before the first step."""

    def __init__(self, calls: int):
        self.left = calls

    def __call__(self) -> bool:
        self.left -= 1
        return self.left == 0


def test_another_teacher_is_refused_on_resume(teacher, student, tmp_path):
    other = tmp_path / "other"
    train(replace(teacher_config(prediction="v", zero_terminal_snr=True), steps=1), Fields(), other)
    config = read_checkpoint(checkpoints(student / "checkpoints")[-1]).config
    config = replace(config, model=replace(config.model, init=str(other / "model")), steps=50)
    with pytest.raises(InputError, match="has other weights than the teacher that this run began with"):
        load_teacher(config)


@pytest.mark.parametrize("prediction", ["v", "epsilon"])
@pytest.mark.parametrize("inputs", ["teacher", "student"])
@torch.no_grad()
def test_targets_lead_to_where_the_teacher_is(teacher, prediction, inputs):
    """A network that predicts exactly its targets is on the teacher's trajectory after every step."""
    model = load(teacher) if prediction == "v" else Model(replace_prediction(load(teacher)))
    timesteps = (23, 17, 11, 4)
    settings = DistillSettings(steps=4, teacher_steps=12, timesteps=timesteps, inputs=inputs, clip=False)
    matching = TrajectoryMatching(model, settings)
    masks, noise = held_out(2)
    batch = StepInputs(torch.zeros_like(noise), masks, torch.zeros(2, dtype=torch.int64), noise)
    perfect = {}

    def student(x, t_N, cond):
        return perfect[int(t_N[0])]

    # With the teacher's own inputs the targets are known; the same network then serves as the student.
    known = TrajectoryMatching(model, replace(settings, inputs="teacher")).inputs([batch], None)
    perfect |= {int(part.t_N[0]): part.noise for part in known}
    parts = matching.inputs([batch], student)
    assert [int(part.t_N[0]) for part in parts] == list(timesteps)
    states = matching.trajectory(masks, noise)
    tolerance = 1e-4
    for part, state in zip(parts, states, strict=False):
        assert torch.allclose(part.images, state, atol=tolerance)
        assert float(matching.loss(lambda x, t, c, part=part: perfect[int(t[0])], part, "l2")) < tolerance
    full = sample_by(model, model.network, masks, noise, matching.grid)
    assert torch.allclose(states[-1], full, atol=1e-6)
    of_v = Model(replace(model.config, diffusion=student_diffusion(model.config.diffusion)), model.network)
    own = sample_by(of_v, student, masks, noise, timesteps, clip=False)
    assert torch.allclose(own, full, atol=tolerance)


def replace_prediction(model: Model):
    return replace(
        model.config, diffusion=replace(model.config.diffusion, prediction="epsilon", zero_terminal_snr=False)
    )


def test_learned_timesteps_are_no_worse_than_any_spacing(teacher):
    model, lines = load(teacher), []
    masks = torch.stack([torch.from_numpy(Fields()[i][1]) for i in range(4)])
    timesteps = learn_timesteps(model, masks, DistillSettings(steps=3, teacher_steps=12), lines.append)
    assert timesteps[0] == 23 and len(timesteps) == 3 and list(timesteps) == sorted(set(timesteps), reverse=True)
    errors = [float(line.rpartition(" ")[2]) for line in lines]
    assert len(lines) >= 3 and errors[-1] <= min(errors)
    assert timesteps == learn_timesteps(model, masks, DistillSettings(steps=3, teacher_steps=12), lines.append)


@pytest.mark.parametrize(
    ("distill", "message"),
    [
        ({"steps": 12}, "must be fewer than the teacher's 12"),
        ({"teacher_steps": 25}, "at most the 24 available steps"),
        ({"timesteps": (22, 10, 5, 1)}, "the first of the timesteps must be 23"),
    ],
)
def test_steps_that_a_teacher_does_not_have(teacher, distill, message):
    with pytest.raises(InputError, match=message):
        prepared(student_config(teacher, distill=distill), Fields(), CPU, print)


@pytest.mark.parametrize("distill", [{"timesteps": (5, 5, 2, 1)}, {"timesteps": (3, 2)}, {"steps": 0}])
def test_invalid_settings(teacher, distill):
    with pytest.raises(InputError):
        student_config(teacher, distill=distill)


def test_a_teacher_is_required():
    with pytest.raises(InputError, match="the teacher is missing"):
        TrainConfig(distill=DistillSettings())


@pytest.mark.slow
def test_on_the_simulated_cohort(tmp_path):
    """A teacher and its student of the simulated cohort at 16 x 16 x 16, on held-out subjects."""
    from voxtune.data.cohort import cohort_contract
    from voxtune.data.splits import held_out_cohort

    size = (16, 16, 16)
    model = ModelSettings(
        size=size, base=32, multipliers=(1,), attention=(), diffusion_steps=50, prediction="v", zero_terminal_snr=True
    )
    data = DataSettings(cohort=16)
    config = replace(teacher_config(), model=model, data=data, steps=300, batch=2)
    teacher = train(config, None, tmp_path / "teacher").model
    config = student_config(teacher, data=data, steps=80, batch=1, distill={"teacher_steps": 16})
    config = prepared(config, open_source(config, load(teacher).config, print, check=False), CPU, print)
    student = train(config, None, tmp_path / "student").model
    subjects = held_out_cohort(cohort_contract(size), 6)
    masks = subjects.condition(list(range(6)))
    noise = load(teacher).noise(77, range(6), (1, *size), CPU)(0)
    distances = compare(load(teacher), load(student), masks, noise)
    own = min(value for name, value in distances.items() if name != "student")
    assert distances["student"] < 0.9 * own, distances
