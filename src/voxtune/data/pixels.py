"""Pixels from 0 to 255 and the [-1, 1] of a model: there, back, to another size, and as PNG.

Legend: C channels, H W pixels, N images. Files and pictures are (H, W, C); models are (C, H, W).
"""

from __future__ import annotations

import io
import math

import numpy as np

from voxtune.errors import InputError

# Colours that a PNG can hold, by the number of channels.
PNG_CHANNELS = (1, 3)
GAP = 2


def to_signed(pixels: np.ndarray) -> np.ndarray:
    """0 .. 255 to [-1, 1]."""
    return pixels.astype(np.float32) / np.float32(127.5) - np.float32(1)


def to_pixels(image_CHW: np.ndarray) -> np.ndarray:
    """[-1, 1] to 0 .. 255, as (H, W, C)."""
    levels = np.rint((np.nan_to_num(image_CHW) + 1) * 127.5)
    return np.ascontiguousarray(np.clip(levels, 0, 255).astype(np.uint8).transpose(1, 2, 0))


def resize(pixels_CHW: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Bicubic, each channel by itself; smaller sizes are averaged, so that nothing aliases."""
    if pixels_CHW.shape[1:] == size:
        return pixels_CHW
    from PIL import Image

    height, width = size
    return np.stack(
        [np.asarray(Image.fromarray(c).resize((width, height), Image.Resampling.BICUBIC)) for c in pixels_CHW]
    )


def check_png(channels: int) -> None:
    if channels not in PNG_CHANNELS:
        raise InputError(f"images of {channels} channels have no PNG form (1 or 3 have); use Model.sample from Python")


def png(pixels_HWC: np.ndarray) -> bytes:
    """The bytes of a PNG, grey or in colours."""
    from PIL import Image

    check_png(pixels_HWC.shape[-1])
    file = io.BytesIO()
    Image.fromarray(pixels_HWC[..., 0] if pixels_HWC.shape[-1] == 1 else pixels_HWC).save(file, format="PNG")
    return file.getvalue()


def sheet(images_NHWC: np.ndarray, *, cell: int = 64) -> np.ndarray:
    """All images on one page, in rows, each at least `cell` pixels wide and high; (H, W, 3)."""
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
