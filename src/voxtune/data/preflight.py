"""Checks of masks and images before any work: each problem is one finding that names the file and the fix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from voxtune.data.contract import PRESETS, DataContract, Label, unknown_labels
from voxtune.data.nifti import Volume, check_affine, exact_labels, read_labels
from voxtune.errors import FileProblems, InputError, advice

log = logging.getLogger("voxtune")
# Number of warnings that are shown; the rest are counted.
SHOWN_WARNINGS = 5

# Affines are stored in float32 or recomputed from quaternions: grids with smaller differences are equal.
AFFINE_TOLERANCE_MM = 0.05


@dataclass(frozen=True, kw_only=True)
class Consumer:
    """What a mask is checked for: its name in messages, and what cures a mask with other labels or too large a one.

    The labels of a `new` model are those of its data.
    """

    name: str = "the model"
    label_cures: tuple[str, ...] = (
        "choose a --workload with these labels",
        "renumber the mask",
    )
    larger_cures: tuple[str, ...] = ("pass a larger --size", "use a larger model or size")
    new: bool = False


MODEL = Consumer()
# The size of a new model alone does not enlarge its field of view.
NEW_MODEL = Consumer(
    new=True, larger_cures=("set larger voxels in mm, such as --set data.spacing=[2,2,2]", "set a larger data.spacing")
)
# Its field of view is fixed.
NEW_HEAD = Consumer(new=True, larger_cures=("resample the files",))


def segmenter_consumer(name: str) -> Consumer:
    """The segmenter that an evaluation compares masks with."""
    cures = (
        "pass a --segmenter for these labels",
        "omit --masks to skip Dice",
        "use a segmenter for these labels",
    )
    return Consumer(name=name, label_cures=cures)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One problem of `file`. Errors stop the work, warnings do not."""

    level: Literal["error", "warning"]
    code: str
    message: str
    file: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of a check; empty if there are none."""

    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.level == "warning")

    def raise_errors(self) -> None:
        """Raises one FilesError with all errors."""
        problems = FileProblems()
        for finding in self.errors:
            problems.add(finding.file, finding.message)
        problems.raise_all()

    def raise_or_warn(self, warn: Callable[[str], None] = log.warning) -> None:
        """Raises the errors; without errors, passes the first warnings to `warn` and counts the rest."""
        self.raise_errors()
        for finding in self.warnings[:SHOWN_WARNINGS]:
            warn(finding.message)
        if len(self.warnings) > SHOWN_WARNINGS:
            warn(f"{len(self.warnings) - SHOWN_WARNINGS} more warnings")

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON mapping."""
        return {"ok": self.ok, "findings": [asdict(f) for f in self.findings]}

    def __add__(self, other: Report) -> Report:
        return Report(findings=self.findings + other.findings)


def check_mask(
    mask: Volume | str | Path,
    contract: DataContract,
    consumer: Consumer = MODEL,
    *,
    stated: bool = False,
    organ_may_miss: bool = False,
) -> Report:
    """Checks whether a mask, in memory or in a file, can be used with this contract, which is that of `consumer`.

    `stated`: the user stated what the values mean, so that there is no other reading of them.
    """
    if not isinstance(mask, Volume):
        path = mask
        try:
            mask = read_labels(path)
        except InputError as error:
            return _report(error_finding("unreadable", path, str(error)))
    name, array = mask.name, mask.array
    findings = []
    if array.ndim != 3 or 0 in array.shape:
        findings.append(error_finding("dimension", name, f"{name}: shape {mask.shape} is not that of a 3D volume"))
    try:
        check_affine(np.asarray(mask.affine), name)
    except InputError as error:
        findings.append(error_finding("affine", name, str(error)))
    if findings:
        return _report(*findings)
    try:
        labels = exact_labels(array, name)
    except InputError as error:
        code = "values" if np.isfinite(array).all() else "nan"
        return _report(error_finding(code, name, str(error)))
    return _check_labels(labels, contract, name, consumer, stated=stated, organ_may_miss=organ_may_miss)


def _check_labels(
    labels: np.ndarray, contract: DataContract, name: str, consumer: Consumer, *, stated: bool, organ_may_miss: bool
) -> Report:
    values = [int(v) for v in np.unique(labels)]
    if values == [0]:
        return _report(
            error_finding(
                "empty", name, f"{name}: the mask is empty, all voxels are 0; expected {contract.describe_labels()}"
            )
        )
    unknown = unknown_labels(labels, contract)
    both = f"the mask has {_some(values)}, {consumer.name} {contract.describe_labels()}"
    if unknown:
        names = "; ".join(f"{label.name}=..." for label in contract.ordered)
        meaning = f'say what its values mean with --labels "{names}; background=..."'
        if consumer.new and not stated and set(values) <= {0, 1, 2, 3, 4} and not {3, 4} <= set(values):
            preset, release = ("brats2021", "up to 2021") if 4 in values else ("brats", "2023 and later")
            meaning = f"if these are the values of BraTS {release}, pass --labels {preset}; else {meaning}"
        shown = f"unknown label{'s' if len(unknown) > 1 else ''} {_some(unknown)}"
        message = f"{name}: {shown}; {both}; {advice(meaning, *consumer.label_cures)}"
        return _report(error_finding("unknown-label", name, message))
    missing = [label for label in contract.ordered if not set(label.values) & set(values)]
    if not stated and is_brats_2021(values, contract):
        text = contract.value_names()
        message = (
            f"{name}: labels {_some([v for v in values if v])} have two readings: BraTS 2021 (4 = enhancing tumour, no brain "
            f"label), or the model's own labels without 3 ({text[3]}), 4 = {text[4]}; "
        )
        message += advice("pass --labels brats2021 or --labels model", "pass labels='brats2021' or labels='model'")
        return _report(error_finding("ambiguous", name, message))
    findings = []
    for label in missing:
        message = f"{name}: label {label.describe()} is not in the mask; {both}"
        if label.kind == "organ" and not organ_may_miss:
            cure = _organ_cure(contract, label, new=consumer.new, stated=stated)
            findings.append(error_finding("missing-organ", name, f"{message}; {cure}"))
        else:
            message += "; the result will not show it"
            findings.append(Finding(level="warning", code="missing-label", message=message, file=name))
    return _report(*findings)


def _organ_cure(contract: DataContract, label: Label, *, new: bool, stated: bool) -> str:
    """What helps if a mask lacks the organ. `--labels model` would change what the user stated about the values."""
    option = label_option(contract, label)
    take = "take it from the subject's image with"
    accept = (
        ["", ""] if new else [", or accept the mask with --labels model", ", or accept the mask with labels='model'"]
    )
    if stated and not new:
        accept = [f", or accept the mask with {label.name}=none in {name}" for name in ("--labels", "labels")]
    with_images = "" if new else advice(f"{take} --labels {option} --images DIR{accept[0]}")
    return with_images or advice(f"{take} --labels {option}{accept[0]}", f"{take} labels={option}{accept[1]}")


def is_brats_2021(values: Sequence[int], contract: DataContract) -> bool:
    """Whether the values can be those of BraTS up to 2021, where 4 is a part of the tumour, as well as the contract's."""
    kinds = {label.values: label.kind for label in contract.labels}
    four_is_the_organ = kinds.get((4,)) == "organ" and kinds.get((3,)) == "pathology"
    return four_is_the_organ and contract.all_values == (1, 2, 3, 4) and 4 in values and 3 not in values


def label_option(contract: DataContract, from_image: Label) -> str:
    """The value of --labels for masks of this contract without one of its labels."""
    values = {label.name: ",".join(map(str, label.values)) for label in contract.ordered} | {from_image.name: "image"}
    parts = [f"{name}={value}" for name, value in values.items()]
    text = "; ".join(parts)
    return next((name for name, preset in PRESETS.items() if preset == text), f'"{text}"')


def check_pair(image: Volume, mask: Volume) -> Report:
    """Checks whether an image and its mask are on the same grid."""
    if image.shape != mask.shape:
        message = f"{image.name}: shape {image.shape} differs from that of its mask {mask.name}, {mask.shape}"
        return _report(error_finding("pair-shape", image.name, f"{message}; resample one to the other"))
    distance_mm = displacement_mm(image.affine, mask.affine, image.shape)
    if not distance_mm <= same_place_mm(mask.spacing):
        message = f"{image.name}: displaced by {distance_mm:.3g} mm from its mask {mask.name}; their affines differ"
        return _report(error_finding("pair-affine", image.name, f"{message}; resample one to the other"))
    return Report()


def displacement_mm(a: np.ndarray, b: np.ndarray, shape: tuple[int, ...]) -> float:
    """The largest distance along a world axis between the places that two affines give to a voxel."""
    # It is largest at the corners.
    corners = np.array([[x, y, z, 1] for x in (0, 1) for y in (0, 1) for z in (0, 1)], dtype=np.float64)
    corners[:, :3] *= np.array(shape) - 1
    return float(np.abs(corners @ (a - b).T).max())


def same_place_mm(spacing: tuple[float, ...]) -> float:
    """The displacement up to which two grids are equal."""
    return max(AFFINE_TOLERANCE_MM, 0.01 * min(spacing))


def check_lost_labels(before: np.ndarray, after: np.ndarray, contract: DataContract, name: str) -> Report:
    """Reports labels that were lost on the model's grid because they are smaller than its voxels."""
    lost = sorted({int(v) for v in np.unique(before)} - {int(v) for v in np.unique(after)} - {0})
    reason = "is smaller than the model's voxels and was lost in resampling"
    messages = [f"{name}: label {contract.name_of(value)} {reason}" for value in lost]
    if lost and not after.any():
        return _report(error_finding("lost-all", name, "; ".join(messages) + "; check the mask's spacing"))
    return _report(*(Finding(level="warning", code="lost-label", message=message, file=name) for message in messages))


def error_finding(code: str, file: str | Path, message: str) -> Finding:
    return Finding(level="error", code=code, message=message, file=str(file))


def _report(*findings: Finding) -> Report:
    return Report(findings=findings)


def _some(values: list[int]) -> str:
    more = f" and {len(values) - 8} more" if len(values) > 8 else ""
    return ", ".join(map(str, values[:8])) + more
