"""Orientation codes and axis reordering, compared with nibabel."""

from __future__ import annotations

from itertools import permutations, product

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nibabel import orientations

from voxtune.data.orientation import axis_codes, check_orientation, flipped, reorder, reorder_affine
from voxtune.errors import InputError

CODES = ["".join(code) for axes in permutations(("RL", "AP", "SI")) for code in product(*axes)]


def rotation(angles):
    (cx, cy, cz), (sx, sy, sz) = np.cos(angles), np.sin(angles)
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    return about_z @ about_y @ about_x


@settings(max_examples=300, deadline=None)
@given(
    st.tuples(*[st.floats(-np.pi, np.pi)] * 3),
    st.tuples(*[st.floats(0.3, 6.0)] * 3),
    st.sampled_from(CODES),
    st.floats(-0.2, 0.2),
)
def test_axis_codes_equal_those_of_nibabel(angles, zooms, code, shear):
    affine = np.eye(4)
    affine[:3, :3] = rotation(np.array(angles)) @ (np.eye(3) + shear * np.eye(3, k=1)) @ np.diag(zooms)
    affine = affine @ orientations.inv_ornt_aff(orientations.axcodes2ornt(tuple(code)), (4, 5, 6))
    assert tuple(axis_codes(affine)) == nib.aff2axcodes(affine)


@pytest.mark.parametrize("angle", [45, 135, 225, 315])
def test_axis_codes_name_each_direction_once_at_ties(angle):
    affine = np.eye(4)
    affine[:3, :3] = rotation(np.radians([angle, 0, 0]))
    check_orientation(axis_codes(affine))


@pytest.mark.parametrize("source", CODES)
def test_reordering_equals_that_of_nibabel(source):
    array = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    for target in CODES:
        check_reordering(array, source, target)


def check_reordering(array, source, target):
    change = orientations.ornt_transform(
        orientations.axcodes2ornt(tuple(source)), orientations.axcodes2ornt(tuple(target))
    )
    axes, flips = reorder(source, target)
    assert np.array_equal(flipped(array.transpose(axes), flips), orientations.apply_orientation(array, change))
    assert np.array_equal(reorder_affine(array.shape, axes, flips), orientations.inv_ornt_aff(change, array.shape))


@pytest.mark.parametrize("code", ["RAR", "RA", "RASX", "ras", "", None, 3])
def test_invalid_codes_are_rejected(code):
    with pytest.raises(InputError, match="R or L, A or P, S or I"):
        check_orientation(code)
