"""How a model is sampled: its own settings, and those that a table over held-out subjects found as good in fewer steps."""

from __future__ import annotations

import string
from dataclasses import asdict, dataclass
from typing import Any, Literal

from voxtune.diffusion.schedule import Spacing
from voxtune.errors import InputError

SamplerName = Literal["ddpm", "ddim", "dpm++", "sde-dpm++", "unipc", "ipndm"]
# A number of steps; "auto" is what is stored with the model; None is the model's default.
Steps = int | Literal["auto"] | None


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Deep features kept between steps: the whole network runs every `interval` steps, at the first and at the last.

    Between these, `depth` whole levels run, the outermost; with 0 the stem, the last block and the head alone.
    """

    interval: int
    depth: int = 1

    def __post_init__(self) -> None:
        if self.interval < 1 or self.depth < 0:
            raise InputError(f"cache {self}: the interval is 1 or more, the depth 0 or more")

    @classmethod
    def of(cls, told: Cache | str | int | None) -> Cache | None:
        """From a person: 3, or 3:0 with the depth after the colon."""
        if told is None or isinstance(told, Cache):
            return told
        parts = str(told).split(":")
        if len(parts) > 2 or not all(p.isascii() and p.isdigit() and len(p) <= 9 for p in parts):
            raise InputError(
                f"cache {str(told)[:40]!r}: give how often a full step comes, such as 3; or 3:0, with how many outer "
                "levels run between"
            )
        return cls(**dict(zip(("interval", "depth"), map(int, parts), strict=False)))

    def __str__(self) -> str:
        return f"{self.interval}" if self.depth == 1 else f"{self.interval}:{self.depth}"

    def check(self, steps: int) -> None:
        if self.interval > steps:
            raise InputError(f"cache {self}: a full step every {self.interval} steps, and there are only {steps}")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Where an automatic choice comes from: the table's file, its hash, and what it says in one line."""

    file: str
    sha256: str
    subjects: int
    summary: str

    def __post_init__(self) -> None:
        if not 0 < len(self.file) <= 255 or "/" in self.file or "\\" in self.file or not self.file.isprintable():
            raise InputError(f"evidence file {self.file[:80]!r}: give the bare name of a file")
        if len(self.sha256) != 64 or not set(self.sha256) <= set(string.hexdigits):
            raise InputError(f"evidence sha256 {self.sha256[:80]!r}: a SHA-256 has 64 hexadecimal digits")
        if self.subjects < 1:
            raise InputError(f"evidence of {self.subjects} subjects: at least 1 is needed")
        if len(self.summary) > 1000 or not self.summary.isprintable():
            raise InputError("evidence summary: one line of at most 1000 characters")


@dataclass(frozen=True, kw_only=True)
class AutoSampling:
    """What `steps="auto"` means for a model; written by `voxtune steps --store`."""

    sampler: SamplerName
    steps: int
    spacing: Spacing = "trailing"
    clip: bool = True
    cache: Cache | None = None
    evidence: Evidence

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InputError(f"steps must be at least 1, found {self.steps}")
        if self.cache is not None:
            self.cache.check(self.steps)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How a model is sampled when the caller does not say: by `auto` where it is stored, else by `sampler` in `steps` steps.

    `steps` None means every step there is.

    `start` is the first diffusion step taken, None the last one there is. `prior` is the mean intensity, in [-1, 1], of the
    background and of each mask channel: sampling then starts at N(signal * prior, noise^2), which is nearer to what the
    network was trained on than N(0, 1), where the signal is small but not nothing. The published sampling has neither.
    `auto` is what `steps="auto"` means, None where nothing was measured.
    """

    sampler: SamplerName = "ddpm"
    steps: int | None = None
    spacing: Spacing = "trailing"
    start: int | None = None
    prior: tuple[float, ...] | None = None
    auto: AutoSampling | None = None

    def __post_init__(self) -> None:
        if self.start is not None and self.start < 0:
            raise InputError(f"sampling start must be a diffusion step from 0 up, found {self.start}")
        if self.prior is not None and not all(-1 <= value <= 1 for value in self.prior):
            raise InputError(f"sampling prior {self.prior}: intensities lie in [-1, 1]")
        if self.steps is not None and self.steps < 1:
            raise InputError(f"sampling steps must be at least 1, found {self.steps}")

    def check(self, total: int, labels: int) -> None:
        """Raises for what does not fit a diffusion of `total` steps and masks of `labels` channels."""
        if self.start is not None and self.start >= total:
            raise InputError(f"sampling start {self.start}: the diffusion's steps are 0 to {total - 1}")
        available = total if self.start is None else self.start + 1
        asked = {"steps": self.steps, "auto steps": None if self.auto is None else self.auto.steps}
        for name, steps in asked.items():
            if steps is not None and steps > available:
                raise InputError(f"sampling {name} {steps} exceed the {available} there are")
        if self.prior is not None and len(self.prior) != labels + 1:
            raise InputError(f"sampling prior has {len(self.prior)} values for the background and {labels} labels")


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Settings with nothing left open. `auto` is the stored choice that they come from; `note` is for the person."""

    sampler: str
    steps: int
    spacing: Spacing
    clip: bool
    cache: Cache | None = None
    auto: AutoSampling | None = None
    note: str = ""

    def record(self) -> dict[str, Any]:
        """What goes beside a volume."""
        plain = {"sampler": self.sampler, "steps": self.steps, "spacing": self.spacing, "clip": self.clip}
        cache = {} if self.cache is None else {"cache": asdict(self.cache)}
        return {**plain, **cache, **({} if self.auto is None else {"steps_auto": asdict(self.auto.evidence)})}


def settle(
    config: SamplingConfig,
    available: int,
    *,
    sampler: str | None = None,
    steps: Steps = None,
    spacing: Spacing | None = None,
    clip: bool | None = None,
    cache: Cache | str | int | None = None,
) -> Drawing:
    """What the caller said, completed by what the model says: nothing said means the stored choice, where there is one."""
    if isinstance(steps, str) and steps != "auto":
        raise InputError(f"steps {steps!r}: give a whole number, or 'auto'")
    kept = Cache.of(cache)
    asked = {"sampler": sampler, "spacing": spacing, "clip": clip, "cache": kept}
    silent = steps is None and all(value is None for value in asked.values())
    if (steps == "auto" or silent) and config.auto is not None:
        chosen = config.auto
        for name, value in asked.items():
            if value is not None and value != getattr(chosen, name):
                raise InputError(
                    f"{name} {value} with steps 'auto': the stored choice was measured with {name} "
                    f"{getattr(chosen, name)}; leave {name} out, or give a number of steps"
                )
        return Drawing(
            sampler=chosen.sampler,
            steps=chosen.steps,
            spacing=chosen.spacing,
            clip=chosen.clip,
            cache=chosen.cache,
            auto=chosen,
        )
    default = config.steps or available
    number = default if steps is None or isinstance(steps, str) else steps
    if kept is not None:
        kept.check(number)
    note = f"steps auto: nothing is stored with this model, so its default of {default}; `voxtune steps` measures"
    return Drawing(
        sampler=sampler or config.sampler,
        steps=number,
        spacing=spacing or config.spacing,
        clip=True if clip is None else clip,
        cache=kept,
        note=note if steps == "auto" else "",
    )
