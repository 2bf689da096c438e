"""What is drawn as it was recorded: the launches along one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from voxtune.report.figure import Timeline
from voxtune.report.shape import in_order

if TYPE_CHECKING:
    import pandas as pd

    from voxtune.profile.session import Session

# A gap shorter than this is how launches always follow each other.
SHORTEST_GAP_US = 2.0


class Index:
    """Words by number: a name is written into the page once, however many launches have it."""

    def __init__(self, words: list[str] | None = None):
        self.words = list(words or [])
        self._place = {w: i for i, w in enumerate(self.words)}

    def __getitem__(self, word: str) -> int:
        if word not in self._place:
            self._place[word] = len(self.words)
            self.words.append(word)
        return self._place[word]


def first_step(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["step"] == table["step"].min()] if len(table) else table


def timeline(session: Session, id: str) -> Timeline | None:
    """The first recorded step. None when no launch has a time."""
    rows = first_step(session.launches).dropna(subset=["start_us", "duration_us"]).sort_values("start_us")
    if rows.empty:
        return None
    classes = rows["class"].fillna("unknown").tolist()
    streams = [_lane(s) for s in rows["stream"].astype(object).tolist()]
    groups, lanes, names, notes = Index(in_order(classes)), Index(), Index(), Index([""])
    columns = (rows[c].tolist() for c in ("start_us", "duration_us", "name", "module", "phase"))
    items = []
    for start, us, name, module, phase, kind, stream in zip(*columns, classes, streams, strict=True):
        note = notes[_note(module, phase)]
        items.append((round(start, 2), round(us, 2), groups[kind], names[_word(name)], note, lanes[stream]))
    # Operators on a CPU nest: no queue runs dry between them.
    gaps = [] if (rows["kind"] == "cpu_op").any() else _gaps(items)
    told = "; the lower lane marks where the device idled" if gaps else ""
    return Timeline(
        id=id,
        title="One step, launch by launch",
        caption=f"{len(items):,} launches of the first recorded step{told}.",
        rows=lanes.words,
        groups=groups.words,
        names=names.words,
        notes=notes.words,
        items=items,
        gaps=gaps,
        length_us=max(start + us for start, us, *_ in items),
    )


def _gaps(items: list[tuple[float, float, int, int, int, int]]) -> list[tuple[float, float]]:
    reach, found = 0.0, []
    for start, us, *_ in items:
        if start - reach > SHORTEST_GAP_US:
            found.append((round(reach, 2), round(start - reach, 2)))
        reach = max(reach, start + us)
    return found


def _lane(stream: Any) -> str:
    return f"stream {stream}" if isinstance(stream, int) else "host"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else "unnamed"


def _note(module: Any, phase: Any) -> str:
    return ", ".join(v for v in (phase, module) if isinstance(v, str) and v)
