"""The volumes of an evaluation: matched by name, read once onto a common grid, and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxtune.data.cohort import cohort_contract
from voxtune.data.contract import DataContract
from voxtune.data.geometry import GeometrySummary
from voxtune.data.preflight import segmenter_consumer
from voxtune.data.volumeset import (
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
from voxtune.errors import FileProblems, InputError
from voxtune.quality.metrics import (
    Metric,
    SetMeasurements,
    VolumeInput,
    collect,
    measure,
    measure_pairs,
)
from voxtune.segmentation.segmenter import Segmenter

# Without a feature network: 192 mm in 64 voxels per dimension.
GRID = cohort_contract((64, 64, 64))

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class EvaluationSets:
    """The files of an evaluation. Without `training`, the real volumes take its place."""

    real: list[VolumeFile]
    synth: list[VolumeFile]
    training: list[VolumeFile] | None
    masks: dict[str, Path] | None
    pairs: list[tuple[VolumeFile, VolumeFile]]


@dataclass(frozen=True, kw_only=True, eq=False)
class SetReadings:
    """One set as it is read: measurements of each volume, and the images in [0, 1] that pairs are taken of."""

    files: list[VolumeFile]
    rows: list[dict[str, Any]] = field(default_factory=list)
    images: list[Tensor] = field(default_factory=list)

    def measurements(self, pairs: Sequence[tuple[int, int]], metrics: Sequence[Metric]) -> SetMeasurements:
        return collect(self.rows, measure_pairs([{"": image} for image in self.images], pairs, metrics))


def find_sets(
    real: Path, synth: Path, masks: Path | None = None, training: Path | None = None, image: str | None = None
) -> EvaluationSets:
    """Finds and checks the files by name, before any is read."""
    real_files, synth_files = find_images(real, image), find_images(synth, image, synthetic=True)
    training_files = None if training is None else find_images(training, image)
    check_modalities([real_files, synth_files, training_files or []])
    mask_files = None if masks is None else find_masks(masks)
    if mask_files is not None and not any(f.subject in mask_files for f in synth_files):
        raise InputError(f"{masks}: no mask matches a synthetic volume by name, such as {synth_files[0].path.name}")
    return EvaluationSets(
        real=real_files,
        synth=synth_files,
        training=training_files,
        masks=mask_files,
        pairs=pair_by_subject(real_files, synth_files),
    )


def grid_of(features: Segmenter | None) -> DataContract:
    """The common grid: that of the feature network."""
    return GRID if features is None else features.config.data


class Reader:
    """Reads volumes one at a time, takes the measurements that `metrics` need, and collects errors of files."""

    def __init__(
        self,
        sets: EvaluationSets,
        features: Segmenter | None,
        segmenter: Segmenter | None,
        metrics: Sequence[Metric],
        progress: Progress | None,
    ):
        self.masks = sets.masks or {}
        # All sets are cropped alike: around the labels if every volume has a mask, else around the centre.
        self.by_mask = sets.training is None and all(f.subject in self.masks for f in (*sets.real, *sets.synth))
        self.features, self.segmenter, self.progress = features, segmenter, progress
        self.pair_metrics = [m for m in metrics if "partner" in m.needs]
        self.set_metrics = [m for m in metrics if "partner" not in m.needs]
        self.errors, self.geometry = FileProblems(), GeometrySummary()
        self.labels_for = None if segmenter is None else segmenter_consumer(segmenter.name)
        self.constant: list[Path] = []
        self.done = 0
        self.total = sum(len(part or []) for part in (sets.real, sets.synth, sets.training, sets.pairs))

    def read(self, files: list[VolumeFile], *, neighbours_only: bool = False) -> SetReadings:
        """With `neighbours_only` (training volumes), only what nearest neighbours need is measured."""
        contract = grid_of(self.features)
        readings = SetReadings(files=files)
        for file, mask in zip(files, masks_of(files, {} if neighbours_only else self.masks), strict=True):
            try:
                # Labels must be those of the network that they are compared with.
                labels_for = self.labels_for if self.features is self.segmenter else None
                placed = read_placed(
                    file, mask, contract, labels_for=labels_for, by_mask=self.by_mask, geometry=self.geometry
                )
                self._measure(placed, mask, readings, neighbours_only)
            except InputError as error:
                self.errors.add(file.path, error)
            self._step()
        return readings

    def read_pairs(self, pairs: list[tuple[VolumeFile, VolumeFile]]) -> dict[Path, dict[str, float]]:
        """Synthetic file -> measurements with its real partner, on the grid of the files."""
        rows = {}
        for real, synth in pairs:
            try:
                partner, image = (torch.from_numpy(array) for array in read_pair(real, synth))
                rows[synth.path] = measure(VolumeInput(image=image, partner=partner), self.pair_metrics)
            except InputError as error:
                self.errors.add(synth.path, error)
            self._step()
        return rows

    def _measure(self, placed: Placed, mask: Path | None, readings: SetReadings, neighbours_only: bool) -> None:
        if placed.constant:
            self.constant.append(placed.file.path)
        image = torch.from_numpy((placed.image_DHW + 1) / 2)
        features = labels = None
        if self.features is not None:
            labels, vectors = self.features.describe(torch.from_numpy(placed.image_DHW)[None, None])
            features, labels = vectors[0], labels[0]
        metrics, adherence = self.set_metrics, {}
        if neighbours_only:
            metrics = [metric for metric in metrics if "training" in metric.needs]
        else:
            readings.images.append(image)
            adherence = {} if self.segmenter is None else self._labels(placed, mask, labels)
        readings.rows.append(measure(VolumeInput(image=image, features=features, **adherence), metrics))

    def _labels(self, placed: Placed, mask: Path | None, labels_DHW: Tensor | None) -> dict[str, Any]:
        """The mask and the predicted labels on the segmenter's grid; neither without a mask."""
        assert self.segmenter is not None
        contract = self.segmenter.config.data
        values = {label.name: label.values for label in contract.labels}
        if mask is None:
            return {"classes": values}
        if self.segmenter is not self.features or not self.by_mask:  # around the labels, as in sampling
            placed = read_placed(placed.file, mask, contract, labels_for=self.labels_for)
            labels_DHW = self.segmenter.describe(torch.from_numpy(placed.image_DHW)[None, None])[0][0]
        assert placed.labels_DHW is not None and labels_DHW is not None
        return {"mask": torch.from_numpy(placed.labels_DHW), "predicted": labels_DHW, "classes": values}

    def _step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
