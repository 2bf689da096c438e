"""From a trace to the launch table: each launch with its operator, module, phase and class.

The backward pass runs on another thread, outside of any module. Autograd numbers each forward operator and repeats the
number on its backward node. That leads from a backward launch to the module of the forward operator.
"""

from __future__ import annotations

import json
import re
from typing import Any

from voxtune.profile.classify import classify
from voxtune.profile.trace import MODULE, NODE, Span, Trace, Work

_COMPILED = re.compile(r"Torch-Compiled Region|CompiledFunction|Call CompiledFxGraph|CompiledFxGraph")
_ACCUMULATE = NODE + "torch::autograd::AccumulateGrad"


def launch_rows(trace: Trace, modules: dict[str, str]) -> list[dict[str, Any]]:
    """The rows of the launch table, without counters. For a trace of a CPU: the operators of the host."""
    attribution = Attribution(trace, modules)
    rows = [attribution.device_row(w) for w in trace.work] if trace.work else attribution.host_rows()
    counts: dict[int, int] = {}
    inside = []
    for row in rows:
        if row["step"] is None:
            continue  # between two steps
        row["index"] = counts.get(row["step"], 0)
        counts[row["step"]] = row["index"] + 1
        inside.append(row)
    return inside


class Attribution:
    """Finds the step, phase and module of any moment in a trace."""

    def __init__(self, trace: Trace, modules: dict[str, str]):
        self.trace, self.modules = trace, modules
        # Of several operators with one number, the last to start created the node: operators inside it have the next number.
        self.forward = {s.sequence: s for s in trace.operators if s.sequence >= 0 and not _node(s)}
        self.backward_from = [self._first_backward(i) for i in range(len(trace.steps))]
        self.cause = self._accumulation_causes()

    def device_row(self, work: Work) -> dict[str, Any]:
        call = work.call
        step = self.trace.step_at(call.start if call else work.start)
        origin = self.trace.steps[step].start if step is not None else 0.0
        op = call.find(lambda s: s.category == "cpu_op") if call else None
        row = {
            "step": step,
            "name": work.name,
            "kind": work.kind,
            "start_us": work.start - origin,
            "duration_us": work.duration,
            "launch_us": call.start - origin if call else None,
            "stream": work.args.get("stream"),
            **_shape(work),
        }
        return row | self._attributes(row, op, call, step)

    def host_rows(self) -> list[dict[str, Any]]:
        rows = []
        for op in self.trace.operators:
            own = op.end - op.start - op.within
            step = self.trace.step_at(op.start)
            if own <= 0 or step is None:
                continue
            start = op.start - self.trace.steps[step].start
            row = {"step": step, "name": op.name, "kind": "cpu_op", "start_us": start, "duration_us": own}
            rows.append(row | {"launch_us": start} | self._attributes(row, op, op, step))
        return rows

    def _attributes(self, row: dict[str, Any], op: Span | None, call: Span | None, step: int | None) -> dict[str, Any]:
        phase = self.phase(row, call, step)
        module = self.module(call)
        kernel = classify(row["name"], row["kind"], op.name if op else None, phase)
        return {
            "op": op.name if op else None,
            "op_shapes": json.dumps(op.args["Input Dims"]) if op and op.args.get("Input Dims") else None,
            "module": module,
            "module_type": self.modules.get(module) if module is not None else None,
            "phase": phase,
            "class": kernel.kernel_class,
            "precision": kernel.precision,
            "layout": kernel.layout,
            "architecture": kernel.architecture,
        }

    def phase(self, row: dict[str, Any], call: Span | None, step: int | None) -> str:
        if row["kind"] == "memcpy" and row.get("direction") in ("HtoD", "DtoH"):
            return "transfer"
        return "other" if call is None or step is None else self._phase(call, call.start, call.thread, step)

    def phase_at(self, span: Span | None, time: float) -> str:
        """The phase at a moment inside `span`."""
        step = self.trace.step_at(time)
        if step is None:
            return "other"
        return self._phase(span, time, span.thread if span else self.trace.steps[step].thread, step)

    def _phase(self, inside: Span | None, time: float, thread: Any, step: int) -> str:
        for span in inside.around() if inside else ():
            if span.name.startswith("Optimizer.step"):
                return "optimizer"
            if span.name.startswith("Optimizer.zero_grad"):
                return "other"
            if span.name.startswith(NODE):
                return "backward"
        if thread != self.trace.steps[step].thread:
            return "backward"
        return "forward" if time < self.backward_from[step] else "other"

    def module(self, span: Span | None) -> str | None:
        """The path of the module; empty outside of any module; None in a compiled region, where it is unknown."""
        path = self._module_around(span)
        if path is not None or span is None:
            return path
        compiled = span.find(lambda s: bool(_COMPILED.search(s.name)) and not s.name.startswith(_ACCUMULATE))
        return None if compiled else ""

    def _module_around(self, span: Span | None) -> str | None:
        for s in span.around() if span else ():
            if s.name.startswith(MODULE):
                return s.name[len(MODULE) :]
            if s.name.startswith(NODE):
                cause = self.cause.get(id(s), s)
                origin = self.forward.get(cause.sequence)
                return self._module_around(origin) if origin else None
        return None

    def _first_backward(self, step: int) -> float:
        bounds = self.trace.steps[step]
        starts = [
            o.start for o in self.trace.operators if o.name.startswith(NODE) and bounds.start <= o.start <= bounds.end
        ]
        return min(starts, default=float("inf"))

    def _accumulation_causes(self) -> dict[int, Span]:
        """Autograd accumulates a gradient directly after the node that computed it, and gives the accumulation no number."""
        causes: dict[int, Span] = {}
        last: dict[Any, Span] = {}
        for op in self.trace.operators:
            if not op.name.startswith(NODE):
                continue
            if not op.name.startswith(_ACCUMULATE):
                last[op.thread] = op
            elif op.thread in last:
                causes[id(op)] = last[op.thread]
        return causes


def _node(span: Span) -> bool:
    return span.find(lambda s: s.name.startswith(NODE)) is not None


def _shape(work: Work) -> dict[str, Any]:
    """Grid and resources of a kernel, or bytes and direction of a copy."""
    args = work.args
    if work.kind == "kernel":
        return {
            "grid": ",".join(map(str, args["grid"])) if "grid" in args else None,
            "block": ",".join(map(str, args["block"])) if "block" in args else None,
            "registers": args.get("registers per thread"),
            "shared_bytes": args.get("shared memory"),
        }
    direction = re.search(r"[HDP]to[HDP]", work.name)
    return {"bytes": args.get("bytes"), "direction": direction.group() if direction else None}
