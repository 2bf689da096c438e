"""Runs a file of kernel checks in its own process: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
# Largest relative errors of the small kernels. The interpreter truncates bfloat16: twice the error of a GPU.
INTERPRETER_ERRORS = {"torch.float32": 5e-7, "torch.float16": 5e-4, "torch.bfloat16": 4e-3}


def run_checks(file: str, *arguments: object, interpret: bool) -> Any:
    """The JSON that `file`, a path below tests/, prints on its last line."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(TESTS / file), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith(("[", "{"))][-1])
