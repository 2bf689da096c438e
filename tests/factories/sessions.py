"""Sessions made by hand, small enough that every answer can be worked out on paper."""

from __future__ import annotations

from typing import Any

from voxtune.profile.session import Session, frame


def meta(name: str = "made", **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "mode": "sample",
        "config": "baseline",
        "environment": {"gpu": "NVIDIA H200"},
        "tiers": {},
        "window": None,
    } | more


def session(
    launches: list[dict[str, Any]],
    *,
    opcodes: list[dict[str, Any]] | None = None,
    memory: list[dict[str, Any]] | None = None,
    bare: list[float] | None = None,
    **more: Any,
) -> Session:
    """Launches are numbered in order within their step; kind kernel, phase forward and step 0 unless told."""
    rows, seen = [], {}
    for launch in launches:
        step = launch.get("step", 0)
        seen[step] = seen.get(step, -1) + 1
        rows.append({"step": step, "index": seen[step], "kind": "kernel", "phase": "forward", "name": "k"} | launch)
    timings = [{"tier": "bare", "repeat": i, "step_ms": ms} for i, ms in enumerate(bare or [])]
    return Session(
        meta=meta(**more),
        launches=frame(rows, "launches"),
        opcodes=frame(opcodes or [], "opcodes"),
        memory=frame(memory or [], "memory"),
        timings=frame(timings, "timings"),
    )


def kernel(start: float, duration: float, kernel_class: str = "elementwise", **more: Any) -> dict[str, Any]:
    return {"start_us": start, "duration_us": duration, "launch_us": start, "class": kernel_class} | more


def counted(start: float, duration: float, kernel_class: str = "elementwise", **more: Any) -> dict[str, Any]:
    """A kernel with the full set read."""
    counters = {"counter_tier": "full", "cycles": duration * 1000, "cycles_active": duration * 1000}
    return kernel(start, duration, kernel_class) | counters | {"instructions": 100.0, "ipc": 1.0} | more


def train(rows: list[dict[str, Any]], **more: Any) -> Session:
    """The rows as the forward phase of a training step, with a kernel each of backward and optimizer."""
    end = max(r["start_us"] + r["duration_us"] for r in rows)
    rest = [counted(end, 1.0, phase="backward"), counted(end + 1, 1.0, "optimizer", phase="optimizer")]
    return session([*rows, *rest], mode="train", **more)
