"""`voxtune sample` as a long job: resumed, with errors skipped, locked, and without private paths in its records."""

from __future__ import annotations

import getpass
import json
import os
import socket
import subprocess
import sys

import pytest

from tests.factories.cli import run
from tests.factories.nifti import write_mask
from voxtune.files import locked_folder


@pytest.fixture
def command(imported_model, tmp_path):
    """A command that draws three volumes in two batches."""
    (tmp_path / "masks").mkdir()
    for number in range(3):
        write_mask(tmp_path / "masks" / f"sub-{number}_dseg.nii.gz")
    options = ("--steps", "2", "--batch", "2", "--device", "cpu", "--plan", "baseline")
    return ("sample", imported_model, "--mask", tmp_path / "masks", "-o", tmp_path / "out", *options)


def contents(folder):
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_resume_completes_a_folder(capsys, command, tmp_path):
    out = tmp_path / "out"
    assert run(capsys, *command, "--picture")[0] == 0
    whole = contents(out)
    (out / "sub-1" / "anat" / "sub-1_desc-synth01_T1w.nii.gz").unlink()
    (out / "sub-2" / "anat" / "sub-2_desc-synth01_T1w.png").unlink()
    (out / ".voxtune-abcd1234.part").write_text("of a killed process")
    code, _, err = run(capsys, *command, "--picture")
    assert code == 2 and "pass --resume to keep it and go on, or pass --overwrite" in err
    code, text, err = run(capsys, *command, "--picture", "--resume", "--dry-run")
    assert code == 0 and "would generate 2 volumes" in text and "sub-0_desc" not in text, err
    code, text, err = run(capsys, *command, "--picture", "--resume", "--json")
    assert code == 0 and "1 of 3 volumes finished; 2 incomplete ones drawn again" in err
    result = json.loads(text)
    assert result["finished_before"] == 1 and len(result["volumes"]) == 2 and result["skipped"] == []
    assert contents(out) == whole, "the same bytes, and nothing of the killed process"
    code, text, _ = run(capsys, *command, "--picture", "--resume")
    assert code == 0 and "3 of 3 volumes finished" in text and "generating" not in text
    code, _, err = run(capsys, *command, "--resume", "--seed", "1")
    assert code == 2 and "was drawn with seed 0, not 1" in err
    code, _, err = run(capsys, *command, "--resume", "--overwrite")
    assert code == 2 and "--overwrite cannot be combined with --resume" in err


def test_a_resumed_job_keeps_its_batch(capsys, command, tmp_path):
    assert run(capsys, *command)[0] == 0
    (tmp_path / "out" / "sub-0" / "anat" / "sub-0_desc-synth01_T1w.json").unlink()
    automatic = [word if word != "2" or command[i - 1] != "--batch" else "auto" for i, word in enumerate(command)]
    code, text, _ = run(capsys, *automatic, "--resume", "--json")
    assert code == 0 and json.loads(text)["batch"] == 2


def test_a_mask_with_an_error_stops_or_is_skipped(capsys, command, tmp_path):
    (tmp_path / "masks" / "sub-1_dseg.nii.gz").write_bytes(b"damaged")
    code, _, err = run(capsys, *command)
    assert code == 2 and "sub-1_dseg.nii.gz" in err and not (tmp_path / "out").exists()
    code, text, err = run(capsys, *command, "--on-error", "skip", "--json")
    result = json.loads(text)
    assert code == 3 and len(result["volumes"]) == 2
    assert [row["file"].endswith("sub-1_dseg.nii.gz") for row in result["skipped"]] == [True]
    assert "warning: 1 file skipped" in err
    write_mask(tmp_path / "masks" / "sub-1_dseg.nii.gz")
    code, _, err = run(capsys, *command, "--on-error", "skip", "--resume")
    assert code == 0, err
    assert len(list((tmp_path / "out").rglob("*.nii.gz"))) == 3


def test_two_jobs_cannot_share_a_folder(capsys, command, tmp_path):
    with locked_folder(tmp_path / "out"):
        code, _, err = run(capsys, *command)
    assert code == 2 and f"in use by another Voxtune process (PID {os.getpid()})" in err
    assert not (tmp_path / "out").exists()


def test_records_hold_names_and_hashes(capsys, command, tmp_path):
    """No absolute path, no path that leaves the folder, no user or host name."""
    assert run(capsys, *command, "--picture")[0] == 0
    private = [str(tmp_path).encode(), f"/{getpass.getuser()}/".encode()]
    for name, data in contents(tmp_path / "out").items():
        words = private if name.endswith(".png") else [*private, b"../", socket.gethostname().encode()]
        assert not any(word in data for word in words), name
    record = json.loads((tmp_path / "out" / "sub-0" / "anat" / "sub-0_desc-synth01_T1w.json").read_text())
    assert record["Sources"] == ["sub-0_dseg.nii.gz"] and len(record["sources_sha256"][0]) == 64
    assert record["model"] == command[1].name and len(record["model_sha256"]) == 64
    assert run(capsys, *command, "--picture", "--overwrite", "--record-paths")[0] == 0
    record = json.loads((tmp_path / "out" / "sub-0" / "anat" / "sub-0_desc-synth01_T1w.json").read_text())
    assert record["Sources"] == [str(tmp_path / "masks" / "sub-0_dseg.nii.gz")]


@pytest.mark.parametrize("names", [[b"sub-\xff\xfe_dseg.nii.gz"], [b"sub-1\x1b[31m_dseg.nii.gz"], [b"-o_dseg.nii.gz"]])
@pytest.mark.slow
def test_odd_names_of_the_users_files(command, tmp_path, names):
    """Names that are not UTF-8, or contain terminal commands, are printed escaped."""
    for file in (tmp_path / "masks").iterdir():
        file.unlink()
    for name in names:
        made = write_mask(tmp_path / "plain.nii.gz")
        made.rename(os.fsdecode(os.fsencode(tmp_path / "masks") + b"/" + name))
    words = [os.fspath(word) for word in command]
    done = subprocess.run([sys.executable, "-m", "voxtune", *words], capture_output=True, check=False)
    assert done.returncode in (0, 2) and b"\x1b" not in done.stdout + done.stderr, done.stderr
    assert b"Traceback" not in done.stderr
