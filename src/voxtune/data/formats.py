"""The formats of volume files, NIfTI and MGH: headers are checked against the bytes present, then nibabel parses the file.

A file is read into memory completely before nibabel parses it. This verifies the gzip checksum, avoids a memory map that
crashes the process if the file is truncated meanwhile, and allows the header to be checked before any allocation.
"""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from voxtune.data.modality import NIFTI_ENDINGS, NIFTI_NAME
from voxtune.errors import InputError
from voxtune.files import one_line

MAX_VOXELS = 2**30
MAX_HEADER_BYTES = 64 * 2**20
GZIP_MAGIC = b"\x1f\x8b"
# The maximum expansion of deflate: a header that requires more data is damaged.
MAX_DEFLATE_RATIO = 1032
# The largest header of a format: that of NIfTI-2.
HEAD_BYTES = 540


@dataclass(frozen=True, kw_only=True, eq=False)
class VolumeContents:
    """What a file holds: voxels in their own type with scaling applied, affine, and a NIfTI header with the geometry.

    `affine_assumed`: the file does not state its orientation.
    """

    array: np.ndarray
    affine: np.ndarray
    header: Any
    affine_assumed: bool


def read_contents(path: Path) -> VolumeContents:
    """Reads and parses a file; raises InputError if it is not one valid 3D volume of scalar numbers."""
    format, data = _read(path)
    try:
        image = format.image_class.from_bytes(data)
        dtype = image.header.get_data_dtype()
        if dtype.kind not in "iufb":
            raise InputError(f"{path}: voxels of type {dtype} are not scalar numbers; convert the file")
        array = np.asanyarray(image.dataobj).reshape(_volume_shape(image.shape, path))
        affine = np.asarray(image.affine, dtype=np.float64)
        header, assumed = format.geometry(image, data)
    except InputError:
        raise
    # nibabel raises almost any exception for a damaged file.
    except Exception as error:
        raise InputError(f"{path}: damaged {format.name} file ({one_line(error)}); export it again") from None
    return VolumeContents(array=array, affine=affine, header=header, affine_assumed=assumed)


class _Format(Protocol):
    """A format: its name in messages, and what its header says."""

    name: str
    image_class: Any

    def layout(self, head: bytes) -> tuple[list[int], int, float]:
        """(dimensions, bytes of a voxel, offset of the first voxel), unchecked; may raise anything."""
        ...

    def header_bytes(self) -> int:
        """The smallest offset of the first voxel."""
        ...

    def geometry(self, image: Any, data: bytes) -> tuple[Any, bool]:
        """A NIfTI header with the image's geometry, and whether its affine is an assumption."""
        ...


class _Nifti:
    name = "NIfTI"

    def __init__(self, image_class: Any) -> None:
        self.image_class = image_class

    def layout(self, head: bytes) -> tuple[list[int], int, float]:
        header_class = self.image_class.header_class
        header = header_class(head[: header_class.template_dtype.itemsize], check=False)
        # Not by nibabel's property, which fails for an unexpected dim[0].
        rank, *shape = (int(n) for n in header["dim"])
        dims = shape[:rank] if 1 <= rank <= 7 else []
        return dims, header.get_data_dtype().itemsize, float(header["vox_offset"])

    def header_bytes(self) -> int:
        # With a smaller offset, such as 0, nibabel would return the bytes of the header as voxels.
        return int(self.image_class.header_class.template_dtype.itemsize) + 4

    def geometry(self, image: Any, data: bytes) -> tuple[Any, bool]:
        forms = image.header.get_qform(coded=True)[0], image.header.get_sform(coded=True)[0]
        return image.header, forms[0] is None and forms[1] is None


class _Mgh:
    """MGH and MGZ of FreeSurfer. It has no magic; the first field is the version, which is 1."""

    name = "MGH"
    version = 1
    # The result of an MGH mask is a NIfTI file, which stores dimensions in 16 bits.
    max_side = 2**15 - 1

    def __init__(self, image_class: Any) -> None:
        self.image_class = image_class

    def layout(self, head: bytes) -> tuple[list[int], int, float]:
        header = self.image_class.header_class(head[: self.header_bytes()], check=False)
        dims = [int(n) for n in header["dims"]]
        return dims if max(dims) <= self.max_side else [], header.get_data_dtype().itemsize, self.header_bytes()

    def header_bytes(self) -> int:
        return 284

    def geometry(self, image: Any, data: bytes) -> tuple[Any, bool]:
        import nibabel as nib

        header = nib.Nifti1Header()
        header.set_xyzt_units("mm")
        header.set_sform(image.affine, code="scanner")
        # A singular affine is reported by the caller; it has no quaternion.
        if np.isfinite(image.affine).all() and np.linalg.det(image.affine[:3, :3]) != 0:
            header.set_qform(image.affine, code="scanner")
            if not np.allclose(header.get_qform(), image.affine, rtol=1e-4, atol=1e-3):  # a shear
                header.set_qform(None, code="unknown")
        # nibabel replaces the orientation by a default if the flag goodRASFlag is 0.
        return header, struct.unpack(">h", data[28:30])[0] == 0


def _format(head: bytes, path: Path) -> _Format:
    try:
        import nibabel as nib
    except ImportError:
        raise InputError("NIfTI files require nibabel: pip install nibabel") from None
    if len(head) >= 348 and head[344:348] == b"n+1\0":
        return _Nifti(nib.Nifti1Image)
    if len(head) >= HEAD_BYTES and head[4:12] == b"n+2\0\r\n\x1a\n":
        return _Nifti(nib.Nifti2Image)
    if head[344:348] == b"ni1\0":
        raise InputError(f"{path}: header of a two-file NIfTI (.hdr, .img); convert it to a single .nii file")
    if ".nii" in path.name.lower()[-len(".nii.gz") :]:
        raise InputError(f"{path}: not a NIfTI file (no NIfTI magic in its header)")
    mgh = _Mgh(nib.MGHImage)
    if len(head) < mgh.header_bytes() or struct.unpack(">i", head[:4])[0] != mgh.version:
        raise InputError(f"{path}: not an MGH file (no MGH version {mgh.version} in its header)")
    return mgh


def _read(path: Path) -> tuple[_Format, bytes]:
    """All bytes of the image, decompressed, read after the header was checked against the size of the file."""
    if not NIFTI_NAME.search(path.name):
        raise InputError(f"{path}: file name must end in one of {NIFTI_ENDINGS}")
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


def _read_checked(stream: IO[bytes] | gzip.GzipFile, max_bytes: int, path: Path) -> tuple[_Format, bytes]:
    head = stream.read(HEAD_BYTES)
    format = _format(head, path)
    needed = _needed_bytes(head, format, path)
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
    return format, data


def _needed_bytes(head: bytes, format: _Format, path: Path) -> int:
    """Number of bytes up to the last voxel according to the header; raises InputError for invalid headers."""
    try:
        shape, itemsize, offset = format.layout(head)
    except Exception as error:
        raise InputError(f"{path}: damaged {format.name} header ({one_line(error)}); export it again") from None
    if not shape or min(shape) < 1:
        raise InputError(f"{path}: damaged {format.name} header (invalid dimensions {shape}); export it again")
    voxels = math.prod(shape)
    if voxels > MAX_VOXELS:
        raise InputError(f"{path}: {' x '.join(map(str, shape))} voxels exceed the limit of {MAX_VOXELS}")
    if not format.header_bytes() <= offset <= MAX_HEADER_BYTES:
        raise InputError(f"{path}: damaged {format.name} header (data offset {offset:g}); export it again")
    return int(offset) + voxels * itemsize


def _volume_shape(shape: tuple[int, ...], path: Path) -> tuple[int, int, int]:
    if len(shape) < 3 or any(n != 1 for n in shape[3:]):
        dims = " x ".join(map(str, shape))
        raise InputError(f"{path}: expected one 3D volume, got {len(shape)}D ({dims}); split or convert the file")
    return (int(shape[0]), int(shape[1]), int(shape[2]))
