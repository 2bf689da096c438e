"""Sections on coverage, layout ledger, precision audit, roofline and environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from voxtune.analysis.certificate import certificate
from voxtune.analysis.ledger import layout_ledger, precision_audit
from voxtune.analysis.mix import kernel_shares
from voxtune.analysis.roofline import roofline as roofline_table
from voxtune.analysis.table import Column, Table
from voxtune.files import recorded_command, recorded_values
from voxtune.report.charts import bars_from_rows, block, not_recorded, overview, present
from voxtune.report.document import Badge, Block, Section, Text
from voxtune.report.figure import Bars, Point, Roof, Scatter, Series

if TYPE_CHECKING:
    from voxtune.profile.session import Session

PARTS = ("layout_ms", "padding_ms", "cast_ms", "copy_ms")


def badge(name: str, session: Session) -> Badge:
    """The certificate of coverage in the headline."""
    extra = certificate(session).extra
    if extra["covers"]:
        reasons = [
            f"counters on at least {extra['threshold_pct']:g} % of step time, all phases recorded, set-up excluded"
        ]
        return Badge(label=f"{name}: whole step covered", good=True, reasons=reasons)
    if extra["covers_time"]:
        why = (session.meta["tiers"].get("few") or {}).get("why")
        reasons = [*extra["reasons"], *([why] if why else [])]
        return Badge(label=f"{name}: whole step timed, counters incomplete", good=False, reasons=reasons)
    return Badge(label=f"{name}: step not covered", good=False, reasons=extra["reasons"])


def coverage(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        return [badge(names[i], session), block("coverage", certificate(session), i)]

    lead = "How much of the step each session recorded. Ratios require sessions that cover their step."
    return overview("coverage", "Certificate of coverage", lead, [], names, sessions, one)


def ledger(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = [layout_ledger(s) for s in sessions]
    series = [
        Series(name=p.removesuffix("_ms"), values=[sum(r[p] or 0.0 for r in t.rows) for t in tables]) for p in PARTS
    ]
    overall = Bars(
        id="ledger-all",
        title="Time in data movement",
        labels=list(names),
        series=series,
        unit="ms",
        stacked=True,
    )

    def one(session: Session, i: int) -> list[Block]:
        figure = bars_from_rows(
            tables[i],
            id=f"ledger-{i}",
            title="Data movement by module",
            caption="The sixteen largest.",
            key="module",
            values=PARTS,
            unit="ms",
            stacked=True,
        )
        for part in figure.series if figure else []:
            part.name = part.name.removesuffix(" ms")
        return [*present(_recoloured(figure)), block("ledger", tables[i], i)]

    lead = "Layout conversions, padding, casts and copies by kernels, charged to the module that caused them."
    return overview("ledger", "Layout ledger", lead, [overall], names, sessions, one)


def _recoloured(figure: Bars | None) -> Bars | None:
    """Assigns colours again after series were renamed."""
    if figure is None:
        return None
    return Bars(**{**vars(figure), "series": [Series(name=s.name, values=s.values) for s in figure.series]})


def precision(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    tables = [precision_audit(s) for s in sessions]
    shares = [t.extra["tensor_time_pct"] for t in tables]
    series = [Series(name="on tensor cores", values=shares, colour="#6f4aa0")]
    title = "Share of convolution and matmul time on tensor cores"
    figure = Bars(id="precision-all", title=title, labels=list(names), series=series, unit="%", digits=1)

    def one(session: Session, i: int) -> list[Block]:
        absent = [not_recorded(session, "few", "Tensor-core counters")] if shares[i] is None else []
        return [*absent, block("precision", tables[i], i)]

    lead = "Convolutions and matmuls on tensor cores, determined by hardware counters and not by kernel names."
    known = [figure] if any(s is not None for s in shares) else []
    return overview("precision", "Precision audit", lead, known, names, sessions, one)


def roofline(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        table = roofline_table(session)
        if table.refused:
            return [not_recorded(session, "full", "FLOP counters")]
        figure = _roofline_figure(table, kernel_shares(session, top=10**6), i)
        tables = [block("roofline", table, i), block("roofline", roofline_table(session, "module"), i, part="modules")]
        return [*present(figure), *tables]

    lead = "Measured FLOP/s against arithmetic intensity (FLOPs per DRAM byte). The area of a point is its share of kernel time."
    return overview("roofline", "Roofline", lead, [], names, sessions, one)


def _roofline_figure(table: Table, shares: Table, i: int) -> Scatter | None:
    classes = {r["kernel"]: r["class"].split(", ")[0] for r in shares.rows}
    part = {r["kernel"]: r["share"] for r in shares.rows}
    points = [
        Point(
            name=r["kernel"],
            x=r["intensity"],
            y=r["tflops"],
            size=part.get(r["kernel"]) or 0.0,
            group=classes.get(r["kernel"], "unknown"),
            detail="" if r["of_roof"] is None else f"{r['of_roof']:.1f} % of the {r['bound']} roof",
        )
        for r in table.rows
        if r["intensity"] and r["tflops"]  # both axes are logarithmic
    ]
    if not points:
        return None
    return Scatter(
        id=f"roofline-{i}",
        title="Roofline by kernel",
        x_title="FLOP/byte",
        y_title="TFLOP/s",
        points=points,
        roofs=_roofs(table.extra.get("ceilings")),
        size_title="share of kernel time, %",
    )


def _roofs(ceilings: dict[str, Any] | None) -> list[Roof]:
    if not ceilings:
        return []
    flat = [
        Roof(name=f"{name} {ceilings[key]:g} TFLOP/s", flat=ceilings[key])
        for key, name in (("fp32", "FP32"), ("tf32", "TF32"), ("half", "BF16"))
        if ceilings.get(key)
    ]
    return [*flat, Roof(name="DRAM", per_x=ceilings["bandwidth_gbs"] / 1e3)]


def environment(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    """The metadata of all sessions."""
    facts = [_flat(_recorded({k: v for k, v in s.meta.items() if k not in ("format", "version")})) for s in sessions]
    keys = list(dict.fromkeys(k for f in facts for k in f))
    columns = [Column("what", kind="text"), *(Column(n, kind="text") for n in names)]
    common = [k for k in keys if len(sessions) > 1 and len({f.get(k) for f in facts}) == 1]
    shared = [{"what": k, "all sessions": facts[0][k]} for k in common if facts[0][k] is not None]
    rows: list[dict[str, Any]] = [
        {"what": k, **{n: f.get(k) for n, f in zip(names, facts, strict=True)}} for k in keys if k not in common
    ]
    common_table = Table(
        "Common to all sessions", [Column("what", kind="text"), Column("all sessions", kind="text")], shared
    )
    tables = [block("environment", common_table, part="shared")] if shared else []
    title = "Differences between sessions" if len(sessions) > 1 else "Session"
    return Section(
        id="environment",
        title="Environment",
        lead="Hardware, software and settings of the sessions.",
        blocks=[
            *tables,
            block("environment", Table(title, columns, rows)),
            *_differences(keys, facts),
        ],
    )


def _recorded(meta: dict[str, Any]) -> dict[str, Any]:
    """The metadata without paths, which sessions of version 0.1 have."""
    command = meta.get("command")
    if isinstance(command, str):
        with suppress(ValueError):  # an open quotation
            meta = {**meta, "command": recorded_command(shlex.split(command))}
    return dict(recorded_values(meta))


def _flat(meta: dict[str, Any], prefix: str = "") -> dict[str, str | None]:
    out: dict[str, str | None] = {}
    for key, value in meta.items():
        if isinstance(value, dict):
            out |= _flat(value, f"{prefix}{key}.")
        elif value is None or isinstance(value, str):
            out[f"{prefix}{key}"] = value
        else:
            out[f"{prefix}{key}"] = json.dumps(value, default=str)
    return out


def _differences(keys: list[str], facts: list[dict[str, str | None]]) -> list[Block]:
    """A warning if sessions of different machines or versions are compared."""
    different = [k for k in keys if k.startswith("environment.") and len({f.get(k) for f in facts}) > 1]
    if not different:
        return []
    names = ", ".join(k.removeprefix("environment.") for k in different)
    return [
        Text(
            text=f"The sessions were recorded in different environments ({names}); comparisons include that difference.",
            tone="bad",
        )
    ]
