"""The gradient of a 3x3x3 convolution's weight: dW[tap, k, c] = sum over voxels v of dy[v, k] * x[v + tap, c].

Why: it is a third of a training step's arithmetic, and cuDNN computes it more slowly than the forward pass.

1. The result is small and the sum long. A tile of the result, 64 x 64 channels of some taps, takes as many steps as the volume
   has tiles of TH x TW voxels. The steps of all tiles, one tile after the other, are divided evenly among the programs: each
   has a contiguous range, and none waits for others at the end. A program sums in float32, and writes a part for each tile of
   the result that it touches.
2. A second kernel adds the parts of each tile in a fixed order: without atomics, results do not depend on timing.
3. Each source of conv(cat([a, b])) gives the columns of its own channels, without a concatenation.
4. Successive steps are successive planes of a column of tiles of voxels: they share input planes.

The plain kernel computes the three taps along w with one tile of dy, on any device; conv3d_weight_gradient_hopper.py computes
nine.

Parts: program i of G has the steps from i * U // G to (i + 1) * U // G. Its part of tile t is number i + t: from one part to
the next, in the order of steps, at least one of the two grows, so that the numbers differ.

Legend: N batch, D H W voxels of dy, XD XH XW voxels of the sources, C input channels of a source, K output channels, U steps of
all tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F
from triton.tools.tensor_descriptor import TensorDescriptor

from voxtune.kernels.conv3d import CUBE, channels_inside, load_voxels, result_size
from voxtune.kernels.conv3d_tiles import Device, has_copy_engine
from voxtune.kernels.measured_tiles import card
from voxtune.kernels.precompile import ready

Method = Literal["cudnn", "triton", "hopper"]
# Which of them `gradients.py` uses where `why_not` is None; None: the one that was faster on this card, else by the rule.
METHOD: Method | None = None
# The rule where nothing was measured: on an H200 the kernel for Hopper takes 0.5 to 0.9 of cuDNN's time from this number of
# voxels on; with fewer, the faster one depends on the shape.
MEASURED_VOXELS = 64**3
# Later versions of Triton pad an input plane to a power of two: the faster tile then exceeds the shared memory.
COMPACT_PLANES = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
PARTS_AT_ONCE = 8  # that the join loads together
ROWS = 8  # of a tile, for one program of the join


@dataclass(frozen=True, kw_only=True)
class GradientTile:
    """One step: h x w voxels, k output and c input channels."""

    h: int = 8
    w: int = 8
    k: int = 64
    c: int = 64
    stages: int = 4  # steps in flight
    warps: int = 4
    hopper: bool = False
    registers: bool = True  # hopper only: dy is an operand in registers, not in shared memory
    # hopper only, with 4 warps: how the products of the three groups follow each other without gaps.
    turns: bool = False  # with dy in registers: a group starts its products when the group before has started its own
    ahead: bool = False  # with dy in shared memory: a group starts its next products while its own run

    @property
    def groups(self) -> int:
        """Of the 27 taps; a program computes one of them."""
        return 3 if self.hopper else 9


@dataclass(frozen=True, kw_only=True)
class Division:
    """The division of the steps."""

    tiles: int  # of the result
    steps: int  # of each tile
    programs: int
    chunks: int  # of input channels

    @property
    def units(self) -> int:
        return self.tiles * self.steps

    @property
    def parts(self) -> int:
        return self.programs + self.tiles - 1

    @staticmethod
    def of(dy_NDHWK: Tensor, C: int, tile: GradientTile, programs: int) -> Division:
        N, D, H, W, K = dy_NDHWK.shape
        chunks = triton.cdiv(C, tile.c)
        tiles = tile.groups * chunks * triton.cdiv(K, tile.k)
        steps = N * D * triton.cdiv(H, tile.h) * triton.cdiv(W, tile.w)
        return Division(tiles=tiles, steps=steps, programs=min(programs, tiles * steps), chunks=chunks)


@dataclass(frozen=True)
class GradientShape:
    """A weight gradient without its values: what decides which method is the faster one.

    `searched`: whether cuDNN chooses its algorithm by measuring, which makes it another rival.
    """

    N: int
    voxels: tuple[int, ...]  # of dy
    channels: tuple[int, ...]  # of each source
    outputs: int
    padding: tuple[int, ...]
    dtype: torch.dtype
    searched: bool

    @property
    def key(self) -> str:
        numbers = (self.N, *self.voxels, "+".join(map(str, self.channels)), self.outputs, *self.padding)
        cudnn = " searched" if self.searched else ""
        return f"{' '.join(map(str, numbers))} {str(self.dtype).removeprefix('torch.')}{cudnn}"

    def tensors(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """A random gradient and random sources, channels-last."""
        around = zip(self.voxels, self.padding[::2], self.padding[1::2], strict=True)
        size = [voxels + 2 - before - after for voxels, before, after in around]
        dy = torch.randn(self.N, *self.voxels, self.outputs, device=device, dtype=self.dtype)
        sources = [torch.randn(self.N, *size, C, device=device, dtype=self.dtype) for C in self.channels]
        return dy.movedim(-1, 1), [source.movedim(-1, 1) for source in sources]

    @property
    def products(self) -> int:
        return self.N * math.prod(self.voxels) * sum(self.channels) * self.outputs


# The faster method by the name of a card and a shape's key: plan/weight_gradients.py measures it.
_faster: dict[str, dict[str, Method]] = {}
# Where shapes are recorded. Not a context variable: on a GPU, PyTorch calls gradients in a thread of its own.
_recorders: list[dict[str, GradientShape]] = []


def use(name: str, faster: dict[str, Any]) -> None:
    """Adds what was measured on a card. Values that are not methods are ignored: a file may be damaged."""
    _faster.setdefault(name, {}).update({key: m for key, m in faster.items() if m in get_args(Method)})


def forget() -> None:
    _faster.clear()


@contextmanager
def recording() -> Iterator[dict[str, GradientShape]]:
    """Records the shapes of the weight gradients inside the block for which a method is chosen, by their keys."""
    shapes: dict[str, GradientShape] = {}
    _recorders.append(shapes)
    try:
        yield shapes
    finally:
        _recorders.pop()


def weight_gradient_reference(
    dy: Tensor, sources: Sequence[Tensor], padding: tuple[int, ...], dtype: torch.dtype | None = None
) -> Tensor:
    """(27, K, C) in plain PyTorch, one matrix product per tap, sums in float32 (float64 for float64)."""
    wide = torch.promote_types(dy.dtype, torch.float32)
    d, h, w = padding[:2], padding[2:4], padding[4:]
    x = F.pad(torch.cat(tuple(sources), dim=1).to(wide), (*w, *h, *d))
    D, H, W = dy.shape[2:]
    rows = dy.to(wide).movedim(1, 0).flatten(1)
    taps = [
        rows @ x[:, :, i : i + D, j : j + H, k : k + W].movedim(1, 0).flatten(1).t()
        for i in range(3)
        for j in range(3)
        for k in range(3)
    ]
    return torch.stack(taps).to(dtype or dy.dtype)


@triton.jit(
    do_not_specialize=[
        *("units", "steps", "D", "H", "W", "XD", "XH", "XW", "eighths_c", "eighths_k", "chunks"),
        *("before_d", "before_h", "before_w"),
    ]
)
def voxtune_weight_gradient(
    x,  # (N, XD, XH, XW, C), tiles of (1, 1, TH, TW, TC); this and the next are descriptors if BULK, else pointers
    dy,  # (N, D, H, W, K), tiles of (1, 1, TH, TW, TK)
    partial_ptr,  # (parts, 3, TK, TC) float32
    units,
    steps,
    D,
    H,
    W,
    XD,
    XH,
    XW,
    eighths_c,  # C / 8: so the compiler knows that rows are aligned to 16 bytes, whatever the number of channels
    eighths_k,
    chunks,
    before_d,
    before_h,
    before_w,
    TH: tl.constexpr,
    TW: tl.constexpr,
    TK: tl.constexpr,
    TC: tl.constexpr,
    BULK: tl.constexpr,
    STAGES: tl.constexpr,
):
    C, K = eighths_c * 8, eighths_k * 8
    program, programs = tl.program_id(0), tl.num_programs(0)
    begin, end = program * units // programs, (program + 1) * units // programs
    across, down = (W + TW - 1) // TW, (H + TH - 1) // TH
    for tile in tl.range(begin // steps, (end - 1) // steps + 1):
        k0, c0, dd, dh = tile // 9 // chunks * TK, tile // 9 % chunks * TC, tile % 9 // 3, tile % 3
        before = tl.zeros((TK, TC), tl.float32)
        same = tl.zeros((TK, TC), tl.float32)
        after = tl.zeros((TK, TC), tl.float32)
        for unit in tl.range(tl.maximum(begin, tile * steps), tl.minimum(end, (tile + 1) * steps), num_stages=STAGES):
            column, d = unit % steps // D, unit % steps % D
            n, h0, w0 = column // (across * down), column // across % down * TH, column % across * TW
            at_d, at_h, at_w = d + dd - before_d, h0 + dh - before_h, w0 - before_w
            rows = load_voxels(dy, n, d, h0, w0, k0, D, H, W, K, TH, TW, TK, BULK).T
            x0 = load_voxels(x, n, at_d, at_h, at_w, c0, XD, XH, XW, C, TH, TW, TC, BULK)
            x1 = load_voxels(x, n, at_d, at_h, at_w + 1, c0, XD, XH, XW, C, TH, TW, TC, BULK)
            x2 = load_voxels(x, n, at_d, at_h, at_w + 2, c0, XD, XH, XW, C, TH, TW, TC, BULK)
            before = tl.dot(rows, x0, before, input_precision="ieee")
            same = tl.dot(rows, x1, same, input_precision="ieee")
            after = tl.dot(rows, x2, after, input_precision="ieee")
        at = tl.arange(0, TK)[:, None] * TC + tl.arange(0, TC)[None, :]
        part = partial_ptr + (program + tile).to(tl.int64) * (3 * TK * TC)
        tl.store(part + at, before)
        tl.store(part + (at + TK * TC), same)
        tl.store(part + (at + 2 * TK * TC), after)


@triton.jit(do_not_specialize=["units", "steps", "programs", "chunks", "C", "K", "WIDTH", "column"])
def voxtune_weight_gradient_join(
    partial_ptr,  # (parts, TAPS, TK, TC) float32
    dw_ptr,  # (27, K, WIDTH)
    units,
    steps,
    programs,
    chunks,
    C,
    K,
    WIDTH,
    column,  # the source's first one
    TAPS: tl.constexpr,
    TK: tl.constexpr,
    TC: tl.constexpr,
    ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    GROUPS: tl.constexpr = 27 // TAPS
    tile, t = tl.program_id(0) // TAPS, tl.program_id(0) % TAPS
    k0, c0, group = tile // GROUPS // chunks * TK, tile // GROUPS % chunks * TC, tile % GROUPS
    # The nine taps of a group have one offset along w; the three of a group are the offsets along w.
    tap = t * 3 + group if TAPS == 9 else group * 3 + t
    # The programs that compute the tile's first and its last step.
    first = ((tile * steps + 1) * programs - 1) // units
    last = ((tile + 1) * steps * programs - 1) // units
    r = tl.program_id(1) * ROWS
    v = tl.arange(0, ROWS * TC)
    total = tl.zeros((ROWS * TC,), tl.float32)
    for program in tl.range(first, last + 1, AT_ONCE):
        p = program + tl.arange(0, AT_ONCE)
        at = ((p + tile).to(tl.int64) * TAPS + t) * (TK * TC) + r * TC
        total += tl.sum(tl.load(partial_ptr + at[:, None] + v[None, :], mask=(p <= last)[:, None], other=0.0), axis=0)
    k, c = k0 + r + v // TC, c0 + v % TC
    to = (tap * K + k) * WIDTH + column + c
    tl.store(dw_ptr + to, total.to(dw_ptr.dtype.element_ty), mask=(k < K) & (c < C))


def why_not(  # noqa: PLR0911
    dy: Tensor, sources: Sequence[Tensor], kernel: tuple[int, ...], padding: tuple[int, ...], *, hopper: bool = False
) -> str | None:
    """The reason why the kernels do not apply, or None. `hopper`: the one for that device."""
    tensors = (dy, *sources)
    if tuple(kernel) != CUBE:
        return f"a kernel of extents {tuple(kernel)}"
    if dy.dtype not in (torch.bfloat16, torch.float16) or any(s.dtype != dy.dtype for s in sources):
        return f"types {', '.join(str(t.dtype) for t in tensors)}"
    if any(t.shape[1] % 8 for t in tensors):
        return "channels that are not a multiple of 8"
    if min(padding) < 0 or any(result_size(s, CUBE, padding) != tuple(dy.shape[2:]) for s in sources):
        return "a negative padding, or a gradient of another size"
    if any(not t.movedim(1, -1).is_contiguous() or t.data_ptr() % 16 or t.numel() == 0 for t in tensors):
        return "a source or the gradient is not channels-last, empty or unaligned"
    # Offsets within a plane and the division of the steps are 32-bit integers.
    if any(t.shape[3] * t.shape[4] * t.shape[1] >= 2**31 for t in tensors):
        return "a plane of 2^31 values or more"
    tile = default_tile(dy, hopper=hopper)
    for source in sources:
        division = Division.of(channels_inside(dy), source.shape[1], tile, programs_of(dy.device, tile))
        if (division.programs + 1) * division.units >= 2**31:
            return "too many steps"
    if hopper and not Device.of(dy.device).halo:
        return "not a Hopper device, or Gluon cannot be loaded"
    return f"a depth of {dy.shape[2]}" if hopper and dy.shape[2] < tile.stages else None


def method_for(dy: Tensor, sources: Sequence[Tensor], padding: tuple[int, ...]) -> Method:
    """For a 3x3x3 kernel: the method that was faster on this card, or by the rule."""
    if METHOD is not None:
        return METHOD
    measured = _faster.get(card(dy.device), {})
    if measured or _recorders:
        shape = shape_of(dy, sources, padding)
        for shapes in _recorders:
            shapes[shape.key] = shape
        if shape.key in measured:
            return measured[shape.key]
    return by_rule(dy.shape[0] * math.prod(dy.shape[2:]), dy.device)


def by_rule(voxels: int, device: torch.device) -> Method:
    return "hopper" if voxels >= MEASURED_VOXELS and Device.of(device).halo else "cudnn"


def shape_of(dy: Tensor, sources: Sequence[Tensor], padding: tuple[int, ...]) -> GradientShape:
    channels = tuple(s.shape[1] for s in sources)
    searched = torch.backends.cudnn.benchmark
    return GradientShape(dy.shape[0], tuple(dy.shape[2:]), channels, dy.shape[1], tuple(padding), dy.dtype, searched)


def own_method(dy: Tensor, sources: Sequence[Tensor], padding: tuple[int, ...]) -> Method | None:
    """The kernel of this project that computes a weight gradient of a 3x3x3 kernel on its device; None if neither does."""
    candidates: tuple[Method, ...] = ("hopper", "triton")
    fitting = (m for m in candidates if why_not(dy, sources, CUBE, padding, hopper=m == "hopper") is None)
    return next(fitting, None)


def default_tile(dy: Tensor, *, hopper: bool) -> GradientTile:
    """Measured by benchmarks/gpu_weight_gradient.py on an H200; the plain kernel's by arithmetic."""
    if hopper and COMPACT_PLANES:
        return GradientTile(hopper=True, h=8, w=16, stages=3, registers=False, ahead=True)
    if hopper:
        return GradientTile(hopper=True, h=8, w=8, stages=4)
    return GradientTile(h=4, w=16, stages=3)


def programs_of(device: torch.device, tile: GradientTile) -> int:
    """As many as run at the same time."""
    processors = Device.of(device).processors
    return processors if tile.hopper else 2 * processors


def weight_gradient(
    dy: Tensor,
    sources: Sequence[Tensor],
    padding: tuple[int, ...],
    dtype: torch.dtype | None = None,
    *,
    hopper: bool = False,
    tile: GradientTile | None = None,
    programs: int | None = None,
    bulk: bool | None = None,
) -> Tensor:
    """(27, K, C of all sources), the weight as conv3d.py packs it, in `dtype` (default: that of dy).

    `why_not` must be None. `bulk`: whether the plain kernel loads by descriptors (default: if the device has a copy engine).
    """
    tile = tile or default_tile(dy, hopper=hopper)
    programs = programs or programs_of(dy.device, tile)
    dy_NDHWK = channels_inside(dy)
    K, width = dy.shape[1], sum(s.shape[1] for s in sources)
    dw = torch.empty((27, K, width), dtype=dtype or dy.dtype, device=dy.device)
    column = 0
    for source in sources:
        C = source.shape[1]
        division = Division.of(dy_NDHWK, C, tile, programs)
        taps = 27 // tile.groups
        partial = torch.empty((division.parts, taps, tile.k, tile.c), dtype=torch.float32, device=dy.device)
        if tile.hopper:
            from voxtune.kernels import conv3d_weight_gradient_hopper as kernel

            kernel.launch(dy_NDHWK, channels_inside(source), partial, tile, division, padding[::2])
        else:
            _launch(dy_NDHWK, channels_inside(source), partial, tile, division, padding[::2], bulk)
        ready(voxtune_weight_gradient_join)[(division.tiles * taps, tile.k // ROWS)](
            *(partial, dw, division.units, division.steps, division.programs, division.chunks, C, K, width, column),
            TAPS=taps,
            TK=tile.k,
            TC=tile.c,
            ROWS=ROWS,
            AT_ONCE=PARTS_AT_ONCE,
            num_warps=4,
        )
        column += C
    return dw


def _launch(
    dy_NDHWK: Tensor,
    x_NDHWC: Tensor,
    partial: Tensor,
    tile: GradientTile,
    division: Division,
    before: tuple[int, ...],
    bulk: bool | None,
) -> None:
    bulk = has_copy_engine(dy_NDHWK.device) if bulk is None else bulk
    box = [1, 1, tile.h, tile.w]
    ready(voxtune_weight_gradient)[(division.programs,)](
        TensorDescriptor.from_tensor(x_NDHWC, [*box, tile.c]) if bulk else x_NDHWC,
        TensorDescriptor.from_tensor(dy_NDHWK, [*box, tile.k]) if bulk else dy_NDHWK,
        *(partial, division.units, division.steps, *dy_NDHWK.shape[1:4], *x_NDHWC.shape[1:4]),
        *(x_NDHWC.shape[4] // 8, dy_NDHWK.shape[4] // 8, division.chunks, *before),
        **constants(tile),
        BULK=bulk,
        num_warps=tile.warps,
    )


def constants(tile: GradientTile) -> dict[str, int]:
    """The plain kernel's compile-time arguments."""
    return {"TH": tile.h, "TW": tile.w, "TK": tile.k, "TC": tile.c, "STAGES": tile.stages}


def arguments(tile: GradientTile, *, dtype: str, bulk: bool = True) -> tuple[dict[str, str], dict[str, object]]:
    """(types of the run-time arguments, constants) of the plain kernel, to compile it without a device."""
    box = f"1,1,{tile.h},{tile.w}"
    signature = {"partial_ptr": "*fp32"}
    for name, channels in (("x", tile.c), ("dy", tile.k)):
        signature[name] = f"tensordesc<{dtype}[{box},{channels}]>" if bulk else f"*{dtype}"
    fixed: dict[str, object] = {**constants(tile), "BULK": bulk}
    sizes = [name for name in voxtune_weight_gradient.arg_names if name not in signature and name not in fixed]
    return signature | dict.fromkeys(sizes, "i32"), fixed


def arguments_of_join(taps: int, *, dtype: str) -> tuple[dict[str, str], dict[str, object]]:
    fixed: dict[str, object] = {"TAPS": taps, "TK": 64, "TC": 64, "ROWS": ROWS, "AT_ONCE": PARTS_AT_ONCE}
    signature = {"partial_ptr": "*fp32", "dw_ptr": f"*{dtype}"}
    sizes = [name for name in voxtune_weight_gradient_join.arg_names if name not in signature and name not in fixed]
    return signature | dict.fromkeys(sizes, "i32"), fixed
