"""Training of the segmenter; takes minutes on a CPU."""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.data.contract import DataContract, classes_of, encode_channels
from voxtune.data.subjects import Source
from voxtune.data.training_data import TrainingData
from voxtune.errors import InputError
from voxtune.files import locked_folder
from voxtune.quality.tissue import SIZES, LesionScore, by_size, lesion_scores
from voxtune.runtime.storage import check_model_folder
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, save_segmenter
from voxtune.training.data import Loader, read_item
from voxtune.training.overview import TIMED_STEPS, Overview, overview
from voxtune.workloads.segment import SegmentConfig, SegmentUNet

log = logging.getLogger("voxtune")

WARM_UP = 0.1
# From this size of the shortest side on, the network has a level more.
LARGE = 128


@dataclass(frozen=True, kw_only=True)
class SegmentTraining:
    """The recipe: AdamW, one-cycle learning rate, cross-entropy plus soft Dice, random intensity augmentation."""

    steps: int = 700
    batch: int = 4
    learning_rate: float = 3e-3
    weight_decay: float = 1e-4
    autocast: Literal["none", "bf16"] = "none"
    seed: int = 0
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1 or self.seed < 0:
            raise InputError(
                f"steps {self.steps}, batch {self.batch}, seed {self.seed}: steps and batch must be >= 1, seed >= 0"
            )
        if not 0 < self.learning_rate < 1:
            raise InputError(f"learning_rate {self.learning_rate}: must be above 0 and below 1")
        if self.autocast not in ("none", "bf16"):
            raise InputError(f"unknown autocast {self.autocast!r}; choose from none, bf16")
        if self.minutes is not None and not self.minutes > 0:
            raise InputError(f"minutes {self.minutes}: must be above 0")


def train_segmenter(
    source: Any,
    training: SegmentTraining,
    *,
    network: SegmentConfig | None = None,
    device: torch.device | str = "cpu",
    workers: int | None = None,
    progress: Callable[[int, float], None] | None = None,
    training_data: TrainingData | None = None,
) -> Segmenter:
    """A segmenter for the contract of `source`. With `minutes`, training ends after that time, with the decay completed.

    `workers` threads load subjects in advance; by default none on a CPU, where they would compete with the network.
    `training_data` are statistics of `source` for the segmenter's config.
    """
    contract, device = source.contract, torch.device(device)
    shape = network or _network(contract, None)
    config = SegmenterConfig(network=shape, data=contract, training_data=training_data)
    gpus = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus):
        torch.manual_seed(training.seed)
        model = SegmentUNet(config.network).to(device, memory_format=torch.channels_last_3d)  # type: ignore[call-overload]
        threads = (0 if device.type == "cpu" else 4) if workers is None else workers
        _fit(model, source, contract, training, device, threads, progress)
    return Segmenter(config, model.to(memory_format=torch.contiguous_format))


def _fit(
    model: SegmentUNet,
    source: Source,
    contract: DataContract,
    training: SegmentTraining,
    device: torch.device,
    workers: int,
    progress: Any,
) -> None:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=training.weight_decay)
    random = torch.Generator().manual_seed(training.seed)
    pin = device.type == "cuda"
    loader = Loader(source, seed=training.seed, batch=training.batch, start=0, workers=workers, pin=pin)
    started = time.monotonic()
    try:
        for step, batch in zip(range(training.steps), loader, strict=False):
            fraction = step / training.steps
            if training.minutes is not None:
                fraction = max(fraction, (time.monotonic() - started) / (60 * training.minutes))
            if fraction >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = training.learning_rate * one_cycle(fraction)
            images, conds = batch.on(device)
            assert conds is not None
            loss = _step(model, augment(images, random), classes_of(conds, contract).long(), training, optimizer)
            if not math.isfinite(loss):
                raise InputError(f"the loss is not finite at step {step + 1}: lower the learning rate")
            if progress is not None:
                progress(step + 1, loss)
    finally:
        loader.close()


def _step(
    model: SegmentUNet, images: Tensor, target_NDHW: Tensor, training: SegmentTraining, optimizer: torch.optim.Optimizer
) -> float:
    with torch.autocast(images.device.type, torch.bfloat16) if training.autocast == "bf16" else nullcontext():
        logits = model(images.contiguous(memory_format=torch.channels_last_3d))
    loss = segmentation_loss(logits.float(), target_NDHW)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def one_cycle(fraction: float) -> float:
    """The factor of the learning rate: linear warm-up over the first tenth, then a cosine decay to a hundredth."""
    if fraction < WARM_UP:
        return max(0.01, fraction / WARM_UP)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (fraction - WARM_UP) / (1 - WARM_UP)))


def segmentation_loss(logits_NKDHW: Tensor, target_NDHW: Tensor) -> Tensor:
    """Cross-entropy plus 1 - soft Dice of each class over the batch, because one volume may lack a class."""
    logs = logits_NKDHW.log_softmax(dim=1)
    entropy = F.nll_loss(logs, target_NDHW)
    scores = []
    for k in range(1, logs.shape[1]):
        probability, target = logs[:, k].exp(), target_NDHW == k
        scores.append((2 * (probability * target).sum() + 1) / (probability.sum() + target.sum() + 1))
    return entropy + 1 - torch.stack(scores).mean()


def augment(images_NCDHW: Tensor, random: torch.Generator) -> Tensor:
    """Random contrast, smoothness, offset and noise for each volume, so that the style of a volume matters less."""
    n, device = images_NCDHW.shape[0], images_NCDHW.device

    def uniform(low: float, high: float) -> Tensor:
        return (low + (high - low) * torch.rand(n, generator=random)).view(n, 1, 1, 1, 1).to(device)

    unit = (images_NCDHW + 1) / 2
    unit = unit.clamp(min=0) ** uniform(0.7, 1.4)
    smooth = F.avg_pool3d(F.pad(unit, (1,) * 6, mode="replicate"), 3, stride=1)
    unit = torch.lerp(unit, smooth, uniform(-0.5, 1.0).clamp(min=0))
    unit = unit * uniform(0.85, 1.1) + uniform(-0.1, 0.08).clamp(min=0) * (1 - unit)
    seed = int(torch.randint(2**31, (1,), generator=random))
    noise = torch.randn(unit.shape, device=device, generator=torch.Generator(device).manual_seed(seed))
    return (unit + noise * uniform(-0.02, 0.06).clamp(min=0)) * 2 - 1


def held_out_dice(segmenter: Segmenter, source: Source) -> list[dict[str, float]]:
    """The Dice of each label by name, for each subject; without labels that neither volume has."""
    return held_out_scores(segmenter, source)[0]


def held_out_scores(segmenter: Segmenter, source: Source) -> tuple[list[dict[str, float]], list[LesionScore]]:
    """The Dice of each label by name, for each subject, and the scores of all lesions."""
    rows, lesions = [], []
    contract = segmenter.config.data
    pathology = [label.channel for label in contract.labels if label.kind == "pathology"]
    voxel_ml = math.prod(contract.spacing) / 1000
    for index in range(len(source)):
        image, cond = read_item(source, index)
        assert cond is not None
        labels_NDHW = segmenter.describe(image[None])[0]
        predicted_LDHW = encode_channels(labels_NDHW, contract.channel_values, contract)[0] > 0
        row = {}
        for label in contract.labels:
            target, predicted = cond[label.channel] > 0, predicted_LDHW[label.channel]
            total = int(target.sum() + predicted.sum())
            if total:
                row[label.name] = 2 * int((target & predicted).sum()) / total
        rows.append(row)
        if pathology:
            lesion, predicted = (part[pathology].amax(dim=0) > 0 for part in (cond, predicted_LDHW.float()))
            lesions += lesion_scores(lesion, predicted, voxel_ml)
    return rows, lesions


def lesions_by_size(scores: list[LesionScore]) -> dict[str, dict[str, float]]:
    """Number of lesions, mean Dice and share of detected lesions, by size; without sizes that no lesion has."""
    dice, detected = by_size(scores, "dice"), by_size(scores, "detected")
    counts = {name: sum(least <= s.ml < below for s in scores) for name, (least, below) in SIZES.items()}
    return {
        name: {"lesions": counts[name], "dice": dice[name], "detection": detected[name]}
        for name in SIZES
        if counts[name]
    }


@dataclass(frozen=True, kw_only=True)
class SegmentResult:
    """`dice` holds mean, minimum ("least") and number of held-out subjects for each label; `lesions`: by size."""

    folder: Path
    seconds: float
    steps: int
    dice: dict[str, dict[str, float]]
    lesions: dict[str, dict[str, float]]

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "folder": str(self.folder)}


Report = Callable[[Overview], None]


def run_segment(
    train: Any,
    held_out: Any,
    training: SegmentTraining,
    out: str | Path,
    *,
    data: str,
    command: str,
    overwrite: bool = False,
    base: int | None = None,
    device: str = "cpu",
    progress: Callable[[int, float], None] | None = None,
    report: Report | None = None,
) -> SegmentResult:
    """Trains on `train`, measures on `held_out`, writes the folder `out`; `data` describes the data in the model card.

    `overwrite` replaces an earlier segmenter. `report` is called before the first step, and again when the time of the first
    steps is known.
    """
    out = Path(out)
    with locked_folder(out):
        check_model_folder(out, overwrite=overwrite)
        network = _network(train.contract, base)
        facts = _overview(train, held_out, network, data)
        if report is not None:
            report(facts)
        started, times = time.perf_counter(), []

        def count(step: int, loss: float) -> None:
            times.append(time.perf_counter())
            if report is not None and step == min(TIMED_STEPS, training.steps) > 1:
                report(facts.with_time((times[-1] - times[0]) / (step - 1), training.steps, training.minutes))
            if progress is not None:
                progress(step, loss)

        segmenter = train_segmenter(
            train, training, network=network, device=device, progress=count, training_data=facts.statistics
        )
        seconds, steps = time.perf_counter() - started, len(times)
        rows, scores = held_out_scores(segmenter, held_out)
        dice, lesions = summary(rows), lesions_by_size(scores)
        text = card(segmenter, training, steps, seconds, data, command, dice, lesions)
        save_segmenter(segmenter, out, card=text, overwrite=overwrite)
    return SegmentResult(folder=out, seconds=round(seconds, 1), steps=steps, dice=dice, lesions=lesions)


def dry_run_segment(
    train: Any,
    held_out: Any,
    training: SegmentTraining,
    *,
    data: str,
    base: int | None = None,
    device: str = "cpu",
    report: Report,
) -> None:
    """Reports the overview of a training, with the time of its second step; nothing is written."""
    network, times = _network(train.contract, base), []
    facts = _overview(train, held_out, network, data)
    two_steps = replace(training, steps=2, minutes=None)
    train_segmenter(
        train, two_steps, network=network, device=device, progress=lambda *_: times.append(time.perf_counter())
    )
    report(facts.with_time(times[1] - times[0], training.steps, training.minutes))


def _network(contract: DataContract, base: int | None) -> SegmentConfig:
    # A lesion of 60 ml is 32 voxels wide at 1.5 mm: on large grids the network sees as far as on small ones.
    levels = 4 if min(contract.size) >= LARGE and not any(side % 16 for side in contract.size) else 3
    return SegmentConfig(
        in_channels=len(contract.images), classes=len(contract.regions) + 1, base=base or 16, levels=levels
    )


def _overview(train: Any, held_out: Any, network: SegmentConfig, data: str) -> Overview:
    contract = train.contract
    facts = overview(train, network, contract.size, contract, held_out=len(held_out), origin=data)
    for line in facts.warnings:
        log.warning(line)
    return facts


def _lesion_table(lesions: dict[str, dict[str, float]]) -> list[str]:
    if not lesions:
        return []
    return [
        "| size of the lesion | lesions | Dice, mean | detected |",
        "|---|---:|---:|---:|",
        *(
            f"| {name.replace('_', ' ')} | {row['lesions']} | {row['dice']:.4f} | {row['detection']:.4f} |"
            for name, row in lesions.items()
        ),
        "",
    ]


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
    lesions: dict[str, dict[str, float]] | None = None,
) -> str:
    """The model card: network, data, recipe, accuracy, limits."""
    contract, network = segmenter.config.data, segmenter.config.network
    parameters = sum(p.numel() for p in segmenter.network.parameters())
    size, spacing = " x ".join(map(str, contract.size)), " x ".join(f"{s:g}" for s in contract.spacing)
    device = "CPU" if segmenter.device.type == "cpu" else torch.cuda.get_device_name(segmenter.device)
    autocast = f", {training.autocast.upper()} autocast" if training.autocast != "none" else ""
    lines = [
        "---",
        "library_name: voxtune",
        "license: apache-2.0",
        "tags: [segmentation, unet, mri]",
        "---",
        "# The segmenter",
        "",
        "Assigns a label to each voxel of a volume; the means of its bottleneck channels are features of the volume.",
        "`voxtune evaluate` compares its labels with masks, and computes FID, MMD and nearest neighbours on its features.",
        "",
        f"- Network: 3D U-Net, {parameters:,} parameters (base {network.base}, {network.levels} levels), "
        f"{network.features} features.",
        f"- Input: {', '.join(contract.images)} on {size} voxels of {spacing} mm, {contract.orientation}, intensities scaled "
        "to [-1, 1] by minimum and maximum of the volume.",
        f"- Labels: {contract.describe_labels()}.",
        f"- Data: {data}.",
        f"- Recipe: AdamW, one-cycle learning rate up to {training.learning_rate:g}, cross-entropy + soft Dice, batch "
        f"{training.batch}, {steps} steps{autocast}, random intensities, seed {training.seed}; {seconds / 60:.1f} minutes on "
        f"{device}.",
        "",
        "| label | Dice on held-out subjects, mean | minimum | subjects |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {d['mean']:.4f} | {d['least']:.4f} | {d['subjects']} |" for name, d in dice.items()),
        "",
        *_lesion_table(lesions or {}),
        "```",
        command,
        "```",
        "",
        "## Limits",
        "Valid for data like its training data: other anatomy, contrasts or scanners require another segmenter. Metrics on",
        "its features are comparable only between results with the same file hash. For research: not a medical device, not",
        "for diagnosis, treatment or any clinical decision.",
        "",
    ]
    return "\n".join(lines)
