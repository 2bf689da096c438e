"""The tissue maps behind version 2 of the simulated cohort, as torch tensors, from nilearn's MNI152 or from one file.

The file, written by `voxtune cohort --write-template`, is for machines without nilearn, nibabel and scipy: set
VOXTUNE_TEMPLATE to its path.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.data.anatomy import template
from voxtune.errors import InputError, optional_import
from voxtune.files import writing
from voxtune.tensorfiles import read_safetensors, save_safetensors

FORMAT = "voxtune-template/1"
TEMPLATE_FILE = "VOXTUNE_TEMPLATE"
MAPS = ("grey", "white", "brain", "depth")
# The depth below the brain's surface is stored in quarters of a millimetre.
DEPTH_STEP = 0.25


@dataclass(frozen=True, kw_only=True, eq=False)
class Atlas:
    """Maps (4, D, H, W) on a 1 mm RAS grid: grey, white, brain and depth, all in [0, 1]; see `depth_unit`.

    `origin` is voxel 0 in MNI space (X, Y, Z), `sites` are MNI points (n, 3) where lesions may be, in mm.
    """

    maps: Tensor
    origin: np.ndarray
    sites: np.ndarray
    depth_unit: float = 255 * DEPTH_STEP

    def at(self, points_mm: Tensor) -> Tensor:
        """All maps at MNI points (3, D, H, W), by linear interpolation; 0 outside."""
        size = torch.tensor(self.maps.shape[:0:-1], dtype=torch.float32, device=points_mm.device)
        origin = torch.tensor(self.origin, dtype=torch.float32, device=points_mm.device)
        shape = (3, 1, 1, 1)
        grid = (points_mm - origin.reshape(shape)) * (2.0 / (size - 1)).reshape(shape) - 1.0
        return F.grid_sample(self.maps[None], grid.permute(1, 2, 3, 0)[None], padding_mode="zeros", align_corners=True)[
            0
        ]

    def to(self, device: torch.device) -> Atlas:
        return replace(self, maps=self.maps.to(device))

    def smoothed(self, spacing_mm: float) -> Atlas:
        """The atlas for sampling at `spacing_mm`: smoothed, to avoid aliasing on coarse grids."""
        return _smoothed(spacing_mm)


@lru_cache(maxsize=1)
def atlas() -> Atlas:
    """The atlas of the file that VOXTUNE_TEMPLATE names, else of nilearn's MNI152."""
    named = os.environ.get(TEMPLATE_FILE)
    maps, origin = _from_nilearn() if named is None else _from_file(Path(named))
    return Atlas(maps=maps.float() / 255.0, origin=origin, sites=_sites(maps, origin))


def write_template(path: Path, *, overwrite: bool = False) -> Path:
    """Writes the maps into one file for machines without nilearn."""
    maps, origin = _from_nilearn()
    tensors = {name: each.contiguous() for name, each in zip(MAPS, maps, strict=True)}
    metadata = {"format": FORMAT, "origin": ",".join(f"{mm:g}" for mm in origin), "source": "MNI152 2009a, by nilearn"}
    with writing(path, overwrite=overwrite) as part:
        save_safetensors(part, tensors, metadata)
    return path


def _from_nilearn() -> tuple[Tensor, np.ndarray]:
    """The maps (4, D, H, W) as bytes, and the origin."""
    with optional_import("the simulated cohort"):
        from scipy.ndimage import distance_transform_edt

    full = template()
    depth_mm = distance_transform_edt(np.pad(full.brain, 1))[1:-1, 1:-1, 1:-1]
    parts = (full.grey, full.white, full.brain, depth_mm / (255 * DEPTH_STEP))
    bytes_XYZ = [np.rint(np.clip(part, 0.0, 1.0) * 255).astype(np.uint8) for part in parts]
    return torch.from_numpy(
        np.stack([np.ascontiguousarray(part.transpose(2, 1, 0)) for part in bytes_XYZ])
    ), full.origin


def _from_file(path: Path) -> tuple[Tensor, np.ndarray]:
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT or set(tensors) != set(MAPS):
        raise InputError(f"{path} ({TEMPLATE_FILE}): not a template; write one with voxtune cohort --write-template")
    maps = [tensors[name] for name in MAPS]
    if any(each.dtype != torch.uint8 or each.dim() != 3 or each.shape != maps[0].shape for each in maps):
        raise InputError(f"{path}: damaged; write it again with voxtune cohort --write-template")
    try:
        origin = np.array([float(mm) for mm in metadata["origin"].split(",")])
    except (KeyError, ValueError):
        origin = np.zeros(0)
    if origin.shape != (3,) or not np.isfinite(origin).all():
        raise InputError(f"{path}: damaged; write it again with voxtune cohort --write-template")
    return torch.stack(maps), origin


def _sites(maps: Tensor, origin: np.ndarray) -> np.ndarray:
    """Points in white matter, at least 9 mm inside the brain and above the brainstem."""
    step = 3
    _, white, _, depth = (each[::step, ::step, ::step].numpy().transpose(2, 1, 0) for each in maps)
    points = np.argwhere((white > 0.6 * 255) & (depth >= 9 / DEPTH_STEP)) * step + origin
    sites: np.ndarray = points[points[:, 2] > -20]
    if not len(sites):
        raise InputError("the template has no white matter; write it again with voxtune cohort --write-template")
    return sites


@lru_cache(maxsize=4)
def _smoothed(spacing_mm: float) -> Atlas:
    full = atlas()
    sd = 0.35 * max(spacing_mm**2 - 1.0, 0.0) ** 0.5
    if sd < 0.1:
        return full
    # Replicated: the bottom slice cuts through the brainstem, which would fade there.
    return replace(full, maps=blurred(full.maps, sd, mode="replicate"))


def blurred(maps: Tensor, sd: float, *, mode: str = "constant") -> Tensor:
    """A Gaussian of `sd` voxels over the last three dimensions, as sums in a fixed order."""
    reach = max(1, math.ceil(3 * sd))
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / max(sd, 1e-3)) ** 2)
    weights /= weights.sum()
    volumes = maps.reshape(-1, *maps.shape[-3:])
    for axis in (1, 2, 3):
        padding = [0] * 6
        padding[2 * (3 - axis)] = padding[2 * (3 - axis) + 1] = reach
        padded = F.pad(volumes[None], padding, mode=mode)[0]
        volumes = torch.zeros_like(volumes)
        for i, weight in enumerate(weights.tolist()):
            volumes += weight * padded.narrow(axis, i, volumes.shape[axis])
    return volumes.reshape(maps.shape)
