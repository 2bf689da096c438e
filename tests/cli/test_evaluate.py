"""voxtune evaluate on valid, incomplete and damaged folders."""

from __future__ import annotations

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import torch

from voxtune.cli.main import main
from voxtune.data.bids import write_cohort
from voxtune.data.cohort import cohort_contract
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, save_segmenter
from voxtune.workloads.segment import SegmentConfig

SIZE = (24, 24, 24)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(real, synth, masks, network): the synthetic volumes are the real ones with noise, named as `sample` names them."""
    root = tmp_path_factory.mktemp("evaluate")
    pairs = write_cohort(root / "real", 4, 0, SIZE, healthy_fraction=0.0)
    write_cohort(root / "training", 3, 1, SIZE, healthy_fraction=0.0)
    rng = np.random.default_rng(0)
    (root / "synth").mkdir()
    for pair in pairs:
        image = nib.load(pair.images[0])
        noisy = image.get_fdata().astype(np.float32) + rng.normal(0, 40, image.shape).astype(np.float32)
        nib.save(nib.Nifti1Image(noisy, image.affine), root / "synth" / f"{pair.id}_desc-synth01_T1w.nii.gz")
    torch.manual_seed(0)
    config = SegmenterConfig(network=SegmentConfig(base=4), data=cohort_contract(SIZE))
    network = save_segmenter(Segmenter(config), root / "network", card="")
    return root / "real", root / "synth", root / "real" / "derivatives" / "masks", network


def run(capsys, *arguments):
    code = main(["evaluate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def figures(text):
    return {f["name"]: f for f in json.loads(text)["figures"]}


def networks(network):
    return ("--features", network, "--segmenter", network, "--resamples", 50)


def test_every_metric_has_its_interval_count_seed_and_hash(capsys, folders, tmp_path):
    real, synth, masks, network = folders
    training = real.parent / "training"
    options = ("--masks", masks, "--training", training, "--seed", 7, *networks(network))
    code, out, err = run(capsys, real, synth, "-o", tmp_path / "out", "--json", *options)
    assert code == 0, err
    assert "covariance is singular" in err
    stored = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert stored == json.loads(out)
    assert stored["counts"] == {"real": 4, "synth": 4, "training": 3, "pairs": 4}
    assert stored["features"]["sha256"] == stored["segmenter"]["sha256"]
    assert len(stored["features"]["sha256"]) == 64
    metrics = figures(out)
    expected = (
        "psnr ms_ssim diversity diversity_real histogram_w1 histogram_js fid mmd dice_brain dice_tumour dice_brain_real"
    )
    assert set(expected.split()) <= set(metrics)
    assert {"nearest_voxel_ratio", "nearest_feature_copies"} <= set(metrics)
    assert stored["left_out"] == {}
    for figure in metrics.values():
        assert figure["seed"] == 7 and figure["n"] >= 3 and figure["resamples"] >= 25, figure
        assert figure["low"] <= figure["high"], figure
    assert metrics["ms_ssim"]["low"] <= metrics["ms_ssim"]["value"] <= metrics["ms_ssim"]["high"]
    assert "| fid |" in (tmp_path / "out" / "metrics.md").read_text()
    [row, *_] = stored["volumes"]
    assert row["nearest"].startswith(str(training)) and 0 < row["ms_ssim"] < 1


def test_the_same_volumes_are_perfect_copies(capsys, folders, tmp_path):
    real, _, masks, network = folders
    code, out, err = run(capsys, real, real, "-o", tmp_path, "--json", "--masks", masks, *networks(network))
    assert code == 0, err
    metrics = figures(out)
    assert metrics["psnr"]["value"] is None and "equals" in metrics["psnr"]["note"]
    assert metrics["ms_ssim"]["value"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["fid"]["value"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["histogram_w1"]["value"] == metrics["histogram_js"]["value"] == 0
    assert metrics["nearest_voxel_copies"]["value"] == 1.0
    assert metrics["dice_brain"]["value"] == metrics["dice_brain_real"]["value"]


def test_metrics_with_missing_inputs_are_skipped_with_the_reason(capsys, folders, tmp_path):
    real, synth, _, network = folders
    shutil.copytree(synth, tmp_path / "s")
    for number, path in enumerate(sorted((tmp_path / "s").iterdir())):
        path.rename(path.with_name(f"volume{number}.nii.gz"))
    code, out, err = run(capsys, real, tmp_path / "s", "-o", tmp_path / "out", "--resamples", 50, "--features", network)
    assert code == 0, err
    assert "skipped  psnr: no synthetic volume matches a reference volume by name" in out
    assert "skipped  dice: no masks" in out
    assert "fid" in out


def test_a_result_is_not_replaced_without_overwrite(capsys, folders, tmp_path):
    real, synth, _, network = folders
    arguments = (real, synth, "-o", tmp_path, "-q", *networks(network))
    assert run(capsys, *arguments)[0] == 0
    code, _, err = run(capsys, *arguments)
    assert code == 2 and "--overwrite" in err
    first = (tmp_path / "metrics.json").read_text()
    assert run(capsys, *arguments, "--overwrite")[0] == 0
    assert (tmp_path / "metrics.json").read_text() == first


def damage(path, kind):
    image = nib.load(path)
    array = image.get_fdata().astype(np.float32)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:300])
    elif kind == "nan":
        array[3, 3, 3] = np.nan
        nib.save(nib.Nifti1Image(array, image.affine), path)
    elif kind == "size":
        nib.save(nib.Nifti1Image(array[:-1], image.affine), path)
    elif kind == "affine":
        nib.save(nib.Nifti1Image(array, np.diag([3, 3, 3, 1])), path)
    elif kind == "four":
        nib.save(nib.Nifti1Image(np.stack([array] * 2, axis=-1), image.affine), path)


@pytest.mark.parametrize("kind", ["cut", "nan", "size", "affine", "four"])
def test_damaged_volumes_end_with_one_line_that_names_them(capsys, folders, tmp_path, kind):
    real, synth, _, network = folders
    shutil.copytree(synth, tmp_path / "s")
    bad = sorted((tmp_path / "s").iterdir())[1]
    damage(bad, kind)
    code, _, err = run(capsys, real, tmp_path / "s", "-o", tmp_path / "out", "-q", *networks(network))
    lines = err.strip().splitlines()
    assert code == 2 and len(lines) == 1, err
    assert bad.name in err and lines[0].startswith("voxtune: error: ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda a, r, s, m, n: [a / "none", s], "no such folder"),
        (lambda a, r, s, m, n: [r, a], "no NIfTI"),
        (lambda a, r, s, m, n: [r, s, "--masks", a], "no NIfTI"),
        (lambda a, r, s, m, n: [r, s, "--features", a], "config.json"),
        (lambda a, r, s, m, n: [r, s, "--segmenter", a / "x"], "no such segmenter"),
        (lambda a, r, s, m, n: [r, s, "--image", "FLAIR"], "FLAIR"),
        (lambda a, r, s, m, n: [r, s, "--resamples", 3], "resamples"),
        (lambda a, r, s, m, n: [r, s, "-o", n / "config.json" / "x"], "is a file"),
    ],
)
def test_wrong_folders_are_refused(capsys, folders, tmp_path, change, word):
    code, _, err = run(capsys, "-o", tmp_path / "out", *change(tmp_path, *folders))
    assert code == 2 and word in err and err.count("\n") == 1, err


def test_masks_of_other_labels_name_the_file(capsys, folders, tmp_path):
    real, synth, masks, network = folders
    shutil.copytree(masks, tmp_path / "m")
    bad = sorted((tmp_path / "m").rglob("*_dseg.nii.gz"))[2]
    image = nib.load(bad)
    nib.save(nib.Nifti1Image(np.full(image.shape, 7, dtype=np.uint8), image.affine), bad)
    code, _, err = run(capsys, real, synth, "-o", tmp_path / "out", "-q", "--masks", tmp_path / "m", *networks(network))
    assert code == 2 and bad.name in err and "unknown label 7" in err


def test_a_segmenter_trains_from_the_command_line(capsys, folders, tmp_path):
    real, _, masks, _ = folders
    options = ["--size", "24,24,24", "--base", "4", "--steps", "2", "--batch", "2", "--device", "cpu", "--json"]
    data = ["--images", str(real), "--masks", str(masks)]
    command = ["train", "--workload", "segment", *options, "-o", str(tmp_path / "seg")]
    assert main([*command, *data]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 2 and set(result["dice"]) == {"brain", "tumour"}
    for extra, word in ((data, "already"), ([], "no data"), ([*data, "--loss", "l1"], "loss")):
        target = [] if word == "already" else ["-o", str(tmp_path / "other")]
        assert main([*command, *extra, *target]) == 2
        assert word in capsys.readouterr().err


def test_copies_are_found_where_only_some_volumes_have_masks(capsys, folders, tmp_path):
    """Scans larger than the network's grid, the head not in their middle: all sets are cropped alike."""
    real, _, masks, network = folders
    for name in ("real", "synth", "training", "masks"):
        (tmp_path / name).mkdir()

    def larger(path, to):
        image = nib.load(path)
        data = np.zeros((40, 40, 40), np.asanyarray(image.dataobj).dtype)
        data[:24, 12:36, 16:40] = np.asanyarray(image.dataobj)
        nib.save(nib.Nifti1Image(data, image.affine), to)

    for number in range(2):
        theirs = next(real.parent.joinpath("training").rglob(f"sub-000{number}_T1w.nii.gz"))
        larger(theirs, tmp_path / "training" / f"t{number}_T1w.nii.gz")
        larger(theirs, tmp_path / "synth" / f"sub-000{number}_desc-synth01_T1w.nii.gz")
        larger(next(real.rglob(f"sub-000{number}_T1w.nii.gz")), tmp_path / "real" / f"sub-000{number}_T1w.nii.gz")
        larger(next(masks.rglob(f"sub-000{number}_dseg.nii.gz")), tmp_path / "masks" / f"sub-000{number}_dseg.nii.gz")
    options = ("--masks", tmp_path / "masks", "--training", tmp_path / "training", "--json", *networks(network))
    code, out, err = run(capsys, tmp_path / "real", tmp_path / "synth", "-o", tmp_path / "out", *options)
    assert code == 0, err
    metrics = figures(out)
    assert metrics["nearest_voxel"]["value"] == 0 and metrics["nearest_voxel_copies"]["value"] == 1


@pytest.mark.parametrize(("change", "word"), [("shape", "shape"), ("label", "unknown label 7")])
def test_masks_of_real_volumes_are_checked_too(capsys, folders, tmp_path, change, word):
    real, synth, masks, network = folders
    shutil.copytree(masks, tmp_path / "masks")
    # Generated for the first subjects only: the last mask belongs to a real volume alone.
    shutil.copytree(synth, tmp_path / "synth")
    next((tmp_path / "synth").glob("sub-0003*")).unlink()
    path = next((tmp_path / "masks").rglob("sub-0003_dseg.nii.gz"))
    labels = np.asanyarray(nib.load(path).dataobj).copy()
    labels = labels[:-2] if change == "shape" else np.where(labels == 1, 7, labels).astype(np.uint8)
    nib.save(nib.Nifti1Image(labels, nib.load(path).affine), path)
    options = ("--masks", tmp_path / "masks", *networks(network))
    code, _, err = run(capsys, real, tmp_path / "synth", "-o", tmp_path / "out", *options)
    assert code == 2 and word in err and "sub-0003" in err


def test_thick_slices_leave_ms_ssim_out(capsys, folders, tmp_path):
    real, synth, _, network = folders
    for name, folder in (("real", real), ("synth", synth)):
        (tmp_path / name).mkdir()
        for path in folder.rglob("*_T1w.nii.gz"):
            image = nib.load(path)
            thick = np.asarray(image.dataobj)[:, :, ::3]
            nib.save(nib.Nifti1Image(thick, image.affine @ np.diag([1, 1, 3, 1])), tmp_path / name / path.name)
    code, out, err = run(
        capsys, tmp_path / "real", tmp_path / "synth", "-o", tmp_path / "out", "--json", *networks(network)
    )
    assert code == 0, err
    assert "fewer than 11 voxels" in json.loads(out)["left_out"]["ms_ssim"] and "psnr" in figures(out)
    assert all(row["ms_ssim"] is None for row in json.loads(out)["volumes"])
