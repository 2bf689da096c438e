"""MGH files wherever NIfTI is read: masks of sample, folders of pack, evaluate and view."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.factories.cli import run
from tests.factories.nifti import oblique_affine, save_mgh

AFFINE = oblique_affine("LIA", (12.0, 10.0, 12.0), (4, -7, 11))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Images and masks of four subjects, all in MGH."""
    root = tmp_path_factory.mktemp("mgh")
    for name in ("images", "masks"):
        (root / name).mkdir()
    for i in range(4):
        labels = np.zeros((14, 17, 11), np.uint8)
        labels[3:-3, 3:-3, 3:-3] = 1
        labels[5:7, 5 + i : 7 + i, 5:7] = 2
        image = (labels * 40 + np.random.default_rng(i).uniform(0, 5, labels.shape)).astype(np.float32)
        save_mgh(root / "images" / f"sub-{i}_T1w.mgz", image, AFFINE)
        save_mgh(root / "masks" / f"sub-{i}_dseg.{'mgh' if i == 3 else 'mgz'}", labels, AFFINE)
    return root


def test_volumes_from_mgh_masks_are_nifti_with_the_same_affine(capsys, imported_model, folder, tmp_path):
    out = tmp_path / "out"
    code, text, err = run(capsys, "sample", imported_model, "-m", folder / "masks", "-o", out, "--steps", 1, "--json")
    assert code == 0, err
    files = [file for volume in json.loads(text)["volumes"] for file in volume["files"]]
    assert [Path(file).name for file in files] == [f"sub-{i}_desc-synth01_T1w.nii.gz" for i in range(4)]
    mask = nib.load(folder / "masks" / "sub-0_dseg.mgz")
    for file in files:
        volume = nib.load(file)
        assert volume.shape == mask.shape and np.array_equal(volume.affine, mask.affine)
        assert volume.get_sform(coded=True)[1] == volume.get_qform(coded=True)[1] == 1
        assert np.allclose(volume.get_qform(), mask.affine, atol=1e-3)
    code, text, err = run(capsys, "view", out, "--masks", folder / "masks", "-o", tmp_path / "view.html", "--json")
    assert code == 0 and len(json.loads(text)["cases"]) == 4, err
    assert not any("mask" in warning for warning in json.loads(text)["warnings"])


def test_subjects_are_packed_from_mgh(capsys, folder, tmp_path):
    options = ["--images", folder / "images", "--masks", folder / "masks", "--size", "16,16,16", "--json"]
    code, out, err = run(capsys, "pack", *options, "-o", tmp_path / "subjects.npz")
    assert code == 0, err
    assert (json.loads(out)["subjects"], json.loads(out)["held_out"]) == (3, 1)


def test_mgh_volumes_are_evaluated(capsys, folder, tmp_path):
    images = folder / "images"
    options = ["--masks", folder / "masks", "--resamples", 50, "--json"]
    code, out, err = run(capsys, "evaluate", images, images, *options, "-o", tmp_path / "result")
    assert code == 0, err
    result = json.loads(out)
    assert result["counts"]["pairs"] == 4
    assert {figure["name"]: figure["value"] for figure in result["figures"]}["ms_ssim"] == pytest.approx(1.0, abs=1e-6)
    [oblique] = [warning for warning in result["warnings"] if "oblique" in warning]
    assert oblique.startswith("8 of 8 files, such as ")
