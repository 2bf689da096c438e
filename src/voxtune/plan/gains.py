"""What each pass of a plan gains: the plan is timed without it, and beside that as it is.

A pass that requires it goes with it, so gains do not add up to the gain of the plan: without channels-last volumes, for example,
no kernel of this project applies.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence

import torch

from voxtune.files import one_line
from voxtune.plan.build import PlanTarget
from voxtune.plan.measure import Timing, measure
from voxtune.plan.optimized import Optimized
from voxtune.plan.passes import BY_NAME, PassStage
from voxtune.plan.plan import Plan
from voxtune.plan.run import kernels_ready

log = logging.getLogger("voxtune")
# No further pass is timed after this time.
GAIN_SECONDS = 120.0
# Stages of the passes that are timed, in this order: those with the most effect first.
STAGES = (
    PassStage.CUDA_GRAPH,
    PassStage.CONVOLUTION,
    PassStage.NORM,
    PassStage.LAYOUT,
    PassStage.FUSION,
    PassStage.EDGES,
    PassStage.SHARING,
    PassStage.CLEANUP,
)


def gains(
    target: PlanTarget, network: Optimized, seconds: float, say: Callable[[str], None] = lambda _line: None
) -> dict[str, float]:
    """Milliseconds by pass; passes that could not be left out, or for which no time was left, are missing.

    `network` is the plan as it is kept. Negative: the plan is faster without the pass.
    """
    until = time.monotonic() + seconds
    result: dict[str, float] = {}
    for name in timed_passes(network.plan.names):
        if time.monotonic() >= until:
            break
        try:
            without = target.build(network.plan.without(name))
            with kernels_ready(without, target.inputs):
                pass
            ms = _time(without, target).p50_ms - _time(network, target).p50_ms
        except Exception as error:  # what remains may not run: then the pass has no gain
            log.info("the plan without %s: %s: %s", name, type(error).__name__, one_line(error))
            continue
        result[name] = round(ms, 4)
        also = [other for other in network.plan.names if other not in (name, *without.plan.names)]
        say(f"gain of {name}: {ms:.3g} ms" + (f" (with {', '.join(also)})" if also else ""))
        del without
        gc.collect()
    return result


def timed_passes(names: Sequence[str]) -> list[str]:
    """Those whose gain is measured: they restructure the graph, choose the memory format, or record it."""
    return [name for stage in STAGES for name in names if BY_NAME[name].stage == stage]


def recorded_gains(plan: Plan) -> dict[str, str]:
    """What a report says about the gain of each pass whose gain is measured; nothing for a plan without such evidence."""
    given = plan.evidence.get("gains")
    if not isinstance(given, dict):  # evidence may come from a file
        return {}
    measured = {name: given[name] for name in timed_passes(plan.names) if isinstance(given.get(name), int | float)}
    return {
        name: f"gain {measured[name]:.3g} ms" if name in measured else "gain not measured"
        for name in timed_passes(plan.names)
    }


def _time(network: Optimized, target: PlanTarget) -> Timing:
    gpu = target.device.type == "cuda"
    with torch.no_grad():
        return measure(
            lambda: network(*target.inputs[0], **target.inputs[1]),
            target.device,
            repeats=20 if gpu else 5,
            seconds=0.3 if gpu else 0.5,
            least=3 if gpu else 2,
        )
