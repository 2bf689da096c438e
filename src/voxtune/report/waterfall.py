"""A benchmark results file as a waterfall: the time of one denoising step, one optimisation after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.files import write_output
from voxtune.reading import read_json, reading
from voxtune.report.figure import Waterfall, WaterfallRow
from voxtune.report.numbers import cudnn_version
from voxtune.report.svg import render_svg

BASELINE = "baseline_fp32"
# Each row adds to the one above it: name in the results file, label, note.
CHAIN = (
    (BASELINE, "FP32", "PyTorch eager, TF32 off"),
    ("tf32", "+ TF32", "convolutions on tensor cores"),
    ("tf32_channels_last", "+ channels-last", "memory format only"),
    ("tf32_channels_last_voxtune_norms", "+ fused norms", "GroupNorm + SiLU fused, graph cleanup"),
    ("voxtune_cudnn", "+ BF16, all fusions, CUDA graph", "convolutions by cuDNN"),
    ("voxtune", "+ Voxtune convolutions", "the full plan"),
)
COMPARED = {
    "bf16_autocast": ("BF16 autocast", "PyTorch eager"),
    "torch_compile_bf16": ("torch.compile", "BF16, channels-last, cuDNN autotuned"),
}


def write_waterfall(results: Path, target: Path, *, overwrite: bool = False) -> None:
    data = read_results(results)
    # Besides names and times, any value of the file is used as text.
    with reading(results, "results file"):
        picture = render_svg(waterfall(data))
    write_output(target, picture, overwrite=overwrite)


def read_results(path: Path) -> dict[str, Any]:
    """A file of benchmarks/results: machine, versions, commit, and rows with name and p50_ms."""
    results = read_json(path)
    rows = results.get("rows") if isinstance(results, dict) else None
    if not isinstance(rows, list) or not all(isinstance(r, dict) and _time(r) for r in rows):
        raise InputError(f"{path}: no benchmark results; expected a list of rows, each with a name and p50_ms > 0")
    return results


def _time(row: dict[str, Any]) -> bool:
    ms = row.get("p50_ms")
    return isinstance(row.get("name"), str) and isinstance(ms, int | float) and 0 < ms < float("inf")


def waterfall(results: dict[str, Any]) -> Waterfall:
    """The rows of `CHAIN` that were measured, then PyTorch's own optimisations of the same network for comparison."""
    rows = {row["name"]: row for row in results["rows"]}
    if BASELINE not in rows:
        raise InputError(f"the results have no row {BASELINE!r}, to which a waterfall is relative")
    base = rows[BASELINE]
    chain, previous = [], None
    for name, label, note in CHAIN:
        if name in rows:
            chain.append(_row(rows[name], label, note, base, previous))
            previous = rows[name]["p50_ms"]
    compared = [
        _row(rows[n], *_compared_label(n), base) for n in rows if n in COMPARED or n.startswith("torch_compile_")
    ]
    return Waterfall(
        id="waterfall",
        title="One denoising step, one optimisation after the other",
        caption=_caption(results, base),
        rows=chain,
        compared=compared,
    )


def _compared_label(name: str) -> tuple[str, str]:
    known = COMPARED.get(name)
    return known or ("torch.compile", name.removeprefix("torch_compile_").replace("_", " "))


def _row(
    row: dict[str, Any], label: str, note: str, base: dict[str, Any], previous: float | None = None
) -> WaterfallRow:
    ms, error = row["p50_ms"], row.get("error")
    spread = f", p20 to p80 {row['p20_ms']:g} to {row['p80_ms']:g} ms" if {"p20_ms", "p80_ms"} <= row.keys() else ""
    return WaterfallRow(
        label=label,
        note=note,
        ms=ms,
        previous_ms=previous,
        factor=base["p50_ms"] / ms,
        error="" if error is None else f"{error:.1e}".replace("e-0", "e-"),
        tip=f"{label}: {ms:g} ms{spread}",
    )


def _caption(results: dict[str, Any], base: dict[str, Any]) -> str:
    size = " × ".join(str(v) for v in base.get("shape", []))
    weights = base.get("weights")
    measured = [
        results.get("gpu"),
        f"network {base['network']}" if base.get("network") else None,
        f"{size} voxels, batch 1" if size else None,
        f"{weights} weights" if weights else None,
        f"commit {results['commit']}" if results.get("commit") else None,
        *_versions(results.get("versions") or {}),
    ]
    against = base.get("error_against")
    lines = [", ".join(str(m) for m in measured if m) + "."]
    lines.append(
        "Time: median (p50) of one run."
        + (f" Error: relative L2 norm of the output's difference from {against}." if against else "")
    )
    return "\n".join(lines)


def _versions(versions: dict[str, Any]) -> list[str]:
    names = {"torch": "PyTorch", "cudnn": "cuDNN"}
    text = {key: cudnn_version(v) if key == "cudnn" else v for key, v in versions.items() if v}
    return [f"{name} {text[key]}" for key, name in names.items() if key in text]
