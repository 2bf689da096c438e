"""Distillation to a few sampling steps: the student's steps learn the trajectories of its teacher's deterministic sampler.

The teacher is sampled by DDIM over a fine grid of steps that contains the student's few. Each of the student's steps is trained
to end where the teacher is at the step after it, from the same initial noise: the update of DDIM is solved for the x_0 that
leads there (Salimans & Ho 2022, algorithm 2), and that x_0 is the student's target. The student starts with the teacher's
weights.

A student predicts v, whatever its teacher predicts: the noise gives x_0 as (x - sigma noise) / alpha, which multiplies errors by
hundreds in a first step without signal. A student of a teacher that predicts the noise learns v from its first update on.

One batch of a run is one set of masks and of initial noise; it gives one part of the training step for each of the student's
steps. All of it depends on the sample numbers and the weights alone, so a run is resumed as any other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from voxtune.data.subjects import Source
from voxtune.diffusion import TIMESTEP_SPACINGS, DiffusionConfig, make_schedule, prediction_loss, spaced_steps
from voxtune.diffusion.samplers import ddim
from voxtune.diffusion.schedule import clean_image
from voxtune.errors import InputError
from voxtune.files import recorded_path
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import Distilled, SamplingConfig
from voxtune.runtime.storage import load, weights_sha256
from voxtune.training.checkpoint import goes_on_from_checkpoint
from voxtune.training.config import DistillSettings, TrainConfig
from voxtune.training.data import read_item
from voxtune.training.plan_step import StepInputs

if TYPE_CHECKING:
    from torch import nn

log = logging.getLogger("voxtune")
Say = Callable[[str], None]
SAMPLER = "ddim"
# Masks and initial noise with which timesteps are learned, and the seed of that noise.
LEARNING_SAMPLES, LEARNING_SEED = 4, 2**62
# Candidates of timesteps whose results are computed at most.
MAX_CANDIDATES = 200


def load_teacher(config: TrainConfig) -> Model:
    """The teacher, which is the model that the run starts from; raises InputError if it is not the one the run began with."""
    assert config.distill is not None and config.model.init is not None
    if goes_on_from_checkpoint(config.model.init):
        raise InputError(f"{config.model.init}: a teacher must be a model folder, a run folder or a published .pt file")
    model = load(config.model.init)
    if model.config.sampling.distilled is not None:
        raise InputError(
            f"{config.model.init}: is distilled itself; distil its teacher {model.config.sampling.distilled.teacher}"
        )
    sha256 = weights_sha256(Path(config.model.init))
    if config.distill.teacher_sha256 not in (None, sha256):
        raise InputError(f"{config.model.init}: has other weights than the teacher that this run began with")
    return model


def prepared(config: TrainConfig, source: Source, device: torch.device | str, say: Say) -> TrainConfig:
    """The settings of a new run with what it must remember: the hash of its teacher, and the student's timesteps."""
    settings = config.distill
    assert settings is not None and config.model.init is not None
    teacher = load_teacher(config).to(device)
    check_steps(teacher, settings)
    if teacher.schedule.prediction == "epsilon":
        say(
            "the teacher predicts the noise and the student v, which it has to learn first: allow for many more updates"
        )
    timesteps = settings.timesteps
    if timesteps is None:
        conds = [read_item(source, number)[1] for number in range(min(LEARNING_SAMPLES, len(source)))]
        masks = [cond for cond in conds if cond is not None]
        timesteps = learn_timesteps(teacher, torch.stack(masks).to(device) if masks else None, settings, say)
    sha256 = weights_sha256(Path(config.model.init))
    return replace(config, distill=replace(settings, timesteps=timesteps, teacher_sha256=sha256))


def check_steps(teacher: Model, settings: DistillSettings) -> None:
    """Raises for steps that this teacher does not have."""
    available = teacher.available_steps
    if settings.steps >= min(settings.teacher_steps, available) or settings.teacher_steps > available:
        raise InputError(
            f"distill: steps {settings.steps} must be fewer than the teacher's {settings.teacher_steps}, and these at most the "
            f"{available} available steps"
        )
    if settings.timesteps is not None and settings.timesteps[0] != available - 1:
        raise InputError(f"distill: the first of the timesteps must be {available - 1}, where sampling starts")


def student_diffusion(teacher: DiffusionConfig) -> DiffusionConfig:
    """The diffusion of a student: the levels of its teacher, and prediction of v."""
    return replace(teacher, prediction="v")


def student_sampling(config: TrainConfig, teacher: SamplingConfig) -> SamplingConfig:
    """The sampling settings of the student: where the teacher starts, in the few steps that it is trained for."""
    settings = config.distill
    assert settings is not None and settings.timesteps is not None and settings.teacher_sha256 is not None
    distilled = Distilled(
        sampler=SAMPLER,
        steps=settings.steps,
        timesteps=settings.timesteps,
        clip=settings.clip,
        teacher=recorded_path(str(config.model.init)),
        teacher_sha256=settings.teacher_sha256,
        teacher_steps=settings.teacher_steps,
    )
    return SamplingConfig(start=teacher.start, prior=teacher.prior, distilled=distilled)


def fine_grid(teacher: Model, settings: DistillSettings, timesteps: Sequence[int]) -> list[int]:
    """The teacher's steps: evenly spaced, and those at which the student's steps end among them."""
    return sorted({*spaced_steps(teacher.available_steps, settings.teacher_steps), *timesteps[1:]}, reverse=True)


def sample_by(
    model: Model, network: Any, cond: Tensor | None, noise: Tensor, timesteps: Sequence[int], **kw: Any
) -> Tensor:
    """The result of the deterministic sampler from this noise; `network` computes the prediction."""
    start = model.start(noise, timesteps[0], cond)
    return ddim(lambda x, t_N: network(x, t_N, cond), start, model.schedule, timesteps, **kw)


class TrajectoryMatching:
    """The objective of a distillation: turns the batches of a step into parts, one for each of the student's steps."""

    def __init__(self, teacher: Model, settings: DistillSettings, network: Any = None):
        assert settings.timesteps is not None
        self.teacher, self.settings, self.timesteps = teacher, settings, settings.timesteps
        self.network = teacher.network if network is None else network
        self.grid = fine_grid(teacher, settings, self.timesteps)
        self._ends = {self.grid.index(t) - 1 for t in self.timesteps[1:]}
        self.schedule = make_schedule(student_diffusion(teacher.config.diffusion))

    @torch.no_grad()
    def inputs(self, batches: Sequence[StepInputs], student: Any) -> list[StepInputs]:
        """For each batch and each of the student's steps: its x as `images`, what it should predict there as `noise`."""
        return [part for batch in batches for part in self._parts(batch, student)]

    def _parts(self, batch: StepInputs, student: Any) -> list[StepInputs]:
        states = self.trajectory(batch.conds, batch.noise)
        x, schedule, parts = states[0], self.schedule, []
        for k, t in enumerate(self.timesteps):
            alpha, sigma = schedule.signal_noise(t)
            alpha_next, sigma_next = schedule.signal_noise(self.timesteps[k + 1] if k + 1 < len(self.timesteps) else -1)
            # The x_0 with which x_next = alpha_next x_0 + sigma_next (x - alpha x_0) / sigma is where the teacher is.
            x0 = (states[k + 1] - (sigma_next / sigma) * x) / (alpha_next - alpha * sigma_next / sigma)
            x0 = x0.clamp(-1, 1) if self.settings.clip else x0
            t_N = torch.full_like(batch.t_N, t)
            parts.append(StepInputs(x, batch.conds, t_N, (alpha * x - x0) / sigma))
            if self.settings.inputs == "teacher":
                x = states[k + 1]
            elif k + 1 < len(self.timesteps):
                own = clean_image(student(x, t_N, batch.conds).to(x.dtype), x, alpha, sigma, schedule.prediction)
                own = own.clamp(-1, 1) if self.settings.clip else own
                x = alpha_next * own + sigma_next * (x - alpha * own) / sigma
        return parts

    def trajectory(self, cond: Tensor | None, noise: Tensor) -> list[Tensor]:
        """Where the student starts, where the teacher is at the student's other timesteps, and the teacher's clean result."""
        states: list[Tensor] = [self.teacher.start(noise, self.timesteps[0], cond)]

        def keep(i: int, x: Tensor, _x0: Tensor) -> None:
            if i in self._ends:
                states.append(x)

        states.append(sample_by(self.teacher, self.network, cond, noise, self.grid, callback=keep))
        return states

    def loss(self, forward: Any, inputs: StepInputs, kind: Any) -> Tensor:
        """The error in x_0, equally in every step."""
        # x_0 = alpha x - sigma v: an error in v is one of sigma times that in x_0.
        _, sigma = self.schedule.levels(inputs.images.device)
        factor = sigma[inputs.t_N].view(-1, *[1] * (inputs.images.dim() - 1))
        predicted = forward(inputs.images, inputs.t_N, inputs.conds).float()
        return prediction_loss(factor * predicted, factor * inputs.noise, kind)


def objective(config: TrainConfig, device: torch.device) -> TrajectoryMatching | None:
    """The objective of a run: trajectory matching if it distils, None for plain training."""
    if config.distill is None:
        return None
    teacher = load_teacher(config).to(device)
    for parameter in teacher.network.parameters():
        parameter.requires_grad_(False)
    return TrajectoryMatching(teacher, config.distill, _fast(teacher, config))


def _fast(teacher: Model, config: TrainConfig) -> nn.Module:
    """The teacher's network by a plan of sampling, if the run's own plan is not plain PyTorch and a GPU computes it."""
    if teacher.device.type != "cuda" or config.requested_plan not in ("auto", "voxtune"):
        return teacher.network
    from voxtune.runtime.planned import Planned

    return Planned(teacher.network, "auto", search=False, say=log.info)


@torch.no_grad()
def learn_timesteps(teacher: Model, cond: Tensor | None, settings: DistillSettings, say: Say) -> tuple[int, ...]:
    """The few steps with which the teacher itself comes closest to its result in many, from the same noise.

    Starts from the best of the spacings; then moves one step at a time, by less and less, while that helps.
    """
    steps = settings.steps
    shape = (teacher.config.network.out_channels, *(teacher.config.size if cond is None else cond.shape[2:]))
    count = LEARNING_SAMPLES if cond is None else len(cond)
    noise = teacher.noise(LEARNING_SEED, list(range(count)), shape, teacher.device)(0)
    full = sample_by(teacher, teacher.network, cond, noise, fine_grid(teacher, settings, ()))
    errors: dict[tuple[int, ...], float] = {}

    def error(timesteps: tuple[int, ...]) -> float:
        if timesteps not in errors:
            x = sample_by(teacher, teacher.network, cond, noise, timesteps)
            errors[timesteps] = float((x - full).square().mean().sqrt())
        return errors[timesteps]

    available = teacher.available_steps
    spacings = {name: spaced_steps(available, steps, name, teacher.schedule) for name in TIMESTEP_SPACINGS}
    starts = {name: (available - 1, *rest[1:]) for name, rest in spacings.items()}
    starts = {name: t for name, t in starts.items() if len(set(t)) == steps and list(t) == sorted(t, reverse=True)}
    for name, timesteps in starts.items():
        say(f"{name}: timesteps {' '.join(map(str, timesteps))}, error {error(timesteps):.4f}")
    best = min(starts.values(), key=error)
    span = max(1, available // 8)
    while span and len(errors) < MAX_CANDIDATES:
        neighbours = [
            moved for k in range(1, steps) for d in (-span, span) if (moved := _moved(best, k, d)) is not None
        ]
        nearest = min([best, *neighbours], key=error)
        if nearest == best:
            span //= 2
        best = nearest
    say(f"learned: timesteps {' '.join(map(str, best))}, error {error(best):.4f}")
    return best


def _moved(timesteps: tuple[int, ...], k: int, by: int) -> tuple[int, ...] | None:
    """With step k moved, None if it would meet its neighbour or leave the schedule."""
    moved = timesteps[k] + by
    below = timesteps[k + 1] if k + 1 < len(timesteps) else -1
    return (*timesteps[:k], moved, *timesteps[k + 1 :]) if below < moved < timesteps[k - 1] else None


def describe(config: TrainConfig) -> list[str]:
    """The lines of the student's card about its teacher and recipe."""
    settings = config.distill
    assert settings is not None and settings.timesteps is not None
    inputs = "the teacher is" if settings.inputs == "teacher" else "the student's own steps before it end"
    return [
        f"Distilled from `{recorded_path(str(config.model.init))}` (SHA-256 of its weights {settings.teacher_sha256}) to "
        f"{settings.steps} steps of {SAMPLER} at timesteps {', '.join(map(str, settings.timesteps))}. These are other "
        "weights than the teacher's, for these steps only.",
        "",
        f"- Targets: the teacher's {SAMPLER} in {settings.teacher_steps} steps from the same noise; each of the student's steps "
        f"starts where {inputs}",
    ]
