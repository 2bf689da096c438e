"""One training step, and the state that it changes."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
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
from voxtune.training.data import Batch, timesteps, training_noise
from voxtune.training.distributed import Processes

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
    def update(self, network: nn.Module, step: int) -> None:
        """Updates the average with the weights after step `step` (the first is 1)."""
        if step >= self.start and step % self.every:
            return
        weight = 1 - self.decay if step >= self.start else 1.0
        pairs = zip(self.network.state_dict().values(), network.state_dict().values(), strict=True)
        for mean, value in pairs:
            if weight == 1.0 or not mean.is_floating_point():
                mean.copy_(value)
            else:
                mean.lerp_(value, weight)


AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
# A smaller loss scale means that no gradient has been finite.
SMALLEST_SCALE = 2.0**-20


class Trainer:
    """Network, moving average, optimizer and loss scale of one run, the same in each of its processes."""

    def __init__(
        self,
        config: TrainConfig,
        model: Model,
        subjects: int,
        device: torch.device,
        processes: Processes | None = None,
    ):
        self.processes = processes or Processes(device)
        self.config, self.model, self.device, self.subjects = config, model, device, subjects
        network = model.network.to(device)
        if config.channels_last:
            network = network.to(memory_format=_channels_last(model.config.network.dimensions))  # type: ignore[call-overload]
        self.network = network.train()
        self.ema = Ema(network, decay=config.ema_decay, every=config.ema_every, start=config.ema_start)
        self.optimizer = torch.optim.Adam(network.parameters(), lr=config.learning_rate)
        # Only fp16 on a GPU needs a loss scale: bf16 has the range of float32.
        scaled = config.autocast == "fp16" and device.type == "cuda"
        self.scaler = torch.amp.GradScaler("cuda") if scaled else None
        # torch.compile around the replicas: it then ends a graph where a bucket of gradients is complete.
        self._replica = self.processes.replicated(network)
        self._forward: Any = torch.compile(self._replica) if config.compile else self._replica
        self.step = 0
        self.seconds = self.elapsed = 0.0
        self.loss_sum, self.loss_count = 0.0, 0
        self.gradient_norm = math.nan
        self.rate = config.learning_rate

    def train_step(self, batches: list[Batch], clock: float = 0.0) -> float:
        """One update of the weights from `accumulation` batches; returns the mean loss of all processes.

        For `clock` see `learning_rate`.
        """
        self.rate = learning_rate(self.config, self.step, clock)
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        for number, batch in enumerate(batches, 1):
            with self.processes.accumulating(self._replica, last=number == len(batches)):
                batch_loss = self._loss(batch) / len(batches)
                (batch_loss if self.scaler is None else self.scaler.scale(batch_loss)).backward()
            loss += batch_loss.detach()
        loss = self.processes.mean(loss)
        norm = self._update()
        self.ema.update(self.network, self.step + 1)
        # The only synchronisation with the GPU in a step, after all of its work has been queued.
        loss_value, norm_value = torch.stack([loss, norm]).tolist()
        self._check(loss_value, norm_value, batches)
        self.step += 1
        self.loss_sum += loss_value
        self.loss_count += 1
        self.gradient_norm = norm_value
        return loss_value

    def _loss(self, batch: Batch) -> Tensor:
        images, conds = batch.on(self.device)
        if self.config.channels_last:
            images = images.contiguous(memory_format=_channels_last(images.dim() - 2))
        t_N = timesteps(self.config.seed, batch.numbers, len(self.model.schedule)).to(self.device)
        noise = training_noise(self.config.seed, batch.numbers, tuple(images.shape[1:]), self.device)
        with self.autocast():
            return training_loss(
                lambda x, t: self._forward(x, t, conds), self.model.schedule, images, t_N, noise, self.config.loss
            )

    def autocast(self) -> Any:
        if self.config.autocast == "none":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self.config.autocast])

    def _update(self) -> Tensor:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = list(self.network.parameters())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if self.config.clip is not None:
            nn.utils.clip_grads_with_norm_(parameters, self.config.clip, norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return norm

    def _check(self, loss: float, norm: float, batches: list[Batch]) -> None:
        """Raises before NaN weights reach a checkpoint. With fp16, steps that overflow are skipped instead."""
        scale = None if self.scaler is None or math.isfinite(norm) else self.scaler.get_scale()
        if math.isfinite(loss) and (math.isfinite(norm) or (scale is not None and scale > SMALLEST_SCALE)):
            return
        subjects = ", ".join(str(i) for batch in batches for i in batch.indices)
        name = "loss" if not math.isfinite(loss) else "gradient"
        raise InputError(
            f"the {name} is not finite at step {self.step + 1} (subjects {subjects}): check these subjects for NaN, "
            "lower the learning rate, set clip, or train without autocast"
        )

    def take_log_row(self) -> dict[str, float]:
        """A row of the log: means over the steps since the last row."""
        row = {
            "step": self.step,
            "epoch": self.step * self.config.samples_per_step // self.subjects,
            "loss": self.loss_sum / max(1, self.loss_count),
            "learning_rate": self.rate,
            "seconds": round(self.seconds, 3),
        }
        if math.isfinite(self.gradient_norm):
            row["gradient_norm"] = self.gradient_norm
        if self.scaler is not None:
            row["loss_scale"] = self.scaler.get_scale()
        self.loss_sum, self.loss_count = 0.0, 0
        return row

    def checkpoint(self) -> Checkpoint:
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
            ),
            config=self.config,
            model=self.model.config,
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


def _channels_last(dimensions: int) -> torch.memory_format:
    return torch.channels_last_3d if dimensions == 3 else torch.channels_last
