"""The gate of gradients: a correct rewrite passes, a wrong one is refused with the layer that is wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.factories.networks import make
from voxtune.plan.plan import Plan
from voxtune.plan.training import training_network, training_passes
from voxtune.plan.training_gate import GateBatch, GradientGate, describe_layers
from voxtune.workloads import MedDDPMConfig, build

pytestmark = pytest.mark.usefixtures("one_thread")


def batches(args, count=2):
    chance = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        noise = torch.randn(args[0].shape, generator=chance)
        x = torch.randn(args[0].shape, generator=chance)
        made.append(GateBatch((x, *args[1:]), lambda y, noise=noise: (y - noise).abs().mean()))
    return made


@pytest.fixture(scope="module")
def network():
    return make("med_ddpm")


def rewritten(precision):
    def make_call(net, args):
        return training_network(net, args, None, Plan.of(*training_passes(precision)))

    return make_call


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_rewritten_network_passes(network, precision):
    net, args = network
    gate = GradientGate(net, batches(args), precision)
    before = copy.deepcopy(net.state_dict())
    verdict = gate.judge(lambda copied: rewritten(precision)(copied, args))
    assert verdict.passed, verdict.reason
    figures = verdict.figures
    assert 0 < figures["relative"] <= figures["limit"] and figures["judged"] > 20
    assert len(figures["worst"]) == 5 and all(w["error"] <= w["limit"] for w in figures["worst"])
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())


def test_plain_pytorch_passes_its_own_gate(network):
    net, args = network
    gate = GradientGate(net, batches(args), "bf16")

    def plain(copied):
        def call(*given):
            with torch.autocast("cpu", torch.bfloat16):
                return copied(*given)

        return call

    verdict = gate.judge(plain)
    assert verdict.passed and verdict.error == verdict.figures["plain"]


def test_a_wrong_gradient_of_one_layer_is_refused_and_named(network):
    net, args = network

    def wrong(copied):
        for p in copied.middle_block[0].in_layers[2].parameters():
            p.register_hook(lambda gradient: 1.1 * gradient)
        return copied

    verdict = GradientGate(net, batches(args), "fp32").judge(wrong)
    assert not verdict.passed
    assert verdict.reason.startswith("gradient of middle_block.0.in_layers.2: error 1.0e-01 exceeds")


def test_a_missing_gradient_and_nan_are_refused(network):
    net, args = network
    gate = GradientGate(net, batches(args), "fp32")
    detached = lambda copied: lambda x, t, c: copied(x, t, c).detach() + copied.out[2].bias.sum()  # noqa: E731
    verdict = gate.judge(detached)
    assert not verdict.passed and verdict.error == float("inf")
    assert not gate.judge(lambda copied: lambda *a: copied(*a) * float("nan")).passed


def test_layers_that_start_at_zero_are_judged_and_unused_ones_are_named():
    torch.manual_seed(0)
    fresh = build(MedDDPMConfig(base=32, multipliers=(1,), attention=()))
    assert any(p.dim() > 1 and not p.any() for p in fresh.parameters())
    fresh.unused = nn.Linear(2, 2)
    args = (torch.randn(1, 1, 4, 4, 4), torch.tensor([3]), torch.randn(1, 2, 4, 4, 4))
    gate = GradientGate(fresh, batches(args), "fp32")
    verdict = gate.judge(lambda copied: copied)
    assert verdict.passed, verdict.reason
    assert set(verdict.figures["excluded"]) >= {"unused.weight", "unused.bias"}
    assert verdict.figures["judged"] > 10
    # Norms with one channel to a group remove every shift before them, and with it the gradient of the time embedding.
    assert "gradients of time_embed.0.weight, time_embed.0.bias" in describe_layers(verdict.figures)


def test_a_network_without_gradients_is_not_judged():
    net = nn.Linear(2, 1)
    batch = GateBatch((torch.zeros(3, 2),), lambda y: 0.0 * y.sum())
    verdict = GradientGate(net, [batch], "fp32").judge(lambda copied: copied)
    assert not verdict.passed and "zero or constant" in verdict.reason
