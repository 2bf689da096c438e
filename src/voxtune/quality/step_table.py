"""The table of ways to draw the same volumes: what each costs, how good it is, whether it is worse than the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from voxtune.quality.bootstrap import Bootstrap, Interval
from voxtune.quality.metrics import metric_of
from voxtune.quality.paired import Comparison
from voxtune.quality.result import versions

FORMAT = "voxtune-steps/1"
# Times this near to each other are equal: a choice must not hang on a clock's noise.
SAME_TIME = 0.1


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One way to draw. `broken` counts volumes with NaN or infinity; `compared` is empty for the reference."""

    name: str
    how: dict[str, Any]
    seconds: float
    figures: dict[str, Interval]
    compared: dict[str, Comparison] = field(default_factory=dict)
    broken: int = 0
    distance: dict[str, float] | None = None

    @property
    def worse(self) -> list[str]:
        """The figures by which it is worse, or may be."""
        return [name for name, c in self.compared.items() if not c.non_inferior] + ["NaN"] * bool(self.broken)

    @property
    def tightest(self) -> tuple[str, float]:
        """The figure that comes nearest to its margin, or goes furthest beyond it."""
        return max(
            ((n, c.share_of_margin) for n, c in self.compared.items()), key=lambda item: item[1], default=("", 0.0)
        )

    @property
    def verdict(self) -> str:
        if not self.compared:
            return "reference"
        return f"worse: {', '.join(self.worse)}" if self.worse else "not worse"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.how,
            "seconds_per_volume": self.seconds,
            "verdict": self.verdict,
            "figures": {name: span.to_json() for name, span in self.figures.items()},
            "worsening": {name: c.to_json() for name, c in self.compared.items()},
            **({"broken": self.broken} if self.broken else {}),
            **({"distance": _plain(self.distance)} if self.distance is not None else {}),
        }


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """Rows, the reference first, then its second draw. `chosen` is a row's name, None where every one is worse."""

    rows: tuple[StepRow, ...]
    margins: dict[str, float]
    subjects: int
    settings: Bootstrap
    about: dict[str, Any]
    chosen: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def choice(self) -> StepRow | None:
        return next((row for row in self.rows if row.name == self.chosen), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            **self.about,
            "subjects": self.subjects,
            "bootstrap": vars(self.settings),
            "margins": describe_rules(self.margins),
            "chosen": self.chosen,
            **({"refusal": refusal} if (refusal := self.refusal()) else {}),
            "notes": list(self.notes),
            "versions": versions(),
            "rows": [row.to_json() for row in self.rows],
        }

    def text(self) -> list[str]:
        """Lines of equal columns for a console."""
        cells = [("row", "s/volume", "tightest", "of margin", "verdict"), *map(_brief, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]

    def markdown(self, title: str) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row.figures))
        refusal = self.refusal()
        lines = [
            f"# {title}",
            "",
            self.conclusion(),
            *([refusal] if refusal else []),
            "",
            *_grid(("row", "s/volume", "tightest", "of margin", "verdict")),
        ]
        lines += [_line(_brief(row)) for row in self.rows]
        lines += ["", f"## Figures, with intervals of {self.settings.level:.0%}", "", *_grid(("row", *names))]
        lines += [_line((row.name, *(_span(row.figures.get(n)) for n in names))) for row in self.rows]
        judged = list(self.margins)
        lines += ["", "## Worsening against the reference, with intervals", "", *_grid(("row", *judged))]
        lines += [_line(("margin", *(f"{self.margins[n]:.3g}" for n in judged)))]
        lines += [
            _line((row.name, *(_span(row.compared[n].worsening) for n in judged))) for row in self.rows if row.compared
        ]
        if any(row.distance for row in self.rows):
            lines += self._distances()
        lines += ["", f"{self.subjects} subjects; {self.settings.resamples} resamples, seed {self.settings.seed}."]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)]) + "\n"

    def conclusion(self) -> str:
        row = self.choice
        if row is None and any(r.compared and not r.worse for r in self.rows[2:]):
            return f"What is not worse than {self.rows[0].name} over {self.subjects} subjects is not faster either."
        if row is None:
            return f"No row is not worse than {self.rows[0].name} on every figure, over {self.subjects} subjects."
        gain = self.rows[0].seconds / row.seconds if row.seconds else math.nan
        earlier = self.about.get("confirms")
        others = "" if earlier is None else f" and {earlier['subjects']} others"
        name = self.rows[0].name
        return f"{row.name}: not worse than {name} over {self.subjects} subjects{others}, {gain:.3g} x as fast."

    def refusal(self) -> str | None:
        """Why no row with features kept between steps was taken, where some were tried."""
        cached = [row for row in self.rows if "cache" in row.how]
        if not cached or self.choice in cached or self.choice is None:
            return None
        reasons = [
            f"{row.name} is {row.verdict if row.worse else 'not worse, but not faster either'}" for row in cached
        ]
        return f"Caching is refused: {'; '.join(reasons)}."

    def _distances(self) -> list[str]:
        rows = [row for row in self.rows if row.distance is not None]
        names = list(rows[0].distance or {})
        lines = ["", "## Distance of volumes from the reference's, from the same noise", "", *_grid(("row", *names))]
        return lines + [_line((r.name, *(f"{v:.4g}" for v in (r.distance or {}).values()))) for r in rows]


def fewest(rows: Sequence[StepRow]) -> StepRow | None:
    """Of the rows that are not worse: the fewest steps, then the most room within the margins. No clock decides."""
    fine = [row for row in rows if row.compared and not row.worse]
    return min(fine, key=lambda row: (row.how["steps"], row.tightest[1]), default=None)


def quicker(plain: StepRow, others: Sequence[StepRow]) -> StepRow:
    """Of the other rows that are not worse and take less time than `plain`, the fastest, whatever its steps; else `plain`."""
    fine = [row for row in others if row.compared and not row.worse]
    fine = [row for row in fine if row.seconds * (1 + SAME_TIME) < plain.seconds]
    return _fastest(fine) if fine else plain


def _fastest(rows: Sequence[StepRow]) -> StepRow:
    """Of rows as fast as the fastest, the one with the most room."""
    least = min(row.seconds for row in rows)
    return min((r for r in rows if r.seconds <= least * (1 + SAME_TIME)), key=lambda row: row.tightest[1])


def nearest_row(rows: Sequence[StepRow]) -> StepRow:
    """The row that comes nearest to being not worse."""
    return min(rows, key=lambda row: (row.broken, len(row.worse), row.tightest[1]))


def describe_rules(limits: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """For the file: which way each figure is better, its floor, its margin."""
    metrics = {name: metric_of(name) for name in limits}
    return {
        name: {"better": metric.better, "floor": metric.min_difference, "margin": limits[name]}
        for name, metric in metrics.items()
        if metric is not None
    }


def _brief(row: StepRow) -> tuple[str, ...]:
    name, share = row.tightest
    return (row.name, f"{row.seconds:.4g}", name, f"{share:.2f}" if row.compared else "", row.verdict)


def _span(span: Interval | None) -> str:
    if span is None:
        return ""
    if not math.isfinite(span.value):
        return "infinite" if span.value == math.inf else "none"
    ends = "" if span.low is None or span.high is None else f" ({span.low:.4g} to {span.high:.4g})"
    return f"{span.value:.4g}{ends}"


def _plain(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _grid(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]
