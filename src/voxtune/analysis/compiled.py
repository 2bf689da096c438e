"""Modules for the launches of compiled steps, as far as operators and kernel names allow.

torch.compile runs outside of any module, so its launches have none. A convolution is still one operator with shapes: the
nth convolution of a shape belongs to the module of the nth in a session that is not compiled, if both have as many.
Fused kernels are named after the operators in them, which gives their kind of work, not their module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from voxtune.analysis.frame import COMPILED

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# The number of operands whose shapes identify a call: input and weight; with the gradient of the output if backward.
CALLS = {"aten::cudnn_convolution": 2, "aten::convolution": 2, "aten::convolution_backward": 3}
# The first match on the kernel name wins.
KINDS = (
    ("native_group_norm_backward", "group norm, backward"),
    ("native_group_norm", "group norm and activation"),
    ("index_put", "interpolation, backward"),
    ("unsafe_index", "interpolation"),
    ("upsample", "interpolation"),
    ("softmax", "attention"),
    ("convolution", "operands of convolutions"),
)
Call = tuple[str, str, str]


def with_modules(sessions: Sequence[Session]) -> list[Session]:
    """The sessions; those of compiled steps with the modules that can be determined, and kinds of work elsewhere."""
    return [_attributed(s, _reference(s, sessions)) if s.launches["module"].isna().any() else s for s in sessions]


def _reference(session: Session, sessions: Sequence[Session]) -> Session | None:
    """A session of the same step with all modules; the one whose configuration differs only by compile if there is one."""
    same = [
        s
        for s in sessions
        if all(s.meta.get(k) == session.meta.get(k) for k in ("workload", "mode", "size", "batch"))
        and not s.launches["module"].isna().any()
    ]
    config = "+".join(p for p in str(session.meta["config"]).split("+") if p != "compile") or "baseline"
    return next((s for s in same if s.meta["config"] == config), same[0] if same else None)


def _attributed(session: Session, reference: Session | None) -> Session:
    rows = session.launches
    modules = rows["module"].astype(object).where(rows["module"].notna(), None).tolist()
    types = rows["module_type"].astype(object).where(rows["module_type"].notna(), None).tolist()
    known = _modules_of_calls(reference) if reference else {}
    calls = _calls(rows)
    for numbered in _by_step(rows, calls):
        for call, places in numbered.items():
            owners = known.get(call, [])
            for place, members in enumerate(places if len(places) == len(owners) else ()):
                for i in members:
                    if modules[i] is None:
                        modules[i], types[i] = owners[place]
    columns = (rows[c].fillna("").tolist() for c in ("name", "class"))
    for i, (name, kind) in enumerate(zip(*columns, strict=True)):
        if modules[i] is None:
            modules[i] = f"{COMPILED} {kind_of(str(name), str(kind))}"
    frame = rows.assign(
        module=_like(rows["module"], modules),
        module_type=_like(rows["module_type"], types),
    )
    return replace(session, launches=frame)


def _like(column: pd.Series[Any], values: list[Any]) -> pd.Series[Any]:
    import pandas as pd

    return pd.Series(values, index=column.index, dtype=column.dtype)


def kind_of(name: str, kernel_class: str) -> str:
    """The kind of work of a compiled kernel, from the operators in its name."""
    if not name.startswith("triton_"):
        return {"conv_fprop": "convolutions", "conv_dgrad": "convolutions", "conv_wgrad": "convolutions"}.get(
            kernel_class, kernel_class or "unknown"
        )
    return next((kind for part, kind in KINDS if part in name), "elementwise")


def _calls(rows: pd.DataFrame) -> list[Call | None]:
    """The call of each launch: its operator, phase and the shapes of its operands; None for other operators."""
    out: list[Call | None] = []
    for op, shapes, phase in zip(*(rows[c].fillna("").tolist() for c in ("op", "op_shapes", "phase")), strict=True):
        count = CALLS.get(str(op))
        out.append((str(op), str(phase), "], [".join(str(shapes).split("], [")[:count])) if count and shapes else None)
    return out


def _by_step(rows: pd.DataFrame, calls: list[Call | None]) -> list[dict[Call, list[list[int]]]]:
    """Per step and call: the places of the launches of each time it was made. Launches in a row are one time."""
    steps: dict[Any, dict[Call, list[list[int]]]] = {}
    before: tuple[Any, Call | None] = (None, None)
    for i, (step, call) in enumerate(zip(rows["step"].tolist(), calls, strict=True)):
        if call is not None:
            places = steps.setdefault(step, {}).setdefault(call, [])
            if before == (step, call):
                places[-1].append(i)
            else:
                places.append([i])
        before = (step, call)
    return list(steps.values())


def _modules_of_calls(reference: Session) -> dict[Call, list[tuple[str, Any]]]:
    """The modules, with their types, that make each call, in order, from the first step."""
    rows = reference.launches
    rows = rows[rows["step"] == rows["step"].min()]
    out: dict[Call, list[tuple[str, Any]]] = {}
    columns = (rows[c].astype(object).tolist() for c in ("module", "module_type"))
    for call, module, kind in zip(_calls(rows), *columns, strict=True):
        if call is not None and isinstance(module, str) and module:
            owner = (module, kind if isinstance(kind, str) else None)
            if owner not in out.setdefault(call, []):
                out[call].append(owner)
    return out
