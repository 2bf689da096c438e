"""The pass for small 2D images: what becomes one operator, what does not, and that the network stays the same."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.factories.networks import REWRITING, make
from voxtune.plan.build import build
from voxtune.plan.plan import Plan
from voxtune.plan.saved_graph import load_graph, save_graph

pytestmark = pytest.mark.usefixtures("one_thread")
OWN = ("conv2d", "depthwise2d", "gate2d", "stem2d", "embedding")


def double(net, args):
    with torch.no_grad():
        return copy.deepcopy(net).double()(*(a.double() if a.is_floating_point() else a for a in args))


def error(y, truth):
    return float((y.double() - truth).norm() / truth.norm())


def operators(fast):
    graph = fast.runner.inner.graph
    return Counter(str(n.target).removesuffix(".default") for n in graph.nodes if n.op == "call_function")


def own(fast):
    counts = operators(fast)
    return tuple(counts[f"voxtune.{name}"] for name in OWN)


def rewritten(net, args, *names):
    torch.manual_seed(0)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.3)
    net.eval()
    fast = build(net, args, None, Plan.of(*(names or REWRITING)), twin=True)
    with torch.no_grad():
        assert error(fast(*args), double(net, args)) < 1e-5
    return fast


@pytest.mark.parametrize("half", [False, True])
def test_a_convnext_block_is_three_operators(half):
    net, args = make("convnext")
    names = ("bf16", *REWRITING) if half else REWRITING
    fast = build(net, args, None, Plan.of(*names), twin=True)
    # Eleven blocks of three; two Downs, two Ups or convolutions of their levels; four gates.
    assert own(fast) == (26, 11, 4, 1, 1)
    counts = operators(fast)
    assert counts["voxtune.pointwise"] == 1, "the last layer"
    left = {name for name in counts if name.startswith("aten")} - {"aten.unsqueeze", "aten.reshape"}
    assert left <= {"aten.split_with_sizes"}
    with torch.no_grad():
        assert error(fast(*args), double(net, args)) < (2e-2 if half else 1e-5)


def test_new_weights_are_packed_again():
    net, args = make("convnext")
    fast = build(net, args, None, Plan.of(*REWRITING), twin=True)
    with torch.no_grad():
        before = fast(*args)
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        truth = double(net, args)
        assert error(before, truth) > 1e-2 and error(fast(*args), truth) < 1e-5


def test_the_graph_is_saved(tmp_path):
    net, args = make("convnext")
    fast = build(net, args, None, Plan.of("bf16", *REWRITING), twin=True)
    save_graph(tmp_path / "a.graph", fast)
    loaded = load_graph(tmp_path / "a.graph", torch.device("cpu"))
    assert loaded is not None
    with torch.no_grad():
        assert torch.equal(loaded[0](*args), fast(*args))


class Sums(nn.Module):
    """Convolutions added to each other, in every order, with activations and addends per channel."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(16, 24, 3, padding="same", bias=False)
        self.narrow, self.wide = nn.Conv2d(24, 32, 1), nn.Conv2d(24, 32, 3, padding=1)
        self.narrow2, self.wide2 = nn.Conv2d(48, 32, 1), nn.Conv2d(32, 32, 3, padding=1)
        self.first, self.second = nn.Conv2d(32, 16, 1), nn.Conv2d(32, 16, 1)
        self.offset = nn.Linear(5, 32)

    def forward(self, x, c):
        y = F.relu(self.a(x) + self.b(x))
        short = self.narrow(y)
        z = self.wide(y) + self.offset(c)[:, :, None, None] + short
        z = F.silu(self.wide2(z)) + self.narrow2(torch.cat([x, z], 1))
        return self.first(z) + self.second(F.gelu(z, approximate="tanh"))


def test_convolutions_that_are_added():
    fast = rewritten(Sums(), (torch.randn(2, 16, 8, 8), torch.randn(2, 5)))
    # The first of two takes the sum; a 1x1 convolution becomes part of the other one, except after an activation.
    assert own(fast) == (6, 0, 0, 0, 0)
    counts = operators(fast)
    assert counts["aten.add.Tensor"] == 0 and counts["aten.cat"] == 0


class Resolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(16, 16, 2, 2), nn.Conv2d(64, 16, 1), nn.Conv2d(16, 16, 3, 2, 1)])
        self.up, self.last = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(32, 8, 1)
        self.valid, self.wide = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 5, padding=2)
        self.dilated = nn.Conv2d(16, 16, 3, padding=2, dilation=2)

    def forward(self, x):
        y = self.down[0](x)
        y = y + F.interpolate(self.down[2](self.down[1](F.pixel_unshuffle(x, 2))), scale_factor=2.0)
        doubled = F.interpolate(y, scale_factor=2.0)
        # Left as they are: a convolution without padding, 5x5, dilation.
        return self.last(torch.cat([self.up(doubled), doubled], 1)).mean() + (
            F.interpolate(self.valid(self.wide(self.dilated(x))), size=x.shape[2:])
        )


def test_changes_of_resolution():
    fast = rewritten(Resolutions(), (torch.randn(1, 16, 16, 16),), "cleanup", "small_images")
    counts = operators(fast)
    # An upsampling with two readers, or that no convolution reads, stays.
    assert own(fast)[0] == 5
    assert counts["aten.pixel_unshuffle"] == 0
    assert counts["aten.conv2d"] == 3


class Norms(nn.Module):
    """One norm after a depthwise convolution that folds, and several that do not."""

    def __init__(self):
        super().__init__()
        self.deep = nn.ModuleList(nn.Conv2d(16, 16, k, padding=k // 2, groups=16, bias=k > 3) for k in (3, 5, 7))
        self.norms = nn.ModuleList(nn.GroupNorm(g, 16, eps=1e-3) for g in (1, 1, 4, 1))
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, k, padding=k // 2) for k in (1, 3, 3, 3))
        self.plain = nn.GroupNorm(1, 16, affine=False)

    def forward(self, x):
        y = self.convs[0](self.norms[0](self.deep[0](x)))
        twice = self.norms[1](self.deep[1](y))
        y = self.convs[1](twice) + twice
        y = self.convs[2](self.norms[2](self.deep[2](y)))
        y = self.convs[3](F.gelu(self.norms[3](y)))
        return self.plain(y)


def test_only_norms_of_one_group_and_one_reader_fold():
    net, args = Norms(), (2 + torch.randn(2, 16, 8, 4),)
    fast = rewritten(net, args, "cleanup", "small_images")
    assert own(fast)[:2] == (4, 3)
    assert "1 norms" in fast.notes["small_images"]
    assert operators(fast)["aten.group_norm"] == 4


class Gates(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_x, self.of_skip = (nn.ModuleList(nn.Conv2d(c, 20, 1, bias=False) for _ in range(3)) for c in (24, 16))
        self.logit, self.many = nn.Conv2d(20, 1, 1, bias=False), nn.Conv2d(20, 16, 1)

    def forward(self, x, skip):
        hidden = [F.relu(b(skip) + a(x)) for a, b in zip(self.of_x, self.of_skip, strict=True)]
        gated = skip * self.logit(hidden[0]).sigmoid()
        # One value per channel, and a gate of another image.
        other = self.many(hidden[1]).sigmoid() * skip
        return gated + self.logit(hidden[2]).sigmoid() * other


def test_gates():
    fast = rewritten(Gates(), (torch.randn(2, 24, 4, 8), torch.randn(2, 16, 4, 8)), "cleanup", "small_images")
    assert own(fast)[2] == 1
    assert operators(fast)["aten.sigmoid"] == 2


class Edges(nn.Module):
    """A stem and a time network, on times or on what `waves` makes of them."""

    def __init__(self, activations=(F.silu, F.silu), hidden=24, waves=None):
        super().__init__()
        self.waves = waves
        self.layers = nn.ModuleList([nn.Linear(6, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 16)])
        self.stem, self.activations = nn.Conv2d(2, 16, 5, padding=2), activations

    def forward(self, x, t):
        t = t if self.waves is None else self.waves(t).to(x.dtype)
        for layer, activation in zip(self.layers, (*self.activations, lambda t: t), strict=True):
            t = activation(layer(t))
        return self.stem(x) * t[:, :, None, None]


def cosines_first(t):
    angle = torch.tensor([0.5, 1.0, 2.0]) * t[:, None].float()
    return torch.cat([angle.cos(), angle.sin()], -1)


def two_angles(t):
    angle = t[:, None] * torch.tensor([0.5, 1.0, 2.0])
    return torch.cat([angle.sin(), (2 * angle).cos()], 1)


@pytest.mark.parametrize(("waves", "matches"), [(cosines_first, True), (two_angles, False)])
def test_sines_and_cosines_of_times(waves, matches):
    fast = rewritten(Edges(waves=waves), (torch.randn(2, 2, 12, 12), torch.tensor([7, 400])))
    assert own(fast)[-1] == 1
    counts = operators(fast)
    assert (counts["aten.sin"] == counts["aten.cat"] == 0) == matches


@pytest.mark.parametrize(
    ("net", "count"),
    [(Edges(), 1), (Edges((F.silu, F.relu)), 0), (Edges((F.silu, torch.sin)), 0), (Edges(hidden=300), 0)],
)
def test_stem_and_time_network(net, count):
    fast = rewritten(net, (torch.randn(2, 2, 12, 12), torch.randn(2, 6)))
    assert own(fast) == (0, 0, 0, 1, count)


def test_large_convolutions_stay_with_cudnn_unless_a_norm_folds():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.plain = nn.Conv2d(16, 64, 3, padding=1)
            self.deep, self.norm = nn.Conv2d(64, 64, 7, padding=3, groups=64), nn.GroupNorm(1, 64)
            self.folded = nn.Conv2d(64, 16, 3, padding=1)

        def forward(self, x):
            return self.folded(self.norm(self.deep(self.plain(x))))

    fast = rewritten(Large(), (torch.randn(1, 16, 136, 136),), "cleanup", "small_images")
    assert own(fast)[:2] == (1, 1)
    assert operators(fast)["aten.conv2d"] == 1
