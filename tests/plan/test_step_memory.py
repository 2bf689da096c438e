"""The simulated memory of a training step against the allocations of a real one, and its categories."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from voxtune.kernels.conv3d_tiles import Device, simulates_device
from voxtune.plan import step_memory
from voxtune.plan.plan import Plan
from voxtune.plan.recompute import grouped
from voxtune.plan.step_memory import BLOCK, CATEGORIES, Block, SimulatedStep, simulated_step
from voxtune.plan.training import training_network, training_passes
from voxtune.workloads import MedDDPMConfig, build, without_zeros

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = (32, 32, 32)


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    net = without_zeros(build(MedDDPMConfig(base=32, multipliers=(1, 2), attention=())))
    args = torch.randn(1, 1, *SIZE), torch.zeros(1, dtype=torch.long), torch.randn(1, 2, *SIZE)
    return training_network(net, args, None, Plan.of(*training_passes("bf16"))), args


def real_peak(fast, args, groups, path):
    """The most bytes that PyTorch's allocator held in a real step, beside what was there before."""
    fast.recompute(groups)
    for p in fast.parameters():
        p.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        y = fast(*args)
        target = torch.empty_like(y, dtype=torch.float32)
        loss = torch.stack([(y.to(target.dtype) - target).abs().mean()]).sum()
        del y
        loss.backward()
    fast.recompute(())
    events.export_chrome_trace(str(path))
    changes = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = most = 0
    for change in sorted(changes, key=lambda e: e["ts"]):
        held += change["args"]["Bytes"]
        most = max(most, held)
    return most


@pytest.mark.parametrize("size", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
@pytest.mark.parametrize("kernels", [False, True], ids=["references", "kernels"])
def test_the_peak_is_that_of_a_real_step(network, monkeypatch, tmp_path, kernels, size):
    """By the references, and by the wrappers of the kernels, which allocate their results and buffers and launch nothing."""
    fast, args = network
    monkeypatch.setattr(step_memory, "_on_its_gpu", lambda _network: nullcontext())
    if kernels:
        monkeypatch.setattr("voxtune.kernels.ops.INTERPRETED", True)
        monkeypatch.setattr("voxtune.kernels.precompile._is_fake", lambda _argument: True)
        monkeypatch.setattr("voxtune.kernels.conv3d_weight_gradient.METHOD", "triton")
    groups = () if size is None else grouped(fast.rewritten.graph, size)
    peak = simulated_step(fast, args, groups=groups).peak()
    simulated = peak.gradients + peak.cast + peak.kept + peak.temporary
    assert simulated == pytest.approx(real_peak(fast, args, groups, tmp_path / "trace.json"), rel=0.005)


def test_what_lasts_is_counted_once(network):
    fast, args = network
    peak = simulated_step(fast, args).peak()
    count = sum(p.numel() for p in fast.parameters())
    tensors = len(list(fast.parameters()))
    for bytes_, copies in ((peak.weights, 1), (peak.average, 1), (peak.optimizer, 2)):
        assert 4 * count * copies <= bytes_ <= 4 * count * copies + copies * tensors * BLOCK + 4096
    assert peak.inputs == sum(-(-x.nbytes // BLOCK) * BLOCK for x in args)
    assert peak.total == sum(peak.by_category().values())
    with_gradients = simulated_step(fast, args, accumulated=True)
    assert with_gradients.peak().gradients >= 4 * count
    # A gradient that is added to an earlier one is there beside it for a moment.
    assert with_gradients.peak().total > peak.total


def test_a_simulation_leaves_the_network_as_it_was(network):
    fast, args = network
    before = {name: p.clone() for name, p in fast.named_parameters()}
    simulated_step(fast, args, groups=grouped(fast.rewritten.graph, 2))
    assert all(torch.equal(p, before[name]) for name, p in fast.named_parameters())
    assert not any(isinstance(x, FakeTensor) for x in (*fast.parameters(), *fast.buffers()))
    assert all(p.grad is None or not isinstance(p.grad, FakeTensor) for p in fast.parameters())
    assert not simulates_device() and Device.of(torch.device("cpu")).processors < Device().processors


def test_the_peak_is_the_moment_at_which_most_is_allocated():
    step = SimulatedStep(
        (Block(10, "weights", 0, 9, "a"), Block(100, "kept", 1, 4, "b"), Block(60, "temporary", 3, 5, "c")), 9, 3
    )
    assert [sum(at.values()) for at in step.timeline()] == [10, 110, 110, 170, 70, 10, 10, 10, 10]
    assert step.peak_event() == 3 and step.peak().total == 170
    assert step.peak().by_category() == dict.fromkeys(CATEGORIES, 0) | {"weights": 10, "kept": 100, "temporary": 60}
    assert [block.by for block in step.at(4)] == ["c", "a"]
    half = step.peak().of_batch(0.5)
    assert (half.weights, half.kept, half.temporary) == (10, 50, 30)


def test_a_source_that_is_computed_again_is_released_before_its_gradient_is_computed(network):
    """The largest pair of the last block: the norm of two sources, and its gradient."""
    fast, args = network
    step = simulated_step(fast, args)
    widest = 64 * 32**3 * 2
    wide = [b for b in step.blocks if b.bytes == widest and b.category == "temporary" and b.first > step.backward]
    assert len(wide) >= 2
    last = sorted(wide, key=lambda b: b.first)[:2]
    assert last[0].end <= last[1].first


def test_weights_of_any_device_become_fake_ones_of_one_device():
    net = torch.nn.Linear(2, 3, device="meta")  # not the device of the fake tensors, like a GPU
    allocations = step_memory._Allocations(FakeTensorMode(allow_non_fake_inputs=True))
    with allocations.mode, step_memory._fake_weights(net, allocations.fake) as parameters, allocations:
        assert {p.device.type for p in parameters} == {"cpu"}
        assert net(torch.empty(4, 2)).shape == (4, 3)
    assert net.weight.device.type == "meta"
