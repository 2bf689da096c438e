"""The formats of volume files, NIfTI and MGH: headers are checked against the bytes present, then nibabel parses the file.

A file is read into memory completely before nibabel parses it. This verifies the gzip checksum, avoids a memory map that
crashes the process if the file is truncated meanwhile, and allows the header to be checked before any allocation.
"""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np

from voxtune.data.modality import NIFTI_ENDINGS, NIFTI_NAME
from voxtune.errors import InputError
from voxtune.reading import CHUNK, check_memory, file_size, opening, reading

# Of a voxel: how far the axes of the qform may lie from the affine.
QUATERNION_ERROR = 2e-3
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
    if not NIFTI_NAME.search(path.name):
        raise InputError(f"{path}: file name must end in one of {NIFTI_ENDINGS}")
    with opening(path, "volume", fix="copy or export the file again") as file:
        if file_size(file) == 0:
            raise InputError(f"{path}: the file is empty; export it again")
        compressed = file.read(2) == GZIP_MAGIC
        file.seek(0)
        stream = gzip.GzipFile(fileobj=file) if compressed else file
        format, data = _read_checked(stream, file_size(file), path)
        image = format.image_class.from_bytes(data)
        dtype = image.header.get_data_dtype()
        if dtype.kind not in "iufb":
            raise InputError(f"{path}: voxels of type {dtype} are not scalar numbers; convert the file")
        array = _array(image.dataobj, data).reshape(_volume_shape(image.shape, path))
        affine = np.asarray(image.affine, dtype=np.float64)
        header, assumed = format.geometry(image, data)
    return VolumeContents(array=array, affine=affine, header=header, affine_assumed=assumed)


def _array(proxy: Any, data: bytes) -> np.ndarray:
    """The scaled voxels, as nibabel computes them, but without copies of the whole array on the way.

    Without scaling, the array shares its memory with `data`.
    """
    from nibabel.volumeutils import apply_read_scaling

    stored = np.ndarray(proxy.shape, proxy.dtype, data, proxy.offset, order="F")
    if (proxy.slope, proxy.inter) == (1, 0):
        return stored
    flat, slope, inter = stored.reshape(-1, order="F"), np.float64(proxy.slope), np.float64(proxy.inter)
    scaled = np.empty(flat.size, apply_read_scaling(flat[:1], slope, inter).dtype)
    for start in range(0, flat.size, CHUNK):
        scaled[start : start + CHUNK] = apply_read_scaling(flat[start : start + CHUNK], slope, inter)
    return scaled.reshape(proxy.shape, order="F")


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """The dimensions (empty if invalid), bytes of a voxel, offset of the first voxel, and whether voxels are scaled."""

    shape: list[int]
    itemsize: int
    offset: float
    scaled: bool = False

    @property
    def memory(self) -> int:
        """Bytes of the voxels as stored, and as numbers to compute with: float64 if they are scaled, else 32 bits."""
        return math.prod(self.shape) * (self.itemsize + (8 if self.scaled else 4))


class _Format(Protocol):
    """A format: its name in messages, and what its header says."""

    name: str
    image_class: Any

    def layout(self, head: bytes) -> _Layout:
        """What the header says, unchecked; may raise anything."""
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

    def layout(self, head: bytes) -> _Layout:
        header_class = self.image_class.header_class
        header = header_class(head[: header_class.template_dtype.itemsize], check=False)
        # Not by nibabel's property, which fails for an unexpected dim[0].
        rank, *shape = (int(n) for n in header["dim"])
        dims = shape[:rank] if 1 <= rank <= 7 else []
        return _Layout(
            shape=dims,
            itemsize=header.get_data_dtype().itemsize,
            offset=float(header["vox_offset"]),
            scaled=header.get_slope_inter() not in ((None, None), (1, 0)),
        )

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

    def layout(self, head: bytes) -> _Layout:
        header = self.image_class.header_class(head[: self.header_bytes()], check=False)
        dims = [int(n) for n in header["dims"]]
        return _Layout(
            shape=dims if max(dims) <= self.max_side else [],
            itemsize=header.get_data_dtype().itemsize,
            offset=self.header_bytes(),
        )

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
            # The header holds three numbers of the quaternion in float32; the fourth, near 0, has half of their digits.
            inexact = QUATERNION_ERROR * max(header.get_zooms()[:3])
            if not np.allclose(header.get_qform(), image.affine, rtol=1e-4, atol=inexact):  # a shear
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


def _read_checked(stream: IO[bytes] | gzip.GzipFile, size: int, path: Path) -> tuple[_Format, bytes]:
    """All bytes of the image, read after its header was compared with the `size` of the file."""
    head = stream.read(HEAD_BYTES)
    format = _format(head, path)
    layout = _checked_layout(head, format, path)
    needed = int(layout.offset) + math.prod(layout.shape) * layout.itemsize
    if needed > size * (MAX_DEFLATE_RATIO if isinstance(stream, gzip.GzipFile) else 1):
        raise InputError(
            f"{path}: the header requires {needed} bytes, more than the file can contain; it is truncated or damaged"
        )
    check_memory(path, layout.memory, size)
    data = head + stream.read(max(0, needed - len(head)))
    # Reading to the end verifies the gzip checksum; data after the image is discarded.
    rest = 0
    while part := stream.read(CHUNK):
        rest += len(part)
        check_memory(path, rest, size)
    if len(data) < needed:
        raise InputError(f"{path}: truncated, {len(data)} of {needed} bytes; copy or export the file again")
    return format, data


def _checked_layout(head: bytes, format: _Format, path: Path) -> _Layout:
    with reading(path, f"{format.name} header", fix="export it again"):
        layout = format.layout(head)
    shape = layout.shape
    if not shape or min(shape) < 1:
        raise InputError(f"{path}: damaged {format.name} header (invalid dimensions {shape}); export it again")
    if math.prod(shape) > MAX_VOXELS:
        raise InputError(f"{path}: {' x '.join(map(str, shape))} voxels exceed the limit of {MAX_VOXELS}")
    if not format.header_bytes() <= layout.offset <= MAX_HEADER_BYTES:
        raise InputError(f"{path}: damaged {format.name} header (data offset {layout.offset:g}); export it again")
    return layout


def _volume_shape(shape: tuple[int, ...], path: Path) -> tuple[int, int, int]:
    if len(shape) < 3 or any(n != 1 for n in shape[3:]):
        dims = " x ".join(map(str, shape))
        raise InputError(f"{path}: expected one 3D volume, got {len(shape)}D ({dims}); split or convert the file")
    return (int(shape[0]), int(shape[1]), int(shape[2]))
