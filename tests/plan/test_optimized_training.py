"""`optimize(train=True)` and the torch.compile backend in training: the same steps as the network alone."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

import voxtune
from tests.factories.networks import REWRITING
from tests.factories.users_networks import make_users
from voxtune.errors import InputError
from voxtune.plan import Plan
from voxtune.plan.gate import volumes_of
from voxtune.plan.optimized_training import OptimizedTraining, gate_inputs
from voxtune.plan.training import training_network, training_passes

NAMES = tuple(n for n in REWRITING if n not in ("elementwise", "small_images"))
PLAN = Plan.of(*NAMES)
pytestmark = pytest.mark.usefixtures("one_thread")


def small() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(8, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True), nn.SiLU(), nn.Conv3d(16, 8, 3, padding=1)
    )
    return net, torch.randn(1, 8, 8, 8, 8)


def steps(call, net, x, count=3):
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = volumes_of(call(x))[0].square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


NETWORKS = ["nnunet_plain", *(pytest.param(n, marks=pytest.mark.slow) for n in ("monai_segresnet", "nnunet_residual"))]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_steps_are_those_of_the_network(name):
    net, (x,), _ = make_users(name)
    net.train()
    plain = copy.deepcopy(net)
    fast = voxtune.optimize(net, x, PLAN, train=True, say=lambda line: None)
    assert isinstance(fast, OptimizedTraining) and "applied" in fast.notes["conv3d"]
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in net.named_parameters()]
    assert all(p.grad is None for p in net.parameters()), "gradients belong to the caller"
    assert steps(fast, fast, x) == pytest.approx(steps(plain, plain, x), rel=1e-4)
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
    report = fast.report()
    assert "original" in report and "own kernels" in report and "conv3d: applied" in report


# Passes that must find something, and operators of PyTorch that may remain beside those of the plan.
REWRITTEN = {
    "nnunet_plain": (("fuse_norm", "doubling", "edges", "conv3d", "strided", "pointwise"), set()),
    "monai_segresnet": (("fuse_norm", "upsample", "edges", "conv3d", "strided", "pointwise"), {"add.Tensor"}),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_a_segmentation_network_is_rewritten_whole(name):
    net, args, _ = make_users(name)
    network = training_network(net.train(), args, {}, Plan.of(*training_passes("bf16")))
    applied, left = REWRITTEN[name]
    for passed in applied:
        assert network.notes[passed].startswith("applied"), (passed, network.notes[passed])
    calls = [n.target for n in network.rewritten.graph.nodes if n.op == "call_function"]
    theirs = {str(t).removeprefix("aten.") for t in calls if getattr(t, "namespace", "") == "aten"}
    assert theirs == left


def test_biases_before_an_instance_norm_have_gradients_of_zero():
    """Convolutions that no pass takes leave their biases to the norm, where these have no effect. nnU-Net names them twice."""
    net, args, _ = make_users("nnunet_plain")
    expected = {name for name, p in net.named_parameters() if _trained(net, args, p)}
    network = training_network(net, args, {}, Plan.of(*training_passes("fp32")).without("conv3d", "edges"))
    network(*args).square().sum().backward()
    assert {name for name, p in net.named_parameters() if p.grad is not None} == expected
    bias = net.get_parameter("encoder.stages.0.0.convs.0.conv.bias")
    assert not bias.grad.any() and "encoder.stages.0.0.convs.0.conv.weight" in expected


def _trained(net, args, parameter):
    return torch.autograd.grad(net(*args).sum(), parameter, allow_unused=True)[0] is not None


def test_other_sizes_are_rewritten_at_their_first_call():
    net, x = small()
    fast = voxtune.optimize(net, x, PLAN, train=True, say=lambda line: None)
    other = torch.randn(2, 8, 6, 10, 4)
    fast(other).square().mean().backward()
    own = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    net(other).square().mean().backward()
    assert len(fast._networks) == 2
    assert all(torch.allclose(a, p.grad, atol=1e-6) for a, p in zip(own, net.parameters(), strict=True))


def test_autocast_at_call_time_decides(caplog):
    net, x = small()
    fast = voxtune.optimize(net, x, PLAN, train=True, say=lambda line: None)
    with caplog.at_level(logging.WARNING), torch.autocast("cpu", torch.bfloat16):
        y = fast(x)
    assert "made for fp32 and is called in bf16" in caplog.text
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(y, net(x))
    half = voxtune.optimize(net, x, Plan.of("bf16", *NAMES), precision="bf16", train=True, say=lambda line: None)
    y = half(x)
    assert 1e-4 < float((y - net(x)).detach().norm() / net(x).detach().norm()) < 2e-2


def test_on_a_cpu_the_original_runs(capsys):
    net, x = small()
    fast = voxtune.optimize(net, x, train=True)
    assert fast.plan.names == () and "need a GPU" in capsys.readouterr().err
    fast(x).sum().backward()
    assert net[0].weight.grad is not None
    assert voxtune.optimize(net, x, "baseline", train=True).plan.names == ()


def test_what_cannot_be_trained_is_refused():
    net, x = small()
    differs = nn.Sequential(net, nn.BatchNorm3d(8))
    with pytest.raises(InputError, match=r"the plan cannot train this network: .*batch norm"):
        voxtune.optimize(differs, x, PLAN, train=True, say=lambda line: None)
    for p in net.parameters():
        p.requires_grad_(False)
    with pytest.raises(InputError, match="frozen"):
        voxtune.optimize(net, x, PLAN, train=True)
    net.requires_grad_(True)
    with pytest.raises(InputError, match="choose same, auto, bf16 or fp16"):
        voxtune.optimize(net, x, PLAN, train=True, precision="tf32")
    with pytest.raises(InputError, match=r"pass train=True"):
        voxtune.optimize(net.train(), x, PLAN)


class TwoResults(nn.Module):
    """As with deep supervision: results of two sizes."""

    def __init__(self):
        super().__init__()
        self.body, self.coarse = small()[0], nn.Conv3d(8, 4, 3, stride=2, padding=1)

    def forward(self, x):
        y = self.body(x)
        return [y, self.coarse(y)]


def test_several_results_of_other_sizes_are_trained():
    torch.manual_seed(0)
    net, x = TwoResults(), torch.randn(1, 8, 8, 8, 8)
    plain = copy.deepcopy(net)
    fast = voxtune.optimize(net, x, PLAN, train=True, say=lambda line: None)
    for call in (fast, plain):
        sum(y.square().mean() for y in call(x)).backward()
    assert [tuple(y.shape) for y in fast(x)] == [(1, 8, 8, 8, 8), (1, 4, 4, 4, 4)]
    for a, b in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_a_wrong_plan_is_refused_with_its_layer(monkeypatch):
    from voxtune.kernels import gradients

    right = gradients.recompute_norm
    monkeypatch.setattr(gradients, "recompute_norm", lambda *args: 1.01 * right(*args))
    net, x = small()
    with pytest.raises(InputError, match=r"refused by the gate: gradient of 3: error"):
        voxtune.optimize(net, x, PLAN, train=True, say=lambda line: None)


def test_the_gate_judges_the_middle_of_large_volumes():
    net, _ = small()
    volume = torch.arange(32.0**3).view(1, 1, 32, 32, 32).expand(1, 8, 32, 32, 32)
    last = volume.contiguous(memory_format=torch.channels_last_3d)
    t, other = torch.tensor([3]), torch.randn(1, 2, 5, 5, 5)

    def call(x, t, *, cond, other):
        return net(x + cond) + t

    (x, same), kwargs = gate_inputs(call, ((last, t), {"cond": volume, "other": other}))
    assert same is t and kwargs["other"] is other
    assert torch.equal(x, volume[:, :, 8:24, 8:24, 8:24]) and torch.equal(kwargs["cond"], x)
    assert x.is_contiguous(memory_format=torch.channels_last_3d) and kwargs["cond"].is_contiguous()

    def refusing(x):
        assert x.shape[2] == 32, "made for this size"
        return net(x)

    assert gate_inputs(refusing, ((volume,), {}))[0][0] is volume
    assert gate_inputs(lambda x: net(x) / 0, ((volume,), {}))[0][0] is volume
    token = torch.randn(1, 7, 16)
    assert gate_inputs(refusing, ((token,), {}))[0][0] is token


def test_a_copy_is_rewritten_at_its_first_call():
    net, x = small()
    fast = voxtune.optimize(net, x, PLAN, train=True, say=lambda line: None)
    for other in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert not other._networks and other.plan == fast.plan
        assert torch.allclose(other(x), fast(x)) and other._networks
        assert other.original is not net
    assert fast.state_dict().keys() == net.state_dict().keys()
    assert fast.eval() is fast and not net.training and not fast.training


def test_the_backend_trains():
    net, x = small()
    plain = copy.deepcopy(net)
    compiled = torch.compile(net, backend="voxtune", options={"plan": PLAN})
    assert steps(compiled, net, x) == pytest.approx(steps(plain, plain, x), rel=1e-4)
    with torch.no_grad():
        assert torch.allclose(compiled(x), plain(x), atol=1e-4)
