"""The operations between a U-Net's 3x3x3 convolutions, for all shapes of the whole-head network: 1x1 convolutions over two
sources, additions, upsampling, stem and head, compared with PyTorch (cuDNN, channels-last) and with a copy.

`copy_share` of a row is the time of a device-to-device copy of the minimum traffic (each source read once, the result written
once), divided by the time of the operation. Errors are relative to float64; those of stem and head to float32 without TF32.
Finally, the largest shapes are timed with tiles other than the default; these times are printed, but not stored.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_group_norm import copy_bandwidth
from results_file import RESULTS, measure, row, show, write
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels import head_conv, head_lines, pointwise, stem_conv, upsample

# (channels of each source, output channels, voxels per side): every 1x1 skip convolution, encoder and decoder.
POINTWISE = [
    ((64, 64), 64, 128),
    ((64, 64), 64, 64),
    ((128, 64), 64, 64),
    ((64,), 128, 32),
    ((128, 64), 128, 32),
    ((192, 128), 128, 32),
    ((128,), 192, 16),
    ((192, 128), 192, 16),
    ((256, 192), 192, 16),
    ((192,), 256, 8),
    ((256, 192), 256, 8),
    ((256, 256), 256, 8),
]
ADD = [(64, 128), (64, 64), (128, 32), (192, 16), (256, 8)]
# (channels, voxels per side of the input)
DOUBLED = [(64, 64), (128, 32), (192, 16), (256, 8)]
# (channels of each source, size): of the whole-head and the tumour network.
STEM = [((3,), (128, 128, 128)), ((1, 2), (128, 128, 128)), ((4, 4), (144, 192, 192))]
# (input and output channels, size, whether norm and SiLU are fused)
HEAD = [
    (64, 1, (128,) * 3, False),
    (64, 1, (128,) * 3, True),
    (64, 4, (144, 192, 192), False),
    (32, 3, (128,) * 3, False),
]
HEAD += [(64, 8, (128,) * 3, False)]
# Heads of segmentation networks, stored in float32: (input and output channels, voxels per side)
POINTWISE_HEAD = [(32, 2, 128), (32, 4, 128), (32, 14, 128), (16, 3, 128), (64, 14, 128), (24, 3, 128)]
TRIAL_LIMIT_S = 100

Method = Callable[[], Tensor]


class Bench:
    def __init__(self, dtype: torch.dtype, bandwidth: float):
        self.dtype, self.bandwidth, self.rows = dtype, bandwidth, []

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """A random tensor; channels-last if it has five dimensions."""
        x = torch.randn(*shape, device="cuda", dtype=dtype or self.dtype)
        return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.dim() == 5 else x

    def measure(self, label: str, sources: list[Tensor], truth: Tensor, methods: dict[str, Method]) -> None:
        """Adds a row per method. The minimum traffic is `sources` and the result."""
        for name, method in methods.items():
            y = method()
            error = _error(y, truth)
            traffic = sum(t.numel() * t.element_size() for t in (*sources, y))
            shape = list(y.shape)
            del y
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            method()
            peak = (torch.cuda.max_memory_allocated() - before) / 2**30
            times = measure(method)
            entry = row(f"{name} {label}", shape, times, peak, error)
            share = traffic / self.bandwidth / sorted(times)[len(times) // 2]
            self.rows.append({**entry, "copy_share": round(share, 3)})


def _error(y: Tensor, truth: Tensor) -> float:
    """Relative error, computed in slabs, since a whole volume in float64 would be large."""
    slabs = list(zip(y.split(16, dim=2), truth.split(16, dim=2), strict=True))
    squared_error = sum((a.double() - b.double()).square().sum().item() for a, b in slabs)
    return (squared_error / sum(b.double().square().sum().item() for _, b in slabs)) ** 0.5


def exact_convolution():
    """Float32 without TF32, and without cuDNN's benchmark, which does not pay off for a single call."""
    return torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=False, allow_tf32=False)


def bench_pointwise(bench: Bench) -> None:
    for channels, out, side in POINTWISE:
        sources = tuple(bench.random(1, c, side, side, side) for c in channels)
        weight = bench.random(out, sum(channels)) * 0.1
        bias = bench.random(1, out)
        kernel = weight.view(out, -1, 1, 1, 1).contiguous(memory_format=torch.channels_last_3d)
        truth = pointwise.pointwise_reference(tuple(s.double() for s in sources), weight.double(), bias.double())

        def plain(sources=sources, kernel=kernel, bias=bias) -> Tensor:
            x = torch.cat(sources, dim=1) if len(sources) > 1 else sources[0]
            return F.conv3d(x, kernel, bias[0])

        def ours(sources=sources, weight=weight, bias=bias) -> Tensor:
            return pointwise.pointwise(sources, weight, bias)

        label = f"1x1 {'+'.join(map(str, channels))} -> {out} at {side}"
        bench.measure(label, [*sources], truth, {"torch": plain, "voxtune": ours})
        if side == 128:
            residual = bench.random(1, out, side, side, side)
            truth = truth + residual
            methods = {
                "torch": lambda plain=plain, residual=residual: plain() + residual,
                "voxtune": lambda s=sources, w=weight, b=bias, r=residual: pointwise.pointwise(s, w, b, r),
            }
            bench.measure(f"{label} + residual", [*sources, residual], truth, methods)


def bench_pointwise_head(bench: Bench) -> None:
    for channels, out, side in POINTWISE_HEAD:
        x, weight, bias = (
            bench.random(1, channels, side, side, side),
            bench.random(out, channels) * 0.1,
            bench.random(1, out),
        )
        kernel = weight.view(out, -1, 1, 1, 1).contiguous(memory_format=torch.channels_last_3d)
        truth = pointwise.pointwise_reference((x.double(),), weight.double(), bias.double())
        methods = {
            "torch": lambda x=x, kernel=kernel, bias=bias: F.conv3d(x, kernel, bias[0]).float(),
            "voxtune": lambda x=x, w=weight, b=bias: pointwise.pointwise((x,), w, b, dtype=torch.float32),
        }
        bench.measure(f"1x1 head {channels} -> {out} at {side}", [x], truth, methods)


def bench_add(bench: Bench) -> None:
    for channels, side in ADD:
        a, b = (bench.random(1, channels, side, side, side) for _ in range(2))
        shift = bench.random(1, channels)
        truth = pointwise.add_reference(a.double(), b.double(), shift.double())
        methods = {
            "torch": lambda a=a, b=b, shift=shift: a + b + shift[..., None, None, None],
            "voxtune": lambda a=a, b=b, shift=shift: pointwise.add(a, b, shift),
        }
        bench.measure(f"sum and shift of {channels} at {side}", [a, b], truth, methods)


def bench_upsample(bench: Bench) -> None:
    for channels, side in DOUBLED:
        x = bench.random(1, channels, side, side, side)
        for mode, options in {
            "linear": {"mode": "trilinear", "align_corners": False},
            "nearest": {"mode": "nearest"},
        }.items():
            truth = upsample.upsample_reference(x.double(), mode)
            methods = {
                "torch": lambda x=x, options=options: F.interpolate(x, scale_factor=2, **options),
                "voxtune": lambda x=x, mode=mode: upsample.upsample(x, mode),
            }
            bench.measure(f"{mode} x2 of {channels} from {side}", [x], truth, methods)


def bench_stem(bench: Bench) -> None:
    for channels, voxels in STEM:
        # Inputs as in the sampler: float32, NCDHW. For PyTorch, casting, concatenation and layout are not timed.
        sources = tuple(torch.randn(1, c, *voxels, device="cuda") for c in channels)
        weight, bias = bench.random(64, sum(channels), 3, 3, 3) * 0.2, bench.random(1, 64)
        joined = torch.cat(sources, dim=1).to(bench.dtype).contiguous(memory_format=torch.channels_last_3d)
        with exact_convolution():
            truth = stem_conv.stem_reference((joined.float(),), weight.float(), bias.float())
        packed = stem_conv.pack_stem(weight, channels, bench.dtype)
        methods = {
            "torch": lambda x=joined, w=weight, b=bias: F.conv3d(x, w, b[0], padding=1),
            "voxtune": lambda s=sources, p=packed, b=bias: stem_conv.stem(s, p, b),
        }
        label = f"stem {'+'.join(map(str, channels))} -> 64 at {'x'.join(map(str, voxels))}"
        bench.measure(label, [*sources], truth, methods)


def bench_head(bench: Bench) -> None:
    for channels, out, voxels, norm in HEAD:
        x, weight = bench.random(1, channels, *voxels), bench.random(out, channels, 3, 3, 3) * 0.1
        bias = bench.random(out)
        affine = torch.randn(1, 2, channels, device="cuda") if norm else None
        with exact_convolution():
            truth = head_conv.head_reference(x.float(), weight.float(), bias.float(), affine)
        packed = head_conv.pack_head(weight, bench.dtype)
        by_planes = replace(packed, lines=None)

        def head(packed, x=x, b=bias, a=affine) -> Tensor:
            return head_conv.head(x, packed, b, affine=a, dtype=torch.float32)

        methods = {"voxtune": lambda head=head, p=packed: head(p)}
        if not norm:
            methods |= {
                "voxtune by planes": lambda head=head, p=by_planes: head(p),
                "torch": lambda x=x, w=weight, b=bias: F.conv3d(x, w, b, padding=1),
            }
        label = f"head {'norm, SiLU, ' if norm else ''}{channels} -> {out} at {'x'.join(map(str, voxels))}"
        bench.measure(label, [x], truth, methods)


def trials(dtype: torch.dtype, started: float) -> None:
    """Times tiles other than the default, up to the time limit."""
    bench = Bench(dtype, 1.0)

    def time_trial(label: str, method: Method, *changes, truth: Tensor | None = None) -> None:
        if time.monotonic() - started > TRIAL_LIMIT_S:
            return
        for change in changes:
            change.start()
        try:
            error = "" if truth is None else f"  error {_error(method(), truth):.1e}"
            times = sorted(measure(method))
            print(f"trial {label:60} {times[len(times) // 2]:8.4f} ms{error}", flush=True)
        except Exception as error:
            print(f"trial {label:60} {type(error).__name__}: {str(error)[:80]}", flush=True)
        finally:
            for change in changes:
                change.stop()

    side = (128,) * 3
    large = (144, 192, 192)
    for channels, out, voxels in ((64, 4, large), (64, 1, side), (32, 3, side)):
        x, weight = bench.random(1, channels, *voxels), bench.random(out, channels, 3, 3, 3)
        packed = head_conv.pack_head(weight, dtype)
        with exact_convolution():
            truth = head_conv.head_reference(x.float(), weight.float())
        for w, warps, stages in ((64, 4, 2), (64, 4, 3), (64, 4, 4), (128, 4, 2), (128, 8, 2), (128, 8, 3)):
            for walk in (16, 64):
                tile = {"BLOCK_W": w, "STAGES": stages, "num_warps": warps}
                changes = (
                    patch.object(head_lines, "lines_tile", return_value=tile),
                    patch.object(head_lines, "lines_walk", return_value=walk),
                )
                label = f"head by lines {channels} -> {out}, {w} voxels {warps} warps {stages} stages walk {walk}"
                time_trial(label, lambda x=x, packed=packed: head_conv.head(x, packed), *changes, truth=truth)
    for channels, out in ((32, 14), (32, 3), (64, 4)):
        x, weight = bench.random(1, channels, *side), bench.random(out, channels)
        for v, warps, stages in ((128, 4, 3), (256, 4, 3), (256, 8, 3), (512, 8, 3), (512, 4, 2)):
            tile = {"BLOCK_V": v, "BLOCK_M": 16, "BLOCK_K": channels, "num_warps": warps, "num_stages": stages}
            change = patch.object(pointwise, "tile_of", return_value=tile)
            time_trial(
                f"1x1 head {channels} -> {out}, {v} voxels {warps} warps {stages} stages",
                lambda x=x, weight=weight: pointwise.pointwise((x,), weight, dtype=torch.float32),
                change,
            )
    x = bench.random(1, 64, *side)
    packed_head = replace(head_conv.pack_head(bench.random(1, 64, 3, 3, 3), dtype), lines=None)
    for walk, (h, w, warps, stages) in (
        (32, (8, 16, 4, 3)),
        (16, (8, 16, 4, 3)),
        (32, (16, 16, 8, 3)),
        (32, (16, 16, 8, 2)),
        (32, (8, 32, 8, 3)),
        (32, (8, 16, 4, 2)),
        (128, (8, 16, 4, 3)),
    ):
        tile = {"BLOCK_H": h, "BLOCK_W": w, "BLOCK_M": 1, "num_warps": warps, "num_stages": stages}
        changes = (
            patch.object(head_conv, "head_tile", return_value=tile),
            patch.object(head_conv, "head_walk", return_value=walk),
        )
        time_trial(
            f"head {h}x{w} {warps} warps {stages} stages walk {walk}", lambda: head_conv.head(x, packed_head), *changes
        )
    sources = (torch.randn(1, 1, *side, device="cuda"), torch.randn(1, 2, *side, device="cuda"))
    for widest in (16, 32, 64):
        packed = stem_conv.pack_stem(bench.random(64, 3, 3, 3, 3), (1, 2), dtype, widest=widest)
        for run in (64, 128) if widest == 32 else (128,):
            change = patch.object(stem_conv, "stem_run", return_value=run)
            time_trial(f"stem chunk {widest} run {run}", lambda packed=packed: stem_conv.stem(sources, packed), change)
    y, weight = bench.random(1, 64, *side), bench.random(64, 128)
    for v, warps, stages in ((128, 4, 3), (128, 4, 2), (64, 4, 3), (64, 4, 2), (128, 8, 2), (256, 8, 2)):
        tile = {"BLOCK_V": v, "BLOCK_M": 64, "BLOCK_K": 64, "num_warps": warps, "num_stages": stages}
        change = patch.object(pointwise, "tile_of", return_value=tile)
        label = f"1x1 64+64 -> 64 {v} voxels {warps} warps {stages} stages"
        time_trial(label, lambda: pointwise.pointwise((x, y), weight), change)
    small = bench.random(1, 64, 64, 64, 64)
    for tile, walk in ((1024, 8), (1024, 1), (1024, 4), (1024, 16), (512, 8)):
        changes = (patch.object(upsample, "TILE", tile), patch.object(upsample, "walk_of", return_value=walk))
        time_trial(f"linear x2 tile {tile} walk {walk}", lambda: upsample.upsample(small, "linear"), *changes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "small_kernels.json")
    parser.add_argument("--type", default="bfloat16")
    parser.add_argument("--no-trials", action="store_true")
    arguments = parser.parse_args()
    started = time.monotonic()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # the fastest setting for PyTorch
    torch.backends.cuda.matmul.allow_tf32 = False
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.2f} TB/s")
    bench = Bench(getattr(torch, arguments.type), bandwidth)
    for part in (bench_head, bench_pointwise_head, bench_stem, bench_pointwise, bench_add, bench_upsample):
        part(bench)
        print(f"{part.__name__}: {time.monotonic() - started:.0f} s so far", flush=True)
    write(arguments.out, bench.rows, copy_tb_s=round(bandwidth / 1e9, 3), type=arguments.type)
    if not arguments.no_trials:
        trials(bench.dtype, started)
    show(bench.rows)
    for r in bench.rows:
        if r["name"].startswith("voxtune"):
            print(f"{r['name']:56} {r['p50_ms']:8.3f} ms  {r['copy_share']:.2f} of copy")


if __name__ == "__main__":
    main()
