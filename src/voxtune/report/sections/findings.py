"""Sections on coverage, layout ledger, precision audit, roofline and environment."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from voxtune.analysis.certificate import THRESHOLD_PCT, certificate, certify, readings, tier_shares
from voxtune.analysis.frame import gpu_name
from voxtune.analysis.ledger import layout_ledger, precision_audit
from voxtune.analysis.mix import kernel_shares
from voxtune.analysis.roofline import roofline as roofline_table
from voxtune.analysis.table import Column, Table
from voxtune.files import recorded_command, recorded_values
from voxtune.report.charts import bars_from_rows, block, not_recorded, overview, present
from voxtune.report.document import Badge, Block, Section, Text
from voxtune.report.figure import Bars, Point, Roof, Scatter, Series
from voxtune.report.numbers import clip, cudnn_version

if TYPE_CHECKING:
    from voxtune.profile.session import Session

PARTS = ("layout_ms", "padding_ms", "cast_ms", "copy_ms")


# What the tiers of counters contain, in the words of the headline.
TIER_NAMES = {
    "few": "Small counter set (cycles, instructions, IPC, tensor pipe, DRAM bytes)",
    "full": "Full counter set (FLOPs, pipes, caches, warps, stalls)",
    "opcodes": "Opcodes (instruction mix)",
}


def badge(name: str, session: Session) -> Badge:
    """The certificate of coverage of one session: what its timeline and its counters cover."""
    extra = certificate(session).extra
    shares = tier_shares(session)
    if not extra["covers_time"]:
        return Badge(label=f"{name}: step not covered", good=False, reasons=extra["reasons"])
    tiers = session.meta["tiers"]
    missing = [
        f"{TIER_NAMES[tier]}: {share:.1f} % of kernel time{_why(tiers, tier)}"
        for tier, share in shares.items()
        if share < THRESHOLD_PCT
    ]
    if not extra["covers"]:
        return Badge(label=f"{name}: whole step timed, counters incomplete", good=False, reasons=missing)
    label = "all counters" if not missing else "small counter set"
    reasons = [f"at least {THRESHOLD_PCT:g} % of kernel time, all phases recorded, set-up excluded", *missing]
    return Badge(label=f"{name}: whole step covered by timeline and {label}", good=True, reasons=reasons)


def _why(tiers: dict[str, Any], tier: str) -> str:
    why = (tiers.get(tier) or {}).get("why")
    return f" ({why})" if why else ""


def coverage_badges(names: Sequence[str], sessions: Sequence[Session]) -> list[Badge]:
    """What covers whole steps, one badge for the timeline and one per tier of counters."""
    count, timed, reasons = len(sessions), 0, []
    for name, session in zip(names, sessions, strict=True):
        extra = certificate(session).extra
        timed += bool(extra["covers_time"])
        reasons += [] if extra["covers_time"] else [f"{name}: {'; '.join(extra['reasons'])}"]
    badges = [Badge(label=f"Timeline: every launch of the step in {_of(timed, count)}", good=timed == count)]
    badges[0].reasons = reasons or ["every kernel, copy and fill of whole steps, with its time; set-up excluded"]
    shares = [tier_shares(s) for s in sessions]
    for tier, title in TIER_NAMES.items():
        known = [s[tier] for s in shares]
        full = sum(s >= THRESHOLD_PCT for s in known)
        rest = [s for s in known if s < THRESHOLD_PCT]
        others = f"; the others: {min(rest):.0f} to {max(rest):.0f} % of kernel time" if rest else ""
        lines = [f"{n}: {s:.1f} % of kernel time{_why(x.meta['tiers'], tier) if s < THRESHOLD_PCT else ''}"
                 for n, s, x in zip(names, known, sessions, strict=True)]  # fmt: skip
        badges.append(
            Badge(label=f"{title}: whole step in {_of(full, count)}{others}", good=full == count, reasons=lines)
        )
    return badges


def _of(part: int, count: int) -> str:
    return f"{part} of {count} session{'s' if count > 1 else ''}"


def coverage(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    def one(session: Session, i: int) -> list[Block]:
        blocks: list[Block] = [badge(names[i], session), block("coverage", certificate(session), i)]
        if certify(session).full_time_pct:
            blocks.append(block("coverage", readings(session), i, folded=True, part="readings"))
        return blocks

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


# The metadata that matters most, with readable names. The rest is in the folded tables.
MACHINE = {
    "environment.gpu": "GPU",
    "environment.driver": "NVIDIA driver",
    "environment.cpu": "CPU",
    "clocks.sm_mhz": "GPU clock, MHz",
    "clocks.power_limit_w": "GPU power limit, W",
    "environment.torch": "PyTorch",
    "environment.cuda": "CUDA",
    "environment.cudnn": "cuDNN",
    "environment.triton": "Triton",
    "environment.ncu": "Nsight Compute",
    "environment.python": "Python",
    "workload": "network",
    "size": "size",
    "batch": "batch",
    "steps": "recorded steps",
    "commit": "commit",
    "created": "recorded",
    "cache_control": "cache control of the profiler",
    "clock_control": "clock control of the profiler",
}
# Longer values are cut in the tables of all metadata.
LONGEST_VALUE = 120


def environment(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    """Machine and software in one short table, what differs per session in another, and all metadata folded."""
    facts = [_flat(_recorded({k: v for k, v in s.meta.items() if k not in ("format", "version")})) for s in sessions]
    keys = list(dict.fromkeys(k for f in facts for k in f))
    common = [k for k in keys if len({_text(f.get(k)) for f in facts}) == 1]
    machine = [
        {"what": title, "value": _readable(key, [f.get(key) for f in facts])}
        for key, title in MACHINE.items()
        if any(f.get(key) for f in facts)
    ]
    columns = [Column("what", kind="text"), Column("value", kind="text")]
    short = Table("Machine, software and settings", columns, machine)
    rows = [{"what": k, "value": _cut(facts[0][k])} for k in common if facts[0][k] is not None]
    tables = [block("environment", short), *([block("environment", _per_session(names, sessions), part="sessions")])]
    title = "All metadata that the sessions share" if len(sessions) > 1 else "All metadata"
    tables.append(block("environment", Table(title, columns, rows), folded=True, part="shared"))
    if len(sessions) > 1:
        all_columns = [Column("what", kind="text"), *(Column(n, kind="text", title=n) for n in names)]
        different: list[dict[str, Any]] = [
            {"what": k, **{n: _cut(f.get(k)) for n, f in zip(names, facts, strict=True)}}
            for k in keys
            if k not in common
        ]
        table = Table("All metadata that differ between sessions", all_columns, different)
        tables.append(block("environment", table, folded=True, part="differences"))
    return Section(
        id="environment",
        title="Environment",
        lead="Hardware, software and settings of the sessions.",
        blocks=[*tables, *_differences(keys, facts)],
    )


def _readable(key: str, values: list[Any]) -> str:
    known = list(dict.fromkeys(str(_text(v)) for v in values if v is not None))
    if key == "environment.cudnn":
        known = [cudnn_version(v) for v in known]
    elif key == "size":
        known = [v.strip("[]").replace(", ", " × ") for v in known]
    elif key == "created":
        known = sorted({v[:10] for v in known})
    return ", ".join(known)


def _per_session(names: Sequence[str], sessions: Sequence[Session]) -> Table:
    """What was set and proved per session."""
    columns = [
        Column("session", kind="text"),
        Column("gpu", kind="text", title="GPU"),
        Column("tf32_convolutions", kind="text", title="TF32 allowed, convolutions"),
        Column("tf32_products", kind="text", title="TF32 allowed, matmuls"),
        Column("proof", kind="text", title="FP32 proved by counters", doc="no kernel used tensor cores"),
        Column("commit", kind="text"),
        Column("created", kind="text", title="recorded"),
    ]
    rows = []
    for name, session in zip(names, sessions, strict=True):
        flags, proof = session.meta.get("flags") or {}, session.meta.get("proof") or {}
        claimed = (_yes_no(proof.get("holds")) or "not measured") if proof.get("claim") else None
        rows.append(
            {
                "session": name,
                "gpu": gpu_name(session),
                "tf32_convolutions": _yes_no(flags.get("cudnn.allow_tf32")),
                "tf32_products": _yes_no(flags.get("cuda.matmul.allow_tf32")),
                "proof": claimed,
                "commit": str(session.meta.get("commit") or "")[:10] or None,
                "created": str(session.meta.get("created") or "")[:16].replace("T", " ") or None,
            }
        )
    return Table("Settings by session", columns, rows)


def _yes_no(value: Any) -> str | None:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else None


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


def _cut(value: Any) -> str | None:
    """A long list as its number of values, other long texts cut."""
    text = _text(value)
    if text is None or len(text) <= LONGEST_VALUE:
        return text
    if isinstance(value, list):
        return f"{len(value)} values, such as {clip(str(value[0]), 60)}"
    return clip(text, LONGEST_VALUE)


def _recorded(meta: dict[str, Any]) -> dict[str, Any]:
    """The metadata without paths, which sessions of version 0.1 have."""
    command = meta.get("command")
    if isinstance(command, str):
        with suppress(ValueError):  # an open quotation
            meta = {**meta, "command": recorded_command(shlex.split(command))}
    return dict(recorded_values(meta))


def _flat(meta: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The metadata by dotted key."""
    out: dict[str, Any] = {}
    for key, value in meta.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _differences(keys: list[str], facts: list[dict[str, Any]]) -> list[Block]:
    """A warning if sessions of different machines or versions are compared."""
    different = [k for k in keys if k.startswith("environment.") and len({_text(f.get(k)) for f in facts}) > 1]
    if not different:
        return []
    names = ", ".join(k.removeprefix("environment.") for k in different)
    return [
        Text(
            text=f"The sessions were recorded in different environments ({names}); comparisons include that difference.",
            tone="bad",
        )
    ]
