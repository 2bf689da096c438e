"""Runs ladder_checks.py in a process of its own: Triton decides when a kernel is defined whether to interpret it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path


def run(*arguments, interpret=True):
    """The JSON on the last line that it prints."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).parent / "ladder_checks.py"), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith(("[", "{"))][-1])
