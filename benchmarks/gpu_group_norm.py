"""Norms of several networks, compared with PyTorch and with a copy: GroupNorm + SiLU of the 3D network, one group over all
channels of the 2D network, InstanceNorm + leaky ReLU (+ residual) of nnU-Net, GroupNorm + ReLU of SegResNet, RMS norm + SiLU of a
video autoencoder.

`copy_share` of a row is the time of a device-to-device copy of the minimum traffic (sources read twice, residual read once,
result written once; the RMS norm reads its source once), divided by the time of the norm.
"""

from __future__ import annotations

import argparse
import itertools
import math
from pathlib import Path

import torch
import triton
from results_file import RESULTS, measure, row, write

from voxtune.kernels.group_norm import activation_reference, norm_act, norm_act_reference
from voxtune.kernels.rms_norm import rms_norm_act, rms_norm_act_reference

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
# (channels, voxels per side): the levels of nnU-Net (InstanceNorm, leaky ReLU); multiples of 8 only.
INSTANCE = [(32, 128), (64, 64), (128, 32), (256, 16), (320, 8), (24, 96), (40, 64)]
# (channels, voxels per side): the levels of SegResNet (8 groups, ReLU).
EIGHT = [(32, 128), (64, 64), (128, 32), (256, 16)]
PARTS = ("group", "flat", "instance", "eight", "rms")
# (channels, frames, pixels per side): the levels of the decoder of a video autoencoder.
VIDEO = [(96, 4, 256), (192, 4, 128), (384, 4, 64)]


def copy_bandwidth() -> float:
    """Bytes per millisecond, read and written, of a large copy."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    return 2 * a.numel() / triton.testing.do_bench(lambda: b.copy_(a), return_mode="median")


def rows_of(
    channels: tuple[int, ...],
    size: tuple[int, ...],
    groups: int,
    activation: str,
    residual: bool,
    dtype: torch.dtype,
    bandwidth: float,
) -> list[dict]:
    torch.manual_seed(0)
    total = sum(channels)
    sources = tuple(torch.randn(1, c, *size, device="cuda", dtype=dtype) for c in channels)
    weight, bias, shift = (torch.randn(n, device="cuda", dtype=dtype) for n in (total, total, total))
    # Time embeddings, which networks for segmentation do not have.
    shift_NC = None if activation in ("relu", "leaky_relu") else shift[None]
    added = torch.randn(1, total, *size, device="cuda", dtype=dtype) if residual else None
    last, last_added = tuple(lasting(s) for s in sources), None if added is None else lasting(added)
    wide = (None if x is None else x.double() for x in (shift_NC, added))
    given = (weight.double(), bias.double(), groups, 1e-5, next(wide), activation, 0.01, None, next(wide))
    truth = norm_act_reference(tuple(s.double() for s in sources), *given)

    def torch_norm(parts: tuple, residual: torch.Tensor | None) -> torch.Tensor:
        x = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        if shift_NC is not None:
            x = x + shift.view(1, -1, *[1] * len(size))
        if groups == total:
            y = torch.nn.functional.instance_norm(x, weight=weight, bias=bias)
        else:
            y = torch.group_norm(x, groups, weight, bias, 1e-5)
        return activation_reference(y if residual is None else y + residual, activation)

    methods = {
        "torch": lambda: torch_norm(sources, added),
        "torch_channels_last": lambda: torch_norm(last, last_added),
        "voxtune": lambda: norm_act(last, weight, bias, groups, 1e-5, shift_NC, activation, residual=last_added),
    }
    copy_ms = (4 if residual else 3) * total * math.prod(size) * dtype.itemsize / bandwidth
    what = f"{groups} groups {activation}{' residual' if residual else ''}"
    label = f"{'+'.join(map(str, channels))} {what} {str(dtype).removeprefix('torch.')}"
    return measured(methods, label, [1, total, *size], truth, copy_ms)


def rms_rows(channels: int, frames: int, side: int, dtype: torch.dtype, bandwidth: float) -> list[dict]:
    torch.manual_seed(0)
    x = torch.randn(1, channels, frames, side, side, device="cuda", dtype=dtype)
    last, gamma = lasting(x), torch.randn(channels, 1, 1, 1, device="cuda", dtype=dtype)
    weight = gamma.flatten()
    floor = 1e-12 * channels**-0.5
    truth = rms_norm_act_reference(x.double(), weight.double(), None, 0.0, floor, "silu")

    def torch_norm(x: torch.Tensor) -> torch.Tensor:
        normal = torch.nn.functional.normalize(x.float(), dim=1).to(x.dtype)
        return torch.nn.functional.silu(normal * channels**0.5 * gamma)

    methods = {
        "torch": lambda: torch_norm(x),
        "torch_channels_last": lambda: torch_norm(last),
        "voxtune": lambda: rms_norm_act(last, weight, None, 0.0, floor, "silu"),
    }
    label = f"{channels} rms silu {str(dtype).removeprefix('torch.')}"
    return measured(methods, label, list(x.shape), truth, 2 * x.numel() * dtype.itemsize / bandwidth)


def part_rows(part: str, dtype: torch.dtype, bandwidth: float) -> list[dict]:
    if part == "rms":
        return [r for shape in VIDEO for r in rms_rows(*shape, dtype, bandwidth)]
    cases = {
        "group": [(c, (s,) * 3, 32, "silu", False) for c, s in SHAPES],
        "flat": [((c,), (s,) * 2, 1, "none", False) for c, s in FLAT],
        "instance": [((c,), (s,) * 3, c, "leaky_relu", r) for c, s in INSTANCE for r in (False, True)],
        "eight": [((c,), (s,) * 3, 8, "relu", False) for c, s in EIGHT],
    }
    return [r for case in cases[part] for r in rows_of(*case, dtype, bandwidth)]


def lasting(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


def measured(methods: dict, label: str, shape: list[int], truth: torch.Tensor, copy_ms: float) -> list[dict]:
    rows = []
    for name, method in methods.items():
        error = ((method().double() - truth).norm() / truth.norm()).item()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        method()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        entry = row(f"{name} {label}", shape, measure(method), peak, error)
        rows.append({**entry, "copy_share": round(copy_ms / entry["p50_ms"], 3) if entry["p50_ms"] else None})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "group_norm.json", help="written with all parts")
    parser.add_argument("--types", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    arguments = parser.parse_args()
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.2f} TB/s")
    rows = []
    for dtype in (getattr(torch, t) for t in arguments.types):
        for part in arguments.parts:
            rows += part_rows(part, dtype, bandwidth)
    if set(arguments.parts) == set(PARTS):
        write(arguments.out, rows, copy_tb_s=round(bandwidth / 1e9, 3))
    print(f"{'shape':46} {'torch':>8} {'last':>8} {'voxtune':>8}  copy  error")
    for plain, last, own in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        times = " ".join(f"{r['p50_ms']:8.3f}" for r in (plain, last, own))
        label = own["name"].removeprefix("voxtune ") + f" at {own['shape'][-1]}"
        print(f"{label:46} {times}  {own['copy_share']:.2f}  {own['error']:.1e}")


if __name__ == "__main__":
    main()
