"""Plans for a Model: `voxtune.optimize`, a network that gets a plan for each input shape, and the tuning of a Model."""

from __future__ import annotations

import importlib.util
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

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
    from voxtune.plan.api import RequestedPrecision
    from voxtune.plan.optimized_training import OptimizedTraining
    from voxtune.plan.search import Search
    from voxtune.plan.tuner import TunerRung

Say = Callable[[str], None]


class Planned(nn.Module):
    """A network that is optimized for each input signature on its first call."""

    def __init__(
        self,
        original: nn.Module,
        plan: str | Path | Plan,
        *,
        precision: RequestedPrecision = "auto",
        search: Search | bool = "quick",
        memory_limit: int | None = None,
        say: Say | None = None,
        ran: Callable[[tuple[str, ...]], None] | None = None,
    ):
        super().__init__()
        self.original, self.plan = original, plan
        self.options: dict[str, Any] = {
            "precision": precision,
            "search": search,
            "memory_limit": memory_limit,
            "say": say,
        }
        self.optimized: OrderedDict[Any, Optimized] = OrderedDict()
        self.parts: dict[int, tuple[Planned, Planned]] = {}
        self.passes: tuple[str, ...] = ()  # of the plan that ran last, in this network or in one of its parts
        self.ran = ran or self._ran
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from voxtune.plan import optimize as optimize_network
        from voxtune.plan.optimized import MAX_VARIANTS
        from voxtune.plan.run import Signature

        signature = Signature.of(args, kwargs)
        if signature not in self.optimized:
            # The graphs of all sizes share the memory of the first one's.
            pool = next((network.pool for network in self.optimized.values() if network.pool is not None), None)
            while len(self.optimized) >= MAX_VARIANTS:
                self.optimized.popitem(last=False)
            self.optimized[signature] = optimize_network(
                self.original, args, self.plan, example_kwargs=kwargs, pool=pool, **self.options
            )
        network = self.optimized[signature]
        self.optimized.move_to_end(signature)
        self.ran(network.plan.names)
        return network.run(signature, args, kwargs)

    def split(self, depth: int) -> tuple[Planned, Planned]:
        """The original's two parts (see `workloads.split`), each with plans of its own."""
        if depth not in self.parts:
            options: dict[str, Any] = {**self.options, "ran": self.ran}
            full, shallow = (Planned(part, self.plan, **options) for part in split(self.original, depth))
            self.parts[depth] = full, shallow
        return self.parts[depth]

    @property
    def plans(self) -> list[Plan]:
        """The plans in use, those of the parts included."""
        parts = [part for pair in self.parts.values() for part in pair]
        return [network.plan for network in self.optimized.values()] + [plan for part in parts for plan in part.plans]

    def _ran(self, passes: tuple[str, ...]) -> None:
        self.passes = passes


def _noise(seed: int, indices: Sequence[int], shape: Sequence[int], device: torch.device) -> Callable[[int], Tensor]:
    """Noise from one kernel launch on a GPU, from plain PyTorch elsewhere."""
    if torch.device(device).type == "cuda" and importlib.util.find_spec("triton") is not None:
        from voxtune.kernels.noise import noise_source as on_gpu

        return on_gpu(seed, indices, shape, device)
    return noise_source(seed, indices, shape, device)


@overload
def optimize(model: Model, example_inputs: None = None, plan: str | Path | Plan = "auto", **options: Any) -> Model: ...
@overload
def optimize(
    model: nn.Module,
    example_inputs: Sequence[Any] | Tensor,
    plan: str | Path | Plan = "auto",
    *,
    train: Literal[False] = False,
    **options: Any,
) -> Optimized: ...
@overload
def optimize(
    model: nn.Module,
    example_inputs: Sequence[Any] | Tensor,
    plan: str | Path | Plan = "auto",
    *,
    train: Literal[True],
    **options: Any,
) -> OptimizedTraining: ...
def optimize(
    model: Model | nn.Module,
    example_inputs: Sequence[Any] | Tensor | None = None,
    plan: str | Path | Plan = "auto",
    *,
    train: bool = False,
    **options: Any,
) -> Model | Optimized | OptimizedTraining:
    """A faster network with the same output, as checked by the gate; `voxtune.plan.optimize` describes plans and options.

    A Model needs no example inputs: its network is optimized for each shape when a volume of it is first sampled.

    `train=True`: the result computes gradients, for the network's own parameters. The rewritten network competes with the
    original in the time of a forward and a backward pass; its gate compares gradients, layer by layer. Options are `precision`:
    "same" (that of autocast where this is called), "auto", "bf16" or "fp16"; `example_kwargs`; and `say`.
    """
    from voxtune.plan import Plan
    from voxtune.plan import optimize as optimize_network

    if not isinstance(plan, str | Path | Plan):
        raise InputError(f"plan: expected 'auto', 'baseline', a plan file or a Plan, got {type(plan).__name__}")
    if isinstance(model, Model):
        if train:
            raise InputError("train=True takes a network: pass model.network, or train with voxtune.train")
        return Model(model.config, Planned(model.network, plan, **options), _noise, weights=model.weights)
    if not isinstance(model, nn.Module):
        raise InputError(f"optimize requires a torch.nn.Module or a voxtune.Model, got {type(model).__name__}")
    if example_inputs is None:
        raise InputError("missing example_inputs: pass the tensors that the network is called with")
    if not isinstance(example_inputs, Tensor | list | tuple):
        raise InputError(f"example_inputs: expected tensors, got {type(example_inputs).__name__}")
    if train:
        from voxtune.plan.optimized_training import optimize_training

        return optimize_training(model, example_inputs, plan, **options)
    return optimize_network(model, example_inputs, plan, **options)


def by_plan(model: Model, plan: str, say: Say) -> Model:
    """The model with a plan that needs no search; the model itself for the baseline on a CPU."""
    if plan == "baseline" and model.device.type == "cpu":
        return model
    return optimize(model, plan=plan, search=False, say=say)


# Steps of the gate's trajectories: enough for errors to accumulate, few enough for a CPU.
STEPS = 8
# Share of the full network in the tuning of a model with a feature cache, for the progress bar.
FULL_SHARE = 0.75


def tuning_target(name: str, device: torch.device | str) -> Model:
    """A model from disk, or a workload with random weights and no zero layers, since a zero layer hides every error."""
    if name in WORKLOADS and not Path(name).exists():
        torch.manual_seed(0)
        model = Model(workload_config(name))
        without_zeros(model.network)
        return model.to(device)
    return load(Path(name), device=device)


def example_inputs(model: Model, size: Sequence[int] | None = None, batch: int = 1) -> tuple[Any, ...]:
    """(x, t, mask): noise, a middle step and a mask of blocks, as `Model.sample` passes them to the network."""
    config = model.config.network
    shape = tuple(size or model.config.size)
    check_size(config, shape)
    x = noise_source(0, list(range(batch)), (config.out_channels, *shape), model.device)(0)
    t_N = torch.full((batch,), len(model.schedule) // 2, dtype=torch.int64, device=model.device)
    if not config.mask_channels:
        return x, t_N, None
    coarse = torch.randn(batch, config.mask_channels, *[4] * len(shape), generator=torch.Generator().manual_seed(0))
    mask = nn.functional.interpolate(coarse.sign(), size=shape, mode="nearest")
    return x, t_N, mask.to(model.device)


def trajectory(model: Model, args: tuple[Any, ...], steps: int = STEPS) -> Callable[[Callable[..., Any], int], Tensor]:
    """A trajectory for the gate: the model's own schedule and sampler in a few steps, with the noise of a seed."""
    from voxtune.plan.gate import volume_of

    timesteps = spaced_steps(model.available_steps, min(steps, model.available_steps))
    sampler = get_sampler(model.config.sampling.sampler)
    x, _, *rest = args

    def follow(call: Callable[..., Any], seed: int) -> Tensor:
        noise = noise_source(seed, list(range(x.shape[0])), tuple(x.shape[1:]), x.device)
        return sampler(lambda y, t_N: volume_of(call(y, t_N, *rest)), noise(0), model.schedule, timesteps, noise=noise)

    return follow


class Parts(nn.Module):
    """A network whose two parts (see `workloads.split`) were tuned separately."""

    def __init__(self, original: nn.Module, depth: int, full: nn.Module, outer: nn.Module):
        super().__init__()
        self.original, self.depth, self.full, self.outer = original, depth, full, outer
        self.eval()

    def forward(self, *args: Any) -> Any:
        return self.original(*args)

    def split(self, depth: int) -> tuple[nn.Module, nn.Module]:
        return (self.full, self.outer) if depth == self.depth else split(self.original, depth)


def tune_model(
    model: Model,
    args: tuple[Any, ...],
    *,
    cache: FeatureCache | None = None,
    ladder: Sequence[TunerRung] | None = None,
    steps: int = STEPS,
    checks: int = 3,
    seconds: float = math.inf,
    gate_last: bool = False,
    quick: bool = False,
    say: Say = lambda _line: None,
    progress: Callable[[float], None] = lambda _fraction: None,
) -> tuple[Model, Plan]:
    """The model with the fastest networks that pass the gate, and their plan; also cached for `plan="auto"`.

    With `cache`, the two parts that run when features are cached between steps are tuned: the full network, which also
    returns the deep feature, and then, with the same passes and without a time limit, the outer levels. The gate checks these
    on one input, since it has checked the passes on the full network. `progress` receives the fraction that is done.
    """
    from voxtune.plan.api import Request
    from voxtune.plan.cache import remember
    from voxtune.plan.plan import Plan
    from voxtune.plan.tuner import BASELINE, Tuned, TunerRung, tune

    def tuned(network: nn.Module, args: tuple[Any, ...], start: float, end: float, **options: Any) -> Tuned:
        result = tune(
            network,
            args,
            trajectory=trajectory(model, args, steps),
            say=say,
            progress=lambda done, total: progress(start + (end - start) * done / total),
            **options,
        )
        # For plan="auto".
        key = Request(precision="auto").key(network, model.device)
        remember(Plan(result.plan.steps, result.plan.made_for | key, result.plan.evidence))
        return result

    limits: dict[str, Any] = {
        "ladder": ladder,
        "checks": checks,
        "seconds": seconds,
        "gate_last": gate_last,
        "quick": quick,
    }
    if cache is None:
        whole = tuned(model.network, args, 0.0, 1.0, **limits)
        return Model(model.config, whole.network, model.noise), whole.plan
    full, outer_levels = split(model.network, cache.depth)
    whole = tuned(full, args, 0.0, FULL_SHARE, **limits)
    say("the outer levels, which run alone while the deep feature is cached:")
    names = tuple(name for name in whole.plan.names if name not in BASELINE.names)
    options = {step.name: step.options for step in whole.plan.steps}
    same = TunerRung("same passes", names, apart=True, options=options)
    with torch.no_grad():
        deep = whole.network(*args)[1].clone()
    outer = tuned(outer_levels, (*args, deep), FULL_SHARE, 1.0, ladder=(same,), checks=1)
    return Model(model.config, Parts(model.network, cache.depth, whole.network, outer.network), model.noise), whole.plan
