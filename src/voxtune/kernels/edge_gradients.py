"""The weight's gradient of a stem and of a head: 3x3(x3) convolutions with few channels on one side.

Why: both are the same sum over all voxels, of a wide tensor's channels times the patch of the narrow one around the voxel:

    stem: dw[k, f, tap] = sum over v of dy[v, k] x[v + tap, f],    head: dw[f, c, tap] = sum over v of x[v, c] dy[v - tap, f].

General kernels pad the narrow side to a width made for 64 channels and take ten times as long as the memory traffic requires.
Here a program walks over runs of voxels along w. It reads the wide tensor once, gathers the patches straight from the narrow one,
of any strides and type, as a matrix (taps x channels, voxels), and keeps the whole product in registers. A row of ones in that
matrix gives the sum of the wide tensor, the gradient of the stem's shift, at no cost.

Programs write their sums, which are added in a fixed order: two runs give the same bits.

Legend: N batch, D H W voxels (an image has D = 1), F channels of the narrow tensor, C of the wide one, P programs, R rows of the
product: taps * F + 1, rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.conv3d_tiles import Device
from voxtune.kernels.pointwise import TYPES
from voxtune.kernels.precompile import ready
from voxtune.kernels.stem_conv import FEW, as_volume, span, stem_run

# Values of one gather: those of a lane, and their addresses, stay in registers.
GATHER = 8192
LONGEST_RUN = 64


def tap_sums_reference(narrow: Tensor, wide: Tensor, *, ahead: bool) -> tuple[Tensor, Tensor]:
    """(taps, F, C) and (C,) by PyTorch, in float32 or wider."""
    kind = torch.promote_types(wide.dtype, torch.float32)
    axes = wide.dim() - 2
    x = torch.nn.functional.pad(narrow.to(wide.dtype).to(kind), [1] * (2 * axes))
    y = wide.to(kind)
    parts = []
    for tap in range(3**axes):
        offsets = [tap // 3 ** (axes - 1 - axis) % 3 for axis in range(axes)]
        offsets = offsets if ahead else [2 - offset for offset in offsets]
        shifted = x
        for axis, (offset, side) in enumerate(zip(offsets, wide.shape[2:], strict=True)):
            shifted = shifted.narrow(2 + axis, offset, side)
        parts.append(torch.einsum("nfv,ncv->fc", shifted.flatten(2), y.flatten(2)))
    return torch.stack(parts), y.flatten(2).sum((0, 2))


@triton.jit
def voxtune_tap_sums(
    narrow_ptr,  # (N, F, D, H, W) of any strides
    wide_ptr,  # (N, D, H, W, C)
    sums_ptr,  # (P, R, C) float32
    D,
    H,
    W,
    C,
    runs,  # of all lines of the batch
    stretch,  # runs of one program
    s_n,
    s_f,
    s_d,
    s_h,
    s_w,
    F: tl.constexpr,
    TAPS: tl.constexpr,
    AHEAD: tl.constexpr,  # whether a tap's voxel is at v + tap, else at v - tap
    PRECISION: tl.constexpr,
    R: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    p, blocks_w = tl.program_id(0), tl.cdiv(W, BLOCK_W)
    r, i, c = tl.arange(0, R), tl.arange(0, BLOCK_W), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    tap, f = r // F, r % F
    SIGN: tl.constexpr = 1 if AHEAD else -1
    kd = SIGN * (tap // 9 - 1) if TAPS == 27 else tap * 0
    kh, kw = SIGN * (tap // 3 % 3 - 1), SIGN * (tap % 3 - 1)
    at = (kd * s_d + kh * s_h + kw * s_w + f * s_f)[:, None] + (i * s_w)[None, :]
    wide_at = i[:, None] * C + c[None, :]
    acc = tl.zeros((R, BLOCK_C), tl.float32)
    for run in range(p * stretch, tl.minimum((p + 1) * stretch, runs)):
        line, w0 = run // blocks_w, run % blocks_w * BLOCK_W
        h, d, n = line % H, line // H % D, (line // (H * D)).to(tl.int64)
        w = w0 + i
        row = (tap < TAPS) & (d + kd >= 0) & (d + kd < D) & (h + kh >= 0) & (h + kh < H)
        column = w[None, :] + kw[:, None]
        keep = row[:, None] & (column >= 0) & (column < W)
        first = narrow_ptr + (n * s_n + d.to(tl.int64) * s_d + h.to(tl.int64) * s_h + w0.to(tl.int64) * s_w)
        patch = tl.load(first + at, mask=keep, other=0.0)
        patch = tl.where(r[:, None] == TAPS * F, 1.0, patch.to(tl.float32)).to(wide_ptr.dtype.element_ty)
        # Beyond the line's end the wide values are zero, whatever the patch has there.
        inside = (w < W)[:, None] & (c < C)[None, :]
        wide = tl.load(wide_ptr + (line.to(tl.int64) * W + w0) * C + wide_at, mask=inside, other=0.0)
        acc = tl.dot(patch, wide, acc, input_precision=PRECISION)
    to = sums_ptr + p.to(tl.int64) * R * C + r[:, None] * C + c[None, :]
    tl.store(to, acc, mask=(c < C)[None, :])


def why_not(narrow: Tensor, wide: Tensor) -> str | None:
    """The reason why the kernel does not apply, or None."""
    if narrow.dtype not in TYPES or wide.dtype not in TYPES:
        return f"types {narrow.dtype} and {wide.dtype}: one has no kernel"
    if wide.dim() not in (4, 5) or narrow.shape[0] != wide.shape[0] or narrow.shape[2:] != wide.shape[2:]:
        return f"shapes {tuple(narrow.shape)} and {tuple(wide.shape)}"
    if narrow.shape[1] > FEW or not wide.movedim(1, -1).is_contiguous() or wide.numel() == 0:
        return f"{narrow.shape[1]} channels, of at most {FEW}; or a wide tensor that is not channels-last, or empty"
    if span(narrow) >= 2**31 or narrow.numel() >= 2**31:
        return "2^31 values or more"
    return None


def tap_sums(narrow: Tensor, wide: Tensor, *, ahead: bool) -> tuple[Tensor, Tensor]:
    """(taps, F, C): sums over v of narrow[v + tap] (or v - tap) times wide[v]; and (C,): those of wide. All float32.

    `why_not` must be None.
    """
    (N, F, D, H, W), C = as_volume(narrow).shape, wide.shape[1]
    taps = 3 ** (wide.dim() - 2)
    tile = tile_of(F, taps, C, W, wide.dtype)
    runs, blocks_c = N * D * H * triton.cdiv(W, tile["BLOCK_W"]), triton.cdiv(C, tile["BLOCK_C"])
    stretch = triton.cdiv(runs * blocks_c, programs_of(tile, wide.device))
    P = triton.cdiv(runs, stretch)
    sums = torch.empty((P, tile["R"], C), dtype=torch.float32, device=wide.device)
    ready(voxtune_tap_sums)[(P, blocks_c)](
        *(narrow, wide, sums, D, H, W, C, runs, stretch, *as_volume(narrow).stride()),
        F=F,
        TAPS=taps,
        AHEAD=ahead,
        PRECISION="ieee",
        **tile,
    )
    total = sums.sum(0)
    return total[: taps * F].view(taps, F, C), total[taps * F]


def tile_of(F: int, taps: int, C: int, W: int, dtype: torch.dtype) -> dict[str, int]:
    """The rows of a product, its voxels and channels, its warps and stages. (By arithmetic; not yet measured.)"""
    rows = max(16, triton.next_power_of_2(taps * F + 1))
    full = dtype == torch.float32
    longest = max(16, min(LONGEST_RUN, GATHER // rows) // (2 if full else 1))
    narrow = rows <= 32
    return {
        "R": rows,
        "BLOCK_W": min(longest, stem_run(W, dtype)),
        "BLOCK_C": max(16, min(32 if full else 64, triton.next_power_of_2(C))),
        "num_warps": 4 if narrow else 8,
        "num_stages": 2 if narrow else 1,
    }


def programs_of(tile: dict[str, int], device: torch.device) -> int:
    """As many as run at once: each writes its sums."""
    each = 16 // tile["num_warps"] if tile["R"] < 256 else 1
    return each * Device.of(device).processors
