"""The ladder's tables as a document: one bar per rung, and the published values of the two reports next to ours.

The reports used a desktop GPU and a small board; their hardware is named, and no ratio is computed between machines.
"""

from __future__ import annotations

import itertools
from typing import Any

from voxtune.analysis.table import Column, Table
from voxtune.report.document import Block, Document, Fact, Section, TableBlock, Text
from voxtune.report.figure import Bars, Series
from voxtune.report.palette import CLASSES

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
    sections = [_climb(data), _components(data), _transfers(data), _end_to_end(data), _block(data), _kernels(data)]
    if data.get("first_step"):
        sections.insert(4, _first_step(data))
    subtitle = f"{data['steps']} steps at {height} x {width}, batch {data['batch']}, on {data['device']}"
    if data.get("commit"):
        subtitle += f", measured at commit {data['commit']}"
    return Document(title="The ladder", subtitle=subtitle, facts=facts, badges=[], sections=sections)


def ladder_picture(data: Data) -> Bars:
    rows = data["rows"]
    gains = ["", *(f", {before['total_ms'] / r['total_ms']:.3g} x" for before, r in itertools.pairwise(rows))]
    return Bars(
        id="ladder",
        title=f"{data['steps']} sampling steps at {data['size'][0]} x {data['size'][1]}, ms",
        caption="One bar per rung, logarithmic, with the speed-up over the previous rung.",
        labels=[f"{r['number']} {r['name']}{gain}" for r, gain in zip(rows, gains, strict=True)],
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
                "speed_up": None if before is None else before / r["total_ms"],
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
        Column("total", unit="ms", better="low", doc="all steps, per image, images back to back"),
        Column("alone", unit="ms", better="low", doc="all steps of a single image, from the call to host memory"),
        Column("speed_up", unit="x", better="high", doc="over the previous rung"),
        Column("over_first", unit="x", better="high"),
        Column("launches", kind="int", doc="per step"),
        Column(
            "transfers",
            kind="int",
            doc="per step, both directions; rungs 10 and 11 transfer the image once, at the end",
        ),
        Column("error", kind="text", doc="relative, against float64"),
        Column("does", kind="text"),
    ]
    notes = [f"{where}: {gain:.1f} x, end to end" for where, gain in data["seeds"]["speedups"].items()]
    table = Table("Speed-up of each rung", columns, rows, notes=["Speed-ups in the reports:", *notes])
    return Section(
        id="climb", title="Rungs", blocks=[ladder_picture(data), TableBlock(id="climb-table-0", table=table)]
    )


def _components(data: Data) -> Section:
    names = list(dict.fromkeys(part for r in data["rows"] for part in r["components"]))
    columns = [Column("operation", kind="text")]
    rows: list[dict[str, Any]] = [{"operation": name} for name in names]
    for r in data["rows"]:
        label = f"rung {r['number']}"
        columns += [
            Column(label, unit="ms", better="low", digits=3),
            Column(f"calls {r['number']}", kind="int", detail=True),
        ]
        for row in rows:
            entry = r["components"].get(row["operation"])
            row[label] = entry and entry["seconds"] * 1e3
            row[f"calls {r['number']}"] = entry and entry["calls"]
    ours = Table("Operations of one step, before and after each rung", columns, rows)
    published = data["seeds"]["components"]
    theirs = Table(
        f"Published: seconds for 100 steps on {published['hardware']}",
        [
            Column("operation", kind="text"),
            *(Column(c, unit="s", better="low", digits=5) for c in published["columns"]),
        ],
        [
            {"operation": name, **dict(zip(published["columns"], values, strict=True))}
            for name, values in published["rows"].items()
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
    published = data["seeds"]["transfers"]
    moved = published["up_ms"] + published["down_ms"]
    share = moved / (moved + published["kernel_ms"]) * 100
    theirs = {"up": published["up_ms"], "kernel": published["kernel_ms"], "down": published["down_ms"], "share": share}
    rows.append({"rung": f"report, one convolution on {published['hardware']}", **theirs})
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
    published = data["seeds"]["end_to_end"]
    rows += [
        {"program": f"report: {name} ({published['hardware']})", **dict(zip(keys, values, strict=True))}
        for name, values in published["rows"].items()
    ]
    columns = [Column("program", kind="text"), *(Column(k, unit="s", better="low", digits=4) for k in keys)]
    notes = [
        "Ours: the times of one step, multiplied by the number of steps; only the totals of the rungs include gaps between "
        "launches. Kernels are timed on the device; synchronous transfers on the host, in rungs 10 and 11 on the device."
    ]
    table = Table("Convolution, other, transfers: all steps", columns, rows, notes=notes)
    ours = [r for r in rows if str(r["program"]).startswith("rung ")]
    theirs = [r | {"program": str(r["program"]).partition(" (")[0]} for r in rows if r not in ours]
    figures = [
        _stacked("end-to-end-ours", f"Convolution, other, transfers on {data['device']}: all steps", ours),
        _stacked("end-to-end-report", f"Convolution, other, transfers in the report, {published['hardware']}", theirs),
    ]
    return Section(
        id="end-to-end", title="End to end", blocks=[*figures, TableBlock(id="end-to-end-table-0", table=table)]
    )


def _stacked(id: str, title: str, rows: list[dict[str, Any]]) -> Bars:
    """Bars of seconds, split as in figure 6 of the board's report."""
    colours = {"convolution": CLASSES["conv_fprop"], "other": CLASSES["elementwise"], "transfers": CLASSES["layout"]}
    series = [Series(name=n, values=[r[n] for r in rows], colour=c) for n, c in colours.items()]
    labels = [str(r["program"]).removeprefix("report: ") for r in rows]
    split = [i for i, r in enumerate(rows) if r["convolution"] is not None]
    whole = ", ".join(labels[i] for i in range(len(rows)) if i not in split)
    caption = f"Not shown, since only their total is measured: {whole}." if whole else ""
    figure = Bars(id=id, title=title, labels=labels, series=series, unit="s", digits=3, stacked=True)
    return figure.rows(split, caption=caption)


def _block(data: Data) -> Section:
    """One block on GPU and CPU: the desktop report's table V."""
    published, ours = data["seeds"]["block"], data.get("block")
    rows = [
        {
            "machine": f"report: {published['hardware']}",
            "gpu": published["gpu_s"] * 1e3,
            "cpu": published["cpu_s"] * 1e3,
        }
    ]
    if ours:
        rows.append({"machine": str(data["device"]), "gpu": ours["gpu_s"] * 1e3, "cpu": ours["cpu_s"] * 1e3})
    for row in rows:
        row["speed_up"] = row["cpu"] / row["gpu"]
    columns = [
        Column("machine", kind="text"),
        Column("gpu", unit="ms", better="low", digits=4, title="on the GPU"),
        Column("cpu", unit="ms", better="low", digits=2, title="on the CPU"),
        Column("speed_up", unit="x", digits=0),
    ]
    notes = [] if ours else ["Not measured in this run."]
    table = Table("One block on the GPU and on the CPU", columns, rows, notes=notes)
    blocks: list[Block] = [*_cpu_program(data), TableBlock(id="block-table-0", table=table)]
    return Section(id="block", title="GPU and CPU", blocks=blocks)


def _cpu_program(data: Data) -> list[TableBlock]:
    """Rung 0 beside the fastest rung."""
    program = data.get("cpu_program")
    if not program:
        return []
    best = min(data["rows"], key=lambda r: r["total_ms"])
    names = (f"0 CPU program, {program['threads']} threads", f"{best['number']} {best['name']}")
    rows = [
        {
            "rung": n,
            "total": r["total_ms"],
            "over_cpu": program["total_ms"] / r["total_ms"],
            "error": f"{r['error']:.1e}",
        }
        for n, r in zip(names, (program, best), strict=True)
    ]
    columns = [
        Column("rung", kind="text"),
        Column("total", unit="ms", better="low", doc="all steps, per image, with update and noise"),
        Column("over_cpu", unit="x", better="high", digits=1, title="over the CPU program"),
        Column("error", kind="text", doc="relative, against float64"),
    ]
    return [TableBlock(id="block-table-1", table=Table("Rung 0: the CPU program of this machine", columns, rows))]


def _first_step(data: Data) -> Section:
    first_step = data["first_step"]
    rows = [
        {"form": form, "best": t["best_ms"], "worst": t["worst_ms"], "average": t["average_ms"]}
        for form, t in first_step["forms"].items()
    ]
    published = data["seeds"]["first_step"]
    rows += [
        {"form": f"report: {form} ({published['hardware']})", "best": t[0], "worst": t[1], "average": t[2]}
        for form, t in published["rows"].items()
    ]
    columns = [
        Column("form", kind="text"),
        *(Column(n, unit="ms", better="low", digits=3) for n in ("best", "worst", "average")),
    ]
    table = Table(f"From the first weight to the end of the first step, of {first_step['runs']} runs", columns, rows)
    summary = Text(text=f"{first_step['bytes'] / 1e6:.1f} MB of weights.")
    return Section(
        id="first-step", title="The first step", blocks=[summary, TableBlock(id="first-step-table-0", table=table)]
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
    return Section(
        id="kernels",
        title="Kernels",
        blocks=[_distribution(data), TableBlock(id="kernels-table-0", table=table, folded=True)],
    )


def _distribution(data: Data, top: int = 10) -> Bars:
    """The share of each kernel in a rung's kernel time, as in figure 7 of the board's report; the largest have a colour."""
    measured = [r for r in data["rows"] if r["kernels"]]
    shares = [{name: _share(r, k) or 0.0 for name, k in r["kernels"].items()} for r in measured]
    names = sorted({n for s in shares for n in s}, key=lambda n: -max(s.get(n, 0.0) for s in shares))
    shown = names[:top]
    series = [Series(name=n.removeprefix("voxtune_"), values=[s.get(n, 0.0) for s in shares]) for n in shown]
    if len(names) > top:
        rest = [max(0.0, 100 - sum(s.get(n, 0.0) for n in shown)) for s in shares]
        series.append(Series(name="other", values=[*rest]))
    labels = [f"{r['number']} {r['name']}" for r in measured]
    title = "Distribution of kernel time in one step"
    return Bars(id="kernels-share", title=title, labels=labels, series=series, unit="%", digits=1, stacked=True)


def _times(seconds: float | None, steps: int) -> float | None:
    return None if seconds is None else seconds * steps


def _share(row: Data, kernel: Data) -> float | None:
    total = sum(k["seconds"] for k in row["kernels"].values())
    return kernel["seconds"] / total * 100 if total else None
