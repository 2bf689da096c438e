"""Subjects that nothing learned from, on a model's own grid: of the embedded cohort, of folders, or of one packed file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.data.cohort import HELD_OUT
from voxtune.data.contract import DataContract
from voxtune.errors import InputError
from voxtune.runtime.model import Model
from voxtune.runtime.segmenter import Segmenter
from voxtune.runtime.subjects import Packed, Shifted, classes_of, encoded, unpack


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


def held_out_cohort(model: Model, count: int, seed: int = 0, *, skip: int = 0) -> HeldOut:
    """Subjects 100000, 100001, ... of the embedded cohort, each with a lesion; without the first `skip` of them."""
    from voxtune.data.dataset import CohortSource

    if count < 2:
        raise InputError(f"--held-out {count}: at least 2 subjects are needed, and 64 for a result")
    contract = contract_of(model)
    first = HELD_OUT + skip
    source = Shifted(CohortSource(contract, seed, first + count, healthy_fraction=0.0), first, count)
    return gathered(source, contract, f"cohort {seed}, subjects {first} to {first + count - 1}")


def held_out_folders(model: Model, real: Path, masks: Path, *, skip: int = 0) -> HeldOut:
    """Real volumes and their masks, paired by name; without the first `skip` of them."""
    from voxtune.data.dataset import PairedFolders

    contract = contract_of(model)
    source = PairedFolders(contract, real, masks)
    source.check().tell()
    left = Shifted(source, skip, max(0, len(source) - skip))
    return gathered(left, contract, f"{len(left)} subjects of the folder {real.name}{_after(skip)}")


def held_out_packed(model: Model, path: Path, count: int | None = None, *, skip: int = 0) -> HeldOut:
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


def contract_of(model: Model) -> DataContract:
    contract = model.config.data
    if contract is None or len(contract.images) != 1:
        found = "no label contract" if contract is None else f"{len(contract.images)} images"
        raise InputError(f"this model has {found}: this is measured for models that draw one image from a mask")
    return contract


def check_segmenter(segmenter: Segmenter, contract: DataContract) -> None:
    """Raises where the segmenter cannot label this model's volumes as they are."""
    difference = unlike(segmenter.config.data, contract)
    if difference:
        raise InputError(
            f"segmenter {segmenter.path}: {difference} than the model's; train one for it, from "
            "subjects packed for it (voxtune pack --model MODEL, voxtune train --workload segment --subjects), and give it "
            "with --segmenter"
        )


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
