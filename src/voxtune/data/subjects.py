"""Subjects to learn from and held-out ones: the embedded cohort, folders of a user, or one file that numpy alone reads.

A source gives `source[i] -> (image (C, D, H, W) in [-1, 1], condition (L, D, H, W))`, as in `data/dataset.py`.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from voxtune.config import from_mapping, to_mapping
from voxtune.data.cohort import HELD_OUT, LABELS, cohort_contract
from voxtune.data.contract import DataContract, Label, Shape, encode_mask
from voxtune.errors import InputError
from voxtune.files import one_line, write_atomic

COHORT_HELD_OUT = 24
# The width of the grid of `head_contract`: 128 voxels of 1.5 mm.
HEAD_MM = 192.0
# Images are stored as whole numbers: [-1, 1] becomes 0 .. 4095, finer than their noise.
STEPS = 4095


class Source(Protocol):
    """Subjects to learn from: `source[i] -> (image (C, *size), condition (L, *size) or None)`, float32 arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


@runtime_checkable
class Compact(Protocol):
    """A source that holds its subjects in memory, in fewer bytes than the network takes.

    `unfold(*stored(indices))` are images and conditions of these subjects, on whichever device the tensors are: a GPU makes
    them in microseconds, where threads of the host would take the time that the loop needs to feed it.
    """

    def stored(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def unfold(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]: ...


class SourceRange:
    """Subjects `first`, `first` + 1, ... of a source that gives any subject by its number."""

    def __init__(self, source: Any, first: int, count: int):
        self.source, self.first, self.count, self.contract = source, first, count, source.contract

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.source[self.first + index]


class Packed:
    """Subjects in memory, from a file that `pack` wrote."""

    def __init__(self, contract: DataContract, images_NCDHW: np.ndarray, labels_NDHW: np.ndarray, origin: str = ""):
        self.contract, self.images_NCDHW, self.labels_NDHW, self.origin = contract, images_NCDHW, labels_NDHW, origin

    def __len__(self) -> int:
        return len(self.labels_NDHW)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image_CDHW = self.images_NCDHW[index].astype(np.float32) * (2.0 / STEPS) - 1.0
        return image_CDHW, encode_mask(self.labels_NDHW[index], self.contract)

    def stored(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images and labels of these subjects as they are held: 16 and 8 bits a voxel."""
        # 0 .. 4095 has the same bits with a sign, for which torch has all operations.
        images = torch.from_numpy(self.images_NCDHW[list(indices)].view(np.int16))
        return images, torch.from_numpy(self.labels_NDHW[list(indices)])

    def unfold(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """`stored` to what `[index]` gives, bit for bit."""
        return images.float() * (2.0 / STEPS) - 1.0, encode_classes(masks, self.contract.values, self.contract)

    def part(self, first: int, count: int) -> Packed:
        span = slice(first, first + count)
        return Packed(self.contract, self.images_NCDHW[span], self.labels_NDHW[span], self.origin)


def encode_classes(masks_NDHW: Tensor, values: Iterable[int], contract: DataContract) -> Tensor:
    """The condition of the model (N, L, D, H, W), as `encode_mask` makes it: a channel for each of `values`, in their order."""
    inside = torch.stack([masks_NDHW == value for value in values], dim=1).float()
    return inside * 2 - 1 if contract.mask_range == "signed" else inside


def cohort_sources(contract: DataContract, seed: int, count: int, held_out: int) -> tuple[Source, Source]:
    """Subjects 0 .. count-1 of cohort `seed` to learn from, and `held_out` that nothing learns from."""
    from voxtune.data.dataset import CohortSource

    if count > HELD_OUT:
        raise InputError(f"--cohort {count}: subjects from {HELD_OUT} on are held out; give {HELD_OUT} at most")
    unseen = SourceRange(CohortSource(contract, seed, HELD_OUT + held_out, healthy_fraction=0.0), HELD_OUT, held_out)
    return CohortSource(contract, seed, count), unseen


def cohort_origin(seed: int, count: int, held_out: int) -> str:
    last = HELD_OUT + held_out - 1
    return f"subjects 0 to {count - 1} of the embedded cohort, seed {seed}; held out: {HELD_OUT} to {last}, all with lesions"


def folder_sources(
    images: str | Path, masks: str | Path, contract: DataContract, held_out: int | None = None
) -> tuple[Source, Source]:
    """Pairs of two folders on the contract's grid; the last are held out, a tenth unless told."""
    from voxtune.data.dataset import PairedFolders

    source = PairedFolders(contract, images, masks)
    source.check().raise_or_warn()
    if len(source) < 2:
        raise InputError(f"{images}: one subject; bring more, one in ten is held out to measure")
    kept = len(source) - (max(1, len(source) // 10) if held_out is None else held_out)
    if not 0 < kept < len(source):
        raise InputError(
            f"{images}: {len(source)} subjects, {held_out} of them held out: some must be left on both sides"
        )
    return SourceRange(source, 0, kept), SourceRange(source, kept, len(source) - kept)


def head_contract(size: Shape, labels: tuple[Label, ...] | None) -> DataContract:
    """A grid of `size` that covers a whole head; by default with the labels of the simulated subjects."""
    depth, height, width = (HEAD_MM / n for n in size)
    return DataContract(size=size, spacing=(depth, height, width), orientation="RAS", labels=labels or LABELS)


def open_sources(
    size: tuple[int, ...],
    *,
    contract: DataContract | None = None,
    cohort: int | None = None,
    seed: int | None = None,
    images: str | Path | None = None,
    masks: str | Path | None = None,
    labels: Sequence[Mapping[str, Any]] | None = None,
    held_out: int | None = None,
) -> tuple[Source, Source, str]:
    """(to learn from, held out, what they are in words): of the embedded cohort, or of a user's folders.

    `labels` are those of the folders' masks, as settings have them: name, value and channel of each. `contract` is a model's,
    whose grid and labels are to be met, in place of `size` and `labels`.
    """
    if contract is not None:
        size = contract.size
    if len(size) != 3:
        raise InputError(f"--size {','.join(map(str, size))}: give three sides, depth,height,width")
    side: Shape = (size[0], size[1], size[2])
    if cohort is not None and (images is not None or masks is not None):
        raise InputError("give folders (--images DIR --masks DIR) or the embedded cohort (--cohort 240), not both")
    if (cohort is None and images is None) or (images is None) != (masks is None):
        raise InputError("no data: give folders (--images DIR --masks DIR) or the embedded cohort (--cohort 240)")
    if cohort is not None:
        if labels is not None:
            raise InputError("--labels are those of your own masks: leave them away with --cohort, which has its own")
        unseen, number = COHORT_HELD_OUT if held_out is None else held_out, seed or 0
        found = cohort_sources(contract or cohort_contract(side), number, cohort, unseen)
        return *found, cohort_origin(number, cohort, unseen)
    if seed is not None:
        raise InputError("a seed is the cohort's: leave it away with --images and --masks")
    assert images is not None and masks is not None
    named = None if labels is None else tuple(Label(**label) for label in labels)
    train, last = folder_sources(images, masks, contract or head_contract(side, named), held_out)
    return train, last, f"{len(train)} subjects of the folder `{Path(images).name}`; {len(last)} held out"


def pack(
    train: Any,
    held_out: Any,
    path: str | Path,
    callback: Callable[[int, int], None] | None = None,
    *,
    origin: str = "",
) -> Path:
    """Writes both sources into one .npz, held-out subjects last, for a machine that has no NIfTI reader.

    `origin` says in words what they are, for the card of what is trained on them.
    """
    contract, total = train.contract, len(train) + len(held_out)
    if max(contract.values) > 255:
        raise InputError(f"label {max(contract.values)}: packed masks hold labels up to 255; renumber the labels")
    images, labels = [], []
    for number in range(total):
        image_CDHW, cond_LDHW = train[number] if number < len(train) else held_out[number - len(train)]
        images.append(np.rint((np.clip(image_CDHW, -1.0, 1.0) + 1.0) * (STEPS / 2.0)).astype(np.uint16))
        labels.append(classes_of(cond_LDHW))
        if callback is not None:
            callback(number + 1, total)
    values = np.array((0, *contract.values), dtype=np.int32)
    header = {"contract": to_mapping(contract), "held_out": len(held_out), "origin": origin}
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, images=np.stack(images), labels=values[np.stack(labels)].astype(np.uint8), header=json.dumps(header)
    )
    write_atomic(Path(path), buffer.getvalue())
    return Path(path)


def unpack(path: str | Path) -> tuple[Packed, Packed]:
    """(to learn from, held out) of a file that `pack` wrote."""
    try:
        with np.load(path, allow_pickle=False) as file:
            images, labels, header = file["images"], file["labels"], json.loads(str(file["header"]))
        contract = from_mapping(DataContract, header["contract"], f"{path}: contract")
        held_out = int(header["held_out"])
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a file of packed subjects ({one_line(error)})") from None
    if not 0 < held_out < len(images):
        raise InputError(
            f"{path}: {held_out} of its {len(images)} subjects are held out; pack some to learn from and some not"
        )
    wanted = (len(labels), len(contract.images), *contract.size)
    if images.shape != wanted or labels.shape != (len(images), *contract.size):
        raise InputError(f"{path}: images of shape {images.shape} do not fit its own contract; pack the subjects again")
    if images.dtype != np.uint16 or images.max() > STEPS:
        raise InputError(f"{path}: its images are not whole numbers from 0 to {STEPS}; pack the subjects again")
    if labels.dtype != np.uint8 or not np.isin(np.arange(256), (0, *contract.values))[labels].all():
        raise InputError(f"{path}: a mask holds labels that its own contract does not name; pack the subjects again")
    everything = Packed(contract, images, labels, str(header.get("origin", "")))
    return everything.part(0, len(images) - held_out), everything.part(len(images) - held_out, held_out)


def classes_of(cond_LDHW: np.ndarray) -> np.ndarray:
    """The class of each voxel, uint8 (D, H, W): 0 background, 1 + channel elsewhere; a channel is positive inside."""
    return np.where((cond_LDHW > 0).any(axis=0), cond_LDHW.argmax(axis=0) + 1, 0).astype(np.uint8)
