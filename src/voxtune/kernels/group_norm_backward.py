"""The gradients of group_norm.py's norm + residual + activation, channels-last, over one or two sources.

Why: PyTorch's backward pass of GroupNorm requires NCDHW, as the forward pass does, and writes the gradient of every step of the
chain (activation, sum, norm, concatenation) to memory. Here the normalised volume is computed again from the source, so that only
the sources are kept from the forward pass:

    z = x scale + offset (+ residual),   dz = dy activation'(z),   xhat = (x - mean) rstd

1. sums: each program reduces a stretch of voxels to the sums per channel of dz, dz xhat, xhat (for the shift's gradient) and, for
   prelu, of min(z, 0) dy;
2. combine: these are the gradients of bias and weight; their means over a group (weighted by the weight) give the coefficients of

    dx = dz scale + x slope + constant;

3. apply: writes dx, and dz as the gradient of the residual. The gradients that other operators gave the source are added here,
   instead of in a pass of their own, and the sums of dx over the voxels are written.

All sums are float32 in a fixed order: two runs give the same bits. A group may contain channels of both sources.

Legend: N batch, V voxels (D*H*W), C channels of all sources, CS of one, P stretches of voxels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from voxtune.kernels.group_norm import (
    channel_block,
    empty_channels_last,
    lanes,
    norm_act_reference,
    stretches,
    unit_of,
    voxels_last,
)
from voxtune.kernels.precompile import ready

# Elements of a tile of step 1, and tiles in flight: so few that group_norm.WAVES programs fit on a multiprocessor at once.
SUMS_TILE = 1024
SUMS_STAGES = 3
# Elements of a tile of step 3: with 8 warps, one 16-byte vector of 16-bit values per lane and operand.
GRADIENT_TILE = 2048
# A program of step 3 takes more tiles only while there are at least this many programs.
ENOUGH = 2048
LONGEST_WALK = 16


@dataclass(frozen=True)
class NormGradients:
    """None where the forward pass had no such argument."""

    sources: tuple[Tensor, ...]
    weight: Tensor
    bias: Tensor
    shift_NC: Tensor | None = None
    slopes: Tensor | None = None
    residual: Tensor | None = None
    # (N, 1, C_i) float32: each source's gradient summed over the voxels. Only the kernels give them.
    sums_NPC: tuple[Tensor, ...] = ()


def norm_act_backward_reference(
    dy: Tensor,
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
) -> NormGradients:
    """The same by PyTorch's own differentiation of the forward pass's reference."""
    given = [*sources, weight, bias, shift_NC, slopes, residual]
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_() for x in given]
        *parts, w, b, shift, p, r = leaves
        y = norm_act_reference(tuple(parts), w, b, groups, eps, shift, activation, slope, p, r)  # type: ignore[arg-type]
        present = [x for x in leaves if x is not None]
        values = iter(torch.autograd.grad(y, present, dy))
    *dx, dw, db, ds, dp, dr = (None if x is None else next(values) for x in leaves)
    return NormGradients(tuple(dx), dw, db, ds, dp, dr)  # type: ignore[arg-type]


@triton.jit
def _derivative(z, slope, ACTIVATION: tl.constexpr):
    """activation'(z); `slope` as in group_norm.activate."""
    if ACTIVATION == "silu":
        s = 1.0 / (1.0 + tl.exp(-z))
        d = s * (1.0 + z * (1.0 - s))
    elif ACTIVATION == "relu":
        d = tl.where(z > 0.0, 1.0, 0.0)
    elif ACTIVATION == "gelu":
        d = 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * tl.exp(-0.5 * z * z)
    elif ACTIVATION == "gelu_tanh":
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
        d = s + z * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * z * z)
    elif ACTIVATION == "none":
        d = z * 0.0 + 1.0
    else:
        d = tl.where(z > 0.0, 1.0, slope + z * 0.0)
    return d


@triton.jit
def _tile(
    x_ptr,
    dy_ptr,
    affine_ptr,
    slopes_ptr,
    residual_ptr,
    n,
    v,
    V,
    CS,
    C,
    first,
    c,
    slope,
    slopes_stride,
    keep,
    inside,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """(x, z, dy, dz) of a tile of voxels and channels of one source, float32."""
    scale = tl.load(affine_ptr + n * 4 * C + first + c, mask=inside, other=0.0)
    offset = tl.load(affine_ptr + (n * 4 + 1) * C + first + c, mask=inside, other=0.0)
    row = (n.to(tl.int64) * V + v)[:, None]
    x = tl.load(x_ptr + row * CS + c[None, :], mask=keep, other=0.0).to(tl.float32)
    at = row * C + first + c[None, :]
    dy = tl.load(dy_ptr + at, mask=keep, other=0.0).to(tl.float32)
    z = x * scale[None, :] + offset[None, :]
    if HAS_RESIDUAL:
        z += tl.load(residual_ptr + at, mask=keep, other=0.0).to(tl.float32)
    if ACTIVATION == "prelu":
        slopes = tl.load(slopes_ptr + (first + c) * slopes_stride, mask=inside, other=0.0).to(tl.float32)
        d = _derivative(z, slopes[None, :], ACTIVATION)
    else:
        d = _derivative(z, slope, ACTIVATION)
    return x, z, dy, dy * d


@triton.jit
def voxtune_norm_sums(
    x_ptr,  # (N, V, CS): one source
    dy_ptr,  # (N, V, C)
    affine_ptr,  # (N, 4, C) float32: scale, offset, mean, 1 / standard deviation
    slopes_ptr,  # (C,) or (1,): unread except by prelu
    residual_ptr,  # (N, V, C); unread when HAS_RESIDUAL is off
    sums_ptr,  # (N, P, 4, C) float32: of dz, dz xhat, xhat, min(z, 0) dy
    V,
    CS,  # this and the next two in units of UNIT
    C,
    first,
    stretch,  # voxels a program reduces
    slope,
    slopes_stride,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,  # tiles in flight
):
    CS *= UNIT
    C *= UNIT
    first *= UNIT
    p, cb, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    P = tl.num_programs(0)
    c = cb * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CS
    mean = tl.load(affine_ptr + (n * 4 + 2) * C + first + c, mask=inside, other=0.0)
    rstd = tl.load(affine_ptr + (n * 4 + 3) * C + first + c, mask=inside, other=0.0)
    start = p * stretch
    end = tl.minimum(start + stretch, V)
    of_dz = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    of_product = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    of_xhat = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    of_negative = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for v0 in tl.range(start, end, BLOCK_V, num_stages=STAGES):
        v = v0 + tl.arange(0, BLOCK_V)
        keep = (v < end)[:, None] & inside[None, :]
        x, z, dy, dz = _tile(
            x_ptr,
            dy_ptr,
            affine_ptr,
            slopes_ptr,
            residual_ptr,
            n,
            v,
            V,
            CS,
            C,
            first,
            c,
            slope,
            slopes_stride,
            keep,
            inside,
            ACTIVATION,
            HAS_RESIDUAL,
        )
        xhat = tl.where(keep, (x - mean[None, :]) * rstd[None, :], 0.0)
        of_dz += dz
        of_product += dz * xhat
        of_xhat += xhat
        if ACTIVATION == "prelu":
            of_negative += tl.minimum(z, 0.0) * dy
    at = sums_ptr + ((n * P + p) * 4).to(tl.int64) * C + first + c
    tl.store(at, tl.sum(of_dz, axis=0), mask=inside)
    tl.store(at + C, tl.sum(of_product, axis=0), mask=inside)
    tl.store(at + 2 * C, tl.sum(of_xhat, axis=0), mask=inside)
    tl.store(at + 3 * C, tl.sum(of_negative, axis=0), mask=inside)


@triton.jit
def voxtune_norm_combine(
    sums_ptr,  # (N, P, 4, C) float32
    affine_ptr,  # (N, 4, C) float32: scale, offset, mean, 1 / standard deviation
    weight_ptr,  # (C,)
    totals_ptr,  # (N, 4, C) float32: gradients of bias, weight, shift and slope for each sample
    linear_ptr,  # (N, 2, C) float32: slope and constant of dx
    V,
    C,
    P,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    g, n = tl.program_id(0), tl.program_id(1)
    SPAN: tl.constexpr = GROUP if GROUP > 1 else BLOCK_G
    lane = tl.arange(0, BLOCK_G)
    c = g * SPAN + lane
    inside = (lane < SPAN) & (c < C)
    of_dz = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    of_product = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    of_xhat = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    of_negative = tl.zeros((BLOCK_P, BLOCK_G), tl.float32)
    for p0 in range(0, P, BLOCK_P):
        p = (p0 + tl.arange(0, BLOCK_P))[:, None]
        keep = (p < P) & inside[None, :]
        at = sums_ptr + ((n * P + p) * 4).to(tl.int64) * C + c[None, :]
        of_dz += tl.load(at, mask=keep, other=0.0)
        of_product += tl.load(at + C, mask=keep, other=0.0)
        of_xhat += tl.load(at + 2 * C, mask=keep, other=0.0)
        of_negative += tl.load(at + 3 * C, mask=keep, other=0.0)
    dz, product = tl.sum(of_dz, axis=0), tl.sum(of_product, axis=0)
    xhat, negative = tl.sum(of_xhat, axis=0), tl.sum(of_negative, axis=0)
    here = affine_ptr + n * 4 * C + c
    scale = tl.load(here, mask=inside, other=0.0)
    mean = tl.load(here + 2 * C, mask=inside, other=0.0)
    rstd = tl.load(here + 3 * C, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    if GROUP == 1:
        of_group, of_group_product = weight * dz / V, weight * product / V
    else:
        of_group = tl.sum(weight * dz, axis=0) / GROUP / V
        of_group_product = tl.sum(weight * product, axis=0) / GROUP / V
    slope = -rstd * rstd * of_group_product
    constant = -rstd * of_group - slope * mean
    at = totals_ptr + n * 4 * C + c
    tl.store(at, dz, mask=inside)
    tl.store(at + C, product, mask=inside)
    # The sum of dx over the voxels; the sum of x - mean is that of xhat / rstd.
    tl.store(at + 2 * C, dz * scale - rstd * of_group * V - rstd * of_group_product * xhat, mask=inside)
    tl.store(at + 3 * C, negative, mask=inside)
    at = linear_ptr + n * 2 * C + c
    tl.store(at, slope, mask=inside)
    tl.store(at + C, constant, mask=inside)


@triton.jit
def voxtune_norm_gradient(
    x_ptr,  # (N, V, CS): one source
    dy_ptr,  # (N, V, C)
    affine_ptr,  # (N, 4, C) float32
    linear_ptr,  # (N, 2, C) float32
    slopes_ptr,
    residual_ptr,  # (N, V, C); unread when HAS_RESIDUAL is off
    addend_ptr,  # (N, V, CS); unread when HAS_ADDEND is off
    dx_ptr,  # (N, V, CS)
    dresidual_ptr,  # (N, V, C); not written when HAS_RESIDUAL is off
    sums_ptr,  # (N, P, CS) float32: of dx; not written when HAS_ADDEND is off
    V,
    CS,  # this and the next two in units of UNIT
    C,
    first,
    slope,
    slopes_stride,
    ACTIVATION: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_ADDEND: tl.constexpr,
    STEPS: tl.constexpr,  # tiles of one program
    UNIT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    CS *= UNIT
    C *= UNIT
    first *= UNIT
    p, cb, n = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = cb * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < CS
    scale = tl.load(affine_ptr + n * 4 * C + first + c, mask=inside, other=0.0)
    linear = tl.load(linear_ptr + n * 2 * C + first + c, mask=inside, other=0.0)
    constant = tl.load(linear_ptr + (n * 2 + 1) * C + first + c, mask=inside, other=0.0)
    total = tl.zeros((BLOCK_V, BLOCK_C), tl.float32)
    for step in range(STEPS):
        # Last voxels first: the sums read them last, so the L2 still has them.
        block = (tl.num_programs(0) - p) * STEPS - 1 - step
        v = block * BLOCK_V + tl.arange(0, BLOCK_V)
        keep = (v < V)[:, None] & inside[None, :]
        x, _, _, dz = _tile(
            x_ptr,
            dy_ptr,
            affine_ptr,
            slopes_ptr,
            residual_ptr,
            n,
            v,
            V,
            CS,
            C,
            first,
            c,
            slope,
            slopes_stride,
            keep,
            inside,
            ACTIVATION,
            HAS_RESIDUAL,
        )
        dx = dz * scale[None, :] + x * linear[None, :] + constant[None, :]
        row = (n.to(tl.int64) * V + v)[:, None]
        at = row * CS + c[None, :]
        if HAS_ADDEND:
            dx += tl.load(addend_ptr + at, mask=keep, other=0.0).to(tl.float32)
            total += tl.where(keep, dx, 0.0)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=keep)
        if HAS_RESIDUAL:
            at = row * C + first + c[None, :]
            tl.store(dresidual_ptr + at, dz.to(dresidual_ptr.dtype.element_ty), mask=keep)
    if HAS_ADDEND:
        at = sums_ptr + (n * tl.num_programs(0) + p).to(tl.int64) * CS + c
        tl.store(at, tl.sum(total, axis=0), mask=inside)


def norm_act_backward(
    dy: Tensor,
    sources: tuple[Tensor, ...],
    affine: Tensor,
    weight: Tensor,
    groups: int,
    shift_NC: Tensor | None = None,
    activation: str = "none",
    slope: float = 0.01,
    slopes: Tensor | None = None,
    residual: Tensor | None = None,
    addends: Sequence[Tensor | None] = (),
) -> NormGradients:
    """The gradients for channels-last dy, sources and residual; `affine` (N, 4, C) is what the forward pass kept.

    `addends` are added to the gradients of the sources: those of other operators that read the same source.
    """
    views, dy_NVC = [voxels_last(s) for s in sources], voxels_last(dy)
    N, V, C = dy_NVC.shape
    device = dy.device
    stretch, P = stretches(V, N, C, device)
    sums = torch.empty((N, P, 4, C), dtype=torch.float32, device=device)
    totals = torch.empty((N, 4, C), dtype=torch.float32, device=device)
    linear = torch.empty((N, 2, C), dtype=torch.float32, device=device)
    options = {"ACTIVATION": activation, "HAS_RESIDUAL": residual is not None, "num_warps": 8}
    given = (affine if slopes is None else slopes, dy_NVC if residual is None else voxels_last(residual))
    slopes_stride = 0 if slopes is None or slopes.numel() == 1 else 1
    parts: list[tuple[Tensor, int]] = []
    first = 0
    for view in views:
        parts.append((view, first))
        first += view.shape[2]
    for view, first in parts:
        CS = view.shape[2]
        block_c, unit = channel_block(CS), unit_of(CS, C, first)
        ready(voxtune_norm_sums)[(P, triton.cdiv(CS, block_c), N)](
            *(view, dy_NVC, affine, *given, sums),
            *(V, CS // unit, C // unit, first // unit, stretch, float(slope), slopes_stride),
            UNIT=unit,
            BLOCK_V=SUMS_TILE // block_c,
            BLOCK_C=block_c,
            STAGES=SUMS_STAGES,
            **options,
        )
    group = C // groups
    block_g = lanes(group, N * C)
    ready(voxtune_norm_combine)[(triton.cdiv(C, block_g) if group == 1 else groups, N)](
        *(sums, affine, weight, totals, linear, V, C, P),
        GROUP=group,
        BLOCK_G=block_g,
        BLOCK_P=max(1, min(triton.next_power_of_2(P), 1024, 2048 // block_g)),
        num_warps=8,
    )
    gradients = [empty_channels_last(source, source.shape[1]) for source in sources]
    sums_NPC = list(totals[:, 2:3].split([view.shape[2] for view in views], dim=2))
    dresidual = None if residual is None else empty_channels_last(residual, C)
    for i, ((view, first), dx) in enumerate(zip(parts, gradients, strict=True)):
        CS, addend = view.shape[2], addends[i] if addends else None
        block_c, unit = channel_block(CS), unit_of(CS, C, first)
        block_v = GRADIENT_TILE // block_c
        blocks_c = triton.cdiv(CS, block_c)
        steps = 1 if addend is None else steps_of(N * blocks_c * triton.cdiv(V, block_v))
        P = triton.cdiv(V, block_v * steps)
        if addend is not None:
            sums_NPC[i] = torch.empty((N, P, CS), dtype=torch.float32, device=device)
        ready(voxtune_norm_gradient)[(P, blocks_c, N)](
            *(view, dy_NVC, affine, linear, *given, view if addend is None else voxels_last(addend)),
            voxels_last(dx),
            dy_NVC if dresidual is None else voxels_last(dresidual),
            sums_NPC[i],
            *(V, CS // unit, C // unit, first // unit, float(slope), slopes_stride),
            HAS_ADDEND=addend is not None,
            STEPS=steps,
            UNIT=unit,
            BLOCK_V=block_v,
            BLOCK_C=block_c,
            **options,
        )
    dbias, dweight, dshift, dslope = totals.unbind(1)
    return NormGradients(
        tuple(gradients),
        dweight[0] if N == 1 else dweight.sum(0),
        dbias[0] if N == 1 else dbias.sum(0),
        _like(dshift, shift_NC),
        None if slopes is None else (dslope.sum() if slopes.numel() == 1 else dslope.sum(0)).view_as(slopes),
        dresidual,
        tuple(sums_NPC),
    )


def steps_of(tiles: int) -> int:
    """Tiles of a program that sums its results: the fewest sums, as long as the programs still fill the GPU."""
    steps = LONGEST_WALK
    while steps > 1 and tiles // steps < ENOUGH:
        steps //= 2
    return steps


def _like(gradient: Tensor, shift_NC: Tensor | None) -> Tensor | None:
    """The gradient of a shift that may serve the whole batch."""
    if shift_NC is None:
        return None
    total = gradient.sum(0, keepdim=True) if shift_NC.shape[0] < gradient.shape[0] else gradient
    # A copy: the sums belong to the source's gradient too, and this may become a parameter's.
    return total.to(shift_NC.dtype, copy=total is gradient)


def affine_reference(
    sources: Sequence[Tensor], weight: Tensor, bias: Tensor, groups: int, eps: float, shift_NC: Tensor | None = None
) -> Tensor:
    """(N, 4, C): scale, offset, mean of a source's values without the shift, and 1 / standard deviation; float32 or wider."""
    x = torch.cat(list(sources), dim=1).flatten(2).double()
    N, C, _ = x.shape
    shift = x.new_zeros(1, C) if shift_NC is None else shift_NC.double()
    grouped = (x + shift[..., None]).unflatten(1, (groups, -1)).flatten(2)
    mean, rstd = grouped.mean(2), (grouped.var(2, unbiased=False) + eps).rsqrt()
    mean, rstd = (t[..., None].expand(N, groups, C // groups).flatten(1) for t in (mean, rstd))
    mean = mean - shift
    scale = weight.double() * rstd
    affine = torch.stack([scale, bias.double() - mean * scale, mean, rstd], dim=1)
    return affine.to(torch.promote_types(sources[0].dtype, torch.float32))
