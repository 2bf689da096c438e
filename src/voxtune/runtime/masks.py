"""The masks of a job: every file is checked before the first volume, and read again when its volume is drawn.

Only the names and hashes of the files stay in memory, so that a job may have any number of masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from voxtune.data.contract import DataContract, Shape
from voxtune.data.derivative import check_stems
from voxtune.data.geometry import GeometrySummary
from voxtune.data.grid import Mode, Placement, fit
from voxtune.data.labels import LabelMap, MaskReader
from voxtune.data.nifti import Volume, exact_labels, given_volume, read_labels
from voxtune.data.preflight import check_lost_labels
from voxtune.data.training_data import MaskComparison
from voxtune.errors import FileProblems, InputError, advice
from voxtune.reading import file_sha256
from voxtune.runtime.job import OnError
from voxtune.runtime.model import Model

# What `Model.draw` accepts.
MASKS = "a NIfTI file, a Volume, an image of nibabel, or an array or a tensor with its affine"


@dataclass(frozen=True, kw_only=True)
class MaskRequest:
    """One mask, read, checked and placed on the model's grid. Holds the geometry of the file but not its voxels."""

    path: Path
    grid: Volume  # the mask's geometry, without its voxels
    labels_DHW: np.ndarray
    placement: Placement
    warnings: tuple[str, ...]
    images: tuple[Path, ...] = ()  # where a label of the mask was taken from
    sha256: tuple[str, ...] = ()  # of the mask's file and of the images' files


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedMask:
    """A mask file that passed the checks. Its volumes and their noise are named after `alias` instead of the file, if given."""

    path: Path
    images: tuple[Path, ...]
    sha256: tuple[str, ...]
    placement: str
    alias: Path | None = None

    @property
    def named(self) -> Path:
        return self.alias or self.path


@dataclass(kw_only=True)
class Masks(Sequence[MaskRequest]):
    """Mask files that passed the checks, as a sequence of requests; each item is read when it is taken.

    `warnings` are about single masks, `common_warnings` about all of them. `problems` are the masks that are skipped.
    """

    reader: MaskReader
    mode: Mode
    size: Shape | None
    checked: list[CheckedMask]
    warnings: list[str] = field(default_factory=list)
    common_warnings: list[str] = field(default_factory=list)
    problems: FileProblems = field(default_factory=FileProblems)
    _last: tuple[int, MaskRequest] | None = None

    @property
    def file_labels(self) -> Mapping[str, str] | None:
        """Names of the files' own values, if these were mapped."""
        labels = self.reader.labels
        return None if labels is None else labels.file_names(self.reader.contract)

    @property
    def names(self) -> list[Path]:
        """What the volumes are named after."""
        return [mask.named for mask in self.checked]

    def __len__(self) -> int:
        return len(self.checked)

    def __getitem__(self, number: int) -> MaskRequest:  # type: ignore[override]  # no slices
        # Several volumes of a mask follow each other.
        if self._last is None or self._last[0] != number:
            mask = self.checked[number]
            request = self._read(mask.path, mask.images)
            if request.sha256 != mask.sha256:
                raise InputError(f"{mask.path}: changed while the job was running; start the job again")
            self._last = (number, request)
        return self._last[1]

    def _read(self, path: Path, images: tuple[Path, ...], *, fix: str = "") -> MaskRequest:
        request = prepare_mask(self.reader.read(path, images, fix=fix), self.reader, self.mode, self.size)
        digests = tuple(file_sha256(file) for file in (path, *images))
        return replace(request, path=path, images=images, sha256=digests)

    def add(self, path: Path, images: tuple[Path, ...], *, fix: str, alias: Path | None = None) -> MaskRequest:
        """Checks one more mask file."""
        request = self._read(path, images, fix=fix)
        placed = sys.intern(request.placement.describe())
        self.checked.append(CheckedMask(path=path, images=images, sha256=request.sha256, placement=placed, alias=alias))
        self.warnings += request.warnings
        self._last = (len(self.checked) - 1, request)
        return request


def prepare(
    model: Model,
    masks: Iterable[Path],
    *,
    mode: Mode = "auto",
    size: Shape | None = None,
    labels: LabelMap | None = None,
    images: Mapping[Path, Sequence[Path]] | None = None,
    on_error: OnError = "stop",
    progress: Callable[[int], None] | None = None,
) -> Masks:
    """Checks all masks; raises one FilesError with every invalid mask, or keeps these in `problems` if they are skipped.

    `labels` is what the values of the masks mean; `images` are those of the masks' subjects, for a label that is taken from
    them. `progress(done)` is called after each mask.
    """
    files = list(masks)
    check_stems(files)
    reader = MaskReader(contract=mask_contract(model), labels=labels)
    reader.check_names()
    fix = advice(
        "pass the folder of the images with --images" if images is None else "add it to the folder of --images",
        "pass it as images",
    )
    result = Masks(reader=reader, mode=mode, size=size, checked=[])
    geometry, comparison = GeometrySummary(), MaskComparison(model.config.training_data, model.config.data)
    for done, path in enumerate(files, start=1):
        try:
            used = tuple((images or {}).get(path, ())) if reader.from_image else ()
            request = result.add(path, used, fix=fix)
            geometry.add(request.grid)
            comparison.add(path.name, request.labels_DHW, request.placement.source_spacing)
        except InputError as error:
            result.problems.add(path, error)
        if progress is not None:
            progress(done)
    if on_error == "stop" or not result.checked:
        result.problems.raise_all()
    unlike = comparison.line()
    result.common_warnings = [*geometry.lines(), *([] if unlike is None else [unlike])]
    return result


def mask_contract(model: Model) -> DataContract:
    if model.config.data is None:
        raise InputError("this model has no data contract, so it cannot read mask files; use Model.sample from Python")
    return model.config.data


def read_mask(mask: object, affine: np.ndarray | None = None) -> Volume:
    """A mask for `draw_images`: read from its file, or checked in memory."""
    if isinstance(mask, torch.Tensor):
        mask = _array(mask)
    if isinstance(mask, np.ndarray):
        if affine is None:
            raise InputError("missing affine: pass the 4 x 4 matrix from voxels to millimetres with the array")
        try:
            mask = Volume(array=mask, affine=np.array(affine, dtype=np.float64))
        except (TypeError, ValueError):
            raise InputError(f"affine: expected a 4 x 4 matrix of numbers, got {type(affine).__name__}") from None
        affine = None
    given = given_volume(mask, "mask", MASKS)
    if affine is not None:
        raise InputError("affine applies to a mask given as an array or a tensor; omit it")
    if isinstance(given, Path):
        return read_labels(given)
    return replace(given, array=exact_labels(given.array, given.name))


def _array(tensor: torch.Tensor) -> np.ndarray:
    try:
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()
    except (TypeError, RuntimeError):
        raise InputError(f"mask: a tensor of {tensor.dtype}, {tensor.layout} cannot be a mask") from None


def prepare_mask(mask: Volume, reader: MaskReader, mode: Mode = "auto", size: Shape | None = None) -> MaskRequest:
    """Checks a mask that `reader` returned and places it on the model's grid."""
    contract = reader.contract
    report = reader.check(mask)
    report.raise_errors()
    placement = fit(mask, contract, mode, size)
    labels_DHW = placement.apply(mask.array, label=True)
    report += check_lost_labels(mask.array, labels_DHW, contract, mask.name)
    report.raise_errors()
    warnings = tuple(f.message for f in report.warnings)
    grid = replace(mask, array=np.broadcast_to(np.zeros((), np.uint8), mask.shape))
    compact = labels_DHW.astype(np.min_scalar_type(max(contract.all_values)))
    return MaskRequest(
        path=mask.path or Path(mask.name), grid=grid, labels_DHW=compact, placement=placement, warnings=warnings
    )


def common_warnings(model: Model, request: MaskRequest) -> list[str]:
    """Warnings about one mask: its geometry, and a mask that is unlike those of the training data."""
    comparison = MaskComparison(model.config.training_data, model.config.data)
    comparison.add(request.path.name, request.labels_DHW, request.placement.source_spacing)
    unlike = comparison.line()
    return [*GeometrySummary([request.grid]).lines(), *([] if unlike is None else [unlike])]
