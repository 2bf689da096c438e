"""Run by test_small_images.py in a separate process: the launches of the 2D ConvNeXt U-Net's plan on an absent GPU.

launches             how often the plan launches each kernel, and how many there are in all
compile ARCH WHICH   registers, stack and instructions of each different launch; WHICH: all, or every n-th
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, ClassVar

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from voxtune.kernels import conv2d, depthwise2d, embedding, gate2d, ops_2d, stem2d
from voxtune.kernels.compiled import dump
from voxtune.plan.api import READY
from voxtune.plan.build import build
from voxtune.workloads import build as make
from voxtune.workloads import workload

MODULES = (conv2d, depthwise2d, embedding, gate2d, stem2d)
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


class Recorder:
    """Takes launches instead of a kernel."""

    launches: ClassVar[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]] = []

    def __init__(self, kernel: Any):
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **options: self.launches.append((self.kernel, args, options))


def plan() -> tuple[list[Any], list[str]]:
    """The launches of one step on 132 multiprocessors, and the names of the other operators that compute."""
    for module in MODULES:
        module.ready = Recorder  # type: ignore[attr-defined]
    for module in (conv2d, depthwise2d, gate2d):
        module.processors_of = lambda _device: 132  # type: ignore[attr-defined]
    ops_2d.runs_kernel = lambda _x, reason, _name: reason is None
    torch.manual_seed(0)
    net = make(workload("convnext").network).eval()
    inputs = torch.randn(1, 3, 64, 64), torch.tensor([60])
    fast = build(net, inputs, None, READY[0].without("cuda_graph", "cudnn_benchmark"), twin=True)
    views = re.compile(r"getitem|unsqueeze|reshape|split")
    others = [
        str(node.target)
        for node in fast.runner.inner.graph.nodes
        if node.op == "call_function" and not views.search(str(node.target)) and "2d.default" not in str(node.target)
    ]
    with torch.no_grad():
        fast.runner.inner(*inputs)
    return Recorder.launches, [name for name in others if "embedding" not in name]


def compiled(arch: int, kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """One launch compiled as Triton would at run time."""
    options = dict(options)
    build_options = {name: options.pop(name) for name in ("num_warps", "num_stages") if name in options}
    signature, constants, attributes = dict.fromkeys(kernel.arg_names, "constexpr"), dict(options), {}
    for position, (name, given) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(given, Tensor):
            signature[name] = TYPES[given.dtype]
            attributes[position,] = [["tt.divisibility", 16]] if given.data_ptr() % 16 == 0 else []
        elif given is None or given == 1:
            constants[name] = given
        else:
            signature[name] = "i32"
            attributes[position,] = [["tt.divisibility", 16]] if given % 16 == 0 else []
    source = ASTSource(
        fn=kernel, signature=signature, constexprs=constants, attrs={k: v for k, v in attributes.items() if v}
    )
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=build_options)
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump(binary.asm["cubin"], "--dump-resource-usage"))
    assert usage
    ptx = binary.asm["ptx"]
    shape = {
        k: v
        for k, v in options.items()
        if k in ("H", "C", "CA", "K", "C2", "SIDE", "SPLIT", "BLOCK_M", "BLOCK_C", "WAYS")
    }
    return {
        "kernel": kernel.fn.__name__,
        "shape": shape,
        "registers": int(usage[1]),
        "stack": int(usage[2]),
        "shared": binary.metadata.shared,
        "products": len(re.findall(r"(?:wgmma\.mma_async|mma)\.sync[^\n]*\.f32\.bf16\.bf16", ptx)),
        "wide_copies": len(re.findall(r"cp\.async\.cg\.shared\.global [^\n]*, 0x10", ptx)),
        "narrow_copies": len(re.findall(r"cp\.async\.ca\.shared\.global [^\n]*, 0x[48]", ptx)),
    }


if __name__ == "__main__":
    launches, others = plan()
    names = [kernel.fn.__name__ for kernel, _, _ in launches]
    answer: Any = {"kernels": {name: names.count(name) for name in dict.fromkeys(names)}, "others": others}
    if sys.argv[1] == "compile":
        different: dict[str, Any] = {}
        for kernel, arguments, options in launches:
            types = [str(a.dtype) if isinstance(a, Tensor) else a for a in arguments]
            different.setdefault(f"{kernel.fn.__name__} {types} {options}", (kernel, arguments, options))
        every = 1 if sys.argv[3] == "all" else int(sys.argv[3])
        answer = [compiled(int(sys.argv[2]), *launch) for launch in list(different.values())[::every]]
    print(json.dumps(answer))
