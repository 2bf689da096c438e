"""Settings that are named after a step ran out of memory, and that `--auto-fit` applies."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.factories.tiny_training import Blobs, tiny_config
from voxtune.errors import InputError
from voxtune.runtime.model import Model
from voxtune.training import fit as fitting
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.config import differences, make_config
from voxtune.training.fit import MOST_FITS, Fit, StepMemoryError, naming_settings, settings_that_fit
from voxtune.training.folder import read_run
from voxtune.training.loop import train
from voxtune.training.model import model_config
from voxtune.training.plan import TrainingPlan, rewriting_plan
from voxtune.training.step import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
BASELINE = TrainingPlan(name="baseline", precision="fp32")


@pytest.fixture(scope="module")
def tiny():
    """(settings, model, a step's memory: all kept, most computed again, a batch of one with all kept)"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("voxtune.plan.training_memory.MOST_STEPS", 4)
        config = tiny_config(batch=8, accumulation=3, model=replace(tiny_config().model, size=(16, 16, 16)))
        model = Model(model_config(config))
        estimates = list(fitting._estimates(config, model, rewriting_plan("fp32")))
        (_, _, kept), (_, _, again) = estimates[:2]
        assert [(batch, budget) for batch, budget, _ in estimates] == [
            (n, b) for n in (8, 4, 2, 1) for b in (False, True)
        ]
        assert estimates[-2][2] == kept.of_batch(1 / 8)
        patch.setattr(fitting, "_estimates", lambda *_: iter(estimates))  # each takes seconds
        one = kept.of_batch(1 / 8).total
        assert one < again.total < kept.total
        yield config, model, kept.total, again.total, one


def test_plain_pytorch_gives_way_to_the_rewritten_network(tiny):
    config, model, whole, again, one = tiny
    assert settings_that_fit(config, model, BASELINE, whole).options() == "--plan voxtune"
    assert settings_that_fit(config, model, BASELINE, again).options().startswith("--memory-budget ")
    assert settings_that_fit(config, model, BASELINE, one).options().endswith(" --batch 1 --accumulation 24")
    assert settings_that_fit(config, model, BASELINE, one // 2) is None


def test_the_rewritten_network_computes_results_again_or_takes_smaller_batches(tiny):
    config, model, whole, again, _ = tiny
    plan = rewriting_plan("fp32")
    fit = settings_that_fit(config, model, plan, whole)
    assert fit.memory_budget and fit.bytes == whole, "it did not fit as it is"
    assert "--batch 4 --accumulation 6" in settings_that_fit(config, model, plan, again - 1).options()


def test_a_budget_that_did_not_suffice_is_lowered(tiny):
    config, model, whole, again, _ = tiny
    between = (whole + again) // 2
    given = replace(config, memory_budget=str(between))
    assert settings_that_fit(given, model, rewriting_plan("fp32"), between - 1000).memory_budget
    assert settings_that_fit(given, model, rewriting_plan("fp32"), between).batch == 4


def test_no_settings_are_named_that_contradict_the_given_ones(tiny):
    config, model, whole, *_ = tiny
    for given in ({"autocast": "none"}, {"compile": True}):
        assert settings_that_fit(replace(config, **given), model, BASELINE, whole) is None


def test_the_named_settings_are_accepted(tiny):
    config, model, _, again, one = tiny
    for memory in (again, one):
        fit = settings_that_fit(config, model, BASELINE, memory)
        options = fit.options().split()
        names = (name.lstrip("-").replace("-", "_") for name in options[::2])
        values = {n: v if n in ("memory_budget", "plan") else int(v) for n, v in zip(names, options[1::2], strict=True)}
        assert make_config({}, {"batch": 8, "accumulation": 3} | values, "here").requested_plan == "voxtune"
        assert fit.applied(config).samples_per_step == config.samples_per_step and fit.settings() == values


def test_the_same_samples_in_other_batches_resume_a_run():
    old = tiny_config(batch=4, accumulation=2)
    assert not differences(old, replace(old, batch=1, accumulation=8))
    assert differences(old, replace(old, batch=2)) == ["batch: 4 -> 2"]


# Runs whose steps run out of memory, as if on a GPU.


class Scarce:
    """A GPU on which steps of more than `most` samples at a time run out of memory, after `steps` of them."""

    def __init__(self, monkeypatch, most: int, steps: int = 0, fits=None):
        self.most, self.steps, self.batches = most, steps, []
        before = Trainer.train_step

        def train_step(trainer, batches, clock=0.0):
            size = len(batches[0].numbers)
            if size > self.most and trainer.step >= self.steps:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.batches.append(size)
            return before(trainer, batches, clock)

        monkeypatch.setattr(Trainer, "train_step", train_step)
        # A CPU has no memory to be asked for.
        monkeypatch.setattr(fitting, "_fit_for", fits or self.halved)

    @staticmethod
    def halved(config, model, plan, device, before):
        return Fit(bytes=10**9 >> len(before), batch=config.batch // 2, accumulation=config.accumulation * 2)


def test_a_run_that_does_not_fit_names_settings(tmp_path, monkeypatch):
    Scarce(monkeypatch, most=1)
    with pytest.raises(
        InputError, match="out of GPU memory: a step is estimated to fit with --batch 2 --accumulation 2"
    ):
        train(tiny_config(batch=4), Blobs(), tmp_path / "run")


@pytest.mark.parametrize("steps", [0, 4], ids=["at once", "after a checkpoint"])
def test_auto_fit_goes_on_with_them(tmp_path, monkeypatch, steps):
    config = tiny_config(batch=4, steps=6)
    plain = train(config, Blobs(), tmp_path / "plain")
    scarce, said = Scarce(monkeypatch, most=1, steps=steps), []
    result = train(config, Blobs(), tmp_path / "run", say=said.append, auto_fit=True)
    lines = [line for line in said if "out of GPU memory" in line]
    assert lines == [f"out of GPU memory: continuing with --batch {b} --accumulation {4 // b}" for b in (2, 1)]
    assert result.step == 6 and scarce.batches[-1] == 1 and (result.resumed_from or 0) == steps // 3 * 3
    assert result.loss == pytest.approx(plain.loss, rel=1e-3)
    stored = read_run(tmp_path / "run")
    assert (stored.batch, stored.accumulation) == (1, 4)
    assert read_checkpoint(checkpoints(tmp_path / "run" / "checkpoints")[-1]).config.batch == 1
    entries = json.loads((tmp_path / "run" / "fits.json").read_text())
    assert [entry["batch"] for entry in entries] == [2, 1]
    assert train(replace(stored, steps=8), Blobs(), tmp_path / "run", resume=True).step == 8


def test_auto_fit_ends(tmp_path, monkeypatch):
    """After a bounded number of attempts, and where no settings are known."""
    scarce, tried = Scarce(monkeypatch, most=0), []

    def same(config, model, plan, device, before):
        tried.append(len(before))
        return Fit(bytes=1, memory_budget=None, batch=config.batch, accumulation=config.accumulation)

    monkeypatch.setattr(fitting, "_fit_for", same)
    with pytest.raises(StepMemoryError):
        train(tiny_config(), Blobs(), tmp_path / "run", auto_fit=True)
    assert tried == list(range(MOST_FITS + 1)) and not scarce.batches
    monkeypatch.setattr(fitting, "_fit_for", lambda *_: None)
    with pytest.raises(StepMemoryError, match="use a smaller batch"):
        train(tiny_config(), Blobs(), tmp_path / "other", auto_fit=True)


def test_auto_fit_starts_from_the_given_model(tmp_path, monkeypatch):
    """Not from what the failed attempt made of it."""
    config = tiny_config(batch=2, steps=2, checkpoint_every=100)
    torch.manual_seed(3)
    model = Model(model_config(config))
    start = {name: p.clone() for name, p in model.network.named_parameters()}
    plain = train(config, Blobs(), tmp_path / "plain", model=Model(model.config, fresh(model)))
    Scarce(monkeypatch, most=1, steps=1)
    result = train(config, Blobs(), tmp_path / "run", model=model, auto_fit=True)
    assert result.loss == pytest.approx(plain.loss, rel=1e-3)
    assert result.step == 2 and all(torch.equal(p, start[n]) for n, p in model.network.named_parameters())


def fresh(model):
    import copy

    return copy.deepcopy(model.network)


def test_an_earlier_run_is_replaced_only_by_one_that_starts(tmp_path, monkeypatch):
    """An attempt that fails before its run is written leaves the earlier run for the next attempt to replace."""
    train(tiny_config(seed=7, steps=3), Blobs(), tmp_path / "run")
    failed = []

    def choose_plan(config, *args):
        if config.batch > 1:
            failed.append(read_run(tmp_path / "run").seed)
            raise InputError("no plan can train this network here") from torch.OutOfMemoryError()
        return TrainingPlan(name="baseline", precision="fp32")

    monkeypatch.setattr("voxtune.training.loop.choose_plan", choose_plan)
    monkeypatch.setattr(fitting, "_fit_for", Scarce.halved)
    result = train(tiny_config(batch=2, steps=4), Blobs(), tmp_path / "run", overwrite=True, auto_fit=True)
    assert failed == [7] and result.step == 4 and result.resumed_from is None
    assert read_run(tmp_path / "run").seed == 0


def test_other_errors_pass():
    with (
        pytest.raises(InputError, match=r"^something else$"),
        naming_settings(tiny_config(), None, BASELINE, torch.device("cpu"), alone=True),
    ):
        raise InputError("something else")
