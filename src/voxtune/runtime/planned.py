"""Between a Model and the plans: `voxtune.optimize`, a network that finds its plan by itself for each shape, and what
`voxtune tune` calls a Model's network with."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from voxtune.diffusion import get_sampler, noise_source, spaced_steps
from voxtune.errors import InputError
from voxtune.runtime.model import Model, check_size, workload_config
from voxtune.runtime.sampling import FeatureCache
from voxtune.runtime.storage import load
from voxtune.workloads import WORKLOADS, split, without_zeros

if TYPE_CHECKING:
    from voxtune.plan import Optimized, Plan
    from voxtune.plan.tuner import TunerRung

Say = Callable[[str], None]


class Planned(nn.Module):
    """A network that is optimized for each form of input when it first comes."""

    def __init__(
        self,
        original: nn.Module,
        plan: str | Path | Plan,
        *,
        search: bool = True,
        say: Say = lambda _line: None,
        ran: Callable[[tuple[str, ...]], None] | None = None,
    ):
        super().__init__()
        self.original, self.plan, self.search, self.say = original, plan, search, say
        self.optimized: dict[Any, Optimized] = {}
        self.parts: dict[int, tuple[Planned, Planned]] = {}
        self.passes: tuple[str, ...] = ()  # of the plan that ran last, of its parts' too
        self.ran = ran or self._ran
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from voxtune.plan import optimize as optimize_network
        from voxtune.plan.run import Signature

        signature = Signature.of(args, kwargs)
        if signature not in self.optimized:
            self.optimized[signature] = optimize_network(
                self.original, args, self.plan, example_kwargs=kwargs, search=self.search, say=self.say
            )
        network = self.optimized[signature]
        self.ran(network.plan.names)
        return network.run(signature, args, kwargs)

    def split(self, depth: int) -> tuple[Planned, Planned]:
        """The original's two parts (see `workloads.split`), each with plans of its own."""
        if depth not in self.parts:
            options: dict[str, Any] = {"search": self.search, "say": self.say, "ran": self.ran}
            full, shallow = (Planned(part, self.plan, **options) for part in split(self.original, depth))
            self.parts[depth] = full, shallow
        return self.parts[depth]

    def _ran(self, passes: tuple[str, ...]) -> None:
        self.passes = passes


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
    from voxtune.plan import optimize as optimize_network

    if isinstance(model, Model):
        return Model(model.config, Planned(model.network, plan, **options), _noise)
    if not isinstance(model, nn.Module):
        raise InputError(f"optimize takes a torch.nn.Module or a voxtune.Model, found {type(model).__name__}")
    if example_inputs is None:
        raise InputError("give example_inputs: the tensors that the network is called with")
    return optimize_network(model, example_inputs, plan, **options)


def by_plan(model: Model, plan: str, say: Say) -> Model:
    """The model by a plan that is known, or found without measuring; as it is where that is all there is to a CPU's baseline."""
    if plan == "baseline" and model.device.type == "cpu":
        return model
    return optimize(model, plan=plan, search=False, say=say)


# Of the gate's trajectories: enough for errors to build up, few enough for a CPU.
STEPS = 8


def tuning_target(name: str, device: torch.device | str) -> Model:
    """A model from disk; or a workload with random weights, none of them zero, since a zero layer hides every error."""
    if name in WORKLOADS and not Path(name).exists():
        torch.manual_seed(0)
        model = Model(workload_config(name))
        without_zeros(model.network)
        return model.to(device)
    return load(Path(name), device=device)


def example_inputs(model: Model, size: Sequence[int] | None = None, batch: int = 1) -> tuple[Any, ...]:
    """(x, t, mask): noise, a middle step, and a mask of blocks, in the form that `Model.sample` calls the network with."""
    config = model.config.network
    sides = tuple(size or model.config.size)
    check_size(config, sides)
    x = noise_source(0, list(range(batch)), (config.out_channels, *sides), model.device)(0)
    t_N = torch.full((batch,), len(model.schedule) // 2, dtype=torch.int64, device=model.device)
    if not config.mask_channels:
        return x, t_N, None
    coarse = torch.randn(batch, config.mask_channels, *[4] * len(sides), generator=torch.Generator().manual_seed(0))
    mask = nn.functional.interpolate(coarse.sign(), size=sides, mode="nearest")
    return x, t_N, mask.to(model.device)


def walk(model: Model, args: tuple[Any, ...], steps: int = STEPS) -> Callable[[Callable[..., Any], int], Tensor]:
    """The model's own schedule and sampler in a few steps, with the noise of a seed."""
    from voxtune.plan.gate import volume_of

    timesteps = spaced_steps(model.available_steps, min(steps, model.available_steps))
    sampler = get_sampler(model.config.sampling.sampler)
    x, _, *rest = args

    def follow(call: Callable[..., Any], seed: int) -> Tensor:
        noise = noise_source(seed, list(range(x.shape[0])), tuple(x.shape[1:]), x.device)
        return sampler(lambda y, t_N: volume_of(call(y, t_N, *rest)), noise(0), model.schedule, timesteps, noise=noise)

    return follow


class Parts(nn.Module):
    """A network whose two parts (see `workloads.split`) were tuned apart."""

    def __init__(self, original: nn.Module, depth: int, full: nn.Module, between: nn.Module):
        super().__init__()
        self.original, self.depth, self.full, self.between = original, depth, full, between
        self.eval()

    def forward(self, *args: Any) -> Any:
        return self.original(*args)

    def split(self, depth: int) -> tuple[nn.Module, nn.Module]:
        return (self.full, self.between) if depth == self.depth else split(self.original, depth)


def tune_model(
    model: Model,
    args: tuple[Any, ...],
    *,
    cache: FeatureCache | None = None,
    ladder: Sequence[TunerRung] | None = None,
    steps: int = STEPS,
    checks: int = 3,
    seconds: float = math.inf,
    say: Say = lambda _line: None,
) -> tuple[Model, Plan]:
    """The model by the fastest networks that pass the gate, and their plan; kept for `plan="auto"`, too.

    With `cache`, what is tuned are the parts that a sampling runs which keeps features between steps: the whole network with
    the deep feature beside its answer, then by the same passes, whatever time that takes, the outer levels alone; these on one
    input, since the passes have been judged on the whole network by then.
    """
    from voxtune.plan.cache import remember
    from voxtune.plan.tuner import BASELINE, Tuned, TunerRung, tune

    def found(network: nn.Module, args: tuple[Any, ...], **options: Any) -> Tuned:
        tuned = tune(network, args, trajectory=walk(model, args, steps), say=say, **options)
        remember(tuned.plan)
        return tuned

    if cache is None:
        whole = found(model.network, args, ladder=ladder, checks=checks, seconds=seconds)
        return Model(model.config, whole.network, model.noise), whole.plan
    full, between = split(model.network, cache.depth)
    whole = found(full, args, ladder=ladder, checks=checks, seconds=seconds)
    say("the outer levels, which run alone where the deep feature is kept:")
    again = TunerRung(
        "all of these", tuple(name for name in whole.plan.names if name not in BASELINE.names), apart=True
    )
    with torch.no_grad():
        deep = whole.network(*args)[1].clone()
    outer = found(between, (*args, deep), ladder=(again,), checks=1)
    return Model(model.config, Parts(model.network, cache.depth, whole.network, outer.network), model.noise), whole.plan
