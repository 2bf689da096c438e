"""Matching of images and masks by name, for plain, BIDS and BraTS names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories.contracts import BRATS
from voxtune.data.pairing import folder_images, images_of_masks, pair_folders
from voxtune.errors import FilesError, InputError


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("image", "mask", "subject"),
    [
        ("001.nii.gz", "001.nii", "001"),
        ("case_7.nii", "case_7_seg.nii", "case_7"),
        ("sub-01_T1w.nii.gz", "sub-01_dseg.nii.gz", "sub-01"),
        ("sub-01_ses-2_T1w.nii.gz", "sub-01_ses-2_desc-tumour_dseg.nii.gz", "sub-01_ses-2"),
        ("sub-01_desc-preproc_T1w.nii.gz", "sub-01_desc-brain_mask.nii.gz", "sub-01"),
        ("BraTS20_001_t1.nii.gz", "BraTS20_001_seg.nii.gz", "BraTS20_001"),
        ("BraTS-GLI-00000-000-t1n.nii.gz", "BraTS-GLI-00000-000-seg.nii.gz", "BraTS-GLI-00000-000"),
        ("p1/t1.nii.gz", "p1/seg.nii.gz", "p1"),
        ("sub-01/anat/sub-01_T1W.NII.GZ", "sub-01/anat/sub-01_dseg.nii.gz", "sub-01"),
    ],
)
@pytest.mark.parametrize("one_folder", [False, True])
def test_matching_names(tmp_path, image, mask, subject, one_folder):
    images, masks = tmp_path / "images", tmp_path / ("images" if one_folder else "masks")
    touch(images, image)
    touch(masks, mask)
    if one_folder and "seg" not in mask and "mask" not in mask:
        pytest.skip("names alone cannot tell an image from a mask here")
    pairing = pair_folders(images, masks)
    assert pairing.report.ok
    assert [(p.id, p.images, p.mask) for p in pairing.pairs] == [(subject, (images / image,), masks / mask)]


def test_files_are_matched_by_name_not_by_order(tmp_path):
    touch(tmp_path / "i", "b.nii", "a.nii", "c.nii")
    touch(tmp_path / "m", "c_seg.nii", "a_seg.nii", "b_seg.nii")
    pairs = pair_folders(tmp_path / "i", tmp_path / "m").pairs
    assert [(p.images[0].name[0], p.mask.name[0]) for p in pairs] == [("a", "a"), ("b", "b"), ("c", "c")]


def test_unmatched_files_are_named(tmp_path):
    touch(tmp_path / "i", "a.nii", "b.nii")
    touch(tmp_path / "m", "a.nii", "z.nii")
    pairing = pair_folders(tmp_path / "i", tmp_path / "m")
    assert [p.id for p in pairing.pairs] == ["a"]
    assert {f.code for f in pairing.report.errors} == {"unmatched"}
    with pytest.raises(FilesError, match=r"b\.nii: no mask.*; and 1 more file with errors") as caught:
        pairing.report.raise_errors()
    assert [(Path(file).name, problem[:8]) for file, problem in caught.value.rows] == [
        ("b.nii", "no mask "),
        ("z.nii", "no image"),
    ]


def test_ambiguous_files_are_named(tmp_path):
    touch(tmp_path / "i", "a.nii", "b_t1.nii", "b_T1w.nii")
    touch(tmp_path / "m", "a_seg.nii", "a_dseg.nii", "b_seg.nii")
    messages = [f.message for f in pair_folders(tmp_path / "i", tmp_path / "m").report.errors]
    assert len(messages) == 2
    assert "a_dseg.nii" in messages[0] and "a_seg.nii" in messages[0] and "several masks" in messages[0]
    assert "b_T1w.nii" in messages[1] and "several T1w images" in messages[1]


def test_the_modality_of_the_contract_is_chosen(tmp_path):
    touch(tmp_path, "a_t1.nii", "a_flair.nii", "a_seg.nii")
    assert pair_folders(tmp_path, tmp_path, ("FLAIR",)).pairs[0].images == (tmp_path / "a_flair.nii",)


@pytest.mark.parametrize("endings", [("_t1", "_t1ce", "_t2", "_flair"), ("-t1n", "-t1c", "-t2w", "-t2f")])
def test_four_images_per_subject_in_the_order_of_the_contract(tmp_path, endings):
    for subject in ("BraTS-1", "BraTS-2"):
        touch(tmp_path / subject, *(f"{subject}{e}.nii.gz" for e in endings), f"{subject}{endings[0][0]}seg.nii.gz")
    pairing = pair_folders(tmp_path, tmp_path, BRATS.images)
    assert pairing.report.ok and len(pairing.pairs) == 2
    assert [p.name for p in pairing.pairs[1].images] == [f"BraTS-2{e}.nii.gz" for e in endings]


def test_bids_names_of_four_images_per_subject(tmp_path):
    names = [f"sub-1_ses-{i}" for i in (1, 2)]
    for name in names:
        touch(tmp_path, *(f"{name}{e}.nii.gz" for e in ("_T1w", "_ce-gadolinium_T1w", "_T2w", "_FLAIR", "_dseg")))
    pairing = pair_folders(tmp_path, tmp_path, BRATS.images)
    assert pairing.report.ok and [p.id for p in pairing.pairs] == names
    assert [p.name for p in pairing.pairs[0].images][1] == "sub-1_ses-1_ce-gadolinium_T1w.nii.gz"
    # An image with a contrast agent is not the T1w image of a model for one image.
    assert [p.images[0].name for p in pair_folders(tmp_path, tmp_path, ("T1w",)).pairs] == [
        f"{name}_T1w.nii.gz" for name in names
    ]


def test_a_missing_channel_is_named(tmp_path):
    touch(tmp_path, *(f"{s}_{e}.nii.gz" for s in "ab" for e in ("t1", "t1ce", "t2", "flair", "seg")))
    (tmp_path / "a_t2.nii.gz").unlink()
    [message] = [f.message for f in pair_folders(tmp_path, tmp_path, BRATS.images).report.errors]
    assert "no T2w image for subject a" in message


@pytest.mark.parametrize(
    ("endings", "images", "message"),
    [
        (["t2"], ("T1w",), "2 T2w images, but no T1w; T1w is required"),
        (["t2", "flair"], ("T1w",), "2 T2w and 2 FLAIR images, but no T1w; T1w is required"),
        (["t1", "t2"], BRATS.images, "2 T1w and 2 T2w images, but no T1ce or FLAIR"),
        (["image"], BRATS.images, "2 unnamed images, but no T1w, T1ce, T2w or FLAIR"),
    ],
)
def test_a_folder_of_other_kinds_is_refused_in_one_line(tmp_path, endings, images, message):
    touch(tmp_path, *(f"{s}_{e}.nii.gz" for s in "ab" for e in (*endings, "seg")))
    [finding] = pair_folders(tmp_path, tmp_path, images).report.errors
    assert finding.message.startswith(f"{tmp_path}: {message}")


def test_ignored_kinds_are_said(tmp_path):
    touch(tmp_path, *(f"{s}_{e}.nii.gz" for s in "ab" for e in ("t1", "t2", "seg")))
    pairing = pair_folders(tmp_path, tmp_path, ("T1w",))
    assert len(pairing.pairs) == 2
    assert [f.message for f in pairing.report.warnings] == [f"{tmp_path}: ignoring 2 T2w images; using only T1w"]


def test_names_without_a_kind_are_the_single_image(tmp_path):
    touch(tmp_path / "i", "a.nii", "b_image.nii", "c_FLAIR.nii")
    touch(tmp_path / "m", "a.nii", "b.nii", "c.nii")
    assert [p.id for p in pair_folders(tmp_path / "i", tmp_path / "m", ("FLAIR",)).pairs] == ["a", "b", "c"]
    pairing = pair_folders(tmp_path / "i", tmp_path / "m", ("T1w",))
    assert [p.id for p in pairing.pairs] == ["a", "b"]
    assert "no T1w image for subject c" in pairing.report.errors[0].message


def test_the_kind_of_a_folder(tmp_path):
    touch(tmp_path / "none", "a.nii", "a_seg.nii")
    touch(tmp_path / "one", "a_t2.nii", "b_T2w.nii", "a_seg.nii")
    touch(tmp_path / "two", *(f"{s}_{e}.nii" for s in "abc" for e in ("T1w", "T2w", "seg")))
    kind, sentence = folder_images(tmp_path / "none", tmp_path / "none", "FLAIR")
    assert kind == "FLAIR" and "no file name" in sentence
    assert folder_images(tmp_path / "one", tmp_path / "one", "T1w")[0] == "T2w"
    with pytest.raises(InputError) as error:
        folder_images(tmp_path / "two", tmp_path / "two", "T1w")
    assert str(error.value) == (
        f"{tmp_path / 'two'}: 3 T1w and 3 T2w images; choose one: --image T1w or --image T2w (both: --image T1w,T2w)"
    )


def test_masks_below_the_images_folder(tmp_path):
    touch(tmp_path, "sub-1/anat/sub-1_T1w.nii.gz", "derivatives/masks/sub-1/anat/sub-1_dseg.nii.gz")
    assert len(pair_folders(tmp_path, tmp_path / "derivatives").pairs) == 1


def test_empty_and_missing_folders(tmp_path):
    (tmp_path / "i").mkdir()
    (tmp_path / "i" / "._a.nii").write_bytes(b"")
    assert pair_folders(tmp_path / "i", tmp_path / "i").report.errors[0].code == "no-files"
    with pytest.raises(InputError, match="no such folder"):
        pair_folders(tmp_path / "gone", tmp_path / "i")


def test_a_folder_of_masks_alone_is_one_line(tmp_path):
    touch(tmp_path, *(f"sub-{n}_dseg.nii.gz" for n in range(30)))
    for function in (pair_folders, lambda a, b: folder_images(a, b, "T1w")):
        with pytest.raises(InputError, match="no images, only masks") as caught:
            function(tmp_path, tmp_path)
        assert not isinstance(caught.value, FilesError)


def test_the_images_of_masks_are_those_of_the_model_and_others_only_with_a_warning(tmp_path):
    images, masks = tmp_path / "images", [tmp_path / f"sub-{n}_dseg.nii.gz" for n in range(4)]
    touch(images, *(f"sub-0_{kind}.nii.gz" for kind in ("FLAIR", "T1w", "T2w")), "sub-1.nii.gz")
    of_model = {
        masks[0]: (images / "sub-0_T1w.nii.gz", images / "sub-0_FLAIR.nii.gz"),
        masks[1]: (images / "sub-1.nii.gz",),
    }
    assert images_of_masks(masks, images, ("T1w", "FLAIR")) == (of_model, None)
    touch(images, "sub-2_T2w.nii.gz")
    partners, warning = images_of_masks(masks, images, ("T1w", "FLAIR"))
    assert partners == {**of_model, masks[2]: (images / "sub-2_T2w.nii.gz",)}
    assert warning == f"{images}: 1 of the masks has no T1w or FLAIR image; using T2w instead"
