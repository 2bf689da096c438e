"""The first convolution of a 2D network: 3x3 to 7x7 over an image of at most four channels, as one product.

Why: three input channels are too few for one chunk a tap, and cuDNN's 7x7 convolution needs the image channels-last, in half
precision, and its bias by another kernel. Here the window of a pixel is one row of a product: for each channel and line of taps
eight columns, of which the taps are the first. The image is read as it is, of any float type and in any layout.

Legend: N batch, C input channels (at most 4), K output channels, KP padded to a multiple of 16, R = C * lines * 8 padded to 64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.conv2d import TYPES
from voxtune.kernels.group_norm import empty_channels_last
from voxtune.kernels.precompile import ready

SIDES = (3, 5, 7)
MOST_CHANNELS = 4
COLUMNS, CHUNK = 8, 64


def pack_window(weight_KCij: Tensor) -> Tensor:
    """(R, KP), with zeros in the columns that are no taps."""
    wide = F.pad(weight_KCij.detach(), (0, COLUMNS - weight_KCij.shape[3]))
    rows = wide.permute(1, 2, 3, 0).flatten(0, 2)
    return F.pad(rows, (0, -rows.shape[1] % 16, 0, -rows.shape[0] % CHUNK)).contiguous()


def stem2d_reference(x: Tensor, packed: Tensor, shift: Tensor, channels: int, side: int) -> Tensor:
    """The same in plain PyTorch; float32 arithmetic, or float64 for float64 images."""
    wide = torch.promote_types(x.dtype, torch.float32)
    C = x.shape[1]
    rows = packed[: C * side * COLUMNS, :channels].to(wide).reshape(C, side, COLUMNS, channels)[:, :, :side]
    y = F.conv2d(x.to(packed.dtype).to(wide), rows.permute(3, 0, 1, 2), shift[:channels].to(wide), padding=side // 2)
    return y.to(packed.dtype)


@triton.jit
def voxtune_stem2d(
    x_ptr,  # (N, C, H, W), with strides
    w_ptr,  # (R, KP)
    shift_ptr,  # (KP,) float32
    y_ptr,  # (N, H, W, K)
    rows,  # N * H * W
    stride_n,
    stride_c,
    stride_h,
    stride_w,
    C: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    SIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PRECISION: tl.constexpr,
):
    TILES_K: tl.constexpr = KP // BLOCK_K
    pid = tl.program_id(0)
    k = pid % TILES_K * BLOCK_K + tl.arange(0, BLOCK_K)
    row = pid // TILES_K * BLOCK_M + tl.arange(0, BLOCK_M)
    n, p = row // (H * W), row % (H * W)
    at_n = x_ptr + n.to(tl.int64) * stride_n
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for first in tl.static_range(0, R, BLOCK_R):
        r = first + tl.arange(0, BLOCK_R)
        c, i, j = r // (8 * SIDE), r // 8 % SIDE, r % 8
        y, x = (p // W)[:, None] + (i - SIDE // 2)[None, :], (p % W)[:, None] + (j - SIDE // 2)[None, :]
        keep = (y >= 0) & (y < H) & (x >= 0) & (x < W) & ((c < C) & (j < SIDE))[None, :] & (row < rows)[:, None]
        a = tl.load(at_n[:, None] + (c * stride_c)[None, :] + y * stride_h + x * stride_w, mask=keep, other=0.0)
        b = tl.load(w_ptr + r[:, None] * KP + k[None, :])
        acc = tl.dot(a.to(b.dtype), b, acc, input_precision=PRECISION)
    acc += tl.load(shift_ptr + k)[None, :]
    keep_y = (k < K)[None, :] & (row < rows)[:, None]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * K + k[None, :], acc.to(y_ptr.dtype.element_ty), mask=keep_y)


def why_not(x: Tensor, packed: Tensor, side: int) -> str | None:
    """The reason why the kernel does not apply, or None."""
    if x.dtype not in TYPES or packed.dtype not in TYPES:
        return f"types {x.dtype} and {packed.dtype}"
    if x.shape[1] > MOST_CHANNELS or side not in SIDES or x.numel() == 0:
        return f"{x.shape[1]} channels, {side}x{side}"
    return None


def stem2d(x: Tensor, packed: Tensor, shift: Tensor, channels: int, side: int, *, checked: bool = False) -> Tensor:
    """The image (N, K, H, W) in channels-last, of the weight's type. `why_not` must be None; `checked`: the caller called it."""
    assert checked or (reason := why_not(x, packed, side)) is None, reason
    (N, C, H, W), KP = x.shape, packed.shape[1]
    y = empty_channels_last(x, channels, dtype=packed.dtype)
    block_k = 32 if KP % 32 == 0 else 16
    block_m = 32 if N * H * W <= 1 << 14 else 64
    programs = triton.cdiv(N * H * W, block_m) * (KP // block_k)
    ready(voxtune_stem2d)[(programs,)](
        x, packed, shift, y, N * H * W, *x.stride(),
        C=C, H=H, W=W, K=channels, KP=KP, R=packed.shape[0], SIDE=side,
        BLOCK_M=block_m, BLOCK_K=block_k, BLOCK_R=CHUNK, PRECISION="ieee", num_warps=4,
    )  # fmt: skip
    return y
