"""Generates the tables of the documentation that follow from code and records: python -m tests.docs.tables"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.docs.kernel_table import kernel_table, markdown, pass_table

ROOT = Path(__file__).parents[2]
NETWORKS = ROOT / "benchmarks" / "results" / "h200" / "foreign.json"
OWN_NETWORK = ROOT / "docs" / "guide" / "own-network.md"
WHAT_RUNS_WHERE = ROOT / "docs" / "reference" / "what-runs-where.md"
WAYS = {
    "autocast": "BF16 autocast",
    "compile": "torch.compile",
    "compile_reduce_overhead": "torch.compile, reduce-overhead",
    "compile_max_autotune": "torch.compile, max-autotune",
    "voxtune": "Voxtune, BF16",
    "fp32": "FP32 without TF32",
    "tf32": "TF32",
    "voxtune_same": "Voxtune, same (TF32 in convolutions, PyTorch's default)",
}


def _record() -> dict[str, Any]:
    return dict(json.loads(NETWORKS.read_text())) if NETWORKS.exists() else {"rows": []}


def networks_origin() -> str:
    """Where and on which commit the networks of other libraries were measured."""
    data = _record()
    if not data["rows"]:
        return "Not recorded yet."
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    return f"[foreign.json](../../benchmarks/results/h200/foreign.json), commit {data['commit']}, {data['gpu']}, {versions}."


def networks_table() -> str:
    """A line for each network of the record, a column for each way of running it that was measured."""
    rows = {tuple(r["name"].split(":")): r for r in _record()["rows"]}
    ways = [way for way in WAYS if any(w == way for _, w in rows)]
    networks = list(dict.fromkeys(network for network, _ in rows))
    lines = [[f"`{n}`", *(_cell(rows.get((n, way))) for way in ways)] for n in networks]
    return markdown(["network", *(WAYS[way] for way in ways)], lines) if lines else ""


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    return "failed" if "failed" in row else f"{row['p50_ms']:.3g} ({row['error']:.1e})"


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    OWN_NETWORK: {"networks": networks_table},
    WHAT_RUNS_WHERE: {"kernels": kernel_table, "passes": pass_table},
}
ORIGINS: dict[Path, dict[str, Callable[[], str]]] = {OWN_NETWORK: {"networks": networks_origin}, WHAT_RUNS_WHERE: {}}


def page(path: Path) -> str:
    """The page as it should be."""
    text = path.read_text()
    for name, make in TABLES[path].items():
        marker = f"<!-- table: {name} -->\n"
        assert marker in text, f"{path.name}: no marker for the table {name}"
        text = re.sub(rf"(?<={marker})(?:\|.*\n)*", lambda _, made=make(): f"{made}\n" if made else "", text)
    for name, make in ORIGINS[path].items():
        marker = f"<!-- record: {name} -->\n"
        assert marker in text, f"{path.name}: no marker for the record {name}"
        text = re.sub(rf"(?<={marker}).*", lambda _, made=make(): made, text)
    return text


if __name__ == "__main__":
    for path in TABLES:
        path.write_text(page(path))
