"""The mask's way to the model's grid, and the result's way back to the mask's own.

One affine map per axis joins the two grids: source voxel = origin + scale * model voxel, in voxel centres. Padding and
cropping are scale 1 with a whole origin, so they are exact; resampling is any other scale.

Legend: XYZ the file's axes, xyz the same axes turned to the contract's orientation, DHW = zyx.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from voxtune.data.contract import DataContract, Shape, check_size
from voxtune.data.nifti import Volume, check_affine
from voxtune.data.orientation import Axes, Flips, axis_codes, flipped, reorder, reorder_affine
from voxtune.errors import InputError

Mode = Literal["auto", "pad", "resample"]
SPACING_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Placement:
    """How one source grid lies on the model's grid. Triples are in xyz order but for `shape` (XYZ) and `size` (DHW)."""

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
        """From the source's grid to the model's, (D, H, W): nearest for labels, linear for images."""
        assert array_XYZ.shape == self.shape, f"{array_XYZ.shape} is not the placed grid {self.shape}"
        turned = flipped(array_XYZ.transpose(self.axes), self.flips)
        coords = [o + s * np.arange(n) for o, s, n in zip(self.origin, self.scale, self.size[::-1], strict=True)]
        return np.ascontiguousarray(_sample(turned, coords, label, fill).transpose(2, 1, 0))

    def invert(self, array_DHW: np.ndarray, *, label: bool, fill: float = 0) -> np.ndarray:
        """From the model's grid back to the source's, (X, Y, Z); `fill` where the model's grid does not reach."""
        assert array_DHW.shape == self.size, f"{array_DHW.shape} is not the model's grid {self.size}"
        turned_shape = [self.shape[axis] for axis in self.axes]
        coords = [(np.arange(n) - o) / s for o, s, n in zip(self.origin, self.scale, turned_shape, strict=True)]
        turned = _sample(array_DHW.transpose(2, 1, 0), coords, label, fill)
        return np.ascontiguousarray(flipped(turned, self.flips).transpose(np.argsort(self.axes)))

    @property
    def model_affine(self) -> np.ndarray:
        """World coordinates of the model's grid, for (x, y, z) = tensor (W, H, D) indices."""
        step = np.diag([*self.scale, 1.0])
        step[:3, 3] = self.origin
        return np.array(self.source_affine) @ reorder_affine(self.shape, self.axes, self.flips) @ step

    def ras_array(self, array_DHW: np.ndarray) -> tuple[np.ndarray, tuple[float, float, float]]:
        """An array on the model's grid, in RAS for a picture, and its millimetres a voxel."""
        return ras_array(Volume(array=array_DHW.transpose(2, 1, 0), affine=self.model_affine))

    def describe(self) -> str:
        """One line: what is done and why."""
        turn = (
            "" if self.orientation == self.source_orientation else f", {self.source_orientation} to {self.orientation}"
        )
        verb = "padded / cropped" if self.mode == "pad" else "resampled"
        grids = f"{_by(self.shape)} at {_by(self.source_spacing)} mm to {_by(self.size[::-1])}"
        return f"mask {verb} from {grids}{turn}: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """The placement for JSON."""
        return {**asdict(self), "description": self.describe()}


def fit(
    volume: Volume, contract: DataContract, mode: Mode = "auto", size: Shape | None = None, label: bool = True
) -> Placement:
    """Places `volume` on the contract's grid (or one of `size`, D H W). With `label`, no labelled voxel is cut off.

    An axis that is too short is padded evenly; one that is too long is cropped to a window centred on the labelled
    voxels (on the volume where there are none).
    """
    if mode not in ("auto", "pad", "resample"):
        raise InputError(f"mode {mode!r}: choose 'auto', 'pad' or 'resample'")
    size = contract.size if size is None else size
    check_size(size)
    if volume.array.ndim != 3 or 0 in volume.shape:
        raise InputError(f"{volume.name}: {_by(volume.shape)} is not a 3D volume")
    check_affine(volume.affine, volume.name)
    source_orientation = axis_codes(volume.affine)
    axes, flips = reorder(source_orientation, contract.orientation)
    wanted = contract.spacing[::-1]
    spacing = tuple(volume.spacing[axis] for axis in axes)
    chosen, reason = _choose(mode, spacing, wanted)
    scale = tuple(w / s if chosen == "resample" else 1.0 for w, s in zip(wanted, spacing, strict=True))
    turned = flipped(volume.array.transpose(axes), flips)
    boxes = _boxes(turned) if label else None
    origin = []
    for i, (n, k, s) in enumerate(zip(turned.shape, size[::-1], scale, strict=True)):
        box = boxes[i] if boxes is not None else None
        origin.append(_origin(n, k, s, box, f"{volume.name}: axis {'XYZ'[axes[i]]}", s * spacing[i]))
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
    """The same voxels with their axes in RAS; nothing is resampled."""
    axes, flips = reorder(axis_codes(volume.affine), "RAS")
    affine = volume.affine @ reorder_affine(volume.shape, axes, flips)
    return replace(volume, array=flipped(volume.array.transpose(axes), flips), affine=affine)


def ras_array(volume: Volume) -> tuple[np.ndarray, tuple[float, float, float]]:
    """The array as (D, H, W) in RAS, and its millimetres a voxel."""
    volume = to_ras(volume)
    x, y, z = volume.spacing
    return volume.array.transpose(2, 1, 0), (z, y, x)


def _choose(
    mode: Mode, spacing: tuple[float, ...], wanted: tuple[float, ...]
) -> tuple[Literal["pad", "resample"], str]:
    worst = max(abs(s / w - 1.0) for s, w in zip(spacing, wanted, strict=True))
    matches = worst <= SPACING_TOLERANCE
    fact = f"spacing {'matches' if matches else 'differs from'} the model's {_by(wanted)} mm"
    if mode != "auto":
        return mode, f"asked for; {fact}"
    return ("pad" if matches else "resample"), fact


def _origin(n: int, size: int, scale: float, box: tuple[int, int] | None, what: str, spacing: float) -> float:
    """Source coordinate of model voxel 0 on one axis of `n` voxels, `box` the first and last labelled voxel."""
    # The resampled axis keeps the centre of the field of view; at scale 1 these are n voxels at 0, 1, ...
    steps = n if scale == 1.0 else max(1, math.ceil(n / scale - 1e-6))
    first = (n - 1) / 2 - scale * (steps - 1) / 2
    if steps <= size:
        return first - scale * ((size - steps) // 2)
    if box is None:
        return first + scale * ((steps - size) // 2)
    # Model steps whose nearest source voxel may be labelled.
    low = max(0, math.ceil((box[0] - 0.5 - first) / scale - 1e-9)) if scale != 1.0 else box[0]
    high = min(steps - 1, math.floor((box[1] + 0.5 - first) / scale + 1e-9)) if scale != 1.0 else box[1]
    extent = high - low + 1
    if extent > size:
        raise InputError(
            f"{what}: labelled voxels span {extent} voxels ({extent * spacing:.1f} mm) of the model's spacing, "
            f"its grid has {size} ({size * spacing:.1f} mm); crop the mask, or use a model or size that is larger"
        )
    start = min(max(low - (size - extent) // 2, 0), steps - size)
    return first + scale * start


def _boxes(array: np.ndarray) -> list[tuple[int, int]] | None:
    """First and last nonzero index on each axis; None where all is zero."""
    boxes = []
    labelled = array != 0
    for axis in range(3):
        hits = np.flatnonzero(labelled.any(axis=tuple(a for a in range(3) if a != axis)))
        if hits.size == 0:
            return None
        boxes.append((int(hits[0]), int(hits[-1])))
    return boxes


def _sample(array: np.ndarray, coords: list[np.ndarray], label: bool, fill: float) -> np.ndarray:
    """`array` at the product of per-axis coordinates; `fill` beyond the outer faces of the edge voxels."""
    result = array if label else array.astype(np.float32)
    inside = []
    for axis, at in enumerate(coords):
        n = array.shape[axis]
        # Resampled coordinates carry rounding; the tolerance keeps a voxel that lies on the face itself.
        inside.append((at >= -0.5 - 1e-6) & (at <= n - 0.5 + 1e-6))
        result = _nearest(result, at, axis) if label else _linear(result, at, axis)
    for axis, mask in enumerate(inside):
        if not mask.all():
            outside = [slice(None)] * 3
            outside[axis] = np.flatnonzero(~mask)  # type: ignore[call-overload]
            result[tuple(outside)] = fill
    return result


def _nearest(array: np.ndarray, at: np.ndarray, axis: int) -> np.ndarray:
    index = np.clip(np.floor(at + 0.5).astype(int), 0, array.shape[axis] - 1)
    return array.take(index, axis=axis)


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
