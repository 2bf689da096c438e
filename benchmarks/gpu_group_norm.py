"""Norms of all shapes of both networks (3D: GroupNorm + SiLU; 2D: one group over all channels): the kernels of this project,
compared with PyTorch and with a copy.

`copy_share` of a row is the time of a device-to-device copy of the minimum traffic (sources read twice, result written once),
divided by the time of the norm.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import torch
import triton
from results_file import RESULTS, measure, row, show, write

from voxtune.kernels.group_norm import group_norm_silu, group_norm_silu_reference

# (channels of each source, voxels per side): every norm of the 3D network, encoder and decoder.
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


# (channels, pixels per side) of the norms of the 2D network: one group, no activation.
FLAT = [(c, s) for c, s in itertools.product((32, 64, 128, 256, 512), (64, 32, 16, 8)) if 16 <= c * s / 64 <= 128]


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written, of a large copy."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / triton.testing.do_bench(lambda: b.copy_(a), return_mode="median")


def rows_of(
    channels: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype, bandwidth: float, *, groups: int, silu: bool
) -> list[dict]:
    torch.manual_seed(0)
    sources = [torch.randn(1, c, *size, device="cuda", dtype=dtype) for c in channels]
    last = tuple(s.movedim(1, -1).contiguous().movedim(-1, 1) for s in sources)
    total = sum(channels)
    weight, bias, shift = (torch.randn(n, device="cuda", dtype=dtype) for n in (total, total, total))
    shift = shift[None]
    wide = tuple(s.double() for s in sources)
    truth = group_norm_silu_reference(wide, weight.double(), bias.double(), groups, shift_NC=shift.double(), silu=silu)

    def torch_norm(parts: tuple) -> torch.Tensor:
        x = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        y = torch.group_norm(x + shift.view(1, -1, *[1] * len(size)), groups, weight, bias, 1e-5)
        return torch.nn.functional.silu(y) if silu else y

    methods = {
        "torch": lambda: torch_norm(tuple(sources)),
        "torch_channels_last": lambda: torch_norm(last),
        "voxtune": lambda: group_norm_silu(last, weight, bias, groups, shift_NC=shift, silu=silu),
    }
    copy_ms = 3 * total * math.prod(size) * dtype.itemsize / bandwidth
    rows = []
    for name, method in methods.items():
        error = ((method().double() - truth).norm() / truth.norm()).item()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        times = measure(method)
        label = f"{name} {'+'.join(map(str, channels))} {str(dtype).removeprefix('torch.')}"
        entry = row(label, [1, total, *size], times, peak, error)
        rows.append({**entry, "copy_share": round(copy_ms / entry["p50_ms"], 3)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "group_norm.json")
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.2f} TB/s")
    rows = []
    for dtype in (getattr(torch, t) for t in arguments.types):
        for channels, side in SHAPES:
            rows += rows_of(channels, (side,) * 3, dtype, bandwidth, groups=32, silu=True)
        for count, side in FLAT:
            rows += rows_of((count,), (side,) * 2, dtype, bandwidth, groups=1, silu=False)
    write(arguments.out, rows, copy_tb_s=round(bandwidth / 1e9, 3))
    show(rows)
    for r in rows:
        if r["name"].startswith("voxtune"):
            print(f"{r['name']:40} {r['shape'][2]:4}  {r['copy_share']:.2f} of copy")


if __name__ == "__main__":
    main()
