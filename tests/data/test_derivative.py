"""Names of generated volumes in both layouts, and the way back from a volume to the subject of its mask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from voxtune.data.derivative import (
    bids_subject,
    check_stems,
    dataset_root,
    describe_dataset,
    mask_stem,
    output_names,
    subject_of,
)
from voxtune.errors import InputError


@pytest.mark.parametrize(
    ("mask", "stem", "subject"),
    [
        ("sub-01_dseg.nii.gz", "sub-01", "sub-01"),
        ("sub-01_ses-2_acq-x_run-1_dseg.nii.gz", "sub-01_ses-2_acq-x_run-1", "sub-01_ses-2_acq-x_run-1"),
        ("sub-01_desc-lesion_mask.nii", "sub-01_desc-lesion", "sub-01"),
        ("sub-01_ce-gadolinium_label.nii.gz", "sub-01_ce-gadolinium", "sub-01"),
        ("sub-01_T1w_seg.nii.gz", "sub-01_T1w", "sub-01"),
        ("sub-01_brain_seg.nii.gz", "sub-01_brain", "sub-01brain"),
        ("case_12_labels.nii.gz", "case_12", "sub-case12"),
        ("case 12.nii.gz", "case 12", "sub-case12"),
        ("BraTS20_Training_001_seg.nii.gz", "BraTS20_Training_001", "sub-BraTS20Training001"),
        ("BraTS-GLI-00000-000-seg.nii.gz", "BraTS-GLI-00000-000-seg", "sub-BraTSGLI00000000"),
        ("sub-03/anat/dseg.nii.gz", "anat", "sub-anat"),
        ("patient_7/seg.nii.gz", "patient_7", "sub-patient7"),
        ("Größe.nii", "Größe", "sub-Gre"),
        ("sub-04_dseg.mgz", "sub-04", "sub-04"),
        ("bert/mri/aseg.mgz", "bert", "sub-bert"),
        ("bert/mri/aparc.DKTatlas+aseg.mgz", "bert", "sub-bert"),
    ],
)
def test_stem_and_subject(tmp_path, mask, stem, subject):
    assert mask_stem(tmp_path / mask) == stem
    assert bids_subject(tmp_path / mask) == subject


def test_bids_layout():
    masks = [Path("m/sub-01_ses-b_run-2_dseg.nii.gz"), Path("m/case_12.nii.gz")]
    assert output_names(masks, 2, ("T1w", "T1ce"), flat=False) == [
        [
            (
                f"sub-01/ses-b/anat/sub-01_ses-b_run-2_desc-synth0{n}_T1w.nii.gz",
                f"sub-01/ses-b/anat/sub-01_ses-b_ce-gadolinium_run-2_desc-synth0{n}_T1w.nii.gz",
            )
            for n in (1, 2)
        ],
        [
            (
                f"sub-case12/anat/sub-case12_desc-synth0{n}_T1w.nii.gz",
                f"sub-case12/anat/sub-case12_ce-gadolinium_desc-synth0{n}_T1w.nii.gz",
            )
            for n in (1, 2)
        ],
    ]


def test_flat_layout(tmp_path):
    masks = [tmp_path / "sub-2_dseg.nii.gz", tmp_path / "x_seg.nii", tmp_path / "y.nii.gz", tmp_path / "z" / "seg.nii"]
    assert output_names(masks, 1, ("T1w", "T1ce"), flat=True) == [
        [("sub-2_desc-synth01_T1w.nii.gz", "sub-2_desc-synth01_T1ce.nii.gz")],
        [("x_desc-synth01_T1w.nii.gz", "x_desc-synth01_T1ce.nii.gz")],
        [("y_desc-synth01_T1w.nii.gz", "y_desc-synth01_T1ce.nii.gz")],
        [("z_desc-synth01_T1w.nii.gz", "z_desc-synth01_T1ce.nii.gz")],
    ]
    numbered = output_names(masks[:1], 101, ("T1w",), flat=True)[0]
    assert numbered[-1] == ("sub-2_desc-synth101_T1w.nii.gz",)


@pytest.mark.parametrize(
    ("names", "flat", "message"),
    [
        (("a/sub-01_dseg.nii.gz", "b/sub-01_dseg.nii.gz"), True, "a/sub-01_dseg.nii.gz and .*determines the noise"),
        (("sub-01_dseg.nii.gz", "sub-01_mask.nii"), True, "have the same name"),
        (("sub-01_dseg.nii.gz", "SUB-01_dseg.nii.gz"), True, "have the same name"),
        (("sub-01_dseg.nii.gz", "sub-01_dseg.nii.gz"), False, "given twice; pass --count"),
        (("case_12.nii.gz", "case-12.nii.gz"), False, "sub-case12, so their volumes would overwrite .*--flat"),
        (("sub-1_desc-a_dseg.nii.gz", "sub-1_desc-b_dseg.nii.gz"), False, "overwrite each other"),
        (("病.nii.gz",), False, "no letter or digit"),
    ],
)
def test_names_that_collide_are_refused(names, flat, message):
    with pytest.raises(InputError, match=message):
        output_names([Path(name) for name in names], 1, ("T1w",), flat=flat)


def test_names_that_collide_in_bids_only_can_be_flat():
    masks = [Path("case_12.nii.gz"), Path("case-12.nii.gz"), Path("病.nii.gz")]
    check_stems(masks)
    assert [names[0][0] for names in output_names(masks, 1, ("T1w",), flat=True)] == [
        "case_12_desc-synth01_T1w.nii.gz",
        "case-12_desc-synth01_T1w.nii.gz",
        "病_desc-synth01_T1w.nii.gz",
    ]


def test_the_description_is_written_once(tmp_path):
    describe_dataset(tmp_path / "out")
    file = tmp_path / "out" / "dataset_description.json"
    description = json.loads(file.read_text())
    assert description["DatasetType"] == "derivative" and description["GeneratedBy"][0]["Name"] == "voxtune"
    file.write_text("{}")
    describe_dataset(tmp_path / "out")
    assert file.read_text() == "{}"
    assert dataset_root(tmp_path / "out" / "sub-1" / "ses-2" / "anat" / "x.nii.gz") == tmp_path / "out"
    assert dataset_root(tmp_path / "else" / "x.nii.gz") == tmp_path / "else"


@pytest.mark.parametrize(
    ("stem", "subject"),
    [
        ("case_12", "case_12"),
        ("sub-01_desc-lesion", "sub-01"),
        ("a/b", "a_b"),
        ("", "sub-case12"),
        (7, "sub-case12"),
        ("x" * 256, "sub-case12"),
        ("a\nb", "sub-case12"),
    ],
)
def test_the_subject_of_a_generated_volume_is_that_of_its_mask(tmp_path, stem, subject):
    volume = tmp_path / "sub-case12_desc-synth01_T1w.nii.gz"
    assert subject_of(volume) == "sub-case12"
    (tmp_path / "sub-case12_desc-synth01_T1w.json").write_text(json.dumps({"noise": {"stem": stem}}))
    assert subject_of(volume) == subject
    (tmp_path / "sub-case12_T1w.json").write_text(json.dumps({"noise": {"stem": stem}}))
    assert subject_of(tmp_path / "sub-case12_T1w.nii.gz") == "sub-case12", "only generated volumes have such a sidecar"


@pytest.mark.parametrize("text", ["[]", "nonsense", '{"noise": 7}', '{"noise": []}', "[" * 10**5])
def test_a_damaged_sidecar_is_ignored(tmp_path, text):
    (tmp_path / "x_desc-synth01_T1w.json").write_text(text)
    assert subject_of(tmp_path / "x_desc-synth01_T1w.nii.gz") == "x"
