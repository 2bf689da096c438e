"""The volumes of an evaluation: matched by name, read once onto a common grid, and measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxtune.data.cohort import cohort_contract
from voxtune.data.contract import DataContract
from voxtune.data.geometry import GeometrySummary
from voxtune.data.labels import LabelMap, MaskReader
from voxtune.data.modality import kind_name, parse_images
from voxtune.data.preflight import segmenter_consumer
from voxtune.data.volumeset import (
    Placed,
    VolumeFiles,
    common_kinds,
    find_images,
    find_masks,
    masks_of,
    pair_by_subject,
    read_pair,
    read_placed,
    volumes_of,
)
from voxtune.errors import FileProblems, InputError, advice, printable
from voxtune.evaluation.judge import DomainCheck
from voxtune.quality.metrics import (
    Metric,
    SetMeasurements,
    VolumeInput,
    collect,
    measure_images,
    measure_pairs,
)
from voxtune.segmentation.segmenter import Segmenter

# Without a feature network: 192 mm in 64 voxels per dimension.
GRID = cohort_contract((64, 64, 64))

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class EvaluationSets:
    """The volumes of an evaluation, each with the images `kinds`. Without `training`, the real volumes take its place."""

    kinds: tuple[str, ...]
    real: list[VolumeFiles]
    synth: list[VolumeFiles]
    training: list[VolumeFiles] | None
    masks: dict[str, Path] | None
    pairs: list[tuple[VolumeFiles, VolumeFiles]]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, eq=False)
class SetReadings:
    """One set as it is read: measurements of each volume, and the images in [0, 1] by kind that pairs are taken of."""

    files: list[VolumeFiles]
    rows: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Tensor]] = field(default_factory=list)

    def measurements(self, pairs: Sequence[tuple[int, int]], metrics: Sequence[Metric]) -> SetMeasurements:
        return collect(self.rows, measure_pairs(self.images, pairs, metrics))


def find_sets(
    real: Path, synth: Path, masks: Path | None = None, training: Path | None = None, image: str | None = None
) -> EvaluationSets:
    """Finds and checks the files by name, before any is read.

    `image` names one or several kinds; by default they are those that all folders have.
    """
    kinds: tuple[str, ...] = () if image is None else parse_images(image)
    real_files, synth_files = find_images(real, kinds), find_images(synth, kinds, synthetic=True)
    training_files = None if training is None else find_images(training, kinds)
    warnings: list[str] = []
    if image is None:
        sets = [(real, real_files), (synth, synth_files)]
        sets += [] if training is None or training_files is None else [(training, training_files)]
        kinds, warnings = common_kinds(sets)
    real_volumes, synth_volumes = volumes_of(real, real_files, kinds), volumes_of(synth, synth_files, kinds)
    pairs = pair_by_subject(real_volumes, synth_volumes)
    if not pairs:
        names = f"{synth_volumes[0].path.name} and {real_volumes[0].path.name}"
        warnings.append(f"0 pairs: no synthetic volume matches a reference volume by name, such as {names}")
    mask_files = None if masks is None else find_masks(masks)
    if mask_files is not None and not any(f.subject in mask_files for f in synth_volumes):
        raise InputError(f"{masks}: no mask matches a synthetic volume by name, such as {synth_volumes[0].path.name}")
    return EvaluationSets(
        kinds=kinds,
        real=real_volumes,
        synth=synth_volumes,
        training=None if training is None or training_files is None else volumes_of(training, training_files, kinds),
        masks=mask_files,
        pairs=pairs,
        warnings=tuple(warnings),
    )


def kinds_read(network: Segmenter, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The evaluated kinds that a network reads, in its order; none if it does not apply to them."""
    names = tuple(kind_name(image) for image in network.config.data.images)
    if kinds == ("",):
        return kinds if len(names) == 1 else ()
    return names if set(names) <= set(kinds) else ()


def grid_of(features: Segmenter | None) -> DataContract:
    """The common grid: that of the feature network."""
    return GRID if features is None else features.config.data


def roles_of(contract: DataContract, numbers: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """What the numbers of labels in a mask are: those of the pathology, and those of the healthy organ."""
    pathology = {n for label in contract.labels if label.kind == "pathology" for n in numbers[label.name]}
    organs = [contract.organ] if contract.organ is not None else contract.labels
    healthy = {n for label in organs for n in numbers[label.name]} - pathology
    return {"healthy": tuple(sorted(healthy)), "pathology": tuple(sorted(pathology))}


class Reader:
    """Reads volumes one at a time, takes the measurements that `metrics` need, and collects errors of files.

    `contract` is the common grid. The networks, if any, read kinds that the sets have.
    """

    def __init__(
        self,
        sets: EvaluationSets,
        contract: DataContract,
        features: Segmenter | None,
        segmenter: Segmenter | None,
        metrics: Sequence[Metric],
        progress: Progress | None,
        labels: LabelMap | None = None,
    ):
        self.kinds, self.contract, self.masks = sets.kinds, contract, sets.masks or {}
        # All sets are cropped alike: around the labels if every volume has a mask, else around the centre.
        self.by_mask = sets.training is None and all(f.subject in self.masks for f in (*sets.real, *sets.synth))
        self.features, self.segmenter, self.progress = features, segmenter, progress
        self.pair_metrics = [m for m in metrics if "partner" in m.needs]
        self.set_metrics = [m for m in metrics if "partner" not in m.needs]
        self.errors, self.geometry = FileProblems(), GeometrySummary()
        self.labels_for = None if segmenter is None else segmenter_consumer(segmenter.name)
        if labels is not None and sets.masks is None:
            raise InputError(f"labels of masks, but no masks; {advice('pass their folder with --masks', 'pass masks')}")
        self.mask_reader = None if segmenter is None else MaskReader(contract=segmenter.config.data, labels=labels)
        if self.mask_reader is not None:
            self.mask_reader.check_names()
        # A label that is taken from the image is taken from the reference: synthetic volumes have no background of zeros.
        self.references = {
            volume.subject: tuple(file.path for file in volume.images.values()) for volume in reversed(sets.real)
        }
        self.constant: list[Path] = []
        self.domain = DomainCheck(sets.real)
        self.done = 0
        self.total = sum(len(part or []) for part in (sets.real, sets.synth, sets.training, sets.pairs))

    @property
    def feature_part(self) -> str:
        """The one of several image kinds that the features are of; "" if they are of all images."""
        read = () if self.features is None else kinds_read(self.features, self.kinds)
        return read[0] if len(read) == 1 < len(self.kinds) else ""

    def read(self, volumes: list[VolumeFiles], *, neighbours_only: bool = False) -> SetReadings:
        """With `neighbours_only` (training volumes), only what nearest neighbours need is measured."""
        readings = SetReadings(files=volumes)
        for files, mask in zip(volumes, masks_of(volumes, {} if neighbours_only else self.masks), strict=True):
            placed = self._place(files, mask)
            if placed is not None:
                self._measure(placed, mask, readings, neighbours_only)
            self._step()
        return readings

    def read_pairs(self, pairs: list[tuple[VolumeFiles, VolumeFiles]]) -> dict[Path, dict[str, Any]]:
        """First synthetic file -> measurements with its real partner, on the grid of the files."""
        rows = {}
        for real, synth in pairs:
            inputs = {}
            for kind, file in synth.images.items():
                try:
                    partner, image = (torch.from_numpy(array) for array in read_pair(real.images[kind], file))
                    inputs[kind] = VolumeInput(image=image, partner=partner)
                except InputError as error:
                    self.errors.add(file.path, error)
            if len(inputs) == len(synth.images):
                rows[synth.path] = measure_images(inputs, self.pair_metrics)
            self._step()
        return rows

    def _place(self, files: VolumeFiles, mask: Path | None) -> dict[str, Placed] | None:
        """The images of a volume on the common grid; None if a file has an error."""
        # Labels must be those of the network that they are compared with.
        labels_for = self.labels_for if self.features is self.segmenter else None
        placed = {}
        for kind, file in files.images.items():
            try:
                placed[kind] = read_placed(
                    file,
                    mask,
                    self.contract,
                    labels_for=labels_for,
                    by_mask=self.by_mask,
                    geometry=self.geometry,
                    masks=self.mask_reader,
                    references=self.references.get(file.subject, ()),
                )
            except InputError as error:
                of_mask = mask is not None and str(error).startswith(f"{printable(str(mask))}: ")
                self.errors.add(mask if of_mask else file.path, error)
        return placed if len(placed) == len(files.images) else None

    def _measure(
        self, placed: dict[str, Placed], mask: Path | None, readings: SetReadings, neighbours_only: bool
    ) -> None:
        self.constant += [image.file.path for image in placed.values() if image.constant]
        images = {kind: torch.from_numpy((image.image_DHW + 1) / 2) for kind, image in placed.items()}
        features = labels = None
        if self.features is not None:
            self.domain.add(self.features, [placed[kind] for kind in kinds_read(self.features, self.kinds)])
            labels, vectors = self.features.describe(self._input(self.features, placed))
            features, labels = vectors[0], labels[0]
        metrics, adherence = self.set_metrics, {}
        if neighbours_only:
            metrics = [metric for metric in metrics if "training" in metric.needs]
        else:
            readings.images.append(images)
            try:
                adherence = {} if self.segmenter is None else self._labels(placed, mask, labels)
            except InputError as error:
                self.errors.add(next(iter(placed.values())).file.path, error)
                return
        masked = adherence.pop("masked", {})
        inputs = {
            kind: VolumeInput(image=image, features=features, kind=kind, masked=masked.get(kind), **adherence)
            for kind, image in images.items()
        }
        row = measure_images(inputs, metrics)
        if self.feature_part and "features" in row:
            row["features"] = {self.feature_part: row["features"]}
        readings.rows.append(row)

    def _input(self, network: Segmenter, placed: dict[str, Placed]) -> Tensor:
        """The images that a network reads, (1, C, D, H, W)."""
        return torch.stack([torch.from_numpy(placed[kind].image_DHW) for kind in kinds_read(network, self.kinds)])[None]

    def _labels(self, placed: dict[str, Placed], mask: Path | None, labels_DHW: Tensor | None) -> dict[str, Any]:
        """The mask and the predicted labels on the segmenter's grid; neither without a mask."""
        assert self.segmenter is not None
        contract = self.segmenter.config.data
        values = {label.name: label.values for label in contract.labels}
        if mask is None:
            return {"classes": values}
        if self.segmenter is not self.features or not self.by_mask:  # around the labels, as in sampling
            assert self.labels_for is not None
            placed = {
                kind: read_placed(
                    placed[kind].file,
                    mask,
                    contract,
                    labels_for=self.labels_for,
                    masks=self.mask_reader,
                    references=self.references.get(placed[kind].file.subject, ()),
                )
                for kind in placed
            }
            self.domain.add(self.segmenter, [placed[kind] for kind in kinds_read(self.segmenter, self.kinds)])
            labels_DHW = self.segmenter.describe(self._input(self.segmenter, placed))[0][0]
        mask_DHW = next(iter(placed.values())).labels_DHW
        assert mask_DHW is not None and labels_DHW is not None
        return {
            "mask": torch.from_numpy(mask_DHW),
            "predicted": labels_DHW,
            "classes": values,
            "masked": {kind: torch.from_numpy((image.image_DHW + 1) / 2) for kind, image in placed.items()},
            "voxel_ml": math.prod(contract.spacing) / 1000,
            **roles_of(contract, values),
        }

    def _step(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total)
