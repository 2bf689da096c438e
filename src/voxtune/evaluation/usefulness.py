"""`voxtune usefulness` from a request to its files. Packed subjects need no NIfTI reader: it runs where little but PyTorch is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.data.splits import (
    HeldOut,
    Split,
    Volumes,
    single_image_contract,
    split_cohort,
    split_folders,
    split_packed,
)
from voxtune.diffusion.noise import check_seed
from voxtune.errors import InputError
from voxtune.evaluation.bench import unit
from voxtune.files import check_output_path, write_atomic
from voxtune.precision import tf32_allowed
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.per_volume import dice_by_label
from voxtune.quality.usefulness_table import REFERENCE, Arm, UsefulnessTable
from voxtune.runtime.model import Model
from voxtune.runtime.planned import by_plan
from voxtune.runtime.sampling import SamplerOptions, SamplerSettings
from voxtune.runtime.storage import load, weights_sha256
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig
from voxtune.segmentation.train import SegmentTraining, train_segmenter
from voxtune.workloads.segment import SegmentConfig

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lesson:
    """One arm's volumes, and how many of them are real; the rest is synthetic."""

    name: str
    volumes: Volumes
    real: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticSet:
    """Synthetic volumes with the masks they were drawn for. Those with NaN or infinity are left out and counted."""

    volumes: Volumes
    seconds: float
    broken: int


def scaled(images_NDHW: Tensor) -> Tensor:
    """To [-1, 1] by each volume's own extremes: real and synthetic volumes alike, as `voxtune evaluate` takes them."""
    return torch.stack([unit(volume) * 2 - 1 for volume in images_NDHW])


def draw(
    model: Model, masks: Volumes, count: int, settings: SamplerSettings, *, seed: int, batch: int, say: Say
) -> SyntheticSet:
    """`count` volumes, number i for mask i; beyond the last mask the first comes again, with other noise."""
    batch = min(batch, count)
    parts, started, told = [], time.perf_counter(), time.perf_counter()
    for first in range(0, count, batch):
        # A last batch that is short is filled up: another shape would ask for another plan.
        numbers = [min(first + i, count - 1) for i in range(batch)]
        cond = masks.condition([n % len(masks) for n in numbers])
        x = model.sample(cond, settings=settings, seed=seed, indices=numbers)
        parts.append(x[: min(batch, count - first), 0].float().cpu())
        if time.perf_counter() - told > 10 or first == 0:
            told = time.perf_counter()
            say(f"drawn: {first + len(parts[-1])} of {count}, {told - started:.0f} s")
    volumes = torch.cat(parts)
    fine = torch.isfinite(volumes).flatten(1).all(dim=1)
    if not bool(fine.any()):
        raise InputError("every synthetic volume holds NaN or infinity: this model draws nothing to learn from")
    classes = masks.classes_NDHW[torch.arange(count) % len(masks)]
    kept = Volumes(contract=masks.contract, images_NDHW=scaled(volumes[fine]), classes_NDHW=classes[fine])
    return SyntheticSet(volumes=kept, seconds=time.perf_counter() - started, broken=int((~fine).sum()))


def lessons(real: Volumes, synthetic: Volumes, few: int | None = None) -> list[Lesson]:
    """The arms, the reference first; `few` adds one with that many real subjects, alone and with all synthetic volumes."""
    check_few(few, len(real))
    made = [
        Lesson(name=REFERENCE, volumes=real, real=len(real)),
        Lesson(name="synthetic", volumes=synthetic, real=0),
        Lesson(name="both", volumes=real + synthetic, real=len(real)),
    ]
    if few is not None:
        part = real.first(few)
        made.append(Lesson(name="few", volumes=part, real=few))
        made.append(Lesson(name="few_and_synthetic", volumes=part + synthetic, real=few))
    return made


def check_few(few: int | None, real: int) -> None:
    if few is not None and not 0 < few < real:
        raise InputError(f"--few {few}: there are {real} real subjects to learn from; give fewer, and at least 1")


def segmenter_config(volumes: Volumes, base: int) -> SegmenterConfig:
    """The one network of all arms; raises where volumes of this size do not fit it."""
    network = SegmentConfig(in_channels=1, classes=len(volumes.contract.labels) + 1, base=base)
    return SegmenterConfig(network=network, data=volumes.contract)


def teach(
    made: list[Lesson],
    test: HeldOut,
    training: SegmentTraining,
    seeds: int,
    *,
    base: int = 16,
    device: str = "cpu",
    say: Say = lambda _line: None,
) -> Iterator[tuple[Arm, ...]]:
    """Trains every arm with one seed, then with the next; gives all arms so far after each seed."""
    config = segmenter_config(made[0].volumes, base)
    test = replace(test, images_NDHW=scaled(test.images_NDHW))
    found: dict[str, list[dict[str, np.ndarray]]] = {lesson.name: [] for lesson in made}
    seconds = dict.fromkeys(found, 0.0)
    began = time.perf_counter()
    for number in range(seeds):
        for lesson in made:
            started = time.perf_counter()
            own = replace(training, seed=training.seed + number)
            segmenter = train_segmenter(lesson.volumes, own, network=config.network, device=device)
            found[lesson.name].append(measure(segmenter, test))
            seconds[lesson.name] += time.perf_counter() - started
            done, spent = sum(map(len, found.values())), time.perf_counter() - began
            left = spent * (seeds * len(made) - done) / done
            scores = ", ".join(f"{label} {np.nanmean(v):.4f}" for label, v in found[lesson.name][-1].items())
            say(f"seed {own.seed}, {lesson.name}: Dice {scores}; {spent:.0f} s, about {left:.0f} s left")
        yield tuple(_arm(lesson, found[lesson.name], seconds[lesson.name]) for lesson in made)


@torch.inference_mode()
def measure(segmenter: Segmenter, test: HeldOut) -> dict[str, np.ndarray]:
    """Dice by label, one value a subject; NaN where its mask lacks the label. Labels that no mask has are left out."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for image, classes in zip(test.images_NDHW, test.classes_NDHW, strict=True):
            found = segmenter.network(image[None, None].to(segmenter.device)).argmax(dim=1)[0]
            yield classes.to(segmenter.device), found

    with tf32_allowed(False):
        return dice_by_label(pairs(), test.contract.classes)


def _arm(lesson: Lesson, rows: list[dict[str, np.ndarray]], seconds: float) -> Arm:
    return Arm(
        name=lesson.name,
        real=lesson.real,
        synthetic=len(lesson.volumes) - lesson.real,
        dice_SN={label: np.stack([row[label] for row in rows]) for label in rows[0]},
        seconds=seconds,
    )


HELD_OUT = 64
# Fewer subjects make a table, but not a result.
ENOUGH = 64
MOST_SEEDS = 64


@dataclass(frozen=True, kw_only=True)
class UsefulnessRequest:
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
    sampling: SamplerOptions = field(default_factory=SamplerOptions)
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
        check_output_path(self.result, self.overwrite)

    @property
    def result(self) -> Path:
        return self.out / "usefulness.json"

    def training(self) -> SegmentTraining:
        low: Any = "bf16" if torch.device(self.device).type == "cuda" else "none"
        return SegmentTraining(steps=self.segment_steps, batch=self.segment_batch, seed=self.seed, autocast=low)


def run(request: UsefulnessRequest, say: Say) -> UsefulnessTable:
    """Draws, trains every arm, measures; the files are written after each seed, so that a run cut short leaves a result."""
    bootstrap = Bootstrap(resamples=request.resamples, seed=request.seed)
    model = load(request.model, device=request.device)
    training = request.training()
    check_seed(request.seed)
    settings = model.resolve(warn=say, **(request.sampling or {"steps": "auto"}))
    subjects = _checked(_split(request, model), request)
    say(f"learn from {subjects.origin}; tested on {subjects.held_out.origin}")
    say(f"{request.volumes} volumes by {settings.sampler} in {settings.steps} steps on {model.device}")
    model = by_plan(model, request.plan, say)
    drawn = draw(model, subjects.learn, request.volumes, settings, seed=request.seed, batch=request.batch, say=say)
    say(f"drawn in {drawn.seconds:.0f} s, plan included")
    about = {**_about(request, model, subjects, settings, drawn), "training": asdict(training)}
    real = replace(subjects.learn, images_NDHW=scaled(subjects.learn.images_NDHW))
    made = lessons(real, drawn.volumes, request.few)
    notes = _notes(subjects, drawn, request)
    result = None
    for arms in teach(
        made, subjects.held_out, training, request.seeds, base=request.base, device=request.device, say=say
    ):
        result = UsefulnessTable(arms=arms, settings=bootstrap, about=about, notes=notes)
        write(result, request.result, request.model.name)
    assert result is not None
    for line in result.text():
        say(line)
    return result


def write(result: UsefulnessTable, path: Path, title: str) -> None:
    """As JSON at `path`, and as Markdown beside it."""
    write_atomic(path, (json.dumps(result.to_json(), indent=2, allow_nan=False) + "\n").encode())
    write_atomic(path.with_suffix(".md"), result.markdown(f"{title}: usefulness").encode())


def _split(request: UsefulnessRequest, model: Model) -> Split:
    contract = single_image_contract(model.config.data)
    if request.subjects is not None:
        return split_packed(contract, request.subjects, request.volumes, request.held_out)
    if request.real is not None and request.masks is not None:
        return split_folders(contract, request.real, request.masks, request.volumes, request.held_out)
    held_out = HELD_OUT if request.held_out is None else request.held_out
    return split_cohort(contract, request.volumes, held_out)


def _checked(subjects: Split, request: UsefulnessRequest) -> Split:
    """Raises for what would fail only after the drawing."""
    segmenter_config(subjects.learn, request.base)
    check_few(request.few, len(subjects.learn))
    if not bool((subjects.held_out.classes_NDHW > 0).any()):
        raise InputError(f"{subjects.held_out.origin}: their masks hold no label, so nothing can be measured on them")
    return subjects


def _about(
    request: UsefulnessRequest, model: Model, subjects: Split, settings: SamplerSettings, drawn: SyntheticSet
) -> dict[str, Any]:
    return {
        "model_sha256": weights_sha256(request.model),
        "data": subjects.origin,
        "held_out": subjects.held_out.origin,
        "size": list(subjects.learn.contract.size),
        "drawing": {
            **settings.record(),
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


def _notes(subjects: Split, drawn: SyntheticSet, request: UsefulnessRequest) -> tuple[str, ...]:
    count, notes = len(subjects.held_out), []
    if count < ENOUGH:
        notes.append(f"{count} held-out subjects: a result needs {ENOUGH}")
    if request.seeds < 2:
        notes.append("one seed: nothing is known of how another would turn out")
    if drawn.broken:
        notes.append(f"{drawn.broken} synthetic volumes held NaN or infinity and were left out")
    return tuple(notes)
