"""Volumes embedded in a page: compressed NIfTI with 16-bit intensities or label numbers, each volume once.

Headers are written anew, since the original headers may contain the patient's name.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.cases import FromImage
from voxtune.data.legend import LabelName, Legend, centre_of, first_labels
from voxtune.data.nifti import Volume, read_labels, read_volume, volume_bytes
from voxtune.data.orientation import axis_codes
from voxtune.data.pixels import label_colour
from voxtune.errors import InputError

# Label numbers in the page are bytes.
MAX_LABELS = 255


@dataclass(kw_only=True)
class Embedding:
    """The volumes of one page by key; `limit` is the maximum size in bytes."""

    limit: int
    legend: Legend = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    size: int = 0
    _texts: dict[str, str] = field(default_factory=dict)
    _keys: dict[tuple[str, Path], str] = field(default_factory=dict)
    _numbers: dict[int, int] = field(default_factory=lambda: {0: 0})

    def image(self, path: Path) -> str:
        """Embeds an image and returns its key. Intensities are stored with 16 bits; integers of that size stay exact."""
        key = self._keys.get(("image", path))
        if key is None:
            volume = read_volume(path, allow_nonfinite=True)
            array, messages = finite(volume)
            self.warnings += messages
            # Integers are stored unscaled, so that the page shows the values of the file.
            integer = bool(np.array_equal(array, np.rint(array))) and float(np.abs(array).max()) < 2**15
            data = volume_bytes(array.astype(np.int16) if integer else array, volume, np.int16)
            key = self._add("image", path, volume, data)
        return key

    def mask(self, path: Path, from_image: FromImage | None = None) -> str:
        """Embeds a label map and returns its key. Labels are renumbered 1, 2, ... in order of occurrence; see `labels`."""
        kind = "mask" if from_image is None else f"mask {from_image}"
        key = self._keys.get((kind, path))
        if key is None:
            volume, note = read_labels(path), ""
            if from_image is not None:
                volume, note = from_image.fill(volume, self.legend)
            values, inverse = np.unique(volume.array, return_inverse=True)
            for value in values:
                self._numbers.setdefault(int(value), len(self._numbers))
            if len(self._numbers) - 1 > MAX_LABELS:
                raise InputError(f"{path}: more than {MAX_LABELS} labels over all masks; give a mask, not an image")
            numbers = np.array([self._numbers[int(v)] for v in values], dtype=np.uint8)
            data = volume_bytes(numbers[inverse].reshape(volume.shape), volume, np.uint8)
            key = self._add(kind, path, volume, data)
            self.facts[key]["note"] = note
            first = first_labels(volume.array, self.legend)
            self.facts[key]["focus"] = _focus(volume, first)
            # An organ would hide what is inside it.
            self.facts[key]["solid"] = [self._numbers[v] for v in first if self._label(v).kind != "organ"]
        return key

    def labels(self) -> list[dict[str, Any]]:
        """Every label that occurs, in order of value, with its number in the page."""
        rows = []
        for value, number in sorted(self._numbers.items()):
            if number:
                label = self._label(value)
                colour = label.colour or label_colour(value)
                row = {"number": number, "value": value, "name": label.name, "colour": colour, "kind": label.kind}
                rows.append(row)
        return rows

    def unnamed(self, source: str) -> list[str]:
        """A warning if masks have values that the legend, given by the user as `source`, does not name."""
        values = sorted(set(self._numbers) - set(self.legend) - {0})
        if not values or not self.legend:
            return []
        shown = ", ".join(map(str, values[:8])) + (f" and {len(values) - 8} more" if len(values) > 8 else "")
        return [f"--labels {source}: no name for {'value' if len(values) == 1 else 'values'} {shown} of the masks"]

    def _label(self, value: int) -> LabelName:
        return self.legend.get(value, LabelName(name=f"label {value}"))

    def elements(self) -> Iterator[str]:
        """Data blocks: base64 cannot close its element, and is decoded only when the case is selected."""
        for key, text in self._texts.items():
            yield f'<script type="application/octet-stream" id="{key}">{text}</script>'

    def _add(self, kind: str, path: Path, volume: Volume, data: bytes) -> str:
        text = base64.b64encode(data).decode("ascii")
        self.size += len(text)
        if self.size > self.limit:
            raise TooLargeError(path)
        key = self._keys[kind, path] = f"v{len(self._keys)}"
        self._texts[key] = text
        self.facts[key] = {"name": path.name, "grid": _grid(volume)}
        return key


class TooLargeError(Exception):
    """The page would exceed its size limit with this file."""


def finite(volume: Volume) -> tuple[np.ndarray, list[str]]:
    """The voxels with NaN and infinity replaced by the minimum, and a warning if there were any."""
    good = np.isfinite(volume.array)
    bad = good.size - int(good.sum())
    if not bad:
        return volume.array, []
    low = volume.array[good].min() if good.any() else 0.0
    message = f"{volume.name}: {bad} of {good.size} voxels {'is' if bad == 1 else 'are'} NaN or infinite; shown as the minimum"
    return np.where(good, volume.array, low), [message]


def _focus(mask: Volume, values: tuple[int, ...]) -> list[float] | None:
    """The initial crosshair position in mm, the centre of a voxel with one of these values; None if the mask is empty."""
    # The centre of a voxel, which the arrow keys can reach again.
    voxel = centre_of(mask.array, values)
    if voxel is None:
        return None
    return [round(float(v), 3) for v in mask.affine[:3, :3] @ np.array(voxel) + mask.affine[:3, 3]]


def _grid(volume: Volume) -> str:
    shape = " × ".join(str(n) for n in volume.shape)
    return f"{shape} voxels, {' × '.join(f'{s:.4g}' for s in volume.spacing)} mm, {axis_codes(volume.affine)}"
