"""Plans on a real GPU: the same answer, as a graph, for ours and for others' networks."""

from __future__ import annotations

import pytest
import torch

import voxtune
from tests.factories.in_place import Gated
from tests.factories.networks import make
from voxtune.plan.api import READY
from voxtune.plan.build import PlanTarget, build
from voxtune.plan.tuner import gate_for, judge
from voxtune.workloads import split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_gpu(name):
    if name.startswith("monai"):
        pytest.importorskip("monai")
    if name.startswith("diffusers"):
        pytest.importorskip("diffusers")
    net, args = make(name)
    return net.cuda(), tuple(a.cuda() for a in args)


@pytest.mark.parametrize("plan", READY, ids=lambda p: p.names[0] + f"-{len(p.names)}")
@pytest.mark.parametrize("name", ["med_ddpm", "monai_3d", "monai_2d", "diffusers_2d", "diffusers_3d", "convnext"])
def test_every_ready_plan_passes_the_gate(name, plan):
    net, args = on_gpu(name)
    subject = PlanTarget(net, (args, {}))
    verdict = judge(subject, subject.build(plan), gate_for(subject))
    assert verdict.passed, verdict


@pytest.mark.parametrize("plan", READY, ids=lambda p: p.names[0] + f"-{len(p.names)}")
@pytest.mark.parametrize("depth", [0, 1])
def test_both_parts_of_a_network_pass_the_gate(depth, plan):
    net, args = on_gpu("med_ddpm")
    full, shallow = split(net, depth)
    with torch.no_grad():
        _, deep = full(*args)
    for part, inputs in ((full, args), (shallow, (*args, deep))):
        subject = PlanTarget(part, (inputs, {}))
        verdict = judge(subject, subject.build(plan), gate_for(subject))
        assert verdict.passed, (type(part).__name__, verdict)


def test_a_graph_follows_its_inputs():
    net, args = on_gpu("med_ddpm")
    fast = build(net, args, None, READY[0])
    plain = build(net, args, None, READY[0].without("cuda_graph"))
    for seed in range(3):
        torch.manual_seed(seed)
        x, t = torch.randn_like(args[0]), torch.full_like(args[1], 10 + seed)
        first = fast(x, t, args[2])
        assert torch.equal(first, plain(x, t, args[2]))
        fast(torch.zeros_like(x), t, args[2])
        assert torch.equal(first, plain(x, t, args[2])), "a later step may not touch what was given out"


def test_auto_is_cached_and_samples_the_same(tmp_path, monkeypatch, golden):
    from voxtune.diffusion import DiffusionConfig
    from voxtune.runtime.model import Model, ModelConfig
    from voxtune.workloads import MedDDPMConfig

    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path))
    network, _ = golden
    config = MedDDPMConfig(base=32, multipliers=(1, 2), attention=(2,))
    model = Model(ModelConfig(network=config, size=(16, 16, 16), diffusion=DiffusionConfig(steps=10)), network).to(
        "cuda"
    )
    fast = voxtune.optimize(model)
    mask = torch.ones(1, 2, 16, 16, 16)
    a, b = model.sample(mask, seed=1), fast.sample(mask, seed=1)
    assert float((a - b).norm() / a.norm()) < 0.1
    assert len(list((tmp_path / "plans").glob("*.json"))) == 1
    monkeypatch.setattr("voxtune.plan.api._searched", None)
    voxtune.optimize(model).sample(mask, seed=1)
    model.to("cpu")


@pytest.mark.parametrize("plan", READY, ids=lambda p: p.names[0] + f"-{len(p.names)}")
def test_gates_in_place_are_fused_and_pass_the_gate(plan):
    torch.manual_seed(0)
    subject = PlanTarget(Gated().eval().cuda(), ((torch.randn(1, 2, 24, 20, 28, device="cuda"),), {}))
    fast = subject.build(plan)
    verdict = judge(subject, fast, gate_for(subject))
    assert verdict.passed, verdict
    if "elementwise" in plan.names:
        assert fast.notes["elementwise"].startswith("applied "), fast.notes
        names = [str(n.target) for n in fast.runner.inner.graph.nodes if n.op == "call_function"]
        assert not [name for name in names if "scatter" in name or "sigmoid" in name]
