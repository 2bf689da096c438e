"""Training in several processes: the weights of one process, shared decisions and errors, kills and signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.factories.tiny_training import Blobs, rows, tiny_config, weights
from tests.training import distributed_checks
from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.distributed import VARIABLES, Processes, is_leader, join_processes, local_count, process_count
from voxtune.training.log import read_metrics
from voxtune.training.loop import train

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
needs_torchrun = pytest.mark.skipif(
    sys.platform != "linux" or not torch.distributed.is_available(), reason="needs Linux and torch.distributed"
)


def launched(*arguments: object, processes: int = 2, restarts: int = 0) -> subprocess.Popen[str]:
    """torchrun with these arguments; it starts the processes again up to `restarts` times."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(port), "--max-restarts", str(restarts), *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)


def output_of(process: subprocess.Popen[str], limit: float = 240) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def errors_of(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("voxtune: error: ")]


def newest(out: Path, part: str) -> dict[str, torch.Tensor]:
    return read_checkpoint(checkpoints(out / "checkpoints")[-1]).part(part)


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Relative, over all tensors together."""
    flat = [torch.cat([state[name].double().flatten() for name in sorted(one)]) for state in (one, two)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The runs of two processes; one of them continues a run of one process."""
    folder = tmp_path_factory.mktemp("shared")
    train(tiny_config(**distributed_checks.FIRST), Blobs(), folder / "one-then-two")
    code, out, err = output_of(launched(distributed_checks.__file__, folder))
    assert code == 0, f"{out}\n{err}"
    return folder


@needs_torchrun
def test_two_processes_reach_the_weights_of_one(shared, tmp_path):
    train(tiny_config(**distributed_checks.DIVIDED), Blobs(), tmp_path / "divided")
    one, two = (newest(folder / "divided", "model.") for folder in (tmp_path, shared))
    assert distance(one, two) <= 1e-5
    losses = [[row["loss"] for row in rows(folder / "divided")] for folder in (tmp_path, shared)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    # Parts of a batch have the shapes that one process has: the same sums, and at any learning rate the same weights.
    train(tiny_config(**distributed_checks.PARTS), Blobs(), tmp_path / "parts")
    one, two = (newest(folder / "parts", "model.") for folder in (tmp_path, shared))
    assert distance(one, two) <= 1e-5
    start = read_checkpoint(checkpoints(tmp_path / "parts" / "checkpoints")[0]).part("model.")
    assert distance(one, start) > 1e-3, "the runs have learned something"


@needs_torchrun
def test_a_plan_in_two_processes(shared, tmp_path):
    train(tiny_config(**distributed_checks.PLANNED), Blobs(), tmp_path / "planned")
    one, two = (newest(folder / "planned", "model.") for folder in (tmp_path, shared))
    assert distance(one, two) <= 1e-5


@needs_torchrun
def test_another_number_of_processes_resumes(shared, tmp_path):
    whole = distributed_checks.FIRST | {"steps": 12}
    train(tiny_config(**whole), Blobs(), tmp_path / "whole")
    train(tiny_config(**whole), Blobs(), shared / "two-then-one", resume=True)
    expected = newest(tmp_path / "whole", "model.")
    for name in ("one-then-two", "two-then-one"):
        assert distance(expected, newest(shared / name, "model.")) <= 1e-5
        assert [row["step"] for row in rows(shared / name)] == [2, 4, 6, 8, 10, 12]


@needs_torchrun
def test_errors_are_raised_in_every_process(shared):
    messages = {}
    for name in ("unreadable", "invalid", "full", "divided"):
        first, second = ((shared / f"{name}-{rank}.txt").read_text() for rank in range(2))
        assert first == second, name
        messages[name] = first
    assert messages["unreadable"].startswith("/data/sub-03.nii: No such file")
    assert "resume with" in messages["unreadable"]
    assert read_checkpoint(checkpoints(shared / "unreadable" / "checkpoints")[-1]).state.step > 0, "its work is saved"
    assert "2 steps in a row were skipped" in messages["invalid"]
    assert "plain PyTorch computes finite values" not in messages["invalid"], "the cause is in the other process"
    invalid = read_checkpoint(checkpoints(shared / "invalid" / "checkpoints")[-1])
    assert f"after step {invalid.state.step}" in messages["invalid"]
    assert messages["full"].startswith("full: No space left on device")
    assert "the last checkpoint is step-00000003" in messages["full"]
    assert "already contains a run" in messages["divided"]
    assert not (shared / "divided" / ".voxtune.lock").exists()


COMMAND = ("-m", "voxtune", "train", "--size", "8,8,8", "--base", "32", "--multipliers", "1", "--device", "cpu")
TINY = (*COMMAND, "--set", "model.diffusion_steps=10", "--set", "tensorboard=false", "--set", "log_every=1")


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """Subjects in a packed file."""
    from tests.training.test_packed import Made
    from voxtune.data.subjects import pack

    return pack(Made(range(4)), Made([90]), tmp_path_factory.mktemp("packed") / "subjects.npz")


@needs_torchrun
def test_wrong_settings_are_one_line(subjects, tmp_path):
    out = tmp_path / "run"
    arguments = ("--subjects", subjects, "--batch", "1", "--accumulation", "1", "-o", out)
    code, _, err = output_of(launched(*COMMAND[:3], *COMMAND[5:], *arguments))
    assert code != 0
    assert errors_of(err) == [
        "voxtune: error: batch 1 x accumulation 1 = 1 samples per step cannot be divided among 2 processes; the product must "
        "be a multiple of 2"
    ]
    assert "exitcode  : 2" in err or "exitcode: 2" in err
    assert not out.exists()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """The processes that torchrun started, in the order of their ranks."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {}
    for pid in map(int, children):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        ranks.update({int(e[5:]): pid for e in environment if e.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


def running(
    subjects: Path,
    out: Path,
    steps: int,
    rows_before: int = 6,
    restarts: int = 0,
    processes: int = 2,
    device: str = "cpu",
) -> subprocess.Popen[str]:
    """A run of two processes, or of another number, that has logged some steps."""
    arguments = ("--subjects", subjects, "--batch", "2", "--accumulation", "1", "--steps", steps, "-o", out)
    more = ("--checkpoint-every", "3", "--sample-every", "0")
    tiny = [device if word == "cpu" else word for word in TINY if word not in ("--size", "8,8,8")]
    process = launched(*tiny, *arguments, *more, restarts=restarts, processes=processes)
    wait_for_rows(process, out, rows_before)
    return process


def wait_for_rows(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Until a run has logged `count` steps."""
    deadline = time.monotonic() + 120
    while len(read_metrics(out / "metrics.jsonl")) < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no new steps"
        time.sleep(0.02)


@pytest.mark.slow
@needs_torchrun
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_run_which_resumes(subjects, tmp_path, victim):
    out = tmp_path / "run"
    process = running(subjects, out, 10**6)
    os.kill(workers_of(process)[victim], signal.SIGKILL)
    started = time.monotonic()
    code, _, err = output_of(process, 60)
    assert code != 0 and time.monotonic() - started < 40
    (line,) = errors_of(err)
    assert f"process {1 - victim} of 2 lost the connection to another one" in line
    assert f"voxtune train --resume {out}" in line
    done = read_checkpoint(checkpoints(out / "checkpoints")[-1]).state.step
    assert done > 0 and done % 3 == 0
    steps = done + 3
    resumed = launched("-m", "voxtune", "train", "--resume", out, "--steps", steps, "--device", "cpu")
    code, text, err = output_of(resumed)
    assert code == 0, err
    assert f"Trained {steps} steps in 2 processes" in text
    assert distance(undisturbed(subjects, tmp_path / "one", steps), newest(out, "model.")) <= 1e-5


def undisturbed(subjects: Path, out: Path, steps: int) -> dict[str, torch.Tensor]:
    """The weights of a run of one process."""
    arguments = ["--subjects", str(subjects), "--batch", "2", "--accumulation", "1", "--steps", str(steps)]
    one = [sys.executable, *TINY, *arguments, "-o", str(out), "--sample-every", "0"]
    one = [word for word in one if word not in ("--size", "8,8,8")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    subprocess.run(one, check=True, env=environment, capture_output=True)
    return newest(out, "model.")


@pytest.mark.slow
@needs_torchrun
@pytest.mark.parametrize("moments", [(6,), (1, 9)])
def test_torchrun_starts_lost_processes_again_and_they_resume(subjects, tmp_path, moments):
    """Killed after these numbers of steps: the other process ends as well, both are started again by torchrun alone."""
    out, steps = tmp_path / "run", 40
    process = running(subjects, out, steps, rows_before=moments[0], restarts=len(moments))
    for place, rows_before in enumerate(moments):
        wait_for_rows(process, out, rows_before)
        before = workers_of(process)
        os.kill(before[(place + 1) % 2], signal.SIGKILL)
        deadline = time.monotonic() + 90
        while len(workers_of(process)) < 2 or set(workers_of(process)) & set(before):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
    code, text, err = output_of(process)
    assert code == 0, err
    assert f"Trained {steps} steps in 2 processes" in text
    assert text.count("started again by torchrun: resuming") == len(moments)
    assert [row["step"] for row in rows(out)] == list(range(1, steps + 1)), "each step once"
    assert distance(undisturbed(subjects, tmp_path / "one", steps), newest(out, "model.")) <= 1e-5


@needs_torchrun
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_one_lost_process_is_started_again(subjects, tmp_path, device):
    """Also on a GPU, whose plan comes from the checkpoint."""
    out, steps = tmp_path / "run", 60
    process = running(subjects, out, steps, restarts=1, processes=1, device=device)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    code, text, err = output_of(process)
    assert code == 0, err
    assert f"Trained {steps} steps" in text and text.count("started again by torchrun: resuming") == 1
    assert [row["step"] for row in rows(out)] == list(range(1, steps + 1)), "each step once"


@pytest.mark.slow
@needs_torchrun
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("receiver", ["torchrun", "process 1"])
def test_a_signal_stops_all_processes_after_a_checkpoint(subjects, tmp_path, number, receiver):
    out = tmp_path / "run"
    process = running(subjects, out, 10**6)
    os.kill(process.pid if receiver == "torchrun" else workers_of(process)[1], number)
    code, text, err = output_of(process, 60)
    assert code != 0 and not errors_of(err) and "SIGABRT" not in err
    stored = read_checkpoint(checkpoints(out / "checkpoints")[-1]).state.step
    assert f"Stopped after step {stored} of 1000000" in text
    assert len(read_metrics(out / "metrics.jsonl")) == stored
    assert (weights(out), (out / ".voxtune.lock").exists()) == (weights(out), False)


def test_a_step_is_divided_without_gaps():
    for count, batch, accumulation, parts in (
        (1, 2, 3, (2, 3)),
        (2, 4, 1, (2, 1)),
        (2, 1, 2, (1, 1)),
        (4, 6, 4, (6, 1)),
    ):
        config = tiny_config(batch=batch, accumulation=accumulation)
        shares = [Processes(CPU, rank=rank, count=count).share(config) for rank in range(count)]
        assert {(s.batch, s.accumulation) for s in shares} == {parts}
        for step in range(2):
            start = step * config.samples_per_step
            numbers = []
            for share in shares:
                batches = share.numbers(0)
                own = [next(batches) for _ in range((step + 1) * share.accumulation)][-share.accumulation :]
                numbers += [n for b in own for n in b]
            assert numbers == list(range(start, start + config.samples_per_step))
    with pytest.raises(InputError, match="6 samples per step cannot be divided among 4 processes"):
        Processes(CPU, count=4).share(tiny_config(batch=3, accumulation=2))


def test_without_torchrun_a_run_is_alone(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert (process_count(), is_leader(), local_count()) == (1, True, 1)
    assert join_processes(CPU).count == 1


def test_the_environment_of_torchrun_is_checked(monkeypatch, tmp_path, capsys):
    for name, value in zip(VARIABLES, ("1", "2", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (process_count(), is_leader(), local_count()) == (2, False, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="cannot be combined with several processes"):
        join_processes(torch.device("cuda:0"))
    with pytest.raises(InputError, match=r"more processes than this machine has GPUs \(1\); pass --nproc-per-node 1"):
        join_processes(torch.device("cuda"))
    for rank in ("2", "-1", "x"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(InputError, match="are not a process of a job"):
            process_count()
    assert main(["train", "--cohort", "2", "-o", str(tmp_path / "run")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("voxtune: error: RANK=x and WORLD_SIZE=2 in the environment are not a process of a job")
