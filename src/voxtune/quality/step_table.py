"""The table of sampler settings: the cost of each, its metrics, and whether it is non-inferior to the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from voxtune.quality.bootstrap import Bootstrap, Interval
from voxtune.quality.metrics import metric_of
from voxtune.quality.paired import Comparison
from voxtune.quality.result import is_simulated, versions

FORMAT = "voxtune-steps/1"
# Times within this fraction of each other count as equal, so that clock noise does not decide.
SAME_TIME = 0.1
# Tables of version 0.1 have the second spelling.
NON_INFERIOR = ("non-inferior", "not worse")
HEADER = ("setting", "s/volume", "limiting metric", "of margin", "verdict")


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """One setting. `record` holds its sampler settings, seed and passes; `compared` is empty for the reference.

    `broken` counts volumes with NaN or infinity.
    """

    name: str
    record: dict[str, Any]
    seconds: float
    metrics: dict[str, Interval]
    compared: dict[str, Comparison] = field(default_factory=dict)
    broken: int = 0
    distance: dict[str, float] | None = None

    @property
    def failed(self) -> list[str]:
        """The metrics by which non-inferiority is not shown."""
        return [name for name, c in self.compared.items() if not c.non_inferior] + ["NaN"] * bool(self.broken)

    @property
    def non_inferior(self) -> bool:
        return bool(self.compared) and not self.failed

    @property
    def limiting(self) -> tuple[str, float]:
        """The metric that uses the largest share of its margin, and that share."""
        shares = ((name, c.share_of_margin) for name, c in self.compared.items())
        return max(shares, key=lambda item: item[1], default=("", 0.0))

    @property
    def verdict(self) -> str:
        if not self.compared:
            return "reference"
        return f"inferior: {', '.join(self.failed)}" if self.failed else NON_INFERIOR[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            **self.record,
            "seconds_per_volume": self.seconds,
            "verdict": self.verdict,
            "figures": {name: interval.to_json() for name, interval in self.metrics.items()},
            "worsening": {name: c.to_json() for name, c in self.compared.items()},
            **({"broken": self.broken} if self.broken else {}),
            **({"distance": _finite(self.distance)} if self.distance is not None else {}),
        }


@dataclass(frozen=True, kw_only=True)
class StepTable:
    """The reference, its repetition with another seed, then the settings. `chosen` is a row's name, or None."""

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
            "margins": describe_margins(self.margins),
            "chosen": self.chosen,
            **({"refusal": refusal} if (refusal := self.refusal()) else {}),
            "notes": list(self.notes),
            "versions": versions(),
            "rows": [row.to_json() for row in self.rows],
        }

    def text(self) -> list[str]:
        """Lines of equal columns for a console."""
        cells = [HEADER, *map(_brief, self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]

    def markdown(self, title: str) -> str:
        names = list(dict.fromkeys(name for row in self.rows for name in row.metrics))
        refusal = self.refusal()
        lines = [f"# {title}", "", self.conclusion(), *([refusal] if refusal else []), "", *_header(HEADER)]
        lines += [_line(_brief(row)) for row in self.rows]
        lines += ["", f"## Metrics, with {self.settings.level:.0%} confidence intervals", ""]
        lines += _header(("setting", *names))
        lines += [_line((row.name, *(_format(row.metrics.get(n)) for n in names))) for row in self.rows]
        compared = list(self.margins)
        lines += ["", "## Worsening relative to the reference, with confidence intervals", ""]
        lines += _header(("setting", *compared))
        lines += [_line(("margin", *(f"{self.margins[n]:.3g}" for n in compared)))]
        lines += [
            _line((row.name, *(_format(row.compared[n].worsening) for n in compared)))
            for row in self.rows
            if row.compared
        ]
        if any(row.distance for row in self.rows):
            lines += self._distances()
        bootstrap = f"{self.settings.resamples} resamples, seed {self.settings.seed}"
        lines += ["", f"{self._subjects()}; {bootstrap}."]
        return "\n".join([*lines, *(f"- {note}" for note in self.notes)]) + "\n"

    def conclusion(self) -> str:
        row, reference = self.choice, self.rows[0].name.removesuffix(", reference")
        if row is None and any(r.non_inferior for r in self.rows[2:] if "distilled_from" not in r.record):
            return f"No setting that is non-inferior to {reference} over {self._subjects()} is faster."
        if row is None:
            return f"No setting is non-inferior to {reference} on every metric, over {self._subjects()}."
        speedup = self.rows[0].seconds / row.seconds if row.seconds else math.nan
        earlier = self.about.get("confirms")
        others = "" if earlier is None else f" and {earlier['subjects']} others"
        return f"{row.name}: non-inferior to {reference} over {self._subjects()}{others}, {speedup:.3g} x as fast."

    def refusal(self) -> str | None:
        """Why no setting with feature caching was chosen, if some were tried."""
        cached = [row for row in self.rows if "cache" in row.record]
        if not cached or self.choice in cached or self.choice is None:
            return None
        reasons = [f"{row.name} is {row.verdict if row.failed else 'non-inferior, but not faster'}" for row in cached]
        return f"Feature caching was not chosen: {'; '.join(reasons)}."

    def _subjects(self) -> str:
        kind = "simulated " if is_simulated(str(self.about.get("data", ""))) else ""
        return f"{self.subjects} {kind}subjects"

    def _distances(self) -> list[str]:
        rows = [row for row in self.rows if row.distance is not None]
        names = list(rows[0].distance or {})
        lines = ["", "## Distance from the reference's volumes, from the same noise", "", *_header(("setting", *names))]
        return lines + [_line((r.name, *(f"{v:.4g}" for v in (r.distance or {}).values()))) for r in rows]


def fewest_steps(rows: Sequence[StepRow]) -> StepRow | None:
    """Of the non-inferior rows: the fewest steps, then the smallest share of a margin. Time does not decide."""
    candidates = [row for row in rows if row.non_inferior]
    return min(candidates, key=lambda row: (row.record["steps"], row.limiting[1]), default=None)


def faster_row(baseline: StepRow, others: Sequence[StepRow]) -> StepRow:
    """The fastest of the other rows that are non-inferior and faster than `baseline`, else `baseline`."""
    candidates = [row for row in others if row.non_inferior and row.seconds * (1 + SAME_TIME) < baseline.seconds]
    if not candidates:
        return baseline
    # Of rows as fast as the fastest, the one with the smallest share of a margin.
    least = min(row.seconds for row in candidates)
    return min((r for r in candidates if r.seconds <= least * (1 + SAME_TIME)), key=lambda row: row.limiting[1])


def closest_row(rows: Sequence[StepRow]) -> StepRow:
    """The row that is closest to being non-inferior."""
    return min(rows, key=lambda row: (row.broken, len(row.failed), row.limiting[1]))


def describe_margins(limits: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    """For the file: each metric's direction, smallest meaningful difference and margin."""
    metrics = {name: metric_of(name) for name in limits}
    return {
        name: {"better": metric.better, "floor": metric.min_difference, "margin": limits[name]}
        for name, metric in metrics.items()
        if metric is not None
    }


def _brief(row: StepRow) -> tuple[str, ...]:
    name, share = row.limiting
    return (row.name, f"{row.seconds:.4g}", name, f"{share:.2f}" if row.compared else "", row.verdict)


def _format(interval: Interval | None) -> str:
    if interval is None:
        return ""
    if not math.isfinite(interval.value):
        return "infinite" if interval.value == math.inf else "none"
    ends = "" if interval.low is None or interval.high is None else f" ({interval.low:.4g} to {interval.high:.4g})"
    return f"{interval.value:.4g}{ends}"


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _header(names: Sequence[str]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]
