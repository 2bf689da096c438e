"""Parallel gzip compression: every reader decompresses it, and the bytes are deterministic."""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxtune.data import nifti
from voxtune.data.nifti import HEADER, PIECE, gzip_bytes

NOISE = np.random.default_rng(0).integers(0, 40, 3 * PIECE + 17, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, len(NOISE)])
def test_every_reader_decompresses_it(size, tmp_path):
    data = NOISE[:size]
    compressed = gzip_bytes(data)
    assert gzip.decompress(compressed) == data
    # One member: a reader that stops at its end has read everything.
    reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
    assert reader.decompress(compressed) == data and reader.eof and not reader.unused_data
    if shutil.which("gzip"):
        (tmp_path / "x.gz").write_bytes(compressed)
        done = subprocess.run(["gzip", "-dc", tmp_path / "x.gz"], capture_output=True, check=True)
        assert done.stdout == data


@given(st.binary(max_size=300), st.integers(1, 9))
def test_any_bytes(data, level):
    old, nifti.PIECE = nifti.PIECE, 64
    try:
        assert gzip.decompress(gzip_bytes(data, level)) == data
    finally:
        nifti.PIECE = old


def test_bytes_do_not_depend_on_the_number_of_cores_and_the_size_is_close_to_gzip(monkeypatch):
    compressed = gzip_bytes(NOISE)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert gzip_bytes(NOISE) == compressed and compressed.startswith(HEADER)
    assert len(compressed) < 1.01 * len(gzip.compress(NOISE, 4))
