"""The convolution's kernels on the CPU: by Triton's interpreter against float64, and compiled for real GPUs without one."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest

from tests.factories.triton_checks import ARCHS, run_checks

run = partial(run_checks, "kernels/conv3d_checks.py")


@pytest.mark.parametrize(
    ("dtype", "kind", "extent"),
    [
        ("float16", "integers", "quick"),
        pytest.param("float16", "integers", "all", marks=pytest.mark.slow),
        pytest.param("float32", "integers", "all", marks=pytest.mark.slow),
        pytest.param("float32", "random", "all", marks=pytest.mark.slow),
        pytest.param("float16", "random", "all", marks=pytest.mark.slow),
    ],
)
def test_against_float64(dtype, kind, extent):
    rows = run("numerics", dtype, kind, extent, interpret=True)
    bar = {"float32": 1e-6, "float16": 1e-3}[dtype]
    assert len(rows) >= (5 if extent == "quick" else 16)
    for row in rows:
        assert row["error"] < bar, row
        assert row["exact"] or kind == "random", row
        assert row["counted"] and row["plain"] and row["pointers"], row
        assert row["mean"] < 1e-5 and row["spread"] < 1e-4, row


@pytest.mark.slow
def test_statistics_about_a_large_mean():
    (row,) = run("numerics", "float32", "offset", "quick", interpret=True)
    assert row["spread"] < 1e-4, row


def test_entry_point():
    row = run("entry", interpret=True)
    assert row["error"] < 1e-3 and row["statistics"] < 1e-3, row
    assert row["operator"] and row["checks"] == 1, "the operator checks its inputs once a call"
    assert row["reasons"][0] is None
    assert all(row["reasons"][1:]), row


def test_schedule_of_the_halo_kernel():
    """Its rings, replayed with the latest reads and the earliest refills that the waits allow."""
    for chunks in (1, 2, 5):
        for stages in (2, 4):
            assert replay(chunks, stages) == 2 * 27 * chunks


def replay(chunks, stages, weights=3):
    planes, taps, done, before = {}, {}, set(), []

    def fetch_plane(j):
        if j < 12 * chunks:
            planes[j % stages] = (j % 4, j // 4)

    def fetch_weights(m):
        if m < 9 * chunks:
            taps[m % weights] = (m % 3, m // 3)

    def multiply(products):
        for upper, slot, tap, kh in products:
            (z, q), (kd, same) = planes[slot], taps[tap]
            assert q == same and kd == z - upper and (upper, kd, kh, q) not in done
            done.add((upper, kd, kh, q))

    for i in range(weights):
        if i < stages - 1:
            fetch_plane(i)
        fetch_weights(i)
    for q in range(3 * chunks):
        for z in range(4):
            j, m = 4 * q + z, 3 * q + z
            assert planes[z % stages] == (z, q) and (z == 3 or taps[m % weights] == (z, q))
            multiply(before)
            before = [(u, z % stages, (m - u) % weights, kh) for kh in range(3) for u in (0, 1) if 0 <= z - u < 3]
            fetch_plane(j + stages - 1)
            if z > 1:
                fetch_weights(m - 2 + weights)
            elif z == 0 and q > 0:
                fetch_weights(m - 1 + weights)
    multiply(before)
    return len(done)


@pytest.mark.parametrize("extent", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_compiles_for_hopper(extent):
    rows = run("compile", "90", extent, interpret=False)
    assert len(rows) >= 2
    for row in rows:
        assert row["products"] and row["bulk"] and not row["serialised"], row
        assert row["spills"] <= 128 and row["shared"] <= row["limit"], row


@pytest.mark.slow
@pytest.mark.parametrize("arch", [80, 86, 89, 100, 120])
def test_compiles_for_other_devices(arch):
    rows = run("compile", arch, "all", interpret=False)
    assert len(rows) >= 8
    for row in rows:
        # Devices without the copy engine load 16 bytes at a time, asynchronously.
        assert row["products"] and (row["bulk"] if arch >= 100 else row["wide"] and not row["bulk"]), row
        assert row["spills"] <= 32 and row["shared"] <= row["limit"], row


@pytest.mark.parametrize("arch", ARCHS)
def test_join_compiles(arch):
    for row in run("join", arch, interpret=False):
        assert row["spills"] == 0 and row["shared"] <= 48 << 10, row


SHAPES = [(1, 128, 128, 128, (8,), 8), (1, 128, 128, 128, (32, 32), 32), (1, 144, 192, 192, (64,), 64)]
SHAPES += [
    (1, 64, 64, 64, (96,), 96),
    (2, 16, 16, 16, (256, 256), 256),
    (1, 8, 8, 8, (320,), 320),
    (1, 1, 1, 1, (16,), 8),
]


@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 120, 0])
@pytest.mark.parametrize("kernel", [(3, 3, 3), (1, 3, 3), (3, 1, 1)])
def test_tiles_fit_into_the_shared_memory_of_each_device(capability, kernel):
    from voxtune.kernels.conv3d_tiles import SHARED_MEMORY, Device, shared_memory, tiles

    shared = SHARED_MEMORY.get(capability, 64 << 10)
    for halo in (True, False) if capability == 90 else (False,):
        device = Device(hopper=capability == 90, halo=halo, shared=shared)
        for shape in SHAPES:
            tile = tiles(*shape, kernel=kernel, device=device)
            assert shared_memory(tile) + 1024 <= shared, (shape, tile)
            assert tile.split <= 27 * sum(shape[4])
            assert not tile.halo or (halo and kernel == (3, 3, 3))


def test_few_channels_are_padded_to_the_least_that_the_matrix_units_take():
    from voxtune.kernels.conv3d_tiles import chunk_of, tiles

    assert [chunk_of(c) for c in ((8,), (32,), (24, 8), (64, 64), (96,), (80,), (320,), (112,))] == [
        *(16, 32, 16, 64, 32, 32, 64, 64)
    ]
    assert [tiles(1, 64, 64, 64, (64,), K).k for K in (8, 16, 24, 32, 40, 64, 128)] == [16, 16, 32, 32, 64, 64, 64]


def test_rocm_devices_are_not_hopper(monkeypatch):
    """They report compute capability 9."""
    import torch

    from voxtune.kernels import conv3d_tiles

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not conv3d_tiles.is_hopper(device) and not conv3d_tiles.has_copy_engine(device)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert conv3d_tiles.is_hopper(device) and conv3d_tiles.has_copy_engine(device)


def test_without_gluon_only_the_halo_kernel_is_lost():
    code = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton.experimental.gluon.language.nvidia"):
            raise ImportError("refused: " + name)

sys.meta_path.insert(0, Refuse())
for name in [n for n in sys.modules if n.startswith("triton.experimental.gluon.language.nvidia")]:
    del sys.modules[name]
import voxtune.kernels.ops
from voxtune.kernels.conv3d_tiles import has_gluon
sys.exit(has_gluon())
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
