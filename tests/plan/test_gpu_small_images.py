"""Small 2D images on a real GPU: each kernel against float64, and the plan of the ConvNeXt network."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.factories.triton_checks import run_checks
from voxtune.plan.api import READY
from voxtune.plan.build import PlanTarget, build
from voxtune.plan.tuner import gate_for, judge
from voxtune.workloads import build as make
from voxtune.workloads import without_zeros, workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
BAR = {"float32": 2e-6, "float16": 6e-4, "bfloat16": 4e-3}


@pytest.mark.parametrize("what", ["convolution", "depthwise", "gate", "stem", "embedding"])
def test_kernels_against_float64(what):
    rows = run_checks("kernels/small_images_checks.py", "cuda", what, *BAR, interpret=False)
    assert len(rows) >= 3
    for row in rows:
        assert row["error"] < BAR[row["type"]], row


def network(batch, size):
    torch.manual_seed(0)
    net = make(workload("convnext").network)
    without_zeros(net)
    return net.eval().cuda(), (torch.randn(batch, 3, *size, device="cuda"), torch.full((batch,), 60, device="cuda"))


@pytest.mark.parametrize(("batch", "size"), [(1, (64, 64)), (3, (32, 64)), (16, (64, 64))])
def test_the_plan_passes_the_gate_and_repeats_itself(batch, size):
    net, (x, t) = network(batch, size)
    # Samples with times of their own.
    args = (x, t + torch.arange(batch, device="cuda"))
    subject = PlanTarget(net, (args, {}))
    fast = subject.build(READY[0])
    assert fast.notes["small_images"].startswith("applied")
    verdict = judge(subject, fast, gate_for(subject))
    assert verdict.passed, verdict
    with torch.no_grad():
        truth = copy.deepcopy(net).double()(args[0].double(), args[1])
        first = fast(*args)
        assert float((first - truth).norm() / truth.norm()) < 2e-2
        # Split sums are added in a fixed order, and their counters are zero again.
        assert all(torch.equal(first, fast(*args)) for _ in range(20))
        plain = build(net, args, None, READY[0].without("cuda_graph"))
        assert torch.equal(first, plain(*args))


def test_two_streams_run_the_plan_without_a_graph():
    net, args = network(1, (64, 64))
    plain = build(net, args, None, READY[0].without("cuda_graph"))
    with torch.no_grad():
        expected = plain(*args)
        torch.cuda.synchronize()
        streams, results = [torch.cuda.Stream() for _ in range(2)], []
        for _ in range(10):
            for stream in streams:
                with torch.cuda.stream(stream):
                    results.append(plain(*args))
        torch.cuda.synchronize()
    assert all(torch.equal(expected, result) for result in results)
