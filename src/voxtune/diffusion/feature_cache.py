"""Deep features kept between steps (the idea of DeepCache, Ma et al. 2023): they change slowly from one step to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from voxtune.diffusion.samplers import Denoise

Full = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Shallow = Callable[[Tensor, Tensor, Tensor], Tensor]


def full_steps(steps: int, interval: int) -> list[bool]:
    """Which of the steps run the whole network: every `interval`-th from the first on, and the last."""
    return [i % interval == 0 or i == steps - 1 for i in range(steps)]


def reusing(full: Full, shallow: Shallow, turns: Iterable[bool]) -> Denoise:
    """A denoiser for one sampling: `full(x, t_N)` leaves the deep feature that `shallow(x, t_N, deep)` takes at other turns."""
    waiting = iter(turns)
    kept: Tensor | None = None

    def denoise(x: Tensor, t_N: Tensor) -> Tensor:
        nonlocal kept
        if next(waiting):
            eps, kept = full(x, t_N)
            return eps
        assert kept is not None, "the first step is a full one"
        return shallow(x, t_N, kept)

    return denoise
