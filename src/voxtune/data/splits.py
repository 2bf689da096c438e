"""Subjects that nothing learned from, on a model's own grid: of the embedded cohort, of folders, or of one packed file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.data.cohort import HELD_OUT
from voxtune.data.contract import DataContract
from voxtune.data.subjects import Packed, Shifted, classes_of, encoded, unpack
from voxtune.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """`images_NDHW` in [-1, 1]; `classes_NDHW` are 0 for background, else 1 + the label's channel."""

    contract: DataContract
    images_NDHW: Tensor
    classes_NDHW: Tensor
    origin: str

    def __len__(self) -> int:
        return len(self.images_NDHW)

    def to(self, device: torch.device) -> HeldOut:
        images, classes = self.images_NDHW.to(device), self.classes_NDHW.to(device)
        return HeldOut(contract=self.contract, images_NDHW=images, classes_NDHW=classes, origin=self.origin)

    def condition(self, numbers: list[int]) -> Tensor:
        """The masks of these subjects as the model takes them, (N, L, D, H, W)."""
        return condition_of(self.classes_NDHW[numbers], self.contract)


def condition_of(classes_NDHW: Tensor, contract: DataContract) -> Tensor:
    """Classes as the model takes a mask, (N, L, D, H, W)."""
    return encoded(classes_NDHW, range(1, 1 + len(contract.labels)), contract)


def held_out_cohort(model: Any, count: int, seed: int = 0, *, skip: int = 0) -> HeldOut:
    """Subjects 100000, 100001, ... of the embedded cohort, each with a lesion; without the first `skip` of them."""
    from voxtune.data.dataset import CohortSource

    if count < 2:
        raise InputError(f"--held-out {count}: at least 2 subjects are needed, and 64 for a result")
    contract = contract_of(model)
    first = HELD_OUT + skip
    source = Shifted(CohortSource(contract, seed, first + count, healthy_fraction=0.0), first, count)
    return gathered(source, contract, f"cohort {seed}, subjects {first} to {first + count - 1}")


def held_out_folders(model: Any, real: Path, masks: Path, *, skip: int = 0) -> HeldOut:
    """Real volumes and their masks, paired by name; without the first `skip` of them."""
    from voxtune.data.dataset import PairedFolders

    contract = contract_of(model)
    source = PairedFolders(contract, real, masks)
    source.check().tell()
    left = Shifted(source, skip, max(0, len(source) - skip))
    return gathered(left, contract, f"{len(left)} subjects of the folder {real.name}{_after(skip)}")


def held_out_packed(model: Any, path: Path, count: int | None = None, *, skip: int = 0) -> HeldOut:
    """The held-out subjects of a file that `voxtune pack` wrote; without the first `skip` of them."""
    contract = contract_of(model)
    _, source = unpack(path)
    left = source.part(skip, len(source))
    check_packed(path, left, contract, count)
    left = left.part(0, len(left) if count is None else count)
    return gathered(left, contract, f"{len(left)} packed subjects{_after(skip)}")


def _after(skip: int) -> str:
    return f", after the first {skip}" if skip else ""


def check_packed(path: Path, held_out: Packed, contract: DataContract, count: int | None) -> None:
    """Raises where packed subjects are not on the model's grid, or fewer than `count` are held out."""
    difference = unlike(held_out.contract, contract)
    if difference:
        raise InputError(f"{path}: {difference} than the model's; pack them for this model, with pack --model")
    if count is not None and count < 2:
        raise InputError(f"--held-out {count}: at least 2 subjects are needed, and 64 for a result")
    if count is not None and count > len(held_out):
        raise InputError(f"{path}: holds {len(held_out)} held-out subjects, {count} were asked for")


def contract_of(model: Any) -> DataContract:
    contract = model.config.data
    if contract is None or len(contract.images) != 1:
        found = "no label contract" if contract is None else f"{len(contract.images)} images"
        raise InputError(f"this model has {found}: this is measured for models that draw one image from a mask")
    return contract


def unlike(found: DataContract, wanted: DataContract) -> str | None:
    """How two contracts differ in what matters here."""
    if found.size != wanted.size:
        return f"another size, {found.size} rather than {wanted.size},"
    if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(found.spacing, wanted.spacing, strict=True)):
        return f"another spacing, {found.spacing} rather than {wanted.spacing},"
    if found.orientation != wanted.orientation:
        return f"another orientation, {found.orientation} rather than {wanted.orientation},"
    if found.values != wanted.values or len(found.images) != len(wanted.images):
        return f"other labels or images, {found.describe_labels()} rather than {wanted.describe_labels()},"
    return None


def gathered(source: Any, contract: DataContract, origin: str) -> HeldOut:
    """All subjects of a source in memory."""
    if len(source) < 2:
        raise InputError(f"{origin}: at least 2 subjects are needed, and 64 for a result")
    images, classes = [], []
    for number in range(len(source)):
        image_CDHW, cond_LDHW = source[number]
        images.append(image_CDHW[0])
        classes.append(classes_of(cond_LDHW))
    return HeldOut(
        contract=contract,
        images_NDHW=torch.from_numpy(np.stack(images)),
        classes_NDHW=torch.from_numpy(np.stack(classes)),
        origin=origin,
    )


# Of folders, one subject in so many is held out.
ONE_IN = 10


@dataclass(frozen=True, kw_only=True, eq=False)
class Volumes:
    """What a segmenter learns from: `images_NDHW` in [-1, 1], and the class of each voxel as in `HeldOut`."""

    contract: DataContract
    images_NDHW: Tensor
    classes_NDHW: Tensor

    def __len__(self) -> int:
        return len(self.images_NDHW)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(image (1, D, H, W), condition (L, D, H, W)), as every source gives them."""
        return self.images_NDHW[index][None].numpy(), self.condition([index])[0].numpy()

    def __add__(self, other: Volumes) -> Volumes:
        images = torch.cat([self.images_NDHW, other.images_NDHW])
        classes = torch.cat([self.classes_NDHW, other.classes_NDHW])
        return Volumes(contract=self.contract, images_NDHW=images, classes_NDHW=classes)

    def first(self, count: int) -> Volumes:
        images, classes = self.images_NDHW[:count], self.classes_NDHW[:count]
        return Volumes(contract=self.contract, images_NDHW=images, classes_NDHW=classes)

    def stored(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images and classes of these subjects, (N, 1, D, H, W) and (N, D, H, W)."""
        return self.images_NDHW[list(indices)][:, None], self.classes_NDHW[list(indices)]

    def unfold(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        return images, condition_of(masks, self.contract)

    def condition(self, numbers: list[int]) -> Tensor:
        """The masks of these subjects as the model takes them, (N, L, D, H, W)."""
        return condition_of(self.classes_NDHW[numbers], self.contract)


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """`origin` says in words what is learned from; `held_out.origin`, what is not."""

    learn: Volumes
    held_out: HeldOut
    origin: str


def split_packed(model: Any, path: Path, count: int, held_out: int | None = None) -> Split:
    """At most `count` subjects to learn from, and the held-out ones, of a file that `voxtune pack` wrote."""
    contract = contract_of(model)
    learn, unseen = unpack(path)
    check_packed(path, unseen, contract, held_out)
    unseen = unseen.part(0, len(unseen) if held_out is None else held_out)
    test = gathered(unseen, contract, f"{len(unseen)} packed subjects")
    words = f"packed subjects ({learn.origin})" if learn.origin else "packed subjects"
    return _split(learn.part(0, min(count, len(learn))), test, contract, words)


def split_cohort(model: Any, count: int, held_out: int, seed: int = 0) -> Split:
    """Subjects 0, 1, ... of the embedded cohort to learn from; 100000, 100001, ... are held out."""
    from voxtune.data.dataset import CohortSource

    contract = contract_of(model)
    test = held_out_cohort(model, held_out, seed)
    return _split(CohortSource(contract, seed, count), test, contract, f"subjects of the embedded cohort, seed {seed}")


def split_folders(model: Any, real: Path, masks: Path, count: int, held_out: int | None = None) -> Split:
    """Volumes and masks paired by name; the last of them are held out, by default one in ten."""
    from voxtune.data.dataset import PairedFolders

    contract = contract_of(model)
    source = PairedFolders(contract, real, masks)
    source.check().tell()
    kept = len(source) - (max(2, len(source) // ONE_IN) if held_out is None else held_out)
    if kept < 2:
        raise InputError(f"{real}: {len(source)} subjects, too few to learn from some and hold others out")
    test = gathered(Shifted(source, kept, len(source) - kept), contract, f"the last of the folder {real.name}")
    return _split(Shifted(source, 0, min(count, kept)), test, contract, f"subjects of the folder {real.name}")


def _split(source: Any, held_out: HeldOut, contract: DataContract, words: str) -> Split:
    found = gathered(source, contract, words)
    learn = Volumes(contract=contract, images_NDHW=found.images_NDHW, classes_NDHW=found.classes_NDHW)
    return Split(learn=learn, held_out=held_out, origin=f"{len(learn)} {words}")
