"""Which method computes a weight gradient: timed per shape, remembered for the card, and used."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from torch import nn

from voxtune.kernels import conv3d_weight_gradient as wg
from voxtune.kernels import gradients
from voxtune.plan import Plan
from voxtune.plan import weight_gradients as measured
from voxtune.plan.training import training_network
from voxtune.plan.weight_gradients import faster_methods, gradient_shapes, measure_weight_gradients

CPU = torch.device("cpu")
SIZE = (4, 6, 8)
pytestmark = pytest.mark.usefixtures("one_thread")


class Net(nn.Module):
    """Two convolutions of one shape, and one of two sources."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv3d(8, 8, 3, padding=1), nn.Conv3d(8, 8, 3, padding=1)
        self.both, self.norm = nn.Conv3d(16, 24, 3, padding=1), nn.GroupNorm(2, 8)

    def forward(self, x):
        a = self.first(x)
        b = nn.functional.silu(self.norm(self.second(a)))
        return self.both(torch.cat([a, b], dim=1))


@pytest.fixture(autouse=True)
def _own_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measured, "_loaded", set())
    wg.forget()
    torch.manual_seed(0)
    yield
    wg.forget()


def network_and_input():
    net, x = Net(), torch.randn(2, 8, *SIZE)
    return training_network(net, (x,), {}, Plan.of("bf16", "channels_last", "cleanup", "fuse_norm", "conv3d")), x


@pytest.fixture
def shapes():
    network, x = network_and_input()
    found = gradient_shapes(network, list(network.parameters()), (x,), {})
    assert all(p.grad is None for p in network.parameters()), "gradients belong to the caller"
    return found


def timer_of(times, log=None):
    """A timer that reports these (own, cuDNN) milliseconds one after the other, and calls both once."""
    given = iter(times)

    def timer(own, cudnn, _device, _seconds):
        a, b = own(), cudnn()
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if log is not None:
            log.append(a.shape)
        return next(given)

    return timer


def never(*_):
    raise AssertionError("timed again")


def test_a_step_names_the_shapes_of_its_weight_gradients(shapes):
    assert {(s.channels, s.outputs) for s in shapes.values()} == {((8,), 8), ((8, 8), 24)}
    assert {s.N for s in shapes.values()} == {2} and {s.voxels for s in shapes.values()} == {SIZE}
    assert {s.dtype for s in shapes.values()} == {torch.bfloat16}
    assert "2 4 6 8 8+8 24 1 1 1 1 1 1 bfloat16" in shapes


def test_the_key_says_whether_cudnn_searches(monkeypatch):
    dy = torch.zeros(1, 8, 4, 4, 4)
    plain = wg.shape_of(dy, (dy,), (1,) * 6)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    assert wg.shape_of(dy, (dy,), (1,) * 6).key == f"{plain.key} searched"


def test_random_tensors_of_a_shape_with_uneven_padding():
    shape = wg.GradientShape(2, (4, 6, 8), (8, 16), 24, (2, 0, 1, 1, 0, 2), torch.float32, False)
    dy, sources = shape.tensors(CPU)
    assert wg.shape_of(dy, sources, shape.padding) == shape
    assert wg.why_not(dy.half(), [s.half() for s in sources], (3, 3, 3), shape.padding) is None


def test_both_calls_compute_the_same(shapes):
    for shape in shapes.values():
        dy, sources = shape.tensors(CPU)
        own = wg.weight_gradient_reference(dy, sources, shape.padding)
        other = measured.cudnn_call(shape, dy, sources)()
        torch.testing.assert_close(own.float(), other.float(), rtol=2e-2, atol=2e-1)


@pytest.fixture
def _references(monkeypatch):
    """The kernel's reference in its place: there is no interpreter here."""
    monkeypatch.setattr(
        wg, "weight_gradient", lambda dy, sources, padding, **_: wg.weight_gradient_reference(dy, sources, padding)
    )


@pytest.mark.usefixtures("_references")
def test_answers_are_stored_and_used(shapes, tmp_path):
    calls = []
    # The largest is timed first.
    times = faster_methods(list(shapes.values()), CPU, 60.0, timer=timer_of([(2.0, 1.0), (1.0, 2.0)], calls))
    assert calls == [(27, 24, 16), (27, 8, 8)]
    assert [t.method for t in times] == ["cudnn", "triton"]
    (file,) = (tmp_path / "cache" / "kernels").glob("weight-gradients-*.json")
    assert json.loads(file.read_text())["times"].keys() == shapes.keys()
    by_channels = {s.channels: wg.method_for(*s.tensors(CPU), s.padding) for s in shapes.values()}
    assert by_channels == {(8,): "triton", (8, 8): "cudnn"}
    # In another process.
    wg.forget()
    assert {wg.method_for(*s.tensors(CPU), s.padding) for s in shapes.values()} == {"cudnn"}
    assert faster_methods(list(shapes.values()), CPU, 0.0, timer=never) == []
    assert {s.channels: wg.method_for(*s.tensors(CPU), s.padding) for s in shapes.values()} == by_channels
    wg.forget()
    measured.load_weight_gradients(CPU)
    assert {s.channels: wg.method_for(*s.tensors(CPU), s.padding) for s in shapes.values()} == by_channels


@pytest.mark.usefixtures("_references")
def test_the_gradient_uses_the_answer(shapes, monkeypatch):
    network, x = network_and_input()
    calls = []
    monkeypatch.setattr(gradients, "_runs_kernel", lambda _x, reason, name: bool(calls.append((name, reason))))
    gradient_shapes(network, list(network.parameters()), (x,), {})
    rule = [name for name, _ in calls if "weight gradient of conv3d" in name]
    wg.use("cpu", dict.fromkeys(shapes, "triton"))
    gradient_shapes(network, list(network.parameters()), (x,), {})
    chosen = [(name, reason) for name, reason in calls if "weight gradient of conv3d" in name]
    assert rule == [] and [reason for _, reason in chosen] == [None] * 3


@pytest.mark.usefixtures("_references")
def test_what_cannot_be_timed_keeps_the_rule(shapes, caplog):
    def failing(*_):
        raise RuntimeError("no algorithm")

    with caplog.at_level(logging.INFO, logger="voxtune"):
        assert faster_methods(list(shapes.values()), CPU, 60.0, timer=failing) == []
    assert "was not timed: RuntimeError: no algorithm" in caplog.text
    assert faster_methods(list(shapes.values()), CPU, -1.0, timer=never) == []
    assert not measured.TABLE.path(CPU).exists()


def test_a_damaged_file_is_ignored(shapes):
    good, bad = shapes
    entry = {"own": "triton", "own_ms": 1.0, "cudnn_ms": 2.0}
    measured.TABLE.add(CPU, {good: entry, bad: {**entry, "own": "cudnn"}, "x": {**entry, "own_ms": 0}, "y": 3})
    measured.load_weight_gradients(CPU)
    assert wg._faster == {"cpu": {good: "triton"}}


def test_nothing_is_measured_on_a_cpu(monkeypatch):
    network, x = network_and_input()
    monkeypatch.setattr(measured, "gradient_shapes", never)
    assert measure_weight_gradients(network, (x,)) == []
