"""The stem: 7x7 convolution of an image with few channels, as one product.

Why: three input channels are too few for one chunk per tap. The channels of the image are padded to four, so that eight adjacent
pixels are 32 contiguous values. The window is padded to 8 x 8 pixels, with zero weights in the eighth row and column: 256 values
per output pixel, and one matrix product computes the convolution.

Legend: N batch, H W pixels, K output channels, KP padded output channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.convnext.common import release, wait

CHANNELS = 4
COLUMNS = 8 * 8 * CHANNELS


def pack_stem(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Packs a weight (K, C, 7, 7), C <= 4, as (8 rows * 8 columns * 4 channels, K padded)."""
    K, C = weight.shape[:2]
    assert C <= CHANNELS and weight.shape[2:] == (7, 7), weight.shape
    wide = F.pad(weight.detach(), (0, 1, 0, 1, 0, CHANNELS - C))
    packed = wide.permute(2, 3, 1, 0).reshape(COLUMNS, K)
    return F.pad(packed, (0, -K % 16)).to(dtype).contiguous()


@triton.jit
def voxtune_stem(
    x_ptr,  # (N, H, W, 4)
    w_ptr,  # (256, KP)
    bias_ptr,  # (KP,) float32
    y_ptr,  # (N, H, W, K), row stride LDY
    H: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    LDY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):
    TILES_K: tl.constexpr = KP // BLOCK_K
    pid = tl.program_id(0)
    k = pid % TILES_K * BLOCK_K + tl.arange(0, BLOCK_K)
    row = pid // TILES_K * BLOCK_M + tl.arange(0, BLOCK_M)
    n, p = row // (H * W), row % (H * W)
    release(CHAINED)
    wait(CHAINED)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    for first in tl.static_range(0, 256, BLOCK_C):
        r = first + tl.arange(0, BLOCK_C)
        i, j = r // 32 - 3, r % 32 // 4 - 3
        y, x = (p // W)[:, None] + i[None, :], (p % W)[:, None] + j[None, :]
        keep = (y >= 0) & (y < H) & (x >= 0) & (x < W)
        a = tl.load(x_ptr + ((n[:, None] * H + y) * W + x) * 4 + (r % 4)[None, :], mask=keep, other=0.0)
        b = tl.load(w_ptr + r[:, None] * KP + k[None, :])
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    acc += tl.load(bias_ptr + k)[None, :]
    tl.store(y_ptr + row[:, None] * LDY + k[None, :], acc.to(y_ptr.dtype.element_ty), mask=(k < K)[None, :])
