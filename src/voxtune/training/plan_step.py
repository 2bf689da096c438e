"""One update of the weights that the host queues without waiting, and its recording as a CUDA graph.

The first steps run as they are: kernels compile, cuDNN selects its algorithms, the optimizer creates its moments. Then the step
is recorded: forward and backward pass, clipping and Adam as one graph; with accumulation one graph for a batch, which adds to the
gradients, and one for the update. A batch of another shape than the recorded one runs as it is.

The loss, the gradient's norm and whether the step was skipped stay on the device. The host reads them one step late.
"""

from __future__ import annotations

import gc
import importlib.util
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.files import one_line
from voxtune.training.config import TrainConfig
from voxtune.training.data import Batch, noise_offsets, queued_noise, timesteps, training_noise

log = logging.getLogger("voxtune")
# Steps before the recording.
WARM_UP = 2


def runs_ahead(device: torch.device) -> bool:
    """Whether work on this device is queued, so that reading a result waits for it."""
    return device.type == "cuda"


@dataclass(frozen=True)
class StepInputs:
    """What a step computes from, on its device."""

    images: Tensor
    conds: Tensor | None
    t_N: Tensor
    noise: Tensor

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.images, self.conds, self.t_N, self.noise) if x is not None]

    def form(self) -> tuple[Any, ...]:
        return tuple(None if x is None else tuple(x.shape) for x in (self.images, self.conds, self.t_N, self.noise))

    def clone(self) -> StepInputs:
        conds = None if self.conds is None else self.conds.clone()
        return StepInputs(self.images.clone(), conds, self.t_N.clone(), self.noise.clone())


def step_inputs(
    batch: Batch,
    config: TrainConfig,
    diffusion_steps: int,
    device: torch.device,
    *,
    channels_last: bool,
    offset_noise: float = 0.0,
) -> StepInputs:
    """The batch with its noise and diffusion steps, which depend on the seed and the sample numbers alone."""
    images, conds = batch.on(device)
    if channels_last:
        images = _lasting(images)
    t_N = timesteps(config.seed, batch.numbers, diffusion_steps)
    shape = tuple(images.shape[1:])
    offsets = None
    if offset_noise:
        offsets = offset_noise * noise_offsets(config.seed, batch.numbers, shape[0], len(shape) - 1)
    if device.type == "cpu":
        noise = training_noise(config.seed, batch.numbers, shape, device)
        return StepInputs(images, conds, t_N, noise if offsets is None else noise + offsets)
    if importlib.util.find_spec("triton") is None:
        noise = training_noise(config.seed, batch.numbers, shape, device)
    else:
        noise = queued_noise(config.seed, _queued(torch.tensor(batch.numbers, dtype=torch.int64), device), shape)
    if offsets is not None:
        noise = noise + _queued(offsets, device)
    if channels_last:
        noise, conds = _lasting(noise), None if conds is None else _lasting(conds)
    return StepInputs(images, conds, _queued(t_N, device), noise)


def _lasting(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last_3d if x.dim() == 5 else torch.channels_last)


def _queued(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; from memory that is not pinned the host would wait for everything queued before."""
    return x.pin_memory().to(device, non_blocking=True)


class QueuedStep:
    """Forward and backward pass, clipping and the optimizer, without reading a value on the host.

    `outcome` (3,) is the loss, the gradient's norm, and 1 if the step was skipped because one of them is not finite: the
    optimizer, which must be fused, then changes nothing. `record`: as a CUDA graph, after the first steps. Of several processes,
    `accumulating` is around each batch, and `mean` is that of the loss over all of them.
    """

    def __init__(
        self,
        loss_of: Callable[[StepInputs], Tensor],
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip: float | None,
        scaler: torch.amp.GradScaler | None,
        record: bool,
        accumulating: Callable[..., Any] | None = None,
        mean: Callable[[Tensor], Tensor] | None = None,
    ):
        self.loss_of, self.optimizer, self.clip, self.scaler = loss_of, optimizer, clip, scaler
        self._accumulating, self._mean = accumulating, mean
        self.parameters = [p for p in network.parameters() if p.requires_grad]
        device = self.parameters[0].device
        self.outcome = torch.zeros(3, device=device)
        # A loss scale is read by the host after a step that overflowed.
        self.record = record and device.type == "cuda" and scaler is None
        self.steps = 0
        self._recorded: RecordedStep | None = None
        self._side = torch.cuda.Stream(device) if self.record else None

    def __call__(self, parts: Sequence[StepInputs]) -> Tensor:
        """Queues the step; the outcome is valid until the next one."""
        self.steps += 1
        if self.record and self._recorded is None and self.steps > WARM_UP:
            self._try_recording(parts)
        if self._recorded is not None and self._recorded.fits(parts):
            self._recorded.replay(parts)
        elif self._side is None:
            self.run(parts)
        else:
            # On the stream of the recording: libraries have a workspace for each stream.
            current = torch.cuda.current_stream()
            self._side.wait_stream(current)
            with torch.cuda.stream(self._side):
                self.run(parts)
            current.wait_stream(self._side)
        return self.outcome

    def run(self, parts: Sequence[StepInputs]) -> None:
        """The step as it is."""
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        for number, part in enumerate(parts, 1):
            with nullcontext() if self._accumulating is None else self._accumulating(last=number == len(parts)):
                loss = self.gradients(part, len(parts))
            total = loss if total is None else total + loss
        assert total is not None
        self.update(total if self._mean is None else self._mean(total))
        if self._recorded is not None:
            self.optimizer.zero_grad(set_to_none=True)

    def gradients(self, part: StepInputs, parts: int) -> Tensor:
        """Adds the gradients of one of the step's batches; returns its part of the loss."""
        loss = self.loss_of(part) / parts
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        return loss.detach()

    def update(self, loss: Tensor) -> None:
        optimizer: Any = self.optimizer
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        if self.clip is not None:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm, foreach=True)
        skipped = torch.logical_not(torch.isfinite(loss) & torch.isfinite(norm)).float()
        if self.scaler is None:
            optimizer.grad_scale, optimizer.found_inf = None, skipped
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        self.outcome.copy_(torch.stack([loss.float(), norm.float(), skipped]))

    def _try_recording(self, parts: Sequence[StepInputs]) -> None:
        assert self._side is not None
        try:
            self._recorded = RecordedStep(self, parts, self._side)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.record = False
            self.optimizer.zero_grad(set_to_none=True)
            log.warning(
                "the training step cannot be recorded as a CUDA graph (%s): it runs uncaptured", one_line(error)
            )


class RecordedStep:
    """A `QueuedStep` recorded for the shapes of `parts`; inputs are copied into the recording's own tensors."""

    def __init__(self, step: QueuedStep, parts: Sequence[StepInputs], side: torch.cuda.Stream):
        self.count, self.form = len(parts), parts[0].form()
        self.inputs = parts[0].clone()
        self._gradients: list[Tensor] = []
        step.optimizer.zero_grad(set_to_none=True)
        gc.collect()  # what the first steps leave behind would be in memory beside the graph's
        side.wait_stream(torch.cuda.current_stream())
        self._batch, self._update = torch.cuda.CUDAGraph(), None
        # Threads that load batches pin memory meanwhile, which an error mode for all threads forbids.
        options: dict[str, Any] = {"stream": side, "capture_error_mode": "thread_local"}
        if self.count == 1:
            # Gradients are created inside, so that they lie in the graph's memory.
            with torch.cuda.graph(self._batch, **options):
                step.update(step.gradients(self.inputs, 1))
        else:
            self._gradients = [torch.zeros_like(p) for p in step.parameters]
            total = torch.zeros((), device=step.outcome.device)
            for p, gradient in zip(step.parameters, self._gradients, strict=True):
                p.grad = gradient
            with torch.cuda.graph(self._batch, **options):
                total += step.gradients(self.inputs, self.count)
            update = torch.cuda.CUDAGraph()
            with torch.cuda.graph(update, pool=self._batch.pool(), **options):
                step.update(total)
                torch._foreach_zero_([*self._gradients, total])
            self._update, self._total = update, total
        # From here on the gradients belong to the graphs, which find them by their addresses.
        step.optimizer.zero_grad(set_to_none=True)

    def fits(self, parts: Sequence[StepInputs]) -> bool:
        return len(parts) == self.count and all(part.form() == self.form for part in parts)

    def replay(self, parts: Sequence[StepInputs]) -> None:
        for part in parts:
            for recorded, given in zip(self.inputs.tensors(), part.tensors(), strict=True):
                recorded.copy_(given, non_blocking=True)
            self._batch.replay()
        if self._update is not None:
            self._update.replay()


@dataclass
class _Unread:
    """The outcome of a step that the GPU may not have finished."""

    values: Tensor
    ready: torch.cuda.Event


class LateReader:
    """Copies outcomes to pinned memory, each with an event, so that the host reads one while the GPU works on the next."""

    def __init__(self) -> None:
        # Two outcomes are on their way at most: that of the step before, and that of the step just queued.
        self._buffers = [torch.zeros(3).pin_memory() for _ in range(3)]
        self._next = 0

    def queue(self, outcome: Tensor) -> _Unread:
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % len(self._buffers)
        buffer.copy_(outcome, non_blocking=True)
        # Blocking: the threads that load batches need the core meanwhile.
        ready = torch.cuda.Event(blocking=True)
        ready.record()
        return _Unread(buffer, ready)

    @staticmethod
    def read(unread: _Unread) -> tuple[float, float, bool]:
        unread.ready.synchronize()
        loss, norm, skipped = unread.values.tolist()
        return loss, norm, skipped != 0.0
