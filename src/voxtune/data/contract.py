"""The data contract of a model: grid, labels, channels and value ranges of its masks and images.

In memory a voxel of a mask has one integer, a value of the contract. A channel is a set of values. The class of a voxel is
the set of channels that contain its value; without overlapping labels these are the single channels.

Legend: N subjects, L labels, C labels or images; D H W are the Z, Y, X axes of a file in the contract's orientation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from voxtune.data.modality import bids_name
from voxtune.data.orientation import check_orientation
from voxtune.errors import InputError

Shape = tuple[int, int, int]


Kind = Literal["organ", "pathology", "other"]
BRAINS = frozenset({"brain", "whole brain"})
ORGANS = BRAINS | {"head", "whole head"}
# A label with one of these words in its name is a pathology.
PATHOLOGIES = frozenset(
    {
        *("tumour", "tumours", "lesion", "lesions", "oedema", "necrosis", "necrotic", "enhancing", "core", "glioma"),
        *("metastasis", "metastases", "infarct", "stroke", "haemorrhage", "wmh", "wt", "tc", "et"),
    }
)
SPELLINGS = (("tumor", "tumour"), (r"\bedema", "oedema"), ("hemorrhage", "haemorrhage"))
# Mask values by name, for --labels. "model": the values of the files are those of the model.
PRESETS = {
    "brats": "necrotic core=1; oedema=2; enhancing tumour=3; brain=image",
    "brats2021": "necrotic core=1; oedema=2; enhancing tumour=4; brain=image",
    "whole-head": "head=1; tumour=2",
    "model": "",
}
# Sets of channels are numbered with 64 bits, classes with 8.
MOST_OVERLAPPING, MOST_CLASSES = 62, 255
# Values of all labels together; the tables of FreeSurfer have about 1,500.
MOST_VALUES = 5000


def check_count(values: int) -> None:
    """Raises for labels with more values than any table has."""
    if values > MOST_VALUES:
        raise InputError(f"labels: {values} values, more than {MOST_VALUES}; give the table of a mask's labels")


def label_key(name: str) -> str:
    """The name of a label for comparisons: without case, separators and differences of British and American spelling."""
    key = re.sub(r"[\s_-]+", " ", name).strip().casefold()
    for american, british in SPELLINGS:
        key = re.sub(american, british, key)
    return key


@dataclass(frozen=True, kw_only=True)
class Label:
    """One structure of the mask: its values in files and its channel in the model's condition.

    `value` is the first of its values, `more_values` are the others. With `from_image`, a mask without this label gets it
    where the mask is 0 and the subject's image is not. `role` sets the kind; by default it follows from the name.
    """

    name: str
    value: int
    channel: int
    more_values: tuple[int, ...] = ()
    from_image: bool = False
    role: Kind | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError(f"label with value {self.value}: the name is empty")
        for value in self.values:
            if value < 1:
                raise InputError(f"label {self.name!r}: value is {value}, must be 1 or more (0 is background)")
        if _repeated(list(self.values)):
            raise InputError(f"label {self.name!r}: value {_repeated(list(self.values))[0]} is given twice")
        if self.channel < 0:
            raise InputError(f"label {self.name!r}: channel is {self.channel}, must be 0 or more")

    @property
    def values(self) -> tuple[int, ...]:
        return (self.value, *self.more_values)

    @property
    def kind(self) -> Kind:
        """Whether the label is the organ (brain, head), a pathology (tumour, oedema, ...) or something else."""
        if self.role is not None:
            return self.role
        key = label_key(self.name)
        if key in ORGANS:
            return "organ"
        return "pathology" if PATHOLOGIES.intersection(re.findall(r"\w+", key)) else "other"

    def describe(self) -> str:
        """Values and name, such as 1/4 (tumour)."""
        return f"{'/'.join(map(str, self.values))} ({self.name})"


@dataclass(frozen=True, kw_only=True)
class DataContract:
    """The grid, labels and value ranges that a model was trained with.

    `size` and `spacing` (mm) are in tensor order (D, H, W); `orientation` is the axis code of the file's X, Y, Z axes, so
    in "RAS" X increases to the right. `mask_range`: one-hot masks are -1 / +1 ("signed") or 0 / 1 ("unit"). `scaling`:
    images are scaled to [-1, 1] by the minimum and maximum of the "volume" or of each "slice" along the file's last axis.
    Only with `overlapping` may one value belong to several labels.
    """

    size: tuple[int, int, int]
    spacing: tuple[float, float, float]
    orientation: str
    labels: tuple[Label, ...]
    mask_range: Literal["signed", "unit"] = "signed"
    images: tuple[str, ...] = ("T1w",)
    scaling: Literal["volume", "slice"] = "volume"
    overlapping: bool = False

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
        if any(set("/\\") & set(image) or not image.isprintable() for image in self.images):
            # The names are part of file names.
            raise InputError(f"images {self.images}: a name must not contain / or \\ or control characters")
        self._check_labels()

    def _check_labels(self) -> None:
        if not self.labels:
            raise InputError("labels: at least one label with name, value and channel is required")
        check_count(sum(len(label.values) for label in self.labels))
        for field in ("name", "channel"):
            duplicates = _repeated([getattr(label, field) for label in self.labels])
            if duplicates:
                raise InputError(f"labels: duplicate {field} {duplicates[0]!r}; it must be unique")
        channels = sorted(label.channel for label in self.labels)
        if channels != list(range(len(channels))):
            raise InputError(f"labels: channels {channels} must be 0, 1, 2, ... without gaps")
        if self.overlapping:
            if len(self.labels) > MOST_OVERLAPPING or len(self.regions) > MOST_CLASSES:
                raise InputError(
                    f"labels: {len(self.labels)} overlapping labels, {len(self.regions)} combinations; at most "
                    f"{MOST_OVERLAPPING} and {MOST_CLASSES} are supported"
                )
            return
        duplicates = _repeated([value for label in self.labels for value in label.values])
        if duplicates:
            raise InputError(
                f"labels: duplicate value {duplicates[0]!r}; it must be unique, unless the labels overlap "
                "(--overlapping-labels)"
            )

    @cached_property
    def ordered(self) -> tuple[Label, ...]:
        """The labels in channel order."""
        return tuple(sorted(self.labels, key=lambda label: label.channel))

    @property
    def values(self) -> tuple[int, ...]:
        """The first value of each label, in channel order."""
        return tuple(label.value for label in self.ordered)

    @property
    def mask_values(self) -> tuple[float, float]:
        """The values outside and inside a label in the model's condition."""
        return (-1.0 if self.mask_range == "signed" else 0.0), 1.0

    @property
    def channel_values(self) -> tuple[tuple[int, ...], ...]:
        """All values of each channel."""
        return tuple(label.values for label in self.ordered)

    @cached_property
    def all_values(self) -> tuple[int, ...]:
        """The values that a mask may have besides 0, sorted."""
        return tuple(sorted({value for label in self.labels for value in label.values}))

    def channels_of(self, value: int) -> tuple[int, ...]:
        """The channels that contain a value."""
        return tuple(label.channel for label in self.ordered if value in label.values)

    @cached_property
    def regions(self) -> tuple[tuple[int, ...], ...]:
        """The sets of channels that a voxel can be in, sorted. Class k of a voxel is set k - 1; class 0 is the background."""
        return tuple(sorted({self.channels_of(value) for value in self.all_values}))

    @cached_property
    def region_values(self) -> tuple[int, ...]:
        """A value of each of `regions`."""
        first: dict[tuple[int, ...], int] = {}
        for value in (value for values in self.channel_values for value in values):
            first.setdefault(self.channels_of(value), value)
        return tuple(first[region] for region in self.regions)

    def value_of(self, channels: Collection[int]) -> int | None:
        """A value that is in exactly these channels; None if there is none."""
        region = tuple(sorted(channels))
        return self.region_values[self.regions.index(region)] if region in self.regions else None

    @property
    def classes(self) -> dict[str, tuple[int, ...]]:
        """The classes of each label by name; without overlapping labels only 1 + channel."""
        return {
            label.name: tuple(k for k, region in enumerate(self.regions, 1) if label.channel in region)
            for label in self.ordered
        }

    @property
    def organ(self) -> Label | None:
        """The label of the brain or the head, None if there is none."""
        return next((label for label in self.ordered if label.kind == "organ"), None)

    def resized(self, size: Shape) -> DataContract:
        """The same field of view on a grid of another size."""
        depth, height, width = (mm * n / s for mm, n, s in zip(self.spacing, self.size, size, strict=True))
        return replace(self, size=size, spacing=(depth, height, width))

    def value_names(self) -> dict[int, str]:
        """The name of each value; of overlapping labels all names."""
        labels = self.ordered
        return {v: " + ".join(label.name for label in labels if v in label.values) for v in self.all_values}

    def name_of(self, value: int) -> str:
        """A label value with its name, for messages."""
        name = self.value_names().get(value)
        return str(value) if name is None else f"{value} ({name})"

    def describe_labels(self) -> str:
        """All labels on one line, including the background."""
        labels = sorted(self.labels, key=lambda label: (label.value, label.channel))
        return ", ".join(["0 (background)", *(_with_source(label) for label in labels)])


def _with_source(label: Label) -> str:
    text = label.describe()
    return f"{text[:-1]}, from the image)" if label.from_image else text


def no_organ(contract: DataContract) -> str | None:
    """A warning about a new model without a label of the brain or the head."""
    if contract.organ is not None:
        return None
    names = ", ".join(label.name for label in contract.ordered)
    return (
        f"no label is the brain or the head, only {names}: the model has to invent the shape of the head; add one to --labels, "
        "such as brain=image"
    )


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
    """The condition of the model, float32 (L, D, H, W): one channel per label, in the contract's range."""
    assert labels_DHW.ndim == 3, f"labels must be (D, H, W), not {labels_DHW.shape}"
    check_known(labels_DHW, contract)
    outside, inside = (np.float32(value) for value in contract.mask_values)
    return np.stack([np.where(_any_of(labels_DHW, values), inside, outside) for values in contract.channel_values])


def check_known(labels_DHW: np.ndarray, contract: DataContract) -> None:
    """Raises for labels that the contract does not have."""
    unknown = unknown_labels(labels_DHW, contract)
    if unknown:
        raise InputError(
            f"unknown label{'s' if len(unknown) > 1 else ''} {', '.join(map(str, unknown[:8]))} in the mask; "
            f"the model has {contract.describe_labels()}; map the mask's values to these"
        )


def encode_channels(masks_NDHW: Tensor, members: Iterable[Sequence[int]], contract: DataContract) -> Tensor:
    """The model's condition (N, L, D, H, W), as `encode_mask`: `members` are the numbers in `masks_NDHW` of each channel."""
    inside = torch.stack([_any_of(masks_NDHW, numbers) for numbers in members], dim=1).float()
    return inside * 2 - 1 if contract.mask_range == "signed" else inside


def classes_of(cond_NLDHW: Tensor, contract: DataContract) -> Tensor:
    """The class of each voxel (see `DataContract.regions`), uint8 (N, D, H, W)."""
    # A channel is positive inside its label, in both mask ranges.
    inside = cond_NLDHW > 0
    if not contract.overlapping:
        return last_channel(inside)
    sets = torch.zeros_like(inside[:, 0], dtype=torch.int64)
    for channel in range(inside.shape[1]):
        sets |= inside[:, channel].long() << channel
    classes = torch.zeros_like(sets, dtype=torch.uint8)
    for number, region in enumerate(contract.regions, 1):
        classes[sets == sum(1 << channel for channel in region)] = number
    if bool(((sets != 0) & (classes == 0)).any()):
        raise InputError("a mask combines labels that never overlap in the model's data contract; check its channels")
    return classes


def last_channel(inside_NLDHW: Tensor) -> Tensor:
    """1 + the last channel that contains a voxel, uint8 (N, D, H, W); 0 for background."""
    shape = (1, -1, *[1] * (inside_NLDHW.dim() - 2))
    rank = torch.arange(1, inside_NLDHW.shape[1] + 1, dtype=torch.uint8, device=inside_NLDHW.device).view(shape)
    return (inside_NLDHW * rank).amax(dim=1)


def _any_of(labels: Any, values: Sequence[int]) -> Any:
    inside = labels == values[0]
    for value in values[1:]:
        inside |= labels == value
    return inside


def example_labels(contract: DataContract) -> np.ndarray:
    """Label values (D, H, W) to try a model without data: an ellipsoid as brain, and every other label inside it."""
    axes = [(np.arange(side) - (side - 1) / 2) / (side / 2) for side in contract.size]
    z, y, x = np.meshgrid(*axes, indexing="ij", sparse=True)
    channel = 0 if contract.organ is None else contract.organ.channel
    region = min((region for region in contract.regions if channel in region), key=len)
    outer = contract.region_values[contract.regions.index(region)]
    labels = np.where((z / 0.62) ** 2 + (y / 0.80) ** 2 + (x / 0.66) ** 2 < 1, outer, 0)
    inner = [value for value in contract.region_values if value != outer]
    for number, value in enumerate(inner):
        radius = 0.22 * (len(inner) - number) / len(inner)
        labels[((z - 0.18) ** 2 + (y + 0.20) ** 2 + (x - 0.24) ** 2) < radius**2] = value
    return labels.astype(np.min_scalar_type(max(contract.all_values)))


def unknown_labels(labels: np.ndarray, contract: DataContract) -> list[int]:
    """Values in `labels` that are neither background nor labels of the contract."""
    unknown = labels != 0
    for value in contract.all_values:
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
