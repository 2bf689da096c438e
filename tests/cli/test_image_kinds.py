"""The image kinds of a folder: chosen, recognised or refused by train and pack."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

import voxtune
from tests.factories.subjects import write_subjects
from voxtune.cli.main import main
from voxtune.data.dataset import PairedFolders
from voxtune.data.derivative import sidecar_path
from voxtune.data.modality import image_kind
from voxtune.data.subjects import unpack
from voxtune.segmentation.segmenter import load_segmenter
from voxtune.training.config import make_config
from voxtune.training.folder import read_run
from voxtune.training.loop import train
from voxtune.training.model import model_config

FOUR = ("T1w", "T1ce", "T2w", "FLAIR")
TINY = [
    "--size",
    "8,8,8",
    "--base",
    "32",
    "--multipliers",
    "1",
    "--steps",
    "1",
    "--sample-every",
    "0",
    "--device",
    "cpu",
]
TINY += ["--set", "model.diffusion_steps=10", "--set", "workers=0", "--set", "tensorboard=false"]


def folders(root, *arguments, **more):
    images, masks = write_subjects(root, *arguments, **more)
    return ["--images", str(images), "--masks", str(masks)]


def refused(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    return line


@pytest.mark.usefixtures("one_thread")
def test_a_folder_of_one_kind_is_trained_as_that_kind(tmp_path, capsys):
    data = folders(tmp_path, ["T2w"], endings=["_t2"])
    assert main(["train", *data, "-o", str(tmp_path / "run"), *TINY]) == 0
    assert f"Images: T2w, from the file names in {tmp_path / 'images'}." in capsys.readouterr().out
    assert voxtune.load(tmp_path / "run" / "model").config.data.images == ("T2w",)
    assert "Images: T2w;" in (tmp_path / "run" / "model" / "README.md").read_text()
    assert read_run(tmp_path / "run").data.modalities == ("T2w",)
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "2", "--quiet", "--device", "cpu"]) == 0


@pytest.mark.usefixtures("one_thread")
def test_a_run_without_stored_kinds_is_resumed_with_the_kind_that_is_given(tmp_path, capsys):
    images, masks = write_subjects(tmp_path, ["T2w"], endings=["_t2"])
    given = {
        "data.images": str(images),
        "data.masks": str(masks),
        "model.size": [8, 8, 8],
        "model.base": 32,
        "steps": 1,
    }
    given |= {"model.multipliers": [1.0], "model.diffusion_steps": 10, "workers": 0, "sample_every": 0, "batch": 1}
    config = make_config({}, given | {"tensorboard": False}, "test")
    contract = replace(model_config(config).data, images=("T2w",))
    # As the first version stored it: T2w images in a model of T1w images.
    train(config, PairedFolders(contract, images, masks), tmp_path / "run")
    resume = ["train", "--resume", str(tmp_path / "run"), "--steps", "2", "--device", "cpu"]
    assert "3 T2w images, but no T1w; T1w is required; pass --image T2w" in refused(capsys, *resume)
    assert main([*resume, "--image", "T2w", "--quiet"]) == 0
    assert voxtune.load(tmp_path / "run" / "model").config.data.images == ("T2w",)
    assert main([*resume[:3], "--steps", "3", "--device", "cpu", "--quiet"]) == 0
    assert "modalities" in refused(capsys, *resume[:3], "--steps", "4", "--image", "FLAIR")


@pytest.mark.usefixtures("one_thread")
def test_names_without_a_kind_are_t1w(tmp_path, capsys):
    data = folders(tmp_path, ["T2w"], endings=[""])
    assert main(["train", *data, "-o", str(tmp_path / "run"), *TINY]) == 0
    assert "Images: T1w, because no file name in" in capsys.readouterr().out
    assert voxtune.load(tmp_path / "run" / "model").config.data.images == ("T1w",)


@pytest.mark.usefixtures("one_thread")
def test_several_kinds_require_a_choice(tmp_path, capsys):
    data = folders(tmp_path, ["T1w", "T2w"], endings=["_t1", "_t2"])
    choice = (
        f"{tmp_path / 'images'}: 3 T1w and 3 T2w images; choose one: --image T1w or --image T2w (both: --image T1w,T2w)"
    )
    for command in (
        ["train", *TINY],
        ["train", "--workload", "segment", "--size", "8,8,8"],
        ["pack", "--size", "8,8,8"],
    ):
        assert refused(capsys, *command, *data, "-o", tmp_path / "out").removeprefix("voxtune: ").endswith(choice)
        assert not (tmp_path / "out").exists()
    assert main(["train", *data, "-o", str(tmp_path / "run"), *TINY, "--image", "t2"]) == 0
    assert "ignoring 3 T1w images; using only T2w" in capsys.readouterr().err
    assert voxtune.load(tmp_path / "run" / "model").config.data.images == ("T2w",)


@pytest.mark.usefixtures("one_thread")
def test_four_kinds_in_one_model(tmp_path):
    data = folders(tmp_path, FOUR)
    options = [*TINY, "--image", "t1,t1ce,t2,flair"]
    assert main(["train", *data, "-o", str(tmp_path / "run"), *options, "--quiet"]) == 0
    model = voxtune.load(tmp_path / "run" / "model")
    assert (model.config.data.images, model.config.network.out_channels) == (FOUR, 4)
    mask = tmp_path / "masks" / "sub-0_dseg.nii.gz"
    sample = [
        "sample",
        str(tmp_path / "run" / "model"),
        "--mask",
        str(mask),
        "-o",
        str(tmp_path / "out"),
        "--steps",
        "1",
    ]
    assert main([*sample, "--device", "cpu", "--quiet"]) == 0
    files = sorted((tmp_path / "out").rglob("*.nii.gz"))
    names = ["sub-0_ce-gadolinium_desc-synth01_T1w", "sub-0_desc-synth01_FLAIR", "sub-0_desc-synth01_T1w"]
    assert [f.name for f in files] == [f"{name}.nii.gz" for name in [*names, "sub-0_desc-synth01_T2w"]]
    kinds = [json.loads(sidecar_path(file).read_text())["Image"] for file in files]
    assert kinds == ["T1ce", "FLAIR", "T1w", "T2w"] == [image_kind(file) for file in files]


@pytest.mark.usefixtures("one_thread")
def test_pack_and_segmenter_of_several_kinds(tmp_path, capsys):
    data = folders(tmp_path, FOUR, 4)
    pack = ["pack", *data, "--size", "8,8,8", "-o", str(tmp_path / "s.npz"), "--held-out", "1", "--json"]
    assert main([*pack, "--image", "t2,t1"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == ["T2w", "T1w"]
    learn, _ = unpack(tmp_path / "s.npz")
    assert learn.contract.images == ("T2w", "T1w")
    # The tumour is brighter than the brain in T2w, darker in T1w.
    image_CDHW, cond_LDHW = learn[0]
    brain, tumour = (image_CDHW[:, cond_LDHW[channel] > 0].mean(axis=1) for channel in (0, 1))
    assert (np.sign(tumour - brain) == (1, -1)).all()
    segment = ["train", "--workload", "segment", "--base", "4", "--steps", "1", "--quiet", "--device", "cpu"]
    assert main([*segment, *data, "--size", "8,8,8", "--image", "t1,flair", "-o", str(tmp_path / "a")]) == 0
    assert main([*segment, "--subjects", str(tmp_path / "s.npz"), "-o", str(tmp_path / "b")]) == 0
    assert load_segmenter(tmp_path / "a").config.data.images == ("T1w", "FLAIR")
    assert load_segmenter(tmp_path / "b").config.data.images == ("T2w", "T1w")


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """(model, segmenter, packed subjects) of four kinds, on 16 voxels a side."""
    root = tmp_path_factory.mktemp("four")
    images, masks = write_subjects(root, FOUR, 4, side=16)
    data = ["--images", str(images), "--masks", str(masks)]
    size = ["--size", "16,16,16", "--device", "cpu", "--quiet"]
    choice = [*data, "--image", ",".join(FOUR)]
    assert main(["train", *choice, "-o", str(root / "run"), *TINY, *size, "--set", "model.diffusion_steps=2"]) == 0
    segment = ["train", "--workload", "segment", *choice, *size, "--base", "4", "--steps", "2"]
    assert main([*segment, "-o", str(root / "segment")]) == 0
    model, packed = root / "run" / "model", root / "s.npz"
    assert main(["pack", *data, "--model", str(model), "-o", str(packed), "--held-out", "2", "--quiet"]) == 0
    return model, root / "segment", packed


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("real", [False, True])
@pytest.mark.slow
def test_steps_of_four_kinds(four, tmp_path, real):
    model, segmenter, packed = four
    images, masks = write_subjects(tmp_path, FOUR, 2, side=16)
    search = ["steps", model, "--samplers", "ddim", "--steps", 2, "--timestep-spacings", "trailing", "--resamples", 20]
    search += ["--segmenter", segmenter, "--plan", "baseline", "-o", tmp_path, "--device", "cpu", "--quiet"]
    search += ["--real", images, "--masks", masks] if real else ["--subjects", packed]
    assert main(list(map(str, search))) == 0
    table = json.loads((tmp_path / "steps.json").read_text())
    assert (table["images"], table["subjects"]) == (list(FOUR), 2)
    names = set(table["rows"][0]["figures"])
    assert {"dice_tumour", "fid"} | {f"histogram_w1_{kind}" for kind in FOUR} <= names
    assert not {"psnr", "histogram_w1"} & names


@pytest.mark.usefixtures("one_thread")
def test_usefulness_of_four_kinds(four, tmp_path):
    model, _, packed = four
    command = ["usefulness", model, "--volumes", 2, "--segment-steps", 2, "--seeds", 1, "--steps", 2, "--resamples", 20]
    command += ["--plan", "baseline", "--subjects", packed, "-o", tmp_path, "--device", "cpu", "--quiet"]
    assert main(list(map(str, command))) == 0
    result = json.loads((tmp_path / "usefulness.json").read_text())
    assert result["images"] == list(FOUR) and "tumour" in result["arms"][0]["dice"]


def test_the_included_segmenter_reads_one_image(four, tmp_path, capsys):
    model, _, packed = four
    assert "the included segmenter" in refused(capsys, "steps", model, "--subjects", packed, "-o", tmp_path)


@pytest.mark.usefixtures("one_thread")
def test_a_model_of_another_kind_is_refused(tmp_path, capsys):
    t1, t2 = folders(tmp_path / "a", ["T1w"]), folders(tmp_path / "b", ["T2w"])
    assert main(["train", *t1, "-o", str(tmp_path / "run"), *TINY, "--quiet"]) == 0
    fine_tune = ["train", *t2, "--init", tmp_path / "run", "-o", tmp_path / "tuned", *TINY[6:]]
    line = refused(capsys, *fine_tune)
    assert "3 T2w images, but no T1w; T1w is required; pass --image T2w" in line
    assert main([*map(str, fine_tune), "--image", "T2w", "--quiet"]) == 0
    assert voxtune.load(tmp_path / "tuned" / "model").config.data.images == ("T2w",)
    pack = ["pack", *t2, "--model", tmp_path / "run" / "model", "-o", tmp_path / "p.npz"]
    assert "3 T2w images, but no T1w" in refused(capsys, *pack)
    assert "--model cannot be combined with" in refused(capsys, *pack, "--image", "T2w")


def test_image_kinds_that_do_not_fit(tmp_path, capsys):
    data = folders(tmp_path, ["T1w", "T2w"])
    out = ["-o", tmp_path / "out"]
    assert "'' is not an image kind" in refused(capsys, "train", *data, *out, "--image", "")
    assert "T1w is given twice" in refused(capsys, "pack", *data, *out, "--image", "t1,T1w")
    assert "3 T1w and 3 T2w images, but no FLAIR" in refused(capsys, "train", *data, *out, *TINY, "--image", "FLAIR")
    assert "cannot be combined with --cohort" in refused(capsys, "pack", "--cohort", "2", *out, "--image", "T2w")
    assert "the simulated cohort has T1w images" in refused(
        capsys, "train", "--cohort", "2", *out, *TINY, "--image", "T2w"
    )
    brats = ["train", *data, *out, "--workload", "med-ddpm-brats", "--labels", "brain=1,tumour=2", *TINY]
    assert "but no T1ce or FLAIR; T1w, T1ce, T2w and FLAIR are required" in refused(capsys, *brats)
