"""Reuse of deep features between sampling steps (DeepCache, Ma et al. 2023): they change slowly from one step to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from voxtune.diffusion.samplers import Denoise

Full = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Shallow = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_steps(steps: int, interval: int) -> list[bool]:
    """True for the steps that run the full network: the first, every `interval`-th after it, and the last."""
    return [i % interval == 0 or i == steps - 1 for i in range(steps)]


def cached_denoiser(full: Full, shallow: Shallow, full_at: Iterable[bool]) -> Denoise:
    """A denoiser for one sampling.

    At steps where `full_at` is true, `full(x, t_N)` returns the noise and the deep feature. At the others,
    `shallow(x, t_N, deep)` reuses that feature.
    """
    schedule = iter(full_at)
    deep: Tensor | None = None

    def denoise(x: Tensor, t_N: Tensor) -> Tensor:
        nonlocal deep
        if next(schedule):
            eps, deep = full(x, t_N)
            return eps
        assert deep is not None, "the first step runs the full network"
        return shallow(x, t_N, deep)

    return denoise
