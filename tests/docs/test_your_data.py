"""The guide "Your data in five minutes": its script runs on small cases with BraTS names, and its text shows the script."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

import voxtune
from tests.factories.brats import SHAPE, SPACING, write_brats
from voxtune.data.contract import PRESETS
from voxtune.data.labels import parse_labels
from voxtune.data.modality import image_kind

ROOT = Path(__file__).parent.parent.parent
GUIDE = ROOT / "docs" / "guide" / "your-data.md"
SCRIPT = ROOT / "docs" / "guide" / "your_data.sh"
KINDS = {"T1w": "T1w", "T1ce": "T1w", "T2w": "T2w", "FLAIR": "FLAIR"}


def commands(text: str) -> list[str]:
    """The lines of a shell script without comments, its options and the arguments."""
    skipped = re.compile(r"#|set -|data=")
    return [line for line in text.splitlines() if line and not skipped.match(line)]


def test_the_guide_shows_the_script():
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert commands("\n".join(blocks)) == commands(SCRIPT.read_text())


def rows(first_column: str) -> list[list[str]]:
    """The cells of the guide's table with this first column."""
    table = GUIDE.read_text().split(f"| {first_column} |", 1)[1].split("\n\n", 1)[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_the_tables_of_the_guide_are_true():
    for kind, endings in rows("kind"):
        for ending in re.findall(r"`(.+?)`", endings):
            assert image_kind(Path(f"sub-01_{ending}.nii.gz")) == kind, ending
    presets = {text.strip("`"): meaning for text, meaning in rows("`--labels`")}
    assert {"brats", "brats2021", "whole-head"} <= set(presets) & set(PRESETS)
    parsed = parse_labels("brats2021")
    assert [str(entry) for entry in parsed.entries] == [
        "necrotic core=1",
        "oedema=2",
        "enhancing tumour=4",
        "brain=image",
    ]
    assert presets["brats2021"].startswith("1 necrotic core, 2 oedema, 4 enhancing tumour")


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The folder that the script writes, and what it prints."""
    root = tmp_path_factory.mktemp("your-data")
    data = write_brats(root / "data", 2)
    binaries = root / "bin"
    binaries.mkdir()
    (binaries / "voxtune").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m voxtune "$@"\n')
    (binaries / "voxtune").chmod(0o755)
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", SCRIPT, data, root / "out", "2"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    (root / "out" / "printed.txt").write_text(done.stdout)
    return root / "out"


@pytest.mark.slow
def test_the_model_has_the_labels_and_images_of_the_data(out):
    model = voxtune.load(out / "run")
    contract = model.config.data
    assert contract.images == tuple(KINDS)
    names = ["necrotic core", "oedema", "enhancing tumour", "brain"]
    assert [label.name for label in sorted(contract.labels, key=lambda label: label.channel)] == names
    assert contract.size == (32, 32, 32)


@pytest.mark.slow
def test_the_volumes_have_the_names_of_bids_and_the_grid_of_their_masks(out):
    for number in range(2):
        subject = f"sub-BraTS2021{number:05d}"
        folder = out / "synth" / subject / "anat"
        contrast = "ce-gadolinium_"
        expected = {f"{subject}_{contrast * (k == 'T1ce')}desc-synth01_{s}.nii.gz" for k, s in KINDS.items()}
        assert {file.name for file in folder.glob("*.nii.gz")} == expected
        for name in expected:
            image, mask = nib.load(folder / name), nib.load(mask_of(out, number))
            np.testing.assert_array_equal(image.affine, mask.affine)
            assert image.shape == SHAPE and np.allclose(image.header.get_zooms(), SPACING)
            voxels = image.get_fdata()
            assert voxels.min() >= 0 and voxels.max() <= 1 and voxels.std() > 0
        record = json.loads((folder / f"{subject}_desc-synth01_T2w.json").read_text())
        assert record["steps"] == 10 and record["sampler"] == "dpm++"


def mask_of(out: Path, number: int) -> Path:
    name = f"BraTS2021_{number:05d}"
    return out.parent / "data" / name / f"{name}_seg.nii.gz"


@pytest.mark.slow
def test_every_kind_has_metrics(out):
    stored = json.loads((out / "metrics" / "metrics.json").read_text())
    names = {figure["name"] for figure in stored["figures"]}
    assert {f"psnr_{kind}" for kind in KINDS} <= names
    assert stored["counts"]["pairs"] == 2


@pytest.mark.slow
def test_the_page_exists(out):
    page = (out / "view.html").read_text()
    assert "BraTS2021_00000" in page or "BraTS202100000" in page


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_python_draws_the_volumes_of_the_script(out):
    model = voxtune.load(out / "run")
    mask = mask_of(out, 1)
    image = mask.with_name(mask.name.replace("_seg", "_t1"))
    drawn = model.draw_images(mask, image=image, labels="brats2021", sampler="dpm++", steps=10)
    folder = out / "synth" / "sub-BraTS202100001" / "anat"
    for kind, volume in drawn.items():
        entity = "ce-gadolinium_" if kind == "T1ce" else ""
        file = folder / f"sub-BraTS202100001_{entity}desc-synth01_{KINDS[kind]}.nii.gz"
        np.testing.assert_allclose(volume.array, nib.load(file).get_fdata(), atol=1e-4)
