"""A contact sheet of volumes on disk: mask, real and synthetic, one column a case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from voxtune.data.cases import Case, find_cases
from voxtune.data.grid import ras_array, to_ras
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.data.preflight import check_pair
from voxtune.report.embedding import finite
from voxtune.report.picture import SlicePanel, gallery
from voxtune.report.view import case_name

# More columns than these are too small to see.
MOST = 12


@dataclass(frozen=True, kw_only=True)
class ContactSheet:
    """What was written: the cases by name, and what its reader should know."""

    path: Path
    cases: tuple[str, ...]
    warnings: tuple[str, ...]


def case_sheet(
    folder: str | Path,
    output: str | Path,
    *,
    real: str | Path | None = None,
    masks: str | Path | None = None,
    limit: int | None = None,
) -> ContactSheet:
    """Writes the PNG of the volumes below `folder`, found as `voxtune view` finds them; the first twelve at most.

    A mask or real volume on another grid than its volume is left out, with a warning.
    """
    found = find_cases(folder, real=real, masks=masks, limit=limit)
    shown, more = found.cases[:MOST], len(found.cases) - MOST
    warnings = list(found.warnings)
    if more > 0:
        warnings.append(f"the contact sheet shows the first {MOST} of {len(found.cases)} cases and leaves out {more}")
    what = "synthetic" if found.drawn else "volume"
    cases = [_panels(case, what, warnings) for case in shown]
    names = tuple(case_name(case) for case in shown)
    return ContactSheet(path=gallery(cases, names, Path(output)), cases=names, warnings=tuple(dict.fromkeys(warnings)))


def _panels(case: Case, what: str, warnings: list[str]) -> list[SlicePanel]:
    volume = _image(case.volume, warnings)
    mask = None if case.mask is None else _on_its_grid(read_labels(case.mask), volume, warnings)
    real = None if case.real is None else _on_its_grid(_image(case.real, warnings), volume, warnings)
    panels = [] if mask is None else [_panel("mask", mask, labels=True)]
    panels += [] if real is None else [_panel("real", real)]
    return [*panels, _panel(what, volume)]


def _image(path: Path, warnings: list[str]) -> Volume:
    volume = read_volume(path, allow_nonfinite=True)
    array, told = finite(volume)
    warnings += told
    return replace(volume, array=array)


def _on_its_grid(partner: Volume, volume: Volume, warnings: list[str]) -> Volume | None:
    """The partner where its voxels lie on the volume's; a sheet compares voxel by voxel, and moves none."""
    # In RAS: files of one grid may be stored in another order.
    if check_pair(to_ras(partner), to_ras(volume)).ok:
        return partner
    warnings.append(f"{partner.name}: lies on another grid than {volume.name}; the contact sheet leaves it out")
    return None


def _panel(title: str, volume: Volume, *, labels: bool = False) -> SlicePanel:
    """Turned to RAS; an image to [0, 1] by its extremes."""
    array_DHW, spacing_DHW = ras_array(volume)
    if not labels:
        array_DHW = array_DHW.astype(np.float64)
        low, high = float(array_DHW.min()), float(array_DHW.max())
        array_DHW = (array_DHW - low) / (high - low) if high > low else np.zeros(array_DHW.shape)
    return SlicePanel(title=title, volume_DHW=array_DHW, labels=labels, spacing_DHW=spacing_DHW)
