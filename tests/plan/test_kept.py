"""Rewritten graphs on disk: the same network comes back, and nothing else."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.factories.networks import EVERY_NETWORK, make
from voxtune.plan import saved_graph as subject
from voxtune.plan.api import CPU_READY, READY, optimize
from voxtune.plan.build import PlanTarget, build
from voxtune.plan.cache import identity, remember
from voxtune.plan.graph import module_of
from voxtune.plan.plan import Plan
from voxtune.plan.saved_graph import load_graph, save_graph

CPU = torch.device("cpu")
WHOLE = READY[0].without("bf16", "cuda_graph", "cudnn_benchmark")


@pytest.fixture
def rewritten():
    net, args = make("med_ddpm")
    return build(net, args, None, WHOLE, twin=True)


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_the_same_network_comes_back(name, tmp_path):
    net, args = make(name)
    one = build(net, args, None, WHOLE, twin=True)
    place = tmp_path / "one.graph"
    save_graph(place, one.runner.inner, one.notes, CPU)
    found = load_graph(place, CPU)
    assert found is not None
    module, notes = found
    assert notes == one.notes
    other = PlanTarget(net, (args, {})).restore(WHOLE, module, notes)
    with torch.no_grad():
        left, right = one(*args), other(*args)
    assert type(left) is type(right)
    for a, b in zip(tree_leaves(left), tree_leaves(right), strict=True):
        # Where a weight lies in memory may decide between two of a library's kernels.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for path, weight in module.state_dict().items():
        own = one.runner.inner
        for part in path.split("."):
            own = getattr(own, part)
        assert torch.equal(own, weight)
        assert own.stride() == weight.stride()
    told = [[module_of(n) for n in g.graph.nodes if n.op == "call_function"] for g in (one.runner.inner, module)]
    assert told[0] == told[1]
    assert any(path for path, _ in told[0])


def test_damaged_files_and_other_sources_are_passed_over(rewritten, tmp_path, monkeypatch):
    one = rewritten
    place = tmp_path / "one.graph"
    assert load_graph(place, CPU) is None
    save_graph(place, one.runner.inner, one.notes, CPU)
    whole = place.read_bytes()
    for data in (b"", whole[: len(whole) // 2], b"not a graph"):
        place.write_bytes(data)
        assert load_graph(place, CPU) is None
    place.write_bytes(whole)
    monkeypatch.setattr(subject, "sources_hash", lambda: "another")
    assert load_graph(place, CPU) is None


def test_a_file_calls_nothing_but_operators(rewritten, tmp_path):
    one = rewritten
    place = tmp_path / "one.graph"
    save_graph(place, one.runner.inner, one.notes, CPU)
    found = torch.load(place, weights_only=True)
    for name in ("os.system.x", "aten.nothing.default", "eval"):
        told = json.loads(found["graph"])
        next(n for n in told["nodes"] if n["op"] == "call_function")["target"] = name
        torch.save({**found, "graph": json.dumps(told)}, place)
        assert load_graph(place, CPU) is None


def test_only_the_latest_stay(rewritten, tmp_path):
    one = rewritten
    for k in range(subject.MAX_FILES + 2):
        save_graph(tmp_path / f"{k}.graph", one.runner.inner, one.notes, CPU)
    assert len(list(tmp_path.iterdir())) == subject.MAX_FILES


def test_what_cannot_be_kept_costs_nothing(tmp_path):
    save_graph(tmp_path / "one.graph", torch.nn.Linear(1, 1), {}, CPU)
    assert not list(tmp_path.iterdir())


def test_the_second_process_takes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path))
    net, args = make("convnext")
    remember(Plan(CPU_READY[0].steps, identity(net, (args, {})), {"gate": {}}))
    first = optimize(net, args)
    (graph,) = (tmp_path / "plans").glob("*.graph")
    with monkeypatch.context() as patch:
        patch.setattr("voxtune.plan.build.capture", lambda *a: pytest.fail("captured again"))
        again = optimize(net, args)
        with torch.no_grad():
            assert torch.equal(again(*args), first(*args))
    graph.write_bytes(b"damaged")
    with torch.no_grad():
        assert torch.equal(optimize(net, args)(*args), first(*args))
    assert graph.stat().st_size > 100
