"""The cache of plans that were tuned or gated on this machine, so that this happens once."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import importlib.metadata
import json
import logging
import os
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from voxtune.errors import InputError
from voxtune.files import write_json
from voxtune.plan.passes import select
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
    """Hash of what determines a network's output, as far as it can be seen: classes, code, settings, weights, buffers."""
    digest = hashlib.blake2b(digest_size=16)
    for name, module in model.named_modules():
        kind = type(module)
        digest.update(f"{name}:{kind.__module__}.{kind.__qualname__}:{module.extra_repr()};".encode())
        digest.update(f"{_settings(module)};{_code(getattr(kind.forward, '__code__', None))};".encode())
    state = model.state_dict()
    # Buffers that are not saved affect the output as well.
    tensors = [*state.items(), *((n, b) for n, b in model.named_buffers() if n not in state)]
    # Hashing releases Python's lock: one thread takes a second per gigabyte.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for (name, tensor), content in zip(tensors, pool.map(_content_hash, [t for _, t in tensors]), strict=True):
            digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode() + content)
    return digest.hexdigest()


def _content_hash(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return hashlib.blake2b(flat.view(torch.uint8).numpy().data, digest_size=16).digest()


def _settings(module: nn.Module) -> str:
    """A module's own plain attributes: the number of heads, a scale, a flag. Values without a stable text are skipped."""
    plain = {name: _text(value) for name, value in vars(module).items() if not name.startswith("_")}
    return repr(sorted((name, text) for name, text in plain.items() if text is not None and name != "training"))


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, list | tuple | set | frozenset):
        parts = [_text(item) for item in value]
        return f"{type(value).__name__}{sorted(map(str, parts)) if isinstance(value, set | frozenset) else parts}"
    if isinstance(value, dict):
        return str([(str(key), _text(item)) for key, item in value.items()])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return str([(field.name, _text(getattr(value, field.name))) for field in dataclasses.fields(value)])
    return None


def _code(code: Any) -> str:
    """A function's instructions and constants, including those of functions inside it, without line numbers."""
    if code is None:
        return ""
    inner = [_code(item) if isinstance(item, types.CodeType) else _text(item) for item in code.co_consts]
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


def mismatch(made_for: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Why a plan's evidence is not valid here, or None."""
    differences = {
        "model": "another model",
        "inputs": "other input shapes",
        "arrangement": "another structure of arguments",
        "device": "another device",
    }
    for key, difference in differences.items():
        if made_for.get(key) != here[key]:
            return f"it was gated on {difference}"
    recorded = made_for.get("versions") or {}
    for name, version in here["versions"].items():
        if recorded.get(name) != version:
            return f"it was gated with {name} {recorded.get(name)}, this is {version}"
    return None


log = logging.getLogger("voxtune")


def cache_folder() -> Path:
    """$VOXTUNE_CACHE, or the user's cache folder."""
    folder = os.environ.get("VOXTUNE_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(folder).expanduser() if folder else Path(base).expanduser() / "voxtune"


def _plan_path(made_for: dict[str, Any]) -> Path:
    key = hashlib.blake2b(json.dumps(made_for, sort_keys=True).encode(), digest_size=16).hexdigest()
    return cache_folder() / "plans" / f"{key}.json"


def graph_path(plan: Plan) -> Path:
    """Where the network rewritten by a plan is saved, beside the plan; each plan for a model has its own."""
    steps = hashlib.blake2b(json.dumps(plan.to_json()["passes"]).encode(), digest_size=4).hexdigest()
    path = _plan_path(plan.made_for)
    return path.with_name(f"{path.stem}-{steps}.graph")


def remembered(made_for: dict[str, Any]) -> Plan | None:
    """The plan for exactly this model, shape, device and versions. An unusable file is ignored with a warning."""
    path = _plan_path(made_for)
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
    except InputError as error:
        log.warning("ignoring a cached plan: %s", error)
        return None
    if plan.made_for != made_for:
        return None
    if plan.names != select("fp32") and not plan.evidence.get("gate"):
        log.warning(
            "ignoring a cached plan without evidence (%s): it was edited, or written by an earlier version", path
        )
        return None
    return plan


def remember(plan: Plan) -> None:
    """Best effort: if the cache cannot be written, only the next run takes longer."""
    path = _plan_path(plan.made_for)
    try:
        write_json(path, plan.to_json(), state=True)
    except (OSError, InputError) as error:
        log.warning("the plan could not be cached in %s: %s", path.parent, error)
