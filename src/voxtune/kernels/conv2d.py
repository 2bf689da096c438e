"""2D convolution of a small image, with the operations around it in the same launch.

Why: at 64 x 64 pixels and batch 1 a convolution takes a few microseconds, as long as the launch of each addition, activation or
norm beside it; cuDNN adds the bias by a kernel of its own. Here one launch computes

    activation(conv(x') + shift + term + residual),   x' = x or group_norm(x) of one group

for 1x1, 3x3 and 2x2 kernels, stride 1 or 2, also over a nearest-upsampled image, over one or two sources, cat([a, b]), without
concatenation. The residual is an image, or a 1x1 convolution of one or two other sources. The norm is applied to the product, as
kernels/convnext/conv.py explains; its statistics are sums that the kernel which wrote x has left.

Legend: N batch, C input channels, K output channels, KP padded to a multiple of 16, T tiles per sample.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from voxtune.kernels.conv3d_tiles import shared_limit
from voxtune.kernels.convnext.conv import conv_work
from voxtune.kernels.convnext.packing import cases
from voxtune.kernels.convnext.tiles import MEASURED, MEASURED_ON, Tile, candidates, cost, power_of_two
from voxtune.kernels.group_norm import activation_reference, empty_channels_last, row_stride
from voxtune.kernels.precompile import ready

if TYPE_CHECKING:
    from collections.abc import Sequence

TYPES = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = ("none", "gelu", "gelu_tanh", "silu", "relu")
# (taps per axis, stride) of the convolutions that the kernel computes.
FORMS = ((1, 1), (3, 1), (2, 2), (3, 2), (1, 2))
# The reduction is padded to whole iterations of any tile: four chunks of 128.
DEPTH = 512
# With this much shared memory, Hopper's, all tiles of half precision fit.
AMPLE_MEMORY = 200_000
# Channels of a source are a multiple of this where there are two.
SEAM = 8


def pack_weight(weight_KCij: Tensor, gamma_C: Tensor | None, dtype: torch.dtype) -> Tensor:
    """(taps * C padded, KP); `gamma`: the weight of the norm before the convolution."""
    wide = weight_KCij.detach().double()
    if gamma_C is not None:
        wide = wide * gamma_C.detach().double()[None, :, None, None]
    rows = wide.permute(2, 3, 1, 0).flatten(0, 2)
    return F.pad(rows, (0, -rows.shape[1] % 16, 0, -rows.shape[0] % DEPTH)).to(dtype).contiguous()


def pack_slope(weight_KCij: Tensor, gamma_C: Tensor, dtype: torch.dtype) -> Tensor:
    """(9, KP) float32: sums of the packed weights, so that a constant image cancels exactly."""
    scaled = weight_KCij.detach().double() * gamma_C.detach().double()[None, :, None, None]
    return _columns(cases(scaled.to(dtype).double().sum(1)))


def pack_shift(
    weight_KCij: Tensor, bias_K: Tensor | None, beta_C: Tensor | None, residual_bias_K: Tensor | None
) -> Tensor:
    """(KP,) float32, or (9, KP) after a norm, whose bias is `beta`: what is added to all pixels, or to those of each case."""
    shift = torch.zeros(weight_KCij.shape[0], dtype=torch.float64, device=weight_KCij.device)
    for bias in (bias_K, residual_bias_K):
        if bias is not None:
            shift = shift + bias.detach().double()
    if beta_C is not None:
        shift = shift + cases((weight_KCij.detach().double() * beta_C.detach().double()[None, :, None, None]).sum(1))
    return _columns(shift)


def _columns(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % 16)).float().contiguous()


def conv2d_reference(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    shift: Tensor,
    slope: Tensor | None,
    term_NK: Tensor | None,
    residual: tuple[Tensor, ...],
    residual_packed: Tensor | None,
    activation: str,
    channels: int,
    side: int,
    stride: int,
    double: bool,
    eps: float,
) -> Tensor:
    """The same in plain PyTorch; float32 arithmetic, or float64 for float64 sources."""
    x = torch.cat(sources, 1)
    wide = torch.promote_types(x.dtype, torch.float32)
    x = x.to(wide)
    if double:
        x = F.interpolate(x, scale_factor=2, mode="nearest")
    y = F.conv2d(
        x, _unpacked(packed, x.shape[1], channels, side, wide), stride=stride, padding=side // 2 if side % 2 else 0
    )
    case = _case_of(y.shape[2], y.shape[3], y.device) if shift.dim() == 2 else None
    if slope is not None:
        assert case is not None
        mean = x.mean((1, 2, 3), keepdim=True)
        rate = (x.var((1, 2, 3), correction=0, keepdim=True) + eps).rsqrt()
        y = (y - mean * slope[:, :channels].to(wide)[case].movedim(-1, 0)) * rate
    per_channel = shift[..., :channels].to(wide)
    y = y + (per_channel[:, None, None] if case is None else per_channel[case].movedim(-1, 0))
    if term_NK is not None:
        y = y + term_NK.to(wide)[..., None, None]
    if residual:
        more = torch.cat(residual, 1).to(wide)
        if residual_packed is not None:
            more = F.conv2d(more, _unpacked(residual_packed, more.shape[1], channels, 1, wide))
        y = y + more
    return activation_reference(y, activation).to(sources[0].dtype)


def _unpacked(packed: Tensor, inputs: int, outputs: int, side: int, dtype: torch.dtype) -> Tensor:
    rows = packed[: side * side * inputs, :outputs].to(dtype)
    return rows.reshape(side, side, inputs, outputs).permute(3, 2, 0, 1)


def _case_of(H: int, W: int, device: torch.device) -> Tensor:
    """(H, W): which of the nine cases a pixel is."""
    y, x = (torch.ones(size, dtype=torch.int64, device=device) for size in (H, W))
    for axis in (y, x):
        axis[0] -= 1
        axis[-1] += 1
    return y[:, None] * 3 + x


@triton.jit
def voxtune_conv2d(
    x_ptr, xb_ptr, w_ptr, x2_ptr, x2b_ptr, w2_ptr, shift_ptr, slope_ptr, term_ptr, read_ptr, y_ptr, sums_ptr, parts_ptr,
    count_ptr, turns, turns2,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, CA: tl.constexpr, C2: tl.constexpr, CA2: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, LDT: tl.constexpr, ROWS: tl.constexpr,
    SIDE: tl.constexpr, STRIDE: tl.constexpr, DOUBLE: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, SUMS: tl.constexpr,
    READ: tl.constexpr, BLOCK_R: tl.constexpr, EPS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_C: tl.constexpr, WAYS: tl.constexpr,
    NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The arguments are those of `conv_work`; all images are dense."""
    LDX: tl.constexpr = CA if CA else C
    LD2: tl.constexpr = CA2 if CA2 else C2
    conv_work(
        tl.program_id(0), x_ptr, w_ptr, x2_ptr, w2_ptr, shift_ptr, slope_ptr, read_ptr, y_ptr, sums_ptr, parts_ptr,
        count_ptr, turns, turns2, H, W, C, C2, K, KP, LDX, LD2, K, ROWS, SIDE, STRIDE, DOUBLE, NORM, RESIDUAL,
        ACTIVATION, SUMS, READ, BLOCK_R, EPS, SPLIT, BLOCK_M, BLOCK_K, BLOCK_C, WAYS, NEAR, PRECISION,
        xb_ptr, x2b_ptr, term_ptr, CA, C - CA, CA2, C2 - CA2, LDT,
    )  # fmt: skip


def result_size(source: Tensor, stride: int, double: bool) -> tuple[int, int]:
    H, W = source.shape[2:]
    return (2 * H, 2 * W) if double else (H // stride, W // stride)


def unsupported(size: Sequence[int], side: int, stride: int, double: bool) -> str | None:
    """The reason why the kernel does not apply to a result of this size, or None."""
    if (side, stride) not in FORMS or (double and stride > 1):
        return f"a {side}x{side} convolution of stride {stride}"
    if size[0] * size[1] % 16 or min(size) < 2:
        return f"{size[0]}x{size[1]} pixels: not a multiple of 16, or one line"
    return None


def why_not(
    sources: tuple[Tensor, ...], residual: tuple[Tensor, ...], activation: str, side: int, stride: int, double: bool
) -> str | None:
    """The reason why the kernel does not apply, or None."""
    first = sources[0]
    if first.dtype not in TYPES or any(s.dtype != first.dtype for s in (*sources, *residual)):
        return f"type {first.dtype}, or images of several types"
    if any(not s.movedim(1, -1).is_contiguous() for s in (*sources, *residual)):
        return "an image is not channels-last"
    if any(size % stride for size in first.shape[2:]):
        return "the image does not divide by the stride"
    for images in (sources, residual):
        if len(images) > 2 or (len(images) == 2 and images[0].shape[1] % SEAM):
            return f"{len(images)} sources of {images[0].shape[1]} channels and more"
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    return unsupported(result_size(first, stride, double), side, stride, double)


@cache
def tile_for(
    rows: int, pixels: int, depth: int, columns: int, processors: int, bytes_each: int, shared: int, loops: int
) -> Tile:
    """As `conv_tile`, for weights that are padded to `columns`, a multiple of 16.

    `shared`: bytes of shared memory for the stages of `loops` loops.
    """
    measured = MEASURED.get((rows, pixels, depth, columns))
    if measured is not None and processors == MEASURED_ON and bytes_each == 2:
        return measured
    choices = candidates(rows, pixels, depth, columns, processors=processors, bytes_each=bytes_each)
    choices = [tile for tile in choices if columns % tile.block_k == 0]
    if shared < AMPLE_MEMORY or bytes_each > 2:
        choices = [tile for tile in choices if loops * tile.stages * _stage(tile, bytes_each) <= shared]
    if processors == 1:
        # The interpreter's time depends on the number of operations, not on their size.
        return max(choices, key=lambda tile: (tile.block_m * tile.block_k, tile.block_c, -tile.split, -tile.ways))
    return min(choices, key=lambda tile: cost(tile, rows, depth, columns, processors))


def _stage(tile: Tile, bytes_each: int) -> int:
    """Bytes of one stage of a tile's loop."""
    return (tile.block_m + tile.block_k) * tile.block_c * tile.ways * bytes_each


def processors_of(device: torch.device) -> int:
    """Number of multiprocessors; 1 on a CPU, where Triton's interpreter runs programs one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# Counters of split sums, one set for each use of a weight: zero before and after every launch.
_counters: WeakIdKeyDictionary = WeakIdKeyDictionary()


def counters(weight: Tensor, number: int) -> Tensor:
    """Zeros for a launch that counts the finished programs of each tile, and leaves zeros.

    A recorded graph never runs twice at a time and has its own; other launches, which two streams may run at once, get new ones.
    """
    new = torch.zeros(number, dtype=torch.int32, device=weight.device) if _launched_now(weight) else None
    if weight not in _counters or _counters[weight].numel() < number:
        _counters[weight] = torch.zeros(number, dtype=torch.int32, device=weight.device)
    kept: Tensor = _counters[weight]
    return kept if new is None else new


def _launched_now(x: Tensor) -> bool:
    """Whether a launch is not recorded in a graph."""
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def conv2d(
    sources: tuple[Tensor, ...],
    packed: Tensor,
    shift: Tensor,
    slope: Tensor | None,
    sums: Tensor | None,
    term_NK: Tensor | None,
    residual: tuple[Tensor, ...],
    residual_packed: Tensor | None,
    activation: str,
    channels: int,
    side: int,
    stride: int,
    double: bool,
    eps: float,
    statistics: bool,
    *,
    tile: Tile | None = None,
    checked: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The image (N, K, H, W) in channels-last, and its sums (N, 2, T) if `statistics`.

    `sums`: those of the source, for the norm; with `slope`. `why_not` must be None; `checked`: the caller has called it.
    """
    assert checked or (reason := why_not(sources, residual, activation, side, stride, double)) is None, reason
    first = sources[0]
    N, (H, W) = first.shape[0], result_size(first, stride, double)
    C, C2, KP = sum(s.shape[1] for s in sources), sum(s.shape[1] for s in residual), packed.shape[1]
    rows, depth = N * H * W, side * side * C
    assert shift.shape[-1] == KP and (slope is None) == (sums is None) == (shift.dim() == 1)
    mode = 0 if not residual else 1 if residual_packed is None else 2
    if tile is None:
        machine = processors_of(first.device), first.element_size(), shared_limit(first.device)
        tile = tile_for(rows, H * W, depth, KP, *machine, loops=2 if mode == 2 else 1)
    each = H * W // tile.block_m * (KP // tile.block_k)
    y = empty_channels_last(first, channels, voxels=(H, W))
    left = torch.empty((N, 2, each), device=first.device) if statistics else None
    split = tile.split > 1
    parts = torch.empty(tile.scratch_size(rows, KP)[0] if split else 0, device=first.device)
    count = counters(packed, N * each) if split else shift
    read = 1 if sums is None else sums.shape[2]
    constants: dict[str, Any] = {
        "H": H, "W": W, "C": C, "CA": _seam(sources), "C2": C2, "CA2": _seam(residual), "K": channels, "KP": KP,
        "LDT": -1 if term_NK is None else row_stride(term_NK), "ROWS": rows,
        "SIDE": side, "STRIDE": stride, "DOUBLE": double,
        "NORM": sums is not None, "RESIDUAL": mode, "ACTIVATION": activation, "SUMS": statistics,
        "READ": read, "BLOCK_R": power_of_two(read), "EPS": eps, "SPLIT": tile.split,
        "BLOCK_M": tile.block_m, "BLOCK_K": tile.block_k, "BLOCK_C": tile.block_c, "WAYS": tile.ways,
        "NEAR": tile.near, "PRECISION": "ieee",
    }  # fmt: skip
    more = residual or sources
    ready(voxtune_conv2d)[(N * each * tile.parts(residual=mode == 2),)](
        first,
        sources[-1],
        packed,
        more[0],
        more[-1],
        packed if residual_packed is None else residual_packed,
        shift,
        shift if slope is None else slope,
        shift if term_NK is None else term_NK,
        shift if sums is None else sums,
        y,
        shift if left is None else left,
        parts,
        count,
        tile.turns(depth),
        tile.turns(C2),
        **constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return y, left


def _seam(images: tuple[Tensor, ...]) -> int:
    """Channels of the first of two images; 0 if there are fewer."""
    return images[0].shape[1] if len(images) == 2 else 0
