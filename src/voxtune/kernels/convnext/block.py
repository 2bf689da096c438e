"""A whole ConvNeXt block in one kernel: depthwise, norm, convolution, GELU, norm, convolution, residual.

Why: at 8 x 8 and 16 x 16 pixels, launching the three kernels of a block takes longer than their computation. Here one
persistent kernel runs all phases, with a grid-wide barrier (`everyone`) before each phase that needs the complete result of the
previous one. Data between phases stays in the L2 cache. The phases call the functions of depthwise.py and conv.py, so a block has
one definition.

Phases: 0 depthwise, 1 first convolution, 2 second convolution. Triton's interpreter runs programs sequentially and cannot
execute a grid-wide barrier; there, the caller launches each phase separately (FIRST to LAST).

Legend: as in conv.py; the number after a name is that of the convolution.
"""

from __future__ import annotations

import triton
import triton.language as tl

from voxtune.kernels.convnext.common import release, wait
from voxtune.kernels.convnext.conv import conv_work
from voxtune.kernels.convnext.depthwise import depthwise_work


@triton.jit
def everyone(
    counter_ptr,  # (1,) int32; nothing else writes it
    PROGRAMS: tl.constexpr,
):
    tl.static_assert(PROGRAMS & (PROGRAMS - 1) == 0)
    # All threads of the program write before the atomic add, which makes the writes visible to the other programs.
    tl.debug_barrier()
    old = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
    goal = (old | (PROGRAMS - 1)) + 1
    now = old + 1
    while now - goal < 0:
        now = tl.inline_asm_elementwise(
            "ld.global.acquire.gpu.b32 $0, [$1];", "=r,l", [counter_ptr], dtype=tl.int32, is_pure=False, pack=1
        )
    tl.debug_barrier()


@triton.jit
def voxtune_barriers(
    counter_ptr,
    ROUNDS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Only barriers, to measure what one costs."""
    for _ in range(ROUNDS):
        everyone(counter_ptr, PROGRAMS)


PHASES = 3


@triton.jit
def voxtune_block(
    x_ptr,  # (N, H, W, C), row stride LDX: the block's input and the residual
    w0_ptr,  # (56, C)
    term_ptr,  # (C,) float32: bias + time term
    h_ptr,  # (N, H, W, C): output of the depthwise convolution
    sums_h_ptr,  # (N, 2, READ1)
    w1_ptr,
    shift1_ptr,
    slope1_ptr,
    g_ptr,  # (N, H, W, K1): output of the first convolution
    sums_g_ptr,  # (N, 2, READ2)
    w2_ptr,
    shift2_ptr,
    slope2_ptr,
    residual_ptr,  # (C padded, KP2), with RESIDUAL 2
    y_ptr,  # (N, H, W, K2), row stride LDY
    parts_ptr,
    count_ptr,
    counter_ptr,  # (1,) int32
    turns1,  # loop iterations, as in conv_work
    turns2,
    turns3,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    K1: tl.constexpr,
    KP1: tl.constexpr,
    K2: tl.constexpr,
    KP2: tl.constexpr,
    LDX: tl.constexpr,
    LDY: tl.constexpr,
    ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    READ1: tl.constexpr,
    BLOCK_R1: tl.constexpr,
    READ2: tl.constexpr,
    BLOCK_R2: tl.constexpr,
    EPS: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPLIT1: tl.constexpr,
    BLOCK_M1: tl.constexpr,
    BLOCK_K1: tl.constexpr,
    BLOCK_C1: tl.constexpr,
    WAYS1: tl.constexpr,
    SPLIT2: tl.constexpr,
    BLOCK_M2: tl.constexpr,
    BLOCK_K2: tl.constexpr,
    BLOCK_C2: tl.constexpr,
    WAYS2: tl.constexpr,
    PRECISION: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    CHAINED: tl.constexpr,
):
    TILES0: tl.constexpr = (ROWS // (BLOCK_P * RUN)) * ((C + BLOCK_D - 1) // BLOCK_D)
    TILES1: tl.constexpr = (ROWS // BLOCK_M1) * (KP1 // BLOCK_K1) * SPLIT1
    MORE: tl.constexpr = 1 if (RESIDUAL == 2 and SPLIT2 > 1) else 0
    TILES2: tl.constexpr = (ROWS // BLOCK_M2) * (KP2 // BLOCK_K2) * (SPLIT2 + MORE)
    pid = tl.program_id(0)
    release(CHAINED)
    wait(CHAINED)
    if FIRST <= 0:
        for tile in range(pid, TILES0, PROGRAMS):
            depthwise_work(
                tile, x_ptr, w0_ptr, term_ptr, h_ptr, sums_h_ptr, H, W, C, LDX, RUN, BLOCK_P, BLOCK_D, BLOCK_I,
                C % BLOCK_D != 0,
            )  # fmt: skip
        if LAST > 1:
            everyone(counter_ptr, PROGRAMS)
    if FIRST <= 1 and LAST > 1:
        for tile in range(pid, TILES1, PROGRAMS):
            conv_work(
                tile, h_ptr, w1_ptr, h_ptr, w1_ptr, shift1_ptr, slope1_ptr, sums_h_ptr, g_ptr, sums_g_ptr, parts_ptr,
                count_ptr, turns1, 1, H, W, C, C, K1, KP1, C, C, K1, ROWS, 3, 1, False, True, 0, "gelu", True,
                READ1, BLOCK_R1, EPS, SPLIT1, BLOCK_M1, BLOCK_K1, BLOCK_C1, WAYS1, True, PRECISION,
            )  # fmt: skip
        if LAST > 2:
            everyone(counter_ptr, PROGRAMS)
    if LAST > 2:
        for tile in range(pid, TILES2, PROGRAMS):
            conv_work(
                tile, g_ptr, w2_ptr, x_ptr, residual_ptr, shift2_ptr, slope2_ptr, sums_g_ptr, y_ptr, sums_g_ptr,
                parts_ptr, count_ptr, turns2, turns3, H, W, K1, C, K2, KP2, K1, LDX, LDY, ROWS, 3, 1, False, True,
                RESIDUAL, "none", False, READ2, BLOCK_R2, EPS, SPLIT2, BLOCK_M2, BLOCK_K2, BLOCK_C2, WAYS2, True,
                PRECISION,
            )  # fmt: skip
