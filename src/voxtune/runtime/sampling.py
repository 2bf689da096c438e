"""Sampler settings: the options a caller gives, the settings a model stores, and the resolved form that a sampler runs with."""

from __future__ import annotations

import itertools
import logging
import string
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, TypedDict

from voxtune.config import current_names, from_mapping
from voxtune.diffusion.samplers import get_sampler
from voxtune.diffusion.schedule import check_timestep_spacing
from voxtune.errors import InputError

log = logging.getLogger("voxtune")

# "auto" selects the settings stored with the model; None is the model's default.
Steps = int | Literal["auto"] | None


class SamplerOptions(TypedDict, total=False):
    """Sampling keywords as a caller gives them; None and a missing key mean the same. `Model.resolve` completes them."""

    sampler: str | None
    steps: Steps
    timestep_spacing: str | None
    spacing: str | None  # deprecated name of timestep_spacing
    clip: bool | None
    cache: FeatureCache | str | int | None


@dataclass(frozen=True, kw_only=True)
class FeatureCache:
    """Deep features are reused between steps: the full network runs every `interval` steps, and at the first and last.

    In between, only the `depth` outermost levels run; with depth 0 only the stem, the last block and the head.
    """

    interval: int
    depth: int = 1

    def __post_init__(self) -> None:
        if self.interval < 1 or self.depth < 0:
            raise InputError(f"cache {self}: the interval must be >= 1 and the depth >= 0")

    @classmethod
    def parse(cls, value: FeatureCache | str | int | None) -> FeatureCache | None:
        """From INTERVAL or INTERVAL:DEPTH, such as 3 or "3:0"."""
        if value is None or isinstance(value, FeatureCache):
            return value
        parts = str(value).split(":")
        if len(parts) > 2 or not all(p.isascii() and p.isdigit() and len(p) <= 9 for p in parts):
            raise InputError(f"cache {str(value)[:40]!r}: expected INTERVAL or INTERVAL:DEPTH, such as 3 or 3:0")
        return cls(**dict(zip(("interval", "depth"), map(int, parts), strict=False)))

    def __str__(self) -> str:
        return f"{self.interval}" if self.depth == 1 else f"{self.interval}:{self.depth}"


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """Resolved sampler settings, passed as one object from the command line to the sampler."""

    OLD_NAMES: ClassVar[dict[str, str]] = {"spacing": "timestep_spacing"}

    sampler: str
    steps: int
    timestep_spacing: str = "trailing"
    clip: bool = True
    cache: FeatureCache | None = None
    # In place of a spacing: the steps themselves, as learned for a distilled model.
    timesteps: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        get_sampler(self.sampler)
        check_timestep_spacing(self.timestep_spacing)
        if self.timesteps is not None:
            check_timesteps(self.timesteps, self.steps)
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 1:
            raise InputError(f"steps must be a whole number of at least 1, got {self.steps!r}")
        if not isinstance(self.clip, bool):
            raise InputError(f"clip must be True or False, got {self.clip!r}")
        if self.cache is not None and self.cache.interval > self.steps:
            raise InputError(f"cache {self.cache}: the interval exceeds the number of steps, {self.steps}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> SamplerSettings:
        """The settings among the keys of a larger record; `where` names the record in error messages."""
        names = ("sampler", "steps", "timestep_spacing", "clip", "cache", "timesteps")
        current = current_names(SamplerSettings, data)
        return from_mapping(SamplerSettings, {name: current[name] for name in names if name in current}, where)

    def to_json(self) -> dict[str, Any]:
        """The settings for tables and records, without `cache` where features are not cached, and without default timesteps."""
        names = ("sampler", "steps", "timestep_spacing", "clip")
        values = {name: getattr(self, name) for name in names}
        values |= {} if self.cache is None else {"cache": asdict(self.cache)}
        return values if self.timesteps is None else {**values, "timesteps": list(self.timesteps)}

    def record(self) -> dict[str, Any]:
        """The settings in the sidecar of a generated volume, in `voxtune info --json` and in `voxtune sample --json`."""
        return self.to_json()

    def describe(self) -> str:
        """The settings in a line, as the commands print them."""
        spacing = f"{self.timestep_spacing} timesteps"
        if self.timesteps is not None:
            spacing = f"timesteps {' '.join(map(str, self.timesteps))}"
        parts = [self.sampler, f"{self.steps} steps", spacing]
        parts += [] if self.clip else ["not clamped"]
        parts += [f"feature cache {self.cache}"] if self.cache else []
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The measurement behind stored settings: the table's file name, its hash, the subjects and a summary in one line."""

    file: str
    sha256: str
    subjects: int
    summary: str

    def __post_init__(self) -> None:
        if not 0 < len(self.file) <= 255 or "/" in self.file or "\\" in self.file or not self.file.isprintable():
            raise InputError(f"evidence file {self.file[:80]!r}: expected a file name without a folder")
        if len(self.sha256) != 64 or not set(self.sha256) <= set(string.hexdigits):
            raise InputError(f"evidence sha256 {self.sha256[:80]!r}: expected 64 hexadecimal digits")
        if self.subjects < 1:
            raise InputError(f"evidence subjects must be at least 1, got {self.subjects}")
        if len(self.summary) > 1000 or not self.summary.isprintable():
            raise InputError("evidence summary: expected one line of at most 1000 characters")


@dataclass(frozen=True, kw_only=True)
class AutoSampling(SamplerSettings):
    """Settings stored with a model by `voxtune steps --store`, and the evidence for them: the meaning of `steps="auto"`."""

    evidence: Evidence

    def record(self) -> dict[str, Any]:
        return {**self.to_json(), "steps_auto": asdict(self.evidence)}

    def describe(self) -> str:
        return f"{super().describe()} (stored by voxtune steps, measured on {self.evidence.subjects} subjects)"


@dataclass(frozen=True, kw_only=True)
class Distilled(SamplerSettings):
    """The few steps that a distilled model was trained for, which are the only ones it can be sampled with.

    `teacher` is the name of the model it was distilled from, and `teacher_sha256` the hash of that model's weights.
    """

    teacher: str
    teacher_sha256: str
    teacher_steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timesteps is None or self.cache is not None:
            raise InputError("a distilled model requires its timesteps, and has no feature cache")
        if len(self.teacher) > 255 or not self.teacher.isprintable():
            raise InputError(f"teacher {self.teacher[:80]!r}: expected a name of at most 255 characters")
        if len(self.teacher_sha256) != 64 or not set(self.teacher_sha256) <= set(string.hexdigits):
            raise InputError(f"teacher_sha256 {self.teacher_sha256[:80]!r}: expected 64 hexadecimal digits")
        if self.teacher_steps < 1:
            raise InputError(f"teacher_steps must be at least 1, got {self.teacher_steps}")

    def record(self) -> dict[str, Any]:
        origin = {"model": self.teacher, "model_sha256": self.teacher_sha256, "steps": self.teacher_steps}
        return {**self.to_json(), "distilled_from": origin}

    def describe(self) -> str:
        return f"{super().describe()} (distilled from {self.teacher})"

    def resolve(self, steps: Steps, options: Mapping[str, Any]) -> Distilled:
        """Itself; raises InputError for other steps or options, which the weights were not trained for."""
        for name, value in {**({} if steps in (None, "auto") else {"steps": steps}), **options}.items():
            if value != getattr(self, name):
                raise InputError(
                    f"{name} {value}: this model was distilled to {SamplerSettings.describe(self)} and has no other settings; "
                    f"omit {name}, or sample its teacher {self.teacher}"
                )
        return self


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """A model's sampling defaults: `distilled` or `auto` where stored, otherwise `sampler` with `steps` (None: all steps).

    `start` is the first diffusion step, None for the last one of the schedule. `prior` is the mean intensity, in [-1, 1], of
    the background and of each class of voxels (each mask channel; with overlapping labels each combination of channels). With
    it, sampling starts at N(signal * prior, noise^2) and not at N(0, 1), which is closer to the training distribution where
    the signal at `start` is small but not zero. The published sampling uses neither.
    """

    OLD_NAMES: ClassVar[dict[str, str]] = SamplerSettings.OLD_NAMES

    sampler: str = "ddpm"
    steps: int | None = None
    timestep_spacing: str = "trailing"
    start: int | None = None
    prior: tuple[float, ...] | None = None
    auto: AutoSampling | None = None
    distilled: Distilled | None = None

    def __post_init__(self) -> None:
        get_sampler(self.sampler)
        check_timestep_spacing(self.timestep_spacing)
        if self.start is not None and self.start < 0:
            raise InputError(f"sampling start must be >= 0, got {self.start}")
        if self.prior is not None and not all(-1 <= value <= 1 for value in self.prior):
            raise InputError(f"sampling prior {self.prior}: intensities must lie in [-1, 1]")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"sampling steps must be at least 1, got {self.steps}")

    def check(self, total: int, classes: int) -> None:
        """Raises for values that do not fit a diffusion of `total` steps and masks of `classes` besides the background."""
        if self.start is not None and self.start >= total:
            raise InputError(f"sampling start {self.start}: the diffusion's steps are 0 to {total - 1}")
        available = total if self.start is None else self.start + 1
        auto_steps = None if self.auto is None else self.auto.steps
        if self.distilled is not None and max(self.distilled.timesteps or ()) >= available:
            raise InputError(f"sampling distilled: timesteps must be below the {available} available steps")
        for name, steps in (("steps", self.steps), ("auto steps", auto_steps)):
            if steps is not None and steps > available:
                raise InputError(f"sampling {name} {steps} exceed the {available} available steps")
        if self.prior is not None and len(self.prior) != classes + 1:
            raise InputError(f"sampling prior has {len(self.prior)} values for the background and {classes} labels")

    def resolve(
        self,
        available: int,
        *,
        sampler: str | None = None,
        steps: Steps = None,
        timestep_spacing: str | None = None,
        spacing: str | None = None,
        clip: bool | None = None,
        cache: FeatureCache | str | int | None = None,
        warn: Callable[[str], None] = log.warning,
    ) -> SamplerSettings:
        """The options completed by the model's settings; without any option, the stored settings with their evidence.

        A number of steps or another single option changes only that: the rest is as stored, except the feature cache, which
        was measured for the stored settings alone. With another sampler, the rest is the model's default, of all `available`
        steps. `unmeasured` tells the difference.
        """
        if isinstance(steps, str) and steps != "auto":
            raise InputError(f"steps {steps!r}: expected a whole number or 'auto'")
        if spacing is not None:
            warnings.warn("spacing is now timestep_spacing", DeprecationWarning, stacklevel=_caller_level())
            timestep_spacing = timestep_spacing or spacing
        options: dict[str, Any] = {
            "sampler": sampler,
            "timestep_spacing": timestep_spacing,
            "clip": clip,
            "cache": FeatureCache.parse(cache),
        }
        given = {name: value for name, value in options.items() if value is not None}
        if self.distilled is not None:
            return self.distilled.resolve(steps, given)
        if self.auto is not None and (steps == "auto" or (steps is None and not given)):
            for name, value in given.items():
                if value != getattr(self.auto, name):
                    raise InputError(
                        f"{name} {value} cannot be combined with steps 'auto': the stored settings have {name} "
                        f"{getattr(self.auto, name)}; omit {name} or give a number of steps"
                    )
            return self.auto
        if steps == "auto":
            steps = None
            warn(
                "steps 'auto': no settings are stored with this model; using its default of "
                f"{self.steps or available} steps (measure and store settings with voxtune steps --store)"
            )
        base = SamplerSettings(
            sampler=self.sampler, steps=self.steps or available, timestep_spacing=self.timestep_spacing
        )
        if self.auto is not None and sampler in (None, self.auto.sampler):
            base = SamplerSettings.from_json({**self.auto.to_json(), "cache": None}, "stored settings")
        if steps is not None:
            given["steps"] = steps
        if base.timesteps is not None and given.keys() & {"steps", "timestep_spacing"}:
            given["timesteps"] = None
        return replace(base, **given)

    def unmeasured(self, settings: SamplerSettings) -> str | None:
        """A line if the stored evidence is not about `settings`, or if they have a feature cache without evidence."""
        if self.auto is None or self.distilled is not None:
            if settings.cache is None or settings.cache.interval == 1:
                return None
            return f"cache {settings.cache} was not measured for this model; measure it with voxtune steps --cache"
        if settings.to_json() == self.auto.to_json():
            return None
        return f"the stored evidence is for {SamplerSettings.describe(self.auto)}; it does not apply to {settings.describe()}"


def check_timesteps(timesteps: tuple[int, ...], steps: int) -> None:
    if (
        not timesteps
        or len(timesteps) != steps
        or timesteps[-1] < 0
        or any(a <= b for a, b in itertools.pairwise(timesteps))
    ):
        raise InputError(f"timesteps {list(timesteps)[:8]}: expected {steps} decreasing numbers of at least 0")


def _caller_level() -> int:
    """The `stacklevel` of the nearest caller outside this package and torch, whose decorators are frames too."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("voxtune", "torch"):
        level, frame = level + 1, frame.f_back
    return level
