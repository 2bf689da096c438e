"""The batch size of sampling, with networks whose time per step is known."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from tests.factories import analytic
from voxtune.runtime import batching
from voxtune.runtime.batching import choose_batch, fastest_batch
from voxtune.runtime.model import Model

SIZE = (8, 8, 8)


class Timed(nn.Module):
    """Takes `fixed` seconds per step and `each` seconds per volume."""

    def __init__(self, fixed: float, each: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.fixed, self.each = fixed, each
        self.batches: list[int] = []

    def forward(self, x, t_N, cond):
        assert len(x) == len(t_N) == len(cond) and x.shape[2:] == cond.shape[2:]
        self.batches.append(len(x))
        time.sleep(self.fixed + self.each * len(x))
        return x


def choose(network, volumes, steps):
    model = Model(analytic.model(4).config, network)
    condition = lambda n: -torch.ones(n, model.config.network.mask_channels, *SIZE)  # noqa: E731
    return choose_batch(model, condition, SIZE, volumes=volumes, steps=steps)


@pytest.fixture
def memory(monkeypatch):
    """Memory for any batch, whatever else runs on this machine."""
    monkeypatch.setattr(batching, "available_memory", lambda _device: 2**50)


def test_larger_batches_that_cost_nothing(memory):
    network = Timed(fixed=0.05, each=0.0)
    choice = choose(network, volumes=6, steps=100)
    assert choice.batch == 6 and choice.reason == "all samples"
    assert list(choice.seconds) == [1, 2, 4, 6] and all(3 <= network.batches.count(n) <= 4 for n in (1, 2, 4, 6))
    assert choice.describe().startswith("batch 6 (all samples; seconds per step and volume: 1: 0.0")


def test_larger_batches_that_gain_nothing(memory):
    network = Timed(fixed=0.0, each=0.05)
    choice = choose(network, volumes=100, steps=100)
    assert choice.batch == 1 and choice.reason == "larger ones are not faster" and set(network.batches) == {1, 2}


def test_one_volume_is_not_measured(memory):
    network = Timed(fixed=0.0, each=0.0)
    choice = choose(network, volumes=1, steps=1000)
    assert (choice.batch, choice.seconds, network.batches) == (
        1,
        {},
        [],
    ) and choice.describe() == "batch 1 (one sample)"


def test_measuring_takes_a_small_part_of_the_time(memory):
    network = Timed(fixed=0.05, each=0.0)
    assert choose(network, volumes=2, steps=4).batch == 1 and network.batches == []
    # Two batch sizes pay, and the step to the third would save less than it takes.
    network = Timed(fixed=0.05, each=0.01)
    choice = choose(network, volumes=20, steps=4)
    assert 1 < choice.batch < 20 and sum(network.batches) < 40


@pytest.mark.parametrize(
    ("seconds", "volumes", "padded", "batch"),
    [
        ({1: 0.384, 2: 0.0698, 3: 0.0778}, 3, False, 3),  # a last batch of 1 would take longer than the first two
        ({1: 0.384, 2: 0.0698, 3: 0.0778}, 4, False, 2),
        ({1: 1.0, 2: 0.6, 4: 0.5}, 5, True, 2),  # 3 batches of 2 in 3.6, 2 of 4 in 4
        ({1: 1.0, 2: 0.6, 4: 0.5}, 5, False, 4),
        ({1: 1.0, 2: 0.99, 4: 0.98}, 4, False, 1),  # within rounding
        ({1: 1.0, 2: 0.9, 4: 0.5}, 7, False, 4),  # the last 3 as half of 2 and 4
    ],
)
def test_the_last_batch_counts(seconds, volumes, padded, batch):
    assert fastest_batch(seconds, volumes, padded=padded) == batch


def test_one_slow_step_does_not_decide(memory):
    network = Timed(fixed=0.0, each=0.1)
    forward = network.forward

    def slow_once(x, t_N, cond):
        time.sleep(0.5 if len(network.batches) in (1, 5) else 0.0)  # a counted step of batch 1, and one of batch 2
        return forward(x, t_N, cond)

    network.forward = slow_once
    choice = choose(network, volumes=100, steps=100)
    assert choice.batch == 1 and max(choice.seconds.values()) < 0.25


@pytest.mark.parametrize(("available", "reason"), [(0, "memory"), (None, "free memory is unknown")])
def test_memory_bounds_the_batch(monkeypatch, available, reason):
    monkeypatch.setattr(batching, "available_memory", lambda _device: available)
    monkeypatch.setattr(batching, "_peak_memory", lambda _device: 2**50)
    choice = choose(Timed(fixed=0.05, each=0.0), volumes=8, steps=100)
    assert choice.batch == 1 and choice.reason == reason


MEMORY = """
import torch
from voxtune.runtime import batching
device = torch.device("cpu")
in_use, available, peak = batching._memory_in_use(device), batching.available_memory(device), batching._peak_memory(device)
assert in_use and in_use > 10 * 2**20 and available and available > 2**20 and peak and peak >= in_use / 2
held = torch.ones(64 * 2**20)  # 256 MiB
grown = batching._memory_in_use(device) - in_use
assert grown > 128 * 2**20 and held.sum() > 0, grown
"""


def test_memory_of_this_machine_is_read():
    """In a process of its own: one that has freed much memory takes it again, and grows by nothing."""
    done = subprocess.run([sys.executable, "-c", MEMORY], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
