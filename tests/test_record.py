"""The record of a run says what happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

def test_good(record_property):
    record_property("cases", 7)

def test_bad():
    assert 1 + 1 == 3, "arithmetic"

@pytest.mark.skip(reason="no such card")
def test_left_out():
    pass
"""


def test_every_outcome_is_written(tmp_path):
    (tmp_path / "test_three.py").write_text(TESTS)
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", str(tmp_path / "test_three.py")]
    command += ["--record", str(tmp_path / "record.json"), "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads((tmp_path / "record.json").read_text())
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 1, 1)
    rows = {row["name"].rpartition("::")[2]: row for row in found["rows"]}
    assert rows["test_good"]["outcome"] == "passed" and "reason" not in rows["test_good"]
    assert rows["test_good"]["cases"] == 7 and "cases" not in rows["test_bad"]
    assert "AssertionError" in rows["test_bad"]["reason"]
    assert rows["test_left_out"]["reason"].endswith("no such card")
    assert found["commit"] and found["versions"]["torch"]


def test_the_commands_of_make_can_replace_a_record():
    """Written as two words, pytest takes the path of an existing record for a folder of tests, and loads no conftest."""
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert makefile.count("--record=") >= 5 and "--record " not in makefile
