"""Settings of a training run: read from YAML or JSON, and checked."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from voxtune.config import from_mapping, to_mapping
from voxtune.data.cohort import HELD_OUT
from voxtune.data.contract import Label
from voxtune.data.labels import parse_labels
from voxtune.data.orientation import check_orientation
from voxtune.diffusion import get_sampler
from voxtune.diffusion.noise import check_seed
from voxtune.errors import InputError, install_command, optional_import
from voxtune.files import recorded_path
from voxtune.reading import MAX_DEPTH, MAX_FIELD, parse_bytes, parse_json, read_text, reading
from voxtune.workloads import DEFAULT_WORKLOAD, WORKLOADS
from voxtune.workloads import workload as find_workload

RECIPE = WORKLOADS[DEFAULT_WORKLOAD].recipe

# PyYAML implements YAML 1.1, in which 1e-5 is a string.
NUMBER = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")


def parse_yaml(text: str, where: object) -> Any:
    """The YAML document in `text`; `where` is the file or the option."""
    with optional_import("a config in YAML instead of JSON"):
        import yaml
    # PyYAML's constructors fail in many ways on a tag that does not match its value (!!bool maybe).
    with reading(where, "YAML document"):
        try:
            return yaml.load(text, Loader=_loader())
        except yaml.YAMLError as error:
            raise InputError(f"not valid YAML: {' '.join(str(error).split())[:300]}") from None


def parse_value(text: str) -> Any:
    """The value of an option such as `--set clip=1.0`. Without PyYAML: JSON, or else a string."""
    if importlib.util.find_spec("yaml") is not None:
        return parse_yaml(text, text[:80])
    try:
        return parse_json(text, text[:80])
    except InputError:
        if set(text) & set("[]{}\"'"):
            raise InputError(
                f"{text[:80]}: not valid JSON, and YAML requires PyYAML: {install_command('yaml')}"
            ) from None
        return text


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            # Nested aliases can expand to gigabytes.
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise InputError(f"line {mark.line + 1}: aliases (*name) are not supported; repeat the value")
            if self.depth > MAX_DEPTH:
                raise InputError(f"nested more than {MAX_DEPTH} deep")
            self.depth += 1
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_scalar(self, node: Any) -> Any:
            # A number in base 60 takes time that grows with the square of its length.
            if len(node.value) > MAX_FIELD:
                raise InputError(f"a value of {len(node.value)} characters")
            return super().construct_scalar(node)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen = set()
            for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
                name = getattr(key, "value", None)
                if isinstance(name, str) and name in seen:
                    raise InputError(f"line {key.start_mark.line + 1}: setting {name[:80]!r} is given twice")
                if isinstance(name, str):
                    seen.add(name)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
    return Loader


# PyYAML takes 40 seconds for a mebibyte; a config has a few kilobytes.
MAX_FILE_BYTES = 2**17
MAX_COUNT = 10**9


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The source of the subjects, and values that replace those of the workload's data contract (None: unchanged).

    `label_map` is what the values of the masks mean, as in --labels; with a new model it also defines the labels.
    """

    images: str | None = None
    masks: str | None = None
    cohort: int | None = None
    cohort_seed: int = 0
    subjects: str | None = None
    fit: Literal["auto", "pad", "resample"] = "auto"
    labels: tuple[Label, ...] | None = None
    label_map: str | None = None
    overlapping: bool | None = None
    modalities: tuple[str, ...] | None = None
    spacing: tuple[float, float, float] | None = None
    orientation: str | None = None
    mask_range: Literal["signed", "unit"] | None = None
    scaling: Literal["volume", "slice"] | None = None
    mirror: bool | None = None

    def __post_init__(self) -> None:
        folders = self.images is not None or self.masks is not None
        if folders + (self.cohort is not None) + (self.subjects is not None) > 1:
            raise InputError("folders (images, masks), cohort and subjects cannot be combined")
        if self.cohort is not None:
            _check_range("cohort", self.cohort, 1, HELD_OUT)
        _check_range("cohort_seed", self.cohort_seed, 0, 2**63 - 1)
        if self.orientation is not None:
            check_orientation(self.orientation[:40])
        if self.label_map is not None:
            parse_labels(self.label_map)
            if self.cohort is not None or self.subjects is not None:
                raise InputError(
                    "label_map (--labels) requires folders of images and masks; simulated and packed subjects have their own"
                )
        _check_path("images", self.images)
        _check_path("masks", self.masks)
        _check_path("subjects", self.subjects)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network: freshly initialised, or that of a stored model (`init`). None: as in `init` or in the workload."""

    workload: str = DEFAULT_WORKLOAD
    init: str | None = None
    size: tuple[int, ...] | None = None
    base: int | None = None
    blocks: int | None = None
    multipliers: tuple[float, ...] | None = None
    attention: tuple[int, ...] | None = None
    schedule: Literal["cosine", "linear"] | None = None
    diffusion_steps: int | None = None

    def __post_init__(self) -> None:
        find_workload(self.workload)
        _check_path("init", self.init)
        if self.size is not None and len(self.size) != self.dimensions:
            raise InputError(f"size {self.size[:8]}: {self.workload} requires {self.dimensions} dimensions")
        if self.size is not None and not all(1 <= n <= 4096 for n in self.size):
            raise InputError(f"size {self.size}: dimensions must be in 1 to 4096")

    @property
    def dimensions(self) -> int:
        return WORKLOADS[self.workload].network.dimensions


DEFAULT_STEPS = 100_000


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. A step is one update of the weights from `accumulation` batches.

    With `epochs`, the number of steps follows from that of the subjects; see `with_steps`.
    """

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    steps: int = DEFAULT_STEPS
    epochs: int | None = None
    minutes: float | None = None
    batch: int = RECIPE.batch
    accumulation: int = RECIPE.accumulation
    learning_rate: float = RECIPE.learning_rate
    warmup: int = 0
    decay: Literal["none", "cosine"] = "none"
    loss: Literal["l1", "l2"] = RECIPE.loss
    clip: float | None = None
    ema_decay: float = 0.995
    ema_every: int = 10
    ema_start: int = 2000
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"
    plan: Literal["auto", "baseline", "compile", "voxtune"] = "auto"
    autocast: Literal["none", "bf16", "fp16"] | None = None
    channels_last: bool = False
    compile: bool = False
    memory_budget: str | None = None
    max_skipped: int = 10
    deterministic: bool = False
    workers: int | None = None
    cache: str = "auto"
    seed: int = 0
    checkpoint_every: int = 1000
    keep: int = 3
    store: Literal["float32", "bf16"] = "float32"
    log_every: int = 10
    sample_every: int = 1000
    sample_steps: int = 25
    sampler: str = "ddim"
    tensorboard: bool = True

    def __post_init__(self) -> None:
        counts = ("steps", "batch", "accumulation", "ema_every", "checkpoint_every", "keep", "log_every", "max_skipped")
        for name in counts:
            _check_range(name, getattr(self, name), 1, MAX_COUNT)
        for name in ("warmup", "ema_start", "sample_every"):
            _check_range(name, getattr(self, name), 0, MAX_COUNT)
        _check_range("sample_steps", self.sample_steps, 1, 100_000)
        if self.workers is not None:
            _check_range("workers", self.workers, 0, 64)
        if self.epochs is not None:
            _check_range("epochs", self.epochs, 1, MAX_COUNT)
        _check_cache(self.cache)
        if self.memory_budget is not None:
            parse_bytes(self.memory_budget, "memory_budget")
        check_seed(self.seed)
        get_sampler(self.sampler)
        if not 0 < self.learning_rate <= 1:
            raise InputError(f"learning_rate {self.learning_rate}: must be above 0 and at most 1")
        if self.warmup > self.steps:
            raise InputError(f"warmup {self.warmup}: exceeds the {self.steps} steps of the run")
        if self.minutes is not None and not 0 < self.minutes <= MAX_COUNT:
            raise InputError(f"minutes {self.minutes}: must be above 0; omit it for no limit")
        if not 0 <= self.ema_decay < 1:
            raise InputError(f"ema_decay {self.ema_decay}: must be in [0, 1)")
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip {self.clip}: the maximum gradient norm must be above 0; omit it for no clipping")
        check_plan(self)
        if self.model.dimensions == 2:
            check_images(self)
        else:
            check_volumes(self)

    @property
    def samples_per_step(self) -> int:
        return self.batch * self.accumulation

    @property
    def requested_plan(self) -> Literal["auto", "baseline", "compile", "voxtune"]:
        """The plan; `compile` and `autocast` also name one."""
        if self.compile:
            return "compile"
        if self.memory_budget is not None:
            return "voxtune"
        return self.plan if self.autocast is None or self.plan == "compile" else "baseline"

    @property
    def requested_precision(self) -> Literal["auto", "default", "fp32", "tf32", "bf16", "fp16"]:
        """The precision; `autocast` also names one. "default": float32 with PyTorch's own flags of TF32."""
        if self.autocast is None or self.precision != "auto":
            return self.precision
        return "default" if self.autocast == "none" else self.autocast


def with_steps(config: TrainConfig, subjects: int) -> TrainConfig:
    """`config` with the number of steps in which the run sees every subject `epochs` times."""
    if config.epochs is None:
        return config
    steps = -(-config.epochs * subjects // config.samples_per_step)
    if config.steps not in (steps, DEFAULT_STEPS):
        raise InputError(
            f"steps {config.steps} and epochs {config.epochs} contradict each other: {config.epochs} epochs of {subjects} "
            f"subjects are {steps} steps; set one of them"
        )
    return replace(config, steps=min(steps, MAX_COUNT))


FORMAT = "voxtune-run/1"
# Settings that are paths, and their options.
PATHS = {"data.images": "--images", "data.masks": "--masks", "data.subjects": "--subjects", "model.init": "--init"}
# Settings that may change when a run is resumed, because they do not affect the weights of a given step.
FREE_TO_CHANGE = frozenset(
    {
        "steps",
        "epochs",
        "minutes",
        "workers",
        "cache",
        "deterministic",
        "checkpoint_every",
        "keep",
        "store",
        "log_every",
    }
    | {
        "sample_every",
        "sample_steps",
        "sampler",
        "tensorboard",
        "plan",
        "memory_budget",
        "max_skipped",
        "data.label_map",
        *PATHS,
    }
)
# With a decaying learning rate these do: they set how fast it decays.
DECAY_LENGTH = frozenset({"steps", "minutes"})


def check_plan(config: TrainConfig) -> None:
    """Raises if the older names of a plan and of a precision, `autocast` and `compile`, contradict the others."""
    if config.compile and config.plan not in ("auto", "compile"):
        raise InputError(f"compile cannot be combined with plan {config.plan}; omit one of them")
    if config.memory_budget is not None and (
        config.compile or config.autocast or config.plan not in ("auto", "voxtune")
    ):
        other = "compile" if config.compile else "autocast" if config.autocast else f"plan {config.plan}"
        raise InputError(f"memory_budget requires plan voxtune and cannot be combined with {other}; omit one of them")
    if config.autocast is None:
        return
    if config.plan == "voxtune":
        hint = "" if config.autocast == "fp16" else f"; use precision {_named(config.autocast)} instead"
        raise InputError(f"autocast {config.autocast} cannot be combined with plan voxtune{hint}")
    fits = ("auto", "fp32", "tf32") if config.autocast == "none" else ("auto", config.autocast)
    if config.precision not in fits:
        raise InputError(f"autocast {config.autocast} contradicts precision {config.precision}; omit one of them")


def _named(autocast: str) -> str:
    return "fp32" if autocast == "none" else autocast


def check_volumes(config: TrainConfig) -> None:
    """Raises for settings that do not apply to a network for volumes."""
    data = config.data
    if (data.images is None) != (data.masks is None):
        names = [w.name for w in WORKLOADS.values() if not w.network.mask_channels]
        hint = f"; images alone train --workload {' or '.join(names)}" if data.masks is None else ""
        raise InputError(f"data: {'masks' if data.masks is None else 'images'} is missing; pass both{hint}")
    if data.mirror is not None:
        raise InputError(f"data: mirror applies to images, not to the volumes of {config.model.workload}; omit it")
    _check_network_settings(config.model)


def check_images(config: TrainConfig) -> None:
    """Raises for settings that do not apply to an unconditional network for images."""
    name = config.model.workload
    if config.data.cohort is not None or config.data.subjects is not None:
        source = "packed subjects are" if config.data.cohort is None else "the simulated subjects are"
        raise InputError(f"data: {source} volumes; {name} trains on images: pass --images DIR")
    plain = DataSettings()
    of_masks = ("masks", "fit", "labels", "label_map", "overlapping")
    for setting in (*of_masks, "modalities", "spacing", "orientation", "mask_range", "scaling"):
        if getattr(config.data, setting) != getattr(plain, setting):
            raise InputError(f"data: {name} has no {setting}; omit it")
    _check_network_settings(config.model)


def _check_network_settings(model: ModelSettings) -> None:
    for setting in ("base", "blocks", "multipliers", "attention"):
        if getattr(model, setting) is not None and setting not in WORKLOADS[model.workload].network.settings:
            raise InputError(f"model: {model.workload} has no {setting}; omit it")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InputError(f"{name} {value}: must be in {low} to {high}")


def _check_cache(cache: str) -> None:
    if cache not in ("auto", "none"):
        try:
            parse_bytes(cache, "cache")
        except InputError:
            raise InputError(f"cache {cache[:40]!r}: must be auto, none or a size such as 8GB") from None


def _check_path(name: str, value: str | None) -> None:
    if value is not None and (not value.strip() or "\0" in value or not _encodable(value)):
        raise InputError(f"{name} {value[:80]!r}: not a path")


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Changed settings, as "name: old -> new", with which `new` cannot resume `old`."""
    before, after = _flat(to_mapping(old)), _flat(to_mapping(new))
    if old.samples_per_step == new.samples_per_step:  # the same samples in parts of another size
        before |= {name: after[name] for name in ("batch", "accumulation")}
    if {old.autocast, new.autocast} == {"none", None}:  # of a run before there were plans, and of today's default
        before["autocast"] = after["autocast"]
    fixed = DECAY_LENGTH if new.decay != "none" else frozenset()
    reasons = dict.fromkeys(fixed, ", over which the learning rate decays")
    changed = [k for k in before if before[k] != after[k] and (k in fixed or k not in FREE_TO_CHANGE)]
    return [f"{k}: {before[k]} -> {after[k]}{reasons.get(k, '')}" for k in changed]


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key] = value
    return flat


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The settings of a YAML or JSON file; `overrides` maps names such as "steps" or "data.images" to other values.

    Paths in the file are relative to its folder.
    """
    data = read_settings(path)
    if data.get("format") == FORMAT:
        del data["format"]
    folder = path.parent.absolute()
    return make_config(with_paths(data, lambda _name, value: str(folder / value)), overrides or {}, str(path))


def with_paths(data: dict[Any, Any], locate: Callable[[str, str], str]) -> dict[Any, Any]:
    """`data` with every path in it replaced by `locate(name of the setting, path)`."""
    located = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    for setting in PATHS:
        section, _, name = setting.partition(".")
        values = located.get(section)
        if isinstance(values, dict) and isinstance(values.get(name), str) and values[name].strip():
            values[name] = locate(setting, values[name])
    return located


def with_names(config: TrainConfig) -> TrainConfig:
    """The settings for records: names instead of paths."""
    data, model = config.data, config.model
    named = replace(data, images=_name(data.images), masks=_name(data.masks), subjects=_name(data.subjects))
    return replace(config, data=named, model=replace(model, init=_name(model.init)))


def _name(path: str | None) -> str | None:
    return None if path is None else recorded_path(path)


def make_config(data: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> TrainConfig:
    """The settings in `data`, replaced by `overrides` where given."""
    merged = {k: dict(v) if isinstance(v, Mapping) else v for k, v in data.items()}
    _override_source(merged, overrides)
    lengths = [name for name in ("steps", "epochs") if overrides.get(name) is not None]
    if len(lengths) > 1:
        raise InputError("steps and epochs cannot be combined: each sets the length of the run")
    if lengths:  # replaces the other one in the file
        merged.pop("epochs" if lengths == ["steps"] else "steps", None)
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        target = merged.setdefault(section, {}) if section else merged
        if isinstance(target, dict):
            target[name] = value
    # An empty section in YAML is null.
    settings = {k: v for k, v in merged.items() if not (k in ("data", "model") and v is None)}
    settings = {**_recipe(settings.get("model")), **settings}
    try:
        return from_mapping(TrainConfig, settings, where)
    except OverflowError:
        raise InputError(f"{where}: a number is too large for any setting") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for a config") from None


def _recipe(model: Any) -> dict[str, Any]:
    name = model.get("workload") if isinstance(model, dict) else None
    return to_mapping(WORKLOADS[name].recipe) if isinstance(name, str) and name in WORKLOADS else {}


def _override_source(merged: dict[Any, Any], overrides: Mapping[str, Any]) -> None:
    """A source of subjects in `overrides` replaces another one in the file."""
    section = merged.get("data")
    if not isinstance(section, dict):
        return
    sources = (("images", "masks"), ("cohort",), ("subjects",))
    given = [names for names in sources if any(f"data.{name}" in overrides for name in names)]
    for name in (name for names in sources if given and names not in given for name in names):
        section.pop(name, None)


def read_settings(path: Path) -> dict[Any, Any]:
    """The mapping in a YAML or JSON file as plain values; nothing in it is executed or expanded."""
    text = read_text(path, limit=MAX_FILE_BYTES, what="config of a training run")
    with reading(path, "config of a training run"):
        is_json = path.suffix.lower() == ".json"
        data = parse_json(text, path, pairs=_unique_pairs) if is_json else parse_yaml(text, path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of settings, got {_kind(data)}")
    return data


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise InputError(f"setting {key[:80]!r} is given twice")
        mapping[key] = value
    return mapping


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def setting_names() -> list[str]:
    """All settings of a config file; those of sections as "data.images"."""
    names: list[str] = []
    for outer in fields(TrainConfig):
        section = {"data": DataSettings, "model": ModelSettings}.get(outer.name)
        names += [outer.name] if section is None else [f"{outer.name}.{inner.name}" for inner in fields(section)]
    return names
