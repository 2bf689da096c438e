"""`train`, `evaluate` and `view`: the commands of these names as functions, with their options as keywords.

Values are checked before any work; a wrong one raises `InputError`. Relative paths start at the working directory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from voxtune.config import check_values
from voxtune.data.labels import parse_labels
from voxtune.data.modality import parse_images
from voxtune.errors import InputError
from voxtune.evaluation.describe import find_sets
from voxtune.evaluation.evaluate import evaluate as evaluate_sets
from voxtune.evaluation.evaluate import open_networks, result_files, write_result
from voxtune.files import check_output_path, check_outputs, checked_path, recorded_path
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.result import Evaluation
from voxtune.report.view import view_page
from voxtune.runtime.model import check_progress, checked_device
from voxtune.training.folder import read_run
from voxtune.training.loop import TrainResult
from voxtune.training.loop import train as run_training
from voxtune.training.model import new_run
from voxtune.training.overview import Overview

log = logging.getLogger("voxtune")

PathLike = str | os.PathLike[str]


def train(
    *,
    out: PathLike | None = None,
    images: PathLike | None = None,
    masks: PathLike | None = None,
    labels: str | None = None,
    overlapping_labels: bool = False,
    image: str | Sequence[str] | None = None,
    subjects: PathLike | None = None,
    cohort: int | None = None,
    workload: str | None = None,
    init: PathLike | None = None,
    size: Sequence[int] | None = None,
    base: int | None = None,
    multipliers: Sequence[float] | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    minutes: float | None = None,
    batch: int | None = None,
    accumulation: int | None = None,
    learning_rate: float | None = None,
    warmup: int | None = None,
    decay: Literal["none", "cosine"] | None = None,
    loss: Literal["l1", "l2"] | None = None,
    precision: Literal["auto", "fp32", "tf32", "bf16"] | None = None,
    plan: Literal["auto", "baseline", "compile", "voxtune"] | None = None,
    memory_budget: str | None = None,
    auto_fit: bool = False,
    autocast: Literal["none", "bf16", "fp16"] | None = None,
    seed: int | None = None,
    cache: str | None = None,
    deterministic: bool = False,
    checkpoint_every: int | None = None,
    sample_every: int | None = None,
    settings: Mapping[str, Any] | None = None,
    config: PathLike | None = None,
    resume: PathLike | None = None,
    overwrite: bool = False,
    device: torch.device | str = "auto",
    progress: Callable[[int, int, float], None] | None = None,
    stop: Callable[[], bool] | None = None,
) -> TrainResult:
    """Trains a model into the run folder `out`, as `voxtune train` does with the options of these names.

    `labels` says what the values of the masks mean, such as "tumour=1,4; oedema=2; brain=image" or "brats2021". `image` names
    the kinds of the images, such as "T2w", "t1,t1ce,t2,flair" or ["t1", "t2"]. `settings` are further settings by name, such as
    `{"ema_decay": 0.999}` (`--set`). `config` is a YAML or JSON file; keywords override it. `resume` is the folder of a
    run to continue, in place of `out`; `overwrite` replaces an earlier run in `out`. `progress(step, steps, loss)` is called
    after every step; the run ends early, with a checkpoint, once `stop()` returns True. Warnings are logged. Load the model
    with `voxtune.load(result.model)`.

    A script that torchrun started trains in all of its processes; `progress` is called and files are written in process 0.

    There is no dry run in Python: `voxtune train --dry-run` prints what would be trained and writes nothing. Here the same
    lines are logged before the first step.
    """
    if workload == "segment":
        raise InputError("workload 'segment': train segmenters with the command voxtune train --workload segment")
    check_values(
        train,
        overlapping_labels=overlapping_labels,
        deterministic=deterministic,
        overwrite=overwrite,
        auto_fit=auto_fit,
    )
    for name, function in {"progress": progress, "stop": stop}.items():
        if function is not None and not callable(function):
            raise InputError(f"{name}: expected a function, got {type(function).__name__}")
    paths = {"data.images": images, "data.masks": masks, "data.subjects": subjects, "model.init": init}
    values: dict[str, Any] = {name: _absolute(path, name.partition(".")[2]) for name, path in paths.items()}
    values |= {"data.cohort": cohort, "model.workload": workload, "model.size": size, "model.base": base}
    values |= {"epochs": epochs, "memory_budget": memory_budget, "cache": cache, "deterministic": deterministic or None}
    values |= {"model.multipliers": multipliers, "steps": steps, "minutes": minutes, "batch": batch}
    values |= {"accumulation": accumulation, "learning_rate": learning_rate, "warmup": warmup, "decay": decay}
    values |= {"loss": loss, "precision": precision, "plan": plan, "autocast": autocast, "seed": seed}
    values |= {"checkpoint_every": checkpoint_every}
    # The settings of a run do not depend on a file of labels.
    values |= {"data.label_map": None if labels is None else str(parse_labels(labels))}
    values |= {"data.overlapping": overlapping_labels or None}
    values |= {"sample_every": sample_every, "data.modalities": None if image is None else parse_images(image)}
    if settings is not None and not isinstance(settings, Mapping):
        raise InputError(f"settings: expected a mapping of names to values, got {type(settings).__name__}")
    given = {name: value for name, value in values.items() if value is not None} | dict(settings or {})
    target = checked_device(device)
    if out is None and resume is None:
        raise InputError("missing output folder: pass out=, or resume= to continue a run")
    if resume is not None and (out is not None or config is not None or overwrite):
        raise InputError("resume cannot be combined with out, config or overwrite; the run folder holds the settings")
    folder = checked_path(resume, "resume") if out is None else checked_path(out, "out")  # type: ignore[arg-type]
    if resume is not None:
        chosen = read_run(folder, given)
    else:
        chosen, note = new_run(_path(config, "config"), given, "train")
        if note:
            log.info(note)
    return run_training(
        chosen,
        None,
        folder,
        progress,
        device=target,
        resume=resume is not None,
        overwrite=overwrite,
        stop=stop,
        warn=log.warning,
        report=_overview_log(),
        say=log.info,
        auto_fit=auto_fit,
    )


def evaluate(
    reference: PathLike,
    synthetic: PathLike,
    *,
    masks: PathLike | None = None,
    labels: str | None = None,
    training: PathLike | None = None,
    image: str | None = None,
    features: PathLike | None = None,
    segmenter: PathLike | None = None,
    resamples: int = 1000,
    seed: int = 0,
    max_pairs: int = 100,
    out: PathLike | None = None,
    overwrite: bool = False,
    device: torch.device | str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Compares a folder of synthetic volumes with a folder of reference volumes, as `voxtune evaluate` does.

    Volumes are matched by file name. `masks` (the masks that the synthetic volumes were generated from) enables Dice;
    `labels` is what their values mean, as in `train`, in names of the segmenter's labels;
    `training` is the folder of the training volumes for memorisation; `image` selects an image type. `features` and
    `segmenter` are segmenter folders, by default the one that is included. With `out`, metrics.json and metrics.md are
    written to that folder. `result["psnr"]` is one metric with its confidence interval; printing the result shows all.
    """
    label_map = None if labels is None else parse_labels(labels)
    check_values(evaluate, image=image, resamples=resamples, seed=seed, max_pairs=max_pairs, overwrite=overwrite)
    if max_pairs < 1:
        raise InputError(f"max_pairs {max_pairs}: must be at least 1")
    check_progress(progress)
    real, synth = checked_path(reference, "reference"), checked_path(synthetic, "synthetic")
    bootstrap, target = Bootstrap(resamples=resamples, seed=seed), checked_device(device)
    folder = _path(out, "out")
    if folder is not None:
        check_outputs(result_files(folder), overwrite=overwrite)
    folders = {"real": real, "synth": synth, "masks": _path(masks, "masks"), "training": _path(training, "training")}
    sets = find_sets(real, synth, folders["masks"], folders["training"], image)
    feature_network, judge = open_networks(_path(features, "features"), _path(segmenter, "segmenter"), target)
    result = evaluate_sets(
        sets,
        features=feature_network,
        segmenter=judge,
        labels=label_map,
        settings=bootstrap,
        max_pairs=max_pairs,
        progress=progress,
        warn=log.warning,
    )
    if folder is not None:
        title = f"{recorded_path(synth)} compared with {recorded_path(real)}"
        write_result(result, folder, title, folders=folders, overwrite=overwrite, max_pairs=max_pairs)
    return result


def view(
    folder: PathLike,
    out: PathLike = "view.html",
    *,
    real: PathLike | None = None,
    masks: PathLike | None = None,
    metrics: PathLike | None = None,
    labels: PathLike | None = None,
    limit: int | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes an offline HTML page of the volumes below `folder`, as `voxtune view` does, and returns its path.

    `real` is a folder of volumes for comparison, matched by name; `masks` a folder of masks, by default those beside the
    volumes or named in their sidecars; `metrics` a metrics.json; `labels` a dseg.tsv or a model folder with the names of the
    labels; `limit` the maximum number of cases. Warnings are logged.
    """
    check_values(view, limit=limit, overwrite=overwrite)
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: must be at least 1")
    page = checked_path(out, "out")
    if page.suffix.lower() != ".html":
        raise InputError(f"{page}: the name must end in .html, such as view.html")
    check_output_path(page, overwrite)
    paths = {"real": real, "masks": masks, "metrics": metrics, "labels": labels}
    options = {name: _path(path, name) for name, path in paths.items()}
    written = view_page(checked_path(folder, "folder"), page, limit=limit, overwrite=overwrite, **options)
    for warning in written.warnings:
        log.warning(warning)
    return written.path


def _overview_log() -> Callable[[Overview], None]:
    """Logs the lines of an overview that were not logged before: it is complete only after the first steps."""
    logged: set[str] = set()

    def report(facts: Overview) -> None:
        for line in facts.lines():
            if line not in logged:
                logged.add(line)
                log.info(line)

    return report


def _path(path: PathLike | None, name: str) -> Path | None:
    return None if path is None else checked_path(path, name)


def _absolute(path: PathLike | None, name: str) -> str | None:
    return None if path is None else str(checked_path(path, name).absolute())
