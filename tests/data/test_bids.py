"""The simulated cohort on disk: a BIDS layout, deterministic bytes, and safe overwriting."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest

from voxtune.cli.main import main
from voxtune.data import bids
from voxtune.data.bids import is_simulated, write_cohort
from voxtune.data.cohort import subject
from voxtune.data.pairing import pair_folders
from voxtune.data.simulation import simulate
from voxtune.errors import InputError

SIZE = (16, 18, 20)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bids") / "cohort"
    write_cohort(folder, 3, 7, SIZE)
    return folder


def find_subjects(folder):
    pairing = pair_folders(folder, folder / "derivatives")
    pairing.report.raise_errors()
    return pairing.pairs


def contents(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_layout(cohort):
    assert sorted(contents(cohort)) == sorted(
        ["README", "dataset_description.json", "participants.tsv"]
        + ["derivatives/masks/dataset_description.json", "derivatives/masks/dseg.tsv"]
        + [f"sub-000{i}/anat/sub-000{i}_T1w.nii.gz" for i in range(3)]
        + [f"derivatives/masks/sub-000{i}/anat/sub-000{i}_dseg.nii.gz" for i in range(3)]
    )
    raw = json.loads((cohort / "dataset_description.json").read_text())
    masks = json.loads((cohort / "derivatives/masks/dataset_description.json").read_text())
    assert raw["DatasetType"] == "raw" and masks["DatasetType"] == "derivative"
    assert raw["BIDSVersion"] and raw["GeneratedBy"][0]["Name"] == "voxtune"
    assert (
        all("simulated subjects" in d["Name"] for d in (raw, masks)) and "Simulated" in (cohort / "README").read_text()
    )
    rows = (cohort / "participants.tsv").read_text().splitlines()
    assert rows[0].startswith("participant_id\t") and [r.split("\t")[0] for r in rows[1:]] == [
        "sub-0000",
        "sub-0001",
        "sub-0002",
    ]
    assert (cohort / "derivatives/masks/dseg.tsv").read_text().splitlines()[1:] == [
        "0\tbackground",
        "1\tbrain",
        "2\ttumour",
    ]


def test_files_contain_the_subjects(cohort):
    pairs = find_subjects(cohort)
    assert [p.id for p in pairs] == ["sub-0000", "sub-0001", "sub-0002"]
    for index, pair in enumerate(pairs):
        expected = subject(7, index, SIZE)
        image, mask = nib.load(pair.images[0]), nib.load(pair.mask)
        assert np.allclose(image.affine, expected.affine, atol=1e-4) and np.array_equal(image.affine, mask.affine)
        assert np.array_equal(np.asanyarray(mask.dataobj).transpose(2, 1, 0), expected.labels_DHW)
        assert np.abs(image.get_fdata().transpose(2, 1, 0) / 1000 - expected.image_DHW).max() <= 0.00051
        assert mask.get_data_dtype() == np.uint8


def test_writing_is_deterministic(cohort, tmp_path):
    seen = []
    write_cohort(tmp_path / "again", 3, 7, SIZE, callback=lambda done, n: seen.append((done, n)))
    assert contents(tmp_path / "again") == contents(cohort) and seen == [(1, 3), (2, 3), (3, 3)]


def test_a_folder_that_is_not_empty_is_rejected(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="not empty"):
        write_cohort(tmp_path, 1, 0, SIZE)
    with pytest.raises(InputError, match="other than those of a voxtune cohort"):
        write_cohort(tmp_path, 1, 0, SIZE, overwrite=True)
    with pytest.raises(InputError, match="is a file"):
        write_cohort(tmp_path / "thesis.txt", 1, 0, SIZE)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_cohort_that_another_process_writes_meanwhile_is_kept(tmp_path, monkeypatch):
    out, locked = tmp_path / "out", bids.locked_folder

    def late(folder):
        monkeypatch.setattr(bids, "locked_folder", locked)
        write_cohort(out, 1, 0, SIZE)
        return locked(folder)

    monkeypatch.setattr(bids, "locked_folder", late)
    with pytest.raises(InputError, match="not empty"):
        write_cohort(out, 1, 1, SIZE)
    write_cohort(tmp_path / "alone", 1, 0, SIZE)
    assert contents(out) == contents(tmp_path / "alone")


def test_overwriting_removes_earlier_subjects(tmp_path):
    write_cohort(tmp_path, 2, 0, SIZE)
    with pytest.raises(InputError, match="not empty"):
        write_cohort(tmp_path, 1, 1, SIZE)
    # Also with the description that version 0.1 wrote.
    description = tmp_path / "dataset_description.json"
    description.write_text(json.dumps({**json.loads(description.read_text()), "Name": "voxtune cohort"}))
    write_cohort(tmp_path, 1, 1, SIZE, overwrite=True)
    assert [p.id for p in find_subjects(tmp_path)] == ["sub-0000"]


def test_other_files_are_never_removed(tmp_path):
    """Neither in a user's dataset with generated volumes, nor beside the subjects of a cohort."""
    (tmp_path / "bids" / "sub-01").mkdir(parents=True)
    made_by = {"Name": "Synthetic MRI", "GeneratedBy": [{"Name": "voxtune"}]}
    (tmp_path / "bids" / "dataset_description.json").write_text(json.dumps(made_by))
    with pytest.raises(InputError, match="other than those of a voxtune cohort"):
        write_cohort(tmp_path / "bids", 1, 0, SIZE, overwrite=True)
    assert (tmp_path / "bids" / "sub-01").is_dir()
    write_cohort(tmp_path / "c", 2, 0, SIZE)
    cohort = tmp_path / "c"
    strangers = ["sub-9_T1w.nii.gz", "sub-0001/anat/notes.txt", "sub-0001/anat/sub-0000_T1w.nii.gz", "sub-0007/x/y"]
    for name in strangers:
        (cohort / name).parent.mkdir(parents=True, exist_ok=True)
        (cohort / name).write_text("precious")
        before = contents(cohort)
        with pytest.raises(InputError, match=f"{name}: is not a file of this cohort"):
            write_cohort(cohort, 1, 0, SIZE, overwrite=True)
        assert contents(cohort) == before
        (cohort / name).unlink()
    (cohort / "sub-0001" / "anat" / "link").symlink_to(cohort / "README")
    with pytest.raises(InputError, match="link: is not a file of this cohort"):
        write_cohort(cohort, 1, 0, SIZE, overwrite=True)
    (cohort / "sub-0001" / "anat" / "link").unlink()
    before = contents(cohort)
    with pytest.raises(InputError, match="other than those of a voxtune cohort"):
        write_cohort(tmp_path / "c" / "derivatives" / "masks", 1, 0, SIZE, overwrite=True)
    assert contents(cohort) == before
    (cohort / "README").write_text("precious")
    (cohort / "notes.txt").write_text("precious")
    write_cohort(cohort, 1, 0, SIZE, overwrite=True)
    assert (cohort / "notes.txt").read_text() == "precious"
    assert not (cohort / "sub-0001").exists() and not (cohort / "derivatives" / "masks" / "sub-0001").exists()


def test_a_cohort_that_was_killed_is_replaced(tmp_path):
    """Without its list of participants, and with the lock and a temporary file that were left behind."""
    write_cohort(tmp_path, 2, 0, SIZE)
    (tmp_path / "participants.tsv").unlink()
    (tmp_path / ".voxtune.lock").write_text("1")
    (tmp_path / "sub-0001" / "anat" / ".voxtune-abcd1234.part").write_text("half")
    write_cohort(tmp_path, 1, 0, SIZE, overwrite=True)
    assert "sub-0001" not in " ".join(contents(tmp_path))
    assert not [name for name in contents(tmp_path) if "voxtune" in name]


def test_invalid_number_of_subjects(tmp_path):
    with pytest.raises(InputError, match="1 or more"):
        write_cohort(tmp_path / "x", 0, 0, SIZE)


def test_version_2_has_several_kinds_a_sheet_and_a_template(tmp_path, capsys):
    command = ["cohort", "2", "-o", str(tmp_path / "c"), "--size", "24,24,24", "--quiet"]
    kinds = ["--cohort-version", "2", "--image", "t1,t1ce,flair", "--healthy", "0"]
    extra = ["--contact-sheet", str(tmp_path / "sheet.png"), "--write-template", str(tmp_path / "t.safetensors")]
    assert main([*command, *kinds, *extra]) == 0
    folder = tmp_path / "c" / "sub-0001" / "anat"
    names = ["sub-0001_FLAIR.nii.gz", "sub-0001_T1w.nii.gz", "sub-0001_ce-gadolinium_T1w.nii.gz"]
    assert sorted(p.name for p in folder.iterdir()) == names
    drawn = simulate(0, 1, (24, 24, 24), kinds=("T1w", "T1ce", "FLAIR"), healthy_fraction=0.0)
    stored = nib.load(folder / names[2]).get_fdata().transpose(2, 1, 0) / 1000
    assert np.abs(stored - drawn.images_DHW["T1ce"]).max() <= 0.00051
    text = (tmp_path / "c" / "dataset_description.json").read_text()
    assert '\\"version\\": 2' in text and is_simulated(folder / names[0])
    assert "None of the subjects is a real person" in (tmp_path / "c" / "README").read_text().replace("\n", " ")
    assert (tmp_path / "sheet.png").read_bytes().startswith(b"\x89PNG") and (
        tmp_path / "t.safetensors"
    ).stat().st_size > 2**20
    # A sheet is not replaced without --overwrite; version 1 replaces all kinds of version 2.
    assert main([*command, *kinds, *extra[:2]]) == 2
    assert "sheet.png" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    assert [p.name for p in folder.iterdir()] == ["sub-0001_T1w.nii.gz"]
    assert '\\"version\\"' not in (tmp_path / "c" / "dataset_description.json").read_text()
    assert main([*command, "--image", "t2", "--overwrite"]) == 2
    assert "--cohort-version 2" in capsys.readouterr().err
