"""What a run trains on: subjects, labels with volumes, resampling, unused files, time and memory.

Legend: spacings and sizes of files in the order X x Y x Z.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from voxtune.config import to_mapping
from voxtune.data.contract import BRAINS, DataContract, label_key, no_organ
from voxtune.data.grid import Placement
from voxtune.data.modality import MASK_ENDINGS, find_kind, same_kind, split_name
from voxtune.data.subjects import Packed, Source, SourceRange
from voxtune.data.training_data import (
    Quantiles,
    TrainingData,
    measure,
    measured_numbers,
    summarise,
    three_digits,
)
from voxtune.errors import InputError
from voxtune.files import counted
from voxtune.training.config import TrainConfig
from voxtune.training.data import read_item
from voxtune.workloads import NetworkConfig
from voxtune.workloads.segment import SegmentConfig

# Rows of each kind on the screen; the rest are counted.
SHOWN_LABELS, SHOWN_GRIDS, SHOWN_REASONS, SHOWN_FILES = 6, 4, 3, 3
# Human brains from newborns to adults, with a margin for atrophy and for segmentations with ventricles and meninges.
PLAUSIBLE_BRAIN_ML = (400, 2500)
WIDTH, INDENT = 100, 13
# The steps that the time of a run is estimated from; the first one also initialises the libraries.
TIMED_STEPS = 4

Progress = Callable[[int, int, float], None]


@runtime_checkable
class FileSource(Protocol):
    """A source of files: where each subject is placed on the grid (after a check), and the files without a subject."""

    placements: Mapping[str, Placement]

    def unused_files(self) -> list[Path]: ...


@dataclass(frozen=True, kw_only=True)
class GridChange:
    """`files` subjects of one size and spacing, and what is done to them."""

    files: int
    size: tuple[int, int, int]
    spacing: tuple[float, float, float]
    resampled: bool
    padded: bool
    cropped: bool

    def text(self) -> str:
        done = [name for name in ("resampled", "padded", "cropped") if getattr(self, name)]
        return f"{self.files} {' and '.join(done) or 'unchanged'}, from {_by(self.size)} at {_by(self.spacing)} mm"


@dataclass(frozen=True, kw_only=True)
class Unused:
    """Files that are not used, and why."""

    reason: str
    files: tuple[str, ...]
    other_kind: bool = False  # images of a kind that the model does not have


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The facts about the data of a run. `memory_bytes` and `seconds` (for the whole run) are estimates.

    `held_out` is None if no subject is held out. `statistics` is None for a model without masks. `cache_bytes` limits the
    memory in which subjects are kept, None for a source without a cache. `steps` of `samples_per_step` samples are planned.
    """

    network: NetworkConfig | SegmentConfig
    size: tuple[int, ...]
    subjects: int
    held_out: int | None
    origin: str
    contract: DataContract | None
    statistics: TrainingData | None
    grids: tuple[GridChange, ...] = ()
    unused: tuple[Unused, ...] = ()
    subject_bytes: int = 0
    cache_bytes: int | None = None
    steps: int | None = None
    samples_per_step: int = 1
    memory_bytes: float | None = None
    seconds_per_step: float | None = None
    seconds: float | None = None
    warnings: tuple[str, ...] = ()

    def with_time(self, seconds_per_step: float, steps: int, minutes: float | None) -> Overview:
        """With the time of a run of at most `steps` steps and `minutes` minutes."""
        limit = math.inf if minutes is None else 60 * minutes
        return replace(self, seconds_per_step=seconds_per_step, seconds=min(seconds_per_step * steps, limit))

    def to_json(self) -> dict[str, Any]:
        data = to_mapping(self)
        totals = {
            name: sum(g.files for g in self.grids if getattr(g, name)) for name in ("resampled", "padded", "cropped")
        }
        return {**data, **totals, "unused_files": sum(len(u.files) for u in self.unused)}

    def lines(self) -> list[str]:
        """The facts on one screen."""
        held_out = "none held out" if self.held_out is None else f"{self.held_out} held out"
        rows = [("subjects", f"{self.subjects} for training, {held_out}"), ("data", self.origin)]
        if self.contract is not None:
            rows += _contract_rows(self.contract, self.statistics)
        elif len(self.size) == 2:
            rows.append(("grid", f"{_by(self.size[::-1])} pixels"))
        rows += _listed("files", [grid.text() for grid in self.grids], SHOWN_GRIDS, "other sizes")
        # A warning of the data's check names the other kinds.
        rows += _listed(
            "not used", [_unused_text(u) for u in self.unused if not u.other_kind], SHOWN_REASONS, "other reasons"
        )
        if self.steps is not None:
            epochs = self.steps * self.samples_per_step / self.subjects
            samples = counted(self.samples_per_step, "sample")
            rows.append(("length", f"{counted(self.steps, 'step')} of {samples}, {epochs:.3g} epochs"))
        if self.cache_bytes is not None:
            rows.append(("cache", self._cached()))
        if self.seconds is not None and self.seconds_per_step is not None:
            step = f"{self.seconds_per_step:.3g} s per step"
            rows.append(("time", f"about {duration(self.seconds)} (estimated, {step})"))
        if self.memory_bytes is not None:
            stored = f" and {size_text(self.subject_bytes)} for the subjects" if self.subject_bytes else ""
            rows.append(("memory", f"about {size_text(self.memory_bytes)} for a step{stored} (estimated)"))
        return [line for name, text in rows for line in _wrapped(name, text)]

    def _cached(self) -> str:
        """What the loader keeps in memory."""
        assert self.cache_bytes is not None
        one = _prepared_bytes(self.contract) if self.contract is not None else 0
        kept = min(self.subjects, self.cache_bytes // one) if one else 0
        if not kept:
            return "off: subjects are read again in each epoch"
        which = "all subjects" if kept == self.subjects else f"{kept} of {self.subjects} subjects"
        return f"{which}, in memory after their first use (limit {size_text(self.cache_bytes)})"


def overview(
    source: Source,
    network: NetworkConfig | SegmentConfig,
    size: tuple[int, ...],
    contract: DataContract | None,
    *,
    held_out: int | None = None,
    origin: str = "",
    new: bool = True,
) -> Overview:
    """The facts about the training subjects of a run, of a `new` model or not; some of them are read and measured."""
    files = _unwrapped(source)
    statistics = None if contract is None else measure_source(source, contract)
    warnings = [no_organ(contract)] if new and contract is not None else []
    if isinstance(files, FileSource) and contract is not None and statistics is not None:
        warnings.append(_implausible_brain(contract, statistics))
    return Overview(
        network=network,
        size=size,
        subjects=len(source),
        held_out=held_out,
        origin=origin,
        contract=contract,
        statistics=statistics,
        grids=_grids(files.placements) if isinstance(files, FileSource) else (),
        unused=_unused(files.unused_files(), contract) if isinstance(files, FileSource) and contract else (),
        subject_bytes=_stored_bytes(source, contract),
        cache_bytes=getattr(_unwrapped(source), "cache_bytes", None),
        warnings=tuple(line for line in warnings if line is not None),
    )


def _implausible_brain(contract: DataContract, statistics: TrainingData) -> str | None:
    """A line about a label of the brain with the volume of something else."""
    for label in statistics.labels:
        if label_key(label.name) in BRAINS and label.ml is not None:
            low, high = PLAUSIBLE_BRAIN_ML
            if not low <= label.ml.median <= high:
                return (
                    f"{_label_name(contract, label.name)} has a median of {three_digits(label.ml.median)} ml, a human brain "
                    f"{low} to {high} ml; check the masks, their voxel size, and whether the images are skull-stripped"
                )
    return None


def measure_source(source: Source, contract: DataContract) -> TrainingData | None:
    """The statistics of a source's subjects; None if they have no masks."""
    spacings = _spacings(source)
    measured = []
    for number in measured_numbers(len(source), contract):
        images, cond = read_item(source, number)
        if cond is None:
            return None
        if not images.isfinite().all():
            raise InputError(f"subject {number} of the training data contains NaN or infinity")
        spacing = None if spacings is None else spacings[number]
        measured.append(measure(contract, cond_CDHW=cond.numpy(), images_CDHW=images.numpy(), spacing_mm=spacing))
    return summarise(measured, contract, len(source))


def _spacings(source: Source) -> list[float] | None:
    """The largest voxel dimension of each subject's file; None if it is not known."""
    files = _unwrapped(source)
    if isinstance(files, FileSource) and len(files.placements) >= len(source):
        first = source.first if isinstance(source, SourceRange) else 0
        return [max(p.source_spacing) for p in list(files.placements.values())[first : first + len(source)]]
    simulated = getattr(files, "spacing", None)
    return None if simulated is None else [simulated] * len(source)


def _unwrapped(source: Any) -> Any:
    while isinstance(source, SourceRange):
        source = source.source
    return source


def _grids(placements: Mapping[str, Placement]) -> tuple[GridChange, ...]:
    """Subjects by size and spacing, most frequent first."""
    counts = Counter(_change(p) for p in placements.values())
    return tuple(replace(change, files=count) for change, count in counts.most_common())


def _change(placement: Placement) -> GridChange:
    padded = cropped = False
    for axis, scale, size in zip(placement.axes, placement.scale, placement.size[::-1], strict=True):
        # In voxels of the model's grid; the tolerance is that of spacings stored in float32.
        extent = math.ceil(placement.shape[axis] / scale - 1e-3)
        padded, cropped = padded or extent < size, cropped or extent > size
    x, y, z = (round(mm, 3) for mm in placement.source_spacing)
    return GridChange(
        files=1,
        size=placement.shape,
        spacing=(x, y, z),
        resampled=placement.mode == "resample",
        padded=padded,
        cropped=cropped,
    )


def _unused(files: Sequence[Path], contract: DataContract) -> tuple[Unused, ...]:
    reasons: dict[tuple[str, bool], list[str]] = {}
    for path in files:
        ending = split_name(path, contract.images)[1]
        kind = find_kind(ending)
        other = kind is not None and not any(same_kind(ending, name) for name in contract.images)
        if ending in MASK_ENDINGS:
            reason = "masks of no image"
        elif kind is not None and other:
            reason = f"{kind.name} images"
        else:
            reason = "unpaired files"
        reasons.setdefault((reason, other), []).append(path.name)
    return tuple(
        Unused(reason=reason, files=tuple(names), other_kind=other) for (reason, other), names in reasons.items()
    )


def _stored_bytes(source: Source, contract: DataContract | None) -> int:
    """The memory that the subjects take up."""
    if contract is None:
        return 0
    voxels = len(source) * math.prod(contract.size)
    if isinstance(source, Packed):
        return voxels * (2 * len(contract.images) + 1)
    limit = getattr(_unwrapped(source), "cache_bytes", None)
    return 0 if limit is None else min(limit, len(source) * _prepared_bytes(contract))


def _prepared_bytes(contract: DataContract) -> int:
    """The memory of one subject on the grid: float32 images, and labels of one byte."""
    return math.prod(contract.size) * (4 * len(contract.images) + 1)


def _contract_rows(contract: DataContract, statistics: TrainingData | None) -> list[tuple[str, str]]:
    rows = [("images", ", ".join(contract.images))]
    if statistics is not None:
        labels = []
        for label in statistics.labels:
            volume = "in no measured subject" if label.ml is None else f"{_ml(label.ml)}, in {label.subjects}"
            labels.append(f"{_label_name(contract, label.name)}: {volume}")
        measured = f" of the {statistics.measured} measured subjects"
        rows += _listed("labels", [labels[0] + measured, *labels[1:]], SHOWN_LABELS, "labels")
    size, spacing = _by(contract.size[::-1]), _by(contract.spacing[::-1])
    return [*rows, ("grid", f"{size} voxels of {spacing} mm, {contract.orientation}")]


def _label_name(contract: DataContract, name: str) -> str:
    return next(label.describe() for label in contract.labels if label.name == name)


def _ml(ml: Quantiles) -> str:
    return f"median {three_digits(ml.median)} ml ({ml.text('ml')})"


def _unused_text(unused: Unused) -> str:
    shown, more = ", ".join(unused.files[:SHOWN_FILES]), len(unused.files) - SHOWN_FILES
    return f"{len(unused.files)} {unused.reason}: {shown}{f' and {more} more' if more > 0 else ''}"


def _listed(name: str, texts: list[str], limit: int, rest: str) -> list[tuple[str, str]]:
    """Rows of which only the first is named; those beyond `limit` are counted."""
    if len(texts) > limit:
        texts = [*texts[: limit - 1], f"{len(texts) - limit + 1} {rest}"]
    return [("" if number else name, text) for number, text in enumerate(texts)]


def _wrapped(name: str, text: str) -> list[str]:
    first = f"{name:<{INDENT}}"
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * INDENT, max_lines=2, placeholder=" ..."
    )
    return lines or [first.rstrip()]


def _by(numbers: Sequence[float]) -> str:
    return " x ".join(f"{n:.4g}" for n in numbers)


def duration(seconds: float) -> str:
    """A time in the two largest units."""
    minutes, hours = seconds / 60, seconds / 3600
    if seconds < 100:
        return f"{max(1.0, seconds):.0f} s"
    if minutes < 100:
        return f"{minutes:.0f} min"
    return f"{hours:.0f} h" if hours < 72 else f"{hours / 24:.0f} days"


def size_text(count: float) -> str:
    """A number of bytes in GiB, or in MiB if it is small."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{max(1, round(count / 2**20))} MiB"


def timing(
    progress: Progress | None, facts: Overview, config: TrainConfig, report: Callable[[Overview], None], warm: int
) -> Progress:
    """A `progress` that reports the estimated time after some steps, without the first one, which starts everything.

    The `warm` steps before these are not timed either: a GPU's graph is recorded in them."""
    times: list[float] = []

    def update(step: int, steps: int, loss: float) -> None:
        if step > min(warm, steps - TIMED_STEPS) and len(times) < TIMED_STEPS:
            times.append(time.perf_counter())
            if len(times) == min(TIMED_STEPS, steps) > 1:
                report(facts.with_time((times[-1] - times[0]) / (len(times) - 1), config.steps, config.minutes))
        if progress is not None:
            progress(step, steps, loss)

    return update
