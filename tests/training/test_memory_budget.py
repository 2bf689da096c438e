"""A run with a memory budget: what it keeps, what it costs, and the same weights."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.factories.tiny_training import MODEL, Blobs, tiny_config, weights
from voxtune.errors import InputError
from voxtune.plan.training_memory import TrainingMemory
from voxtune.runtime.model import Model
from voxtune.training.config import make_config
from voxtune.training.loop import train
from voxtune.training.model import model_config
from voxtune.training.plan import RewrittenForward, rewriting_plan

pytestmark = pytest.mark.usefixtures("one_thread")


SIZE = (16, 16, 16)
SETTINGS = {"plan": "voxtune", "model": replace(MODEL, size=SIZE)}


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch):
    monkeypatch.setattr("voxtune.plan.training_memory.MOST_STEPS", 3)


def run(out, **settings):
    said: list[str] = []
    result = train(tiny_config(steps=2, **SETTINGS, **settings), Blobs(size=SIZE), out, say=said.append)
    assert result.step == 2
    return weights(out), said


def estimate(said):
    line = next(line for line in said if line.startswith("memory budget: "))
    return line, float(re.search(r"need ([\d.]+) GiB", line)[1])


def choices():
    """The steps' memory of the tiny run's network, from nothing computed again to most of it."""
    config = tiny_config(**SETTINGS)
    model = Model(model_config(config))
    size, network = model.config.size, model.config.network
    shape = lambda channels: (config.batch, channels, *size)  # noqa: E731
    args = (torch.zeros(shape(network.out_channels)), torch.zeros(config.batch, dtype=torch.int64))
    args += (torch.zeros(shape(network.mask_channels)),) if network.mask_channels else ()
    forward = RewrittenForward(rewriting_plan("fp32"), model.network)
    return [memory.total for _, memory in TrainingMemory(forward.rewrite(args), args).choices()]


@pytest.mark.slow
def test_a_budget_changes_no_weight(tmp_path):
    most, *_, least = choices()
    assert least < most
    plain, said = run(tmp_path / "plain")
    assert not any("memory budget" in line for line in said)
    ample, said = run(tmp_path / "ample", memory_budget=f"{most}")
    assert estimate(said)[0].endswith("nothing is computed twice")
    _, said = run(tmp_path / "tight", memory_budget=f"{least}")
    assert re.search(r"[1-9]\d?% of the forward pass's products are computed twice$", estimate(said)[0])
    assert ample == plain
    a, b = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("plain", "tight"))
    for name, value in a.items():
        torch.testing.assert_close(b[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", ["0", "-1GB", "much", "12 parsecs"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(InputError, match="memory_budget"):
        make_config({}, {"memory_budget": size}, "here")


@pytest.mark.parametrize(
    ("settings", "other"),
    [({"compile": True}, "compile"), ({"autocast": "bf16"}, "autocast"), ({"plan": "baseline"}, "plan baseline")],
)
def test_only_the_rewritten_network_has_one(settings, other):
    with pytest.raises(InputError, match=f"requires plan voxtune and cannot be combined with {other}"):
        make_config({}, {"memory_budget": "12GB", **settings}, "here")
    assert make_config({}, {"memory_budget": "12GB"}, "here").requested_plan == "voxtune"


def test_a_step_that_does_not_fit_is_refused_before_the_first_one(tmp_path):
    with pytest.raises(InputError, match=r"needs at least .* GiB here, more than the memory budget"):
        run(tmp_path / "run", memory_budget="1KB")
    assert not (tmp_path / "run" / "checkpoints").exists()
