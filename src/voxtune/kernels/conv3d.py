"""3x3x3 convolution of channels-last volumes, with what follows it in its epilogue.

Why: three quarters of a 3D U-Net's arithmetic are 3x3x3 convolutions with 64 output channels, where the matrix units wait for
shared memory: each of 27 taps loads the whole tile again. Here a program computes two neighbouring output planes. Of the four
input planes that they need, the inner two serve both, so that each is loaded once for two products. The products of one step
use different accumulators: two on the same one would wait for each other.

1. The bulk copy engine loads tiles (tensor descriptors) and fills what is outside the volume with zeros: the padding. On devices
   without it the compiler turns the same descriptors into masked pointer loads.
2. The epilogue adds a shift per channel (bias, time embedding) and a residual, and computes the statistics of its output, so that
   the next norm need not read it again: see group_norm.py for their form.
3. Small volumes fill too few multiprocessors: there several programs share the taps of a tile and write float32 partial sums,
   and a second kernel adds these in a fixed order and does the epilogue.

Legend: N batch, D H W voxels, V = D*H*W, C input channels, K output channels, P tiles (or stretches) of voxels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from voxtune.kernels.conv3d_tiles import Conv3dTile, tiles
from voxtune.kernels.group_norm import row_stride
from voxtune.kernels.precompile import ready


def conv3d_reference(
    x: Tensor,
    packed: Tensor,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The same in plain PyTorch, sums in float32 (float64 for float64); the statistics as one stretch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = F.conv3d(x.to(wide), unpack(packed).to(wide), padding=1)
    if shift_NC is not None:
        y = y + shift_NC.to(wide)[:, :, None, None, None]
    if residual is not None:
        y = y + residual.to(wide)
    y = y.to(x.dtype)
    if not statistics:
        return y, None
    y_NCV = y.flatten(2).to(wide)
    count = torch.full_like(y_NCV[..., 0], y_NCV.shape[2])
    mean = y_NCV.mean(dim=2)
    m2 = (y_NCV - mean[..., None]).square().sum(dim=2)
    return y, torch.stack([count, mean, m2], dim=1)[:, None].to(torch.float32)


def pack(weight: Tensor) -> Tensor:
    """A convolution's weight (K, C, 3, 3, 3) as (27, K, C): one contiguous matrix per tap."""
    return weight.permute(2, 3, 4, 0, 1).reshape(27, *weight.shape[:2]).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    _, K, C = packed.shape
    return packed.view(3, 3, 3, K, C).permute(3, 4, 0, 1, 2)


@triton.jit
def _product(accumulator, x, w, SWAP: tl.constexpr):
    """One tap: x (voxels, channels), w (output channels, channels). SWAP makes output channels the rows of the product."""
    return tl.dot(w, x.T, accumulator) if SWAP else tl.dot(x, w.T, accumulator)


# Sizes are not specialised: one compiled kernel is used for all volume sizes and numbers of channels.
@triton.jit(do_not_specialize=["N", "D", "H", "W", "C", "K", "splits", "shift_stride"])
def voxtune_conv3d(  # noqa: PLR0915
    x_desc,  # (N, D, H, W, C), tiles of (1, 1, TH, TW, TC)
    w_desc,  # (27 * K, C), tiles of (TK, TC)
    y_desc,  # (N, D, H, W, K), or float32 (splits * N, D, H, W, K); tiles of (1, 1, TH, TW, TK)
    r_desc,  # (N, D, H, W, K) or None
    shift_ptr,  # (N, K) or (1, K), of any float type, or None
    statistics_ptr,  # (N, P, 3, K) float32 or None
    N,
    D,
    H,
    W,
    C,
    K,
    splits,
    shift_stride,  # from row to row, or 0 when one shift serves the batch
    TH: tl.constexpr,
    TW: tl.constexpr,
    TK: tl.constexpr,
    TC: tl.constexpr,
    SWAP: tl.constexpr,
    INNER_STAGES: tl.constexpr,
    OUTER_STAGES: tl.constexpr,
):
    VOXELS: tl.constexpr = TH * TW
    SHAPE: tl.constexpr = (TK, VOXELS) if SWAP else (VOXELS, TK)
    chunks = (C + TC - 1) // TC
    columns = (K + TK - 1) // TK
    # Neighbours in the grid share input: output channels first, then along w, h, d.
    tile, split = tl.program_id(0) // columns, tl.program_id(1)
    k0 = tl.program_id(0) % columns * TK
    across, down = (W + TW - 1) // TW, (H + TH - 1) // TH
    P = across * down * ((D + 1) // 2)
    n, p = tile // P, tile % P
    w0 = p % across * TW
    h0 = p // across % down * TH
    d0 = p // (across * down) * 2

    first, last = 27 * chunks * split // splits, 27 * chunks * (split + 1) // splits
    lower = tl.zeros(SHAPE, tl.float32)
    upper = tl.zeros(SHAPE, tl.float32)
    # The inner input planes d0 and d0 + 1 (18 of the 27 taps of either output plane): one tile of x, two of weights.
    inner = 18 * chunks
    for step in tl.range(tl.minimum(first, inner), tl.minimum(last, inner), num_stages=INNER_STAGES):
        tap = step // chunks
        c0 = step % chunks * TC
        x = x_desc.load([n, d0 + tap // 9, h0 + tap // 3 % 3 - 1, w0 + tap % 3 - 1, c0]).reshape(VOXELS, TC)
        # All loads before the products: one barrier a step.
        w_lower = w_desc.load([(tap + 9) * K + k0, c0])
        w_upper = w_desc.load([tap * K + k0, c0])
        lower = _product(lower, x, w_lower, SWAP)
        upper = _product(upper, x, w_upper, SWAP)
    # The outer planes d0 - 1 and d0 + 2, each seen by one output plane.
    for step in tl.range(tl.maximum(first, inner) - inner, tl.maximum(last, inner) - inner, num_stages=OUTER_STAGES):
        tap = step // chunks
        c0 = step % chunks * TC
        h, w = h0 + tap // 3 - 1, w0 + tap % 3 - 1
        below = x_desc.load([n, d0 - 1, h, w, c0]).reshape(VOXELS, TC)
        above = x_desc.load([n, d0 + 2, h, w, c0]).reshape(VOXELS, TC)
        w_lower = w_desc.load([tap * K + k0, c0])
        w_upper = w_desc.load([(tap + 18) * K + k0, c0])
        lower = _product(lower, below, w_lower, SWAP)
        upper = _product(upper, above, w_upper, SWAP)

    if SWAP:
        lower, upper = lower.T, upper.T
    k = k0 + tl.arange(0, TK)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + n * shift_stride + k, mask=k < K, other=0.0).to(tl.float32)
        lower += shift[None, :]
        upper += shift[None, :]
    if r_desc is not None:
        lower += r_desc.load([n, d0, h0, w0, k0]).reshape(VOXELS, TK).to(tl.float32)
        upper += r_desc.load([n, d0 + 1, h0, w0, k0]).reshape(VOXELS, TK).to(tl.float32)
    y_lower, y_upper = lower.to(y_desc.dtype), upper.to(y_desc.dtype)
    y_desc.store([split * N + n, d0, h0, w0, k0], y_lower.reshape(1, 1, TH, TW, TK))
    y_desc.store([split * N + n, d0 + 1, h0, w0, k0], y_upper.reshape(1, 1, TH, TW, TK))
    if statistics_ptr is not None:
        v = tl.arange(0, VOXELS)
        inside = ((h0 + v // TW < H) & (w0 + v % TW < W))[:, None]
        both = d0 + 1 < D
        lower = tl.where(inside, y_lower.to(tl.float32), 0.0)
        upper = tl.where(inside & both, y_upper.to(tl.float32), 0.0)
        count = (tl.minimum(TH, H - h0) * tl.minimum(TW, W - w0) * tl.minimum(2, D - d0)).to(tl.float32)
        mean = (tl.sum(lower, axis=0) + tl.sum(upper, axis=0)) / count
        lower = tl.where(inside, lower - mean[None, :], 0.0)
        upper = tl.where(inside & both, upper - mean[None, :], 0.0)
        at = statistics_ptr + tile.to(tl.int64) * 3 * K + k
        tl.store(at, tl.zeros_like(mean) + count, mask=k < K)
        tl.store(at + K, mean, mask=k < K)
        tl.store(at + 2 * K, tl.sum(lower * lower, axis=0) + tl.sum(upper * upper, axis=0), mask=k < K)


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


def why_not(  # noqa: PLR0911
    x: Tensor,
    weight_shape: tuple[int, ...],
    stride: tuple[int, ...] = (1, 1, 1),
    padding: tuple[int, ...] = (1, 1, 1),
    dilation: tuple[int, ...] = (1, 1, 1),
    groups: int = 1,
) -> str | None:
    """The reason why the kernels do not apply, or None."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"type {x.dtype} has no kernel"
    if tuple(weight_shape[2:]) != (3, 3, 3) or x.dim() != 5 or weight_shape[1] != x.shape[1]:
        return "not a 3x3x3 convolution of all channels"
    if (tuple(stride), tuple(padding), tuple(dilation), groups) != ((1, 1, 1), (1, 1, 1), (1, 1, 1), 1):
        return "stride, padding, dilation or groups other than 1"
    if weight_shape[0] % 16 or weight_shape[1] % 16:
        return f"{weight_shape[1]} to {weight_shape[0]} channels: not multiples of 16"
    if not x.movedim(1, -1).is_contiguous():
        return "the source is not channels-last"
    if x.numel() == 0 or x.data_ptr() % 16:
        return "an empty or unaligned source"
    return None


def conv3d(
    x: Tensor,
    packed: Tensor,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: bool = False,
    *,
    checked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """conv(x) + shift + residual, channels-last, and its statistics (N, P, 3, K) if requested; `why_not` must be None.

    `checked`: the caller has called `why_not`.
    """
    assert checked or (reason := why_not(x, (packed.shape[1], packed.shape[2], 3, 3, 3))) is None, reason
    N, C, D, H, W = x.shape
    tile = tiles(N, D, H, W, C, packed.shape[1], hopper=is_hopper(x.device))
    return convolve(x, packed, tile, shift_NC, residual, statistics)


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def convolve(
    x: Tensor,
    packed: Tensor,
    tile: Conv3dTile,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """conv3d with a given tile."""
    N, C, D, H, W = x.shape
    K, V = packed.shape[1], D * H * W
    x_NDHWC, r_NDHWK = channels_inside(x), None if residual is None else channels_inside(residual)
    assert packed.is_contiguous(), "the weights are not contiguous"
    shift_stride = row_stride(shift_NC)
    y_NDHWK = torch.empty((N, D, H, W, K), dtype=x.dtype, device=x.device)
    P = triton.cdiv(W, tile.w) * triton.cdiv(H, tile.h) * triton.cdiv(D, 2)
    join_v, join_k = join_block(N, V, K)
    stretches = P if tile.split == 1 else triton.cdiv(V, join_v)
    moments = torch.empty((N, stretches, 3, K), dtype=torch.float32, device=x.device) if statistics else None
    if tile.halo:
        from voxtune.kernels import conv3d_halo

        conv3d_halo.launch(x_NDHWC, packed, y_NDHWK, r_NDHWK, shift_NC, moments, tile, shift_stride)
        return y_NDHWK.movedim(-1, 1), moments
    unsplit = tile.split == 1
    target = y_NDHWK if unsplit else y_NDHWK.new_empty((tile.split * N, D, H, W, K), dtype=torch.float32)
    box = [1, 1, tile.h, tile.w]
    ready(voxtune_conv3d)[(P * N * triton.cdiv(K, tile.k), tile.split)](
        TensorDescriptor.from_tensor(x_NDHWC, [*box, tile.c]),
        TensorDescriptor.from_tensor(packed.view(27 * K, C), [tile.k, tile.c]),
        TensorDescriptor.from_tensor(target, [*box, tile.k]),
        TensorDescriptor.from_tensor(r_NDHWK, [*box, tile.k]) if unsplit and r_NDHWK is not None else None,
        shift_NC if unsplit else None,
        moments if unsplit else None,
        N,
        D,
        H,
        W,
        C,
        K,
        tile.split,
        shift_stride,
        **tile.constants(),
        num_warps=tile.warps,
    )
    if not unsplit:
        ready(voxtune_conv3d_join)[(stretches, triton.cdiv(K, join_k), N)](
            target,
            y_NDHWK,
            r_NDHWK,
            shift_NC,
            moments,
            N,
            V,
            K,
            tile.split,
            shift_stride,
            BLOCK_V=join_v,
            BLOCK_K=join_k,
            num_warps=4,
        )
    return y_NDHWK.movedim(-1, 1), moments


def channels_inside(x: Tensor) -> Tensor:
    """A channels-last (N, C, D, H, W) tensor as (N, D, H, W, C), with regular strides also for dimensions of size 1."""
    x_NDHWC = x.movedim(1, -1)
    assert x_NDHWC.is_contiguous(), "a source or the residual is not channels-last"
    return x_NDHWC.reshape(-1).view(x_NDHWC.shape)


def join_block(N: int, V: int, K: int) -> tuple[int, int]:
    """(voxels, channels) per program of the join: small enough that few voxels still fill the device."""
    block_k = min(64, K & -K)
    block_v = 32
    while block_v < 256 and N * (V // block_v) * (K // block_k) > 1024:
        block_v *= 2
    return block_v, block_k


def arguments(tile: Conv3dTile, *, dtype: str, epilogue: bool = True) -> tuple[dict[str, str], dict]:
    """(types of the run-time arguments, constants) of voxtune_conv3d, to compile it without a device."""
    box = f"1,1,{tile.h},{tile.w}"
    with_epilogue = epilogue and tile.split == 1
    signature = {
        "x_desc": f"tensordesc<{dtype}[{box},{tile.c}]>",
        "w_desc": f"tensordesc<{dtype}[{tile.k},{tile.c}]>",
        "y_desc": f"tensordesc<{dtype if tile.split == 1 else 'fp32'}[{box},{tile.k}]>",
    }
    if with_epilogue:
        signature |= {"r_desc": signature["y_desc"], "shift_ptr": "*fp32", "statistics_ptr": "*fp32"}
    signature |= dict.fromkeys(("N", "D", "H", "W", "C", "K", "splits", "shift_stride"), "i32")
    absent = {} if with_epilogue else dict.fromkeys(("r_desc", "shift_ptr", "statistics_ptr"))
    return signature, {**tile.constants(), **absent}
