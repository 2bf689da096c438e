"""GroupNorm or InstanceNorm + residual + activation for channels-last volumes, over one or two sources.

Why: PyTorch's GroupNorm requires NCDHW, so with channels-last volumes every norm costs two layout copies; and with batch 1 it
runs one block for each of 32 groups, on a GPU with 132 multiprocessors. Here the reduction uses the whole device:

1. moments: each program reduces a stretch of voxels to three values per channel: count, mean, and the sum of squares about that
   mean, so that a large mean does not cancel the variance. The convolution that wrote the source may provide these
   (`statistics`), one triple per tile: then this step, which reads the source, is skipped;
2. finalize: combines the stretches into statistics per group, and these into a scale and an offset per channel;
3. apply: y = activation(x * scale + offset + residual), starting with the voxels that were read last, which are still in the
   L2 cache.

InstanceNorm is a group of one channel each: step 2 then handles several groups in one program.

A shift per channel (a convolution's bias, the time embedding) moves a channel's mean and keeps its variance: step 2 applies it
without another pass. Two sources, cat([a, b]) along the channels, are reduced and applied separately: the concatenation is
never written, although a group may contain channels of both.

Legend: N batch, V voxels (D*H*W), C channels of all sources, CS of one, P stretches of voxels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.conv3d_tiles import Device
from voxtune.kernels.precompile import ready

# Programs of step 1 per multiprocessor: enough loads in flight to saturate the memory system.
WAVES = 4
MIN_VOXELS = 64
# Programs of step 2 that several groups of one channel are distributed over at least, if there are as many channels.
MIN_PROGRAMS = 64
TYPES = (torch.float32, torch.bfloat16, torch.float16)


ACTIVATIONS = ("none", "silu", "relu", "leaky_relu", "prelu", "gelu", "gelu_tanh")


def activation_reference(y: Tensor, activation: str, slope: float = 0.01, slopes: Tensor | None = None) -> Tensor:
    """One of ACTIVATIONS; `slope` is that of leaky_relu, `slopes` are those of prelu: one, or one per channel."""
    if activation == "prelu":
        assert slopes is not None, "prelu requires slopes"
        return F.prelu(y, slopes.to(y.dtype).flatten())
    return {
        "none": lambda: y,
        "silu": lambda: F.silu(y),
        "relu": lambda: F.relu(y),
        "leaky_relu": lambda: F.leaky_relu(y, slope),
        "gelu": lambda: F.gelu(y),
        "gelu_tanh": lambda: F.gelu(y, approximate="tanh"),
    }[activation]()


def norm_act_reference(
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    shift_NC: Tensor | None = None,
    activation: str = "none",
    slope: float = 0.01,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The same in plain PyTorch; statistics in float32, or float64 for float64 sources."""
    x = torch.cat(sources, dim=1)
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if shift_NC is not None:
        y = y + shift_NC.to(wide).view(*shift_NC.shape, *[1] * (x.dim() - 2))
    # PyTorch's own kernel for channels-last volumes on a CPU loses digits to cancellation.
    y = torch.group_norm(y.contiguous(), groups, weight.to(wide), bias.to(wide), eps)
    if residual is not None:
        y = y + residual.to(wide)
    return activation_reference(y, activation, slope, slopes).to(x.dtype)


@triton.jit
def activate(y, slope, ACTIVATION: tl.constexpr):
    """`slope` is a number or a tensor that broadcasts to y; only leaky_relu and prelu use it."""
    if ACTIVATION == "silu":
        y = y / (1.0 + tl.exp(-y))
    elif ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # unlike the maximum, keeps NaN
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # y (1 + tanh u) / 2 = y sigmoid(2 u), u = sqrt(2 / pi) (y + 0.044715 y^3)
        y = y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))
    elif ACTIVATION != "none":
        y = tl.where(y < 0.0, y * slope, y)
    return y


@triton.jit
def voxtune_moments(
    x_ptr,  # (N, V, CS): one source
    statistics_ptr,  # (N, P, 3, CS) float32: count, mean, sum of squares about the mean
    V,
    CS,  # in units of UNIT
    stretch,  # voxels a program reduces
    UNIT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    CS *= UNIT
    p, cb, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    P = tl.num_programs(0)
    c = cb * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CS
    base = x_ptr + n.to(tl.int64) * V * CS
    start = p * stretch
    end = tl.minimum(start + stretch, V)
    # About a pivot, the stretch's first voxel: its distance to the mean is of the order of the spread.
    pivot = tl.load(base + start.to(tl.int64) * CS + c, mask=inside, other=0.0).to(tl.float32)
    # One sum a lane, reduced over voxels once at the end: a reduction in the loop would wait for all warps each time.
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    squares = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for v0 in range(start, end, BLOCK_V):
        v = v0 + tl.arange(0, BLOCK_V)
        keep = (v < end)[:, None] & inside[None, :]
        x = tl.load(base + v[:, None].to(tl.int64) * CS + c[None, :], mask=keep, other=0.0).to(tl.float32)
        d = tl.where(keep, x - pivot[None, :], 0.0)
        total += d
        squares += d * d
    count = (end - start).to(tl.float32)
    from_pivot = tl.sum(total, axis=0) / count
    about_mean = tl.sum(squares, axis=0) - from_pivot * from_pivot * count
    at = statistics_ptr + ((n * P + p) * 3).to(tl.int64) * CS + c
    tl.store(at, tl.zeros_like(from_pivot) + count, mask=inside)
    tl.store(at + CS, pivot + from_pivot, mask=inside)
    tl.store(at + 2 * CS, tl.maximum(about_mean, 0.0), mask=inside)


@triton.jit
def voxtune_finalize(
    a_ptr,  # (N, PA, 3, CA) float32: the first source's statistics
    b_ptr,  # (N, PB, 3, C - CA) float32: the second's; unread when CA is C
    shift_ptr,  # (N, C) or (1, C), of any float type; unread when HAS_SHIFT is off
    weight_ptr,  # (C,)
    bias_ptr,  # (C,)
    affine_ptr,  # (N, ROWS, C) float32: scale, offset; of four rows also the mean and 1 / standard deviation of x
    V,
    C,
    CA,
    PA,
    PB,
    eps,
    shift_stride,  # from row to row, or 0 when one shift serves the batch
    GROUP: tl.constexpr,  # channels a group
    BLOCK_G: tl.constexpr,  # GROUP, rounded up to a power of two; groups a program if GROUP is 1
    BLOCK_P: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    ROWS: tl.constexpr,
):
    g, n = tl.program_id(0), tl.program_id(1)
    SPAN: tl.constexpr = GROUP if GROUP > 1 else BLOCK_G
    lane = tl.arange(0, BLOCK_G)
    c = g * SPAN + lane
    inside = (lane < SPAN) & (c < C)
    of_a = c < CA
    CB = C - CA
    width, stretches = tl.where(of_a, CA, CB), tl.where(of_a, PA, PB)
    here = tl.where(of_a, a_ptr + n.to(tl.int64) * PA * 3 * CA + c, b_ptr + n.to(tl.int64) * PB * 3 * CB + (c - CA))
    # Each lane joins its stretches by Chan's rule, then the lanes of a group are joined.
    count = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    mean = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    spread = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    # Channels on one side of the seam read only their own source's stretches.
    most = tl.maximum(tl.where(g * SPAN < CA, PA, 0), tl.where((g + 1) * SPAN > CA, PB, 0))
    for p0 in range(0, most, BLOCK_P):
        p = (p0 + tl.arange(0, BLOCK_P))[:, None]
        keep = (p < stretches[None, :]) & inside[None, :]
        at = here[None, :] + (p * 3).to(tl.int64) * width[None, :]
        more = tl.load(at, mask=keep, other=0.0)
        away = tl.load(at + width[None, :], mask=keep, other=0.0) - mean
        both = count + more
        share = more / tl.maximum(both, 1.0)
        spread += tl.load(at + 2 * width[None, :], mask=keep, other=0.0) + away * away * count * share
        mean += away * share
        count = both
    mean_c = tl.sum(mean * count, axis=0) / V
    away_c = mean - mean_c[None, :]
    spread_c = tl.sum(spread + away_c * away_c * count, axis=0)  # sum of squares about the channel's own mean
    shift = tl.zeros((BLOCK_G,), tl.float32)
    if HAS_SHIFT:
        shift = tl.load(shift_ptr + n * shift_stride + c, mask=inside, other=0.0).to(tl.float32)
    mean_c += shift
    if GROUP == 1:
        mean_g = mean_c
        variance = spread_c / V
    else:
        mean_g = tl.sum(tl.where(inside, mean_c, 0.0), axis=0) / GROUP
        away_g = tl.where(inside, mean_c - mean_g, 0.0)
        variance = (tl.sum(tl.where(inside, spread_c, 0.0), axis=0) / V + tl.sum(away_g * away_g, axis=0)) / GROUP
    scale = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32) / tl.sqrt(variance + eps)
    offset = tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32) + (shift - mean_g) * scale
    at = affine_ptr + n * ROWS * C + c
    tl.store(at, scale, mask=inside)
    tl.store(at + C, offset, mask=inside)
    if ROWS == 4:
        tl.store(at + 2 * C, mean_g - shift, mask=inside)
        tl.store(at + 3 * C, shift * 0.0 + 1.0 / tl.sqrt(variance + eps), mask=inside)


@triton.jit
def voxtune_normalize(
    x_ptr,  # (N, V, CS): one source
    affine_ptr,  # (N, ROWS, C) float32
    slopes_ptr,  # (C,) or (1,): unread except by prelu
    residual_ptr,  # (N, V, C); unread when HAS_RESIDUAL is off
    y_ptr,  # (N, V, C)
    V,
    CS,  # this and the next two in units of UNIT
    C,
    first,
    slope,
    slopes_stride,  # 1, or 0 when one slope serves all channels
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    CS *= UNIT
    C *= UNIT
    first *= UNIT
    # Last voxels first: step 1 read them last, so the L2 still has them.
    block, cb, n = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = cb * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CS
    scale = tl.load(affine_ptr + n * ROWS * C + first + c, mask=inside, other=0.0)
    offset = tl.load(affine_ptr + (n * ROWS + 1) * C + first + c, mask=inside, other=0.0)
    v = block * BLOCK_V + tl.arange(0, BLOCK_V)
    keep = (v < V)[:, None] & inside[None, :]
    row = (n.to(tl.int64) * V + v)[:, None]
    x = tl.load(x_ptr + row * CS + c[None, :], mask=keep, other=0.0).to(tl.float32)
    y = x * scale[None, :] + offset[None, :]
    at = row * C + first + c[None, :]
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + at, mask=keep, other=0.0).to(tl.float32)
    if ACTIVATION == "prelu":
        slopes = tl.load(slopes_ptr + (first + c) * slopes_stride, mask=inside, other=0.0).to(tl.float32)
        y = activate(y, slopes[None, :], ACTIVATION)
    else:
        y = activate(y, slope, ACTIVATION)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=keep)


def channel_block(channels: int) -> int:
    """Channels a program: the largest power of two up to 128 that divides them; masked if that is below 16."""
    block = min(128, channels & -channels)
    if block >= 16:
        return block
    if channels <= 32:
        return triton.next_power_of_2(channels)
    # The fewest masked lanes, then the longest rows.
    return min((128, 64, 32), key=lambda size: triton.cdiv(channels, size) * size)


def unit_of(*channels: int) -> int:
    """The largest power of two up to 8 that divides the counts; 1 if 16 divides them.

    Triton derives the width of its loads from what it knows to divide the arguments: a multiple of 16 it notices itself.
    """
    common = math.gcd(*channels)
    return 1 if common % 16 == 0 else min(8, common & -common)


def voxels_last(x: Tensor) -> Tensor:
    """The view (N, V, C) of a channels-last (N, C, *voxels) tensor."""
    x_NVC = x.movedim(1, -1)
    assert x_NVC.is_contiguous(), "the source is not channels-last"
    return x_NVC.view(x.shape[0], -1, x.shape[1])


def why_not(  # noqa: PLR0911
    sources: tuple[Tensor, ...],
    groups: int,
    activation: str = "none",
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
) -> str | None:
    """The reason why the kernels do not apply, or None."""
    first = sources[0]
    channels = sum(s.shape[1] for s in sources)
    for tensor in (first, first if residual is None else residual):
        if tensor.dtype not in TYPES:
            return f"type {tensor.dtype} has no kernel"
    if any(s.dtype != first.dtype or s.shape[0] != first.shape[0] or s.shape[2:] != first.shape[2:] for s in sources):
        return "the sources differ in type, batch or size"
    if any(not s.movedim(1, -1).is_contiguous() for s in sources):
        return "a source is not channels-last"
    if len(sources) > 2:
        return f"{len(sources)} sources: at most two"
    if channels % groups:
        return f"{channels} channels do not divide into {groups} groups"
    if first.numel() == 0 or triton.next_power_of_2(channels // groups) > 1024:
        return "an empty source, or more than 1024 channels a group"
    if residual is not None:
        if residual.shape != (first.shape[0], channels, *first.shape[2:]):
            return "the residual differs from the result in size"
        if not residual.movedim(1, -1).is_contiguous():
            return "the residual is not channels-last"
    return why_not_activation(activation, channels, slopes)


def why_not_activation(activation: str, channels: int, slopes: Tensor | None) -> str | None:
    if activation not in ACTIVATIONS:
        return f"activation {activation} has no kernel"
    if activation == "prelu" and (slopes is None or slopes.numel() not in (1, channels)):
        return "prelu requires one slope, or one per channel"
    return None


def row_stride(shift_NC: Tensor | None) -> int:
    """Row stride of a shift per channel, which may be a slice of a wider tensor (all blocks' time embeddings)."""
    if shift_NC is None or shift_NC.shape[0] == 1:
        return 0
    assert shift_NC.stride(1) == 1, "a shift's channels have gaps"
    return shift_NC.stride(0)


def moments(source: Tensor) -> Tensor:
    """The statistics (N, P, 3, C) of a channels-last source."""
    view = voxels_last(source)
    N, V, CS = view.shape
    stretch, P = stretches(V, N, CS, source.device)
    statistics = torch.empty((N, P, 3, CS), dtype=torch.float32, device=source.device)
    block_c, unit = channel_block(CS), unit_of(CS)
    ready(voxtune_moments)[(P, triton.cdiv(CS, block_c), N)](
        view, statistics, V, CS // unit, stretch, UNIT=unit, BLOCK_V=4096 // block_c, BLOCK_C=block_c, num_warps=8
    )
    return statistics


def norm_act(
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    shift_NC: Tensor | None = None,
    activation: str = "none",
    slope: float = 0.01,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: Sequence[Tensor | None] | None = None,
    *,
    checked: bool = False,
) -> Tensor:
    """activation(group_norm(cat(sources) + shift) + residual) for channels-last sources (N, C_i, *voxels).

    `statistics` are those of each source (N, P_i, 3, C_i), or None for a source whose statistics must be computed here.
    `why_not` must be None; `checked`: the caller has called it.
    """
    given = (activation, slope, slopes, residual, statistics)
    return norm_act_and_affine(sources, weight, bias, groups, eps, shift_NC, *given, rows=2, checked=checked)[0]


def norm_act_and_affine(
    sources: tuple[Tensor, ...],
    weight: Tensor,
    bias: Tensor,
    groups: int,
    eps: float = 1e-5,
    shift_NC: Tensor | None = None,
    activation: str = "none",
    slope: float = 0.01,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
    statistics: Sequence[Tensor | None] | None = None,
    *,
    rows: int = 4,
    checked: bool = False,
) -> tuple[Tensor, Tensor]:
    """The result of `norm_act`, and (N, rows, C) float32: scale, offset and, of four rows, what the backward pass needs too."""
    assert checked or (reason := why_not(sources, groups, activation, slopes, residual)) is None, reason
    views = [voxels_last(s) for s in sources]
    N, V, CA = views[0].shape
    C = sum(view.shape[2] for view in views)
    known = list(statistics) if statistics else [None] * len(sources)
    assert len(known) == len(sources), "one statistics tensor or None per source"
    parts = [moments(source) if part is None else part for source, part in zip(sources, known, strict=True)]
    assert all(p.shape[0] == N and p.shape[2:] == (3, v.shape[2]) for p, v in zip(parts, views, strict=True))
    affine = torch.empty((N, rows, C), dtype=torch.float32, device=sources[0].device)
    group = C // groups
    block_g, most = lanes(group, N * C), max(part.shape[1] for part in parts)
    ready(voxtune_finalize)[(triton.cdiv(C, block_g) if group == 1 else groups, N)](
        parts[0],
        parts[-1],
        affine if shift_NC is None else shift_NC,
        weight,
        bias,
        affine,
        V,
        C,
        CA,
        parts[0].shape[1],
        parts[-1].shape[1],
        eps,
        row_stride(shift_NC),
        GROUP=group,
        BLOCK_G=block_g,
        BLOCK_P=max(1, min(triton.next_power_of_2(most), 2048, 4096 // block_g)),
        HAS_SHIFT=shift_NC is not None,
        ROWS=rows,
        num_warps=8,
    )
    return normalize(sources, affine, activation, slope, slopes, residual), affine


def normalize(
    sources: tuple[Tensor, ...],
    affine: Tensor,
    activation: str = "none",
    slope: float = 0.01,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Step 3: activation(cat(sources) * scale + offset + residual); `affine` (N, 2 or 4, C) begins with scale and offset."""
    views, (N, rows, C) = [voxels_last(s) for s in sources], affine.shape
    V = views[0].shape[1]
    y = empty_channels_last(sources[0], C)
    first = 0
    for view in views:
        CS = view.shape[2]
        block_c, unit = channel_block(CS), unit_of(CS, C, first)
        block_v = 4096 // block_c
        ready(voxtune_normalize)[(triton.cdiv(V, block_v), triton.cdiv(CS, block_c), N)](
            view,
            affine,
            affine if slopes is None else slopes,
            view if residual is None else residual,
            y,
            V,
            CS // unit,
            C // unit,
            first // unit,
            float(slope),
            0 if slopes is None or slopes.numel() == 1 else 1,
            ACTIVATION=activation,
            HAS_RESIDUAL=residual is not None,
            ROWS=rows,
            UNIT=unit,
            BLOCK_V=block_v,
            BLOCK_C=block_c,
            num_warps=8,
        )
        first += CS
    return y


def lanes(group: int, columns: int) -> int:
    """Channels that a program of step 2 handles, a power of two: those of one group, or several groups of one channel.

    Eight channels are one sector of memory; fewer keep enough programs in flight for few channels with many stretches.
    """
    if group > 1:
        return triton.next_power_of_2(group)
    return min(8, 1 << (max(1, columns // MIN_PROGRAMS).bit_length() - 1))


def stretches(V: int, N: int, C: int, device: torch.device) -> tuple[int, int]:
    """(voxels per program, number of programs for V): about WAVES programs per multiprocessor in all."""
    columns = N * triton.cdiv(C, 128)
    programs = max(1, WAVES * Device.of(device).processors // columns)
    stretch = max(MIN_VOXELS, triton.cdiv(V, programs))
    return stretch, triton.cdiv(V, stretch)


def empty_channels_last(
    source: Tensor, channels: int, dtype: torch.dtype | None = None, voxels: tuple[int, ...] | None = None
) -> Tensor:
    """An empty channels-last tensor with `channels`, by default of the source's type and size."""
    N, _, *size = source.shape
    return source.new_empty((N, *(voxels or size), channels), dtype=dtype or source.dtype).movedim(-1, 1)
