"""voxtune train, killed, failing or interrupted at any step of its writes: nothing is lost, and a resume gives the same bits."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.factories import nifti
from tests.factories.kills import Commands, Done, Fault
from tests.factories.tiny_training import rows, weights
from voxtune.errors import InputError
from voxtune.runtime.storage import load

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL and fork")
SETTINGS = [
    "model.diffusion_steps=10",
    "model.attention=[]",
    "log_every=1",
    "sample_steps=2",
    "workers=0",
    "ema_start=2",
]
OPTIONS = [
    "--size",
    "8,8,8",
    "--base",
    "32",
    "--multipliers",
    "1",
    "--batch",
    "2",
    "--accumulation",
    "1",
    "--device",
    "cpu",
]
OPTIONS += ["--steps", "4", "--checkpoint-every", "2", "--sample-every", "2", "--lr", "1e-3"]
OPTIONS += [word for setting in SETTINGS for word in ("--set", setting)]


@pytest.fixture(scope="module")
def commands():
    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("private-place") / "study"
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for subject in range(3):
        labels = np.zeros((8, 8, 8), np.uint8)
        labels[2:6, 2:6, 2:6] = 1
        labels[3:5, 3:5, 2 + subject] = 2
        image = (labels * 40 + np.random.default_rng(subject).uniform(0, 5, labels.shape)).astype(np.float32)
        affine = np.diag([24.0, 24.0, 24.0, 1.0])
        nifti.save(root / "images" / f"sub-{subject}_T1w.nii.gz", image, affine)
        nifti.save(root / "masks" / f"sub-{subject}_dseg.nii.gz", labels, affine)
    return root


def new(data: Path, out: Path, *more: str) -> list[str]:
    folders = ["--images", str(data / "images"), "--masks", str(data / "masks")]
    return ["train", *folders, "-o", str(out), *OPTIONS, *more]


@pytest.fixture(scope="module")
def uninterrupted(commands, data, tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    """(a run that nothing interrupts, its steps)"""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = commands.run(new(data, out))
    assert done.code == 0, done.stderr
    return out, done.steps


def resume(commands: Commands, data: Path, out: Path) -> Done:
    """Continues a run after whatever happened to it; a run without settings had not begun."""
    begun = (out / "train.json").exists()
    return commands.run(["train", "--resume", str(out), "--device", "cpu"] if begun else new(data, out))


def check_model(out: Path) -> None:
    """The model folder is complete, or without weights; never weights with the config or the card of others."""
    try:
        model = load(out / "model")
    except InputError as error:
        assert "not a model folder" in str(error) or "not found" in str(error) or "no such model" in str(error)
        return
    assert model.config.network.base == 32
    card = out / "model" / "README.md"
    if card.exists():
        step = int(card.read_text().split(" for ")[1].split(" of ")[0])
        state = model.network.state_dict()
        stored = load_step(out, step)
        if stored is not None:
            assert all(bool((state[name] == value).all()) for name, value in stored.items())


def load_step(out: Path, step: int):
    from voxtune.training.loop import load_init

    path = out / "checkpoints" / f"step-{step:08d}.safetensors"
    return load_init(str(path)).network.state_dict() if path.exists() else None


def check_same(out: Path, uninterrupted: Path) -> None:
    assert weights(out) == weights(uninterrupted)
    assert rows(out) == rows(uninterrupted)
    for name in ("config.json", "README.md"):
        assert (out / "model" / name).exists()
    assert (out / "model" / "config.json").read_bytes() == (uninterrupted / "model" / "config.json").read_bytes()
    assert [p.name for p in sorted(out.glob("samples/*"))] == [p.name for p in sorted(uninterrupted.glob("samples/*"))]
    leftovers = list(out.rglob(".*"))
    assert not leftovers
    check_model(out)


def test_the_steps_of_a_run_include_every_file(uninterrupted):
    text = " ".join(uninterrupted[1])
    for file in ("train.json", "sources.json", "commands.json", "step-00000002.safetensors", "model.safetensors"):
        assert f"publish {file}" in text
    for file in ("config.json", "README.md", "step-00000004.png"):
        assert f"publish {file}" in text
    assert "append metrics.jsonl" in text and "append events.out.tfevents" in text


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_every_step_of_its_writes(commands, data, uninterrupted, tmp_path, every):
    for at in range(2, len(uninterrupted[1]) + 1, every):
        out = tmp_path / f"run-{at}"
        assert commands.run(new(data, out), Fault(at)).killed
        check_model(out)
        done = resume(commands, data, out)
        assert done.code == 0, (at, uninterrupted[1][at - 1], done.stderr)
        check_same(out, uninterrupted[0])


@pytest.mark.parametrize("every", [37, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("kind", "lasting"), [("ENOSPC", True), ("EIO", False)])
def test_a_failing_disk_is_one_line_and_resumes(commands, data, uninterrupted, tmp_path, every, kind, lasting):
    reason = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}[kind]
    steps = uninterrupted[1]
    for at in range(3, len(steps) + 1, every):
        out = tmp_path / f"run-{at}"
        done = commands.run(new(data, out), Fault(at, kind, lasting=lasting))
        if done.code == 0:  # what only tidies up may fail
            assert steps[at - 1].split()[0] in ("remove", "rmdir", "truncate"), steps[at - 1]
        else:
            lines = [line for line in done.stderr.splitlines() if line.startswith("voxtune: error")]
            assert (done.code, len(lines)) == (2, 1), (at, steps[at - 1], done.stderr)
            assert reason in lines[0] and "Traceback" not in done.stderr and len(lines[0]) < 520
            assert not list(out.rglob(".voxtune-*")), "no temporary file is left"
        check_model(out)
        done = resume(commands, data, out)
        assert done.code == 0, (at, steps[at - 1], done.stderr)
        check_same(out, uninterrupted[0])


@pytest.mark.parametrize("every", [47, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_interrupted_within_a_write(commands, data, uninterrupted, tmp_path, every, name, code):
    for at in range(3, len(uninterrupted[1]), every):
        out = tmp_path / f"run-{at}"
        done = commands.run(new(data, out), Fault(at, name))
        assert done.code in (code, 0), (at, uninterrupted[1][at - 1], done.stderr)
        assert "Traceback" not in done.stderr
        done = resume(commands, data, out)
        assert done.code == 0, (at, done.stderr)
        check_same(out, uninterrupted[0])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("delay", [0.4, *(pytest.param(d, marks=pytest.mark.slow) for d in (0.2, 0.8, 1.2, 2.0))])
def test_interrupted_before_the_first_step(commands, data, tmp_path, number, code, delay):
    """During the imports and the checks of the data: one line, and no folder is left behind."""
    out = tmp_path / "run"
    done = commands.run(new(data, out, "--steps", "100000"), signal_after=(delay, number), fresh=True)
    assert done.code == code, done.stderr
    if not out.exists():
        assert done.stderr == "voxtune: error: interrupted\n"


def test_data_that_is_damaged_during_a_run(commands, data, uninterrupted, tmp_path):
    for damage in ("missing", "truncated"):
        study, out = tmp_path / damage / "study", tmp_path / damage / "run"
        shutil.copytree(data, study)
        assert commands.run(new(study, out), Fault(40)).killed
        file = study / "images" / "sub-1_T1w.nii.gz"
        whole = file.read_bytes()
        file.unlink() if damage == "missing" else file.write_bytes(whole[: len(whole) // 2])
        done = resume(commands, study, out)
        assert done.code == 2, done.stderr
        assert "sub-1" in done.stderr and "Traceback" not in done.stderr
        file.write_bytes(whole)
        assert resume(commands, study, out).code == 0
        check_same(out, uninterrupted[0])


@pytest.fixture
def full_disk(tmp_path):
    """(a file system of 1 MiB, a function that makes it larger)"""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system here")
    yield place, lambda: subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
    subprocess.run(["umount", "-l", str(place)], check=False)


def test_a_full_disk(commands, data, uninterrupted, full_disk):
    out = full_disk[0] / "run"
    done = commands.run(new(data, out))
    assert done.code == 2 and "No space left on device" in done.stderr.replace("os error 28", "")
    assert not list(out.rglob(".*"))
    full_disk[1]()
    assert resume(commands, data, out).code == 0
    check_same(out, uninterrupted[0])


def test_records_hold_names_instead_of_paths(commands, data, uninterrupted, tmp_path):
    """Only sources.json, which a resume needs, says where the data is."""
    for file in (p for p in uninterrupted[0].rglob("*") if p.is_file()):
        assert f".{socket.gethostname()}." not in file.name
        if file.name != "sources.json":
            content = file.read_bytes()
            for private in ("private-place", str(uninterrupted[0].parent)):
                assert private.encode() not in content, (file, private)
    out = tmp_path / "run"
    assert commands.run(new(data, out, "--record-paths", "--steps", "1")).code == 0
    for file in ("train.json", "commands.json", "model/README.md"):
        assert str(data / "images") in (out / file).read_text()


def test_moved_data_is_named_again(commands, data, tmp_path):
    project, moved = tmp_path / "project", tmp_path / "moved"
    shutil.copytree(data, project / "data")
    out = project / "runs" / "mine"
    assert commands.run(new(project / "data", out, "--steps", "1")).code == 0
    assert json.loads((out / "sources.json").read_text())["data.images"] == "../../data/images"
    more = ["--steps", "2", "--device", "cpu"]
    project.rename(moved)  # as a whole: found
    out = moved / "runs" / "mine"
    assert commands.run(["train", "--resume", out, *more]).code == 0
    (moved / "data").rename(tmp_path / "elsewhere")
    done = commands.run(["train", "--resume", out, "--steps", "3"])
    assert done.code == 2 and "not found" in done.stderr and "pass --images" in done.stderr
    places = ["--images", tmp_path / "elsewhere" / "images", "--masks", tmp_path / "elsewhere" / "masks"]
    done = commands.run(["train", "--resume", out, "--steps", "3", *places])
    assert done.code == 0, done.stderr
    (out / "sources.json").unlink()
    done = commands.run(["train", "--resume", out, "--steps", "4"])
    assert done.code == 2 and "sources.json" in done.stderr and "pass --images" in done.stderr
