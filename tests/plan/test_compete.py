"""Own convolutions against cuDNN's, form by form, and the plan that leaves those that lose to PyTorch."""

from __future__ import annotations

import json
import logging
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.factories.networks import REWRITING
from voxtune.errors import InputError
from voxtune.plan import card_table
from voxtune.plan import compete as competing
from voxtune.plan.build import build
from voxtune.plan.compete import Competition, KernelTimes, compete, race
from voxtune.plan.kernel_forms import PASS_OF, kernel_forms, own_call, rival_call
from voxtune.plan.plan import Plan, Step

CPU = torch.device("cpu")
EPILOGUE_AND_MORE = Plan.of(*REWRITING)
SIZE = (4, 6, 8)


class Net(nn.Module):
    """Every own convolution, with each kind of epilogue."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(3, 16, 3, padding=1)
        self.first, self.second = nn.Conv3d(16, 16, 3, padding=1), nn.Conv3d(16, 16, 3, padding=1)
        self.causal = nn.Conv3d(16, 16, 3, padding=(0, 1, 1))
        self.down = nn.Conv3d(16, 32, 3, stride=2, padding=1)
        self.up, self.transposed = nn.Conv3d(32, 16, 3, padding=1), nn.ConvTranspose3d(32, 16, 2, 2)
        self.join, self.both = nn.Conv3d(32, 16, 1), nn.Conv3d(32, 16, 3, padding=1)
        self.last = nn.Conv3d(16, 16, 3, padding=1)
        self.head = nn.Conv3d(16, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(4, c) for c in (16, 16, 32, 16, 16))

    def forward(self, x, mask, t):
        s = self.stem(torch.cat([x, mask], dim=1))
        a = self.first(F.silu(self.norms[0](s))) + t[:, :, None, None, None]
        a = F.silu(self.second(F.silu(a)) + s) + a
        a = self.causal(F.pad(F.silu(self.norms[1](a)), (0, 0, 0, 0, 2, 0)))
        d = F.silu(self.norms[2](self.down(a)))
        u, v = self.up(F.interpolate(d, scale_factor=2.0, mode="nearest")), self.transposed(d)
        j = self.join(torch.cat([u, v], dim=1))
        h = self.both(torch.cat([F.silu(self.norms[3](j)), F.silu(a)], dim=1))
        return self.head(F.silu(self.norms[4](self.last(F.silu(h)) + h)))


def inputs(size=SIZE):
    return torch.randn(2, 1, *size), torch.randn(2, 2, *size), torch.randn(2, 16)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)


@pytest.fixture(scope="module")
def rewritten():
    torch.manual_seed(0)
    net, args = Net().eval(), inputs()
    return build(net, args, None, EPILOGUE_AND_MORE, twin=True), args


def forms_of(rewritten):
    network, args = rewritten
    return kernel_forms(network, (args, {}))


def result_of(y):
    return y[0] if isinstance(y, tuple) else y


def test_every_own_convolution_has_a_form(rewritten):
    network, _ = rewritten
    forms = forms_of(rewritten)
    assert {f.operator for f in forms} == set(PASS_OF)
    nodes = [n for n in network.runner.inner.graph.nodes if n.op == "call_function" and "voxtune" in str(n.target)]
    names = [str(n.target).split(".")[1] for n in nodes]
    assert sum(forms.values()) == sum(name in PASS_OF for name in names)
    by_operator = {f.operator: f for f in forms}
    assert by_operator["head"].excepted == ("edges", (16, 4, *SIZE))
    assert by_operator["stem"].excepted == ("edges", (3, 16, *SIZE))
    assert by_operator["strided_conv"].excepted == ("strided", (16, 32, 2, 3, 4))
    assert by_operator["pointwise"].excepted == ("pointwise", (32, 16, *SIZE))
    assert {f.scale for f in forms if f.operator == "doubling_conv"} == {None, (2, 2, 2)}
    assert all(f.excepted == ("doubling", (32, 16, *SIZE)) for f in forms if f.operator == "doubling_conv")


def test_a_rival_computes_the_same(rewritten):
    forms = forms_of(rewritten)
    compared = 0
    for form in forms:
        given = form.tensors(CPU)
        own, rival = own_call(form, given)(), rival_call(form, given)()
        y, z = result_of(own), result_of(rival)
        assert (y.shape, y.dtype) == (z.shape, z.dtype)
        if form.scale is not None:
            continue  # of other weights: see below
        if form.norm_shifts and given["shift"] is not None:
            z = z + given["shift"][:, :, None, None, None]
        torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-3)
        if given.get("statistics") and not (form.norm_shifts and given["shift"] is not None):
            torch.testing.assert_close(own[1], rival[1], rtol=1e-3, atol=1e-2)
        assert isinstance(rival, tuple) == bool(given.get("statistics"))
        compared += 1
    assert compared == len(forms) - 1
    epilogues = [(f.operator, f["residual"] is not None) for f in forms if f.operator == "conv3d"]
    assert ("conv3d", True) in epilogues and ("conv3d", False) in epilogues
    assert any(f.norm_shifts for f in forms) and not all(f.norm_shifts for f in forms)


def test_forms_have_the_types_of_the_plan():
    """Half precision is applied last, and is not in the metadata of the graph."""
    args = inputs()
    network = build(Net().eval(), args, None, Plan.of("bf16", *REWRITING), twin=True)
    for form in kernel_forms(network, (args, {})):
        if form.operator not in ("stem", "head"):
            assert all(source.dtype == torch.bfloat16 for source in form.sources), form
        given = form.tensors(CPU)
        y, z = result_of(own_call(form, given)()), result_of(rival_call(form, given)())
        assert y.dtype == z.dtype == form.result.dtype
        assert form.result.dtype == (torch.float32 if form.operator == "head" else torch.bfloat16)


def test_the_calls_are_timed_in_turns():
    calls = []

    def sleeping(name, seconds):
        return lambda: calls.append(name) or time.sleep(seconds)

    own, rival = race(sleeping("a", 0.004), sleeping("b", 0.012), CPU, 0.15)
    assert 4 <= own < 9 and 12 <= rival < 25
    assert calls == ["a", "b"] * (len(calls) // 2) and 1 + competing.LEAST <= len(calls) // 2 <= 1 + 0.15 / 0.016 + 1
    calls.clear()
    race(sleeping("a", 0.02), sleeping("b", 0.02), CPU, 0.0)
    assert len(calls) == 2 * (1 + competing.LEAST)


def timer_of(own_ms, rival_ms, log=None):
    """A timer with given times: by the name of the operator, or one for all."""

    def timer(own, _rival, _device, _seconds):
        name = own.__closure__[0].cell_contents._schema.name.split("::")[1]
        if log is not None:
            log.append(name)
        return own_ms.get(name, 1.0), rival_ms

    return timer


def test_real_times_are_cached(rewritten, tmp_path):
    network, args = rewritten
    result = compete(network, (args, {}), 60.0)
    assert len(result.times) == len(forms_of(rewritten)) and not result.untimed
    assert all(t.own_ms > 0 and t.rival_ms > 0 for t in result.times)
    (file,) = (tmp_path / "cache" / "kernels").glob("*.json")
    assert len(json.loads(file.read_text())["times"]) == len(result.times)

    def never(*_):
        raise AssertionError("timed again")

    again = compete(network, (args, {}), 0.0, timer=never)
    key = lambda t: t.form.key  # noqa: E731
    assert sorted(again.times, key=key) == sorted(result.times, key=key)


def test_losers_are_excepted_and_the_plan_survives(rewritten, tmp_path):
    network, args = rewritten
    result = compete(network, (args, {}), 60.0, timer=timer_of({"head": 1.1, "strided_conv": 1.02}, 1.0))
    assert result.report() == "head 16->4 at 4x6x8: 1.1 ms, cuDNN 1 ms"
    plan = result.excepting(network.plan)
    # Without its own kernel, the pass conv3d would take the head.
    head = {"except": [[16, 4, *SIZE]]}
    assert {s.name: s.options for s in plan.steps if s.options} == {"edges": head, "conv3d": head}
    fast = build(network.original, args, None, plan, twin=True)
    assert fast.notes["edges"] == "applied 1 x (excepted by the plan)"
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), network.original(*args), rtol=1e-3, atol=1e-4)
    # Without a pass, in a file, and for another size.
    assert fast.plan.without("conv3d").options("edges") == plan.options("edges")
    fast.plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.steps == fast.plan.steps
    other = build(network.original, inputs((4, 4, 4)), None, loaded, twin=True)
    assert other.notes["edges"] == "applied 2 x"


def test_a_pass_without_any_convolution_left_stays_in_the_plan(rewritten):
    """At another size it applies."""
    network, args = rewritten
    plan = compete(network, (args, {}), 60.0, timer=timer_of({"head": 2.0, "stem": 2.0}, 1.0)).excepting(network.plan)
    fast = build(network.original, args, None, plan, twin=True)
    assert fast.notes["edges"] == "no effect: excepted by the plan" and "edges" in fast.plan.names
    assert build(network.original, inputs((4, 4, 4)), None, fast.plan, twin=True).notes["edges"] == "applied 2 x"


def test_what_a_pass_leaves_no_other_one_takes(rewritten):
    network, args = rewritten
    plan = compete(network, (args, {}), 60.0, timer=timer_of({"doubling_conv": 2.0}, 1.0)).excepting(network.plan)
    shape = [32, 16, *SIZE]
    # The graph's own convolution of this shape has won: the plan does not except it.
    assert {s.name: s.options for s in plan.steps if s.options} == {"doubling": {"except": [shape]}}
    folded = next(f for f in forms_of(rewritten) if f.scale is not None)
    alone = Competition([KernelTimes(folded, 1, 2.0, 1.0)])
    excepted = {s.name: s.options for s in alone.excepting(network.plan).steps if s.options}
    assert excepted == {"doubling": {"except": [shape]}, "conv3d": {"except": [shape]}}
    fast = build(network.original, args, None, alone.excepting(network.plan), twin=True)
    targets = [str(n.target) for n in fast.runner.inner.graph.nodes]
    assert "voxtune.doubling_conv.default" not in targets and "aten.conv3d.default" in targets


def test_a_graph_without_own_convolutions_holds_what_their_rivals_compute(rewritten):
    network, args = rewritten
    result = compete(network, (args, {}), 60.0, timer=timer_of(dict.fromkeys(PASS_OF, 2.0), 1.0))
    # The pass elementwise adds biases too.
    plan = result.excepting(EPILOGUE_AND_MORE.without("elementwise"))
    fast = build(network.original, args, None, plan, twin=True)
    assert not kernel_forms(fast, (args, {}))
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), network.original(*args), rtol=1e-3, atol=1e-4)
    targets = [str(n.target) for n in fast.runner.inner.graph.nodes if n.op == "call_function"]
    forms = forms_of(rewritten)
    residuals = sum(count for f, count in forms.items() if dict(f.arguments).get("residual") is not None)
    assert targets.count("voxtune.add.default") == residuals > 0
    assert targets.count("voxtune.upsample.default") == 1 and targets.count("aten.pad.default") == 1
    assert targets.count("aten.cat.default") == sum(len(f.sources) == 2 for f in forms) == 3
    # Biases that norms take over: those of convolutions that only a norm reads.
    convolutions = [n for n in fast.runner.inner.graph.nodes if "conv3d" in str(n.target)]
    without_bias = sum(n.args[2] is None if len(n.args) > 2 else True for n in convolutions)
    free = sum(f.norm_shifts for f in forms)
    assert without_bias == free + residuals


def test_forms_of_one_shape_count_together(rewritten):
    forms = [f for f in forms_of(rewritten) if f.excepted == ("conv3d", (16, 16, *SIZE))]
    assert len(forms) >= 2
    first, second = forms[:2]
    half = Competition([KernelTimes(first, 1, 2.0, 1.0), KernelTimes(second, 3, 1.0, 1.4)])
    assert not half.lost() and half.excepting(EPILOGUE_AND_MORE) is None
    half = Competition([KernelTimes(first, 3, 2.0, 1.0), KernelTimes(second, 1, 1.0, 1.4)])
    assert half.report() == "conv3d 16->16 at 4x6x8 (4 x): 7 ms, cuDNN 4.4 ms"
    assert not Competition(half.times[:1], [second]).lost(), "one of them was not timed"
    assert "not timed" in Competition([], [second]).report()


def test_the_largest_share_comes_first_and_time_is_limited(rewritten, monkeypatch):
    network, args = rewritten
    order = []
    compete(network, (args, {}), 60.0, timer=timer_of({}, 1.0, order))
    forms = forms_of(rewritten)
    largest = max(forms, key=lambda f: f.work * forms[f])
    assert order[0] == largest.operator and len(order) == len(forms)
    for file in card_table.cache_folder().rglob("*.json"):
        file.unlink()
    clock = [0.0]
    monkeypatch.setattr(competing.time, "monotonic", lambda: clock[0])

    def slow(*_):
        clock[0] += 1.0
        return 1.0, 1.0

    result = compete(network, (args, {}), 2.5, timer=slow)
    assert len(result.times) == 3 and len(result.untimed) == len(forms) - 3
    assert f"{len(result.untimed)} forms of own convolutions were not timed" in result.report()


def test_a_kernel_that_fails_stays(rewritten):
    network, args = rewritten

    def failing(*_):
        raise torch.OutOfMemoryError("no memory")

    result = compete(network, (args, {}), 60.0, timer=failing)
    assert not result.times and result.excepting(network.plan) is None


def test_a_network_that_does_not_fit_is_not_compared(rewritten, monkeypatch):
    network, args = rewritten

    def failing(*_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(competing, "kernel_forms", failing)
    result = compete(network, (args, {}), 60.0)
    assert result.excepting(network.plan) is None and "OutOfMemoryError: no memory" in result.report()


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{ half",
        "[]",
        '{"format": "other", "times": {}}',
        '{"format": "voxtune-kernels/1", "times": [1]}',
        '{"format": "voxtune-kernels/1", "times": {"KEY": [-1.0, 1.0]}}',
        '{"format": "voxtune-kernels/1", "times": {"KEY": [1.0]}}',
        '{"format": "voxtune-kernels/1", "times": {"KEY": [true, "x"]}}',
        '{"format": "voxtune-kernels/1", "times": {"KEY": [NaN, 1.0]}}',
        "[" * 5000,
    ],
)
def test_a_hostile_cache_is_ignored(rewritten, content, caplog):
    network, args = rewritten
    forms = list(forms_of(rewritten))
    path = competing.TABLE.path(CPU)
    path.parent.mkdir(parents=True)
    path.write_text(content.replace("KEY", forms[0].key))
    order = []
    with caplog.at_level(logging.WARNING, logger="voxtune"):
        result = compete(network, (args, {}), 60.0, timer=timer_of({}, 1.0, order))
    assert len(order) == len(forms) == len(result.times)
    assert json.loads(path.read_text())["format"] == "voxtune-kernels/1"
    assert len(json.loads(path.read_text())["times"]) == len(forms)


def test_a_cache_that_cannot_be_written_is_no_error(rewritten, monkeypatch, caplog):
    network, args = rewritten

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(card_table, "write_json", full)
    with caplog.at_level(logging.WARNING, logger="voxtune"):
        assert compete(network, (args, {}), 60.0, timer=timer_of({}, 1.0)).times
    assert "could not be cached" in caplog.text


def test_a_network_without_own_convolutions_has_nothing_to_time():
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).eval(), torch.randn(2, 8)
    fast = build(net, (x,), None, Plan.of("cleanup"))
    result = compete(fast, ((x,), {}), 60.0)
    assert not result.times and not result.untimed


@pytest.mark.parametrize("name", ["pointwise", "edges", "conv3d"])
@pytest.mark.parametrize("wrong", [5, "conv", [5], {"a": 1}])
def test_an_option_of_another_form_is_an_error(name, wrong):
    plan = Plan(tuple(Step(n, {"except": wrong} if n == name else {}) for n in REWRITING))
    with pytest.raises(InputError, match="option 'except' of a pass"):
        build(Net().eval(), inputs(), None, plan, twin=True)
