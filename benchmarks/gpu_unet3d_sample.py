"""One denoising step of the published networks on a GPU: PyTorch, torch.compile and the plans of this project.

A run measures all of its rows, each with a newly built network, and computes their errors against float64 (for large sizes
against float32; see `error_against`). `--part breakdown` lists the kernels of one planned step.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from networks import FOREIGN, inputs, network
from results_file import RESULTS, row, show, write
from torch import Tensor, nn

from voxtune.plan.build import IN_FORCE, build
from voxtune.plan.gate import volume_of
from voxtune.plan.plan import Plan
from voxtune.plan.search import FUSED
from voxtune.precision import tf32_allowed
from voxtune.runtime.planned import example_inputs, tuning_target
from voxtune.runtime.planned import optimize as optimize_model

WHOLE = ("bf16", *FUSED, "edges", "conv3d", "cuda_graph")
Step = Callable[[], Any]


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def channels_last(net: nn.Module) -> nn.Module:
    for parameter in net.parameters():
        if parameter.dim() in FORMATS:
            parameter.data = parameter.data.contiguous(memory_format=FORMATS[parameter.dim()])
    return net


def on_gpu(xs: tuple[Tensor, ...], dtype: torch.dtype = torch.float32, last: bool = False) -> tuple[Tensor, ...]:
    def convert(x: Tensor) -> Tensor:
        x = x.cuda().to(dtype) if x.is_floating_point() else x.cuda()
        return x.contiguous(memory_format=FORMATS[x.dim()]) if last and x.dim() in FORMATS else x

    return tuple(convert(x) for x in xs)


def plain(net: nn.Module, xs: tuple[Tensor, ...], *, tf32: bool = False, last: bool = False) -> Step:
    net, xs = (channels_last(net) if last else net).cuda(), on_gpu(xs, last=last)

    def step() -> Any:
        with tf32_allowed(tf32):
            return net(*xs)

    return step


def autocast(net: nn.Module, xs: tuple[Tensor, ...]) -> Step:
    net, xs = net.cuda(), on_gpu(xs)

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return net(*xs)

    return step


def compiled(net: nn.Module, xs: tuple[Tensor, ...]) -> Step:
    """The strongest common configuration: BF16 weights, channels-last, torch.compile."""
    torch._dynamo.reset()
    net, xs = channels_last(net.to(torch.bfloat16)).cuda(), on_gpu(xs, torch.bfloat16, last=True)
    fast = torch.compile(net, dynamic=False)
    torch.backends.cudnn.benchmark = True  # the fastest setting for PyTorch
    return lambda: fast(*xs)


def compiled_autocast(net: nn.Module, xs: tuple[Tensor, ...], mode: str = "default") -> Step:
    """The same for networks that do not accept BF16 weights."""
    torch._dynamo.reset()
    net, xs = channels_last(net).cuda(), on_gpu(xs, last=True)
    fast = torch.compile(net, dynamic=False, mode=mode)
    torch.backends.cudnn.benchmark = True

    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return fast(*xs)

    return step


def planned(*names: str) -> Callable[[nn.Module, tuple[Tensor, ...]], Step]:
    def make(net: nn.Module, xs: tuple[Tensor, ...]) -> Step:
        net, xs = net.cuda(), on_gpu(xs)
        fast = build(net, xs, None, Plan.of(*names))
        notes = {k: v for k, v in fast.notes.items() if v != IN_FORCE}
        print("   ", "; ".join(f"{k}: {v}" for k, v in notes.items()), flush=True)
        return lambda: fast(*xs)

    return make


ROWS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Step]] = {
    "baseline_fp32": plain,
    "tf32": lambda n, x: plain(n, x, tf32=True),
    "channels_last": lambda n, x: plain(n, x, last=True),
    "tf32_channels_last": lambda n, x: plain(n, x, tf32=True, last=True),
    "tf32_channels_last_voxtune_norms": planned("tf32", "channels_last", "cleanup", "fuse_norm"),
    "bf16_autocast": autocast,
    "torch_compile_bf16": compiled,
    "torch_compile_bf16_autocast": compiled_autocast,
    "torch_compile_reduce_overhead_bf16_autocast": lambda n, x: compiled_autocast(n, x, "reduce-overhead"),
    "voxtune_cudnn": planned("bf16", *FUSED, "cuda_graph"),
    "voxtune": planned(*WHOLE),
}
THEIRS = ("bf16_autocast", "torch_compile_bf16_autocast", "voxtune_cudnn", "voxtune")
# Without CUDA graphs, small networks are limited by launch overhead.
IN_2D = (*THEIRS, "torch_compile_reduce_overhead_bf16_autocast")
PARTS: dict[str, tuple[str, tuple[int, ...], tuple[str, ...]]] = {
    "whole_head": (
        "med-ddpm",
        (128, 128, 128),
        tuple(r for r in ROWS if not r.endswith("_bf16_autocast")),
    ),
    "brats": ("med-ddpm-brats", (144, 192, 192), ("torch_compile_bf16", "voxtune")),
    "whole_head_256": ("med-ddpm", (256, 256, 256), ("torch_compile_bf16", "voxtune")),
    "monai": ("monai", (128, 128, 128), THEIRS),
    "monai_2d": ("monai_2d", (256, 256), IN_2D),
    "diffusers_2d": ("diffusers_2d", (256, 256), IN_2D),
    "diffusers_3d": ("diffusers_3d", (16, 32, 32), THEIRS),
}


def timed(step: Step, seconds: float) -> list[float]:
    times: list[float] = []
    deadline = time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < deadline and len(times) < 60):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def reference(net: nn.Module, xs: tuple[Tensor, ...], wide: bool) -> Tensor:
    dtype = torch.float64 if wide else torch.float32
    start = time.monotonic()
    with tf32_allowed(False):
        y = volume_of(copy.deepcopy(net).to("cuda", dtype)(*on_gpu(xs, dtype))).cpu()
    print(f"    reference in {dtype}: {time.monotonic() - start:.1f} s", flush=True)
    return y


@torch.no_grad()
def measure(part: str, labels: list[str] | None, seconds: float) -> list[dict]:
    name, size, names = PARTS[part]
    master, xs = network(name), inputs(name, size)
    wide = part == "whole_head" or part in FOREIGN
    truth = reference(master, xs, wide).double()
    rows = []
    for label in names:
        if labels and label not in labels:
            continue
        gc.collect()
        torch.backends.cudnn.benchmark = False
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start = time.monotonic()
        try:
            step = ROWS[label](copy.deepcopy(master), xs)
            y = volume_of(step()).double().cpu()
            torch.cuda.synchronize()
            first = time.monotonic() - start
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            times = timed(step, seconds)
            torch.cuda.empty_cache()
            # A CUDA graph holds its memory without allocating, so the reserved memory is its peak.
            peak = max(torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()) / 2**30
        except Exception as error:
            print(f"{label}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        error = float((y - truth).norm() / truth.norm())
        entry = row(label if part == "whole_head" else f"{part}_{label}", list(size), times, peak, error)
        details = {"network": name, "weights": "random", "error_against": "float64" if wide else "float32"}
        rows.append(entry | {"first_s": round(first, 2)} | details)
        show(rows[-1:])
        step = None  # type: ignore[assignment]
    return rows


COLD = """
import time; start = time.monotonic()
import logging, torch, sys
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="    %(message)s")
sys.path.insert(0, {here!r})
import gpu_unet3d_sample as bench
from voxtune.plan import optimize
net = bench.network("med-ddpm").cuda()
xs = bench.on_gpu(bench.inputs("med-ddpm", (128, 128, 128)))
ready = time.monotonic()
with torch.no_grad():
    fast = optimize(net, xs, precision="auto")
    fast(*xs)
torch.cuda.synchronize()
torch.cuda.empty_cache()
print("COLD", ready - start, time.monotonic() - ready, "+".join(fast.plan.names))
"""


def cold_start() -> dict[str, float]:
    """Seconds from `optimize` to the end of the first step in a new process: without caches, then with those of the first.

    Python's bytecode is compiled beforehand, as in an installation by pip.
    """
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "VOXTUNE_CACHE": folder,
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "PYTHONPYCACHEPREFIX": f"{folder}/bytecode",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        modules = (
            "torch, torch.export, torch._dynamo, torch.distributed.fsdp, triton, voxtune.plan, voxtune.kernels.ops"
        )
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, env=environment)
        for name in ("cold", "warm"):
            code = COLD.format(here=str(Path(__file__).parent))
            done = subprocess.run(
                [sys.executable, "-c", code], check=False, env=environment, capture_output=True, text=True
            )
            line = next((x for x in done.stdout.splitlines() if x.startswith("COLD")), None)
            if line is None:
                print(done.stderr[-2000:])
                continue
            print("\n".join(x for x in done.stdout.splitlines() if x != line), flush=True)
            _, load, first, plan = line.split()
            times |= {f"{name}_first_step_s": round(float(first), 2), f"{name}_load_s": round(float(load), 2)}
            print(name, "first step", first, "s after loading in", load, "s:", plan, flush=True)
    return times


@torch.no_grad()
def loop(steps: int = 50) -> dict[str, float]:
    """Time per step of a whole DDPM run by `Model.sample` with the plan, including update and noise."""
    model = tuning_target("med-ddpm", "cuda")
    fast = optimize_model(model)
    mask = example_inputs(model)[2]
    times = []
    for _ in range(4):  # the first run selects and checks the plan
        torch.cuda.synchronize()
        start = time.monotonic()
        fast.sample(mask, sampler="ddpm", steps=steps)
        torch.cuda.synchronize()
        times.append((time.monotonic() - start) * 1e3 / steps)
    median = statistics.median(times[1:])
    print(f"sampling: {median:.2f} ms per step, including update and noise", flush=True)
    return {"sampling_ms_a_step": round(median, 3)}


@torch.no_grad()
def breakdown(name: str, size: tuple[int, int, int], top: int = 40) -> list[dict]:
    """GPU time of each kernel of one planned step without CUDA graph, by torch.profiler."""
    net, xs = network(name).cuda(), on_gpu(inputs(name, size))
    fast = build(net, xs, None, Plan.of(*(n for n in WHOLE if n != "cuda_graph")))
    for _ in range(2):
        fast(*xs)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], record_shapes=True) as profile:
        fast(*xs)
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.setdefault(event.name[:90], []).append(event.time_range.elapsed_us() / 1e3)
    ranked = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    total = sum(sum(t) for t in kernels.values())
    print(f"{total:.2f} ms in {sum(len(t) for t in kernels.values())} kernels")
    for kernel, times in ranked[:top]:
        print(f"{sum(times):8.3f} ms {len(times):4d} x  max {max(times):7.3f}  {kernel}")
    return [{"kernel": n, "ms": round(sum(t), 4), "count": len(t)} for n, t in ranked]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--part", default="whole_head,brats,whole_head_256,monai,monai_2d,diffusers_2d,diffusers_3d,cold,loop"
    )
    parser.add_argument("--rows", help="comma-separated names of the rows (default: all)")
    parser.add_argument("--seconds", type=float, default=1.5, help="seconds of timing per row")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "h200" / "unet3d_sample.json")
    arguments = parser.parse_args()
    rows: list[dict] = []
    more: dict[str, object] = {}
    for part in arguments.part.split(","):
        print(f"{part}:", flush=True)
        if part == "cold":
            more |= cold_start()
        elif part == "loop":
            more |= loop()
        elif part == "breakdown":
            more[part] = breakdown("med-ddpm", (128, 128, 128))
        elif part == "breakdown_brats":
            more[part] = breakdown("med-ddpm-brats", (144, 192, 192), top=20)
        else:
            rows += measure(part, arguments.rows.split(",") if arguments.rows else None, arguments.seconds)
        write(arguments.out, rows, **more)
    show(rows)
    print(json.dumps({k: v for k, v in more.items() if not k.startswith("breakdown")}))


if __name__ == "__main__":
    main()
