"""The source of a training run, the order of its subjects, and batches loaded in advance.

Sample n of a run depends on the seed and n alone: each epoch is a permutation of the subjects, and a batch may span two
epochs. The position of a run is therefore one number, whatever had been loaded in advance when it stopped.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.data.contract import DataContract
from voxtune.data.labels import LabelMap, parse_labels
from voxtune.data.splits import contract_difference
from voxtune.data.subjects import Compact, Packed, Source, unpack
from voxtune.diffusion.noise import check_seed, normal_batch, offset_batch, philox
from voxtune.errors import InputError
from voxtune.files import recorded_path
from voxtune.reading import parse_bytes
from voxtune.runtime.batching import available_memory
from voxtune.runtime.model import ModelConfig
from voxtune.training.config import TrainConfig
from voxtune.training.distributed import Share, local_count

_MASK = 0xFFFFFFFF
# Counters that samplers never use, so that training noise and sampling noise are independent.
_OFFSET, _ORDER, _TIMESTEP, _NOISE = 0xFFFFFFFC, 0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF


@dataclass(frozen=True, kw_only=True)
class Batch:
    """`indices` are the subjects, `numbers` the sample numbers of the run; `images` and `masks` as stored by the source."""

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
    """The permutation of `count` subjects in an epoch, sorted by a 63-bit random key; the same on every machine."""
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


def noise_offsets(seed: int, numbers: tuple[int, ...], channels: int, dimensions: int) -> Tensor:
    """What offset noise adds to the noise of each channel of each sample, with standard deviation 1; on the CPU."""
    return offset_batch(seed, numbers, _OFFSET, channels, dimensions)


def queued_noise(seed: int, numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`training_noise` of sample numbers that are on a GPU, in one kernel that the host does not wait for."""
    from voxtune.kernels.noise import normal_batch as on_gpu

    return on_gpu(seed, numbers, _NOISE, shape)


def _key(seed: int) -> tuple[int, int]:
    return check_seed(seed) & _MASK, seed >> 32


# Loader threads: more than this read no faster from one disk, and take the interpreter from the thread that trains.
MAX_AUTO_WORKERS = 8
# The share of this machine's free memory in which subjects are kept; the rest is for the run, pinned batches and file caches.
CACHE_SHARE = 0.5


def worker_count(config: TrainConfig, device: torch.device) -> int:
    """The loader threads of a run; by default for a GPU one per core that its process has, and two for a CPU."""
    if config.workers is not None:
        return config.workers
    if device.type != "cuda":
        return 2
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(MAX_AUTO_WORKERS, cores // local_count()))


def cache_limit(setting: str) -> int:
    """The memory in bytes that one process may fill with subjects; `auto` divides free memory among the processes."""
    if setting == "none":
        return 0
    if setting != "auto":
        return parse_bytes(setting, "cache")
    from voxtune.data.dataset import CACHE_BYTES

    free = available_memory(torch.device("cpu"))
    return CACHE_BYTES if free is None else int(CACHE_SHARE * free / local_count())


def consecutive(start: int, batch: int) -> Iterator[tuple[int, ...]]:
    """The sample numbers of batches, one after the other."""
    return (tuple(range(first, first + batch)) for first in itertools.count(start, batch))


class Loader:
    """Batches in order, starting at sample number `start`, loaded in advance by `workers` threads.

    With `share`, only the batches of one of several processes, from the step on that begins with sample `start`.
    """

    def __init__(
        self,
        source: Source,
        *,
        seed: int,
        start: int,
        workers: int,
        pin: bool,
        batch: int = 1,
        share: Share | None = None,
    ):
        self.source, self.seed, self.pin = source, seed, pin
        self.count = len(source)
        self._numbers = consecutive(start, batch) if share is None else share.numbers(start)
        self._order = (-1, [0])
        # A new thread pins memory for the first GPU, whichever one the run has.
        prepare = partial(torch.cuda.set_device, torch.cuda.current_device()) if pin else None
        self._pool = ThreadPoolExecutor(workers, "voxtune-loader", initializer=prepare) if workers else None
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
        """(epoch, position in the epoch) of a sample number."""
        return divmod(number, self.count)

    def _take(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        numbers = next(self._numbers)
        return numbers, tuple(self._index(number) for number in numbers)

    def _index(self, number: int) -> int:
        epoch, position = self.position(number)
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self.seed, epoch, self.count))
        return self._order[1][position]

    def _load(self, numbers: tuple[int, ...], indices: tuple[int, ...]) -> Batch:
        unfold = None
        masks: Tensor | None
        if isinstance(self.source, Compact):
            with _naming_files(indices):
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
    """Subject `index` as tensors; a missing or damaged file is an InputError."""
    with _naming_files((index,)):
        image, cond = source[index]
    return _tensor(image), None if cond is None else _tensor(cond)


@contextmanager
def _naming_files(indices: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = error.filename or f"subject {', '.join(map(str, indices))}"
        raise InputError(f"{place}: {error.strerror or error}") from error


def _tensor(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


Warn = Callable[[str], None]


def open_source(config: TrainConfig, model: ModelConfig, warn: Warn, *, check: bool, workers: int = 2) -> Source:
    """The source in `config.data` on the model's grid; `check` validates every file first.

    Above two `workers`, that many processes simulate a cohort in advance.
    """
    if model.network.dimensions == 2:
        return _open_images(config, model, warn)
    data, contract = config.data, model.data
    if contract is None:
        raise InputError("this model takes no mask, but the data has masks; train it from Python")
    if data.subjects is not None:
        return PackedSource(data.subjects, contract)
    from voxtune.data.dataset import CohortSource, PairedFolders
    from voxtune.data.preflight import MODEL, NEW_MODEL

    if data.cohort is not None:
        cohort = CohortSource(
            contract,
            data.cohort_seed,
            data.cohort,
            cache_bytes=cache_limit(config.cache),
            version=data.cohort_version,
        )
        if workers > 2:
            cohort.warm(workers, warn)
        return cohort
    if data.images is None or data.masks is None:
        raise InputError(
            "no data: pass folders (--images DIR --masks DIR), packed subjects (--subjects FILE) or a number of "
            "simulated subjects (--cohort 64)"
        )
    labels = None if data.labels is None else LabelMap.of(data.labels)
    if data.label_map is not None:
        labels = parse_labels(data.label_map)
    consumer = NEW_MODEL if config.model.init is None else MODEL
    source = PairedFolders(
        contract,
        data.images,
        data.masks,
        mode=data.fit,
        cache_bytes=cache_limit(config.cache),
        labels=labels,
        consumer=consumer,
    )
    if check:
        source.check().raise_or_warn(warn)
    return source


def _open_images(config: TrainConfig, model: ModelConfig, warn: Warn) -> Source:
    from voxtune.data.cifar import Cifar10

    folder = config.data.images
    if folder is None:
        raise InputError("no data: pass the folder of the CIFAR-10 batches (--images DIR)")
    height, width = model.size
    source = Cifar10(folder, size=(height, width), mirror=config.data.mirror is not False)
    if source.missing:
        missing = ", ".join(f"data_batch_{n}" for n in source.missing)
        warn(f"{folder}: training on {len(source.files)} of the CIFAR-10 batches; {missing} not found")
    return source


def check_items(source: Source, model: ModelConfig) -> None:
    """Raises if the shape of the first subject does not match the model."""
    if len(source) < 1:
        raise InputError("the data has no subjects")
    image, cond = read_item(source, 0)
    network = model.network
    expected = [
        (network.out_channels, *model.size),
        (network.mask_channels, *model.size) if network.mask_channels else None,
    ]
    shapes = [tuple(image.shape), None if cond is None else tuple(cond.shape)]
    for name, shape, required in zip(("image", "mask"), shapes, expected, strict=True):
        if shape != required:
            raise InputError(f"the {name} of the first subject has shape {shape}, but the model requires {required}")


def describe_source(config: TrainConfig, source: Source) -> str:
    """The data of a run in one sentence, for the model card."""
    data, subjects = config.data, len(source)
    if isinstance(source, PackedSource):
        return f"{subjects} subjects packed in `{source.name}`: {source.origin or f'{source.held_out} held out and not used'}"
    if config.model.dimensions == 2:
        mirrored = " and their mirror images" if data.mirror is not False else ""
        folder = recorded_path(data.images or "")
        return f"CIFAR-10 training images of `{folder}`{mirrored}, {subjects} in total; class labels are not used"
    if data.cohort is not None:
        version = "" if data.cohort_version == 1 else f" version {data.cohort_version} of"
        return f"{subjects} simulated subjects of{version} the embedded cohort, seed {data.cohort_seed}"
    images, masks = recorded_path(data.images or ""), recorded_path(data.masks or "")
    return f"{subjects} subjects: images of `{images}`, masks of `{masks}`"


class PackedSource(Packed):
    """The training subjects of a file that `voxtune pack` wrote, without its held-out subjects."""

    def __init__(self, path: str | Path, contract: DataContract):
        packed, held_out = unpack(path)
        _check_contract(path, packed.contract, contract)
        super().__init__(contract, packed.images_NCDHW, packed.labels_NDHW, packed.origin)
        self.name, self.held_out = Path(path).name, len(held_out)


def _check_contract(path: str | Path, packed: DataContract, model: DataContract) -> None:
    difference = contract_difference(packed, model)
    if difference is None and packed.scaling != model.scaling:
        difference = f"scaling by {packed.scaling} differs from the model's, by {model.scaling}"
    if difference is not None:
        raise InputError(
            f"{path}: {difference}; pack subjects for this model, or do not set size, spacing, labels or other settings "
            "that the file already holds"
        )
