"""The format of all results files: hardware, versions, commit, and rows with times and errors. Also the timers."""

from __future__ import annotations

import itertools
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from voxtune.versions import commit

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def measure(function: Callable[[], Any], calls: int = 4, replays: int = 25) -> list[float]:
    """Times in ms of CUDA graph replays, which exclude launch overhead on the host; a graph contains `calls` calls."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    return [ms / calls for ms in timed(graph.replay, replays, warm=3)]


def timed(run: Callable[[], Any], repeats: int, *, warm: int = 1) -> list[float]:
    """Times in ms of consecutive calls, measured on the GPU."""
    for _ in range(warm):
        run()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    for mark in marks[:-1]:
        mark.record()
        run()
    marks[-1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def row(
    name: str, shape: list[int], times_ms: list[float], peak_gib: float, error: float, **more: Any
) -> dict[str, Any]:
    """A row with p20, p50 and p80 of the times. The error is relative, against float64."""
    cuts = statistics.quantiles(times_ms, n=10, method="inclusive")
    return {
        "name": name,
        "shape": shape,
        "p20_ms": round(cuts[1], 3),
        "p50_ms": round(statistics.median(times_ms), 3),
        "p80_ms": round(cuts[7], 3),
        "peak_gib": round(peak_gib, 3),
        "error": float(f"{error:.3g}"),
    }


def write(path: Path, rows: list[dict[str, Any]], **more: Any) -> None:
    content = {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": _cpu(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
        },
        "commit": commit(),
        **more,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'name':44} {'p50 ms':>10} {'p20':>10} {'p80':>10} {'peak GiB':>9} {'error':>9}")
    for r in rows:
        times = f"{r['p50_ms']:10.2f} {r['p20_ms']:10.2f} {r['p80_ms']:10.2f}"
        print(f"{r['name']:44} {times} {r['peak_gib']:9.3f} {r['error']:9.1e}")


def _cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{names[0].split(':')[1].strip()}, {len(names)} cores" if names else platform.processor()
