"""voxtune evaluate on valid, incomplete and damaged folders."""

from __future__ import annotations

import json
import shutil

import nibabel as nib
import numpy as np
import pytest
import torch

from voxtune.cli.main import main
from voxtune.config import to_mapping
from voxtune.data.bids import write_cohort
from voxtune.data.cohort import cohort_contract
from voxtune.quality.tissue import SIZES
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, load_segmenter, save_segmenter, shipped_segmenter
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
    assert {
        "grey_white_contrast",
        "grey_white_contrast_real",
        "grey_white_ratio",
        "csf_fraction",
        "lesion_contrast",
    } <= set(metrics)
    # Sizes that no lesion of these few subjects has.
    sized = {name for name in (*metrics, *stored["left_out"]) if name.startswith(("lesion_dice_", "lesion_detection_"))}
    every = {f"{name}_{size}" for name in ("lesion_dice", "lesion_detection") for size in SIZES}
    assert every <= sized and set(stored["left_out"]) < sized
    assert all("no mask of these volumes has a lesion of this size" in reason for reason in stored["left_out"].values())
    for name, figure in metrics.items():
        if name not in sized:
            assert figure["seed"] == 7 and figure["n"] >= 3 and figure["resamples"] >= 25, figure
        assert figure["low"] <= figure["high"], figure
    assert metrics["ms_ssim"]["low"] <= metrics["ms_ssim"]["value"] <= metrics["ms_ssim"]["high"]
    assert "| fid |" in (tmp_path / "out" / "metrics.md").read_text()
    [row, *_] = stored["volumes"]
    assert row["nearest"] in files_below(training) and row["file"] in files_below(synth) and 0 < row["ms_ssim"] < 1


def files_below(folder):
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*.nii.gz")]


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
    assert "skipped psnr, ms_ssim: no synthetic volume matches a reference volume by name" in out
    assert (
        "skipped dice, grey_white_contrast, grey_white_ratio, csf_fraction" in out
        and ": no masks; pass their folder" in out
    )
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
        (lambda a, r, s, m, n: [r, s, "-o", n / "config.json" / "x"], "is not a folder"),
    ],
)
def test_wrong_folders_are_refused(capsys, folders, tmp_path, change, word):
    code, _, err = run(capsys, "-o", tmp_path / "out", *change(tmp_path, *folders))
    assert code == 2 and word in err and err.count("\n") == 1, err


def with_labels(masks, to, change):
    """A copy of the masks with other label values."""
    shutil.copytree(masks, to)
    for path in sorted(to.rglob("*_dseg.nii.gz")):
        image = nib.load(path)
        labels = change(np.asanyarray(image.dataobj), path.name)
        nib.save(nib.Nifti1Image(labels.astype(np.uint8), image.affine), path)
    return to


@pytest.mark.parametrize("every", [True, False])
def test_masks_of_other_labels_leave_dice_out_and_name_the_segmenter(capsys, folders, tmp_path, every):
    real, synth, masks, network = folders
    brats = with_labels(masks, tmp_path / "m", lambda a, name: np.where((a == 2) & (every or "0002" in name), 4, a))
    code, out, err = run(capsys, real, synth, "-o", tmp_path / "out", "--masks", brats, "--json", *networks(network))
    assert code == 0, err
    result = json.loads(out)
    reason = result["left_out"]["dice"]
    assert f"of 4 masks do not have the labels of the segmenter {network.name}" in reason
    assert reason.startswith("4 of 4" if every else "1 of 4") and "unknown label 4" in reason
    assert "sub-0002_dseg.nii.gz" in reason or every
    assert "1 (brain), 2 (tumour)" in reason and "--segmenter" in reason
    assert result["segmenter"] is None and "fid" in figures(out) and "psnr" in figures(out)
    assert "dice" not in result["volumes"][0]


def test_networks_for_other_image_kinds_are_left_out(capsys, folders, tmp_path):
    real, synth, masks, network = folders
    for name, folder in (("real", real), ("synth", synth)):
        (tmp_path / name).mkdir()
        for path in folder.rglob("*_T1w.nii.gz"):
            shutil.copy(path, tmp_path / name / path.name.replace("_T1w", "_FLAIR"))
    options = ("--masks", masks, *networks(network))
    code, out, err = run(capsys, tmp_path / "real", tmp_path / "synth", "-o", tmp_path / "out", "--json", *options)
    assert code == 0, err
    result = json.loads(out)
    for name in ("fid", "mmd", "nearest_feature", "dice"):
        assert f"the segmenter {network.name} reads T1w images, not FLAIR" in result["left_out"][name]
    assert {"psnr", "ms_ssim", "histogram_w1", "nearest_voxel"} <= set(figures(out))
    assert result["features"] is result["segmenter"] is None


def test_the_reference_value_stands_beside_the_synthetic_one(capsys, folders, tmp_path):
    real, synth, masks, network = folders
    code, out, err = run(capsys, real, synth, "-o", tmp_path / "out", "--masks", masks, *networks(network))
    assert code == 0, err
    stored = json.loads((tmp_path / "out" / "metrics.json").read_text())
    by_name = {f["name"]: f for f in stored["figures"]}
    assert by_name["dice_brain"]["real"] == by_name["dice_brain_real"]["value"]
    assert "real" not in by_name["psnr"] and "real" not in by_name["dice_brain_real"]
    table = (tmp_path / "out" / "metrics.md").read_text()
    assert "| metric | value | reference | interval |" in table
    cells = next(line for line in table.splitlines() if line.startswith("| dice_brain |")).split("|")
    assert float(cells[3]) == pytest.approx(by_name["dice_brain_real"]["value"], abs=1e-3)
    header = next(line for line in out.splitlines() if line.startswith("metric"))
    assert header.split()[:3] == ["metric", "value", "reference"]
    # Random weights do not recognise the tumour.
    weak = next(line for line in stored["warnings"] if "weak" in line)
    assert f"the segmenter {network.name} is weak on the reference volumes" in weak
    assert "dice_tumour_real is 0.0" in weak and "dice_tumour" in weak.split("so ")[1]


def test_a_judge_warns_of_reference_volumes_unlike_its_training_data(capsys, folders, tmp_path):
    real, synth, masks, network = folders
    data = to_mapping(load_segmenter(shipped_segmenter()).config.training_data)
    of_children = {key: value / 3 for key, value in data["labelled_ml"].items()}
    coarse = {**data, "outside_share": dict.fromkeys(data["outside_share"], 0.15)}
    for number, statistics in enumerate((coarse, {**coarse, "labelled_ml": of_children})):
        judge = shutil.copytree(network, tmp_path / f"judge{number}")
        config = json.loads((judge / "config.json").read_text())
        (judge / "config.json").write_text(json.dumps({**config, "training_data": statistics}))
        options = ("--masks", masks, *networks(judge))
        code, _, err = run(capsys, real, synth, "-o", tmp_path / f"out{number}", "-q", *options)
        assert code == 0, err
        lines = [line for line in err.splitlines() if "training data" in line]
        assert len(lines) == number, err
    assert f"4 of 4 reference volumes are far outside the training data of the segmenter {judge}" in lines[0]
    assert "sub-0000_T1w.nii.gz: labels of" in lines[0]


def test_the_included_judge_accepts_held_out_simulated_subjects(capsys, tmp_path):
    pairs = write_cohort(tmp_path / "real", 2, 0, (64, 64, 64), healthy_fraction=0.0, first=100_000)
    (tmp_path / "synth").mkdir()
    for pair in pairs:
        shutil.copy(pair.images[0], tmp_path / "synth" / f"{pair.id}_desc-synth01_T1w.nii.gz")
    masks = tmp_path / "real" / "derivatives" / "masks"
    options = ("--masks", masks, "-q", "--resamples", 50, "--device", "cpu")
    code, _, err = run(capsys, tmp_path / "real", tmp_path / "synth", "-o", tmp_path / "out", *options)
    assert code == 0 and "training data" not in err, err


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


def test_masks_of_real_volumes_are_checked_too(capsys, folders, tmp_path):
    real, synth, masks, network = folders
    shutil.copytree(masks, tmp_path / "masks")
    # Generated for the first subjects only: the last mask belongs to a real volume alone.
    shutil.copytree(synth, tmp_path / "synth")
    next((tmp_path / "synth").glob("sub-0003*")).unlink()
    path = next((tmp_path / "masks").rglob("sub-0003_dseg.nii.gz"))
    image = nib.load(path)
    nib.save(nib.Nifti1Image(np.asanyarray(image.dataobj)[:-2], image.affine), path)
    options = ("--masks", tmp_path / "masks", *networks(network))
    code, _, err = run(capsys, real, tmp_path / "synth", "-o", tmp_path / "out", *options)
    assert code == 2 and "shape" in err and "sub-0003" in err


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
