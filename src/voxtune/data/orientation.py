"""Axis codes such as "RAS", and how to reorder the axes of one orientation to another. Requires only NumPy.

A code names the direction in which each axis increases: "RAS" is to the right, to anterior, to superior.
"""

from __future__ import annotations

import numpy as np

from voxtune.errors import InputError

Axes = tuple[int, int, int]
Flips = tuple[bool, bool, bool]
# World axes x, y, z: the positive direction first.
AXIS_PAIRS = ("RL", "AP", "SI")


def check_orientation(code: str) -> None:
    """Raises InputError unless `code` names each of the three directions once."""
    letters = code if isinstance(code, str) else ""
    if len(letters) != 3 or any(sum(letter in pair for letter in letters) != 1 for pair in AXIS_PAIRS):
        raise InputError(f"orientation {code!r}: give one of R or L, A or P, S or I in any order, such as 'RAS'")


def axis_codes(affine: np.ndarray) -> str:
    """The code of the voxel axes X, Y, Z of an invertible affine, as nibabel's `aff2axcodes` gives it."""
    matrix = np.asarray(affine, dtype=np.float64)[:3, :3]
    # The polar decomposition gives the rotation nearest to the affine without its zooms.
    left, _, right = np.linalg.svd(matrix / np.sqrt((matrix**2).sum(axis=0)))
    rotation = left @ right
    codes = [""] * 3
    # The best aligned axis chooses first, so that no two axes choose the same direction.
    for axis in np.argsort(-(rotation**2).max(axis=0), kind="stable"):
        direction = int(np.argmax(np.abs(rotation[:, axis])))
        codes[axis] = AXIS_PAIRS[direction][0 if rotation[direction, axis] > 0 else 1]
        rotation[direction, :] = 0
    return "".join(codes)


def reorder(source: str, target: str) -> tuple[Axes, Flips]:
    """For each axis of `target`: the axis of `source` along the same direction, and whether it must be reversed.

    `flipped(array.transpose(axes), flips)` is the array in the target orientation.
    """
    pairs = [next(pair for pair in AXIS_PAIRS if letter in pair) for letter in target]
    i, j, k = (next(axis for axis, letter in enumerate(source) if letter in pair) for pair in pairs)
    flips = (source[i] != target[0], source[j] != target[1], source[k] != target[2])
    return (i, j, k), flips


def flipped(array: np.ndarray, flips: Flips) -> np.ndarray:
    """A view of `array` with the marked ones of its first three axes reversed."""
    return array[tuple(slice(None, None, -1) if flip else slice(None) for flip in flips)]


def reorder_affine(shape: tuple[int, ...], axes: Axes, flips: Flips) -> np.ndarray:
    """The affine from voxels of the reordered array to voxels of the source array of `shape`."""
    affine = np.zeros((4, 4))
    affine[3, 3] = 1
    for new, (old, flip) in enumerate(zip(axes, flips, strict=True)):
        affine[old, new] = -1 if flip else 1
        affine[old, 3] = shape[old] - 1 if flip else 0
    return affine


def centred_affine(code: str, spacing: tuple[float, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The affine of a grid whose axes run along `code`, with the spacing (mm) of its axes and the origin at its centre."""
    axes, flips = reorder("RAS", code)
    order = np.argsort(axes)
    steps = np.diag([*np.array(spacing)[order], 1.0])
    affine = steps @ reorder_affine(tuple(np.array(shape)[order]), axes, flips)
    affine[:3, 3] -= affine[:3] @ [*((n - 1) / 2 for n in shape), 1]
    return affine
