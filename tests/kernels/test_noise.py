"""The noise kernel gives the noise of diffusion/noise.py: by the interpreter, and compiled for real GPUs without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).parent / "noise_checks.py"


def run(what, interpret):
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0"}
    done = subprocess.run(
        [sys.executable, str(CHECKS), what], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_noise_as_in_plain_pytorch():
    for row in run("numerics", interpret=True):
        assert row["shape"] and row["worst"] < 2e-6, row


def test_compiles_for_real_gpus():
    for arch, found in run("compiled", interpret=False).items():
        assert found["registers"] <= 96 and found["spills"] == 0, (arch, found)
