"""The local engine with real processes: workers and drivers that are killed, interrupted, or short of something."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.scale.datasets import Job, contents, write_masks, write_model
from tests.scale.workers import DeadlyWorker, InlineEngine, NoNetworkWorker, SlowWorker
from voxtune.errors import InputError
from voxtune.scale.engine import EngineOptions, make_engine
from voxtune.scale.local import LocalEngine
from voxtune.scale.verify import verify

ROOT = Path(__file__).resolve().parents[2]


def local(make=NoNetworkWorker, workers=1):
    return LocalEngine(EngineOptions(devices=("cpu",) * workers, make=make))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(model, tmp_path):
    # The settings are those of one thread, as in the environment of the commands.
    return Job(model=model, manifest=write_masks(tmp_path / "masks", 3), out=tmp_path / "out", per_mask=3, batch=2)


def prepared(job):
    """A data set whose settings are fixed, so that only workers that draw are started."""
    with pytest.raises(KeyboardInterrupt):
        job.run(InlineEngine(drawn=0))
    return job


def processes_of(engine):
    return [worker.process for worker in engine._workers]


def test_a_killed_worker_is_replaced(job, one_thread):
    job, engine, killed = prepared(job), local(SlowWorker), []

    def kill(tally):
        if tally.drawn and not killed:
            killed.append(processes_of(engine)[0])
            os.kill(killed[0].pid, signal.SIGKILL)

    tally = job.run(engine, kill)
    assert killed and tally.retries >= 1 and (tally.missing, tally.problems) == (0, {})
    assert verify(job.out).problems == []
    assert not killed[0].is_alive() and processes_of(engine) == []


@pytest.mark.slow
def test_a_task_that_ends_workers_is_reported_and_the_others_are_drawn(job, one_thread):
    job = prepared(job.but(per_mask=2))
    tally = job.run(local(DeadlyWorker, workers=2))
    assert {(task.subject, task.numbers) for task in tally.problems} == {("sub-1", (1, 2))}
    assert set(tally.problems.values()) == {"the worker was ended by SIGKILL (out of memory?) (3 attempts)"}
    assert (tally.drawn, tally.missing) == (4, 2)
    assert job.run(InlineEngine()).missing == 0 and verify(job.out).problems == []


class RefusingWorker(NoNetworkWorker):
    def __init__(self, settings, device):
        raise InputError(f"no free memory on {device}")


def test_workers_that_cannot_start_end_the_command(job):
    with pytest.raises(InputError, match="no free memory on cpu"):
        job.run(local(RefusingWorker))
    assert not job.out.exists()
    with pytest.raises(InputError, match="--engine teleport: choose from local"):
        make_engine("teleport", EngineOptions(devices=("cpu",)))


def command(job, *more):
    options = ("--per-mask", job.per_mask, "--batch", job.batch, "--plan", "baseline", "--device", "cpu")
    words = ("generate", job.manifest, "--model", job.model, "-o", job.out, *options, *more)
    return [sys.executable, "-m", "voxtune", *map(str, words)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def start(job, *more):
    return subprocess.Popen(
        command(job, *more),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def children(pid):
    """The worker processes of a driver, and its other helpers."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def voxtune(*words):
    return subprocess.run(words, env=environment(), capture_output=True, text=True, check=False)


def workers_of(pid):
    return [p for p in children(pid) if "spawn_main" in Path(f"/proc/{p}/cmdline").read_text()]


def volumes(out):
    folders = list(out.glob("sub-*/anat"))  # the data set may not exist yet
    return [path for folder in folders for path in folder.glob("*_T1w.json")]


def wait_for(condition, seconds=600):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_ctrl_c_finishes_what_runs(job):
    job = job.but(per_mask=200, batch=1)
    process = start(job)
    wait_for(lambda: volumes(job.out))
    workers = workers_of(process.pid)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers as well
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "finishing the volumes that are being drawn" in err and "Traceback" not in err
    assert "are missing; the same command draws them" in err and "voxtune: error: interrupted" in err
    drawn, result = len(volumes(job.out)), verify(job.out)
    assert result.verified == drawn < 600 and not result.damaged and not result.extra, "nothing is lost"
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.slow
def test_workers_end_with_their_driver(job):
    job = job.but(per_mask=200, batch=1)
    process = start(job)
    wait_for(lambda: volumes(job.out))
    workers = workers_of(process.pid)
    assert workers
    process.kill()
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 20)
    tally = job.but(per_mask=200).run(InlineEngine())
    assert tally.missing == 0 and verify(job.out).problems == []


@pytest.mark.slow
def test_the_command_reports_in_json(job):
    done = voxtune(*command(job, "--workers", 2, "--price-per-gpu-hour", 3, "--json"))
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (result["volumes"], result["drawn"], result["missing"], result["failed"]) == (9, 9, 0, [])
    assert result["cost_per_1000"] > 0 and 0 <= result["idle_share"] <= 1
    done = voxtune(sys.executable, "-m", "voxtune", "generate", "--verify", "-o", job.out, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["complete"] is True
    next(job.out.rglob("*_T1w.nii.gz")).unlink()
    done = voxtune(sys.executable, "-m", "voxtune", "generate", "--verify", "-o", job.out)
    assert done.returncode == 3 and "1 missing, 0 damaged, 0 extra" in done.stderr


@pytest.mark.slow
def test_two_shards_start_at_the_same_time(job):
    """One chooses plan and batch, the other waits for that."""
    both = [start(job.but(batch="auto"), "--shard", f"{number}/2") for number in (1, 2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert sorted("first start" in out for out, _ in outputs) == [False, True]
    assert verify(job.out).problems == []


class Killer(threading.Thread):
    """Kills a random worker of the driver `process` at random moments, but not again before volumes were written."""

    def __init__(self, out: Path, seed: int):
        super().__init__(daemon=True)
        self.out, self.random, self.process, self.stop = out, random.Random(seed), None, False
        self.killed = self.count = 0

    def run(self):
        while not self.stop:
            time.sleep(self.random.uniform(0, 2))
            process, count = self.process, len(volumes(self.out))
            if process is None or process.poll() is not None or count == self.count:
                continue
            with contextlib.suppress(OSError):
                workers = workers_of(process.pid)
                if workers:
                    os.kill(self.random.choice(workers), signal.SIGKILL)
                    self.killed, self.count = self.killed + 1, count


@pytest.mark.scale
def test_killed_workers_and_drivers_leave_the_bytes_of_an_undisturbed_run(job, model, tmp_path, record_property):
    """600 volumes; a worker is killed at random moments, 20 times and more, the driver twice."""
    masks = write_masks(tmp_path / "many", 60)
    whole = job.but(manifest=masks, out=tmp_path / "whole", per_mask=10, batch=2)
    assert (
        subprocess.run(command(whole, "--workers", 2), env=environment(), capture_output=True, check=False).returncode
        == 0
    )
    disturbed = whole.but(out=tmp_path / "disturbed")
    killer, drivers, starts = Killer(disturbed.out, seed=7), 0, 0
    killer.start()
    while True:
        starts += 1
        assert starts < 60
        process = killer.process = start(disturbed, "--workers", 2)
        if drivers < 2:
            count = len(volumes(disturbed.out))
            wait_for(
                lambda count=count, process=process: (
                    len(volumes(disturbed.out)) > count + 60 or process.poll() is not None
                )
            )
            if process.poll() is None:
                process.kill()
                drivers += 1
        _, err = process.communicate(timeout=900)
        assert process.returncode in (0, 2, 3, -signal.SIGKILL), err
        assert "Traceback" not in err, err
        if process.returncode == 0:
            if killer.killed >= 20:
                break
            # Too fast: a part of the volumes is drawn again while workers are killed.
            for path in random.Random(starts).sample(volumes(disturbed.out), 200):
                path.unlink()
    killer.stop = True
    result = verify(disturbed.out)
    assert (result.verified, result.problems, result.reduced) == (600, [], 0)
    assert contents(disturbed.out) == contents(whole.out)
    record_property("volumes", 600)
    record_property("workers_killed", killer.killed)
    record_property("drivers_killed", drivers)
    record_property("starts", starts)
