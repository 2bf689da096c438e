"""Reading and writing NIfTI files: the geometry is preserved exactly, damaged files raise InputError.

A file is read into memory completely before nibabel parses it. This verifies the gzip checksum, avoids a memory map that
crashes the process if the file is truncated meanwhile, and allows the header to be checked before any allocation.
"""

from __future__ import annotations

import base64
import gzip
import html
import math
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from voxtune.data.orientation import axis_codes
from voxtune.errors import InputError
from voxtune.files import checked_path, one_line, write_atomic

# Deflate refers back 32 KiB at most, so independent pieces of this size compress almost as well.
PIECE = 2**19
# Without name, time stamp and system, so that the same data gives the same bytes.
HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"


def gzip_bytes(data: bytes, level: int = 4) -> bytes:
    """Compresses `data` in parallel to one gzip member; the bytes do not depend on the number of threads.

    One member, because browsers decompress only the first.
    """
    view = memoryview(data)
    pieces = [view[start : start + PIECE] for start in range(0, len(view), PIECE)] or [view]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as pool:
        parts = list(pool.map(lambda n: _deflated(pieces[n], level, last=n == len(pieces) - 1), range(len(pieces))))
    return b"".join([HEADER, *parts, struct.pack("<LL", zlib.crc32(view), len(view) & 0xFFFFFFFF)])


def _deflated(piece: memoryview, level: int, *, last: bool) -> bytes:
    """Deflate blocks that end on a byte boundary, so that others can follow; the last piece ends the stream."""
    stream = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return stream.compress(piece) + stream.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


MAX_VOXELS = 2**30
# Voxel sizes outside this range indicate a header in metres or micrometres, or a wrong one.
SMALLEST_MM, LARGEST_MM = 0.005, 500.0
MAX_HEADER_BYTES = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"
# The maximum expansion of deflate: a header that requires more data is damaged.
MAX_DEFLATE_RATIO = 1032
GEOMETRY_FIELDS = (
    *("qform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("sform_code", "srow_x", "srow_y", "srow_z", "xyzt_units"),
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Volume:
    """A 3D array (X, Y, Z) with its affine: an image, or a mask of whole numbers. Notebooks show its middle slice.

    `header` is nibabel's and `path` the file; both are None for volumes created in memory. `kind` names the image, such as
    "T1w". `centre` is the voxel (x, y, z) that pictures show; None: the middle, in a mask that of the smallest label.
    Intensities of generated volumes are in [0, 1].
    """

    array: np.ndarray
    affine: np.ndarray
    header: Any = None
    path: Path | None = None
    kind: str | None = None
    centre: tuple[int, int, int] | None = None

    def save(self, path: str | Path) -> Path:
        """Writes the volume to a .nii or .nii.gz file and returns its path; an existing file is replaced."""
        return write_volume(checked_path(path), self.array, self)

    def __repr__(self) -> str:
        array = np.asarray(self.array)
        if array.ndim != 3 or not array.size:
            return f"Volume(shape {array.shape}, not a 3D volume)"
        labels = np.issubdtype(array.dtype, np.integer) or array.dtype == bool
        parts = [self.kind or ("mask" if labels else "image"), _list(array.shape), self._describe_grid()]
        if labels:
            values = np.unique(array)
            parts.append(f"labels {', '.join(map(str, values[:8]))}{', ...' if len(values) > 8 else ''}")
        else:
            parts.append(f"intensities {array.min():.3g} to {array.max():.3g}")
        return f"Volume({', '.join(parts)})"

    def _describe_grid(self) -> str:
        try:
            check_affine(np.asarray(self.affine), self.name)
        except InputError:
            return "invalid affine"
        return f"{' x '.join(f'{s:.3g}' for s in self.spacing)} mm, {axis_codes(self.affine)}"

    def _repr_png_(self) -> bytes:
        from voxtune.data.pixels import slice_png

        return slice_png(self)

    def _repr_html_(self) -> str:
        picture = base64.b64encode(self._repr_png_()).decode()
        text = html.escape(repr(self))
        return f'<figure><img alt="axial slice" src="data:image/png;base64,{picture}"><figcaption>{text}</figcaption></figure>'

    @property
    def name(self) -> str:
        """The name in messages."""
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
        """The qform and its code; (None, 0) if the file has none."""
        return (None, 0) if self.header is None else self.header.get_qform(coded=True)

    @property
    def sform(self) -> tuple[np.ndarray | None, int]:
        """The sform and its code; (None, 0) if the file has none."""
        return (None, 0) if self.header is None else self.header.get_sform(coded=True)


def read_volume(path: str | Path, *, allow_nonfinite: bool = False) -> Volume:
    """Reads an image as float32 with its scaling applied; NaN and infinity are errors unless `allow_nonfinite`."""
    path = Path(path)
    raw, header, affine = _load(path)
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.ascontiguousarray(raw, dtype=np.float32)
    bad = array.size - int(np.isfinite(array).sum())
    if bad and not allow_nonfinite:
        raise InputError(f"{path}: {bad} of {array.size} voxels are NaN or infinite; replace them before use")
    return Volume(array=array, affine=affine, header=header, path=path)


def read_labels(path: str | Path) -> Volume:
    """Reads a label map as int32; float or scaled storage is accepted if every value is an integer."""
    path = Path(path)
    raw, header, affine = _load(path)
    return Volume(array=exact_labels(raw, str(path)), affine=affine, header=header, path=path)


def exact_labels(array: np.ndarray, name: str) -> np.ndarray:
    """Converts `array` to int32; raises InputError if that would change a value."""
    if not np.issubdtype(array.dtype, np.integer) and array.dtype != bool:
        finite = np.isfinite(array)
        if not finite.all():
            raise InputError(
                f"{name}: {int((~finite).sum())} voxels of the label map are NaN or infinite; set them to 0"
            )
        # Scaling is applied in floating point: 3 may be read as 3.0000001.
        rounded = np.rint(array)
        fractional = np.abs(array - rounded) > 1e-4
        if fractional.any():
            raise InputError(
                f"{name}: a label map must contain integers, got {float(array[fractional][0]):g}; give the mask, not the image"
            )
        array = rounded
    low, high = array.min(), array.max()
    if low < -(2**31) or high >= 2**31:
        raise InputError(f"{name}: label {low if low < 0 else high} does not fit into 32 bits; renumber the labels")
    return np.ascontiguousarray(array, dtype=np.int32)


def write_volume(path: str | Path, array: np.ndarray, like: Volume, dtype: Any = None) -> Path:
    """Writes `array` (X, Y, Z) with the affine, qform, sform, codes and units of `like`. The write is atomic.

    `dtype` None: float32 for floats, the smallest of uint8, int16, int32 for integers. An integer `dtype` for a float
    array stores scaled integers.
    """
    path = Path(path)
    write_atomic(path, volume_bytes(array, like, dtype, compressed=_is_compressed(path)))
    return path


def volume_bytes(array: np.ndarray, like: Volume, dtype: Any = None, *, compressed: bool = True) -> bytes:
    """The content of the file that `write_volume` writes."""
    assert array.shape == like.shape, f"shape {array.shape} is not that of {like.name}, {like.shape}"
    data = _image_bytes(array, like, np.dtype(dtype) if dtype is not None else _storage_dtype(array))
    return gzip_bytes(data) if compressed else data


def check_affine(affine: np.ndarray, name: str) -> None:
    """Raises InputError for an affine that is not 4 x 4, not finite, singular, or not in millimetres."""
    if affine.shape != (4, 4) or not np.isfinite(affine).all():
        raise InputError(f"{name}: the affine is not finite; repair the header's sform or qform")
    lengths = np.sqrt((affine[:3, :3] ** 2).sum(axis=0))
    if lengths.min() < 1e-6 or lengths.max() > 1e6 or abs(np.linalg.det(affine[:3, :3] / lengths)) < 1e-3:
        raise InputError(
            f"{name}: the affine is singular (voxel size {_list(lengths)} mm); repair the header's sform or qform"
        )
    if lengths.min() < SMALLEST_MM or lengths.max() > LARGEST_MM:
        raise InputError(
            f"{name}: voxel size {_list(lengths)} mm is implausible; the affine must be in millimetres, not metres or micrometres"
        )


def _load(path: Path) -> tuple[np.ndarray, Any, np.ndarray]:
    """The array in its own data type (with scaling applied), the header and the affine."""
    data = _contents(path)
    try:
        image = _image_class(data, path).from_bytes(data)
        header, shape = image.header, _volume_shape(image.shape, path)
        dtype = header.get_data_dtype()
        if dtype.kind not in "iufb":
            raise InputError(f"{path}: voxels of type {dtype} are not scalar numbers; convert the file")
        array = np.asanyarray(image.dataobj).reshape(shape)
        affine = np.asarray(image.affine, dtype=np.float64)
        header.get_qform(coded=True)
    except InputError:
        raise
    # nibabel raises almost any exception for a damaged file.
    except Exception as error:
        raise InputError(f"{path}: damaged NIfTI file ({one_line(error)}); export it again") from None
    check_affine(affine, str(path))
    return array, header, affine


def _contents(path: Path) -> bytes:
    """All bytes of the image, decompressed, read after the header was checked against the size of the file."""
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


def _read_checked(stream: IO[bytes] | gzip.GzipFile, max_bytes: int, path: Path) -> bytes:
    head = stream.read(540)
    needed = _needed_bytes(head, path)
    if needed > max_bytes:
        raise InputError(
            f"{path}: the header requires {needed} bytes, more than the file can contain; it is truncated or damaged"
        )
    rest = stream.read(max(0, needed - len(head)))
    # Reading to the end verifies the gzip checksum; data after the image is discarded.
    while stream.read(2**20):
        pass
    data = head + rest
    if len(data) < needed:
        raise InputError(f"{path}: truncated, {len(data)} of {needed} bytes; copy or export the file again")
    return data


def _needed_bytes(head: bytes, path: Path) -> int:
    """Number of bytes up to the last voxel according to the header; raises InputError for invalid headers."""
    image_class = _image_class(head, path)
    try:
        header = image_class.header_class(head[: image_class.header_class.template_dtype.itemsize], check=False)
        # Not by nibabel's property, which fails for an unexpected dim[0].
        rank, *shape = (int(n) for n in header["dim"])
        itemsize, offset = header.get_data_dtype().itemsize, float(header["vox_offset"])
    except Exception as error:
        raise InputError(f"{path}: damaged NIfTI header ({one_line(error)}); export it again") from None
    if not 1 <= rank <= 7 or min(shape[:rank]) < 1:
        raise InputError(f"{path}: damaged NIfTI header (dimensions {[rank, *shape]}); export it again")
    voxels = math.prod(shape[:rank])
    if voxels > MAX_VOXELS:
        raise InputError(f"{path}: {_list(shape[:rank])} voxels exceed the limit of {MAX_VOXELS}")
    # With an offset of 0, nibabel would return the bytes of the header as voxels.
    if not len(header.binaryblock) + 4 <= offset <= MAX_HEADER_BYTES:
        raise InputError(f"{path}: damaged NIfTI header (data offset {offset:g}); export it again")
    return int(offset) + voxels * itemsize


def _image_class(head: bytes, path: Path) -> Any:
    try:
        import nibabel as nib
    except ImportError:
        raise InputError("NIfTI files require nibabel: pip install nibabel") from None
    if len(head) >= 348 and head[344:348] == b"n+1\0":
        return nib.Nifti1Image
    if len(head) >= 540 and head[4:12] == b"n+2\0\r\n\x1a\n":
        return nib.Nifti2Image
    if head[344:348] == b"ni1\0":
        raise InputError(f"{path}: header of a two-file NIfTI (.hdr, .img); convert it to a single .nii file")
    raise InputError(f"{path}: not a NIfTI file (no NIfTI magic in its header)")


def _volume_shape(shape: tuple[int, ...], path: Path) -> tuple[int, int, int]:
    if len(shape) < 3 or any(n != 1 for n in shape[3:]):
        raise InputError(
            f"{path}: expected one 3D volume, got {len(shape)}D ({_list(shape)}); split or convert the file"
        )
    return (int(shape[0]), int(shape[1]), int(shape[2]))


def _is_compressed(path: Path) -> bool:
    name = path.name.lower()
    if not name.endswith((".nii", ".nii.gz")):
        raise InputError(f"{path}: file name must end in .nii or .nii.gz")
    return name.endswith(".gz")


def _storage_dtype(array: np.ndarray) -> np.dtype:
    if not np.issubdtype(array.dtype, np.integer) and array.dtype != bool:
        return np.dtype(np.float32)
    low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
    for dtype in (np.uint8, np.int16, np.int32):
        if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max:
            return np.dtype(dtype)
    raise InputError(f"labels from {low} to {high} do not fit into 32 bits; renumber the labels")


def _image_bytes(array: np.ndarray, like: Volume, dtype: np.dtype) -> bytes:
    import nibabel as nib

    source = like.header
    image_class = nib.Nifti2Image if isinstance(source, nib.Nifti2Header) else nib.Nifti1Image
    # A new header: descriptions and extensions of the mask do not describe this volume and may contain the patient's name.
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
    integer = np.issubdtype(array.dtype, np.integer) or array.dtype == bool
    if integer and np.issubdtype(dtype, np.integer) and array.size:
        limits = np.iinfo(dtype)
        assert limits.min <= array.min() and array.max() <= limits.max, f"labels do not fit into {dtype}"
    direct = integer or np.issubdtype(dtype, np.floating)
    return bytes(image_class(array.astype(dtype) if direct else array, None, header).to_bytes())


def _list(numbers: Any) -> str:
    return " x ".join(f"{n:g}" for n in numbers)
