"""The weight gradient of conv3d_weight_gradient.py for Hopper: bulk copies, barriers and asynchronous matrix products.

Why: the product of one tap is 64 x 64, with voxels as its inner dimension. From shared memory, both operands of such a product
take 128 bytes a clock, all that the memory delivers, and a load of the tile of x for each tap adds to it. Here

1. a program computes nine taps, those with one offset along w: a plane's tile of x, (TH + 2) x TW voxels, is loaded once. The
   taps along h read it at three offsets of whole rows: TW voxels, a multiple of 8, are whole units of the swizzle. The taps
   along d read the tiles of three planes: the program walks along d, and each step adds one plane of x and one of dy. For an
   offset along w the swizzle has no such view: it is in the coordinates of the copies, and three programs share the taps.
2. dy is read into registers once a step (REGISTERS) for three products. Of the 128 bytes a clock, the products then take 64,
   the loads into registers 21 and the copies 16 (tiles of 8 x 8 voxels).
3. three groups of four warps compute one offset along h each: three accumulators of 64 x 64, 96 registers a thread. A fourth
   group, one warp, starts the copies. A group waits for its products at the end of each step, while those of the other two run.
   So that the groups do not all wait at once, they can take turns in starting their products (TURNS), or, with dy in shared
   memory, start those of the next step before (AHEAD).

With 8 warps (a form without groups) all warps compute nine taps, half of the input channels each four warps, and start
the copies of a later step at the end of each step.

Barriers. Step s of a program uses slot s % STAGES of dy, and planes f(s), f(s) + 1 and f(s) + 2 of x, counted in the order of
their copies, in a ring too: f grows by 1 from step to step, and by 3 where a column begins.
- `full[slot]`: one arrival a use, when the copies start, which adds the bytes of dy and of the 1 or 3 planes that are new.
- `empty[slot]`: three arrivals a use, one of each group, after the step's products are complete in all of its warps.
- Copies of step s start after step s - STAGES is released. Steps in use then begin at s - STAGES + 1, and f(s) - f(s - STAGES +
  1) <= STAGES - 1 + 2, because at most one of these steps begins a column if D >= STAGES. The planes from there to f(s) + 2 are
  STAGES + 4: MORE_PLANES. tests/kernels/test_weight_gradient.py replays it.
- `turns[g]`: one arrival a step, when group g - 1 has started its products; the first group waits for the third one's step
  before.
- Every wait is for an older step, or a group before in the same step, so that no wait is circular. It is by parity, and no
  barrier advances twice meanwhile: the next use of `full[slot]` requires a release by every group, that of `empty[slot]` copies
  that start after the wait, that of `turns[g]` products that group g starts after it.

Written in Gluon: see conv3d_halo.py. Legend: as in conv3d_weight_gradient.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from voxtune.kernels.conv3d_halo import NEWER, barrier, layout, to_shared, view
from voxtune.kernels.precompile import ready

if TYPE_CHECKING:
    from voxtune.kernels.conv3d_weight_gradient import Division, GradientTile

BYTES: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
# Planes of x in shared memory beyond the steps: see above.
MORE_PLANES = 4

if NEWER:

    @gluon.jit
    def rows(ring, slot, SLOT: gl.constexpr, first: gl.constexpr, count: gl.constexpr):
        """The part of a slot of the ring that a view may cover."""
        TW: gl.constexpr = ring.shape[1]
        TC: gl.constexpr = ring.shape[2]
        slots = ring.reinterpret(ring.dtype, [ring.shape[0] // SLOT, SLOT * TW * TC], BYTES)
        return slots.index(slot).reinterpret(ring.dtype, [SLOT, TW, TC], ring.layout).slice(first, count)

else:

    @gluon.jit
    def rows(ring, slot, SLOT: gl.constexpr, first: gl.constexpr, count: gl.constexpr):
        """The part of a slot of the ring where a view begins."""
        return ring.index(slot * SLOT + first)


def rows_of_slot(rows_of_tile: int) -> int:
    """Rows of a plane's tile of x, with the two of the halo; newer versions of Triton take views only of powers of two."""
    return triton.next_power_of_2(rows_of_tile + 2) if NEWER else rows_of_tile + 2


@gluon.jit
def _copy_step(
    x_desc,
    edge_desc,
    dy_desc,
    shared,
    walk,
    volume,
    unit,
    plane,
    keep,
    STAGES: gl.constexpr,
    SLOT: gl.constexpr,
):
    """Starts the copies of a step, if `keep`; `plane` counts the planes of x before it. Returns that count after it."""
    x_ring, dy_ring, full, _, _ = shared
    _, begin, _, steps, D = walk
    H, W, chunks, before_d, before_h, before_w = volume
    TH: gl.constexpr = dy_desc.block_shape[2]
    TW: gl.constexpr = dy_desc.block_shape[3]
    TK: gl.constexpr = dy_desc.block_shape[4]
    TC: gl.constexpr = x_desc.block_shape[4]
    PLANES: gl.constexpr = x_ring.shape[0] // SLOT
    PLANE: gl.constexpr = (TH + 2) * TW * TC * 2
    across, down = (W + TW - 1) // TW, (H + TH - 1) // TH
    tile, column, d = unit // steps, unit % steps // D, unit % steps % D
    n, h0, w0 = column // (across * down), column // across % down * TH, column % across * TW
    k0, c0, dw = tile // 3 // chunks * TK, tile // 3 % chunks * TC, tile % 3
    new, old = keep & ((d == 0) | (unit == begin)), keep & (d != 0) & (unit != begin)
    slot = (unit - begin) % STAGES
    done = full.index(slot)
    mbarrier.expect(done, TH * TW * TK * 2 + PLANE * 3, pred=new)
    mbarrier.expect(done, TH * TW * TK * 2 + PLANE, pred=old)
    dy_slot = view(dy_ring.index(slot), dy_ring.dtype, [1, 1, TH, TW, TK], dy_desc.layout)
    to_shared(dy_desc, [n, d, h0, w0, k0], done, dy_slot, pred=keep)
    for dd in gl.static_range(3):
        needed = new if dd < 2 else keep
        p = plane % PLANES
        body = view(rows(x_ring, p, SLOT, 0, TH), x_ring.dtype, [1, 1, TH, TW, TC], x_desc.layout)
        edge = view(rows(x_ring, p, SLOT, TH, 2), x_ring.dtype, [1, 1, 2, TW, TC], edge_desc.layout)
        at_d, at_h, at_w = d + dd - before_d, h0 - before_h, w0 + dw - before_w
        to_shared(x_desc, [n, at_d, at_h, at_w, c0], done, body, pred=needed)
        to_shared(edge_desc, [n, at_d, at_h + TH, at_w, c0], done, edge, pred=needed)
        plane += gl.where(needed, 1, 0)
    return plane


@gluon.jit
def _products(
    dy,
    x_ring,
    plane,
    below,
    same,
    above,
    FIRST: gl.constexpr,
    TH: gl.constexpr,
    SLOT: gl.constexpr,
):
    """Products of TH rows of dy, (K, voxels), with those from FIRST of three planes of x: the three taps along d."""
    TW: gl.constexpr = x_ring.shape[1]
    TC: gl.constexpr = x_ring.shape[2]
    PLANES: gl.constexpr = x_ring.shape[0] // SLOT
    x0 = view(rows(x_ring, plane % PLANES, SLOT, FIRST, TH), x_ring.dtype, [TH * TW, TC], x_ring.layout)
    x1 = view(rows(x_ring, (plane + 1) % PLANES, SLOT, FIRST, TH), x_ring.dtype, [TH * TW, TC], x_ring.layout)
    x2 = view(rows(x_ring, (plane + 2) % PLANES, SLOT, FIRST, TH), x_ring.dtype, [TH * TW, TC], x_ring.layout)
    below = warpgroup_mma(dy, x0, below, is_async=True)
    same = warpgroup_mma(dy, x1, same, is_async=True)
    above = warpgroup_mma(dy, x2, above, is_async=True)
    return below, same, above


@gluon.jit
def _store(partial_ptr, number, below, same, above, mma: gl.constexpr, DH: gl.constexpr):
    """The sums of one offset along h into their part."""
    TK: gl.constexpr = below.shape[0]
    TC: gl.constexpr = below.shape[1]
    k = gl.expand_dims(gl.arange(0, TK, layout=gl.SliceLayout(1, mma)), 1)
    c = gl.expand_dims(gl.arange(0, TC, layout=gl.SliceLayout(0, mma)), 0)
    part = partial_ptr + (number * 9 + DH).to(gl.int64) * (TK * TC)
    gl.store(part + (k * TC + c), below)
    gl.store(part + (k * TC + c + 3 * TK * TC), same)
    gl.store(part + (k * TC + c + 6 * TK * TC), above)


@gluon.jit
def _copy(x_desc, edge_desc, dy_desc, shared, walk, volume, STAGES: gl.constexpr, SLOT: gl.constexpr):
    """One warp: starts the copies of every step."""
    _, _, _, empty, _ = shared
    _, begin, end, _, _ = walk
    plane = 0
    for unit in range(begin, end):
        step = unit - begin
        # The parity of the use before: the first use of a slot waits for nothing.
        mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)
        plane = _copy_step(x_desc, edge_desc, dy_desc, shared, walk, volume, unit, plane, unit < end, STAGES, SLOT)


@gluon.jit
def _release(empty, slot, pred):
    # One thread arrives for the group: the products of its other warps must be complete too.
    barrier()
    mbarrier.arrive(empty.index(slot), count=1, pred=pred)


@gluon.jit
def _multiply(
    partial_ptr,
    shared,
    walk,
    TH: gl.constexpr,
    STAGES: gl.constexpr,
    SLOT: gl.constexpr,
    REGISTERS: gl.constexpr,
    AHEAD: gl.constexpr,
    TURNS: gl.constexpr,
    DH: gl.constexpr,
):
    """Four warps: the three taps along d at one offset along h."""
    x_ring, dy_ring, full, empty, turns = shared
    program, begin, end, steps, D = walk
    TC: gl.constexpr = x_ring.shape[2]
    TK: gl.constexpr = dy_ring.shape[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TC, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    plane = 0
    for tile in range(begin // steps, (end - 1) // steps + 1):
        below = gl.zeros((TK, TC), gl.float32, layout=mma)
        same = gl.zeros((TK, TC), gl.float32, layout=mma)
        above = gl.zeros((TK, TC), gl.float32, layout=mma)
        start, stop = gl.maximum(begin, tile * steps), gl.minimum(end, (tile + 1) * steps)
        if AHEAD:
            for unit in range(start, stop):
                step = unit - begin
                slot = step % STAGES
                mbarrier.wait(full.index(slot), step // STAGES & 1)
                dy = dy_ring.index(slot).permute((1, 0))
                below, same, above = _products(dy, x_ring, plane, below, same, above, DH, TH, SLOT)
                below, same, above = warpgroup_mma_wait(num_outstanding=3, deps=(below, same, above))
                _release(empty, (step + STAGES - 1) % STAGES, unit > start)
                plane += gl.where((unit + 1) % D == 0, 3, 1)
            below, same, above = warpgroup_mma_wait(num_outstanding=0, deps=(below, same, above))
            _release(empty, (stop - 1 - begin) % STAGES, stop > start)
        else:
            for unit in range(start, stop):
                step = unit - begin
                slot = step % STAGES
                mbarrier.wait(full.index(slot), step // STAGES & 1)
                dy = dy_ring.index(slot).permute((1, 0))
                if REGISTERS:
                    held = dy.load(operand)
                    if TURNS:
                        mbarrier.wait(turns.index(DH), step & 1 if DH > 0 else (step & 1) ^ 1)
                    below, same, above = _products(held, x_ring, plane, below, same, above, DH, TH, SLOT)
                    if TURNS:
                        mbarrier.arrive(turns.index((DH + 1) % 3), count=1)
                    below, same, above, held = warpgroup_mma_wait(num_outstanding=0, deps=(below, same, above, held))
                else:
                    below, same, above = _products(dy, x_ring, plane, below, same, above, DH, TH, SLOT)
                    below, same, above = warpgroup_mma_wait(num_outstanding=0, deps=(below, same, above))
                _release(empty, slot, stop > start)
                plane += gl.where((unit + 1) % D == 0, 3, 1)
        _store(partial_ptr, program + tile, below, same, above, mma, DH)


@gluon.jit
def _all_in_one(
    x_desc,
    edge_desc,
    dy_desc,
    partial_ptr,
    shared,
    walk,
    volume,
    STAGES: gl.constexpr,
    SLOT: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """Eight warps, half of the input channels each four: nine taps, and the copies."""
    x_ring, dy_ring, full, _, _ = shared
    program, begin, end, steps, D = walk
    TH: gl.constexpr = dy_desc.block_shape[2]
    TC: gl.constexpr = x_ring.shape[2]
    TK: gl.constexpr = dy_ring.shape[2]
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, TC // 2, 16])
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=2)
    # With dy in shared memory, the products of a step run on during the next one; its registers would have to be held too.
    LAG: gl.constexpr = 0 if REGISTERS else 1
    copied, plane = 0, 0
    for i in gl.static_range(STAGES - LAG):
        unit = begin + i
        copied = _copy_step(x_desc, edge_desc, dy_desc, shared, walk, volume, unit, copied, unit < end, STAGES, SLOT)
    for tile in range(begin // steps, (end - 1) // steps + 1):
        a0 = gl.zeros((TK, TC), gl.float32, layout=mma)
        a1 = gl.zeros((TK, TC), gl.float32, layout=mma)
        a2 = gl.zeros((TK, TC), gl.float32, layout=mma)
        b0 = gl.zeros((TK, TC), gl.float32, layout=mma)
        b1 = gl.zeros((TK, TC), gl.float32, layout=mma)
        b2 = gl.zeros((TK, TC), gl.float32, layout=mma)
        c0 = gl.zeros((TK, TC), gl.float32, layout=mma)
        c1 = gl.zeros((TK, TC), gl.float32, layout=mma)
        c2 = gl.zeros((TK, TC), gl.float32, layout=mma)
        for unit in range(gl.maximum(begin, tile * steps), gl.minimum(end, (tile + 1) * steps)):
            step = unit - begin
            slot = step % STAGES
            mbarrier.wait(full.index(slot), step // STAGES & 1)
            dy = dy_ring.index(slot).permute((1, 0))
            if REGISTERS:
                held = dy.load(operand)
                a0, a1, a2 = _products(held, x_ring, plane, a0, a1, a2, 0, TH, SLOT)
                b0, b1, b2 = _products(held, x_ring, plane, b0, b1, b2, 1, TH, SLOT)
                c0, c1, c2 = _products(held, x_ring, plane, c0, c1, c2, 2, TH, SLOT)
                a0, a1, a2, b0, b1, b2, c0, c1, c2, held = warpgroup_mma_wait(
                    num_outstanding=0, deps=(a0, a1, a2, b0, b1, b2, c0, c1, c2, held)
                )
            else:
                a0, a1, a2 = _products(dy, x_ring, plane, a0, a1, a2, 0, TH, SLOT)
                b0, b1, b2 = _products(dy, x_ring, plane, b0, b1, b2, 1, TH, SLOT)
                c0, c1, c2 = _products(dy, x_ring, plane, c0, c1, c2, 2, TH, SLOT)
                a0, a1, a2, b0, b1, b2, c0, c1, c2 = warpgroup_mma_wait(
                    num_outstanding=9, deps=(a0, a1, a2, b0, b1, b2, c0, c1, c2)
                )
            barrier()
            # All warps' products of step - LAG are complete: its slot takes the step STAGES later.
            later = unit + STAGES - LAG
            copied = _copy_step(
                x_desc, edge_desc, dy_desc, shared, walk, volume, later, copied, later < end, STAGES, SLOT
            )
            plane += gl.where((unit + 1) % D == 0, 3, 1)
        a0, a1, a2, b0, b1, b2, c0, c1, c2 = warpgroup_mma_wait(
            num_outstanding=0, deps=(a0, a1, a2, b0, b1, b2, c0, c1, c2)
        )
        _store(partial_ptr, program + tile, a0, a1, a2, mma, 0)
        _store(partial_ptr, program + tile, b0, b1, b2, mma, 1)
        _store(partial_ptr, program + tile, c0, c1, c2, mma, 2)


@gluon.jit(do_not_specialize=["units", "steps", "D", "H", "W", "chunks", "before_d", "before_h", "before_w"])
def voxtune_weight_gradient_hopper(
    x_desc,  # (N, XD, XH, XW, C), tiles of (1, 1, TH, TW, TC)
    edge_desc,  # the same, tiles of (1, 1, 2, TW, TC)
    dy_desc,  # (N, D, H, W, K), tiles of (1, 1, TH, TW, TK)
    partial_ptr,  # (parts, 9, TK, TC) float32
    units,
    steps,
    D,
    H,
    W,
    chunks,
    before_d,
    before_h,
    before_w,
    STAGES: gl.constexpr,
    PLANES: gl.constexpr,
    SLOT: gl.constexpr,
    REGISTERS: gl.constexpr,
    AHEAD: gl.constexpr,
    TURNS: gl.constexpr,
    num_warps: gl.constexpr,  # 4: groups of warps with parts of their own; 8: all warps do the same
):
    dtype: gl.constexpr = x_desc.dtype
    TH: gl.constexpr = dy_desc.block_shape[2]
    TW: gl.constexpr = dy_desc.block_shape[3]
    TK: gl.constexpr = dy_desc.block_shape[4]
    TC: gl.constexpr = x_desc.block_shape[4]
    of_x: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=TC * 2, element_bitwidth=16, rank=2)
    of_dy: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=TK * 2, element_bitwidth=16, rank=2)
    program, programs = gl.program_id(0), gl.num_programs(0)
    begin, end = program * units // programs, (program + 1) * units // programs
    x_ring = gl.allocate_shared_memory(dtype, [PLANES * SLOT, TW, TC], of_x)
    dy_ring = gl.allocate_shared_memory(dtype, [STAGES, TH * TW, TK], of_dy)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(turns.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=3)
    shared = (x_ring, dy_ring, full, empty, turns)
    walk = (program, begin, end, steps, D)
    volume = (H, W, chunks, before_d, before_h, before_w)
    if num_warps == 8:
        _all_in_one(x_desc, edge_desc, dy_desc, partial_ptr, shared, walk, volume, STAGES, SLOT, REGISTERS)
    else:
        gl.warp_specialize(
            [
                (_multiply, (partial_ptr, shared, walk, TH, STAGES, SLOT, REGISTERS, AHEAD, TURNS, 0)),
                (_multiply, (partial_ptr, shared, walk, TH, STAGES, SLOT, REGISTERS, AHEAD, TURNS, 1)),
                (_multiply, (partial_ptr, shared, walk, TH, STAGES, SLOT, REGISTERS, AHEAD, TURNS, 2)),
                (_copy, (x_desc, edge_desc, dy_desc, shared, walk, volume, STAGES, SLOT)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


def constants(tile: GradientTile) -> dict[str, int | bool]:
    return {
        "STAGES": tile.stages,
        "PLANES": tile.stages + MORE_PLANES,
        "SLOT": rows_of_slot(tile.h),
        "REGISTERS": tile.registers,
        "AHEAD": tile.ahead,
        "TURNS": tile.turns,
    }


def shared_memory(tile: GradientTile) -> int:
    """Bytes of the rings; the kernel uses a few more for barriers."""
    plane, step = rows_of_slot(tile.h) * tile.w * tile.c * 2, tile.h * tile.w * tile.k * 2
    return (tile.stages + MORE_PLANES) * plane + tile.stages * step


def launch(
    dy_NDHWK: Tensor, x_NDHWC: Tensor, partial: Tensor, tile: GradientTile, division: Division, before: tuple[int, ...]
) -> None:
    """Fills the parts that the steps of `division` touch."""
    D, H, W = dy_NDHWK.shape[1:4]
    assert tile.stages <= D, "a column of fewer steps than are in flight"
    box, of_x = [1, 1, tile.h, tile.w], layout(5, tile.c)
    ready(voxtune_weight_gradient_hopper)[(division.programs,)](
        TensorDescriptor.from_tensor(x_NDHWC, [*box, tile.c], of_x),
        TensorDescriptor.from_tensor(x_NDHWC, [1, 1, 2, tile.w, tile.c], of_x),
        TensorDescriptor.from_tensor(dy_NDHWK, [*box, tile.k], layout(5, tile.k)),
        *(partial, division.units, division.steps, D, H, W, division.chunks, *before),
        **constants(tile),
        num_warps=tile.warps,
    )


def arguments(tile: GradientTile, *, dtype: str) -> tuple[dict[str, str], dict[str, object]]:
    """(types of the run-time arguments, constants), to compile it without a device."""
    box, of_x = f"1,1,{tile.h},{tile.w}", layout(5, tile.c)
    signature = {
        "x_desc": f"tensordesc<{dtype}[{box},{tile.c}],{of_x!r}>",
        "edge_desc": f"tensordesc<{dtype}[1,1,2,{tile.w},{tile.c}],{of_x!r}>",
        "dy_desc": f"tensordesc<{dtype}[{box},{tile.k}],{layout(5, tile.k)!r}>",
        "partial_ptr": "*fp32",
    }
    fixed: dict[str, object] = {**constants(tile), "num_warps": tile.warps}
    sizes = [name for name in voxtune_weight_gradient_hopper.arg_names if name not in signature and name not in fixed]
    return signature | dict.fromkeys(sizes, "i32"), fixed
