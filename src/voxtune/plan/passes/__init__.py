"""The passes, in the order in which they run. A plan names some of them; their order in it does not matter.

Exact passes keep what is computed (up to the order of sums); gated ones change numerics and ask for the gate's limit of
their precision. Every plan is gated all the same.
"""

from __future__ import annotations

import difflib

import torch

from voxtune.errors import InputError
from voxtune.plan.passes.attention import sdpa
from voxtune.plan.passes.base import Context, Outcome, Pass, fusing, needs_gpu, needs_half
from voxtune.plan.passes.cleanup import cleanup
from voxtune.plan.passes.convolution import conv3d, edges, epilogue, pointwise
from voxtune.plan.passes.half import half
from voxtune.plan.passes.layout import channels_last
from voxtune.plan.passes.norm import fuse_norm
from voxtune.plan.passes.time import merge_linears
from voxtune.plan.passes.upsample import upsample


def _not_tf32(context: Context) -> str | None:
    return needs_gpu(context) or (None if context.dtype.itemsize == 4 else "the plan computes in half precision")


def _needs_norm(context: Context) -> str | None:
    return fusing(context) or (None if "fuse_norm" in context.passes else "it leans on fuse_norm, which is not there")


def _half_kernels(context: Context) -> str | None:
    return fusing(context) or needs_half(context)


def _hopper_kernels(context: Context) -> str | None:
    if context.device.type == "cuda" and torch.cuda.get_device_capability(context.device)[0] != 9:
        return "its kernel is made for compute capability 9; cuDNN serves other cards better"
    return _half_kernels(context)


def _needs_compiler(context: Context) -> str | None:
    from voxtune.plan.hazards import why_no_compiler

    return why_no_compiler(context.device)


def _needs_heap(context: Context) -> str | None:
    from voxtune.plan.heap import why_no_heap

    return "a GPU's memory is kept by PyTorch already" if context.device.type != "cpu" else why_no_heap()


PASSES: tuple[Pass, ...] = (
    Pass("strict", "float32 products and convolutions without TF32", "exact"),
    Pass("tf32", "TF32 in float32 products and convolutions", "gated", _not_tf32),
    Pass("cudnn_benchmark", "cuDNN chooses its algorithms by measuring", "exact", needs_gpu),
    Pass("cleanup", "remove what computes nothing, share what is equal", "exact", rewrite=cleanup),
    Pass("sdpa", "attention in one kernel", "exact", rewrite=sdpa),
    Pass("time", "all projections of the time embedding in one product", "exact", rewrite=merge_linears),
    Pass("fuse_norm", "GroupNorm + SiLU + shift in one operator, no concat", "exact", fusing, fuse_norm),
    Pass("upsample", "upsampling by two, channels-last", "exact", fusing, upsample),
    Pass("edges", "own kernels for the stem and the head", "exact", _half_kernels, edges),
    Pass("conv3d", "own 3x3x3 convolutions with their epilogue", "exact", _hopper_kernels, conv3d),
    Pass("pointwise", "own 1x1 convolutions over one or two sources", "exact", fusing, pointwise),
    Pass("epilogue", "bias into the norm; bias and residual in one pass", "exact", _needs_norm, epilogue),
    Pass("bf16", "BF16 weights and volumes, float32 where it matters", "gated", rewrite=half),
    Pass("fp16", "FP16 weights and volumes, float32 where it matters", "gated", rewrite=half),
    Pass("channels_last", "channels innermost in memory", "exact", rewrite=channels_last),
    Pass("compile", "torch.compile (Inductor)", "exact", _needs_compiler),
    Pass("cuda_graph", "the whole step as one CUDA graph", "exact", needs_gpu),
    Pass("heap", "a CPU step's memory is kept for the next", "exact", _needs_heap),
)
BY_NAME = {p.name: p for p in PASSES}

__all__ = ["BY_NAME", "PASSES", "Context", "Outcome", "Pass", "check_names"]


def check_names(names: list[str]) -> None:
    """Raises for an unknown pass, one named twice, or two that exclude each other."""
    for name in names:
        if name not in BY_NAME:
            near = difflib.get_close_matches(name, BY_NAME, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise InputError(f"unknown pass {name!r}: known are {', '.join(BY_NAME)}{hint}")
        if names.count(name) > 1:
            raise InputError(f"pass {name!r} is named twice")
    for pair in (("strict", "tf32"), ("bf16", "fp16"), ("tf32", "bf16"), ("tf32", "fp16")):
        if set(pair) <= set(names):
            raise InputError(f"passes {pair[0]!r} and {pair[1]!r} exclude each other")
