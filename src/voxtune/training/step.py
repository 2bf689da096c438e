"""One training step, and the state that it changes."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.diffusion import training_loss
from voxtune.errors import InputError
from voxtune.runtime.model import Model
from voxtune.training.checkpoint import (
    Checkpoint,
    RunState,
    ScalerState,
    optimizer_tensors,
    random_state,
    restore_network,
    restore_optimizer,
    restore_random_state,
)
from voxtune.training.config import TrainConfig
from voxtune.training.data import Batch
from voxtune.training.distributed import Processes
from voxtune.training.nonfinite import first_not_finite
from voxtune.training.plan import TrainingPlan, unmeasured_plan
from voxtune.training.plan_step import LateReader, QueuedStep, StepInputs, runs_ahead, step_inputs

# The factor of the learning rate at the end of the decay.
FINAL_FACTOR = 0.01


def learning_rate(config: TrainConfig, step: int, clock: float = 0.0) -> float:
    """The learning rate of step `step` (the first is 0). `clock` is the elapsed fraction of the run's time limit.

    Linear warm-up over `warmup` steps, times a cosine decay from 1 to a hundredth over the run's steps or minutes,
    whichever has progressed further.
    """
    factor = min(1.0, (step + 1) / config.warmup) if config.warmup else 1.0
    if config.decay == "cosine":
        progress = min(1.0, max(step / config.steps, clock))
        factor *= FINAL_FACTOR + (1 - FINAL_FACTOR) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * factor


class Ema:
    """Moving average of the weights: a copy before step `start`, then updated every `every` steps with `decay`."""

    def __init__(self, network: nn.Module, *, decay: float, every: int, start: int):
        self.decay, self.every, self.start = decay, every, start
        self.network = copy.deepcopy(network).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, network: nn.Module, step: int, skipped: Tensor | None = None) -> None:
        """Updates the average with the weights after step `step` (the first is 1).

        `skipped` is 1 on the device if the step changed no weight: the average then stays as it is. The host does not read it.
        """
        if step >= self.start and step % self.every:
            return
        weight = 1 - self.decay if step >= self.start else 1.0
        pairs = list(zip(self.network.state_dict().values(), network.state_dict().values(), strict=True))
        copied = [pair for pair in pairs if weight == 1.0 or not pair[0].is_floating_point()]
        averaged = [pair for pair in pairs if weight != 1.0 and pair[0].is_floating_point()]
        if skipped is None:
            for mean, value in copied:
                mean.copy_(value)
            for mean, value in averaged:
                mean.lerp_(value, weight)
            return
        if copied:
            torch._foreach_copy_([mean for mean, _ in copied], [value for _, value in copied])
        for means, values in _chunks(averaged):
            difference = torch._foreach_sub(values, means)
            torch._foreach_mul_(difference, weight * (1 - skipped))
            torch._foreach_add_(means, difference)


# Elements whose differences are in memory at a time.
CHUNK = 2**24


def _chunks(pairs: list[tuple[Tensor, Tensor]]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    means: list[Tensor] = []
    values: list[Tensor] = []
    for mean, value in pairs:
        means.append(mean)
        values.append(value)
        if sum(x.numel() for x in means) >= CHUNK:
            yield means, values
            means, values = [], []
    if means:
        yield means, values


# A smaller loss scale means that no gradient has been finite.
SMALLEST_SCALE = 2.0**-20


@dataclass
class _Queued:
    """A step whose outcome has not been read, and then its outcome."""

    step: int
    rate: float
    batches: list[Batch]
    unread: Any = None
    loss: float = math.nan
    norm: float = math.nan
    skipped: bool = False


class Trainer:
    """Network, moving average, optimizer and loss scale of one run, the same in each of its processes.

    On a GPU a step is queued, and its loss is read after the next one has been: `step` counts queued steps. A step whose loss or
    gradient is not finite changes nothing. After `max_skipped` of them in a row, `failure` is set, and the state is that after
    the last good step.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: Model,
        subjects: int,
        device: torch.device,
        plan: TrainingPlan | None = None,
        processes: Processes | None = None,
    ):
        self.processes = processes = processes or Processes(device)
        self.config, self.model, self.device, self.subjects = config, model, device, subjects
        self.plan = plan = plan or unmeasured_plan(config, device)
        network = plan.placed(model.network.to(device), model.config.network.dimensions)
        self.network = network.train()
        self.ema = Ema(network, decay=config.ema_decay, every=config.ema_every, start=config.ema_start)
        queued = runs_ahead(device)
        self.optimizer = _queued_adam(network, config, device) if queued else _plain_adam(network, config)
        # Only fp16 on a GPU needs a loss scale: bf16 has the range of float32.
        scaled = plan.precision == "fp16" and device.type == "cuda"
        self.scaler = torch.amp.GradScaler("cuda") if scaled else None
        if plan.name == "voxtune":
            self._replica = processes.replicated(network, plan.forward(network, accumulated=config.accumulation > 1))
            self._forward: Any = self._replica
        else:
            # torch.compile around the replicas: it then ends a graph where a bucket of gradients is complete.
            self._replica = processes.replicated(network)
            self._forward = plan.forward(self._replica)
        self._queue = self._reader = None
        if queued:
            # The communication of several processes is not recorded.
            record = plan.name == "voxtune" and processes.alone
            options: dict[str, Any] = {"clip": config.clip, "scaler": self.scaler, "record": record}
            options |= {"accumulating": self._accumulating, "mean": processes.mean}
            self._queue = QueuedStep(self._loss, network, self.optimizer, **options)
            self._reader = LateReader()
        self.step = 0
        self.seconds = self.elapsed = 0.0
        self.loss_sum, self.loss_count = 0.0, 0
        self.skipped = self.skipped_in_row = 0
        # Of the last good step that was read.
        self.loss: float | None = None
        self.failure: InputError | None = None
        # Whether the failure is that of a batch of this process.
        self.failed_here = False
        self._waiting: deque[_Queued] = deque()
        self._read: deque[_Queued] = deque()
        self._rows: list[dict[str, float]] = []
        # The sums for the next row of the log, after the last good step.
        self._good = self.loss_sum, self.loss_count

    def train_step(self, batches: list[Batch], clock: float = 0.0) -> float:
        """One update of the weights from `accumulation` batches; returns the loss of the last good step that was read.

        For `clock` see `learning_rate`."""
        queued = _Queued(self.step + 1, learning_rate(self.config, self.step, clock), batches)
        with self.plan.flags(self.device):
            if self._queue is None:
                self._run(queued)
            else:
                self._queue_step(queued)
        return math.nan if self.loss is None else self.loss

    def _run(self, queued: _Queued) -> None:
        """The step on a CPU, whose result is known at once."""
        for group in self.optimizer.param_groups:
            group["lr"] = queued.rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for number, inputs in enumerate(self._inputs(queued.batches), 1):
            with self._accumulating(last=number == len(queued.batches)):
                batch_loss = self._loss(inputs) / len(queued.batches)
                batch_loss.backward()
            loss += batch_loss.detach()
        loss = self.processes.mean(loss)
        parameters = list(self.network.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        queued.loss, queued.norm = torch.stack([loss, norm]).tolist()
        queued.skipped = not (math.isfinite(queued.loss) and math.isfinite(queued.norm))
        self.step = queued.step
        if not queued.skipped:
            if self.config.clip is not None:
                nn.utils.clip_grads_with_norm_(parameters, self.config.clip, norm)
            self.optimizer.step()
            self.ema.update(self.network, self.step)
        self._finish(queued)

    def _accumulating(self, *, last: bool) -> Any:
        return self.processes.accumulating(self._replica, last=last)

    def _queue_step(self, queued: _Queued) -> None:
        assert self._queue is not None and self._reader is not None
        for group in self.optimizer.param_groups:
            group["lr"].fill_(queued.rate)
        outcome = self._queue(self._inputs(queued.batches))
        self.ema.update(self.network, queued.step, outcome[2])
        queued.unread = self._reader.queue(outcome)
        self.step = queued.step
        self._waiting.append(queued)
        # The host runs one step ahead; not at the start, and not while steps are skipped, because these may end the run.
        while self._waiting and (len(self._waiting) > 1 or self._unsure()):
            self._finish_next()

    def _unsure(self) -> bool:
        return self.loss is None or self.skipped_in_row > 0 or self.config.max_skipped == 1

    def settle(self) -> None:
        """Waits for the outcome of every step."""
        while self._waiting:
            self._finish_next()

    def _finish_next(self) -> None:
        assert self._reader is not None
        queued = self._waiting.popleft()
        queued.loss, queued.norm, queued.skipped = self._reader.read(queued.unread)
        self._finish(queued)

    def _finish(self, queued: _Queued) -> None:
        self._read.append(queued)
        if self._counts(queued):
            self.loss = queued.loss
        if not queued.skipped:
            self.skipped_in_row = 0
            return
        self.skipped += 1
        # With a loss scale, steps that overflow are part of finding it.
        if self.scaler is None or not math.isfinite(queued.loss) or self.scaler.get_scale() <= SMALLEST_SCALE:
            self.skipped_in_row += 1
        if self.skipped_in_row >= self.config.max_skipped and self.failure is None:
            self.failure = InputError(self._describe_failure(queued))
            # The weights, the moments and the average are those after the last good step.
            self._account()
            self.loss_sum, self.loss_count = self._good
            self.skipped -= self.skipped_in_row
            self.step, self.skipped_in_row = queued.step - self.skipped_in_row, 0

    def _counts(self, queued: _Queued) -> bool:
        """Whether the loss of a step is one of the run's: with a loss scale, a gradient may overflow at a good loss."""
        return math.isfinite(queued.loss) and (self.scaler is not None or not queued.skipped)

    def _describe_failure(self, queued: _Queued) -> str:
        count = "the step was" if self.skipped_in_row == 1 else f"{self.skipped_in_row} steps in a row were"
        name = "loss" if not math.isfinite(queued.loss) else "gradient"
        inputs = self._inputs(queued.batches)
        where = first_not_finite(self.network, inputs, self._plain_loss)
        self.failed_here = where is not None
        if where is None:
            where = "plain PyTorch computes finite values"
            where += (
                ""
                if self.plan.name == "baseline"
                else f", but the plan does not ({self.plan.describe()}): pass --plan baseline"
            )
        subjects = ", ".join(str(i) for batch in queued.batches for i in batch.indices)
        return (
            f"the {name} is not finite at step {queued.step} (subjects {subjects}), and {count} skipped: {where}; check these "
            "subjects for NaN, lower the learning rate, set clip, or train in float32"
        )

    def _inputs(self, batches: list[Batch]) -> list[StepInputs]:
        total, last = len(self.model.schedule), self.plan.channels_last
        return [step_inputs(b, self.config, total, self.device, channels_last=last) for b in batches]

    def _loss(self, inputs: StepInputs) -> Tensor:
        return self._loss_of(self._forward, inputs)

    def _plain_loss(self, inputs: StepInputs) -> Tensor:
        """By the original network in the plan's precision."""
        with self.autocast():
            return self._loss_of(self.network, inputs)

    def _loss_of(self, forward: Any, inputs: StepInputs) -> Tensor:
        schedule, kind = self.model.schedule, self.config.loss
        return training_loss(
            lambda x, t: forward(x, t, inputs.conds), schedule, inputs.images, inputs.t_N, inputs.noise, kind
        )

    def autocast(self) -> Any:
        return self.plan.autocast(self.device)

    def _account(self) -> None:
        """Adds the steps that were read to the next row of the log, and completes the row when it is due."""
        while self._read:
            queued = self._read.popleft()
            if self._counts(queued):
                self.loss_sum += queued.loss
                self.loss_count += 1
            if queued.step % self.config.log_every == 0:
                self._rows.append(self._row(queued))
            if not queued.skipped:
                self._good = self.loss_sum, self.loss_count

    def take_log_rows(self) -> list[dict[str, float]]:
        """Rows of the log that are complete: means over the good steps since the row before."""
        self._account()
        rows, self._rows = self._rows, []
        return rows

    def _row(self, queued: _Queued) -> dict[str, float]:
        row = {
            "step": queued.step,
            "epoch": queued.step * self.config.samples_per_step // self.subjects,
            "loss": self.loss_sum / max(1, self.loss_count),
            "learning_rate": queued.rate,
            "seconds": round(self.seconds, 3),
        }
        if not self.loss_count:
            del row["loss"]
        if math.isfinite(queued.norm):
            row["gradient_norm"] = queued.norm
        if self.skipped:
            row["skipped"] = self.skipped
        if self.scaler is not None:
            row["loss_scale"] = self.scaler.get_scale()
        self.loss_sum, self.loss_count = 0.0, 0
        return row

    def checkpoint(self) -> Checkpoint:
        self.settle()
        self._account()
        if not all(torch.isfinite(p).all() for p in self.network.parameters()):
            raise InputError(f"a weight is not finite after step {self.step}: lower the learning rate or set clip")
        epoch, position = divmod(self.step * self.config.samples_per_step, self.subjects)
        scaler = None
        if self.scaler is not None:
            values = self.scaler.state_dict()
            scaler = ScalerState(scale=float(values["scale"]), growth_tracker=int(values["_growth_tracker"]))
        parts = {
            "model": self.network.state_dict(),
            "ema": self.ema.network.state_dict(),
            "optimizer": optimizer_tensors(self.optimizer, self.network.named_parameters()),
            "rng": random_state(self.device),
        }
        return Checkpoint(
            state=RunState(
                step=self.step,
                epoch=epoch,
                position=position,
                subjects=self.subjects,
                loss_sum=self.loss_sum,
                loss_count=self.loss_count,
                seconds=self.seconds,
                elapsed=self.elapsed,
                scaler=scaler,
                skipped=self.skipped,
                skipped_in_row=self.skipped_in_row,
            ),
            config=self.config,
            model=self.model.config,
            plan=self.plan,
            tensors={f"{part}.{name}": value for part, state in parts.items() for name, value in state.items()},
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        state, where = checkpoint.state, str(checkpoint.path)
        expected = divmod(state.step * self.config.samples_per_step, state.subjects)
        if state.subjects != self.subjects or expected != (state.epoch, state.position):
            raise InputError(
                f"{where}: stopped at subject {state.position} of {state.subjects} in epoch {state.epoch}, but the "
                f"data now has {self.subjects} subjects: restore the data, or start another run with --init"
            )
        restore_network(self.network, checkpoint.part("model."), where)
        restore_network(self.ema.network, checkpoint.part("ema."), where)
        restore_optimizer(self.optimizer, self.network.named_parameters(), checkpoint.part("optimizer."), where)
        restore_random_state(checkpoint.part("rng."), self.device, where)
        if self.scaler is not None and state.scaler is not None:
            stored = {"scale": state.scaler.scale, "_growth_tracker": state.scaler.growth_tracker}
            self.scaler.load_state_dict({**self.scaler.state_dict(), **stored})
        self.step, self.seconds, self.elapsed = state.step, state.seconds, state.elapsed
        self.loss_sum, self.loss_count = state.loss_sum, state.loss_count
        self.skipped, self.skipped_in_row = state.skipped, state.skipped_in_row
        self._good = self.loss_sum, self.loss_count


def _plain_adam(network: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    return torch.optim.Adam(network.parameters(), lr=config.learning_rate)


def _queued_adam(network: nn.Module, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """Adam that is told on the device whether to skip a step, and reads its learning rate there."""
    rate = torch.tensor(config.learning_rate, device=device)
    optimizer: Any = torch.optim.Adam(network.parameters(), lr=rate, fused=True, capturable=True)
    # It runs without a graph too: in the first steps, and in plans that record none.
    optimizer._warned_capturable_if_run_uncaptured = True
    return optimizer
