"""Plans that were tuned or gated on this machine, so that the next run need not do it again."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import logging
import os
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from voxtune.errors import InputError
from voxtune.plan.plan import Plan
from voxtune.plan.run import Inputs, Signature


def identity(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    signature = Signature.of(*inputs)
    return {
        "model": network_hash(model),
        "inputs": [list(map(str, leaf)) if isinstance(leaf, tuple) else leaf for leaf in signature.leaves],
        "arrangement": signature.structure,
        "device": device_name(signature.device),
        "versions": versions(),
    }


def network_hash(model: nn.Module) -> str:
    """Of what decides a network's answer, as far as it can be seen: classes, their code, settings, weights and buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, module in model.named_modules():
        kind = type(module)
        digest.update(f"{name}:{kind.__module__}.{kind.__qualname__}:{module.extra_repr()};".encode())
        digest.update(f"{_settings(module)};{_code(getattr(kind.forward, '__code__', None))};".encode())
    kept = model.state_dict()
    # Buffers that are not saved belong to the answer as well.
    for name, tensor in [*kept.items(), *((n, b) for n, b in model.named_buffers() if n not in kept)]:
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _settings(module: nn.Module) -> str:
    """A module's own plain attributes: the number of heads, a scale, a flag. What has no stable words is left out."""
    plain = {name: _words(value) for name, value in vars(module).items() if not name.startswith("_")}
    return repr(sorted((name, words) for name, words in plain.items() if words is not None and name != "training"))


def _words(value: Any) -> str | None:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_words(one) for one in value]
        return f"{type(value).__name__}{sorted(map(str, parts)) if isinstance(value, set | frozenset) else parts}"
    if isinstance(value, dict):
        return str([(str(key), _words(one)) for key, one in value.items()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return str([(field.name, _words(getattr(value, field.name))) for field in dataclasses.fields(value)])
    return None


def _code(code: Any) -> str:
    """A function's instructions and constants, those of functions inside it too; not where its lines stand."""
    if code is None:
        return ""
    inner = [_code(one) if isinstance(one, types.CodeType) else _words(one) for one in code.co_consts]
    return f"{code.co_code.hex()}{code.co_names}{inner}"


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    import platform

    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    from voxtune.versions import __version__

    def of(package: str) -> str | None:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return None

    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        "voxtune": __version__,
        "torch": torch.__version__,
        "triton": of("triton"),
        "cudnn": str(cudnn) if cudnn else None,
    }


def unlike(made_for: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Why a plan's evidence does not count here, or None."""
    others = {
        "model": "another model",
        "inputs": "other shapes",
        "arrangement": "arguments arranged otherwise",
        "device": "another device",
    }
    for key, words in others.items():
        if made_for.get(key) != here[key]:
            return f"it was gated on {words}"
    theirs, ours = made_for.get("versions") or {}, here["versions"]
    for name, version in ours.items():
        if theirs.get(name) != version:
            return f"it was gated with {name} {theirs.get(name)}, here is {version}"
    return None


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
