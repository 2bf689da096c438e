"""Each kernel of the backward pass at the shapes of Med-DDPM at 128^3, beside PyTorch's way, with the error against float64.

The bytes of a row are the least traffic: each operand read once, each result written once. Afterwards kernels are timed with
other tiles than their own; these times are printed, but not stored.

    python benchmarks/gpu_gradients.py
    TRITON_INTERPRET=1 python benchmarks/gpu_gradients.py --side 8 --type float32   # no GPU: only the errors
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from results_file import RESULTS, measure, row, show, write
from torch import Tensor

from voxtune.kernels import channel_sums, conv3d, edge_gradients, group_norm, packing, upsample_backward
from voxtune.kernels import group_norm_backward as norms
from voxtune.kernels import stem_conv as stem

aten = torch.ops.aten
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRIAL_LIMIT_S = 40


def lasting(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, ...]
    own: Callable[[], Any]
    plain: Callable[[], Any]
    truth: Callable[[], Any]  # in float64
    moved: int  # bytes
    products: int = 0  # floating-point operations


class Cases:
    def __init__(self, side: int, dtype: torch.dtype):
        self.side, self.dtype = side, dtype

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, device=DEVICE, dtype=dtype or self.dtype)
        return lasting(x) if x.dim() == 5 else x

    def __iter__(self) -> Iterator[Case]:
        for C, divisor in ((64, 2), (128, 4), (192, 8), (256, 16)):
            if self.side // divisor:
                yield self.upsampling(C, self.side // divisor)
        for few in (1, 2):
            yield self.stem_weight(few)
        yield self.head_weight()
        yield self.head_data()
        for C, divisor in ((64, 1), (128, 4)):
            yield self.sums(C, self.side // divisor)
        yield self.norm((64,), self.side)
        yield self.norm((64,), self.side, addend=True)
        yield self.norm((64, 64), self.side)
        yield self.norm((128,), self.side // 4)
        K, C = (256, 512) if self.side >= 64 else (48, 40)
        yield from self.packing(K, C)

    def upsampling(self, C: int, side: int) -> Case:
        dy = self.random(1, C, *[2 * side] * 3)
        size = list(dy.shape[2:])

        def plain() -> Tensor:
            return aten.upsample_trilinear3d_backward(dy, size, [1, C, side, side, side], False, 2.0, 2.0, 2.0)

        return Case(
            "upsampling",
            (C, side),
            lambda: upsample_backward.upsample_backward(dy, "linear"),
            plain,
            lambda: upsample_backward.upsample_backward_reference(dy.double(), "linear"),
            dy.nbytes * 9 // 8,
        )

    def convolution_backward(self, dy: Tensor, x: Tensor, weight: Tensor, *, data: bool) -> Tensor:
        ones = [1, 1, 1]
        both = aten.convolution_backward(
            *(dy, x, weight, None, ones, ones, ones, False, [0, 0, 0], 1), [data, not data, False]
        )
        return both[0 if data else 1]

    def stem_weight(self, few: int) -> Case:
        x, dy = self.random(1, few, *[self.side] * 3, dtype=torch.float32), self.random(1, 64, *[self.side] * 3)
        weight = self.random(64, few, 3, 3, 3)
        half = x.to(self.dtype)
        return Case(
            "stem weight",
            (few, 64, self.side),
            lambda: edge_gradients.tap_sums(x, dy, ahead=True)[0],
            lambda: self.convolution_backward(dy, x.to(self.dtype), weight, data=False),
            lambda: edge_gradients.tap_sums_reference(half.double(), dy.double(), ahead=True)[0],
            dy.nbytes + x.nbytes,
            2 * 27 * few * dy.numel(),
        )

    def head_weight(self) -> Case:
        dy, x = self.random(1, 1, *[self.side] * 3, dtype=torch.float32), self.random(1, 64, *[self.side] * 3)
        weight = self.random(1, 64, 3, 3, 3)
        half = dy.to(self.dtype)
        return Case(
            "head weight",
            (64, 1, self.side),
            lambda: edge_gradients.tap_sums(dy, x, ahead=False)[0],
            lambda: self.convolution_backward(dy.to(self.dtype), x, weight, data=False),
            lambda: edge_gradients.tap_sums_reference(half.double(), x.double(), ahead=False)[0],
            x.nbytes + dy.nbytes,
            2 * 27 * x.numel(),
        )

    def head_data(self) -> Case:
        dy, x = self.random(1, 1, *[self.side] * 3, dtype=torch.float32), self.random(1, 64, *[self.side] * 3)
        weight = self.random(1, 64, 3, 3, 3)
        opposite = weight.flatten(2).flip(2).transpose(0, 1).unflatten(2, (3, 3, 3))
        half = dy.to(self.dtype)
        return Case(
            "head data",
            (64, 1, self.side),
            lambda: stem.stem((dy,), stem.pack_stem(opposite, (1,), self.dtype)),
            lambda: self.convolution_backward(dy.to(self.dtype), x, weight, data=True),
            lambda: stem.stem_reference((half.double(),), opposite.double()),
            x.nbytes + dy.nbytes,
            2 * 27 * x.numel(),
        )

    def sums(self, C: int, side: int) -> Case:
        dy = self.random(1, C, side, side, side) + 1
        return Case(
            "sum over voxels",
            (C, side),
            lambda: channel_sums.channel_sums(dy).sum(1),
            lambda: dy.movedim(1, -1).flatten(1, -2).sum(1, dtype=torch.float32),
            lambda: dy.double().flatten(2).sum(2),
            dy.nbytes,
        )

    def norm(self, channels: tuple[int, ...], side: int, *, addend: bool = False) -> Case:
        """GroupNorm and SiLU; `addend`: the gradient of another operator that read the source is added."""
        C = sum(channels)
        sources = tuple(self.random(1, c, side, side, side) + 1 for c in channels)
        dy, weight, bias = self.random(1, C, side, side, side), *(self.random(C, dtype=torch.float32) for _ in "wb")
        affine = group_norm.norm_act_and_affine(sources, weight, bias, 32, 1e-5, None, "silu")[1]
        more = tuple(torch.randn_like(s) for s in sources) if addend else ()
        x = torch.cat(sources, 1).contiguous()
        half = weight.to(x.dtype), bias.to(x.dtype)
        z, mean, rstd = aten.native_group_norm(x, *half, 1, C, side**3, 32, 1e-5)

        def plain() -> Tensor:
            dz = aten.silu_backward(dy, z).contiguous()
            dx = aten.native_group_norm_backward(dz, x, mean, rstd, half[0], 1, C, side**3, 32, [True] * 3)[0]
            return dx + torch.cat(more, 1) if more else dx

        def truth() -> Tensor:
            wide = tuple(s.double() for s in sources)
            both = norms.norm_act_backward_reference(
                *(dy.double(), wide, weight.double(), bias.double(), 32, 1e-5, None, "silu")
            )
            dx = torch.cat(both.sources, 1)
            return dx + torch.cat(more, 1).double() if more else dx

        def own() -> tuple[Tensor, ...]:
            return norms.norm_act_backward(dy, sources, affine, weight, 32, None, "silu", addends=more).sources

        name = "norm and an addend" if addend else "norm"
        return Case(name, (*channels, side), own, plain, truth, (4 if addend else 3) * dy.nbytes)

    def packing(self, K: int, C: int) -> Iterator[Case]:
        weight = self.random(K, C, 3, 3, 3, dtype=torch.float32).contiguous()
        packed = packing.pack_taps(weight, self.dtype)
        given = packed.double()
        shape = (K, C, 27)
        yield Case(
            "pack",
            shape,
            lambda: packing.pack_taps(weight, self.dtype),
            lambda: conv3d.pack(weight).to(self.dtype),
            lambda: conv3d.pack(weight.double()),
            weight.nbytes + packed.nbytes,
        )
        yield Case(
            "unpack",
            shape,
            lambda: packing.unpack_taps(packed, weight.shape, torch.float32),
            lambda: conv3d.unpack(packed.float()).contiguous(),
            lambda: conv3d.unpack(given),
            weight.nbytes + packed.nbytes,
        )
        yield Case(
            "opposite",
            shape,
            lambda: packing.opposite_taps(packed, 0, C),
            lambda: packed.flip(0).transpose(1, 2).contiguous(),
            lambda: packing.opposite_reference(given, 0, C),
            2 * packed.nbytes,
        )


def error_of(y: Any, truth: Tensor) -> float:
    y = torch.cat(y, 1) if isinstance(y, tuple) else y
    y = y.double().reshape(truth.shape) if y.shape == truth.shape or y.numel() != truth.numel() else _as_taps(y, truth)
    return float((y.double() - truth).norm() / truth.norm())


def _as_taps(weight: Tensor, truth: Tensor) -> Tensor:
    """A weight's gradient (M, C, 3, 3, 3) as (taps, F, C), as the kernel of stem and head gives it."""
    by_taps = weight.flatten(2).permute(2, 0, 1)
    return by_taps if by_taps.shape == truth.shape else by_taps.transpose(1, 2)


def rows_of(case: Case) -> list[dict[str, Any]]:
    truth = case.truth()
    errors = {name: error_of(method(), truth) for name, method in (("voxtune", case.own), ("torch", case.plain))}
    del truth
    rows: list[dict[str, Any]] = []
    for name, method in (("voxtune", case.own), ("torch", case.plain)):
        if DEVICE == "cpu":
            print(f"{name} {case.name} {case.shape}: error {errors[name]:.2e}")
            continue
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        entry = row(f"{name} {case.name}", list(case.shape), measure(method, calls=2, replays=15), peak, errors[name])
        ms = entry["p50_ms"]
        entry["tb_s"] = round(case.moved / ms / 1e9, 2) if ms else None
        entry["tflop_s"] = round(case.products / ms / 1e9, 1) if ms and case.products else None
        rows.append(entry)
        print(
            f"  {entry['name']:28} {entry['shape']!s:18} {entry['tb_s']} TB/s  {entry['tflop_s']} TFLOP/s", flush=True
        )
    return rows


def trials(cases: Cases) -> None:
    """Times of the largest shapes with other tiles."""
    end, side = time.perf_counter() + TRIAL_LIMIT_S, cases.side
    plans: list[tuple[Case, Any, str, list[Any]]] = [
        (cases.upsampling(64, side // 2), upsample_backward, "TILE", [2048, 4096, 8192]),
        (cases.upsampling(64, side // 2), upsample_backward, "LONGEST_WALK", [4, 16, 32]),
        (cases.sums(64, side), channel_sums, "TILE", [4096, 8192, 16384]),
        (cases.sums(64, side), channel_sums, "STAGES", [1, 2, 6]),
        (cases.norm((64,), side), norms, "SUMS_STAGES", [1, 2, 3, 4]),
        (cases.norm((64,), side), norms, "SUMS_TILE", [1024, 2048, 4096]),
        (cases.norm((64,), side), norms, "GRADIENT_TILE", [1024, 2048, 4096]),
        (cases.norm((64,), side, addend=True), norms, "GRADIENT_TILE", [1024, 2048, 4096]),
        (cases.norm((64,), side, addend=True), norms, "LONGEST_WALK", [1, 4, 16]),
        (cases.head_weight(), edge_gradients, "LONGEST_RUN", [32, 64, 128]),
        (cases.stem_weight(2), edge_gradients, "GATHER", [2048, 4096, 8192]),
    ]
    for case, module, constant, values in plans:
        for value in values:
            if time.perf_counter() > end:
                print("  no time left for more tiles")
                return
            try:
                with patch.object(module, constant, value):
                    times = sorted(measure(case.own, calls=2, replays=10))
                print(f"  {case.name} {case.shape} {constant}={value}: {times[len(times) // 2]:.3f} ms", flush=True)
            except Exception as error:
                print(f"  {case.name} {case.shape} {constant}={value}: {type(error).__name__}: {error}"[:200])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--type", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--no-trials", action="store_true", help="skip the tiles that are only printed")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "gradients.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True  # the fastest setting of PyTorch
    cases = Cases(options.side, getattr(torch, options.type))
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows += rows_of(case)
    if DEVICE == "cpu":
        return
    show(rows)
    write(options.out, rows)
    if not options.no_trials:
        trials(cases)


if __name__ == "__main__":
    main()
