"""Prediction of v, shifted and zero terminal signal-to-noise ratios, and offset noise: conversions, schedules and samplers."""

from __future__ import annotations

import math

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_ddim import rescale_zero_terminal_snr

from voxtune.diffusion import (
    SAMPLERS,
    DiffusionConfig,
    add_noise,
    get_sampler,
    make_schedule,
    noise_source,
    prediction_target,
    spaced_steps,
    training_loss,
)
from voxtune.diffusion.noise import with_offset
from voxtune.diffusion.schedule import clean_image, noise_in, rescale_to_zero_terminal_snr, shift_snr
from voxtune.errors import InputError

T = 250
PLAIN = make_schedule(DiffusionConfig(steps=T))
V = make_schedule(DiffusionConfig(steps=T, prediction="v"))
ZERO = make_schedule(DiffusionConfig(steps=T, prediction="v", zero_terminal_snr=True))


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("t", [0, 7, 120, 249])
@pytest.mark.parametrize("schedule", [PLAIN, V, ZERO], ids=["epsilon", "v", "v, zero terminal SNR"])
def test_targets_and_conversions_are_inverse(schedule, t):
    """From what the network should predict, the image and the noise are recovered."""
    x0, noise, t_N = randn(2, 1, 4, 4, 4), randn(2, 1, 4, 4, 4, seed=1), torch.full((2,), t)
    x = add_noise(schedule, x0, t_N, noise)
    target = prediction_target(schedule, x0, t_N, noise)
    # The levels on a device are float32.
    alpha, sigma = (float(level[t]) for level in schedule.levels(torch.device("cpu")))
    assert torch.allclose(clean_image(target, x, alpha, sigma, schedule.prediction), x0, atol=1e-6)
    assert torch.allclose(noise_in(target, x, alpha, sigma, schedule.prediction), noise, atol=1e-6)


def test_v_agrees_with_diffusers():
    scheduler = diffusers.DDPMScheduler(T, trained_betas=V.betas.numpy(), prediction_type="v_prediction")
    x0, noise, t_N = randn(3, 1, 4, 4, 4), randn(3, 1, 4, 4, 4, seed=1), torch.tensor([3, 100, 249])
    assert torch.allclose(prediction_target(V, x0, t_N, noise), scheduler.get_velocity(x0, noise, t_N), atol=1e-6)


def test_the_loss_is_zero_for_the_right_prediction_alone():
    x0, noise, t_N = randn(2, 1, 4, 4, 4), randn(2, 1, 4, 4, 4, seed=1), torch.tensor([30, 200])
    for schedule in (PLAIN, V):
        target = prediction_target(schedule, x0, t_N, noise)
        assert training_loss(lambda x, t, target=target: target, schedule, x0, t_N, noise) == 0
    assert training_loss(lambda x, t: noise, V, x0, t_N, noise) > 0.1


def test_zero_terminal_snr_agrees_with_diffusers():
    ours = rescale_to_zero_terminal_snr(PLAIN.betas)
    assert torch.allclose(ours, rescale_zero_terminal_snr(PLAIN.betas), atol=1e-12)
    assert ZERO.signal_noise(T - 1) == (0.0, 1.0)
    assert ZERO.log_snr[-1] == -math.inf and torch.isfinite(ZERO.log_snr[:-1]).all()
    assert math.isclose(ZERO.signal_noise(0)[0], PLAIN.signal_noise(0)[0], rel_tol=1e-12)
    assert (ZERO.betas > 0).all() and (ZERO.alphas_cumprod.diff() < 0).all()


@pytest.mark.parametrize("factor", [1e-4, 0.25, 3.0])
def test_a_shift_multiplies_the_ratio_of_every_step(factor):
    a = make_schedule(DiffusionConfig(steps=T, snr_shift=factor)).alphas_cumprod
    before = PLAIN.alphas_cumprod
    assert torch.allclose(a / (1 - a), factor * before / (1 - before), rtol=1e-9)
    assert torch.equal(shift_snr(PLAIN.betas, factor), make_schedule(DiffusionConfig(steps=T, snr_shift=factor)).betas)


@pytest.mark.parametrize("spacing", ["trailing", "linspace", "leading", "logsnr"])
def test_spacings_of_a_schedule_without_signal_at_the_end(spacing):
    timesteps = spaced_steps(T, 12, spacing, ZERO)
    assert len(set(timesteps)) == 12 and timesteps == sorted(timesteps, reverse=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_terminal_snr": True},
        {"prediction": "v", "zero_terminal_snr": True, "steps": 1},
        {"prediction": "x0"},
        {"snr_shift": 0.0},
        {"snr_shift": math.nan},
        {"offset_noise": -0.1},
    ],
)
def test_invalid_settings(settings):
    with pytest.raises(InputError):
        DiffusionConfig(**settings)


def denoiser(x, t_N):
    t = t_N.view(-1, 1, 1, 1, 1).double() / T
    return torch.tanh(x * (0.3 + t)) * 0.9 + 0.1 * torch.sin(3 * x + 5 * t)


def scheduler_in_float64(kind, schedule, **options):
    options |= {"trained_betas": schedule.betas.numpy(), "prediction_type": "v_prediction"}
    scheduler = kind(T, timestep_spacing="trailing", **options)
    scheduler.betas, scheduler.alphas = schedule.betas, 1 - schedule.betas
    scheduler.alphas_cumprod = schedule.alphas_cumprod
    return scheduler


@pytest.mark.parametrize("schedule", [V, ZERO], ids=["v", "zero terminal SNR"])
@pytest.mark.parametrize("steps", [5, 25])
def test_ddim_agrees_with_diffusers(schedule, steps):
    scheduler = scheduler_in_float64(diffusers.DDIMScheduler, schedule, clip_sample=True)
    scheduler.final_alpha_cumprod = torch.tensor(1.0, dtype=torch.float64)
    scheduler.set_timesteps(steps)
    expected = randn(2, 1, 4, 4, 4)
    for t in scheduler.timesteps:
        predicted = denoiser(expected, torch.full((2,), int(t)))
        expected = scheduler.step(predicted, t, expected, use_clipped_model_output=True).prev_sample
    x = get_sampler("ddim")(denoiser, randn(2, 1, 4, 4, 4), schedule, spaced_steps(T, steps))
    assert torch.allclose(x, expected, atol=1e-6)


def test_ddpm_agrees_with_diffusers():
    scheduler = scheduler_in_float64(diffusers.DDPMScheduler, ZERO, clip_sample=True, variance_type="fixed_small")
    scheduler.one = torch.tensor(1.0, dtype=torch.float64)
    scheduler.set_timesteps(T)
    noises = randn(T + 1, 2, 1, 4, 4, 4, seed=3)
    x = randn(2, 1, 4, 4, 4)
    for i, t in enumerate(scheduler.timesteps):
        predicted = denoiser(x, torch.full((2,), int(t)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(diffusers.schedulers.scheduling_ddpm, "randn_tensor", lambda *_, i=i, **__: noises[i + 1])
            x = scheduler.step(predicted, t, x).prev_sample
    start = randn(2, 1, 4, 4, 4)
    ours = get_sampler("ddpm")(denoiser, start, ZERO, spaced_steps(T, T), noise=lambda k: noises[k])
    assert torch.allclose(ours, x, atol=1e-5)


@pytest.mark.parametrize("name", ["dpm++", "unipc"])
@pytest.mark.parametrize("steps", [5, 20])
def test_exponential_integrators_agree_with_diffusers(name, steps):
    options = {
        "solver_order": 2,
        "final_sigmas_type": "zero",
        "thresholding": True,
        "sample_max_value": 1.0,
    }
    kind = diffusers.DPMSolverMultistepScheduler if name == "dpm++" else diffusers.UniPCMultistepScheduler
    scheduler = scheduler_in_float64(kind, V, **options)
    scheduler.set_timesteps(steps)
    expected = randn(2, 1, 4, 4, 4)
    for t in scheduler.timesteps:
        expected = scheduler.step(denoiser(expected, torch.full((2,), int(t))), t, expected).prev_sample
    ours = get_sampler(name)(denoiser, randn(2, 1, 4, 4, 4), V, spaced_steps(T, steps))
    assert ((ours - expected).norm() / expected.norm()).item() < 1e-5


MEAN, STD = 0.4, 0.3


def gaussian_denoiser(schedule, std=STD):
    """The best prediction for images whose voxels are N(MEAN, std^2): what a perfect network would return."""

    def denoise(x, t_N):
        alpha, sigma = schedule.signal_noise(int(t_N[0]))
        x0 = MEAN + alpha * std**2 / (alpha**2 * std**2 + sigma**2) * (x - alpha * MEAN)
        noise = (x - alpha * x0) / sigma
        return noise if schedule.prediction == "epsilon" else alpha * noise - sigma * x0

    return denoise


def moments(name, schedule, steps, std=STD):
    """(mean, standard deviation) of what a sampler makes of pure noise: exact, because every step is an affine map.

    Row 0 is sampled without any noise, row 1 from a start of 1, row 1 + k with 1 as draw k of the noise.
    """
    rows = torch.eye(steps + 1, dtype=torch.float64)[:, :, None]
    rows = torch.cat([torch.zeros_like(rows[:, :1]), rows], dim=1)
    timesteps = spaced_steps(len(schedule), steps)
    denoise = gaussian_denoiser(schedule, std)
    x = get_sampler(name)(denoise, rows[0], schedule, timesteps, noise=lambda k: rows[k], clip=False)[:, 0]
    return float(x[0]), float((x[1:] - x[0]).norm())


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_mean_is_exact_from_pure_noise(name):
    """Without signal at the last step, sampling starts at the distribution of training, with any number of steps."""
    for steps in (2, 5, 25):
        assert math.isclose(moments(name, ZERO, steps)[0], MEAN, abs_tol=1e-9)


def test_the_mean_is_wrong_where_the_start_has_signal():
    linear = make_schedule(DiffusionConfig(steps=T, schedule="linear", snr_shift=1000.0, prediction="v"))
    alpha, _ = linear.signal_noise(T - 1)
    assert alpha > 0.1 and abs(moments("ddim", linear, 25)[0] - MEAN) > 0.01


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_distribution_is_recovered_with_all_steps(name):
    mean, std = moments(name, ZERO, T)
    assert math.isclose(mean, MEAN, abs_tol=1e-9) and math.isclose(std, STD, rel_tol=0.03)


@pytest.mark.parametrize("schedule", [V, ZERO], ids=["v", "zero terminal SNR"])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("steps", [1, 2, 12])
def test_a_known_image_is_recovered(name, schedule, steps):
    mean, std = moments(name, schedule, steps, std=0.0)
    assert math.isclose(mean, MEAN, abs_tol=1e-6) and std < 1e-6


def test_both_predictions_give_the_same_samples():
    for name in ("ddim", "dpm++", "unipc", "ipndm"):
        assert moments(name, PLAIN, 10) == pytest.approx(moments(name, V, 10), abs=1e-6)


def test_offset_noise_changes_the_mean_of_a_sample_alone():
    shape, indices = (2, 4, 4, 4), list(range(2000))
    plain = noise_source(3, indices, shape)
    assert with_offset(plain, 0.0, 3, indices, shape) is plain
    added = with_offset(plain, 0.5, 3, indices, shape)(4) - plain(4)
    assert added.flatten(2).var(dim=2).max() < 1e-10
    values = added.flatten(2).mean(dim=2)
    # Four standard errors.
    assert abs(float(values.mean())) < 0.032 and abs(float(values.std()) - 0.5) < 0.023
    # Each draw has its own offsets, and they depend on the index of the sample, not on its place in the batch.
    assert not torch.allclose(added, with_offset(plain, 0.5, 3, indices, shape)(5) - plain(5))
    alone = with_offset(noise_source(3, [7], shape), 0.5, 3, [7], shape)(4)
    assert torch.equal(alone[0], with_offset(plain, 0.5, 3, indices, shape)(4)[7])
