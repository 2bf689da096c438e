"""Tiles measured for a network's own convolutions, with the kernels run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

from voxtune.kernels import measured_tiles
from voxtune.kernels.parity_tiles import ParityTile
from voxtune.plan import tiling

CPU = torch.device("cpu")


@pytest.mark.slow
def test_faster_tiles_that_compute_the_same_are_used_and_remembered(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.tiling_checks"],
        env={**os.environ, "TRITON_INTERPRET": "1", "VOXTUNE_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["measured"] == 3 and all(tried > 0 for tried in result["tried"]), result
    assert 0 < result["changed"] == result["used"], result
    assert result["again"] == 0, "the second network of these shapes takes the tiles from the cache"
    assert 0 <= result["difference"] < 2e-3
    (file,) = (tmp_path / "kernels").glob("tiles-*.json")
    assert len(json.loads(file.read_text())["tiles"]) == 3


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path))
    yield tiling.TABLE.path(CPU)
    measured_tiles.forget()


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"format": "voxtune-tiles/1"}', '{"format": 1, "tiles": {}}', "[" * 100_000]
)
def test_a_damaged_table_is_ignored(table, content, caplog):
    table.parent.mkdir(parents=True)
    table.write_text(content)
    assert tiling.TABLE.read(CPU) == {}
    assert len(caplog.records) == 1


def test_a_table_is_written_and_read(table):
    tile = asdict(ParityTile(h=8, w=8))
    tiling.TABLE.add(CPU, {"strided_conv 1 2": tile})
    tiling.TABLE.add(CPU, {"strided_conv 1 3": tile})
    assert tiling.TABLE.read(CPU) == {"strided_conv 1 2": tile, "strided_conv 1 3": tile}
