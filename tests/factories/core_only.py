"""The command line where optional libraries are not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

# A GPU machine without internet: it has PyTorch, numpy, safetensors, typer, and nothing else that Voxtune uses.
BARE = "ray nibabel scipy nilearn sklearn pandas pyarrow rich yaml PIL plotly tensorboard monai diffusers"
# What the extras install; the core remains.
EXTRAS = "ray scipy nilearn sklearn pandas pyarrow yaml tensorboard plotly monai diffusers"

CODE = """
import contextlib, io, json, sys

# As if they were not installed: imports fail, and find_spec returns None.
sys.modules.update(dict.fromkeys(sys.argv[1].split()))
import torch
torch.set_num_threads(1)
from voxtune.cli.main import main
if sys.argv[2] == "one":
    sys.argv = ["voxtune", *sys.argv[3:]]  # as a model card records it
    sys.exit(main(sys.argv[1:]))
for command in json.loads(sys.argv[3]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(command)
    print(json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()}))
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CODE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def voxtune_bare(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`voxtune arguments` on a bare GPU machine."""
    return _run(BARE, "one", *map(str, arguments))


def voxtune_core(commands: Iterable[Sequence[object]]) -> list[dict[str, Any]]:
    """Each command with the core dependencies only, one after the other in one process: exit code, stdout and stderr."""
    listed = [[str(a) for a in command] for command in commands]
    done = _run(EXTRAS, "many", json.dumps(listed))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
