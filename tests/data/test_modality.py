"""Image kinds from file names, and the names that are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from voxtune.data.modality import (
    KINDS,
    bids_name,
    bids_stem,
    image_kind,
    kind_name,
    parse_images,
    same_kind,
    split_name,
)
from voxtune.errors import InputError


@pytest.mark.parametrize(
    ("name", "subject", "kind"),
    [
        ("sub-01_T1w.nii.gz", "sub-01", "T1w"),
        ("sub-01_ses-2_acq-mprage_T1w.nii", "sub-01_ses-2_acq-mprage", "T1w"),
        ("sub-01_ses-2_ce-gadolinium_run-1_T1w.nii.gz", "sub-01_ses-2_run-1", "T1ce"),
        ("sub-01_ce-gd_desc-synth01_T1w.nii.gz", "sub-01", "T1ce"),
        ("sub-01_ce-gadolinium_FLAIR.nii.gz", "sub-01", "FLAIR"),
        ("sub-01_space-MNI_desc-preproc_T2w.nii.gz", "sub-01_space-MNI", "T2w"),
        ("BraTS20_001_t1ce.nii.gz", "BraTS20_001", "T1ce"),
        ("BraTS-GLI-00000-000-t2f.nii.gz", "BraTS-GLI-00000-000", "FLAIR"),
        ("BraTS-GLI-00000-000-t2w.nii.gz", "BraTS-GLI-00000-000", "T2w"),
        ("UPENN-GBM-00001_11_T1GD.nii.gz", "UPENN-GBM-00001_11", "T1ce"),
        ("p1/flair.nii.gz", "p1", "FLAIR"),
        ("CE-01_T1w.nii.gz", "CE-01", "T1w"),
        ("ce-01_T1w.nii.gz", "ce-01", "T1w"),
        ("sub-01.nii.gz", "sub-01", None),
        ("sub-01_image.nii.gz", "sub-01", None),
        ("sub-01_desc-tumour_dseg.nii.gz", "sub-01", None),
    ],
)
def test_subject_and_kind_of_a_name(name, subject, kind):
    assert split_name(Path("data") / name)[0] == subject
    assert image_kind(Path("data") / name) == kind


@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_written_names_are_read_back(kind):
    for stem in ("sub-01", "sub-01_ses-2_run-1", "case_7"):
        path = Path(f"{bids_stem(stem, kind, 'synth01')}.nii.gz")
        assert (split_name(path)[0], image_kind(path)) == (stem, kind)


def test_entities_are_in_the_order_of_bids():
    assert bids_stem("sub-01_ses-2_run-1", "T1ce", "synth01") == "sub-01_ses-2_ce-gadolinium_run-1_desc-synth01_T1w"
    assert bids_stem("sub-01_ses-2_run-1", "T2w", "synth01") == "sub-01_ses-2_run-1_desc-synth01_T2w"
    assert bids_stem("run-3", "T1ce", "synth02") == "run-3_ce-gadolinium_desc-synth02_T1w"


def test_names_of_older_contracts_are_known():
    assert [kind_name(name) for name in ("T1", "T1ce", "T2", "FLAIR")] == ["T1w", "T1ce", "T2w", "FLAIR"]
    assert bids_name("T1") == ("", "T1w")
    assert bids_name("T1ce") == ("ce-gadolinium", "T1w")
    assert same_kind("t1n", "T1") and not same_kind("T1", "T1ce") and not same_kind("", "T1")


def test_the_suffix_of_an_unknown_image_cannot_leave_its_folder():
    assert bids_name("../../x_y") == ("", "xy")
    assert bids_name("_") == ("", "image")


def test_image_option():
    assert parse_images("t1, t1ce,T2,flair") == ("T1w", "T1ce", "T2w", "FLAIR")
    assert parse_images("CT") == ("CT",)
    for text, message in (("", "not an image kind"), ("t1,", "not an image kind"), ("a/b", "not an image kind")):
        with pytest.raises(InputError, match=message):
            parse_images(text)
    with pytest.raises(InputError, match="T1w is given twice"):
        parse_images("t1,T1w")
