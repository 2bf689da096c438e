"""Plans that were tuned or gated on this machine, so that the next run need not do it again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.plan.plan import Plan

log = logging.getLogger("voxtune")


def cache_folder() -> Path:
    """$VOXTUNE_CACHE, else the user's cache."""
    told = os.environ.get("VOXTUNE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(told).expanduser() if told else Path(base).expanduser() / "voxtune"


def _place(made_for: dict[str, Any]) -> Path:
    key = hashlib.blake2b(json.dumps(made_for, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder() / "plans" / f"{key}.json"


def graph_place(plan: Plan) -> Path:
    """Of the network rewritten by a plan, beside the plan: another plan for the same model has a graph of its own."""
    steps = hashlib.blake2b(json.dumps(plan.to_json()["passes"]).encode(), digest_size=4).hexdigest()
    place = _place(plan.made_for)
    return place.with_name(f"{place.stem}-{steps}.graph")


def remembered(made_for: dict[str, Any]) -> Plan | None:
    """The plan of exactly this model, shape, device and versions; a file that cannot be used is told and passed over."""
    path = _place(made_for)
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
    except InputError as error:
        log.warning("cached plan passed over: %s", error)
        return None
    return plan if plan.made_for == made_for else None


def remember(plan: Plan) -> None:
    """Best effort: a cache that cannot be written costs the next run its time, not this one its result."""
    path = _place(plan.made_for)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan.save(path)
    except (OSError, InputError) as error:
        log.warning("the plan could not be cached in %s: %s", path.parent, error)
