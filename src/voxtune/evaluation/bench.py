"""Generates the volumes of held-out subjects with one setting after another, and compares each with the reference.

Every row has the same subjects and the same noise. Volumes are measured as soon as they are generated; only those of the
current row, of the reference and of the real subjects stay in memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from voxtune.data.modality import kind_name
from voxtune.data.splits import HeldOut
from voxtune.errors import InputError
from voxtune.evaluation.describe import roles_of
from voxtune.precision import tf32_allowed
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.metrics import (
    Need,
    SetMeasurements,
    VolumeInput,
    choose_pairs,
    collect,
    measure_images,
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
    """`seed` is that of the noise; the reference is repeated with seed + 1. `margin`: see quality/paired.py."""

    seed: int = 0
    batch: int = 8
    margin: float = 0.5
    max_pairs: int = 128
    bootstrap: Bootstrap = field(default_factory=Bootstrap)

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= 4096 or self.seed < 0 or not 0 <= self.margin <= 100 or self.max_pairs < 1:
            raise InputError(
                f"batch {self.batch}, seed {self.seed}, margin {self.margin}, pairs {self.max_pairs}: the batch must be "
                "1 to 4096, the seed >= 0, the margin 0 to 100 and the pairs >= 1"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class GeneratedSet:
    """The volumes of one row as the sampler returned them, and their measurements."""

    volumes_NCDHW: Tensor
    measurements: SetMeasurements
    seconds: float
    broken: int = 0


class Bench:
    """Generates and measures the volumes of the held-out subjects, one setting at a time."""

    def __init__(self, model: Model, subjects: HeldOut, segmenter: Segmenter, options: TableOptions, say: Say):
        check_segmenter(segmenter, subjects.contract)
        self.model, self.options, self.say = model, options, say
        self.segmenter = segmenter.to(model.device)
        self.subjects = subjects.to(model.device)
        self.pairs = choose_pairs(len(subjects), options.max_pairs, options.bootstrap.seed)
        self.real = self.measure(self.subjects.images_NCDHW)
        self.done = self.total = 0
        self.started = time.perf_counter()

    def generate(
        self, model: Model, settings: SamplerSettings, seed: int, reference: GeneratedSet | None = None
    ) -> GeneratedSet:
        """One volume for each subject; with `reference`, similarity to its volumes is measured, too."""
        parts, seconds = [], 0.0
        count, batch = len(self.subjects), min(self.options.batch, len(self.subjects))
        for first in range(0, count, batch):
            # A short last batch is padded: another shape would need another plan.
            numbers = [min(first + i, count - 1) for i in range(batch)]
            cond = self.subjects.condition(numbers)
            started = self._now()
            x = self._sample(model, settings, cond, seed, numbers)
            seconds += (self._now() - started) * len(set(numbers)) / batch
            parts.append(x[: len(set(numbers))])
            self.done += settings.steps * len(set(numbers))
        volumes = torch.cat(parts)
        broken = int((~torch.isfinite(volumes).flatten(1).all(dim=1)).sum())
        volumes = volumes.nan_to_num(0.0, 1.0, -1.0)
        references = None if reference is None else reference.volumes_NCDHW
        measurements = self.measure(volumes, self.subjects.images_NCDHW, references)
        return GeneratedSet(volumes_NCDHW=volumes, measurements=measurements, seconds=seconds / count, broken=broken)

    def warm_up(self, model: Model, cache: FeatureCache | None = None) -> None:
        """Runs each kind of step once at the batch's shape, so that plans and kernels are built before timing."""
        batch = min(self.options.batch, len(self.subjects))
        numbers = list(range(batch))
        settings = model.resolve(steps=1) if model.config.sampling.distilled is None else model.resolve()
        if cache is not None:
            steps = min(3, model.available_steps)  # a full step, a cached one, and the last
            settings = model.resolve(steps=steps, cache=replace(cache, interval=steps))
        # The first call builds the plan, the second shows whether it runs.
        for _ in range(2):
            self._sample(model, settings, self.subjects.condition(numbers), 0, numbers)

    @torch.inference_mode()
    def measure(
        self, volumes_NCDHW: Tensor, partners: Tensor | None = None, references: Tensor | None = None
    ) -> SetMeasurements:
        """The measurements of a set. `partners` are the subjects' own volumes, `references` those of the reference."""
        others: dict[Need, Tensor | None] = {"partner": partners, "reference": references}
        metrics = metrics_for(PROVIDED | {need for need, volumes in others.items() if volumes is not None})
        # Metrics are computed in float32, whatever precision generated the volumes.
        with tf32_allowed(False):
            volumes = [units(volume) for volume in volumes_NCDHW]
            contract = self.subjects.contract
            kinds = [kind_name(name) for name in contract.images]
            rows = []
            for number, images_CDHW in enumerate(volumes):
                logits, features = self.segmenter.network.forward_both(images_CDHW[None] * 2 - 1)
                # Labels stay on the device: copying them is slow.
                inputs = {
                    kind: VolumeInput(
                        image=images_CDHW[channel],
                        partner=None if partners is None else unit(partners[number, channel]),
                        reference=None if references is None else unit(references[number, channel]),
                        features=features[0].double().cpu(),
                        mask=self.subjects.classes_NDHW[number],
                        predicted=logits.argmax(dim=1)[0],
                        classes=contract.classes,
                        kind=kind,
                        masked=images_CDHW[channel],
                        voxel_ml=math.prod(contract.spacing) / 1000,
                        **roles_of(contract, contract.classes),
                    )
                    for channel, kind in enumerate(kinds)
                }
                rows.append(measure_images(inputs, metrics))
            images = [dict(zip(kinds, images_CDHW, strict=True)) for images_CDHW in volumes]
            return collect(rows, measure_pairs(images, self.pairs, metrics))

    def report(self, row: StepRow) -> None:
        spent = time.perf_counter() - self.started
        left = spent * (self.total - self.done) / max(1, self.done)
        self.say(
            f"{row.name}: {row.seconds:.4g} s per volume, {row.verdict}; {spent:.0f} s, about {max(0, left):.0f} s left"
        )

    def _sample(self, model: Model, settings: SamplerSettings, cond: Tensor, seed: int, numbers: list[int]) -> Tensor:
        return model.sample(cond, settings=settings, seed=seed, indices=numbers).float()

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()


@dataclass(eq=False)
class Judge:
    """Compares rows with the reference over the same resamples of subjects.

    `average`: the reference is the mean of its two runs, which halves the weight of their seeds. Otherwise it is the first
    run, whose noise the rows share.
    """

    bench: Bench
    reference: GeneratedSet
    repeated: GeneratedSet
    average: bool = False

    def __post_init__(self) -> None:
        bench, options = self.bench, self.bench.options
        broken = self.reference.broken + self.repeated.broken
        if broken:
            raise InputError(
                f"{broken} volumes of the reference contain NaN or infinity; try --plan baseline, and if that fails "
                "too, the weights are damaged"
            )
        parameters = shared_parameters(self.reference.measurements, bench.real)
        self.resampler = Resampler(bench.real, options.bootstrap, parameters)
        self.metrics = self.resampler.metrics(self.reference.measurements)
        self.metrics_repeated = self.resampler.metrics(self.repeated.measurements)
        self.margins = margins(self.metrics, self.metrics_repeated, options.margin)

    def reference_rows(self, name: str, record: dict[str, Any]) -> list[StepRow]:
        """The reference, and its repetition, which shows the effect of the seed alone."""
        level, seed = self.bench.options.bootstrap.level, self.bench.options.seed
        reference = StepRow(
            name=f"{name}, reference",
            record={**record, "seed": seed},
            seconds=self.reference.seconds,
            metrics={n: m.interval(level) for n, m in self.metrics.items()},
        )
        repeated = self._row(
            f"{name}, seed {seed + 1}",
            {**record, "seed": seed + 1},
            self.repeated,
            self.metrics_repeated,
            [self.metrics],
        )
        return [reference, repeated]

    def row(self, name: str, record: dict[str, Any], generated: GeneratedSet) -> StepRow:
        references = [self.metrics, self.metrics_repeated] if self.average else [self.metrics]
        return self._row(name, record, generated, self.resampler.metrics(generated.measurements), references)

    def _row(
        self,
        name: str,
        record: dict[str, Any],
        generated: GeneratedSet,
        metrics: dict[str, Resampled],
        references: list[dict[str, Resampled]],
    ) -> StepRow:
        level = self.bench.options.bootstrap.level
        return StepRow(
            name=name,
            record=record,
            seconds=generated.seconds,
            metrics={n: m.interval(level) for n, m in metrics.items()},
            compared=compare(metrics, references, self.margins, level),
            broken=generated.broken,
        )


def units(images_CDHW: Tensor) -> Tensor:
    """Scales each image of a volume to [0, 1]."""
    return torch.stack([unit(image_DHW) for image_DHW in images_CDHW])


def unit(volume: Tensor) -> Tensor:
    """Scales to [0, 1] by minimum and maximum, as `voxtune evaluate` does with files; a constant volume becomes 0."""
    clamped = volume.clamp(-1, 1)
    low, high = clamped.amin(), clamped.amax()
    return (clamped - low) / torch.where(high > low, high - low, torch.ones_like(high))
