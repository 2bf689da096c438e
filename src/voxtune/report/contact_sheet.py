"""A contact sheet of volumes on disk: mask, reference and volume, one column per case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from voxtune.data.cases import Case, Origin, find_cases
from voxtune.data.grid import ras_array, to_ras
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.data.preflight import check_pair
from voxtune.report.embedding import finite
from voxtune.report.picture import SlicePanel, gallery
from voxtune.report.view import case_name

# More columns would be too small.
MAX_CASES = 12
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
    limit: int | None = None,
) -> ContactSheet:
    """Writes a PNG of the first twelve cases of `find_cases`.

    A mask or reference volume on another grid than its volume is omitted with a warning.
    """
    cases = find_cases(folder, real=real, masks=masks, limit=limit)
    shown, more = cases.cases[:MAX_CASES], len(cases.cases) - MAX_CASES
    warnings = list(cases.warnings)
    if more > 0:
        warnings.append(f"the contact sheet shows only the first {MAX_CASES} of {len(cases.cases)} cases")
    panels = [_panels(case, warnings) for case in shown]
    names = tuple(case_name(case) for case in shown)
    return ContactSheet(path=gallery(panels, names, Path(output)), cases=names, warnings=tuple(dict.fromkeys(warnings)))


def _panels(case: Case, warnings: list[str]) -> list[SlicePanel]:
    volume = _image(case.volume, warnings)
    mask = None if case.mask is None else _on_its_grid(read_labels(case.mask), volume, warnings)
    reference = None if case.reference is None else _on_its_grid(_image(case.reference, warnings), volume, warnings)
    panels = [] if mask is None else [_panel("mask", mask, labels=True)]
    panels += [] if reference is None else [_panel(_title(case.reference_origin), reference)]
    return [*panels, _panel(_title(case.origin), volume)]


def _title(origin: Origin) -> str:
    return TITLES.get(origin, origin)


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
