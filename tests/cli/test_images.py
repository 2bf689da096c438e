"""CIFAR-10 to a model to PNG, as a user does it: trained, stopped, resumed, drawn, refused."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest
from PIL import Image

import voxtune
from tests.factories.cifar import write_cifar
from voxtune.cli.main import main
from voxtune.training.folder import read_run

TINY = ["--base", "8", "--multipliers", "1,1", "--batch", "3", "--device", "cpu", "--quiet", "--sample-every", "0"]
TINY += ["--set", "model.diffusion_steps=6", "--set", "tensorboard=false", "--set", "sample_steps=2"]


def train(folder, out, *more) -> int:
    return main(["train", "--workload", "convnext", "--images", str(folder), "-o", str(out), *TINY, *more])


def refused(capsys, *arguments) -> str:
    assert main([str(a) for a in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("voxtune: error: ")
    return lines[0]


def weights(run) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with CIFAR-10 in both forms, and a run of six steps on the Python form."""
    root = tmp_path_factory.mktemp("images")
    for name, binary in (("py", False), ("bin", True)):
        write_cifar(root / name, binary=binary)
    assert train(root / "py", root / "run", "--steps", "6", "--sample-every", "6") == 0
    return root


def test_the_run_folder(place):
    model = voxtune.load(place / "run")
    assert (model.config.family, model.config.size, model.config.data) == ("convnext", (32, 32), None)
    page = np.asarray(Image.open(place / "run" / "samples" / "step-00000006.png"))
    assert page.shape[0] > 4 * 64
    assert np.ptp(page.astype(int), axis=2).max() > 0, "in colours"
    card = (place / "run" / "model" / "README.md").read_text()
    for fact in ("`py` and their mirror images, 40 in total", "labels are not used", "--count 16"):
        assert fact in card
    assert read_run(place / "run").learning_rate == 2e-4


def test_both_forms_and_a_resumed_run_give_the_same_bits(place):
    """Three steps on one form, the other three on the other: order, noise and images are the same."""
    assert train(place / "py", place / "parts", "--steps", "3") == 0
    resumed = ["--steps", "6", "--images", str(place / "bin"), "--device", "cpu", "--quiet"]
    assert main(["train", "--resume", str(place / "parts"), *resumed]) == 0
    assert weights(place / "parts") == weights(place / "run")
    assert train(place / "py", place / "plain", "--steps", "6", "--set", "data.mirror=false") == 0
    assert weights(place / "plain") != weights(place / "run")


def test_another_size_and_going_on_from_a_model(place):
    assert train(place / "py", place / "small", "--init", str(place / "run"), "--size", "16,16", "--steps", "1") == 0
    assert voxtune.load(place / "small").config.size == (16, 16)


def test_missing_batches_are_a_warning(place, tmp_path, capsys):
    folder = write_cifar(tmp_path / "few", batches=2)
    assert train(folder, tmp_path / "run", "--steps", "1") == 0
    said = capsys.readouterr().err
    assert "2 of the CIFAR-10 batches; data_batch_3, data_batch_4, data_batch_5 not found" in said


def test_sample_draws_png(place, tmp_path, capsys):
    arguments = ["sample", str(place / "run"), "-o", str(tmp_path), "--count", "3", "--batch", "2", "--device", "cpu"]
    assert main([*arguments, "--picture", "--json"]) == 0
    drawn = json.loads(capsys.readouterr().out)
    files = [file for image in drawn["images"] for file in image["files"]]
    assert files == [str(tmp_path / name) for name in (*(f"image-00000{i}.png" for i in range(3)), "picture.png")]
    assert Image.open(files[0]).size == (32, 32)
    assert Image.open(files[3]).size == (130, 130)
    assert (drawn["steps"], drawn["sampler"]) == (6, "ddpm")
    existing = refused(capsys, *arguments)
    assert "image-000000.png: already exists, and 5 more files; choose another folder, pass --resume" in existing
    assert existing.endswith("or pass --overwrite to replace it")
    assert main([*arguments, "--overwrite", "--size", "16,24", "--sampler", "ddim", "--steps", "2", "--quiet"]) == 0
    assert Image.open(files[0]).size == (24, 16)


def test_a_resumed_job_has_the_sheet_of_all_images(place, tmp_path):
    run = ["sample", str(place / "run"), "-o", str(tmp_path), "--count", "4", "--batch", "2", "--device", "cpu"]
    arguments = [*run, "--steps", "2", "--picture", "--quiet"]
    assert main(arguments) == 0
    sheet, written = tmp_path / "picture.png", (tmp_path / "picture.png").read_bytes()
    for lost in (("image-000003.json", "picture.png"), ("image-000000.png",), ("picture.png",)):
        for name in lost:
            (tmp_path / name).unlink()
        assert main([*arguments, "--resume"]) == 0
        assert sheet.read_bytes() == written, lost


def test_what_sample_refuses(place, tmp_path, capsys):
    run, out = place / "run", tmp_path / "out"
    assert "takes no mask; omit --mask" in refused(capsys, "sample", run, "-m", "x.nii.gz", "-o", out)
    assert "omit --fit" in refused(capsys, "sample", run, "--fit", "pad", "-o", out)
    assert "expected H,W" in refused(capsys, "sample", run, "--size", "32,32,32", "-o", out)
    assert "multiple of 2" in refused(capsys, "sample", run, "--size", "33,32", "-o", out)
    assert "requires --mask" in refused(capsys, "sample", voxtune.runtime.storage.demo_model(), "-o", out)
    assert not out.exists()


def test_what_train_refuses(place, tmp_path, capsys):
    start = ["train", "--workload", "convnext", "-o", tmp_path / "run"]
    assert "--images DIR" in refused(capsys, *start)
    assert "no such folder" in refused(capsys, *start, "--images", tmp_path / "absent")
    assert "data_batch_1.bin" in refused(capsys, *start, "--images", tmp_path)
    assert "convnext has no masks" in refused(capsys, *start, "--images", place / "py", "--masks", place / "py")
    assert "simulated subjects are volumes" in refused(capsys, *start, "--cohort", "2")
    assert "requires 2 dimensions" in refused(capsys, *start, "--images", place / "py", "--size", "8,8,8")
    assert not (tmp_path / "run").exists(), "nothing is left behind"


class Runs:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_a_malicious_batch_is_refused_and_not_executed(tmp_path, capsys):
    folder, mark = write_cifar(tmp_path / "data"), tmp_path / "executed"
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": Runs(mark), b"labels": [1]}, 2))
    said = refused(capsys, "train", "--workload", "convnext", "--images", folder, "-o", tmp_path / "run")
    assert "data_batch_3" in said
    assert "nothing was executed" in said
    assert not mark.exists()
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_resumed_with_other_images(place, tmp_path, capsys):
    folder = write_cifar(tmp_path / "data")
    assert train(folder, tmp_path / "run", "--steps", "1") == 0
    (folder / "data_batch_5").unlink()
    capsys.readouterr()
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "2", "--device", "cpu"]) == 2
    assert "the data now has 32 subjects" in capsys.readouterr().err
