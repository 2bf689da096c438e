"""The passes, in the order in which they run. The order in which a plan names them does not matter.

A pass's file defines its flags: this list is the only other place that names it. Exact passes keep what is computed, up to the
order of sums; the others change numerics. Every plan is gated in either case.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from voxtune.errors import InputError
from voxtune.plan.passes.attention import SDPA
from voxtune.plan.passes.base import Context, Pass, PassOutcome, PassStage, Precision
from voxtune.plan.passes.cleanup import CLEANUP
from voxtune.plan.passes.convolution import CONV3D, EDGES, EPILOGUE, POINTWISE
from voxtune.plan.passes.elementwise import ELEMENTWISE
from voxtune.plan.passes.execution import COMPILE, CUDA_GRAPH, CUDNN_BENCHMARK, HEAP, STRICT, TF32
from voxtune.plan.passes.half import BF16, FP16
from voxtune.plan.passes.layout import CHANNELS_LAST
from voxtune.plan.passes.norm import FUSE_NORM
from voxtune.plan.passes.resampling import DOUBLING, STRIDED
from voxtune.plan.passes.small_images import SMALL_IMAGES
from voxtune.plan.passes.time import TIME
from voxtune.plan.passes.upsample import UPSAMPLE

PASSES: tuple[Pass, ...] = (
    STRICT,
    TF32,
    CUDNN_BENCHMARK,
    CLEANUP,
    SDPA,
    TIME,
    SMALL_IMAGES,
    FUSE_NORM,
    DOUBLING,
    UPSAMPLE,
    EDGES,
    CONV3D,
    STRIDED,
    POINTWISE,
    EPILOGUE,
    BF16,
    FP16,
    ELEMENTWISE,
    CHANNELS_LAST,
    COMPILE,
    CUDA_GRAPH,
    HEAP,
)
BY_NAME = {p.name: p for p in PASSES}

__all__ = ["BY_NAME", "PASSES", "Context", "Pass", "PassOutcome", "PassStage", "check_names", "precision_of", "select"]


def select(*parts: PassStage | Precision) -> tuple[str, ...]:
    """Names of the passes of each stage, and of the pass that selects each precision."""
    return tuple(p.name for part in parts for p in PASSES if part in (p.stage, p.precision))


def precision_of(names: Iterable[str]) -> Precision:
    """What a plan of these passes computes in."""
    chosen = [p.precision for p in PASSES if p.precision is not None and p.name in set(names)]
    return chosen[-1] if chosen else "fp32"


def check_names(names: list[str]) -> None:
    """Raises for an unknown pass, for one named twice, and for two that exclude each other."""
    for name in names:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"unknown pass {name!r}; choose from {', '.join(BY_NAME)}{hint}")
        if names.count(name) > 1:
            raise InputError(f"pass {name!r} is given twice")
    for name in names:
        for other in BY_NAME[name].excludes:
            if other in names:
                raise InputError(f"pass {name!r} cannot be combined with {other!r}")
