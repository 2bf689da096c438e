"""`python -m voxtune.profile ...` is the same as `voxtune profile ...`."""

from __future__ import annotations

import runpy
import sys

# Worker processes import this module again and must not run the command again.
if __name__ == "__main__":
    sys.argv.insert(1, "profile")
    runpy.run_module("voxtune", run_name="__main__", alter_sys=True)
