"""Access to the launches of a session: columns as arrays, means that skip missing values, kernel families, short names."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

Array = np.ndarray[Any, np.dtype[np.float64]]

CONVOLUTIONS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_backward")
MOVEMENT = ("layout", "padding", "cast", "copy")
# The fused kernels of a compiled step carry no module.
MODULE_UNKNOWN = "(module unknown)"
# How the work of compiled kernels without a module starts in place of a module (compiled.py).
COMPILED = "(compiled)"
# Launches by the network's own forward code, the loss or the optimizer.
OUTSIDE_MODULES = "(outside modules)"


def family(kernel_class: str) -> str:
    """The coarse kernel class, as in the paper (see study.py)."""
    if kernel_class.startswith("conv"):
        return "convolution"
    return {"padding": "layout"}.get(kernel_class, kernel_class)


def steps(session: Session) -> int:
    """Number of recorded steps. Every total in this package is a mean over them."""
    return max(1, int(session.launches["step"].nunique()))


def kernels(session: Session) -> pd.DataFrame:
    """Kernels on a GPU, operators on a CPU. Copies and fills are left out: they have no counters.

    Numbers are plain floats with NaN for null, so that selecting rows is one copy instead of one per column. The frame
    is cached per launch table: do not modify it in place.
    """
    source = session.launches
    cached = _PLAIN.get(id(source))
    if cached is not None and cached[0]() is source:
        return cached[1]
    rows = _plain(source[source["kind"].isin(["kernel", "cpu_op"])])
    key = id(source)
    _PLAIN[key] = (weakref.ref(source, lambda _gone: _PLAIN.pop(key, None)), rows)
    return rows


_PLAIN: dict[int, tuple[weakref.ref[pd.DataFrame], pd.DataFrame]] = {}


def _plain(rows: pd.DataFrame) -> pd.DataFrame:
    import pandas as pd

    numeric = [c for c in rows.columns if pd.api.types.is_numeric_dtype(rows[c].dtype)]
    values = np.column_stack([rows[c].to_numpy(dtype=float, na_value=np.nan) for c in numeric])
    numeric_frame = pd.DataFrame(values, columns=numeric, index=rows.index)
    text_columns = {c: rows[c].to_numpy(dtype=object, na_value=None) for c in rows.columns if c not in set(numeric)}
    text_frame = pd.DataFrame(text_columns, index=rows.index, dtype=object)
    return pd.concat([numeric_frame, text_frame], axis=1)[list(rows.columns)]


def on_gpu(session: Session) -> bool:
    return bool((session.launches["kind"] != "cpu_op").any())


def numbers(frame: pd.DataFrame, column: str) -> Array:
    """A column as floats, with NaN where it was not measured."""
    return frame[column].to_numpy(dtype=float, na_value=np.nan)


def text(frame: pd.DataFrame, column: str) -> pd.Series[str]:
    return frame[column].fillna("")


def total(values: Array) -> float | None:
    """The sum of the measured values; None if there are none."""
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else None


def mean(values: Array, weights: Array | None = None) -> float | None:
    """The weighted mean of the measured values; None if there are none."""
    weights = np.ones_like(values) if weights is None else weights
    known = ~np.isnan(values) & ~np.isnan(weights)
    weight = weights[known].sum()
    return float((values[known] * weights[known]).sum() / weight) if weight > 0 else None


def geometric_mean(values: Array) -> float | None:
    """Of the positive values: a launch that issued no instruction has no IPC."""
    positive = values[values > 0]
    return float(np.exp(np.log(positive).mean())) if len(positive) else None


def ratio(value: float | None, base: float | None) -> float | None:
    return None if value is None or not base else value / base


def share(part: float | None, total: float | None) -> float | None:
    """In percent."""
    fraction = ratio(part, total)
    return None if fraction is None else 100 * fraction


def milliseconds(frame: pd.DataFrame, count: int) -> float:
    """Device time per step."""
    return float(np.nansum(numbers(frame, "duration_us")) / 1e3 / count)


@functools.lru_cache(maxsize=16384)
def short(name: str) -> str:
    """A kernel name without namespaces, template arguments and tile sizes."""
    name = re.sub(r"^std::enable_if<.{0,200}?>::type ", "", name)
    name = name.removeprefix("void ").replace("(anonymous namespace)", "")
    known = re.match(r"(sm\d+_xmma_\w+?_implicit_gemm|sm\d+_xmma_gemm|triton_[a-z]+_fused_\w+|nvjet_\w+?_)", name)
    if known:
        return known.group(1).rstrip("_")
    base = re.split(r"[<(]", name, maxsplit=1)[0].strip()
    if base.endswith("Kernel2") and "cutlass" in name:
        inner = re.search(r"<(\w+)", name)
        return inner.group(1) if inner else "cutlass"
    return base.split("::")[-1] or name[:40]


def gpu_name(session: Session) -> str:
    """The GPU without its vendor; CPU if there was none."""
    name = str(session.meta.get("environment", {}).get("gpu") or "CPU")
    return name.removeprefix("NVIDIA ")


def labels(sessions: Sequence[Session]) -> list[str]:
    """A short unique label per session: its name without the words that all share, and its GPU; numbered if ambiguous."""
    words = [s.name.split(" ") for s in sessions]
    while len(words) > 1 and min(map(len, words)) > 1 and len({w[0] for w in words}) == 1:
        words = [w[1:] for w in words]
    names: list[str] = []
    for parts, session in zip(words, sessions, strict=True):
        name, gpu, n = " ".join(parts), gpu_name(session), 2
        label = f"{name} ({gpu})"
        while label in names:
            label, n = f"{name} ({gpu}, {n})", n + 1
        names.append(label)
    return names


def labels_on_gpu(sessions: Sequence[Session]) -> list[str]:
    """The labels, without the GPU if all sessions have the same: for columns and figures whose heading states it."""
    gpus = {gpu_name(s) for s in sessions}
    if len(gpus) > 1:
        return labels(sessions)
    return [n.removesuffix(f" ({next(iter(gpus))})") for n in labels(sessions)]


def module_names(rows: pd.DataFrame, own: str = "") -> list[str]:
    """The module of each launch; `own` for launches outside any module."""
    return [str(m) or own for m in rows["module"].fillna(MODULE_UNKNOWN)]
