"""`voxtune.optimize`, for a bare network and for a Model; and a network that finds its plan by itself for each shape."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from voxtune.diffusion import noise_source
from voxtune.runtime.model import Model

if TYPE_CHECKING:
    from voxtune.plan import Optimized, Plan

Say = Callable[[str], None]


class Planned(nn.Module):
    """A network that is optimized for each form of input when it first comes."""

    def __init__(
        self, original: nn.Module, plan: str | Path | Plan, *, search: bool = True, say: Say = lambda _line: None
    ):
        super().__init__()
        self.original, self.plan, self.search, self.say = original, plan, search, say
        self.made: dict[Any, Optimized] = {}
        self.passes: tuple[str, ...] = ()  # of the plan that ran last
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from voxtune.plan import optimize as optimize_network
        from voxtune.plan.run import Signature

        form = Signature.of(args, kwargs)
        if form not in self.made:
            self.made[form] = optimize_network(
                self.original, args, self.plan, example_kwargs=kwargs, search=self.search, say=self.say
            )
        self.passes = self.made[form].plan.names
        return self.made[form](*args, **kwargs)


def _noise(seed: int, indices: Sequence[int], shape: Sequence[int], device: torch.device) -> Callable[[int], Tensor]:
    """On a GPU by one kernel a draw; elsewhere by plain PyTorch."""
    if torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is not None:
        from voxtune.kernels.noise import noise_source as on_gpu

        return on_gpu(seed, indices, shape, device)
    return noise_source(seed, indices, shape, device)


@overload
def optimize(model: Model, example_inputs: None = None, plan: str | Path | Plan = "auto", **options: Any) -> Model: ...
@overload
def optimize(
    model: nn.Module, example_inputs: Sequence[Any] | Tensor, plan: str | Path | Plan = "auto", **options: Any
) -> Optimized: ...
def optimize(
    model: Model | nn.Module,
    example_inputs: Sequence[Any] | Tensor | None = None,
    plan: str | Path | Plan = "auto",
    **options: Any,
) -> Model | Optimized:
    """A faster network that gives the same answer; see `voxtune.plan.optimize` for plans and options.

    A Model needs no example inputs: its network is optimized for each shape when that is first sampled.
    """
    from voxtune.errors import InputError
    from voxtune.plan import optimize as optimize_network

    if isinstance(model, Model):
        return Model(model.config, Planned(model.network, plan, **options), _noise)
    if not isinstance(model, nn.Module):
        raise InputError(f"optimize takes a torch.nn.Module or a voxtune.Model, found {type(model).__name__}")
    if example_inputs is None:
        raise InputError("give example_inputs: the tensors that the network is called with")
    return optimize_network(model, example_inputs, plan, **options)
