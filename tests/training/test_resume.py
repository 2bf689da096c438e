"""A run that is killed at any time and resumed ends with the same bits as an uninterrupted run."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.factories.tiny_training import (
    Blobs,
    child,
    finish,
    rows,
    run_limited,
    run_tiny,
    tiny_config,
    weights,
)
from voxtune.files import write_json
from voxtune.training.checkpoint import checkpoints
from voxtune.training.data import epoch_order
from voxtune.training.folder import check_new_run, delete_run
from voxtune.training.loop import train

KILLED = -signal.SIGKILL
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL and a fork server"),
    pytest.mark.usefixtures("one_thread"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The run that nothing interrupts."""
    out = tmp_path_factory.mktemp("uninterrupted") / "run"
    assert finish(run_tiny, str(out), {}) == 0
    return out


def check_same(out: Path, uninterrupted: Path) -> None:
    assert weights(out) == weights(uninterrupted)
    assert rows(out) == rows(uninterrupted)
    assert not list(out.rglob("*.part"))
    last = [checkpoints(folder / "checkpoints")[-1] for folder in (out, uninterrupted)]
    assert last[0].name == last[1].name


@pytest.mark.slow
def test_killed_from_outside_at_random_moments(tmp_path, uninterrupted):
    chance = random.Random(7)
    out = tmp_path / "run"
    deaths = 0
    for _ in range(40):
        process = child(run_tiny, str(out), {})
        enough = len(rows(out)) + chance.choice([1, 1, 2])
        while process.is_alive() and len(rows(out)) < enough:
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.join(300)
        if process.exitcode == 0:
            break
        assert process.exitcode == KILLED
        deaths += 1
    assert deaths >= 2
    assert process.exitcode == 0
    check_same(out, uninterrupted)


@pytest.mark.slow
def test_pictures_workers_and_checkpoint_intervals_do_not_change_the_weights(tmp_path, uninterrupted):
    changes = {"sample_every": 2, "workers": 0, "checkpoint_every": 5, "tensorboard": True, "log_every": 3}
    assert finish(run_tiny, str(tmp_path / "run"), changes) == 0
    assert weights(tmp_path / "run") == weights(uninterrupted)
    assert len(list((tmp_path / "run" / "samples").glob("*.png"))) == 6


def test_stop_and_resume_in_the_middle_of_an_epoch(tmp_path):
    """5 subjects in batches of 2: step 4 ends at sample 8, place 3 of epoch 1."""
    train(tiny_config(), Blobs(), tmp_path / "uninterrupted")
    steps = []
    result = train(
        tiny_config(), Blobs(), tmp_path / "run", lambda *a: steps.append(a[0]), stop=lambda: len(steps) >= 3
    )
    assert (result.step, result.stopped, result.checkpoint.name) == (4, True, "step-00000004.safetensors")
    seen = []

    class Watched(Blobs):
        def __getitem__(self, index):
            seen.append(index)
            return super().__getitem__(index)

    resumed = train(tiny_config(workers=0), Watched(), tmp_path / "run", resume=True)
    assert (resumed.step, resumed.resumed_from, resumed.stopped) == (12, 4, False)
    order = [i for epoch in range(5) for i in epoch_order(0, epoch, 5)]
    assert seen[1:] == order[8:24], "after the look at subject 0, exactly the samples that were left"
    check_same(tmp_path / "run", tmp_path / "uninterrupted")


def test_more_steps_continue_a_completed_run(tmp_path):
    train(tiny_config(), Blobs(), tmp_path / "uninterrupted")
    train(tiny_config(steps=6), Blobs(), tmp_path / "run")
    train(tiny_config(steps=12), Blobs(), tmp_path / "run", resume=True)
    check_same(tmp_path / "run", tmp_path / "uninterrupted")
    again = train(tiny_config(steps=12), Blobs(), tmp_path / "run", resume=True)
    assert (again.step, again.resumed_from, again.stopped) == (12, 12, False)
    check_same(tmp_path / "run", tmp_path / "uninterrupted")


def test_file_size_limit_leaves_the_last_checkpoint(tmp_path, uninterrupted):
    """EFBIG from the system, as a quota or a full disk gives it."""
    out, report = tmp_path / "run", tmp_path / "error.json"
    assert finish(run_limited, str(out), {}, 4, str(report)) == 0
    message = json.loads(report.read_text())
    assert "too large" in message.lower()
    assert "step-00000003.safetensors" in message
    assert f"--resume {out}" in message
    assert not list(out.rglob("*.part"))
    assert finish(run_tiny, str(out), {}) == 0
    check_same(out, uninterrupted)


def test_a_replacement_that_is_interrupted_leaves_a_run_or_a_folder_for_a_new_one(tmp_path, monkeypatch):
    old, delete = tmp_path / "old", Path.unlink
    train(tiny_config(sample_every=3), Blobs(), old)
    write_json(old / "sources.json", {"format": "voxtune-sources/1"})
    total = len([file for file in old.rglob("*") if file.is_file()])
    for count in range(total + 1):
        out = shutil.copytree(old, tmp_path / str(count))
        deleted = []

        def unlink(path, missing_ok=False, deleted=deleted, count=count):
            if len(deleted) == count:
                raise KeyboardInterrupt
            deleted.append(path)
            delete(path)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "unlink", unlink)
            delete_run(out)
        check_new_run(out, overwrite=(out / "train.json").exists())
        assert (out / "sources.json").exists() or not (out / "train.json").exists()
