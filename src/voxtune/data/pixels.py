"""Conversion between pixels (0 .. 255) and the [-1, 1] of a model, resizing, and PNG.

Legend: C channels, H W pixels, N images. Files are (H, W, C); models are (C, H, W).
"""

from __future__ import annotations

import io
import math

import numpy as np

from voxtune.errors import InputError

# Numbers of channels that a PNG can store.
PNG_CHANNELS = (1, 3)
GAP = 2


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
    """Encodes a greyscale or RGB image as PNG."""
    from PIL import Image

    check_png(pixels_HWC.shape[-1])
    file = io.BytesIO()
    Image.fromarray(pixels_HWC[..., 0] if pixels_HWC.shape[-1] == 1 else pixels_HWC).save(file, format="PNG")
    return file.getvalue()


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
