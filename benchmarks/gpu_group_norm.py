"""GroupNorm + SiLU on every shape of the whole-head network: this project's kernels against PyTorch, and against a copy.

A row's `copy_share` is the time that a device-to-device copy would need for the norm's least traffic (sources read twice, result
written once) over the time it took.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import torch
import triton
from results_file import RESULTS, row, show, write

from voxtune.kernels.group_norm import group_norm_silu, group_norm_silu_reference

# (channels of each source, side): every norm of the network, encoder and decoder.
SHAPES = [
    ((64,), 128),
    ((64, 64), 128),
    ((64,), 64),
    ((64, 64), 64),
    ((128, 64), 64),
    ((64,), 32),
    ((128,), 32),
    ((128, 64), 32),
    ((192, 128), 32),
    ((128,), 16),
    ((192,), 16),
    ((256, 192), 16),
    ((192, 192), 16),
    ((256,), 8),
    ((256, 256), 8),
    ((256, 192), 8),
]


def measure(function) -> list[float]:
    """Times in ms of graph replays, so that launch gaps of the host stay out; several calls a graph for small shapes."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    calls = 4
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(26)]
    for mark in marks[:-1]:
        mark.record()
        graph.replay()
    marks[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / calls for a, b in itertools.pairwise(marks)]


def copy_bandwidth() -> float:
    """Bytes a millisecond, read and written, of a large copy."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / triton.testing.do_bench(lambda: b.copy_(a), return_mode="median")


def rows_of(channels: tuple[int, ...], side: int, dtype: torch.dtype, bandwidth: float) -> list[dict]:
    torch.manual_seed(0)
    sources = [torch.randn(1, c, side, side, side, device="cuda", dtype=dtype) for c in channels]
    last = tuple(s.to(memory_format=torch.channels_last_3d) for s in sources)
    total = sum(channels)
    weight, bias, shift = (torch.randn(n, device="cuda", dtype=dtype) for n in (total, total, total))
    shift = shift[None]
    truth = group_norm_silu_reference(
        tuple(s.double() for s in sources), weight.double(), bias.double(), 32, shift_NC=shift.double()
    )

    def torch_norm(parts: tuple) -> torch.Tensor:
        x = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return torch.nn.functional.silu(torch.group_norm(x + shift[..., None, None, None], 32, weight, bias, 1e-5))

    methods = {
        "torch": lambda: torch_norm(tuple(sources)),
        "torch_channels_last": lambda: torch_norm(last),
        "voxtune": lambda: group_norm_silu(last, weight, bias, 32, shift_NC=shift),
    }
    floor = 3 * total * side**3 * dtype.itemsize / bandwidth
    rows = []
    for name, method in methods.items():
        error = ((method().double() - truth).norm() / truth.norm()).item()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        times = measure(method)
        what = f"{name} {'+'.join(map(str, channels))} {str(dtype).removeprefix('torch.')}"
        made = row(what, [1, total, side, side, side], times, peak, error)
        rows.append({**made, "copy_share": round(floor / made["p50_ms"], 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "group_norm.json")
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.2f} TB/s")
    rows = [r for t in arguments.types for s in SHAPES for r in rows_of(*s, getattr(torch, t), bandwidth)]
    write(arguments.out, rows, copy_tb_s=round(bandwidth / 1e9, 3))
    show(rows)
    for r in rows:
        if r["name"].startswith("voxtune"):
            print(f"{r['name']:40} {r['shape'][2]:4}  {r['copy_share']:.2f} of copy")


if __name__ == "__main__":
    main()
