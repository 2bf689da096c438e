"""The result of an evaluation: metrics with confidence intervals and skipped metrics, as JSON and as Markdown."""

from __future__ import annotations

import html
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
HEADER = ("metric", "value", "reference", "interval", "n", "better", "note")


@dataclass
class Notes:
    """Collects metrics, skipped metrics and warnings while an evaluation runs."""

    on_warning: Callable[[str], None]
    metrics: list[MetricValue] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def add(self, metric: MetricValue) -> None:
        self.metrics.append(metric)

    def leave_out(self, name: str, reason: str) -> None:
        self.left_out[name] = reason

    def warn(self, text: str) -> None:
        self.warnings.append(text)
        self.on_warning(text)


@dataclass(frozen=True, kw_only=True, repr=False)
class Evaluation:
    """The metrics of an evaluation, by name: `evaluation["psnr"].value`.

    `left_out` gives the reason for each skipped metric. `volumes` has one row per synthetic image.
    """

    metrics: tuple[MetricValue, ...]
    left_out: dict[str, str]
    warnings: tuple[str, ...]
    counts: dict[str, int | None]
    images: tuple[str, ...]  # kinds; none if no file name states one
    volumes: tuple[dict[str, Any], ...]
    features: dict[str, Any] | None
    segmenter: dict[str, Any] | None

    def __getitem__(self, name: str) -> MetricValue:
        for metric in self.metrics:
            if metric.name == name:
                return metric
        reason = f"was skipped: {self.left_out[name]}" if name in self.left_out else "unknown metric"
        raise KeyError(f"{name}: {reason}; this evaluation has {', '.join(metric.name for metric in self.metrics)}")

    def __repr__(self) -> str:
        """A table of the metrics, and the reasons for those that were skipped."""
        rows = [HEADER[:-1], *(row[:-1] for row in self.rows())]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
        # The numbers are aligned to the right.
        lines = [
            "  ".join(
                cell.rjust(width) if column in (1, 2, 3, 4) else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.items() if count is not None)
        return "\n".join(
            [f"Evaluation({counts})", *lines, *(f"skipped: {names}: {reason}" for names, reason in self.skipped())]
        )

    def _repr_html_(self) -> str:
        cells = [[f"<td>{html.escape(cell)}</td>" for cell in row] for row in self.rows()]
        head = "".join(f"<th>{name}</th>" for name in HEADER)
        body = "".join(f"<tr>{''.join(row)}</tr>" for row in cells)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def to_json(self, **about: Any) -> dict[str, Any]:
        """`about`: further entries from the caller, such as folders and options."""
        return {
            "format": FORMAT,
            **about,
            "counts": self.counts,
            "images": list(self.images),
            "figures": [self._figure(metric) for metric in self.metrics],
            "left_out": self.left_out,
            "warnings": list(self.warnings),
            "features": self.features,
            "segmenter": self.segmenter,
            "versions": versions(),
            "volumes": list(self.volumes),
        }

    def skipped(self) -> list[tuple[str, str]]:
        """(skipped metrics, the reason), one row for each reason."""
        names: dict[str, list[str]] = {}
        for name, reason in self.left_out.items():
            names.setdefault(reason, []).append(name)
        return [(", ".join(each), reason) for reason, each in names.items()]

    def rows(self) -> list[tuple[str, ...]]:
        """The metrics as text, in the order of HEADER."""
        rows: list[tuple[str, ...]] = []
        for m in self.metrics:
            reference = self._reference(m)
            real = "" if reference is None else _value(reference.value, reference.unit)
            rows.append((m.name, _value(m.value, m.unit), real, _interval(m), str(m.n), m.better, m.note))
        return rows

    def _reference(self, metric: MetricValue) -> MetricValue | None:
        """The same metric of the reference volumes, if there is one."""
        return next((other for other in self.metrics if other.name == f"{metric.name}_real"), None)

    def _figure(self, metric: MetricValue) -> dict[str, Any]:
        """A metric as JSON, with the value of the reference volumes beside it."""
        reference = self._reference(metric)
        return metric.to_json() | ({} if reference is None else {"real": reference.to_json()["value"]})

    def markdown(self, title: str) -> str:
        lines = [f"# {title}", "", _line(HEADER), "|---|---:|---:|---:|---:|---|---|"]
        lines += [_line(row) for row in self.rows()]
        first = self.metrics[0]
        lines += [
            "",
            f"{first.level:.0%} confidence intervals: percentile bootstrap over volumes, seed {first.seed}. "
            "The metrics are defined in docs/reference/metrics.md. "
            "The suffix `_real` marks the reference volumes: your scans or simulated subjects.",
        ]
        for role, network in (("Features", self.features), ("Segmenter", self.segmenter)):
            if network is not None:
                lines += ["", f"{role}: `{network['file']}`, SHA-256 `{network['sha256']}`."]
        if self.left_out:
            lines += ["", "Skipped:", *(f"- {names}: {reason}" for names, reason in self.skipped())]
        if self.warnings:
            lines += ["", "Warnings:", *(f"- {text}" for text in self.warnings)]
        return "\n".join(lines) + "\n"


def is_simulated(origin: str) -> bool:
    """Whether the description of subjects in a result (`data`) means simulated subjects, also as version 0.1 wrote it."""
    if "folder" in origin:
        return False
    return "simulated" in origin or "embedded cohort" in origin or origin.startswith("cohort ")


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


def _interval(metric: MetricValue) -> str:
    if metric.low is None or metric.high is None:
        return "none"
    return f"{metric.low:.4g} to {metric.high:.4g}"


def _line(cells: tuple[str, ...]) -> str:
    # A file name may contain a bar, which would end the cell.
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
