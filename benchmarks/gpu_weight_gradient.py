"""The weight gradients of a network's 3x3x3 convolutions: cuDNN, the plain kernel and forms of the Hopper kernel, in one run.

Each method runs in a process of its own, one after the other, and is killed after `--seconds`: a barrier that never completes
costs one method. The processes start and compile together first. A method must reproduce integer results exactly, at odd sizes,
before it is timed; at the sizes of the network its float32 result is compared with float64, for three of the 27 taps.
"""

from __future__ import annotations

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_conv3d import NETWORKS, Shape, flops, shapes_of
from results_file import RESULTS, measure, row, write
from torch import Tensor

from voxtune.kernels import conv3d as cv
from voxtune.kernels import conv3d_weight_gradient as wg
from voxtune.kernels.conv3d_weight_gradient import GradientTile


def _hopper(h: int, w: int, stages: int, **more: Any) -> GradientTile:
    return GradientTile(h=h, w=w, stages=stages, hopper=True, **more)


DEVICE = "cuda"
# In an order in which the first few decide, should the time not suffice for all.
METHODS: dict[str, GradientTile | None] = {
    "hopper 8x8": _hopper(8, 8, 4),
    "cudnn": None,
    "hopper 8x16, 8 warps": _hopper(8, 16, 3, warps=8),
    "triton 4x16": GradientTile(h=4, w=16, stages=3),
    "hopper 8x16": _hopper(8, 16, 3),
    "hopper 8x16, turns": _hopper(8, 16, 3, turns=True),
    "hopper 8x8, turns": _hopper(8, 8, 4, turns=True),
    "hopper 8x16, shared, ahead": _hopper(8, 16, 3, registers=False, ahead=True),
    "hopper 16x8": _hopper(16, 8, 3),
    "hopper 8x8, shared": _hopper(8, 8, 4, registers=False),
    "hopper 8x8, 6 stages": _hopper(8, 8, 6),
    "triton 8x16": GradientTile(h=8, w=16, stages=2),
}
# (batch, channels of each source, output channels, voxels, padding): ragged, batch 2, two sources, several blocks of channels.
EXACT = [
    (1, (64,), 64, (32, 32, 32), cv.AROUND),
    (2, (64, 128), 64, (9, 13, 21), cv.AROUND),
    (1, (40,), 136, (17, 5, 9), cv.AROUND),
    (1, (72,), 8, (11, 10, 12), (0,) * 6),
    (1, (8,), 64, (8, 40, 3), (2, 0, 1, 1, 0, 2)),
]
TAPS = (0, 13, 26)
START_SECONDS = 45  # for all processes together to start and compile


def lasting(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def gradient(method: GradientTile | None, dy: Tensor, sources: list[Tensor], padding: tuple[int, ...], exact: bool):
    """Float32 if `exact`, except for cuDNN."""
    if method is None:
        (x,) = sources
        return torch.ops.aten.convolution_backward(
            *(dy, x, x.new_empty(dy.shape[1], x.shape[1], 3, 3, 3), None, [1] * 3, list(padding[::2]), [1] * 3),
            *(False, [0] * 3, 1, [False, True, False]),
        )[1]
    return wg.weight_gradient(dy, sources, padding, torch.float32 if exact else None, tile=method)


def is_exact(method: GradientTile, case: tuple, dtype: torch.dtype) -> bool:
    N, channels, K, voxels, padding = case
    generator = torch.Generator(DEVICE).manual_seed(0)

    def draw(C: int, size: tuple[int, ...]) -> Tensor:
        return lasting(torch.randint(-2, 3, (N, C, *size), generator=generator, device=DEVICE).to(dtype))

    sources = [draw(c, voxels) for c in channels]
    dy = draw(K, cv.result_size(sources[0], cv.CUBE, padding))
    truth = wg.weight_gradient_reference(dy.double(), [s.double() for s in sources], padding)
    results = [gradient(method, dy, sources, padding, True) for _ in range(2)]
    return all(torch.equal(dw.double(), truth) for dw in results)


def error(dw: Tensor, dy: Tensor, x: Tensor) -> float:
    """Relative error of three taps against float64; dw is (27, K, C)."""
    D, H, W = dy.shape[2:]
    padded = torch.nn.functional.pad(x, (1,) * 6)

    def parts(t: Tensor) -> Tensor:  # sums over 64 parts of the volume: one long sum would fill few multiprocessors
        return t.double().movedim(1, 0).reshape(t.shape[1], 64, -1).movedim(1, 0)

    rows = parts(dy)
    difference, total = 0.0, 0.0
    for tap in TAPS:
        i, j, k = tap // 9, tap // 3 % 3, tap % 3
        columns = parts(padded[:, :, i : i + D, j : j + H, k : k + W])
        truth = (rows @ columns.transpose(1, 2)).sum(0)
        difference += float((dw[tap].double() - truth).square().sum())
        total += float(truth.square().sum())
    return (difference / total) ** 0.5


def timed_shape(name: str, shape: Shape, dtype: torch.dtype) -> dict[str, Any]:
    method = METHODS[name]
    generator = torch.Generator(DEVICE).manual_seed(1)
    size = (shape.D, shape.H, shape.W)
    x, dy = (
        lasting(torch.randn(1, c, *size, generator=generator, device=DEVICE).to(dtype))
        for c in (shape.channels[0], shape.K)
    )

    def run(exact: bool = False) -> Tensor:
        return gradient(method, dy, [x], shape.padding, exact)

    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dw = run(exact=True)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    off = error(dw if method else cv.pack(dw), dy, x)
    times = measure(run, *((2, 12) if flops(shape) > 1e11 else (6, 15)))
    entry = row(name, [*shape.channels, shape.K, *size], times, peak, off)
    entry["us"] = round(entry["p50_ms"] * 1e3, 1)
    return {**entry, "tflop_s": round(flops(shape) / entry["us"] / 1e6, 1), "tile": method and asdict(method)}


def child(name: str, shapes: list[Shape], dtype: torch.dtype) -> None:
    """Compiles, waits for a line on standard input, measures. Prints one JSON object a line."""
    from voxtune.kernels.precompile import compiled_ahead

    method = METHODS[name]
    torch.backends.cudnn.benchmark = True
    x = lasting(torch.zeros(1, 64, 8, 16, 16, device=DEVICE, dtype=dtype))
    if method is not None:
        # Two kernels: the join writes float32 for the checks, and the type of the inputs.
        def rehearse() -> None:
            for exact in (True, False):
                gradient(method, x, [x], cv.AROUND, exact)

        with compiled_ahead(rehearse):
            pass
    say({"ready": True})
    sys.stdin.readline()
    if method is not None:
        wrong = [case for case in EXACT if not is_exact(method, case, dtype)]
        if wrong:
            say({"failed": f"WRONG for {wrong}"})
            return
    for shape in shapes:
        try:
            say(timed_shape(name, shape, dtype))
        except Exception as failure:
            say({"failed": f"{shape}: {failure!r:.300}"})
    say({"done": True})


def say(content: dict[str, Any]) -> None:
    print(json.dumps(content), flush=True)


class Process:
    """A method's process."""

    def __init__(self, name: str, arguments: argparse.Namespace):
        self.name, self.lines = name, queue.Queue[str | None]()
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `end`
        options = [f"--{key}={getattr(arguments, key)}" for key in ("network", "dtype", "shapes")]
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", name, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def results(self, deadline: float) -> Iterator[dict[str, Any]]:
        """What the process prints until it ends or the deadline passes."""
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                yield {"failed": "time limit reached: killed"}
                return
            if line is None:
                self.errors.seek(0)
                yield {"failed": f"ended: {self.errors.read()[-1500:]}"}
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                print(f"  {self.name}: {line.rstrip()}", flush=True)

    def wait_until_ready(self, deadline: float) -> bool:
        content = next(self.results(deadline))
        if not content.get("ready"):
            print(f"FAILED {self.name}: {content}", flush=True)
        return bool(content.get("ready"))

    def run(self, seconds: float) -> list[dict[str, Any]]:
        """The rows that it measured in this time."""
        rows: list[dict[str, Any]] = []
        start = time.monotonic()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            for content in self.results(start + seconds):
                if content.get("done"):
                    break
                if "failed" in content:
                    print(f"FAILED {self.name}: {content['failed']}", flush=True)
                else:
                    rows.append(content)
        except OSError as failure:
            print(f"FAILED {self.name}: {failure}", flush=True)
        self.end()
        largest = f", the first at {rows[0]['tflop_s']} TFLOP/s" if rows else ""
        print(f"{self.name}: {len(rows)} shapes in {time.monotonic() - start:.1f} s{largest}", flush=True)
        return rows

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.errors.close()


def compare(arguments: argparse.Namespace, counts: dict[Shape, int]) -> None:
    start = time.monotonic()
    names = [name for name in METHODS if not arguments.only or name in arguments.only]
    processes = [Process(name, arguments) for name in names]
    rows: list[dict[str, Any]] = []
    try:
        ready = [p for p in processes if p.wait_until_ready(start + START_SECONDS)]
        print(f"{len(ready)} methods compiled after {time.monotonic() - start:.0f} s", flush=True)
        for process in ready:
            if time.monotonic() - start > arguments.total:
                print(f"FAILED {process.name}: no time left", flush=True)
                continue
            rows += process.run(arguments.seconds)
            save(rows, counts, arguments)
    finally:
        for process in processes:
            process.end()
    show(rows, counts, [p.name for p in ready])
    print(f"{time.monotonic() - start:.0f} s")


def save(rows: list[dict[str, Any]], counts: dict[Shape, int], arguments: argparse.Namespace) -> None:
    """After every method: a run that is stopped keeps what it measured."""
    times = {(*s.channels, *s[1:5]): count for s, count in counts.items()}
    named = [{**r, "times_in_network": times[tuple(r["shape"])]} for r in rows]
    write(arguments.out, named, network=arguments.network, dtype=arguments.dtype)


def show(rows: list[dict[str, Any]], counts: dict[Shape, int], names: list[str]) -> None:
    """TFLOP/s of every method at every shape, and the time of one step."""
    for i, name in enumerate(names):
        print(f"{chr(97 + i)}: {name}")
    print(f"{'TFLOP/s':22}" + "".join(f"{chr(97 + i):>7}" for i in range(len(names))) + "   largest error: cuDNN, own")
    totals = dict.fromkeys(names, 0.0)
    best = 0.0
    for shape, count in counts.items():
        here = {r["name"]: r for r in rows if r["shape"] == [*shape.channels, *shape[1:5]]}
        for name in names:
            totals[name] += (here[name]["us"] if name in here else float("nan")) * count / 1e3
        best += min((r["us"] for r in here.values()), default=float("nan")) * count / 1e3
        label = f"{shape.channels[0]}->{shape.K} {shape.D}x{shape.H}x{shape.W}"
        values = "".join(f"{here[n]['tflop_s']:7.0f}" if n in here else "      -" for n in names)
        errors = [max((r["error"] for n, r in here.items() if (n == "cudnn") == c), default=-1) for c in (True, False)]
        print(f"{label:22}{values}   {errors[0]:.1e} {errors[1]:.1e}")
    print(f"{'ms of one step':22}" + "".join(f"{totals[n]:7.2f}" for n in names) + f"   best of each: {best:.2f}")


def dry() -> None:
    """Resources of every kernel, compiled for sm_90 without a GPU."""
    from voxtune.kernels import conv3d_weight_gradient_hopper as hopper
    from voxtune.kernels.compiled import compiled

    for name, tile in METHODS.items():
        if tile is None:
            continue
        kernel: Any = hopper.voxtune_weight_gradient_hopper if tile.hopper else wg.voxtune_weight_gradient
        arguments: Callable[..., Any] = hopper.arguments if tile.hopper else wg.arguments
        made = compiled(kernel, *arguments(tile, dtype="bf16"), arch=90, warps=tile.warps)
        usage = f"{made.registers} registers, {made.spills} bytes spilled, {made.shared} bytes shared"
        print(f"{name}: {usage}{', serialised' if made.serialised else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--network", choices=list(NETWORKS), default="whole-head")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--shapes", type=int, default=99, help="maximum number of shapes, in decreasing order of cost")
    parser.add_argument("--seconds", type=float, default=20, help="time limit of each method")
    parser.add_argument("--total", type=float, default=80, help="no method starts after this time")
    parser.add_argument("--only", nargs="*", choices=list(METHODS), help="these methods")
    parser.add_argument("--child", choices=list(METHODS), help=argparse.SUPPRESS)
    parser.add_argument("--dry", action="store_true", help="only compile for sm_90 and report resources (needs no GPU)")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "weight_gradient.json")
    arguments = parser.parse_args()
    if arguments.dry:
        dry()
        return
    counts = dict(list(shapes_of(arguments.network).items())[: arguments.shapes])
    if arguments.child:
        child(arguments.child, list(counts), getattr(torch, arguments.dtype))
    else:
        compare(arguments, counts)


if __name__ == "__main__":
    main()
