"""The seed's study as it is read: figure by figure."""

from __future__ import annotations

from voxtune.analysis.table import Table

TITLES = {
    4: "IPC stacks",
    5: "priority scores",
    6: "kernel mix",
    7: "instruction mix",
    8: "kernel mix by configuration",
    9: "instruction mix by configuration",
    10: "pipe utilisation and SM throughput",
    11: "cache hit rates and DRAM",
    12: "active warps",
    13: "stalls",
}


def by_figure(table: Table) -> list[Table]:
    """The study's table cut into one for each figure of the seed; the notes stay with the last."""
    if table.refused:
        return [table]
    columns = [c for c in table.columns if c.name != "figure"]
    out = []
    for figure in sorted({r["figure"] for r in table.rows}):
        rows = [{c.name: r[c.name] for c in columns} for r in table.rows if r["figure"] == figure]
        out.append(Table(f"Figure {figure}: {TITLES.get(figure, 'stated in the text')}", columns, rows))
    if out:
        out[-1].notes = list(table.notes)
    return out
