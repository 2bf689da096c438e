"""Options with a fixed set of values, and option spellings that are deprecated.

The values come from registries, and most of those import torch. They are read only when a value is checked or the help
of a command is printed, so that `voxtune --help` stays fast. In a help text, `{sampler}` stands for the names of the
samplers, and likewise for every other key of REGISTRIES and DEFAULTS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from voxtune.errors import command_options
from voxtune.files import recording_paths

# Deprecated option -> its name today. Accepted with a warning, and left out of the help.
OLD_OPTIONS = {
    "--output": "--out",
    "--shape": "--size",
    "--spacing": "--timestep-spacing",
    "--spacings": "--timestep-spacings",
}


def _samplers() -> Iterable[str]:
    from voxtune.diffusion import SAMPLERS

    return SAMPLERS


def _timestep_spacings() -> Iterable[str]:
    from voxtune.diffusion import TIMESTEP_SPACINGS

    return TIMESTEP_SPACINGS


def _noise_rules() -> Iterable[str]:
    from voxtune.diffusion.noise import NoiseRule

    return get_args(NoiseRule)


def _fits() -> Iterable[str]:
    from voxtune.data.grid import Mode

    return get_args(Mode)


def _workloads() -> Iterable[str]:
    from voxtune.workloads import WORKLOADS

    return WORKLOADS


def _trainable() -> Iterable[str]:
    return (*_workloads(), "segment")


def _training(setting: str) -> Callable[[], Iterable[str]]:
    def values() -> Iterable[str]:
        from voxtune.training.config import TrainConfig

        values = get_args(get_type_hints(TrainConfig)[setting])
        return get_args(values[0]) or values  # of Literal[...] | None, or of Literal[...]

    return values


def _training_default(setting: str) -> Callable[[], Iterable[str]]:
    """The default of a training setting, with the workloads whose recipe differs."""

    def values() -> Iterable[str]:
        from voxtune.segmentation.train import SegmentTraining
        from voxtune.training.config import TrainConfig
        from voxtune.workloads import WORKLOADS

        default = next(f.default for f in fields(TrainConfig) if f.name == setting)
        others = {w.name: getattr(w.recipe, setting, default) for w in WORKLOADS.values()}
        others["segment"] = getattr(SegmentTraining, setting, default)
        different = [f"{name}: {_plain(value)}" for name, value in others.items() if value != default]
        return (_plain(default) + (f" ({', '.join(different)})" if different else ""),)

    return values


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default_workload() -> Iterable[str]:
    from voxtune.workloads import DEFAULT_WORKLOAD

    return (DEFAULT_WORKLOAD,)


def _step_configs() -> Iterable[str]:
    from voxtune.profile.configs import BASELINE, PARTS

    return (BASELINE, *PARTS)


def _tiers() -> Iterable[str]:
    from voxtune.profile.record import TIERS

    return TIERS


def _estimate_configs() -> Iterable[str]:
    from voxtune.analysis.estimate import PARTS

    return PARTS


def _cards() -> Iterable[str]:
    from voxtune.analysis.estimate import cards

    return cards()


def _engines() -> Iterable[str]:
    from voxtune.scale.engine import ENGINES

    return ENGINES


def _studies() -> Iterable[str]:
    return ("paper",)


REGISTRIES: dict[str, Callable[[], Iterable[str]]] = {
    "sampler": _samplers,
    "timestep_spacing": _timestep_spacings,
    "noise": _noise_rules,
    "fit": _fits,
    "workload": _workloads,
    "trainable": _trainable,
    "decay": _training("decay"),
    "loss": _training("loss"),
    "precision": _training("precision"),
    "training_plan": _training("plan"),
    "autocast": _training("autocast"),
    "configuration": _step_configs,
    "tier": _tiers,
    "estimate": _estimate_configs,
    "gpu": _cards,
    "study": _studies,
    "engine": _engines,
}

DEFAULTS: dict[str, Callable[[], Iterable[str]]] = {
    "default_workload": _default_workload,
    **{
        f"default_{setting}": _training_default(setting)
        for setting in (
            *(
                "steps",
                "batch",
                "accumulation",
                "learning_rate",
                "warmup",
                "decay",
                "loss",
                "precision",
                "plan",
                "seed",
            ),
            *("checkpoint_every", "sample_every"),
        )
    },
}


def one_of(kind: str, *, word: str | None = None, old: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Keywords for typer.Option or typer.Argument: the value must be in the registry `kind`.

    `word` names the kind in the error message. `old` maps deprecated values to those of today.
    """
    renamed = dict(old or {})

    def check(context: typer.Context, value: str | None) -> str | None:
        if value is None or context.resilient_parsing:
            return value
        if value in renamed:
            warn_deprecated(value, renamed[value])
            return renamed[value]
        names = list(REGISTRIES[kind]())
        if value not in names:
            raise typer.BadParameter(f"unknown {word or kind} {value[:80]!r}; choose from {', '.join(names)}")
        return value

    def complete(incomplete: str) -> list[str]:
        return [name for name in REGISTRIES[kind]() if name.startswith(incomplete)]

    return {"callback": check, "autocompletion": complete}


# What a deprecated option means, where its name can be mistaken.
MEANINGS = {"--spacing": "the spacing of the timesteps; the spacing of the voxels is the model's"}


def warn_deprecated(old: str, new: str) -> None:
    print(f"warning: {old} is deprecated; use {new}", file=sys.stderr)


class Command(TyperCommand):
    """A command that accepts deprecated option spellings and lists the values of its options in its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._with_current_options(args))

    def invoke(self, ctx: Any) -> Any:
        # --record-paths applies to everything that the command writes, so it is handled here and not passed on.
        allowed = ctx.params.pop("record_paths", False)
        with command_options(name for param in self.params for name in param.opts), recording_paths(allowed):
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for param in self.params:
            text = getattr(param, "help", None) or ""
            for kind, names in (REGISTRIES | DEFAULTS).items():
                if f"{{{kind}}}" in text:
                    text = text.replace(f"{{{kind}}}", ", ".join(names()))
                    param.help = text  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def _with_current_options(self, args: list[str]) -> list[str]:
        options = {name for param in self.params for name in param.opts}
        renamed = {old: new for old, new in OLD_OPTIONS.items() if old not in options and new in options}
        current = list(args)
        for i, argument in enumerate(args):
            if argument == "--":
                break
            name, equals, value = argument.partition("=")
            if name in renamed:
                meaning = f" ({MEANINGS[name]})" if name in MEANINGS else ""
                warn_deprecated(name, renamed[name] + meaning)
                current[i] = f"{renamed[name]}{equals}{value}"
        return current
