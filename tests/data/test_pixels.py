"""Conversion of pixels, resizing, image grids and PNG."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from voxtune.data.pixels import png, resize, sheet, to_pixels, to_signed
from voxtune.errors import InputError


def test_round_trip_is_exact_and_values_are_clipped():
    levels = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    assert (to_signed(levels).min(), to_signed(levels).max()) == (-1, 1)
    np.testing.assert_array_equal(to_pixels(to_signed(levels))[..., 0], levels[0])
    np.testing.assert_array_equal(to_pixels(np.array([[[-2.0, 2.0, np.nan]]])).ravel(), [0, 255, 128])


def test_resizing_keeps_channels_separate_and_constant_images_constant():
    plain = np.stack([np.full((32, 32), level, np.uint8) for level in (10, 200, 77)])
    for size in ((64, 64), (16, 8)):
        resized = resize(plain, size)
        assert resized.shape == (3, *size)
        assert [set(channel.ravel().tolist()) for channel in resized] == [{10}, {200}, {77}]
    assert resize(plain, (32, 32)) is plain


@pytest.mark.parametrize("channels", [1, 3])
def test_png_round_trip(channels):
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, channels), dtype=np.uint8)
    read = np.asarray(Image.open(io.BytesIO(png(pixels))))
    np.testing.assert_array_equal(read.reshape(pixels.shape), pixels)


def test_png_of_four_channels_is_rejected():
    with pytest.raises(InputError, match="4 channels"):
        png(np.zeros((2, 2, 4), np.uint8))


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (4, 2, 2), (5, 2, 3), (16, 4, 4)])
def test_the_sheet_shows_every_image_once(count, rows, columns):
    images = np.stack([np.full((32, 32, 3), 10 * (i + 1), np.uint8) for i in range(count)])
    page = sheet(images, cell=64)
    assert page.shape == (rows * 66 - 2, columns * 66 - 2, 3)
    for i in range(count):
        assert (page == 10 * (i + 1)).sum() == 64 * 64 * 3
