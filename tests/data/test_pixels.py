"""Conversion of pixels, resizing, image grids and PNG."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.factories.nifti import oriented_affine
from voxtune.data.nifti import Volume
from voxtune.data.orientation import flipped, reorder
from voxtune.data.pixels import label_colour, png, resize, sheet, to_pixels, to_signed
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


def picture(volume: Volume) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(volume._repr_png_())).convert("RGB")).astype(int)


@pytest.mark.parametrize("code", ["RAS", "LPS", "SAR", "AIL"])
def test_the_picture_of_a_volume_is_an_axial_slice(code):
    """Anterior at the top and left on the left, whatever the order of the axes in the file."""
    axes, flips = reorder("RAS", code)
    ras = np.zeros((20, 30, 10), np.float32)
    ras[2:7, 23:28, 4:6] = 1.0  # to the left, anterior
    array = flipped(ras.transpose(axes), flips)
    volume = Volume(array=array, affine=oriented_affine(code, tuple(np.array([2.0, 2.0, 5.0])[list(axes)])))
    pixels = picture(volume)
    assert pixels.shape == (256, 171, 3), "2 mm x 2 mm voxels"
    rows, columns = np.nonzero(pixels[..., 0] > 128)
    assert rows.mean() < 256 / 4 and columns.mean() < 171 / 3
    below = replace(volume, centre=tuple(np.array([5, 5, 0 if "S" in code else 9])[list(axes)]))
    assert picture(below).max() == 0, "the slice through the centre"


def test_the_picture_of_a_mask_shows_its_smallest_label():
    labels = np.zeros((16, 16, 16), np.uint8)
    labels[2:14, 2:14, 2:14] = 4
    labels[3:5, 3:5, 3:5] = 2
    pixels = picture(Volume(array=labels, affine=np.eye(4)))
    assert {tuple(int(f"0x{label_colour(v)[i : i + 2]}", 16) for i in (1, 3, 5)) for v in (0, 2, 4)} == set(
        map(tuple, pixels.reshape(-1, 3).tolist())
    )
    page = Volume(array=labels, affine=np.eye(4))._repr_html_()
    assert page.startswith("<figure><img") and "labels 0, 2, 4" in page


def test_bright_voxels_do_not_darken_the_picture():
    array = np.full((16, 16, 16), 100.0, np.float32)
    array[:8] = 50.0
    array[0, 0, 0] = 1e6
    pixels = picture(Volume(array=array, affine=np.eye(4)))
    assert pixels[:, -20:].min() == 255 and pixels[:, :20].max() == 0
    constant = Volume(array=np.full((4, 4, 4), np.nan, np.float32), affine=np.eye(4))
    assert picture(constant).max() == 0


def test_the_picture_of_no_volume_is_refused():
    with pytest.raises(InputError, match="not that of a 3D volume"):
        Volume(array=np.zeros((3, 3)), affine=np.eye(4))._repr_png_()
