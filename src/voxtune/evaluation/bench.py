"""Held-out subjects drawn in one way after another, and each way held against the reference.

Every row draws the same subjects from the same noise. A volume is described as soon as it is drawn; kept are the volumes of
the row at hand, of the reference and of the real subjects.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from voxtune.data.splits import HeldOut
from voxtune.errors import InputError
from voxtune.precision import tf32_allowed
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.metrics import (
    Need,
    SetMeasurements,
    VolumeInput,
    choose_pairs,
    collect,
    measure,
    measure_pairs,
    metrics_for,
)
from voxtune.quality.paired import Resampled, Resampler, compare, margins, shared_parameters
from voxtune.quality.step_table import StepRow
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import FeatureCache, SamplerSettings
from voxtune.segmentation.segmenter import Segmenter, check_segmenter

Say = Callable[[str], None]

# What a metric can need and every set of volumes here provides.
PROVIDED: frozenset[Need] = frozenset({"pairs", "real", "features", "masks", "subjects"})


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """`seed` draws the volumes, seed + 1 the reference's second draw. `margin` is in seed-to-seed spreads of a volume."""

    seed: int = 0
    batch: int = 8
    margin: float = 0.5
    max_pairs: int = 128
    bootstrap: Bootstrap = field(default_factory=Bootstrap)

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= 4096 or self.seed < 0 or not 0 <= self.margin <= 100 or self.max_pairs < 1:
            raise InputError(
                f"batch {self.batch}, seed {self.seed}, margin {self.margin}, pairs {self.max_pairs}: the batch is 1 to "
                "4096, the seed 0 or more, the margin 0 to 100, the pairs at least 1"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratedSet:
    """The volumes of one row as the sampler returned them, and their measurements."""

    volumes_NDHW: Tensor
    measurements: SetMeasurements
    seconds: float
    broken: int = 0


class Bench:
    """Draws the subjects in one way after another and measures what comes."""

    def __init__(self, model: Model, subjects: HeldOut, segmenter: Segmenter, options: TableOptions, say: Say):
        check_segmenter(segmenter, subjects.contract)
        self.model, self.options, self.say = model, options, say
        self.segmenter = segmenter.to(model.device)
        self.subjects = subjects.to(model.device)
        self.pairs = choose_pairs(len(subjects), options.max_pairs, options.bootstrap.seed)
        self.real = self.measure(self.subjects.images_NDHW)
        self.done = self.total = 0
        self.began = time.perf_counter()

    def draw(
        self, model: Model, settings: SamplerSettings, seed: int, reference: GeneratedSet | None = None
    ) -> GeneratedSet:
        """All subjects by one way; their volumes against the reference's, too, where it is there."""
        parts, seconds = [], 0.0
        count, batch = len(self.subjects), min(self.options.batch, len(self.subjects))
        for first in range(0, count, batch):
            # A last batch that is short is filled up: another shape would ask for another plan.
            numbers = [min(first + i, count - 1) for i in range(batch)]
            cond = self.subjects.condition(numbers)
            started = self._now()
            x = self._sample(model, settings, cond, seed, numbers)
            seconds += (self._now() - started) * len(set(numbers)) / batch
            parts.append(x[: len(set(numbers)), 0])
            self.done += settings.steps * len(set(numbers))
        volumes = torch.cat(parts)
        broken = int((~torch.isfinite(volumes).flatten(1).all(dim=1)).sum())
        volumes = volumes.nan_to_num(0.0, 1.0, -1.0)
        against = None if reference is None else reference.volumes_NDHW
        measurements = self.measure(volumes, self.subjects.images_NDHW, against)
        return GeneratedSet(volumes_NDHW=volumes, measurements=measurements, seconds=seconds / count, broken=broken)

    def warm(self, model: Model, cache: FeatureCache | None = None) -> None:
        """A step of each kind at the batch's shape: plans and kernels are made outside of what is timed."""
        batch = min(self.options.batch, len(self.subjects))
        numbers = list(range(batch))
        settings = model.resolve(steps=1)
        if cache is not None:
            few = min(3, model.available_steps)  # a full step, one between, and the last
            settings = model.resolve(steps=few, cache=replace(cache, interval=few))
        # Twice: the first call makes the plan, the second shows whether it runs.
        for _ in range(2):
            self._sample(model, settings, self.subjects.condition(numbers), 0, numbers)

    @torch.inference_mode()
    def measure(
        self, volumes_NDHW: Tensor, partners: Tensor | None = None, references: Tensor | None = None
    ) -> SetMeasurements:
        """What the metrics need of each volume; `partners` are the real volumes, `references` those of the reference."""
        others: dict[Need, Tensor | None] = {"partner": partners, "reference": references}
        metrics = metrics_for(PROVIDED | {need for need, volumes in others.items() if volumes is not None})
        with self._exactly():
            images = [unit(volume) for volume in volumes_NDHW]
            rows = []
            for number, image in enumerate(images):
                logits, features = self.segmenter.network.forward_both(image[None, None] * 2 - 1)
                # Labels stay on the device: copying those of a row would take long.
                volume = VolumeInput(
                    image=image,
                    partner=None if partners is None else unit(partners[number]),
                    reference=None if references is None else unit(references[number]),
                    features=features[0].double().cpu(),
                    mask=self.subjects.classes_NDHW[number],
                    predicted=logits.argmax(dim=1)[0],
                    classes=self.subjects.contract.classes,
                )
                rows.append(measure(volume, metrics))
            return collect(rows, measure_pairs(images, self.pairs, metrics))

    def _sample(self, model: Model, settings: SamplerSettings, cond: Tensor, seed: int, numbers: list[int]) -> Tensor:
        return model.sample(cond, settings=settings, seed=seed, indices=numbers).float()

    def _exactly(self) -> AbstractContextManager[Any]:
        """Metrics in float32 throughout, whatever the volumes were drawn with."""
        return tf32_allowed(False)

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def tell(self, row: StepRow) -> None:
        spent = time.perf_counter() - self.began
        left = spent * (self.total - self.done) / max(1, self.done)
        self.say(
            f"{row.name}: {row.seconds:.4g} s a volume, {row.verdict}; {spent:.0f} s, about {max(0, left):.0f} s left"
        )


@dataclass(eq=False)
class Judge:
    """Holds rows against the reference, over the same resamples of subjects.

    With `both` it is the mean of its two draws, whose seeds then weigh less; else the first, whose noise the rows share.
    """

    bench: Bench
    reference: GeneratedSet
    again: GeneratedSet
    both: bool = False

    def __post_init__(self) -> None:
        bench, options = self.bench, self.bench.options
        broken = self.reference.broken + self.again.broken
        if broken:
            raise InputError(
                f"{broken} volumes of the reference hold NaN or infinity, so nothing can be held against it: try "
                "--plan baseline; if that fails too, the weights are broken"
            )
        parameters = shared_parameters(self.reference.measurements, bench.real)
        self.resampler = Resampler(bench.real, options.bootstrap, parameters)
        self.metrics = self.resampler.metrics(self.reference.measurements)
        self.metrics_again = self.resampler.metrics(self.again.measurements)
        self.margins = margins(self.metrics, self.metrics_again, options.margin)

    def reference_rows(self, name: str, how: dict[str, Any]) -> list[StepRow]:
        """The reference, and its second draw, which says what a seed alone makes."""
        level, seed = self.bench.options.bootstrap.level, self.bench.options.seed
        figures = {n: m.interval(level) for n, m in self.metrics.items()}
        how = {**how, "seed": seed}
        reference = StepRow(name=f"{name}, reference", how=how, seconds=self.reference.seconds, figures=figures)
        return [
            reference,
            self._row(
                f"{name}, seed {seed + 1}", {**how, "seed": seed + 1}, self.again, self.metrics_again, [self.metrics]
            ),
        ]

    def row(self, name: str, how: dict[str, Any], drawn: GeneratedSet) -> StepRow:
        references = [self.metrics, self.metrics_again] if self.both else [self.metrics]
        return self._row(name, how, drawn, self.resampler.metrics(drawn.measurements), references)

    def _row(
        self,
        name: str,
        how: dict[str, Any],
        drawn: GeneratedSet,
        metrics: dict[str, Resampled],
        references: list[dict[str, Resampled]],
    ) -> StepRow:
        level = self.bench.options.bootstrap.level
        return StepRow(
            name=name,
            how=how,
            seconds=drawn.seconds,
            figures={n: m.interval(level) for n, m in metrics.items()},
            compared=compare(metrics, references, self.margins, level),
            broken=drawn.broken,
        )


def unit(volume: Tensor) -> Tensor:
    """To [0, 1] by its own minimum and maximum, as `voxtune evaluate` takes files; a constant volume is background."""
    clamped = volume.clamp(-1, 1)
    low, high = clamped.amin(), clamped.amax()
    return (clamped - low) / torch.where(high > low, high - low, torch.ones_like(high))
