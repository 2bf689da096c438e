"""The volumes of an evaluation: found by name, read once onto one grid, and described as the metrics take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.data.cohort import cohort_contract
from voxtune.data.contract import DataContract
from voxtune.data.volumeset import (
    FileErrors,
    Placed,
    VolumeFile,
    check_modalities,
    find_images,
    find_masks,
    masks_of,
    pair_by_subject,
    read_pair,
    read_placed,
)
from voxtune.errors import InputError
from voxtune.quality.distributions import histogram
from voxtune.quality.per_volume import dice
from voxtune.quality.similarity import WINDOW, ms_ssim, psnr
from voxtune.segmentation.segmenter import Segmenter

# Where no network says otherwise: 192 mm in 64 voxels a side.
GRID = cohort_contract((64, 64, 64))

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Sets:
    """The files of an evaluation, by name. `training` None: the real volumes stand in for it."""

    real: list[VolumeFile]
    synth: list[VolumeFile]
    training: list[VolumeFile] | None
    masks: dict[str, Path] | None
    pairs: list[tuple[VolumeFile, VolumeFile]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Described:
    """One set as the metrics take it: images in [0, 1], coarse images for neighbours, features and histograms."""

    files: list[VolumeFile]
    images: list[Tensor] = field(default_factory=list)
    coarse: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)
    histograms: list[np.ndarray] = field(default_factory=list)
    dices: list[dict[str, float]] = field(default_factory=list)


def find_sets(
    real: Path, synth: Path, masks: Path | None = None, training: Path | None = None, image: str | None = None
) -> Sets:
    """What the folders hold; refuses what cannot be judged before anything is read."""
    reals, synths = find_images(real, image), find_images(synth, image, synthetic=True)
    trained = None if training is None else find_images(training, image)
    check_modalities([reals, synths, trained or []])
    found = None if masks is None else find_masks(masks)
    if found is not None and not any(f.subject in found for f in synths):
        raise InputError(f"{masks}: no mask has the name of a synthetic volume, such as {synths[0].path.name}")
    return Sets(real=reals, synth=synths, training=trained, masks=found, pairs=pair_by_subject(reals, synths))


def grid_of(features: Segmenter | None) -> DataContract:
    """The common grid of an evaluation with this feature network."""
    return GRID if features is None else features.config.data


class Reader:
    """Reads volumes one at a time and keeps what the metrics need; gathers what is wrong with files."""

    def __init__(self, sets: Sets, features: Segmenter | None, segmenter: Segmenter | None, progress: Progress | None):
        self.masks = sets.masks or {}
        # All sets are placed alike: around their labels where every volume has some, else around their middles.
        self.by_mask = sets.training is None and all(f.subject in self.masks for f in (*sets.real, *sets.synth))
        self.features, self.segmenter, self.progress = features, segmenter, progress
        self.faults = FileErrors()
        self.constant: list[Path] = []
        self.done = 0
        self.total = sum(len(part or []) for part in (sets.real, sets.synth, sets.training, sets.pairs))

    def read(self, files: list[VolumeFile], *, judged: bool = True) -> Described:
        """Volumes that are not `judged` are neighbours alone: their images are not kept, their masks not asked for."""
        contract = grid_of(self.features)
        described = Described(files=files)
        for file, mask in zip(files, masks_of(files, self.masks if judged else {}), strict=True):
            try:
                # Labels are checked against the contract of the network that they are held against.
                held_here = self.segmenter is not None and self.features is self.segmenter
                placed = read_placed(file, mask, contract, strict=held_here, by_mask=self.by_mask)
                self._describe(placed, mask, described, judged)
            except InputError as error:
                self.faults.add(error)
            self._step()
        return described

    def read_pairs(self, pairs: list[tuple[VolumeFile, VolumeFile]]) -> dict[Path, tuple[float, float]]:
        """Synthetic file -> (PSNR, MS-SSIM) against its real partner."""
        rows = {}
        for real, synth in pairs:
            try:
                a, b = (torch.from_numpy(array) for array in read_pair(real, synth))
                # Thick slices leave no room for its windows.
                rows[synth.path] = (psnr(b, a), ms_ssim(b, a) if min(a.shape) >= WINDOW else np.nan)
            except InputError as error:
                self.faults.add(InputError(str(error) if str(synth.path) in str(error) else f"{synth.path}: {error}"))
            self._step()
        return rows

    def _describe(self, placed: Placed, mask: Path | None, out: Described, judged: bool) -> None:
        if placed.constant:
            self.constant.append(placed.file.path)
        unit = torch.from_numpy((placed.image_DHW + 1) / 2)
        out.coarse.append(F.avg_pool3d(unit[None, None], 2).flatten())
        out.histograms.append(histogram(unit))
        if judged:
            out.images.append(unit)
        labels = None
        if self.features is not None:
            labels, vector = self.features.describe(torch.from_numpy(placed.image_DHW)[None, None])
            out.features.append(vector[0])
        if self.segmenter is not None and judged:
            out.dices.append(self._dices(placed, mask, None if labels is None else labels[0]))

    def _dices(self, placed: Placed, mask: Path | None, labels_DHW: Tensor | None) -> dict[str, float]:
        """Dice by label name; empty where there is no mask."""
        assert self.segmenter is not None
        contract = self.segmenter.config.data
        if self.segmenter is not self.features or not self.by_mask:  # as sampling places it: around its labels
            placed = read_placed(placed.file, mask, contract)
            labels_DHW = self.segmenter.describe(torch.from_numpy(placed.image_DHW)[None, None])[0][0]
        if placed.labels_DHW is None or labels_DHW is None:
            return {}
        asked = torch.from_numpy(placed.labels_DHW)
        scores = {label.name: dice(asked, labels_DHW, label.value) for label in contract.labels}
        return {name: score for name, score in scores.items() if score is not None}

    def _step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
