"""`voxtune steps`, from its request to the files that it writes. With packed subjects it needs the core packages only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from voxtune.config import current_names
from voxtune.data.contract import DataContract
from voxtune.data.labels import LabelMap
from voxtune.data.splits import (
    HeldOut,
    held_out_cohort,
    held_out_folders,
    held_out_packed,
    mask_model_contract,
)
from voxtune.data.training_data import measure, unlike_subjects
from voxtune.errors import InputError
from voxtune.evaluation.step_search import TableOptions, confirm_table, numerics_table, step_table
from voxtune.files import check_outputs, delete_file, locked_folder, recorded_path, write_file
from voxtune.marks import marked_markdown
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.step_table import FORMAT, NON_INFERIOR, StepTable
from voxtune.reading import file_sha256, read_json
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.planned import by_plan, optimize
from voxtune.runtime.sampling import AutoSampling, Evidence, FeatureCache, SamplerSettings
from voxtune.runtime.storage import config_file, load, store_auto, weights_sha256
from voxtune.segmentation.segmenter import (
    Segmenter,
    SegmenterConfig,
    check_segmenter,
    load_segmenter,
    shipped_segmenter,
)
from voxtune.workloads import split


@dataclass(frozen=True, kw_only=True)
class EarlierTable:
    """A table to confirm. `candidates`: its choice, and non-inferior rows with more of the same steps.

    `seen` is the number of subjects up to the last one of that table.
    """

    file: str
    sha256: str
    chosen: str
    margin: float
    subjects: int
    seen: int
    candidates: tuple[SamplerSettings, ...]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("file", "sha256", "chosen", "margin", "subjects")}


def read_earlier(path: Path, model: Model, model_sha256: str | None) -> EarlierTable:
    """Reads the table at `path`; raises InputError if it is of another model or has no choice."""
    data = read_json(path)
    if not isinstance(data, dict) or data.get("format") != FORMAT or data.get("table") != "steps":
        raise InputError(f"{path}: not a steps.json file of voxtune steps")
    if data.get("model_sha256") != model_sha256:
        raise InputError(f"{path}: was made with other weights than this model's; run the search again")
    if data.get("chosen") is None:
        raise InputError(f"{path}: has no chosen setting, so there is nothing to confirm")
    try:
        rows = [current_names(SamplerSettings, row) for row in data["rows"]]
        chosen = next(row for row in rows if row["name"] == data["chosen"])
        similar = sorted((row for row in rows if _confirmable(chosen, row)), key=lambda row: int(row["steps"]))
        candidates = tuple(_settings(model, row, path) for row in [chosen, *similar])
        counts = {name: int(data[name]) for name in ("subjects", "skip")}
        margin = float(data["margin"])
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError, StopIteration) as error:
        raise InputError(f"{path}: damaged ({type(error).__name__}: {error}); run the search again") from None
    if min(counts.values()) < 0:
        raise InputError(f"{path}: damaged: {counts}; run the search again")
    return EarlierTable(
        file=path.name,
        sha256=file_sha256(path),
        chosen=str(chosen["name"]),
        margin=margin,
        subjects=counts["subjects"],
        seen=counts["skip"] + counts["subjects"],
        candidates=candidates,
    )


def _confirmable(chosen: dict[str, Any], row: dict[str, Any]) -> bool:
    """Whether a row is non-inferior and equals the chosen one but for more steps, or for feature caching."""
    same = all(row[name] == chosen[name] for name in ("sampler", "timestep_spacing", "clip"))
    passed = row["verdict"] in NON_INFERIOR and row["seed"] == chosen["seed"] and "cache" not in row
    passed = passed and "distilled_from" not in row
    return same and passed and ("cache" in chosen or row["steps"] > chosen["steps"])


def _settings(model: Model, row: dict[str, Any], path: Path) -> SamplerSettings:
    settings = SamplerSettings.from_json(row, f"{path}: damaged: row {row['name']}")
    options: dict[str, Any] = {name: value for name, value in vars(settings).items() if name != "timesteps"}
    return model.resolve(**options)


HELD_OUT = 64

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class StepsRequest:
    """The options of `voxtune steps`. Subjects come from `subjects`, from `real` with `masks`, or from the cohort."""

    model: Path
    out: Path
    segmenter: Path | None = None
    held_out: int | None = None
    skip: int | None = None
    confirm: Path | None = None
    subjects: Path | None = None
    real: Path | None = None
    masks: Path | None = None
    labels: LabelMap | None = None
    samplers: str | None = None
    steps: str | None = None
    timestep_spacings: str | None = None
    cache: str | None = None
    distilled: Path | None = None
    plan: str = "auto"
    seed: int = 0
    batch: int = 8
    margin: float = 0.5
    resamples: int = 1000
    numerics: bool = False
    store: bool = False
    overwrite: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        if (self.real is None) != (self.masks is None):
            raise InputError("--real and --masks must be given together")
        if self.labels is not None and self.real is None:
            raise InputError(
                "--labels requires --real and --masks; simulated and packed subjects have their own labels"
            )
        if self.real is not None and (self.subjects is not None or self.held_out is not None):
            raise InputError("--real cannot be combined with --subjects or --held-out")
        if self.store and self.numerics:
            raise InputError("--store cannot be combined with --numerics")
        if (self.cache is not None or self.timestep_spacings is not None) and self.numerics:
            raise InputError("--cache and --timestep-spacings cannot be combined with --numerics")
        searched = (self.samplers, self.steps, self.timestep_spacings, self.cache)
        if self.confirm is not None and (self.numerics or any(option is not None for option in searched)):
            raise InputError(
                "--confirm cannot be combined with --samplers, --steps, --timestep-spacings, --cache or --numerics"
            )
        if self.distilled is not None and self.numerics:
            raise InputError("--distilled cannot be combined with --numerics")
        if self.skip is not None and self.skip < 0:
            raise InputError(f"--skip {self.skip}: must be >= 0")
        check_outputs(self.files, overwrite=self.overwrite, folder=self.out)
        if self.store:
            check_outputs([config_file(self.model)], overwrite=True)
        if self.numerics and self.plan not in ("auto", "baseline") and torch.device(self.device).type != "cuda":
            raise InputError(
                f"--plan {self.plan} cannot be combined with --numerics on a CPU, which compares FP32 and BF16 autocast"
            )

    @property
    def result(self) -> Path:
        return self.out / ("numerics.json" if self.numerics else "steps.json")

    @property
    def unfinished(self) -> Path:
        """Holds the rows so far while the command runs, and after an interrupted run."""
        return self.out / "steps-unfinished.json"

    @property
    def files(self) -> list[Path]:
        results = (self.result,) if self.numerics else (self.result, self.unfinished)
        return [file for result in results for file in (result, result.with_suffix(".md"))]

    def options(self) -> TableOptions:
        bootstrap = Bootstrap(resamples=self.resamples, seed=self.seed)
        return TableOptions(seed=self.seed, batch=self.batch, margin=self.margin, bootstrap=bootstrap)


def run(request: StepsRequest, say: Say, warn: Say | None = None) -> StepTable:
    """Runs the search, writes the table and, with `store`, the choice. Without `warn`, warnings go to `say`."""
    with locked_folder(request.out):
        return _run(request, say, warn or say)


def _run(request: StepsRequest, say: Say, warn: Say) -> StepTable:
    options, title = request.options(), recorded_path(request.model)
    samplers = parse_names(request.samplers, "--samplers")
    timestep_spacings = parse_names(request.timestep_spacings, "--timestep-spacings")
    numbers, caches = parse_steps(request.steps), parse_caches(request.cache)
    model = load(request.model, device=request.device)
    segmenter = _segmenter(request.segmenter)
    contract = mask_model_contract(model.config.data)
    check_segmenter(segmenter, contract)
    about: dict[str, Any] = {"model_sha256": weights_sha256(request.model), "plan": recorded_path(request.plan)}
    earlier = None if request.confirm is None else read_earlier(request.confirm, model, about["model_sha256"])
    students = _students(request, about["model_sha256"], say)
    seen = 0 if earlier is None else earlier.seen
    skip = seen if request.skip is None else request.skip
    subjects = _subjects(request, contract, skip, warn)
    _warn_of_unlike(subjects, {"the model": model.config, "the segmenter": segmenter.config}, warn)
    about |= {"skip": skip} | ({} if earlier is None else {"confirms": earlier.to_json()})

    def complete(table: StepTable) -> StepTable:
        return replace(table, about={**table.about, **about})

    def save_unfinished(table: StepTable) -> None:
        # After the first row, the file is its own.
        write(complete(table), request.unfinished, title, overwrite=request.overwrite or len(table.rows) > 1)

    if request.numerics:
        settings = {"sampler": _one(samplers, "--samplers"), "steps": _one(numbers, "--steps") or "auto"}
        table = numerics_table(
            precisions(model, request.plan, say), subjects, segmenter, options=options, say=say, **settings
        )
    elif earlier is not None:
        planned = by_plan(model, request.plan, say)
        table = confirm_table(
            planned,
            subjects,
            segmenter,
            earlier.candidates,
            students=students,
            options=options,
            say=say,
            on_update=save_unfinished,
        )
    else:
        if numbers is not None and "auto" in numbers:
            raise InputError("--steps auto cannot be used here: give the numbers of steps to compare, such as 5,10,20")
        choices: dict[str, Any] = {"steps": numbers, "caches": caches, "students": students}
        choices |= {} if samplers is None else {"samplers": samplers}
        choices |= {} if timestep_spacings is None else {"timestep_spacings": timestep_spacings}
        planned = by_plan(model, request.plan, say)
        table = step_table(planned, subjects, segmenter, options=options, say=say, on_update=save_unfinished, **choices)
    table = complete(table)
    digest = write(table, request.result, title, overwrite=request.overwrite)
    if not request.numerics:
        # The Markdown file may be recognised by the JSON file, so it goes first.
        for file in (request.unfinished.with_suffix(".md"), request.unfinished):
            delete_file(file)
    for line in table.text():
        say(line)
    say(table.conclusion())
    refusal = table.refusal()
    if refusal:
        say(refusal)
    if request.store:
        _store(request, table, digest, say)
    return table


def write(table: StepTable, path: Path, title: str, *, overwrite: bool = False) -> str:
    """Writes the table as JSON to `path` and as Markdown next to it; returns the hash of the JSON."""
    data = (json.dumps(table.to_json(), indent=2, allow_nan=False) + "\n").encode()
    write_file(path, data, overwrite=overwrite)
    markdown = marked_markdown(table.markdown(f"{title}: {table.about['table']}"))
    write_file(path.with_suffix(".md"), markdown, overwrite=overwrite)
    return hashlib.sha256(data).hexdigest()


def parse_steps(text: str | None) -> list[Any] | None:
    """Comma-separated numbers, or auto."""
    if text is None:
        return None
    parts = [p.strip() for p in text.split(",")]
    if not all(p == "auto" or (p.isascii() and p.isdigit() and len(p) <= 9) for p in parts):
        raise InputError(f"--steps {text[:40]}: expected comma-separated whole numbers, such as 5,10,20")
    return list(dict.fromkeys(p if p == "auto" else int(p) for p in parts))


def parse_names(text: str | None, option: str) -> list[str] | None:
    """Comma-separated names."""
    if text is None:
        return None
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InputError(f"{option} {text[:40]}: expected comma-separated names")
    return list(dict.fromkeys(names))


def parse_caches(text: str | None) -> list[FeatureCache]:
    """Comma-separated INTERVAL or INTERVAL:DEPTH."""
    parts = [] if text is None else [FeatureCache.parse(part.strip()) for part in text.split(",")]
    return [cache for cache in parts if cache is not None]


def precisions(model: Model, plan: str, say: Say = lambda _line: None) -> list[tuple[str, Model]]:
    """The model in float32 first, then in the other precisions that this device supports."""
    from voxtune.plan import Plan
    from voxtune.plan.hazards import slow_half

    if model.device.type != "cuda":
        slow = slow_half(model.device.type)
        if slow is not None:
            say(f"BF16 autocast: skipped: {slow}")
            return [("FP32", model)]
        return [("FP32", model), ("BF16 autocast", Model(model.config, AutocastNetwork(model.network)))]
    plans: list[tuple[str, Any]] = [("FP32", "baseline"), ("TF32", Plan.of("tf32")), ("BF16 plan", plan)]
    return [(name, optimize(model, plan=chosen, search=False, say=say)) for name, chosen in plans]


class AutocastNetwork(nn.Module):
    """A network under BF16 autocast, with outputs in float32."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network = network
        self.eval()

    def forward(self, x: Tensor, *others: Any) -> Any:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            outputs = self.network(x, *others)
        return tree_map_only(Tensor, Tensor.float, outputs)

    def split(self, depth: int) -> tuple[AutocastNetwork, AutocastNetwork]:
        full, shallow = split(self.network, depth)
        return AutocastNetwork(full), AutocastNetwork(shallow)


def _segmenter(path: Path | None) -> Segmenter:
    chosen = shipped_segmenter() if path is None else path
    if path is None and not (chosen / "config.json").is_file():
        raise InputError("no segmenter: train one with voxtune train --workload segment and pass it with --segmenter")
    return load_segmenter(chosen)


def _students(request: StepsRequest, model_sha256: str | None, say: Say) -> list[Model]:
    """The distilled model to compare, which must be a student of this model."""
    if request.distilled is None:
        return []
    student = load(request.distilled, device=request.device)
    distilled = student.config.sampling.distilled
    if distilled is None or distilled.teacher_sha256 != model_sha256:
        what = "is not a distilled model" if distilled is None else "was distilled from other weights"
        raise InputError(f"--distilled {request.distilled}: {what}; pass a student of {request.model}")
    return [by_plan(student, request.plan, say)]


def _subjects(request: StepsRequest, contract: DataContract, skip: int, warn: Say) -> HeldOut:
    if request.subjects is not None:
        return held_out_packed(contract, request.subjects, request.held_out, skip=skip)
    if request.real is not None and request.masks is not None:
        return held_out_folders(contract, request.real, request.masks, skip=skip, labels=request.labels, warn=warn)
    return held_out_cohort(contract, HELD_OUT if request.held_out is None else request.held_out, skip=skip)


def _warn_of_unlike(
    subjects: HeldOut, configs: Mapping[str, ModelConfig | SegmenterConfig], warn: Callable[[str], None]
) -> None:
    """Warns, in one line for each network, of subjects that are far outside its training data."""
    numbers = range(len(subjects)) if any(config.training_data is not None for config in configs.values()) else ()
    measured = [
        measure(
            subjects.contract,
            cond_CDHW=subjects.condition([number])[0].numpy(),
            images_CDHW=subjects.images_NCDHW[number].numpy(),
        )
        for number in numbers
    ]
    for owner, config in configs.items():
        line = unlike_subjects(config.training_data, subjects.contract, measured, owner)
        if line is not None:
            warn(line)


def _one(values: Sequence[Any] | None, option: str) -> Any:
    if values is not None and len(values) != 1:
        raise InputError(f"{option}: --numerics compares one setting; give a single value")
    return None if values is None else values[0]


def _store(request: StepsRequest, table: StepTable, digest: str, say: Say) -> None:
    row = table.choice
    if row is None:
        say(f"nothing stored: {table.conclusion()}")
        return
    evidence = Evidence(file=request.result.name, sha256=digest, subjects=table.subjects, summary=table.conclusion())
    settings = SamplerSettings.from_json(row.record, row.name)
    say(f"stored in {store_auto(request.model, AutoSampling(**vars(settings), evidence=evidence))}")
