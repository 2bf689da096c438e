"""Between a Model, held-out subjects and the metrics: `voxtune steps`, how few steps and which numerics are enough.

Every row draws the same subjects from the same noise. A volume is described as soon as it is drawn; kept are the volumes of
the row at hand, of the reference and of the real subjects.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.diffusion.schedule import Spacing
from voxtune.errors import InputError
from voxtune.evaluating import chosen_pairs
from voxtune.precision import tf32_allowed
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.compare import difference
from voxtune.quality.detail import detail
from voxtune.quality.distributions import histogram
from voxtune.quality.overlap import dice
from voxtune.quality.paired import Measured, Resampled, Resampler, compare, kernel_width, margins
from voxtune.quality.similarity import ms_ssim, psnr
from voxtune.quality.table import Row, Table, fewest, nearest_row
from voxtune.runtime.heldout import HeldOut, check_segmenter
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import Drawing, Steps
from voxtune.runtime.segmenter import Segmenter

STEPS = (5, 8, 10, 15, 20, 25, 50)
SAMPLERS = ("ddpm", "ddim", "dpm++", "unipc", "ipndm")
SPACINGS: tuple[Spacing, ...] = ("trailing", "linspace", "leading")
# Fewer subjects make a table, but not a result.
ENOUGH = 64

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """`seed` draws the volumes, seed + 1 the reference's second draw. `margin` is in seed-to-seed spreads of a volume."""

    seed: int = 0
    batch: int = 8
    margin: float = 1.0
    max_pairs: int = 128
    bootstrap: Bootstrap = field(default_factory=Bootstrap)

    def __post_init__(self) -> None:
        if not 1 <= self.batch <= 4096 or self.seed < 0 or not 0 <= self.margin <= 100 or self.max_pairs < 1:
            raise InputError(
                f"batch {self.batch}, seed {self.seed}, margin {self.margin}, pairs {self.max_pairs}: the batch is 1 to "
                "4096, the seed 0 or more, the margin 0 to 100, the pairs at least 1"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawn:
    """The volumes of one row as the sampler gave them, and what was measured of them."""

    volumes_NDHW: Tensor
    measured: Measured
    seconds: float
    broken: int = 0


class Bench:
    """Draws the subjects in one way after another and measures what comes."""

    def __init__(self, model: Model, subjects: HeldOut, segmenter: Segmenter, options: TableOptions, say: Say):
        check_segmenter(segmenter, subjects.contract)
        self.model, self.options, self.say = model, options, say
        self.segmenter = segmenter.to(model.device)
        self.subjects = subjects.to(model.device)
        self.pairs = chosen_pairs(len(subjects), options.max_pairs, options.bootstrap.seed)
        self.real = self.measure(self.subjects.images_NDHW)
        self.done = self.total = 0
        self.began = time.perf_counter()

    def draw(self, model: Model, how: Drawing, seed: int, reference: Drawn | None = None) -> Drawn:
        """All subjects by one way; their volumes against the reference's, too, where it is there."""
        parts, seconds = [], 0.0
        count, batch = len(self.subjects), min(self.options.batch, len(self.subjects))
        for first in range(0, count, batch):
            # A last batch that is short is filled up: another shape would ask for another plan.
            numbers = [min(first + i, count - 1) for i in range(batch)]
            cond = self.subjects.condition(numbers)
            started = self._now()
            x = self._sample(model, how, cond, seed, numbers)
            seconds += (self._now() - started) * len(set(numbers)) / batch
            parts.append(x[: len(set(numbers)), 0])
            self.done += how.steps * len(set(numbers))
        volumes = torch.cat(parts)
        broken = int((~torch.isfinite(volumes).flatten(1).all(dim=1)).sum())
        volumes = volumes.nan_to_num(0.0, 1.0, -1.0)
        against = None if reference is None else reference.volumes_NDHW
        measured = self.measure(volumes, self.subjects.images_NDHW, against)
        return Drawn(volumes_NDHW=volumes, measured=measured, seconds=seconds / count, broken=broken)

    def warm(self, model: Model) -> None:
        """One step at the batch's shape: plans and kernels are made outside of what is timed."""
        batch = min(self.options.batch, len(self.subjects))
        numbers = list(range(batch))
        # Twice: the first call makes the plan, the second shows whether it runs.
        for _ in range(2):
            self._sample(model, model.drawing(steps=1), self.subjects.condition(numbers), 0, numbers)

    @torch.inference_mode()
    def measure(self, volumes_NDHW: Tensor, real: Tensor | None = None, reference: Tensor | None = None) -> Measured:
        """What the figures need of each volume."""
        with self._exactly():
            features, dices = self._labelled(volumes_NDHW)
            units = [unit(v) for v in volumes_NDHW]
            inside = self.subjects.classes_NDHW > 0
            likeness: dict[str, np.ndarray] = {}
            for suffix, others in (("", real), ("_reference", reference)):
                if others is not None:
                    theirs = [unit(v) for v in others]
                    likeness["psnr" + suffix] = np.array([psnr(a, b) for a, b in zip(units, theirs, strict=True)])
                    likeness["ms_ssim" + suffix] = np.array([ms_ssim(a, b) for a, b in zip(units, theirs, strict=True)])
            return Measured(
                features_NF=features,
                histograms_NB=np.stack([histogram(v.cpu()) for v in units]),
                detail_N=np.array([detail(v, mask) for v, mask in zip(units, inside, strict=True)]),
                pairs_P=np.array([ms_ssim(units[i], units[j]) for i, j in self.pairs]),
                dice_N=dices,
                likeness_N=likeness,
            )

    def _labelled(self, volumes_NDHW: Tensor) -> tuple[Tensor, dict[str, np.ndarray]]:
        """Features, and Dice by label; on the device, where the labels of a row would take long to copy."""
        labels = sorted(self.subjects.contract.labels, key=lambda label: label.channel)
        features: list[Tensor] = []
        scores: dict[str, list[float]] = {label.name: [] for label in labels}
        for number, volume in enumerate(volumes_NDHW):
            logits, vector = self.segmenter.network.forward_both(unit(volume)[None, None] * 2 - 1)
            found, asked = logits.argmax(dim=1)[0], self.subjects.classes_NDHW[number]
            features.append(vector[0].double().cpu())
            for label in labels:
                score = dice(asked, found, 1 + label.channel)
                scores[label.name].append(np.nan if score is None else score)
        held = {name: np.array(values) for name, values in scores.items() if not np.isnan(values).all()}
        return torch.stack(features), held

    def _sample(self, model: Model, how: Drawing, cond: Tensor, seed: int, numbers: list[int]) -> Tensor:
        settings: dict[str, Any] = {
            "sampler": how.sampler,
            "steps": how.steps,
            "spacing": how.spacing,
            "clip": how.clip,
        }
        return model.sample(cond, seed=seed, indices=numbers, **settings).float()

    def _exactly(self) -> AbstractContextManager[Any]:
        """Metrics in float32 throughout, whatever the volumes were drawn with."""
        return tf32_allowed(False)

    def _now(self) -> float:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        return time.perf_counter()

    def tell(self, row: Row) -> None:
        spent = time.perf_counter() - self.began
        left = spent * (self.total - self.done) / max(1, self.done)
        self.say(
            f"{row.name}: {row.seconds:.4g} s a volume, {row.verdict}; {spent:.0f} s, about {max(0, left):.0f} s left"
        )


@dataclass(eq=False)
class Judge:
    """Holds rows against the reference, over the same resamples of subjects."""

    bench: Bench
    reference: Drawn
    again: Drawn

    def __post_init__(self) -> None:
        bench, options = self.bench, self.bench.options
        width = kernel_width(self.reference.measured, bench.real)
        self.resampler = Resampler(bench.real, bench.pairs, options.bootstrap, width)
        self.figures = self.resampler.figures(self.reference.measured)
        self.figures_again = self.resampler.figures(self.again.measured)
        self.margins = margins(self.figures, self.figures_again, options.margin)

    def reference_rows(self, name: str, how: dict[str, Any]) -> list[Row]:
        """The reference, and its second draw, which says what a seed alone makes."""
        level, seed = self.bench.options.bootstrap.level, self.bench.options.seed
        figures = {n: f.span(level) for n, f in self.figures.items()}
        how = {**how, "seed": seed}
        reference = Row(name=f"{name}, reference", how=how, seconds=self.reference.seconds, figures=figures)
        return [
            reference,
            self.row(f"{name}, seed {seed + 1}", {**how, "seed": seed + 1}, self.again, self.figures_again),
        ]

    def row(self, name: str, how: dict[str, Any], drawn: Drawn, figures: dict[str, Resampled] | None = None) -> Row:
        level = self.bench.options.bootstrap.level
        found = self.resampler.figures(drawn.measured) if figures is None else figures
        return Row(
            name=name,
            how=how,
            seconds=drawn.seconds,
            figures={n: f.span(level) for n, f in found.items()},
            compared=compare(found, self.figures, self.margins, level),
            broken=drawn.broken,
        )


def step_table(
    model: Model,
    subjects: HeldOut,
    segmenter: Segmenter,
    *,
    samplers: Sequence[str] = SAMPLERS,
    steps: Sequence[int] | None = None,
    options: TableOptions | None = None,
    say: Say = lambda _line: None,
) -> Table:
    """DDPM with all steps against every sampler and number of steps; then spacing and clamping around the best of them."""
    ways = _ways(model, samplers, steps)
    bench = Bench(model, subjects, segmenter, options or TableOptions(), say)
    reference_way = model.drawing(sampler="ddpm", steps=model.available_steps, clip=True)
    bench.total = len(subjects) * (2 * reference_way.steps + sum(w.steps for w in ways))
    seed = bench.options.seed
    bench.warm(model)
    say(f"{len(subjects)} subjects, {len(ways)} rows, {bench.total} volume-steps on {model.device}")
    reference = bench.draw(model, reference_way, seed)
    judge = Judge(bench, reference, bench.draw(model, reference_way, seed + 1, reference))
    first = judge.reference_rows(name_of(reference_way), _how(reference_way))
    for row in first:
        bench.tell(row)
    rows = [_row(judge, way, model) for way in ways]
    best = fewest(rows) or nearest_row(rows)
    around = _around(model, best)
    bench.total += len(subjects) * sum(way.steps for way in around)
    rows += [_row(judge, way, model) for way in around]
    chosen = fewest(rows)
    return _table(judge, [*first, *rows], "steps", None if chosen is None else chosen.name)


def numerics_table(
    models: Sequence[tuple[str, Model]],
    subjects: HeldOut,
    segmenter: Segmenter,
    *,
    sampler: str | None = None,
    steps: Steps = None,
    options: TableOptions | None = None,
    say: Say = lambda _line: None,
) -> Table:
    """The first of `models` against the others, each with the same sampler, steps and noise."""
    (name, model), *others = models
    bench = Bench(model, subjects, segmenter, options or TableOptions(), say)
    way = model.drawing(sampler=sampler, steps=steps)
    bench.total = len(subjects) * way.steps * (2 + len(others))
    seed = bench.options.seed
    bench.warm(model)
    reference = bench.draw(model, way, seed)
    judge = Judge(bench, reference, bench.draw(model, way, seed + 1, reference))
    rows = judge.reference_rows(name, {**_how(way), "passes": _passes(model)})
    for other_name, other in others:
        try:
            bench.warm(other)
        except InputError as refused:  # a plan that the gate does not let through has no row
            say(f"{other_name}: left out: {refused}")
            continue
        drawn = bench.draw(other, way, seed, reference)
        row = judge.row(other_name, {**_how(way), "seed": seed, "passes": _passes(other)}, drawn)
        rows.append(replace(row, distance=distances(drawn.volumes_NDHW, reference.volumes_NDHW)))
        bench.tell(rows[-1])
    fine = [row for row in rows[2:] if not row.worse]
    fastest = min(fine, key=lambda row: row.seconds).name if fine else None
    return _table(judge, rows, "numerics", fastest)


def distances(volumes_NDHW: Tensor, reference_NDHW: Tensor) -> dict[str, float]:
    """Relative error and PSNR by volume, of the mean and the worst volume; the worst voxel of all, in a range of 2."""
    gaps = [difference(a, b) for a, b in zip(volumes_NDHW, reference_NDHW, strict=True)]
    return {
        "relative": float(np.mean([g.relative for g in gaps])),
        "relative_worst": max(g.relative for g in gaps),
        "psnr": float(np.mean([g.psnr for g in gaps])),
        "psnr_worst": min(g.psnr for g in gaps),
        "worst_voxel": max(g.worst for g in gaps),
    }


def unit(volume: Tensor) -> Tensor:
    """To [0, 1] by its own minimum and maximum, as `voxtune evaluate` takes files; a constant volume is background."""
    clamped = volume.clamp(-1, 1)
    low, high = clamped.amin(), clamped.amax()
    return (clamped - low) / torch.where(high > low, high - low, torch.ones_like(high))


def name_of(way: Drawing) -> str:
    parts = [f"{way.sampler} {way.steps}"]
    parts += [way.spacing] if way.spacing != "trailing" else []
    return " ".join([*parts, *([] if way.clip else ["no clip"])])


def _ways(model: Model, samplers: Sequence[str], steps: Sequence[int] | None) -> list[Drawing]:
    """Every sampler with every number of steps; refuses what the model cannot do."""
    available = model.available_steps
    numbers = [n for n in STEPS if n < available] if steps is None else list(steps)
    if not samplers or not numbers:
        raise InputError(f"no sampler or no steps to compare; the model has {available} steps")
    for sampler, number in itertools.product(samplers, numbers):
        model.check_request(sampler=sampler, steps=number, seed=0)
    return [model.drawing(sampler=s, steps=n) for s, n in itertools.product(samplers, numbers)]


def _around(model: Model, row: Row) -> list[Drawing]:
    """The same sampler and steps by the other spacings, which end at other last steps, and without clamping."""
    sampler, steps = row.how["sampler"], row.how["steps"]
    others = [s for s in SPACINGS if s != row.how["spacing"]]
    spaced = [model.drawing(sampler=sampler, steps=steps, spacing=s) for s in others]
    return [*spaced, model.drawing(sampler=sampler, steps=steps, clip=False)]


def _row(judge: Judge, way: Drawing, model: Model) -> Row:
    bench = judge.bench
    drawn = bench.draw(model, way, bench.options.seed, judge.reference)
    row = judge.row(name_of(way), {**_how(way), "seed": bench.options.seed}, drawn)
    bench.tell(row)
    return row


def _how(way: Drawing) -> dict[str, Any]:
    return {"sampler": way.sampler, "steps": way.steps, "spacing": way.spacing, "clip": way.clip}


def _passes(model: Model) -> list[str]:
    return list(getattr(model.network, "passes", ()))


def _table(judge: Judge, rows: list[Row], kind: str, chosen: str | None) -> Table:
    bench, options = judge.bench, judge.bench.options
    count = len(bench.subjects)
    notes = [f"{count} subjects: a result needs {ENOUGH}"] if count < ENOUGH else []
    features = bench.real.features_NF.shape[1]
    if count <= features:
        notes.append(f"fid: {count} subjects for {features} features; it is biased upwards, alike in every row")
    device = bench.model.device
    about = {
        "table": kind,
        "data": bench.subjects.origin,
        "seed": options.seed,
        "margin": options.margin,
        "batch": options.batch,
        "pairs": len(bench.pairs),
        "size": list(bench.subjects.contract.size),
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "segmenter_sha256": bench.segmenter.sha256,
    }
    return Table(
        rows=tuple(rows),
        margins=judge.margins,
        subjects=count,
        settings=options.bootstrap,
        about=about,
        chosen=chosen,
        notes=tuple(notes),
    )
