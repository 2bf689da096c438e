"""The registry of quality metrics, read by `voxtune evaluate` and `voxtune steps`. A new metric is one entry in METRICS.

A metric has two parts. Its measurement is taken once of each volume, or of pairs of volumes, as soon as the volume is read
or generated. Its statistic combines the measurements of the generated and of the real volumes into one number, as a
function of resampling counts (bootstrap.py). `evaluate` resamples both sets independently; `steps` resamples subjects, the
same for all sets (paired.py).

Legend: N volumes of a set, P pairs of them, F features, B bins.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.quality.bootstrap import Statistic, mean_statistic
from voxtune.quality.distributions import (
    fid_statistic,
    histogram,
    jensen_shannon_statistic,
    mean_over_pairs,
    median_distance,
    mmd_statistic,
    wasserstein_statistic,
)
from voxtune.quality.per_volume import copies, detail, dice
from voxtune.quality.similarity import WINDOW, ms_ssim, psnr
from voxtune.quality.tissue import BRIGHT_FLUID, SIZES, TissueFit, by_size, fit_tissues, lesion_contrast, lesion_scores

Direction = Literal["higher", "lower", "closer"]
Need = Literal["partner", "pairs", "real", "features", "masks", "training", "reference", "subjects"]
# What a metric can need, in the order in which `evaluate` reports the metrics.
NEEDS: dict[Need, str] = {
    "partner": "a real volume of the same subject",
    "pairs": "at least two volumes in a set",
    "real": "a set of real volumes",
    "features": "a feature network",
    "masks": "masks and a segmenter",
    "training": "the volumes that the model was trained on",
    "reference": "a volume of the same subject and noise by the reference configuration",
    "subjects": "real and generated volumes of the same subjects on one grid, with their masks",
}


@dataclass(frozen=True, kw_only=True, eq=False)
class VolumeInput:
    """One image (D, H, W) of a volume with intensities in [0, 1], and what measurements may need besides."""

    image: Tensor
    partner: Tensor | None = None
    reference: Tensor | None = None
    features: Tensor | None = None
    mask: Tensor | None = None
    predicted: Tensor | None = None  # labels by the segmenter
    classes: Mapping[str, Sequence[int]] = field(default_factory=dict)  # label name -> its numbers in `mask`
    kind: str = ""
    masked: Tensor | None = None  # the image on the grid of the mask
    healthy: tuple[int, ...] = ()  # numbers in `mask` of the organ without pathology
    pathology: tuple[int, ...] = ()
    voxel_ml: float = 0.0  # of the mask

    def at(self, numbers: Sequence[int], labels: Tensor | None = None) -> Tensor:
        """The voxels of the mask, or of other labels, that have one of these numbers."""
        labels = self.mask if labels is None else labels
        assert labels is not None
        return torch.isin(labels, torch.tensor(numbers, device=labels.device))


@dataclass(frozen=True, kw_only=True, eq=False)
class PairValues:
    """A measurement of P pairs of different volumes of a set of `count`."""

    values_P: np.ndarray
    pairs_P2: np.ndarray
    count: int

    def __len__(self) -> int:
        return len(self.values_P)


@dataclass(frozen=True, kw_only=True, eq=False)
class SetMeasurements:
    """Measurements of a set of volumes by name: (N,), (N, B) or (N, F), or PairValues. NaN: not defined for a volume.

    `by_part` holds those of each label and, if the volumes have several images, those of each image kind.
    """

    count: int
    values: dict[str, Any]
    by_part: dict[str, dict[str, Any]] = field(default_factory=dict)

    def value(self, measurement: str, part: str = "") -> Any:
        """A measurement, of a label or an image kind if it has parts; None if it was not taken."""
        return self.by_part.get(measurement, {}).get(part) if part else self.values.get(measurement)

    def put(self, measurement: str, part: str, value: Any) -> None:
        """Adds a measurement, of a label or an image kind unless `part` is empty."""
        (self.by_part.setdefault(measurement, {}) if part else self.values)[part or measurement] = value

    def get(self, metric: Metric, part: str = "") -> Any:
        """What the metric is computed from; None if it was not measured."""
        return self.value(metric.measurement, part)

    def parts(self, metric: Metric) -> list[str]:
        """The labels or image kinds that a metric has values for; [""] for a metric without parts."""
        parts = list(self.by_part.get(metric.measurement, {}))
        return parts if metric.per_label or metric.parts else parts or [""]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """`statistic(generated, real)`, with `parameter` if there is one, makes the function of counts.

    `sets` says whether that function takes counts of the generated set alone or of both sets. `parameter` is estimated once
    and shared by all sets that are compared.
    """

    name: str
    measurement: str
    statistic: Callable[..., Statistic]
    needs: frozenset[Need]
    better: Direction | None = None  # None: reported, but decides nothing
    # The smallest difference that matters, whatever the random seeds vary; 0 where the scale is that of a network.
    min_difference: float = 0.0
    target: float | None = None  # what "closer" is closer to; None: the value of the real volumes
    sets: Literal[1, 2] = 1
    uses_real: bool = False  # whether the statistic depends on the real volumes; implied by two sets
    per_label: bool = False
    parts: tuple[str, ...] = ()  # further parts, such as sizes of lesions
    decides: bool = True  # whether `steps` requires a setting to be non-inferior by it
    # Why no volume may have a value; where only some have none, they are ignored.
    missing: str = ""
    per_image: bool = True  # whether each image kind has a value of its own, if the volumes have several images
    parameter: Callable[[Any, Any], float] | None = None
    # Another form of the statistic for paired resampling, equal up to rounding.
    paired_statistic: Callable[..., Statistic] | None = None
    # Whether intervals are centred, because copies in a resample shift a distance; "paired": in `steps` only.
    centred: Literal["never", "paired", "always"] = "never"
    max_resamples: int | None = None
    minimum: float = -math.inf
    min_volumes: int = 1
    unit: str = ""
    # For the page of `evaluate`. Templates may use {parameter}, {pairs}, {all_pairs} and {neighbour}.
    note: str = ""
    real_note: str | None = None  # not None: also reported for the real volumes, as NAME_real
    caution: Callable[[Any, Any], str] | None = None  # replaces the note unless it is empty
    warn: bool = False  # whether the caution is also a warning
    undefined: str = ""  # why a volume may have no value; without it such volumes are ignored

    def __post_init__(self) -> None:
        if self.sets == 2 and not self.uses_real:
            object.__setattr__(self, "uses_real", True)

    def full_name(self, part: str = "") -> str:
        """The name in a result, with a label or an image kind: dice_brain, psnr_T2w."""
        return f"{self.name}_{part.replace(' ', '_')}" if part else self.name

    def build(self, generated: Any, real: Any, parameter: float | None = None, *, paired: bool = False) -> Statistic:
        make = self.paired_statistic if paired and self.paired_statistic is not None else self.statistic
        return make(generated, real) if self.parameter is None else make(generated, real, parameter)


def _ms_ssim(image: Tensor, other: Tensor) -> float:
    return ms_ssim(image, other) if min(image.shape) >= WINDOW else math.nan


def _dice(volume: VolumeInput) -> dict[str, float]:
    if volume.mask is None or volume.predicted is None:
        return dict.fromkeys(volume.classes, math.nan)
    scores = {name: dice(volume.mask, volume.predicted, members) for name, members in volume.classes.items()}
    return {name: math.nan if score is None else score for name, score in scores.items()}


def _tissues(volume: VolumeInput) -> TissueFit | None:
    if volume.mask is None or volume.masked is None or not volume.healthy:
        return None
    return fit_tissues(volume.masked, volume.at(volume.healthy), bright_fluid=volume.kind in BRIGHT_FLUID)


def _grey_white(volume: VolumeInput) -> float:
    tissues = _tissues(volume)
    return math.nan if tissues is None else tissues.contrast


def _fluid_share(volume: VolumeInput) -> float:
    tissues = _tissues(volume)
    return math.nan if tissues is None else tissues.shares[0]


def _lesion_contrast(volume: VolumeInput) -> float:
    if volume.mask is None or volume.masked is None or not volume.pathology:
        return math.nan
    return lesion_contrast(volume.masked, volume.at(volume.pathology), volume.at(volume.healthy))


def _by_size(volume: VolumeInput, value: str) -> dict[str, float]:
    if volume.mask is None or volume.predicted is None or not volume.pathology:
        return dict.fromkeys(SIZES, math.nan)
    lesion, predicted = volume.at(volume.pathology), volume.at(volume.pathology, volume.predicted)
    return by_size(lesion_scores(lesion, predicted, volume.voxel_ml), value)


# Measurements of one volume, by name. A measurement that several metrics share is taken once.
MEASUREMENTS: dict[str, Callable[[Any], Any]] = {
    "dice": _dice,
    "grey_white": _grey_white,
    "fluid_share": _fluid_share,
    "lesion_contrast": _lesion_contrast,
    "lesion_dice": lambda v: _by_size(v, "dice"),
    "lesion_detection": lambda v: _by_size(v, "detected"),
    "features": lambda v: v.features,
    "histogram": lambda v: histogram(v.image.cpu()),
    "psnr": lambda v: psnr(v.image, v.partner),
    "ms_ssim": lambda v: _ms_ssim(v.image, v.partner),
    "psnr_reference": lambda v: psnr(v.image, v.reference),
    "ms_ssim_reference": lambda v: _ms_ssim(v.image, v.reference),
    "detail": lambda v: detail(v.image, v.mask > 0),
    "coarse": lambda v: F.avg_pool3d(v.image[None, None], 2).flatten(),
}
# Measurements of a pair of volumes.
PAIR_MEASUREMENTS: dict[str, Callable[[Tensor, Tensor], float]] = {"similarity": ms_ssim}
# Distance to the nearest training volume -> the measurement that distances are taken of.
VOXEL_NEIGHBOUR = "nearest_voxel"
NEIGHBOUR_MEASUREMENTS = {VOXEL_NEIGHBOUR: "coarse", "nearest_feature": "features"}


def mean(values_N: np.ndarray, _real: Any) -> Statistic:
    return mean_statistic(values_N)


def _ratio_of_sums(values_N: np.ndarray, real_N: np.ndarray) -> Statistic:
    return lambda counts, counts_real: float(counts @ values_N / (counts_real @ real_N))


def _ratio_of_means(values_N: np.ndarray, real_N: np.ndarray) -> Statistic:
    near, far = np.asarray(values_N), np.asarray(real_N)
    return lambda a, b: float((a @ near / a.sum()) / (b @ far / b.sum())) if far.any() else math.nan


def _ratio_of_known_means(values_N: np.ndarray, real_N: np.ndarray) -> Statistic:
    near, far = mean_statistic(values_N), mean_statistic(real_N)
    return lambda a, b: near(a) / far(b)


def _share_of_copies(values_N: np.ndarray, real_N: np.ndarray) -> Statistic:
    return mean_statistic(copies(values_N.tolist(), real_N.tolist()))


def _mean_of_known_pairs(pairs: PairValues, _real: Any) -> Statistic:
    values_NN, known_NN = np.zeros((pairs.count, pairs.count)), np.zeros((pairs.count, pairs.count))
    for (i, j), value in zip(pairs.pairs_P2, pairs.values_P, strict=True):
        values_NN[i, j], known_NN[i, j] = value, 1
    return lambda counts: mean_over_pairs(values_NN, counts, known_NN)


def _mean_of_listed_pairs(pairs: PairValues, _real: Any) -> Statistic:
    first, second = pairs.pairs_P2.T
    return lambda c: float((c[first] * c[second]) @ pairs.values_P / (c[first] @ c[second]))


def _equal_volumes(values_N: Any, _real: Any) -> str:
    return "" if np.isfinite(values_N).all() else "infinite: a synthetic volume equals its reference volume"


def _singular_covariance(a_NF: Tensor, b_NF: Tensor) -> str:
    count, features = min(len(a_NF), len(b_NF)), a_NF.shape[1]
    if count > features:
        return ""
    return f"{count} volumes for {features} features: the covariance is singular and the distance biased upwards"


def _neighbours(kind: str, quantity: str, needs: Iterable[Need], *, per_image: bool) -> tuple[Metric, ...]:
    """Memorisation: the distance of generated volumes to training volumes, and that of real volumes."""
    name, required = f"nearest_{kind}", frozenset[Need](needs)
    return (
        Metric(
            name=name,
            measurement=name,
            per_image=per_image,
            statistic=mean,
            needs=required,
            better="closer",
            note=f"RMS difference of {quantity}, {{neighbour}}",
            real_note="the same for the reference volumes, each without itself",
        ),
        Metric(
            name=f"{name}_ratio",
            measurement=name,
            per_image=per_image,
            statistic=_ratio_of_means,
            needs=required,
            sets=2,
            note="synthetic divided by reference; well below 1 indicates copies",
        ),
        Metric(
            name=f"{name}_copies",
            measurement=name,
            per_image=per_image,
            statistic=_share_of_copies,
            needs=required,
            uses_real=True,
            better="lower",
            note="share closer than half the smallest distance of a reference volume",
        ),
    )


NO_TISSUE = "no mask of these volumes contains enough of the healthy organ"
METRICS: tuple[Metric, ...] = (
    Metric(
        name="dice",
        measurement="dice",
        statistic=mean,
        needs=frozenset({"masks"}),
        better="higher",
        min_difference=0.01,
        per_label=True,
        per_image=False,
        real_note="the segmenter's own limit, on the reference volumes",
    ),
    Metric(
        name="fid",
        measurement="features",
        per_image=False,
        statistic=fid_statistic,
        needs=frozenset({"real", "features"}),
        better="lower",
        sets=2,
        centred="always",
        max_resamples=200,  # each takes two eigendecompositions
        minimum=0.0,
        min_volumes=2,
        caution=_singular_covariance,
        warn=True,
    ),
    Metric(
        name="mmd",
        measurement="features",
        per_image=False,
        statistic=mmd_statistic,
        needs=frozenset({"real", "features"}),
        better="lower",
        sets=2,
        parameter=median_distance,
        centred="paired",
        min_volumes=2,
        note="squared, unbiased, Gaussian kernel of width {parameter:.4g} (median distance)",
    ),
    Metric(
        name="histogram_w1",
        measurement="histogram",
        statistic=wasserstein_statistic,
        needs=frozenset({"real"}),
        better="lower",
        min_difference=0.002,
        sets=2,
        centred="paired",
        note="in units of the intensity range",
    ),
    Metric(
        name="histogram_js",
        measurement="histogram",
        statistic=jensen_shannon_statistic,
        needs=frozenset({"real"}),
        better="lower",
        min_difference=0.005,
        sets=2,
        centred="paired",
        unit="bit",
    ),
    Metric(
        name="psnr",
        measurement="psnr",
        statistic=mean,
        needs=frozenset({"partner"}),
        better="higher",
        min_difference=0.25,
        unit="dB",
        caution=_equal_volumes,
    ),
    Metric(
        name="ms_ssim",
        measurement="ms_ssim",
        statistic=mean,
        needs=frozenset({"partner"}),
        better="higher",
        min_difference=0.01,
        undefined=f"a pair has a dimension of fewer than {WINDOW} voxels, the size of its window",
    ),
    Metric(
        name="psnr_reference",
        measurement="psnr_reference",
        statistic=mean,
        needs=frozenset({"reference"}),
        unit="dB",
    ),
    Metric(name="ms_ssim_reference", measurement="ms_ssim_reference", statistic=mean, needs=frozenset({"reference"})),
    Metric(
        name="diversity",
        measurement="similarity",
        statistic=_mean_of_known_pairs,
        paired_statistic=_mean_of_listed_pairs,
        needs=frozenset({"pairs"}),
        better="closer",
        min_difference=0.01,
        min_volumes=2,
        note="MS-SSIM of {pairs} of {all_pairs} pairs; lower is more diverse",
        real_note="MS-SSIM of {pairs} of {all_pairs} pairs; lower is more diverse",
    ),
    Metric(
        name="detail",
        measurement="detail",
        statistic=_ratio_of_sums,
        needs=frozenset({"subjects"}),
        better="closer",
        min_difference=0.02,
        target=1.0,
        sets=2,
    ),
    Metric(
        name="grey_white_contrast",
        measurement="grey_white",
        statistic=mean,
        needs=frozenset({"masks"}),
        better="closer",
        decides=False,
        missing=NO_TISSUE,
        note="difference of white and grey matter in units of their spread",
        real_note="the same for the reference volumes",
    ),
    Metric(
        name="grey_white_ratio",
        measurement="grey_white",
        statistic=_ratio_of_known_means,
        needs=frozenset({"masks", "real"}),
        better="closer",
        min_difference=0.05,
        target=1.0,
        sets=2,
        missing=NO_TISSUE,
        note="synthetic divided by reference",
    ),
    Metric(
        name="csf_fraction",
        measurement="fluid_share",
        statistic=mean,
        needs=frozenset({"masks"}),
        better="closer",
        decides=False,
        missing=NO_TISSUE,
        note="share of fluid in the healthy brain",
        real_note="the same for the reference volumes",
    ),
    Metric(
        name="lesion_contrast",
        measurement="lesion_contrast",
        statistic=mean,
        needs=frozenset({"masks"}),
        better="closer",
        decides=False,
        missing="no mask of these volumes has a lesion inside healthy tissue",
        note="difference of lesions and their surroundings in units of their spread",
        real_note="the same for the reference volumes",
    ),
    *(
        Metric(
            name=name,
            measurement=name,
            statistic=mean,
            needs=frozenset({"masks"}),
            better="higher",
            decides=False,
            parts=tuple(SIZES),
            per_image=False,
            missing="no mask of these volumes has a lesion of this size",
            note=note,
            real_note="the segmenter's own limit, on the reference volumes",
        )
        for name, note in (
            ("lesion_dice", "of each lesion of this size"),
            ("lesion_detection", "share of lesions of which a tenth or more is found"),
        )
    ),
    *_neighbours("voxel", "intensities", ["training"], per_image=True),
    *_neighbours("feature", "features", ["training", "features"], per_image=False),
)


LABEL_MEASUREMENTS = frozenset(metric.measurement for metric in METRICS if metric.per_label)
# Measurements that some volumes do not have.
_SPARSE = LABEL_MEASUREMENTS | {metric.measurement for metric in METRICS if metric.missing}


def metric_of(name: str) -> Metric | None:
    """The metric of a name in a result, such as fid, dice_brain or psnr_T2w; None for an unknown name."""
    exact = next((m for m in METRICS if m.name == name and not (m.per_label or m.parts)), None)
    parted = [m for m in METRICS if (m.per_label or m.per_image or m.parts) and name.startswith(f"{m.name}_")]
    return exact or max(parted, key=lambda m: len(m.name), default=None)


def metrics_for(provided: Set[Need]) -> list[Metric]:
    """The metrics that need nothing else."""
    return [metric for metric in METRICS if metric.needs <= provided]


def measure(volume: VolumeInput, metrics: Iterable[Metric]) -> dict[str, Any]:
    """The measurements of one volume that these metrics are computed from."""
    names = dict.fromkeys(metric.measurement for metric in metrics)
    names |= dict.fromkeys(NEIGHBOUR_MEASUREMENTS[name] for name in names if name in NEIGHBOUR_MEASUREMENTS)
    return {name: MEASUREMENTS[name](volume) for name in names if name in MEASUREMENTS}


def measure_images(images: Mapping[str, VolumeInput], metrics: Iterable[Metric]) -> dict[str, Any]:
    """The measurements of a volume with these images by kind. With one image they are those of `measure`.

    What is not measured of each image is taken of the first input.
    """
    first, *others = images.values()
    if not others:
        return measure(first, metrics)
    metrics = list(metrics)
    row = measure(first, [m for m in metrics if not m.per_image])
    each = {kind: measure(image, [m for m in metrics if m.per_image]) for kind, image in images.items()}
    names = dict.fromkeys(name for values in each.values() for name in values)
    return row | {name: {kind: values[name] for kind, values in each.items()} for name in names}


def choose_pairs(count: int, limit: int, seed: int) -> list[tuple[int, int]]:
    """All pairs of `count` volumes, or `limit` of them at random."""
    pairs = list(itertools.combinations(range(count), 2))
    if len(pairs) <= limit:
        return pairs
    picks = np.random.Generator(np.random.Philox(seed)).choice(len(pairs), limit, replace=False)
    return [pairs[i] for i in sorted(picks)]


def measure_pairs(
    volumes: Sequence[Mapping[str, Tensor]], pairs: Sequence[tuple[int, int]], metrics: Iterable[Metric]
) -> dict[str, dict[str, PairValues]]:
    """The measurements of pairs of volumes that these metrics are computed from, by image kind."""
    names = dict.fromkeys(m.measurement for m in metrics if m.measurement in PAIR_MEASUREMENTS)
    indices = np.array(pairs, dtype=int).reshape(-1, 2)
    return {
        name: {
            kind: PairValues(
                values_P=np.array([PAIR_MEASUREMENTS[name](volumes[i][kind], volumes[j][kind]) for i, j in pairs]),
                pairs_P2=indices,
                count=len(volumes),
            )
            for kind in (volumes[0] if volumes else ())
        }
        for name in names
    }


def collect(
    rows: Sequence[Mapping[str, Any]], pairs: Mapping[str, Mapping[str, PairValues]] | None = None
) -> SetMeasurements:
    """The measurements of all volumes of a set, from those of each and of pairs of them."""
    values: dict[str, Any] = {}
    by_part: dict[str, dict[str, Any]] = {}
    for name, by_kind in (pairs or {}).items():
        if len(by_kind) == 1:
            [values[name]] = by_kind.values()
        else:
            by_part[name] = dict(by_kind)
    for name in rows[0] if rows else ():
        column = [row[name] for row in rows]
        if isinstance(column[0], Mapping):
            by_part[name] = {part: _column([row[part] for row in column]) for part in column[0]}
        else:
            values[name] = _column(column)
    for name in _SPARSE & by_part.keys():
        # A label that no mask holds has no values.
        by_part[name] = {label: scores for label, scores in by_part[name].items() if not np.isnan(scores).all()}
    for name in _SPARSE & values.keys():
        if np.isnan(values[name]).all():
            del values[name]
    return SetMeasurements(count=len(rows), values=values, by_part=by_part)


def _column(values: list[Any]) -> Any:
    return torch.stack(values) if isinstance(values[0], Tensor) else np.array(values)
