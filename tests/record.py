"""--record=FILE: the outcome of every test of a run as one JSON file, with where and on which commit it ran.

Why: the GPU tests and the slow tests are run by hand, and their result is evidence like any measurement.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest


class Recorder:
    def __init__(self, path: Path):
        self.path, self.began, self.rows = path, time.monotonic(), {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        row = self.rows.setdefault(report.nodeid, {"name": report.nodeid, "outcome": "passed", "seconds": 0.0})
        row["seconds"] = round(row["seconds"] + report.duration, 2)
        # What the test counted, by record_property. Reports of a later phase repeat it.
        row.update(report.user_properties)
        if report.outcome != "passed":
            row["outcome"] = report.outcome
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            # Of a traceback the last line names the error.
            row["reason"] = reason.strip().splitlines()[-1][-300:]

    def pytest_sessionfinish(self) -> None:
        sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
        from results_file import write

        rows = list(self.rows.values())
        outcomes = [row["outcome"] for row in rows]
        counts = {name: outcomes.count(name) for name in ("passed", "failed", "skipped")}
        write(self.path, rows, **counts, seconds=round(time.monotonic() - self.began, 1))
