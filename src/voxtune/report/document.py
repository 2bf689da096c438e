"""A report independent of its output format: sections of text, figures and tables, in reading order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from voxtune.analysis.table import Table
from voxtune.report.figure import Figure


@dataclass(kw_only=True)
class Text:
    """A paragraph. `tone` is plain, good, bad, or missing (data that was not recorded, with the reason)."""

    text: str
    tone: str = "plain"
    title: str = ""


@dataclass(kw_only=True)
class Fact:
    """One value of the headline."""

    label: str
    value: str
    note: str = ""


@dataclass(kw_only=True)
class Badge:
    """A verdict with its reasons."""

    label: str
    good: bool
    reasons: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class TableBlock:
    """A table; `id` is unique in the document. `folded`: collapsed until opened."""

    id: str
    table: Table
    folded: bool = False


Block = Text | Badge | Figure | TableBlock


@dataclass(kw_only=True)
class Tab:
    """The blocks of one session, or of one comparison, in a section."""

    label: str
    blocks: list[Block]
    mode: str = ""


@dataclass(kw_only=True)
class Section:
    id: str
    title: str
    lead: str = ""
    blocks: list[Block] = field(default_factory=list)
    tabs: list[Tab] = field(default_factory=list)

    def all_blocks(self) -> Iterator[Block]:
        yield from self.blocks
        for tab in self.tabs:
            yield from tab.blocks


@dataclass(kw_only=True)
class Document:
    title: str
    subtitle: str
    facts: list[Fact]
    # One per session.
    badges: list[Badge]
    sections: list[Section]
    # For the headline: one per kind of data, which are the timeline and the tiers of counters.
    coverage: list[Badge] = field(default_factory=list)

    def all_blocks(self) -> Iterator[Block]:
        for section in self.sections:
            yield from section.all_blocks()

    def figures(self) -> list[Figure]:
        return [b for b in self.all_blocks() if isinstance(b, Figure)]

    def tables(self) -> list[TableBlock]:
        return [b for b in self.all_blocks() if isinstance(b, TableBlock)]
