"""Sources of training subjects: a user's folders, or the simulated cohort.

A source has a length, and `source[i]` is (image (C, D, H, W) in [-1, 1], condition (L, D, H, W)) as float32 arrays on the
contract's grid. Prepared subjects are cached in memory up to a limit.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from voxtune.data.cohort import FIELD_OF_VIEW, LABELS, cohort_spacing
from voxtune.data.contract import DataContract, Shape, check_known, encode_channels, encode_mask, scale_image
from voxtune.data.geometry import GeometrySummary
from voxtune.data.grid import Mode, Placement, fit
from voxtune.data.labels import LabelMap, MaskReader
from voxtune.data.modality import T1W, find_kind, kind_name
from voxtune.data.nifti import Volume, read_volume
from voxtune.data.orientation import reorder
from voxtune.data.pairing import Pair, nifti_files, pair_folders
from voxtune.data.preflight import MODEL, Consumer, Report, check_lost_labels, check_pair, error_finding
from voxtune.data.simulation import check_version, simulated_subject
from voxtune.errors import InputError

T = TypeVar("T")
# Far longer than a process takes to start and simulate a subject: a process that exceeds it hangs.
TIMEOUT_S = 300.0


def map_in_processes(
    work: Callable[[int], T], count: int, processes: int, *, timeout_s: float = TIMEOUT_S
) -> Iterator[T]:
    """Yields work(0), work(1), ... work(count - 1) in order. `work` is pickled for every number, so it should be small.

    Raises TimeoutError if a result takes longer than `timeout_s`, BrokenProcessPool if a process dies.
    """
    others = set(active_children())
    # Not forked: a forked process inherits locks held by threads that it does not have.
    pool = ProcessPoolExecutor(min(processes, count), mp_context=get_context("spawn"))
    with _one_thread_each(), pool:
        try:
            futures = [pool.submit(work, number) for number in range(count)]
            for future in futures:
                yield future.result(timeout=timeout_s)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, TimeoutError):
                # Leaving the block waits for the processes, and a hanging one never ends.
                for process in set(active_children()) - others:
                    process.kill()
            raise


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started within the context use one thread each, to avoid oversubscription."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


log = logging.getLogger("voxtune")

CACHE_BYTES = 2 * 2**30
# Of a simulated subject: float32 images and uint8 labels.
IMAGE_BYTES, LABEL_BYTES = 4, 1


class _Prepared:
    """Subjects as images and labels on the grid, cached in memory after their first use; `Compact` for the loader."""

    contract: DataContract

    def __init__(self, cache_bytes: int) -> None:
        self._cache = _Cache(cache_bytes)

    def __len__(self) -> int:
        raise NotImplementedError

    def _prepare(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image_CDHW, labels_DHW = self._item(index)
        return image_CDHW.copy(), encode_mask(labels_DHW, self.contract)

    @property
    def cache_bytes(self) -> int:
        """The memory that prepared subjects may take up."""
        return self._cache.limit_bytes

    @property
    def cached(self) -> int:
        """How many subjects are in memory."""
        return len(self._cache)

    def stored(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images and labels of these subjects: a label takes up one byte, in the condition four of each channel."""
        images, labels = zip(*map(self._item, indices), strict=True)
        return torch.from_numpy(np.stack(images)), torch.from_numpy(np.stack(labels))

    def unfold(self, images: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        """Converts the result of `stored` to images and conditions, bit-identical to `[index]`."""
        if masks.dtype == torch.uint8 and max(self.contract.all_values) > 255:
            masks = masks.int()  # a comparison with a number that does not fit would wrap around
        return images, encode_channels(masks, self.contract.channel_values, self.contract)

    def _item(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self._cache.get(_checked(index, len(self)), self._prepare)


class PairedFolders(_Prepared):
    """A user's images and masks, matched by name. `check` reads and checks every file, and fills `placements`."""

    def __init__(
        self,
        contract: DataContract,
        images_dir: str | Path,
        masks_dir: str | Path,
        *,
        mode: Mode = "auto",
        size: Shape | None = None,
        cache_bytes: int = CACHE_BYTES,
        labels: LabelMap | None = None,
        consumer: Consumer = MODEL,
    ) -> None:
        pairing = pair_folders(images_dir, masks_dir, contract.images)
        pairing.report.raise_errors()
        self.contract = contract if size is None else replace(contract, size=size)
        self.pairs = pairing.pairs
        self._masks = MaskReader(contract=self.contract, labels=labels)
        self._masks.check_names()
        self.placements: dict[str, Placement] = {}
        self._consumer = consumer
        self._folders = (images_dir, masks_dir)
        self._matching = pairing.report
        self.mode = mode
        super().__init__(cache_bytes)

    def __len__(self) -> int:
        return len(self.pairs)

    def check(self) -> Report:
        """Checks every mask and pair."""
        report, geometry = self._matching, GeometrySummary()
        for pair in self.pairs:
            try:
                mask = self._masks.read(pair.mask, pair.images)
            except InputError as error:
                report += Report(findings=(error_finding("unreadable", pair.mask, str(error)),))
                continue
            masked = self._masks.check(mask, self._consumer)
            report += masked
            if masked.ok:
                report += self._check_pair(pair, mask, geometry)
        return geometry.report() + report

    def unused_files(self) -> list[Path]:
        """The files of both folders that belong to no pair, such as images of other kinds."""
        used = {path for pair in self.pairs for path in (*pair.images, pair.mask)}
        return sorted({path for folder in self._folders for path in nifti_files(folder)} - used)

    def _check_pair(self, pair: Pair, mask: Volume, geometry: GeometrySummary) -> Report:
        report = Report()
        try:
            geometry.add(mask)
            for path in pair.images:
                image = read_volume(path)
                geometry.add(image)
                report += check_pair(image, mask)
            placement = self.placements[pair.id] = fit(mask, self.contract, self.mode, consumer=self._consumer)
            placed = placement.apply(mask.array, label=True)
        except InputError as error:
            return report + Report(findings=(error_finding("unusable", pair.mask, str(error)),))
        return report + check_lost_labels(mask.array, placed, self.contract, mask.name)

    def _prepare(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        pair = self.pairs[index]
        images = [read_volume(path) for path in pair.images]
        mask = self._masks.read(pair.mask, images)
        report = self._masks.check(mask)
        for image in images:
            report += check_pair(image, mask)
        report.raise_errors()
        return _on_grid(images, mask, self.contract, self.mode)


class CohortSource(_Prepared):
    """Simulated subjects 0 .. count-1 of cohort `seed`, on the contract's grid."""

    def __init__(
        self,
        contract: DataContract,
        seed: int,
        count: int,
        *,
        healthy_fraction: float = 0.1,
        cache_bytes: int = CACHE_BYTES,
        version: int = 1,
    ) -> None:
        if count < 1:
            raise InputError(f"number of subjects is {count}; it must be 1 or more")
        several = version == 1 and len(contract.images) != 1
        if several or not {label.value for label in LABELS} <= set(contract.all_values):
            raise InputError(
                f"the simulated cohort has one T1w image and the labels 1 (brain), 2 (tumour), but the model has "
                f"{len(contract.images)} images and {contract.describe_labels()}; use your own images and masks"
            )
        if version == 1 and (find_kind(contract.images[0]) or T1W) is not T1W:
            raise InputError(
                f"the simulated cohort has T1w images, but {contract.images[0]} is required; use your own images and masks"
            )
        if version != 1:
            check_version(version, contract.images)
        self.contract = contract
        self.version = version
        self.seed = seed
        self.count = count
        self.healthy_fraction = healthy_fraction
        self.spacing = _isotropic_spacing(contract)
        super().__init__(cache_bytes)

    def __len__(self) -> int:
        return self.count

    def warm(self, processes: int, warn: Callable[[str], None] | None = None, *, first: int = 0) -> None:
        """Simulates all subjects from `first` on that fit into the cache, in parallel; one takes a tenth of a second or more.

        If a process fails, `warn` is called, and the remaining subjects are simulated when they are needed.
        """
        voxel_bytes = len(self.contract.images) * IMAGE_BYTES + LABEL_BYTES
        count = min(self.count - first, self._cache.capacity(math.prod(self.contract.size) * voxel_bytes))
        if count < 1:
            return
        try:
            work = partial(_following, self.simulation(), first)
            for index, prepared in enumerate(map_in_processes(work, count, processes), first):
                self._cache.put(index, prepared)
        except (BrokenProcessPool, TimeoutError) as error:
            reason = "timeout" if isinstance(error, TimeoutError) else "a process died, possibly out of memory"
            (warn or log.warning)(
                f"simulating subjects with {processes} processes failed ({reason}); continuing with one"
            )

    def simulation(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """The function index -> subject, without `self`, so that the cache is not pickled."""
        return partial(_simulate, self.contract, self.seed, self.spacing, self.healthy_fraction, self.version)

    def _prepare(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.simulation()(index)


def _following(work: Callable[[int], T], first: int, number: int) -> T:
    return work(first + number)


def _simulate(
    contract: DataContract,
    seed: int,
    spacing: float,
    healthy_fraction: float,
    version: int,
    index: int,
) -> tuple[np.ndarray, np.ndarray]:
    # An unknown name of a single image is that of a T1w image in version 1.
    kinds = ("T1w",) if version == 1 else tuple(kind_name(image) for image in contract.images)
    simulated = simulated_subject(
        version,
        seed,
        index,
        _ras_size(contract),
        spacing=spacing,
        healthy_fraction=healthy_fraction,
        kinds=kinds,
    )
    images = [simulated.image_volume(kind) for kind in kinds]
    return _on_grid(images, simulated.label_volume(), contract, "pad")


class _Cache:
    """Keeps the first items up to a limit. Every epoch visits all subjects, so evicting items would not help."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._items: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._lock = threading.Lock()  # several threads of a loader prepare subjects at the same time

    def __len__(self) -> int:
        return len(self._items)

    def get(self, index: int, prepare: Callable[[int], tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        if index in self._items:
            return self._items[index]
        prepared = prepare(index)
        self.put(index, prepared)
        return prepared

    def capacity(self, item_bytes: int) -> int:
        """How many more items of this size fit."""
        return (self.limit_bytes - self.bytes) // item_bytes

    def put(self, index: int, prepared: tuple[np.ndarray, np.ndarray]) -> bool:
        """Stores an item if it fits; returns whether it is stored."""
        cost = sum(array.nbytes for array in prepared)
        with self._lock:
            if index in self._items or self.bytes + cost > self.limit_bytes:
                return index in self._items
            self._items[index] = prepared
            self.bytes += cost
            return True


def _on_grid(images: list[Volume], mask: Volume, contract: DataContract, mode: Mode) -> tuple[np.ndarray, np.ndarray]:
    """Scaled images (C, D, H, W) and labels (D, H, W), which are many times smaller than the condition."""
    placement = fit(mask, contract, mode)
    labels_DHW = placement.apply(mask.array, label=True)
    if labels_DHW.max() <= 255:
        labels_DHW = labels_DHW.astype(np.uint8)
    check_known(labels_DHW, contract)
    placed = [placement.apply(image.array, label=False, fill=float(image.array.min())) for image in images]
    return np.stack([scale_image(image_DHW, contract) for image_DHW in placed]), labels_DHW


def _ras_size(contract: DataContract) -> Shape:
    """The contract's size as (D, H, W) of a RAS volume, so that reordering it to the contract's axes is exact."""
    (x, y, z), _ = reorder(contract.orientation, "RAS")
    size_XYZ = contract.size[::-1]
    return (size_XYZ[z], size_XYZ[y], size_XYZ[x])


def _isotropic_spacing(contract: DataContract) -> float:
    low, high = min(contract.spacing), max(contract.spacing)
    needed = cohort_spacing(_ras_size(contract))
    if high > low * 1.001 or low < needed * 0.999:
        extent = " x ".join(f"{mm:g}" for mm in FIELD_OF_VIEW)
        raise InputError(
            f"the simulated cohort requires a field of view of {extent} mm (D, H, W) and isotropic voxels; the model has "
            f"{contract.size} voxels of {contract.spacing} mm; set the spacing to {needed:g} mm or more"
        )
    return low


def _checked(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"subject {index} is out of range for {length} subjects")
    return index
