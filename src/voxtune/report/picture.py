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
INK = (235, 235, 235)


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A column of the picture: an image in [0, 1], or with `labels` a label map."""

    title: str
    volume_DHW: np.ndarray
    labels: bool = False
    spacing_DHW: tuple[float, float, float] = (1.0, 1.0, 1.0)


def contact_sheet(panels: Sequence[Panel], path: Path, *, around: np.ndarray, side: int = 256) -> Path:
    """Draws each panel's axial, coronal and sagittal slice (superior and anterior up) through the middle of `around`'s
    highest label, and writes the PNG."""
    centre = _centre(around)
    sheet, draw = _paper((side + GAP) * len(panels) + GAP, CAPTION + (side + GAP) * len(VIEWS))
    for column, panel in enumerate(panels):
        left = GAP + column * (side + GAP)
        draw.text((left, 4), panel.title, fill=INK, font=_font())
        for row, view in enumerate(VIEWS):
            _place(sheet, panel, view, centre, (left, CAPTION + row * (side + GAP)), side)
    return _save(sheet, path)


def gallery(cases: Sequence[Sequence[Panel]], names: Sequence[str], path: Path, *, side: int = 150) -> Path:
    """One column a case, one row a panel and view; the cases with the most panels name the first rows.

    Slices go through the middle of a case's label map's highest label.
    """
    from PIL import Image

    fullest = sorted(cases, key=len, reverse=True)
    titles = list(dict.fromkeys(p.title for panels in fullest for p in panels))
    rows = [(view, title) for view in VIEWS[::2] for title in titles]
    sheet, draw = _paper(CAPTION + (side + GAP) * len(cases), CAPTION + (side + GAP) * len(rows))
    for row, (_, title) in enumerate(rows):
        strip, pen = _paper(side, CAPTION)
        pen.text((side // 2, CAPTION // 2), title, fill=INK, font=_font(), anchor="mm")
        sheet.paste(strip.transpose(Image.Transpose.ROTATE_90), (0, CAPTION + row * (side + GAP)))
    for column, (panels, name) in enumerate(zip(cases, names, strict=True)):
        x = CAPTION + column * (side + GAP)
        draw.text((x, 4), name, fill=INK, font=_font())
        centre = _centre(next((p.volume_DHW for p in panels if p.labels), np.zeros(panels[0].volume_DHW.shape)))
        by_title = {p.title: p for p in panels}
        for row, (view, title) in enumerate(rows):
            if title in by_title:
                _place(sheet, by_title[title], view, centre, (x, CAPTION + row * (side + GAP)), side)
    return _save(sheet, path)


def _paper(width: int, height: int) -> tuple[Any, Any]:
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (width, height), (10, 11, 14))
    return sheet, ImageDraw.Draw(sheet)


def _place(
    sheet: Any, panel: Panel, view: str, centre: tuple[int, int, int], corner: tuple[int, int], side: int
) -> None:
    """A slice, as large as fits a square of `side`, in its middle."""
    from PIL import Image

    tile = Image.fromarray(_colours(_slice(panel.volume_DHW, view, centre), panel.labels))
    depth, height, width = panel.spacing_DHW
    across, down = {"axial": (width, height), "coronal": (width, depth), "sagittal": (height, depth)}[view]
    mm = tile.width * across, tile.height * down
    size = [max(1, round(length * side / max(mm))) for length in mm]
    tile = tile.resize(size, Image.Resampling.NEAREST if panel.labels else Image.Resampling.BICUBIC)
    sheet.paste(tile, (corner[0] + (side - tile.width) // 2, corner[1] + (side - tile.height) // 2))


def _save(sheet: Any, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot write the picture ({getattr(error, 'strerror', None) or error})") from None
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
