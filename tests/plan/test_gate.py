"""The gate refuses broken passes, wrong epsilons, skipped norms and NaN, and reports the errors."""

from __future__ import annotations

import math

import pytest
import torch

from tests.factories.networks import REWRITING, make
from voxtune.plan.build import PlanTarget, build
from voxtune.plan.gate import Gate, trajectory_of, vary
from voxtune.plan.optimized import Optimized
from voxtune.plan.plan import Plan
from voxtune.plan.tuner import gate_for, judge
from voxtune.quality.tensor_error import difference

NORM = "norm_act"


@pytest.fixture(scope="module")
def subject():
    net, args = make("med_ddpm")
    # A short trajectory: on some CPUs a step in BF16 takes half a second.
    with torch.no_grad():
        walk = trajectory_of((args, {}), net(*args), steps=2)
    return net, args, gate_for(PlanTarget(net, (args, {})), walk)


def rewritten(net, args, *names) -> Optimized:
    return build(net, args, None, Plan.of(*names, *REWRITING), twin=True)


def norms_of(network):
    graph = network.runner.inner.graph
    return [n for n in graph.nodes if n.op == "call_function" and NORM in str(n.target)]


def test_a_sound_plan_passes_with_its_figures(subject):
    net, args, gate = subject
    verdict = judge(PlanTarget(net, (args, {})), rewritten(net, args, "bf16"), gate)
    assert verdict.passed, verdict
    figures = verdict.figures
    assert figures["reference"] == "float64" and figures["inputs"] == 3
    assert figures["structure"] < figures["structure_limit"] <= 1e-4
    assert 1e-4 < figures["relative"] < figures["limit"] == pytest.approx(1.5 * figures["plain"])
    assert {"relative", "psnr", "worst", "limit"} <= set(figures["trajectory"])


@pytest.mark.parametrize("epsilon", [1e-6, *(pytest.param(e, marks=pytest.mark.slow) for e in (1e-4, 1e-3))])
def test_a_wrong_epsilon_is_refused_although_bf16_would_hide_it(subject, epsilon):
    net, args, gate = subject
    fast, twin = rewritten(net, args, "bf16"), rewritten(net, args)
    for network in (fast, twin):
        for norm in norms_of(network):
            norm.args = (*norm.args[:4], epsilon, *norm.args[5:])
        network.runner.inner.recompile()
    verdict = gate.judge(fast, "bf16", twin)
    assert not verdict.passed and "float32" in verdict.reason
    assert verdict.figures["structure"] > verdict.figures["structure_limit"]


def test_a_skipped_norm_is_refused(subject):
    net, args, gate = subject
    broken = rewritten(net, args)
    norm = next(n for n in norms_of(broken) if len(n.args[0]) == 1)
    norm.replace_all_uses_with(norm.args[0][0])
    broken.runner.inner.recompile()
    assert not gate.judge(broken, "fp32", broken).passed


def test_a_pass_that_forgets_the_residual_is_refused(subject):
    net, args, gate = subject
    broken = rewritten(net, args, "bf16")
    conv = next(n for n in broken.runner.inner.graph.nodes if "voxtune.conv3d" in str(n.target) and n.args[3])
    conv.args = (*conv.args[:3], None, *conv.args[4:])
    broken.runner.inner.recompile()
    verdict = gate.judge(broken, "bf16")
    assert not verdict.passed and "exceeds" in verdict.reason


def test_nan_is_refused(subject):
    net, _args, gate = subject
    verdict = gate.judge(lambda *a: net(*a) * math.nan, "fp32")
    assert not verdict.passed and verdict.error == math.inf


def test_too_coarse_numerics_are_refused(subject):
    net, _args, gate = subject

    def coarse(x, t, cond):
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x.bfloat16().float(), t, cond).float()
        return y + 0.03 * y.std() * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))

    assert not gate.judge(coarse, "bf16").passed


def test_a_drift_that_single_steps_hide_is_refused(subject, monkeypatch):
    """Each step passes, their sum does not: the trajectory is what decides."""
    monkeypatch.setattr("voxtune.plan.gate.SEEDS", (0,))
    net, args, _ = subject

    def half_right(x, t, cond):
        y = net(x, t, cond)
        return y if int(t[0]) in (120, 60, 0) else y * 1.05

    gate = Gate(net, vary((args, {})), trajectory_of((args, {}), torch.empty_like(args[0])))
    verdict = gate.judge(half_right, "fp32")
    assert not verdict.passed and "sampled volume" in verdict.reason and "PSNR" in verdict.reason


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_constant_output_cannot_be_judged(value):
    """Every plan passes for such a network, so a verdict would prove nothing."""
    net, x = torch.nn.Conv2d(1, 1, 3, padding=1).eval(), torch.randn(1, 1, 8, 8)
    torch.nn.init.zeros_(net.weight), torch.nn.init.constant_(net.bias, value)
    verdict = Gate(net, [((x,), {})]).judge(net, "fp32")
    assert not verdict.passed and "zero or constant" in verdict.reason
    torch.nn.init.ones_(net.weight)
    assert Gate(net, [((x,), {})]).judge(net, "fp32").passed


def test_no_memory_is_a_verdict_and_no_crash(subject):
    _net, _args, gate = subject

    def greedy(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 80 GiB")

    verdict = gate.judge(greedy, "fp32")
    assert not verdict.passed and "out of memory" in verdict.reason


def test_inputs_vary_in_noise_and_time():
    _, args = make("med_ddpm")
    first, second, third = vary((args, {}))
    assert torch.equal(first[0][0], args[0])
    assert not torch.equal(second[0][0], first[0][0]) and not torch.equal(third[0][0], second[0][0])
    assert [i[0][1].tolist() for i in (first, second, third)] == [[120, 30], [60, 15], [0, 0]]
    assert torch.equal(second[0][2], args[2]), "the mask is no noise"


def test_difference_has_known_answers():
    r = torch.tensor([0.0, 3.0, 4.0])
    result = difference(r + torch.tensor([0.0, 0.0, 0.5]), r)
    assert result.relative == pytest.approx(0.1) and result.worst == pytest.approx(0.5)
    assert result.psnr == pytest.approx(20 * math.log10(4 / (0.5 / math.sqrt(3))))
    assert difference(r, r).psnr == math.inf
    with pytest.raises(ValueError, match="differ"):
        difference(r, r[:2])
