"""The MNI152 templates behind the simulated cohort, and smooth random fields in millimetres.

nilearn ships the skull-stripped MNI152 T1 image and its grey and white matter maps at 1 mm. The files are read from the
installed package without importing nilearn, which would take seconds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from voxtune.data.nifti import read_volume
from voxtune.errors import InputError, missing_dependency, optional_import

TEMPLATE = "mni_icbm152_{}_tal_nlin_sym_09a_converted.nii.gz"
# Centre of the brain's bounding box in MNI space, in mm.
BRAIN_CENTRE = np.array([0.0, -17.0, 5.0])
MARGIN = 6


@dataclass(frozen=True, kw_only=True, eq=False)
class Anatomy:
    """MNI152 maps in [0, 1] on a 1 mm RAS grid (X, Y, Z), cropped to the brain; `origin` is voxel 0 in MNI space, in mm."""

    t1: np.ndarray
    grey: np.ndarray
    white: np.ndarray
    brain: np.ndarray
    origin: np.ndarray

    def at(self, name: str, points_mm: np.ndarray) -> np.ndarray:
        """One map at MNI points (3, ...), by linear interpolation; 0 outside the map."""
        with optional_import("the simulated cohort"):
            from scipy.ndimage import map_coordinates

        voxels = points_mm - self.origin.astype(np.float32).reshape(3, *[1] * (points_mm.ndim - 1))
        return map_coordinates(getattr(self, name), voxels, order=1, mode="constant", prefilter=False)


@lru_cache(maxsize=1)
def template() -> Anatomy:
    """The maps at their original resolution of 1 mm."""
    folder = _template_folder()
    t1 = read_volume(folder / TEMPLATE.format("t1"))
    grey, white = (read_volume(folder / TEMPLATE.format(tissue)).array for tissue in ("gm", "wm"))
    if not np.allclose(t1.affine[:3, :3], np.eye(3)):
        raise InputError(f"{t1.name}: expected MNI152 at 1 mm in RAS; install nilearn 0.11 or newer")
    inside = np.argwhere(t1.array > 0)
    low = np.maximum(inside.min(axis=0) - MARGIN, 0)
    box = tuple(slice(a, b) for a, b in zip(low, inside.max(axis=0) + 1 + MARGIN, strict=True))
    return Anatomy(
        t1=t1.array[box] / 255.0,
        grey=grey[box] / 255.0,
        white=white[box] / 255.0,
        brain=(t1.array[box] > 0).astype(np.float32),
        origin=t1.affine[:3, 3] + low,
    )


@lru_cache(maxsize=4)
def anatomy(spacing_mm: float) -> Anatomy:
    """The maps smoothed for sampling at `spacing_mm`, to avoid aliasing on coarse grids."""
    with optional_import("the simulated cohort"):
        from scipy.ndimage import gaussian_filter

    full = template()
    sigma = 0.35 * max(spacing_mm**2 - 1.0, 0.0) ** 0.5
    if sigma < 0.1:
        return full
    # The bottom slice cuts through the brainstem; "nearest" keeps it from fading there.
    maps = {n: gaussian_filter(getattr(full, n), sigma, mode="nearest") for n in ("t1", "grey", "white", "brain")}
    return Anatomy(**maps, origin=full.origin)


@lru_cache(maxsize=1)
def lesion_sites() -> np.ndarray:
    """MNI points (n, 3) in deep white matter, at least 12 mm inside the brain and above the brainstem."""
    with optional_import("the simulated cohort"):
        from scipy.ndimage import distance_transform_edt

    full = template()
    step = 3
    depth_mm = distance_transform_edt(full.brain[::step, ::step, ::step]) * step
    points = np.argwhere((full.white[::step, ::step, ::step] > 0.6) & (depth_mm >= 12)) * step + full.origin
    return points[points[:, 2] > -10]


@dataclass(frozen=True, kw_only=True, eq=False)
class SmoothField:
    """A cubic B-spline with control points `step_mm` apart, centred on 0: the same field at any resolution."""

    controls: np.ndarray  # (..., kx, ky, kz)
    step_mm: float

    @staticmethod
    def draw(rng: np.random.Generator, reach_mm: float, step_mm: float, sd: float, components: int = 1) -> SmoothField:
        """A random field over [-reach_mm, reach_mm] on each axis, with a standard deviation of about `sd`."""
        n = 2 * (int(np.ceil(reach_mm / step_mm)) + 2) + 1
        # At a control point the squared weights sum to 1/2 per axis, which would reduce the standard deviation.
        return SmoothField(controls=rng.normal(0.0, sd * 0.5**-1.5, (components, n, n, n)), step_mm=step_mm)

    def at(self, x_mm: np.ndarray, y_mm: np.ndarray, z_mm: np.ndarray) -> np.ndarray:
        """Values (components, X, Y, Z) on the grid of three coordinate lists.

        Sums in a fixed order: the last digits of a matrix product depend on the number of threads.
        """
        values = self.controls.astype(np.float32)
        for coords in (x_mm, y_mm, z_mm):
            # Contracts the first control axis and appends the coordinates: after three rounds the order is X, Y, Z.
            values = np.moveaxis(values, 1, -1)
            values = sum(values[..., index] * weight for index, weight in self.taps(coords, self.controls.shape[1]))
        return values

    def taps(self, coords_mm: np.ndarray, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The four control points around each coordinate and their spline weights, which are 0 beyond the last point."""
        place = coords_mm / self.step_mm + n // 2
        first = np.floor(place).astype(np.int64) - 1
        for index in (first, first + 1, first + 2, first + 3):
            distance = np.abs(place - index)
            near = 2.0 / 3.0 - distance**2 + distance**3 / 2.0
            far = np.clip(2.0 - distance, 0.0, None) ** 3 / 6.0
            weight = np.where(distance < 1.0, near, far) * ((index >= 0) & (index < n))
            yield np.clip(index, 0, n - 1), weight.astype(np.float32)


def _template_folder() -> Path:
    spec = importlib.util.find_spec("nilearn")
    if spec is None or spec.origin is None:
        raise missing_dependency("nilearn", "the simulated cohort")
    return Path(spec.origin).parent / "datasets" / "data"
