"""Memory of a training step: what is kept, what is computed again, and that gradients do not change by it."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.factories.networks import REWRITING, make
from voxtune.errors import InputError
from voxtune.kernels.gradients import recipe_of
from voxtune.plan.plan import Plan
from voxtune.plan.recompute import Group, Kept, grouped, kept_bytes, pieces, repeated_bytes
from voxtune.plan.training import training_network
from voxtune.plan.training_memory import TrainingMemory

PLAN = Plan.of(*(n for n in REWRITING if n not in ("elementwise", "small_images")))
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    net, args = make("med_ddpm")
    net = net.double()
    args = tuple(a.double() if a.is_floating_point() else a for a in args)
    return training_network(net, args, None, PLAN), args


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


def test_what_is_kept_is_what_a_step_keeps(network):
    """The figure from shapes against the storages that a real step's hooks see."""
    fast, args = network
    memory = TrainingMemory(fast, args)
    execution = fast.execution(())
    weights = fast.weights()
    own = {w.untyped_storage()._cdata for w in (*weights.values(), *fast.parameters(), *fast.buffers())}
    constants = {t.untyped_storage()._cdata for t in fast.rewritten.buffers()}
    seen = {}

    def pack(x):
        recipe = recipe_of(x)
        for part in (
            [x] if recipe is None else [t for t in torch.utils._pytree.tree_leaves(recipe.kept) if t is not None]
        ):
            if isinstance(part, torch.Tensor) and part.untyped_storage()._cdata not in own | constants:
                seen[part.untyped_storage()._cdata] = (part.untyped_storage().nbytes(), part)
        return x

    execution.hooks = lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    execution(args, weights)
    real = sum(size for size, _ in seen.values())
    assert kept_bytes(memory.kept, ()) == pytest.approx(real, rel=0.02)


def test_larger_groups_keep_less(network):
    fast, args = network
    memory = TrainingMemory(fast, args)
    kept = [step.kept for _, step in memory.choices()]
    assert len(kept) > 1 and kept == sorted(kept, reverse=True) and kept[-1] < 0.7 * kept[0]
    assert all(step.total == step.states + step.weights + step.kept + step.transient for _, step in memory.choices())
    totals = [(step.total, groups) for groups, step in memory.choices()]
    assert memory.within(totals[0][0]) == ()
    tight = min(total for total, _ in totals)
    assert dict(totals)[tight] == memory.within(tight) or tight == totals[0][0]
    with pytest.raises(InputError, match="needs at least"):
        memory.within(tight - 1)


def test_kept_bytes_count_each_tensor_once():
    kept = [Kept(3, 1, 100), Kept(4, 1, 100), Kept(4, 3, 10), Kept(5, 3, 10), Kept(5, 4, 7, again=True)]
    assert kept_bytes(kept, ()) == 110
    assert kept_bytes(kept, [Group(3, 6)]) == 100
    assert repeated_bytes(kept, [Group(3, 6)]) == 10
    assert kept_bytes(kept, [Group(3, 6)], {1: 100, 2: 5}) == 105


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
