"""voxtune train, killed, failing or interrupted at any step of its writes: nothing is lost, and a resume gives the same bits."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests.factories.kills import Commands, Fault
from tests.factories.small_jobs import (
    FAILURES,
    REASONS,
    check_failure,
    check_model,
    check_same_run,
    half_files,
    record_counts,
    resume_train,
    small_disk,
    train,
    write_study,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL and fork")


@pytest.fixture(scope="module")
def commands():
    commands = Commands()
    yield commands
    commands.close()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_study(tmp_path_factory.mktemp("private-place") / "study")


@pytest.fixture(scope="module")
def uninterrupted(commands, data, tmp_path_factory) -> tuple[Path, tuple[str, ...]]:
    """(a run that nothing interrupts, its steps)"""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    done = commands.run(train(data, out))
    assert done.code == 0, done.stderr
    return out, done.steps


def test_the_steps_of_a_run_include_every_file(uninterrupted):
    text = " ".join(uninterrupted[1])
    for file in ("train.json", "sources.json", "commands.json", "step-00000002.safetensors", "model.safetensors"):
        assert f"publish {file}" in text
    for file in ("config.json", "README.md", "step-00000004.png"):
        assert f"publish {file}" in text
    assert "append metrics.jsonl" in text and "append events.out.tfevents" in text


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.hostile)])
@pytest.mark.slow
def test_killed_at_every_step_of_its_writes(commands, data, uninterrupted, tmp_path, record_property, every):
    places = range(2, len(uninterrupted[1]) + 1, every)
    for at in places:
        out = tmp_path / f"run-{at}"
        assert commands.run(train(data, out), Fault(at)).killed
        check_model(out)
        assert half_files(out) == []
        done = resume_train(commands, data, out)
        assert done.code == 0, (at, uninterrupted[1][at - 1], done.stderr)
        check_same_run(out, uninterrupted[0])
    record_counts(record_property, kills=len(places))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "lasting", "every"),
    [
        ("ENOSPC", True, 37),
        ("EIO", False, 37),
        *(pytest.param(*failure, every, marks=pytest.mark.hostile) for *failure, every in FAILURES),
    ],
)
def test_a_failing_disk_is_one_line_and_resumes(
    commands, data, uninterrupted, tmp_path, record_property, kind, lasting, every
):
    steps = uninterrupted[1]
    places = range(1 if every == 1 else 3, len(steps) + 1, every)
    for at in places:
        out = tmp_path / f"run-{at}"
        done = commands.run(train(data, out), Fault(at, kind, lasting=lasting))
        check_failure(done, steps[at - 1], REASONS[kind])
        if done.code and (kind, lasting) != ("EIO", True):  # then files cannot be deleted either
            assert not list(out.rglob(".voxtune-*")), "no temporary file is left"
        check_model(out)
        assert half_files(out) == []
        done = resume_train(commands, data, out)
        assert done.code == 0, (at, steps[at - 1], done.stderr)
        check_same_run(out, uninterrupted[0])
    record_counts(record_property, faults=len(places))


@pytest.mark.parametrize("every", [47, pytest.param(3, marks=pytest.mark.hostile)])
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.slow
def test_interrupted_within_a_write(commands, data, uninterrupted, tmp_path, record_property, every, name, code):
    places = range(3, len(uninterrupted[1]), every)
    for at in places:
        out = tmp_path / f"run-{at}"
        done = commands.run(train(data, out), Fault(at, name))
        assert done.code in (code, 0), (at, uninterrupted[1][at - 1], done.stderr)
        assert "Traceback" not in done.stderr
        done = resume_train(commands, data, out)
        assert done.code == 0, (at, done.stderr)
        check_same_run(out, uninterrupted[0])
    record_counts(record_property, interruptions=len(places))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("delay", [0.4, *(pytest.param(d, marks=pytest.mark.slow) for d in (0.2, 0.8, 1.2, 2.0))])
def test_interrupted_before_the_first_step(commands, data, tmp_path, number, code, delay):
    """During the imports and the checks of the data: one line, and no folder is left behind."""
    out = tmp_path / "run"
    done = commands.run(train(data, out, "--steps", "100000"), signal_after=(delay, number), fresh=True)
    assert done.code == code, done.stderr
    if not out.exists():
        assert done.stderr == "voxtune: error: interrupted\n"


def test_data_that_is_damaged_during_a_run(commands, data, uninterrupted, tmp_path):
    for damage in ("missing", "truncated"):
        study, out = tmp_path / damage / "study", tmp_path / damage / "run"
        shutil.copytree(data, study)
        assert commands.run(train(study, out), Fault(40)).killed
        file = study / "images" / "sub-1_T1w.nii.gz"
        whole = file.read_bytes()
        file.unlink() if damage == "missing" else file.write_bytes(whole[: len(whole) // 2])
        done = resume_train(commands, study, out)
        assert done.code == 2, done.stderr
        assert "sub-1" in done.stderr and "Traceback" not in done.stderr
        file.write_bytes(whole)
        assert resume_train(commands, study, out).code == 0
        check_same_run(out, uninterrupted[0])


def test_a_full_disk(commands, data, uninterrupted, tmp_path):
    with small_disk(tmp_path / "disk", "size=1m") as enlarge:
        out = tmp_path / "disk" / "run"
        done = commands.run(train(data, out))
        assert done.code == 2 and "No space left on device" in done.stderr.replace("os error 28", "")
        assert not list(out.rglob(".*"))
        enlarge()
        assert resume_train(commands, data, out).code == 0
        check_same_run(out, uninterrupted[0])


def test_records_hold_names_instead_of_paths(commands, data, uninterrupted, tmp_path):
    """Only sources.json, which a resume needs, says where the data is."""
    for file in (p for p in uninterrupted[0].rglob("*") if p.is_file()):
        assert f".{socket.gethostname()}." not in file.name
        if file.name != "sources.json":
            content = file.read_bytes()
            for private in ("private-place", str(uninterrupted[0].parent)):
                assert private.encode() not in content, (file, private)
    out = tmp_path / "run"
    assert commands.run(train(data, out, "--record-paths", "--steps", "1")).code == 0
    for file in ("train.json", "commands.json", "model/README.md"):
        assert str(data / "images") in (out / file).read_text()


def test_moved_data_is_named_again(commands, data, tmp_path):
    project, moved = tmp_path / "project", tmp_path / "moved"
    shutil.copytree(data, project / "data")
    out = project / "runs" / "mine"
    assert commands.run(train(project / "data", out, "--steps", "1")).code == 0
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
