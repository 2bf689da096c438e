"""The convolution of conv3d.py for Hopper, with the halo in shared memory.

Why: conv3d.py loads each tile of an input plane once for every tap of that plane, nine times; at 64 output channels the writes
into shared memory then take as long as the products. Here a tile includes the row above and the row below it, and the three
taps along h read it at three offsets: three loads per plane instead of nine. An offset along h moves the matrix operand by
complete rows of TW voxels, which the swizzled layout allows; an offset along w does not, so each w is loaded separately.

Output channels are the rows of the product, voxels its columns. One step is one input plane (z = 0 to 3) for one offset along w
and 64 input channels: 3 products with the lower output plane (z < 3), 3 with the upper (z > 0), all in flight together, while the
copy engine fills the rings for the steps ahead.

Written in Gluon, Triton's lower-level language, whose names differ between releases; conv3d.py computes the same without it.

Legend: as in conv3d.py. Weights of one step: the three taps along h for one offset along d.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from voxtune.kernels.conv3d_tiles import Conv3dTile
from voxtune.kernels.precompile import ready

NEWER = hasattr(gl.shared_memory_descriptor, "reinterpret")
view = gl.shared_memory_descriptor.reinterpret if NEWER else gl.shared_memory_descriptor._reinterpret
barrier = gl.barrier if NEWER else gl.thread_barrier
to_shared = tma.async_load if NEWER else tma.async_copy_global_to_shared
to_global = tma.async_store if NEWER else tma.async_copy_shared_to_global

if NEWER:

    @gluon.jit
    def rows(ring, first: gl.constexpr, count: gl.constexpr):
        """The part of a ring that a view may cover."""
        return ring.slice(first, count)

else:

    @gluon.jit
    def rows(ring, first: gl.constexpr, count: gl.constexpr):
        """The part of a ring where a view begins: here a slice must not come from a ring of 3 x 2^n rows."""
        return ring.index(first)


@gluon.jit
def _fetch_plane(x_desc, edge_desc, ring, arrived, j, steps, n, d0, h0, w0, CHUNKS: gl.constexpr, slot: gl.constexpr):
    """Step j's tile of x: TH rows, then the two that the tile's lower rows need."""
    TH: gl.constexpr = x_desc.block_shape[2]
    TW: gl.constexpr = x_desc.block_shape[3]
    TC: gl.constexpr = x_desc.block_shape[4]
    q = j // 4
    d, h, w, c0 = d0 + j % 4 - 1, h0 - 1, w0 + q // CHUNKS - 1, q % CHUNKS * TC
    done = arrived.index(slot)
    mbarrier.expect(done, (TH + 2) * TW * TC * 2, pred=j < steps)
    body = view(rows(ring, slot * (TH + 2), TH), ring.dtype, [1, 1, TH, TW, TC], x_desc.layout)
    edge = view(rows(ring, slot * (TH + 2) + TH, 2), ring.dtype, [1, 1, 2, TW, TC], edge_desc.layout)
    to_shared(x_desc, [n, d, h, w, c0], done, body, pred=j < steps)
    to_shared(edge_desc, [n, d, h + TH, w, c0], done, edge, pred=j < steps)


@gluon.jit
def _fetch_weights(w_desc, ring, arrived, m, fetches, K, k0, CHUNKS: gl.constexpr, STAGES: gl.constexpr):
    TK: gl.constexpr = w_desc.block_shape[0]
    TC: gl.constexpr = w_desc.block_shape[1]
    slot, q = m % STAGES, m // 3
    done = arrived.index(slot)
    first = (m % 3 * 9 + q // CHUNKS) * K + k0
    mbarrier.expect(done, 3 * TK * TC * 2, pred=m < fetches)
    for kh in gl.static_range(3):
        at = [first + kh * 3 * K, q % CHUNKS * TC]
        to_shared(w_desc, at, done, ring.index(slot * 3 + kh), pred=m < fetches)


@gluon.jit(do_not_specialize=["D", "H", "W", "K", "shift_stride"])
def voxtune_conv3d_halo(  # noqa: PLR0912, PLR0915
    x_desc,  # (N, D, H, W, C), tiles of (1, 1, TH, TW, TC)
    edge_desc,  # the same, tiles of (1, 1, 2, TW, TC)
    w_desc,  # (27 * K, C), tiles of (TK, TC)
    y_desc,  # (N, D, H, W, K), tiles of (1, 1, TH, TW, TK)
    r_desc,  # as y_desc, or None
    shift_ptr,  # (N, K) or (1, K), of any float type, or None
    statistics_ptr,  # (N, P, 3, K) float32 or None
    D,
    H,
    W,
    K,
    shift_stride,
    CHUNKS: gl.constexpr,  # of TC input channels; a constant, since a loop that might not run would serialise the products
    X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = x_desc.dtype
    TH: gl.constexpr = x_desc.block_shape[2]
    TW: gl.constexpr = x_desc.block_shape[3]
    TC: gl.constexpr = x_desc.block_shape[4]
    TK: gl.constexpr = w_desc.block_shape[0]
    VOXELS: gl.constexpr = TH * TW
    # Four warps a 64 rows; with 64 output channels, further warps take further voxels.
    SIDE: gl.constexpr = num_warps * 16 // TK if num_warps * 16 > TK else 1
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps // SIDE, SIDE], instr_shape=[16, VOXELS // SIDE, 16]
    )
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    columns = (K + TK - 1) // TK
    tile, k0 = gl.program_id(0) // columns, gl.program_id(0) % columns * TK
    across, down = (W + TW - 1) // TW, (H + TH - 1) // TH
    P = across * down * ((D + 1) // 2)
    n, p = tile // P, tile % P
    w0, h0, d0 = p % across * TW, p // across % down * TH, p // (across * down) * 2

    x_ring = gl.allocate_shared_memory(dtype, [X_STAGES * (TH + 2), TW, TC], flat)
    w_ring = gl.allocate_shared_memory(dtype, [W_STAGES * 3, TK, TC], w_desc.layout)
    x_arrived = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_arrived = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_arrived.index(i), count=1)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_arrived.index(i), count=1)
    steps, fetches = 12 * CHUNKS, 9 * CHUNKS
    for i in gl.static_range(W_STAGES):
        if i < X_STAGES - 1:
            _fetch_plane(x_desc, edge_desc, x_ring, x_arrived, i, steps, n, d0, h0, w0, CHUNKS, i)
        _fetch_weights(w_desc, w_ring, w_arrived, i, fetches, K, k0, CHUNKS, W_STAGES)

    lower = gl.zeros((TK, VOXELS), gl.float32, layout=mma)
    upper = gl.zeros((TK, VOXELS), gl.float32, layout=mma)
    for q in range(3 * CHUNKS):
        for z in gl.static_range(4):
            j, m = 4 * q + z, 3 * q + z
            mbarrier.wait(x_arrived.index(j % X_STAGES), j // X_STAGES & 1)
            if z < 3:
                mbarrier.wait(w_arrived.index(m % W_STAGES), m // W_STAGES & 1)
            for kh in gl.static_range(3):
                x = view(rows(x_ring, z % X_STAGES * (TH + 2) + kh, TH), dtype, [VOXELS, TC], flat).permute((1, 0))
                if z < 3:
                    lower = warpgroup_mma(w_ring.index(m % W_STAGES * 3 + kh), x, lower, is_async=True)
                if z > 0:
                    upper = warpgroup_mma(w_ring.index((m - 1) % W_STAGES * 3 + kh), x, upper, is_async=True)
            # All but this step's products are done: what only the step before read can be filled anew.
            lower, upper = warpgroup_mma_wait(num_outstanding=3 if z % 3 == 0 else 6, deps=(lower, upper))
            barrier()
            _fetch_plane(
                x_desc,
                edge_desc,
                x_ring,
                x_arrived,
                j + X_STAGES - 1,
                steps,
                n,
                d0,
                h0,
                w0,
                CHUNKS,
                (z + X_STAGES - 1) % X_STAGES,
            )
            # Weights serve two steps, lower then upper: those of m - 2 are free (at z = 0 m - 1, the last of the round before).
            if z > 1:
                _fetch_weights(w_desc, w_ring, w_arrived, m - 2 + W_STAGES, fetches, K, k0, CHUNKS, W_STAGES)
            elif z == 0:
                again = gl.where(q > 0, m - 1 + W_STAGES, fetches)
                _fetch_weights(w_desc, w_ring, w_arrived, again, fetches, K, k0, CHUNKS, W_STAGES)
    lower, upper = warpgroup_mma_wait(num_outstanding=0, deps=(lower, upper))
    barrier()

    # The weights' ring holds both planes of the result on their way out.
    out_lower = view(rows(w_ring, 0, VOXELS // 64), dtype, [1, 1, TH, TW, TK], y_desc.layout)
    out_upper = view(rows(w_ring, VOXELS // 64, VOXELS // 64), dtype, [1, 1, TH, TW, TK], y_desc.layout)
    flat_lower = view(rows(w_ring, 0, VOXELS // 64), dtype, [VOXELS, TK], flat).permute((1, 0))
    flat_upper = view(rows(w_ring, VOXELS // 64, VOXELS // 64), dtype, [VOXELS, TK], flat).permute((1, 0))
    k = k0 + gl.arange(0, TK, layout=gl.SliceLayout(1, mma))
    if r_desc is not None:
        done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(done, count=1)
        mbarrier.expect(done, 2 * VOXELS * TK * 2)
        to_shared(r_desc, [n, d0, h0, w0, k0], done, out_lower)
        to_shared(r_desc, [n, d0 + 1, h0, w0, k0], done, out_upper)
    if shift_ptr is not None:
        shift = gl.load(shift_ptr + n * shift_stride + k, mask=k < K, other=0.0).to(gl.float32)
        lower += shift[:, None]
        upper += shift[:, None]
    if r_desc is not None:
        mbarrier.wait(done, 0)
        lower += flat_lower.load(mma).to(gl.float32)
        upper += flat_upper.load(mma).to(gl.float32)
        barrier()
    y_lower, y_upper = lower.to(dtype), upper.to(dtype)
    flat_lower.store(y_lower)
    flat_upper.store(y_upper)
    fence_async_shared()
    barrier()
    to_global(y_desc, [n, d0, h0, w0, k0], out_lower)
    to_global(y_desc, [n, d0 + 1, h0, w0, k0], out_upper)
    if statistics_ptr is not None:
        v = gl.arange(0, VOXELS, layout=gl.SliceLayout(0, mma))
        inside = ((h0 + v // TW < H) & (w0 + v % TW < W))[None, :]
        both = inside & (d0 + 1 < D)
        lower = gl.where(inside, y_lower.to(gl.float32), 0.0)
        upper = gl.where(both, y_upper.to(gl.float32), 0.0)
        count = (gl.minimum(TH, H - h0) * gl.minimum(TW, W - w0) * gl.minimum(2, D - d0)).to(gl.float32)
        mean = (gl.sum(lower, axis=1) + gl.sum(upper, axis=1)) / count
        lower = gl.where(inside, lower - mean[:, None], 0.0)
        upper = gl.where(both, upper - mean[:, None], 0.0)
        at = statistics_ptr + tile.to(gl.int64) * 3 * K + k
        gl.store(at, mean * 0.0 + count, mask=k < K)
        gl.store(at + K, mean, mask=k < K)
        gl.store(at + 2 * K, gl.sum(lower * lower, axis=1) + gl.sum(upper * upper, axis=1), mask=k < K)
    tma.store_wait(0)


def layout(rank: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def constants(tile: Conv3dTile, C: int) -> dict[str, int]:
    return {"CHUNKS": -(-C // tile.c), "X_STAGES": tile.inner_stages, "W_STAGES": tile.outer_stages}


def launch(
    x_NDHWC: Tensor,
    packed: Tensor,
    y_NDHWK: Tensor,
    r_NDHWK: Tensor | None,
    shift_NC: Tensor | None,
    statistics: Tensor | None,
    tile: Conv3dTile,
    shift_stride: int,
) -> None:
    """Fills y and the statistics."""
    N, D, H, W, C = x_NDHWC.shape
    K = y_NDHWK.shape[4]
    box, L = [1, 1, tile.h, tile.w], layout(5)
    programs = N * -(-W // tile.w) * -(-H // tile.h) * -(-D // 2) * -(-K // tile.k)
    ready(voxtune_conv3d_halo)[(programs,)](
        TensorDescriptor.from_tensor(x_NDHWC, [*box, tile.c], L),
        TensorDescriptor.from_tensor(x_NDHWC, [1, 1, 2, tile.w, tile.c], L),
        TensorDescriptor.from_tensor(packed.view(27 * K, C), [tile.k, tile.c], layout(2)),
        TensorDescriptor.from_tensor(y_NDHWK, [*box, tile.k], L),
        None if r_NDHWK is None else TensorDescriptor.from_tensor(r_NDHWK, [*box, tile.k], L),
        shift_NC,
        statistics,
        D,
        H,
        W,
        K,
        shift_stride,
        **constants(tile, C),
        num_warps=tile.warps,
    )


def arguments(
    tile: Conv3dTile, C: int, *, dtype: str, epilogue: bool = True
) -> tuple[dict[str, str], dict[str, object]]:
    """(types of the run-time arguments, constants), to compile it without a device."""
    box = f"1,1,{tile.h},{tile.w}"
    signature = {
        "x_desc": f"tensordesc<{dtype}[{box},{tile.c}],{layout(5)!r}>",
        "edge_desc": f"tensordesc<{dtype}[1,1,2,{tile.w},{tile.c}],{layout(5)!r}>",
        "w_desc": f"tensordesc<{dtype}[{tile.k},{tile.c}],{layout(2)!r}>",
        "y_desc": f"tensordesc<{dtype}[{box},{tile.k}],{layout(5)!r}>",
    }
    if epilogue:
        signature |= {"r_desc": signature["y_desc"], "shift_ptr": "*fp32", "statistics_ptr": "*fp32"}
    signature |= dict.fromkeys(("D", "H", "W", "K", "shift_stride"), "i32")
    absent = {} if epilogue else dict.fromkeys(("r_desc", "shift_ptr", "statistics_ptr"))
    return signature, {**constants(tile, C), "num_warps": tile.warps, **absent}
