"""Runs small_kernels_checks.py: Triton decides when a kernel is defined whether to interpret it, so each in its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

CHECKS = Path(__file__).parent / "small_kernels_checks.py"
# The interpreter cuts bfloat16 instead of rounding it: twice the error of a GPU.
BARS = {"torch.float32": 5e-7, "torch.float16": 5e-4, "torch.bfloat16": 4e-3}


def run(*arguments, interpret):
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(CHECKS), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
