"""The head of a 3D network by lines: a 3x3x3 convolution with up to 8 channels out, in half precision.

Why: with few outputs a product per tap leaves the matrix units idle, and a product of a voxel with all taps of a plane at once
(head_conv.py) leaves 9 numbers per output to align and add, which costs more than the product. Here a program takes a line of
voxels along w and walks along h, for two neighbouring output planes:

1. along the depth, four input lines serve both output planes, and the products of three of them are added in one accumulator;
2. along h, the columns of a product are the three taps: a line of the result is finished when the next input line is there;
3. along w, the columns are the three taps too. They are aligned last, when only these three numbers per output are left.

A voxel is loaded twice (four lines for two planes); with more than 4 outputs, once more for each further group of 4, whose sums
would not fit into the registers. By arithmetic, 64 -> 4 channels at 144x192x192 moves 1.4 GB through the L2: 0.25 ms.

Legend: N batch, D H W voxels, C channels in, M channels out, G groups of them, T columns: (taps along h, taps along w, channels
out of the group), the taps padded to 4.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from voxtune.kernels.conv3d import channels_inside, load_voxels
from voxtune.kernels.conv3d_tiles import has_copy_engine
from voxtune.kernels.precompile import ready

# Input channels: all of them are one step of the product.
WIDEST = 64
# A walk along h is longer only while there are at least this many programs.
ENOUGH = 528


def pack_lines(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A convolution's weight (M, C, 3, 3, 3) as (G, taps along the depth, T, C padded)."""
    M, C = weight.shape[:2]
    group = block_m(M)
    w_MDHWC = F.pad(weight.detach().permute(0, 2, 3, 4, 1), (0, block_k(C) - C, 0, 1, 0, 1, 0, 0, 0, -M % group))
    w_GDHWMC = w_MDHWC.unflatten(0, (-1, group)).permute(0, 2, 3, 4, 1, 5)
    return w_GDHWMC.flatten(2, 4).to(dtype).contiguous()


def block_m(M: int) -> int:
    """Output channels per program."""
    return min(4, triton.next_power_of_2(M))


def block_k(C: int) -> int:
    return max(16, triton.next_power_of_2(C))


def lines_reference(x: Tensor, weight: Tensor, bias_M: Tensor | None = None) -> Tensor:
    """The same in plain PyTorch, in the weight's type."""
    return F.conv3d(x.to(weight.dtype), weight, bias_M, padding=1)


@triton.jit
def _taps(product, COLUMNS: tl.constexpr, BLOCK_W: tl.constexpr):
    """A product's columns (BLOCK_W, T) as three of (BLOCK_W, COLUMNS): for the results' lines ahead, here and behind."""
    parts = tl.reshape(product, (BLOCK_W, 4, COLUMNS))
    tap = tl.arange(0, 4)[None, :, None]
    ahead = tl.sum(tl.where(tap == 0, parts, 0.0), axis=1)
    here = tl.sum(tl.where(tap == 1, parts, 0.0), axis=1)
    behind = tl.sum(tl.where(tap == 2, parts, 0.0), axis=1)
    return ahead, here, behind


@triton.jit
def _aligned(line, source, BLOCK_M: tl.constexpr, BLOCK_W: tl.constexpr):
    """The sum (BLOCK_W, BLOCK_M) of the taps along w."""
    return tl.sum(tl.reshape(tl.gather(line, source, 0), (BLOCK_W, 4, BLOCK_M)), axis=1)


@triton.jit(do_not_specialize=["D", "H", "W", "M", "eighths", "walk"])
def voxtune_head_lines(
    x,  # (N, D, H, W, C): a descriptor of tiles (1, 1, 1, BLOCK_W, BLOCK_K) if BULK, else a pointer
    w_ptr,  # (G, 3, T, BLOCK_K)
    bias_ptr,  # (M,) of any float type, or None
    y_ptr,  # (N, M, D, H, W) of any strides
    D,
    H,
    W,
    M,
    eighths,  # C / 8: so the compiler knows that rows are aligned to 16 bytes
    y_n,
    y_m,
    y_d,
    y_h,
    y_w,
    walk,  # lines of the result for one program
    BLOCK_W: tl.constexpr,  # with the border
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
):
    COLUMNS: tl.constexpr = 4 * BLOCK_M
    T: tl.constexpr = 4 * COLUMNS
    C = eighths * 8
    blocks_w, blocks_d = tl.cdiv(W, BLOCK_W - 2), tl.cdiv(D, 2)
    block, n = tl.program_id(0), tl.program_id(1)
    w0 = block % blocks_w * (BLOCK_W - 2) - 1
    d0 = block // blocks_w % blocks_d * 2
    h0 = block // (blocks_w * blocks_d) * walk
    v = tl.arange(0, BLOCK_W)
    inner = (v > 0) & (v < BLOCK_W - 1) & (w0 + v < W)
    # From which voxel of the line the tap of a column comes; the border's own results are never stored, only kept in range.
    tap = tl.arange(0, COLUMNS) // BLOCK_M
    source = v[:, None] + tl.where(tap < 3, tap - 1, 0)[None, :]
    source = tl.minimum(tl.maximum(source, 0), BLOCK_W - 1)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    bias = tl.zeros((BLOCK_M,), tl.float32)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + m, mask=m < M, other=0.0).to(tl.float32)
    y_at = (w0 + v)[:, None] * y_w + m[None, :] * y_m
    y_line = y_ptr + n.to(tl.int64) * y_n + d0.to(tl.int64) * y_d

    w_at = (
        w_ptr + tl.program_id(2) * 3 * T * BLOCK_K + tl.arange(0, T)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    )
    w_0, w_1, w_2 = tl.load(w_at), tl.load(w_at + T * BLOCK_K), tl.load(w_at + 2 * T * BLOCK_K)
    lower_here = tl.zeros((BLOCK_W, COLUMNS), tl.float32)
    lower_behind = tl.zeros((BLOCK_W, COLUMNS), tl.float32)
    upper_here = tl.zeros((BLOCK_W, COLUMNS), tl.float32)
    upper_behind = tl.zeros((BLOCK_W, COLUMNS), tl.float32)
    for step in tl.range(0, tl.minimum(walk, H - h0) + 2, num_stages=STAGES):
        h = h0 + step - 1
        x_0 = load_voxels(x, n, d0 - 1, h, w0, 0, D, H, W, C, 1, BLOCK_W, BLOCK_K, BULK)
        x_1 = load_voxels(x, n, d0, h, w0, 0, D, H, W, C, 1, BLOCK_W, BLOCK_K, BULK)
        x_2 = load_voxels(x, n, d0 + 1, h, w0, 0, D, H, W, C, 1, BLOCK_W, BLOCK_K, BULK)
        x_3 = load_voxels(x, n, d0 + 2, h, w0, 0, D, H, W, C, 1, BLOCK_W, BLOCK_K, BULK)
        lower = tl.dot(x_0, w_0.T)
        upper = tl.dot(x_1, w_0.T)
        lower = tl.dot(x_1, w_1.T, lower)
        upper = tl.dot(x_2, w_1.T, upper)
        lower = tl.dot(x_2, w_2.T, lower)
        upper = tl.dot(x_3, w_2.T, upper)
        lower_ahead, here, behind = _taps(lower, COLUMNS, BLOCK_W)
        lower_done, lower_behind = lower_behind + behind, lower_here + here
        upper_ahead, here, behind = _taps(upper, COLUMNS, BLOCK_W)
        upper_done, upper_behind = upper_behind + behind, upper_here + here
        lower_here, upper_here = lower_ahead, upper_ahead
        # A line of the result is complete when the input's next one has been added. As tiles, for the interpreter.
        keep = (inner & (v * 0 + step > 1))[:, None] & (m < M)[None, :]
        both = keep & ((v * 0 + d0 + 1 < D)[:, None])
        y = y_line + (h - 1).to(tl.int64) * y_h + y_at
        result = _aligned(lower_done, source, BLOCK_M, BLOCK_W) + bias[None, :]
        tl.store(y, result.to(y_ptr.dtype.element_ty), mask=keep)
        result = _aligned(upper_done, source, BLOCK_M, BLOCK_W) + bias[None, :]
        tl.store(y + y_d, result.to(y_ptr.dtype.element_ty), mask=both)


def why_not_lines(x: Tensor, M: int) -> str | None:
    """The reason why this kernel does not apply, or None."""
    if x.dim() != 5 or x.dtype not in (torch.bfloat16, torch.float16):
        return f"{x.dim() - 2} voxel axes of type {x.dtype}: volumes in half precision are required"
    if x.shape[1] % 8 or x.shape[1] > WIDEST or M > 8:
        return f"{x.shape[1]} channels to {M}: a multiple of 8 up to {WIDEST}, and at most 8, are required"
    if not x.movedim(1, -1).is_contiguous() or x.numel() == 0 or x.data_ptr() % 16:
        return "the source is not channels-last, or empty, or unaligned"
    return None


def head_lines(x: Tensor, packed: Tensor, bias_M: Tensor | None, y: Tensor, *, bulk: bool | None = None) -> None:
    """Fills y (N, M, D, H, W), of any strides, with conv(x) + bias; `why_not_lines` must be None."""
    N, C, D, H, W = x.shape
    tile = lines_tile(C)
    block_w, (groups, _, T, K) = tile["BLOCK_W"], packed.shape
    bulk = has_copy_engine(x.device) if bulk is None else bulk
    x_NDHWC = channels_inside(x)
    columns = triton.cdiv(W, block_w - 2) * triton.cdiv(D, 2)
    walk = lines_walk(N * columns * groups, H)
    ready(voxtune_head_lines)[(columns * triton.cdiv(H, walk), N, groups)](
        TensorDescriptor.from_tensor(x_NDHWC, [1, 1, 1, block_w, K]) if bulk else x_NDHWC,
        packed,
        bias_M,
        y,
        D,
        H,
        W,
        y.shape[1],
        C // 8,
        *y.stride(),
        walk,
        BLOCK_M=T // 16,
        BLOCK_K=K,
        BULK=bulk,
        **tile,
    )


def lines_tile(C: int) -> dict[str, int]:
    """The voxels of a line with its border, its warps and stages. (By arithmetic; not yet measured.)"""
    return {"BLOCK_W": 64, "STAGES": 3 if C <= 32 else 2, "num_warps": 4}


def lines_walk(columns: int, H: int) -> int:
    """Lines of the result per program: two more are read, but the programs must fill the GPU."""
    walk = 64
    while walk > 4 and columns * triton.cdiv(H, walk) < ENOUGH:
        walk //= 2
    return walk
