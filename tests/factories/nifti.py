"""NIfTI files, volumes and masks."""

from __future__ import annotations

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np
from hypothesis import strategies as st

from voxtune.data.nifti import Volume, write_volume

# The 48 ways to lay a volume along the patient's axes.
ORIENTATIONS = [
    a + b + c
    for a in "RLAPSI"
    for b in "RLAPSI"
    for c in "RLAPSI"
    if all(sum(letter in pair for letter in (a, b, c)) == 1 for pair in ("RL", "AP", "SI"))
]

shapes = st.tuples(*[st.integers(1, 9)] * 3)
spacings = st.tuples(*[st.floats(0.3, 4.0)] * 3)


def oriented_affine(code: str, spacing=(1.0, 1.0, 1.0), origin=(-7.0, 3.5, 11.0)) -> np.ndarray:
    """An affine whose voxel axes run along `code` with the spacing of the voxel axes."""
    affine = np.eye(4)
    affine[:3, :3] = _along(code) * np.array(spacing)
    affine[:3, 3] = origin
    return affine


# Rotations of up to 30 degrees about each axis, so that the nearest orientation stays the same.
rotations = st.tuples(*[st.floats(-30.0, 30.0)] * 3)


def oblique_affine(code: str, spacing, degrees, origin=(-7.0, 3.5, 11.0)) -> np.ndarray:
    """`oriented_affine`, turned about the world axes."""
    affine = oriented_affine(code, spacing, origin)
    affine[:3, :3] = nib.eulerangles.euler2mat(*np.radians(degrees)) @ affine[:3, :3]
    return affine


def _along(code: str) -> np.ndarray:
    columns = np.zeros((3, 3))
    for voxel_axis, letter in enumerate(code):
        world = next(i for i, pair in enumerate(("RL", "AP", "SI")) if letter in pair)
        columns[world, voxel_axis] = 1 if letter in "RAS" else -1
    return columns


def save(
    path: Path, array: np.ndarray, affine: np.ndarray | None = None, sform: int = 1, qform: int = 1, **fields
) -> Path:
    """Writes a file with nibabel alone; `fields` go into the header."""
    affine = np.eye(4) if affine is None else affine
    image = nib.Nifti1Image(array, affine)
    # Not image.affine, which changes with the forms.
    image.set_sform(affine if sform else None, code=sform)
    image.set_qform(affine if qform else None, code=qform)
    for name, value in fields.items():
        image.header[name] = value
    nib.save(image, path)
    return path


def mgh_bytes(array: np.ndarray, affine: np.ndarray | None = None) -> bytes:
    """An MGH file, not compressed, by nibabel."""
    return bytes(nib.MGHImage(array, np.eye(4) if affine is None else affine).to_bytes())


def save_mgh(path: Path, array: np.ndarray, affine: np.ndarray | None = None) -> Path:
    """Writes an MGH file, compressed as its name says."""
    data = mgh_bytes(array, affine)
    path.write_bytes(gzip.compress(data) if path.name.endswith("z") else data)
    return path


def volume(array: np.ndarray, affine: np.ndarray | None = None) -> Volume:
    return Volume(array=array, affine=np.eye(4) if affine is None else affine)


def write_mask(path, shape=(14, 17, 11), affine=None, values=(0, 1, 2)):
    """Writes a mask with two nested boxes, 12 mm voxels unless `affine` is given."""
    labels = np.zeros(shape, np.uint8)
    labels[3:-3, 3:-3, 3:-3] = values[1]
    labels[5:7, 5:7, 5:7] = values[2]
    affine = np.diag([12.0, 12.0, 12.0, 1.0]) if affine is None else affine
    image = nib.Nifti1Image(labels, affine)
    image.set_sform(affine, 2)
    image.set_qform(affine, 1)
    nib.save(image, path)
    return path


def write_array(path: Path, array: np.ndarray, affine: np.ndarray | None = None) -> Path:
    """Writes a volume with voxels of 2 x 2 x 3 mm unless `affine` is given."""
    volume = Volume(array=array, affine=np.diag([2.0, 2, 3, 1]) if affine is None else affine)
    return write_volume(path, array, volume, overwrite=True)
