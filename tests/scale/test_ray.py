"""The Ray engine: the bytes of the local one, also when workers, the driver or the cluster are lost."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.factories.core_only import voxtune_core
from tests.scale.datasets import Job, contents, write_masks, write_model
from tests.scale.test_local import ROOT, RefusingWorker, command, environment, start, volumes, voxtune, wait_for
from tests.scale.workers import DeadlyWorker, InlineEngine, NoNetworkWorker, SlowWorker
from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.scale.engine import EngineOptions, make_engine
from voxtune.scale.ledger import DatasetLedger
from voxtune.scale.verify import verify

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def ray():
    """Ray with a cluster of this module, whose workers can import the tests."""
    pytest.importorskip("ray")
    from voxtune.scale.ray_engine import connect

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.delenv("RAY_ADDRESS", raising=False)
        module = connect(None, cpus=2)
        yield module
        module.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(model, tmp_path):
    return Job(model=model, manifest=write_masks(tmp_path / "masks", 3), out=tmp_path / "out", per_mask=3, batch=2)


def engine(make=NoNetworkWorker, workers=1):
    return make_engine("ray", EngineOptions(devices=("cpu",) * workers, make=make))


def below(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have started."""
    try:
        own = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return own + [p for child in own for p in below(child)]


def actors(pid: int) -> list[int]:
    """The processes of workers among those below a process."""
    processes = []
    for process in below(pid):
        try:
            if Path(f"/proc/{process}/cmdline").read_bytes().startswith(b"ray::RayWorker"):
                processes.append(process)
        except OSError:
            continue
    return processes


def test_a_lost_worker_leaves_the_bytes_of_an_undisturbed_run(ray, job, tmp_path, capsys):
    killed = []

    def kill(tally):
        if tally.drawn and not killed:
            killed.extend(actors(os.getpid())[:1])
            os.kill(killed[0], signal.SIGKILL)

    tally = job.run(engine(SlowWorker), kill)
    assert killed and tally.retries >= 1 and (tally.missing, tally.problems) == (0, {})
    assert verify(job.out).problems == [] and not capsys.readouterr().out
    whole = job.but(out=tmp_path / "whole")
    whole.run(InlineEngine())
    assert contents(whole.out) == contents(job.out)


@pytest.mark.slow
def test_a_task_that_ends_workers_is_reported_and_the_others_are_drawn(ray, job):
    tally = job.but(per_mask=2).run(engine(DeadlyWorker, workers=2))
    assert {(task.subject, task.numbers) for task in tally.problems} == {("sub-1", (1, 2))}
    (reason,) = tally.problems.values()
    assert reason.startswith("the worker was lost (Actor") and reason.endswith("(3 attempts)")
    assert (tally.drawn, tally.missing) == (4, 2)


@pytest.mark.slow
def test_workers_that_cannot_start_end_the_command(ray, job):
    with pytest.raises(InputError, match="no free memory on cpu"):
        job.run(engine(RefusingWorker))
    assert not job.out.exists()
    # Later, at a start that continues.
    with pytest.raises(KeyboardInterrupt):
        job.run(InlineEngine(drawn=0))
    with pytest.raises(InputError, match="no free memory on cpu"):
        job.run(engine(RefusingWorker, workers=2))


def test_what_the_cluster_lacks_is_refused(ray):
    from voxtune.scale.ray_engine import cluster_devices

    assert cluster_devices("auto", None, 2, None) == (("cpu", "cpu"), max(2, os.cpu_count()))
    for device, gpus, workers, problem in (
        ("cuda", 1, None, "--gpus 1: the Ray cluster has 0 GPUs"),
        ("cpu", 1, None, "--gpus requires CUDA devices"),
        ("cpu", None, 10_000, "--workers 10000: the Ray cluster has"),
        ("cuda:1", None, None, "cannot be combined with --engine ray"),
        ("cuda", None, 1, "--workers applies to CPUs"),
    ):
        with pytest.raises(InputError, match=problem):
            cluster_devices(device, gpus, workers, None)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("127.0.0.1:1", "no connection to the Ray cluster at 127.0.0.1:1"),
        ("ray://127.0.0.1:1", "expected auto or HOST:PORT"),
        ("nonsense", "expected auto or HOST:PORT"),
        ("127.0.0.1:99999", "no connection to the Ray cluster"),
    ],
)
def test_an_address_without_a_cluster_is_refused_at_once(address, problem, monkeypatch):
    """In a process that has no cluster yet."""
    ray = pytest.importorskip("ray")
    from voxtune.scale.ray_engine import connect

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InputError, match=problem):
        connect(address)


def test_without_ray_the_extra_is_named(job, tmp_path, capsys):
    words = command(job, "--engine", "ray")[3:]
    [result] = voxtune_core([words])
    assert result["code"] == 2 and result["err"].count("\n") == 1
    assert '--engine ray requires ray, which is not installed: pip install "voxtune[scale]"' in result["err"]
    assert main([*words[:-2], "--address", "auto"]) == 2
    assert "--address requires --engine ray" in capsys.readouterr().err


@pytest.mark.slow
def test_ctrl_c_finishes_what_runs(job):
    pytest.importorskip("ray")
    job = job.but(per_mask=200, batch=1)
    process = start(job, "--engine", "ray", "--json")
    wait_for(lambda: volumes(job.out))
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "are missing; the same command draws them" in err and "Traceback" not in err and "raylet" not in out
    result = verify(job.out)
    assert 0 < result.verified < 600 and not result.damaged and not result.extra


def start_cluster(cpus: int) -> tuple[subprocess.Popen[bytes], str]:
    """`ray start`, as on the first node of a cluster, and its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    words = ["start", "--head", "--block", "--include-dashboard=false", "--disable-usage-stats"]
    words += [f"--num-cpus={cpus}", "--node-ip-address=127.0.0.1", f"--port={address.partition(':')[2]}"]
    words += [f"--object-store-memory={100 * 2**20}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ray.scripts.scripts", *words],
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        time.sleep(0.5)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", int(address.partition(":")[2]))) == 0:
                return process, address
    raise AssertionError("the cluster did not start")


def stop_cluster(cluster: subprocess.Popen[bytes]) -> None:
    cluster.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        cluster.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(cluster.pid, signal.SIGKILL)
    cluster.wait(20)


class ActorKiller(threading.Thread):
    """Kills random workers of a cluster at random moments, with some volumes between them: a worker takes seconds to start."""

    def __init__(self, cluster: int, ledger: Path, seed: int):
        super().__init__(daemon=True)
        self.cluster, self.ledger, self.random = cluster, ledger, random.Random(seed)
        self.stop, self.workers = False, 0

    def drawn(self) -> int:
        return self.ledger.read_bytes().count(b"\n") if self.ledger.exists() else 0

    def run(self):
        following = self.random.randint(1, 80)
        while not self.stop:
            time.sleep(self.random.uniform(0.1, 0.5))
            if self.drawn() < following:
                continue
            following = self.drawn() + self.random.randint(1, 160)
            running = actors(self.cluster)
            if running and not self.stop:
                try:
                    os.kill(self.random.choice(running), signal.SIGKILL)
                    self.workers += 1
                except ProcessLookupError:
                    continue


@pytest.mark.scale
def test_two_thousand_tasks_with_killed_workers_and_drivers(job, tmp_path, record_property, monkeypatch):
    """A worker of four is killed at random moments, 20 times and more, the driver twice."""
    pytest.importorskip("ray")
    for name, value in {"USAGE_STATS_ENABLED": "0", "AUTH_MODE": "token", "AUTH_TOKEN": secrets.token_hex(32)}.items():
        monkeypatch.setenv(f"RAY_{name}", value)
    masks = write_masks(tmp_path / "many", 2000)
    whole = job.but(manifest=masks, out=tmp_path / "whole", per_mask=1, batch=1)
    began = time.monotonic()
    assert voxtune(*command(whole, "--workers", 2)).returncode == 0
    record_property("local_seconds", round(time.monotonic() - began, 1))
    disturbed = whole.but(out=tmp_path / "disturbed")
    ledger = DatasetLedger(disturbed.out).shard_file(1, 1)
    cluster, address = start_cluster(cpus=4)
    killer, drivers, starts, seconds = ActorKiller(cluster.pid, ledger, seed=11), 0, 0, 0.0
    killer.start()
    try:
        while True:
            starts += 1
            assert starts < 60
            began = time.monotonic()
            process = start(disturbed, "--engine", "ray", "--address", address, "--workers", 4)
            if drivers < 2:
                count = len(volumes(disturbed.out))
                wait_for(
                    lambda count=count, process=process: (
                        len(volumes(disturbed.out)) > count + 200 or process.poll() is not None
                    ),
                    300,
                )
                if process.poll() is None:
                    process.kill()
                    drivers += 1
            _, err = process.communicate(timeout=900)
            seconds += time.monotonic() - began
            assert process.returncode in (0, 3, -signal.SIGKILL), err
            assert "Traceback" not in err, err
            if process.returncode == 0:
                if killer.workers >= 20:
                    break
                # Too fast: a part of the volumes is drawn again while workers are killed.
                for path in random.Random(starts).sample(volumes(disturbed.out), 400):
                    path.unlink()
    finally:
        killer.stop = True
        stop_cluster(cluster)
    result = verify(disturbed.out)
    assert (result.verified, result.problems, result.reduced) == (2000, [], 0)
    assert contents(disturbed.out) == contents(whole.out)
    record_property("tasks", 2000)
    record_property("workers_killed", killer.workers)
    record_property("drivers_killed", drivers)
    record_property("starts", starts)
    record_property("ray_seconds", round(seconds, 1))
