"""Between a Model, subjects and the training of segmenters: what one learns from real volumes, from synthetic ones, from both.

Every arm has the same network, recipe, steps and seeds; all that differs is the volumes that it is shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.comparing import unit
from voxtune.errors import InputError
from voxtune.precision import tf32_allowed
from voxtune.quality.overlap import dice_by_label
from voxtune.quality.useful import REFERENCE, Arm
from voxtune.runtime.heldout import HeldOut
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import Drawing
from voxtune.runtime.segmenter import Segmenter, SegmenterConfig
from voxtune.runtime.segmenttrain import SegmentTraining, train_segmenter
from voxtune.runtime.split import Volumes
from voxtune.workloads.segment import SegmentConfig

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Lesson:
    """One arm's volumes, and how many of them are real; the rest is synthetic."""

    name: str
    volumes: Volumes
    real: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """Synthetic volumes with the masks they were drawn for. Those with NaN or infinity are left out and counted."""

    volumes: Volumes
    seconds: float
    broken: int


def scaled(images_NDHW: Tensor) -> Tensor:
    """To [-1, 1] by each volume's own extremes: real and synthetic volumes alike, as `voxtune evaluate` takes them."""
    return torch.stack([unit(volume) * 2 - 1 for volume in images_NDHW])


def draw(model: Model, masks: Volumes, count: int, how: Drawing, *, seed: int, batch: int, say: Say) -> Drawn:
    """`count` volumes, number i for mask i; beyond the last mask the first comes again, with other noise."""
    # A stored choice by its name, whatever it holds; else as settled once, so that nothing is said with every batch.
    plain = {"sampler": how.sampler, "steps": how.steps, "spacing": how.spacing, "clip": how.clip}
    settings: dict[str, Any] = plain if how.auto is None else {"steps": "auto"}
    batch = min(batch, count)
    parts, started, told = [], time.perf_counter(), time.perf_counter()
    for first in range(0, count, batch):
        # A last batch that is short is filled up: another shape would ask for another plan.
        numbers = [min(first + i, count - 1) for i in range(batch)]
        cond = masks.condition([n % len(masks) for n in numbers])
        x = model.sample(cond, seed=seed, indices=numbers, **settings)
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
    return Drawn(volumes=kept, seconds=time.perf_counter() - started, broken=int((~fine).sum()))


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
