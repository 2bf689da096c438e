"""In-place writes into views: cleanup resolves what functionalisation makes of them, and the result stays the same to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from voxtune.plan.build import build
from voxtune.plan.graph import capture
from voxtune.plan.plan import Plan

SCATTERS = ("slice_scatter", "select_scatter", "copy")


class Network(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x * 1.5)


def first_half(x):
    x[:, :4].mul_(2)
    return x


def chunk(x):
    x.chunk(2, 1)[0].relu_()
    return x.sigmoid()


def uneven_chunk(x):
    a, b, c = x.chunk(3, 1)
    c.mul_(3)
    a.add_(b)
    return x, a * b, c


def one_channel(x):
    x[:, 1].add_(1)
    return x


def gate(x):
    a, b = x.chunk(2, 1)
    a.mul_(b.sigmoid_())
    return a


def gate_that_is_read_whole(x):
    a, b = x.chunk(2, 1)
    a.mul_(b.sigmoid_())
    return a + x[:, 4:], x


def other_halves(x):
    a, b = x.chunk(2, 1)
    a.mul_(b)
    return a + x[:, 4:] + x[:, 2:6]


def three_parts(x):
    a, b, c = x.split([2, 2, 4], 1)
    a.add_(b)
    b.sigmoid_()
    c.relu_()
    return a * b, c


def within_a_view(x):
    a = x[:, :4]
    a.mul_(2)
    a[:, 1:3].add_(1)
    return a, x[:, 2:], x[:, -7:-5]


def two_dimensions(x):
    x[:, :, 1:3, 2:5].mul_(2)
    return x, x[:, :, 1:3], x[:, :, 1:3, 2:5] + 1


def every_other(x):
    x[:, ::2].mul_(2)
    return x, x[:, ::2] + 1, x[:, 1::2] + 2, x[:, 4], x[:, 3], x[:, 2:7:4]


def of_every_other(x):
    x[:, ::2].mul_(2)
    x[:, 1::2].add_(1)
    return x[:, 2:7:4], x[:, 3:6:2] * 2


def unbound(x):
    a, b = x.unbind(1)[:2]
    a.add_(b)
    return x.sum(1) + a, x[:, :1] * 2, x[:, 1:2]


def assigned(x):
    x[:, :4] = x[:, 4:] * 2
    x[:, -1] = x[:, 0] + 1
    return x


def every_channel(x):
    for i in range(8):
        x[:, i] = x[:, i - 1] * i
    return x


def overwritten_twice(x):
    x[:, 2:6].mul_(2)
    x[:, 3:5].add_(1)
    x[:, 5:].relu_()
    x[:, 3].exp_()
    return x, x[:, 2:6] + 0.5


def everything(x):
    x[:, 0:8].mul_(2)
    x[:].add_(1)
    return x, x[:, 3]


def nothing(x):
    x[:, 4:4].mul_(2)
    return x


def transposed(x):
    x.transpose(1, 2)[:, 2:].mul_(3)
    return x


def broadcast(x):
    x[:, :4] = x[:, 4:5]
    return x


GONE = [
    *(first_half, chunk, uneven_chunk, one_channel, gate, gate_that_is_read_whole, other_halves, three_parts),
    *(within_a_view, two_dimensions, of_every_other, unbound, assigned, every_channel, overwritten_twice, everything),
    *(nothing, transposed),
]


def names(fast):
    return [str(n.target) for n in fast.runner.inner.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("function", [*GONE, every_other, broadcast], ids=lambda f: f.__name__)
def test_writes_into_views(function):
    net, x = Network(function).eval(), torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
    assert any("scatter" in str(n.target) for n in capture(net, (x,)).graph.nodes)
    fast = build(net, (x,), None, Plan.of("cleanup"))
    left = [name for name in names(fast) if any(f"{word}." in name for word in SCATTERS)]
    if function in GONE:
        assert not left, left
    expected, result = net(x.clone()), fast(x)
    for y, z in zip(*((r if isinstance(r, tuple) else (r,)) for r in (expected, result)), strict=True):
        assert torch.equal(y, z)


def test_a_gate_reads_halves_and_copies_nothing():
    fast = build(Network(gate).eval(), (torch.randn(2, 8, 6, 6),), None, Plan.of("cleanup"))
    assert not [name for name in names(fast) if "scatter" in name or "cat" in name]
    assert names(fast).count("aten.mul.Tensor") == 2


def test_channels_of_a_loop_become_one_concatenation():
    fast = build(Network(every_channel).eval(), (torch.randn(2, 8, 6, 6),), None, Plan.of("cleanup"))
    assert [name for name in names(fast) if "cat" in name] == ["aten.cat.default"]


def test_gated_network_keeps_its_result_in_half_precision():
    from tests.factories.in_place import Gated

    torch.manual_seed(0)
    net, x = Gated(8, 2).eval(), torch.randn(1, 2, 4, 5, 6)
    with torch.no_grad():
        truth = copy.deepcopy(net).double()(x.double())
    for plan, limit in ((Plan.of("cleanup"), 1e-6), (Plan.of("cleanup", "bf16", "channels_last"), 2e-2)):
        fast = build(net, (x,), None, plan)
        assert not [name for name in names(fast) if "scatter" in name]
        assert (fast(x).double() - truth).norm() / truth.norm() < limit
