"""Pictures of volumes: slices through what matters, side by side, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.errors import InputError

# Background, then labels in order of their value: colours that differ for colour-blind readers too.
PALETTE = ((20, 22, 28), (86, 134, 188), (230, 159, 0), (0, 158, 115), (204, 121, 167), (240, 228, 66), (213, 94, 0))
VIEWS = ("axial", "coronal", "sagittal")
GAP, CAPTION = 8, 26


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A column of the picture: an image in [0, 1], or with `labels` a label map."""

    title: str
    volume_DHW: np.ndarray
    labels: bool = False


def contact_sheet(panels: Sequence[Panel], path: Path, *, around: np.ndarray, side: int = 256) -> Path:
    """Draws each panel's axial, coronal and sagittal slice (superior and anterior up) through the middle of `around`'s
    highest label, and writes the PNG."""
    from PIL import Image, ImageDraw

    centre = _centre(around)
    sheet = Image.new("RGB", ((side + GAP) * len(panels) + GAP, CAPTION + (side + GAP) * len(VIEWS)), (10, 11, 14))
    draw = ImageDraw.Draw(sheet)
    for column, panel in enumerate(panels):
        left = GAP + column * (side + GAP)
        draw.text((left, 4), panel.title, fill=(235, 235, 235), font=_font())
        for row, view in enumerate(VIEWS):
            tile = Image.fromarray(_colours(_slice(panel.volume_DHW, view, centre), panel.labels))
            tile.thumbnail((side, side))
            scale = side / max(tile.size)
            size = (max(1, round(tile.width * scale)), max(1, round(tile.height * scale)))
            tile = tile.resize(size, Image.Resampling.NEAREST if panel.labels else Image.Resampling.BICUBIC)
            top = CAPTION + row * (side + GAP)
            sheet.paste(tile, (left + (side - tile.width) // 2, top + (side - tile.height) // 2))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except OSError as error:
        raise InputError(f"{path}: cannot write the picture ({error.strerror or error})") from None
    return path


def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=15)


def _centre(labels_DHW: np.ndarray) -> tuple[int, int, int]:
    """The middle of the highest label: the lesion where there is one."""
    top = int(labels_DHW.max())
    if top == 0:
        d, h, w = (s // 2 for s in labels_DHW.shape)
        return d, h, w
    d, h, w = (int(np.median(axis)) for axis in np.nonzero(labels_DHW == top))
    return d, h, w


def _slice(volume_DHW: np.ndarray, view: str, centre: tuple[int, int, int]) -> np.ndarray:
    """One slice with the picture's first row at the top: D runs to superior and H to anterior, so both are flipped."""
    d, h, w = centre
    if view == "axial":
        return volume_DHW[d, ::-1, :]
    return volume_DHW[::-1, h, :] if view == "coronal" else volume_DHW[::-1, :, w]


def _colours(plane: np.ndarray, labels: bool) -> np.ndarray:
    if labels:
        return np.array(PALETTE, dtype=np.uint8)[np.minimum(plane.astype(int), len(PALETTE) - 1)]
    grey = (np.clip(plane, 0, 1) * 255).round().astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=-1)
