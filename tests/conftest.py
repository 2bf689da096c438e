"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.factories import GOLDENS
from tests.factories.chromium import NO_BROWSER
from tests.record import Recorder
from voxtune.workloads import MedDDPMConfig, build

INTERPRET = os.environ.get("TRITON_INTERPRET", "0")
# Threads of several test processes on the same cores wait for each other in turns: tests then take many times as long.
THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
torch.set_num_threads(THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))  # for the processes that tests start

LONG_SECONDS = 20  # a test of the quick suite that takes longer is named in the summary


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="write every test's outcome into this JSON file")


def pytest_configure(config):
    # With -n the controller sees every report; the workers would overwrite its file.
    if config.getoption("--record") is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(config.getoption("--record")))


def pytest_terminal_summary(terminalreporter):
    skipped = [r for r in terminalreporter.getreports("skipped") if NO_BROWSER in str(r.longrepr)]
    if skipped:
        terminalreporter.write_line(
            f"{len(skipped)} browser tests skipped: install Chromium (.ci/browser) or set VOXTUNE_CHROMIUM to its program"
        )
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        if report.duration > LONG_SECONDS and not {"slow", "gpu", "hostile", "scale"} & set(report.keywords):
            line = f"{report.nodeid} took {report.duration:.0f} s; make it faster or mark it `slow`"
            terminalreporter.write_line(line)


@pytest.fixture(scope="module")
def one_thread():
    """Bits depend on the number of threads, and networks as small as these run best on one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _cache_of_our_own(tmp_path_factory):
    """Plans tuned by the person at this machine are none of the tests' business."""
    before = os.environ.get("VOXTUNE_CACHE")
    os.environ["VOXTUNE_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["VOXTUNE_CACHE"]
    else:
        os.environ["VOXTUNE_CACHE"] = before


@pytest.fixture(scope="session")
def golden():
    """(the tiny published-format network, its golden tensors)"""
    g = {k: torch.from_numpy(v) for k, v in np.load(GOLDENS / "med_ddpm_tiny.npz").items()}
    network = build(MedDDPMConfig(base=32, multipliers=(1, 2), attention=(2,)))
    state = torch.load(GOLDENS / "med_ddpm_tiny.pt", weights_only=True)["ema"]
    network.load_state_dict({k.removeprefix("denoise_fn."): v for k, v in state.items() if k.startswith("denoise_fn.")})
    return network, g


@pytest.fixture(autouse=True)
def _no_interpreter_for_the_next_test(monkeypatch):
    """`voxtune ladder` turns Triton's interpreter on for its process, which here runs other tests too."""
    monkeypatch.setenv("TRITON_INTERPRET", INTERPRET)
