"""Searches and the tuner leave own convolutions that lose to cuDNN; the gain of each pass."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import voxtune
from tests.factories.networks import REWRITING, make
from tests.plan.test_compete import SIZE, Net, inputs, timer_of
from voxtune.plan import gains as gaining
from voxtune.plan import search as searching
from voxtune.plan import tuner as tuning
from voxtune.plan.build import PlanTarget
from voxtune.plan.compete import compete
from voxtune.plan.gains import gains, timed_passes
from voxtune.plan.passes import PassStage, select
from voxtune.plan.plan import Plan, Step
from voxtune.plan.search import Candidate

LOSERS = {"head": 2.0, "strided_conv": 3.0}
LOST = "strided_conv 16->32 at 2x3x4: 3 ms, cuDNN 1 ms; head 16->4 at 4x6x8: 2 ms, cuDNN 1 ms"
HEAD = {"except": [[16, 4, *SIZE]]}
EXCEPTED = {"edges": HEAD, "conv3d": HEAD, "strided": {"except": [[16, 32, 2, 3, 4]]}}
OWN = Candidate("own kernels", Plan.of(*REWRITING))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)


@pytest.fixture
def rewriting(monkeypatch):
    """Every pass applies here, by its references; the head and the downsampling lose to cuDNN."""
    real = PlanTarget.build
    monkeypatch.setattr(PlanTarget, "build", lambda self, plan, *, twin=True: real(self, plan, twin=True))
    monkeypatch.setattr(searching, "candidates", lambda *_: [OWN])
    for module in (searching, tuning):
        monkeypatch.setattr(module, "compete", partial(compete, timer=timer_of(LOSERS, 1.0)))


def timings(monkeypatch, module, *times):
    values = iter(times)
    monkeypatch.setattr(module, "measure", lambda *_, **__: tuning.Timing(*[next(values)] * 3, 0.1, None))


def options_of(plan):
    return {s.name: s.options for s in plan.steps if s.options}


def test_a_search_keeps_the_plan_that_leaves_losers_to_cudnn(rewriting, monkeypatch):
    """Original, own kernels; then these again and the plan with its exceptions."""
    net, args, lines = Net().eval(), inputs(), []
    timings(monkeypatch, searching, 10.0, 5.0, 5.0, 4.0)
    fast = voxtune.optimize(net, args, say=lines.append)
    assert options_of(fast.plan) == EXCEPTED
    row = fast.plan.evidence["waterfall"][-1]
    assert row["name"] == tuning.BY_CUDNN and row["kept"] and row["note"] == LOST and row["best_p50_ms"] == 5.0
    assert LOST in fast.report() and "edges: applied 1 x (excepted by the plan)" in fast.report()
    assert "epilogue" in fast.plan.names, "it had nothing to do beside the own kernels"
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), net(*args), rtol=1e-3, atol=1e-4)
    # The cached plan, with its graph.
    monkeypatch.setattr("voxtune.plan.api.fastest", lambda *_: pytest.fail("searched again"))
    again = voxtune.optimize(net, args)
    assert again.plan == fast.plan and again.notes == fast.notes and again.report() == fast.report()
    with torch.no_grad():
        assert torch.equal(again(*args), fast(*args))
        # Another size: nothing is excepted.
        small = inputs((4, 4, 4))
        torch.testing.assert_close(again(*small), net(*small), rtol=1e-3, atol=1e-4)
    other = [v for v in again._variants.values() if v.signature != again.signature]
    notes = {name: other[0].notes[name] for name in ("edges", "strided")}
    assert len(other) == 1 and notes == {"edges": "applied 2 x", "strided": "applied 1 x"}
    assert options_of(other[0].plan) == EXCEPTED


def test_a_plan_that_is_not_faster_as_a_whole_is_dropped(rewriting, monkeypatch):
    timings(monkeypatch, searching, 10.0, 5.0, 5.0, 4.99)
    fast = voxtune.optimize(Net().eval(), inputs(), say=lambda _line: None)
    assert not options_of(fast.plan) and fast.plan.evidence["waterfall"][1]["kept"]
    row = fast.plan.evidence["waterfall"][-1]
    assert (row["why"], row["note"]) == ("not faster than the fastest plan above", LOST)


def test_a_plan_that_the_gate_refuses_is_dropped(rewriting, monkeypatch):
    timings(monkeypatch, searching, 10.0, 5.0, 5.0, 4.0)
    real = searching.judge

    def verdict(target, network, gate):
        return (
            tuning.Verdict(False, "wrong", {"relative": 0.5})
            if options_of(network.plan)
            else real(target, network, gate)
        )

    monkeypatch.setattr(searching, "judge", verdict)
    fast = voxtune.optimize(Net().eval(), inputs(), say=lambda _line: None)
    assert not options_of(fast.plan) and fast.plan.names
    assert fast.plan.evidence["waterfall"][-1]["why"] == "refused: wrong"


def test_without_losers_there_is_no_further_plan(rewriting, monkeypatch):
    monkeypatch.setattr(searching, "compete", partial(compete, timer=timer_of({}, 1.0)))
    timings(monkeypatch, searching, 10.0, 5.0)
    fast = voxtune.optimize(Net().eval(), inputs(), say=lambda _line: None)
    assert fast.plan.evidence["waterfall"][-1]["why"].startswith("none of ") and not options_of(fast.plan)


def test_without_time_nothing_is_compared(rewriting, monkeypatch):
    monkeypatch.setattr(searching, "LEAST_LEFT", 1e6)
    monkeypatch.setattr(searching, "compete", lambda *_: pytest.fail("compared"))
    timings(monkeypatch, searching, 10.0, 5.0)
    fast = voxtune.optimize(Net().eval(), inputs(), say=lambda _line: None)
    assert fast.plan.evidence["waterfall"][-1]["why"] == "not tried: the time limit was reached"


def test_no_plan_is_tried_after_the_limit(rewriting, monkeypatch):
    """The comparison took the rest of the time: its result is in the report, and cached."""
    clock = [0.0]
    monkeypatch.setattr(searching.time, "monotonic", lambda: clock[0])
    real = compete

    def slow(*args):
        result = real(*args, timer=timer_of(LOSERS, 1.0))
        clock[0] += 60.0
        return result

    monkeypatch.setattr(searching, "compete", slow)
    timings(monkeypatch, searching, 10.0, 5.0)
    fast = voxtune.optimize(Net().eval(), inputs(), say=lambda _line: None)
    row = fast.plan.evidence["waterfall"][-1]
    assert (row["why"], row["note"]) == ("not tried: the time limit was reached", LOST) and not options_of(fast.plan)


RUNGS = (
    tuning.TunerRung("own kernels", REWRITING, apart=True),
    tuning.TunerRung(tuning.BY_CUDNN, select(PassStage.FUSION), competes=True),
)


def test_the_last_rung_of_the_tuner_leaves_losers_to_cudnn(rewriting, monkeypatch):
    lines = []
    timings(monkeypatch, tuning, 10.0, 5.0, 10.0, 4.0, 5.0)
    options = {"checks": 1, "quick": True, "say": lines.append}
    tuned = tuning.tune(Net().eval(), inputs(), ladder=RUNGS, **options)
    assert options_of(tuned.plan) == EXCEPTED and "epilogue" in tuned.plan.names
    assert LOST in lines[-1] and lines[-1].endswith("kept") and tuned.plan.evidence["waterfall"][-1]["note"] == LOST
    # The passes of another rung are added without losing options.
    assert options_of(tuning._extended(tuned.plan, tuning.TunerRung("time", ("time",)))) == EXCEPTED
    same = tuning.TunerRung("same", tuned.plan.names, apart=True, options=EXCEPTED)
    assert options_of(tuning._extended(tuning.BASELINE, same)) == EXCEPTED
    assert options_of(tuned.plan.without("conv3d")) == {n: o for n, o in EXCEPTED.items() if n != "conv3d"}


def test_the_tuner_states_why_nothing_is_left_to_cudnn(rewriting, monkeypatch):
    monkeypatch.setattr(tuning, "compete", partial(compete, timer=timer_of({}, 1.0)))
    timings(monkeypatch, tuning, 10.0, 5.0, 10.0)
    tuned = tuning.tune(Net().eval(), inputs(), ladder=RUNGS, checks=1, quick=True)
    assert tuned.rows[-1].why.startswith("none of ") and not options_of(tuned.plan)
    timings(monkeypatch, tuning, 10.0)
    tuned = tuning.tune(Net().eval(), inputs(), ladder=RUNGS[1:], checks=1, quick=True)
    assert tuned.rows[-1].why == "the best plan has no own convolution"


def test_each_pass_is_timed_once_with_those_that_require_it(rewriting, monkeypatch):
    args, lines = inputs(), []
    target = PlanTarget(Net().eval(), (args, {}))
    network = target.build(Plan.of("cleanup", "fuse_norm", "pointwise", "epilogue", "channels_last"))
    assert network.plan.names == ("fuse_norm", "pointwise", "epilogue", "channels_last")
    result = gains(target, network, 60.0, lines.append)
    assert list(result) == ["fuse_norm", "channels_last", "pointwise", "epilogue"] and len(lines) == 4
    assert lines[0].startswith("gain of fuse_norm: ") and lines[0].endswith(" ms (with epilogue)")
    assert gains(target, network, 0.0) == {}
    timings(monkeypatch, gaining, 5.0, 3.0, 2.0, 3.0, 3.5, 3.0, 3.0, 3.0)
    assert gains(target, network, 60.0) == {"fuse_norm": 2.0, "channels_last": -1.0, "pointwise": 0.5, "epilogue": 0.0}


def test_precision_and_flags_have_no_gain_of_their_own():
    names = ("bf16", "cudnn_benchmark", "cleanup", "channels_last", "conv3d", "cuda_graph", "compile", "heap")
    assert timed_passes(names) == ["cuda_graph", "conv3d", "channels_last", "cleanup"]


def test_a_pass_that_cannot_be_left_out_has_no_gain(monkeypatch):
    net, args = make("convnext")
    target = PlanTarget(net, (args, {}))
    network = target.build(Plan.of("cleanup", "time", "channels_last"))
    real = PlanTarget.build

    def build(self, plan, **options):
        if "time" not in plan.names:
            raise RuntimeError("it cannot be left out")
        return real(self, plan, **options)

    monkeypatch.setattr(PlanTarget, "build", build)
    assert list(gains(target, network, 60.0)) == ["channels_last", "cleanup"]


def test_a_full_search_reports_gains_and_a_quick_one_how_to_get_them(monkeypatch):
    net, args = make("convnext")
    monkeypatch.setattr(
        searching, "candidates", lambda *_: [Candidate("fused", Plan.of("strict", "cleanup", "time", "channels_last"))]
    )
    timings(monkeypatch, searching, 10.0, 5.0)
    quick = voxtune.optimize(net, args, say=lambda _line: None)
    assert "gains" not in quick.plan.evidence and 'search="full" and by voxtune tune' in quick.report()
    timings(monkeypatch, searching, 10.0, 5.0)
    timings(monkeypatch, gaining, 6.0, 5.0, 5.25, 5.0, 5.0, 5.0)
    lines = []
    full = voxtune.optimize(net, args, search="full", say=lines.append)
    assert full.plan.evidence["gains"] == {"channels_last": 1.0, "time": 0.25, "cleanup": 0.0}
    assert "gain of channels_last: 1 ms" in lines
    report = full.report()
    assert "channels_last: applied" in report and "; gain 1 ms" in report and "gain 0.25 ms" in report
    assert "voxtune tune" not in report
    full.plan.evidence["gains"] = {"channels_last": "x", "time": 1.0}
    assert full.report().count("gain not measured") == 2
    full.plan.evidence["gains"] = 5
    assert "gain" not in full.report()


def test_options_of_a_plan_are_part_of_its_evidence():
    plan = Plan((Step("edges", EXCEPTED["edges"]),), {"device": "card"}, {"gate": {"relative": 0.0}})
    stored = plan.to_json()
    assert Plan.from_json(stored, "plan") == plan
    stored["passes"][0]["options"] = {"except": [[8, 4, *SIZE]]}
    assert not Plan.from_json(stored, "plan").evidence
