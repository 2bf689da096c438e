"""Training and held-out subjects: the simulated cohort, a user's folders, or a packed file that requires only NumPy.

`source[i]` is (image (C, D, H, W) in [-1, 1], condition (L, D, H, W)), as in `data/dataset.py`.
"""

from __future__ import annotations

import io
import json
import logging
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from voxtune.config import from_mapping, to_mapping
from voxtune.data.cohort import HELD_OUT, LABELS, cohort_contract
from voxtune.data.contract import DataContract, Label, Shape, classes_of, encode_channels, encode_mask
from voxtune.data.labels import LabelMap
from voxtune.data.modality import T1W
from voxtune.data.pairing import folder_images
from voxtune.errors import InputError
from voxtune.files import write_file
from voxtune.reading import MAX_JSON_BYTES, check_memory, opening_zip, parse_json, read_into

log = logging.getLogger("voxtune")

# By version: more, so that there are some lesions of each size.
COHORT_HELD_OUT = {1: 24, 2: 96}
# The width of the grid of `head_contract`: 128 voxels of 1.5 mm.
HEAD_MM = 192.0
# Images are stored as integers: [-1, 1] becomes 0 .. 4095, finer than their noise.
STEPS = 4095


class Source(Protocol):
    """Subjects: `source[i]` is (image (C, *size), condition (L, *size) or None) as float32 arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


class VolumeSource(Source, Protocol):
    """Subjects on the grid of a contract."""

    contract: DataContract


@runtime_checkable
class Compact(Protocol):
    """A source that holds its subjects in memory in a compact form.

    `unfold(*stored(indices))` are the images and conditions of these subjects, on the device of the tensors: a GPU unfolds
    them in microseconds, and the host stays free to launch the training step.
    """

    def stored(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def unfold(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]: ...


class SourceRange:
    """Subjects first .. first + count - 1 of a source."""

    def __init__(self, source: Any, first: int, count: int):
        self.source, self.first, self.count, self.contract = source, first, count, source.contract

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.source[self.first + index]


class Packed:
    """Subjects in memory, from a file written by `pack`."""

    def __init__(self, contract: DataContract, images_NCDHW: np.ndarray, labels_NDHW: np.ndarray, origin: str = ""):
        self.contract, self.images_NCDHW, self.labels_NDHW, self.origin = contract, images_NCDHW, labels_NDHW, origin

    def __len__(self) -> int:
        return len(self.labels_NDHW)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image_CDHW = self.images_NCDHW[index].astype(np.float32) * (2.0 / STEPS) - 1.0
        return image_CDHW, encode_mask(self.labels_NDHW[index], self.contract)

    def stored(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images and labels of these subjects as stored, with 16 and 8 bits per voxel."""
        # torch supports int16 better than uint16; the bits of 0 .. 4095 are the same.
        images = torch.from_numpy(self.images_NCDHW[list(indices)].view(np.int16))
        return images, torch.from_numpy(self.labels_NDHW[list(indices)])

    def unfold(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Converts the result of `stored` to images and conditions, bit-identical to `[index]`."""
        return images.float() * (2.0 / STEPS) - 1.0, encode_channels(masks, self.contract.channel_values, self.contract)

    def part(self, first: int, count: int) -> Packed:
        span = slice(first, first + count)
        return Packed(self.contract, self.images_NCDHW[span], self.labels_NDHW[span], self.origin)


def cohort_sources(
    contract: DataContract,
    seed: int,
    count: int,
    held_out: int,
    *,
    version: int = 1,
    cache_bytes: int | None = None,
    workers: int = 1,
    warn: Callable[[str], None] = log.warning,
) -> tuple[VolumeSource, VolumeSource]:
    """Simulated subjects 0 .. count-1 of cohort `seed` for training, and `held_out` others.

    With several `workers`, that many processes simulate them in advance, as far as they fit into `cache_bytes`.
    """
    from voxtune.data.dataset import CACHE_BYTES, CohortSource

    if count > HELD_OUT:
        raise InputError(
            f"--cohort {count}: must be {HELD_OUT} or less, because subjects from {HELD_OUT} on are held out"
        )
    limit = CACHE_BYTES if cache_bytes is None else cache_bytes
    share = held_out / (count + held_out)
    others = CohortSource(
        contract,
        seed,
        HELD_OUT + held_out,
        healthy_fraction=0.0,
        version=version,
        cache_bytes=CACHE_BYTES if cache_bytes is None else int(limit * share),
    )
    train = CohortSource(contract, seed, count, version=version, cache_bytes=limit)
    if workers > 1:
        train.warm(workers, warn)
        others.warm(workers, warn, first=HELD_OUT)
    return train, SourceRange(others, HELD_OUT, held_out)


def cohort_origin(seed: int, count: int, held_out: int, version: int = 1) -> str:
    last = HELD_OUT + held_out - 1
    cohort = "the cohort" if version == 1 else f"version {version} of the cohort"
    return f"simulated subjects 0 to {count - 1} of {cohort}, seed {seed}; held out: {HELD_OUT} to {last}, all with lesions"


def folder_sources(
    images: str | Path,
    masks: str | Path,
    contract: DataContract,
    held_out: int | None = None,
    labels: LabelMap | None = None,
    *,
    new: bool = False,
    warn: Callable[[str], None] = log.warning,
) -> tuple[VolumeSource, VolumeSource]:
    """A user's images and masks on the contract's grid, of a model or `new`; the last are held out, by default one in ten."""
    from voxtune.data.dataset import PairedFolders
    from voxtune.data.preflight import MODEL, NEW_HEAD

    source = PairedFolders(contract, images, masks, labels=labels, consumer=NEW_HEAD if new else MODEL)
    source.check().raise_or_warn(warn)
    if len(source) < 2:
        raise InputError(f"{images}: only one subject; at least two are required, since one in ten is held out")
    n_train = len(source) - (max(1, len(source) // 10) if held_out is None else held_out)
    if not 0 < n_train < len(source):
        raise InputError(
            f"--held-out {held_out}: must be from 1 to {len(source) - 1}; {images} has {len(source)} subjects"
        )
    return SourceRange(source, 0, n_train), SourceRange(source, n_train, len(source) - n_train)


def head_contract(
    size: Shape, labels: tuple[Label, ...] | None, images: tuple[str, ...] = (T1W.name,), *, overlapping: bool = False
) -> DataContract:
    """A grid of `size` that covers a whole head; by default with the labels of the simulated subjects."""
    spacing = (HEAD_MM / size[0], HEAD_MM / size[1], HEAD_MM / size[2])
    return DataContract(
        size=size, spacing=spacing, orientation="RAS", labels=labels or LABELS, images=images, overlapping=overlapping
    )


def open_sources(
    size: tuple[int, ...],
    *,
    contract: DataContract | None = None,
    cohort: int | None = None,
    seed: int | None = None,
    version: int | None = None,
    workers: int = 1,
    cache_bytes: int | None = None,
    images: str | Path | None = None,
    masks: str | Path | None = None,
    labels: LabelMap | None = None,
    overlapping: bool = False,
    modalities: tuple[str, ...] | None = None,
    held_out: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    warn: Callable[[str], None] = log.warning,
) -> tuple[VolumeSource, VolumeSource, str]:
    """(training subjects, held-out subjects, description) of the simulated cohort or of a user's folders.

    `labels` are those of the masks in the folders, `overlapping` allows one value in several of them; `modalities` are the
    image kinds, by default the one of the folder, which is passed to `say`. `contract` is that of a model, instead of
    `size`, `overlapping` and `modalities`; `labels` then map the masks to its labels. `version` is that of the cohort, which
    `workers` processes simulate in advance, as far as it fits into `cache_bytes`.
    """
    if contract is not None:
        size = contract.size
    if len(size) != 3:
        raise InputError(f"--size {','.join(map(str, size))}: give three dimensions, depth,height,width")
    shape: Shape = (size[0], size[1], size[2])
    if cohort is not None and (images is not None or masks is not None):
        raise InputError("--cohort cannot be combined with --images or --masks")
    if (cohort is None and images is None) or (images is None) != (masks is None):
        raise InputError("no data: pass --images DIR --masks DIR, or --cohort N for simulated subjects")
    if cohort is not None:
        _check_cohort_options(labels, overlapping, modalities, version)
        if contract is None:
            contract = replace(cohort_contract(shape), images=modalities or (T1W.name,))
        seed, version = seed or 0, version or 1
        n_held_out = COHORT_HELD_OUT.get(version, 24) if held_out is None else held_out
        if workers > 1:
            say(f"simulating {cohort + n_held_out} subjects with {workers} processes")
        options: dict[str, Any] = {"version": version, "cache_bytes": cache_bytes, "workers": workers, "warn": warn}
        sources = cohort_sources(contract, seed, cohort, n_held_out, **options)
        return *sources, cohort_origin(seed, cohort, n_held_out, version)
    if version is not None:
        raise InputError("--cohort-version requires --cohort; it cannot be combined with --images and --masks")
    if seed is not None:
        raise InputError("--seed requires --cohort; it cannot be combined with --images and --masks")
    assert images is not None and masks is not None
    new = contract is None
    if contract is None:
        if modalities is None:
            kind, sentence = folder_images(images, masks, T1W.name)
            say(sentence)
            modalities = (kind,)
        named = None if labels is None else labels.labels(overlapping=overlapping)
        contract = head_contract(shape, named, modalities, overlapping=overlapping)
    train, rest = folder_sources(images, masks, contract, held_out, labels, new=new, warn=warn)
    return train, rest, f"{len(train)} subjects of the folder `{Path(images).name}`; {len(rest)} held out"


def _check_cohort_options(
    labels: LabelMap | None, overlapping: bool, modalities: tuple[str, ...] | None, version: int | None
) -> None:
    if labels is not None:
        raise InputError("--labels cannot be combined with --cohort, which has its own labels")
    if overlapping:
        raise InputError("--overlapping-labels cannot be combined with --cohort")
    if modalities is not None and (version or 1) == 1:
        raise InputError(
            "--image cannot be combined with --cohort, which has T1w images (--cohort-version 2 has others)"
        )


def pack(
    train: Any,
    held_out: Any,
    path: str | Path,
    callback: Callable[[int, int], None] | None = None,
    *,
    origin: str = "",
    overwrite: bool = False,
) -> Path:
    """Writes both sources into one .npz file, held-out subjects last, for machines without a NIfTI reader.

    `origin` describes the subjects; it becomes part of the model card.
    """
    contract, total = train.contract, len(train) + len(held_out)
    if max(contract.all_values) > 255:
        raise InputError(
            f"label {max(contract.all_values)}: packed masks support labels up to 255; use masks with smaller values"
        )
    images, labels = [], []
    for number in range(total):
        image_CDHW, cond_LDHW = train[number] if number < len(train) else held_out[number - len(train)]
        images.append(np.rint((np.clip(image_CDHW, -1.0, 1.0) + 1.0) * (STEPS / 2.0)).astype(np.uint16))
        labels.append(classes_of(torch.from_numpy(cond_LDHW)[None], contract)[0].numpy())
        if callback is not None:
            callback(number + 1, total)
    values = np.array((0, *contract.region_values), dtype=np.int32)
    header = {"contract": to_mapping(contract), "held_out": len(held_out), "origin": origin}
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer, images=np.stack(images), labels=values[np.stack(labels)].astype(np.uint8), header=json.dumps(header)
    )
    return write_file(Path(path), buffer.getvalue(), overwrite=overwrite)


MEMBERS = ("images.npy", "labels.npy", "header.npy")


def unpack(path: str | Path) -> tuple[Packed, Packed]:
    """(training subjects, held-out subjects) of a file written by `pack`."""
    with _opening_packed(Path(path)) as (archive, header):
        contract = from_mapping(DataContract, header["contract"], f"{path}: contract")
        images, labels = (_read_member(archive, name) for name in MEMBERS[:2])
    held_out = header.get("held_out")
    if not isinstance(held_out, int) or not 0 < held_out < len(images):
        raise InputError(
            f"{path}: {held_out} of its {len(images)} subjects are held out; pack both training and held-out subjects"
        )
    expected = (len(labels), len(contract.images), *contract.size)
    if images.shape != expected or labels.shape != (len(images), *contract.size):
        raise InputError(
            f"{path}: shape {images.shape} of the images does not match its contract; pack the subjects again"
        )
    if images.dtype != np.uint16 or images.max() > STEPS:
        raise InputError(f"{path}: images must be integers from 0 to {STEPS}; pack the subjects again")
    if labels.dtype != np.uint8 or not np.isin(np.arange(256), (0, *contract.all_values))[labels].all():
        raise InputError(f"{path}: a mask has labels that are not in its contract; pack the subjects again")
    everything = Packed(contract, images, labels, str(header.get("origin", "")))
    return everything.part(0, len(images) - held_out), everything.part(len(images) - held_out, held_out)


def packed_contract(path: str | Path) -> DataContract:
    """The data contract of a packed file; its subjects are not read."""
    with _opening_packed(Path(path)) as (_, header):
        return from_mapping(DataContract, header["contract"], f"{path}: contract")


@contextmanager
def _opening_packed(path: Path) -> Iterator[tuple[zipfile.ZipFile, dict[str, Any]]]:
    """The archive and its header; the declared sizes of the arrays were compared with the memory limit."""
    with opening_zip(path, "file of packed subjects", fix="pack the subjects again") as archive:
        records = archive.infolist()
        if sorted(record.filename for record in records) != sorted(MEMBERS):
            raise InputError(f"{path}: not a file of packed subjects; expected one from voxtune pack")
        check_memory(path, sum(record.file_size for record in records), path.stat().st_size)
        header = parse_json(str(_read_member(archive, MEMBERS[2])), path)
        if not isinstance(header, dict) or "contract" not in header:
            raise InputError(f"{path}: not a file of packed subjects (no contract); expected one from voxtune pack")
        yield archive, header


def _read_member(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """An array of numbers or text, whose shape agrees with the size of its record."""
    with archive.open(name) as stream:
        version = np.lib.format.read_magic(stream)
        if version != (1, 0):
            raise ValueError(f"{name} in version {version} of NumPy's format")
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
        needed = math.prod(shape) * dtype.itemsize
        if (
            dtype.kind not in "iufU"
            or min(shape, default=0) < 0
            or stream.tell() + needed != archive.getinfo(name).file_size
        ):
            raise ValueError(f"{name} of {shape} numbers of type {dtype}")
        if dtype.kind == "U" and (shape or needed > MAX_JSON_BYTES):
            raise ValueError(f"a text of {needed} bytes")
        raw = np.empty(needed, np.uint8)
        read_into(stream, raw.data)
        return raw.view(dtype).reshape(shape, order="F" if fortran else "C")
