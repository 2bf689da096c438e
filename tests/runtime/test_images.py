"""Generated images: independent of the batch size, written as PNG with a sidecar of their settings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.factories import GOLDENS
from voxtune.errors import InputError
from voxtune.runtime.images import GeneratedImage, ImageJob
from voxtune.runtime.model import Model, ModelConfig, SamplingConfig
from voxtune.runtime.sampling import SamplerSettings
from voxtune.runtime.storage import load
from voxtune.workloads import ConvNeXtConfig


def make_model(channels: int = 3) -> Model:
    torch.manual_seed(0)
    network = ConvNeXtConfig(channels=channels, width=8, multipliers=(1, 1))
    return Model(ModelConfig(network=network, size=(8, 8), sampling=SamplingConfig(sampler="ddim", steps=2)))


def generate_images(model: Model, out: Path, *, batch: int = 1, progress=None, **options) -> list[GeneratedImage]:
    return list(ImageJob(model, out, **options).generate(batch, progress))


@pytest.fixture(scope="module")
def model():
    return make_model()


def test_files_contain_the_samples(model, tmp_path):
    generated = generate_images(model, tmp_path / "out", count=3, seed=4, provenance={"model": "m"})
    assert [g.file.name for g in generated] == ["image-000000.png", "image-000001.png", "image-000002.png"]
    expected = model.sample(indices=range(3), seed=4).numpy()
    for i, image in enumerate(generated):
        pixels = np.asarray(Image.open(image.file))
        assert pixels.shape == (8, 8, 3)
        np.testing.assert_array_equal(pixels, image.pixels_HWC)
        assert np.abs(pixels.transpose(2, 0, 1) / 127.5 - 1 - expected[i]).max() < 0.005
        record = json.loads(image.file.with_suffix(".json").read_text())
        assert (record["model"], record["seed"], record["index"], record["steps"]) == ("m", 4, i, 2)
    assert np.ptp([g.pixels_HWC.astype(int) for g in generated], axis=0).max() > 5, "every image has its own noise"


def test_batch_does_not_change_the_images(model, tmp_path):
    done = []
    one = generate_images(model, tmp_path / "a", count=3)
    two = list(generate_images(model, tmp_path / "b", count=3, batch=2, progress=lambda d, n: done.append((d, n))))
    for a, b in zip(one, two, strict=True):
        assert np.abs(a.pixels_HWC.astype(int) - b.pixels_HWC).max() <= 1
    assert done == [(2, 6), (4, 6), (5, 6), (6, 6)]


def test_another_size_and_grey_images(tmp_path):
    [image] = generate_images(make_model(channels=1), tmp_path, size=(4, 12))
    assert Image.open(image.file).mode == "L"
    assert Image.open(image.file).size == (12, 4)


def test_existing_images_are_not_replaced(model, tmp_path):
    generate_images(model, tmp_path)
    with pytest.raises(InputError, match=r"image-000000.png: already exists, and 1 more file; .*overwrite=True"):
        generate_images(model, tmp_path, count=2)
    assert len(generate_images(model, tmp_path, count=2, overwrite=True)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (lambda: {"settings": SamplerSettings(sampler="ddim", steps=10_000)}, "steps"),
        (lambda: {"seed": -1}, "seed"),
        (lambda: {"settings": SamplerSettings(sampler="foo", steps=2)}, "foo"),
        (lambda: {"size": (8, 9)}, "multiple of 2"),
        (lambda: {"size": (8, 8, 8)}, "2 dimensions"),
    ],
)
def test_invalid_options_write_nothing(model, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        generate_images(model, tmp_path / "out", **options())
    assert not (tmp_path / "out").exists()


def test_models_that_cannot_generate_images(tmp_path):
    with pytest.raises(InputError, match="4 channels"):
        generate_images(make_model(channels=4), tmp_path)
    with pytest.raises(InputError, match="volumes from masks"):
        generate_images(load(GOLDENS / "med_ddpm_tiny.pt"), tmp_path)
