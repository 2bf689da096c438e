"""Fixtures that many tests share."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.factories import GOLDENS
from tests.record import Recorder
from voxtune.workloads import MedDDPMConfig, build

# Threads of several test processes on the same cores wait for each other in turns: tests then take many times as long.
THREADS = max(1, (os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
torch.set_num_threads(THREADS)
os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))  # for the processes that tests start


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="write every test's outcome into this JSON file")


def pytest_configure(config):
    if config.getoption("--record") is not None:
        config.pluginmanager.register(Recorder(config.getoption("--record")))


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
