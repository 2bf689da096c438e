"""Between folders of volumes and the metrics: `voxtune evaluate`.

Everything but pairs is measured on one common grid, that of the feature network; pairs on their own.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxtune.data.volumeset import VolumeFile
from voxtune.errors import InputError
from voxtune.evaluation.describe import Described, Progress, Reader, Sets
from voxtune.files import write_atomic
from voxtune.quality.bootstrap import Bootstrap, figure, mean_figure
from voxtune.quality.distributions import (
    fid_statistic,
    jensen_shannon_statistic,
    mean_over_pairs,
    median_distance,
    mmd_statistic,
    wasserstein_statistic,
)
from voxtune.quality.per_volume import Nearest, copies, nearest
from voxtune.quality.result import Evaluation, Notes
from voxtune.quality.similarity import WINDOW, ms_ssim
from voxtune.segmentation.segmenter import Segmenter

# Each resample of the Frechet distance takes two eigendecompositions.
FID_RESAMPLES = 200


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
    write_atomic(files[0], data.encode())
    write_atomic(files[1], result.markdown(title).encode())
    return files
