"""voxtune train --workload segment: the small network that judges synthetic volumes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

from voxtune.cli.common import Output
from voxtune.errors import InputError

SIDE = 64
TAKES = {
    *("data.images", "data.masks", "data.cohort", "data.cohort_seed", "data.labels", "data.subjects"),
    *("model.workload", "model.base", "model.size", "steps", "batch", "learning_rate", "autocast", "seed", "minutes"),
}


def train_segment(settings: dict[str, Any], out: Path | None, device: str, output: Output) -> None:
    """Trains in one go, in minutes, so there is nothing to resume; prints Dice on held-out subjects."""
    from voxtune.runtime.segmentrun import run_segment
    from voxtune.runtime.segmenttrain import SegmentTraining

    unused = sorted(set(settings) - TAKES)
    if unused:
        raise InputError(f"{unused[0]}: training a segmenter has no such setting; leave it away")
    if out is None:
        raise InputError("where to? give a folder with -o DIR; a segmenter trains in one go, without --resume")
    if (out / "config.json").exists():
        raise InputError(f"{out}: holds a model already; choose another folder")
    plain = {
        k: settings[k] for k in ("steps", "batch", "learning_rate", "autocast", "seed", "minutes") if k in settings
    }
    training = SegmentTraining(**plain)
    train, held_out, data = _sources(settings)
    output.say(f"{len(train)} subjects to learn from, {len(held_out)} held out, on {device}")
    with output.progress("training", training.steps) as update:
        result = run_segment(
            train,
            held_out,
            training,
            out,
            data=data,
            command=shlex.join(["voxtune", *sys.argv[1:]]),
            base=settings.get("model.base"),
            device=device,
            progress=lambda step, loss: update(step, f"loss {loss:.4f}"),
        )
    for name, dice in result.dice.items():
        output.say(
            f"Dice {name}: {dice['mean']:.4f} (least {dice['least']:.4f}) on {dice['subjects']} held-out subjects"
        )
    output.say(f"Trained {result.steps} steps in {result.seconds:.0f} s. Segmenter: {result.folder}")
    output.result(result.to_json())


def _sources(settings: dict[str, Any]) -> tuple[Any, Any, str]:
    from voxtune.runtime.subjects import open_sources, unpack

    given = {name: settings.get(f"data.{name}") for name in ("cohort", "images", "masks")}
    names = ("data.subjects", "data.labels", "model.size", "data.cohort_seed")
    subjects, labels, size, seed = (settings.get(name) for name in names)
    if subjects is not None:
        if any(value is not None for value in (*given.values(), labels, size, seed)):
            raise InputError(
                "--subjects: leave --cohort and its seed, --images, --masks, --labels and --size away, the file has them"
            )
        train, held_out = unpack(subjects)
        return train, held_out, train.origin or f"{len(train)} packed subjects, {len(held_out)} more held out"
    return open_sources(tuple(size or (SIDE,) * 3), **given, seed=seed, labels=labels)
