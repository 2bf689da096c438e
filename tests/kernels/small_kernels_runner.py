"""What the tests of the small kernels share."""

from __future__ import annotations

from functools import partial

from checks_runner import run_checks

# The interpreter cuts bfloat16 instead of rounding it: twice the error of a GPU.
BARS = {"torch.float32": 5e-7, "torch.float16": 5e-4, "torch.bfloat16": 4e-3}
run = partial(run_checks, "small_kernels_checks.py")
