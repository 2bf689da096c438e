"""Announcements of geometry: one line for each property, however many files have it."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories.nifti import (
    ORIENTATIONS,
    mgh_bytes,
    oblique_affine,
    oriented_affine,
    rotations,
    save,
    save_mgh,
    spacings,
    volume,
)
from voxtune.data.contract import generic_contract
from voxtune.data.dataset import PairedFolders
from voxtune.data.geometry import GeometrySummary, obliquity_degrees
from voxtune.data.nifti import read_labels

LABELS = np.ones((8, 8, 8), np.uint8)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ORIENTATIONS), spacings, rotations)
def test_the_angle_is_that_of_nibabel(code, spacing, degrees):
    affine = oblique_affine(code, spacing, degrees)
    assert obliquity_degrees(affine) == pytest.approx(np.degrees(nib.affines.obliquity(affine)).max(), abs=1e-4)


@pytest.mark.parametrize("code", ORIENTATIONS)
def test_axes_along_the_patient_are_not_announced(tmp_path, code):
    mask = read_labels(save(tmp_path / "m.nii", LABELS, oriented_affine(code, (1.5, 0.9375, 3.0))))
    assert GeometrySummary([mask, volume(LABELS)]).lines() == []


def test_oblique_axes_are_announced_with_the_largest_angle(tmp_path):
    angles = {"a": 0.0, "b": 7.0, "c": 15.2, "d": 0.05}
    masks = [
        read_labels(save(tmp_path / f"{name}.nii", LABELS, oblique_affine("RAS", (1, 1, 1), (0, 0, degrees))))
        for name, degrees in angles.items()
    ]
    [line] = GeometrySummary([*masks, masks[1]]).lines()
    assert line.startswith(f"2 of 4 files, such as {tmp_path / 'b.nii'}: the axes are oblique by up to 15.2 degrees")
    assert "nothing is rotated or resampled" in line
    [single] = GeometrySummary([masks[1]]).lines()
    assert single.startswith(f"{tmp_path / 'b.nii'}: the axes are oblique by up to 7.0 degrees")


def forms(path, sform, qform):
    image = nib.Nifti1Image(LABELS, sform)
    image.set_sform(sform, 2)
    image.set_qform(qform, 1)
    nib.save(image, path)
    return read_labels(path)


def test_forms_that_differ_are_announced_and_the_sform_is_used(tmp_path):
    sform = oriented_affine("LPS", (1, 2, 3))
    qform = sform.copy()
    qform[0, 3] += 4.5
    mask = forms(tmp_path / "m.nii", sform, qform)
    [line] = GeometrySummary([mask]).lines()
    assert "sform and qform differ by up to 4.5 mm; the sform is used" in line
    assert np.array_equal(mask.affine, sform)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ORIENTATIONS), spacings, rotations)
def test_the_rounding_of_a_quaternion_is_no_difference(tmp_path_factory, code, spacing, degrees):
    affine = oblique_affine(code, spacing, degrees)
    lines = GeometrySummary([forms(tmp_path_factory.getbasetemp() / "round.nii", affine, affine)]).lines()
    assert not any("differ" in line for line in lines)


def test_a_file_without_forms_is_announced_with_the_axes_that_are_assumed(tmp_path):
    mask = read_labels(save(tmp_path / "m.nii", LABELS, np.diag([2.0, 2.0, 2.0, 1.0]), sform=0, qform=0))
    [line] = GeometrySummary([mask]).lines()
    assert "no orientation in the header" in line and "axes LAS" in line
    assert "".join(nib.aff2axcodes(mask.affine)) == "LAS"


def test_training_folders_are_announced_once_for_masks_and_images(tmp_path):
    for i in range(7):
        affine = oblique_affine("RAS", (1, 1, 1), (i, 0, 0))
        save(tmp_path / f"sub-{i}_dseg.nii", LABELS, affine)
        save(tmp_path / f"sub-{i}_T1w.nii", np.random.default_rng(i).random((8, 8, 8)).astype(np.float32), affine)
    warnings = PairedFolders(generic_contract(1, 1, (8, 8, 8)), tmp_path, tmp_path).check().warnings
    [oblique] = [w.message for w in warnings if w.code == "geometry"]
    assert oblique.startswith("12 of 14 files, such as ") and "6.0 degrees" in oblique
    assert warnings[0].code == "geometry"


def test_an_mgh_file_without_orientation_is_announced(tmp_path):
    data = bytearray(mgh_bytes(LABELS))
    data[28:30] = b"\0\0"
    (tmp_path / "m.mgh").write_bytes(data)
    mask = read_labels(tmp_path / "m.mgh")
    [line] = GeometrySummary([mask]).lines()
    assert "no orientation in the header" in line and "axes LSP" in line
    assert GeometrySummary([read_labels(save_mgh(tmp_path / "good.mgz", LABELS))]).lines() == []
