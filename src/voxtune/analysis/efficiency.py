"""IPC and share of the peak rate against step time, over networks and configurations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from voxtune.analysis.certificate import certify
from voxtune.analysis.counters import totals
from voxtune.analysis.frame import labels, share
from voxtune.analysis.roofline import card_of
from voxtune.analysis.step import step_totals
from voxtune.analysis.table import Column, Table
from voxtune.errors import InputError
from voxtune.runtime.describe import forward_flops
from voxtune.runtime.model import check_size
from voxtune.workloads import WORKLOADS, workload

if TYPE_CHECKING:
    from voxtune.profile.session import Session

# A backward pass has twice the FLOPs of the forward pass: the gradients of inputs and of weights.
PASSES = {"sample": 1, "train": 3}


def efficiency(sessions: Sequence[Session]) -> Table:
    """One row per session. FLOPs are those of the network, not of the kernels that ran; None for unknown networks."""
    columns = [
        Column("session", kind="text"),
        Column("network", kind="text"),
        Column("mode", kind="text", detail=True),
        Column("wall_ms", "ms", better="low"),
        Column("ipc", title="IPC", doc="weighted by active cycles; only if counters cover the step"),
        Column("tflop", "TFLOP", digits=3, title="FLOPs", doc="of the network, one step"),
        Column("tflops", "TFLOP/s", better="high", digits=1),
        Column("of_fp32", "%", "percent", "high", 1, title="of FP32 peak", detail=True),
        Column(
            "of_half", "%", "percent", "high", 1, title="of peak", doc="of the 16-bit tensor-core rate of the datasheet"
        ),
    ]
    steps = step_totals(sessions).rows
    rows = [_row(s, label, step["wall_ms"]) for s, label, step in zip(sessions, labels(sessions), steps, strict=True)]
    notes = [
        "FLOPs of a training step: three times the forward pass. All configurations are compared with the same peak, that of "
        "16-bit tensor cores, so that the share falls with the time only."
    ]
    return Table("Efficiency by network and configuration", columns, rows, notes)


def _row(session: Session, label: str, wall_ms: float | None) -> dict[str, Any]:
    meta, card = session.meta, card_of(session)
    ipc = totals(session)["ipc_weighted"] if certify(session).covers("few") else None
    row: dict[str, Any] = {"session": label, "network": str(meta.get("workload")), "mode": str(meta["mode"])}
    row |= {"wall_ms": wall_ms, "ipc": ipc}
    flops = _flops(str(meta.get("workload")), tuple(meta.get("size") or ()), int(meta.get("batch") or 1))
    if flops is None or not wall_ms:
        return row
    work = flops * PASSES.get(str(meta["mode"]), 1)
    rate = work / wall_ms / 1e9
    row |= {"tflop": work / 1e12, "tflops": rate}
    return row | ({"of_fp32": share(rate, card.fp32), "of_half": share(rate, card.half)} if card else {})


@functools.lru_cache(maxsize=64)
def _flops(name: str, size: tuple[int, ...], batch: int) -> int | None:
    if name not in WORKLOADS:
        return None
    entry = workload(name)
    try:
        check_size(entry.network, size or entry.size)
        return forward_flops(entry.network, size or entry.size, batch)
    except (InputError, RuntimeError):  # a size that the network cannot have
        return None
