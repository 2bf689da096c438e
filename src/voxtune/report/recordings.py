"""The recorded sessions that ship with the package, for report and study without a GPU."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.profile.session import Session, find_sessions

ABSENT = (
    "this installation contains no recorded sessions (voxtune/recordings is empty); record one with voxtune profile"
)

# The configurations of the shipped recordings, which `voxtune profile --kit` records on other GPUs.
KIT_CONFIGS = (
    "baseline",
    "tf32",
    "channels_last",
    "tf32+channels_last",
    "bf16+channels_last",
    "bf16+channels_last+compile",
)


def root() -> Path:
    return Path(str(resources.files("voxtune"))) / "recordings"


def recorded_root() -> Path:
    """The folder of the shipped sessions; InputError if it is empty."""
    if not any(root().glob("**/session.json")):
        raise InputError(ABSENT)
    return root()


def recorded_sessions() -> list[Path]:
    """The folders of the shipped sessions."""
    return find_sessions(recorded_root())


def in_order(sessions: list[Session]) -> list[Session]:
    """Training before sampling; the baseline first, then by number of changes, compiled configurations last."""

    def place(session: Session) -> tuple[Any, ...]:
        config = str(session.meta["config"])
        parts = [p for p in config.split("+") if p != "baseline"]
        rare = [p for p in parts if p not in ("tf32", "channels_last")]
        return session.meta["mode"] != "train", "compile" in rare, len(rare), len(parts), "tf32" not in parts, config

    return sorted(sessions, key=place)
