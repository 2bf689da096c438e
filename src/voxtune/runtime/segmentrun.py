"""A segmenter from subjects to a folder: trained, measured on subjects it never saw, written with its card."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from voxtune.errors import InputError
from voxtune.runtime.segmenter import Segmenter, save_segmenter
from voxtune.runtime.segmenttrain import SegmentTraining, held_out_dice, train_segmenter
from voxtune.workloads.segment import SegmentConfig


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """`dice` holds mean, least and count over held-out subjects, by label."""

    folder: Path
    seconds: float
    steps: int
    dice: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder)}


def run_segment(
    train: Any,
    held_out: Any,
    training: SegmentTraining,
    out: str | Path,
    *,
    data: str,
    command: str,
    base: int | None = None,
    device: str = "cpu",
    progress: Callable[[int, float], None] | None = None,
) -> SegmentResult:
    """Trains on `train`, measures on `held_out`, writes the folder `out`; `data` says in words what it was trained on."""
    out = Path(out)
    if (out / "config.json").exists():
        raise InputError(f"{out}: holds a model already; choose another folder")
    contract, started, taken = train.contract, time.perf_counter(), [0]

    def told(step: int, loss: float) -> None:
        taken[0] = step
        if progress is not None:
            progress(step, loss)

    network = SegmentConfig(in_channels=len(contract.images), classes=len(contract.labels) + 1, base=base or 16)
    segmenter = train_segmenter(train, training, network=network, device=device, progress=told)
    seconds = time.perf_counter() - started
    dice = summary(held_out_dice(segmenter, held_out))
    save_segmenter(segmenter, out, card=card(segmenter, training, taken[0], seconds, data, command, dice))
    return SegmentResult(folder=out, seconds=round(seconds, 1), steps=taken[0], dice=dice)


def summary(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    names = sorted({name for row in rows for name in row})
    scores = {name: [row[name] for row in rows if name in row] for name in names}
    return {name: {"mean": statistics.fmean(s), "least": min(s), "subjects": len(s)} for name, s in scores.items()}


def card(
    segmenter: Segmenter,
    training: SegmentTraining,
    steps: int,
    seconds: float,
    data: str,
    command: str,
    dice: dict[str, dict[str, float]],
) -> str:
    """The model card: what it is, how it was made, how good it is, what it is not for."""
    contract, network = segmenter.config.data, segmenter.config.network
    parameters = sum(p.numel() for p in segmenter.network.parameters())
    size, spacing = " x ".join(map(str, contract.size)), " x ".join(f"{s:g}" for s in contract.spacing)
    device = "CPU" if segmenter.device.type == "cpu" else torch.cuda.get_device_name(segmenter.device)
    low = f", {training.autocast.upper()} autocast" if training.autocast != "none" else ""
    lines = [
        "---",
        "library_name: voxtune",
        "license: apache-2.0",
        "tags: [segmentation, unet, mri]",
        "---",
        "# The segmenter",
        "",
        "Labels the structures of a volume, and describes it by the means of its bottleneck. `voxtune evaluate` judges mask",
        "adherence by its labels, and FID, MMD and nearest neighbours by its features.",
        "",
        f"- Network: 3D U-Net, {parameters:,} parameters (base {network.base}, {network.levels} levels), "
        f"{network.features} features.",
        f"- Takes: {', '.join(contract.images)} on {size} voxels of {spacing} mm, {contract.orientation}, intensities to "
        "[-1, 1] by the volume's extremes.",
        f"- Labels: {contract.describe_labels()}.",
        f"- Data: {data}.",
        f"- Recipe: AdamW, one-cycle rate up to {training.learning_rate:g}, cross-entropy + soft Dice, batch "
        f"{training.batch}, {steps} steps{low}, intensities varied, seed {training.seed}; {seconds / 60:.1f} minutes on "
        f"{device}.",
        "",
        "| label | Dice on held-out subjects, mean | least | subjects |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {d['mean']:.4f} | {d['least']:.4f} | {d['subjects']} |" for name, d in dice.items()),
        "",
        "```",
        command,
        "```",
        "",
        "## Limits",
        "It knows what it was trained on: other anatomy, contrast or scanners need a segmenter of their own. Figures over its",
        "features are comparable only between results that name the same file hash. For research: not a medical device, not",
        "for diagnosis, treatment or any clinical decision.",
        "",
    ]
    return "\n".join(lines)
