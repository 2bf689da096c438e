"""Saved graphs: the same network is loaded, and a file cannot run anything else."""

from __future__ import annotations

import errno
import json
import os
from unittest.mock import Mock

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests.factories.networks import EVERY_NETWORK, make
from voxtune.plan import saved_graph
from voxtune.plan.api import CPU_READY, READY, optimize
from voxtune.plan.build import PlanTarget, build
from voxtune.plan.cache import identity, remember
from voxtune.plan.derivation import function_of, name_of
from voxtune.plan.graph import module_of
from voxtune.plan.plan import Plan
from voxtune.plan.saved_graph import load_graph, save_graph

CPU = torch.device("cpu")
ALL_PASSES = READY[0].without("bf16", "cuda_graph", "cudnn_benchmark")


@pytest.fixture
def rewritten():
    net, args = make("med_ddpm")
    return build(net, args, None, ALL_PASSES, twin=True)


@pytest.mark.parametrize("name", EVERY_NETWORK)
def test_the_same_network_is_loaded(name, tmp_path):
    net, args = make(name)
    rewritten = build(net, args, None, ALL_PASSES, twin=True)
    path = tmp_path / "network.graph"
    save_graph(path, rewritten)
    loaded = load_graph(path, CPU)
    assert loaded is not None
    module, notes, derived = loaded
    assert notes == rewritten.notes
    other = PlanTarget(net, (args, {})).restore(ALL_PASSES, module, notes, derived)
    with torch.no_grad():
        left, right = rewritten(*args), other(*args)
    assert type(left) is type(right)
    for a, b in zip(tree_leaves(left), tree_leaves(right), strict=True):
        # Where a weight lies in memory may decide between two of a library's kernels.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for weight_path, weight in module.state_dict().items():
        original = rewritten.runner.inner
        for part in weight_path.split("."):
            original = getattr(original, part)
        assert torch.equal(original, weight)
        assert original.stride() == weight.stride()
    modules = [
        [module_of(n) for n in g.graph.nodes if n.op == "call_function"] for g in (rewritten.runner.inner, module)
    ]
    assert modules[0] == modules[1]
    assert any(path for path, _ in modules[0])


def test_a_full_disk_is_no_error(rewritten, tmp_path, monkeypatch):
    """Only the next process takes longer."""

    errors = {os: ("fsync", OSError(errno.ENOSPC, "No space left on device"))}
    errors[torch] = ("save", RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"))
    for module, (name, error) in errors.items():
        with monkeypatch.context() as patch:
            patch.setattr(module, name, Mock(side_effect=error))
            save_graph(tmp_path / "a.graph", rewritten)
    assert not list(tmp_path.iterdir())


def test_damaged_files_and_other_sources_are_ignored(rewritten, tmp_path, monkeypatch):
    path = tmp_path / "network.graph"
    assert load_graph(path, CPU) is None
    save_graph(path, rewritten)
    content = path.read_bytes()
    for data in (b"", content[: len(content) // 2], b"not a graph"):
        path.write_bytes(data)
        assert load_graph(path, CPU) is None
    path.write_bytes(content)
    monkeypatch.setattr(saved_graph, "sources_hash", lambda: "another")
    assert load_graph(path, CPU) is None


def test_a_file_calls_nothing_but_operators(rewritten, tmp_path):
    path = tmp_path / "network.graph"
    save_graph(path, rewritten)
    content = torch.load(path, weights_only=True)
    for name in ("os.system.x", "aten.nothing.default", "eval", "aten.from_file.default"):
        description = json.loads(content["graph"])
        next(n for n in description["nodes"] if n["op"] == "call_function")["target"] = name
        torch.save({**content, "graph": json.dumps(description)}, path)
        assert load_graph(path, CPU) is None


@pytest.mark.parametrize("notes", [None, [], "x", {"fold": 1}])
def test_notes_of_another_type_are_ignored(rewritten, tmp_path, notes):
    path = tmp_path / "network.graph"
    save_graph(path, rewritten)
    content = torch.load(path, weights_only=True)
    torch.save({**content, "graph": json.dumps({**json.loads(content["graph"]), "notes": notes})}, path)
    assert load_graph(path, CPU) is None


def test_only_the_latest_files_remain(rewritten, tmp_path):
    for k in range(saved_graph.MAX_FILES + 2):
        save_graph(tmp_path / f"{k}.graph", rewritten)
    assert len(list(tmp_path.iterdir())) == saved_graph.MAX_FILES


def test_a_network_that_cannot_be_saved_is_skipped(tmp_path):
    save_graph(tmp_path / "network.graph", build(torch.nn.Linear(1, 1), (torch.zeros(1, 1),), None, Plan.of("strict")))
    assert not list(tmp_path.iterdir())


def test_the_second_call_uses_the_saved_graph(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path))
    net, args = make("convnext")
    made_for = identity(net, (args, {})) | {"precision": "same: fp32"}
    remember(Plan(CPU_READY[0].steps, made_for, {"gate": {"relative": 0.0}}))
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


@pytest.mark.parametrize(
    "name",
    [
        "voxtune.files:delete_file",
        "voxtune.plan.derivation:name_of",
        "voxtune.plan.passes.layout:channels_last",
        "voxtune.kernels.conv3d:unpack",
        "os:system",
        "voxtune.plan.passes.layout:os.system",
        "lasting",
    ],
)
def test_a_file_names_only_functions_that_compute_weights(name):
    with pytest.raises(ValueError, match="function"):
        function_of(name)


def test_weights_follow_after_loading(rewritten, tmp_path):
    path = tmp_path / "network.graph"
    save_graph(path, rewritten)
    loaded = load_graph(path, CPU)
    assert loaded is not None
    assert {
        function_of(name_of(d.function)) for d in loaded[2].derivations.values() if not hasattr(d.function, "_schema")
    }
    net, args = make("med_ddpm")
    other = PlanTarget(net, (args, {})).restore(ALL_PASSES, *loaded)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.1)
        torch.testing.assert_close(other(*args), net(*args), rtol=1e-3, atol=1e-4)
