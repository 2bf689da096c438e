"""The order in which training sees its subjects, and the batches made of them ahead of time.

Sample n of a run is fixed by the seed and n: an epoch is a permutation, epochs follow each other without a gap, and a
batch may span two. So the position of a run is one number, whatever was loaded ahead when it stopped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from voxtune.diffusion.noise import check_seed, normal_batch, philox
from voxtune.errors import InputError

_MASK = 0xFFFFFFFF
# Counters of their own, far from the draws of a sampler, so that no training noise is ever a sampling noise.
_ORDER, _TIMESTEP, _NOISE = 0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF


class Source(Protocol):
    """Subjects to learn from: `source[i] -> (image (C, *size), condition (L, *size) or None)`, float32 arrays."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> tuple[Any, Any]: ...


@runtime_checkable
class Compact(Protocol):
    """A source that holds its subjects in memory, in fewer bytes than the network takes.

    `unfold(*stored(indices))` are images and conditions of these subjects, on whichever device the tensors are: a GPU makes
    them in microseconds, where threads of the host would take the time that the loop needs to feed it.
    """

    def stored(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]: ...

    def unfold(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`indices` are the subjects, `numbers` the samples of the run they are seen as; `images` and `masks` as they travel."""

    numbers: tuple[int, ...]
    indices: tuple[int, ...]
    images: Tensor
    masks: Tensor | None
    unfold: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Images and conditions on `device`, float32."""
        images = self.images.to(device, non_blocking=True)
        masks = None if self.masks is None else self.masks.to(device, non_blocking=True)
        return (images, masks) if self.unfold is None or masks is None else self.unfold(images, masks)


def epoch_order(seed: int, epoch: int, count: int) -> list[int]:
    """The permutation of `count` subjects in an epoch: sorted by a 63-bit random key, the same on every machine."""
    index = torch.arange(count, dtype=torch.int64)
    counter = [index, *(torch.full_like(index, n) for n in (_ORDER, epoch & _MASK, epoch >> 32))]
    high, low, _, _ = philox(counter, _key(seed))
    return torch.argsort((high << 31) | (low >> 1), stable=True).tolist()


def timesteps(seed: int, numbers: tuple[int, ...], total: int) -> Tensor:
    """The diffusion step, 0 to total - 1, of each sample of a batch."""
    n = torch.tensor(numbers, dtype=torch.int64)
    counter = [torch.zeros_like(n), torch.full_like(n, _TIMESTEP), n & _MASK, n >> 32]
    return (philox(counter, _key(seed))[0] * total) >> 32


def training_noise(seed: int, numbers: tuple[int, ...], shape: tuple[int, ...], device: torch.device) -> Tensor:
    return normal_batch(seed, numbers, _NOISE, shape, device)


def _key(seed: int) -> tuple[int, int]:
    return check_seed(seed) & _MASK, seed >> 32


class Loader:
    """Batches from sample number `start` on, made by `workers` threads ahead of their use, in order."""

    def __init__(self, source: Source, *, seed: int, batch: int, start: int, workers: int, pin: bool):
        self.source, self.seed, self.batch, self.pin = source, seed, batch, pin
        self.count = len(source)
        self._next = start
        self._order = (-1, [0])
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="voxtune-loader") if workers else None
        self._ahead: deque[Future[Batch]] = deque()
        self._depth = 2 * workers

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self._pool is None:
                yield self._load(*self._take())
                continue
            while len(self._ahead) < self._depth:
                self._ahead.append(self._pool.submit(self._load, *self._take()))
            yield self._ahead.popleft().result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def position(self, number: int) -> tuple[int, int]:
        """(epoch, place in it) of a sample number."""
        return divmod(number, self.count)

    def _take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers = tuple(range(self._next, self._next + self.batch))
        self._next += self.batch
        return numbers, tuple(self._index(number) for number in numbers)

    def _index(self, number: int) -> int:
        epoch, place = self.position(number)
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.seed, epoch, self.count))
        return self._order[1][place]

    def _load(self, numbers: tuple[int, ...], indices: tuple[int, ...]) -> Batch:
        unfold = None
        masks: Tensor | None
        if isinstance(self.source, Compact):
            images, masks = self.source.stored(indices)
            unfold = self.source.unfold
        else:
            images, masks = _stacked([read_item(self.source, index) for index in indices])
        if self.pin:
            images, masks = images.pin_memory(), None if masks is None else masks.pin_memory()
        return Batch(numbers=numbers, indices=indices, images=images, masks=masks, unfold=unfold)


def _stacked(items: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    masks = [cond for _, cond in items if cond is not None]
    return torch.stack([image for image, _ in items]), torch.stack(masks) if masks else None


def read_item(source: Source, index: int) -> tuple[Tensor, Tensor | None]:
    """Subject `index` as tensors; a file that went away or broke is the user's to mend."""
    try:
        image, cond = source[index]
    except OSError as error:
        raise InputError(f"{error.filename or f'subject {index}'}: {error.strerror or error}") from error
    return _tensor(image), None if cond is None else _tensor(cond)


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
