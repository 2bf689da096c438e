"""voxtune distill and voxtune ema, from packed subjects."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from tests.factories.cli import run
from tests.training.test_packed import TINY, Made
from voxtune.data.subjects import pack
from voxtune.diffusion import prediction_loss
from voxtune.reading import file_sha256
from voxtune.runtime.model import Model
from voxtune.runtime.storage import load
from voxtune.training.averages import held_out_loss, held_out_subjects, measured_timesteps
from voxtune.training.checkpoint import averages, checkpoints, load_weights, read_checkpoint
from voxtune.training.config import DataSettings

pytestmark = pytest.mark.usefixtures("one_thread")
V = ["--set", "model.prediction=v", "--set", "model.zero_terminal_snr=true"]
QUICK = ["--updates", "2", "--batch", "2", "--teacher-steps", "6", "--set", "sample_every=2", "--device", "cpu"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(run folder of a teacher, packed subjects)"""
    root = tmp_path_factory.mktemp("distill")
    file = pack(Made(range(4)), Made([90, 91, 92]), root / "subjects.npz", origin="made of numbers")
    decays = ["--set", "ema_candidates=[0.5, 0.99]", "--set", "ema_every=1", "--set", "ema_start=1"]
    lengths = ["--steps", "6", "--lr", "1e-3", "--checkpoint-every", "3", "--sample-every", "0"]
    from voxtune.cli.main import main

    command = ["train", "--subjects", str(file), "-o", str(root / "teacher"), *TINY, *V, *decays, *lengths, "--quiet"]
    assert main(command) == 0
    return root / "teacher", file


def test_a_student_is_distilled_resumed_and_sampled(capsys, folders, tmp_path):
    teacher, file = folders
    before = file_sha256(teacher / "model" / "model.safetensors")
    command = ("distill", teacher, "--subjects", file, "-o", tmp_path / "run", "--steps", 3, *QUICK, "--json")
    code, out, err = run(capsys, *command)
    assert code == 0, err
    result = json.loads(out)
    assert result["step"] == 2 and len(result["timesteps"]) == 3 and result["timesteps"][0] == 9
    assert file_sha256(teacher / "model" / "model.safetensors") == before
    assert "learned: timesteps 9" in err
    model = load(tmp_path / "run")
    assert model.config.sampling.distilled.teacher_sha256 == before
    assert model.config.sampling.distilled.teacher == "teacher"
    assert (tmp_path / "run" / "samples" / "step-00000002.png").exists()
    code, _, err = run(
        capsys, "train", "--resume", tmp_path / "run", "--steps", 3, "--set", "decay=cosine", "--device", "cpu"
    )
    assert code == 2 and "steps: 2 -> 3" in err
    code, out, err = run(capsys, "info", tmp_path / "run")
    assert code == 0 and "distilled from teacher" in out and "v-prediction, zero terminal SNR" in out
    code, out, _ = run(capsys, "info", tmp_path / "run", "--json")
    sampling = json.loads(out)["sampling"]
    assert sampling["timesteps"] == result["timesteps"] and sampling["distilled_from"]["steps"] == 6


def test_a_student_never_replaces_its_teacher(capsys, folders, tmp_path):
    teacher, file = folders
    for out in (teacher, teacher / "model"):
        code, _, err = run(capsys, "distill", teacher / "model", "--subjects", file, "-o", out, *QUICK, "--overwrite")
        assert code == 2 and "a student never replaces its teacher" in err, err
    assert load(teacher).config.sampling.distilled is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--timesteps", "9,x"), "must be whole numbers"),
        (("--timesteps", "9,5"), "expected 4 decreasing numbers"),
        (("--timesteps", "8,5,3,1"), "the first of the timesteps must be 9"),
        (("--steps", "6"), "must be fewer than the teacher's 6"),
        (("--set", "distill.inputs=both"), "'both' is not one of"),
        (("--set", "model.base=64"), "base is 32 in"),
    ],
)
def test_wrong_options_end_with_one_line(capsys, folders, tmp_path, options, message):
    teacher, file = folders
    code, _, err = run(capsys, "distill", teacher, "--subjects", file, "-o", tmp_path / "run", *QUICK, *options)
    assert code == 2 and message in err, err
    assert not (tmp_path / "run" / "model").exists()


def test_a_checkpoint_is_no_teacher(capsys, folders, tmp_path):
    teacher, file = folders
    path = checkpoints(teacher / "checkpoints")[-1]
    code, _, err = run(capsys, "distill", path, "--subjects", file, "-o", tmp_path / "run", *QUICK)
    assert code == 2 and "a teacher must be a model folder" in err


def test_the_average_with_the_smallest_held_out_loss_is_written(capsys, folders, tmp_path):
    teacher, _ = folders
    code, out, err = run(
        capsys, "ema", teacher, "-o", tmp_path / "best", "--held-out", 2, "--timesteps", 3, "--device", "cpu", "--json"
    )
    assert code == 0, err
    result = json.loads(out)
    names = [(row["step"], row["name"]) for row in result["rows"]]
    assert names == [(step, name) for step in (3, 6) for name in ("model", "ema", "ema-0.5", "ema-0.99")]
    losses = [row["loss"] for row in result["rows"]]
    assert len(set(losses)) == 8 and result["chosen"]["loss"] == min(losses)
    chosen = read_checkpoint(teacher / "checkpoints" / f"step-{result['chosen']['step']:08d}.safetensors")
    state = load(tmp_path / "best").network.state_dict()
    assert all(torch.equal(v, state[k]) for k, v in chosen.part(f"{result['chosen']['name']}.").items())
    assert f"{min(losses):.6f}" in (tmp_path / "best" / "README.md").read_text()
    code, _, err = run(capsys, "ema", teacher, "-o", tmp_path / "best", "--device", "cpu")
    assert code == 2 and "already contains a model" in err


def test_the_held_out_loss_has_the_same_bits_again_and_is_that_of_its_definition(folders):
    teacher, file = folders
    checkpoint = read_checkpoint(checkpoints(teacher / "checkpoints")[-1])
    model = load_weights(checkpoint, "ema-0.5")
    subjects = held_out_subjects(DataSettings(subjects=str(file)), model.config.data, 3)
    timesteps = measured_timesteps(10, 4)
    assert timesteps == (1, 3, 6, 8) and len(subjects) == 3
    first = held_out_loss(model, subjects, timesteps)
    torch.rand(7)
    assert held_out_loss(load_weights(checkpoint, "ema-0.5"), subjects, timesteps) == first
    # Of a network that predicts 0, the loss is the mean of |v|, which is computed here from the noise itself.
    from voxtune.diffusion import noise_source, prediction_target
    from voxtune.training.averages import FIRST_DRAW

    zero = Model(model.config, Zero())
    expected = []
    for number in range(3):
        image = subjects.images_NCDHW[number : number + 1]
        noise = noise_source(0, [number], tuple(image.shape[1:]))
        targets = [
            prediction_target(model.schedule, image, torch.tensor([t]), noise(FIRST_DRAW + t)) for t in timesteps
        ]
        expected.append(np.mean([float(prediction_loss(torch.zeros_like(v), v, "l1")) for v in targets]))
    assert held_out_loss(zero, subjects, timesteps)[0] == pytest.approx(np.mean(expected), rel=1e-6)
    assert averages(checkpoint) == ["ema", "ema-0.5", "ema-0.99"]


class Zero(torch.nn.Module):
    """Predicts 0."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, x, t_N, cond):
        return torch.zeros_like(x)


def test_a_distilled_run_has_no_held_out_loss(capsys, folders, tmp_path):
    teacher, file = folders
    steps = ("--timesteps", "9,5,1", "--steps", 3, "--set", "sample_every=0")
    assert run(capsys, "distill", teacher, "--subjects", file, "-o", tmp_path / "run", *QUICK, *steps)[0] == 0
    code, _, err = run(capsys, "ema", tmp_path / "run", "-o", tmp_path / "best", "--held-out", 2, "--device", "cpu")
    assert code == 2 and "distils a model" in err
