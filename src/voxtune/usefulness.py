"""`voxtune usefulness` from a request to its files. Packed subjects need no NIfTI reader: it runs where little but PyTorch is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from voxtune.diffusion.schedule import Spacing
from voxtune.errors import InputError
from voxtune.files import check_room, write_whole
from voxtune.optimizing import by_plan
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.useful import Usefulness
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import Drawing, Steps
from voxtune.runtime.segmenttrain import SegmentTraining
from voxtune.runtime.split import Split, split_cohort, split_folders, split_packed
from voxtune.runtime.storage import load, weights_sha256
from voxtune.teaching import Drawn, check_few, draw, lessons, scaled, segmenter_config, teach

HELD_OUT = 64
# Fewer subjects make a table, but not a result.
ENOUGH = 64
MOST_SEEDS = 64

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `voxtune usefulness` was asked for. Subjects come from one of `subjects`, `real` with `masks`, or the cohort."""

    model: Path
    out: Path
    volumes: int = 240
    few: int | None = None
    held_out: int | None = None
    subjects: Path | None = None
    real: Path | None = None
    masks: Path | None = None
    segment_steps: int = 2000
    segment_batch: int = 8
    seeds: int = 2
    sampler: str | None = None
    steps: Steps = None
    spacing: Spacing | None = None
    clip: bool | None = None
    plan: str = "auto"
    seed: int = 0
    batch: int = 8
    resamples: int = 1000
    base: int = 16
    overwrite: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        if (self.real is None) != (self.masks is None):
            raise InputError("--real and --masks belong together: folders of volumes and of their masks")
        if self.real is not None and self.subjects is not None:
            raise InputError("--real: leave --subjects away, subjects come from one place")
        if self.volumes < 2 or self.batch < 1 or not 1 <= self.seeds <= MOST_SEEDS:
            raise InputError(
                f"volumes {self.volumes}, batch {self.batch}, seeds {self.seeds}: at least 2 volumes, a batch from 1 up, "
                f"and 1 to {MOST_SEEDS} seeds"
            )
        if self.held_out is not None and self.held_out < 2:
            raise InputError(f"--held-out {self.held_out}: at least 2 subjects are needed, and {ENOUGH} for a result")
        check_room(self.result, self.overwrite)

    @property
    def result(self) -> Path:
        return self.out / "usefulness.json"

    def training(self) -> SegmentTraining:
        low: Any = "bf16" if torch.device(self.device).type == "cuda" else "none"
        return SegmentTraining(steps=self.segment_steps, batch=self.segment_batch, seed=self.seed, autocast=low)


def run(request: Request, say: Say) -> Usefulness:
    """Draws, trains every arm, measures; the files are written after each seed, so that a run cut short leaves a result."""
    settings = Bootstrap(resamples=request.resamples, seed=request.seed)
    model = load(request.model, device=request.device)
    training = request.training()
    told: dict[str, Any] = {"sampler": request.sampler, "spacing": request.spacing, "clip": request.clip}
    silent = request.steps is None and all(value is None for value in told.values())
    how = model.check_request(steps="auto" if silent else request.steps, seed=request.seed, **told)
    subjects = _checked(_split(request, model), request)
    if how.note:
        say(how.note)
    say(f"learn from {subjects.origin}; tested on {subjects.held_out.origin}")
    say(f"{request.volumes} volumes by {how.sampler} in {how.steps} steps on {model.device}")
    model = by_plan(model, request.plan, say)
    drawn = draw(model, subjects.learn, request.volumes, how, seed=request.seed, batch=request.batch, say=say)
    say(f"drawn in {drawn.seconds:.0f} s, plan included")
    about = {**_about(request, model, subjects, how, drawn), "training": asdict(training)}
    real = replace(subjects.learn, images_NDHW=scaled(subjects.learn.images_NDHW))
    made = lessons(real, drawn.volumes, request.few)
    notes = _notes(subjects, drawn, request)
    result = None
    for arms in teach(
        made, subjects.held_out, training, request.seeds, base=request.base, device=request.device, say=say
    ):
        result = Usefulness(arms=arms, settings=settings, about=about, notes=notes)
        write(result, request.result, request.model.name)
    assert result is not None
    for line in result.text():
        say(line)
    return result


def write(result: Usefulness, path: Path, title: str) -> None:
    """As JSON at `path`, and as Markdown beside it."""
    write_whole(path, (json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n").encode())
    write_whole(path.with_suffix(".md"), result.markdown(f"{title}: usefulness").encode())


def _split(request: Request, model: Model) -> Split:
    if request.subjects is not None:
        return split_packed(model, request.subjects, request.volumes, request.held_out)
    if request.real is not None and request.masks is not None:
        return split_folders(model, request.real, request.masks, request.volumes, request.held_out)
    held_out = HELD_OUT if request.held_out is None else request.held_out
    return split_cohort(model, request.volumes, held_out)


def _checked(subjects: Split, request: Request) -> Split:
    """Raises for what would fail only after the drawing."""
    segmenter_config(subjects.learn, request.base)
    check_few(request.few, len(subjects.learn))
    if not bool((subjects.held_out.classes_NDHW > 0).any()):
        raise InputError(f"{subjects.held_out.origin}: their masks hold no label, so nothing can be measured on them")
    return subjects


def _about(request: Request, model: Model, subjects: Split, how: Drawing, drawn: Drawn) -> dict[str, Any]:
    return {
        "model_sha256": weights_sha256(request.model),
        "data": subjects.origin,
        "held_out": subjects.held_out.origin,
        "size": list(subjects.learn.contract.size),
        "drawing": {
            **how.record(),
            "seed": request.seed,
            "plan": request.plan,
            "passes": list(getattr(model.network, "passes", ())),
            "volumes": request.volumes,
            "broken": drawn.broken,
            "seconds": round(drawn.seconds, 1),
        },
        "seeds_asked": request.seeds,
        "network_base": request.base,
        "device": model.device_name,
    }


def _notes(subjects: Split, drawn: Drawn, request: Request) -> tuple[str, ...]:
    count, notes = len(subjects.held_out), []
    if count < ENOUGH:
        notes.append(f"{count} held-out subjects: a result needs {ENOUGH}")
    if request.seeds < 2:
        notes.append("one seed: nothing is known of how another would turn out")
    if drawn.broken:
        notes.append(f"{drawn.broken} synthetic volumes held NaN or infinity and were left out")
    return tuple(notes)
