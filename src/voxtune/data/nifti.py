"""NIfTI files in and out: geometry kept to the bit, damaged files refused by name.

A file is read whole into memory before nibabel parses it. That checks the gzip checksum, leaves no memory map that
would crash the process when a file is cut short under it, and lets the header's claims be checked before any
allocation.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from voxtune.errors import InputError
from voxtune.files import one_line, write_atomic

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


MAX_VOXELS = 2**30
# Headers that count in metres or micrometres are rare, often wrong, and told by sides that no scanner makes.
SMALLEST_MM, LARGEST_MM = 0.005, 500.0
MAX_HEADER_BYTES = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"
# Deflate cannot expand a byte further than this, so a header that claims more is lying.
MAX_DEFLATE_RATIO = 1032
GEOMETRY_FIELDS = (
    *("qform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("sform_code", "srow_x", "srow_y", "srow_z", "xyzt_units"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Volume:
    """A 3D array (X, Y, Z) with its place in the world. `header` is nibabel's; None for volumes made in memory."""

    array: np.ndarray
    affine: np.ndarray
    header: Any = None
    path: Path | None = None

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path) if self.path is not None else "volume in memory"

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(n) for n in self.array.shape)

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Millimetres between voxel centres along X, Y, Z."""
        x, y, z = (float(v) for v in np.sqrt((self.affine[:3, :3] ** 2).sum(axis=0)))
        return (x, y, z)

    @property
    def qform(self) -> tuple[np.ndarray | None, int]:
        """The qform and its code; (None, 0) where the file has none."""
        return (None, 0) if self.header is None else self.header.get_qform(coded=True)

    @property
    def sform(self) -> tuple[np.ndarray | None, int]:
        """The sform and its code; (None, 0) where the file has none."""
        return (None, 0) if self.header is None else self.header.get_sform(coded=True)


def read_volume(path: str | Path, *, allow_nonfinite: bool = False) -> Volume:
    """An image as float32, scaling applied. NaN and infinity are refused unless asked for."""
    path = Path(path)
    raw, header, affine = _load(path)
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.ascontiguousarray(raw, dtype=np.float32)
    bad = array.size - int(np.isfinite(array).sum())
    if bad and not allow_nonfinite:
        raise InputError(f"{path}: {bad} of {array.size} voxels are NaN or infinite; replace them before use")
    return Volume(array=array, affine=affine, header=header, path=path)


def read_labels(path: str | Path) -> Volume:
    """A label map as exact int32; float or scaled storage is accepted where every value is whole."""
    path = Path(path)
    raw, header, affine = _load(path)
    return Volume(array=exact_labels(raw, str(path)), affine=affine, header=header, path=path)


def exact_labels(array: np.ndarray, name: str) -> np.ndarray:
    """`array` as int32, refused with an example where that would change a value."""
    if not np.issubdtype(array.dtype, np.integer) and array.dtype != bool:
        finite = np.isfinite(array)
        if not finite.all():
            raise InputError(
                f"{name}: {int((~finite).sum())} voxels of the label map are NaN or infinite; set them to 0"
            )
        # Scaled storage multiplies in floating point: 3 may come back as 3.0000001, which is still label 3.
        whole = np.rint(array)
        off = np.abs(array - whole) > 1e-4
        if off.any():
            raise InputError(
                f"{name}: a label map holds whole numbers, found {float(array[off][0]):g}; give the mask, not the image"
            )
        array = whole
    low, high = array.min(), array.max()
    if low < -(2**31) or high >= 2**31:
        raise InputError(f"{name}: label {low if low < 0 else high} does not fit 32 bits; renumber the labels")
    return np.ascontiguousarray(array, dtype=np.int32)


def write_volume(path: str | Path, array: np.ndarray, like: Volume, dtype: Any = None) -> Path:
    """Writes `array` (X, Y, Z) on `like`'s grid: affine, qform, sform, their codes and the units stay as they are.

    `dtype` None: float32 for floats, the smallest of uint8, int16, int32 for integers. An integer `dtype` for a float
    array stores scaled integers. The file appears whole or not at all.
    """
    path = Path(path)
    write_atomic(path, volume_bytes(array, like, dtype, compressed=_is_compressed(path)))
    return path


def volume_bytes(array: np.ndarray, like: Volume, dtype: Any = None, *, compressed: bool = True) -> bytes:
    """The file that `write_volume` writes, in memory."""
    assert array.shape == like.shape, f"{array.shape} is not the grid of {like.name}, {like.shape}"
    data = _image_bytes(array, like, np.dtype(dtype) if dtype is not None else _storage_dtype(array))
    return gzip_bytes(data) if compressed else data


def check_affine(affine: np.ndarray, name: str) -> None:
    """Refuses an affine that places no volume: not 4 by 4, not finite, or flat."""
    if affine.shape != (4, 4) or not np.isfinite(affine).all():
        raise InputError(f"{name}: the affine is not finite; repair the header's sform or qform")
    lengths = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    if lengths.min() < 1e-6 or lengths.max() > 1e6 or abs(np.linalg.det(affine[:3, :3] / lengths)) < 1e-3:
        raise InputError(
            f"{name}: the affine is singular (voxel sides {_list(lengths)} mm); repair the header's sform or qform"
        )
    if lengths.min() < SMALLEST_MM or lengths.max() > LARGEST_MM:
        raise InputError(
            f"{name}: voxel sides {_list(lengths)} mm are no scanner's; give the file in millimetres, not metres or micrometres"
        )


def _load(path: Path) -> tuple[np.ndarray, Any, np.ndarray]:
    """Array with its own data type (scaling applied), header, affine."""
    data = _contents(path)
    try:
        image = _image_class(data, path).from_bytes(data)
        header, shape = image.header, _volume_shape(image.shape, path)
        dtype = header.get_data_dtype()
        if dtype.kind not in "iufb":
            raise InputError(f"{path}: voxels of type {dtype} are not numbers on one channel; convert the file")
        array = np.asanyarray(image.dataobj).reshape(shape)
        affine = np.asarray(image.affine, dtype=np.float64)
        header.get_qform(coded=True)
    except InputError:
        raise
    # nibabel reports damage as almost any exception, and damage to a user's file is the user's to mend.
    except Exception as error:
        raise InputError(f"{path}: damaged NIfTI file ({one_line(error)}); export it again") from None
    check_affine(affine, str(path))
    return array, header, affine


def _contents(path: Path) -> bytes:
    """All bytes of the image, decompressed, read only after the header's claims were held against the file's size."""
    _is_compressed(path)
    try:
        if path.is_dir():
            raise InputError(f"{path}: is a folder, not a NIfTI file")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise InputError(f"{path}: the file is empty; export it again")
            compressed = file.read(2) == GZIP_MAGIC
            file.seek(0)
            if not compressed:
                return _read_checked(file, size, path)
            with gzip.GzipFile(fileobj=file) as stream:
                return _read_checked(stream, size * MAX_DEFLATE_RATIO, path)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: damaged gzip stream ({one_line(error)}); copy or export the file again") from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: cannot be read ({one_line(error)})") from None


def _read_checked(stream: IO[bytes] | gzip.GzipFile, at_most: int, path: Path) -> bytes:
    head = stream.read(540)
    needed = _needed_bytes(head, path)
    if needed > at_most:
        raise InputError(
            f"{path}: the header claims {needed} bytes, the file cannot hold them; it is cut short or damaged"
        )
    rest = stream.read(max(0, needed - len(head)))
    # Reading to the end makes gzip compare its checksum; what lies behind the image is not kept.
    while stream.read(2**20):
        pass
    data = head + rest
    if len(data) < needed:
        raise InputError(f"{path}: cut short, {len(data)} bytes of {needed}; copy or export the file again")
    return data


def _needed_bytes(head: bytes, path: Path) -> int:
    """Bytes up to the image's last voxel, by the header; refuses what no volume has."""
    image_class = _image_class(head, path)
    try:
        header = image_class.header_class(head[: image_class.header_class.template_dtype.itemsize], check=False)
        # Read without nibabel's property, which fails on a dim[0] it does not expect.
        rank, *sides = (int(n) for n in header["dim"])
        itemsize, offset = header.get_data_dtype().itemsize, float(header["vox_offset"])
    except Exception as error:
        raise InputError(f"{path}: damaged NIfTI header ({one_line(error)}); export it again") from None
    if not 1 <= rank <= 7 or min(sides[:rank]) < 1:
        raise InputError(f"{path}: damaged NIfTI header (dimensions {[rank, *sides]}); export it again")
    voxels = math.prod(sides[:rank])
    if voxels > MAX_VOXELS:
        raise InputError(f"{path}: {_list(sides[:rank])} is more than the {MAX_VOXELS} voxels a volume may have")
    # nibabel takes an offset of 0 at its word and would return the header's own bytes as voxels.
    if not len(header.binaryblock) + 4 <= offset <= MAX_HEADER_BYTES:
        raise InputError(f"{path}: damaged NIfTI header (data offset {offset:g}); export it again")
    return int(offset) + voxels * itemsize


def _image_class(head: bytes, path: Path) -> Any:
    try:
        import nibabel as nib
    except ImportError:
        raise InputError("reading and writing NIfTI needs nibabel: pip install nibabel") from None
    if len(head) >= 348 and head[344:348] == b"n+1\0":
        return nib.Nifti1Image
    if len(head) >= 540 and head[4:12] == b"n+2\0\r\n\x1a\n":
        return nib.Nifti2Image
    if head[344:348] == b"ni1\0":
        raise InputError(f"{path}: the header of a two-file pair; convert it to a single .nii file")
    raise InputError(f"{path}: not a NIfTI file (no NIfTI mark in its header)")


def _volume_shape(shape: tuple[int, ...], path: Path) -> tuple[int, int, int]:
    if len(shape) < 3 or any(n != 1 for n in shape[3:]):
        raise InputError(f"{path}: {len(shape)}D of {_list(shape)}, expected one 3D volume; split or convert the file")
    return (int(shape[0]), int(shape[1]), int(shape[2]))


def _is_compressed(path: Path) -> bool:
    name = path.name.lower()
    if not name.endswith((".nii", ".nii.gz")):
        raise InputError(f"{path}: not a NIfTI name; use .nii or .nii.gz")
    return name.endswith(".gz")


def _storage_dtype(array: np.ndarray) -> np.dtype:
    if not np.issubdtype(array.dtype, np.integer) and array.dtype != bool:
        return np.dtype(np.float32)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for dtype in (np.uint8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise InputError(f"labels from {low} to {high} do not fit 32 bits; renumber the labels")


def _image_bytes(array: np.ndarray, like: Volume, dtype: np.dtype) -> bytes:
    import nibabel as nib

    source = like.header
    image_class = nib.Nifti2Image if isinstance(source, nib.Nifti2Header) else nib.Nifti1Image
    # A fresh header: descriptions and extensions of the mask say nothing about this volume and may name a patient.
    header = image_class.header_class()
    header.set_data_shape(array.shape)
    header.set_data_dtype(dtype)
    if source is None:
        header.set_xyzt_units("mm")
        header.set_qform(like.affine, code="scanner")
        header.set_sform(like.affine, code="scanner")
    else:
        for field in GEOMETRY_FIELDS:
            header[field] = source[field]
        header["pixdim"][:4] = source["pixdim"][:4]
    whole = np.issubdtype(array.dtype, np.integer) or array.dtype == bool
    if whole and np.issubdtype(dtype, np.integer) and array.size:
        limits = np.iinfo(dtype)
        assert limits.min <= array.min() and array.max() <= limits.max, f"labels do not fit {dtype}"
    direct = whole or np.issubdtype(dtype, np.floating)
    return bytes(image_class(array.astype(dtype) if direct else array, None, header).to_bytes())


def _list(numbers: Any) -> str:
    return " x ".join(f"{n:g}" for n in numbers)
