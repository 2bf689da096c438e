"""The learning rate over a run, the time limit, and the stored weights."""

from __future__ import annotations

import json
import math

import pytest
import torch

from tests.factories.tiny_training import Blobs, rows, tiny_config, weights
from voxtune.errors import InputError
from voxtune.runtime.storage import load
from voxtune.training import loop as train_module
from voxtune.training.loop import train
from voxtune.training.step import learning_rate

pytestmark = pytest.mark.usefixtures("one_thread")
DECAYING = {"warmup": 3, "decay": "cosine"}


def test_linear_warmup_and_cosine_decay():
    plain = tiny_config(steps=100)
    assert {learning_rate(plain, step) for step in range(100)} == {1e-3}
    warm = tiny_config(steps=100, warmup=4)
    assert [learning_rate(warm, step) for step in range(6)] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
    both = tiny_config(steps=100, warmup=4, decay="cosine")
    assert learning_rate(both, 50) == pytest.approx(1e-3 * (0.01 + 0.99 / 2))
    assert learning_rate(both, 99) == pytest.approx(1e-5, rel=0.1)
    falling = [learning_rate(both, step) for step in range(4, 100)]
    assert falling == sorted(falling, reverse=True)


def test_the_clock_can_only_speed_up_the_decay():
    config = tiny_config(steps=100, decay="cosine", minutes=1.0)
    assert learning_rate(config, 10, clock=0.05) == learning_rate(config, 10)
    assert learning_rate(config, 10, clock=0.5) == learning_rate(config, 50)
    assert learning_rate(config, 10, clock=7.0) == pytest.approx(1e-5)


def test_a_stopped_run_with_decay_ends_with_the_same_bits(tmp_path):
    config = tiny_config(**DECAYING, log_every=1)
    train(config, Blobs(), tmp_path / "uninterrupted")
    seen = []
    train(config, Blobs(), tmp_path / "run", lambda *a: seen.append(a), stop=lambda: len(seen) >= 4)
    train(config, Blobs(), tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "uninterrupted")
    assert rows(tmp_path / "run") == rows(tmp_path / "uninterrupted")
    assert [row["learning_rate"] for row in rows(tmp_path / "run")] == [learning_rate(config, s) for s in range(12)]
    train(tiny_config(log_every=1), Blobs(), tmp_path / "even")
    assert weights(tmp_path / "even") != weights(tmp_path / "uninterrupted")


def test_with_decay_the_length_of_a_run_is_fixed(tmp_path):
    train(tiny_config(steps=2, decay="cosine"), Blobs(), tmp_path / "run")
    with pytest.raises(InputError, match=r"steps: 2 -> 4, over which the learning rate decays.*start another run"):
        train(tiny_config(steps=4, decay="cosine"), Blobs(), tmp_path / "run", resume=True)
    with pytest.raises(InputError, match="decay: cosine -> none"):
        train(tiny_config(steps=4), Blobs(), tmp_path / "run", resume=True)


class Clock:
    """Time that passes when it is looked at."""

    def __init__(self, seconds: float):
        self.now, self.seconds = 0.0, seconds

    def monotonic(self) -> float:
        self.now += self.seconds
        return self.now

    def perf_counter(self) -> float:
        return self.now


def test_the_time_limit_ends_a_run_and_can_be_extended(tmp_path, monkeypatch):
    monkeypatch.setattr(train_module, "time", Clock(5.0))
    config = tiny_config(minutes=1.0, decay="cosine", log_every=1)
    result = train(config, Blobs(), tmp_path / "run")
    assert (result.ended, result.stopped) == ("minutes", False)
    assert 2 < result.step < 12
    assert result.checkpoint.name == f"step-{result.step:08d}.safetensors"
    rates = [row["learning_rate"] for row in rows(tmp_path / "run")]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1 * rates[0], "the decay has followed the clock"
    card = (result.model / "README.md").read_text()
    assert f"{result.step} of 12 steps" in card
    assert "over 12 steps or 1 minutes, whichever progressed further" in card
    again = train(config, Blobs(), tmp_path / "run", resume=True)
    assert (again.step, again.ended, again.resumed_from) == (result.step, "minutes", result.step)
    with pytest.raises(InputError, match=r"minutes: 1.0 -> 9.0, over which"):
        train(tiny_config(minutes=9.0, decay="cosine", log_every=1), Blobs(), tmp_path / "run", resume=True)


def test_without_decay_a_longer_time_limit_finishes_the_run_with_the_same_bits(tmp_path, monkeypatch):
    train(tiny_config(), Blobs(), tmp_path / "uninterrupted")
    monkeypatch.setattr(train_module, "time", Clock(5.0))
    assert train(tiny_config(minutes=0.5), Blobs(), tmp_path / "run").ended == "minutes"
    assert train(tiny_config(minutes=90.0), Blobs(), tmp_path / "run", resume=True).ended == "steps"
    assert weights(tmp_path / "run") == weights(tmp_path / "uninterrupted")


def test_a_run_takes_at_least_one_step(tmp_path):
    result = train(tiny_config(minutes=1e-9), Blobs(), tmp_path / "run")
    assert (result.step, result.ended) == (1, "minutes")
    assert load(result.model)


def test_weights_stored_in_bf16_are_the_rounded_average(tmp_path):
    result = train(tiny_config(steps=3), Blobs(), tmp_path / "run")
    full = load(result.model).network.state_dict()
    size = (result.model / "model.safetensors").stat().st_size
    train(tiny_config(steps=3, store="bf16"), Blobs(), tmp_path / "run", resume=True)
    half = load(result.model).network.state_dict()
    assert all(torch.equal(half[name], value.bfloat16().float()) for name, value in full.items())
    assert (result.model / "model.safetensors").stat().st_size < 0.6 * size
    assert "stored in BF16" in (result.model / "README.md").read_text()
    assert json.loads((tmp_path / "run" / "train.json").read_text())["store"] == "bf16"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": 13}, "warmup 13: exceeds the 12 steps of the run"),
        ({"warmup": -1}, "warmup -1"),
        ({"minutes": 0.0}, "minutes 0.0: must be above 0"),
        ({"minutes": math.nan}, "minutes nan"),
    ],
)
def test_invalid_settings_are_errors(settings, message):
    with pytest.raises(InputError, match=message):
        tiny_config(**settings)
