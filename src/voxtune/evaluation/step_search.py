"""The search of `voxtune steps`: the fewest sampling steps, or the fastest precision, that is non-inferior to the reference."""

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
from voxtune.diffusion.schedule import TIMESTEP_SPACINGS
from voxtune.errors import InputError
from voxtune.evaluation.bench import Bench, Judge, Say, TableOptions
from voxtune.quality.step_table import StepRow, StepTable, closest_row, faster_row, fewest_steps
from voxtune.quality.tensor_error import difference
from voxtune.runtime.describe import shallow_share
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import Distilled, FeatureCache, SamplerSettings, Steps
from voxtune.segmentation.segmenter import Segmenter

STEPS = (5, 8, 10, 15, 20, 25, 50)
# Tables over fewer subjects carry a warning.
ENOUGH = 64


def step_table(
    model: Model,
    subjects: HeldOut,
    segmenter: Segmenter,
    *,
    samplers: Sequence[str] = tuple(SAMPLERS),
    steps: Sequence[int] | None = None,
    timestep_spacings: Sequence[str] = tuple(TIMESTEP_SPACINGS),
    caches: Sequence[FeatureCache] = (),
    students: Sequence[Model] = (),
    options: TableOptions | None = None,
    say: Say = lambda _line: None,
    on_update: Callable[[StepTable], None] = lambda _table: None,
) -> StepTable:
    """Compares every sampler and number of steps with DDPM with all steps; then varies timesteps and clamping of the best.

    All candidates have the first of `timestep_spacings`; the others are tried around the best rows. `caches` are tried on
    the row chosen so far, and taken if they are non-inferior and faster. `students`, which were distilled from the model, are
    rows too, but never the choice: they are other weights. `on_update` receives the table after every row, so that an
    interrupted run leaves a result.
    """
    candidates = _candidates(model, samplers, steps, timestep_spacings)
    numbers = sorted({settings.steps for settings in candidates})
    _check_caches(model, caches, numbers)
    bench = Bench(model, subjects, segmenter, options or TableOptions(), say)
    rows = _Rows(bench, model, candidates, on_update, students)
    for settings in candidates:
        rows.add(settings)
    _vary(bench, rows.rows.copy(), numbers, timestep_spacings[1:], rows.add)
    chosen, notes = fewest_steps(rows.rows), list[str]()
    if chosen is not None and caches:
        cached, notes = _cached_rows(bench, model, caches, chosen, numbers, rows.add)
        chosen = faster_row(chosen, cached)
    elif caches:
        notes = ["feature caching was not tried: no setting without it is non-inferior"]
    return rows.table(chosen, notes)


def confirm_table(
    model: Model,
    subjects: HeldOut,
    segmenter: Segmenter,
    candidates: Sequence[SamplerSettings],
    *,
    students: Sequence[Model] = (),
    options: TableOptions | None = None,
    say: Say = lambda _line: None,
    on_update: Callable[[StepTable], None] = lambda _table: None,
) -> StepTable:
    """Compares the settings that an earlier table passed with DDPM with all steps, on other subjects."""
    bench = Bench(model, subjects, segmenter, options or TableOptions(), say)
    rows = _Rows(bench, model, candidates, on_update, students)
    for cache in dict.fromkeys(settings.cache for settings in candidates if settings.cache is not None):
        bench.warm_up(model, cache)
    for settings in candidates:
        rows.add(settings)
    plain = fewest_steps([row for row in rows.rows if "cache" not in row.record])
    cached = [row for row in rows.rows if "cache" in row.record]
    return rows.table(fewest_steps(cached) if plain is None else faster_row(plain, cached))


class _Rows:
    """The rows of a table of steps: the reference and its repetition first, then one row at a time."""

    def __init__(
        self,
        bench: Bench,
        model: Model,
        candidates: Sequence[SamplerSettings],
        on_update: Callable[[StepTable], None],
        students: Sequence[Model] = (),
    ):
        settings = model.resolve(sampler="ddpm", steps=model.available_steps, clip=True)
        seed, count = bench.options.seed, len(bench.subjects)
        bench.total = count * (2 * settings.steps + sum(c.steps for c in candidates))
        bench.warm_up(model)
        bench.say(f"{count} subjects, {len(candidates)} settings, {bench.total} volume-steps on {model.device}")
        reference = bench.generate(model, settings, seed)
        self.model, self.on_update = model, on_update
        self.judge = Judge(bench, reference, bench.generate(model, settings, seed + 1, reference), average=True)
        self.references = self.judge.reference_rows(settings_name(settings), settings.to_json())
        self.rows: list[StepRow] = []
        self.students: list[StepRow] = []
        for row in self.references:
            bench.report(row)
        self._update()
        for student in students:
            self._add_student(student)

    def _add_student(self, student: Model) -> None:
        bench, settings = self.judge.bench, student.resolve()
        bench.total += len(bench.subjects) * settings.steps
        bench.warm_up(student)
        generated = bench.generate(student, settings, bench.options.seed, self.judge.reference)
        row = self.judge.row(settings_name(settings), {**settings.record(), "seed": bench.options.seed}, generated)
        bench.report(row)
        self.students.append(row)
        self._update()

    def add(self, settings: SamplerSettings) -> StepRow:
        bench = self.judge.bench
        generated = bench.generate(self.model, settings, bench.options.seed, self.judge.reference)
        record = {**settings.to_json(), "seed": bench.options.seed}
        row = self.judge.row(settings_name(settings), record, generated)
        bench.report(row)
        self.rows.append(row)
        self._update()
        return row

    def table(self, chosen: StepRow | None, notes: Sequence[str] = ()) -> StepTable:
        return _table(self.judge, [*self.references, *self.rows, *self.students], "steps", chosen, notes)

    def _update(self) -> None:
        self.on_update(self.table(fewest_steps(self.rows), ["unfinished: the rows so far"]))


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
    """Compares the other `models` with the first, each with the same sampler, steps and noise."""
    (name, model), *others = models
    bench = Bench(model, subjects, segmenter, options or TableOptions(), say)
    settings = model.resolve(sampler=sampler, steps=steps)
    bench.total = len(subjects) * settings.steps * (2 + len(others))
    seed = bench.options.seed
    bench.warm_up(model, settings.cache)
    reference = bench.generate(model, settings, seed)
    judge = Judge(bench, reference, bench.generate(model, settings, seed + 1, reference))
    rows = judge.reference_rows(name, {**settings.to_json(), "passes": _passes(model)})
    for other_name, other in others:
        try:
            bench.warm_up(other, settings.cache)
        except InputError as error:  # the gate rejected the plan
            say(f"{other_name}: skipped: {error}")
            continue
        generated = bench.generate(other, settings, seed, reference)
        row = judge.row(other_name, {**settings.to_json(), "seed": seed, "passes": _passes(other)}, generated)
        rows.append(replace(row, distance=distances(generated.volumes_NCDHW, reference.volumes_NCDHW)))
        bench.report(rows[-1])
    faster = [row for row in rows[2:] if row.non_inferior and row.seconds < rows[0].seconds]
    return _table(judge, rows, "numerics", min(faster, key=lambda row: row.seconds) if faster else None)


def distances(volumes_NCDHW: Tensor, reference_NCDHW: Tensor) -> dict[str, float]:
    """Relative error and PSNR of volumes, mean and worst; the largest difference of a voxel, of a range of 2."""
    gaps = [difference(a, b) for a, b in zip(volumes_NCDHW, reference_NCDHW, strict=True)]
    return {
        "relative": float(np.mean([g.relative for g in gaps])),
        "relative_worst": max(g.relative for g in gaps),
        "psnr": float(np.mean([g.psnr for g in gaps])),
        "psnr_worst": min(g.psnr for g in gaps),
        "worst_voxel": max(g.worst for g in gaps),
    }


def settings_name(settings: SamplerSettings) -> str:
    parts = ["distilled"] if isinstance(settings, Distilled) else []
    parts += [f"{settings.sampler} {settings.steps}"]
    parts += [settings.timestep_spacing] if settings.timestep_spacing != "trailing" else []
    parts += [] if settings.clip else ["no clip"]
    return " ".join([*parts, *([f"cache {settings.cache}"] if settings.cache else [])])


def _candidates(
    model: Model, samplers: Sequence[str], steps: Sequence[int] | None, timestep_spacings: Sequence[str]
) -> list[SamplerSettings]:
    """Every sampler with every number of steps; raises InputError for what the model does not support."""
    available = model.available_steps
    numbers = [n for n in STEPS if n < available] if steps is None else list(steps)
    if not samplers or not numbers or not timestep_spacings:
        raise InputError(f"no sampler, timestep spacing or steps to compare; the model has {available} steps")
    every = [
        model.resolve(sampler=s, steps=n, timestep_spacing=spacing, clip=True)
        for spacing, s, n in itertools.product(timestep_spacings, samplers, numbers)
    ]
    return [settings for settings in every if settings.timestep_spacing == timestep_spacings[0]]


def _vary(
    bench: Bench,
    plain: Sequence[StepRow],
    numbers: Sequence[int],
    timestep_spacings: Sequence[str],
    add: Callable[[SamplerSettings], StepRow],
) -> None:
    """Tries the best row of each sampler with other timestep spacings, then the best of these without clamping.

    A setting that is non-inferior is tried with fewer steps, until it is not.
    """
    rows = list(plain)

    def descend(settings: SamplerSettings) -> None:
        for steps in [settings.steps, *sorted((n for n in numbers if n < settings.steps), reverse=True)]:
            bench.total += len(bench.subjects) * steps
            rows.append(add(replace(settings, steps=steps)))
            if rows[-1].failed:
                break

    for name in _names(plain):
        changes: list[dict[str, Any]] = [*({"timestep_spacing": s} for s in timestep_spacings), {"clip": False}]
        for change in changes:
            own = [row for row in rows if row.record["sampler"] == name]
            descend(_changed(fewest_steps(own) or closest_row(own), **change))


def _names(rows: Sequence[StepRow]) -> list[str]:
    return list(dict.fromkeys(row.record["sampler"] for row in rows))


def _changed(row: StepRow, **change: Any) -> SamplerSettings:
    return replace(SamplerSettings.from_json(row.record, row.name), **change)


def _check_caches(model: Model, caches: Sequence[FeatureCache], numbers: Sequence[int]) -> None:
    """Raises InputError for a cache that could not be tried on any row."""
    for cache in caches:
        if cache.interval < 2:
            raise InputError(f"cache {cache}: every step would be a full step; the interval must be >= 2")
        model.resolve(steps=max(numbers), cache=cache)


def _cached_rows(
    bench: Bench,
    model: Model,
    caches: Sequence[FeatureCache],
    plain: StepRow,
    numbers: Sequence[int],
    add: Callable[[SamplerSettings], StepRow],
) -> tuple[list[StepRow], list[str]]:
    """Tries feature caching on `plain`, also with more steps where these cost less arithmetic."""
    rows: list[StepRow] = []
    notes: list[str] = []
    for cache in dict.fromkeys(caches):
        candidates = _cached_candidates(model, cache, plain, numbers)
        if not candidates:
            notes.append(f"cache {cache}: no step of {plain.name} can be cached")
            continue
        try:
            bench.warm_up(model, cache)
        except InputError as error:  # the gate rejected the plan
            notes.append(f"cache {cache}: skipped: {error}")
            continue
        bench.total += len(bench.subjects) * sum(settings.steps for settings in candidates)
        rows += [add(settings) for settings in candidates]
    return rows, notes


def _cached_candidates(
    model: Model, cache: FeatureCache, plain: StepRow, numbers: Sequence[int]
) -> list[SamplerSettings]:
    share = shallow_share(model.config.network, model.config.size, cache.depth)
    settings = SamplerSettings.from_json(plain.record, plain.name)
    candidates = []
    for steps in sorted({plain.record["steps"], *(n for n in numbers if n > plain.record["steps"])}):
        full = sum(full_steps(steps, cache.interval))
        # In the arithmetic of full steps: what costs more than `plain` cannot be faster.
        if cache.interval <= steps and full + share * (steps - full) < plain.record["steps"]:
            candidates.append(replace(settings, steps=steps, cache=cache))
    return candidates


def _passes(model: Model) -> list[str]:
    return list(getattr(model.network, "passes", ()))


def _table(judge: Judge, rows: list[StepRow], kind: str, chosen: StepRow | None, more: Sequence[str] = ()) -> StepTable:
    bench, options = judge.bench, judge.bench.options
    count = len(bench.subjects)
    notes = [f"{count} subjects: at least {ENOUGH} are required for a reliable result"] if count < ENOUGH else []
    features = bench.real.values["features"].shape[1]
    if count <= features:
        notes.append(f"fid: {count} subjects for {features} features; it is biased upwards, equally in every row")
    about = {
        "table": kind,
        "data": bench.subjects.origin,
        "seed": options.seed,
        "margin": options.margin,
        "reference_draws": 2 if judge.average else 1,
        "batch": options.batch,
        "pairs": len(bench.pairs),
        "size": list(bench.subjects.contract.size),
        "images": list(bench.subjects.contract.images),
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
