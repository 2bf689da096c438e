"""Generates the tables of docs/development/hostile.md from the record of the campaign: python -m tests.hostile.page"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "development" / "hostile.md"
RECORD = ROOT / "benchmarks" / "results" / "hostile-tests.json"
FILE_TESTS, FAULT_TESTS = "test_damaged_files.py", "test_faults.py"
COUNTS = ("cases", "read", "refused", "tracebacks", "messages", "hangs", "over_memory", "crashes", "files", "replaced")
# What every row of a record has besides counts.
COMMON = {"name", "outcome", "seconds", "reason"}
NOTHING = "not recorded yet"


def record() -> dict[str, Any]:
    return dict(json.loads(RECORD.read_text())) if RECORD.exists() else {"rows": []}


def rows(test_file: str) -> list[dict[str, Any]]:
    return [row for row in record()["rows"] if f"/{test_file}::" in row["name"]]


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def damage_table() -> str:
    """The counts of each kind of input, summed over its tests, and of all of them."""
    totals: dict[str, dict[str, Any]] = {}
    for row in rows(FILE_TESTS):
        if "cases" in row:
            for name in (row["input"], "**all**"):
                total = totals.setdefault(name, dict.fromkeys((*COUNTS, "max_mib", "max_seconds"), 0))
                total |= {count: total[count] + row[count] for count in COUNTS}
                total |= {most: max(total[most], row[most]) for most in ("max_mib", "max_seconds")}
    everything = totals.pop("**all**", None)
    totals |= {} if everything is None else {"**all**": everything}
    head = ["input", *(name.replace("_", " ") for name in COUNTS), "most MiB", "most seconds"]
    return markdown(
        head,
        [
            [name, *(f"{t[c]:,}" for c in COUNTS), f"{t['max_mib']:,}", f"{t['max_seconds']:g}"]
            for name, t in totals.items()
        ],
    )


def faults_table() -> str:
    """The tests of faults, each with the counts that it recorded."""
    lines = []
    for row in rows(FAULT_TESTS):
        counts = [f"{name.replace('_', ' ')} {value}" for name, value in row.items() if name not in COMMON]
        lines.append(
            [row["name"].partition("::")[2].replace("_", " ").replace("|", "\\|"), row["outcome"], ", ".join(counts)]
        )
    return markdown(["test", "outcome", "counts"], lines)


def provenance(test_file: str) -> str:
    """Where and on which commit the tests of a file ran."""
    if not rows(test_file):
        return NOTHING
    data = record()
    minutes = sum(row["seconds"] for row in rows(test_file)) / 60
    versions = f"Python {data['versions']['python']}, torch {data['versions']['torch']}"
    return f"Commit {data['commit']}, {data['cpu']}, {versions}; {minutes:.0f} minutes of one core."


TABLES: dict[str, Callable[[], str]] = {"damage": damage_table, "faults": faults_table}
RECORDS = {"damage": FILE_TESTS, "faults": FAULT_TESTS}


def block(name: str) -> re.Pattern[str]:
    """The lines of the table after its marker."""
    return re.compile(rf"(?<=<!-- table: {name} -->\n)(?:\|.*\n)*")


def line(name: str) -> re.Pattern[str]:
    """The line after the marker of a record."""
    return re.compile(rf"(?<=<!-- record: {name} -->\n).*")


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text()
    for name, make in TABLES.items():
        table, origin = f"{make()}\n", provenance(RECORDS[name])
        text = block(name).sub(lambda _, table=table: table, text)
        text = line(name).sub(lambda _, origin=origin: origin, text)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
