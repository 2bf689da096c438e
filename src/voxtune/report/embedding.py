"""Volumes as they go into a page: NIfTI of 16 bits or of label numbers, compressed, each once, within a limit.

Headers are written afresh: what a scanner or a person wrote into the old ones may name a patient.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.cases import Legend
from voxtune.data.nifti import Volume, read_labels, read_volume, volume_bytes
from voxtune.data.orientation import axis_codes
from voxtune.errors import InputError
from voxtune.report.picture import label_colour

# The page's label numbers are bytes.
MOST_LABELS = 255


@dataclass(kw_only=True)
class Embedding:
    """The volumes of one page by key. `limit` is in bytes of the page."""

    limit: int
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    size: int = 0
    _texts: dict[str, str] = field(default_factory=dict)
    _keys: dict[tuple[str, Path], str] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=lambda: {0: 0})

    def image(self, path: Path) -> str:
        """The key of an image; intensities keep 16 bits of their range, whole numbers of that size stay exact."""
        key = self._keys.get(("image", path))
        if key is None:
            volume = read_volume(path, allow_nonfinite=True)
            array, told = finite(volume)
            self.warnings += told
            # Whole numbers stay themselves, so that the value under the crosshair is the file's.
            whole = bool(np.array_equal(array, np.rint(array))) and float(np.abs(array).max()) < 2**15
            data = volume_bytes(array.astype(np.int16) if whole else array, volume, np.int16)
            key = self._keep("image", path, volume, data)
        return key

    def mask(self, path: Path) -> str:
        """The key of a label map, renumbered 1, 2, ... as labels are met; `labels` says which is which."""
        key = self._keys.get(("mask", path))
        if key is None:
            volume = read_labels(path)
            values, inverse = np.unique(volume.array, return_inverse=True)
            for value in values:
                self._numbers.setdefault(int(value), len(self._numbers))
            if len(self._numbers) - 1 > MOST_LABELS:
                raise InputError(f"{path}: more than {MOST_LABELS} labels over all masks; is it an image, not a mask?")
            numbers = np.array([self._numbers[int(v)] for v in values], dtype=np.uint8)
            data = volume_bytes(numbers[inverse].reshape(volume.shape), volume, np.uint8)
            key = self._keep("mask", path, volume, data)
            self.facts[key]["focus"] = _focus(volume)
        return key

    def labels(self, legend: Legend) -> list[dict[str, Any]]:
        """Every label that occurs, in order of its value, with the number that it has in the page."""
        rows = []
        for value, number in sorted(self._numbers.items()):
            if number:
                named = legend.get(value)
                colour = named.colour if named is not None and named.colour else label_colour(value)
                name = named.name if named is not None else f"label {value}"
                rows.append({"number": number, "value": value, "name": name, "colour": colour})
        return rows

    def elements(self) -> Iterator[str]:
        """Blocks of data, not of script: base64 cannot close its element, and is decoded when it is looked at."""
        for key, text in self._texts.items():
            yield f'<script type="application/octet-stream" id="{key}">{text}</script>'

    def _keep(self, kind: str, path: Path, volume: Volume, data: bytes) -> str:
        text = base64.b64encode(data).decode("ascii")
        self.size += len(text)
        if self.size > self.limit:
            raise TooLargeError(path)
        key = self._keys[kind, path] = f"v{len(self._keys)}"
        self._texts[key] = text
        self.facts[key] = {"name": path.name, "grid": _grid(volume)}
        return key


class TooLargeError(Exception):
    """The page would pass its limit with this file."""


def finite(volume: Volume) -> tuple[np.ndarray, list[str]]:
    """The voxels with the darkest for those that are no number, and the warning that says so."""
    good = np.isfinite(volume.array)
    bad = good.size - int(good.sum())
    if not bad:
        return volume.array, []
    low = volume.array[good].min() if good.any() else 0.0
    told = f"{volume.name}: {bad} of {good.size} voxels are NaN or infinite, shown as the darkest"
    return np.where(good, volume.array, low), [told]


def _focus(mask: Volume) -> list[float] | None:
    """Where to look first, in mm: the middle of the highest label, the lesion where there is one."""
    top = mask.array.max()
    if top < 1:
        return None
    # A voxel's own centre, as the arrow keys reach it.
    middle = np.array([int(np.median(axis)) for axis in np.nonzero(mask.array == top)])
    return [round(float(v), 3) for v in mask.affine[:3, :3] @ middle + mask.affine[:3, 3]]


def _grid(volume: Volume) -> str:
    sides = " × ".join(str(n) for n in volume.shape)
    return f"{sides} voxels, {' × '.join(f'{s:.4g}' for s in volume.spacing)} mm, {axis_codes(volume.affine)}"
