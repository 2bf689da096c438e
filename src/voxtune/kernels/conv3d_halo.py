"""The convolution of conv3d.py for Hopper, with the halo in shared memory.

Why: conv3d.py loads each tile of an input plane once for every tap of that plane, nine times; at 64 output channels the writes
into shared memory then take as long as the products. Here a tile includes the row above and the row below it, and the three
taps along h read it at three offsets: three loads per plane instead of nine. An offset along h moves the matrix operand by
complete rows of TW voxels, which the swizzled layout allows; an offset along w does not, so each w is loaded separately.

Output channels are the rows of the product, voxels its columns; with 32 output channels or fewer the reverse, since rows come in
units of 64. One step is one input plane (z = 0 to 3), one offset along w and up to 64 input channels: 3 products with the lower
output plane (z < 3), 3 with the upper (z > 0), all in flight together, while the copy engine fills the rings for the steps ahead.
Of two sources, conv(cat([a, b])), each step reads one: the copies of the other are predicated off.

Written in Gluon, Triton's lower-level language, whose names differ between releases; conv3d.py computes the same without it.

Legend: as in conv3d.py. Weights of one step: the three taps along h for one offset along d.
"""

from __future__ import annotations

from collections.abc import Sequence

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
def _fetch_plane(
    a_desc,
    a_edge_desc,
    b_desc,
    b_edge_desc,
    ring,
    arrived,
    j,
    steps,
    n,
    d0,
    h0,
    w0,
    CHUNKS_A: gl.constexpr,
    CHUNKS_B: gl.constexpr,
    slot: gl.constexpr,
):
    """Step j's tile of x: TH rows, then the two that the tile's lower rows need. (d0, h0, w0) is the first tap's voxel."""
    TH: gl.constexpr = a_desc.block_shape[2]
    TW: gl.constexpr = a_desc.block_shape[3]
    TC: gl.constexpr = a_desc.block_shape[4]
    CHUNKS: gl.constexpr = CHUNKS_A + CHUNKS_B
    q = j // 4
    d, w, chunk = d0 + j % 4, w0 + q // CHUNKS, q % CHUNKS
    done, keep = arrived.index(slot), j < steps
    mbarrier.expect(done, (TH + 2) * TW * TC * 2, pred=keep)
    body = view(rows(ring, slot * (TH + 2), TH), ring.dtype, [1, 1, TH, TW, TC], a_desc.layout)
    edge = view(rows(ring, slot * (TH + 2) + TH, 2), ring.dtype, [1, 1, 2, TW, TC], a_edge_desc.layout)
    if CHUNKS_B == 0:
        to_shared(a_desc, [n, d, h0, w, chunk * TC], done, body, pred=keep)
        to_shared(a_edge_desc, [n, d, h0 + TH, w, chunk * TC], done, edge, pred=keep)
    else:
        from_a, from_b = keep & (chunk < CHUNKS_A), keep & (chunk >= CHUNKS_A)
        to_shared(a_desc, [n, d, h0, w, chunk * TC], done, body, pred=from_a)
        to_shared(a_edge_desc, [n, d, h0 + TH, w, chunk * TC], done, edge, pred=from_a)
        c0 = (chunk - CHUNKS_A) * TC
        to_shared(b_desc, [n, d, h0, w, c0], done, body, pred=from_b)
        to_shared(b_edge_desc, [n, d, h0 + TH, w, c0], done, edge, pred=from_b)


@gluon.jit
def _fetch_weights(
    w_desc,
    ring,
    arrived,
    m,
    fetches,
    CA,
    K,
    k0,
    CHUNKS_A: gl.constexpr,
    CHUNKS_B: gl.constexpr,
    STAGES: gl.constexpr,
):
    TK: gl.constexpr = w_desc.block_shape[0]
    TC: gl.constexpr = w_desc.block_shape[1]
    CHUNKS: gl.constexpr = CHUNKS_A + CHUNKS_B
    slot, q = m % STAGES, m // 3
    done, chunk = arrived.index(slot), q % CHUNKS
    # The second source's columns begin at CA, which need not be a whole chunk.
    c0 = chunk * TC
    if CHUNKS_B > 0:
        c0 = gl.where(chunk < CHUNKS_A, c0, c0 + CA - CHUNKS_A * TC)
    first = (m % 3 * 9 + q // CHUNKS) * K + k0
    mbarrier.expect(done, 3 * TK * TC * 2, pred=m < fetches)
    for kh in gl.static_range(3):
        to_shared(w_desc, [first + kh * 3 * K, c0], done, ring.index(slot * 3 + kh), pred=m < fetches)


@gluon.jit
def _product(x, w, accumulator, SWAP: gl.constexpr):
    """x (voxels, channels), w (output channels, channels)."""
    if SWAP:
        accumulator = warpgroup_mma(w, x.permute((1, 0)), accumulator, is_async=True)
    else:
        accumulator = warpgroup_mma(x, w.permute((1, 0)), accumulator, is_async=True)
    return accumulator


@gluon.jit(do_not_specialize=["D", "H", "W", "CA", "K", "before_d", "before_h", "before_w", "shift_stride"])
def voxtune_conv3d_halo(  # noqa: PLR0912, PLR0915
    a_desc,  # (N, XD, XH, XW, CA), tiles of (1, 1, TH, TW, TC)
    a_edge_desc,  # the same, tiles of (1, 1, 2, TW, TC)
    b_desc,  # (N, XD, XH, XW, CB), tiles as of a; or None
    b_edge_desc,
    w_desc,  # (27 * K, CA + CB), tiles of (TK, TC)
    y_desc,  # (N, D, H, W, K), tiles of (1, 1, TH, TW, TK)
    r_desc,  # as y_desc, or None
    shift_ptr,  # (N, K) or (1, K), of any float type, or None
    statistics_ptr,  # (N, P, 3, K) float32 or None
    D,
    H,
    W,
    CA,
    K,
    before_d,
    before_h,
    before_w,
    shift_stride,
    CHUNKS_A: gl.constexpr,  # of TC input channels; a constant, since a loop that might not run would serialise the products
    CHUNKS_B: gl.constexpr,
    SWAP: gl.constexpr,  # output channels are the rows of the product
    X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    dtype: gl.constexpr = a_desc.dtype
    TH: gl.constexpr = a_desc.block_shape[2]
    TW: gl.constexpr = a_desc.block_shape[3]
    TC: gl.constexpr = a_desc.block_shape[4]
    TK: gl.constexpr = w_desc.block_shape[0]
    VOXELS: gl.constexpr = TH * TW
    # Four warps a 64 rows; with 64 output channels, further warps take further voxels.
    SIDE: gl.constexpr = num_warps * 16 // TK if SWAP and num_warps * 16 > TK else 1
    WIDTH: gl.constexpr = VOXELS // SIDE if SWAP else TK
    mma: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps // SIDE, SIDE], instr_shape=[16, WIDTH, 16]
    )
    # The dimensions of channels and of voxels in the product.
    CHANNELS: gl.constexpr = 0 if SWAP else 1
    SPACE: gl.constexpr = 1 if SWAP else 0
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=TC * 2, element_bitwidth=16, rank=2)
    flat_out: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=TK * 2 if TK < 64 else 128, element_bitwidth=16, rank=2
    )
    columns = (K + TK - 1) // TK
    tile, k0 = gl.program_id(0) // columns, gl.program_id(0) % columns * TK
    across, down = (W + TW - 1) // TW, (H + TH - 1) // TH
    P = across * down * ((D + 1) // 2)
    n, p = tile // P, tile % P
    w0, h0, d0 = p % across * TW, p // across % down * TH, p // (across * down) * 2
    xd, xh, xw = d0 - before_d, h0 - before_h, w0 - before_w

    x_ring = gl.allocate_shared_memory(dtype, [X_STAGES * (TH + 2), TW, TC], flat)
    w_ring = gl.allocate_shared_memory(dtype, [W_STAGES * 3, TK, TC], w_desc.layout)
    x_arrived = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], mbarrier.MBarrierLayout())
    w_arrived = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(X_STAGES):
        mbarrier.init(x_arrived.index(i), count=1)
    for i in gl.static_range(W_STAGES):
        mbarrier.init(w_arrived.index(i), count=1)
    steps, fetches = 12 * (CHUNKS_A + CHUNKS_B), 9 * (CHUNKS_A + CHUNKS_B)
    for i in gl.static_range(W_STAGES):
        if i < X_STAGES - 1:
            _fetch_plane(
                *(a_desc, a_edge_desc, b_desc, b_edge_desc, x_ring, x_arrived),
                *(i, steps, n, xd, xh, xw, CHUNKS_A, CHUNKS_B, i),
            )
        _fetch_weights(w_desc, w_ring, w_arrived, i, fetches, CA, K, k0, CHUNKS_A, CHUNKS_B, W_STAGES)

    SHAPE: gl.constexpr = (TK, VOXELS) if SWAP else (VOXELS, TK)
    lower = gl.zeros(SHAPE, gl.float32, layout=mma)
    upper = gl.zeros(SHAPE, gl.float32, layout=mma)
    for q in range(3 * (CHUNKS_A + CHUNKS_B)):
        for z in gl.static_range(4):
            j, m = 4 * q + z, 3 * q + z
            mbarrier.wait(x_arrived.index(j % X_STAGES), j // X_STAGES & 1)
            if z < 3:
                mbarrier.wait(w_arrived.index(m % W_STAGES), m // W_STAGES & 1)
            for kh in gl.static_range(3):
                x = view(rows(x_ring, z % X_STAGES * (TH + 2) + kh, TH), dtype, [VOXELS, TC], flat)
                if z < 3:
                    lower = _product(x, w_ring.index(m % W_STAGES * 3 + kh), lower, SWAP)
                if z > 0:
                    upper = _product(x, w_ring.index((m - 1) % W_STAGES * 3 + kh), upper, SWAP)
            # All but this step's products are done: what only the step before read can be filled anew.
            lower, upper = warpgroup_mma_wait(num_outstanding=3 if z % 3 == 0 else 6, deps=(lower, upper))
            barrier()
            _fetch_plane(
                *(a_desc, a_edge_desc, b_desc, b_edge_desc, x_ring, x_arrived, j + X_STAGES - 1, steps),
                *(n, xd, xh, xw, CHUNKS_A, CHUNKS_B, (z + X_STAGES - 1) % X_STAGES),
            )
            # Weights serve two steps, lower then upper: those of m - 2 are free (at z = 0 m - 1, the last of the round before).
            if z > 1:
                _fetch_weights(
                    w_desc, w_ring, w_arrived, m - 2 + W_STAGES, fetches, CA, K, k0, CHUNKS_A, CHUNKS_B, W_STAGES
                )
            elif z == 0:
                again = gl.where(q > 0, m - 1 + W_STAGES, fetches)
                _fetch_weights(w_desc, w_ring, w_arrived, again, fetches, CA, K, k0, CHUNKS_A, CHUNKS_B, W_STAGES)
    lower, upper = warpgroup_mma_wait(num_outstanding=0, deps=(lower, upper))
    barrier()

    # A ring that is large enough holds both planes of the result on their way out: that of the weights, or that of x.
    if 2 * VOXELS <= W_STAGES * 3 * TC:
        half_lower, half_upper = rows(w_ring, 0, VOXELS // TC), rows(w_ring, VOXELS // TC, VOXELS // TC)
    elif 2 * TH * TK <= X_STAGES * (TH + 2) * TC:
        half_lower, half_upper = rows(x_ring, 0, TH * TK // TC), rows(x_ring, TH * TK // TC, TH * TK // TC)
    else:
        results = gl.allocate_shared_memory(dtype, [2, VOXELS, TK], flat_out)
        half_lower, half_upper = results.index(0), results.index(1)
    out_lower = view(half_lower, dtype, [1, 1, TH, TW, TK], y_desc.layout)
    out_upper = view(half_upper, dtype, [1, 1, TH, TW, TK], y_desc.layout)
    flat_lower = view(half_lower, dtype, [VOXELS, TK], flat_out)
    flat_upper = view(half_upper, dtype, [VOXELS, TK], flat_out)
    if SWAP:
        flat_lower, flat_upper = flat_lower.permute((1, 0)), flat_upper.permute((1, 0))
    k = k0 + gl.arange(0, TK, layout=gl.SliceLayout(SPACE, mma))
    if r_desc is not None:
        done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(done, count=1)
        mbarrier.expect(done, 2 * VOXELS * TK * 2)
        to_shared(r_desc, [n, d0, h0, w0, k0], done, out_lower)
        to_shared(r_desc, [n, d0 + 1, h0, w0, k0], done, out_upper)
    if shift_ptr is not None:
        shift = gl.load(shift_ptr + n * shift_stride + k, mask=k < K, other=0.0).to(gl.float32)
        lower += gl.expand_dims(shift, SPACE)
        upper += gl.expand_dims(shift, SPACE)
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
        v = gl.arange(0, VOXELS, layout=gl.SliceLayout(CHANNELS, mma))
        inside = gl.expand_dims((h0 + v // TW < H) & (w0 + v % TW < W), CHANNELS)
        both = inside & (d0 + 1 < D)
        lower = gl.where(inside, y_lower.to(gl.float32), 0.0)
        upper = gl.where(both, y_upper.to(gl.float32), 0.0)
        count = (gl.minimum(TH, H - h0) * gl.minimum(TW, W - w0) * gl.minimum(2, D - d0)).to(gl.float32)
        mean = (gl.sum(lower, axis=SPACE) + gl.sum(upper, axis=SPACE)) / count
        lower = gl.where(inside, lower - gl.expand_dims(mean, SPACE), 0.0)
        upper = gl.where(both, upper - gl.expand_dims(mean, SPACE), 0.0)
        at = statistics_ptr + tile.to(gl.int64) * 3 * K + k
        gl.store(at, mean * 0.0 + count, mask=k < K)
        gl.store(at + K, mean, mask=k < K)
        squares = gl.sum(lower * lower, axis=SPACE) + gl.sum(upper * upper, axis=SPACE)
        gl.store(at + 2 * K, squares, mask=k < K)
    tma.store_wait(0)
    # The copy engine reads the results until here: without this use, sums over warps could be given the same memory.
    x_ring._keep_alive()
    w_ring._keep_alive()
    if 2 * VOXELS > W_STAGES * 3 * TC and 2 * TH * TK > X_STAGES * (TH + 2) * TC:
        results._keep_alive()


def layout(rank: int, channels: int) -> gl.NVMMASharedLayout:
    """For tiles with this many channels in each row."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * channels), element_bitwidth=16, rank=rank)


def constants(tile: Conv3dTile, channels: tuple[int, ...]) -> dict[str, int | bool]:
    chunks = [-(-c // tile.c) for c in channels] + [0]
    return {
        "CHUNKS_A": chunks[0],
        "CHUNKS_B": chunks[1],
        "SWAP": tile.swap,
        "X_STAGES": tile.inner_stages,
        "W_STAGES": tile.outer_stages,
    }


def launch(
    sources: Sequence[Tensor],
    packed: Tensor,
    y_NDHWK: Tensor,
    r_NDHWK: Tensor | None,
    shift_NC: Tensor | None,
    statistics: Tensor | None,
    tile: Conv3dTile,
    shift_stride: int,
    before: tuple[int, ...],
) -> None:
    """Fills y and the statistics. `sources` are (N, XD, XH, XW, C); `before` is the padding in front along each axis."""
    N, D, H, W, K = y_NDHWK.shape
    channels = tuple(s.shape[4] for s in sources)
    box, L = [1, 1, tile.h, tile.w], layout(5, tile.c)
    programs = N * -(-W // tile.w) * -(-H // tile.h) * -(-D // 2) * -(-K // tile.k)
    tiled: list[TensorDescriptor | None] = []
    for source in sources:
        tiled.append(TensorDescriptor.from_tensor(source, [*box, tile.c], L))
        tiled.append(TensorDescriptor.from_tensor(source, [1, 1, 2, tile.w, tile.c], L))
    tiled += [None] * (4 - len(tiled))
    ready(voxtune_conv3d_halo)[(programs,)](
        *tiled,
        TensorDescriptor.from_tensor(packed.view(27 * K, sum(channels)), [tile.k, tile.c], layout(2, tile.c)),
        TensorDescriptor.from_tensor(y_NDHWK, [*box, tile.k], layout(5, tile.k)),
        None if r_NDHWK is None else TensorDescriptor.from_tensor(r_NDHWK, [*box, tile.k], layout(5, tile.k)),
        shift_NC,
        statistics,
        D,
        H,
        W,
        channels[0],
        K,
        *before,
        shift_stride,
        **constants(tile, channels),
        num_warps=tile.warps,
    )


def arguments(
    tile: Conv3dTile, channels: tuple[int, ...], *, dtype: str, epilogue: bool = True
) -> tuple[dict[str, str], dict[str, object]]:
    """(types of the run-time arguments, constants), to compile it without a device."""
    box = f"1,1,{tile.h},{tile.w}"
    names = ("a_desc", "a_edge_desc", "b_desc", "b_edge_desc")
    signature = {}
    for body, edge in (names[:2], names[2:])[: len(channels)]:
        signature[body] = f"tensordesc<{dtype}[{box},{tile.c}],{layout(5, tile.c)!r}>"
        signature[edge] = f"tensordesc<{dtype}[1,1,2,{tile.w},{tile.c}],{layout(5, tile.c)!r}>"
    signature["w_desc"] = f"tensordesc<{dtype}[{tile.k},{tile.c}],{layout(2, tile.c)!r}>"
    signature["y_desc"] = f"tensordesc<{dtype}[{box},{tile.k}],{layout(5, tile.k)!r}>"
    if epilogue:
        signature |= {"r_desc": signature["y_desc"], "shift_ptr": "*fp32", "statistics_ptr": "*fp32"}
    integers = ("D", "H", "W", "CA", "K", "before_d", "before_h", "before_w", "shift_stride")
    signature |= dict.fromkeys(integers, "i32")
    optional = (*names, "r_desc", "shift_ptr", "statistics_ptr")
    absent = {name: None for name in optional if name not in signature}
    return signature, {**constants(tile, channels), "num_warps": tile.warps, **absent}
