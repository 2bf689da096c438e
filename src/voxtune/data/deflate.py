"""gzip by several threads: compressing a volume must not take longer than drawing it."""

from __future__ import annotations

import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor

# Deflate looks 32 KiB back, so a piece of this size loses little by not seeing the one before it.
PIECE = 2**19
# Deflate, no name, no time stamp, no system: the same data gives the same bytes.
HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


def gzip_bytes(data: bytes, level: int = 4) -> bytes:
    """`data` as one gzip member, whatever reads gzip can read it; the same bytes for any number of threads.

    Not several members, which are as valid: browsers decompress the first alone.
    """
    view = memoryview(data)
    pieces = [view[start : start + PIECE] for start in range(0, len(view), PIECE)] or [view]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as pool:
        parts = list(pool.map(lambda n: _deflated(pieces[n], level, last=n == len(pieces) - 1), range(len(pieces))))
    return b"".join([HEADER, *parts, struct.pack("<LL", zlib.crc32(view), len(view) & 0xFFFFFFFF)])


def _deflated(piece: memoryview, level: int, *, last: bool) -> bytes:
    """Blocks that end on a whole byte, so that others can follow; those of the last piece end the stream."""
    stream = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return stream.compress(piece) + stream.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)
