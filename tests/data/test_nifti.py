"""Reading and writing preserve values and geometry; files that are not a volume raise an error with their name."""

from __future__ import annotations

import gzip
import os
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.factories.nifti import (
    ORIENTATIONS,
    mgh_bytes,
    oblique_affine,
    oriented_affine,
    rotations,
    save,
    save_mgh,
    shapes,
    spacings,
    volume,
)
from voxtune.data import nifti
from voxtune.data.nifti import Volume, read_labels, read_volume, write_volume
from voxtune.errors import InputError
from voxtune.files import write_file


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("nifti")


@settings(max_examples=60, deadline=None)
@given(
    shapes,
    spacings,
    st.sampled_from(ORIENTATIONS),
    st.sampled_from([np.uint8, np.int16, np.int32, np.uint16, np.float32, np.float64]),
    st.sampled_from([(1, 1), (2, 0), (0, 1), (4, 2)]),
    st.sampled_from([".nii", ".nii.gz"]),
    st.sampled_from([nib.Nifti1Image, nib.Nifti2Image]),
)
def test_labels_and_geometry_round_trip(folder, shape, spacing, code, dtype, codes, suffix, image_class):
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    image = image_class(array, oriented_affine(code, spacing))
    image.set_sform(image.affine, code=codes[0])
    image.set_qform(image.affine, code=codes[1])
    image.header.set_xyzt_units("mm", "sec")
    nib.save(image, folder / f"in{suffix}")
    read = read_labels(folder / f"in{suffix}")
    assert np.array_equal(read.array, array) and read.array.dtype == np.int32
    assert np.allclose(read.spacing, spacing, rtol=1e-5)

    back = nib.load(write_volume(folder / f"out{suffix}", read.array, read, overwrite=True))
    assert type(back) is image_class and back.get_data_dtype() == np.uint8
    assert np.array_equal(np.asanyarray(back.dataobj), array)
    assert np.array_equal(back.affine, read.affine)
    for form in ("get_qform", "get_sform"):
        (was, was_code), (now, now_code) = (getattr(h, form)(coded=True) for h in (image.header, back.header))
        assert was_code == now_code and (was is None or np.allclose(was, now, atol=1e-5))
    assert back.header.get_xyzt_units()[0] == "mm"
    reread = read_labels(folder / f"out{suffix}")
    assert reread.qform[1] == read.qform[1] and reread.sform[1] == read.sform[1]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([np.uint8, np.int16, np.int32]), st.floats(0.01, 8.0), st.floats(-100.0, 100.0))
def test_scaled_integer_storage(folder, dtype, slope, intercept):
    stored = np.arange(24, dtype=dtype).reshape(2, 3, 4)
    path = save(folder / "scaled.nii", stored)
    data = bytearray(path.read_bytes())
    data[112:120] = np.array([slope, intercept], dtype="<f4").tobytes()
    path.write_bytes(data)
    expected = stored * np.float64(np.float32(slope)) + np.float64(np.float32(intercept))
    assert np.allclose(read_volume(path).array, expected, rtol=1e-5, atol=1e-4)


def test_scaled_storage_of_integer_labels_is_exact(folder):
    path = save(folder / "scaled_labels.nii", np.array([[[0, 1, 2]]], dtype=np.int16))
    data = bytearray(path.read_bytes())
    data[112:120] = np.array([2.0, 1.0], dtype="<f4").tobytes()
    path.write_bytes(data)
    assert read_labels(path).array.ravel().tolist() == [1, 3, 5]


def test_float_image_written_as_scaled_integers(folder):
    image = np.random.default_rng(1).random((5, 6, 7)).astype(np.float32)
    like = volume(image, oriented_affine("LPS", (1, 2, 3)))
    path = write_volume(folder / "scaled_out.nii.gz", image, like, dtype=np.int16)
    assert nib.load(path).get_data_dtype() == np.int16
    assert np.abs(read_volume(path).array - image).max() < 1e-4
    assert np.array_equal(read_volume(write_volume(folder / "f.nii", image, like)).array, image)


def test_volume_from_memory_has_qform_and_sform(folder):
    affine = oriented_affine("PIR", (0.7, 1.1, 2.0))
    read = read_volume(
        write_volume(folder / "memory.nii.gz", np.zeros((3, 4, 5), np.float32), volume(np.zeros((3, 4, 5)), affine))
    )
    assert np.allclose(read.affine, affine, atol=1e-5) and np.allclose(read.qform[0], affine, atol=1e-5)
    assert read.qform[1] == read.sform[1] == 1


def test_mask_without_qform_and_sform_keeps_its_affine(folder):
    path = save(folder / "bare.nii", np.ones((3, 4, 5), np.uint8), np.diag([2.0, 3.0, 4.0, 1.0]), sform=0, qform=0)
    read = read_labels(path)
    back = read_labels(write_volume(folder / "bare_out.nii", read.array, read))
    assert np.array_equal(back.affine, read.affine) and back.qform == (None, 0) and back.sform == (None, 0)


def test_description_and_extensions_are_not_copied(folder):
    image = nib.Nifti1Image(np.ones((2, 2, 2), np.uint8), np.eye(4))
    image.header["descrip"] = b"patient name"
    image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", b"patient name"))
    nib.save(image, folder / "named.nii")
    read = read_labels(folder / "named.nii")
    assert b"patient" not in write_volume(folder / "clean.nii", read.array, read).read_bytes()


def test_writing_is_deterministic(folder):
    array = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    one, two = (write_volume(folder / f"same{i}.nii.gz", array, volume(array)).read_bytes() for i in range(2))
    assert one == two


@pytest.mark.parametrize("shape", [(3, 4, 5, 1), (3, 4, 5, 1, 1)])
def test_single_volume_4d_is_squeezed(folder, shape):
    path = save(folder / "four.nii.gz", np.arange(60, dtype=np.float32).reshape(shape))
    assert read_volume(path).shape == (3, 4, 5)


@pytest.mark.parametrize("shape", [(3, 4), (7,), (3, 4, 5, 2), (3, 4, 5, 1, 3)])
def test_other_dimensions_are_rejected(folder, shape):
    path = save(folder / "dims.nii", np.zeros(shape, np.float32))
    with pytest.raises(InputError, match=r"dims\.nii.*expected one 3D volume"):
        read_volume(path)


def test_big_endian_and_gzip_under_another_name(folder):
    image = nib.Nifti1Image(np.arange(24, dtype=">i2").reshape(2, 3, 4), np.eye(4), nib.Nifti1Header(endianness=">"))
    data = image.to_bytes()
    (folder / "big.nii").write_bytes(gzip.compress(data))
    assert read_labels(folder / "big.nii").array.ravel().tolist() == list(range(24))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nonfinite_voxels(folder, bad):
    array = np.ones((3, 3, 3), np.float32)
    array[1, 1, 1] = bad
    path = save(folder / "nan.nii", array)
    for read in (read_volume, read_labels):
        with pytest.raises(InputError, match=r"nan\.nii.*NaN"):
            read(path)
    assert not np.isfinite(read_volume(path, allow_nonfinite=True).array).all()


def test_fractional_labels_are_rejected(folder):
    path = save(folder / "prob.nii", np.full((2, 2, 2), 0.25, np.float32))
    with pytest.raises(InputError, match=r"got 0\.25"):
        read_labels(path)


def test_huge_labels_are_rejected(folder):
    path = save(folder / "huge.nii", np.full((2, 2, 2), 1e12, np.float64))
    with pytest.raises(InputError, match="32 bits"):
        read_labels(path)


def test_complex_and_colour_are_rejected(folder):
    path = save(folder / "complex.nii", np.ones((2, 2, 2), np.complex64))
    with pytest.raises(InputError, match="complex64"):
        read_volume(path)
    colour = np.zeros((2, 2, 2), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
    with pytest.raises(InputError, match=r"rgb\.nii"):
        read_volume(save(folder / "rgb.nii", colour))


@pytest.mark.parametrize("name", ["missing.nii", "missing.nii.gz", "notes.txt", "old.img"])
def test_missing_files_and_other_names(folder, name):
    with pytest.raises(InputError, match=name):
        read_volume(folder / name)


def test_folder_in_place_of_a_file(folder):
    (folder / "dir.nii").mkdir()
    with pytest.raises(InputError, match="folder"):
        read_volume(folder / "dir.nii")


def test_unwritable_paths_are_named(folder):
    (folder / "file").write_text("")
    with pytest.raises(InputError, match=r"file.*(Not a directory|File exists)"):
        write_volume(folder / "file" / "x.nii", np.zeros((2, 2, 2)), volume(np.zeros((2, 2, 2))))
    with pytest.raises(InputError, match=r"must end in \.nii"):
        write_volume(folder / "x.png", np.zeros((2, 2, 2)), volume(np.zeros((2, 2, 2))))


def test_full_disk_keeps_the_old_file(folder, monkeypatch):
    path = folder / "kept.nii"
    path.write_bytes(b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match=r"kept\.nii.*No space left"):
        write_file(path, b"new", state=True)
    assert path.read_bytes() == b"old" and not list(folder.glob(".kept*"))


def test_missing_nibabel_names_the_package_to_install(folder, monkeypatch):
    path = save(folder / "fine.nii", np.zeros((2, 2, 2), np.uint8))
    monkeypatch.setitem(__import__("sys").modules, "nibabel", None)
    with pytest.raises(InputError, match="pip install nibabel"):
        nifti.read_volume(path)


def test_save_replaces_and_reads_back(tmp_path):
    image = Volume(array=np.random.default_rng(0).random((4, 5, 6), dtype=np.float32), affine=np.diag([1.0, 2, 3, 1]))
    for path in (tmp_path / "a" / "image.nii.gz", str(tmp_path / "image.nii")):
        assert image.save(path) == Path(path)
        with pytest.raises(InputError, match=r"already exists; .* pass overwrite=True"):
            image.save(path)
        again = read_volume(image.save(path, overwrite=True))
        np.testing.assert_array_equal(again.array, image.array)
        np.testing.assert_array_equal(again.affine, image.affine)
    labels = replace(image, array=np.arange(120).reshape(4, 5, 6))
    np.testing.assert_array_equal(read_labels(labels.save(tmp_path / "mask.nii.gz")).array, labels.array)
    for path in ("image.png", "", 5, None, b"x.nii"):
        with pytest.raises(InputError):
            image.save(path)


def test_a_volume_describes_itself():
    affine = oriented_affine("LPS", (1.0, 1.0, 6.0))
    image = Volume(array=np.linspace(0, 1, 120, dtype=np.float32).reshape(4, 5, 6), affine=affine, kind="FLAIR")
    assert repr(image) == "Volume(FLAIR, 4 x 5 x 6, 1 x 1 x 6 mm, LPS, intensities 0 to 1)"
    mask = replace(image, array=(image.array * 4).astype(np.uint8), kind=None)
    assert repr(mask) == "Volume(mask, 4 x 5 x 6, 1 x 1 x 6 mm, LPS, labels 0, 1, 2, 3, 4)"
    assert "invalid affine" in repr(replace(mask, affine=np.zeros((4, 4))))
    assert "not a 3D volume" in repr(replace(mask, array=np.zeros((0, 2))))


def test_a_volume_has_the_image_kind_of_its_name(tmp_path):
    image = Volume(array=np.zeros((2, 2, 2), np.float32), affine=np.eye(4))
    for name, kind in {"sub-01_ce-gadolinium_T1w": "T1ce", "case_1_flair": "FLAIR", "case_1": None}.items():
        assert read_volume(image.save(tmp_path / f"{name}.nii.gz")).kind == kind


@settings(max_examples=50, deadline=None)
@given(
    shapes,
    spacings,
    st.sampled_from(ORIENTATIONS),
    rotations,
    st.sampled_from([np.uint8, np.int16, np.int32, np.float32]),
    st.sampled_from([".mgz", ".mgh", ".mgh.gz"]),
)
@example((1, 1, 1), (1.0, 1.0, 2.0), "LIA", (2.0, 2.0, 2.0), np.uint8, ".mgz")
def test_an_mgh_mask_gives_a_nifti_result_with_its_exact_affine(folder, shape, spacing, code, degrees, dtype, suffix):
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    path = save_mgh(folder / f"in{suffix}", array, oblique_affine(code, spacing, degrees))
    source = nib.MGHImage.from_bytes(mgh_bytes(array, oblique_affine(code, spacing, degrees)))
    read = read_labels(path)
    assert np.array_equal(read.array, array) and np.array_equal(read.affine, source.affine)
    assert np.array_equal(read_volume(path).array, array)
    back = nib.load(write_volume(folder / "out.nii.gz", read.array, read, overwrite=True))
    assert type(back) is nib.Nifti1Image and np.array_equal(np.asanyarray(back.dataobj), array)
    assert np.array_equal(back.affine, source.affine)
    assert np.array_equal(back.get_sform(coded=True)[0], source.affine) and back.get_sform(coded=True)[1] == 1
    qform, kind = back.get_qform(coded=True)
    assert np.allclose(qform, source.affine, atol=2e-3 * max(spacing)) and kind == 1
    assert back.header.get_xyzt_units()[0] == "mm"


def test_the_name_of_an_mgh_file_does_not_decide_over_its_content(folder):
    data = nib.Nifti1Image(np.ones((2, 3, 4), np.uint8), np.eye(4)).to_bytes()
    (folder / "nifti.mgz").write_bytes(gzip.compress(data))
    assert read_labels(folder / "nifti.mgz").shape == (2, 3, 4)
    (folder / "mgh.nii").write_bytes(mgh_bytes(np.ones((2, 3, 4), np.uint8)))
    with pytest.raises(InputError, match=r"mgh\.nii: not a NIfTI file"):
        read_labels(folder / "mgh.nii")


def test_mgh_with_several_frames_is_rejected(folder):
    with pytest.raises(InputError, match=r"frames\.mgz: expected one 3D volume, got 4D \(3 x 4 x 5 x 2\)"):
        read_volume(save_mgh(folder / "frames.mgz", np.ones((3, 4, 5, 2), np.float32)))


def test_a_sheared_mgh_affine_has_no_qform(folder):
    data = bytearray(mgh_bytes(np.ones((3, 4, 5), np.uint8)))
    data[42:54] = np.array([1.0, 0.3, 0.0], ">f4").tobytes()
    (folder / "shear.mgh").write_bytes(data)
    read = read_labels(folder / "shear.mgh")
    assert read.qform == (None, 0) and np.array_equal(read.sform[0], read.affine) and read.affine[1, 0] != 0


def test_volumes_are_not_written_as_mgh(folder):
    with pytest.raises(InputError, match=r"must end in \.nii or \.nii\.gz"):
        write_volume(folder / "x.mgz", np.zeros((2, 2, 2)), volume(np.zeros((2, 2, 2))))
