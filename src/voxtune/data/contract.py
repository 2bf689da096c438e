"""The data contract of a model: grid, labels, channels and value ranges of its masks and images.

Legend: C labels or images; D H W are the Z, Y, X axes of a file in the contract's orientation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from voxtune.data.modality import bids_name
from voxtune.data.orientation import check_orientation
from voxtune.errors import InputError

Shape = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Label:
    """One structure of the mask: its value in files and its channel in the model's condition."""

    name: str
    value: int
    channel: int

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError(f"label with value {self.value}: the name is empty")
        if self.value < 1:
            raise InputError(f"label {self.name!r}: value is {self.value}, must be 1 or more (0 is background)")
        if self.channel < 0:
            raise InputError(f"label {self.name!r}: channel is {self.channel}, must be 0 or more")


@dataclass(frozen=True, kw_only=True)
class DataContract:
    """The grid, labels and value ranges that a model was trained with.

    `size` and `spacing` (mm) are in tensor order (D, H, W); `orientation` is the axis code of the file's X, Y, Z axes, so
    in "RAS" X increases to the right. `mask_range`: one-hot masks are -1 / +1 ("signed") or 0 / 1 ("unit"). `scaling`:
    images are scaled to [-1, 1] by the minimum and maximum of the "volume" or of each "slice" along the file's last axis.
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
            raise InputError(f"spacing {self.spacing}: must be three positive finite numbers in mm (D, H, W)")
        check_orientation(self.orientation)
        if self.mask_range not in ("signed", "unit"):
            raise InputError(f"unknown mask_range {self.mask_range!r}; choose from 'signed' (-1 / +1), 'unit' (0 / 1)")
        if self.scaling not in ("volume", "slice"):
            raise InputError(f"unknown scaling {self.scaling!r}; choose from 'volume', 'slice'")
        names = [bids_name(image) for image in self.images]
        if not self.images or not all(self.images) or _repeated([(e, suffix.lower()) for e, suffix in names]):
            raise InputError(f"images {self.images}: must be one or more unique names of different image kinds")
        self._check_labels()

    def _check_labels(self) -> None:
        if not self.labels:
            raise InputError("labels: at least one label with name, value and channel is required")
        for field in ("name", "value", "channel"):
            duplicates = _repeated([getattr(label, field) for label in self.labels])
            if duplicates:
                raise InputError(f"labels: duplicate {field} {duplicates[0]!r}; it must be unique")
        channels = sorted(label.channel for label in self.labels)
        if channels != list(range(len(channels))):
            raise InputError(f"labels: channels {channels} must be 0, 1, 2, ... without gaps")

    @property
    def values(self) -> tuple[int, ...]:
        """Label values in channel order."""
        return tuple(label.value for label in sorted(self.labels, key=lambda label: label.channel))

    @property
    def mask_values(self) -> tuple[float, float]:
        """The values outside and inside a label in the model's condition."""
        return (-1.0 if self.mask_range == "signed" else 0.0), 1.0

    @property
    def classes(self) -> dict[str, int]:
        """The class of each label by name: 1 + channel; 0 is the background."""
        return {label.name: 1 + label.channel for label in sorted(self.labels, key=lambda label: label.channel)}

    def resized(self, size: Shape) -> DataContract:
        """The same field of view on a grid of another size."""
        depth, height, width = (mm * n / s for mm, n, s in zip(self.spacing, self.size, size, strict=True))
        return replace(self, size=size, spacing=(depth, height, width))

    def name_of(self, value: int) -> str:
        """A label value with its name, for messages."""
        return next((f"{label.value} ({label.name})" for label in self.labels if label.value == value), str(value))

    def describe_labels(self) -> str:
        """All labels on one line, including the background."""
        return ", ".join(["0 (background)", *(self.name_of(v) for v in sorted(self.values))])


def check_size(size: Any) -> None:
    """Raises InputError unless `size` is three positive integers."""
    if len(size) != 3 or not all(isinstance(n, int | np.integer) and n > 0 for n in size):
        raise InputError(f"size {size}: must be three positive integers (D, H, W)")


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
    """A contract for a model without one: labels 1 .. n in channel order, numbered images."""
    if n_labels < 1 or n_images < 1:
        raise InputError(f"{n_labels} labels and {n_images} images: at least one of each is required")
    return DataContract(
        size=size,
        spacing=spacing,
        orientation=orientation,
        labels=tuple(Label(name=f"label{i + 1}", value=i + 1, channel=i) for i in range(n_labels)),
        mask_range=mask_range,
        images=("T1w",) if n_images == 1 else tuple(f"image{i + 1}" for i in range(n_images)),
    )


def encode_mask(labels_DHW: np.ndarray, contract: DataContract) -> np.ndarray:
    """The condition of the model, float32 (C, D, H, W): one channel per label, in the contract's range."""
    assert labels_DHW.ndim == 3, f"labels must be (D, H, W), not {labels_DHW.shape}"
    unknown = unknown_labels(labels_DHW, contract)
    if unknown:
        raise InputError(
            f"unknown label {', '.join(map(str, unknown[:8]))} in the mask; "
            f"the model has {contract.describe_labels()}; renumber the mask"
        )
    outside, inside = (np.float32(value) for value in contract.mask_values)
    return np.stack([np.where(labels_DHW == value, inside, outside) for value in contract.values])


def example_labels(contract: DataContract) -> np.ndarray:
    """Label values (D, H, W) to try a model without data: an ellipsoid as brain, and every other label inside it."""
    axes = [(np.arange(side) - (side - 1) / 2) / (side / 2) for side in contract.size]
    z, y, x = np.meshgrid(*axes, indexing="ij", sparse=True)
    outer = next((label for label in contract.labels if label.name == "brain"), contract.labels[0])
    labels = np.where((z / 0.62) ** 2 + (y / 0.80) ** 2 + (x / 0.66) ** 2 < 1, outer.value, 0)
    inner = [label for label in contract.labels if label is not outer]
    for number, label in enumerate(inner):
        radius = 0.22 * (len(inner) - number) / len(inner)
        labels[((z - 0.18) ** 2 + (y + 0.20) ** 2 + (x - 0.24) ** 2) < radius**2] = label.value
    return labels.astype(np.min_scalar_type(max(contract.values)))


def unknown_labels(labels: np.ndarray, contract: DataContract) -> list[int]:
    """Values in `labels` that are neither background nor labels of the contract."""
    unknown = labels != 0
    for value in contract.values:
        unknown &= labels != value
    return [int(value) for value in np.unique(labels[unknown])] if unknown.any() else []


def scale_image(image_DHW: np.ndarray, contract: DataContract) -> np.ndarray:
    """Scales an image to float32 in [-1, 1] by its minimum and maximum; a constant volume or slice becomes -1."""
    assert image_DHW.ndim == 3, f"an image must be (D, H, W), not {image_DHW.shape}"
    # D is the file's last axis: the published whole-head model scales each slice separately.
    axes = (1, 2) if contract.scaling == "slice" else (0, 1, 2)
    image = image_DHW.astype(np.float64)
    low, high = image.min(axis=axes, keepdims=True), image.max(axis=axes, keepdims=True)
    span = np.where(high > low, high - low, 1.0)
    return ((image - low) / span * 2.0 - 1.0).astype(np.float32)


def unscale_image(image: np.ndarray, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    """Maps a model's output, clipped to [-1, 1], to intensities in [low, high].

    The range applies to the whole volume, whichever scaling the model was trained with; synthetic images have no
    scanner units.
    """
    unit = (np.clip(image, -1.0, 1.0).astype(np.float32) + 1.0) / 2.0
    return (low + unit * (high - low)).astype(np.float32)
