"""Training and held-out subjects in memory, on a model's grid: from the cohort, from folders or from a packed file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.data.cohort import HELD_OUT
from voxtune.data.contract import DataContract, classes_of, encode_channels
from voxtune.data.labels import LabelMap
from voxtune.data.modality import kind_name
from voxtune.data.subjects import Packed, SourceRange, unpack
from voxtune.errors import InputError

log = logging.getLogger("voxtune")

# One subject in this many is held out of folders by default.
HELD_OUT_ONE_IN = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """Held-out subjects: `images_NCDHW` in [-1, 1]; `classes_NDHW` are those of `DataContract.regions`."""

    contract: DataContract
    images_NCDHW: Tensor
    classes_NDHW: Tensor
    origin: str

    def __len__(self) -> int:
        return len(self.images_NCDHW)

    def to(self, device: torch.device) -> HeldOut:
        images, classes = self.images_NCDHW.to(device), self.classes_NDHW.to(device)
        return HeldOut(contract=self.contract, images_NCDHW=images, classes_NDHW=classes, origin=self.origin)

    def condition(self, numbers: list[int]) -> Tensor:
        """The masks of these subjects as the model's condition, (N, L, D, H, W)."""
        return condition_of(self.classes_NDHW[numbers], self.contract)


@dataclass(frozen=True, kw_only=True, eq=False)
class Volumes:
    """Training data of a segmenter: `images_NCDHW` in [-1, 1] and the class of each voxel as in `HeldOut`."""

    contract: DataContract
    images_NCDHW: Tensor
    classes_NDHW: Tensor

    def __len__(self) -> int:
        return len(self.images_NCDHW)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(image (C, D, H, W), condition (L, D, H, W)), as every `Source`."""
        return self.images_NCDHW[index].numpy(), self.condition([index])[0].numpy()

    def __add__(self, other: Volumes) -> Volumes:
        images = torch.cat([self.images_NCDHW, other.images_NCDHW])
        classes = torch.cat([self.classes_NDHW, other.classes_NDHW])
        return Volumes(contract=self.contract, images_NCDHW=images, classes_NDHW=classes)

    def first(self, count: int) -> Volumes:
        images, classes = self.images_NCDHW[:count], self.classes_NDHW[:count]
        return Volumes(contract=self.contract, images_NCDHW=images, classes_NDHW=classes)

    def stored(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images and classes of these subjects, (N, C, D, H, W) and (N, D, H, W)."""
        return self.images_NCDHW[list(indices)], self.classes_NDHW[list(indices)]

    def unfold(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        return images, condition_of(masks, self.contract)

    def condition(self, numbers: list[int]) -> Tensor:
        """The masks of these subjects as the model's condition, (N, L, D, H, W)."""
        return condition_of(self.classes_NDHW[numbers], self.contract)


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Training and held-out subjects. `origin` describes the training subjects, `held_out.origin` the others."""

    learn: Volumes
    held_out: HeldOut
    origin: str


def condition_of(classes_NDHW: Tensor, contract: DataContract) -> Tensor:
    """Classes as the model's condition, (N, L, D, H, W)."""
    return encode_channels(classes_NDHW, contract.classes.values(), contract)


def mask_model_contract(contract: DataContract | None) -> DataContract:
    """Returns a model's contract; raises InputError unless the model generates images from a mask."""
    if contract is None:
        raise InputError("this model has no label contract; this command requires a model that generates from a mask")
    return contract


def held_out_cohort(contract: DataContract, count: int, seed: int = 0, *, skip: int = 0) -> HeldOut:
    """Simulated subjects 100000, 100001, ... of the cohort, each with a lesion; the first `skip` are left out."""
    from voxtune.data.dataset import CohortSource

    _check_count(count, f"--held-out {count}")
    first = HELD_OUT + skip
    source = SourceRange(CohortSource(contract, seed, first + count, healthy_fraction=0.0), first, count)
    return gather(source, contract, f"simulated cohort, seed {seed}, subjects {first} to {first + count - 1}")


def held_out_folders(
    contract: DataContract,
    images: Path,
    masks: Path,
    *,
    skip: int = 0,
    labels: LabelMap | None = None,
    warn: Callable[[str], None] = log.warning,
) -> HeldOut:
    """A user's images and masks, paired by name; the first `skip` subjects are left out."""
    source = _folders(contract, images, masks, labels, warn)
    rest = SourceRange(source, skip, max(0, len(source) - skip))
    return gather(rest, contract, f"{len(rest)} subjects of the folder {images.name}{_after(skip)}")


def held_out_packed(contract: DataContract, path: Path, count: int | None = None, *, skip: int = 0) -> HeldOut:
    """The held-out subjects of a file written by `voxtune pack`; the first `skip` are left out."""
    _, source = unpack(path)
    rest = source.part(skip, len(source))
    check_packed(path, rest, contract, count)
    rest = rest.part(0, len(rest) if count is None else count)
    return gather(rest, contract, f"{len(rest)} packed subjects{_packed(source)}{_after(skip)}")


def split_cohort(contract: DataContract, count: int, held_out: int, seed: int = 0) -> Split:
    """Simulated subjects 0, 1, ... of the cohort for training; 100000, 100001, ... are held out."""
    from voxtune.data.dataset import CohortSource

    test = held_out_cohort(contract, held_out, seed)
    return _split(CohortSource(contract, seed, count), test, contract, f"simulated subjects of the cohort, seed {seed}")


def split_folders(
    contract: DataContract,
    images: Path,
    masks: Path,
    count: int,
    held_out: int | None = None,
    *,
    labels: LabelMap | None = None,
    warn: Callable[[str], None] = log.warning,
) -> Split:
    """A user's images and masks, paired by name; the last are held out, by default one in ten."""
    source = _folders(contract, images, masks, labels, warn)
    n_train = len(source) - (max(2, len(source) // HELD_OUT_ONE_IN) if held_out is None else held_out)
    if n_train < 2:
        raise InputError(f"{images}: {len(source)} subjects are too few to train on some and hold out others")
    test = gather(
        SourceRange(source, n_train, len(source) - n_train), contract, f"the last of the folder {images.name}"
    )
    return _split(SourceRange(source, 0, min(count, n_train)), test, contract, f"subjects of the folder {images.name}")


def split_packed(contract: DataContract, path: Path, count: int, held_out: int | None = None) -> Split:
    """At most `count` training subjects, and the held-out ones, of a file written by `voxtune pack`."""
    train, rest = unpack(path)
    check_packed(path, rest, contract, held_out)
    rest = rest.part(0, len(rest) if held_out is None else held_out)
    test = gather(rest, contract, f"{len(rest)} packed subjects{_packed(rest)}")
    return _split(train.part(0, min(count, len(train))), test, contract, f"packed subjects{_packed(train)}")


def check_packed(path: Path, held_out: Packed, contract: DataContract, count: int | None) -> None:
    """Raises InputError where packed subjects are not on the model's grid, or fewer than `count` are held out."""
    difference = contract_difference(held_out.contract, contract)
    if difference:
        raise InputError(f"{path}: {difference}; pack subjects for this model with voxtune pack --model")
    if count is None:
        return
    _check_count(count, f"--held-out {count}")
    if count > len(held_out):
        raise InputError(f"--held-out {count}: {path} has only {len(held_out)} held-out subjects")


def contract_difference(contract: DataContract, model: DataContract) -> str | None:
    """How the grid or the labels of `contract` differ from the model's; None where they are equal."""
    if contract.size != model.size:
        return f"size {contract.size} differs from the model's {model.size}"
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(contract.spacing, model.spacing, strict=True)):
        return f"voxel spacing {contract.spacing} mm differs from the model's {model.spacing}"
    if contract.orientation != model.orientation:
        return f"orientation {contract.orientation} differs from the model's {model.orientation}"
    if contract.channel_values != model.channel_values:
        return f"labels {contract.describe_labels()} differ from the model's {model.describe_labels()}"
    if [kind_name(image) for image in contract.images] != [kind_name(image) for image in model.images]:
        return f"images {', '.join(contract.images)} differ from the model's {', '.join(model.images)}"
    return None


def gather(source: Any, contract: DataContract, origin: str) -> HeldOut:
    """Reads all subjects of a source into memory."""
    _check_count(len(source), origin)
    images, classes = [], []
    for number in range(len(source)):
        image_CDHW, cond_LDHW = source[number]
        images.append(image_CDHW)
        classes.append(classes_of(torch.as_tensor(cond_LDHW)[None], contract)[0])
    return HeldOut(
        contract=contract,
        images_NCDHW=torch.from_numpy(np.stack(images)),
        classes_NDHW=torch.stack(classes),
        origin=origin,
    )


def _folders(
    contract: DataContract, images: Path, masks: Path, labels: LabelMap | None, warn: Callable[[str], None]
) -> Any:
    from voxtune.data.dataset import PairedFolders

    source = PairedFolders(contract, images, masks, labels=labels)
    source.check().raise_or_warn(warn)
    return source


def _split(source: Any, held_out: HeldOut, contract: DataContract, origin: str) -> Split:
    train = gather(source, contract, origin)
    learn = Volumes(contract=contract, images_NCDHW=train.images_NCDHW, classes_NDHW=train.classes_NDHW)
    return Split(learn=learn, held_out=held_out, origin=f"{len(learn)} {origin}")


def _check_count(count: int, where: str) -> None:
    if count < 2:
        raise InputError(f"{where}: at least 2 subjects are required, 64 or more for a reliable result")


def _packed(source: Packed) -> str:
    return f" ({source.origin})" if source.origin else ""


def _after(skip: int) -> str:
    return f", after the first {skip}" if skip else ""
