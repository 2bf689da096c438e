"""What synthetic volumes are worth as training data: Dice of segmenters on held-out subjects, by what they were trained on.

An arm is one training set. Every arm is trained with the same seeds and measured on the same subjects, so that arms are
compared subject by subject. A subject's Dice is the mean over seeds, and intervals resample subjects. The effect of the
random seed is estimated separately: from the spread of an arm's mean over its seeds, pooled over all arms.

Legend: S seeds, N subjects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from voxtune.quality.bootstrap import Bootstrap, MetricValue, mean_value
from voxtune.quality.result import is_simulated, versions

FORMAT = "voxtune-usefulness/1"
# Where training subjects come from. It is also the name of the arm that is trained on all of them.
SubjectKind = Literal["simulated", "real"]
# A difference is significant only beyond this many standard errors of the seeds. With three arms and two seeds the spread
# has three degrees of freedom, and 3.2 is the 95 % point of its t distribution.
SEED_ERRORS = 3.0
NOT_SIGNIFICANT = "no significant difference"
# Every arm is compared with the first; an arm that extends another is compared with that one, too.
EXTENDS = {"few_and_synthetic": "few"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Arm:
    """`dice_SN` by label, NaN where a subject's mask lacks it. The training set has `subjects` and `synthetic` volumes."""

    name: str
    kind: SubjectKind = "real"
    subjects: int
    synthetic: int
    dice_SN: dict[str, np.ndarray]
    seconds: float = 0.0

    @property
    def trained_on(self) -> str:
        return describe_training({self.kind: self.subjects, "synthetic": self.synthetic})


def describe_training(counts: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {kind}" for kind, count in counts.items() if count)


def training_counts(result: Mapping[str, Any], arm: Mapping[str, Any]) -> dict[str, int]:
    """The training set of an arm of a results file. Files of version 0.1 call simulated subjects real."""
    if "simulated" in arm:
        return {"simulated": arm["simulated"], "synthetic": arm["synthetic"]}
    return {"simulated" if is_simulated(result["data"]) else "real": arm["real"], "synthetic": arm["synthetic"]}


def arm_name(result: Mapping[str, Any], name: str) -> str:
    """The name of an arm of a results file, as it is written today."""
    return "simulated" if name == "real" and is_simulated(result["data"]) else name


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The difference of two arms in the Dice of a label. `seed_error` is None for one seed."""

    arm: str
    against: str
    label: str
    difference: MetricValue
    by_seed: tuple[float, ...]
    seed_error: float | None

    @property
    def verdict(self) -> str:
        """Significant if the interval over subjects excludes 0 and the difference exceeds what seeds cause."""
        low, high = self.difference.low, self.difference.high
        if low is None or high is None or self.seed_error is None or low <= 0 <= high:
            return NOT_SIGNIFICANT
        if abs(self.difference.value) <= SEED_ERRORS * self.seed_error:
            return NOT_SIGNIFICANT
        return "higher" if low > 0 else "lower"

    def to_json(self) -> dict[str, Any]:
        return {
            "against": self.against,
            "label": self.label,
            **self.difference.to_json(),
            "by_seed": list(self.by_seed),
            "seed_error": self.seed_error,
            "verdict": self.verdict,
        }

    def text(self) -> str:
        return f"{self.label}: {self.arm} - {self.against} = {_format(self.difference, '+.4f')}, {self.verdict}"


@dataclass(frozen=True, kw_only=True, eq=False)
class UsefulnessTable:
    """Arms with the same test subjects and number of seeds; the first is the reference."""

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
        pairs += [(named[a], named[b]) for a, b in EXTENDS.items() if a in named and b in named]
        return [self._gain(arm, other, label) for arm, other in pairs for label in self.labels]

    def _gain(self, arm: Arm, other: Arm, label: str) -> Gain:
        gap_SN = arm.dice_SN[label] - other.dice_SN[label]
        difference = _mean(f"gain_{label.replace(' ', '_')}", gap_SN, self.settings, better="higher")
        by_seed = tuple(float(np.nanmean(row)) for row in gap_SN)
        error = self.seed_error(label)
        return Gain(
            arm=arm.name, against=other.name, label=label, difference=difference, by_seed=by_seed, seed_error=error
        )

    def seed_error(self, label: str) -> float | None:
        """The standard error that seeds alone cause in the difference of two arms."""
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
                    arm.kind: arm.subjects,
                    "synthetic": arm.synthetic,
                    "seconds": round(arm.seconds, 1),
                    "dice": {label: self._dice_json(arm, label) for label in self.labels},
                    "gains": [gain.to_json() for gain in gains if gain.arm == arm.name],
                    "dice_by_seed_and_subject": {n: _nullable(v) for n, v in arm.dice_SN.items()},
                }
                for arm in self.arms
            ],
        }

    def _dice_json(self, arm: Arm, label: str) -> dict[str, Any]:
        by_seed = [float(np.nanmean(row)) for row in arm.dice_SN[label]]
        return {**self.dice(arm, label).to_json(), "by_seed": by_seed}

    def text(self) -> list[str]:
        """Lines of equal columns for a console, then one line per comparison."""
        cells = [("arm", "trained on", *self.labels), *(self._row(arm) for arm in self.arms)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
        return [*lines, *(gain.text() for gain in self.gains())]

    def markdown(self, title: str) -> str:
        header = ("arm", "trained on", *(f"Dice of {label}" for label in self.labels))
        lines = [f"# {title}", "", *_header(header), *(_line(self._row(arm)) for arm in self.arms)]
        lines += ["", "## Paired differences", ""]
        lines += _header(
            ("label", "arm", "compared with", "difference", "by seed", "standard error of seeds", "verdict")
        )
        for gain in self.gains():
            by_seed = ", ".join(f"{value:+.4f}" for value in gain.by_seed)
            difference = _format(gain.difference, "+.4f")
            error = "none" if gain.seed_error is None else f"{gain.seed_error:.4f}"
            lines.append(_line((gain.label, gain.arm, gain.against, difference, by_seed, error, gain.verdict)))
        lines += [
            "",
            f"{self.subjects} held-out subjects, {self.seeds} seeds; {self.settings.level:.0%} confidence intervals over "
            f"subjects, {self.settings.resamples} resamples, seed {self.settings.seed}. The arms are defined in "
            "docs/guide/usefulness.md.",
        ]
        return "\n".join([*lines, *([""] if self.notes else []), *(f"- {note}" for note in self.notes)]) + "\n"

    def _row(self, arm: Arm) -> tuple[str, ...]:
        return (arm.name, arm.trained_on, *(_format(self.dice(arm, label)) for label in self.labels))


def _mean(name: str, values_SN: np.ndarray, settings: Bootstrap, **fields: Any) -> MetricValue:
    """Over the subjects whose mask has the label, each with its mean over seeds."""
    present = ~np.isnan(values_SN).any(axis=0)
    return mean_value(name, values_SN[:, present].mean(axis=0).tolist(), settings, **fields)


def _format(metric: MetricValue, form: str = ".4f") -> str:
    ends = "" if metric.low is None or metric.high is None else f" ({metric.low:{form}} to {metric.high:{form}})"
    return f"{metric.value:{form}}{ends}"


def _nullable(values_SN: np.ndarray) -> list[list[float | None]]:
    return [[None if np.isnan(v) else round(float(v), 5) for v in row] for row in values_SN]


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(cells) + " |"


def _header(names: tuple[str, ...]) -> list[str]:
    return [_line(names), "|" + "---|" * len(names)]
