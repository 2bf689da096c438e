"""Renders a document as one self-contained HTML file: style, scripts and data are embedded.

Names in a session may contain anything. They enter the page only as escaped text, or as JSON with escaped angle
brackets and from there as text nodes. The content security policy forbids all requests, and all scripts except the
embedded ones (by hash).
"""

from __future__ import annotations

import base64
import hashlib
import json
from html import escape
from importlib import resources
from string import Template
from typing import Any

from voxtune.analysis.table import Table
from voxtune.report import palette
from voxtune.report.document import Badge, Block, Document, Fact, Section, Tab, TableBlock, Text
from voxtune.report.figure import Bars, Figure
from voxtune.report.numbers import heading
from voxtune.versions import __version__

# More reasons than this stay collapsed.
OPEN_REASONS = 2


def render_html(document: Document) -> str:
    script = "\n".join(asset(name) for name in ("tables.js", "charts.js", "page.js"))
    early, library = asset("early.js"), asset("vendor/echarts.js")
    return Template(asset("page.html")).substitute(
        policy=escape(policy([early, library, script])),
        version=escape(__version__),
        title=escape(document.title),
        subtitle=escape(document.subtitle),
        style=asset("page.css"),
        early=early,
        contents="\n".join(f'<li><a href="#{s.id}">{escape(s.title)}</a></li>' for s in document.sections),
        headline=_facts(document.facts) + _badges(document.coverage),
        sections="\n".join(_section(s) for s in document.sections),
        data=embed(_data(document)),
        library=library,
        script=script,
    )


def embed(data: Any) -> str:
    """JSON that cannot be parsed as markup or as the end of its script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def asset(name: str) -> str:
    return (resources.files("voxtune.report") / "assets" / name).read_text(encoding="utf-8")


def policy(scripts: list[str]) -> str:
    digests = (base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() for s in scripts)
    allowed = " ".join(f"'sha256-{d}'" for d in digests)
    defaults = "default-src 'none'; base-uri 'none'; form-action 'none'"
    return f"{defaults}; img-src data:; style-src 'unsafe-inline'; script-src {allowed}"


def _data(document: Document) -> dict[str, Any]:
    figures = {f.id: f.to_json() for f in document.figures()}
    tables = {b.id: _table_data(b.table) for b in document.tables()}
    assert len(figures) == len(document.figures()), "duplicate figure ids"
    assert len(tables) == len(document.tables()), "duplicate table ids"
    light = {*palette.NAMED.values(), *palette.SEQUENCE}
    dark = {c: palette.on_dark(c) for c in sorted(light)}
    return {
        "figures": figures,
        "tables": tables,
        "dark": dark,
        "ink": {c: palette.ink(c) for c in sorted({*light, *dark.values()})},
    }


def _table_data(table: Table) -> dict[str, Any]:
    names = [c.name for c in table.columns]
    rows = [[row[n] for n in names] for row in table.rows]
    heads = [dict(zip(("head", "aside"), heading(c), strict=True)) for c in table.columns]
    columns = [vars(c) | h for c, h in zip(table.columns, heads, strict=True)]
    return {"title": table.title, "columns": columns, "rows": rows}


def _facts(facts: list[Fact]) -> str:
    def one(fact: Fact) -> str:
        note = f"<small>{escape(fact.note).replace('+', '+<wbr>').replace('_', '_<wbr>')}</small>" if fact.note else ""
        return f"<div><dt>{escape(fact.label)}</dt><dd>{escape(fact.value)}{note}</dd></div>"

    return f'<dl class="facts">{"".join(one(f) for f in facts)}</dl>\n' if facts else ""


def _badges(badges: list[Badge]) -> str:
    return f'<div class="badges">{"".join(_badge(b) for b in badges)}</div>' if badges else ""


def _badge(badge: Badge) -> str:
    tone, mark = ("good", "✓") if badge.good else ("bad", "✗")
    reasons = "".join(f"<li>{escape(r)}</li>" for r in badge.reasons)
    # A few reasons of a failed verdict are expanded.
    opened = "" if badge.good or len(badge.reasons) > OPEN_REASONS else " open"
    return (
        f'<details class="badge {tone}"{opened}><summary>{mark} {escape(badge.label)}</summary>'
        f"<ul>{reasons}</ul></details>"
    )


def _section(section: Section) -> str:
    lead = f'<p class="lead">{escape(section.lead)}</p>' if section.lead else ""
    blocks = "\n".join(_block(b) for b in section.blocks)
    return f'<section id="{section.id}"><h2>{escape(section.title)}</h2>{lead}\n{blocks}\n{_tabs(section)}</section>'


def _tabs(section: Section) -> str:
    if len(section.tabs) < 2:
        return "\n".join(_block(b) for t in section.tabs for b in t.blocks)

    def button(i: int, tab: Tab) -> str:
        chosen = "true" if i == 0 else "false"
        return (
            f'<button type="button" role="tab" id="{section.id}-tab{i}" aria-controls="{section.id}-panel{i}"'
            f' aria-selected="{chosen}" tabindex="{0 if i == 0 else -1}">{escape(tab.label)}</button>'
        )

    def body(i: int, tab: Tab) -> str:
        blocks = "\n".join(_block(b) for b in tab.blocks)
        hidden = "" if i == 0 else " hidden"
        names = f'id="{section.id}-panel{i}" aria-labelledby="{section.id}-tab{i}"'
        return f'<div role="tabpanel" {names}{hidden}>{blocks}</div>'

    buttons = "".join(button(i, t) for i, t in enumerate(section.tabs))
    bodies = "\n".join(body(i, t) for i, t in enumerate(section.tabs))
    return f'<div role="tablist" aria-label="Configuration">{buttons}</div>\n{bodies}'


def _block(block: Block) -> str:
    if isinstance(block, Text):
        title = f"<b>{escape(block.title)}</b>" if block.title else ""
        return f'<p class="text {escape(block.tone)}">{title}{escape(block.text)}</p>'
    if isinstance(block, Badge):
        return _badge(block)
    if isinstance(block, TableBlock):
        return _table(block)
    return _figure(block)


def _figure(figure: Figure) -> str:
    caption = f'<p class="caption">{escape(figure.caption)}</p>' if figure.caption else ""
    missing = figure.unmeasured() if isinstance(figure, Bars) else ""
    absent = f'<p class="caption">Not measured: {escape(missing)}.</p>' if missing else ""
    return (
        f'<figure data-figure="{escape(figure.id)}"><figcaption>{escape(figure.title)}</figcaption>{caption}{absent}'
        '<div class="legend"></div><div class="plot" role="img" '
        f'aria-label="{escape(figure.title)}; see the tables of this section for the values"></div>'
        '<div class="zoom"></div></figure>'
    )


def _table(block: TableBlock) -> str:
    table = block.table
    notes = "".join(f"<li>{escape(n)}</li>" for n in table.notes)
    after = f'<ul class="notes">{notes}</ul>' if notes else ""
    if table.refused:
        return f'<h3>{escape(table.title)}</h3><p class="text bad">Refused: {escape(table.refused)}</p>{after}'
    if not table.rows:
        return f'<h3>{escape(table.title)}</h3><p class="text missing">No data.</p>{after}'
    body = f'<div data-table="{escape(block.id)}"></div>{after}'
    if block.folded:
        return f'<details class="fold"><summary>{escape(table.title)}</summary>{body}</details>'
    return f"<h3>{escape(table.title)}</h3>{body}"
