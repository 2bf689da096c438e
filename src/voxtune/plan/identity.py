"""What a plan was made for: the model by its weights, the inputs' forms, the card, the versions."""

from __future__ import annotations

import hashlib
import importlib.metadata
from typing import Any

import torch
from torch import nn

from voxtune.plan.run import Inputs, Signature


def identity(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    signature = Signature.of(*inputs)
    return {
        "model": weights_hash(model),
        "inputs": [list(map(str, leaf)) if isinstance(leaf, tuple) else leaf for leaf in signature.leaves],
        "device": device_name(signature.device),
        "versions": versions(),
    }


def weights_hash(model: nn.Module) -> str:
    """Of every parameter's and buffer's name, type, shape and bytes, and of the classes they belong to."""
    digest = hashlib.blake2b(digest_size=16)
    for name, module in model.named_modules():
        digest.update(f"{name}:{type(module).__module__}.{type(module).__qualname__}:{module.extra_repr()};".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    import platform

    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


def versions() -> dict[str, str | None]:
    from voxtune import __version__

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
    for key, words in (("model", "another model"), ("inputs", "other shapes"), ("device", "another device")):
        if made_for.get(key) != here[key]:
            return f"it was gated on {words}"
    theirs, ours = made_for.get("versions") or {}, here["versions"]
    for name, version in ours.items():
        if theirs.get(name) != version:
            return f"it was gated with {name} {theirs.get(name)}, here is {version}"
    return None
