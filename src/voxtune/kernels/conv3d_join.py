"""Adds the partial sums of a convolution whose taps several programs share, with the convolution's epilogue.

Why: small volumes have too few tiles to fill a GPU. The programs of conv3d.py then each compute some of the taps; the sums are
added here in a fixed order, so that results do not depend on timing, and shift, residual and statistics come after the sum.

Legend: N batch, V voxels, K output channels, P stretches of voxels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.group_norm import row_stride
from voxtune.kernels.precompile import ready


def join_reference(partial: Tensor, r_NDHWK: Tensor | None, shift_NC: Tensor | None, splits: int) -> Tensor:
    """The same in plain PyTorch, in float32."""
    y = partial.view(splits, -1, *partial.shape[1:]).sum(0)
    if shift_NC is not None:
        y = y + shift_NC.float()[:, None, None, None]
    return y if r_NDHWK is None else y + r_NDHWK.float()


@triton.jit(do_not_specialize=["N", "V", "splits", "shift_stride"])
def voxtune_conv3d_join(
    partial_ptr,  # (splits, N, V, K) float32
    y_ptr,  # (N, V, K)
    r_ptr,  # (N, V, K) or None
    shift_ptr,  # (N, K) or (1, K) or None
    statistics_ptr,  # (N, P, 3, K) float32 or None
    N,
    V,
    K,
    splits,
    shift_stride,
    BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    p, n = tl.program_id(0), tl.program_id(2)
    v = p * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    keep = (v < V)[:, None] & (k < K)[None, :]
    at = (n.to(tl.int64) * V + v)[:, None] * K + k[None, :]
    y = tl.zeros((BLOCK_V, BLOCK_K), tl.float32)
    for split in range(splits):
        row = (n + split * N).to(tl.int64) * V + v
        y += tl.load(partial_ptr + row[:, None] * K + k[None, :], mask=keep, other=0.0)
    if shift_ptr is not None:
        y += tl.load(shift_ptr + n * shift_stride + k, mask=k < K, other=0.0).to(tl.float32)[None, :]
    if r_ptr is not None:
        y += tl.load(r_ptr + at, mask=keep, other=0.0).to(tl.float32)
    stored = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, stored, mask=keep)
    if statistics_ptr is not None:
        count = tl.minimum(BLOCK_V, V - p * BLOCK_V).to(tl.float32)
        y = tl.where(keep, stored.to(tl.float32), 0.0)
        mean = tl.sum(y, axis=0) / count
        away = tl.where(keep, y - mean[None, :], 0.0)
        to = statistics_ptr + (n * tl.num_programs(0) + p).to(tl.int64) * 3 * K + k
        tl.store(to, tl.zeros_like(mean) + count, mask=k < K)
        tl.store(to + K, mean, mask=k < K)
        tl.store(to + 2 * K, tl.sum(away * away, axis=0), mask=k < K)


def join(
    partial: Tensor,
    y_NDHWK: Tensor,
    r_NDHWK: Tensor | None,
    shift_NC: Tensor | None,
    statistics: Tensor | None,
    splits: int,
) -> None:
    """Fills y and the statistics from `partial`, float32 (splits * N, D, H, W, K)."""
    N, D, H, W, K = y_NDHWK.shape
    block_v, block_k = join_block(N, D * H * W, K)
    ready(voxtune_conv3d_join)[(triton.cdiv(D * H * W, block_v), triton.cdiv(K, block_k), N)](
        partial,
        y_NDHWK,
        r_NDHWK,
        shift_NC,
        statistics,
        N,
        D * H * W,
        K,
        splits,
        row_stride(shift_NC),
        BLOCK_V=block_v,
        BLOCK_K=block_k,
        num_warps=4,
    )


def stretches_of_join(N: int, V: int, K: int) -> int:
    """P of the statistics that the join writes."""
    return triton.cdiv(V, join_block(N, V, K)[0])


def join_block(N: int, V: int, K: int) -> tuple[int, int]:
    """(voxels, channels) per program of the join: small enough that few voxels still fill the device."""
    block_k = min(64, K & -K)
    block_v = 32
    while block_v < 256 and N * (V // block_v) * (K // block_k) > 1024:
        block_v *= 2
    return block_v, block_k
