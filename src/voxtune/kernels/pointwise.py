"""1x1(x1) convolution over one or two channels-last sources, and the sum of two volumes.

Why: a decoder's skip connection is conv1x1(cat([a, b])). The concatenation costs more than the convolution: at 128^3 it moves
twice the bytes of the product. Here one loop over input channels reads both sources, so that each byte is read once and the
result is written once. The product is bound by memory (128 -> 64 channels is 43 FLOP per byte), so bias, time embedding and
residual are added before the result leaves the registers. A segmentation network's head (32 channels to a few classes) is the
same: its columns are padded to the 16 that the matrix units need, and only the real ones are stored, in float32 if wanted.

Legend: N batch, V voxels, CA CB channels of the sources, K = CA + CB, M channels of the result.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.group_norm import channel_block, empty_channels_last, row_stride, voxels_last
from voxtune.kernels.precompile import ready

TYPES = (torch.float32, torch.bfloat16, torch.float16)
# With fewer programs than this, tiles are made smaller: two per multiprocessor of a large GPU.
ENOUGH = 264


def pointwise_reference(
    sources: tuple[Tensor, ...],
    weight_MK: Tensor,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The same in plain PyTorch; float32 arithmetic, or float64 for float64 sources."""
    x = torch.cat(sources, dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = torch.einsum("nk...,mk->nm...", x.to(wide), weight_MK.to(wide))
    if shift_NC is not None:
        y = y + shift_NC.to(wide).view(*shift_NC.shape, *[1] * (x.dim() - 2))
    return (y if residual is None else y + residual.to(wide)).to(dtype or x.dtype)


def add_reference(a: Tensor, b: Tensor, shift_NC: Tensor | None = None) -> Tensor:
    wide = torch.promote_types(a.dtype, torch.float32)
    y = a.to(wide) + b.to(wide)
    if shift_NC is not None:
        y = y + shift_NC.to(wide).view(*shift_NC.shape, *[1] * (a.dim() - 2))
    return y.to(a.dtype)


@triton.jit
def voxtune_pointwise(
    a_ptr,  # (N, V, CA)
    b_ptr,  # (N, V, CB); unread when CB is 0
    w_ptr,  # (M, K)
    shift_ptr,  # (N, M) or (1, M), of any float type; unread when HAS_SHIFT is off
    residual_ptr,  # (N, V, M); unread when HAS_RESIDUAL is off
    y_ptr,  # (N, V, M)
    V,
    M,
    shift_stride,  # from row to row, or 0 when one shift serves the batch
    CA: tl.constexpr,
    CB: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Blocks of result channels run fastest: those of one stretch of voxels meet in the L2.
    blocks_m = tl.cdiv(M, BLOCK_M)
    m0, v0, n = (
        tl.program_id(0) % blocks_m * BLOCK_M,
        tl.program_id(0) // blocks_m * BLOCK_V,
        tl.program_id(1),
    )
    K: tl.constexpr = CA + CB
    CHUNKS_A: tl.constexpr = (CA + BLOCK_K - 1) // BLOCK_K
    CHUNKS_B: tl.constexpr = (CB + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = (CA % BLOCK_K == 0) and (CB % BLOCK_K == 0)
    # Offsets in a tile fit 32 bits; where the tile begins does not.
    row0 = n.to(tl.int64) * V + v0
    v, m, k = tl.arange(0, BLOCK_V), m0 + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    in_v, in_m = v0 + v < V, m < M
    keep = in_v[:, None] & in_m[None, :]
    y_at = row0 * M + (v[:, None] * M + m[None, :])
    if HAS_RESIDUAL:  # loaded first: it arrives while the product runs
        residual = tl.load(residual_ptr + y_at, mask=keep, other=0.0)
    acc = tl.zeros((BLOCK_V, BLOCK_M), tl.float32)
    a_tile, b_tile = a_ptr + row0 * CA, b_ptr + row0 * CB
    for i in range(CHUNKS_A + CHUNKS_B):
        if CB == 0:
            # Constants, from which the compiler sees how rows are aligned.
            tile = a_tile
            width: tl.constexpr = CA
            at = k + i * BLOCK_K
            column = at
        else:
            # A select rather than a branch, so that the loads of both sources go through one pipeline.
            second = i >= CHUNKS_A
            tile = tl.where(second, b_tile, a_tile)
            width = tl.where(second, CB, CA)
            at = k + tl.where(second, i - CHUNKS_A, i) * BLOCK_K
            column = at + tl.where(second, CA, 0)
        x_mask, w_mask = in_v[:, None], in_m[None, :]
        if not EVEN:
            x_mask = x_mask & (at < width)[None, :]
            w_mask = w_mask & (at < width)[:, None]
        x = tl.load(tile + (v[:, None] * width + at[None, :]), mask=x_mask, other=0.0)
        w = tl.load(w_ptr + (m[None, :] * K + column[:, None]), mask=w_mask, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + n * shift_stride + m, mask=in_m, other=0.0)
        acc += shift.to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        acc += residual.to(tl.float32)
    tl.store(y_ptr + y_at, acc.to(y_ptr.dtype.element_ty), mask=keep)


@triton.jit
def voxtune_add(
    a_ptr,  # (N, V, C)
    b_ptr,  # (N, V, C)
    shift_ptr,  # (N, C) or (1, C), of any float type; unread when HAS_SHIFT is off
    y_ptr,  # (N, V, C)
    V,
    C,
    shift_stride,  # from row to row, or 0 when one shift serves the batch
    HAS_SHIFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    blocks_c = tl.cdiv(C, BLOCK_C)
    v0, n = tl.program_id(0) // blocks_c * BLOCK_V, tl.program_id(1)
    c = tl.program_id(0) % blocks_c * BLOCK_C + tl.arange(0, BLOCK_C)
    v = tl.arange(0, BLOCK_V)
    inside = c < C
    keep = (v0 + v < V)[:, None] & inside[None, :]
    at = (n.to(tl.int64) * V + v0) * C + (v[:, None] * C + c[None, :])
    a = tl.load(a_ptr + at, mask=keep, other=0.0).to(tl.float32)
    y = a + tl.load(b_ptr + at, mask=keep, other=0.0).to(tl.float32)
    if HAS_SHIFT:
        y += tl.load(shift_ptr + n * shift_stride + c, mask=inside, other=0.0).to(tl.float32)[None, :]
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=keep)


def why_not(
    sources: tuple[Tensor, ...], weight_MK: Tensor, shift_NC: Tensor | None = None, residual: Tensor | None = None
) -> str | None:
    """The reason why the product's kernel does not apply, or None."""
    first = sources[0]
    N, channels = first.shape[0], sum(s.shape[1] for s in sources)
    tensors = (*sources, *(() if residual is None else (residual,)))
    if first.dtype not in TYPES or len(sources) > 2:
        return f"{len(sources)} sources of type {first.dtype}: one or two of float32, bfloat16 or float16 are needed"
    if any(t.dtype != first.dtype or t.shape[0] != N or t.shape[2:] != first.shape[2:] for t in tensors):
        return "the sources, or the residual, differ in type, batch or size"
    if any(not t.movedim(1, -1).is_contiguous() or t.numel() == 0 for t in tensors):
        return "a source, or the residual, is not channels-last, or empty"
    if weight_MK.dtype != first.dtype or weight_MK.shape[1:] != (channels,) or not weight_MK.is_contiguous():
        return f"a weight of {tuple(weight_MK.shape)}: a contiguous matrix of {first.dtype} for {channels} channels is needed"
    if residual is not None and residual.shape[1] != weight_MK.shape[0]:
        return f"a residual of {residual.shape[1]} channels for a result of {weight_MK.shape[0]}"
    return why_no_shift(shift_NC, N, weight_MK.shape[0])


def why_not_add(a: Tensor, b: Tensor, shift_NC: Tensor | None = None) -> str | None:
    """The reason why the sum's kernel does not apply, or None."""
    if a.dtype not in TYPES:
        return f"type {a.dtype} has no kernel"
    if a.dtype != b.dtype or a.shape != b.shape:
        return "the addends differ in type or shape"
    if not (a.movedim(1, -1).is_contiguous() and b.movedim(1, -1).is_contiguous()):
        return "an addend is not channels-last"
    if a.numel() == 0:
        return "an empty addend"
    return why_no_shift(shift_NC, a.shape[0], a.shape[1])


def pointwise(
    sources: tuple[Tensor, ...],
    weight_MK: Tensor,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    tf32: bool = False,
    checked: bool = False,
) -> Tensor:
    """conv1x1(cat(sources)) + shift + residual for channels-last sources; `why_not` must be None.

    The result is of `dtype` (default: the sources'). `tf32` applies to float32 sources. `checked`: the caller has called
    `why_not`.
    """
    assert checked or (reason := why_not(sources, weight_MK, shift_NC, residual)) is None, reason
    a = voxels_last(sources[0])
    N, V, CA = a.shape
    b = voxels_last(sources[1]) if len(sources) > 1 else a
    CB = b.shape[2] if len(sources) > 1 else 0
    M = weight_MK.shape[0]
    y = empty_channels_last(sources[0], M, dtype)
    tile = tile_of(N, V, CA, CB, M, a.dtype)
    ready(voxtune_pointwise)[(triton.cdiv(M, tile["BLOCK_M"]) * triton.cdiv(V, tile["BLOCK_V"]), N)](
        a,
        b,
        weight_MK,
        weight_MK if shift_NC is None else shift_NC,
        a if residual is None else voxels_last(residual),
        voxels_last(y),
        V,
        M,
        row_stride(shift_NC),
        CA=CA,
        CB=CB,
        HAS_SHIFT=shift_NC is not None,
        HAS_RESIDUAL=residual is not None,
        PRECISION="tf32" if tf32 else "ieee",
        **tile,
    )
    return y


def add(a: Tensor, b: Tensor, shift_NC: Tensor | None = None, *, checked: bool = False) -> Tensor:
    """a + b + shift in one pass for channels-last volumes; `why_not_add` must be None.

    `checked`: the caller has called `why_not_add`.
    """
    assert checked or (reason := why_not_add(a, b, shift_NC)) is None, reason
    N, V, C = voxels_last(a).shape
    y = empty_channels_last(a, C)
    block_c = channel_block(C)
    block_v = 4096 // block_c
    ready(voxtune_add)[(triton.cdiv(C, block_c) * triton.cdiv(V, block_v), N)](
        voxels_last(a),
        voxels_last(b),
        a if shift_NC is None else shift_NC,
        voxels_last(y),
        V,
        C,
        row_stride(shift_NC),
        HAS_SHIFT=shift_NC is not None,
        BLOCK_V=block_v,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return y


def tile_of(N: int, V: int, CA: int, CB: int, M: int, dtype: torch.dtype) -> dict[str, int]:
    """The tile, its warps and its stages. Small levels use small tiles, since only many programs fill the GPU."""
    # A chunk that divides both sources needs no mask; 64 channels of 16 bits are one 128-byte line.
    widest = 32 if dtype == torch.float32 else 64
    chunk = next((k for k in (64, 32, 16) if k <= widest and CA % k == 0 and CB % k == 0), 0)
    block_k = chunk or max(16, min(widest, triton.next_power_of_2(max(CA, CB))))
    block_m = max(16, min(64, triton.next_power_of_2(M)))
    # A head's tile is thin: more voxels keep enough bytes in flight. (Not yet measured.)
    thin = dtype != torch.float32 and block_m == 16 and max(CA, CB) <= 32
    block_v = 64 if dtype == torch.float32 else 256 if thin else 128
    while block_v > 32 and N * triton.cdiv(V, block_v) * triton.cdiv(M, block_m) < ENOUGH:
        block_v //= 2
    return {"BLOCK_V": block_v, "BLOCK_M": block_m, "BLOCK_K": block_k, "num_warps": 4, "num_stages": 3}


def why_no_shift(shift_NC: Tensor | None, N: int, channels: int) -> str | None:
    """The reason why a shift per channel cannot be added, or None."""
    if shift_NC is None:
        return None
    if shift_NC.shape not in ((N, channels), (1, channels)) or shift_NC.stride(1) != 1:
        return f"a shift of shape {tuple(shift_NC.shape)}: (N, {channels}) or (1, {channels}), with contiguous rows, is required"
    return None
