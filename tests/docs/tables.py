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
TRAIN = ROOT / "benchmarks" / "results" / "h200" / "unet3d_train.json"
TRAINING = ROOT / "docs" / "results" / "training.md"
OWN_NETWORK = ROOT / "docs" / "guide" / "own-network.md"
WHAT_RUNS_WHERE = ROOT / "docs" / "reference" / "what-runs-where.md"
TRAIN_WAYS = ("baseline_fp32", "tf32", "autocast_bf16", "torch_compile_bf16", "voxtune")
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


def _train_record() -> dict[str, Any]:
    return dict(json.loads(TRAIN.read_text())) if TRAIN.exists() else {"rows": []}


def train_origin() -> str:
    """Where and on which commits the training steps were measured."""
    data = _train_record()
    if not data["rows"]:
        return "Not recorded yet."
    commits = dict.fromkeys(r.get("commit", data["commit"]) for r in data["rows"])
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items() if version)
    measured = f"commit{'s' if len(commits) > 1 else ''} {', '.join(commits)}, {data['gpu']}, {versions}"
    return f"[unet3d_train.json](../../benchmarks/results/h200/unet3d_train.json), {measured}."


Case = tuple[str, tuple[int, ...], int]
WHOLE_HEAD: Case = ("med-ddpm", (128, 128, 128), 1)


def _train_rows() -> dict[Case, dict[str, dict[str, Any]]]:
    """The rows by network, shape and batch, then by way; each with the commit of its measurement."""
    data = _train_record()
    cases: dict[Case, dict[str, dict[str, Any]]] = {}
    for r in data["rows"]:
        network, _, way = r["name"].rpartition(":")
        case = (network or "med-ddpm", tuple(r["shape"]), r["batch"])
        cases.setdefault(case, {})[way] = {"commit": data["commit"], **r}
    return cases


def train_table() -> str:
    rows = _train_rows().get(WHOLE_HEAD, {})
    lines = [[f"`{way}`", *_train_figures(rows[way])] for way in TRAIN_WAYS if way in rows]
    return markdown(["way", "ms", "peak GiB", "held GiB", "gradient error"], lines) if lines else ""


def _train_figures(row: dict[str, Any]) -> list[str]:
    if "failed" in row:
        return [row["failed"], "", "", ""]
    # The first record has no held memory.
    memory = [f"{row[name]:.1f}" if name in row else "" for name in ("peak_gib", "held_gib")]
    return [f"{row['p50_ms']:.1f}", *memory, f"{row['error']:.1e} ({row['error_against']})"]


def train_others_table() -> str:
    """A line for each network, size and batch beside the first table's."""
    lines = []
    for case, rows in _train_rows().items():
        compiled, own = rows.get("torch_compile_bf16"), rows.get("voxtune")
        if case == WHOLE_HEAD or own is None:
            continue
        network, shape, batch = case
        together = all(r and "failed" not in r for r in (compiled, own)) and compiled["commit"] == own["commit"]
        factor = f"{compiled['p50_ms'] / own['p50_ms']:.2f}" if together else ""
        figures = _train_figures(own)
        size = " x ".join(map(str, shape))
        lines.append([f"`{network}`", size, str(batch), *_compiled(compiled), *figures[:3], factor, figures[3]])
    head = [
        "network",
        "size",
        "batch",
        "torch.compile, ms",
        "peak GiB",
        "Voxtune, ms",
        "peak GiB",
        "held GiB",
        "factor",
    ]
    return markdown([*head, "gradient error"], lines) if lines else ""


def _compiled(row: dict[str, Any] | None) -> list[str]:
    return ["not measured", ""] if row is None else _train_figures(row)[:2]


def train_passes_table() -> str:
    rows = _train_rows().get(WHOLE_HEAD, {})
    whole = rows.get("voxtune")
    lines = []
    for prefix, label in (("voxtune_without_", "without"), ("voxtune_up_to_", "up to")):
        for way, row in rows.items():
            if not way.startswith(prefix) or whole is None or "failed" in (*whole, *row):
                continue
            if row["commit"] == whole["commit"]:
                ms, peak = row["p50_ms"] - whole["p50_ms"], row["peak_gib"] - whole["peak_gib"]
                name = f"{label} `{way.removeprefix(prefix)}`"
                lines.append([name, f"{row['p50_ms']:.1f}", f"{ms:+.1f}", f"{row['peak_gib']:.1f}", f"{peak:+.1f}"])
    return markdown(["plan", "ms", "more than the whole plan", "peak GiB", "more"], lines) if lines else ""


def train_breakdown_table() -> str:
    entry = _train_record().get("breakdown", {}).get("voxtune 128x128x128 batch 1")
    if entry is None:
        return ""
    lines = [[name, f"{part['ms']:.2f}", str(part["launches"])] for name, part in entry["classes"].items()]
    lines.append(["all kernels", f"{entry['kernels_ms']:.2f}", str(entry["launches"])])
    lines.append(["gaps", f"{entry['gaps_ms']:.2f}", ""])
    return markdown(["class", "ms", "launches"], lines)


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    OWN_NETWORK: {"networks": networks_table},
    WHAT_RUNS_WHERE: {"kernels": kernel_table, "passes": pass_table},
    TRAINING: {
        "training": train_table,
        "training-others": train_others_table,
        "training-passes": train_passes_table,
        "training-breakdown": train_breakdown_table,
    },
}
ORIGINS: dict[Path, dict[str, Callable[[], str]]] = {
    OWN_NETWORK: {"networks": networks_origin},
    WHAT_RUNS_WHERE: {},
    TRAINING: {"training": train_origin},
}


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
