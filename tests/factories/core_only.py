"""The command line on a machine that holds PyTorch, numpy and typer, and nothing else of ours."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import sys

# As if they were not installed: imports fail, and who looks for them finds nothing.
absent = "nibabel scipy nilearn sklearn pandas pyarrow safetensors rich yaml PIL plotly tensorboard monai diffusers"
sys.modules.update(dict.fromkeys(absent.split()))
import torch
torch.set_num_threads(1)
from voxtune.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def voxtune_bare(*arguments):
    command = [sys.executable, "-c", CODE, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
