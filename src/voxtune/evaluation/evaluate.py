"""`voxtune evaluate`: the metrics of folders of volumes.

Pairs are compared on their own grid; everything else is measured on a common grid, that of the feature network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxtune.data.labels import LabelMap
from voxtune.data.modality import kind_name, listed
from voxtune.evaluation.describe import EvaluationSets, Progress, Reader, SetReadings, grid_of, kinds_read
from voxtune.evaluation.judge import other_labels, other_names, weak_segmenter
from voxtune.files import recorded_path, recorded_text, write_file, write_json
from voxtune.marks import marked_markdown
from voxtune.quality.bootstrap import Bootstrap, metric_value
from voxtune.quality.metrics import (
    LABEL_MEASUREMENTS,
    NEEDS,
    NEIGHBOUR_MEASUREMENTS,
    VOXEL_NEIGHBOUR,
    Metric,
    Need,
    PairValues,
    SetMeasurements,
    choose_pairs,
    collect,
    metrics_for,
)
from voxtune.quality.per_volume import nearest
from voxtune.quality.result import Evaluation, Notes
from voxtune.segmentation.segmenter import Segmenter, load_segmenter, shipped_segmenter

# What a metric can need and an evaluation of folders can provide.
POSSIBLE: frozenset[Need] = frozenset({"partner", "pairs", "real", "features", "masks", "training"})


def evaluate(
    sets: EvaluationSets,
    *,
    features: Segmenter | None,
    segmenter: Segmenter | None,
    labels: LabelMap | None = None,
    settings: Bootstrap | None = None,
    max_pairs: int = 100,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Every metric that the sets allow, with its interval; `left_out` gives the reason for each of the others.

    `labels` is what the values of the masks mean, in names of the segmenter's labels.
    """
    settings = settings or Bootstrap()
    notes = Notes(warn)
    for line in sets.warnings:
        notes.warn(line)
    missing, contract = _missing(sets, features, segmenter), grid_of(features)
    unstated = segmenter is not None and labels is None and "masks" not in missing
    wrong = other_labels(_used_masks(sets), segmenter) if segmenter is not None and unstated else None
    if segmenter is not None and labels is not None and "masks" not in missing:
        wrong = other_names(labels, segmenter)
    if wrong is not None:
        missing["masks"], segmenter = wrong, None
    features = features if features is not None and kinds_read(features, sets.kinds) else None
    segmenter = segmenter if segmenter is not None and kinds_read(segmenter, sets.kinds) else None
    metrics = sorted(metrics_for(POSSIBLE), key=report_order)
    computed = [metric for metric in metrics if not metric.needs & missing.keys()]
    reader = Reader(sets, contract, features, segmenter, computed, progress, labels)
    synth, real = reader.read(sets.synth), reader.read(sets.real)
    training = None if sets.training is None else reader.read(sets.training, neighbours_only=True)
    partners = reader.read_pairs(sets.pairs)
    reader.errors.raise_all()
    for line in (*reader.geometry.lines(), *reader.domain.warnings()):
        notes.warn(line)
    for path in reader.constant:
        notes.warn(f"{path}: every voxel has the same value")
    generated, baseline = (
        part.measurements(choose_pairs(len(part.images), max_pairs, settings.seed), computed) for part in (synth, real)
    )
    paired = collect(list(partners.values()))
    generated.values.update(paired.values)
    generated.by_part.update(paired.by_part)
    nearest_files = _measure_neighbours(generated, baseline, synth, real, training)
    report = _Report(
        generated=generated,
        real=baseline,
        labels={} if segmenter is None else {label.name: label.values for label in segmenter.config.data.labels},
        neighbour="nearest reference volume (no --training)" if training is None else "nearest training volume",
        settings=settings,
        notes=notes,
    )
    for metric in metrics:
        reason = next((missing[need] for need in NEEDS if need in metric.needs and need in missing), None)
        if reason is None:
            report.add(metric)
        else:
            notes.leave_out(metric.name, reason)
        for kind in sets.kinds if reason is None and reader.feature_part and "features" in metric.needs else ():
            if kind != reader.feature_part and features is not None:
                notes.leave_out(metric.full_name(kind), _other_images(features, (kind,)))
    if segmenter is not None and "masks" not in missing:
        _warn_of_dice(sets, segmenter, notes)
    return Evaluation(
        metrics=tuple(notes.metrics),
        left_out=dict(notes.left_out),
        warnings=tuple(notes.warnings),
        counts={
            "real": len(sets.real),
            "synth": len(sets.synth),
            "training": None if sets.training is None else len(sets.training),
            "pairs": len(sets.pairs),
        },
        images=tuple(kind for kind in sets.kinds if kind),
        volumes=tuple(_rows(sets, generated, partners, nearest_files)),
        features=None if features is None else features.identity(),
        segmenter=None if segmenter is None else segmenter.identity(),
    )


def open_networks(
    features: Path | None, segmenter: Path | None, device: torch.device | str
) -> tuple[Segmenter | None, Segmenter | None]:
    """(feature network, segmenter): those given, else the one that ships."""
    shipped = None
    if (features is None or segmenter is None) and (shipped_segmenter() / "config.json").is_file():
        shipped = load_segmenter(shipped_segmenter(), device=device)
    network = shipped if features is None else load_segmenter(features, device=device)
    if segmenter is None:
        return network, shipped
    return network, network if segmenter == features else load_segmenter(segmenter, device=device)


def _warn_of_dice(sets: EvaluationSets, segmenter: Segmenter, notes: Notes) -> None:
    """Warns of what limits the meaning of Dice."""
    weak = weak_segmenter(notes.metrics, segmenter)
    if weak is not None:
        notes.warn(weak)
    unmasked = [f.path.name for f in sets.synth if f.subject not in (sets.masks or {})]
    if unmasked:
        notes.warn(f"{len(unmasked)} synthetic volumes have no mask and are not part of dice, such as {unmasked[0]}")


def _used_masks(sets: EvaluationSets) -> list[Path]:
    """The masks of the volumes that are compared."""
    masks = sets.masks or {}
    return [masks[file.subject] for file in (*sets.real, *sets.synth) if file.subject in masks]


def report_order(metric: Metric) -> int:
    """Metrics are reported by what they need; those with the same needs as in the registry."""
    return max(list(NEEDS).index(need) for need in metric.needs)


def _missing(sets: EvaluationSets, features: Segmenter | None, segmenter: Segmenter | None) -> dict[Need, str]:
    """What these sets and networks do not provide, and why."""
    missing: dict[Need, str] = {}
    if not sets.pairs:
        missing["partner"] = "no synthetic volume matches a reference volume by name"
    if features is None:
        missing["features"] = "no feature network; pass one with --features"
    if sets.masks is None:
        missing["masks"] = "no masks; pass their folder with --masks"
    elif segmenter is None:
        missing["masks"] = "no segmenter; pass one with --segmenter"
    networks: dict[Need, Segmenter | None] = {"features": features, "masks": segmenter}
    for need, network in networks.items():
        if need not in missing and network is not None and not kinds_read(network, sets.kinds):
            missing[need] = _other_images(network, sets.kinds)
    return missing


def _other_images(network: Segmenter, kinds: tuple[str, ...]) -> str:
    """Why a network does not apply to images of these kinds."""
    names = listed([kind_name(image) for image in network.config.data.images])
    images = f"not {listed(kinds)}" if any(kinds) else "and the file names state no kind"
    return f"{network.name} reads {names} images, {images}"


@dataclass(frozen=True, kw_only=True, eq=False)
class _Report:
    """Computes metrics with their intervals from the measurements of both sets."""

    generated: SetMeasurements
    real: SetMeasurements
    labels: dict[str, tuple[int, ...]]
    neighbour: str
    settings: Bootstrap
    notes: Notes

    def add(self, metric: Metric) -> None:
        for part in self._parts(metric):
            name = metric.full_name(part)
            values, real = self.generated.get(metric, part), self.real.get(metric, part)
            self._add(metric, name, part, values, real)
            # A size of lesions that no subject has is skipped once.
            absent = bool(metric.missing) and values is None and real is None
            if metric.real_note is not None and not absent:
                self._add(metric, f"{name}_real", part, real, real, of_real=True)

    def _parts(self, metric: Metric) -> Iterable[str]:
        if metric.per_label:
            return self.labels
        return metric.parts or self.generated.parts(metric)

    def _add(self, metric: Metric, name: str, part: str, values: Any, real: Any, *, of_real: bool = False) -> None:
        if values is not None and real is None and metric.uses_real:
            return  # NAME_real gives the reason
        reason = self._reason(metric, part, values, real)
        if reason is not None:
            self.notes.leave_out(name, reason)
            return
        if metric.per_label or metric.missing:
            values = values[~np.isnan(values)]
            real = real[~np.isnan(real)] if metric.sets == 2 else real
        parameter = None if metric.parameter is None else metric.parameter(values, real)
        note = (metric.real_note or "") if of_real else metric.note
        note = note.format(parameter=parameter, neighbour=self.neighbour, **_pair_counts(values))
        caution = "" if metric.caution is None else metric.caution(values, real)
        if caution and metric.warn:
            self.notes.warn(f"{name}: {caution}; compare only results with the same counts")
        resamples = min(self.settings.resamples, metric.max_resamples or self.settings.resamples)
        sizes = [_count(part) for part in (values, real)[: metric.sets]]
        better = {None: "", "closer": "closer to yardstick"}.get(metric.better, metric.better)
        self.notes.add(
            metric_value(
                name,
                metric.build(values, real, parameter),
                sizes,
                replace(self.settings, resamples=resamples),
                n=len(values) if metric.sets == 1 else None,
                centred=metric.centred == "always",
                minimum=metric.minimum,
                better="" if of_real else better,
                unit=metric.unit,
                note=caution or note,
            )
        )

    def _reason(self, metric: Metric, part: str, values: Any, real: Any) -> str | None:
        """Why the metric cannot be computed from these values; None if it can."""
        if values is None or (real is None and metric.sets == 2):
            return metric.missing or self._without_values(metric, part)
        if metric.sets == 2 and min(_count(values), _count(real)) < metric.min_volumes:
            return "requires at least two volumes in each set"
        if _count(values) < metric.min_volumes:
            return "requires at least two volumes"
        if metric.undefined and np.isnan(values).any():
            return metric.undefined
        return None

    def _without_values(self, metric: Metric, part: str) -> str:
        if not metric.per_label:
            return "a single reference volume has no other neighbour"
        values = "/".join(map(str, self.labels[part]))
        return f"no mask of these volumes contains label {values} ({part}) on this grid"


def _count(values: Any) -> int:
    """How many volumes a measurement was taken of."""
    return values.count if isinstance(values, PairValues) else len(values)


def _pair_counts(values: Any) -> dict[str, int]:
    if not isinstance(values, PairValues):
        return {}
    return {"pairs": len(values), "all_pairs": values.count * (values.count - 1) // 2}


def _measure_neighbours(
    generated: SetMeasurements,
    baseline: SetMeasurements,
    synth: SetReadings,
    real: SetReadings,
    training: SetReadings | None,
) -> dict[str, list[Path]]:
    """Adds the distance to the nearest training volume; returns the nearest by intensities of each synthetic volume, by kind.

    Without training volumes the real ones take their place. A real volume is not its own neighbour.
    """
    neighbours, candidates = (real, baseline) if training is None else (training, collect(training.rows))
    paths = [f.path.resolve() for f in neighbours.files]
    itself = [paths.index(p) if p in paths else None for p in (f.path.resolve() for f in real.files)]
    files: dict[str, list[Path]] = {}
    for name, measurement in NEIGHBOUR_MEASUREMENTS.items():
        for part in candidates.by_part.get(measurement) or ([""] if measurement in candidates.values else []):
            vectors = candidates.value(measurement, part)
            matches = nearest(generated.value(measurement, part), vectors)
            generated.put(name, part, np.array(matches.distance))
            if len(vectors) > 1 or itself[0] is None:
                distances = nearest(baseline.value(measurement, part), vectors, skip=itself).distance
                baseline.put(name, part, np.array(distances))
            if name == VOXEL_NEIGHBOUR:
                volumes = [neighbours.files[i] for i in matches.index]
                files[part] = [v.images[part].path if part else v.path for v in volumes]
    return files


def _rows(
    sets: EvaluationSets,
    generated: SetMeasurements,
    partners: dict[Path, dict[str, Any]],
    nearest_files: dict[str, list[Path]],
) -> list[dict[str, Any]]:
    """The measurements of each synthetic image; those of a whole volume are repeated for each of its images."""
    rows = []
    for number, volume in enumerate(sets.synth):
        dice: dict[str, Any] = {}
        for name in sorted(LABEL_MEASUREMENTS & generated.by_part.keys()):
            scores = {
                label: float(v[number]) for label, v in generated.by_part[name].items() if not np.isnan(v[number])
            }
            dice |= {name: scores} if scores else {}
        for kind, file in volume.images.items():
            part = kind if len(sets.kinds) > 1 else ""
            row: dict[str, Any] = {"file": str(file.path), "subject": file.subject}
            row |= {"image": kind} if part else {}
            for name, measured in partners.get(volume.path, {}).items():
                value = measured[part] if part else measured
                row[name] = value if np.isfinite(value) else None
            distance = float(generated.value(VOXEL_NEIGHBOUR, part)[number])
            rows.append(row | dice | {"nearest": str(nearest_files[part][number]), VOXEL_NEIGHBOUR: distance})
    return rows


def result_files(folder: Path) -> tuple[Path, Path]:
    return folder / "metrics.json", folder / "metrics.md"


def write_result(
    result: Evaluation,
    folder: Path,
    title: str,
    *,
    folders: Mapping[str, str | Path | None],
    overwrite: bool = False,
    **about: Any,
) -> tuple[Path, Path]:
    """Writes metrics.json and metrics.md to `folder`; `about`: further entries, such as options.

    `folders` are those of the volumes; files are named relative to them.
    """
    files = result_files(folder)
    recorded = without_paths(result, folders)
    write_json(files[0], recorded.to_json(folders=recorded_folders(folders), **about), overwrite=overwrite)
    write_file(files[1], marked_markdown(recorded.markdown(title)), overwrite=overwrite)
    return files


def recorded_folders(folders: Mapping[str, str | Path | None]) -> dict[str, str | None]:
    return {name: None if path is None else recorded_path(path) for name, path in folders.items()}


def without_paths(result: Evaluation, folders: Mapping[str, str | Path | None]) -> Evaluation:
    """The result with files named relative to the folder that they are in."""
    roots = [Path(path) for path in folders.values() if path is not None]

    def named(file: str) -> str:
        root = next((root for root in roots if Path(file).is_relative_to(root)), None)
        return recorded_path(file, inside=root)

    return replace(
        result,
        warnings=tuple(recorded_text(text, roots) for text in result.warnings),
        left_out={name: recorded_text(text, roots) for name, text in result.left_out.items()},
        volumes=tuple(row | {key: named(row[key]) for key in ("file", "nearest")} for row in result.volumes),
    )
