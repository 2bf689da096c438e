"""What a model expects of a mask and an image: grid, labels, channels, ranges.

Legend: C labels or images, D H W = the Z, Y, X axes of the file once it is in the contract's orientation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from voxtune.data.orientation import check_orientation
from voxtune.errors import InputError

Shape = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Label:
    """One structure of the mask: the value it has in files, the channel it has in the model's condition."""

    name: str
    value: int
    channel: int

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError(f"label of value {self.value}: the name is empty; give it a name")
        if self.value < 1:
            raise InputError(f"label {self.name!r}: value {self.value} must be 1 or more (0 is background)")
        if self.channel < 0:
            raise InputError(f"label {self.name!r}: channel {self.channel} must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class DataContract:
    """The grid, the labels and the ranges a model was trained on.

    `size` and `spacing` (mm) are in tensor order (D, H, W); `orientation` names the file's X, Y, Z axes, so "RAS" means
    X runs to the right. `mask_range`: "signed" is one-hot as -1 / +1, "unit" as 0 / 1. `scaling`: images go to [-1, 1]
    by the minimum and maximum of the whole "volume" or of each "slice" along the file's last axis.
    """

    size: tuple[int, int, int]
    spacing: tuple[float, float, float]
    orientation: str
    labels: tuple[Label, ...]
    mask_range: Literal["signed", "unit"] = "signed"
    images: tuple[str, ...] = ("T1w",)
    scaling: Literal["volume", "slice"] = "volume"

    def __post_init__(self) -> None:
        check_size(self.size)
        if len(self.spacing) != 3 or not all(math.isfinite(s) and s > 0 for s in self.spacing):
            raise InputError(f"spacing {self.spacing}: give three positive finite numbers of millimetres (D, H, W)")
        check_orientation(self.orientation)
        if self.mask_range not in ("signed", "unit"):
            raise InputError(f"mask_range {self.mask_range!r}: choose 'signed' (-1 / +1) or 'unit' (0 / 1)")
        if self.scaling not in ("volume", "slice"):
            raise InputError(f"scaling {self.scaling!r}: choose 'volume' or 'slice'")
        if not self.images or not all(self.images) or _repeated([i.lower() for i in self.images]):
            raise InputError(f"images {self.images}: give at least one image name, each once")
        self._check_labels()

    def _check_labels(self) -> None:
        if not self.labels:
            raise InputError("labels: a mask model needs at least one label; give name, value and channel")
        for field in ("name", "value", "channel"):
            again = _repeated([getattr(label, field) for label in self.labels])
            if again:
                raise InputError(f"labels: {field} {again[0]!r} is used twice; each label needs its own")
        channels = sorted(label.channel for label in self.labels)
        if channels != list(range(len(channels))):
            raise InputError(f"labels: channels {channels} must count 0, 1, 2, ... without a gap")

    @property
    def values(self) -> tuple[int, ...]:
        """Label values in channel order."""
        return tuple(label.value for label in sorted(self.labels, key=lambda label: label.channel))

    @property
    def classes(self) -> dict[str, int]:
        """A segmenter's class of each label by name: 0 is the background, then in channel order."""
        return {label.name: 1 + label.channel for label in sorted(self.labels, key=lambda label: label.channel)}

    def resized(self, size: Shape) -> DataContract:
        """The same field of view on a grid of another size."""
        depth, height, width = (mm * n / s for mm, n, s in zip(self.spacing, self.size, size, strict=True))
        return replace(self, size=size, spacing=(depth, height, width))

    def name_of(self, value: int) -> str:
        """`value` with its name, for messages."""
        return next((f"{label.value} ({label.name})" for label in self.labels if label.value == value), str(value))

    def describe_labels(self) -> str:
        """All labels in one line, background included."""
        return ", ".join(["0 (background)", *(self.name_of(v) for v in sorted(self.values))])


def check_size(size: Any) -> None:
    """Refuses a grid that is not three positive integers."""
    if len(size) != 3 or not all(isinstance(n, int | np.integer) and n > 0 for n in size):
        raise InputError(f"size {size}: give three positive whole numbers of voxels (D, H, W)")


def _repeated(items: list[Any]) -> list[Any]:
    return [item for i, item in enumerate(items) if item in items[:i]]


def generic_contract(
    n_labels: int,
    n_images: int,
    size: Shape,
    *,
    spacing: tuple[float, float, float] = (1.0, 1.0, 1.0),
    orientation: str = "RAS",
    mask_range: Literal["signed", "unit"] = "signed",
) -> DataContract:
    """A contract for a model that carries none: labels 1..n in channel order, images named by number."""
    if n_labels < 1 or n_images < 1:
        raise InputError(f"{n_labels} labels and {n_images} images: a mask model needs at least one of each")
    return DataContract(
        size=size,
        spacing=spacing,
        orientation=orientation,
        labels=tuple(Label(name=f"label{i + 1}", value=i + 1, channel=i) for i in range(n_labels)),
        mask_range=mask_range,
        images=("T1w",) if n_images == 1 else tuple(f"image{i + 1}" for i in range(n_images)),
    )


def encode_mask(labels_DHW: np.ndarray, contract: DataContract) -> np.ndarray:
    """The condition of the model, float32 (C, D, H, W): one channel a label, in the contract's range."""
    assert labels_DHW.ndim == 3, f"labels must be (D, H, W), not {labels_DHW.shape}"
    unknown = unknown_labels(labels_DHW, contract)
    if unknown:
        raise InputError(
            f"mask holds unknown label {', '.join(map(str, unknown[:8]))}; "
            f"the model knows {contract.describe_labels()}; renumber the mask"
        )
    inside, outside = np.float32(1.0), np.float32(-1.0 if contract.mask_range == "signed" else 0.0)
    return np.stack([np.where(labels_DHW == value, inside, outside) for value in contract.values])


def unknown_labels(labels: np.ndarray, contract: DataContract) -> list[int]:
    """Values in `labels` that are neither background nor in the contract."""
    strange = labels != 0
    for value in contract.values:
        strange &= labels != value
    return [int(value) for value in np.unique(labels[strange])] if strange.any() else []


def scale_image(image_DHW: np.ndarray, contract: DataContract) -> np.ndarray:
    """One image to float32 in [-1, 1] by its minimum and maximum; a constant volume or slice becomes -1, background."""
    assert image_DHW.ndim == 3, f"an image must be (D, H, W), not {image_DHW.shape}"
    # D is the file's last axis: the published whole-head model scales each of its slices alone.
    axes = (1, 2) if contract.scaling == "slice" else (0, 1, 2)
    image = image_DHW.astype(np.float64)
    low, high = image.min(axis=axes, keepdims=True), image.max(axis=axes, keepdims=True)
    span = np.where(high > low, high - low, 1.0)
    return ((image - low) / span * 2.0 - 1.0).astype(np.float32)


def unscale_image(image: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """A model's output, clipped to [-1, 1], as intensities in [low, high].

    A synthetic image has no scanner units to return to: -1 (background) becomes `low`, +1 becomes `high`, for the
    whole volume, whichever scaling the model was trained with.
    """
    unit = (np.clip(image, -1.0, 1.0).astype(np.float32) + 1.0) / 2.0
    return (low + unit * (high - low)).astype(np.float32)
