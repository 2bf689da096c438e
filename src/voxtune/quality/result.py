"""The result of an evaluation: figures with intervals, what was left out and why, as JSON and as a page of Markdown."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from voxtune.quality.bootstrap import MetricValue
from voxtune.versions import commit

FORMAT = "voxtune-metrics/1"
HEADER = ("figure", "value", "interval", "n", "better", "note")


@dataclass
class Notes:
    """Gathers figures, and what there is to say beside them, while an evaluation runs."""

    tell: Callable[[str], None]
    figures: list[MetricValue] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, figure: MetricValue) -> None:
        self.figures.append(figure)

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.tell(text)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """`left_out` names figures that could not be had, with the reason. `volumes` holds a row a synthetic volume."""

    figures: tuple[MetricValue, ...]
    left_out: dict[str, str]
    warnings: tuple[str, ...]
    counts: dict[str, int | None]
    volumes: tuple[dict[str, Any], ...]
    features: dict[str, Any] | None
    segmenter: dict[str, Any] | None

    def __getitem__(self, name: str) -> MetricValue:
        return next(f for f in self.figures if f.name == name)

    def to_json(self, **about: Any) -> dict[str, Any]:
        """`about` is what the caller knows besides: folders, options."""
        return {
            "format": FORMAT,
            **about,
            "counts": self.counts,
            "figures": [f.to_json() for f in self.figures],
            "left_out": self.left_out,
            "warnings": list(self.warnings),
            "features": self.features,
            "segmenter": self.segmenter,
            "versions": versions(),
            "volumes": list(self.volumes),
        }

    def rows(self) -> list[tuple[str, ...]]:
        """The figures as text, in the order of HEADER."""
        return [(f.name, _value(f.value, f.unit), _interval(f), str(f.n), f.better, f.note) for f in self.figures]

    def markdown(self, title: str) -> str:
        lines = [f"# {title}", "", _line(HEADER), "|---|---:|---:|---:|---|---|"]
        lines += [_line(row) for row in self.rows()]
        first = self.figures[0]
        lines += [
            "",
            f"Intervals of {first.level:.0%}: percentile bootstrap over volumes, seed {first.seed}. "
            "What each figure means stands in docs/quality.md.",
        ]
        for what, network in (("Features", self.features), ("Segmenter", self.segmenter)):
            if network is not None:
                lines += ["", f"{what}: `{network['file']}`, SHA-256 `{network['sha256']}`."]
        if self.left_out:
            lines += ["", "Left out:", *(f"- {name}: {reason}" for name, reason in self.left_out.items())]
        if self.warnings:
            lines += ["", "Warnings:", *(f"- {text}" for text in self.warnings)]
        return "\n".join(lines) + "\n"


def versions() -> dict[str, str]:
    from voxtune.versions import __version__

    return {
        "voxtune": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _value(value: float, unit: str = "") -> str:
    if not math.isfinite(value):
        return "infinite" if value == math.inf else "none"
    return f"{value:.4g}{' ' + unit if unit else ''}"


def _interval(figure: MetricValue) -> str:
    if figure.low is None or figure.high is None:
        return "none"
    return f"{figure.low:.4g} to {figure.high:.4g}"


def _line(cells: tuple[str, ...]) -> str:
    # A file's name may hold a bar, which would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
