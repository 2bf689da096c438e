"""Memory of a CPU step that is reused by the next step.

Why: the C library returns blocks above 32 MB to the system as soon as they are freed, and every volume of a step is such a
block. The system then provides zeroed pages again, one page fault at a time: at 64^3 with 64 channels, a quarter to a third of
a step. In return the process keeps its peak memory. The setting holds for the whole process, until a plan without it runs.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

# Numbers of <malloc.h>.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# Nothing is returned to the system, and no block is mapped separately.
REUSED = {TRIM_THRESHOLD: 2**31 - 1, MMAP_THRESHOLD: 2**30}
# What the library's dynamic rule arrives at for blocks of this size.
DEFAULT = {TRIM_THRESHOLD: 2**26, MMAP_THRESHOLD: 2**25}
_reusing = False


def why_no_heap() -> str | None:
    """The reason why memory cannot be reused here, or None."""
    return None if _library() is not None else "the C library is not glibc"


def reuse_memory(enabled: bool) -> None:
    """Turns it on, or off again; changes nothing in a process that never turned it on."""
    global _reusing  # noqa: PLW0603 - the allocator belongs to the process
    library = _library()
    if enabled == _reusing or library is None:
        return
    for name, value in (REUSED if enabled else DEFAULT).items():
        library.mallopt(name, value)
    if not enabled:
        library.malloc_trim(0)
    _reusing = enabled


def _library() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "gnu_get_libc_version") else None
