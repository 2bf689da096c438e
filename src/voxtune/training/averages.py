"""The choice among the averages of a run's weights: the loss on held-out subjects, at fixed noise and diffusion steps.

The noise of a subject depends on its number and on the number of the diffusion step, so every average is measured on the same
inputs, and the same average has the same loss in every call on the same machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from voxtune.data.contract import DataContract
from voxtune.data.labels import LabelMap
from voxtune.data.splits import HeldOut, held_out_cohort, held_out_folders, held_out_packed
from voxtune.diffusion import add_noise, noise_source, prediction_loss, prediction_target
from voxtune.diffusion.noise import with_offset
from voxtune.errors import InputError
from voxtune.files import recorded_path
from voxtune.precision import deterministic_algorithms, tf32_allowed
from voxtune.runtime.card import model_card
from voxtune.runtime.model import Model
from voxtune.runtime.storage import save
from voxtune.training.checkpoint import CHECKPOINTS, Checkpoint, averages, checkpoints, load_weights, read_checkpoint
from voxtune.training.config import DataSettings

# Draws of the noise of held-out subjects begin here, far from those of samplers.
FIRST_DRAW = 2**30


@dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """The loss of the weights `name` ("model": those that are trained) after `step`, with its standard error over subjects."""

    name: str
    step: int
    loss: float
    error: float

    def describe(self) -> str:
        return f"{self.name} after step {self.step}: loss {self.loss:.6f} ({self.error:.6f})"


@dataclass(frozen=True, kw_only=True)
class ChosenAverage:
    """The weights with the smallest held-out loss, and those that they were compared with."""

    chosen: HeldOutLoss
    rows: tuple[HeldOutLoss, ...]
    subjects: int
    timesteps: tuple[int, ...]
    model: Path


def measured_timesteps(total: int, count: int) -> tuple[int, ...]:
    """The middles of `count` equal parts of the diffusion's steps."""
    count = min(count, total)
    return tuple((2 * number + 1) * total // (2 * count) for number in range(count))


@torch.no_grad()
def held_out_loss(model: Model, subjects: HeldOut, timesteps: Sequence[int], seed: int = 0) -> tuple[float, float]:
    """The loss of the model in float32, mean and standard error over subjects, one volume at a time."""
    losses = []
    schedule, kind = model.schedule, model.config.diffusion.loss
    shape, offset = tuple(subjects.images_NCDHW.shape[1:]), model.config.diffusion.offset_noise
    with tf32_allowed(False), deterministic_algorithms(True):
        for number in range(len(subjects)):
            image = subjects.images_NCDHW[number : number + 1].to(model.device)
            cond = subjects.condition([number]).to(model.device)
            noise = with_offset(noise_source(seed, [number], shape, model.device), offset, seed, [number], shape)
            parts = []
            for t in timesteps:
                t_N = torch.full((1,), t, dtype=torch.int64, device=model.device)
                draw = noise(FIRST_DRAW + t)
                x = add_noise(schedule, image, t_N, draw)
                target = prediction_target(schedule, image, t_N, draw)
                parts.append(float(prediction_loss(model.network(x, t_N, cond), target, kind)))
            losses.append(sum(parts) / len(parts))
    values = torch.tensor(losses, dtype=torch.float64)
    return float(values.mean()), float(values.std() / len(values) ** 0.5)


def candidates(run: Path) -> list[tuple[Checkpoint, str]]:
    """All weights in the checkpoints of a run, oldest first."""
    files = checkpoints(run / CHECKPOINTS)
    if not files:
        raise InputError(f"{run}: contains no checkpoints of a training run")
    return [(c, name) for c in map(read_checkpoint, files) for name in ("model", *averages(c))]


def choose_average(
    run: Path,
    out: Path,
    subjects: HeldOut,
    *,
    count: int,
    device: torch.device | str,
    overwrite: bool,
    say: Callable[[str], None],
    command: str | None = None,
) -> ChosenAverage:
    """Measures all weights of a run and writes a model folder with the best."""
    rows: list[HeldOutLoss] = []
    best: tuple[HeldOutLoss, Checkpoint] | None = None
    timesteps: tuple[int, ...] = ()
    for checkpoint, name in candidates(run):
        if checkpoint.config.distill is not None:
            raise InputError(
                f"{run}: distils a model; its loss is that of a trajectory, so held-out images say nothing about it"
            )
        model = load_weights(checkpoint, name).to(device)
        timesteps = measured_timesteps(len(model.schedule), count)
        loss, error = held_out_loss(model, subjects, timesteps)
        row = HeldOutLoss(name=name, step=checkpoint.state.step, loss=loss, error=error)
        say(row.describe())
        rows.append(row)
        if best is None or row.loss < best[0].loss:
            best = row, checkpoint
    assert best is not None
    chosen, checkpoint = best
    model = load_weights(checkpoint, chosen.name)
    origin = _origin(run, chosen, rows, subjects, timesteps, command)
    card = model_card(model, title="A model trained with voxtune", origin=origin)
    save(model, out, card=card, overwrite=overwrite, half=checkpoint.config.store == "bf16")
    return ChosenAverage(chosen=chosen, rows=tuple(rows), subjects=len(subjects), timesteps=timesteps, model=out)


def _origin(
    run: Path,
    chosen: HeldOutLoss,
    rows: Sequence[HeldOutLoss],
    subjects: HeldOut,
    timesteps: Sequence[int],
    command: str | None,
) -> str:
    what = "The trained weights" if chosen.name == "model" else f"The average `{chosen.name}` of the weights"
    lines = [
        f"{what} of the run `{recorded_path(run)}` after step {chosen.step}, chosen by the smallest loss on held-out subjects: "
        f"{subjects.origin}, at {len(timesteps)} diffusion steps with fixed noise. The card of the run's own model describes "
        "its data and recipe.",
        "",
        "| weights | step | held-out loss | standard error |",
        "|---|---|---|---|",
        *(f"| {row.name} | {row.step} | {row.loss:.6f} | {row.error:.6f} |" for row in rows),
    ]
    return "\n".join([*lines, *([] if command is None else ["", "```", command, "```"])])


def held_out_subjects(
    data: DataSettings,
    contract: DataContract | None,
    count: int,
    *,
    subjects: Path | None = None,
    real: Path | None = None,
    masks: Path | None = None,
    labels: LabelMap | None = None,
) -> HeldOut:
    """The first held-out subjects of the run's own source, or of the given one."""
    if contract is None:
        raise InputError("a model without masks has no held-out subjects")
    if real is not None and masks is not None:
        held_out = held_out_folders(contract, real, masks, labels=labels)
    elif subjects is not None or data.subjects is not None:
        path = Path(str(subjects or data.subjects))
        return held_out_packed(contract, path, count)
    elif data.cohort is not None:
        return held_out_cohort(contract, count, data.cohort_seed)
    else:
        raise InputError("the run trained on folders: pass held-out subjects with --real and --masks, or --subjects")
    part: Any = slice(count)
    return replace(held_out, images_NCDHW=held_out.images_NCDHW[part], classes_NDHW=held_out.classes_NDHW[part])
