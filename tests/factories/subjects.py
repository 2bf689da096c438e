"""Folders of NIfTI images and masks of simulated subjects, with one image of each kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tests.factories.nifti import save
from voxtune.data.modality import bids_name

# Every spelling has its own contrast, so that a swapped channel is seen.
CONTRASTS = {"T1w": (60, 20), "T1ce": (50, 90), "T2w": (30, 80), "FLAIR": (40, 70)}
VALUES = (0, 1, 2)


def write_subjects(
    root: Path,
    kinds: Sequence[str] = ("T1w",),
    count: int = 3,
    *,
    side: int = 8,
    endings: Sequence[str] | None = None,
    first: int = 0,
) -> tuple[Path, Path]:
    """(images, masks): `count` subjects of two labels on a grid of 192 mm; `endings` replace the BIDS names of the kinds."""
    images, masks = root / "images", root / "masks"
    for folder in (images, masks):
        folder.mkdir(parents=True, exist_ok=True)
    affine = np.diag([192 / side] * 3 + [1.0])
    for number in range(first, first + count):
        random = np.random.default_rng(number)
        labels = subject_labels(number, side)
        save(masks / f"sub-{number}_dseg.nii.gz", labels, affine)
        for kind, ending in zip(kinds, endings or [_ending(kind) for kind in kinds], strict=True):
            save(images / f"sub-{number}{ending}.nii.gz", _image(labels, kind, random), affine)
    return images, masks


def subject_labels(number: int, side: int = 8) -> np.ndarray:
    """A brain (1) with a tumour (2) whose place depends on the subject."""
    labels = np.zeros((side, side, side), np.uint8)
    unit = side // 8
    labels[unit:-unit, unit:-unit, unit:-unit] = 1
    place = (2 + number % 3) * unit
    labels[3 * unit : 5 * unit, 3 * unit : 5 * unit, place : place + 2 * unit] = 2
    return labels


def _image(labels: np.ndarray, kind: str, random: np.random.Generator) -> np.ndarray:
    brain, tumour = CONTRASTS[kind]
    levels = np.array([0, brain, tumour], dtype=np.float32)
    return (levels[labels] + random.uniform(0, 5, labels.shape)).astype(np.float32)


def _ending(kind: str) -> str:
    entities, suffix = bids_name(kind)
    return f"_{entities}_{suffix}" if entities else f"_{suffix}"
