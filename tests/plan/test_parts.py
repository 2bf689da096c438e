"""The two parts of a network with a feature cache: captured, rewritten, gated and saved like any network."""

from __future__ import annotations

import pytest
import torch

from tests.factories.networks import REWRITING, make
from voxtune.errors import InputError
from voxtune.plan.api import CPU_READY, optimize
from voxtune.plan.build import PlanTarget, build
from voxtune.plan.gate import trajectory_of, volume_of
from voxtune.plan.plan import Plan
from voxtune.plan.saved_graph import load_graph, save_graph
from voxtune.plan.tuner import gate_for, judge
from voxtune.runtime.planned import Planned
from voxtune.workloads import split

pytestmark = pytest.mark.usefixtures("one_thread")

# With own convolutions, and with the library's, whose bias and residual other passes take.
PLANS = (REWRITING, tuple(n for n in REWRITING if n not in ("conv3d", "edges")))


@pytest.fixture(scope="module")
def parts():
    """((full, its inputs), (shallow, its inputs))"""
    network, inputs = make("med_ddpm")
    full, shallow = split(network, 1)
    with torch.no_grad():
        _, deep = full(*inputs)
    return (full, inputs), (shallow, (*inputs, deep))


def outputs(network, inputs):
    with torch.no_grad():
        output = network(*inputs)
    return output if isinstance(output, tuple) else (output,)


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("names", PLANS)
def test_every_pass_leaves_every_output_the_same(parts, which, names):
    part, inputs = parts[which]
    fast = build(part, inputs, None, Plan.of(*names), twin=True)
    assert "applied" in fast.notes["fuse_norm"]
    for a, b in zip(outputs(fast, inputs), outputs(part, inputs), strict=True):
        assert a.dtype == b.dtype
        assert 0 < float((a - b).norm() / b.norm()) < 1e-5


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_gate_admits_half_precision(parts, which):
    part, inputs = parts[which]
    subject = PlanTarget(part, (inputs, {}))
    with torch.no_grad():
        walk = trajectory_of((inputs, {}), volume_of(part(*inputs)), steps=2)
    verdict = judge(subject, subject.build(Plan.of("bf16", *REWRITING), twin=True), gate_for(subject, walk))
    assert verdict.passed, verdict
    assert verdict.figures["relative"] > 1e-4 and "trajectory" in verdict.figures


def test_the_gate_checks_the_deep_feature(parts):
    full, inputs = parts[0]
    gate = gate_for(PlanTarget(full, (inputs, {})))

    def wrong(*args):
        eps, deep = full(*args)
        return eps, deep * 1.01

    verdict = gate.judge(wrong, "fp32")
    assert not verdict.passed and verdict.error == pytest.approx(0.01, rel=1e-3)
    assert gate.judge(full, "fp32").passed


@pytest.mark.parametrize("which", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_given_plan_is_gated_and_its_graph_is_saved(parts, which, tmp_path):
    part, inputs = parts[which]
    fast = optimize(part, inputs, CPU_READY[0])
    assert fast.plan.evidence["gate"]["structure"] < 1e-5
    save_graph(tmp_path / "a.graph", fast)
    module, _, _ = load_graph(tmp_path / "a.graph", torch.device("cpu"))
    for a, b in zip(outputs(module, inputs), outputs(fast, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_planned_network_has_planned_parts(parts):
    inputs = parts[0][1]
    planned = Planned(parts[0][0].network, CPU_READY[0])
    full, shallow = split(planned, 1)
    assert split(planned, 1) == (full, shallow), "made once, as their plans are"
    with torch.no_grad():
        eps, deep = full(*inputs)
        again = shallow(*inputs, deep)
    assert float((again - eps).norm() / eps.norm()) < 1e-5
    assert (
        set(planned.passes) <= set(CPU_READY[0].names) and "channels_last" in planned.passes and not planned.optimized
    )
    with pytest.raises(InputError, match="Linear"):
        split(Planned(torch.nn.Linear(1, 1), "auto"), 1)
