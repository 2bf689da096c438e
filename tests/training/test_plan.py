"""The plan of a run: settings and their contradictions, the choice, what a checkpoint remembers, the rewritten network."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.factories.tiny_training import MODEL, Blobs, rows, tiny_config, weights
from voxtune.errors import InputError
from voxtune.plan.measure import Timing
from voxtune.runtime.model import Model
from voxtune.training import plan_choice
from voxtune.training.checkpoint import checkpoints, read_checkpoint, write_checkpoint
from voxtune.training.config import make_config
from voxtune.training.folder import read_run
from voxtune.training.loop import train
from voxtune.training.model import model_config
from voxtune.training.plan import TrainingPlan, resolved_precision, rewriting_plan, unmeasured_plan
from voxtune.training.plan_choice import _Choice, choose_plan
from voxtune.training.plan_step import step_inputs

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


def newest(out):
    return read_checkpoint(checkpoints(out / "checkpoints")[-1])


@pytest.mark.parametrize(
    ("settings", "plan", "precision"),
    [
        ({}, "auto", "auto"),
        ({"autocast": "bf16"}, "baseline", "bf16"),
        ({"autocast": "fp16", "compile": True}, "compile", "fp16"),
        ({"autocast": "none"}, "baseline", "default"),
        ({"autocast": "none", "precision": "tf32"}, "baseline", "tf32"),
        ({"autocast": "bf16", "plan": "compile"}, "compile", "bf16"),
        ({"compile": True}, "compile", "auto"),
        ({"precision": "bf16", "plan": "voxtune"}, "voxtune", "bf16"),
    ],
)
def test_older_settings_name_a_plan_and_a_precision(settings, plan, precision):
    config = make_config({}, settings, "here")
    assert (config.requested_plan, config.requested_precision) == (plan, precision)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": True, "plan": "voxtune"}, "compile cannot be combined with plan voxtune"),
        ({"compile": True, "plan": "baseline"}, "compile cannot be combined with plan baseline"),
        (
            {"autocast": "bf16", "plan": "voxtune"},
            "autocast bf16 cannot be combined with plan voxtune; use precision bf16",
        ),
        ({"autocast": "fp16", "plan": "voxtune"}, "autocast fp16 cannot be combined with plan voxtune"),
        ({"autocast": "bf16", "precision": "fp32"}, "autocast bf16 contradicts precision fp32"),
        ({"autocast": "none", "precision": "bf16"}, "autocast none contradicts precision bf16"),
        ({"precision": "fp16"}, "precision: 'fp16' is not one of"),
        ({"max_skipped": 0}, "max_skipped 0: must be in 1"),
    ],
)
def test_contradictions_are_refused_in_one_line(settings, message):
    with pytest.raises(InputError, match=message) as refused:
        make_config({}, settings, "here")
    assert "\n" not in str(refused.value)


def test_on_a_cpu_the_default_is_plain_float32():
    assert unmeasured_plan(tiny_config(), CPU) == TrainingPlan(name="baseline", precision="fp32")
    assert resolved_precision(tiny_config(precision="tf32"), CPU) == "fp32"
    assert resolved_precision(tiny_config(precision="bf16"), CPU) == "bf16"


class Unread(Blobs):
    def __getitem__(self, index):
        raise AssertionError("nothing is measured")


def test_nothing_is_measured_on_a_cpu_by_default(tmp_path):
    said = []
    plan = choose_plan(tiny_config(), Model(model_config(tiny_config())), Unread(), CPU, said.append)
    assert (plan.name, plan.candidates, said) == ("baseline", (), [])


def test_default_and_named_baseline_are_the_same_bits(tmp_path):
    for name, settings in {
        "default": {},
        "named": {"plan": "baseline", "precision": "fp32"},
        "old": {"autocast": "none"},
    }.items():
        train(tiny_config(**settings), Blobs(), tmp_path / name)
    assert weights(tmp_path / "default") == weights(tmp_path / "named") == weights(tmp_path / "old")


@pytest.fixture(scope="module")
def voxtune_run(tmp_path_factory):
    """(an uninterrupted run by the plan voxtune, what it printed)"""
    out, said = tmp_path_factory.mktemp("voxtune") / "run", []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train(tiny_config(plan="voxtune"), Blobs(), out, say=said.append)
    torch.set_num_threads(threads)
    return out, said


def test_the_rewritten_network_trains_like_the_original(voxtune_run, tmp_path):
    out, said = voxtune_run
    train(tiny_config(), Blobs(), tmp_path / "plain")
    losses = [[row["loss"] for row in rows(run)] for run in (out, tmp_path / "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert said[0] == "gate: gradients of 4 batches of 2 at 4 x 4 x 4"
    assert said[1].startswith("gate: voxtune: ") and "layers judged, the worst: " in said[1]
    assert any("voxtune in FP32: gradient error" in line for line in said)
    card = (out / "model" / "README.md").read_text()
    assert "voxtune in FP32" in card and "plain PyTorch in FP32" in (tmp_path / "plain/model/README.md").read_text()


def test_half_precision_keeps_float32_weights(tmp_path):
    result = train(tiny_config(plan="voxtune", precision="bf16", steps=4), Blobs(), tmp_path / "run")
    assert 0 < result.loss < 2
    assert all(v.dtype == torch.float32 for v in newest(tmp_path / "run").part("model.").values())


def test_a_checkpoint_remembers_the_plan_and_a_resume_does_not_measure_again(voxtune_run, tmp_path, monkeypatch):
    config, seen = tiny_config(plan="voxtune"), []
    train(config, Blobs(), tmp_path / "run", lambda *a: seen.append(a), stop=lambda: len(seen) >= 4)
    stored = newest(tmp_path / "run").plan
    assert (
        (stored.name, stored.precision) == ("voxtune", "fp32") and stored.passes and "a CPU, torch" in stored.made_for
    )
    assert stored.candidates[0].kept and 0 < stored.candidates[0].error < 1e-4
    monkeypatch.setattr(_Choice, "gate", lambda *a: pytest.fail("gated again"))
    train(config, Blobs(), tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(voxtune_run[0])
    assert rows(tmp_path / "run") == rows(voxtune_run[0])


def test_a_plan_of_another_device_is_gated_again(voxtune_run, tmp_path, monkeypatch):
    gated, real = [], _Choice.gate
    monkeypatch.setattr(_Choice, "gate", lambda self, *a: gated.append(a) or real(self, *a))
    checkpoint = newest(voxtune_run[0])
    model = Model(checkpoint.model)
    other = replace(checkpoint, plan=replace(checkpoint.plan, made_for="another card"))
    plan = choose_plan(checkpoint.config, model, Blobs(), CPU, print, other)
    assert gated == [("fp32",)] and plan.name == "voxtune" and plan.made_for != "another card"


@pytest.mark.parametrize("reason", ["no such kernel", "out of memory"])
def test_a_plan_that_is_not_possible_here_gives_plain_pytorch(tmp_path, monkeypatch, reason):
    config, seen, said = tiny_config(plan="voxtune"), [], []
    train(config, Blobs(), tmp_path / "run", lambda *a: seen.append(a), stop=lambda: len(seen) >= 4)

    def fails(*_args):
        raise RuntimeError(reason)

    monkeypatch.setattr(plan_choice.RewrittenForward, "rewrite", fails)
    train(config, Blobs(), tmp_path / "run", resume=True, say=said.append)
    assert newest(tmp_path / "run").plan.name == "baseline"
    assert len(said) == 1 and reason in said[0] and said[0].endswith("training by plain PyTorch in FP32")


def test_a_run_from_before_there_were_plans_is_resumed_as_it_was(tmp_path):
    config = tiny_config(autocast="bf16", plan="auto")
    train(config, Blobs(), tmp_path / "whole")
    seen = []
    train(config, Blobs(), tmp_path / "run", lambda *a: seen.append(a), stop=lambda: len(seen) >= 4)
    old = newest(tmp_path / "run")
    path = write_checkpoint(tmp_path / "run" / "checkpoints", replace(old, plan=None))
    assert read_checkpoint(path).plan is None
    settings = json.loads((tmp_path / "run" / "train.json").read_text())
    for name in ("precision", "plan", "max_skipped"):
        del settings[name]
    (tmp_path / "run" / "train.json").write_text(json.dumps(settings))
    train(read_run(tmp_path / "run"), Blobs(), tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert newest(tmp_path / "run").plan.precision == "bf16"


def test_the_plan_can_be_changed_on_resume_and_the_precision_cannot(tmp_path):
    train(tiny_config(steps=3), Blobs(), tmp_path / "run")
    with pytest.raises(InputError, match="precision: auto -> bf16"):
        train(tiny_config(steps=4, precision="bf16"), Blobs(), tmp_path / "run", resume=True)
    train(tiny_config(steps=4, plan="voxtune"), Blobs(), tmp_path / "run", resume=True)
    assert newest(tmp_path / "run").plan.name == "voxtune"


def test_a_refused_plan_names_its_worst_layer(tmp_path, monkeypatch):
    from voxtune.plan import training_gate

    monkeypatch.setitem(training_gate.FLOORS, "fp32", 1e-12)
    monkeypatch.setattr(
        training_gate.GradientGate, "_plain_errors", lambda self: dict.fromkeys(self._errors(self.model), 1e-12)
    )
    with pytest.raises(
        InputError, match=r"plan voxtune: refused by the gate: gradient of \S+: error .* exceeds"
    ) as refused:
        train(tiny_config(plan="voxtune"), Blobs(), tmp_path / "run")
    assert "--plan baseline" in str(refused.value)


def choice(monkeypatch, times, refused=(), **settings):
    """The choice of a search in which candidates take the given times; (plan, what it printed)."""
    config = tiny_config(steps=10**6, **settings)
    said = []
    search = _Choice(config, Model(model_config(config)), Blobs(), CPU, said.append)

    def timed(plan):
        ms = times[plan.label]
        if ms is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Timing(ms, ms, ms, 1.0, 2.0)

    real = plan_choice._maker

    def maker(plan):
        """Nothing is compiled, and what is to be refused computes something else."""
        make = real(plan if plan.name == "voxtune" and plan.label not in refused else replace(plan, name="baseline"))
        return make if plan.label not in refused else lambda network: lambda *a: make(network)(*a) * 1.5

    monkeypatch.setattr(search, "_timed", timed)
    monkeypatch.setattr(plan_choice, "_maker", maker)
    return search.fastest("fp32"), said


TIMES = {
    "plain PyTorch": 100.0,
    "plain PyTorch, channels-last": 120.0,
    "voxtune": 40.0,
    "torch.compile, channels-last": 60.0,
}


def test_the_fastest_plan_that_passes_is_used(monkeypatch):
    plan, said = choice(monkeypatch, TIMES)
    assert plan.name == "voxtune" and plan.passes == rewriting_plan("fp32").passes
    assert [(c.name, c.kept) for c in plan.candidates] == [
        ("plain PyTorch", False),
        ("plain PyTorch, channels-last", False),
        ("voxtune", True),
        ("torch.compile, channels-last", False),
    ]
    assert plan.candidates[2].p50_ms == 40.0 and plan.candidates[2].error > 0
    assert any(line.startswith("voxtune: 2.50 x as fast as plain PyTorch, gradient error") for line in said)


@pytest.mark.slow
def test_the_next_candidate_follows_a_refused_one(monkeypatch):
    plan, said = choice(monkeypatch, TIMES, refused=("voxtune",))
    assert (plan.name, plan.channels_last) == ("compile", True)
    refused = next(c for c in plan.candidates if c.name == "voxtune")
    assert refused.why.startswith("refused: gradient of ") and not refused.kept
    assert any("voxtune: refused: gradient of" in line for line in said)
    assert "gate: gradients of 16 batches of 2 at 4 x 4 x 4" in said, "it was judged once more"


@pytest.mark.slow
def test_plain_pytorch_is_used_if_nothing_faster_is_accepted(monkeypatch):
    plan, _ = choice(monkeypatch, TIMES, refused=("voxtune", "torch.compile, channels-last"))
    assert (plan.name, plan.channels_last) == ("baseline", False)
    slow = {**TIMES, "voxtune": 200.0, "torch.compile, channels-last": 150.0, "plain PyTorch, channels-last": 90.0}
    plan, said = choice(monkeypatch, slow)
    assert (plan.name, plan.channels_last) == ("baseline", True)
    assert said[-1].startswith("plain PyTorch, channels-last is used")


@pytest.mark.slow
def test_a_candidate_that_does_not_fit_costs_itself_only(monkeypatch):
    plan, _ = choice(monkeypatch, {**TIMES, "plain PyTorch": None, "plain PyTorch, channels-last": None})
    assert plan.name == "voxtune" and "out of memory" in plan.candidates[0].why
    with pytest.raises(InputError, match="no plan can train this network here"):
        choice(monkeypatch, dict.fromkeys(TIMES))


def test_a_short_run_is_not_searched_for(monkeypatch):
    plan, said = choice(monkeypatch, TIMES, minutes=0.5)
    assert plan.name == "baseline" and len(plan.candidates) == 1 and "too short for a search" in said[-1]


def test_whole_steps_are_timed_without_changing_the_run():
    config = tiny_config(accumulation=2)
    model = Model(model_config(config))
    before = {k: v.clone() for k, v in model.network.state_dict().items()}
    search = _Choice(config, model, Blobs(), CPU, print)
    timing = search._timed(rewriting_plan("fp32"))
    assert 0 < timing.p20_ms <= timing.p50_ms <= timing.p80_ms
    assert all(torch.equal(v, before[k]) for k, v in model.network.state_dict().items())


def test_large_volumes_are_gated_in_part():
    config = tiny_config(batch=2, model=replace(MODEL, size=(32, 32, 48), multipliers=(1, 1)))
    search = _Choice(config, Model(model_config(config)), Blobs(size=(32, 32, 48)), CPU, print)
    inputs = step_inputs(search.batches(1)[0], config, 20, CPU, channels_last=False)
    sizes = search._gate_sizes(inputs)
    assert sizes == [(1, (8, 8, 12)), (1, (4, 4, 6))]
    batch = search._gate_batch(inputs, *sizes[0])
    assert [tuple(a.shape) for a in batch.args] == [(1, 1, 8, 8, 12), (1,), (1, 2, 8, 8, 12)]
