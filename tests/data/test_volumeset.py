"""Sets of volumes for evaluation: matching by name, and errors that name the file."""

from __future__ import annotations

import nibabel as nib
import numpy as np
import pytest

from voxtune.data.contract import generic_contract
from voxtune.data.volumeset import (
    common_kinds,
    find_images,
    find_masks,
    pair_by_subject,
    read_pair,
    read_placed,
    volumes_of,
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
    real, synth = volumes(tmp_path / "real"), volumes(tmp_path / "synth", synthetic=True)
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


def volumes(folder, kinds=("T1w",), **more):
    return volumes_of(folder, find_images(folder, **more), kinds)


def test_the_kinds_that_all_sets_have(tmp_path):
    for name in (
        "r/a_T1w",
        "r/a_T2w",
        "r/b_t1n",
        "r/b_t2",
        "r/a_FLAIR",
        "s/a_desc-synth01_T2w",
        "s/a_desc-synth01_T1w",
    ):
        write(tmp_path / f"{name}.nii.gz")
    write(tmp_path / "t2" / "a_T2w.nii.gz")
    write(tmp_path / "none" / "a.nii.gz")
    write(tmp_path / "none" / "b_image.nii.gz")
    names = ("r", "s", "t2", "none")
    sets = {name: (tmp_path / name, find_images(tmp_path / name, synthetic=name == "s")) for name in names}
    assert common_kinds([sets["r"], sets["s"]]) == (
        ("T1w", "T2w"),
        ["FLAIR images are ignored: not every folder has them"],
    )
    assert common_kinds([sets["s"], sets["t2"]])[0] == ("T2w",)
    assert common_kinds([sets["none"], sets["t2"]]) == (("T2w",), [])
    assert common_kinds([sets["none"]]) == (("",), [])
    with pytest.raises(InputError, match="no file name states the image kind; choose one: --image T1w or --image T2w"):
        common_kinds([sets["none"], sets["s"]])
    write(tmp_path / "flair" / "a_FLAIR.nii.gz")
    with pytest.raises(
        InputError, match=r"s: 1 T1w and 1 T2w images; .*flair: 1 FLAIR image; no image kind is in all"
    ) as error:
        common_kinds([sets["s"], (tmp_path / "flair", find_images(tmp_path / "flair"))])
    assert len(str(error.value).splitlines()) == 1


def test_files_of_one_volume_are_grouped(tmp_path):
    names = ("sub-1_ses-1_T1w", "sub-1_ses-1_ce-gadolinium_T1w", "sub-1_ses-2_T1w", "sub-1_ses-2_ce-gadolinium_T1w")
    for name in names:
        write(tmp_path / "r" / f"{name}.nii.gz")
    both = ("T1ce", "T1w")
    [first, second] = volumes(tmp_path / "r", both)
    assert (first.subject, second.subject) == ("sub-1_ses-1", "sub-1_ses-2")
    assert {kind: file.path.name for kind, file in first.images.items()} == {
        "T1ce": f"{names[1]}.nii.gz",
        "T1w": f"{names[0]}.nii.gz",
    }
    assert [v.path.name for v in volumes(tmp_path / "r")] == [f"{names[0]}.nii.gz", f"{names[2]}.nii.gz"]
    for number in (1, 2):
        write(tmp_path / "s" / f"sub-1_ses-1_desc-synth0{number}_T1w.nii.gz")
        write(tmp_path / "s" / f"sub-1_ses-1_ce-gadolinium_desc-synth0{number}_T1w.nii.gz")
    synthetic = volumes(tmp_path / "s", both, synthetic=True)
    assert [len(v.images) for v in synthetic] == [2, 2]
    assert [(a, b) for a, b in pair_by_subject([first, second], synthetic)] == [(first, v) for v in synthetic]


def test_volumes_without_a_kind_or_with_two_files_of_one_are_errors(tmp_path):
    for name in ("a_T1w", "a_T2w", "b_T1w"):
        write(tmp_path / f"{name}.nii.gz")
    with pytest.raises(InputError, match=r"no T2w image for subject b; add it, or choose .* --image T1w"):
        volumes(tmp_path, ("T1w", "T2w"))
    with pytest.raises(InputError, match="no FLAIR images"):
        volumes(tmp_path, ("FLAIR",))
    with pytest.raises(InputError, match="no FLAIR or ADC images"):
        volumes(tmp_path, ("FLAIR", "ADC"))
    write(tmp_path / "b_t2.nii.gz")
    write(tmp_path / "b_T2w.nii.gz")
    with pytest.raises(InputError, match="several T2w images for subject b"):
        volumes(tmp_path, ("T1w", "T2w"))


def test_ambiguous_partners_are_rejected(tmp_path):
    for name in ("one/sub-01_T1w", "two/sub-01_T1w"):
        write(tmp_path / "real" / f"{name}.nii.gz")
    write(tmp_path / "synth" / "sub-01_desc-synth01_T1w.nii.gz")
    with pytest.raises(InputError, match="several reference images for subject sub-01"):
        pair_by_subject(volumes(tmp_path / "real"), volumes(tmp_path / "synth"))
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
