"""Where training takes its subjects from: folders of a user, or the embedded cohort.

A source has a length and gives `source[i] -> (image (C, D, H, W) in [-1, 1], condition (L, D, H, W))` as float32 arrays
on the contract's grid. What was prepared once is kept in memory up to a limit; beyond it, subjects are read again.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import TypeVar

import numpy as np

from voxtune.data.cohort import FIELD_OF_VIEW, LABELS, cohort_spacing, subject
from voxtune.data.contract import DataContract, Shape, encode_mask, scale_image
from voxtune.data.grid import Mode, fit
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.data.orientation import reorder
from voxtune.data.pairing import Pair, pair_folders
from voxtune.data.preflight import Finding, Report, check_lost_labels, check_mask, check_pair
from voxtune.errors import InputError

T = TypeVar("T")
# Far longer than a process needs to start and to draw a subject: whoever takes more will not come back.
TIMEOUT_S = 300.0


def map_in_processes(
    work: Callable[[int], T], count: int, processes: int, *, timeout_s: float = TIMEOUT_S
) -> Iterator[T]:
    """work(0), work(1), ... work(count - 1), in order. `work` goes to the processes anew with every number: keep it small.

    Raises TimeoutError where a result does not come, BrokenProcessPool where a process dies (out of memory, mostly).
    """
    others = set(active_children())
    # Fresh processes: a forked one would inherit locks of threads that it does not have.
    pool = ProcessPoolExecutor(min(processes, count), mp_context=get_context("spawn"))
    with _one_thread_each(), pool:
        try:
            futures = [pool.submit(work, number) for number in range(count)]
            for future in futures:
                yield future.result(timeout=timeout_s)
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)
            if isinstance(error, TimeoutError):
                # Leaving the block waits for the processes, and these do not end of themselves.
                for process in set(active_children()) - others:
                    process.kill()
            raise


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Processes started meanwhile compute with one thread each: many of them with many threads would crawl."""
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
# Of a drawn subject: a float32 image and its labels.
BYTES_A_VOXEL = 5


class PairedFolders:
    """Images and masks of a user, paired by name. Names are checked when made; `check` looks into every mask."""

    def __init__(
        self,
        contract: DataContract,
        images_dir: str | Path,
        masks_dir: str | Path,
        *,
        mode: Mode = "auto",
        size: Shape | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        pairing = pair_folders(images_dir, masks_dir, contract.images)
        pairing.report.raise_errors()
        self.contract = contract if size is None else replace(contract, size=size)
        self.pairs = pairing.pairs
        self.mode = mode
        self._cache = _Cache(cache_bytes)

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image_CDHW, labels_DHW = self._cache.get(_checked(index, len(self)), self._prepare)
        return image_CDHW.copy(), encode_mask(labels_DHW, self.contract)

    def check(self) -> Report:
        """The pre-flight of every mask and pair, before any work."""
        report = Report()
        for pair in self.pairs:
            masked = check_mask(pair.mask, self.contract)
            report += masked
            if masked.ok:
                report += self._check_pair(pair)
        return report

    def _check_pair(self, pair: Pair) -> Report:
        report = Report()
        try:
            mask = read_labels(pair.mask)
            for path in pair.images:
                report += check_pair(read_volume(path), mask)
            placed = fit(mask, self.contract, self.mode).apply(mask.array, label=True)
        except InputError as error:
            return report + Report(findings=(Finding(level="error", code="unusable", message=str(error)),))
        return report + check_lost_labels(mask.array, placed, self.contract, mask.name)

    def _prepare(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        pair = self.pairs[index]
        mask = read_labels(pair.mask)
        images = [read_volume(path) for path in pair.images]
        report = check_mask(mask, self.contract)
        for image in images:
            report += check_pair(image, mask)
        report.raise_errors()
        return _on_grid(images, mask, self.contract, self.mode)


class CohortSource:
    """Subjects 0 .. count-1 of the embedded cohort `seed`, drawn on the contract's own grid."""

    def __init__(
        self,
        contract: DataContract,
        seed: int,
        count: int,
        *,
        healthy_fraction: float = 0.1,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if count < 1:
            raise InputError(f"{count} subjects: ask for one or more")
        if len(contract.images) != 1 or not {label.value for label in LABELS} <= set(contract.values):
            raise InputError(
                f"the embedded cohort has one T1w image and the labels 1 (brain), 2 (tumour); the model wants "
                f"{len(contract.images)} images and {contract.describe_labels()}: bring your own folders"
            )
        self.contract = contract
        self.seed = seed
        self.count = count
        self.healthy_fraction = healthy_fraction
        self.spacing = _isotropic_spacing(contract)
        self._cache = _Cache(cache_bytes)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image_CDHW, labels_DHW = self._cache.get(_checked(index, len(self)), self._prepare)
        return image_CDHW.copy(), encode_mask(labels_DHW, self.contract)

    def warm(self, processes: int, warn: Callable[[str], None] | None = None) -> None:
        """Draws all subjects that fit the cache now, side by side: drawing one takes a tenth of a second or more.

        Where the processes fail, `warn` is told, and what is missing is drawn when it is needed.
        """
        count = min(self.count, self._cache.room(math.prod(self.contract.size) * BYTES_A_VOXEL))
        if count < 1:
            return
        try:
            for index, prepared in enumerate(map_in_processes(self.drawing(), count, processes)):
                self._cache.put(index, prepared)
        except (BrokenProcessPool, TimeoutError) as error:
            told = "no subject for minutes" if isinstance(error, TimeoutError) else "a process died; out of memory?"
            (warn or log.warning)(f"drawing the cohort with {processes} processes failed ({told}): going on with one")

    def drawing(self) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
        """index -> subject. Apart from `self`, so that no process is sent the cache."""
        return partial(_draw, self.contract, self.seed, self.spacing, self.healthy_fraction)

    def _prepare(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.drawing()(index)


def _draw(
    contract: DataContract, seed: int, spacing: float, healthy_fraction: float, index: int
) -> tuple[np.ndarray, np.ndarray]:
    drawn = subject(seed, index, _ras_size(contract), spacing=spacing, healthy_fraction=healthy_fraction)
    return _on_grid([drawn.image_volume()], drawn.label_volume(), contract, "pad")


class _Cache:
    """Keeps what came first until the limit. Epochs visit every subject, so evicting would only lose what is needed."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def get(self, index: int, prepare: Callable[[int], tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
        if index in self._kept:
            return self._kept[index]
        prepared = prepare(index)
        self.put(index, prepared)
        return prepared

    def room(self, item_bytes: int) -> int:
        """How many more items of this size it keeps."""
        return (self.limit_bytes - self.bytes) // item_bytes

    def put(self, index: int, prepared: tuple[np.ndarray, np.ndarray]) -> bool:
        """Whether it was kept."""
        cost = sum(array.nbytes for array in prepared)
        if index in self._kept or self.bytes + cost > self.limit_bytes:
            return index in self._kept
        self._kept[index] = prepared
        self.bytes += cost
        return True


def _on_grid(images: list[Volume], mask: Volume, contract: DataContract, mode: Mode) -> tuple[np.ndarray, np.ndarray]:
    """Scaled images (C, D, H, W) and compact labels (D, H, W); the condition made of them is many times larger."""
    placement = fit(mask, contract, mode)
    labels_DHW = placement.apply(mask.array, label=True)
    if labels_DHW.max() <= 255:
        labels_DHW = labels_DHW.astype(np.uint8)
    placed = [placement.apply(image.array, label=False, fill=float(image.array.min())) for image in images]
    return np.stack([scale_image(image_DHW, contract) for image_DHW in placed]), labels_DHW


def _ras_size(contract: DataContract) -> Shape:
    """The contract's grid as the (D, H, W) of a RAS volume, so that turning it to the contract's axes is exact."""
    (x, y, z), _ = reorder(contract.orientation, "RAS")
    size_XYZ = contract.size[::-1]
    return (size_XYZ[z], size_XYZ[y], size_XYZ[x])


def _isotropic_spacing(contract: DataContract) -> float:
    low, high = min(contract.spacing), max(contract.spacing)
    needed = cohort_spacing(_ras_size(contract))
    if high > low * 1.001 or low < needed * 0.999:
        view = " x ".join(f"{mm:g}" for mm in FIELD_OF_VIEW)
        raise InputError(
            f"the embedded cohort needs {view} mm (D, H, W) and one spacing for all axes; the model has "
            f"{contract.size} voxels at {contract.spacing} mm: set the spacing to {needed:g} mm or more"
        )
    return low


def _checked(index: int, length: int) -> int:
    if not 0 <= index < length:
        raise IndexError(f"subject {index} of {length}")
    return index
