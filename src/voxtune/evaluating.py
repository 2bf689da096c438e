"""Between folders of volumes and the metrics: `voxtune evaluate`.

Everything but pairs is measured on one common grid, that of the feature network; pairs on their own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.data.cohort import cohort_contract
from voxtune.data.contract import DataContract
from voxtune.data.volumeset import (
    Faults,
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
from voxtune.files import write_whole
from voxtune.quality.bootstrap import Bootstrap, figure, mean_figure
from voxtune.quality.distributions import (
    fid_statistic,
    histogram,
    jensen_shannon_statistic,
    mean_over_pairs,
    median_distance,
    mmd_statistic,
    wasserstein_statistic,
)
from voxtune.quality.neighbours import Nearest, copies, nearest
from voxtune.quality.overlap import dice
from voxtune.quality.result import Evaluation, Notes
from voxtune.quality.similarity import WINDOW, ms_ssim, psnr
from voxtune.runtime.segmenter import Segmenter

# Where no network says otherwise: 192 mm in 64 voxels a side.
GRID = cohort_contract((64, 64, 64))
# Each resample of the Frechet distance takes two eigendecompositions.
FID_RESAMPLES = 200

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
    reals, synths = find_images(real, image), find_images(synth, image, drawn=True)
    trained = None if training is None else find_images(training, image)
    check_modalities([reals, synths, trained or []])
    found = None if masks is None else find_masks(masks)
    if found is not None and not any(f.subject in found for f in synths):
        raise InputError(f"{masks}: no mask has the name of a synthetic volume, such as {synths[0].path.name}")
    return Sets(real=reals, synth=synths, training=trained, masks=found, pairs=pair_by_subject(reals, synths))


def evaluate(
    sets: Sets,
    *,
    features: Segmenter | None,
    segmenter: Segmenter | None,
    settings: Bootstrap | None = None,
    max_pairs: int = 100,
    progress: Progress | None = None,
    warn: Callable[[str], None] = lambda text: None,
) -> Evaluation:
    """Every figure that the sets allow, with its interval; what they do not allow is named with its reason."""
    settings = settings or Bootstrap()
    notes = Notes(warn)
    for network in (features, segmenter):
        if network is not None and len(network.config.data.images) != 1:
            raise InputError(f"{network.path}: takes {len(network.config.data.images)} images; an evaluation has one")
    reader = Reader(sets, features, segmenter, progress)
    synth, real = reader.read(sets.synth), reader.read(sets.real)
    training = None if sets.training is None else reader.read(sets.training, judged=False)
    pair_rows = reader.read_pairs(sets.pairs)
    reader.faults.raise_all()
    for path in reader.constant:
        notes.warn(f"{path}: every voxel has the same value")
    _pair_figures(pair_rows, settings, notes)
    _diversity(synth, real, settings, max_pairs, notes)
    _histograms(synth, real, settings, notes)
    _feature_figures(synth, real, features, settings, notes)
    _adherence(synth, real, sets, segmenter, settings, notes)
    neighbours = _memorisation(synth, real, training, features, settings, notes)
    return Evaluation(
        figures=tuple(notes.figures),
        left_out=dict(notes.left_out),
        warnings=tuple(notes.warnings),
        counts={
            "real": len(sets.real),
            "synth": len(sets.synth),
            "training": None if sets.training is None else len(sets.training),
            "pairs": len(sets.pairs),
        },
        volumes=tuple(_rows(sets, synth, pair_rows, neighbours)),
        features=None if features is None else features.identity(),
        segmenter=None if segmenter is None else segmenter.identity(),
    )


class Reader:
    """Reads volumes one at a time and keeps what the metrics need; gathers what is wrong with files."""

    def __init__(self, sets: Sets, features: Segmenter | None, segmenter: Segmenter | None, progress: Progress | None):
        self.masks = sets.masks or {}
        # All sets are placed alike: around their labels where every volume has some, else around their middles.
        self.by_mask = sets.training is None and all(f.subject in self.masks for f in (*sets.real, *sets.synth))
        self.features, self.segmenter, self.progress = features, segmenter, progress
        self.faults = Faults()
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


def _pair_figures(rows: dict[Path, tuple[float, float]], settings: Bootstrap, notes: Notes) -> None:
    if not rows:
        notes.leave_out("psnr", "no synthetic volume has the name of a real one")
        notes.leave_out("ms_ssim", "no synthetic volume has the name of a real one")
        return
    psnrs, similar = zip(*rows.values(), strict=True)
    note = "infinite: a synthetic volume equals its real partner" if not np.isfinite(psnrs).all() else ""
    notes.add(mean_figure("psnr", psnrs, settings, unit="dB", better="higher", note=note))
    if np.isnan(similar).any():
        notes.leave_out("ms_ssim", f"a pair has a side of fewer than {WINDOW} voxels, which its windows need")
    else:
        notes.add(mean_figure("ms_ssim", similar, settings, better="higher"))


def _diversity(synth: Described, real: Described, settings: Bootstrap, max_pairs: int, notes: Notes) -> None:
    for name, group in (("diversity", synth), ("diversity_real", real)):
        count = len(group.images)
        if count < 2:
            notes.leave_out(name, "needs at least two volumes")
            continue
        chosen = chosen_pairs(count, max_pairs, settings.seed)
        values, known = np.zeros((count, count)), np.zeros((count, count))
        for i, j in chosen:
            values[i, j] = ms_ssim(group.images[i], group.images[j])
            known[i, j] = 1
        notes.add(
            figure(
                name,
                lambda counts, v=values, k=known: mean_over_pairs(v, counts, k),
                [count],
                settings,
                n=len(chosen),
                better="closer to yardstick" if group is synth else "",
                note=f"MS-SSIM of {len(chosen)} of {count * (count - 1) // 2} pairs; lower is more diverse",
            )
        )


def chosen_pairs(count: int, most: int, seed: int) -> list[tuple[int, int]]:
    """All pairs of `count` volumes, or `most` of them at random."""
    pairs = list(itertools.combinations(range(count), 2))
    if len(pairs) <= most:
        return pairs
    picks = np.random.Generator(np.random.Philox(seed)).choice(len(pairs), most, replace=False)
    return [pairs[i] for i in sorted(picks)]


def _histograms(synth: Described, real: Described, settings: Bootstrap, notes: Notes) -> None:
    a, b = np.stack(synth.histograms), np.stack(real.histograms)
    sizes = [len(a), len(b)]
    w1, js = wasserstein_statistic(a, b), jensen_shannon_statistic(a, b)
    notes.add(figure("histogram_w1", w1, sizes, settings, better="lower", note="in units of the intensity range"))
    notes.add(figure("histogram_js", js, sizes, settings, better="lower", unit="bit"))


def _feature_figures(
    synth: Described, real: Described, network: Segmenter | None, settings: Bootstrap, notes: Notes
) -> None:
    sizes = [len(synth.files), len(real.files)]
    if network is None or min(sizes) < 2:
        why = "no feature network: give one with --features" if network is None else "needs two volumes of each set"
        notes.leave_out("fid", why)
        notes.leave_out("mmd", why)
        return
    a, b = torch.stack(synth.features), torch.stack(real.features)
    few, dimension, note = min(sizes), a.shape[1], ""
    if few <= dimension:
        note = f"{few} volumes for {dimension} features: the covariance is singular and the distance biased upwards"
        notes.warn(f"fid: {note}; compare only results of the same counts")
    fewer = Bootstrap(resamples=min(settings.resamples, FID_RESAMPLES), seed=settings.seed, level=settings.level)
    notes.add(figure("fid", fid_statistic(a, b), sizes, fewer, centred=True, floor=0.0, better="lower", note=note))
    width = median_distance(a, b)
    note = f"squared, unbiased, Gaussian kernel of width {width:.4g} (median distance)"
    notes.add(figure("mmd", mmd_statistic(a, b, width), sizes, settings, better="lower", note=note))


def _adherence(
    synth: Described, real: Described, sets: Sets, segmenter: Segmenter | None, settings: Bootstrap, notes: Notes
) -> None:
    if segmenter is None or sets.masks is None:
        why = (
            "no masks: give their folder with --masks"
            if sets.masks is None
            else "no segmenter: give one with --segmenter"
        )
        notes.leave_out("dice", why)
        return
    lacking = [f.path.name for f in sets.synth if f.subject not in sets.masks]
    if lacking:
        notes.warn(f"{len(lacking)} synthetic volumes have no mask and do not count in dice, such as {lacking[0]}")
    for label in segmenter.config.data.labels:
        for suffix, group in (("", synth), ("_real", real)):
            name = f"dice_{label.name.replace(' ', '_')}{suffix}"
            scores = [row[label.name] for row in group.dices if label.name in row]
            if not scores:
                notes.leave_out(name, f"no mask of these volumes holds label {label.value} ({label.name}) on this grid")
                continue
            better = "" if suffix else "higher"
            note = "the segmenter's own limit, on real volumes" if suffix else ""
            notes.add(mean_figure(name, scores, settings, better=better, note=note))


def _memorisation(
    synth: Described,
    real: Described,
    training: Described | None,
    network: Segmenter | None,
    settings: Bootstrap,
    notes: Notes,
) -> list[tuple[VolumeFile, float]]:
    """For each synthetic volume, the nearest training volume by intensities and its distance."""
    trained = real if training is None else training
    origin = "nearest real volume (no --training)" if training is None else "nearest training volume"
    paths = [f.path.resolve() for f in trained.files]
    itself = [paths.index(p) if p in paths else None for p in (f.path.resolve() for f in real.files)]
    kinds = [("voxel", "coarse")] + ([("feature", "features")] if network is not None else [])
    by_voxel: list[tuple[VolumeFile, float]] = []
    for kind, part in kinds:
        asked, held, known = (torch.stack(getattr(group, part)) for group in (synth, real, trained))
        found = nearest(asked, known)
        note = f"RMS difference of {'intensities' if kind == 'voxel' else 'features'}, {origin}"
        notes.add(mean_figure(f"nearest_{kind}", found.distance, settings, better="closer to yardstick", note=note))
        if kind == "voxel":
            by_voxel = [(trained.files[i], d) for i, d in zip(found.index, found.distance, strict=True)]
        if len(known) > 1 or itself[0] is None:
            _yardstick(kind, found, nearest(held, known, skip=itself), settings, notes)
        else:
            notes.leave_out(f"nearest_{kind}_real", "one real volume has no neighbour but itself")
    return by_voxel


def _yardstick(kind: str, found: Nearest, unseen: Nearest, settings: Bootstrap, notes: Notes) -> None:
    near, far = np.asarray(found.distance), np.asarray(unseen.distance)
    sizes = [len(near), len(far)]
    notes.add(
        mean_figure(f"nearest_{kind}_real", unseen.distance, settings, note="the same for real volumes, left out")
    )
    notes.add(
        figure(
            f"nearest_{kind}_ratio",
            lambda a, b: float((a @ near / a.sum()) / (b @ far / b.sum())) if far.any() else float("nan"),
            sizes,
            settings,
            note="synthetic over real; well below 1 means copies",
        )
    )
    below = copies(found.distance, unseen.distance)
    notes.add(
        mean_figure(
            f"nearest_{kind}_copies",
            below,
            settings,
            better="lower",
            note="share nearer than half the least distance of a real volume",
        )
    )


def _rows(
    sets: Sets,
    synth: Described,
    pairs: dict[Path, tuple[float, float]],
    neighbours: Sequence[tuple[VolumeFile, float]],
) -> list[dict[str, Any]]:
    """What is known of each synthetic volume alone."""
    rows = []
    for number, file in enumerate(sets.synth):
        row: dict[str, Any] = {"file": str(file.path), "subject": file.subject}
        if file.path in pairs:
            value, similar = pairs[file.path]
            row |= {"psnr": value if np.isfinite(value) else None, "ms_ssim": None if np.isnan(similar) else similar}
        if synth.dices and synth.dices[number]:
            row["dice"] = synth.dices[number]
        near, distance = neighbours[number]
        rows.append(row | {"nearest": str(near.path), "nearest_voxel": distance})
    return rows


def write_result(result: Evaluation, folder: Path, title: str, **about: Any) -> tuple[Path, Path]:
    """metrics.json and metrics.md in `folder`; `about` is what the caller knows besides: folders, options."""
    files = folder / "metrics.json", folder / "metrics.md"
    data = json.dumps(result.to_json(**about), indent=2, allow_nan=False) + "\n"
    write_whole(files[0], data.encode())
    write_whole(files[1], result.markdown(title).encode())
    return files


def grid_of(features: Segmenter | None) -> DataContract:
    """The common grid of an evaluation with this feature network."""
    return GRID if features is None else features.config.data
