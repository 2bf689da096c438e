"""`voxtune.optimize`: plans tuned, cached, given and refused; and calls with other inputs."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import re
import time

import pytest
import torch
from torch import nn

import voxtune
import voxtune.plan.backend
from tests.factories import analytic
from tests.factories.networks import make
from voxtune.errors import InputError
from voxtune.evaluation.steps import precisions
from voxtune.plan import Plan, cache
from voxtune.plan import build as building
from voxtune.plan import search as searching
from voxtune.plan import tuner as tuning
from voxtune.plan.api import CPU_READY
from voxtune.plan.gate import Verdict
from voxtune.plan.hazards import hazards, refuses_half, slow_half, why_no_compiler
from voxtune.plan.passes import PassOutcome
from voxtune.plan.run import Signature
from voxtune.runtime.planned import Planned

QUICK = (
    tuning.TunerRung("sharing and sdpa", ("cleanup", "sdpa", "time")),
    tuning.TunerRung("channels_last", ("channels_last",)),
    tuning.TunerRung("bf16", ("cleanup", "bf16"), apart=True),
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    # Every rung is tried, whatever the processor.
    monkeypatch.setattr(tuning, "slow_half", lambda _type: None)


@pytest.fixture
def quick(monkeypatch):
    """Few rungs and short measurements."""
    monkeypatch.setattr(tuning, "CPU_LADDER", QUICK)
    real = tuning.measure
    monkeypatch.setattr(tuning, "measure", lambda call, device, **_: real(call, device, repeats=3, seconds=0.1))


@pytest.fixture
def rewritten_wins(monkeypatch):
    """The original takes 10 ms, each candidate less than the one before it."""
    times = iter([10.0, *(9.0 - k / 10 for k in range(60))])
    monkeypatch.setattr(searching, "measure", lambda *_, **__: tuning.Timing(*[next(times)] * 3, 0.1, None))


def test_auto_searches_once_and_remembers(rewritten_wins, tmp_path, monkeypatch):
    net, args = make("convnext")
    lines: list[str] = []
    fast = voxtune.optimize(net, args, say=lines.append)
    with torch.no_grad():
        assert float((fast(*args) - net(*args)).norm() / net(*args).norm()) < 1e-4
    assert lines[0].startswith("original") and "x as fast as the original" in lines[-1]
    plans = list((tmp_path / "cache" / "plans").glob("*.json"))
    assert len(plans) == 1
    evidence = json.loads(plans[0].read_text())["evidence"]
    names = [c.name for c in searching.candidates("fp32", torch.device("cpu"))]
    assert [r["name"] for r in evidence["waterfall"]] == ["original", *names]
    assert evidence["gate"]["relative"] <= evidence["gate"]["limit"]

    def no_search(*_, **__):
        raise AssertionError("a remembered plan was searched again")

    monkeypatch.setattr("voxtune.plan.api.fastest", no_search)
    again = voxtune.optimize(net, args)
    assert again.plan.steps == fast.plan.steps and again.report() == fast.report()


def test_other_weights_are_another_model(rewritten_wins, monkeypatch):
    net, args = make("convnext")
    voxtune.optimize(net, args)
    other = copy.deepcopy(net)
    with torch.no_grad():
        next(iter(other.parameters())).add_(1e-3)
    seen = []
    real = searching.fastest
    monkeypatch.setattr("voxtune.plan.api.fastest", lambda *a, **k: seen.append(1) or real(*a, **k))
    voxtune.optimize(other, args)
    assert seen == [1]


def test_a_damaged_cache_is_ignored(rewritten_wins, tmp_path, caplog):
    net, args = make("convnext")
    voxtune.optimize(net, args)
    for path in (tmp_path / "cache" / "plans").glob("*.json"):
        path.write_text("{ half a file")
    with caplog.at_level(logging.WARNING, logger="voxtune"):
        voxtune.optimize(net, args)
    assert "ignoring a cached plan" in caplog.text


def test_rungs_that_are_not_faster_are_dropped(monkeypatch):
    net, args = make("convnext")

    monkeypatch.setattr(tuning, "measure", lambda *_, **__: tuning.Timing(1.0, 1.0, 1.0, 0.1, None))
    tuned = tuning.tune(net, args, ladder=QUICK)
    assert tuned.plan.names == ("strict",), "equal times win nothing"
    assert all("not faster" in r.why for r in tuned.rows[1:])


def test_the_table_agrees_with_its_verdicts(monkeypatch):
    """Each row has the best plan's time beside its own, and that decides: the machine may have become faster since."""
    net, args = make("convnext")
    # Baseline; then each rung and the best so far beside it. The second rung is close, so it is timed once more.
    times = iter([12.0, 10.6, 10.0, 9.0, 9.02, 8.0, 13.0, 14.0])
    lines: list[str] = []

    def measured(*_, **__):
        ms = next(times)
        return tuning.Timing(ms, ms, ms, 0.1, None)

    monkeypatch.setattr(tuning, "measure", measured)
    ladder = (*QUICK[:2], tuning.TunerRung("cleanup", ("cleanup",), apart=True))
    tuned = tuning.tune(net, args, ladder=ladder, checks=1, say=lines.append)
    shown = [(r.timing.p50_ms, r.best and r.best.p50_ms, r.kept) for r in tuned.rows]
    assert shown == [(12.0, None, True), (10.6, 10.0, False), (8.0, 9.02, True), (13.0, 14.0, True)]
    assert "10.60 ms" in lines[1] and "best so far     10.00" in lines[1] and "not faster" in lines[1]
    assert "8.000 ms" in lines[2] and "best so far     9.020" in lines[2]
    assert lines[2].endswith("timed twice, the other time 9.000 ms; kept")
    for row in tuned.plan.evidence["waterfall"][1:]:
        assert row["kept"] == (row["p50_ms"] < row["best_p50_ms"])


@pytest.mark.slow
def test_the_numbers_printed_are_those_that_decided(monkeypatch):
    """Real timings: each comparison's two times are in the row of its verdict, to four digits or more."""
    net, args = make("convnext")
    decided: list[tuple[float, float, bool]] = []
    real = tuning._faster

    def faster(timing, best):
        decided.append((timing.p50_ms, best.p50_ms, real(timing, best)))
        return decided[-1][-1]

    monkeypatch.setattr(tuning, "_faster", faster)
    lines: list[str] = []
    tuned = tuning.tune(net, args, ladder=QUICK, checks=1, say=lines.append)
    lines, gained = lines[: len(tuned.rows)], lines[len(tuned.rows) :]
    assert [line.split(":")[0] for line in gained] == [f"gain of {name}" for name in tuned.plan.evidence["gains"]]
    printed = [re.search(r"([\d.]+) ms \(best so far +([\d.]+)\)", line) for line in lines]
    compared = [(row, line, match) for row, line, match in zip(tuned.rows, lines, printed, strict=True) if match]
    assert len(compared) == len(decided) > 0
    for (row, line, match), (ms, best_ms, won) in zip(compared, decided, strict=True):
        assert (row.timing.p50_ms, row.best.p50_ms) == (ms, best_ms)
        for text, used in zip(match.groups(), (ms, best_ms), strict=True):
            assert float(text) == pytest.approx(used, rel=6e-4) and len(text.replace(".", "").lstrip("0")) >= 4
        assert line.endswith("not faster than the best so far by 0.5%") != won


def test_a_measurement_that_ended_early_is_marked(monkeypatch):
    net, args = make("convnext")
    times = iter([10.0, 20.0, 10.0])
    monkeypatch.setattr(tuning, "measure", lambda *_, give_up_ms=math.inf, **__: slow(next(times), give_up_ms))
    lines: list[str] = []

    def slow(ms, limit):
        return tuning.Timing(ms, ms, ms, 0.1, None, ms > limit)

    tuned = tuning.tune(net, args, ladder=QUICK[:1], checks=1, say=lines.append)
    assert lines[1].endswith("two runs, both longer than 13.00 ms; not faster than the best so far by 0.5%")
    assert tuned.plan.evidence["waterfall"][1]["note"] == "two runs, both longer than 13.00 ms"


@pytest.mark.parametrize(
    ("ms", "text"), [(1234.5, "1234.50"), (12.7, "12.70"), (1.0, "1.000"), (0.01234, "0.01234"), (0, "0.00")]
)
def test_milliseconds_have_four_digits(ms, text):
    assert tuning.format_ms(ms) == text


def test_the_fastest_plan_is_gated_last(monkeypatch):
    """With `gate_last` only the fastest plan is judged; if it is refused, the next one."""
    net, args = make("convnext")
    times = iter([9.0, 8.0, 9.0, 7.0, 8.0])
    monkeypatch.setattr(tuning, "measure", lambda *_, **__: tuning.Timing(*[next(times)] * 3, 0.1, None))
    judged, lines, done = [], [], []

    def verdict(_target, network, _gate):
        judged.append(network.plan.names)
        return tuning.Verdict(len(judged) > 1, "wrong", {"relative": 0.5})

    monkeypatch.setattr(tuning, "judge", verdict)
    options = {"checks": 1, "gate_last": True, "say": lines.append, "progress": lambda *d: done.append(d)}
    tuned = tuning.tune(net, args, ladder=QUICK[:2], **options)
    shared = ("strict", "cleanup", "time")  # sdpa has no effect here
    assert judged == [(*shared, "channels_last"), shared]
    assert tuned.plan.names == shared and [row.kept for row in tuned.rows] == [True, True, False]
    assert tuned.plan.evidence["gate"] == {"relative": 0.5}
    judgements = [line for line in lines if not line.startswith("gain of")]
    assert "refused: wrong" in judgements[-2] and judgements[-1].endswith("passed")
    assert done[-1][0] == done[-1][1] and [d for d, _ in done] == sorted(d for d, _ in done)


def test_a_rung_that_cannot_win_is_timed_briefly():
    seconds = iter([0.0] + [0.02] * 10)
    calls = []

    def call():
        calls.append(time.sleep(next(seconds)))

    timing = tuning.measure(call, torch.device("cpu"), give_up_ms=5.0)
    assert len(calls) == 1 + 2 and timing.p50_ms > 5.0
    tuning.measure(lambda: calls.append(None), torch.device("cpu"), repeats=4, seconds=9.0, give_up_ms=1e3)
    assert len(calls) == 3 + 1 + 4


def test_the_tuner_starts_no_rung_after_its_time_limit(quick):
    net, args = make("convnext")
    lines = []
    tuned = tuning.tune(net, args, seconds=0.0, say=lines.append)
    assert tuned.plan.names == ("strict",)
    assert [r.why for r in tuned.rows[1:]] == ["not tried: the time limit was reached"] * len(QUICK)
    assert len(lines) == 1 + len(QUICK)
    assert tuned.plan.evidence["gate"]["relative"] < 1e-4


def test_a_given_plan_is_gated_and_one_that_fails_is_refused(tmp_path, monkeypatch):
    net, args = make("med_ddpm")
    fast = voxtune.optimize(net, args, Plan.of("cleanup", "channels_last"))
    assert fast.plan.evidence["gate"]["relative"] < 1e-5
    path = tmp_path / "plan.json"
    fast.plan.save(path)
    # Evidence of this very model, shape, device and version counts: no gate runs.
    monkeypatch.setattr("voxtune.plan.api.judge", None)
    voxtune.optimize(net, args, path)
    monkeypatch.undo()
    # Elsewhere it is gated again; a broken pass is refused there.
    real = Plan(fast.plan.steps, {}, fast.plan.evidence)

    def broken(captured, context, options):
        norm = captured.nodes(torch.ops.aten.group_norm.default)[0]
        captured.replace(norm, norm.args[0])
        captured.refresh()
        return PassOutcome(1)

    passes = tuple(dataclasses.replace(p, rewrite=broken) if p.name == "channels_last" else p for p in building.PASSES)
    monkeypatch.setattr(building, "PASSES", passes)
    with pytest.raises(InputError, match="refused by the gate"):
        voxtune.optimize(net, args, real)


@pytest.mark.slow
def test_an_edited_plan_is_gated_again(tmp_path, monkeypatch):
    net, args = make("med_ddpm")
    fast = voxtune.optimize(net, args, Plan.of("cleanup", "channels_last"))
    path = tmp_path / "plan.json"
    fast.plan.save(path)
    stored = json.loads(path.read_text())
    assert Plan.load(path) == fast.plan
    edits = [
        {"passes": [{"pass": "cleanup"}, {"pass": "bf16"}]},
        {"passes": [*stored["passes"][:1], {"pass": "channels_last", "options": {"except": []}}]},
        {"made_for": stored["made_for"] | {"device": "another card"}},
        {"evidence": {"gate": stored["evidence"]["gate"] | {"relative": 0.0}}},
        {"hash": "0" * 32},
        {"hash": None},
    ]
    calls = []
    monkeypatch.setattr("voxtune.plan.api.judge", lambda *args: calls.append(args) or Verdict(False, "edited", {}))
    for edit in edits:
        path.write_text(json.dumps(stored | edit))
        assert not Plan.load(path).evidence
        with pytest.raises(InputError, match="refused by the gate: edited"):
            voxtune.optimize(net, args, path)
    assert len(calls) == len(edits)


def test_an_edited_plan_in_the_cache_is_ignored(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path))
    net, args = make("med_ddpm")
    fast = voxtune.optimize(net, args, Plan.of("cleanup", "channels_last"))
    cache.remember(fast.plan)
    here = fast.plan.made_for
    assert cache.remembered(here) == fast.plan
    path = next((tmp_path / "plans").glob("*.json"))
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"passes": [{"pass": "bf16"}]}))
    assert cache.remembered(here) is None
    assert "ignoring a cached plan" in caplog.text


def test_other_sizes_get_a_variant_of_the_plan(caplog):
    net, args = make("med_ddpm")
    fast = voxtune.optimize(net, args, Plan.of("cleanup", "channels_last"))
    other = (torch.randn(3, 1, 8, 8, 8), torch.tensor([3, 4, 5]), torch.randn(3, 2, 8, 8, 8))
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="voxtune"):
        torch.testing.assert_close(fast(*other), net(*other), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fast(*args), net(*args), rtol=1e-4, atol=1e-5)
    assert "the plan is not used" not in caplog.text and len(fast._variants) == 2


def test_other_types_run_the_original_network(caplog):
    net, args = make("med_ddpm")
    fast = voxtune.optimize(net, args, Plan.of("cleanup", "channels_last"))
    other = (args[0].double(), *args[1:])
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="voxtune"):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                fast(*other)  # as the original
    assert caplog.text.count("the plan is not used") == 1 and "float64" in caplog.text


def test_training_mode_runs_the_original_network():
    net, args = make("med_ddpm")
    fast = voxtune.optimize(net, args, Plan.of("cleanup"))
    fast.train()
    assert fast(*args).requires_grad
    fast.eval()
    assert not fast(*args).requires_grad
    with pytest.raises(InputError, match=r"\.eval\(\)"):
        voxtune.optimize(net.train(), args)


class Branching(nn.Module):
    """A network without a static graph: control flow depends on values."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.a(x) if float(x.sum()) > 0 else self.b(x)


def test_a_network_that_cannot_be_captured_still_works(caplog):
    torch.manual_seed(0)
    net, x = Branching().eval(), torch.randn(1, 4, 8, 8)
    with caplog.at_level(logging.WARNING, logger="voxtune"):
        fast = voxtune.optimize(net, x, Plan.of("cleanup", "fuse_norm", "channels_last"))
    assert "could not be captured" in caplog.text and "failed" in fast.notes["capture"]
    for value in (x, -x):
        torch.testing.assert_close(fast(value), net(value))


def test_a_network_with_no_known_pattern_works():
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), torch.randn(2, 8)
    fast = voxtune.optimize(net, x, Plan.of("cleanup", "sdpa", "channels_last"))
    assert fast.notes["sdpa"].startswith("no effect") and fast.notes["channels_last"].startswith("no effect")
    torch.testing.assert_close(fast(x), net(x))


def test_wrong_requests():
    net, _ = make("med_ddpm")
    with pytest.raises(InputError, match="example_inputs"):
        voxtune.optimize(net)
    with pytest.raises(InputError, match="no tensor"):
        voxtune.optimize(net, (1, 2))
    with pytest.raises(InputError, match="got str"):
        voxtune.optimize("med-ddpm", torch.zeros(1))
    with pytest.raises(InputError, match="no such file"):
        voxtune.optimize(net, torch.zeros(1), "no/such/plan.json")


def test_a_model_is_optimized_for_each_shape_it_samples(golden):
    from voxtune.diffusion import DiffusionConfig
    from voxtune.runtime.model import Model, ModelConfig
    from voxtune.workloads import MedDDPMConfig

    network, _ = golden
    config = MedDDPMConfig(base=32, multipliers=(1, 2), attention=(2,))
    model = Model(ModelConfig(network=config, size=(8, 8, 8), diffusion=DiffusionConfig(steps=4)), network)
    fast = voxtune.optimize(model, plan=Plan.of("cleanup", "sdpa", "time", "channels_last"))
    for batch in (2, 3, 2):  # PyTorch convolves a single small volume slowly
        mask = torch.ones(batch, 2, 8, 8, 8)
        a, b = model.sample(mask, seed=3), fast.sample(mask, seed=3)
        assert float((a - b).norm() / a.norm()) < 1e-4
    assert len(fast.network.optimized) == 2


def test_the_signature_is_computed_once_a_step(monkeypatch):
    net, args = make("convnext")
    planned = Planned(net, Plan.of("cleanup"))
    with torch.no_grad():
        expected = planned(*args)
        calls = []
        original = Signature.of
        monkeypatch.setattr(Signature, "of", lambda *a: calls.append(a) or original(*a))
        assert torch.equal(planned(*args), expected)
    assert len(calls) == 1


def test_torch_compile_backend():
    net, args = make("med_ddpm")
    torch._dynamo.reset()
    fast = torch.compile(net, backend="voxtune", dynamic=False, options={"plan": CPU_READY[0]})
    with torch.no_grad():
        y, truth = fast(*args), net(*args)
    assert 0 < float((y - truth).norm() / truth.norm()) < 1e-5, "rewritten, and the same"
    trained = fast(*args)  # with gradients the graph runs as it came
    trained.sum().backward()
    assert next(net.parameters()).grad is not None


def test_torch_compile_backend_follows_changed_weights(caplog):
    net, args = make("med_ddpm")
    torch._dynamo.reset()
    fast = torch.compile(net, backend="voxtune", dynamic=False, options={"plan": CPU_READY[0]})
    conv = next(m for m in net.modules() if isinstance(m, nn.Conv3d))
    with torch.no_grad():
        fast(*args)
        net.load_state_dict({name: value * 1.25 for name, value in net.state_dict().items()})
        torch.testing.assert_close(fast(*args), net(*args), rtol=1e-4, atol=1e-4)
        conv.weight.data = conv.weight.data * 0.5
        torch.testing.assert_close(fast(*args), net(*args), rtol=1e-4, atol=1e-4)
    assert "running the original" not in caplog.text


def test_torch_compile_backend_with_sizes_that_change(caplog, monkeypatch):
    """Dynamo passes changed sizes as numbers to one graph: each size has a plan."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 4, 1)]
    net, plans = nn.Sequential(*layers).eval(), []
    real = voxtune.plan.backend.optimize
    monkeypatch.setattr("voxtune.plan.backend.optimize", lambda *a, **k: plans.append(real(*a, **k)) or plans[-1])
    torch._dynamo.reset()
    fast = torch.compile(net, backend="voxtune", options={"plan": CPU_READY[0]})
    with torch.no_grad():
        for _ in range(2):
            for batch in (4, 3, 1, 2, 3):
                x = torch.randn(batch, 4, 8, 8)
                torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
            net.load_state_dict({name: value * 1.25 for name, value in net.state_dict().items()})
    shapes = [[leaf[0][0] for leaf in n.signature.leaves if isinstance(leaf, tuple)] for n in plans]
    assert {batch for (batch,) in shapes} == {1, 2, 3, 4} and len(plans) <= 5
    assert all("channels_last" in n.plan.names for n in plans)
    assert "running the original" not in caplog.text and "could not be captured" not in caplog.text


@pytest.mark.parametrize(("half", "slow"), [(0.9, False), (7.9, False), (19.0, True)])
def test_a_processor_that_is_slow_in_half_precision_does_not_try_it(monkeypatch, half, slow):
    slow_half.cache_clear()
    monkeypatch.setattr(tuning, "slow_half", slow_half)
    monkeypatch.setattr("voxtune.plan.hazards._convolution_ms", lambda x, _: half if x.dtype == torch.bfloat16 else 1.0)
    net, args = make("convnext")
    bf16 = tuning.TunerRung("bf16", ("bf16",), apart=True)
    monkeypatch.setattr(tuning, "_faster", lambda *_: False)
    tuned = tuning.tune(net, args, ladder=(bf16,))
    precision_names = [name for name, _ in precisions(analytic.model(4), "auto")]
    slow_half.cache_clear()
    if slow:
        assert tuned.rows[1].why == "BF16 convolutions take 19 times as long as float32 on this CPU"
        assert tuned.rows[1].timing is None
        assert precision_names == ["FP32"]
    else:
        assert tuned.rows[1].timing is not None
        assert precision_names == ["FP32", "BF16 autocast"]


def test_hazards_are_checked_first(monkeypatch):
    assert refuses_half(torch.device("cpu")) is None
    hazards.cache_clear()
    monkeypatch.setattr("voxtune.plan.hazards._wrong_convolution", lambda _type: 0.3)
    assert "BF16 conv3d is wrong" in refuses_half(torch.device("cpu"))
    net, args = make("convnext")
    tuned = tuning.tune(net, args, ladder=(tuning.TunerRung("bf16", ("bf16",), apart=True),))
    assert "half precision is refused" in tuned.rows[1].why
    with pytest.raises(InputError, match="half precision is refused"):
        voxtune.optimize(net, args, Plan.of("bf16"))
    hazards.cache_clear()


def test_a_missing_compiler_is_reported(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _name: None)
    assert "C++ compiler" in why_no_compiler(torch.device("cpu"))
    net, args = make("convnext")
    tuned = tuning.tune(net, args, ladder=(tuning.TunerRung("compile", ("compile",), apart=True),))
    assert "C++ compiler" in tuned.rows[1].why
