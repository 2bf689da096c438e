"""The geometry that a command should announce, once for all of its files.

Oblique axes, sform and qform that differ, and files without either: nothing of this is an error, but each decides where a
voxel is in the patient.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from voxtune.data.nifti import Volume
from voxtune.data.orientation import axis_codes
from voxtune.data.preflight import Finding, Report, displacement_mm, same_place_mm

# Smaller angles are rounding, or invisible: 0.1 degrees are 0.2 mm at the border of a head.
OBLIQUE_DEGREES = 0.1


class GeometrySummary:
    """Counts the files with each property."""

    def __init__(self, volumes: Iterable[Volume] = ()) -> None:
        self._files: set[str] = set()
        # Property -> (file, size of the property), of each file that has it.
        self._oblique: list[tuple[str, float]] = []
        self._different: list[tuple[str, float]] = []
        self._assumed: list[tuple[str, str]] = []
        for volume in volumes:
            self.add(volume)

    def add(self, volume: Volume) -> None:
        """Counts a volume; a file that was counted before is not counted again."""
        if volume.name in self._files:
            return
        self._files.add(volume.name)
        degrees = obliquity_degrees(volume.affine)
        if degrees > OBLIQUE_DEGREES:
            self._oblique.append((volume.name, degrees))
        if volume.affine_assumed:
            self._assumed.append((volume.name, axis_codes(volume.affine)))
        (qform, _), (sform, _) = volume.qform, volume.sform
        if qform is not None and sform is not None:
            distance = displacement_mm(qform, sform, volume.shape)
            if not distance <= same_place_mm(volume.spacing):
                self._different.append((volume.name, distance))

    def lines(self) -> list[str]:
        """One line for each property that some file has."""
        lines = []
        if self._oblique:
            degrees = max(degrees for _, degrees in self._oblique)
            lines.append(
                f"{self._where(self._oblique)}: the axes are oblique by up to {degrees:.1f} degrees; voxels keep their axes, "
                "nothing is rotated or resampled because of it"
            )
        if self._different:
            distance = max(distance for _, distance in self._different)
            lines.append(
                f"{self._where(self._different)}: sform and qform differ by up to {distance:.3g} mm; the sform is used, "
                "results keep both"
            )
        if self._assumed:
            lines.append(
                f"{self._where(self._assumed)}: no orientation in the header (codes of sform and qform, or goodRASFlag, are "
                f"0); the axes {self._assumed[0][1]} are assumed and may be wrong, also left and right"
            )
        return lines

    def report(self) -> Report:
        """The lines as warnings."""
        return Report(
            findings=tuple(
                Finding(level="warning", code="geometry", message=line, file=line.partition(": ")[0])
                for line in self.lines()
            )
        )

    def _where(self, files: list[tuple[str, float]] | list[tuple[str, str]]) -> str:
        first, total = files[0][0], len(self._files)
        return first if total == 1 else f"{len(files)} of {total} files, such as {first}"


def obliquity_degrees(affine: np.ndarray) -> float:
    """The largest angle between an axis of the voxels and the axis of the patient nearest to it."""
    cosines = np.abs(affine[:3, :3]) / np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    return float(np.degrees(np.arccos(np.minimum(cosines.max(axis=0), 1.0))).max())
