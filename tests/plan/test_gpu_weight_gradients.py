"""Weight gradients on a real GPU: each shape by the faster method, which is remembered for the card and used."""

from __future__ import annotations

import json
import logging
import math
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import voxtune
from voxtune.kernels import conv3d_weight_gradient as wg
from voxtune.kernels.measured_tiles import card
from voxtune.plan import Plan
from voxtune.plan import weight_gradients as measured
from voxtune.plan.training import training_network, training_passes
from voxtune.plan.weight_gradients import gradient_shapes, measure_weight_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Measurements: run pytest with --log-cli-level=INFO.
log = logging.getLogger("voxtune")
CUDA = torch.device("cuda")


class Net(nn.Module):
    """64 channels at the input's size and 128 at half of it, with two sources in between."""

    def __init__(self):
        super().__init__()
        self.stem, self.down = nn.Conv3d(1, 64, 3, padding=1), nn.Conv3d(64, 128, 3, stride=2, padding=1)
        self.wide, self.deep = nn.Conv3d(64, 64, 3, padding=1), nn.Conv3d(128, 128, 3, padding=1)
        self.both, self.head = nn.Conv3d(192, 64, 3, padding=1), nn.Conv3d(64, 2, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, c) for c in (64, 64, 128, 128, 64))

    def forward(self, x):
        a = self.wide(F.silu(self.norms[0](self.stem(x))))
        d = self.deep(F.silu(self.norms[2](self.down(F.silu(self.norms[1](a))))))
        u = F.interpolate(F.silu(self.norms[3](d)), scale_factor=2, mode="nearest")
        return self.head(F.silu(self.norms[4](self.both(torch.cat([u, a], dim=1)))))


@pytest.fixture(autouse=True)
def _own_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "_loaded", set())
    wg.forget()
    torch.manual_seed(0)
    yield
    wg.forget()


def network_and_inputs(side=32):
    net, args = Net().cuda(), (torch.randn(1, 1, side, side, side, device=CUDA),)
    return training_network(net, args, {}, Plan.of(*training_passes("bf16"))), args


def methods_used(network, args, monkeypatch):
    """The methods of the own kernels that one step runs."""
    used, original = [], wg.weight_gradient

    def called(dy, sources, padding, *more, **options):
        used.append((wg.shape_of(dy, sources, padding).key, "hopper" if options.get("hopper") else "triton"))
        return original(dy, sources, padding, *more, **options)

    with monkeypatch.context() as patch:
        patch.setattr(wg, "weight_gradient", called)
        gradient_shapes(network, list(network.parameters()), args, {})
    return dict(used)


def test_answers_are_stored_and_used(monkeypatch):
    network, args = network_and_inputs()
    times = measure_weight_gradients(network, args)
    shapes = gradient_shapes(network, list(network.parameters()), args, {})
    log.info("\n".join(t.describe() for t in times))
    assert len(shapes) >= 2 and {t.key for t in times} == set(shapes)
    entries = json.loads(measured.TABLE.path(CUDA).read_text())["times"]
    assert entries.keys() == set(shapes)
    faster = {key: e["own"] for key, e in entries.items() if e["own_ms"] < e["cudnn_ms"]}
    assert methods_used(network, args, monkeypatch) == faster
    started = time.monotonic()
    assert measure_weight_gradients(network, args) == [], "measured again"
    assert time.monotonic() - started < 1.0
    # Another process reads the file; here the other answer for each shape.
    turned = {k: {**e, "own_ms": e["cudnn_ms"], "cudnn_ms": e["own_ms"]} for k, e in entries.items()}
    measured.TABLE.add(CUDA, turned)
    wg.forget()
    monkeypatch.setattr(measured, "_loaded", set())
    measured.load_weight_gradients(CUDA)
    assert methods_used(network, args, monkeypatch) == {k: e["own"] for k, e in entries.items() if k not in faster}


def test_measured_times_are_those_of_a_step():
    """The chosen methods are at most as slow as either method alone, over all shapes."""
    network, args = network_and_inputs(48)
    times = measure_weight_gradients(network, args)
    chosen = math.fsum(min(t.own_ms, t.cudnn_ms) for t in times)
    log.info(
        f"chosen {chosen:.3f} ms, own {sum(t.own_ms for t in times):.3f}, cuDNN {sum(t.cudnn_ms for t in times):.3f}"
    )
    assert times and all(1e-3 < t.own_ms < 50 and 1e-3 < t.cudnn_ms < 50 for t in times)


def test_deterministic_runs_keep_the_rule():
    network, args = network_and_inputs(16)
    torch.use_deterministic_algorithms(True)
    try:
        assert measure_weight_gradients(network, args) == []
    finally:
        torch.use_deterministic_algorithms(False)
    assert not measured.TABLE.path(CUDA).exists()


@pytest.mark.parametrize("method", ["own", "cudnn"])
def test_gradients_are_right_by_either_method(method):
    network, args = network_and_inputs()
    shapes = gradient_shapes(network, list(network.parameters()), args, {})
    own = {k: wg.own_method(*s.tensors(CUDA), s.padding) for k, s in shapes.items()}
    wg.use(card(CUDA), own if method == "own" else dict.fromkeys(shapes, "cudnn"))
    y = network(*args)
    start = torch.randn_like(y)
    mine = torch.autograd.grad(y, list(network.parameters()), start)
    wide = Net().cuda().double()
    wide.load_state_dict(network.original.state_dict())
    truth = torch.autograd.grad(wide(args[0].double()), list(wide.parameters()), start.double())
    gap = sum(float((a.double() - b).square().sum()) for a, b in zip(mine, truth, strict=True))
    assert math.sqrt(gap / sum(float(b.square().sum()) for b in truth)) < 3e-2


def test_optimize_measures_them_for_training():
    torch.manual_seed(0)
    net, args = Net().cuda(), (torch.randn(1, 1, 96, 96, 96, device=CUDA),)
    started = time.monotonic()
    fast = voxtune.optimize(net, args, precision="bf16", train=True)
    log.info(f"{time.monotonic() - started:.1f} s\n{fast.report()}")
    assert fast.plan.names, fast.report()
    # The shapes at 96^3 belong to the own kernel without a measurement.
    keys = json.loads(measured.TABLE.path(CUDA).read_text())["times"]
    assert any(k.startswith("1 48 48 48 ") for k in keys) and not any(k.startswith("1 96 ") for k in keys)
    fast(*args).square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())
