"""Pictures of volumes: slices side by side, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.legend import Legend, first_voxel
from voxtune.data.pixels import coloured, png
from voxtune.files import write_file, write_output

VIEWS = ("axial", "coronal", "sagittal")
GAP, CAPTION = 8, 26
INK = (235, 235, 235)


@dataclass(frozen=True, kw_only=True)
class SlicePanel:
    """A volume in RAS with its title: an image in [0, 1], or a label map if `labels`."""

    title: str
    volume_DHW: np.ndarray
    labels: bool = False
    spacing_DHW: tuple[float, float, float] = (1.0, 1.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class SheetColumn:
    """One column of a contact sheet: an image of a case, with its mask and its reference volume."""

    title: str = ""
    panels: Sequence[SlicePanel]


def slice_picture(
    panels: Sequence[SlicePanel],
    path: Path,
    *,
    around: np.ndarray,
    legend: Legend,
    side: int = 256,
    overwrite: bool = False,
) -> Path:
    """Writes a PNG with a column for each panel: axial, coronal and sagittal slices, superior and anterior at the top.

    The slices pass through the pathology of the mask `around`, according to the names in `legend`.
    """
    centre = first_voxel(around, legend)
    sheet, draw = _canvas((side + GAP) * len(panels) + GAP, CAPTION + (side + GAP) * len(VIEWS))
    for column, panel in enumerate(panels):
        left = GAP + column * (side + GAP)
        _caption(draw, (left, 4), panel.title, side)
        for row, view in enumerate(VIEWS):
            _place(sheet, panel, view, centre, (left, CAPTION + row * (side + GAP)), side)
    return write_file(path, png(np.asarray(sheet)), overwrite=overwrite)


def gallery(
    cases: Sequence[Sequence[SheetColumn]],
    names: Sequence[str],
    path: Path,
    *,
    legend: Legend,
    side: int = 150,
    overwrite: bool = False,
) -> Path:
    """Writes a PNG with the columns of each case side by side, and a row for each view and panel title.

    The slices pass through the pathology of a case's mask, according to the names in `legend`.
    """
    from PIL import Image

    columns = [column for case in cases for column in case]
    fullest = sorted((column.panels for column in columns), key=len, reverse=True)
    titles = list(dict.fromkeys(p.title for panels in fullest for p in panels))
    rows = [(view, title) for view in VIEWS[::2] for title in titles]
    top = CAPTION * (2 if any(column.title for column in columns) else 1)
    step = side + GAP
    sheet, draw = _canvas(CAPTION + step * len(columns), top + step * len(rows))
    for row, (_, title) in enumerate(rows):
        strip, pen = _canvas(side, CAPTION)
        pen.text((side // 2, CAPTION // 2), title, fill=INK, font=_font(), anchor="mm")
        sheet.paste(strip.transpose(Image.Transpose.ROTATE_90), (0, top + row * step))
    x = CAPTION
    for case, name in zip(cases, names, strict=True):
        _caption(draw, (x, 4), name, step * len(case) - GAP)
        panels = [panel for column in case for panel in column.panels]
        mask = next((p.volume_DHW for p in panels if p.labels), np.zeros(panels[0].volume_DHW.shape, np.uint8))
        centre = first_voxel(mask, legend)
        for column in case:
            _caption(draw, (x, CAPTION + 2), column.title, side)
            by_title = {p.title: p for p in column.panels}
            for row, (view, title) in enumerate(rows):
                if title in by_title:
                    _place(sheet, by_title[title], view, centre, (x, top + row * step), side)
            x += step
    return write_output(path, png(np.asarray(sheet)), overwrite=overwrite)


def _canvas(width: int, height: int) -> tuple[Any, Any]:
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (width, height), (10, 11, 14))
    return sheet, ImageDraw.Draw(sheet)


def _place(
    sheet: Any, panel: SlicePanel, view: str, centre: tuple[int, ...], corner: tuple[int, int], side: int
) -> None:
    """Pastes one slice, scaled to fit a square of `side` pixels and centred in it."""
    from PIL import Image

    tile = Image.fromarray(coloured(_slice(panel.volume_DHW, view, centre), panel.labels))
    depth, height, width = panel.spacing_DHW
    across, down = {"axial": (width, height), "coronal": (width, depth), "sagittal": (height, depth)}[view]
    mm = tile.width * across, tile.height * down
    size = [max(1, round(length * side / max(mm))) for length in mm]
    tile = tile.resize(size, Image.Resampling.NEAREST if panel.labels else Image.Resampling.BICUBIC)
    sheet.paste(tile, (corner[0] + (side - tile.width) // 2, corner[1] + (side - tile.height) // 2))


def _caption(draw: Any, corner: tuple[int, int], text: str, width: int) -> None:
    """Draws text within `width`: in a smaller font if necessary, then without its beginning, since names differ at the end."""
    text = " ".join(text.split())
    size = next((s for s in range(15, 9, -1) if draw.textlength(text, font=_font(s)) <= width), 9)
    while len(text) > 2 and draw.textlength(text, font=_font(size)) > width:
        text = ".." + text.removeprefix("..")[1:]
    draw.text(corner, text, fill=INK, font=_font(size))


def _font(size: int = 15) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(size=size)


def _slice(volume_DHW: np.ndarray, view: str, centre: tuple[int, ...]) -> np.ndarray:
    """One slice, first row at the top: D increases to superior and H to anterior, so both are reversed."""
    d, h, w = centre
    if view == "axial":
        return volume_DHW[d, ::-1, :]
    return volume_DHW[::-1, h, :] if view == "coronal" else volume_DHW[::-1, :, w]
