"""voxtune evaluate on volumes of several image kinds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from tests.factories.subjects import write_subjects
from voxtune.cli.main import main
from voxtune.data.cohort import cohort_contract
from voxtune.data.modality import image_kind
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, save_segmenter
from voxtune.workloads.segment import SegmentConfig

FOUR = ("T1w", "T1ce", "T2w", "FLAIR")
SIDE = 16

pytestmark = pytest.mark.usefixtures("one_thread")


def network(folder, images):
    """An untrained segmenter of these images."""
    torch.manual_seed(0)
    contract = replace(cohort_contract((SIDE, SIDE, SIDE)), images=images)
    shape = SegmentConfig(base=4, in_channels=len(images))
    return save_segmenter(Segmenter(SegmenterConfig(network=shape, data=contract)), folder, card="")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(real, synth, masks, segmenter of T1w, segmenter of all): the synthetic volumes are the real ones with noise."""
    root = tmp_path_factory.mktemp("kinds")
    images, masks = write_subjects(root, FOUR, 3, side=SIDE)
    rng = np.random.default_rng(0)
    (root / "synth").mkdir()
    for path in sorted(images.iterdir()):
        volume = nib.load(path)
        noisy = volume.get_fdata().astype(np.float32) + rng.normal(0, 8, volume.shape).astype(np.float32)
        stem, _, suffix = path.name.rpartition("_")
        nib.save(nib.Nifti1Image(noisy, volume.affine), root / "synth" / f"{stem}_desc-synth01_{suffix}")
    return (
        images,
        root / "synth",
        masks,
        network(root / "one", ("T1w",)),
        network(root / "all", ("T1", "T1ce", "T2", "FLAIR")),
    )


def run(capsys, out, real, synth, judge, *options, code=0):
    arguments = ["evaluate", real, synth, "-o", out, "--features", judge, "--segmenter", judge, "--resamples", 20]
    assert main([*map(str, arguments), *map(str, options), "--json", "--device", "cpu"]) == code
    captured = capsys.readouterr()
    return (json.loads(captured.out), captured.err) if code == 0 else (None, captured.err)


def figures(result):
    return {figure["name"]: figure for figure in result["figures"]}


@pytest.fixture(scope="module")
def of_t1w(folders, tmp_path_factory):
    """The result for T1w alone."""
    real, synth, masks, one, _ = folders
    out = tmp_path_factory.mktemp("t1w")
    arguments = ["evaluate", real, synth, "-o", out, "--features", one, "--segmenter", one, "--resamples", 20]
    assert main([*map(str, arguments), "--masks", str(masks), "--image", "t1", "--quiet", "--device", "cpu"]) == 0
    return json.loads((out / "metrics.json").read_text())


def test_a_network_of_one_kind_measures_that_kind(folders, of_t1w, tmp_path, capsys):
    real, synth, masks, one, _ = folders
    result, _ = run(capsys, tmp_path, real, synth, one, "--masks", masks)
    metrics, alone = figures(result), figures(of_t1w)
    assert result["images"] == list(FOUR) and of_t1w["images"] == ["T1w"]
    assert result["counts"] == of_t1w["counts"] == {"real": 3, "synth": 3, "training": None, "pairs": 3}
    for name in (
        "psnr",
        "ms_ssim",
        "histogram_w1",
        "histogram_js",
        "diversity",
        "nearest_voxel",
        "nearest_voxel_copies",
    ):
        assert {f"{name}_{kind}" for kind in FOUR} <= metrics.keys() and name not in metrics
        assert metrics[f"{name}_T1w"] == {**alone[name], "name": f"{name}_T1w"}
        assert len({metrics[f"{name}_{kind}"]["value"] for kind in FOUR}) == 4 or name.endswith("copies")
    assert "diversity_T2w_real" in metrics
    for name in ("fid", "mmd", "nearest_feature"):
        assert metrics[f"{name}_T1w"] == {**alone[name], "name": f"{name}_T1w"}
        assert f"{name}_T2w" not in metrics
        assert "reads T1w images, not T2w" in result["left_out"][f"{name}_T2w"]
    # Dice is of the masks, and has no kind.
    assert metrics["dice_brain"] == alone["dice_brain"] and metrics["dice_brain_real"] == alone["dice_brain_real"]
    assert result["segmenter"]["images"] == ["T1w"]
    rows = {(row["subject"], row["image"]): row for row in result["volumes"]}
    assert len(rows) == 12
    assert all(image_kind(tmp_path / row["file"]) == kind for (_, kind), row in rows.items())
    [first] = [row for row in of_t1w["volumes"] if row["subject"] == "sub-0"]
    assert {**first, "image": "T1w"} == rows["sub-0", "T1w"]
    assert rows["sub-0", "FLAIR"]["dice"] == first["dice"]
    assert image_kind(tmp_path / rows["sub-0", "FLAIR"]["nearest"]) == "FLAIR"
    assert "| psnr_FLAIR |" in (tmp_path / "metrics.md").read_text()


def test_a_network_of_all_kinds_measures_volumes(folders, tmp_path, capsys):
    real, synth, masks, _, every = folders
    training, _ = write_subjects(tmp_path / "training", FOUR, 2, side=SIDE, first=5)
    result, _ = run(capsys, tmp_path / "out", real, synth, every, "--masks", masks, "--training", training)
    metrics = figures(result)
    assert {"fid", "mmd", "nearest_feature", "dice_brain", "dice_tumour", "psnr_T2w"} <= metrics.keys()
    assert not any(name.startswith(("fid_", "mmd_")) for name in metrics)
    assert all(name.startswith(("lesion_dice_", "lesion_detection_")) for name in result["left_out"])
    assert {"grey_white_contrast_T2w", "csf_fraction_FLAIR", "lesion_contrast_T1ce"} <= metrics.keys()
    assert result["segmenter"]["images"] == ["T1", "T1ce", "T2", "FLAIR"]
    assert result["volumes"][0]["nearest"] in {file.name for file in Path(training).iterdir()}
    # The order of --image is that of the result; the network has its own.
    again, _ = run(capsys, tmp_path / "b", real, synth, every, "--masks", masks, "--image", "flair,t2,t1ce,t1")
    assert again["images"] == ["FLAIR", "T2w", "T1ce", "T1w"]
    assert figures(again)["fid"]["value"] == pytest.approx(metrics["fid"]["value"], rel=0.5)
    assert "psnr_T1ce" in figures(again)


def test_a_network_of_other_kinds_is_left_out(folders, of_t1w, tmp_path, capsys):
    real, synth, masks, one, every = folders
    result, _ = run(capsys, tmp_path / "a", real, synth, one, "--masks", masks, "--image", "T2w")
    assert "psnr" in figures(result) and "fid" not in figures(result) and "dice_brain" not in figures(result)
    assert result["left_out"]["fid"].endswith("reads T1w images, not T2w")
    assert result["left_out"]["dice"] == result["left_out"]["fid"]
    assert result["features"] is None and result["segmenter"] is None
    result, _ = run(capsys, tmp_path / "b", real, synth, every, "--masks", masks, "--image", "t1,t2")
    assert result["left_out"]["fid"].endswith("reads T1w, T1ce, T2w and FLAIR images, not T1w and T2w")
    assert "histogram_w1_T2w" in figures(result)


def test_kinds_of_one_folder_only_are_ignored(folders, of_t1w, tmp_path, capsys):
    real, synth, masks, one, _ = folders
    (tmp_path / "synth").mkdir()
    for path in synth.glob("*_desc-synth01_T1w.nii.gz"):
        if "ce-" not in path.name:
            (tmp_path / "synth" / path.name).write_bytes(path.read_bytes())
    result, err = run(capsys, tmp_path / "out", real, tmp_path / "synth", one, "--masks", masks)
    assert "T1ce, T2w and FLAIR images are ignored: not every folder has them" in err
    assert figures(result) == figures(of_t1w)


def test_folders_that_cannot_be_compared_are_refused(folders, tmp_path, capsys):
    real, synth, _, one, _ = folders
    other, _ = write_subjects(tmp_path / "t2", ["T2w"], 2, side=SIDE)
    t1, _ = write_subjects(tmp_path / "t1", ["T1w"], 2, side=SIDE)
    unnamed, _ = write_subjects(tmp_path / "unnamed", ["T1w"], 2, side=SIDE, endings=[""])
    for folder, options, message in (
        ((t1, other), (), "no image kind is in all of them"),
        ((real, synth), ("--image", "ADC"), "no ADC images in this folder"),
        ((real, other), ("--image", "t1,t2"), "no T1w image for subject sub-0"),
        (
            (unnamed, synth),
            (),
            "no file name states the image kind; choose one: --image T1w, --image T1ce, --image T2w or",
        ),
        ((real, synth), ("--image", "t1,t1"), "T1w is given twice"),
    ):
        _, err = run(capsys, tmp_path / "out", *folder, one, *options, code=2)
        assert message in err and len(err.strip().splitlines()) == 1
    result, _ = run(capsys, tmp_path / "out", unnamed, synth, one, "--image", "T1w")
    assert result["counts"]["pairs"] == 2
