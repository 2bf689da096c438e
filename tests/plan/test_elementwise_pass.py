"""The pass elementwise: which operators become one kernel, which do not, and the results against float64."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.factories.in_place import Gated
from voxtune.kernels import ops as _operators  # noqa: F401 - registers them
from voxtune.plan.build import PlanTarget, build
from voxtune.plan.plan import Plan
from voxtune.plan.saved_graph import load_graph, save_graph

ops = torch.ops.voxtune
PLAN = ("cleanup", "elementwise", "channels_last")


class Network(nn.Module):
    def __init__(self, function, width=8):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.rand(width, 1, 1) + 0.5)
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.linear = nn.Linear(width, 4 * width)

    def forward(self, *args):
        return self.function(self, *args)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def run(function, *args, names=PLAN, limit=1e-6):
    """The programs of the rewritten network, the last one of the graph first, after its result was checked."""
    net = function if isinstance(function, nn.Module) else Network(function)
    net = net.eval()
    fast = build(net, args, None, Plan.of(*names), twin=True)
    with torch.no_grad():
        wide = [a.double() if a.is_floating_point() else a for a in args]
        truth = copy.deepcopy(net).double()(*wide)
        plain = net(*args)
    result = fast(*args)
    as_tuple = lambda y: y if isinstance(y, tuple) else (y,)  # noqa: E731
    for y, z, p in zip(as_tuple(result), as_tuple(truth), as_tuple(plain), strict=True):
        assert y.dtype == p.dtype and y.shape == p.shape
        assert (y.double() - z).norm() / z.norm() < limit
    return [node.args[1] for node in reversed(calls(fast))]


def calls(fast, target=ops.elementwise.default):
    return [n for n in fast.runner.inner.graph.nodes if n.target is target]


def x(*shape):
    return torch.randn(*(shape or (2, 8, 4, 6)))


@pytest.mark.parametrize("names", [PLAN, ("bf16", *PLAN), ("fp16", *PLAN)])
def test_gates_in_place_are_one_kernel_each(names):
    gate = "sigmoid 0; mul 1 3; add 2 4; mul 5 0.7071"
    programs = run(Gated(8, 3), x(1, 2, 4, 5, 6), names=names, limit=1e-6 if names == PLAN else 3e-2)
    # The bias of the head is added with what follows; in half precision also the cast to float32.
    assert programs == ["add 0 1; sub 2 0.1", f"{gate}; elu 6 1.0 1.0 1.0", gate, gate]


def test_half_precision_is_the_type_of_the_kernels_inside_and_not_at_the_end():
    net, args = Gated(8, 2).eval(), (x(1, 2, 4, 5, 6),)
    fast = build(net, args, None, Plan.of("bf16", *PLAN), twin=True)
    assert [node.args[2] for node in calls(fast)] == [torch.bfloat16, torch.bfloat16, torch.float32]
    assert fast.notes["elementwise"].startswith("applied 3 x (")


def test_geglu():
    def geglu(net, t):
        a, gate = net.linear(t).chunk(2, dim=-1)
        return net.linear.weight.sum() * a * F.gelu(gate)

    programs = run(geglu, x(2, 5, 8))
    assert programs in (["mul 0 1; gelu 2; mul 3 4"], ["gelu 2; mul 0 1; mul 4 3"], ["mul 0 1; gelu 3; mul 2 4"]), (
        programs
    )


def test_a_value_with_readers_outside_is_a_kernel_of_its_own():
    def two_readers(net, v):
        y = torch.sigmoid(v * 2)
        z = torch.tanh(y + 1) - y
        return z, F.conv2d(y, net.conv.weight)

    assert run(two_readers, x()) == ["add 0 1.0; tanh 1; sub 2 0", "mul 0 2.0; sigmoid 1"]


def test_readers_in_two_kernels():
    def two_kernels(net, v):
        y = v.exp() * 0.1
        a, b = net.conv(F.silu(y + 1)), net.conv(F.relu(y - 1))
        return a, b

    assert sorted(run(two_kernels, x(), limit=3e-6)) == ["add 0 1.0; silu 1", "exp 0; mul 1 0.1", "sub 0 1.0; relu 1"]


def test_two_readers_in_one_kernel():
    assert run(lambda _, v: (v * 2).sigmoid() * (v * 2), x()) == ["mul 0 2.0; sigmoid 1; mul 2 1"]


def test_smaller_tensors_are_broadcast_and_only_little_is_repeated():
    def gate(net, v, w):
        return v * torch.sigmoid(w) * net.scale

    assert run(gate, x(2, 8, 4, 6), x(2, 1, 4, 6)) == ["sigmoid 0; mul 1 3; mul 4 2"]

    def longer(net, v, w):
        return F.silu(v) * torch.tanh(torch.sigmoid(w * 2) + net.scale)

    assert run(longer, x(2, 8, 4, 6), x(2, 1, 4, 6)) == ["silu 0; mul 1 2.0; sigmoid 4; add 5 2; tanh 6; mul 3 7"]


def test_long_computations_on_small_tensors_are_not_repeated():
    def long(_, v, w):
        return F.silu(v) * w.exp().tanh().abs().sqrt().neg()

    programs = run(long, x(2, 8, 4, 6), x(2, 1, 1, 1))
    assert [p.count(";") + 1 for p in programs] == [4, 3]
    assert programs[1] == "exp 0; tanh 1; abs 2"


def test_at_most_eight_inputs():
    def sums(_, *tensors):
        y = tensors[0]
        for t in tensors[1:]:
            y = y + t
        return y

    programs = run(sums, *(x() for _ in range(12)))
    assert [p.count("add") for p in programs] == [7, 4]


def test_the_bias_of_a_convolution_is_added_by_its_reader():
    def block(net, v):
        return F.gelu(net.conv(v))

    net = Network(block).eval()
    assert run(net, x(), limit=3e-6) == ["add 0 1; gelu 2"]
    fast = build(net, (x(),), None, Plan.of(*PLAN), twin=True)
    (conv,) = calls(fast, torch.ops.aten.conv2d.default)
    assert conv.args[2] is None

    def two(net, v):
        y = net.conv(v)
        return F.gelu(y), y.mean()

    assert run(two, x(), limit=3e-6) == []


def test_transposed_convolutions_too():
    net = nn.Sequential(nn.ConvTranspose2d(4, 6, 2, 2), nn.ReLU())
    assert run(net, x(1, 4, 3, 5)) == ["add 0 1; relu 2"]


def test_single_operators_and_other_types_are_left_alone():
    assert run(lambda _, v: v.sigmoid(), x()) == []
    assert run(lambda _, v: v.softmax(1) * 2, x()) == []
    assert run(lambda _, v: (v.long() * 2 + 1).float().mean(1), x()) == []
    assert run(lambda _, v: (v.double() * 2 + 1).sigmoid(), x()) == []
    assert run(lambda _, v, i: (v * i + i).tanh(), x(), torch.arange(6)) == []
    assert run(lambda _, v: v.pow(1.7).clamp(float("-inf"), 0.5), x().abs()) == []


def test_numbers_on_either_side_and_alpha():
    assert run(lambda _, v: 1 - v.sigmoid(), x()) == ["sigmoid 0; sub 1.0 1"]
    assert run(lambda _, v, w: torch.add(v.neg(), w, alpha=0.5), x(), x()) == ["neg 0; mul 1 0.5; add 2 3"]
    assert run(lambda _, v, w: torch.sub(v.neg(), w, alpha=2), x(), x()) == ["neg 0; mul 1 2.0; sub 2 3"]
    assert run(lambda _, v: torch.rsub(v.abs(), 3, alpha=2), x()) == ["abs 0; mul 1 2.0; sub 3.0 2"]
    assert run(lambda _, v: 3 / (v.abs() + 1), x())[0].startswith("abs 0; add 1 1.0; reciprocal 2; mul 3 3.0")


FUNCTIONS = {
    "clamp": (lambda v: v.clamp(-0.5, 1), "maximum 1 -0.5; minimum 2 1.0"),
    "clamp_min": (lambda v: v.clamp(min=0.25), "maximum 1 0.25"),
    "clamp_max": (lambda v: v.clamp_max(0.25), "minimum 1 0.25"),
    "hardtanh": (lambda v: F.hardtanh(v, -0.5, 0.75), "maximum 1 -0.5; minimum 2 0.75"),
    "relu6": (F.relu6, "maximum 1 0.0; minimum 2 6.0"),
    "hardsigmoid": (F.hardsigmoid, "add 1 3.0; maximum 2 0.0; minimum 3 6.0; div 4 6.0"),
    "hardswish": (F.hardswish, "add 1 3.0; maximum 2 0.0; minimum 3 6.0; div 4 6.0; mul 1 5"),
    "elu": (lambda v: F.elu(v, 0.5), "elu 1 0.5 1.0 1.0"),
    "leaky_relu": (lambda v: F.leaky_relu(v, 0.2), "leaky_relu 1 0.2"),
    "softplus": (lambda v: F.softplus(v, 2, 5), "softplus 1 2.0 5.0"),
    "gelu_tanh": (lambda v: F.gelu(v, approximate="tanh"), "gelu_tanh 1"),
    "mish": (F.mish, "mish 1"),
    "square": (lambda v: v**2, "square 1"),
    "cube": (lambda v: v**3, "cube 1"),
    "power": (lambda v: v.abs() ** -0.5, "abs 1; rsqrt 2"),
    "root": (lambda v: v.abs().sqrt(), "abs 1; sqrt 2"),
    "maximum": (lambda v: torch.maximum(v, v.neg()), "neg 1; maximum 1 2"),
    "minimum": (lambda v: torch.min(v, v.neg()), "neg 1; minimum 1 2"),
    "log": (lambda v: v.abs().log(), "abs 1; log 2"),
    "reciprocal": (lambda v: v.reciprocal(), "reciprocal 1"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_operator(name):
    function, program = FUNCTIONS[name]
    assert run(lambda _, v: function(v * 3), x()) == [f"mul 0 3.0; {program}"]


def test_casts_cost_no_operation():
    assert run(lambda _, v: (v.bfloat16() * 2).float() + v, x(), limit=1e-2) == ["mul 0 2.0; add 1 0"]
    assert run(lambda _, v: v.half().bfloat16(), x(), limit=1e-2) == []


def test_without_a_gpu_it_does_not_apply():
    fast = build(Gated(8, 1).eval(), (x(1, 2, 4, 4, 4),), None, Plan.of(*PLAN))
    assert fast.notes["elementwise"] == "does not apply: requires a CUDA device"
    assert not calls(fast)


def test_changed_weights_are_followed():
    def block(net, v):
        return F.gelu(net.conv(v)) * net.scale + 1

    net, v = Network(block).eval(), x()
    fast = build(net, (v,), None, Plan.of(*PLAN), twin=True)
    assert [node.args[1] for node in calls(fast)] == ["add 0 1; gelu 3; mul 4 2; add 5 1.0"]
    for change in (lambda p: p.mul_(1.5), lambda p: setattr(p, "data", torch.rand_like(p))):
        with torch.no_grad():
            for parameter in net.parameters():
                change(parameter)
            torch.testing.assert_close(fast(v), net(v))


def test_saved_graphs_keep_the_programs(tmp_path):
    net, v = Gated(8, 2).eval(), x(1, 2, 4, 5, 6)
    plan = Plan.of(*PLAN)
    fast = build(net, (v,), None, plan, twin=True)
    save_graph(tmp_path / "a.graph", fast)
    loaded = load_graph(tmp_path / "a.graph", torch.device("cpu"))
    assert loaded is not None
    other = PlanTarget(net, ((v,), {})).restore(plan, *loaded)
    assert [n.args[1:] for n in calls(other)] == [n.args[1:] for n in calls(fast)] != []
    assert torch.equal(other(v), fast(v))


class Shifted(nn.Module):
    """Parts of one projection, each with a constant added in its own way."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 24)
        self.bias = nn.ParameterList(torch.randn(s) for s in ((4,), (4, 1, 1), (1, 4, 1, 1), (4,), (4, 2, 1), (4,)))

    def forward(self, t, v):
        a, b, c, d, e, f = self.linear(t).split([4] * 6, 1)
        a, b, c = a + self.bias[0], b[:, :, None, None] + self.bias[1], self.bias[2] + c.reshape(-1, 4, 1, 1)
        near_misses = (d + self.bias[3]) * d.sum(), e[:, :, None, None] + self.bias[4], f.sub(self.bias[5])
        volume = v + a[:, :, None, None] + b + c
        return (volume, *near_misses)


def test_constants_move_into_the_bias_of_a_product():
    net, args = Shifted().eval(), (x(2, 5), x(2, 4, 3, 3))
    fast = build(net, args, None, Plan.of(*PLAN), twin=True)
    assert "3 constants moved into the bias of a product" in fast.notes["elementwise"], fast.notes
    for factor in (1.0, 1.3):  # the second time with changed weights
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.mul_(factor)
            for y, z in zip(fast(*args), net(*args), strict=True):
                torch.testing.assert_close(y, z)


@pytest.mark.parametrize("names", [PLAN, ("bf16", *PLAN)])
def test_the_projection_of_the_time_carries_the_biases_of_the_blocks(names, tmp_path):
    from tests.factories.networks import make

    net, args = make("convnext")
    plan = Plan.of("time", "fuse_norm", "pointwise", "epilogue", *names)
    fast = build(net, args, None, plan, twin=True)
    moved = fast.notes["elementwise"].partition("; ")[2]
    assert "constants moved" in moved and not moved.startswith("0 "), fast.notes
    small = [
        n for n in fast.runner.inner.graph.nodes if str(n.target) == "aten.add.Tensor" and n.meta["val"].dim() == 2
    ]
    assert not small
    save_graph(tmp_path / "a.graph", fast)
    assert load_graph(tmp_path / "a.graph", torch.device("cpu")) is not None
    with torch.no_grad():
        truth = copy.deepcopy(net).double()(args[0].double(), *args[1:])
    assert (fast(*args).double() - truth).norm() / truth.norm() < (5e-6 if names == PLAN else 5e-2)


@pytest.mark.parametrize("program", ["exp(0)", "__import__ 0", "sigmoid 9", 7])
def test_a_saved_graph_with_another_program_is_not_loaded(program, tmp_path):
    class Chain(nn.Module):
        def forward(self, x):
            return (x * 2).sigmoid() + 1

    fast = build(Chain().eval(), (torch.randn(1, 4, 2, 2, 2),), None, Plan.of("elementwise"), twin=True)
    save_graph(tmp_path / "a.graph", fast)
    content = torch.load(tmp_path / "a.graph", weights_only=True)
    description = json.loads(content["graph"])
    (node,) = [n for n in description["nodes"] if n.get("target") == "voxtune.elementwise.default"]
    node["args"][2] = program
    torch.save({**content, "graph": json.dumps(description)}, tmp_path / "a.graph")
    assert load_graph(tmp_path / "a.graph", torch.device("cpu")) is None
