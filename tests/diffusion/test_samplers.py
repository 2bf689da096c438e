"""Every sampler agrees with the scheduler of diffusers on the same betas, and DDPM with a stored reference volume."""

from __future__ import annotations

import diffusers
import pytest
import torch

from voxtune.diffusion import SAMPLERS, DiffusionConfig, Schedule, get_sampler, make_schedule, spaced_steps
from voxtune.diffusion.samplers import ddim
from voxtune.errors import InputError

T = 250
SCHEDULE = make_schedule(DiffusionConfig(steps=T))
BETAS = SCHEDULE.betas.numpy()


def denoiser(x, t_N):
    """A smooth function of x and t, nonlinear, so that a wrong order or timestep changes the result."""
    t = t_N.view(-1, 1, 1, 1, 1).double() / T
    return torch.tanh(x * (0.3 + t)) * 0.9 + 0.1 * torch.sin(3 * x + 5 * t)


def start():
    return torch.randn(2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def in_float64(scheduler):
    """diffusers computes the schedule in float32, which loses four digits at the last steps; replaces it by float64."""
    scheduler.betas, scheduler.alphas = SCHEDULE.betas, 1 - SCHEDULE.betas
    scheduler.alphas_cumprod = SCHEDULE.alphas_cumprod
    scheduler.one = torch.tensor(1.0, dtype=torch.float64)
    return scheduler


def run_scheduler(scheduler, timesteps, x, **step_options):
    for t in timesteps:
        x = scheduler.step(denoiser(x, torch.full((2,), int(t))), t, x, **step_options).prev_sample
    return x


def assert_close(ours, expected, tolerance=1e-5):
    assert torch.isfinite(ours).all()
    assert ((ours - expected).norm() / expected.norm()).item() < tolerance


@pytest.mark.parametrize("steps", [10, 25, 50])
def test_ddim(steps):
    scheduler = in_float64(
        diffusers.DDIMScheduler(T, trained_betas=BETAS, timestep_spacing="trailing", clip_sample=True)
    )
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == spaced_steps(T, steps, "trailing")
    expected = run_scheduler(scheduler, scheduler.timesteps, start(), use_clipped_model_output=True)
    assert_close(ddim(denoiser, start(), SCHEDULE, spaced_steps(T, steps)), expected)


def test_ddpm_every_step():
    scheduler = in_float64(
        diffusers.DDPMScheduler(T, trained_betas=BETAS, clip_sample=True, variance_type="fixed_small")
    )
    scheduler.set_timesteps(T)
    noises = torch.randn(T + 1, 2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = start()
    for i, t in enumerate(scheduler.timesteps):
        # Replaces the noise of the scheduler by the noise of this test.
        eps = denoiser(x, torch.full((2,), int(t)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(diffusers.schedulers.scheduling_ddpm, "randn_tensor", lambda *_, i=i, **__: noises[i + 1])
            x = scheduler.step(eps, t, x).prev_sample
    assert_close(get_sampler("ddpm")(denoiser, start(), SCHEDULE, spaced_steps(T, T), noise=lambda k: noises[k]), x)


@pytest.mark.parametrize("spacing", ["trailing", "linspace"])
@pytest.mark.parametrize("steps", [2, 5, 10, 20, 25])
@pytest.mark.parametrize("name", ["dpm++", "unipc"])
def test_exponential_integrators(name, steps, spacing):
    common = {
        "num_train_timesteps": T,
        "trained_betas": BETAS,
        "timestep_spacing": spacing,
        "solver_order": 2,
        "final_sigmas_type": "zero",
        # Dynamic thresholding with a maximum of 1 is clamping to [-1, 1].
        "thresholding": True,
        "sample_max_value": 1.0,
    }
    scheduler = (
        diffusers.DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", **common)
        if name == "dpm++"
        else diffusers.UniPCMultistepScheduler(solver_type="bh2", predict_x0=True, **common)
    )
    in_float64(scheduler).set_timesteps(steps)
    assert scheduler.timesteps.tolist() == spaced_steps(T, steps, spacing)
    expected = run_scheduler(scheduler, scheduler.timesteps, start())
    assert_close(get_sampler(name)(denoiser, start(), SCHEDULE, spaced_steps(T, steps, spacing)), expected)


@pytest.mark.parametrize("steps", [5, 10, 20])
def test_logsnr_spacing_agrees_with_diffusers(steps):
    linear = Schedule(0.9 * make_schedule(DiffusionConfig(schedule="linear", steps=T)).betas)
    scheduler = diffusers.DPMSolverMultistepScheduler(
        num_train_timesteps=T, trained_betas=linear.betas.numpy(), use_lu_lambdas=True, final_sigmas_type="zero"
    )
    scheduler.set_timesteps(steps)
    ours = spaced_steps(T, steps, "logsnr", linear)
    # The two implementations round differently.
    assert max(abs(a - b) for a, b in zip(ours, scheduler.timesteps.tolist(), strict=True)) <= 1


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_sde_dpm_solver_pp(steps):
    scheduler = diffusers.DPMSolverMultistepScheduler(
        num_train_timesteps=T,
        trained_betas=BETAS,
        timestep_spacing="trailing",
        solver_order=2,
        final_sigmas_type="zero",
        thresholding=True,
        sample_max_value=1.0,
        algorithm_type="sde-dpmsolver++",
    )
    in_float64(scheduler).set_timesteps(steps)
    noises = torch.randn(steps + 1, 2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = start()
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(denoiser(x, torch.full((2,), int(t))), t, x, variance_noise=noises[i + 1]).prev_sample
    ours = get_sampler("sde-dpm++")(denoiser, start(), SCHEDULE, spaced_steps(T, steps), noise=lambda k: noises[k])
    # diffusers rounds the noise to float32.
    assert_close(ours, x)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 10, 25])
def test_ipndm_order_3(steps, clip):
    timesteps = spaced_steps(T, steps)
    levels = torch.tensor([SCHEDULE.signal_noise(t) for t in [*timesteps, -1]], dtype=torch.float64)
    scheduler = diffusers.IPNDMScheduler(T, trained_betas=levels[:, 1].numpy())
    scheduler.set_timesteps(steps)
    # The "alphas" and "betas" of this scheduler are the signal and noise levels.
    scheduler.alphas, scheduler.betas = levels[:, 0], levels[:, 1]
    x = start()
    for t, (alpha, sigma), level in zip(timesteps, levels, scheduler.timesteps, strict=False):
        eps = denoiser(x, torch.full((2,), t))
        if clip:
            eps = (x - alpha * ((x - sigma * eps) / alpha).clamp(-1, 1)) / sigma
        scheduler.ets = scheduler.ets[-2:]
        # The scheduler takes the velocity v and computes eps = sigma x + alpha v.
        x = scheduler.step((eps - sigma * x) / alpha, level, x).prev_sample
    assert_close(get_sampler("ipndm")(denoiser, start(), SCHEDULE, timesteps, clip=clip), x.clamp(-1, 1) if clip else x)


def test_ddpm_reproduces_the_reference_volume(golden):
    network, g = golden
    schedule = make_schedule(DiffusionConfig(steps=10))
    with torch.inference_mode():
        x = get_sampler("ddpm")(
            lambda x, t: network(x, t, g["cond"]),
            g["sampler_noises"][0],
            schedule,
            spaced_steps(10, 10),
            noise=lambda k: g["sampler_noises"][k],
        )
    assert_close(x, g["ddpm_sample"])


@pytest.mark.parametrize("name", SAMPLERS)
def test_callback_is_called_at_every_step(name):
    steps = []
    noise = lambda k: torch.zeros_like(start())  # noqa: E731
    get_sampler(name)(
        denoiser, start(), SCHEDULE, spaced_steps(T, 6), noise=noise, callback=lambda i, x, x0: steps.append(i)
    )
    assert steps == list(range(6))


@pytest.mark.parametrize("name", SAMPLERS)
def test_exact_denoiser_recovers_the_image(name):
    """With the true noise of an image, every sampler returns that image."""
    image = torch.rand(1, 1, 4, 4, 4, dtype=torch.float64) * 1.6 - 0.8

    def exact_noise(x, t_N):
        alpha, sigma = SCHEDULE.signal_noise(int(t_N[0]))
        return (x - alpha * image) / sigma

    x = get_sampler(name)(exact_noise, start()[:1], SCHEDULE, spaced_steps(T, 12), noise=lambda k: start()[:1])
    assert torch.allclose(x, image, atol=1e-6)


def test_invalid_arguments():
    with pytest.raises(InputError, match="unknown sampler 'no-such-sampler'"):
        get_sampler("no-such-sampler")
    with pytest.raises(InputError, match="1 to 250"):
        spaced_steps(T, 251)
    with pytest.raises(InputError, match="noise source"):
        get_sampler("ddpm")(denoiser, start(), SCHEDULE, [3])
