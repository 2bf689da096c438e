"""Subjects to learn from and others held out, both in memory and on a model's own grid: of the embedded cohort, of folders,
or of one packed file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.data.contract import DataContract
from voxtune.errors import InputError
from voxtune.runtime.heldout import HeldOut, check_packed, condition_of, contract_of, gathered, held_out_cohort
from voxtune.runtime.model import Model
from voxtune.runtime.subjects import Shifted, unpack

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


def split_packed(model: Model, path: Path, count: int, held_out: int | None = None) -> Split:
    """At most `count` subjects to learn from, and the held-out ones, of a file that `voxtune pack` wrote."""
    contract = contract_of(model)
    learn, unseen = unpack(path)
    check_packed(path, unseen, contract, held_out)
    unseen = unseen.part(0, len(unseen) if held_out is None else held_out)
    test = gathered(unseen, contract, f"{len(unseen)} packed subjects")
    words = f"packed subjects ({learn.origin})" if learn.origin else "packed subjects"
    return _split(learn.part(0, min(count, len(learn))), test, contract, words)


def split_cohort(model: Model, count: int, held_out: int, seed: int = 0) -> Split:
    """Subjects 0, 1, ... of the embedded cohort to learn from; 100000, 100001, ... are held out."""
    from voxtune.data.dataset import CohortSource

    contract = contract_of(model)
    test = held_out_cohort(model, held_out, seed)
    return _split(CohortSource(contract, seed, count), test, contract, f"subjects of the embedded cohort, seed {seed}")


def split_folders(model: Model, real: Path, masks: Path, count: int, held_out: int | None = None) -> Split:
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
