"""What a training run is: its settings, checked, and read from YAML or JSON."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from voxtune.config import from_mapping, to_mapping
from voxtune.data.cohort import HELD_OUT
from voxtune.data.contract import Label
from voxtune.data.orientation import check_orientation
from voxtune.diffusion import get_sampler
from voxtune.diffusion.noise import check_seed
from voxtune.errors import InputError
from voxtune.files import reporting_os_errors
from voxtune.workloads import DEFAULT_WORKLOAD, WORKLOADS
from voxtune.workloads import workload as find_workload

RECIPE = WORKLOADS[DEFAULT_WORKLOAD].recipe

# PyYAML follows YAML 1.1, to which 1e-5 is a string.
NUMBER = re.compile(r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")


def parse_yaml(text: str) -> Any:
    """The one document in `text`; InputError, or ValueError of a bad number or date, where it is none."""
    try:
        import yaml
    except ImportError:
        raise InputError("reading YAML needs PyYAML: install pyyaml, or write the config as .json") from None
    try:
        return yaml.load(text, Loader=_loader())
    except yaml.YAMLError as error:
        raise InputError(f"not valid YAML: {' '.join(str(error).split())[:300]}") from None
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        # An explicit tag on a value of another kind (!!bool maybe) trips PyYAML's own constructors.
        raise InputError(f"not valid YAML: a tagged value does not fit its tag ({error})") from None


def parse_value(text: str) -> Any:
    """The value in an option such as `--set clip=1.0`; without PyYAML as JSON, and what is none is a plain word."""
    if importlib.util.find_spec("yaml") is not None:
        return parse_yaml(text)
    try:
        return json.loads(text)
    except ValueError:
        if set(text) & set("[]{}\"'"):
            raise InputError(f"{text[:80]}: not valid JSON, and PyYAML is not installed") from None
        return text


@cache
def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            # A few aliases of aliases stand for gigabytes once anything prints or walks them.
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise InputError(f"line {mark.line + 1}: aliases (*name) are not taken; write the value out")
            return super().compose_node(parent, index)

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


MAX_FILE_BYTES = 2**20
MAX_COUNT = 10**9


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Where the subjects come from, and what differs from the workload's data contract (None: nothing)."""

    images: str | None = None
    masks: str | None = None
    cohort: int | None = None
    cohort_seed: int = 0
    subjects: str | None = None
    fit: Literal["auto", "pad", "resample"] = "auto"
    labels: tuple[Label, ...] | None = None
    modalities: tuple[str, ...] | None = None
    spacing: tuple[float, float, float] | None = None
    orientation: str | None = None
    mask_range: Literal["signed", "unit"] | None = None
    scaling: Literal["volume", "slice"] | None = None
    mirror: bool | None = None

    def __post_init__(self) -> None:
        folders = self.images is not None or self.masks is not None
        if folders + (self.cohort is not None) + (self.subjects is not None) > 1:
            raise InputError("data: give folders (images, masks), a cohort or packed subjects, not both")
        if self.cohort is not None:
            _check_range("cohort", self.cohort, 1, HELD_OUT)
        _check_range("cohort_seed", self.cohort_seed, 0, 2**63 - 1)
        if self.orientation is not None:
            check_orientation(self.orientation[:40])
        _check_path("data: images", self.images)
        _check_path("data: masks", self.masks)
        _check_path("data: subjects", self.subjects)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The network: a stored model to go on from (`init`), or a fresh one. None: as `init`, or the workload, has it."""

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
        _check_path("model: init", self.init)
        if self.size is not None and len(self.size) != self.dimensions:
            raise InputError(f"model: size {self.size[:8]}: {self.workload} takes {self.dimensions} sides")
        if self.size is not None and not all(1 <= side <= 4096 for side in self.size):
            raise InputError(f"model: size {self.size}: sides must lie in 1 to 4096")

    @property
    def dimensions(self) -> int:
        return WORKLOADS[self.workload].network.dimensions


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. A step is one update of the weights, made of `accumulation` batches."""

    data: DataSettings = field(default_factory=DataSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    steps: int = 100_000
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
    autocast: Literal["none", "bf16", "fp16"] = "none"
    channels_last: bool = False
    compile: bool = False
    workers: int = 2
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
        for name in ("steps", "batch", "accumulation", "ema_every", "checkpoint_every", "keep", "log_every"):
            _check_range(name, getattr(self, name), 1, MAX_COUNT)
        for name in ("warmup", "ema_start", "sample_every"):
            _check_range(name, getattr(self, name), 0, MAX_COUNT)
        _check_range("sample_steps", self.sample_steps, 1, 100_000)
        _check_range("workers", self.workers, 0, 64)
        check_seed(self.seed)
        get_sampler(self.sampler)
        if not 0 < self.learning_rate <= 1:
            raise InputError(f"learning_rate {self.learning_rate}: must lie above 0 and at most at 1")
        if self.warmup > self.steps:
            raise InputError(f"warmup {self.warmup}: longer than the run's {self.steps} steps; give fewer")
        if self.minutes is not None and not 0 < self.minutes <= MAX_COUNT:
            raise InputError(f"minutes {self.minutes}: must lie above 0; leave it out for no limit")
        if not 0 <= self.ema_decay < 1:
            raise InputError(f"ema_decay {self.ema_decay}: must lie in [0, 1)")
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip {self.clip}: the largest gradient norm must be above 0; leave it out for none")
        if self.model.dimensions == 2:
            check_images(self)
        else:
            check_volumes(self)

    @property
    def samples_per_step(self) -> int:
        return self.batch * self.accumulation


# What may change when a run is continued: none of it reaches the weights of a given step.
FREE_TO_CHANGE = frozenset(
    {"steps", "minutes", "workers", "checkpoint_every", "keep", "store", "log_every", "sample_every", "sample_steps"}
    | {"sampler", "tensorboard", "data.images", "data.masks", "data.subjects", "model.init"}
)
# But these, where the learning rate decays: they say how fast.
OF_DECAY = frozenset({"steps", "minutes"})


def check_volumes(config: TrainConfig) -> None:
    """Raises for settings that do not apply to a network for volumes, which requires masks."""
    data = config.data
    if (data.images is None) != (data.masks is None):
        names = [w.name for w in WORKLOADS.values() if not w.network.mask_channels]
        hint = f"; images alone train --workload {' or '.join(names)}" if data.masks is None else ""
        raise InputError(f"data: {'masks' if data.masks is None else 'images'} is missing; the two go together{hint}")
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
    for setting in ("masks", "fit", "labels", "modalities", "spacing", "orientation", "mask_range", "scaling"):
        if getattr(config.data, setting) != getattr(plain, setting):
            raise InputError(f"data: {name} has no {setting}; omit it")
    _check_network_settings(config.model)


def _check_network_settings(model: ModelSettings) -> None:
    for setting in ("base", "blocks", "multipliers", "attention"):
        if getattr(model, setting) is not None and setting not in WORKLOADS[model.workload].network.settings:
            raise InputError(f"model: {model.workload} has no {setting}; omit it")


def _check_range(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise InputError(f"{name} {value}: must lie in {low} to {high}")


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
    """The settings, as "name: old -> new", that make `new` another run than `old`."""
    before, after = _flat(to_mapping(old)), _flat(to_mapping(new))
    held = OF_DECAY if new.decay != "none" else frozenset()
    why = dict.fromkeys(held, ", over which the learning rate decays")
    changed = [k for k in before if before[k] != after[k] and (k in held or k not in FREE_TO_CHANGE)]
    return [f"{k}: {before[k]} -> {after[k]}{why.get(k, '')}" for k in changed]


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update({f"{key}.{k}": v for k, v in value.items()})
        else:
            flat[key] = value
    return flat


def read_config(path: Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The run that a YAML or JSON file describes; `overrides` maps "steps" or "data.images" to what replaces it.

    Relative paths in the file count from its folder.
    """
    data = read_settings(path)
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a mapping of settings, found {_kind(data)}")
    for section, names in (("data", ("images", "masks", "subjects")), ("model", ("init",))):
        part = data.get(section)
        for name in names:
            if isinstance(part, dict) and isinstance(part.get(name), str) and part[name].strip():
                part[name] = str(path.parent.absolute() / part[name])
    return make_config(data, overrides or {}, str(path))


def make_config(data: Mapping[str, Any], overrides: Mapping[str, Any], where: str) -> TrainConfig:
    """`data` as read from a file with `overrides` put over it, checked."""
    merged = {k: dict(v) if isinstance(v, Mapping) else v for k, v in data.items()}
    _override_source(merged, overrides)
    for key, value in overrides.items():
        section, _, name = key.rpartition(".")
        target = merged.setdefault(section, {}) if section else merged
        if isinstance(target, dict):
            target[name] = value
    # A section left empty in YAML is null: nothing is set in it.
    settings = {k: v for k, v in merged.items() if not (k in ("data", "model") and v is None)}
    settings = {**_recipe(settings.get("model")), **settings}
    try:
        return from_mapping(TrainConfig, settings, where)
    except OverflowError:
        raise InputError(f"{where}: holds a number too large for any setting") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply for a config") from None
    except InputError as error:
        text = str(error)
        raise InputError(text if len(text) <= 600 else f"{text[:600]}...") from None


def _recipe(model: Any) -> dict[str, Any]:
    name = model.get("workload") if isinstance(model, dict) else None
    return to_mapping(WORKLOADS[name].recipe) if isinstance(name, str) and name in WORKLOADS else {}


def _override_source(merged: dict[Any, Any], overrides: Mapping[str, Any]) -> None:
    """An option that names the subjects replaces the file's other way of naming them."""
    part = merged.get("data")
    if not isinstance(part, dict):
        return
    ways = (("images", "masks"), ("cohort",), ("subjects",))
    given = [way for way in ways if any(f"data.{name}" in overrides for name in way)]
    for name in (name for way in ways if given and way not in given for name in way):
        part.pop(name, None)


def read_settings(path: Path) -> Any:
    """What a YAML or JSON file holds, as plain values; nothing in it can run code or grow."""
    with reporting_os_errors(path), path.open("rb") as file:
        raw = file.read(MAX_FILE_BYTES + 1)
    if len(raw) > MAX_FILE_BYTES:
        raise InputError(f"{path}: larger than any config of a training run; is this the right file?")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not a text file ({error.reason} at byte {error.start})") from None
    try:
        if path.suffix.lower() == ".json":
            return json.loads(text, object_pairs_hook=_unique_pairs)

        return parse_yaml(text)
    except RecursionError:
        raise InputError(f"{path}: nested too deeply for a config") from None
    except (ValueError, OverflowError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())[:300]}") from None


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InputError(f"setting {key[:80]!r} is given twice")
        found[key] = value
    return found


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def setting_names() -> list[str]:
    """Every setting of a config file, sections as "data.images"."""
    names: list[str] = []
    for outer in fields(TrainConfig):
        part = {"data": DataSettings, "model": ModelSettings}.get(outer.name)
        names += [outer.name] if part is None else [f"{outer.name}.{inner.name}" for inner in fields(part)]
    return names
