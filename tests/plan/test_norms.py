"""Norms of segmentation networks and video autoencoders are fused with activation, residual and shift or folded into the
convolution before them, and stay correct."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.factories.networks import REWRITING
from tests.factories.users_networks import IMAGE, USERS_NETWORKS, make_users
from voxtune.plan.build import build
from voxtune.plan.graph import argument, capture, is_call
from voxtune.plan.passes import BY_NAME, Context
from voxtune.plan.plan import Plan
from voxtune.plan.saved_graph import load_graph, save_graph

aten = torch.ops.aten
NORMS = (aten.group_norm.default, aten.instance_norm.default, aten.batch_norm.default)
NORMS += (aten._native_batch_norm_legit_no_training.default,)
# How often fuse_norm applied; activations of the fused norms; how many of them have a residual.
FUSED = {
    "nnunet_plain": (10, {"leaky_relu": 10}, 0),
    "nnunet_residual": (14, {"leaky_relu": 13, "none": 1}, 5),
    "monai_segresnet": (9, {"relu": 9}, 0),
    "monai_unet": (9, {"prelu": 9}, 0),
    "monai_dynunet": (10, {"leaky_relu": 10}, 0),
    "monai_dynunet_residual": (13, {"leaky_relu": 10, "none": 3}, 3),
    "monai_unet_batch_norm": (0, {}, 0),
    "wan_decoder": (18, {"silu": 17, "none": 1}, 0),
    "wan_block": (2, {"silu": 2}, 0),
    "ltx_norm": (1, {"silu": 1}, 0),
}


def monai_dynunet_residual():
    from monai.networks.nets import DynUNet

    return DynUNet(3, 1, 2, (3, 3, 3), (1, 2, 2), (2, 2), res_block=True)


def monai_unet_batch_norm():
    from monai.networks.nets import UNet

    net = UNet(3, 1, 2, (16, 32, 64), (2, 2), num_res_units=2, norm="BATCH")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm3d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return net


def wan_block():
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock

    return WanResidualBlock(1, 24)


def ltx_norm():
    from diffusers.models.autoencoders.autoencoder_kl_ltx2 import PerChannelRMSNorm

    return nn.Sequential(nn.Conv3d(1, 24, 1), PerChannelRMSNorm(), nn.SiLU())


MORE = {f.__name__: f for f in (monai_dynunet_residual, monai_unet_batch_norm, wan_block, ltx_norm)}


def make(name):
    """The network and its inputs; affine parameters are drawn, so that a forgotten one is noticed."""
    if name in USERS_NETWORKS:
        net, args, _ = make_users(name)
        args = (args[0].expand(2, -1, -1, -1, -1) + torch.randn(2, 1, 1, 1, 1),)
    else:
        torch.manual_seed(0)
        net, args = MORE[name]().eval(), (torch.randn(2, *IMAGE[1:]),)
    for parameter in net.parameters():
        if parameter.dim() == 1 or parameter.shape[1:] == (1, 1, 1):
            nn.init.normal_(parameter, 0.5, 0.3)
    return net, args


def double_answer(net, args):
    with torch.no_grad():
        return copy.deepcopy(net).double()(*(a.double() for a in args))


def error(y, truth):
    return float((y.double() - truth).norm() / truth.norm())


def fused_norms(graph):
    operators = (torch.ops.voxtune.norm_act.default, torch.ops.voxtune.rms_norm_act.default)
    return [n for n in graph.nodes if is_call(n, *operators)]


def residual_of(norm):
    return argument(norm, "residual") if is_call(norm, torch.ops.voxtune.norm_act.default) else None


@pytest.mark.parametrize("name", FUSED)
def test_norms_of_real_networks_are_fused(name):
    net, args = make(name)
    fast = build(net, args, None, Plan.of(*REWRITING), twin=True)
    assert "capture" not in fast.notes, fast.notes
    count, activations, residuals = FUSED[name]
    assert fast.notes["fuse_norm"].startswith(f"applied {count} x" if count else "no effect"), fast.notes
    graph = fast.runner.inner.graph
    norms = fused_norms(graph)
    assert Counter(argument(n, "activation") for n in norms) == activations
    assert sum(residual_of(n) is not None for n in norms) == residuals
    assert not [n for n in graph.nodes if is_call(n, *NORMS)]
    for factor in (1.0, 1.1):  # the second time with changed weights
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(factor)
        assert error(fast(*args), double_answer(net, args)) < 5e-6


@pytest.mark.parametrize("name", ["nnunet_plain", "monai_unet", "wan_block"])
def test_half_precision_errs_like_autocast(name):
    net, args = make(name)
    truth = double_answer(net, args)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = error(net(*args), truth)
    for names in (("bf16", *REWRITING), ("bf16",)):
        y = build(net, args, None, Plan.of(*names), twin=True)(*args)
        assert y.dtype == torch.float32
        assert error(y, truth) < 1.5 * plain, names


class Patterns(nn.Module):
    """Every activation, operands in both orders, and near misses."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(
            [
                nn.GroupNorm(4, 16, eps=1e-3),
                nn.InstanceNorm3d(16, affine=True),
                nn.InstanceNorm3d(16),
                nn.GroupNorm(8, 16, affine=False),
                nn.GroupNorm(2, 16),
                nn.GroupNorm(1, 16),
                nn.InstanceNorm3d(16),
                nn.GroupNorm(4, 16),
            ]
        )
        self.slopes = nn.Parameter(torch.rand(16))

    def forward(self, x, y, t):
        a, b, c, d, e, f, g, h = self.norms
        s = a(x)
        s = s * torch.sigmoid(s)  # silu
        s = F.gelu(y + b(s), approximate="tanh")  # the residual first
        s = F.prelu(c(s + t) + x, self.slopes)  # a shift before InstanceNorm has no effect
        s = F.gelu(d(s).clamp_min(0) + y)  # after the activation: no residual of the norm
        s = F.relu(e(s + t) + t)  # per channel: no volume of the same shape
        kept = f(s) + y
        s = F.silu(kept) + kept  # the sum has two readers: the activation stays apart
        s = F.leaky_relu(torch.add(g(s), y, alpha=2), 0.3)  # scaled: no plain sum
        return F.elu(h(s)) * 1.0 + 0.0  # no kernel has elu


def test_patterns_and_near_misses(tmp_path):
    torch.manual_seed(0)
    net = Patterns().eval()
    args = (torch.randn(2, 16, 4, 5, 6), torch.randn(2, 16, 4, 5, 6), torch.randn(2, 16, 1, 1, 1))
    names = [name for name in REWRITING if name != "elementwise"]  # it would fuse what is left
    fast = build(net, args, None, Plan.of(*names), twin=True)
    assert error(fast(*args), double_answer(net, args)) < 5e-6
    norms = fused_norms(fast.runner.inner.graph)
    activations = ["silu", "gelu_tanh", "prelu", "relu", "none", "none", "none", "none"]
    assert [argument(n, "activation") for n in norms] == activations
    assert [residual_of(n) is not None for n in norms] == [False, True, True, False, False, True, False, False]
    assert [argument(n, "shift") is not None for n in norms] == [False] * 4 + [True] + [False] * 3
    left = Counter(n.target for n in fast.runner.inner.graph.nodes if n.op == "call_function")
    assert left[aten.gelu.default] == left[aten.relu.default] == left[aten.leaky_relu.default] == 1
    assert left[aten.sigmoid.default] == left[aten.prelu.default] == 0
    save_graph(tmp_path / "network.graph", fast)
    module, *_ = load_graph(tmp_path / "network.graph", torch.device("cpu"))
    with torch.no_grad():
        torch.testing.assert_close(module(*args), fast(*args))


class BatchNorms(nn.Module):
    def __init__(self, shared, inplace):
        super().__init__()
        self.a = nn.Conv3d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm3d(8, eps=1e-3)
        self.up = nn.ConvTranspose3d(8, 6, 2, stride=2)
        self.inorm = nn.InstanceNorm3d(6, affine=True, track_running_stats=True)
        self.plain = nn.BatchNorm3d(6, affine=False)
        self.flat = nn.Conv2d(6, 4, 3, padding="same", groups=2)
        self.flat_bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace)
        self.shared = shared

    def forward(self, x):
        h = self.a(x)
        y = self.inorm(self.up(self.relu(self.bn(h))))
        y = self.plain(self.relu(y))  # no convolution before it
        y = self.flat_bn(self.flat(y[:, :, 0]))
        return y + h.mean() if self.shared else y


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("inplace", [False, True])  # PyTorch's functionalisation decomposes BatchNorm
def test_norms_with_running_statistics_are_folded_into_the_convolution(shared, inplace):
    torch.manual_seed(0)
    net, x = BatchNorms(shared, inplace).eval(), torch.randn(2, 3, 5, 4, 6)
    for module in net.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                buffer.copy_(torch.rand_like(buffer) + (0.5 if "var" in name else -0.5))
    fast = build(net, (x,), None, Plan.of("cleanup"))
    assert error(fast(x), double_answer(net, (x,))) < 5e-6
    left = [n for n in fast.runner.inner.graph.nodes if is_call(n, *NORMS)]
    assert len(left) == (2 if shared else 1), "a convolution that something else reads keeps its weight"
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1.5)
    assert error(fast(x), double_answer(net, (x,))) < 5e-6, "changed weights"


def test_in_training_mode_running_statistics_are_left_alone():
    net, x = nn.InstanceNorm3d(4, track_running_stats=True), torch.randn(1, 4, 3, 3, 3)
    captured = capture(net.train(), (x,))
    BY_NAME["cleanup"].rewrite(captured, Context(torch.device("cpu"), ("cleanup",)), {})
    assert captured.nodes(aten.instance_norm.default)


class Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv3d(3, 8, 1)
        self.b = nn.Conv3d(8, 4, 1, bias=False)
        self.c = nn.Conv3d(4, 4, 1)
        self.d = nn.Conv2d(4, 5, 1)
        self.e = nn.Conv2d(5, 5, 3)

    def forward(self, x):
        x = self.a(F.avg_pool3d(x, 2))
        y = F.avg_pool3d(x, 2, 2, ceil_mode=True)  # another size
        x = F.avg_pool3d(x, 2, 2)
        z = self.c(self.b(x)) + x[:, :4] + self.b(y)[:, :, :1, :1, :1]  # something else reads the pooled volume
        w = self.d(F.avg_pool2d(z[:, :, 0], (2, 2), ceil_mode=False))
        return self.e(F.avg_pool2d(w, 2))  # no 1x1 convolution


def test_a_mean_before_a_pointwise_convolution_becomes_a_stride():
    torch.manual_seed(0)
    net, x = Pools().eval(), torch.randn(2, 3, 9, 50, 51)
    fast = build(net, (x,), None, Plan.of("cleanup"))
    assert error(fast(x), double_answer(net, (x,))) < 5e-6
    graph = fast.runner.inner.graph
    assert len([n for n in graph.nodes if is_call(n, aten.avg_pool3d.default, aten.avg_pool2d.default)]) == 3
    strided = [n for n in graph.nodes if is_call(n, aten.conv3d.default, aten.conv2d.default) and n.args[3:]]
    assert [n.args[3] for n in strided] == [[2, 2, 2], [2, 2]]
