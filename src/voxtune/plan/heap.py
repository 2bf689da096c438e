"""A CPU step's memory, kept for the next step.

Why: the C library gives blocks above 32 MB back to the system as soon as they are free, and every volume of a step is such a
block. The system then hands out zeroed pages anew, one fault at a time: at 64^3 with 64 channels, a quarter to a third of a
step. The process keeps its peak in return. What is set here holds for the whole process, until a plan without it runs.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# As <malloc.h> numbers them.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# Nothing is given back, and no block is apart; then what the library's own rule comes to for blocks of this size.
KEPT = {TRIM_THRESHOLD: 2**31 - 1, MMAP_THRESHOLD: 2**30}
USUAL = {TRIM_THRESHOLD: 2**26, MMAP_THRESHOLD: 2**25}
_kept = False


def why_no_heap() -> str | None:
    """The reason why memory cannot be kept here, or None."""
    return None if _library() is not None else "the C library is not glibc"


def keep_memory(wanted: bool) -> None:
    """Turns it on, or off again; nothing is touched in a process that never asked for it."""
    global _kept  # noqa: PLW0603 - the allocator is the process's own
    library = _library()
    if wanted == _kept or library is None:
        return
    for name, value in (KEPT if wanted else USUAL).items():
        library.mallopt(name, value)
    if not wanted:
        library.malloc_trim(0)
    _kept = wanted


def _library() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version") else None
