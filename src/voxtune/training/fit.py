"""After a step did not fit into the GPU's memory: the settings with which it is estimated to fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from voxtune.errors import InputError
from voxtune.runtime.model import Model
from voxtune.training.config import TrainConfig
from voxtune.training.plan import RewrittenForward, TrainingPlan, rewriting_plan, zeros

# Of the memory that this process may use: the allocator's blocks do not fit exactly.
USABLE = 0.9


def usable_memory(device: torch.device) -> int:
    """Bytes that this process may use: what is free, and what it holds itself."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(USABLE * (free + torch.cuda.memory_reserved(device)))


def settings_that_fit(config: TrainConfig, model: Model, plan: TrainingPlan, memory: int) -> str | None:
    """Options of `voxtune train` with which a step is estimated to need at most `memory` bytes; None if none are known.

    The same samples make up a step, by the plan voxtune: in smaller batches, or with results that are computed again.
    """
    rewritten = plan.name == "voxtune"
    if not rewritten and (config.compile or config.autocast):
        return None  # these contradict another plan
    named = [] if rewritten or config.memory_budget else ["--plan voxtune"]
    for batch, budget, total in _estimates(config, model, plan if rewritten else rewriting_plan(plan.precision)):
        if total > memory or (rewritten and not budget and batch == config.batch):
            continue
        options = [f"--memory-budget {_size(memory)}"] if budget else named
        if batch != config.batch:
            options = [*options, f"--batch {batch} --accumulation {config.accumulation * config.batch // batch}"]
        return " ".join(options)
    return None


def _estimates(config: TrainConfig, model: Model, plan: TrainingPlan) -> Iterator[tuple[int, bool, int]]:
    """(batch, whether results are computed again, bytes of a step), from the fastest step to the smallest."""
    from voxtune.plan.training_memory import TrainingMemory

    args = zeros(model, config.batch)
    try:
        network = RewrittenForward(replace(plan, memory_budget=None), model.network).rewrite(args)
    except (InputError, torch.OutOfMemoryError):
        return  # the failed step still holds its memory
    choices = [step for _, step in TrainingMemory(network, args).choices()]
    for batch in (n for n in range(config.batch, 0, -1) if config.batch % n == 0):
        for budget, step in ((False, choices[0]), (True, choices[-1])):
            yield batch, budget, step.states + step.weights + (step.kept + step.transient) * batch // config.batch


def _size(memory: int) -> str:
    return f"{memory // 10**8 / 10:g}GB" if memory >= 10**9 else f"{memory // 10**3}KB"
