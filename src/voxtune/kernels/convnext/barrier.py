"""A barrier over all programs of a launch, so that one kernel can do what depends on all of what it did before.

All programs must be on the card together: no more of them than multiprocessors. The counter only ever grows, by one a program and
barrier, and is never reset: a recorded graph may run it any number of times. Programs are a power of two, so that the counter may
wrap. Triton's interpreter runs one program after the other: there the caller launches once a phase instead.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def everyone(
    counter_ptr,  # (1,) int32; nothing else writes it
    PROGRAMS: tl.constexpr,
):
    tl.static_assert(PROGRAMS & (PROGRAMS - 1) == 0)
    # All lanes' writes come before the one lane's count, which makes them seen by the others.
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
    """Nothing but barriers: what one costs on a card."""
    for _ in range(ROUNDS):
        everyone(counter_ptr, PROGRAMS)
