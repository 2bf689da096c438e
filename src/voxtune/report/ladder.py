"""The ladder's stored tables as a document: one bar a rung, and every table with the reports' own figures beside ours.

The reports' hardware stands beside their figures: theirs are a desktop card and a small board, and are not compared with ours.
"""

from __future__ import annotations

import itertools
from typing import Any

from voxtune.analysis.table import Column, Table
from voxtune.report.document import Document, Fact, Section, TableBlock, Text
from voxtune.report.figure import Bars, Series

Data = dict[str, Any]


def ladder_document(data: Data) -> Document:
    rows = data["rows"]
    first, best = rows[0], min(rows, key=lambda r: r["total_ms"])
    height, width = data["size"]
    facts = [
        Fact(label="fastest", value=f"{best['total_ms']:.2f} ms", note=f"rung {best['number']}, {best['name']}"),
        Fact(label="over rung " + str(first["number"]), value=f"{first['total_ms'] / best['total_ms']:.1f} x"),
        Fact(label="largest error", value=f"{max(r['error'] for r in rows):.1e}", note="relative, against float64"),
    ]
    sections = [_climb(data), _components(data), _transfers(data), _end_to_end(data), _kernels(data)]
    if data.get("first_step"):
        sections.insert(4, _first_step(data))
    subtitle = f"{data['steps']} steps at {height} x {width}, batch {data['batch']}, on {data['device']}"
    return Document(title="The ladder", subtitle=subtitle, facts=facts, badges=[], sections=sections)


def ladder_picture(data: Data) -> Bars:
    rows = data["rows"]
    bought = ["", *(f", {before['total_ms'] / r['total_ms']:.3g} x" for before, r in itertools.pairwise(rows))]
    return Bars(
        id="ladder",
        title=f"{data['steps']} sampling steps at {data['size'][0]} x {data['size'][1]}, ms",
        caption="One bar a rung, by decades, and what it bought over the one before.",
        labels=[f"{r['number']} {r['name']}{gain}" for r, gain in zip(rows, bought, strict=True)],
        series=[Series(name="all steps", values=[r["total_ms"] for r in rows])],
        unit="ms",
        log=True,
    )


def _climb(data: Data) -> Section:
    rows, before = [], None
    for r in data["rows"]:
        rows.append(
            {
                "rung": r["number"],
                "name": r["name"],
                "total": r["total_ms"],
                "alone": r.get("alone_ms"),
                "bought": None if before is None else before / r["total_ms"],
                "over_first": data["rows"][0]["total_ms"] / r["total_ms"],
                "launches": r["launches"],
                "transfers": r["transfers"],
                "error": f"{r['error']:.1e}",
                "does": r["does"],
            }
        )
        before = r["total_ms"]
    columns = [
        Column("rung", kind="int", digits=0),
        Column("name", kind="text"),
        Column("total", unit="ms", better="low", doc="all steps, of an image among others that follow each other"),
        Column("alone", unit="ms", better="low", doc="the same of one image by itself, from the call to the host"),
        Column("bought", unit="x", better="high", doc="over the rung before"),
        Column("over_first", unit="x", better="high"),
        Column("launches", kind="int", doc="a step"),
        Column("transfers", kind="int", doc="a step, both ways; rungs 10 and 11 move the image once, at the end"),
        Column("error", kind="text", doc="relative, against float64"),
        Column("does", kind="text"),
    ]
    notes = [f"{where}: {gain:.1f} x, end to end" for where, gain in data["seeds"]["speedups"].items()]
    table = Table("What each rung bought", columns, rows, notes=["The reports' own climbs:", *notes])
    return Section(
        id="climb", title="The climb", blocks=[ladder_picture(data), TableBlock(id="climb-table-0", table=table)]
    )


def _components(data: Data) -> Section:
    names = list(dict.fromkeys(part for r in data["rows"] for part in r["components"]))
    columns = [Column("operation", kind="text")]
    rows: list[dict[str, Any]] = [{"operation": name} for name in names]
    for r in data["rows"]:
        label = f"rung {r['number']}"
        columns += [Column(label, unit="ms", better="low", digits=3), Column(f"calls {r['number']}", kind="int")]
        for row in rows:
            found = r["components"].get(row["operation"])
            row[label] = found and found["seconds"] * 1e3
            row[f"calls {r['number']}"] = found and found["calls"]
    ours = Table("Operations of one step, before and after each rung", columns, rows)
    seeds = data["seeds"]["components"]
    theirs = Table(
        f"The report's, seconds for 100 steps, on {seeds['hardware']}",
        [Column("operation", kind="text"), *(Column(c, unit="s", better="low", digits=5) for c in seeds["columns"])],
        [
            {"operation": name, **dict(zip(seeds["columns"], values, strict=True))}
            for name, values in seeds["rows"].items()
        ],
    )
    blocks = [TableBlock(id="components-table-0", table=ours), TableBlock(id="components-table-1", table=theirs)]
    return Section(id="components", title="Components", blocks=list(blocks))


def _transfers(data: Data) -> Section:
    rows = [
        {
            "rung": str(r["number"]),
            "up": r["crossing"]["up_s"] * 1e3,
            "kernel": r["crossing"]["kernel_s"] * 1e3,
            "down": r["crossing"]["down_s"] * 1e3,
            "share": r["crossing"]["share"] * 100,
        }
        for r in data["rows"]
    ]
    seeds = data["seeds"]["transfers"]
    moved = seeds["up_ms"] + seeds["down_ms"]
    share = moved / (moved + seeds["kernel_ms"]) * 100
    theirs = {"up": seeds["up_ms"], "kernel": seeds["kernel_ms"], "down": seeds["down_ms"], "share": share}
    rows.append({"rung": f"report, one convolution on {seeds['hardware']}", **theirs})
    columns = [
        Column("rung", kind="text"),
        *(Column(n, unit="ms", better="low", digits=3) for n in ("up", "kernel", "down")),
        Column("share", unit="%", kind="percent", better="low", doc="of the transfers"),
    ]
    table = Table("To the GPU, kernels, to the host: one step", columns, rows)
    return Section(id="transfers", title="Transfers", blocks=[TableBlock(id="transfers-table-0", table=table)])


def _end_to_end(data: Data) -> Section:
    keys = ("convolution", "other", "transfers", "total")
    rows = [
        {"program": f"rung {r['number']}", **{k: _times(r["end_to_end"][f"{k}_s"], data["steps"]) for k in keys}}
        for r in data["rows"]
    ]
    seeds = data["seeds"]["end_to_end"]
    rows += [
        {"program": f"report: {name} ({seeds['hardware']})", **dict(zip(keys, values, strict=True))}
        for name, values in seeds["rows"].items()
    ]
    columns = [Column("program", kind="text"), *(Column(k, unit="s", better="low", digits=4) for k in keys)]
    notes = [
        "Ours: the times of one step, times the steps; gaps between launches are in the climb's totals only. Kernels are "
        "timed by the device; a transfer that the host waits for as the host sees it, but by the device in rungs 10 and 11."
    ]
    table = Table("Convolution, other, transfers: all steps", columns, rows, notes=notes)
    return Section(id="end-to-end", title="End to end", blocks=[TableBlock(id="end-to-end-table-0", table=table)])


def _first_step(data: Data) -> Section:
    found = data["first_step"]
    rows = [
        {"form": form, "best": t["best_ms"], "worst": t["worst_ms"], "average": t["average_ms"]}
        for form, t in found["forms"].items()
    ]
    seeds = data["seeds"]["first_step"]
    rows += [
        {"form": f"report: {form} ({seeds['hardware']})", "best": t[0], "worst": t[1], "average": t[2]}
        for form, t in seeds["rows"].items()
    ]
    columns = [
        Column("form", kind="text"),
        *(Column(n, unit="ms", better="low", digits=3) for n in ("best", "worst", "average")),
    ]
    table = Table(f"From the first weight to the end of the first step, of {found['runs']} runs", columns, rows)
    told = Text(text=f"{found['bytes'] / 1e6:.1f} MB of weights. Managed memory: {found['managed']}.")
    return Section(
        id="first-step", title="The first step", blocks=[told, TableBlock(id="first-step-table-0", table=table)]
    )


def _kernels(data: Data) -> Section:
    rows = [
        {"rung": r["number"], "kernel": name, "time": k["seconds"] * 1e6, "calls": k["calls"], "share": _share(r, k)}
        for r in data["rows"]
        for name, k in r["kernels"].items()
    ]
    columns = [
        Column("rung", kind="int"),
        Column("kernel", kind="text"),
        Column("time", unit="us", better="low"),
        Column("calls", kind="int"),
        Column("share", unit="%", kind="percent"),
    ]
    table = Table("Each rung's kernels in one step", columns, rows)
    return Section(id="kernels", title="Kernels", blocks=[TableBlock(id="kernels-table-0", table=table, folded=True)])


def _times(seconds: float | None, steps: int) -> float | None:
    return None if seconds is None else seconds * steps


def _share(row: Data, kernel: Data) -> float | None:
    total = sum(k["seconds"] for k in row["kernels"].values())
    return kernel["seconds"] / total * 100 if total else None
