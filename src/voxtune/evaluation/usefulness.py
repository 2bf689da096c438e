"""`voxtune usefulness`, from its request to the files that it writes. With packed subjects it needs the core packages only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxtune.data.labels import LabelMap
from voxtune.data.splits import (
    HeldOut,
    Split,
    Volumes,
    mask_model_contract,
    split_cohort,
    split_folders,
    split_packed,
)
from voxtune.diffusion.noise import check_seed
from voxtune.errors import InputError
from voxtune.evaluation.bench import units
from voxtune.files import check_outputs, locked_folder, recorded_path, write_file, write_json
from voxtune.marks import marked_markdown
from voxtune.precision import tf32_allowed
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.per_volume import dice_by_label
from voxtune.quality.result import is_simulated
from voxtune.quality.usefulness_table import Arm, SubjectKind, UsefulnessTable
from voxtune.runtime.model import Model
from voxtune.runtime.planned import by_plan
from voxtune.runtime.sampling import SamplerOptions, SamplerSettings
from voxtune.runtime.storage import load, weights_sha256
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig
from voxtune.segmentation.train import SegmentTraining, train_segmenter
from voxtune.workloads.segment import SegmentConfig

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class ArmData:
    """The training set of an arm: the first `subjects` volumes are those of subjects, the others are synthetic."""

    name: str
    volumes: Volumes
    subjects: int


@dataclass(frozen=True, kw_only=True, eq=False)
class SyntheticSet:
    """Synthetic volumes with their masks. `broken` counts those with NaN or infinity, which are excluded."""

    volumes: Volumes
    seconds: float
    broken: int


def scaled(images_NCDHW: Tensor) -> Tensor:
    """Scales each image to [-1, 1] by its minimum and maximum, as `voxtune evaluate` does."""
    return torch.stack([units(volume) * 2 - 1 for volume in images_NCDHW])


def generate_volumes(
    model: Model, masks: Volumes, count: int, settings: SamplerSettings, *, seed: int, batch: int, say: Say
) -> SyntheticSet:
    """`count` volumes, one per mask; after the last mask, masks are reused with other noise."""
    batch = min(batch, count)
    parts, started, reported = [], time.perf_counter(), time.perf_counter()
    for first in range(0, count, batch):
        # A short last batch is padded: another shape would need another plan.
        numbers = [min(first + i, count - 1) for i in range(batch)]
        cond = masks.condition([n % len(masks) for n in numbers])
        x = model.sample(cond, settings=settings, seed=seed, indices=numbers)
        parts.append(x[: min(batch, count - first)].float().cpu())
        if time.perf_counter() - reported > 10 or first == 0:
            reported = time.perf_counter()
            say(f"generated {first + len(parts[-1])} of {count} volumes, {reported - started:.0f} s")
    volumes = torch.cat(parts)
    finite = torch.isfinite(volumes).flatten(1).all(dim=1)
    if not bool(finite.any()):
        raise InputError(
            "every synthetic volume contains NaN or infinity; check the model's weights, or try --plan baseline"
        )
    classes = masks.classes_NDHW[torch.arange(count) % len(masks)]
    valid = Volumes(contract=masks.contract, images_NCDHW=scaled(volumes[finite]), classes_NDHW=classes[finite])
    return SyntheticSet(volumes=valid, seconds=time.perf_counter() - started, broken=int((~finite).sum()))


def arm_data(
    subjects: Volumes, synthetic: Volumes, few: int | None = None, kind: SubjectKind = "real"
) -> list[ArmData]:
    """The arms, the reference first; `few` adds that many subjects, alone and with all synthetic volumes."""
    check_few(few, len(subjects))
    arms = [
        ArmData(name=kind, volumes=subjects, subjects=len(subjects)),
        ArmData(name="synthetic", volumes=synthetic, subjects=0),
        ArmData(name="both", volumes=subjects + synthetic, subjects=len(subjects)),
    ]
    if few is not None:
        part = subjects.first(few)
        arms.append(ArmData(name="few", volumes=part, subjects=few))
        arms.append(ArmData(name="few_and_synthetic", volumes=part + synthetic, subjects=few))
    return arms


def check_few(few: int | None, subjects: int) -> None:
    if few is not None and not 0 < few < subjects:
        raise InputError(f"--few {few}: must be at least 1 and less than the {subjects} training subjects")


def segmenter_config(volumes: Volumes, base: int) -> SegmenterConfig:
    """The network of every arm; raises InputError if volumes of this size do not fit it."""
    contract = volumes.contract
    network = SegmentConfig(in_channels=len(contract.images), classes=len(contract.regions) + 1, base=base)
    return SegmenterConfig(network=network, data=contract)


def train_arms(
    data: list[ArmData],
    test: HeldOut,
    training: SegmentTraining,
    seeds: int,
    *,
    kind: SubjectKind = "real",
    base: int = 16,
    device: str = "cpu",
    say: Say = lambda _line: None,
) -> Iterator[tuple[Arm, ...]]:
    """Trains every arm with one seed, then with the next; yields the results so far after each seed."""
    config = segmenter_config(data[0].volumes, base)
    test = replace(test, images_NCDHW=scaled(test.images_NCDHW))
    scores: dict[str, list[dict[str, np.ndarray]]] = {arm.name: [] for arm in data}
    seconds = dict.fromkeys(scores, 0.0)
    run_started = time.perf_counter()
    for number in range(seeds):
        for arm in data:
            started = time.perf_counter()
            seeded = replace(training, seed=training.seed + number)
            segmenter = train_segmenter(arm.volumes, seeded, network=config.network, device=device)
            scores[arm.name].append(measure_dice(segmenter, test))
            seconds[arm.name] += time.perf_counter() - started
            done, spent = sum(map(len, scores.values())), time.perf_counter() - run_started
            left = spent * (seeds * len(data) - done) / done
            means = ", ".join(f"{label} {np.nanmean(v):.4f}" for label, v in scores[arm.name][-1].items())
            say(f"seed {seeded.seed}, {arm.name}: Dice {means}; {spent:.0f} s, about {left:.0f} s left")
        yield tuple(_arm(arm, kind, scores[arm.name], seconds[arm.name]) for arm in data)


@torch.inference_mode()
def measure_dice(segmenter: Segmenter, test: HeldOut) -> dict[str, np.ndarray]:
    """Dice by label, one value per subject; NaN if its mask lacks the label. Labels that no mask has are omitted."""

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        for image, classes in zip(test.images_NCDHW, test.classes_NDHW, strict=True):
            predicted = segmenter.network(image[None].to(segmenter.device)).argmax(dim=1)[0]
            yield classes.to(segmenter.device), predicted

    with tf32_allowed(False):
        return dice_by_label(pairs(), test.contract.classes)


def _arm(data: ArmData, kind: SubjectKind, scores: list[dict[str, np.ndarray]], seconds: float) -> Arm:
    return Arm(
        name=data.name,
        kind=kind,
        subjects=data.subjects,
        synthetic=len(data.volumes) - data.subjects,
        dice_SN={label: np.stack([row[label] for row in scores]) for label in scores[0]},
        seconds=seconds,
    )


HELD_OUT = 64
# Results over fewer subjects carry a warning.
ENOUGH = 64
MOST_SEEDS = 64


@dataclass(frozen=True, kw_only=True)
class UsefulnessRequest:
    """The options of `voxtune usefulness`. Subjects come from `subjects`, from `real` with `masks`, or from the cohort."""

    model: Path
    out: Path
    volumes: int = 240
    few: int | None = None
    held_out: int | None = None
    subjects: Path | None = None
    real: Path | None = None
    masks: Path | None = None
    labels: LabelMap | None = None
    segment_steps: int = 2000
    segment_batch: int = 8
    seeds: int = 2
    sampling: SamplerOptions = field(default_factory=SamplerOptions)
    plan: str = "auto"
    seed: int = 0
    batch: int = 8
    resamples: int = 1000
    base: int = 16
    overwrite: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        if (self.real is None) != (self.masks is None):
            raise InputError("--real and --masks must be given together")
        if self.labels is not None and self.real is None:
            raise InputError(
                "--labels requires --real and --masks; simulated and packed subjects have their own labels"
            )
        if self.real is not None and self.subjects is not None:
            raise InputError("--real cannot be combined with --subjects")
        if self.volumes < 2 or self.batch < 1 or not 1 <= self.seeds <= MOST_SEEDS:
            raise InputError(
                f"volumes {self.volumes}, batch {self.batch}, seeds {self.seeds}: volumes must be >= 2, the batch >= 1 "
                f"and seeds 1 to {MOST_SEEDS}"
            )
        if self.held_out is not None and self.held_out < 2:
            raise InputError(
                f"--held-out {self.held_out}: at least 2 subjects are required, {ENOUGH} or more for a reliable result"
            )
        check_outputs([self.result, self.result.with_suffix(".md")], overwrite=self.overwrite, folder=self.out)

    @property
    def result(self) -> Path:
        return self.out / "usefulness.json"

    def training(self) -> SegmentTraining:
        autocast: Any = "bf16" if torch.device(self.device).type == "cuda" else "none"
        return SegmentTraining(steps=self.segment_steps, batch=self.segment_batch, seed=self.seed, autocast=autocast)


def run(request: UsefulnessRequest, say: Say, warn: Say | None = None) -> UsefulnessTable:
    """Generates volumes, then trains and measures every arm; the files are written after each seed."""
    with locked_folder(request.out):
        return _run(request, say, warn or say)


def _run(request: UsefulnessRequest, say: Say, warn: Say) -> UsefulnessTable:
    bootstrap = Bootstrap(resamples=request.resamples, seed=request.seed)
    model = load(request.model, device=request.device)
    training = request.training()
    check_seed(request.seed)
    settings = model.resolve(warn=warn, **(request.sampling or {"steps": "auto"}))
    unmeasured = model.config.sampling.unmeasured(settings)
    if unmeasured is not None:
        warn(unmeasured)
    subjects = _checked(_split(request, model, warn), request)
    say(f"training subjects: {subjects.origin}; test subjects: {subjects.held_out.origin}")
    say(f"{request.volumes} volumes with {settings.describe()}, on {model.device}")
    model = by_plan(model, request.plan, say)
    synthetic = generate_volumes(
        model, subjects.learn, request.volumes, settings, seed=request.seed, batch=request.batch, say=say
    )
    say(f"generated in {synthetic.seconds:.0f} s, including the plan")
    about = {**_about(request, model, subjects, settings, synthetic), "training": asdict(training)}
    kind: SubjectKind = "simulated" if is_simulated(subjects.origin) else "real"
    scaled_subjects = replace(subjects.learn, images_NCDHW=scaled(subjects.learn.images_NCDHW))
    data = arm_data(scaled_subjects, synthetic.volumes, request.few, kind)
    notes = _notes(subjects, synthetic, request)
    result = None
    for arms in train_arms(
        data,
        subjects.held_out,
        training,
        request.seeds,
        kind=kind,
        base=request.base,
        device=request.device,
        say=say,
    ):
        first = result is None
        result = UsefulnessTable(arms=arms, settings=bootstrap, about=about, notes=notes)
        # After the first seed, the files are its own.
        write(result, request.result, recorded_path(request.model), overwrite=request.overwrite or not first)
    assert result is not None
    for line in result.text():
        say(line)
    return result


def write(result: UsefulnessTable, path: Path, title: str, *, overwrite: bool = False) -> None:
    """Writes the result as JSON to `path` and as Markdown next to it."""
    write_json(path, result.to_json(), overwrite=overwrite)
    write_file(path.with_suffix(".md"), marked_markdown(result.markdown(f"{title}: usefulness")), overwrite=overwrite)


def _split(request: UsefulnessRequest, model: Model, warn: Say) -> Split:
    contract = mask_model_contract(model.config.data)
    if request.subjects is not None:
        return split_packed(contract, request.subjects, request.volumes, request.held_out)
    if request.real is not None and request.masks is not None:
        folders = (request.real, request.masks)
        return split_folders(contract, *folders, request.volumes, request.held_out, labels=request.labels, warn=warn)
    held_out = HELD_OUT if request.held_out is None else request.held_out
    return split_cohort(contract, request.volumes, held_out)


def _checked(subjects: Split, request: UsefulnessRequest) -> Split:
    """Raises InputError for what would otherwise fail after sampling."""
    segmenter_config(subjects.learn, request.base)
    check_few(request.few, len(subjects.learn))
    if not bool((subjects.held_out.classes_NDHW > 0).any()):
        raise InputError(f"{subjects.held_out.origin}: the masks contain no label, so Dice cannot be computed")
    return subjects


def _about(
    request: UsefulnessRequest, model: Model, subjects: Split, settings: SamplerSettings, synthetic: SyntheticSet
) -> dict[str, Any]:
    return {
        "model_sha256": weights_sha256(request.model),
        "data": subjects.origin,
        "held_out": subjects.held_out.origin,
        "size": list(subjects.learn.contract.size),
        "images": list(subjects.learn.contract.images),
        "drawing": {
            **settings.record(),
            "seed": request.seed,
            "plan": recorded_path(request.plan),
            "passes": list(getattr(model.network, "passes", ())),
            "volumes": request.volumes,
            "broken": synthetic.broken,
            "seconds": round(synthetic.seconds, 1),
        },
        "seeds_asked": request.seeds,
        "network_base": request.base,
        "device": model.device_name,
    }


def _notes(subjects: Split, synthetic: SyntheticSet, request: UsefulnessRequest) -> tuple[str, ...]:
    count, notes = len(subjects.held_out), []
    if count < ENOUGH:
        notes.append(f"{count} held-out subjects: at least {ENOUGH} are required for a reliable result")
    if request.seeds < 2:
        notes.append("one seed: the effect of the random seed is unknown")
    if synthetic.broken:
        notes.append(f"{synthetic.broken} synthetic volumes contained NaN or infinity and were excluded")
    return tuple(notes)
