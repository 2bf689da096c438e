"""CIFAR-10 as it is published, in either of its two forms, as a source of training images.

The Python form: pickles `data_batch_1` .. `data_batch_5` of a dictionary with `data` (N, 3072) uint8 and `labels`. The binary
form: `data_batch_1.bin` .. with records of one label and 3072 pixels. An image is 32 x 32: all of red, then green, then
blue, each row by row from the top. `test_batch` is the test set and never trained on.
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

CHANNELS, SIDE, CLASSES = 3, 32, 10
PIXELS = CHANNELS * SIDE * SIDE
PUBLISHED_BATCHES = 5
BATCH = re.compile(r"data_batch_([1-9]\d{0,3})(\.bin)?")
# What the archives unpack to, which lets a user name the folder above.
FOLDERS = ("cifar-10-batches-py", "cifar-10-batches-bin")
# A published file has 31 MB.
MAX_FILE_BYTES = 2**28
EXPECTED = (
    "data_batch_1 to data_batch_5 (the Python version) or data_batch_1.bin to data_batch_5.bin (the binary version)"
)


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Images as (N, 3, 32, 32) uint8 and the class of each, 0 to 9."""

    images_NCHW: np.ndarray
    labels_N: np.ndarray


class Cifar10:
    """The training images below a folder, in [-1, 1]; `mirror` adds each one's mirror image after them.

    Everything is read and checked when made: 150 MB for the whole set. `labels_N` is kept for whoever wants it; the network
    is unconditional and never sees it.
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
            raise IndexError(f"image {index} of {len(self)}")
        mirrored, place = divmod(index, len(self.images_NCHW))
        image_CHW = to_signed(resize(self.images_NCHW[place], self.size))
        return (image_CHW[:, :, ::-1] if mirrored else image_CHW), None


def find_batches(folder: Path) -> dict[int, Path]:
    """The files of training images by their number, in the one form that the folder, or one inside it, holds."""
    with reporting_os_errors(folder):
        if folder.is_file():
            raise InputError(
                f"{folder}: is a file; unpack the archive, if it is one, and give the folder of its batches"
            )
        places = [place for place in (folder, *(folder / name for name in FOLDERS)) if place.is_dir()]
        found = [batches for place in places for batches in _forms(place) if batches]
    if not places:
        raise InputError(f"{folder}: no such folder; give the one with the CIFAR-10 batches")
    if not found:
        raise InputError(f"{folder}: holds no CIFAR-10 batches; expected {EXPECTED}")
    if len(found) > 1:
        both = " and ".join(str(next(iter(batches.values()))) for batches in found)
        raise InputError(f"{folder}: holds CIFAR-10 more than once ({both}); keep one, or name its folder")
    return found[0]


def _forms(folder: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    """The batches of the Python form and of the binary form, by number."""
    forms: tuple[dict[int, Path], dict[int, Path]] = ({}, {})
    for path in sorted(folder.iterdir()):
        if (match := BATCH.fullmatch(path.name)) and path.is_file():
            forms[match[2] is not None][int(match[1])] = path
    return {n: forms[0][n] for n in sorted(forms[0])}, {n: forms[1][n] for n in sorted(forms[1])}


def read_batch(path: Path) -> Batches:
    """One file in either form, told by its name."""
    with reporting_os_errors(path), path.open("rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than any CIFAR-10 batch; is this the right file?")
    try:
        images, labels = _binary(data) if path.suffix == ".bin" else _pickled(data)
    except InputError as error:
        raise InputError(f"{path}: {error}; download it again, or remove it to train without it") from None
    return Batches(images_NCHW=images.reshape(-1, CHANNELS, SIDE, SIDE), labels_N=labels)


def _binary(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    record = 1 + PIXELS
    if not data or len(data) % record:
        raise InputError(
            f"{len(data)} bytes are no whole number of records of 1 + {PIXELS}: truncated, or not CIFAR-10"
        )
    records = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    return records[:, 1:], _classes(records[:, 0])


def _pickled(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    content = unpickle(data)
    if not isinstance(content, dict):
        raise InputError(f"expected a dictionary with data and labels, found {type(content).__name__}")
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
        raise InputError("'labels' is no list of whole numbers")
    if len(labels) != len(images):
        raise InputError(f"{len(labels)} labels for {len(images)} images")
    return images, _classes(np.array(labels))


def _classes(labels: np.ndarray) -> np.ndarray:
    if labels.min() < 0 or labels.max() >= CLASSES:
        wrong = labels[(labels < 0) | (labels >= CLASSES)][0]
        raise InputError(f"label {wrong} is none of 0 to {CLASSES - 1}: damaged, or not CIFAR-10")
    return labels.astype(np.uint8)
