"""Between a Model, held-out subjects and the metrics: `voxtune steps`, how few steps and which numerics are enough."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from voxtune.data.splits import HeldOut
from voxtune.diffusion import full_steps
from voxtune.diffusion.samplers import SAMPLERS
from voxtune.diffusion.schedule import SPACINGS
from voxtune.errors import InputError
from voxtune.evaluation.bench import Bench, Judge, Say, TableOptions
from voxtune.quality.step_table import StepRow, StepTable, fewest, nearest_row, quicker
from voxtune.quality.tensor_error import difference
from voxtune.runtime.describe import shallow_share
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import FeatureCache, SamplerSettings, Steps
from voxtune.segmentation.segmenter import Segmenter

STEPS = (5, 8, 10, 15, 20, 25, 50)
# Fewer subjects make a table, but not a result.
ENOUGH = 64


def step_table(
    model: Model,
    subjects: HeldOut,
    segmenter: Segmenter,
    *,
    samplers: Sequence[str] = tuple(SAMPLERS),
    steps: Sequence[int] | None = None,
    spacings: Sequence[str] = tuple(SPACINGS),
    caches: Sequence[FeatureCache] = (),
    options: TableOptions | None = None,
    say: Say = lambda _line: None,
    keep: Callable[[StepTable], None] = lambda _table: None,
) -> StepTable:
    """DDPM with all steps against every sampler and number of steps; then spacing and clamping around the best of them.

    The first of `spacings` is that of every sampler and number, the others are tried around the best rows.
    `caches` are tried on the row that these leave, and taken if they are not worse either, and faster. `keep` is given the
    table after every row: what was measured is not lost with a run that does not end.
    """
    ways = _ways(model, samplers, steps, spacings)
    numbers = sorted({way.steps for way in ways})
    _check_caches(model, caches, numbers)
    bench = Bench(model, subjects, segmenter, options or TableOptions(), say)
    rows = _Rows(bench, model, ways, keep)
    for way in ways:
        rows.add(way)
    _vary(bench, rows.drawn.copy(), numbers, spacings[1:], rows.add)
    chosen, notes = fewest(rows.drawn), list[str]()
    if chosen is not None and caches:
        cached, notes = _cached_rows(bench, model, caches, chosen, numbers, rows.add)
        chosen = quicker(chosen, cached)
    elif caches:
        notes = ["caching was not tried: no row without it is not worse"]
    return rows.table(chosen, notes)


def confirm_table(
    model: Model,
    subjects: HeldOut,
    segmenter: Segmenter,
    ways: Sequence[SamplerSettings],
    *,
    options: TableOptions | None = None,
    say: Say = lambda _line: None,
    keep: Callable[[StepTable], None] = lambda _table: None,
) -> StepTable:
    """These ways and no others against DDPM with all steps: what an earlier table passed, on subjects it has not seen."""
    bench = Bench(model, subjects, segmenter, options or TableOptions(), say)
    rows = _Rows(bench, model, ways, keep)
    for cache in dict.fromkeys(way.cache for way in ways if way.cache is not None):
        bench.warm(model, cache)
    for way in ways:
        rows.add(way)
    plain = fewest([row for row in rows.drawn if "cache" not in row.how])
    cached = [row for row in rows.drawn if "cache" in row.how]
    return rows.table(fewest(cached) if plain is None else quicker(plain, cached))


class _Rows:
    """A table of steps in the making: the reference's two draws, then row by row; `keep` is given what there is."""

    def __init__(self, bench: Bench, model: Model, ways: Sequence[SamplerSettings], keep: Callable[[StepTable], None]):
        way = model.resolve(sampler="ddpm", steps=model.available_steps, clip=True)
        seed, count = bench.options.seed, len(bench.subjects)
        bench.total = count * (2 * way.steps + sum(w.steps for w in ways))
        bench.warm(model)
        bench.say(f"{count} subjects, {len(ways)} rows, {bench.total} volume-steps on {model.device}")
        reference = bench.draw(model, way, seed)
        self.model, self.keep = model, keep
        self.judge = Judge(bench, reference, bench.draw(model, way, seed + 1, reference), both=True)
        self.first = self.judge.reference_rows(name_of(way), way.to_json())
        self.drawn: list[StepRow] = []
        for row in self.first:
            bench.tell(row)
        self._keep()

    def add(self, way: SamplerSettings) -> StepRow:
        self.drawn.append(_row(self.judge, way, self.model))
        self._keep()
        return self.drawn[-1]

    def table(self, chosen: StepRow | None, notes: Sequence[str] = ()) -> StepTable:
        return _table(self.judge, [*self.first, *self.drawn], "steps", chosen, notes)

    def _keep(self) -> None:
        self.keep(self.table(fewest(self.drawn), ["unfinished: the rows so far"]))


def numerics_table(
    models: Sequence[tuple[str, Model]],
    subjects: HeldOut,
    segmenter: Segmenter,
    *,
    sampler: str | None = None,
    steps: Steps = None,
    options: TableOptions | None = None,
    say: Say = lambda _line: None,
) -> StepTable:
    """The first of `models` against the others, each with the same sampler, steps and noise."""
    (name, model), *others = models
    bench = Bench(model, subjects, segmenter, options or TableOptions(), say)
    way = model.resolve(sampler=sampler, steps=steps)
    bench.total = len(subjects) * way.steps * (2 + len(others))
    seed = bench.options.seed
    bench.warm(model, way.cache)
    reference = bench.draw(model, way, seed)
    judge = Judge(bench, reference, bench.draw(model, way, seed + 1, reference))
    rows = judge.reference_rows(name, {**way.to_json(), "passes": _passes(model)})
    for other_name, other in others:
        try:
            bench.warm(other, way.cache)
        except InputError as refused:  # a plan that the gate does not let through has no row
            say(f"{other_name}: left out: {refused}")
            continue
        drawn = bench.draw(other, way, seed, reference)
        row = judge.row(other_name, {**way.to_json(), "seed": seed, "passes": _passes(other)}, drawn)
        rows.append(replace(row, distance=distances(drawn.volumes_NDHW, reference.volumes_NDHW)))
        bench.tell(rows[-1])
    fine = [row for row in rows[2:] if not row.worse and row.seconds < rows[0].seconds]
    fastest = min(fine, key=lambda row: row.seconds) if fine else None
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


def name_of(way: SamplerSettings) -> str:
    parts = [f"{way.sampler} {way.steps}"]
    parts += [way.spacing] if way.spacing != "trailing" else []
    parts += [] if way.clip else ["no clip"]
    return " ".join([*parts, *([f"cache {way.cache}"] if way.cache else [])])


def _ways(
    model: Model, samplers: Sequence[str], steps: Sequence[int] | None, spacings: Sequence[str]
) -> list[SamplerSettings]:
    """Every sampler with every number of steps; refuses what the model cannot do."""
    available = model.available_steps
    numbers = [n for n in STEPS if n < available] if steps is None else list(steps)
    if not samplers or not numbers or not spacings:
        raise InputError(f"no sampler, spacing or steps to compare; the model has {available} steps")
    ways = [
        model.resolve(sampler=s, steps=n, spacing=spacing)
        for spacing, s, n in itertools.product(spacings, samplers, numbers)
    ]
    return [way for way in ways if way.spacing == spacings[0]]


def _vary(
    bench: Bench,
    plain: Sequence[StepRow],
    numbers: Sequence[int],
    spacings: Sequence[str],
    add: Callable[[SamplerSettings], StepRow],
) -> None:
    """Every sampler's best row with other spacings, then what is best of these without clamping.

    What is not worse goes on in fewer steps, until it is.
    """
    rows = list(plain)

    def descend(way: SamplerSettings) -> None:
        for steps in [way.steps, *sorted((n for n in numbers if n < way.steps), reverse=True)]:
            bench.total += len(bench.subjects) * steps
            rows.append(add(replace(way, steps=steps)))
            if rows[-1].worse:
                break

    for name in _names(plain):
        changes: list[dict[str, Any]] = [*({"spacing": s} for s in spacings), {"clip": False}]
        for change in changes:
            own = [row for row in rows if row.how["sampler"] == name]
            descend(_changed(fewest(own) or nearest_row(own), **change))


def _names(rows: Sequence[StepRow]) -> list[str]:
    return list(dict.fromkeys(row.how["sampler"] for row in rows))


def _changed(row: StepRow, **change: Any) -> SamplerSettings:
    return replace(SamplerSettings.from_json(row.how, row.name), **change)


def _check_caches(model: Model, caches: Sequence[FeatureCache], numbers: Sequence[int]) -> None:
    """Refuses what could not be tried on any row."""
    for cache in caches:
        if cache.interval < 2:
            raise InputError(f"cache {cache}: every step would be a full one; compare intervals from 2 up")
        model.resolve(steps=max(numbers), cache=cache)


def _cached_rows(
    bench: Bench,
    model: Model,
    caches: Sequence[FeatureCache],
    plain: StepRow,
    numbers: Sequence[int],
    add: Callable[[SamplerSettings], StepRow],
) -> tuple[list[StepRow], list[str]]:
    """`plain` with features kept between its steps, and in more steps where these may still take less time."""
    rows: list[StepRow] = []
    notes: list[str] = []
    for cache in dict.fromkeys(caches):
        ways = _cached_ways(model, cache, plain, numbers)
        if not ways:
            notes.append(f"cache {cache}: {plain.name} leaves no step to save")
            continue
        try:
            bench.warm(model, cache)
        except InputError as refused:  # a plan that the gate does not let through has no row
            notes.append(f"cache {cache}: left out: {refused}")
            continue
        bench.total += len(bench.subjects) * sum(way.steps for way in ways)
        rows += [add(way) for way in ways]
    return rows, notes


def _cached_ways(model: Model, cache: FeatureCache, plain: StepRow, numbers: Sequence[int]) -> list[SamplerSettings]:
    share = shallow_share(model.config.network, model.config.size, cache.depth)
    settings = SamplerSettings.from_json(plain.how, plain.name)
    ways = []
    for steps in sorted({plain.how["steps"], *(n for n in numbers if n > plain.how["steps"])}):
        full = sum(full_steps(steps, cache.interval))
        # In full steps' arithmetic: what costs more than `plain` cannot be faster.
        if cache.interval <= steps and full + share * (steps - full) < plain.how["steps"]:
            ways.append(replace(settings, steps=steps, cache=cache))
    return ways


def _row(judge: Judge, way: SamplerSettings, model: Model) -> StepRow:
    bench = judge.bench
    drawn = bench.draw(model, way, bench.options.seed, judge.reference)
    row = judge.row(name_of(way), {**way.to_json(), "seed": bench.options.seed}, drawn)
    bench.tell(row)
    return row


def _passes(model: Model) -> list[str]:
    return list(getattr(model.network, "passes", ()))


def _table(judge: Judge, rows: list[StepRow], kind: str, chosen: StepRow | None, more: Sequence[str] = ()) -> StepTable:
    bench, options = judge.bench, judge.bench.options
    count = len(bench.subjects)
    notes = [f"{count} subjects: a result needs {ENOUGH}"] if count < ENOUGH else []
    features = bench.real.values["features"].shape[1]
    if count <= features:
        notes.append(f"fid: {count} subjects for {features} features; it is biased upwards, alike in every row")
    about = {
        "table": kind,
        "data": bench.subjects.origin,
        "seed": options.seed,
        "margin": options.margin,
        "reference_draws": 2 if judge.both else 1,
        "batch": options.batch,
        "pairs": len(bench.pairs),
        "size": list(bench.subjects.contract.size),
        "device": bench.model.device_name,
        "segmenter_sha256": bench.segmenter.sha256,
    }
    return StepTable(
        rows=tuple(rows),
        margins=judge.margins,
        subjects=count,
        settings=options.bootstrap,
        about=about,
        chosen=None if chosen is None else chosen.name,
        notes=(*notes, *more),
    )
