"""A contact sheet of volumes on disk: mask, reference and volume, one column per case and image kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from voxtune.data.cases import Case, Origin, find_cases
from voxtune.data.grid import ras_array, to_ras
from voxtune.data.legend import Legend
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.data.preflight import check_pair
from voxtune.report.embedding import finite
from voxtune.report.picture import SheetColumn, SlicePanel, gallery

# More columns would be too small.
MAX_COLUMNS = 12
TITLES: dict[Origin, str] = {"simulated": "simulated subject"}


@dataclass(frozen=True, kw_only=True)
class ContactSheet:
    """The picture that was written: names of its cases, and warnings."""

    path: Path
    cases: tuple[str, ...]
    warnings: tuple[str, ...]


def case_sheet(
    folder: str | Path,
    output: str | Path,
    *,
    real: str | Path | None = None,
    masks: str | Path | None = None,
    labels: str | Path | None = None,
    limit: int | None = None,
    overwrite: bool = False,
) -> ContactSheet:
    """Writes a PNG of the first cases of `find_cases`, in at most twelve columns: one for each image of a case.

    A mask or reference volume on another grid than its volume is omitted with a warning.
    """
    cases = find_cases(folder, real=real, masks=masks, labels=labels, limit=limit)
    shown = cases.cases[: max(1, MAX_COLUMNS // max(len(case.images) for case in cases.cases))]
    warnings = list(cases.warnings)
    if len(cases.cases) > len(shown):
        warnings.append(f"the contact sheet shows only the first {len(shown)} of {len(cases.cases)} cases")
    columns = [_columns(case, cases.legend, warnings) for case in shown]
    # The kinds are above the columns.
    names = [c.name if len(c.images) == 1 else f"{c.subject} {c.number}".strip() for c in shown]
    path = gallery(columns, names, Path(output), legend=cases.legend, overwrite=overwrite)
    return ContactSheet(path=path, cases=tuple(c.name for c in shown), warnings=tuple(dict.fromkeys(warnings)))


def _columns(case: Case, legend: Legend, warnings: list[str]) -> list[SheetColumn]:
    """A column for each image that is on the grid of the first; the mask is in the first column."""
    columns: list[SheetColumn] = []
    first = _image(case.images[0].volume, warnings)
    for image in case.images:
        volume = first if image is case.images[0] else _on_its_grid(_image(image.volume, warnings), first, warnings)
        if volume is None:
            continue
        mask = None if columns else _mask(case, legend)
        mask = None if mask is None else _on_its_grid(mask, volume, warnings)
        other = None if image.reference is None else _on_its_grid(_image(image.reference, warnings), volume, warnings)
        panels = [] if mask is None else [_panel("mask", mask, labels=True)]
        panels += [] if other is None else [_panel(_title(case.reference_origin), other)]
        panels.append(_panel(_title(case.origin), volume))
        columns.append(SheetColumn(title=image.kind if len(case.images) > 1 else "", panels=panels))
    return columns


def _title(origin: Origin) -> str:
    return TITLES.get(origin, origin)


def _mask(case: Case, legend: Legend) -> Volume | None:
    if case.mask is None:
        return None
    mask = read_labels(case.mask)
    return mask if case.from_image is None else case.from_image.fill(mask, legend)[0]


def _image(path: Path, warnings: list[str]) -> Volume:
    volume = read_volume(path, allow_nonfinite=True)
    array, messages = finite(volume)
    warnings += messages
    return replace(volume, array=array)


def _on_its_grid(partner: Volume, volume: Volume, warnings: list[str]) -> Volume | None:
    """The partner, or None with a warning if its voxels do not coincide with the volume's."""
    # In RAS, because files on the same grid may store their axes in another order.
    if check_pair(to_ras(partner), to_ras(volume)).ok:
        return partner
    warnings.append(f"{partner.name}: not on the grid of {volume.name}; omitted from the contact sheet")
    return None


def _panel(title: str, volume: Volume, *, labels: bool = False) -> SlicePanel:
    """A volume in RAS; an image is scaled to [0, 1] by its minimum and maximum."""
    array_DHW, spacing_DHW = ras_array(volume)
    if not labels:
        array_DHW = array_DHW.astype(np.float64)
        low, high = float(array_DHW.min()), float(array_DHW.max())
        array_DHW = (array_DHW - low) / (high - low) if high > low else np.zeros(array_DHW.shape)
    return SlicePanel(title=title, volume_DHW=array_DHW, labels=labels, spacing_DHW=spacing_DHW)
