"""The folder of a training run: whether a run may be written there, its settings, and where its data is."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from voxtune.config import to_mapping
from voxtune.errors import InputError, advice
from voxtune.files import LOCK, PART, check_outputs, write_json
from voxtune.marks import written_by_voxtune
from voxtune.reading import read_json
from voxtune.training.checkpoint import CHECKPOINTS
from voxtune.training.config import (
    FORMAT,
    PATHS,
    TrainConfig,
    make_config,
    read_config,
    read_settings,
    with_names,
    with_paths,
)
from voxtune.training.log import METRICS, SAMPLES, TENSORBOARD

CONFIG, SOURCES, COMMANDS, FITS, MODEL = "train.json", "sources.json", "commands.json", "fits.json", "model"
SOURCES_FORMAT = "voxtune-sources/1"
# Files of a run, in the order in which they are deleted: what is left after an interruption is a run that knows its data, or
# a folder for a new one.
RUN_FILES = (
    *(f"{MODEL}/{name}" for name in ("README.md", "model.safetensors", "config.json")),
    *(f"{CHECKPOINTS}/step-*.safetensors", f"{CHECKPOINTS}/step-*.safetensors.damaged"),
    *(f"{SAMPLES}/step-*.png", f"{TENSORBOARD}/events.out.tfevents.*", METRICS, COMMANDS, FITS, CONFIG, SOURCES),
)
# What a run that was killed before its first setting leaves behind; .lock is that of version 0.1.
LEFTOVERS = {LOCK, ".lock", SOURCES}


def check_new_run(out: Path, *, overwrite: bool) -> None:
    """Raises unless a new run may be written to `out`: a new or empty folder, or with `overwrite` that of another run."""
    check_outputs([out / CONFIG], overwrite=True)
    if not out.is_dir() or all(path.name in LEFTOVERS or PART.fullmatch(path.name) for path in out.iterdir()):
        return
    if not written_by_voxtune(out / CONFIG):
        raise InputError(f"{out}: is not empty and contains no training run; choose another folder")
    if not overwrite:
        replace = advice("pass --overwrite to replace it", "pass overwrite=True to replace it")
        raise InputError(
            f"{out}: already contains a run; continue it with --resume {out}, {replace}, or choose another folder"
        )
    check_outputs(_run_files(out), overwrite=True, folder=out)


def delete_run(out: Path) -> None:
    """Deletes the files of an earlier run, which `check_new_run` has checked, and the folders that this empties."""
    for path in _run_files(out):
        if path.name == CONFIG:  # from here on, the folder is one for a new run, which has no other folders
            for folder in (MODEL, CHECKPOINTS, SAMPLES, TENSORBOARD):
                with suppress(OSError):  # holds other files, or does not exist
                    (out / folder).rmdir()
        path.unlink(missing_ok=True)


def _run_files(out: Path) -> list[Path]:
    return [path for pattern in RUN_FILES for path in sorted(out.glob(pattern))]


def write_settings(out: Path, config: TrainConfig) -> None:
    """Writes the settings with the names of the data, and in a file of its own where the data is, for a resume."""
    places = {name: _relative(path, out) for name, path in _paths(config).items()}
    if places:
        write_json(out / SOURCES, {"format": SOURCES_FORMAT, **places}, state=True)
    write_json(out / CONFIG, {"format": FORMAT, **to_mapping(with_names(config))}, state=True)


def _paths(config: TrainConfig) -> dict[str, str]:
    values = {name: getattr(getattr(config, name.split(".")[0]), name.split(".")[1]) for name in PATHS}
    return {name: value for name, value in values.items() if value is not None}


def _relative(path: str, out: Path) -> str:
    """The path from the run folder, so that a project can be moved as a whole; unchanged for another drive."""
    try:
        return Path(os.path.relpath(Path(path).absolute(), out.resolve())).as_posix()
    except ValueError:
        return path


def read_run(out: Path, overrides: Mapping[str, Any] | None = None) -> TrainConfig:
    """The settings of a run folder, replaced by `overrides` where given."""
    file, overrides = out / CONFIG, overrides or {}
    if not file.is_file():
        raise InputError(f"{out}: not a training run ({CONFIG} is missing); start one with -o {out}")
    data = read_settings(file)
    if data.pop("format", None) != FORMAT:  # of version 0.1, with the paths in it
        return read_config(file, overrides)
    places = _read_sources(out)
    moved = any(name in overrides for name in PATHS)

    def locate(name: str, recorded: str) -> str:
        if name not in places:
            if moved:
                return recorded
            raise InputError(
                f"{out}: {SOURCES}, which names the place of {recorded[:80]}, is missing; pass {PATHS[name]}"
            )
        path = Path(os.path.normpath(out.resolve() / places[name]))
        # Not Path.exists, which raises for a name that is too long.
        if not moved and not os.path.exists(path):  # noqa: PTH110
            raise InputError(
                f"{out / SOURCES}: {str(path)[:200]} not found, but the run needs it; if it was moved, pass {PATHS[name]}"
            )
        return str(path)

    return make_config(with_paths(data, locate), overrides, str(file))


def _read_sources(out: Path) -> dict[str, str]:
    if not (out / SOURCES).exists():
        return {}
    data = read_json(out / SOURCES)
    if not isinstance(data, dict) or data.get("format") != SOURCES_FORMAT:
        raise InputError(
            f"{out / SOURCES}: expected a file of format {SOURCES_FORMAT!r}; pass --images and --masks instead"
        )
    return {name: path for name, path in data.items() if name in PATHS and isinstance(path, str)}


def add_command(out: Path, command: str | None) -> list[str]:
    """The commands that started and resumed the run, this one included; stored in the run folder."""
    path = out / COMMANDS
    try:
        stored = read_json(path) if path.exists() else []
    except InputError:
        stored = []
    commands = [line for line in stored if isinstance(line, str)] if isinstance(stored, list) else []
    if command is None or commands[-1:] == [command]:
        return commands
    write_json(path, [*commands, command], state=True)
    return [*commands, command]


def add_fits(out: Path, fits: Sequence[Mapping[str, Any]]) -> None:
    """Adds settings that were changed because a step ran out of memory to those in the run folder, each of them once."""
    path = out / FITS
    try:
        stored = read_json(path) if path.exists() else []
    except InputError:
        stored = []
    before = stored if isinstance(stored, list) else []
    new = [dict(fit) for fit in fits if dict(fit) not in before]
    if new:
        write_json(path, [*before, *new], state=True)
