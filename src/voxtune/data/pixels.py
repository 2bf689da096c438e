"""Conversion between pixels (0 .. 255) and the [-1, 1] of a model, resizing, colours of labels, and PNG.

Legend: C channels, H W pixels, N images. Files are (H, W, C); models are (C, H, W).
"""

from __future__ import annotations

import colorsys
import io
import math
from pathlib import Path

import numpy as np

from voxtune.data.grid import ras_array
from voxtune.data.legend import first_voxel
from voxtune.data.nifti import Volume
from voxtune.data.orientation import axis_codes, reorder
from voxtune.errors import InputError
from voxtune.marks import PNG_COMMENT
from voxtune.reading import opening

# Numbers of channels that a PNG can store.
PNG_CHANNELS = (1, 3)
GAP = 2
# Background, then the first labels by value: colours that colour-blind readers can distinguish.
PALETTE = ((20, 22, 28), (86, 134, 188), (230, 159, 0), (0, 158, 115), (204, 121, 167), (240, 228, 66), (213, 94, 0))
# The longer side of a volume's picture.
SLICE_SIDE = 256
# Scans have a few very bright voxels: the brightest ones are shown alike.
WINDOW = (0.5, 99.5)


def to_signed(pixels: np.ndarray) -> np.ndarray:
    """Converts 0 .. 255 to [-1, 1]."""
    return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)


def to_pixels(image_CHW: np.ndarray) -> np.ndarray:
    """Converts [-1, 1] to 0 .. 255, as (H, W, C)."""
    levels = np.rint((np.nan_to_num(image_CHW) + 1) * 127.5)
    return np.ascontiguousarray(np.clip(levels, 0, 255).astype(np.uint8).transpose(1, 2, 0))


def resize(pixels_CHW: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resizes by bicubic interpolation, with antialiasing when the size is reduced."""
    if pixels_CHW.shape[1:] == size:
        return pixels_CHW
    from PIL import Image

    height, width = size
    return np.stack(
        [np.asarray(Image.fromarray(c).resize((width, height), Image.Resampling.BICUBIC)) for c in pixels_CHW]
    )


def check_png(channels: int) -> None:
    if channels not in PNG_CHANNELS:
        raise InputError(
            f"images with {channels} channels cannot be written as PNG, which has 1 or 3; use Model.sample from Python"
        )


def png(pixels_HWC: np.ndarray) -> bytes:
    """Encodes a greyscale or RGB image as PNG, with the mark of Voxtune."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    check_png(pixels_HWC.shape[-1])
    buffer, info = io.BytesIO(), PngInfo()
    info.add_text(*PNG_COMMENT)
    image = Image.fromarray(pixels_HWC[..., 0] if pixels_HWC.shape[-1] == 1 else pixels_HWC)
    image.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def read_png(path: Path, size: tuple[int, ...]) -> np.ndarray:
    """The pixels (H, W, C) of a greyscale or RGB image of this height and width."""
    from PIL import Image

    with opening(path, "PNG") as file:
        image = Image.open(file, formats=("PNG",))
        if (image.height, image.width) != size or image.mode not in ("L", "RGB"):
            raise InputError(f"{path}: expected a greyscale or RGB image of {size[0]} x {size[1]} pixels")
        pixels = np.asarray(image)
    return pixels if pixels.ndim == 3 else pixels[..., None]


def sheet(images_NHWC: np.ndarray, *, cell: int = 64) -> np.ndarray:
    """Arranges images in a grid (H, W, 3), each at least `cell` pixels wide and high."""
    count, height, width, channels = images_NHWC.shape
    if channels not in PNG_CHANNELS:
        images_NHWC = images_NHWC[..., :1]
    zoom = max(1, -(-cell // min(height, width)))
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    high, wide = zoom * height + GAP, zoom * width + GAP
    page = np.zeros((rows * high - GAP, columns * wide - GAP, 3), dtype=np.uint8)
    for i, image_HWC in enumerate(images_NHWC):
        top, left = i // columns * high, i % columns * wide
        page[top : top + high - GAP, left : left + wide - GAP] = image_HWC.repeat(zoom, axis=0).repeat(zoom, axis=1)
    return page


def label_colour(value: int) -> str:
    """The colour (#rrggbb) of a label value: from the palette, then generated hues."""
    if 0 <= value < len(PALETTE):
        channels = PALETTE[value]
    else:
        golden = 0.618034
        red, green, blue = colorsys.hsv_to_rgb(value * golden % 1.0, 0.65, 0.9)
        channels = (round(red * 255), round(green * 255), round(blue * 255))
    return "#" + "".join(f"{c:02x}" for c in channels)


def coloured(plane: np.ndarray, labels: bool) -> np.ndarray:
    """The pixels (H, W, 3) of a slice: labels in their colours, intensities in [0, 1] as grey."""
    if labels:
        values, inverse = np.unique(plane, return_inverse=True)
        colours = [list(bytes.fromhex(label_colour(int(v))[1:])) for v in values]
        return np.array(colours, dtype=np.uint8)[inverse.reshape(plane.shape)]
    grey = (np.clip(plane, 0, 1) * 255).round().astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=-1)


def slice_png(volume: Volume) -> bytes:
    """An axial slice through the volume's `centre` as PNG, anterior at the top and the patient's left on the left."""
    from PIL import Image

    array = np.asarray(volume.array)
    if array.ndim != 3 or not array.size:
        raise InputError(f"{volume.name}: shape {volume.shape} is not that of a 3D volume")
    labels = np.issubdtype(array.dtype, np.integer) or array.dtype == bool
    axes, flips = reorder(axis_codes(volume.affine), "RAS")
    # Without labels, the middle of the volume.
    position = (volume.centre or first_voxel(array if labels else np.zeros(array.shape, np.uint8), {}))[axes[2]]
    ras_DHW, (_, height_mm, width_mm) = ras_array(volume)
    plane = ras_DHW[-1 - position if flips[2] else position, ::-1, :]
    if not labels:
        finite = array[np.isfinite(array)]
        low, high = np.percentile(finite, WINDOW) if finite.size else (0.0, 1.0)
        plane = (np.nan_to_num(plane, nan=low) - low) / max(float(high - low), 1e-12)
    tile = Image.fromarray(coloured(plane, labels))
    mm = tile.width * width_mm, tile.height * height_mm
    size = [max(1, round(length * SLICE_SIDE / max(mm))) for length in mm]
    tile = tile.resize(size, Image.Resampling.NEAREST if labels else Image.Resampling.BICUBIC)
    return png(np.asarray(tile))
