"""Reference volume, mask, origin and label names of each volume."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from voxtune.data.bids import mark_simulated, write_cohort
from voxtune.data.cases import find_cases
from voxtune.data.nifti import Volume, write_volume
from voxtune.errors import InputError

TINY = Volume(array=np.zeros((2, 2, 2), np.uint8), affine=np.eye(4))


def put(*paths):
    for path in paths:
        write_volume(path, TINY.array, TINY)


def names(case):
    [image] = case.images
    return tuple(None if p is None else p.name for p in (image.volume, image.reference, case.mask))


def test_volume_reference_and_mask_in_one_folder(tmp_path):
    put(*(tmp_path / f"sub-1_{end}.nii.gz" for end in ("desc-synth01_T1w", "desc-synth02_T1w", "T1w", "dseg")))
    cases = find_cases(tmp_path)
    assert [names(c) for c in cases.cases] == [
        ("sub-1_desc-synth01_T1w.nii.gz", "sub-1_T1w.nii.gz", "sub-1_dseg.nii.gz"),
        ("sub-1_desc-synth02_T1w.nii.gz", "sub-1_T1w.nii.gz", "sub-1_dseg.nii.gz"),
    ]
    assert [(c.subject, c.note) for c in cases.cases] == [("sub-1", "synth01 T1w"), ("sub-1", "synth02 T1w")]
    assert cases.origin == "synthetic" and not cases.warnings


def test_real_volumes_and_masks_in_separate_folders(tmp_path):
    put(tmp_path / "synth" / "a.nii", tmp_path / "synth" / "b.nii")
    put(tmp_path / "real" / "a.nii.gz", tmp_path / "masks" / "a.nii.gz", tmp_path / "masks" / "b.nii.gz")
    cases = find_cases(tmp_path / "synth", real=tmp_path / "real", masks=tmp_path / "masks")
    assert [names(c) for c in cases.cases] == [("a.nii", "a.nii.gz", "a.nii.gz"), ("b.nii", None, "b.nii.gz")]
    assert len(cases.warnings) == 1 and "1 of 2 cases have no unique real volume (b)" in cases.warnings[0]
    assert [c.subject for c in find_cases(tmp_path / "synth", limit=1).cases] == ["a"]


def test_the_sidecar_names_the_mask_and_its_labels(tmp_path):
    put(tmp_path / "out" / "x_desc-synth01_T1w.nii.gz", tmp_path / "elsewhere" / "x_seg.nii.gz")
    record = {"mask": "x_seg.nii.gz", "Sources": ["../elsewhere/x_seg.nii.gz"], "labels": {"3": "lesion", "?": "no"}}
    (tmp_path / "out" / "x_desc-synth01_T1w.json").write_text(json.dumps(record))
    outside = find_cases(tmp_path / "out")
    assert names(outside.cases[0])[2] is None
    assert outside.warnings == ("1 of 1 cases have no unique mask (x); pass --masks DIR to name the folder",)
    for folder in (tmp_path, tmp_path / "elsewhere"):
        cases = find_cases(tmp_path / "out", masks=folder)
        assert names(cases.cases[0])[2] == "x_seg.nii.gz" and not cases.warnings
    assert {v: label.name for v, label in cases.legend.items()} == {3: "lesion"}


def test_only_regular_files_in_the_given_folders_are_opened(tmp_path):
    """Neither through a link in the folder, nor a pipe, nor a sidecar or a table of labels elsewhere."""
    put(tmp_path / "private" / "secret.nii.gz", tmp_path / "private" / "x_dseg.nii.gz")
    private = {"labels": {"1": "secret"}, "Sources": ["../private/x_dseg.nii.gz"], "mask": "x_dseg.nii.gz"}
    (tmp_path / "private" / "secret.json").write_text(json.dumps(private))
    (tmp_path / "private" / "dseg.tsv").write_text("index\tname\n1\tsecret\n")
    out = tmp_path / "out"
    put(out / "x_desc-synth01_T1w.nii.gz")
    (out / "x_desc-synth01_T1w.json").symlink_to(tmp_path / "private" / "secret.json")
    (out / "dseg.tsv").symlink_to(tmp_path / "private" / "dseg.tsv")
    (out / "y_desc-synth01_T1w.nii.gz").symlink_to(tmp_path / "private" / "secret.nii.gz")
    (out / "x_dseg.nii.gz").symlink_to(tmp_path / "private" / "x_dseg.nii.gz")
    (out / "loop_T1w.nii.gz").symlink_to(out / "loop_T1w.nii.gz")
    os.mkfifo(out / "x_T1w.nii.gz")
    cases = find_cases(out)
    assert [names(c) for c in cases.cases] == [("x_desc-synth01_T1w.nii.gz", None, None)]
    assert not cases.legend and not cases.cases[0].record
    assert "4 files not shown" in cases.warnings[0] and "--real or --masks" in cases.warnings[0]
    # The user may give the folder that the links lead to.
    assert names(find_cases(out, masks=tmp_path / "private").cases[0])[2] == "x_dseg.nii.gz"
    (out / "x_desc-synth01_T1w.nii.gz").unlink()
    with pytest.raises(InputError, match="not a regular file in the given folders"):
        find_cases(out)


def test_images_that_a_sidecar_names_are_found_by_name(tmp_path):
    """Sidecars hold names without folders; a name that several subjects have is the subject's own."""
    put(tmp_path / "out" / "x_desc-synth01_T1w.nii.gz")
    put(
        tmp_path / "real" / "x_T1w.nii.gz",
        tmp_path / "m" / "x_T1w.nii.gz",
        tmp_path / "m" / "x_seg.nii.gz",
    )
    record = {"mask": "x_seg.nii.gz", "Sources": ["x_seg.nii.gz", "x_T1w.nii.gz"]}
    record |= {"mask_labels": {"1": "tumour", "image": "brain"}}
    (tmp_path / "out" / "x_desc-synth01_T1w.json").write_text(json.dumps(record))
    case = find_cases(tmp_path / "out", real=tmp_path / "real", masks=tmp_path / "m").cases[0]
    assert case.from_image.images == (), "two files of this name"
    (tmp_path / "m" / "x_T1w.nii.gz").unlink()
    case = find_cases(tmp_path / "out", real=tmp_path / "real", masks=tmp_path / "m").cases[0]
    assert case.from_image.images == (tmp_path / "real" / "x_T1w.nii.gz",)


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"Sources": 3, "labels": [1], "mask": null}', '{"Sources": [7, "../q"]}']
)
def test_an_invalid_sidecar_is_ignored(tmp_path, text):
    put(tmp_path / "x_desc-synth01_T1w.nii.gz")
    (tmp_path / "x_desc-synth01_T1w.json").write_text(text)
    assert names(find_cases(tmp_path).cases[0])[1:] == (None, None)


def test_another_modality_is_not_a_reference(tmp_path):
    put(tmp_path / "x_desc-synth01_T1w.nii.gz", tmp_path / "x_FLAIR.nii.gz")
    assert find_cases(tmp_path).cases[0].images[0].reference is None


def test_folders_without_a_match_are_rejected(tmp_path):
    put(tmp_path / "s" / "a.nii", tmp_path / "r" / "other.nii")
    with pytest.raises(InputError, match=r"no image of the same subject as a\.nii"):
        find_cases(tmp_path / "s", real=tmp_path / "r")
    with pytest.raises(InputError, match=r"no mask of the same subject as a\.nii"):
        find_cases(tmp_path / "s", masks=tmp_path / "r")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no volumes"):
        find_cases(tmp_path / "empty")
    with pytest.raises(InputError, match="no such folder"):
        find_cases(tmp_path / "absent")


def kinds(case):
    return [(image.kind, image.volume.name, image.reference and image.reference.name) for image in case.images]


def test_images_of_a_subject_are_one_case(tmp_path):
    """Flat names and BIDS folders, with or without a session; the kinds are in the order of the registry."""
    for number in ("01", "02"):
        for kind in ("FLAIR", "T2w", "T1w"):
            put(tmp_path / "flat" / f"x_desc-synth{number}_{kind}.nii.gz")
            put(tmp_path / "bids" / "sub-1" / "ses-2" / "anat" / f"sub-1_ses-2_desc-synth{number}_{kind}.nii.gz")
        put(tmp_path / "bids" / "sub-1" / "ses-2" / "anat" / f"sub-1_ses-2_ce-gadolinium_desc-synth{number}_T1w.nii.gz")
    put(tmp_path / "real" / "sub-1_ses-2_t1ce.nii.gz", tmp_path / "real" / "sub-1_ses-2_t1.nii.gz")
    flat = find_cases(tmp_path / "flat").cases
    assert [(c.subject, c.number, c.note) for c in flat] == [
        ("x", "synth01", "synth01 T1w, T2w, FLAIR"),
        ("x", "synth02", "synth02 T1w, T2w, FLAIR"),
    ]
    cases = find_cases(tmp_path / "bids", real=tmp_path / "real")
    assert [c.name for c in cases.cases] == [f"sub-1_ses-2 synth{n} T1w, T1ce, T2w, FLAIR" for n in ("01", "02")]
    assert kinds(cases.cases[0])[:3] == [
        ("T1w", "sub-1_ses-2_desc-synth01_T1w.nii.gz", "sub-1_ses-2_t1.nii.gz"),
        ("T1ce", "sub-1_ses-2_ce-gadolinium_desc-synth01_T1w.nii.gz", "sub-1_ses-2_t1ce.nii.gz"),
        ("T2w", "sub-1_ses-2_desc-synth01_T2w.nii.gz", None),
    ]
    assert "2 of 2 cases have no unique real volume (sub-1_ses-2)" in cases.warnings[-1]
    assert [c.number for c in find_cases(tmp_path / "bids", limit=1).cases] == ["synth01"]


def test_images_of_the_same_kind_or_of_no_kind_are_cases_of_their_own(tmp_path):
    put(*(tmp_path / name for name in ("a/x_t1.nii.gz", "b/x_t1.nii.gz", "b/x_t2.nii.gz", "b/x.nii.gz")))
    cases = [(c.name, [i.volume.parent.name for i in c.images]) for c in find_cases(tmp_path).cases]
    assert sorted(cases) == [("x", ["b"]), ("x T1w", ["a"]), ("x T1w, T2w", ["b", "b"])]


def test_cohort_subjects_are_called_simulated(tmp_path):
    write_cohort(tmp_path / "cohort", 1, 0, (8, 8, 8))
    put(tmp_path / "out" / "sub-0000_desc-synth01_T1w.nii.gz")
    cases = find_cases(tmp_path / "out", real=tmp_path / "cohort")
    assert (cases.origin, cases.cases[0].reference_origin) == ("synthetic", "simulated")
    assert find_cases(tmp_path / "cohort").origin == "simulated"
    # A description as version 0.1 wrote it.
    old = {"Name": "voxtune cohort", "DatasetType": "raw", "GeneratedBy": [{"Name": "voxtune"}]}
    (tmp_path / "cohort" / "dataset_description.json").write_text(json.dumps(old))
    assert find_cases(tmp_path / "cohort").origin == "simulated"


def test_real_is_a_scan_of_the_user_and_reference_a_volume_of_unknown_origin(tmp_path):
    put(
        tmp_path / "out" / "a_desc-synth01_T1w.nii.gz",
        tmp_path / "out" / "a_T1w.nii.gz",
        tmp_path / "mine" / "a.nii.gz",
    )
    assert find_cases(tmp_path / "out").cases[0].reference_origin == "reference"
    assert find_cases(tmp_path / "out", real=tmp_path / "mine").cases[0].reference_origin == "real"
    assert find_cases(tmp_path / "mine").origin == "volume"
    mark_simulated(tmp_path / "out" / "a_T1w.nii.gz")
    assert find_cases(tmp_path / "out").cases[0].reference_origin == "simulated"


def test_an_image_that_a_label_was_taken_from_must_be_in_a_given_folder(tmp_path):
    put(
        tmp_path / "out" / "x_desc-synth01_T1w.nii.gz",
        tmp_path / "data" / "x_seg.nii.gz",
        tmp_path / "data" / "x_T1w.nii.gz",
        tmp_path / "masks" / "x_seg.nii.gz",
    )
    sources = ["../data/x_seg.nii.gz", "../data/x_T1w.nii.gz"]
    record = {"mask": "x_seg.nii.gz", "Sources": sources, "mask_labels": {"1": "tumour", "image": "brain"}}
    sidecar = tmp_path / "out" / "x_desc-synth01_T1w.json"
    sidecar.write_text(json.dumps(record))
    outside = find_cases(tmp_path / "out", masks=tmp_path / "masks")
    assert outside.cases[0].from_image.images == ()
    assert "brain was taken from the image and is not in the mask; pass --real DIR" in outside.warnings[0]
    inside = find_cases(tmp_path / "out", real=tmp_path / "data")
    assert inside.cases[0].from_image.images == ((tmp_path / "data" / "x_T1w.nii.gz").resolve(),)
    assert {v: label.name for v, label in inside.legend.items()} == {1: "tumour", 2: "brain"}
    assert not inside.warnings
    # With --labels, only its names are used; the brain has a value beside them.
    named = find_cases(tmp_path / "out", real=tmp_path / "data", labels="lesion=7").legend
    assert {v: label.name for v, label in named.items()} == {7: "lesion", 8: "brain"}
    for source in ("../data/absent.nii.gz", "a\0.nii.gz", "a" * 5000 + ".nii.gz", 3):
        sidecar.write_text(json.dumps({**record, "Sources": [sources[0], source]}))
        assert find_cases(tmp_path / "out", real=tmp_path / "data").cases[0].from_image.images == ()
