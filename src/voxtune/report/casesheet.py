"""A contact sheet of volumes on disk: mask, real and synthetic, one column a case."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from voxtune.data.cases import Case, find_cases
from voxtune.data.grid import upright
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.errors import InputError
from voxtune.report.picture import Panel, gallery

# More columns than these are too small to see.
MOST = 12


def case_sheet(
    folder: str | Path,
    output: str | Path,
    *,
    real: str | Path | None = None,
    masks: str | Path | None = None,
    limit: int | None = None,
) -> Path:
    """Writes the PNG of the volumes below `folder`, found as `voxtune view` finds them; the first twelve at most."""
    found = find_cases(folder, real=real, masks=masks, limit=min(limit or MOST, MOST))
    what = "synthetic" if found.drawn else "volume"
    cases = [_panels(case, what) for case in found.cases]
    return gallery(cases, [case.subject for case in found.cases], Path(output))


def _panels(case: Case, what: str) -> list[Panel]:
    panels = [] if case.mask is None else [_panel("mask", read_labels(case.mask), labels=True)]
    panels += [] if case.real is None else [_panel("real", read_volume(case.real))]
    panels.append(_panel(what, read_volume(case.volume)))
    shapes = {p.volume_DHW.shape for p in panels}
    if len(shapes) > 1:
        raise InputError(f"{case.volume}: its mask or real volume has another size; sheets show volumes of one grid")
    return panels


def _panel(title: str, volume: Volume, *, labels: bool = False) -> Panel:
    """Turned to RAS; an image to [0, 1] by its extremes."""
    array_DHW, spacing_DHW = upright(volume)
    if not labels:
        low, high = float(array_DHW.min()), float(array_DHW.max())
        array_DHW = (array_DHW - low) / (high - low) if high > low else np.zeros(array_DHW.shape)
    return Panel(title=title, volume_DHW=array_DHW, labels=labels, spacing_DHW=spacing_DHW)
