"""One seed, one volume: whatever the batch, and bit for bit when run again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import voxtune
from tests.factories import GOLDENS
from voxtune.diffusion import SAMPLERS
from voxtune.errors import InputError
from voxtune.runtime.model import Model, SamplingConfig


@pytest.fixture(scope="module")
def model():
    return voxtune.load(GOLDENS / "med_ddpm_tiny.pt")


@pytest.fixture(scope="module")
def cond():
    return torch.sign(torch.randn(3, 2, 16, 16, 16, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("name", SAMPLERS)
def test_again_is_bit_identical_and_batch_does_not_matter(model, cond, name):
    together = model.sample(cond, sampler=name, steps=3, seed=9)
    assert together.shape == (3, 1, 16, 16, 16)
    assert torch.isfinite(together).all()
    assert together.abs().max() <= 1.0001
    assert torch.equal(together, model.sample(cond, sampler=name, steps=3, seed=9))
    for i in range(3):
        alone = model.sample(cond[i : i + 1], sampler=name, steps=3, seed=9, indices=[i])
        assert (alone - together[i]).norm() / together[i].norm() < 1e-4
    assert not torch.equal(together, model.sample(cond, sampler=name, steps=3, seed=10))


def test_another_size_than_it_was_trained_at(model):
    assert model.sample(torch.ones(1, 2, 8, 12, 20), steps=1).shape == (1, 1, 8, 12, 20)


def test_progress_counts_the_steps(model, cond):
    seen = []
    model.sample(cond[:1], steps=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"cond": None}, "mask"),
        ({"cond": torch.zeros(1, 3, 16, 16, 16)}, "shape"),
        ({"cond": torch.zeros(1, 2, 16, 15, 16)}, "divide"),
        ({"sampler": "euler"}, "unknown sampler"),
        ({"steps": 11}, "1 to 10"),
        ({"seed": -1}, "seed"),
        ({"indices": [1, 2]}, "2 indices for 1"),
        ({"size": (8, 8, 8)}, "differs"),
        ({"cond": torch.full((1, 2, 16, 16, 16), float("nan"))}, "NaN"),
        ({"steps": 2.5}, "1 to 10"),
        ({"seed": 1.5}, "seed"),
    ],
)
def test_what_the_user_gets_wrong(model, cond, arguments, message):
    with pytest.raises(InputError, match=message):
        model.sample(**{"cond": cond[:1], **arguments})


def test_numpy_masks_are_taken(model, cond):
    assert torch.equal(model.sample(cond[:1].numpy(), steps=1), model.sample(cond[:1], steps=1))


def test_one_step_for_each_sample_or_for_all(model, cond):
    with pytest.raises(InputError, match="each of 3"):
        model.denoise(torch.zeros(3, 1, 16, 16, 16), torch.tensor([1, 2]), cond)


@pytest.mark.parametrize("t", [-1, 10, 2.5])
def test_step_outside_the_diffusion(model, cond, t):
    with pytest.raises(InputError, match="0 to 9"):
        model.denoise(torch.zeros(1, 1, 16, 16, 16), t, cond[:1])


def test_a_prior_moves_the_start_and_nothing_else(model, cond):
    """With signal 0 at the last step the prior has no say; at an earlier start it gives each label its mean."""
    started = replace(model.config, sampling=SamplingConfig(sampler="ddim", steps=2, start=4, prior=(-1.0, 0.5, 0.25)))
    begun = Model(started, model.network)
    noise = torch.zeros(3, 1, 16, 16, 16)
    x = begun._start(noise, 4, cond)
    signal, _ = model.schedule.signal_noise(4)
    brain, tumour = cond[:, 0:1] > 0, cond[:, 1:2] > 0
    assert torch.allclose(x[tumour], torch.tensor(0.25 * signal))
    assert torch.allclose(x[brain & ~tumour], torch.tensor(0.5 * signal))
    assert torch.allclose(x[~brain & ~tumour], torch.tensor(-1.0 * signal))
    assert begun.available_steps == 5
    assert begun.sample(cond[:1]).shape == (1, 1, 16, 16, 16)
    with pytest.raises(InputError, match="1 to 5"):
        begun.sample(cond[:1], steps=6)


@pytest.mark.parametrize(
    "bad", [{"start": 10}, {"start": -1}, {"prior": (0.0, 0.0)}, {"prior": (2.0, 0, 0)}, {"start": 3, "steps": 5}]
)
def test_sampling_settings_are_checked_when_made(model, bad):
    with pytest.raises(InputError):
        replace(model.config, sampling=SamplingConfig(**bad))
