"""Schedules agree with stored reference values; the noise generator agrees with published known answers."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch

from tests.factories import GOLDENS
from voxtune.diffusion import TIMESTEP_SPACINGS, DiffusionConfig, make_schedule, noise_source, normal, spaced_steps
from voxtune.diffusion.noise import identity_index, philox
from voxtune.diffusion.schedule import recognise
from voxtune.errors import InputError


def test_cosine_schedule_agrees_with_the_published_one():
    schedule = make_schedule(DiffusionConfig())
    reference = np.load(GOLDENS / "cosine_schedule_250.npz")
    for name in ("betas", "alphas_cumprod", "posterior_variance"):
        np.testing.assert_allclose(getattr(schedule, name).numpy(), reference[name], rtol=1e-5, atol=1e-12)


def test_linear_schedule_ends_in_noise_for_any_number_of_steps():
    for steps in (20, 100, 1000):
        assert make_schedule(DiffusionConfig(schedule="linear", steps=steps)).alphas_cumprod[-1] < 1e-3


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_stored_betas_are_recognised(name):
    config = DiffusionConfig(schedule=name, steps=250)
    assert recognise(make_schedule(config).betas.float()) == config


def test_other_betas_are_a_custom_schedule():
    betas = torch.linspace(0.01, 0.2, 7)
    config = recognise(betas)
    assert config.schedule == "custom"
    assert torch.equal(make_schedule(config).betas.float(), betas)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("spacing", TIMESTEP_SPACINGS)
@pytest.mark.parametrize("steps", [1, 2, 7, 50, 249, 250])
def test_spaced_steps_decrease_and_stay_in_range(spacing, steps, schedule):
    timesteps = spaced_steps(250, steps, spacing, make_schedule(DiffusionConfig(schedule=schedule, steps=250)))
    assert len(timesteps) == steps
    assert all(a > b for a, b in itertools.pairwise(timesteps))
    assert 0 <= timesteps[-1] <= timesteps[0] < 250


@pytest.mark.parametrize("total", [250, 236])
def test_logsnr_spacing_is_even_in_log_snr(total):
    schedule = make_schedule(DiffusionConfig(schedule="cosine", steps=250))
    timesteps = spaced_steps(total, 15, "logsnr", schedule)
    assert timesteps[0] == total - 1 and timesteps[-1] == 0
    # Few steps at the end of the schedule, where there is almost no signal; evenly spaced, six would lie above 243.
    assert sum(t > 243 for t in timesteps) <= 3
    gaps = schedule.log_snr[timesteps].diff()[1:]
    even = (schedule.log_snr[0] - max(schedule.log_snr[total - 1], torch.tensor(-5.1))) / 14
    # As even as whole steps allow; near both ends a single step is a large part of the interval.
    assert (gaps - even).abs().max() < 0.2 * even
    with pytest.raises(InputError, match="unknown timestep spacing"):
        spaced_steps(total, 15, "karras")


def test_philox_known_answers():
    """The known-answer vectors published with Random123."""

    def words(counter, key):
        return [int(w) for w in philox([torch.tensor([c]) for c in counter], key)]

    assert words((0, 0, 0, 0), (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert words((ones,) * 4, (ones,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert words((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)) == [
        0xD16CFE09,
        0x94FDCCEB,
        0x5001E420,
        0x24126EA1,
    ]


def test_noise_is_standard_normal_and_independent():
    x = normal(5, 0, 0, (400_000,)).double()
    y = normal(5, 0, 1, (400_000,)).double()
    z = normal(5, 1, 0, (400_000,)).double()
    assert abs(x.mean()) < 0.01
    assert abs(x.std() - 1) < 0.01
    assert abs((x**4).mean() - 3) < 0.1
    for a, b in ((x, y), (x, z), (x[::4], x[1::4]), (x[:-1], x[1:])):
        assert abs((a * b).mean()) < 0.01


def test_noise_does_not_depend_on_the_batch():
    shape = (1, 5, 7, 3)
    batched = noise_source(11, [0, 1, 2, 2**33, 2**63 - 1, 2**63 - 2**32 - 1], shape)(4)
    for row, index in enumerate([0, 1, 2, 2**33]):
        assert torch.equal(batched[row], noise_source(11, [index], shape)(4)[0])
    assert not torch.equal(batched[0], noise_source(12, [0], shape)(4)[0])


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_out_of_range(seed):
    with pytest.raises(InputError, match="seed"):
        normal(seed, 0, 0, (4,))


@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 0},
        {"schedule": "custom"},
        {"betas": (0.1,) * 250},
        {"schedule": "custom", "steps": 1, "betas": (1.5,)},
    ],
)
def test_invalid_configs(settings):
    with pytest.raises(InputError):
        DiffusionConfig(**settings)


def test_an_identity_is_a_number_of_63_bits():
    assert identity_index("sub-01", 1) == 0x78EE4BF8555E31D4
    assert identity_index("sub-01", 12) == 0x0DEF5734C0F68685
    indices = [identity_index(f"sub-{i:02d}", n) for i in range(100) for n in range(1, 11)]
    assert len(set(indices)) == 1000 and max(indices) >= 2**62 and min(indices) >= 0 and max(indices) < 2**63
    # The two ways of Unicode to write a name, and a name that is no valid text.
    assert identity_index("Gr\u00f6\u00dfe", 1) == identity_index("Gro\u0308\u00dfe", 1)
    assert identity_index(os.fsdecode(b"\xff"), 1) != identity_index(os.fsdecode(b"\xfe"), 1)
