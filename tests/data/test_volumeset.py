"""Sets of volumes for evaluation: matching by name, and errors that name the file."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest

from voxtune.data.contract import generic_contract
from voxtune.data.volumeset import (
    check_modalities,
    find_images,
    find_masks,
    pair_by_subject,
    read_pair,
    read_placed,
)
from voxtune.errors import InputError

CONTRACT = generic_contract(2, 1, (8, 8, 8))


def write(path, array=None, affine=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = np.random.default_rng(0).random((8, 8, 8), dtype=np.float32) if array is None else array
    nib.save(nib.Nifti1Image(array, np.eye(4) if affine is None else affine), path)
    return path


def mask(labels=2):
    array = np.zeros((8, 8, 8), dtype=np.uint8)
    array[2:6, 2:6, 2:6] = np.resize(np.arange(1, labels + 1), (4, 4, 4))
    return array


def test_synthetic_volumes_are_matched_with_references(tmp_path):
    for name in ("sub-01/anat/sub-01_T1w", "sub-02/anat/sub-02_T1w", "derivatives/masks/sub-01/anat/sub-01_dseg"):
        write(tmp_path / "real" / f"{name}.nii.gz")
    for name in ("sub-01_desc-synth01_T1w", "sub-01_desc-synth02_T1w", "sub-09_desc-synth01_T1w"):
        write(tmp_path / "synth" / f"{name}.nii.gz")
    real, synth = find_images(tmp_path / "real"), find_images(tmp_path / "synth", synthetic=True)
    assert [f.subject for f in real] == ["sub-01", "sub-02"]
    pairs = pair_by_subject(real, synth)
    assert [(a.path.name, b.path.name) for a, b in pairs] == [
        ("sub-01_T1w.nii.gz", "sub-01_desc-synth01_T1w.nii.gz"),
        ("sub-01_T1w.nii.gz", "sub-01_desc-synth02_T1w.nii.gz"),
    ]
    assert list(find_masks(tmp_path / "real")) == ["sub-01"]


def test_one_folder_with_references_and_synthetic_volumes(tmp_path):
    for name in ("sub-01_T1w", "sub-01_desc-synth01_T1w", "sub-01_dseg"):
        write(tmp_path / f"{name}.nii.gz")
    assert [f.path.name for f in find_images(tmp_path)] == ["sub-01_T1w.nii.gz"]
    assert [f.path.name for f in find_images(tmp_path, synthetic=True)] == ["sub-01_desc-synth01_T1w.nii.gz"]


def test_several_modalities_require_a_choice(tmp_path):
    for name in ("a_T1w", "a_T2w", "b_T1n"):
        write(tmp_path / f"{name}.nii.gz")
    with pytest.raises(InputError, match="--image"):
        check_modalities([find_images(tmp_path)])
    chosen = find_images(tmp_path, "T1w")
    assert [f.path.name for f in chosen] == ["a_T1w.nii.gz", "b_T1n.nii.gz"]
    check_modalities([chosen])
    with pytest.raises(InputError, match="no FLAIR images"):
        find_images(tmp_path, "FLAIR")


def test_ambiguous_partners_are_rejected(tmp_path):
    for name in ("one/sub-01_T1w", "two/sub-01_T1w"):
        write(tmp_path / "real" / f"{name}.nii.gz")
    write(tmp_path / "synth" / "sub-01_desc-synth01_T1w.nii.gz")
    with pytest.raises(InputError, match="several reference images for subject sub-01"):
        pair_by_subject(find_images(tmp_path / "real"), find_images(tmp_path / "synth"))
    for name in ("a_seg", "a_dseg"):
        write(tmp_path / "masks" / f"{name}.nii.gz")
    with pytest.raises(InputError, match="several masks for subject a"):
        find_masks(tmp_path / "masks")
    (tmp_path / "empty").mkdir()
    for find in (find_images, find_masks):
        with pytest.raises(InputError, match="no NIfTI"):
            find(tmp_path / "empty")
        with pytest.raises(InputError, match="no such folder"):
            find(tmp_path / "nowhere")


def test_a_volume_is_placed_by_its_mask(tmp_path):
    write(tmp_path / "a_T1w.nii.gz")
    labels = write(tmp_path / "a_dseg.nii.gz", mask())
    [file] = find_images(tmp_path)
    placed = read_placed(file, labels, CONTRACT)
    assert (placed.image_DHW.min(), placed.image_DHW.max()) == (-1.0, 1.0)
    np.testing.assert_array_equal(placed.labels_DHW, mask().transpose(2, 1, 0))
    assert not placed.constant
    assert read_placed(file, None, CONTRACT).labels_DHW is None
    [flat] = find_images(write(tmp_path / "flat" / "b.nii.gz", np.full((8, 8, 8), 3.0, dtype=np.float32)).parent)
    assert read_placed(flat, None, CONTRACT).constant


@pytest.mark.parametrize(
    ("labels", "affine", "message"),
    [
        (np.zeros((8, 8, 9), dtype=np.uint8), None, "shape"),
        (mask(), np.diag([1.0, 1.0, 2.0, 1.0]), "displaced by .* mm"),
        (mask(3), None, "unknown label 3"),
        (np.zeros((8, 8, 8), dtype=np.uint8), None, "empty"),
    ],
)
def test_invalid_masks_are_rejected_by_name(tmp_path, labels, affine, message):
    write(tmp_path / "a_T1w.nii.gz")
    path = write(tmp_path / "a_dseg.nii.gz", labels, affine)
    [file] = find_images(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        read_placed(file, path, CONTRACT)
    assert "a_dseg.nii.gz" in str(error.value) or "a_T1w.nii.gz" in str(error.value)


def test_the_grid_of_a_mask_is_checked_even_if_its_labels_are_not(tmp_path):
    write(tmp_path / "a_T1w.nii.gz")
    [file] = find_images(tmp_path)
    other = write(tmp_path / "b_dseg.nii.gz", mask(3))
    assert read_placed(file, other, CONTRACT, labels_for=None).labels_DHW is not None
    with pytest.raises(InputError, match="shape"):
        read_placed(
            file, write(tmp_path / "a_dseg.nii.gz", np.ones((4, 4, 4), dtype=np.uint8)), CONTRACT, labels_for=None
        )


def test_pairs_must_share_a_grid(tmp_path):
    write(tmp_path / "r" / "a.nii.gz")
    for name, array, affine in (
        ("shape", np.zeros((8, 8, 7), dtype=np.float32), None),
        ("affine", None, np.diag([2.0, 1.0, 1.0, 1.0])),
        ("nan", np.full((8, 8, 8), np.nan, dtype=np.float32), None),
    ):
        write(tmp_path / name / "a.nii.gz", array, affine)
        [real], [synth] = find_images(tmp_path / "r"), find_images(tmp_path / name)
        with pytest.raises(InputError) as error:
            read_pair(real, synth)
        assert str(synth.path) in str(error.value)
