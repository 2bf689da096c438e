"""Each sampler against diffusers' scheduler on the same betas and a fixed denoiser, and against the golden volume."""

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
    """A fixed smooth map: nonlinear in x, and different at every step, so that a wrong order or step shows."""
    t = t_N.view(-1, 1, 1, 1, 1).double() / T
    return torch.tanh(x * (0.3 + t)) * 0.9 + 0.1 * torch.sin(3 * x + 5 * t)


def start():
    return torch.randn(2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def exact(scheduler):
    """diffusers keeps the schedule in float32, which costs the last steps four digits: give it ours in float64."""
    scheduler.betas, scheduler.alphas = SCHEDULE.betas, 1 - SCHEDULE.betas
    scheduler.alphas_cumprod = SCHEDULE.alphas_cumprod
    scheduler.one = torch.tensor(1.0, dtype=torch.float64)
    return scheduler


def follow(scheduler, timesteps, x, **step_options):
    for t in timesteps:
        x = scheduler.step(denoiser(x, torch.full((2,), int(t))), t, x, **step_options).prev_sample
    return x


def same(ours, theirs, tolerance=1e-5):
    assert torch.isfinite(ours).all()
    assert ((ours - theirs).norm() / theirs.norm()).item() < tolerance


@pytest.mark.parametrize("steps", [10, 25, 50])
def test_ddim(steps):
    scheduler = exact(diffusers.DDIMScheduler(T, trained_betas=BETAS, timestep_spacing="trailing", clip_sample=True))
    scheduler.set_timesteps(steps)
    assert scheduler.timesteps.tolist() == spaced_steps(T, steps, "trailing")
    theirs = follow(scheduler, scheduler.timesteps, start(), use_clipped_model_output=True)
    same(ddim(denoiser, start(), SCHEDULE, spaced_steps(T, steps)), theirs)


def test_ddpm_every_step():
    scheduler = exact(diffusers.DDPMScheduler(T, trained_betas=BETAS, clip_sample=True, variance_type="fixed_small"))
    scheduler.set_timesteps(T)
    noises = torch.randn(T + 1, 2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = start()
    for i, t in enumerate(scheduler.timesteps):
        # The scheduler's own noise is replaced: its mean is its step at zero noise, its spread is its variance.
        eps = denoiser(x, torch.full((2,), int(t)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(diffusers.schedulers.scheduling_ddpm, "randn_tensor", lambda *_, i=i, **__: noises[i + 1])
            x = scheduler.step(eps, t, x).prev_sample
    same(get_sampler("ddpm")(denoiser, start(), SCHEDULE, spaced_steps(T, T), noise=lambda k: noises[k]), x)


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
        # Dynamic thresholding whose bound is 1 is the plain clamp.
        "thresholding": True,
        "sample_max_value": 1.0,
    }
    scheduler = (
        diffusers.DPMSolverMultistepScheduler(algorithm_type="dpmsolver++", **common)
        if name == "dpm++"
        else diffusers.UniPCMultistepScheduler(solver_type="bh2", predict_x0=True, **common)
    )
    exact(scheduler).set_timesteps(steps)
    assert scheduler.timesteps.tolist() == spaced_steps(T, steps, spacing)
    theirs = follow(scheduler, scheduler.timesteps, start())
    same(get_sampler(name)(denoiser, start(), SCHEDULE, spaced_steps(T, steps, spacing)), theirs)


@pytest.mark.parametrize("steps", [5, 10, 20])
def test_steps_even_in_log_snr(steps):
    linear = Schedule(0.9 * make_schedule(DiffusionConfig(schedule="linear", steps=T)).betas)
    scheduler = diffusers.DPMSolverMultistepScheduler(
        num_train_timesteps=T, trained_betas=linear.betas.numpy(), use_lu_lambdas=True, final_sigmas_type="zero"
    )
    scheduler.set_timesteps(steps)
    ours = spaced_steps(T, steps, "logsnr", linear)
    # They round between steps, and both may round near a step that was taken already.
    assert max(abs(a - b) for a, b in zip(ours, scheduler.timesteps.tolist(), strict=True)) <= 1


@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_the_stochastic_solver(steps):
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
    exact(scheduler).set_timesteps(steps)
    noises = torch.randn(steps + 1, 2, 1, 4, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x = start()
    for i, t in enumerate(scheduler.timesteps):
        x = scheduler.step(denoiser(x, torch.full((2,), int(t))), t, x, variance_noise=noises[i + 1]).prev_sample
    ours = get_sampler("sde-dpm++")(denoiser, start(), SCHEDULE, spaced_steps(T, steps), noise=lambda k: noises[k])
    # Their noise is rounded to float32.
    same(ours, x)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("steps", [1, 3, 10, 25])
def test_ipndm_order_3(steps, clip):
    timesteps = spaced_steps(T, steps)
    levels = torch.tensor([SCHEDULE.signal_noise(t) for t in [*timesteps, -1]], dtype=torch.float64)
    scheduler = diffusers.IPNDMScheduler(T, trained_betas=levels[:, 1].numpy())
    scheduler.set_timesteps(steps)
    # This scheduler's "alphas" and "betas" are the levels of signal and noise.
    scheduler.alphas, scheduler.betas = levels[:, 0], levels[:, 1]
    x = start()
    for t, (alpha, sigma), level in zip(timesteps, levels, scheduler.timesteps, strict=False):
        eps = denoiser(x, torch.full((2,), t))
        if clip:
            eps = (x - alpha * ((x - sigma * eps) / alpha).clamp(-1, 1)) / sigma
        scheduler.ets = scheduler.ets[-2:]
        # It takes the velocity and makes the noise of it again: eps = sigma x + alpha v.
        x = scheduler.step((eps - sigma * x) / alpha, level, x).prev_sample
    same(get_sampler("ipndm")(denoiser, start(), SCHEDULE, timesteps, clip=clip), x.clamp(-1, 1) if clip else x)


def test_golden_volume(golden):
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
    same(x, g["ddpm_sample"])


@pytest.mark.parametrize("name", SAMPLERS)
def test_callback_sees_every_step(name):
    seen = []
    noise = lambda k: torch.zeros_like(start())  # noqa: E731
    get_sampler(name)(
        denoiser, start(), SCHEDULE, spaced_steps(T, 6), noise=noise, callback=lambda i, x, x0: seen.append(i)
    )
    assert seen == list(range(6))


@pytest.mark.parametrize("name", SAMPLERS)
def test_exact_denoiser_gives_the_image(name):
    """Given the true noise of one image, every sampler must return that image."""
    image = torch.rand(1, 1, 4, 4, 4, dtype=torch.float64) * 1.6 - 0.8

    def truth(x, t_N):
        alpha, sigma = SCHEDULE.signal_noise(int(t_N[0]))
        return (x - alpha * image) / sigma

    x = get_sampler(name)(truth, start()[:1], SCHEDULE, spaced_steps(T, 12), noise=lambda k: start()[:1])
    assert torch.allclose(x, image, atol=1e-6)


def test_what_the_user_gets_wrong():
    with pytest.raises(InputError, match="unknown sampler 'euler'"):
        get_sampler("euler")
    with pytest.raises(InputError, match="1 to 250"):
        spaced_steps(T, 251)
    with pytest.raises(InputError, match="noise source"):
        get_sampler("ddpm")(denoiser, start(), SCHEDULE, [3])
