"""Placement of a mask on the model's grid, and of the result back on the grid of the mask.

One linear map per axis relates the grids: source voxel = origin + scale * model voxel, at voxel centres. Padding and
cropping have scale 1 and an integer origin, so they are exact; any other scale is resampling.

Legend: XYZ the axes of the file, xyz the same axes reordered to the contract's orientation, DHW = zyx.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from voxtune.data.contract import DataContract, Shape, check_size
from voxtune.data.nifti import Volume, check_affine
from voxtune.data.orientation import Axes, Flips, axis_codes, flipped, reorder, reorder_affine
from voxtune.data.preflight import MODEL, Consumer
from voxtune.errors import InputError, advice

Mode = Literal["auto", "pad", "resample"]
SPACING_TOLERANCE = 0.01
# Headers store spacings, and the columns of a rotation, in float32: 1.5 mm may be read as 1.50000004.
ROUNDING = 1e-5
# Part of a voxel by which rounding may move a point across the border between two voxels.
BORDER = 1e-3


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How a source grid maps to the model's grid. Triples are in xyz order except `shape` (XYZ) and `size` (DHW)."""

    shape: Shape
    size: Shape
    axes: Axes
    flips: Flips
    scale: tuple[float, float, float]
    origin: tuple[float, float, float]
    mode: Literal["pad", "resample"]
    reason: str
    source_orientation: str
    orientation: str
    source_spacing: tuple[float, float, float]
    source_affine: tuple[tuple[float, ...], ...]

    def apply(self, array_XYZ: np.ndarray, *, label: bool, fill: float = 0) -> np.ndarray:
        """Maps an array from the source grid to the model's (D, H, W): nearest for labels, linear for images."""
        assert array_XYZ.shape == self.shape, f"shape {array_XYZ.shape} is not that of the source grid, {self.shape}"
        array_xyz = flipped(array_XYZ.transpose(self.axes), self.flips)
        coords = [o + s * np.arange(n) for o, s, n in zip(self.origin, self.scale, self.size[::-1], strict=True)]
        return np.ascontiguousarray(_sample(array_xyz, coords, label, fill).transpose(2, 1, 0))

    def invert(self, array_DHW: np.ndarray, *, label: bool, fill: float = 0) -> np.ndarray:
        """Maps an array from the model's grid back to the source grid (X, Y, Z); `fill` outside the model's grid."""
        assert array_DHW.shape == self.size, f"shape {array_DHW.shape} is not that of the model's grid, {self.size}"
        shape_xyz = [self.shape[axis] for axis in self.axes]
        coords = [(np.arange(n) - o) / s for o, s, n in zip(self.origin, self.scale, shape_xyz, strict=True)]
        array_xyz = _sample(array_DHW.transpose(2, 1, 0), coords, label, fill)
        return np.ascontiguousarray(flipped(array_xyz, self.flips).transpose(np.argsort(self.axes)))

    @property
    def model_affine(self) -> np.ndarray:
        """The affine of the model's grid, for indices (x, y, z) = tensor (W, H, D)."""
        step = np.diag([*self.scale, 1.0])
        step[:3, 3] = self.origin
        return np.array(self.source_affine) @ reorder_affine(self.shape, self.axes, self.flips) @ step

    def ras_array(self, array_DHW: np.ndarray) -> tuple[np.ndarray, tuple[float, float, float]]:
        """An array on the model's grid as (D, H, W) in RAS, and its voxel spacing in mm."""
        return ras_array(Volume(array=array_DHW.transpose(2, 1, 0), affine=self.model_affine))

    def describe(self) -> str:
        """What is done to the mask and why, on one line."""
        reordered = (
            "" if self.orientation == self.source_orientation else f", {self.source_orientation} to {self.orientation}"
        )
        verb = "padded / cropped" if self.mode == "pad" else "resampled"
        grids = f"{_by(self.shape)} at {_by(self.source_spacing)} mm to {_by(self.size[::-1])}"
        return f"mask {verb} from {grids}{reordered}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """The placement as a JSON mapping."""
        return {**asdict(self), "description": self.describe()}


def fit(
    volume: Volume,
    contract: DataContract,
    mode: Mode = "auto",
    size: Shape | None = None,
    label: bool = True,
    *,
    consumer: Consumer = MODEL,
) -> Placement:
    """Places `volume` on the contract's grid, or on a grid of `size` (D, H, W).

    A short axis is padded on both sides. A long axis is cropped to a window around the labelled voxels, none of which is
    cut off; without `label`, or without labelled voxels, to the centre of the volume.
    """
    if mode not in ("auto", "pad", "resample"):
        raise InputError(f"unknown mode {mode!r}; choose from 'auto', 'pad', 'resample'")
    size = contract.size if size is None else size
    check_size(size)
    if volume.array.ndim != 3 or 0 in volume.shape:
        raise InputError(f"{volume.name}: {_by(volume.shape)} is not a 3D volume")
    check_affine(volume.affine, volume.name)
    source_orientation = axis_codes(volume.affine)
    axes, flips = reorder(source_orientation, contract.orientation)
    model_spacing = contract.spacing[::-1]
    spacing = tuple(volume.spacing[axis] for axis in axes)
    chosen, reason = _choose(mode, spacing, model_spacing)
    scale = tuple(m / s if chosen == "resample" else 1.0 for m, s in zip(model_spacing, spacing, strict=True))
    array_xyz = flipped(volume.array.transpose(axes), flips)
    boxes = _boxes(array_xyz) if label else None
    origin = []
    for i, (n, k, s) in enumerate(zip(array_xyz.shape, size[::-1], scale, strict=True)):
        box = boxes[i] if boxes is not None else None
        try:
            origin.append(_origin(n, k, s, box, s * spacing[i]))
        except _TooLargeError as error:
            names = _too_long(array_xyz, contract, i, k * s)
            what = f"{', '.join(names)} {'extends' if len(names) == 1 else 'extend'}" if names else "the labels extend"
            raise InputError(
                f"{volume.name}: axis {'XYZ'[axes[i]]}: {what} over {error}; crop the mask and its images, or "
                f"{advice(*consumer.larger_cures)}"
            ) from None
    return Placement(
        shape=_triple(volume.shape),
        size=_triple(size),
        axes=axes,
        flips=flips,
        scale=(scale[0], scale[1], scale[2]),
        origin=(origin[0], origin[1], origin[2]),
        mode=chosen,
        reason=reason,
        source_orientation=source_orientation,
        orientation=contract.orientation,
        source_spacing=volume.spacing,
        source_affine=tuple(tuple(float(v) for v in row) for row in volume.affine),
    )


def to_ras(volume: Volume) -> Volume:
    """The same voxels with the axes reordered to RAS, without resampling."""
    axes, flips = reorder(axis_codes(volume.affine), "RAS")
    affine = volume.affine @ reorder_affine(volume.shape, axes, flips)
    return replace(volume, array=flipped(volume.array.transpose(axes), flips), affine=affine)


def ras_array(volume: Volume) -> tuple[np.ndarray, tuple[float, float, float]]:
    """The array as (D, H, W) in RAS, and its voxel spacing in mm."""
    volume = to_ras(volume)
    x, y, z = volume.spacing
    return volume.array.transpose(2, 1, 0), (z, y, x)


def _choose(
    mode: Mode, spacing: tuple[float, ...], model_spacing: tuple[float, ...]
) -> tuple[Literal["pad", "resample"], str]:
    deviation = max(abs(s / m - 1.0) for s, m in zip(spacing, model_spacing, strict=True))
    matches = deviation <= SPACING_TOLERANCE
    reason = f"spacing {'matches' if matches else 'differs from'} the model's {_by(model_spacing)} mm"
    if mode != "auto":
        return mode, f"requested; {reason}"
    return ("pad" if matches else "resample"), reason


class _TooLargeError(Exception):
    """The labels do not fit on an axis of the grid; the message is their extent and that of the grid."""


def _too_long(array_xyz: np.ndarray, contract: DataContract, axis: int, longest: float) -> list[str]:
    """The labels that alone extend over more than `longest` voxels of an axis."""
    boxes = {label.name: _boxes(np.isin(array_xyz, label.values)) for label in contract.ordered}
    return [name for name, box in boxes.items() if box is not None and box[axis][1] - box[axis][0] + 1 > longest]


def _origin(n: int, size: int, scale: float, box: tuple[int, int] | None, spacing: float) -> float:
    """Source coordinate of model voxel 0 on an axis of `n` voxels; `box` is the first and last labelled voxel."""
    # The resampled axis has the same centre as the source axis; at scale 1 it is the source axis.
    steps = n if scale == 1.0 else max(1, math.ceil(n / scale * (1 - ROUNDING)))
    first = (n - 1) / 2 - scale * (steps - 1) / 2
    if steps <= size:
        return first - scale * ((size - steps) // 2)
    if box is None:
        return first + scale * ((steps - size) // 2)
    # Model voxels whose nearest source voxel is between the first and the last labelled one.
    nearest = np.clip(_nearest_index(first + scale * np.arange(steps)), 0, n - 1)
    labelled = np.flatnonzero((nearest >= box[0]) & (nearest <= box[1]))
    if labelled.size == 0:
        return first + scale * ((steps - size) // 2)
    low, high = int(labelled[0]), int(labelled[-1])
    extent = high - low + 1
    if extent > size:
        raise _TooLargeError(
            f"{extent} voxels of the model's spacing ({extent * spacing:.1f} mm), but its grid has {size} "
            f"({size * spacing:.1f} mm)"
        )
    start = min(max(low - (size - extent) // 2, 0), steps - size)
    return first + scale * start


def _boxes(array: np.ndarray) -> list[tuple[int, int]] | None:
    """First and last nonzero index on each axis; None if all voxels are zero."""
    boxes = []
    labelled = array != 0
    for axis in range(3):
        hits = np.flatnonzero(labelled.any(axis=tuple(a for a in range(3) if a != axis)))
        if hits.size == 0:
            return None
        boxes.append((int(hits[0]), int(hits[-1])))
    return boxes


def _sample(array: np.ndarray, coords: list[np.ndarray], label: bool, fill: float) -> np.ndarray:
    """`array` on the grid of per-axis coordinates; `fill` outside the outer faces of the array."""
    result = array if label else array.astype(np.float32)
    inside = []
    for axis, at in enumerate(coords):
        n = array.shape[axis]
        inside.append((at >= -0.5 - BORDER) & (at <= n - 0.5 + BORDER))
        result = _nearest(result, at, axis) if label else _linear(result, at, axis)
    for axis, mask in enumerate(inside):
        if not mask.all():
            outside = [slice(None)] * 3
            outside[axis] = np.flatnonzero(~mask)  # type: ignore[call-overload]
            result[tuple(outside)] = fill
    return result


def _nearest(array: np.ndarray, at: np.ndarray, axis: int) -> np.ndarray:
    return array.take(np.clip(_nearest_index(at), 0, array.shape[axis] - 1), axis=axis)


def _nearest_index(at: np.ndarray) -> np.ndarray:
    """The nearest index; a coordinate on the border between two voxels, up to rounding, belongs to the upper one."""
    return np.floor(at + (0.5 + BORDER)).astype(int)


def _linear(array: np.ndarray, at: np.ndarray, axis: int) -> np.ndarray:
    n = array.shape[axis]
    at = np.clip(at, 0, n - 1)
    low = np.floor(at).astype(int)
    weight = (at - low).astype(np.float32)
    if not weight.any():
        return array.take(low, axis=axis)
    weight = weight.reshape([-1 if a == axis else 1 for a in range(3)])
    return array.take(low, axis=axis) * (1 - weight) + array.take(np.minimum(low + 1, n - 1), axis=axis) * weight


def _triple(values: Any) -> Shape:
    a, b, c = (int(v) for v in values)
    return (a, b, c)


def _by(numbers: Any) -> str:
    return " x ".join(f"{n:.4g}" for n in numbers)
