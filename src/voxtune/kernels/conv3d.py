"""3x3x3 convolution of channels-last volumes, with what follows it in its epilogue.

Why: three quarters of a 3D U-Net's arithmetic are 3x3x3 convolutions with 64 output channels, and there the matrix units wait
for shared memory: each of 27 taps fetches the whole tile again. Here a program computes two neighbouring output planes. Of the
four input planes that they see, the inner two serve both, so that each is fetched once for two products. The products of one
step go to different accumulators: two on the same one would wait for each other.

1. Tiles come by the bulk copy engine (tensor descriptors), which fills what lies outside the volume with zeros: the padding. On
   devices without it the compiler turns the same descriptors into masked pointer loads.
2. The epilogue adds a shift per channel (bias, time embedding) and a residual, and takes the statistics of what it stores, so
   that the norm that follows need not read it once more: see group_norm.py for their form.
3. Small volumes fill too few multiprocessors: there several programs share the taps of a tile, write float32 partial sums, and a
   second kernel adds these in a fixed order and does the epilogue.

Legend: N batch, D H W voxels, V = D*H*W, I input channels, O output channels, P tiles (or stretches) of voxels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from voxtune.kernels.conv3d_tiles import Tile, tiles


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
    """A convolution's weight (O, I, 3, 3, 3) as (27, O, I): one contiguous matrix a tap."""
    return weight.permute(2, 3, 4, 0, 1).reshape(27, *weight.shape[:2]).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`."""
    _, O, I = packed.shape
    return packed.view(3, 3, 3, O, I).permute(3, 4, 0, 1, 2)


@triton.jit
def _product(accumulator, x, w, SWAP: tl.constexpr):
    """One tap: x (voxels, channels), w (output channels, channels). SWAP makes output channels the rows of the product."""
    if SWAP:
        return tl.dot(w, x.T, accumulator)
    else:
        return tl.dot(x, w.T, accumulator)


# Sizes are not specialised: one compiled kernel serves every volume and every number of channels.
@triton.jit(do_not_specialize=["N", "D", "H", "W", "I", "O", "splits", "shift_stride"])
def voxtune_conv3d(
    x_desc,  # (N, D, H, W, I), tiles of (1, 1, TH, TW, TI)
    w_desc,  # (27 * O, I), tiles of (TO, TI)
    y_desc,  # (N, D, H, W, O), or float32 (splits * N, D, H, W, O); tiles of (1, 1, TH, TW, TO)
    r_desc,  # (N, D, H, W, O) or None
    shift_ptr,  # (N, O) or (1, O), of any float type, or None
    statistics_ptr,  # (N, P, 3, O) float32 or None
    N,
    D,
    H,
    W,
    I,
    O,
    splits,
    shift_stride,  # O, or 0 when one shift serves the batch
    TH: tl.constexpr,
    TW: tl.constexpr,
    TO: tl.constexpr,
    TI: tl.constexpr,
    SWAP: tl.constexpr,
    INNER_STAGES: tl.constexpr,
    OUTER_STAGES: tl.constexpr,
):
    VOXELS: tl.constexpr = TH * TW
    SHAPE: tl.constexpr = (TO, VOXELS) if SWAP else (VOXELS, TO)
    chunks = (I + TI - 1) // TI
    columns = (O + TO - 1) // TO
    # Neighbours in the grid share input: output channels first, then along w, h, d.
    tile, split = tl.program_id(0) // columns, tl.program_id(1)
    o0 = tl.program_id(0) % columns * TO
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
        i0 = step % chunks * TI
        x = x_desc.load([n, d0 + tap // 9, h0 + tap // 3 % 3 - 1, w0 + tap % 3 - 1, i0]).reshape(VOXELS, TI)
        lower = _product(lower, x, w_desc.load([(tap + 9) * O + o0, i0]), SWAP)
        upper = _product(upper, x, w_desc.load([tap * O + o0, i0]), SWAP)
    # The outer planes d0 - 1 and d0 + 2, each seen by one output plane.
    for step in tl.range(tl.maximum(first, inner) - inner, tl.maximum(last, inner) - inner, num_stages=OUTER_STAGES):
        tap = step // chunks
        i0 = step % chunks * TI
        h, w = h0 + tap // 3 - 1, w0 + tap % 3 - 1
        below = x_desc.load([n, d0 - 1, h, w, i0]).reshape(VOXELS, TI)
        above = x_desc.load([n, d0 + 2, h, w, i0]).reshape(VOXELS, TI)
        lower = _product(lower, below, w_desc.load([tap * O + o0, i0]), SWAP)
        upper = _product(upper, above, w_desc.load([(tap + 18) * O + o0, i0]), SWAP)

    if SWAP:
        lower, upper = lower.T, upper.T
    o = o0 + tl.arange(0, TO)
    if shift_ptr is not None:
        shift = tl.load(shift_ptr + n * shift_stride + o, mask=o < O, other=0.0).to(tl.float32)
        lower += shift[None, :]
        upper += shift[None, :]
    if r_desc is not None:
        lower += r_desc.load([n, d0, h0, w0, o0]).reshape(VOXELS, TO).to(tl.float32)
        upper += r_desc.load([n, d0 + 1, h0, w0, o0]).reshape(VOXELS, TO).to(tl.float32)
    y_lower, y_upper = lower.to(y_desc.dtype), upper.to(y_desc.dtype)
    y_desc.store([split * N + n, d0, h0, w0, o0], y_lower.reshape(1, 1, TH, TW, TO))
    y_desc.store([split * N + n, d0 + 1, h0, w0, o0], y_upper.reshape(1, 1, TH, TW, TO))
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
        at = statistics_ptr + tile.to(tl.int64) * 3 * O + o
        tl.store(at, tl.zeros_like(mean) + count, mask=o < O)
        tl.store(at + O, mean, mask=o < O)
        tl.store(at + 2 * O, tl.sum(lower * lower, axis=0) + tl.sum(upper * upper, axis=0), mask=o < O)


@triton.jit(do_not_specialize=["N", "V", "splits", "shift_stride"])
def voxtune_conv3d_join(
    partial_ptr,  # (splits, N, V, O) float32
    y_ptr,  # (N, V, O)
    r_ptr,  # (N, V, O) or None
    shift_ptr,  # (N, O) or (1, O) or None
    statistics_ptr,  # (N, P, 3, O) float32 or None
    N,
    V,
    O,
    splits,
    shift_stride,
    BLOCK_V: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    p, n = tl.program_id(0), tl.program_id(2)
    v = p * BLOCK_V + tl.arange(0, BLOCK_V)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    keep = (v < V)[:, None] & (o < O)[None, :]
    at = (n.to(tl.int64) * V + v)[:, None] * O + o[None, :]
    y = tl.zeros((BLOCK_V, BLOCK_O), tl.float32)
    for split in range(splits):
        row = (n + split * N).to(tl.int64) * V + v
        y += tl.load(partial_ptr + row[:, None] * O + o[None, :], mask=keep, other=0.0)
    if shift_ptr is not None:
        y += tl.load(shift_ptr + n * shift_stride + o, mask=o < O, other=0.0).to(tl.float32)[None, :]
    if r_ptr is not None:
        y += tl.load(r_ptr + at, mask=keep, other=0.0).to(tl.float32)
    stored = y.to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + at, stored, mask=keep)
    if statistics_ptr is not None:
        count = tl.minimum(BLOCK_V, V - p * BLOCK_V).to(tl.float32)
        y = tl.where(keep, stored.to(tl.float32), 0.0)
        mean = tl.sum(y, axis=0) / count
        away = tl.where(keep, y - mean[None, :], 0.0)
        to = statistics_ptr + (n * tl.num_programs(0) + p).to(tl.int64) * 3 * O + o
        tl.store(to, tl.zeros_like(mean) + count, mask=o < O)
        tl.store(to + O, mean, mask=o < O)
        tl.store(to + 2 * O, tl.sum(away * away, axis=0), mask=o < O)


def why_not(
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
) -> tuple[Tensor, Tensor | None]:
    """conv(x) + shift + residual, channels-last, and its statistics (N, P, 3, O) if asked; `why_not` must be None."""
    assert (reason := why_not(x, (packed.shape[1], packed.shape[2], 3, 3, 3))) is None, reason
    N, I, D, H, W = x.shape
    return convolve(x, packed, tiles(N, D, H, W, I, packed.shape[1]), shift_NC, residual, statistics)


def convolve(
    x: Tensor,
    packed: Tensor,
    tile: Tile,
    shift_NC: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """conv3d with a given tile."""
    N, I, D, H, W = x.shape
    O = packed.shape[1]
    device = x.device
    y_NDHWO = torch.empty((N, D, H, W, O), dtype=x.dtype, device=device)
    r_NDHWO = None if residual is None else residual.movedim(1, -1)
    assert r_NDHWO is None or r_NDHWO.is_contiguous(), "the residual is not channels-last"
    assert packed.is_contiguous() and (shift_NC is None or shift_NC.is_contiguous())
    shift_stride = 0 if shift_NC is None or shift_NC.shape[0] == 1 else O
    split = tile.split > 1
    target = torch.empty((tile.split * N, D, H, W, O), dtype=torch.float32, device=device) if split else y_NDHWO
    P = triton.cdiv(W, tile.w) * triton.cdiv(H, tile.h) * triton.cdiv(D, 2)
    if split:
        join_v, join_o = join_block(N, D * H * W, O)
        partials = triton.cdiv(D * H * W, join_v)
    else:
        partials = P
    found = torch.empty((N, partials, 3, O), dtype=torch.float32, device=device) if statistics else None
    box = [1, 1, tile.h, tile.w]
    voxtune_conv3d[(P * N * triton.cdiv(O, tile.o), tile.split)](
        TensorDescriptor.from_tensor(x.movedim(1, -1), [*box, tile.i]),
        TensorDescriptor.from_tensor(packed.view(27 * O, I), [tile.o, tile.i]),
        TensorDescriptor.from_tensor(target, [*box, tile.o]),
        None if split or r_NDHWO is None else TensorDescriptor.from_tensor(r_NDHWO, [*box, tile.o]),
        None if split else shift_NC,
        None if split else found,
        N,
        D,
        H,
        W,
        I,
        O,
        tile.split,
        shift_stride,
        **tile.constants(),
        num_warps=tile.warps,
    )
    if split:
        voxtune_conv3d_join[(partials, triton.cdiv(O, join_o), N)](
            target,
            y_NDHWO,
            r_NDHWO,
            shift_NC,
            found,
            N,
            D * H * W,
            O,
            tile.split,
            shift_stride,
            BLOCK_V=join_v,
            BLOCK_O=join_o,
            num_warps=4,
        )
    return y_NDHWO.movedim(-1, 1), found


def join_block(N: int, V: int, O: int) -> tuple[int, int]:
    """(voxels, channels) a program of the join adds up: small enough that few voxels still fill the device."""
    block_o = min(64, O & -O)
    block_v = 32
    while block_v < 256 and N * (V // block_v) * (O // block_o) > 1024:
        block_v *= 2
    return block_v, block_o


def arguments(tile: Tile, *, dtype: str, epilogue: bool = True) -> tuple[dict[str, str], dict]:
    """(types of the run-time arguments, constants) of voxtune_conv3d, to compile it without a device."""
    box = f"1,1,{tile.h},{tile.w}"
    whole = epilogue and tile.split == 1
    signature = {
        "x_desc": f"tensordesc<{dtype}[{box},{tile.i}]>",
        "w_desc": f"tensordesc<{dtype}[{tile.o},{tile.i}]>",
        "y_desc": f"tensordesc<{dtype if tile.split == 1 else 'fp32'}[{box},{tile.o}]>",
    }
    if whole:
        signature |= {"r_desc": signature["y_desc"], "shift_ptr": "*fp32", "statistics_ptr": "*fp32"}
    signature |= dict.fromkeys(("N", "D", "H", "W", "I", "O", "splits", "shift_stride"), "i32")
    absent = {} if whole else dict.fromkeys(("r_desc", "shift_ptr", "statistics_ptr"))
    return signature, {**tile.constants(), **absent}
