"""Manifests of many rows: how long a start takes, what a task costs, and how much memory the driver needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.scale.test_local import ROOT, environment


def measured(folder, count):
    command = [sys.executable, "-m", "tests.scale.many_checks", str(folder), str(count)]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.scale
def test_fifty_thousand_tasks(tmp_path, record_property):
    load = os.getloadavg()[0]
    few, many = measured(tmp_path / "few", 1000), measured(tmp_path / "many", 50_000)
    record_property("load_before", load)
    for name, value in many.items():
        record_property(name, round(value, 3))
        record_property(f"{name}_of_1000", round(few[name], 3))
    for row in (few, many):
        assert row["drawn"] == row["verified"] == row["tasks"] and row["problems"] == row["again_drawn"] == 0
        assert row["driver_peak_gib"] < 1
    assert 1000 * (many["cpu_s"] - few["cpu_s"]) / (many["tasks"] - few["tasks"]) < 5
    assert many["driver_task_ms"] < 1.5 * few["driver_task_ms"] + 0.1, "flat"
    assert many["start_cpu_s"] < 10
    # Beside other programs, wall times say nothing.
    if load < 0.5 * (os.cpu_count() or 1):
        assert many["start_s"] < 30 and many["again_s"] < 30
        assert many["task_ms"] < 5 and few["task_ms"] < 5
