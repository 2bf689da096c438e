"""voxtune ladder on a machine without a GPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


def voxtune(*arguments):
    command = [sys.executable, "-m", "voxtune", "ladder", "--device", "cpu", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rungs", "0-3"], "numbered 1 to 11"),
        pytest.param(["--rungs", "two"], "1,4,8-10", marks=pytest.mark.slow),
        pytest.param(["--size", "8x8x8", "--rungs", "10"], "expected height and width", marks=pytest.mark.slow),
        pytest.param(["--size", "6x8", "--rungs", "10"], "multiples of 2", marks=pytest.mark.slow),
    ],
)
def test_reports_wrong_input(tmp_path, arguments, message):
    done = voxtune(*arguments, "-o", tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_runs_on_a_cpu(tmp_path):
    done = voxtune("--rungs", "7,10-11", "--size", "8x8", "--json", "-o", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "interpreter" in done.stderr
    tables = json.loads(done.stdout)
    assert [row["number"] for row in tables["rows"]] == [7, 10, 11]
    assert all(row["error"] < 1e-5 for row in tables["rows"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["ladder.html", "ladder.json", "ladder.svg"]


def test_other_rungs_run_after_a_failure():
    import torch

    from voxtune.diffusion import DiffusionConfig, make_schedule
    from voxtune.ladder.climb import climb
    from voxtune.ladder.rungs import Rung, Setting
    from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet

    network = ConvNeXtUNet(ConvNeXtConfig(width=8, multipliers=(1, 2))).eval()
    schedule = make_schedule(DiffusionConfig(schedule="linear", steps=100))
    setting = Setting(network=network, size=(8, 8), schedule=schedule, timesteps=[50])

    class Plain:
        def __init__(self, setting, machine):
            self.machine = machine

        def __call__(self, x, t):
            return network(x, torch.full((len(x),), t)).detach()

    def broken(setting, machine):
        raise RuntimeError("out of shared memory:\n  376 KiB of 227 KiB")

    rungs = [
        Rung(number=n, name=make.__name__, does="", kernels=(), make=make) for n, make in ((6, broken), (10, Plain))
    ]
    messages, saved = [], []
    tables = climb(setting, rungs, report=messages.append, save=lambda partial: saved.append(len(partial["rows"])))
    assert saved == [1], "results are saved after every successful rung"
    assert [row["number"] for row in tables["rows"]] == [10]
    assert tables["failed"] == [
        {"number": 6, "name": "broken", "reason": "RuntimeError: out of shared memory: 376 KiB of 227 KiB"}
    ]
    assert "failed: RuntimeError" in messages[0]


def test_the_cpu_program_is_the_network_in_float32():
    import torch

    from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
    from voxtune.ladder.climb import reference
    from voxtune.ladder.cpu_program import block_times, cpu_program
    from voxtune.ladder.rungs import Setting
    from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet

    torch.manual_seed(0)
    network = ConvNeXtUNet(ConvNeXtConfig(width=8, multipliers=(1, 2))).eval()
    schedule = make_schedule(DiffusionConfig(schedule="linear", steps=100))
    setting = Setting(network=network, size=(8, 8), schedule=schedule, timesteps=spaced_steps(100, 4))
    x, t, truth = reference(setting)
    program = cpu_program(setting, x, t, truth, repeats=2)
    assert program["error"] < 1e-5 and len(program["totals_ms"]) == 2 and program["total_ms"] > 0
    assert 1 <= program["measured_steps"] <= 4 and program["threads"] == torch.get_num_threads()
    assert block_times(setting, torch.device("cpu")) is None
