"""After a step did not fit into the GPU's memory: the settings with which it is estimated to fit."""

from __future__ import annotations

import copy
import gc
import logging
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.plan.step_memory import StepMemory
from voxtune.reading import parse_bytes
from voxtune.runtime.model import Model
from voxtune.training.config import TrainConfig
from voxtune.training.plan import RewrittenForward, TrainingPlan, rewriting_plan, zeros

if TYPE_CHECKING:
    from voxtune.training.loop import TrainResult

log = logging.getLogger("voxtune")
# Settings that are tried after the first ones, each for at most this share of the memory that the ones before were to need.
MOST_FITS, NEXT_SHARE = 4, 0.85
GENERAL = "use a smaller batch with more accumulation, a smaller model, or precision bf16"
# Of the memory that this process may use: the allocator's blocks do not fit exactly.
USABLE = 0.9


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Settings with which a step of the same samples is estimated to need `bytes`; None: as it was."""

    bytes: int
    plan: str | None = None
    memory_budget: str | None = None
    batch: int | None = None
    accumulation: int | None = None

    def settings(self) -> dict[str, Any]:
        names = ("plan", "memory_budget", "batch", "accumulation")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def applied(self, config: TrainConfig) -> TrainConfig:
        return replace(config, **self.settings())

    def options(self) -> str:
        """As options of `voxtune train`."""
        return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.settings().items())


class StepMemoryError(InputError):
    """A step ran out of the GPU's memory; `fit` are settings that may help, `written` is whether the run is in its folder."""

    def __init__(self, text: str, fit: Fit | None, *, written: bool):
        super().__init__(text)
        self.fit, self.written = fit, written


def usable_memory(device: torch.device) -> int:
    """Bytes that this process may use: what is free, and what it holds itself; at most its share of the GPU."""
    free, total = torch.cuda.mem_get_info(device)
    share: Any = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _device: 1.0)
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(USABLE * min(free + torch.cuda.memory_reserved(device), share(index) * total))


def settings_that_fit(config: TrainConfig, model: Model, plan: TrainingPlan, memory: int) -> Fit | None:
    """Settings with which a step is estimated to need at most `memory` bytes, and less than now; None if none are known.

    The same samples make up a step, by the plan voxtune: in smaller batches, or with results that are computed again.
    """
    rewritten = plan.name == "voxtune"
    if not rewritten and (config.compile or config.autocast):
        return None  # these contradict another plan
    named = None if rewritten or config.memory_budget else "voxtune"
    before = None if config.memory_budget is None else parse_bytes(config.memory_budget, "memory_budget")
    for batch, budget, step in _estimates(config, model, plan if rewritten else rewriting_plan(plan.precision)):
        same = rewritten and batch == config.batch and (not budget or (before is not None and memory >= before))
        if step.total > memory or same:
            continue
        smaller = batch != config.batch
        return Fit(
            bytes=memory if budget else step.total,
            plan=None if budget else named,
            memory_budget=_size(memory) if budget else None,
            batch=batch if smaller else None,
            accumulation=config.accumulation * config.batch // batch if smaller else None,
        )
    return None


def _estimates(config: TrainConfig, model: Model, plan: TrainingPlan) -> Iterator[tuple[int, bool, StepMemory]]:
    """(batch, whether results are computed again, a step's memory), from the fastest step to the smallest."""
    from voxtune.plan.training_memory import TrainingMemory

    args = zeros(model, config.batch)
    try:
        network = RewrittenForward(replace(plan, memory_budget=None), model.network).rewrite(args)
    except (InputError, torch.OutOfMemoryError):
        return  # the failed step still holds its memory
    accumulated = config.samples_per_step > 1
    choices = [step for _, step in TrainingMemory(network, args, accumulated=accumulated).choices()]
    for batch in (n for n in range(config.batch, 0, -1) if config.batch % n == 0):
        for budget, step in ((False, choices[0]), (True, choices[-1])):
            yield batch, budget, step.of_batch(batch / config.batch)


def _size(memory: int) -> str:
    return f"{memory // 10**8 / 10:g}GB" if memory >= 10**9 else f"{memory // 10**3}KB"


@contextmanager
def naming_settings(
    config: TrainConfig,
    model: Model,
    plan: TrainingPlan,
    device: torch.device,
    *,
    alone: bool,
    before: Sequence[Fit] = (),
    hint: Callable[[], str] | None = None,
) -> Iterator[None]:
    """A step inside that runs out of GPU memory raises StepMemoryError, which names settings that fit.

    These are estimated to need less than those `before`.
    """
    try:
        yield
    except (torch.OutOfMemoryError, InputError) as error:
        cause = error if isinstance(error, torch.OutOfMemoryError) else error.__cause__
        if not isinstance(cause, torch.OutOfMemoryError):
            raise
        # The frames of the failed step hold its tensors.
        for failed in (error, cause):
            traceback.clear_frames(failed.__traceback__)
        fit = _fit_for(config, model, plan, device, before) if alone else None
        text = f"a step is estimated to fit with {fit.options()}" if fit is not None else GENERAL
        end = "" if hint is None else f"; {hint()}"
        raise StepMemoryError(f"out of GPU memory: {text}{end}", fit, written=hint is not None) from error


def _fit_for(
    config: TrainConfig, model: Model, plan: TrainingPlan, device: torch.device, before: Sequence[Fit]
) -> Fit | None:
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    memory = min([usable_memory(device), *(int(NEXT_SHARE * earlier.bytes) for earlier in before)])
    return settings_that_fit(config, model, plan, memory)


def train_fitting(
    train: Callable[..., TrainResult],
    config: TrainConfig,
    *,
    model: Model | None,
    resume: bool,
    overwrite: bool,
    say: Callable[[str], None] | None,
    warn: Callable[[str], None] | None,
    **options: Any,
) -> TrainResult:
    """`train` with these settings, or with others that fit after it ran out of memory. `fits` are those so far."""
    fits: list[Fit] = []
    while True:
        last = len(fits) == MOST_FITS
        # The attempt trains the network that it is given.
        start = model if model is None or last else copy.deepcopy(model)
        try:
            more = {**options, "resume": resume, "overwrite": overwrite, "say": say, "warn": warn}
            return train(config, model=start, fits=fits, **more)
        except StepMemoryError as error:
            if error.fit is None or last:
                raise
            fit, written = error.fit, error.written
            log.info("%s", one_line(error))
        # Outside of the handler, whose error holds the failed attempt.
        del start
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        config = fit.applied(config)
        fits.append(fit)
        (say or log.info)(f"out of GPU memory: continuing with {fit.options()}")
        resume, overwrite, warn = resume or written, overwrite and not written, None
