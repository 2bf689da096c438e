"""Passes that leave the graph as it is and act when the plan runs; `plan/run.py` applies them."""

from __future__ import annotations

from voxtune.plan.hazards import why_no_compiler
from voxtune.plan.heap import why_no_heap
from voxtune.plan.passes.base import Context, Pass, PassStage


def _why_not_tf32(context: Context) -> str | None:
    return None if context.dtype.itemsize == 4 else "the plan computes in half precision"


def _why_no_heap(context: Context) -> str | None:
    return "PyTorch already reuses GPU memory" if context.device.type != "cpu" else why_no_heap()


STRICT = Pass(
    name="strict",
    summary="float32 products and convolutions without TF32",
    precision="fp32",
)
TF32 = Pass(
    name="tf32",
    summary="TF32 in float32 products and convolutions",
    precision="tf32",
    exact=False,
    excludes=("strict", "bf16", "fp16"),
    needs_gpu=True,
    unavailable=_why_not_tf32,
)
CUDNN_BENCHMARK = Pass(
    name="cudnn_benchmark",
    summary="cuDNN chooses its algorithms by measuring",
    stage=PassStage.AUTOTUNING,
    needs_gpu=True,
)
COMPILE = Pass(
    name="compile",
    summary="torch.compile (Inductor)",
    stage=PassStage.COMPILER,
    unavailable=lambda context: why_no_compiler(context.device),
)
CUDA_GRAPH = Pass(
    name="cuda_graph",
    summary="the whole step as one CUDA graph",
    stage=PassStage.CUDA_GRAPH,
    needs_gpu=True,
)
HEAP = Pass(
    name="heap",
    summary="memory of a CPU step is reused by the next",
    stage=PassStage.MEMORY,
    unavailable=_why_no_heap,
)
