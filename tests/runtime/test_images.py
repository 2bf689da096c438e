"""Images from nothing: one seed, one image, whatever the batch; written as PNG with how they came to be."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.factories import GOLDENS
from voxtune.errors import InputError
from voxtune.runtime.generate import generate_images
from voxtune.runtime.model import Model, ModelConfig, SamplingConfig
from voxtune.runtime.sampling import SamplerSettings
from voxtune.runtime.storage import load
from voxtune.workloads import ConvNeXtConfig


def make(channels: int = 3) -> Model:
    torch.manual_seed(0)
    network = ConvNeXtConfig(channels=channels, width=8, multipliers=(1, 1))
    return Model(ModelConfig(network=network, size=(8, 8), sampling=SamplingConfig(sampler="ddim", steps=2)))


@pytest.fixture(scope="module")
def model():
    return make()


def test_files_hold_what_was_drawn(model, tmp_path):
    drawn = list(generate_images(model, tmp_path / "out", count=3, seed=4, provenance={"model": "m"}))
    assert [d.file.name for d in drawn] == ["image-000000.png", "image-000001.png", "image-000002.png"]
    expected = model.sample(indices=range(3), seed=4).numpy()
    for i, each in enumerate(drawn):
        pixels = np.asarray(Image.open(each.file))
        assert pixels.shape == (8, 8, 3)
        np.testing.assert_array_equal(pixels, each.pixels_HWC)
        assert np.abs(pixels.transpose(2, 0, 1) / 127.5 - 1 - expected[i]).max() < 0.005
        record = json.loads(each.file.with_suffix(".json").read_text())
        assert (record["model"], record["seed"], record["index"], record["steps"]) == ("m", 4, i, 2)
    assert np.ptp([d.pixels_HWC.astype(int) for d in drawn], axis=0).max() > 5, "each image has noise of its own"


def test_batch_does_not_change_the_images(model, tmp_path):
    done = []
    one = list(generate_images(model, tmp_path / "a", count=3))
    two = list(generate_images(model, tmp_path / "b", count=3, batch=2, progress=lambda d, n: done.append((d, n))))
    for a, b in zip(one, two, strict=True):
        assert np.abs(a.pixels_HWC.astype(int) - b.pixels_HWC).max() <= 1
    assert done == [(2, 6), (4, 6), (5, 6), (6, 6)]


def test_another_size_and_grey_images(tmp_path):
    [drawn] = generate_images(make(channels=1), tmp_path, size=(4, 12))
    assert Image.open(drawn.file).mode == "L"
    assert Image.open(drawn.file).size == (12, 4)


def test_existing_images_are_not_replaced(model, tmp_path):
    list(generate_images(model, tmp_path))
    with pytest.raises(InputError, match=r"image-000000.png: exists already; .*--overwrite"):
        list(generate_images(model, tmp_path, count=2))
    assert len(list(generate_images(model, tmp_path, count=2, overwrite=True))) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: {"settings": SamplerSettings(sampler="ddim", steps=10_000)}, "steps"),
        (lambda: {"seed": -1}, "seed"),
        (lambda: {"settings": SamplerSettings(sampler="foo", steps=2)}, "foo"),
        (lambda: {"size": (8, 9)}, "divide by 2"),
        (lambda: {"size": (8, 8, 8)}, "2 sides"),
    ],
)
def test_a_request_that_cannot_be_met_leaves_nothing_behind(model, tmp_path, wrong, said):
    with pytest.raises(InputError, match=said):
        list(generate_images(model, tmp_path / "out", **wrong()))
    assert not (tmp_path / "out").exists()


def test_models_that_draw_no_pictures(tmp_path):
    with pytest.raises(InputError, match="4 channels"):
        list(generate_images(make(channels=4), tmp_path))
    with pytest.raises(InputError, match="volumes from masks"):
        list(generate_images(load(GOLDENS / "med_ddpm_tiny.pt"), tmp_path))
