"""Networks rewritten for training: results and gradients against the network itself."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.factories.networks import REWRITING, make
from tests.factories.users_networks import make_users
from voxtune.errors import InputError
from voxtune.plan.gate import volumes_of
from voxtune.plan.plan import Plan
from voxtune.plan.training import training_network

PLAN = tuple(n for n in REWRITING if n not in ("elementwise", "small_images"))


def gradients(network, parameters, args, dy):
    for p in parameters:
        p.grad = None
    y = volumes_of(network(*args))[0]
    (y * dy.to(y.dtype)).sum().backward()
    return y.detach(), [None if p.grad is None else p.grad.clone() for p in parameters]


def compare(net, args, names, dtype):
    """Relative errors of the result and of the whole gradient, against the network in float64."""
    net = net.eval().to(dtype)
    given = tuple(a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    wide = copy.deepcopy(net).double()
    exact = tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)
    parameters = list(net.parameters())
    fast = training_network(net, given, None, Plan.of(*names))
    with torch.no_grad():
        y = volumes_of(wide(*exact))[0]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    z, true = gradients(wide, list(wide.parameters()), exact, dy)
    y, own = gradients(fast, parameters, given, dy)
    flat = lambda parts: torch.cat([g.double().flatten() for g in parts])  # noqa: E731
    differs = [n for (n, _), a, b in zip(net.named_parameters(), own, true, strict=True) if (a is None) != (b is None)]
    assert not differs, differs
    a, b = (flat([g for g in group if g is not None]) for group in (own, true))
    return fast, float((y - z).norm() / z.norm()), float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", ["med_ddpm", "monai_3d"])
def test_gradients_are_those_of_the_network(name):
    torch.manual_seed(0)
    fast, error, gradient = compare(*make(name), PLAN, torch.float64)
    assert "applied" in fast.notes["fuse_norm"] and "applied" in fast.notes["conv3d"], fast.notes
    assert error < 1e-9 and gradient < 1e-6, (error, gradient)


@pytest.mark.parametrize("name", ["nnunet_plain", "nnunet_residual", "monai_dynunet", "monai_unet", "monai_segresnet"])
def test_gradients_of_users_networks(name):
    net, args, kwargs = make_users(name)
    assert not kwargs
    fast, error, gradient = compare(net, args, PLAN, torch.float64)
    assert "applied" in fast.notes["fuse_norm"] and "applied" in fast.notes["conv3d"], fast.notes
    assert error < 1e-9 and gradient < 1e-6, (error, gradient)


def test_a_parameter_without_effect_gets_a_gradient_of_zero():
    """A bias before an instance norm; an optimizer with weight decay changes it, and one without a gradient it would not."""
    net = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True), nn.SiLU()).eval()
    x = torch.randn(1, 1, 6, 6, 6)
    fast = training_network(net, (x,), None, Plan.of(*PLAN))
    fast(x).square().mean().backward()
    assert "0.bias" not in {str(n.target) for n in fast.rewritten.graph.nodes}
    assert net[0].bias.grad is not None and not net[0].bias.grad.any() and net[0].weight.grad.any()
    net[0].bias.requires_grad_(False)
    net[0].bias.grad = None
    fast(x).square().mean().backward()
    assert net[0].bias.grad is None


def test_gradients_in_half_precision():
    torch.manual_seed(0)
    fast, error, gradient = compare(*make("med_ddpm"), ("bf16", *PLAN), torch.float32)
    assert fast.notes["bf16"].startswith("applied")
    assert error < 3e-2 and gradient < 6e-2, (error, gradient)


def test_a_step_changes_the_network_and_the_next_result():
    torch.manual_seed(0)
    net, args = make("med_ddpm")
    fast = training_network(net.eval(), args, None, Plan.of(*PLAN))
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in net.named_parameters()]
    optimizer = torch.optim.Adam(fast.parameters(), lr=1e-5)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = fast(*args).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), net(*args), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layer", [nn.BatchNorm3d(8), nn.Dropout(0.1)])
def test_networks_that_differ_in_training_mode_are_refused(layer):
    net = nn.Sequential(nn.Conv3d(8, 8, 3, padding=1), layer)
    with pytest.raises(InputError, match="training mode"):
        training_network(net.eval(), (torch.randn(1, 8, 4, 4, 4),), None, Plan.of(*PLAN))


def test_weights_are_packed_in_one_step():
    from voxtune.kernels.packing import pack_as

    torch.manual_seed(0)
    net, args = make("med_ddpm")
    fast = training_network(net.eval(), args, None, Plan.of("bf16", *PLAN))
    derivations = fast._live.derived.derivations
    of_graph = [derivations.get(node.target) for node in fast.rewritten.graph.find_nodes(op="get_attr")]
    packed = [d for d in of_graph if d is not None and d.function is pack_as]
    convolutions = fast.rewritten.graph.find_nodes(op="call_function", target=torch.ops.voxtune.conv3d.default)
    assert len(packed) == len(convolutions) > 0


def test_later_operators_read_sources_from_the_norm(monkeypatch):
    """So that gradients of several operators are added in the norm's own pass."""
    from voxtune.kernels import gradients as kernels

    handed, plain = [], kernels.norm_before
    monkeypatch.setattr(kernels, "norm_before", lambda on, *args: handed.append(on) or plain(on, *args))
    torch.manual_seed(0)
    net, args = make("med_ddpm")
    fast = training_network(net.eval(), args, None, Plan.of(*PLAN))
    fast(*args)
    norms = fast.rewritten.graph.find_nodes(op="call_function", target=torch.ops.voxtune.norm_act.default)
    assert len(handed) == len(norms)
    assert sum(any(on) for on in handed) > len(norms) // 3
    handed.clear()
    with torch.no_grad():
        fast(*args)
    assert not handed
