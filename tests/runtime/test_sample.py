"""Samples depend on the seed and the index, not on the batch size, and are reproducible bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import voxtune
from tests.factories import GOLDENS
from voxtune.data.contract import Label, encode_mask
from voxtune.diffusion import SAMPLERS
from voxtune.errors import InputError
from voxtune.runtime.model import Model, SamplingConfig
from voxtune.runtime.sampling import SamplerSettings


@pytest.fixture(scope="module")
def model():
    return voxtune.load(GOLDENS / "med_ddpm_tiny.pt")


@pytest.fixture(scope="module")
def cond():
    return torch.sign(torch.randn(3, 2, 16, 16, 16, generator=torch.Generator().manual_seed(0)))


def test_settings_and_keywords_give_the_same_samples(model, cond):
    settings = SamplerSettings(sampler="dpm++", steps=3, timestep_spacing="leading", clip=False)
    assert model.resolve(sampler="dpm++", steps=3, timestep_spacing="leading", clip=False) == settings
    small = cond[:1, :, :8, :8, :8]
    expected = model.sample(small, sampler="dpm++", steps=3, timestep_spacing="leading", clip=False, seed=1)
    assert torch.equal(model.sample(small, settings=settings, seed=1), expected)


@pytest.mark.parametrize("name", SAMPLERS)
def test_samples_are_reproducible_and_independent_of_the_batch(model, cond, name):
    cond = cond[..., :8]
    batched = model.sample(cond, sampler=name, steps=3, seed=9)
    assert batched.shape == (3, 1, 16, 16, 8)
    assert torch.isfinite(batched).all()
    assert batched.abs().max() <= 1.0001
    assert torch.equal(batched, model.sample(cond, sampler=name, steps=3, seed=9))
    for i in range(3):
        single = model.sample(cond[i : i + 1], sampler=name, steps=3, seed=9, indices=[i])
        assert (single - batched[i]).norm() / batched[i].norm() < 1e-4
    assert not torch.equal(batched, model.sample(cond, sampler=name, steps=3, seed=10))


def test_size_other_than_the_training_size(model):
    assert model.sample(torch.ones(1, 2, 8, 12, 20), steps=1).shape == (1, 1, 8, 12, 20)


def test_progress_counts_the_steps(model, cond):
    calls = []
    model.sample(cond[:1], steps=3, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cond": None}, "mask"),
        ({"cond": torch.zeros(1, 3, 16, 16, 16)}, "shape"),
        ({"cond": torch.ones(1, 2, 16, 15, 16)}, "multiple of"),
        ({"sampler": "no-such-sampler"}, "unknown sampler"),
        ({"steps": 11}, "1 to 10"),
        ({"seed": -1}, "seed"),
        ({"indices": [1, 2]}, "2 indices for 1"),
        ({"size": (8, 8, 8)}, "differs"),
        ({"cond": torch.full((1, 2, 16, 16, 16), float("nan"))}, "NaN"),
        ({"steps": 2.5}, "whole number"),
        ({"seed": 1.5}, "seed"),
        ({"settings": SamplerSettings(sampler="ddim", steps=2), "steps": 2}, "settings cannot be combined with steps"),
        ({"settings": SamplerSettings(sampler="ddim", steps=11)}, "1 to 10"),
        ({"settings": {"steps": 2}}, "expected SamplerSettings, got dict"),
        (
            {"cond": "sub-01_dseg.nii.gz"},
            "cond: expected a tensor, got the path 'sub-01_dseg.nii.gz'; Model.draw takes",
        ),
        ({"cond": Path("sub-01_dseg.nii.gz")}, "got the path"),
        ({"cond": object()}, "expected a tensor, got object"),
        ({"cond": np.ones((1, 2, 4, 4, 4)).astype("U1")}, "expected a tensor, got ndarray"),
        ({"cond": torch.ones(1, 2, 16, 16, 16, dtype=torch.complex64)}, "complex64, expected real numbers"),
        ({"cond": torch.zeros(1, 2, 16, 16, 16, dtype=torch.bool)}, r"other than -1 \(outside"),
        ({"cond": torch.full((1, 2, 16, 16, 16), 2)}, "encode_mask"),
        ({"cond": torch.ones(0, 2, 16, 16, 16)}, "shape"),
        ({"steps": "ten"}, "whole number"),
        ({"steps": True}, "whole number"),
        ({"seed": True}, "seed"),
        ({"seed": "0"}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"sampler": 5}, "unknown sampler"),
        ({"timestep_spacing": []}, "unknown timestep spacing"),
        ({"clip": "yes"}, "clip must be True or False"),
        ({"cache": True}, "cache"),
        ({"indices": "a"}, "indices"),
        ({"indices": [-1]}, "indices"),
        ({"indices": 0}, "indices"),
        ({"size": "16"}, "size"),
        ({"progress": 3}, "progress"),
    ],
)
def test_invalid_arguments(model, cond, arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        model.sample(**{"cond": cond[:1], **arguments})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": "x.pt"}, "x: expected a tensor, got the path"),
        ({"x": torch.zeros(1, 2, 16, 16, 16)}, "x has shape"),
        ({"x": torch.zeros(1, 1, 16, 16)}, "x has shape"),
        ({"x": torch.zeros(1, 1, 16, 16, 16, dtype=torch.int64)}, "expected floating point"),
        ({"t": "last"}, "t: expected a tensor"),
        ({"t": None}, "t: expected a tensor"),
        ({"cond": "mask.nii.gz"}, "cond: expected a tensor"),
        ({"cond": None}, "mask"),
    ],
)
def test_denoise_refuses_invalid_arguments(model, cond, arguments, message):
    with pytest.raises(InputError, match=message):
        model.denoise(**{"x": torch.zeros(1, 1, 16, 16, 16), "t": 3, "cond": cond[:1], **arguments})


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 5, None, ""])
def test_devices_are_checked(model, device):
    with pytest.raises(InputError, match="device"):
        model.to(device)


def test_a_model_describes_itself(model):
    text = repr(model)
    for part in ("med-ddpm", "32 x 32 x 32", "1 (head)", "2 (tumour)", "T1w", "cpu", "med_ddpm_tiny.pt"):
        assert part in text


def test_numpy_masks_are_accepted(model, cond):
    assert torch.equal(model.sample(cond[:1].numpy(), steps=1), model.sample(cond[:1], steps=1))


def test_denoise_takes_one_step_or_one_for_each_sample(model, cond):
    with pytest.raises(InputError, match="each of 3"):
        model.denoise(torch.zeros(3, 1, 16, 16, 16), torch.tensor([1, 2]), cond)


@pytest.mark.parametrize("t", [-1, 10, 2.5])
def test_denoise_refuses_steps_outside_the_diffusion(model, cond, t):
    with pytest.raises(InputError, match="0 to 9"):
        model.denoise(torch.zeros(1, 1, 16, 16, 16), t, cond[:1])


def test_prior_sets_the_mean_of_the_initial_noise(model, cond):
    """At the last step the signal is 0 and the prior has no effect; at an earlier start it sets the mean of each label."""
    config = replace(model.config, sampling=SamplingConfig(sampler="ddim", steps=2, start=4, prior=(-1.0, 0.5, 0.25)))
    early = Model(config, model.network)
    noise = torch.zeros(3, 1, 16, 16, 16)
    x = early.start(noise, 4, cond)
    signal, _ = model.schedule.signal_noise(4)
    brain, tumour = cond[:, 0:1] > 0, cond[:, 1:2] > 0
    assert torch.allclose(x[tumour], torch.tensor(0.25 * signal))
    assert torch.allclose(x[brain & ~tumour], torch.tensor(0.5 * signal))
    assert torch.allclose(x[~brain & ~tumour], torch.tensor(-1.0 * signal))
    assert early.available_steps == 5
    assert early.sample(cond[:1]).shape == (1, 1, 16, 16, 16)
    with pytest.raises(InputError, match="1 to 5"):
        early.sample(cond[:1], steps=6)


def test_the_prior_of_overlapping_labels_has_a_value_for_each_combination(model):
    labels = (Label(name="WT", value=1, more_values=(2,), channel=0), Label(name="TC", value=1, channel=1))
    data = replace(model.config.data, labels=labels, overlapping=True)
    assert data.regions == ((0,), (0, 1))
    prior = SamplingConfig(start=4, prior=(-1.0, 0.5, 0.25))
    start = Model(replace(model.config, data=data, sampling=prior), model.network).start
    values = np.zeros(model.config.size, np.uint8)
    values[4:12, 4:12, 4:12], values[6:8, 6:8, 6:8] = 2, 1
    x = start(torch.zeros(1, 1, *values.shape), 4, torch.from_numpy(encode_mask(values, data))[None])
    signal, _ = model.schedule.signal_noise(4)
    expected = torch.tensor([-1.0, 0.25, 0.5])[torch.from_numpy(values).long()] * signal
    assert torch.allclose(x[0, 0], expected)
    with pytest.raises(InputError, match="4 values"):
        replace(model.config, data=data, sampling=replace(prior, prior=(-1.0, 0.5, 0.25, 0.0)))


@pytest.mark.parametrize(
    "options", [{"start": 10}, {"start": -1}, {"prior": (0.0, 0.0)}, {"prior": (2.0, 0, 0)}, {"start": 3, "steps": 5}]
)
def test_invalid_sampling_configs(model, options):
    with pytest.raises(InputError):
        replace(model.config, sampling=SamplingConfig(**options))
