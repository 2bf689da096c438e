"""The passes doubling and strided on each form of their patterns and on near misses, against float64."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.factories.networks import REWRITING
from voxtune.plan.build import build
from voxtune.plan.plan import Plan, Step

ops = torch.ops.voxtune


def run(net, *args, options=None, names=REWRITING):
    """The rewritten network, and its error against float64."""
    net = net.eval()
    plan = Plan(tuple(Step(name, (options or {}).get(name, {})) for name in names))
    fast = build(net, args, None, plan, twin=True)
    with torch.no_grad():
        truth = copy.deepcopy(net).double()(*(a.double() for a in args))
    y = fast(*args)
    return fast, float((y.double() - truth).norm() / truth.norm())


def targets(fast):
    return [n.target for n in fast.runner.inner.graph.nodes if n.op == "call_function"]


def calls(fast, target):
    return [n for n in fast.runner.inner.graph.nodes if n.target is target]


def assert_statistics_are_used(convolution):
    """The norm that reads the result of the operator (result, statistics) receives the statistics too."""
    readers = {}
    for item in convolution.users:
        assert item.target is operator.getitem
        (readers[item.args[1]],) = item.users
    assert convolution.args[-1] is True and readers[0] is readers[1] and "norm" in str(readers[0].target)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def transposed(dimensions, c, k, kernel, stride, **more):
    kind = nn.ConvTranspose3d if dimensions == 3 else nn.ConvTranspose2d
    return kind(c, k, kernel, stride, **more)


@pytest.mark.parametrize(
    ("dimensions", "kernel", "stride", "more"),
    [
        (3, 2, 2, {}),
        (3, 2, 2, {"bias": False}),
        (3, (1, 2, 2), (1, 2, 2), {}),
        (3, 3, 2, {"padding": 1, "output_padding": 1}),
        (3, 3, (1, 2, 2), {"padding": 1, "output_padding": (0, 1, 1)}),
        (3, 4, 2, {"padding": 1}),
        (2, 2, 2, {}),
        (2, 3, 2, {"padding": 1, "output_padding": 1}),
    ],
)
@pytest.mark.parametrize("half", ["fp32", "bf16"])
def test_transposed_convolutions(dimensions, kernel, stride, more, half):
    net = transposed(dimensions, 16, 24, kernel, stride, **more)
    x = torch.randn(2, 16, *(3, 4, 6)[:dimensions])
    fast, error = run(net, x, names=REWRITING if half == "fp32" else (half, *REWRITING))
    assert fast.notes["doubling"].startswith("applied 1 x"), fast.notes
    assert error < (1e-6 if half == "fp32" else 5e-3)
    (node,) = calls(fast, ops.doubling_conv.default)
    assert node.args[5] is False, "no norm reads it"


@pytest.mark.parametrize(
    "net",
    [
        transposed(3, 16, 24, 2, 2, groups=2),
        transposed(3, 16, 24, 3, 2, padding=1),
        transposed(3, 16, 24, 3, 2),
        transposed(3, 16, 24, 3, 1, padding=1),
        transposed(3, 16, 24, 3, 2, padding=2, output_padding=1, dilation=2),
        transposed(3, 16, 20, 2, 2),
        transposed(3, 16, 24, (2, 2, 1), (2, 2, 1)),
        transposed(3, 16, 24, 4, 4),
    ],
)
def test_other_transposed_convolutions_are_left(net):
    fast, error = run(net, torch.randn(1, 16, 3, 4, 6))
    assert error < 1e-6
    assert fast.notes["doubling"].startswith("no effect") and ops.doubling_conv.default not in targets(fast)


def test_a_concatenation_is_read_as_two_sources():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = transposed(3, 24, 16, 3, 2, padding=1, output_padding=1)

        def forward(self, x, y):
            return self.up(torch.cat([x, y], dim=1))

    for widths in ((16, 8), (12, 12)):
        fast, error = run(Net(), *(torch.randn(1, c, 2, 3, 4) for c in widths))
        (node,) = calls(fast, ops.doubling_conv.default)
        assert error < 1e-6 and len(node.args[0]) == (2 if widths == (16, 8) else 1)


class Nearest(nn.Module):
    """norm(conv(nearest(x)) + time), the upsampling in one of its forms."""

    def __init__(self, form, dimensions=3, kernel=3):
        super().__init__()
        self.form = form
        padding = tuple(k // 2 for k in kernel) if isinstance(kernel, tuple) else kernel // 2
        kind = nn.Conv3d if dimensions == 3 else nn.Conv2d
        self.conv, self.norm = kind(16, 32, kernel, padding=padding), nn.GroupNorm(4, 32)

    def forward(self, x, t):
        if self.form == "size":
            up = F.interpolate(x, size=[2 * s for s in x.shape[2:]], mode="nearest")
        elif self.form == "default":
            up = torch.ops.aten.upsample_nearest3d.default(x, [2 * s for s in x.shape[2:]])
        elif self.form == "trilinear":
            up = F.interpolate(x, scale_factor=2, mode="trilinear")
        else:
            up = F.interpolate(x, scale_factor=self.form if isinstance(self.form, tuple) else 2.0, mode="nearest")
        y = F.silu(self.norm(self.conv(up) + t[(..., *[None] * (x.dim() - 2))]))
        return torch.cat([y, up], dim=1) if self.form == "read again" else y


@pytest.mark.parametrize(
    ("form", "dimensions", "kernel"),
    [
        ("scale", 3, 3),
        ("scale", 2, 3),
        ("size", 3, 3),
        ("default", 3, 3),
        ((1.0, 2.0, 2.0), 3, 3),
        ((1.0, 2.0, 2.0), 3, (1, 3, 3)),
    ],
)
def test_nearest_upsampling_is_folded_into_its_convolution(form, dimensions, kernel):
    net = Nearest(form, dimensions, kernel)
    x = torch.randn(2, 16, *(3, 4, 5)[:dimensions])
    fast, error = run(net, x, torch.randn(2, 32), names=[n for n in REWRITING if n != "small_images"])
    assert fast.notes["doubling"].startswith("applied 1 x") and error < 3e-6, (fast.notes, error)
    assert not any("upsample" in str(t) for t in targets(fast))
    assert_statistics_are_used(*calls(fast, ops.doubling_conv.default))


@pytest.mark.parametrize("form", ["trilinear", "read again", (2.1, 2.0, 2.0), (1.0, 2.0, 1.0)])
def test_other_upsampling_is_left(form):
    # PyTorch itself ignores a factor of 2.1 for channels-last volumes on a CPU.
    names = [n for n in REWRITING if n != "channels_last"]
    fast, error = run(Nearest(form), torch.randn(1, 16, 3, 4, 5), torch.randn(1, 32), names=names)
    assert error < 3e-6 and fast.notes["doubling"].startswith("no effect"), fast.notes
    assert (ops.upsample.default in targets(fast)) == (form in ("trilinear", "read again"))


def test_folded_weights_are_rounded_once():
    """In half precision the folded convolution errs as little as a convolution of the upsampled volume."""
    net, args = Nearest("scale"), (torch.randn(1, 16, 6, 6, 6), torch.randn(1, 32))
    errors = [
        run(net, *args, names=[n for n in ("bf16", *REWRITING) if n not in without])[1]
        for without in ((), ("doubling",))
    ]
    assert errors[0] < 1.2 * errors[1]


class Down(nn.Module):
    def __init__(self, **more):
        super().__init__()
        self.conv = nn.Conv3d(16, 32, **({"kernel_size": 3, "stride": 2, "padding": 1} | more))
        self.norm = nn.GroupNorm(4, 32)

    def forward(self, x):
        return F.silu(self.norm(self.conv(x)))


@pytest.mark.parametrize(
    "more",
    [{}, {"bias": False}, {"stride": (1, 2, 2)}, {"kernel_size": (1, 3, 3), "stride": (1, 2, 2), "padding": (0, 1, 1)}],
)
def test_strided_convolutions(more):
    fast, error = run(Down(**more), torch.randn(2, 16, 5, 6, 8))
    assert error < 3e-6 and fast.notes["strided"].startswith("applied 1 x"), fast.notes
    assert_statistics_are_used(*calls(fast, ops.strided_conv.default))


@pytest.mark.parametrize(
    ("more", "voxels"),
    [({}, (4, 5, 8)), ({"groups": 2}, (4, 4, 4)), ({"padding": 0}, (4, 4, 4)), ({"stride": 3}, (6, 6, 6))],
)
def test_other_strided_convolutions_are_left(more, voxels):
    fast, error = run(Down(**more), torch.randn(2, 16, *voxels))
    assert error < 3e-6 and fast.notes["strided"].startswith("no effect"), fast.notes


def test_shapes_that_the_plan_excepts():
    options = {"strided": {"except": [[16, 32, 2, 2, 3]]}, "doubling": {"except": [[16, 24, 8, 8, 12]]}}
    net, x = Down(), torch.randn(1, 16, 4, 4, 6)
    assert run(net, x, options=options)[0].notes["strided"] == "no effect: excepted by the plan"
    up = transposed(3, 16, 24, 2, 2)
    assert run(up, x, options=options)[0].notes["doubling"] == "no effect: excepted by the plan"
    assert run(up, x[..., :4], options=options)[0].notes["doubling"].startswith("applied 1 x")


def test_the_norm_that_follows_is_right_with_the_statistics():
    for net, args in (
        (Down(), (torch.randn(2, 16, 6, 6, 8),)),
        (Nearest("scale"), (torch.randn(2, 16, 3, 3, 4), torch.randn(2, 32))),
    ):
        _, error = run(net, *args, names=("bf16", *REWRITING))
        assert error < 1e-2
