"""Damaged NIfTI and MGH files: each is read, or rejected with an InputError that names it."""

from __future__ import annotations

import gzip
import os
import struct
import tracemalloc

import nibabel as nib
import numpy as np
import pytest

from tests.factories.contracts import WHOLE_HEAD
from tests.factories.nifti import mgh_bytes
from voxtune.data.formats import _Layout, read_contents
from voxtune.data.grid import fit
from voxtune.data.nifti import read_labels, read_volume
from voxtune.data.preflight import check_mask
from voxtune.errors import InputError
from voxtune.reading import DEFAULT_LIMIT, MEMORY_RATIO

IMAGE = nib.Nifti1Image((np.arange(6 * 7 * 8) % 3).astype(np.int16).reshape(6, 7, 8), np.diag([1.5, 1.5, 1.5, 1.0]))
IMAGE.set_qform(IMAGE.affine, code=1)
RAW = IMAGE.to_bytes()
PACKED = gzip.compress(RAW, mtime=0)


def patched(offset: int, form: str, *values) -> bytes:
    data = bytearray(RAW)
    struct.pack_into(f"<{form}", data, offset, *values)
    return bytes(data)


def hostile_files() -> list[tuple[str, str, bytes]]:
    rng = np.random.default_rng(20)
    cases = [
        (f"cut-raw-{n}", ".nii", RAW[:n])
        for n in (0, 1, 2, 4, 40, 100, 343, 344, 347, 348, 351, 352, 353, 700, len(RAW) - 1)
    ]
    cases += [
        (f"cut-gz-{n}", ".nii.gz", PACKED[:n])
        for n in (0, 1, 2, 5, 10, 11, 20, 60, 100, len(PACKED) - 9, len(PACKED) - 4, len(PACKED) - 1)
    ]
    for i in range(70):
        data = bytearray(RAW)
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(0, 352))] = int(rng.integers(0, 256))
        cases.append((f"header-bytes-{i}", ".nii", bytes(data)))
    for i in range(30):
        data = bytearray(PACKED)
        data[int(rng.integers(0, len(data)))] ^= int(rng.integers(1, 256))
        cases.append((f"gzip-byte-{i}", ".nii.gz", bytes(data)))
    cases += [(f"noise-{i}", suffix, rng.bytes(2000)) for i, suffix in enumerate([".nii", ".nii.gz"] * 3)]
    cases += [(f"gzip-noise-{i}", ".nii.gz", gzip.compress(rng.bytes(2000))) for i in range(3)]
    return cases + lying_headers()


def lying_headers() -> list[tuple[str, str, bytes]]:
    nan, inf = float("nan"), float("inf")
    dims = [
        (3, -6, 7, 8),
        (3, 0, 7, 8),
        (3, 32767, 32767, 32767),
        (7, 32767, 32767, 32767),
        (0, 6, 7, 8),
        (-1, 6, 7, 8),
    ]
    dims += [(9, 6, 7, 8), (4, 6, 7, 4, 2), (2, 6, 56, 1), (3, 1, 1, 1), (5, 6, 7, 8, 1, 1)]
    cases = [(f"dims-{d}", ".nii", patched(40, f"{len(d)}h", *d)) for d in dims]
    cases.append(("dims-huge-gz", ".nii.gz", gzip.compress(patched(40, "4h", 3, 32767, 32767, 32767))))
    cases.append(("dims-large-gz", ".nii.gz", gzip.compress(patched(40, "4h", 3, 1000, 1000, 1000))))
    cases += [(f"affine-{v}", ".nii", patched(280, "4f", v, 0, 0, 0)) for v in (nan, inf, 0.0, 1e38, 1e-30)]
    cases += [(f"offset-{v}", ".nii", patched(108, "f", v)) for v in (nan, inf, -352.0, 0.0, 1e9, 353.0, 1e30)]
    cases += [
        (f"slope-{a}-{b}", ".nii", patched(112, "2f", a, b))
        for a, b in ((inf, 0), (1, nan), (1, inf), (nan, nan), (1e38, 1e38))
    ]
    cases += [(f"type-{t}", ".nii", patched(70, "h", t)) for t in (-1, 0, 1, 128, 255, 1536, 2048, 9999)]
    cases += [(f"quaternion-{v}", ".nii", patched(252, "2h3f", 1, 0, v, v, v)) for v in (nan, inf, 2.0, 0.9)]
    cases += [(f"magic-{m!r}", ".nii", RAW[:344] + m + RAW[348:]) for m in (b"ni1\0", b"n+2\0", b"\0\0\0\0", b"n+1 ")]
    cases.append(("extension", ".nii", RAW[:348] + b"\1\0\0\0" + struct.pack("<ii", 2**31 - 1, 6) + RAW[352:]))
    cases.append(("not-nifti", ".nii.gz", b"PK\3\4" + bytes(400)))
    return cases


MGH = mgh_bytes(np.asanyarray(IMAGE.dataobj), IMAGE.affine)
MGZ = gzip.compress(MGH, mtime=0)


def patched_mgh(offset: int, form: str, *values) -> bytes:
    data = bytearray(MGH)
    struct.pack_into(f">{form}", data, offset, *values)
    return bytes(data)


def hostile_mgh_files() -> list[tuple[str, str, bytes]]:
    rng = np.random.default_rng(21)
    nan, inf = float("nan"), float("inf")
    voxels_end = 284 + 6 * 7 * 8 * 2
    cases = [(f"mgh-cut-{n}", ".mgh", MGH[:n]) for n in (1, 3, 4, 20, 100, 283, 284, 285, 540, voxels_end - 1)]
    cases += [(f"mgz-cut-{n}", ".mgz", MGZ[:n]) for n in (1, 2, 10, 20, 60, len(MGZ) - 9, len(MGZ) - 1)]
    for i in range(60):
        data = bytearray(MGH)
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(0, 90))] = int(rng.integers(0, 256))
        cases.append((f"mgh-header-bytes-{i}", ".mgh", bytes(data)))
    for i in range(20):
        data = bytearray(MGZ)
        data[int(rng.integers(0, len(data)))] ^= int(rng.integers(1, 256))
        cases.append((f"mgz-byte-{i}", ".mgz", bytes(data)))
    dims = [(-6, 7, 8, 1), (0, 7, 8, 1), (6, 7, 8, 0), (6, 7, 8, 2), (6, 7, 8, -1), (2**31 - 1,) * 4, (40000, 1, 1, 1)]
    dims += [(1024, 1024, 1024, 1), (1024, 1024, 1025, 1), (1, 1, 1, 1)]
    cases += [(f"mgh-dims-{d}", ".mgh", patched_mgh(4, "4i", *d)) for d in dims]
    cases += [(f"mgz-dims-{d}", ".mgz", gzip.compress(patched_mgh(4, "4i", *d))) for d in dims]
    cases += [(f"mgh-type-{t}", ".mgh", patched_mgh(20, "i", t)) for t in (-1, 2, 5, 6, 7, 11, 2**31 - 1)]
    cases += [(f"mgh-version-{v}", ".mgh", patched_mgh(0, "i", v)) for v in (0, 2, -1, 2**24)]
    cases += [(f"mgh-flag-{v}", ".mgh", patched_mgh(28, "h", v)) for v in (0, -1, 2)]
    for v in (nan, inf, 0.0, 1e38, -1e-30):
        cases += [(f"mgh-{name}-{v}", ".mgh", patched_mgh(at, "f", v)) for name, at in (("delta", 30), ("mdc", 42))]
        cases.append((f"mgh-centre-{v}", ".mgh", patched_mgh(78, "3f", v, v, v)))
    cases += [(f"mgh-noise-{i}", suffix, rng.bytes(2000)) for i, suffix in enumerate([".mgh", ".mgz"] * 3)]
    cases += [(f"mgz-noise-{i}", ".mgz", gzip.compress(rng.bytes(2000))) for i in range(3)]
    return cases


CASES = hostile_files() + hostile_mgh_files()


def test_there_are_enough_cases():
    assert len(CASES) >= 320 and len({name for name, _, _ in CASES}) == len(CASES)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "suffix", "data"), CASES, ids=[name for name, _, _ in CASES])
def test_read_or_rejected(tmp_path, name, suffix, data):
    path = tmp_path / f"mask{suffix}"
    path.write_bytes(data)
    for read in (read_volume, read_labels):
        try:
            fit(read(path), WHOLE_HEAD, label=False)
        except InputError as error:
            assert f"mask{suffix}" in str(error) and "\n" not in str(error)
    check_mask(path, WHOLE_HEAD).to_dict()


@pytest.mark.parametrize("cut", [0, 10, 348, 400, len(RAW) - 1])
def test_truncated_files_are_rejected(tmp_path, cut):
    (tmp_path / "cut.nii").write_bytes(RAW[:cut])
    with pytest.raises(InputError, match=r"cut\.nii"):
        read_volume(tmp_path / "cut.nii")


@pytest.mark.parametrize("cut", [0, 1, 10, 60, len(PACKED) - 9, len(PACKED) - 1])
def test_truncated_gzip_is_rejected(tmp_path, cut):
    (tmp_path / "cut.nii.gz").write_bytes(PACKED[:cut])
    with pytest.raises(InputError, match=r"cut\.nii\.gz"):
        read_volume(tmp_path / "cut.nii.gz")


def test_a_wrong_checksum_is_rejected(tmp_path):
    data = bytearray(PACKED)
    data[-6] ^= 1
    (tmp_path / "sum.nii.gz").write_bytes(data)
    with pytest.raises(InputError, match=r"sum\.nii\.gz: damaged .*CRC check failed"):
        read_volume(tmp_path / "sum.nii.gz")


def test_the_undamaged_file_is_read(tmp_path):
    (tmp_path / "fine.nii.gz").write_bytes(PACKED)
    assert check_mask(tmp_path / "fine.nii.gz", WHOLE_HEAD).findings == ()


@pytest.mark.parametrize("offset", [0.0, 8.0, 351.0])
def test_the_header_is_never_read_as_voxels(tmp_path, offset):
    (tmp_path / "low.nii").write_bytes(patched(108, "f", offset))
    with pytest.raises(InputError, match=r"low\.nii.*offset"):
        read_volume(tmp_path / "low.nii")


def test_the_undamaged_mgh_file_is_read(tmp_path):
    for name, data in (("fine.mgh", MGH), ("fine.mgz", MGZ), ("no-footer.mgh", MGH[: 284 + 6 * 7 * 8 * 2])):
        (tmp_path / name).write_bytes(data)
        assert check_mask(tmp_path / name, WHOLE_HEAD).findings == ()


@pytest.mark.parametrize("cut", [0, 1, 10, 283, 284, 400, 284 + 6 * 7 * 8 * 2 - 1])
def test_truncated_mgh_files_are_rejected(tmp_path, cut):
    for name, data in (("cut.mgh", MGH[:cut]), ("cut.mgz", gzip.compress(MGH[:cut]))):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match=name):
            read_volume(tmp_path / name)


@pytest.mark.parametrize("dims", [(1000, 1000, 1000, 1), (1024, 1024, 1024, 1)])
def test_an_mgh_header_that_requires_more_than_the_file_allocates_nothing(tmp_path, dims):
    for name, data in (
        ("large.mgh", patched_mgh(4, "4i", *dims)),
        ("large.mgz", gzip.compress(patched_mgh(4, "4i", *dims))),
    ):
        (tmp_path / name).write_bytes(data)
        tracemalloc.start()
        with pytest.raises(InputError, match=rf"{name}.*more than the file can contain"):
            read_volume(tmp_path / name)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 4 * 2**20


@pytest.mark.parametrize("name", ["pipe.nii", "pipe.nii.gz", "pipe.mgz"])
def test_a_pipe_is_refused_at_once(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match="not a regular file"):
        read_labels(tmp_path / name)


def test_a_small_file_of_a_large_volume_is_refused_before_it_is_read(tmp_path, monkeypatch):
    """1000 x 1000 x 500 voxels of 2 bytes; the file is as large as its data compress to."""
    path = tmp_path / "large.nii.gz"
    path.write_bytes(gzip.compress(patched(40, "4h", 3, 1000, 1000, 500) + bytes(2**20)) + bytes(2**20))
    with pytest.raises(InputError, match=r"large\.nii\.gz: .* need 2\.79 GiB of memory.*--read-limit 4GiB"):
        read_volume(path)
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "4GiB")
    with pytest.raises(InputError, match="truncated"):
        read_volume(path)


def test_data_after_the_image_are_limited(tmp_path, monkeypatch):
    path = tmp_path / "tail.nii.gz"
    path.write_bytes(PACKED + gzip.compress(bytes(2**22)))
    assert read_labels(path).shape == (6, 7, 8)
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "1MiB")
    with pytest.raises(InputError, match="--read-limit"):
        read_labels(path)


def test_what_the_limit_counts():
    """Of ordinary volumes of 512 x 512 x 512, any file is small enough."""
    for itemsize in (1, 2, 4):
        assert _Layout(shape=[512] * 3, itemsize=itemsize, offset=352).memory <= DEFAULT_LIMIT
    # Scaled ones are computed in float64; a file of 84 MB passes, as such images compress by a factor of 2 to 3.
    assert _Layout(shape=[512] * 3, itemsize=2, offset=352, scaled=True).memory <= MEMORY_RATIO * 84 * 10**6


@pytest.mark.parametrize("kind", ["u1", "i2", ">i2", "i4", "u4", "f4", ">f4", "f8", "i8"])
@pytest.mark.parametrize(("slope", "inter"), [(1, 0), (2, 0), (0.001, -3), (1, 5), (1e-30, 0), (1e30, 1)])
def test_scaling_is_that_of_nibabel(tmp_path, kind, slope, inter):
    header = nib.Nifti1Header(endianness=">" if kind[0] == ">" else "<")
    header.set_data_dtype(kind)
    header.set_data_shape((5, 6, 7))
    header["scl_slope"], header["scl_inter"], header["vox_offset"] = slope, inter, 352
    header.set_sform(np.eye(4), code=1)
    voxels = np.random.default_rng(0).integers(0, 100, 5 * 6 * 7).astype(kind)
    path = tmp_path / "x.nii"
    path.write_bytes(header.binaryblock + bytes(4) + voxels.tobytes())
    expected = np.asanyarray(nib.load(path).dataobj)
    array = read_contents(path).array
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)
    assert read_volume(path, allow_nonfinite=True).array.flags.writeable
