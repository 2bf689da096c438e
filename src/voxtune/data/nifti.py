"""Volumes, read from NIfTI and MGH files and written to NIfTI files: the geometry is preserved exactly."""

from __future__ import annotations

import base64
import html
import os
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.formats import read_contents
from voxtune.data.modality import image_kind
from voxtune.data.orientation import axis_codes
from voxtune.errors import InputError
from voxtune.files import check_output_path, checked_path, counted, one_line, write_file
from voxtune.marks import NIFTI_DESCRIPTION

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
    if len(pieces) == 1:
        parts = [_deflated(view, level, last=True)]
    else:
        with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1)) as pool:
            parts = list(pool.map(lambda n: _deflated(pieces[n], level, last=n == len(pieces) - 1), range(len(pieces))))
    return b"".join([HEADER, *parts, struct.pack("<LL", zlib.crc32(view), len(view) & 0xFFFFFFFF)])


def _deflated(piece: memoryview, level: int, *, last: bool) -> bytes:
    """Deflate blocks that end on a byte boundary, so that others can follow; the last piece ends the stream."""
    stream = zlib.compressobj(level, zlib.DEFLATED, -zlib.MAX_WBITS)
    return stream.compress(piece) + stream.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


# Voxel sizes outside this range indicate a header in metres or micrometres, or a wrong one.
SMALLEST_MM, LARGEST_MM = 0.005, 500.0
GEOMETRY_FIELDS = (
    *("qform_code", "quatern_b", "quatern_c", "quatern_d", "qoffset_x", "qoffset_y", "qoffset_z"),
    *("sform_code", "srow_x", "srow_y", "srow_z", "xyzt_units"),
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Volume:
    """A 3D array (X, Y, Z) with its affine: an image, or a mask of whole numbers. Notebooks show its middle slice.

    `header` is nibabel's NIfTI header and `path` the file; both are None for volumes created in memory. `kind` names the
    image, such as "T1w". `centre` is the voxel (x, y, z) that pictures show; None: the middle, in a mask that of the
    smallest label. Intensities of generated volumes are in [0, 1].
    """

    array: np.ndarray
    affine: np.ndarray
    header: Any = None
    path: Path | None = None
    kind: str | None = None
    centre: tuple[int, int, int] | None = None
    # The file does not state its orientation.
    affine_assumed: bool = False

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the volume to a .nii or .nii.gz file and returns its path; `overwrite` replaces a file of Voxtune."""
        file = checked_path(path)
        check_output_path(file, overwrite)
        return write_volume(file, self.array, self, overwrite=overwrite)

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
    volume = _read(Path(path))
    with np.errstate(over="ignore", invalid="ignore"):
        array = np.require(volume.array, np.float32, ("C", "W"))
    bad = array.size - int(np.isfinite(array).sum())
    if bad and not allow_nonfinite:
        raise InputError(
            f"{path}: {bad} of {array.size} voxels {'is' if bad == 1 else 'are'} NaN or infinite; replace them before use"
        )
    return replace(volume, array=array)


def read_labels(path: str | Path) -> Volume:
    """Reads a label map as int32; float or scaled storage is accepted if every value is an integer."""
    volume = _read(Path(path))
    return replace(volume, array=np.require(exact_labels(volume.array, volume.name), requirements=("C", "W")))


def _read(path: Path) -> Volume:
    """The volume in its own data type."""
    contents = read_contents(path)
    check_affine(contents.affine, str(path))
    return Volume(
        array=contents.array,
        affine=contents.affine,
        header=contents.header,
        path=path,
        kind=image_kind(path),
        affine_assumed=contents.affine_assumed,
    )


def given_volume(value: object, name: str, expected: str) -> Volume | Path:
    """A volume or its file, as a caller gave it: a path, a Volume, or an image of nibabel. `name` is the argument."""
    if isinstance(value, Volume):
        return checked_volume(value)
    if isinstance(value, str | os.PathLike):
        return checked_path(value, name)
    if not all(hasattr(value, attribute) for attribute in ("dataobj", "get_fdata", "affine", "header")):
        raise InputError(f"{name}: expected {expected}, got {type(value).__name__}")
    import nibabel as nib

    image: Any = value
    header = image.header.copy() if isinstance(image.header, nib.Nifti1Header) else None
    if image.affine is None:
        raise InputError(f"{name}: the nibabel image has no affine")
    try:
        array = np.asanyarray(image.dataobj)
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{name}: the nibabel image cannot be read ({one_line(error)})") from None
    return checked_volume(Volume(array=array, affine=np.asarray(image.affine), header=header))


def checked_volume(volume: Volume) -> Volume:
    """`volume` if it is a 3D volume of numbers with a valid affine."""
    array, affine = np.asarray(volume.array), np.asarray(volume.affine)
    if array.ndim != 3 or not array.size or array.dtype.kind not in "iufb":
        raise InputError(f"{volume.name}: shape {array.shape} of {array.dtype} is not a 3D volume of numbers")
    if affine.dtype.kind not in "iuf":
        raise InputError(f"{volume.name}: the affine must be a 4 x 4 matrix of numbers")
    check_affine(affine, volume.name)
    return replace(volume, array=array, affine=affine)


def exact_labels(array: np.ndarray, name: str) -> np.ndarray:
    """Converts `array` to int32; raises InputError if that would change a value."""
    if not np.issubdtype(array.dtype, np.integer) and array.dtype != bool:
        bad = int((~np.isfinite(array)).sum())
        if bad:
            verb = "is" if bad == 1 else "are"
            raise InputError(f"{name}: {counted(bad, 'voxel')} of the label map {verb} NaN or infinite; set them to 0")
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


def write_volume(
    path: str | Path, array: np.ndarray, like: Volume, dtype: Any = None, *, overwrite: bool = False
) -> Path:
    """Writes `array` (X, Y, Z) with the affine, qform, sform, codes and units of `like`. The write is atomic.

    `overwrite` allows replacing a file that Voxtune wrote. `dtype` None: float32 for floats, the smallest of uint8, int16,
    int32 for integers. An integer `dtype` for a float array stores scaled integers.
    """
    path = Path(path)
    name = path.name.lower()
    if not name.endswith((".nii", ".nii.gz")):
        raise InputError(f"{path}: the name of a file to write must end in .nii or .nii.gz")
    return write_file(path, volume_bytes(array, like, dtype, compressed=name.endswith(".gz")), overwrite=overwrite)


def volume_bytes(array: np.ndarray, like: Volume, dtype: Any = None, *, compressed: bool = True) -> bytes:
    """The content of the file that `write_volume` writes."""
    assert array.shape == like.shape, f"shape {array.shape} is not that of {like.name}, {like.shape}"
    data = _image_bytes(array, like, np.dtype(dtype) if dtype is not None else _storage_dtype(array))
    return gzip_bytes(data) if compressed else data


def check_affine(affine: np.ndarray, name: str) -> None:
    """Raises InputError for an affine that is not 4 x 4, not finite, singular, or not in millimetres."""
    if affine.shape != (4, 4):
        raise InputError(f"{name}: the affine has shape {affine.shape}, expected (4, 4)")
    if not np.isfinite(affine).all():
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
    header["descrip"] = NIFTI_DESCRIPTION
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
