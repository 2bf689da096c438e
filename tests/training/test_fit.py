"""Settings that are named after a step ran out of memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.factories.tiny_training import tiny_config
from voxtune.plan.training_memory import TrainingMemory
from voxtune.runtime.model import Model
from voxtune.training.config import make_config
from voxtune.training.fit import settings_that_fit
from voxtune.training.model import model_config
from voxtune.training.plan import RewrittenForward, TrainingPlan, rewriting_plan, zeros

pytestmark = pytest.mark.usefixtures("one_thread")
BASELINE = TrainingPlan(name="baseline", precision="fp32")


@pytest.fixture(scope="module")
def tiny():
    """(settings, model, a step's memory: all kept, most computed again, a batch of one with all kept)"""
    config = tiny_config(batch=8, accumulation=3)
    model = Model(model_config(config))
    args = zeros(model, config.batch)
    memory = TrainingMemory(RewrittenForward(rewriting_plan("fp32"), model.network).rewrite(args), args)
    steps = [step for _, step in memory.choices()]
    one = steps[-1].states + steps[-1].weights + (steps[-1].kept + steps[-1].transient) // 8
    assert one < steps[-1].total < steps[0].total
    return config, model, steps[0].total, steps[-1].total, one


def test_plain_pytorch_gives_way_to_the_rewritten_network(tiny):
    config, model, whole, again, one = tiny
    assert settings_that_fit(config, model, BASELINE, whole) == "--plan voxtune"
    assert settings_that_fit(config, model, BASELINE, again).startswith("--memory-budget ")
    assert settings_that_fit(config, model, BASELINE, one).endswith(" --batch 1 --accumulation 24")
    assert settings_that_fit(config, model, BASELINE, one // 2) is None


def test_the_rewritten_network_computes_results_again_or_takes_smaller_batches(tiny):
    config, model, whole, again, _ = tiny
    plan = rewriting_plan("fp32")
    assert settings_that_fit(config, model, plan, whole).startswith("--memory-budget "), "it did not fit as it is"
    assert "--batch 4 --accumulation 6" in settings_that_fit(config, model, plan, again - 1)


def test_no_settings_are_named_that_contradict_the_given_ones(tiny):
    config, model, whole, *_ = tiny
    for given in ({"autocast": "none"}, {"compile": True}):
        assert settings_that_fit(replace(config, **given), model, BASELINE, whole) is None


def test_the_named_settings_are_accepted(tiny):
    config, model, _, again, one = tiny
    for memory in (again, one):
        options = settings_that_fit(config, model, BASELINE, memory).split()
        names = (name.lstrip("-").replace("-", "_") for name in options[::2])
        values = {n: v if n == "memory_budget" else int(v) for n, v in zip(names, options[1::2], strict=True)}
        assert make_config({}, {"batch": 8, "accumulation": 3} | values, "here").requested_plan == "voxtune"
        assert values.get("batch", 8) * values.get("accumulation", 3) == config.samples_per_step
