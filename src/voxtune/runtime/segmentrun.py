"""A segmenter from subjects to a folder: trained, measured on subjects it never saw, written with its card."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from voxtune.data.contract import Shape
from voxtune.errors import InputError
from voxtune.runtime.segmentdata import cohort_origin, cohort_sources, pack, unpack
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


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m voxtune.runtime.segmentrun`: subjects into one file here, training from it where little is installed."""
    asked = _parser().parse_args(arguments)
    try:
        return _pack(asked) if asked.verb == "pack" else _train(asked, arguments)
    except InputError as error:
        print(f"voxtune: error: {error}", file=sys.stderr)  # noqa: T201
        return 2


def _pack(asked: argparse.Namespace) -> int:
    side: Shape = (asked.size,) * 3
    train, held_out = cohort_sources(side, asked.seed, asked.cohort, asked.held_out)
    path = pack(train, held_out, asked.out, origin=cohort_origin(asked.seed, asked.cohort, asked.held_out))
    _say(f"wrote {len(train)} + {len(held_out)} subjects to {path}, {path.stat().st_size / 2**20:.1f} MiB")
    return 0


def _train(asked: argparse.Namespace, arguments: Sequence[str] | None) -> int:
    train, held_out = unpack(asked.subjects)
    training = SegmentTraining(
        steps=asked.steps,
        batch=asked.batch,
        learning_rate=asked.learning_rate,
        autocast=asked.autocast,
        seed=asked.seed,
        minutes=asked.minutes,
    )
    given = " ".join(sys.argv[1:] if arguments is None else arguments)
    result = run_segment(
        train,
        held_out,
        training,
        asked.out,
        data=train.origin or f"{len(train)} packed subjects, {len(held_out)} more held out",
        command=f"python -m voxtune.runtime.segmentrun {given}",
        base=asked.base,
        device=asked.device,
        progress=lambda step, loss: _say(f"step {step}, loss {loss:.4f}") if step % 50 == 0 else None,
    )
    _say(f"{result.steps} steps in {result.seconds:.0f} s, {result.folder}: {result.dice}")
    return 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m voxtune.runtime.segmentrun")
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="subjects of the embedded cohort into one file")
    packing.add_argument("--cohort", type=int, default=240)
    packing.add_argument("--held-out", type=int, default=24)
    packing.add_argument("--size", type=int, default=64)
    packing.add_argument("--seed", type=int, default=0)
    packing.add_argument("-o", "--out", required=True)
    training = verbs.add_parser("train", help="from such a file; needs torch and numpy alone")
    training.add_argument("subjects")
    training.add_argument("-o", "--out", required=True)
    training.add_argument("--steps", type=int, default=SegmentTraining.steps)
    training.add_argument("--batch", type=int, default=SegmentTraining.batch)
    training.add_argument("--learning-rate", type=float, default=SegmentTraining.learning_rate)
    training.add_argument("--autocast", default="none")
    training.add_argument("--minutes", type=float)
    training.add_argument("--base", type=int)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--device", default="cpu")
    return parser


if __name__ == "__main__":
    sys.exit(main())
