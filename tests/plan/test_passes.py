"""Every pass keeps what is computed, on the workloads and on networks of other libraries."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.factories.networks import EVERY_NETWORK, NETWORKS, REWRITING, make
from voxtune.plan.api import CPU_READY, READY
from voxtune.plan.build import build
from voxtune.plan.gate import volume_of
from voxtune.plan.graph import argument, capture
from voxtune.plan.passes import BY_NAME, PASSES, Context, Pass, PassStage, precision_of, select
from voxtune.plan.plan import Plan
from voxtune.plan.tuner import BASELINE, CPU_LADDER, GPU_LADDER
from voxtune.precision import tf32_allowed

# How often each pass matches.
MATCHES = {
    "med_ddpm": {"sdpa": 4, "fuse_norm": 21, "upsample": 1, "edges": 2, "conv3d": 17, "strided": 1, "pointwise": 5},
    "monai_3d": {"sdpa": 4, "fuse_norm": 21, "doubling": 1, "edges": 2, "conv3d": 16, "strided": 1, "pointwise": 5},
    "monai_2d": {"sdpa": 4, "small_images": 21, "fuse_norm": 25, "upsample": 1, "edges": 2},
    "diffusers_2d": {"small_images": 19, "fuse_norm": 21, "edges": 2},
    "diffusers_3d": {"fuse_norm": 58, "doubling": 1, "edges": 2, "conv3d": 32, "epilogue": 11, "pointwise": 5},
    "convnext": {"small_images": 43, "pointwise": 1},
}
# The same without `small_images`, which takes most of a small 2D network: larger images are rewritten by other passes.
LARGER = {
    "monai_2d": {"sdpa": 4, "fuse_norm": 25, "doubling": 1, "upsample": 1, "edges": 2, "epilogue": 14, "pointwise": 5},
    "diffusers_2d": {"fuse_norm": 21, "doubling": 1, "edges": 2, "epilogue": 11, "pointwise": 5},
    "convnext": {"fuse_norm": 22, "doubling": 1},
}


def truth_of(net, args):
    wide = make_double(net)
    with torch.no_grad(), tf32_allowed(False):
        return volume_of(wide(*(a.double() if a.is_floating_point() else a for a in args)))


def make_double(net):
    return copy.deepcopy(net).double()


def error(y, truth):
    return float((y.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("name", [*[*NETWORKS][:-1], pytest.param([*NETWORKS][-1], marks=pytest.mark.slow)])
def test_all_rewritings_keep_the_network(name):
    net, args = make(name)
    truth = truth_of(net, args)
    for left_out, matches in (("", MATCHES[name]), ("small_images", LARGER.get(name))):
        if matches is None:
            continue
        fast = build(net, args, None, Plan.of(*(n for n in REWRITING if n != left_out)), twin=True)
        assert error(volume_of(fast(*args)), truth) < 5e-6
        for passed, count in matches.items():
            assert fast.notes[passed].startswith(f"applied {count} x"), (passed, fast.notes[passed])


@pytest.mark.parametrize("name", EVERY_NETWORK)
@pytest.mark.parametrize("half", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_half_precision_errs_like_autocast(name, half):
    net, args = make(name)
    truth = truth_of(net, args)
    fast = build(net, args, None, Plan.of(half, *REWRITING), twin=True)
    dtype = torch.bfloat16 if half == "bf16" else torch.float16
    with torch.no_grad(), torch.autocast("cpu", dtype):
        plain = error(volume_of(net(*args)), truth)
    y = volume_of(fast(*args))
    assert y.dtype == torch.float32
    assert error(y, truth) < 1.5 * plain


FUSED = {
    *("channels_last", "cleanup", "sdpa", "time", "fuse_norm", "epilogue", "pointwise", "doubling", "upsample"),
    *("elementwise", "cudnn_benchmark"),
}


def test_ready_plans_and_ladders_follow_from_the_flags_of_passes():
    assert [set(plan.names) for plan in READY] == [
        {"bf16", *FUSED, "edges", "conv3d", "strided", "small_images", "cuda_graph"},
        {"bf16", *FUSED, "cuda_graph"},
        {"bf16", *FUSED},
        {"tf32", *FUSED},
        {"tf32"},
    ]
    assert [plan.names for plan in CPU_READY] == [("cleanup", "sdpa", "time", "channels_last")]
    assert BASELINE.names == ("strict",)
    assert [set(rung.add) for rung in GPU_LADDER] == [
        {"tf32"},
        {"strict", "channels_last"},
        {"tf32", "channels_last"},
        {"bf16"},
        {"bf16", "channels_last", "cleanup", "compile"},
        {"bf16", "channels_last", "cleanup", "sdpa", "time", "fuse_norm"},
        {"cudnn_benchmark"},
        {"epilogue", "pointwise", "doubling", "upsample", "elementwise"},
        {"edges"},
        {"conv3d", "strided", "small_images"},
        {"cuda_graph"},
        {"epilogue", "pointwise", "doubling", "upsample", "elementwise"},
    ]
    assert [rung.competes for rung in GPU_LADDER] == [False] * 11 + [True]
    assert [rung.add for rung in CPU_LADDER] == [
        ("cleanup", "sdpa", "time"),
        ("channels_last",),
        ("cleanup", "compile"),
        ("cleanup", "sdpa", "time", "channels_last", "compile"),
        ("cleanup", "sdpa", "time", "bf16", "channels_last"),
        ("heap",),
    ]


def test_flags_of_passes():
    assert {p.name for p in PASSES if p.structural} == set(REWRITING) - {"channels_last"}
    assert {p.name for p in PASSES if not p.exact} == {"tf32", "bf16", "fp16"}
    names = {p.name for p in PASSES}
    assert all(set(p.excludes) | set(p.requires) <= names for p in PASSES)
    for plan, precision in {("strict", "bf16"): "bf16", ("tf32",): "tf32", ("cleanup",): "fp32"}.items():
        assert precision_of(plan) == precision


def test_a_new_pass_joins_the_plans_of_its_stage(monkeypatch):
    extra = Pass(name="extra", summary="for this test", stage=PassStage.FUSION)
    monkeypatch.setattr("voxtune.plan.passes.PASSES", (*PASSES, extra))
    assert select(PassStage.FUSION) == ("doubling", "upsample", "pointwise", "epilogue", "elementwise", "extra")
    assert select("bf16", PassStage.FUSION)[0] == "bf16"


@pytest.fixture(scope="module")
def captured_network():
    """(captured graph, inputs, their result in float64)"""
    net, args = make("med_ddpm")
    return capture(net, args), args, truth_of(net, args)


@pytest.mark.parametrize("alone", REWRITING)
def test_each_pass_alone_keeps_the_network(captured_network, alone):
    captured, args, truth = copy.deepcopy(captured_network)
    plan = (
        Plan.of("cleanup", "fuse_norm", "channels_last", alone)
        if alone not in ("cleanup", "fuse_norm", "channels_last")
        else Plan.of(alone)
    )
    context = Context(torch.device("cpu"), plan.names, twin=True)
    for name in (p for p in BY_NAME if p in plan.names):
        BY_NAME[name].rewrite(captured, context, {})
    with torch.no_grad():
        assert error(captured.module(*args), truth) < 5e-6


class Blocks(nn.Module):
    """Patterns and their near misses."""

    def __init__(self):
        super().__init__()
        self.a = nn.Conv3d(16, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 32, eps=1e-3)
        self.b = nn.Conv3d(32, 16, 3, padding=1)
        self.c = nn.Conv3d(16, 16, 3, padding=1, stride=2)
        self.plain = nn.GroupNorm(4, 16, affine=False)
        self.time = nn.Linear(8, 16)

    def forward(self, x, t):
        shift = self.time(t)[:, :, None, None, None]
        h = self.a(x) + shift
        both = torch.cat([h, x], dim=1)
        n = self.norm(both)
        y = self.b(F.silu(n)) + x  # the residual is the input
        y = y + n[:, :16]  # the norm before its SiLU has another user: they may not be fused
        return self.c(self.plain(y))


def test_near_misses_are_left_alone():
    torch.manual_seed(0)
    net = Blocks().eval()
    args = (torch.randn(2, 16, 4, 6, 8), torch.randn(2, 8))
    fast = build(net, args, None, Plan.of(*REWRITING), twin=True)
    truth = net.double()(*(a.double() for a in args))
    net.float()
    assert error(fast(*args), truth) < 5e-6
    targets = [n.target for n in fast.runner.inner.graph.nodes if n.op == "call_function"]
    norms = [n for n in fast.runner.inner.graph.nodes if n.target is torch.ops.voxtune.norm_act.default]
    assert [argument(n, "activation") for n in norms] == ["none", "none"]
    assert torch.ops.aten.silu.default in targets, "a norm whose plain result is used keeps its SiLU apart"
    assert [len(argument(n, "sources")) for n in norms] == [2, 1], "the concatenation is read as two sources"
    assert torch.ops.aten.group_norm.default not in targets, "a norm without weights is fused with ones and zeros"
    own = [n for n in fast.runner.inner.graph.nodes if n.target is torch.ops.voxtune.conv3d.default]
    assert [bool(n.args[3]) for n in own] == [False, True], "the second convolution takes the residual"


class Windows(nn.Module):
    """Convolutions over two sources, of other kernels and with other paddings, and their near misses."""

    def __init__(self):
        super().__init__()
        self.joined = nn.Conv3d(24, 16, 3, padding=1)
        self.causal = nn.Conv3d(16, 16, 3)
        self.partly = nn.Conv3d(16, 16, (3, 1, 3), padding=(1, 0, 0))
        self.plane = nn.Conv3d(16, 8, (1, 3, 3), padding="same")
        self.line = nn.Conv3d(8, 16, (3, 1, 1))
        self.valid = nn.Conv3d(16, 16, 3)
        self.odd = nn.Conv3d(20, 16, 3, padding=1)

    def forward(self, x, skip):
        y = self.joined(torch.cat([x, skip], dim=1))
        y = self.causal(F.pad(y, (1, 1, 1, 1, 2, 0)))
        y = y + self.partly(F.pad(y, (2, 0)))  # the residual has the size of the result
        y = self.line(F.pad(self.plane(y), (0, 0, 0, 0, 2, 0)))
        y = self.odd(torch.cat([y, y[:, :4]], dim=1))  # 20 channels
        y = self.valid(F.pad(y, (1, 1, 1, 1, 1, 1), mode="replicate"))
        y = self.valid(F.pad(y, (1, 1, 1, 1, 1, 1), value=1.0))
        y = self.valid(F.pad(y, (-1, 3, 1, 1, 1, 1)))
        return self.joined(F.pad(y, (0, 0, 0, 0, 0, 0, 4, 4)))


def test_convolutions_of_two_sources_and_any_padding():
    torch.manual_seed(0)
    net, args = Windows().eval(), (torch.randn(2, 16, 4, 6, 7), torch.randn(2, 8, 4, 6, 7))
    truth = truth_of(net, args)
    fast = build(net, args, None, Plan.of("cleanup", "conv3d", "channels_last"), twin=True)
    assert error(fast(*args), truth) < 5e-6
    assert fast.notes["conv3d"] == "applied 9 x (20 channels, not a multiple of 8)"
    own = [n for n in fast.runner.inner.graph.nodes if n.target is torch.ops.voxtune.conv3d.default]
    assert [len(n.args[0]) for n in own] == [2, *[1] * 8], "the concatenation is read as two sources"
    around, none = [1] * 6, [0] * 6
    windows = [((3, 3, 3), around), ((3, 3, 3), [2, 0, 1, 1, 1, 1]), ((3, 1, 3), [1, 1, 0, 0, 2, 0])]
    windows += [((1, 3, 3), [0, 0, 1, 1, 1, 1]), ((3, 1, 1), [2, 0, 0, 0, 0, 0]), *[((3, 3, 3), none)] * 3]
    windows += [((3, 3, 3), around)]
    assert [(tuple(argument(n, "kernel")), argument(n, "padding")) for n in own] == windows
    assert [n.args[3] is not None for n in own] == [False, False, True, *[False] * 6]


def test_convolutions_of_groups_or_strides_are_left():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.grouped = nn.Conv3d(16, 16, 3, padding=1, groups=2)
            self.wide = nn.Conv3d(16, 16, 5, padding=2)
            self.strided = nn.Conv3d(16, 16, 3, padding=1, stride=(1, 2, 2))
            self.dilated = nn.Conv3d(16, 16, 3, padding=2, dilation=2)

        def forward(self, x):
            return self.dilated(self.strided(self.wide(self.grouped(x))))

    net, args = Net().eval(), (torch.randn(1, 16, 4, 6, 8),)
    fast = build(net, args, None, Plan.of("cleanup", "conv3d", "channels_last"), twin=True)
    assert fast.notes["conv3d"].startswith("no effect: a kernel of extents (5, 5, 5)")


def test_statistics_go_from_convolution_to_norm():
    net, args = make("med_ddpm")
    fast = build(net, args, None, Plan.of(*REWRITING), twin=True)
    norms = [n for n in fast.runner.inner.graph.nodes if n.target is torch.ops.voxtune.norm_act.default]
    given = [s for n in norms for s in argument(n, "statistics") if s.op == "call_function"]
    assert all(s.target is operator.getitem and s.args[1] == 1 for s in given)
    assert len(given) > len(norms) / 2


@pytest.mark.parametrize("form", ["ncl", "heads", "matmul", "bmm_scaled"])
def test_attention_of_any_form_is_found(form):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, dim=-1)  # (N, L, C)
            if form == "ncl":
                w = torch.einsum("ncl,ncm->nlm", q.mT * 0.5, k.mT * 0.5).softmax(-1)
                return torch.einsum("nlm,ncm->ncl", w, v.mT)
            if form == "heads":
                q, k, v = (a.unflatten(-1, (2, 8)).permute(0, 2, 1, 3) for a in (q, k, v))
                w = (torch.einsum("bhxd,bhyd->bhxy", q, k) * 8**-0.5).softmax(dim=-1)
                return torch.einsum("bhxy,bhyd->bhxd", w, v)
            if form == "matmul":
                w = torch.softmax(torch.matmul(q, k.transpose(1, 2)) / 4, dim=2)
                return torch.matmul(w, v)
            w = torch.bmm(q * 0.25, k.transpose(1, 2)).softmax(-1, dtype=torch.float32)
            return torch.bmm(w, v)

    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(2, 5, 16)
    fast = build(net, (x,), None, Plan.of("cleanup", "sdpa"))
    assert fast.notes["sdpa"] == "applied 1 x"
    with torch.no_grad():  # the last form insists on float32
        assert error(fast(x), net(x).double()) < 5e-6


def test_attention_whose_weights_are_looked_at_is_left():
    class Net(nn.Module):
        def forward(self, q, k, v):
            w = torch.bmm(q, k.transpose(1, 2)).softmax(-1)
            return torch.bmm(w, v), w

    args = tuple(torch.randn(2, 5, 16) for _ in range(3))
    fast = build(Net().eval(), args, None, Plan.of("cleanup", "sdpa"))
    assert fast.notes["sdpa"].startswith("no effect")


@pytest.mark.parametrize("seen_again", [False, True])
def test_networks_that_write_in_place(seen_again):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(16, 16, 3, padding=1)
            self.norm = nn.GroupNorm(4, 16)

        def forward(self, x):
            h = self.conv(x)
            kept = h.clone()
            y = F.silu(self.norm(h), inplace=True)
            if seen_again:
                view = h.flatten(2)
                h.add_(1.0)
                return view.view(x.shape) + kept
            h.add_(1.0)
            return y + kept + h

    torch.manual_seed(0)
    net, x = Net().eval(), torch.randn(1, 16, 8, 8)
    with torch.no_grad():
        truth = net(x).double()
    fast = build(net, (x,), None, Plan.of(*REWRITING), twin=True)
    assert error(fast(x), truth) < 1e-6
    assert "capture" not in fast.notes


def test_a_golden_network_gives_its_golden_answer(golden):
    net, g = golden
    net.eval()
    args = (g["x_t"], g["t"], g["cond"])
    fast = build(net, args, None, Plan.of(*REWRITING), twin=True)
    assert error(fast(*args), g["eps_pred"].double()) < 1e-5


def test_the_memory_format_stays_where_own_kernels_take_every_convolution():
    """Without it, their passes would not apply when the plan is built again: for another size, or from a file."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv3d(16, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv3d(16, 16, 3, padding=1)
    )
    x = torch.randn(1, 16, 4, 4, 4)
    fast = build(net.eval(), (x,), None, Plan.of(*REWRITING), twin=True)
    assert fast.notes["conv3d"] == "applied 2 x" and "channels_last" in fast.plan.names
    again = build(net, (torch.randn(2, 16, 6, 4, 4),), None, fast.plan, twin=True)
    assert again.notes["conv3d"] == "applied 2 x" and again.notes["fuse_norm"] == "applied 1 x"
    assert again.plan == fast.plan
    # Without kernels that read it, the pass that found nothing to do is dropped.
    assert "channels_last" not in build(nn.Linear(4, 4).eval(), (x[..., 0, :],), None, fast.plan, twin=True).plan.names
