"""What synthetic volumes are worth to a segmenter: Dice on held-out subjects after learning from one set or another.

An arm is one set to learn from; every arm is trained with the same seeds and measured on the same subjects, so that two arms
are compared subject by subject. A subject's Dice is the mean over seeds, and intervals resample subjects: they say nothing of
how another seed would turn out. That is told by the spread of an arm's mean over its seeds, pooled over all arms.

Legend: S seeds, N subjects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from voxtune.quality.bootstrap import Bootstrap, MetricValue, mean_value
from voxtune.quality.result import versions

FORMAT = "voxtune-usefulness/1"
REFERENCE = "real"
# A difference counts from this many of the standard errors that seeds alone make: with three arms and two seeds, the spread
# has three degrees of freedom, and 3.2 would be the 95 % point of its t distribution.
SEED_ERRORS = 3.0
# Each arm but the first is held against it; one that adds to another is held against that, too.
ADDS_TO = {"few_and_synthetic": "few"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Arm:
    """`dice_SN` by label, NaN where a subject's mask lacks it; `real` and `synthetic` count what was learned from."""

    name: str
    real: int
    synthetic: int
    dice_SN: dict[str, np.ndarray]
    seconds: float = 0.0

    @property
    def learned_from(self) -> str:
        counts = ((self.real, "real"), (self.synthetic, "synthetic"))
        return " + ".join(f"{count} {kind}" for count, kind in counts if count)


@dataclass(frozen=True, kw_only=True)
class Gain:
    """How much higher one arm's Dice of a label is than another's. `seed_error` is None for one seed."""

    arm: str
    against: str
    label: str
    figure: MetricValue
    by_seed: tuple[float, ...]
    seed_error: float | None

    @property
    def verdict(self) -> str:
        """Higher or lower only where both hold: the interval over subjects lies beyond 0, and seeds alone do not make it."""
        low, high = self.figure.low, self.figure.high
        if low is None or high is None or self.seed_error is None or low <= 0 <= high:
            return "not told apart"
        if abs(self.figure.value) <= SEED_ERRORS * self.seed_error:
            return "not told apart"
        return "higher" if low > 0 else "lower"

    def to_json(self) -> dict[str, Any]:
        return {
            "against": self.against,
            "label": self.label,
            **self.figure.to_json(),
            "by_seed": list(self.by_seed),
            "seed_error": self.seed_error,
            "verdict": self.verdict,
        }

    def words(self) -> str:
        return f"{self.label}: {self.arm} - {self.against} = {_span(self.figure, '+.4f')}, {self.verdict}"


@dataclass(frozen=True, kw_only=True, eq=False)
class UsefulnessTable:
    """All arms with the same subjects and the same number of seeds; the first is the reference."""

    arms: tuple[Arm, ...]
    settings: Bootstrap
    about: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def subjects(self) -> int:
        return int(next(iter(self.arms[0].dice_SN.values())).shape[1])

    @property
    def seeds(self) -> int:
        return int(next(iter(self.arms[0].dice_SN.values())).shape[0])

    @property
    def labels(self) -> list[str]:
        return list(self.arms[0].dice_SN)

    def dice(self, arm: Arm, label: str) -> MetricValue:
        return _mean(f"dice_{label.replace(' ', '_')}", arm.dice_SN[label], self.settings, better="higher")

    def gains(self) -> list[Gain]:
        named = {arm.name: arm for arm in self.arms}
        pairs = [(arm, self.arms[0]) for arm in self.arms[1:]]
        pairs += [(named[a], named[b]) for a, b in ADDS_TO.items() if a in named and b in named]
        return [self._gain(arm, other, label) for arm, other in pairs for label in self.labels]

    def _gain(self, arm: Arm, other: Arm, label: str) -> Gain:
        gap_SN = arm.dice_SN[label] - other.dice_SN[label]
        figure = _mean(f"gain_{label.replace(' ', '_')}", gap_SN, self.settings, better="higher")
        by_seed = tuple(float(np.nanmean(row)) for row in gap_SN)
        error = self.seed_error(label)
        return Gain(arm=arm.name, against=other.name, label=label, figure=figure, by_seed=by_seed, seed_error=error)

    def seed_error(self, label: str) -> float | None:
        """The standard error that seeds alone give to a difference of two arms' means."""
        if self.seeds < 2:
            return None
        means_AS = np.array([np.nanmean(arm.dice_SN[label], axis=1) for arm in self.arms])
        return float(np.sqrt(means_AS.var(axis=1, ddof=1).mean() * 2 / self.seeds))

    def to_json(self) -> dict[str, Any]:
        gains = self.gains()
        return {
            "format": FORMAT,
            **self.about,
            "subjects": self.subjects,
            "seeds": self.seeds,
            "bootstrap": vars(self.settings),
            "notes": list(self.notes),
            "versions": versions(),
            "arms": [
                {
                    "name": arm.name,
                    "real": arm.real,
                    "synthetic": arm.synthetic,
                    "seconds": round(arm.seconds, 1),
                    "dice": {label: self._dice_json(arm, label) for label in self.labels},
                    "gains": [gain.to_json() for gain in gains if gain.arm == arm.name],
                    "dice_by_seed_and_subject": {n: _plain(v) for n, v in arm.dice_SN.items()},
                }
                for arm in self.arms
            ],
        }

    def _dice_json(self, arm: Arm, label: str) -> dict[str, Any]:
        by_seed = [float(np.nanmean(row)) for row in arm.dice_SN[label]]
        return {**self.dice(arm, label).to_json(), "by_seed": by_seed}

    def text(self) -> list[str]:
        """Lines of equal columns for a console; then a line for each comparison."""
        cells = [("arm", "learned from", *self.labels), *(self._row(arm) for arm in self.arms)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return [*lines, *(gain.words() for gain in self.gains())]

    def markdown(self, title: str) -> str:
        header = ("arm", "learned from", *(f"Dice of {label}" for label in self.labels))
        lines = [f"# {title}", "", *_grid(header), *(_line(self._row(arm)) for arm in self.arms)]
        lines += ["", "## Differences, subject by subject", ""]
        lines += _grid(("label", "arm", "against", "difference", "by seed", "seeds' error", "verdict"))
        for gain in self.gains():
            by_seed = ", ".join(f"{value:+.4f}" for value in gain.by_seed)
            figure = _span(gain.figure, "+.4f")
            error = "none" if gain.seed_error is None else f"{gain.seed_error:.4f}"
            lines.append(_line((gain.label, gain.arm, gain.against, figure, by_seed, error, gain.verdict)))
        lines += [
            "",
            f"{self.subjects} held-out subjects, {self.seeds} seeds; intervals of {self.settings.level:.0%} over subjects, "
            f"{self.settings.resamples} resamples, seed {self.settings.seed}. What each arm is stands in docs/quality.md.",
        ]
        return "\n".join([*lines, *([""] if self.notes else []), *(f"- {note}" for note in self.notes)]) + "\n"

    def _row(self, arm: Arm) -> tuple[str, ...]:
        return (arm.name, arm.learned_from, *(_span(self.dice(arm, label)) for label in self.labels))


def _mean(name: str, values_SN: np.ndarray, settings: Bootstrap, **facts: Any) -> MetricValue:
    """Over the subjects that have the label, each with its mean over seeds."""
    there = ~np.isnan(values_SN).any(axis=0)
    return mean_value(name, values_SN[:, there].mean(axis=0).tolist(), settings, **facts)


def _span(figure: MetricValue, form: str = ".4f") -> str:
    ends = "" if figure.low is None or figure.high is None else f" ({figure.low:{form}} to {figure.high:{form}})"
    return f"{figure.value:{form}}{ends}"


def _plain(values_SN: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(v) else round(float(v), 5) for v in row] for row in values_SN]


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _grid(names: tuple[str, ...]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]
