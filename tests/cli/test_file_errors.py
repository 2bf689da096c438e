"""Errors of many files: a table on standard error, a text file with all, and advice that the command can follow."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import typer

from tests.factories.cli import run
from tests.factories.nifti import oblique_affine, write_mask
from voxtune.cli.main import app, main


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    """The system's temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def bad_masks(folder: Path, count: int) -> Path:
    folder.mkdir()
    for i in range(count):
        (folder / f"sub-{i:02d}_dseg.nii.gz").write_bytes(b"not an image")
    return folder


def test_three_files_are_a_table(capsys, imported_model, tmp_path, temporary):
    masks = bad_masks(tmp_path / "masks", 3)
    code, out, err = run(capsys, "sample", imported_model, "-m", masks, "-o", tmp_path / "out")
    title, *rows = err.splitlines()
    assert code == 2 and out == "" and title == "voxtune: error: 3 files cannot be used:"
    for i, row in enumerate(rows):
        file, problem = row.split(maxsplit=1)
        assert file == str(masks / f"sub-{i:02d}_dseg.nii.gz") and problem.startswith("not a NIfTI file")
    assert len(rows) == 3 and not list(temporary.iterdir()) and not (tmp_path / "out").exists()


def test_more_than_twenty_files_are_listed_in_a_text_file(capsys, imported_model, tmp_path, temporary):
    masks = bad_masks(tmp_path / "masks", 60)
    code, _, err = run(capsys, "sample", imported_model, "-m", masks, "-o", tmp_path / "out")
    progress, title, *rows, last = err.splitlines()
    [listed] = temporary.iterdir()
    assert code == 2 and progress.startswith("checking masks 60/60") and "60 files" in title and len(rows) == 20
    assert last == f"40 more; all of them: {listed}"
    lines = [line.split("\t") for line in listed.read_text().splitlines()]
    assert [Path(file).name for file, _ in lines] == [f"sub-{i:02d}_dseg.nii.gz" for i in range(60)]
    assert not (tmp_path / "out").exists()


def test_with_json_the_error_is_one_line(capsys, imported_model, tmp_path, temporary):
    masks = bad_masks(tmp_path / "masks", 25)
    code, out, err = run(capsys, "sample", imported_model, "-m", masks, "-o", tmp_path / "out", "--json")
    [listed] = temporary.iterdir()
    progress, err = err.split("\n", 1)
    assert progress.startswith("checking masks 25/25")
    assert code == 2 and out == "" and err.count("\n") == 1 and err.startswith("voxtune: error: ")
    assert "sub-00_dseg.nii.gz" in err and "and 24 more files with errors" in err and str(listed) in err
    assert len(listed.read_text().splitlines()) == 25


def test_control_characters_in_file_names_are_escaped(capsys, imported_model, tmp_path, temporary):
    masks = bad_masks(tmp_path / "masks", 2)
    (masks / "\x1b[2Jred\x07_dseg.nii").write_bytes(b"bad")
    for selected in (masks, masks / "\x1b[2Jred\x07_dseg.nii"):
        _, _, err = run(capsys, "sample", imported_model, "-m", selected, "-o", tmp_path / "out")
        assert "\x1b" not in err and "\x07" not in err and r"\x1b[2Jred\x07_dseg.nii" in err


def test_on_a_terminal_the_table_fits_its_width(imported_model, tmp_path, temporary, monkeypatch):
    masks = bad_masks(tmp_path / "masks", 2)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    reader, writer = os.openpty()
    with os.fdopen(writer, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        assert main(["sample", str(imported_model), "-m", str(masks), "-o", str(tmp_path / "out")]) == 2
        terminal.flush()
        text = re.sub(r"\x1b\[[0-9;]*m", "", os.read(reader, 2**16).decode())
    os.close(reader)
    _, heading, *rows = text.splitlines()
    assert heading.split() == ["file", "problem"]
    assert max(len(row) for row in rows) <= 60
    assert "".join(row[: heading.index("problem")].strip() for row in rows).count("_dseg.nii.gz") == 2


def test_a_full_temporary_folder_does_not_hide_the_errors(capsys, imported_model, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    code, _, err = run(
        capsys, "sample", imported_model, "-m", bad_masks(tmp_path / "masks", 21), "-o", tmp_path / "out"
    )
    assert code == 2 and "1 more; all of them: not written, No such file" in err


def wrong_labels(folder: Path, count: int = 2) -> Path:
    """Masks, and images of the same subjects, with a label that no contract has."""
    for i in range(count):
        mask = write_mask(folder.with_name("m") / f"sub-{i}_dseg.nii.gz", values=(0, 1, 77))
        image = nib.load(mask)
        nib.save(
            nib.Nifti1Image(np.asarray(image.dataobj).astype(np.float32), image.affine), folder / f"sub-{i}_T1w.nii.gz"
        )
    return folder


def options_of(command: str) -> set[str]:
    group = typer.main.get_command(app)
    return {name for param in group.commands[command].params for name in param.opts}


@pytest.mark.parametrize(
    ("command", "consumer", "cure"),
    [
        (["sample", "MODEL", "-m", "MASKS"], "the model", None),
        (["train", "--images", "IMAGES", "--masks", "MASKS", "--size", "16,16,16", "--steps", "1"], "", "--labels"),
        (["pack", "--images", "IMAGES", "--masks", "MASKS", "--size", "16,16,16"], "", "--labels"),
        (["usefulness", "MODEL", "--real", "IMAGES", "--masks", "MASKS"], "the model", None),
        (["evaluate", "IMAGES", "IMAGES", "--masks", "MASKS"], "the included segmenter", "--segmenter"),
    ],
)
def test_the_advice_names_only_options_of_the_command(capsys, imported_model, tmp_path, command, consumer, cure):
    (tmp_path / "i").mkdir()
    (tmp_path / "m").mkdir()
    images = wrong_labels(tmp_path / "i")
    places = {"MODEL": imported_model, "IMAGES": images, "MASKS": tmp_path / "m"}
    out = tmp_path / ("out.npz" if command[0] == "pack" else "out")
    code, text, err = run(capsys, *(places.get(part, part) for part in command), "-o", out)
    # An evaluation goes on without Dice, and gives the reason in its table.
    # A table folds its lines.
    text, expected = (" ".join(text.split()), 0) if command[0] == "evaluate" else (err, 2)
    assert code == expected and "unknown label 77" in text and consumer in text, text + err
    # Warnings may name other commands.
    errors = "\n".join(line for line in text.splitlines() if not line.startswith("warning: "))
    advised = set(re.findall(r"(?<= )--[a-z][a-z-]*", errors))
    assert advised <= options_of(command[0]) and (cure is None or cure in advised), text
    assert "renumber" not in text or not advised


def test_an_error_of_a_mask_names_the_mask_not_its_image(capsys, tmp_path):
    (tmp_path / "i").mkdir()
    (tmp_path / "m").mkdir()
    images = wrong_labels(tmp_path / "i")
    options = ["--masks", tmp_path / "m", "--labels", "brain=1,tumour=2"]
    code, _, err = run(capsys, "evaluate", images, images, *options, "-o", tmp_path / "out")
    title, *rows = err[err.index("voxtune: error") :].splitlines()
    assert code == 2 and "2 files" in title and not (tmp_path / "out").exists()
    assert [row.split()[0] for row in rows] == [str(tmp_path / "m" / f"sub-{i}_dseg.nii.gz") for i in range(2)]
    assert all("label 77" in row and str(images) not in row for row in rows)


def test_oblique_masks_are_announced_once_for_all(capsys, imported_model, tmp_path):
    for i in range(3):
        write_mask(tmp_path / f"sub-{i}_dseg.nii", affine=oblique_affine("RAS", (12.0, 12.0, 12.0), (0, 0, 5 + i)))
    code, out, err = run(capsys, "sample", imported_model, "-m", tmp_path, "-o", tmp_path / "out", "--steps", 1)
    assert code == 0, err
    assert err.count("axes are oblique") == 1 and "3 of 3 files" in err and "by up to 7.0 degrees" in err
    assert "axes are oblique" not in out
    for i in range(3):
        [made] = (tmp_path / "out").rglob(f"sub-{i}_desc-synth01_T1w.nii.gz")
        assert np.array_equal(nib.load(made).affine, nib.load(tmp_path / f"sub-{i}_dseg.nii").affine)


@pytest.mark.parametrize("text", ["²", "9" * 5000, "٣", "1,²,1", ""])
def test_characters_that_only_look_like_digits_are_wrong_input(capsys, text):
    """int() fails for some that str.isdigit accepts."""
    for options in (("info", "med-ddpm", f"--size={text or ','}"), ("ladder", "-o", "x", f"--rungs={text or '-'}")):
        assert main([*options]) == 2
        assert capsys.readouterr().err.startswith("voxtune: error: ")
    assert main(["sample", "demo", "-o", "x", f"--device=cuda:{text or '²'}"]) == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_on_a_full_disk_is_one_line(tmp_path):
    """Whether the failing write is that of a line, or the last flush; and nothing is printed where nothing can be."""
    for arguments in (["--version"], ["estimate", "med-ddpm", "--json"]):
        command = [sys.executable, "-m", "voxtune", *arguments]
        with Path("/dev/full").open("wb") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
            assert done.returncode == 2, done.stderr
            assert done.stderr.splitlines()[-1] == "voxtune: error: standard output: No space left on device"
            assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
            assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 2
