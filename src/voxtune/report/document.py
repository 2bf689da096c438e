"""A report before it has a form: sections of text, figures and tables, in reading order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from voxtune.analysis.table import Table
from voxtune.report.figure import Figure

# More badges than this hide what they say.
MANY = 4


@dataclass(kw_only=True)
class Text:
    """A paragraph. `tone` is plain, good, bad, or missing (data that was not recorded, with the reason)."""

    text: str
    tone: str = "plain"


@dataclass(kw_only=True)
class Fact:
    """One number of the headline."""

    label: str
    value: str
    note: str = ""


@dataclass(kw_only=True)
class Badge:
    """A verdict that is seen at once, with its reasons."""

    label: str
    good: bool
    reasons: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class TableBlock:
    """A table under a name unique in the document. `folded`: the reader opens it."""

    id: str
    table: Table
    folded: bool = False


Block = Text | Badge | Figure | TableBlock


@dataclass(kw_only=True)
class Tab:
    """What a section shows for one session; the reader chooses among its fellows."""

    label: str
    blocks: list[Block]


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
    badges: list[Badge]
    sections: list[Section]

    def headline(self) -> list[Badge]:
        """The badges as they are seen first: many good ones in one, bad ones each on its own."""
        good = [b for b in self.badges if b.good]
        if len(good) <= MANY:
            return self.badges
        label = f"{len(good)} of {len(self.badges)} sessions cover the whole step"
        bad = [b for b in self.badges if not b.good]
        return [Badge(label=label, good=True, reasons=[b.label for b in good]), *bad]

    def all_blocks(self) -> Iterator[Block]:
        for section in self.sections:
            yield from section.all_blocks()

    def figures(self) -> list[Figure]:
        return [b for b in self.all_blocks() if isinstance(b, Figure)]

    def tables(self) -> list[TableBlock]:
        return [b for b in self.all_blocks() if isinstance(b, TableBlock)]
