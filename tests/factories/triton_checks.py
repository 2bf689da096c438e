"""Runs a file of kernel checks outside this process: Triton reads TRITON_INTERPRET when a kernel is defined."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.factories.warm_python import WarmPython

TESTS = Path(__file__).parent.parent
# Largest relative errors of the small kernels. The interpreter truncates bfloat16: twice the error of a GPU.
INTERPRETER_ERRORS = {"torch.float32": 5e-7, "torch.float16": 5e-4, "torch.bfloat16": 4e-3}
# Compute capabilities that every kernel is compiled for; all but Hopper's in slow tests.
OTHER_ARCHS = [pytest.param(arch, marks=pytest.mark.slow) for arch in (80, 86, 89, 100)]
ARCHS = [90, *OTHER_ARCHS]
# The same for the small kernels: (compute capability, types).
COMPILED = [
    (90, "bf16"),
    *(pytest.param(arch, "bf16,fp32", marks=pytest.mark.slow) for arch in (90, 80, 86, 89, 100)),
]

_MODULES = (
    "torch triton triton.language triton.compiler voxtune.kernels.conv3d voxtune.kernels.group_norm voxtune.workloads"
)
_PROCESSES = {
    interpret: WarmPython(_MODULES, {"TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"})
    for interpret in (False, True)
}


def run_checks(file: str, *arguments: object, interpret: bool) -> Any:
    """The JSON that `file`, a path below tests/, prints on its last line."""
    done = _PROCESSES[interpret].run(TESTS / file, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads([line for line in done.stdout.splitlines() if line.startswith(("[", "{"))][-1])
