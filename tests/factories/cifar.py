"""CIFAR-10 files as they are published, written by hand: Python 2's pickles, and the binary records."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

PIXELS = 3 * 32 * 32


def pictures(count: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """Discs (odd classes) and squares (even ones) on a plain ground: (N, 3072) uint8 and N labels."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:32, :32]
    images, labels = np.empty((count, 3, 32, 32), np.uint8), rng.integers(0, 10, count)
    for i, label in enumerate(labels):
        ground, figure = rng.integers(0, 100, 3), rng.integers(150, 256, 3)
        cy, cx, radius = rng.uniform([11, 11, 5], [21, 21, 10])
        dy, dx = np.abs(y - cy), np.abs(x - cx)
        inside = (np.hypot(dy, dx) if label % 2 else np.maximum(dy, dx)) < radius
        images[i] = np.where(inside, figure[:, None, None], ground[:, None, None])
    return images.reshape(count, PIXELS), labels.tolist()


def _text(text: bytes) -> bytes:
    """SHORT_BINSTRING: what Python 2 writes for a str."""
    return b"U" + struct.pack("<B", len(text)) + text


def _number(value: int) -> bytes:
    return b"K" + struct.pack("<B", value) if value < 256 else b"J" + struct.pack("<i", value)


def published_pickle(data: np.ndarray, labels: list[int], *, code: bytes = b"u1", name: bytes = b"labels") -> bytes:
    """What Python 2's cPickle wrote at protocol 2: str for text and pixels, numpy.core for the array."""
    rows, columns = data.shape
    raw = data.tobytes()
    out = b"\x80\x02}q\x01(" + _text(b"batch_label") + b"q\x02" + _text(b"training batch 1 of 5") + b"q\x03"
    out += _text(name) + b"q\x04]q\x05(" + b"".join(map(_number, labels)) + b"e"
    out += _text(b"data") + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85"
    out += _text(b"b") + b"\x87Rq\x09(K\x01" + _number(rows) + _number(columns) + b"\x86"
    out += b"cnumpy\ndtype\nq\x0a" + _text(code) + b"K\x00K\x01\x87Rq\x0b(K\x03" + _text(b"|")
    out += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"
    names = b"".join(_text(b"image_s_%06d.png" % i) + b"r" + struct.pack("<i", 1000 + i) for i in range(len(labels)))
    return out + _text(b"filenames") + b"q\x0c]q\x0d(" + names + b"eu."


def published_records(data: np.ndarray, labels: list[int]) -> bytes:
    return np.concatenate([np.array(labels, np.uint8)[:, None], data], axis=1).tobytes()


def write_cifar(folder: Path, *, batches: int = 5, count: int = 4, binary: bool = False) -> Path:
    """A folder as the archive unpacks to, with the test batch and what else is in it."""
    folder.mkdir(parents=True)
    make, ending = (published_records, ".bin") if binary else (published_pickle, "")
    for number in range(1, batches + 1):
        (folder / f"data_batch_{number}{ending}").write_bytes(make(*pictures(count, seed=number)))
    (folder / f"test_batch{ending}").write_bytes(make(*pictures(count, seed=99)))
    (folder / ("batches.meta.txt" if binary else "batches.meta")).write_bytes(b"airplane\n")
    (folder / "readme.html").write_text("<html></html>")
    return folder
