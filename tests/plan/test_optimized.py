"""The optimized network as a module: it follows the original's weights, and can be copied, saved and shared."""

from __future__ import annotations

import copy
import logging
import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import voxtune
from tests.factories.networks import make
from voxtune.errors import InputError
from voxtune.plan import Plan
from voxtune.plan import search as searching
from voxtune.plan.api import CPU_READY
from voxtune.plan.build import PlanTarget
from voxtune.plan.derivation import LiveWeights
from voxtune.plan.gate import Verdict
from voxtune.plan.measure import Timing
from voxtune.plan.optimized import MAX_VARIANTS

EVERYTHING = Plan.of("cleanup", "sdpa", "time", "channels_last")


class Small(nn.Module):
    """A convolution, a norm without weights of its own, a frozen scale and a buffer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.register_buffer("scale", torch.rand(8, 1, 1))
        self.head = nn.Conv2d(8, 2, 1)
        self.frequencies = torch.linspace(1, 2, 8)  # a constant of the code

    def forward(self, x, t=None, *, options=None):
        y = F.silu(self.norm(self.conv(x)) * (2 * self.scale)) * self.frequencies[:, None, None]
        if options is not None:
            y = y + options["shift"]
        return {"out": self.head(y), "pair": (y.mean(dim=(2, 3)), y)}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def small():
    torch.manual_seed(0)
    net, x = Small().eval(), torch.randn(2, 4, 8, 8)
    return net, x, voxtune.optimize(net, x, EVERYTHING)


def assert_same(fast, net, *args, **kwargs):
    with torch.no_grad():
        left, right = fast(*args, **kwargs), net(*args, **kwargs)
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def no_capture(monkeypatch):
    monkeypatch.setattr("voxtune.plan.build.capture", lambda *_: pytest.fail("captured again"))


def by_load_state_dict(net):
    net.load_state_dict({k: v * 1.5 for k, v in net.state_dict().items()})


def by_assignment(net):
    net.load_state_dict({k: v * 1.5 for k, v in net.state_dict().items()}, assign=True)


def by_an_optimizer(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


def by_data(net):
    for p in net.parameters():
        p.data = p.data * 1.5


def by_an_average(net):
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(0.5 * p + 0.1)


def by_type_and_back(net):
    net.to(torch.float64)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.5)
    net.to(torch.float32)


def by_a_buffer(net):
    net.scale.mul_(3.0)


def by_a_new_module(net):
    net.head = nn.Conv2d(8, 2, 1)


def by_one_parameter(net):
    net.norm.weight = nn.Parameter(torch.rand(8))


@pytest.mark.parametrize(
    "change",
    [
        by_load_state_dict,
        by_assignment,
        by_an_optimizer,
        by_data,
        by_an_average,
        by_type_and_back,
        by_a_buffer,
        by_a_new_module,
        by_one_parameter,
    ],
)
def test_changed_weights_are_used_at_the_next_call(small, change, monkeypatch):
    net, x, fast = small
    assert_same(fast, net, x)
    before = fast(x)["out"]
    no_capture(monkeypatch)
    change(net)
    assert_same(fast, net, x)
    assert not torch.allclose(fast(x)["out"], before)


@pytest.mark.parametrize("values", [0, 1, 2])
def test_equal_weights_in_another_tensor_are_seen(values):
    """Of one value, tensors compare equal with a plain truth value; of none or several, the comparison raises."""
    net = nn.Module()
    net.weight, net.scale = nn.Parameter(torch.ones(values)), nn.Buffer(torch.ones(values))
    weights = LiveWeights(net, net)
    assert not weights.changed()
    for name, other in (("weight", nn.Parameter(torch.ones(values))), ("scale", torch.ones(values))):
        before = getattr(net, name)
        setattr(net, name, other)
        assert weights.changed()
        setattr(net, name, before)
        assert not weights.changed()


@pytest.mark.parametrize(
    "name", ["convnext", *(pytest.param(n, marks=pytest.mark.slow) for n in ("med_ddpm", "monai_2d"))]
)
def test_changed_weights_of_whole_networks(name, monkeypatch):
    net, args = make(name)
    fast = voxtune.optimize(net, args, EVERYTHING)
    no_capture(monkeypatch)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    assert_same(fast, net, *args)


def test_the_kernels_weights_follow_too(monkeypatch):
    """Packed, halved, merged and folded weights of the passes for a GPU, with their references."""
    from voxtune.plan.api import READY

    net, args = make("med_ddpm")
    fast = PlanTarget(net, (args, {})).build(READY[0].without("bf16", "cuda_graph", "cudnn_benchmark"), twin=True)
    fast.runner.weights.repack()  # nothing has changed
    assert_same(fast, net, *args)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
    assert_same(fast, net, *args)


def test_a_backup_of_the_weights_is_not_overwritten(small):
    """As an EMA does: other weights for a while, then the old tensors again."""
    net, x, fast = small
    assert_same(fast, net, x)
    kept = {n: p.data for n, p in net.named_parameters()}
    copies = {n: p.clone() for n, p in kept.items()}
    for p in net.parameters():
        p.data = p.data * 2
    assert_same(fast, net, x)
    for n, p in net.named_parameters():
        p.data = kept[n]
    assert_same(fast, net, x)
    assert all(torch.equal(kept[n], copies[n]) for n in kept)


def test_writes_without_a_trace_need_refresh(small):
    net, x, fast = small
    before = fast(x)["out"]
    net.conv.weight.data.copy_(net.conv.weight.data * 2)
    net.head.weight.detach().numpy()[:] *= 2
    assert torch.equal(fast(x)["out"], before), "if this is seen now, say so in the documentation"
    fast.refresh()
    assert_same(fast, net, x)


def test_other_shapes_of_weights_are_captured_again(small, caplog):
    net, x, fast = small
    net.conv, net.norm = nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16)
    net.scale, net.head, net.frequencies = torch.rand(16, 1, 1), nn.Conv2d(16, 2, 1), torch.ones(16)
    net.eval()
    assert_same(fast, net, x)


def test_the_check_is_fast():
    net, args = make("med_ddpm")
    weights = PlanTarget(net, (args, {})).build(EVERYTHING).runner.weights
    times = []
    for _ in range(50):
        started = time.perf_counter()
        assert not weights.changed()
        times.append(time.perf_counter() - started)
    per_weight = min(times) / len(weights._objects)
    # 549 objects in the published network: under 60 microseconds. Generous here, for a machine that is busy.
    assert per_weight * 549 < 180e-6, f"{per_weight * 549 * 1e6:.0f} microseconds"


def test_state_dicts_are_the_originals(small):
    net, x, fast = small
    assert list(fast.state_dict()) == list(net.state_dict())
    assert [n for n, _ in fast.named_parameters()] == [n for n, _ in net.named_parameters()]
    fast.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})
    assert_same(fast, net, x)
    outer = nn.Sequential(fast)
    assert next(iter(outer.state_dict())) == f"0.{next(iter(net.state_dict()))}"
    outer.load_state_dict({k: v * 0.5 for k, v in outer.state_dict().items()})
    assert_same(fast, net, x)
    assert fast.conv is net.conv and fast.frequencies is net.frequencies
    with pytest.raises(AttributeError):
        _ = fast.no_such_attribute


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_are_independent(small, copied):
    net, x, fast = small
    other = copied(fast)
    assert other.plan == fast.plan
    assert_same(other, net, x)
    with torch.no_grad():
        net.conv.weight.mul_(2)
    assert_same(fast, net, x)
    assert not torch.allclose(other(x)["out"], fast(x)["out"])
    assert_same(other, other.original, x)
    assert "channels_last" in other.plan.names and other.runner is not fast.runner


def test_torch_save(small, tmp_path):
    _net, x, fast = small
    torch.save(fast, tmp_path / "fast.pt")
    again = torch.load(tmp_path / "fast.pt", weights_only=False)
    assert_same(again, fast, x)


def test_tuples_dicts_and_keywords():
    torch.manual_seed(0)
    net, x, shift = Small().eval(), torch.randn(2, 4, 8, 8), torch.randn(1, 8, 1, 1)
    fast = voxtune.optimize(net, (x, None), EVERYTHING, example_kwargs={"options": {"shift": shift}})
    assert "capture" not in fast.notes
    assert_same(fast, net, x, None, options={"shift": shift * 2})
    with torch.no_grad():
        output = fast(x, None, options={"shift": shift})
    assert list(output) == ["out", "pair"] and isinstance(output["pair"], tuple)


def test_gradients_of_inputs_come_from_the_original(small, caplog):
    net, x, fast = small
    for _ in range(2):
        left, right = x.clone().requires_grad_(), x.clone().requires_grad_()
        fast(left)["out"].sum().backward()
        net(right)["out"].sum().backward()
        torch.testing.assert_close(left.grad, right.grad)
    assert caplog.text.count("requires gradients") == 1
    with torch.no_grad():
        fast(x.clone().requires_grad_())
    assert caplog.text.count("requires gradients") == 1


def test_several_threads(small):
    net, x, fast = small
    inputs = [torch.randn_like(x) for _ in range(4)]
    with torch.no_grad():
        expected = [net(i)["out"] for i in inputs]
    wrong = []

    def work(k):
        for _ in range(10):
            with torch.no_grad():
                if not torch.allclose(fast(inputs[k])["out"], expected[k], rtol=1e-4, atol=1e-5):
                    wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_least_recently_used_sizes_are_dropped(small):
    net, x, fast = small
    for size in range(4, 4 + MAX_VARIANTS + 2):
        assert_same(fast, net, torch.randn(2, 4, size, size))
    assert len(fast._variants) == MAX_VARIANTS
    assert_same(fast, net, x)


def test_a_moved_network_runs_as_the_original(small, caplog):
    net, x, fast = small
    fast.to(torch.float64)
    assert net.conv.weight.dtype == torch.float64
    with caplog.at_level(logging.WARNING, logger="voxtune"):
        assert_same(fast, net, x.double())
    assert "float64" in caplog.text
    fast.to(torch.float32)
    assert_same(fast, net, x)


# Precision and search.


class InPlace(nn.Module):
    """Writes in place to what it computed, through a view, and reads it afterwards."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        y[:, :4].mul_(2.0)
        z = y.clamp_(min=0.01).sqrt_()
        return F.leaky_relu_(z.add_(-0.5), 0.1) + y


def test_in_place_operations_are_captured():
    torch.manual_seed(0)
    net, x = InPlace().eval(), torch.randn(2, 4, 8, 8)
    fast = voxtune.optimize(net, x, EVERYTHING)
    assert "capture" not in fast.notes
    assert_same(fast, net, x)


class WritesToItself(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return self.conv(x) * self.count


def test_what_cannot_be_captured_is_named(caplog):
    net, x = WritesToItself().eval(), torch.randn(1, 4, 8, 8)
    target = PlanTarget(net, ((x,), {}))
    reason = target.captured()
    assert isinstance(reason, str) and "count" in reason and "test_optimized.py, line" in reason


class Thresholded(nn.Sequential):
    def forward(self, x):
        x = super().forward(x)
        return x / x.mean() if x.mean() > 1 else x


def test_the_report_names_what_cannot_be_captured(monkeypatch, caplog):
    net, args = Thresholded(*tiny()[0]).eval(), tiny()[1]
    line = Thresholded.forward.__code__.co_firstlineno + 2
    for ms in (10.0, 5.0):  # candidates that are slower than the original, and faster
        timings(monkeypatch, 8.0, *[ms] * 9)
        for _ in range(2):  # the second time from the cache
            fast = voxtune.optimize(net, args, say=lambda _line: None)
            assert "capture: failed: " in fast.report() and f"test_optimized.py, line {line})" in fast.report()
        assert bool(fast.plan.names) == (ms < 8.0)
        with torch.no_grad():
            torch.testing.assert_close(fast(*args), net(*args))
        net[0].weight.data.mul_(1.1)  # another network for the cache
    assert caplog.text.count("could not be captured") == 3, "once a search, and where a cached plan is built"


@pytest.mark.filterwarnings("error")
def test_no_warnings_of_pytorch_about_itself():
    assert not isinstance(PlanTarget(InPlace().eval(), ((torch.randn(2, 4, 8, 8),), {})).captured(), str)


def tiny():
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), nn.Dropout(0.1), nn.Conv2d(8, 4, 1)]
    return nn.Sequential(*layers).eval(), (torch.randn(2, 4, 8, 8),)


def timings(monkeypatch, *ms):
    times = iter(ms)
    monkeypatch.setattr(searching, "measure", lambda *_, **__: Timing(*[next(times)] * 3, 0.1, None))


def test_the_original_is_kept_if_nothing_is_faster(monkeypatch):
    net, args = tiny()
    lines = []
    timings(monkeypatch, 10.0, *[9.97] * 9)
    fast = voxtune.optimize(net, args, say=lines.append)
    assert fast.plan.names == () and "the original network" in lines[-1]
    assert "not faster than the original" in fast.report()
    with torch.no_grad():
        assert torch.equal(fast(*args), net(*args))
    assert voxtune.optimize(net, args, say=lines.append).plan == fast.plan, "also from the cache"
    with pytest.raises(InputError, match="no plan"):
        _ = fast.runner


def test_the_fastest_accepted_candidate_wins(monkeypatch):
    net, args = tiny()
    timings(monkeypatch, 10.0, 5.0, 7.0, 6.0)
    verdicts = iter([False, True])
    monkeypatch.setattr(
        searching, "judge", lambda *_: Verdict(next(verdicts), "wrong", {"relative": 0.0, "limit": 1.0})
    )
    fast = voxtune.optimize(net, args, say=lambda _line: None)
    kept = [row for row in fast.plan.evidence["waterfall"] if row["kept"]]
    assert [row["p50_ms"] for row in kept] == [6.0] and tuple(kept[0]["passes"]) == fast.plan.names
    assert "refused: wrong" in fast.report()


def test_a_slow_network_is_not_searched_for_minutes(monkeypatch):
    net, args = tiny()
    lines = []
    timings(monkeypatch, 5000.0)
    fast = voxtune.optimize(net, args, say=lines.append)
    assert fast.plan.names == () and "one call takes 5.0 s" in lines[-1] and 'search="full"' in lines[-1]


def test_a_constant_output_is_not_judged():
    net, x = nn.Conv2d(4, 4, 3, padding=1).eval(), torch.randn(1, 4, 8, 8)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    with pytest.raises(InputError, match="zero or constant"):
        voxtune.optimize(net, x, CPU_READY[0])
    assert voxtune.optimize(net, x, say=lambda _line: None).plan.names == ()


def test_precision_is_that_of_the_call(monkeypatch):
    net, args = tiny()
    timings(monkeypatch, *[10.0, 5.0, 5.0, 5.0] * 4)
    monkeypatch.setattr(searching, "slow_half", lambda _type: None)
    fast = voxtune.optimize(net, args, say=lambda _line: None)
    assert "bf16" not in fast.plan.names and fast.precision == "fp32"
    with torch.no_grad():
        truth = net(*args)
        assert float((fast(*args) - truth).norm() / truth.norm()) < 1e-4
        with torch.autocast("cpu", torch.bfloat16):
            assert len(fast._variants) == 1
            half = fast(*args)
            assert len(fast._variants) == 2
        assert 1e-4 < float((half.float() - truth).norm() / truth.norm()) < 5e-2
        assert float((fast(*args) - truth).norm() / truth.norm()) < 1e-4


def test_precision_as_named(monkeypatch):
    net, args = tiny()
    monkeypatch.setattr(searching, "slow_half", lambda _type: None)
    timings(monkeypatch, *[10.0, 5.0, 5.0, 5.0] * 4)
    assert "bf16" in voxtune.optimize(net, args, precision="bf16", say=lambda _line: None).plan.names
    for name in ("fp32", "tf32"):
        assert "bf16" not in voxtune.optimize(net, args, precision=name, say=lambda _line: None).plan.names
    for options in ({"precision": "int8"}, {"search": "long"}):
        with pytest.raises(InputError, match="choose"):
            voxtune.optimize(net, args, **options)


def test_half_precision_weights_stay_half(monkeypatch):
    net, (x,) = tiny()
    net, x = net.bfloat16(), x.bfloat16()
    timings(monkeypatch, *[10.0, 5.0, 5.0, 5.0] * 4)
    monkeypatch.setattr(searching, "slow_half", lambda _type: None)
    fast = voxtune.optimize(net, x, say=lambda _line: None)
    assert fast.precision == "bf16" and fast.plan.names
    with torch.no_grad():
        y, truth = fast(x), net(x)
    assert y.dtype == torch.bfloat16 and float((y - truth).float().norm() / truth.float().norm()) < 1e-2
