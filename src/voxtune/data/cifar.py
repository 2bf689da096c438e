"""CIFAR-10 in its published formats, as a source of training images.

Python version: pickles `data_batch_1` .. `data_batch_5` of a dictionary with `data` (N, 3072) uint8 and `labels`. Binary
version: `data_batch_1.bin` .. with records of one label byte and 3072 pixels. Images are (3, 32, 32) in C order.
`test_batch` is not read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from voxtune.data.pixels import resize, to_signed
from voxtune.data.unpickle import stored_array, stored_text, unpickle
from voxtune.errors import InputError
from voxtune.files import reporting_os_errors
from voxtune.reading import read_file, reading

CHANNELS, SIDE, CLASSES = 3, 32, 10
PIXELS = CHANNELS * SIDE * SIDE
PUBLISHED_BATCHES = 5
BATCH = re.compile(r"data_batch_([1-9]\d{0,3})(\.bin)?")
# Folders in the archives, so that the user can also give the parent folder.
FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin")
# The published files have 31 MB.
MAX_FILE_BYTES = 2**28
EXPECTED = (
    "data_batch_1 to data_batch_5 (the Python version) or data_batch_1.bin to data_batch_5.bin (the binary version)"
)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Images (N, 3, 32, 32) as uint8, and their classes, 0 to 9."""

    images_NCHW: np.ndarray
    labels_N: np.ndarray


class Cifar10:
    """The training images in a folder, in [-1, 1]; `mirror` appends the mirror image of each.

    All files are read and checked on construction: 150 MB for the complete set. `labels_N` is not used in training; the
    network is unconditional.
    """

    def __init__(self, folder: str | Path, *, size: tuple[int, int] = (SIDE, SIDE), mirror: bool = True) -> None:
        files = find_batches(Path(folder))
        batches = [read_batch(path) for path in files.values()]
        self.files = tuple(files.values())
        self.missing = tuple(n for n in range(1, PUBLISHED_BATCHES + 1) if n not in files)
        self.images_NCHW = np.concatenate([batch.images_NCHW for batch in batches])
        self.labels_N = np.concatenate([batch.labels_N for batch in batches])
        self.size, self.mirror = size, mirror

    def __len__(self) -> int:
        return len(self.images_NCHW) * (2 if self.mirror else 1)

    def __getitem__(self, index: int) -> tuple[np.ndarray, None]:
        if not 0 <= index < len(self):
            raise IndexError(f"image {index} is out of range for {len(self)} images")
        mirrored, number = divmod(index, len(self.images_NCHW))
        image_CHW = to_signed(resize(self.images_NCHW[number], self.size))
        return (image_CHW[:, :, ::-1] if mirrored else image_CHW), None


def find_batches(folder: Path) -> dict[int, Path]:
    """The training batches by number, in the folder or in an unpacked archive inside it."""
    with reporting_os_errors(folder):
        if folder.is_file():
            raise InputError(f"{folder}: is a file; unpack the archive and give its folder")
        folders = [path for path in (folder, *(folder / name for name in FOLDERS)) if path.is_dir()]
        versions = [batches for path in folders for batches in _versions(path) if batches]
    if not folders:
        raise InputError(f"{folder}: no such folder; give the folder of the CIFAR-10 batches")
    if not versions:
        raise InputError(f"{folder}: contains no CIFAR-10 batches; expected {EXPECTED}")
    if len(versions) > 1:
        both = " and ".join(str(next(iter(batches.values()))) for batches in versions)
        raise InputError(f"{folder}: contains CIFAR-10 more than once ({both}); give the folder of one version")
    return versions[0]


def _versions(folder: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """The batches of the Python version and of the binary version, by number."""
    versions: tuple[dict[int, Path], dict[int, Path]] = ({}, {})
    for path in sorted(folder.iterdir()):
        if (match := BATCH.fullmatch(path.name)) and path.is_file():
            versions[match[2] is not None][int(match[1])] = path
    return {n: versions[0][n] for n in sorted(versions[0])}, {n: versions[1][n] for n in sorted(versions[1])}


def read_batch(path: Path) -> Batches:
    """Reads one file of either version, depending on its name."""
    with reading(path, "CIFAR-10 batch", fix="download it again, or remove it to train without it"):
        data = read_file(path, limit=MAX_FILE_BYTES, what="CIFAR-10 batch")
        images, labels = _binary(data) if path.suffix == ".bin" else _pickled(data)
        return Batches(images_NCHW=images.reshape(-1, CHANNELS, SIDE, SIDE), labels_N=labels)


def _binary(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    record = 1 + PIXELS
    if not data or len(data) % record:
        raise InputError(
            f"{len(data)} bytes is not a multiple of the record size 1 + {PIXELS}: truncated, or not CIFAR-10"
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    return records[:, 1:], _classes(records[:, 0])


def _pickled(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    content = unpickle(data)
    if not isinstance(content, dict):
        raise InputError(f"expected a dictionary with data and labels, got {type(content).__name__}")
    named = {stored_text(key): value for key, value in content.items()}
    for name in ("data", "labels"):
        if name not in named:
            other = "; this is CIFAR-100, give CIFAR-10" if "fine_labels" in named else ""
            raise InputError(f"the dictionary has no {name!r}{other}")
    images = stored_array(named["data"], "'data'")
    if images.ndim != 2 or images.shape[0] < 1 or images.shape[1] != PIXELS:
        raise InputError(f"'data' has shape {images.shape}, expected (images, {PIXELS})")
    labels = named["labels"]
    if not isinstance(labels, list) or not all(type(label) is int for label in labels):
        raise InputError("'labels' is not a list of integers")
    if len(labels) != len(images):
        raise InputError(f"{len(labels)} labels for {len(images)} images")
    return images, _classes(np.array(labels))


def _classes(labels: np.ndarray) -> np.ndarray:
    if labels.min() < 0 or labels.max() >= CLASSES:
        wrong = labels[(labels < 0) | (labels >= CLASSES)][0]
        raise InputError(f"label {wrong} is not from 0 to {CLASSES - 1}: damaged, or not CIFAR-10")
    return labels.astype(np.uint8)
