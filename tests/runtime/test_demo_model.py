"""The shipped model on a CPU, in few steps: it draws inside the mask and leaves the rest dark."""

from __future__ import annotations

import numpy as np
import torch

import voxtune
from voxtune.data import cohort
from voxtune.data.contract import encode_mask, unscale_image
from voxtune.runtime.storage import demo_model


def test_shipped_model_follows_the_mask():
    model = voxtune.load(demo_model())
    contract = model.config.data
    person = cohort.subject(0, 100_000, contract.size, spacing=contract.spacing[0], healthy_fraction=0.0)
    cond = torch.from_numpy(encode_mask(person.labels_DHW, contract))[None]
    image = unscale_image(model.sample(cond, steps=5)[0, 0].numpy())
    outside, brain, tumour = (image[person.labels_DHW == value].mean() for value in (0, 1, 2))
    assert outside < 0.1
    assert brain > 0.5
    assert tumour < brain - 0.1
    correlation = np.corrcoef(image.ravel(), person.image_DHW.ravel())[0, 1]
    assert correlation > 0.9


def test_shipped_model_is_small_and_says_its_limits():
    folder = demo_model()
    assert (folder / "model.safetensors").stat().st_size < 16 * 2**20
    assert "not a medical device" in (folder / "README.md").read_text().lower()
