"""Statistics of a model's training data, and the check whether an input is far outside them.

Legend: C images or labels; D H W are the Z, Y, X axes of the contract's orientation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from voxtune.data.contract import BRAINS, DataContract, encode_mask, label_key
from voxtune.errors import InputError

# More subjects hardly change the range of a quantity, and reading all of a large data set takes minutes.
MEASURED_SUBJECTS = 64
# Fewer are measured of large volumes.
MEASURED_VOXELS = MEASURED_SUBJECTS * 96**3
FEWEST_MEASURED = 8

# Limits of the check, as factors of the training subjects' smallest and largest value. For the included model, the 64
# held-out simulated subjects lie within factors of 1.0 (volumes), 1.02 (extents) and 1.28 (lesions).
VOLUME_FACTOR, EXTENT_FACTOR, LABEL_FACTOR, SPACING_FACTOR = 1.5, 1.3, 3.0, 2.0
# An image with skull has about half of its bright voxels outside the brain, one without has almost none.
SHARE_MARGIN = 0.15
# Voxels brighter than this part of the 99th percentile are not background.
BRIGHT = 0.1


@dataclass(frozen=True, kw_only=True)
class Quantiles:
    """The distribution of a quantity over subjects: minimum, 5 %, median, 95 % and maximum."""

    low: float
    p5: float
    median: float
    p95: float
    high: float

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.p5 <= self.median <= self.p95 <= self.high:
            raise InputError(f"quantiles {tuple(vars(self).values())}: must be 0 or more, in ascending order")

    @classmethod
    def of(cls, values: Sequence[float]) -> Quantiles:
        # Four digits are enough for every use, and keep the config readable.
        low, p5, median, p95, high = (float(f"{v:.4g}") for v in np.quantile(values, (0.0, 0.05, 0.5, 0.95, 1.0)))
        return cls(low=low, p5=p5, median=median, p95=p95, high=high)

    def includes(self, value: float, factor: float) -> bool:
        return self.low / factor <= value <= self.high * factor

    def text(self, unit: str) -> str:
        low, high = three_digits(self.low), three_digits(self.high)
        return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def three_digits(value: float) -> str:
    """A number in at least three digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True)
class LabelVolume:
    """The volume of a label over the `subjects` that have it; `ml` is None if no subject has it."""

    name: str
    subjects: int
    ml: Quantiles | None = None


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """Statistics of `measured` of the `subjects` that a model was trained on, on its grid.

    `labelled_ml` is the volume of all labels together, and `extent_mm` the size of their bounding box (D, H, W).
    `image_ml` is the volume that is brighter than the background, and `outside_share` the part of it without a label: an
    image with skull has a large one. `spacing_mm` is the largest voxel dimension of the files, where these are known.
    """

    subjects: int
    measured: int
    images: tuple[str, ...]
    labels: tuple[LabelVolume, ...]
    labelled_ml: Quantiles
    extent_mm: tuple[Quantiles, Quantiles, Quantiles]
    image_ml: Quantiles
    outside_share: Quantiles
    spacing_mm: Quantiles | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.measured <= self.subjects:
            raise InputError(f"measured {self.measured}: must be from 1 to the number of subjects, {self.subjects}")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The same quantities of one subject; None for those that need an image or a mask that is not given."""

    labels_ml: dict[str, float] | None = None
    extent_mm: tuple[float, float, float] | None = None
    labelled_ml: float | None = None
    image_ml: float | None = None
    outside_share: float | None = None
    spacing_mm: float | None = None


def measure(
    contract: DataContract,
    *,
    cond_CDHW: np.ndarray | None = None,
    images_CDHW: np.ndarray | None = None,
    spacing_mm: float | None = None,
) -> Measurement:
    """Measures a subject on the contract's grid: its condition (positive inside a label) and its images in [-1, 1]."""
    voxel_ml = math.prod(contract.spacing) / 1000
    bright = None if images_CDHW is None else _bright(images_CDHW)
    image_ml = None if bright is None else float(bright.sum()) * voxel_ml
    if cond_CDHW is None:
        return Measurement(image_ml=image_ml, spacing_mm=spacing_mm)
    inside = np.asarray(cond_CDHW) > 0
    labelled = np.asarray(inside.any(axis=0))
    share = None
    if bright is not None:
        share = float((bright & ~labelled).sum()) / max(1.0, float(bright.sum()))
    return Measurement(
        labels_ml={label.name: float(inside[label.channel].sum()) * voxel_ml for label in contract.labels},
        labelled_ml=float(labelled.sum()) * voxel_ml,
        extent_mm=_extent_mm(labelled, contract.spacing),
        image_ml=image_ml,
        outside_share=share,
        spacing_mm=spacing_mm,
    )


def _bright(images_CDHW: np.ndarray) -> np.ndarray:
    """Voxels (D, H, W) that are clearly above the background in any image."""
    unit = (np.asarray(images_CDHW, dtype=np.float32) + 1) / 2
    levels = BRIGHT * np.quantile(unit.reshape(len(unit), -1), 0.99, axis=1)
    return np.asarray((unit > levels[:, None, None, None]).any(axis=0))


def _extent_mm(labelled_DHW: np.ndarray, spacing: tuple[float, float, float]) -> tuple[float, float, float]:
    extents = []
    for axis, mm in enumerate(spacing):
        hits = np.flatnonzero(labelled_DHW.any(axis=tuple(a for a in range(3) if a != axis)))
        extents.append(float(hits[-1] - hits[0] + 1) * mm if hits.size else 0.0)
    return (extents[0], extents[1], extents[2])


def measured_numbers(subjects: int, contract: DataContract) -> list[int]:
    """The numbers of the subjects to measure, evenly spaced."""
    affordable = max(FEWEST_MEASURED, MEASURED_VOXELS // math.prod(contract.size))
    count = min(subjects, MEASURED_SUBJECTS, affordable)
    return [number * subjects // count for number in range(count)]


def summarise(measurements: Sequence[Measurement], contract: DataContract, subjects: int) -> TrainingData:
    """The statistics of training subjects that were measured with images and conditions."""

    def over(name: str) -> Quantiles:
        return Quantiles.of([getattr(m, name) for m in measurements])

    labels = []
    for label in sorted(contract.labels, key=lambda label: label.channel):
        volumes = [m.labels_ml[label.name] for m in measurements if m.labels_ml and m.labels_ml[label.name] > 0]
        ml = Quantiles.of(volumes) if volumes else None
        labels.append(LabelVolume(name=label.name, subjects=len(volumes), ml=ml))
    depth, height, width = (
        Quantiles.of([m.extent_mm[axis] for m in measurements if m.extent_mm is not None]) for axis in range(3)
    )
    known = all(m.spacing_mm is not None for m in measurements)
    return TrainingData(
        subjects=subjects,
        measured=len(measurements),
        images=contract.images,
        labels=tuple(labels),
        labelled_ml=over("labelled_ml"),
        extent_mm=(depth, height, width),
        image_ml=over("image_ml"),
        outside_share=over("outside_share"),
        spacing_mm=over("spacing_mm") if known else None,
    )


def differences(training: TrainingData, contract: DataContract, subject: Measurement) -> list[str]:
    """What is far outside the training data, most important first; empty for an input that is like them."""
    lines: list[str] = []
    if subject.labelled_ml is not None and not training.labelled_ml.includes(subject.labelled_ml, VOLUME_FACTOR):
        line = (
            f"labels of {three_digits(subject.labelled_ml)} ml in total (training: {training.labelled_ml.text('ml')})"
        )
        lines.append(line + (", as in a mask of the whole head" if _is_head(training, contract, subject) else ""))
    else:
        lines += _label_differences(training, subject)
    if subject.extent_mm is not None and not lines:
        lines += [
            f"labels of {three_digits(mm)} mm in {name} (training: {known.text('mm')})"
            for mm, known, name in zip(subject.extent_mm, training.extent_mm, ("depth", "height", "width"), strict=True)
            if not known.includes(mm, EXTENT_FACTOR)
        ]
    if subject.outside_share is not None:
        known = training.outside_share
        if not known.low - SHARE_MARGIN <= subject.outside_share <= known.high + SHARE_MARGIN:
            numbers = f"{subject.outside_share:.0%} of the bright voxels without a label"
            lines.append(f"{numbers} (training: {known.low:.0%} to {known.high:.0%}; skull?)")
    elif subject.image_ml is not None and not training.image_ml.includes(subject.image_ml, VOLUME_FACTOR):
        lines.append(
            f"{three_digits(subject.image_ml)} ml above the background (training: {training.image_ml.text('ml')})"
        )
    coarsest = max(contract.spacing) if training.spacing_mm is None else training.spacing_mm.high
    coarsest = max(coarsest, *contract.spacing)
    if subject.spacing_mm is not None and subject.spacing_mm > SPACING_FACTOR * coarsest:
        lines.append(f"voxels of {three_digits(subject.spacing_mm)} mm (training: up to {three_digits(coarsest)} mm)")
    return lines


def _is_head(training: TrainingData, contract: DataContract, subject: Measurement) -> bool:
    """Whether the label of the brain is so large that it may be the whole head."""
    organ = contract.organ
    if organ is None or label_key(organ.name) not in BRAINS or subject.labels_ml is None:
        return False
    known = next((label.ml for label in training.labels if label.name == organ.name), None)
    return known is not None and subject.labels_ml.get(organ.name, 0.0) > known.high * VOLUME_FACTOR


def _label_differences(training: TrainingData, subject: Measurement) -> list[str]:
    lines = []
    for label in training.labels:
        ml = (subject.labels_ml or {}).get(label.name, 0.0)
        if ml and label.ml is not None and not label.ml.includes(ml, LABEL_FACTOR):
            lines.append(f"{label.name} of {three_digits(ml)} ml (training: {label.ml.text('ml')})")
    return lines


class MaskComparison:
    """Compares masks on the model's grid with the training data, one after the other."""

    def __init__(self, training: TrainingData | None, contract: DataContract | None) -> None:
        self._training, self._contract = training, contract
        self._rows: list[tuple[str, list[str]]] = []

    def add(self, name: str, labels_DHW: np.ndarray, spacing: Sequence[float]) -> None:
        """Adds a mask; `spacing` is the voxel size of its file."""
        if self._training is None or self._contract is None:
            return
        cond = encode_mask(labels_DHW, self._contract)
        measured = measure(self._contract, cond_CDHW=cond, spacing_mm=max(spacing))
        self._rows.append((name, differences(self._training, self._contract, measured)))

    def line(self) -> str | None:
        """One line about the masks that are unlike the training data, if there are any."""
        return unlike(self._rows, "mask", "this model")


def unlike_subjects(
    training: TrainingData | None, contract: DataContract, measured: Sequence[Measurement], owner: str
) -> str | None:
    """One line about measured subjects that are unlike the training data of `owner`."""
    if training is None:
        return None
    rows = [(f"subject {n}", differences(training, contract, subject)) for n, subject in enumerate(measured)]
    return unlike(rows, "subject", owner)


def unlike(rows: Sequence[tuple[str, list[str]]], kind: str, owner: str) -> str | None:
    """One line about the subjects (name, differences) that are unlike the training data of `owner`."""
    outside = [(name, lines) for name, lines in rows if lines]
    if not outside:
        return None
    name, lines = outside[0]
    what = f"far outside the training data of {owner}"
    if len(rows) == 1:
        return f"{name}: the {kind} is {what}: {', '.join(lines[:3])}; results may be invalid"
    count = f"{len(outside)} of {len(rows)} {kind}s {'is' if len(outside) == 1 else 'are'} {what}"
    first = f"such as {name}" if len(outside) > 1 else name
    return f"{count}, {first}: {', '.join(lines[:3])}; results may be invalid"
