"""The norm's kernels on the CPU: by Triton's interpreter against float64, and compiled for real GPUs without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Triton decides when a kernel is defined whether to interpret it, so the checks run in a process of their own.
CHECKS = Path(__file__).parent / "group_norm_checks.py"


def run(*arguments, interpret):
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECKS), *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_against_float64(dtype):
    rows = run("numerics", dtype, interpret=True)
    bar = {"float32": 2e-6, "float16": 2e-3}[dtype]
    assert len(rows) >= 28
    for row in rows:
        assert row["error"] < bar, row
        assert row["written"], row


def test_large_mean_does_not_cancel():
    row = run("offset", interpret=True)
    assert row["error"] < 1e-4, row


@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_without_spills(arch):
    for kernel in run("compile", str(arch), interpret=False):
        assert kernel["spills"] == 0, kernel
        assert kernel["registers"] <= 128, kernel
