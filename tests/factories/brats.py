"""Cases as the BraTS challenges publish them: one folder for each case, four images and a mask with values 1, 2 and 4."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np

from tests.factories.nifti import oriented_affine

IMAGES = ("t1", "t1ce", "t2", "flair")
SHAPE = (40, 48, 36)
SPACING = (4.0, 4.0, 4.5)
# Intensities of brain, necrotic core (1), oedema (2) and enhancing tumour (4) in each image.
LEVELS = {
    "t1": (600, 300, 450, 500),
    "t1ce": (600, 300, 450, 900),
    "t2": (400, 800, 700, 600),
    "flair": (400, 300, 800, 600),
}


def write_brats(folder: Path, count: int = 4, first: int = 0) -> Path:
    """Writes `count` cases of an ellipsoidal brain with a tumour of three parts, on an anisotropic grid in LPS."""
    for number in range(first, first + count):
        name = f"BraTS2021_{number:05d}"
        rng = np.random.default_rng(number)
        brain, labels = _anatomy(rng)
        for image in IMAGES:
            levels = np.array(LEVELS[image], np.float32)
            clean = np.where(brain, levels[0], 0)
            for level, value in zip(levels[1:], (1, 2, 4), strict=True):
                clean = np.where(labels == value, level, clean)
            noisy = np.where(brain, clean * rng.normal(1, 0.05, SHAPE), 0).clip(0)
            _save(folder / name / f"{name}_{image}.nii.gz", noisy.astype(np.int16))
        _save(folder / name / f"{name}_seg.nii.gz", labels)
    return folder


def _anatomy(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(brain, labels): voxels of the brain, and the parts of the tumour inside it."""
    axes = [(np.arange(n) - (n - 1) / 2) * mm for n, mm in zip(SHAPE, SPACING, strict=True)]
    x, y, z = np.meshgrid(*axes, indexing="ij", sparse=True)
    brain = (x / 66) ** 2 + (y / 82) ** 2 + (z / 64) ** 2 < 1
    shift = rng.uniform(-15, 15, 3)
    distance = np.sqrt((x - 15 - shift[0]) ** 2 + (y + 15 - shift[1]) ** 2 + (z - 10 - shift[2]) ** 2)
    labels = np.zeros(SHAPE, np.uint8)
    for radius, value in ((28, 2), (18, 4), (10, 1)):
        labels[(distance < radius) & brain] = value
    return brain, labels


def _save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = nib.Nifti1Image(array, oriented_affine("LPS", SPACING))
    image.set_sform(image.affine, 1)
    image.set_qform(image.affine, 1)
    nib.save(image, path)
