"""Memory of a training step: what is kept, what is computed again, and that gradients do not change by it."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.factories.networks import REWRITING, make
from voxtune.errors import InputError
from voxtune.plan.plan import Plan
from voxtune.plan.recompute import Group, grouped, merged, pieces, recomputation
from voxtune.plan.training import training_network
from voxtune.plan.training_memory import TrainingMemory
from voxtune.workloads import MedDDPMConfig, build, without_zeros

PLAN = Plan.of(*(n for n in REWRITING if n not in ("elementwise", "small_images")))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    net, args = make("med_ddpm")
    return in_float64(net, args)


def in_float64(net, args):
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    return training_network(net.double(), args, None, PLAN), args


@pytest.fixture(scope="module")
def wide():
    """A network whose activations, not its weights, make up most of a step's memory."""
    torch.manual_seed(0)
    net = without_zeros(build(MedDDPMConfig(base=32, multipliers=(1, 1), attention=())))
    size = (16, 16, 16)
    return in_float64(net, (torch.randn(1, 1, *size), torch.zeros(1, dtype=torch.long), torch.randn(1, 2, *size)))


def gradients(network, args):
    for p in network.parameters():
        p.grad = None
    y = network(*args)
    y = y[0] if isinstance(y, tuple) else y
    y.square().mean().backward()
    return [p.grad.clone() for p in network.parameters() if p.grad is not None]


def test_groups_change_no_gradient(network):
    fast, args = network
    expected = gradients(fast, args)
    graph = fast.rewritten.graph
    for size in (1, 2, 6):
        groups = grouped(graph, size)
        assert groups and len(groups) <= len(pieces(graph))
        fast.recompute(groups)
        calls = count_norms(fast, args)
        own = gradients(fast, args)
        fast.recompute(())
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(own, expected, strict=True)), size
        assert (calls > count_norms(fast, args)) is (size > 1), size


def count_norms(fast, args):
    """Norms that a step computes from their sources: each once, and again where a group is."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        norms = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.norms += "norm_act" in str(func)
            return func(*args, **(kwargs or {}))

    with Count() as count:
        gradients(fast, args)
    return count.norms


@pytest.fixture(scope="module")
def memory(wide):
    fast, args = wide
    return TrainingMemory(fast, args)


@pytest.fixture(scope="module")
def choices(memory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("voxtune.plan.training_memory.MOST_STEPS", 4)
        return list(memory.choices())


@pytest.mark.slow
def test_each_choice_needs_less(memory, choices):
    totals = [step.total for _, step in choices]
    assert len(totals) > 1 and totals == sorted(set(totals), reverse=True)
    assert [memory.step(groups).total for groups, _ in choices] == totals


@pytest.mark.slow
def test_a_budget_is_met_by_what_costs_least(memory, choices, monkeypatch):
    most, least = choices[0][1].total, choices[-1][1].total
    assert memory.within(most) == () and memory.computed_twice(()) == 0
    costs = []
    for budget in (most - 1, least):
        groups = memory.within(budget)
        assert groups and memory.step(groups).total <= budget
        costs.append(memory.computed_twice(groups))
    assert costs == sorted(costs) and costs[0] > 0 and costs[-1] < 1
    monkeypatch.setattr("voxtune.plan.training_memory.MOST_STEPS", 1)
    with pytest.raises(InputError, match="needs at least"):
        memory.within(1000)


def test_what_is_chosen_changes_no_gradient(wide, choices):
    fast, args = wide
    expected = gradients(fast, args)
    least = choices[-1][0]
    fast.recompute(least)
    own = gradients(fast, args)
    fast.recompute(())
    assert least and all(torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(own, expected, strict=True))


def test_a_result_is_computed_again_by_the_pieces_from_it_to_its_readers(wide, memory):
    nodes = list(wide[0].rewritten.graph.nodes)
    assert memory.candidates
    for node, (group, cost) in memory.candidates.items():
        inside = nodes[group.first : group.end]
        assert node in inside and set(node.users) <= set(inside) and cost > 0
        again = recomputation(nodes, group)
        assert node in again.results and node in again.nodes
        assert not {user for user in node.users if user.target is torch.ops.voxtune.norm_act.default} - set(inside)


def test_groups_that_overlap_become_one():
    assert merged([Group(5, 8), Group(0, 3), Group(7, 9), Group(9, 10)]) == (Group(0, 3), Group(5, 9), Group(9, 10))


def test_values_of_a_group_are_released_one_by_one(network):
    """Each when nothing can ask for it any more, not when the group's backward pass is over."""
    from voxtune.plan.training import _GroupValues

    fast, args = network
    fast.recompute(grouped(fast.rewritten.graph, 6))
    sizes = []
    before = _GroupValues.__call__

    def watched(self, node):
        y = before(self, node)
        sizes.append((id(self), len(self.values)))
        return y

    _GroupValues.__call__ = watched
    try:
        gradients(fast, args)
    finally:
        _GroupValues.__call__ = before
        fast.recompute(())
    of_one = [[n for i, n in sizes if i == key] for key in {i for i, _ in sizes}]
    longest = max(of_one, key=len)
    assert longest[0] > 1 and longest[-1] < longest[0]


def test_steps_without_gradients_compute_nothing_twice(network):
    fast, args = network
    fast.recompute(grouped(fast.rewritten.graph, 2))
    try:
        with torch.no_grad():
            a = fast(*args)
        fast.recompute(())
        with torch.no_grad():
            b = fast(*args)
        assert torch.equal(a[0] if isinstance(a, tuple) else a, b[0] if isinstance(b, tuple) else b)
    finally:
        fast.recompute(())


def test_a_copy_of_the_network_is_not_needed(network):
    """Nothing of the graph is stored twice: its weights are computed from the parameters."""
    fast, _ = network
    stored = sum(t.numel() for t in fast.rewritten.buffers() if t.device.type != "meta")
    assert stored < 0.01 * sum(p.numel() for p in copy.copy(fast).parameters())
