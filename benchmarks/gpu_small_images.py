"""The 2D ConvNeXt U-Net's plan with and without `small_images`, beside the ladder's hand-made graph; all in one run.

    python benchmarks/gpu_small_images.py            # 64 x 64, batch 1 and 64
    python benchmarks/gpu_small_images.py --kernels  # also the kernels of the plan, in the order of their time

A call includes its copies of inputs and outputs. The step of the ladder is a hundredth of its graph of 100 steps, with
update and noise. Errors are relative, against float64. Nothing is written.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from results_file import timed

from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
from voxtune.ladder.program import Program
from voxtune.ladder.sampling import Loop
from voxtune.plan.api import READY
from voxtune.plan.build import PlanTarget
from voxtune.plan.run import compilers, kernels_ready
from voxtune.workloads import build, without_zeros, workload

STEPS = 100


def network() -> Any:
    torch.manual_seed(0)
    net = build(workload("convnext").network)
    without_zeros(net)
    return net.eval().cuda()


@torch.no_grad()
def plans(batch: int, *, kernels: bool) -> None:
    net = network()
    x, t = torch.randn(batch, 3, 64, 64, device="cuda"), torch.full((batch,), 60, device="cuda")
    truth = network().double()(x.double(), t)
    target = PlanTarget(net, ((x, t), {}))
    for name, plan in (("without small_images", READY[0].without("small_images")), ("with small_images", READY[0])):
        started = time.monotonic()
        with compilers(target.device):
            fast = target.build(plan)
            with kernels_ready(fast, target.inputs):
                pass
            y = fast(x, t)
        torch.cuda.synchronize()
        first = time.monotonic() - started
        assert fast.runner.graph is not None
        error = float((y - truth).norm() / truth.norm())
        calls = statistics.median(timed(lambda fast=fast: fast(x, t), 200, warm=20))  # type: ignore[misc]
        graph = statistics.median(timed(fast.runner.graph.recorded.replay, 200, warm=20))
        print(
            f"batch {batch}, {name}: {calls:.3f} ms a call, {graph:.3f} ms the graph alone, error {error:.2e}, "
            f"first answer after {first:.1f} s"
        )
        print("   ", fast.notes.get("small_images", "not in the plan"))
        if kernels:
            profile(fast.runner.graph.recorded.replay)


def profile(step: Any) -> None:
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
        step()
        torch.cuda.synchronize()
    events = [e for e in traced.key_averages() if e.self_device_time_total > 0]
    events.sort(key=lambda e: -e.self_device_time_total)
    total = sum(event.self_device_time_total for event in events) / 1e3
    print(f"    {sum(event.count for event in events)} launches, {total:.3f} ms of kernels")
    for event in events[:16]:
        print(f"      {event.self_device_time_total / 1e3:7.3f} ms {event.count:4d} x  {event.key[:90]}")


@torch.no_grad()
def ladder(batch: int) -> None:
    schedule = make_schedule(DiffusionConfig(schedule="linear", steps=STEPS))
    loop = Loop(Program(network(), (64, 64), batch), schedule, spaced_steps(STEPS, STEPS))
    assert loop.graph is not None
    alone = statistics.median(timed(loop.graph.replay, 20, warm=2)) / STEPS
    image = statistics.median(timed(lambda: loop.sample(1).cpu(), 20, warm=2)) / STEPS
    print(f"batch {batch}, ladder: {alone:.3f} ms a step, {image:.3f} ms with the image in host memory")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,64")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    for batch in map(int, options.batch.split(",")):
        plans(batch, kernels=options.kernels)
        ladder(batch)
