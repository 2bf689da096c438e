"""Published `.pt` checkpoints: read without executing pickled code; the architecture is inferred from the weights."""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxtune.data.contract import DataContract, generic_contract
from voxtune.data.modality import NIFTI_NAME
from voxtune.diffusion.schedule import DiffusionConfig, recognise
from voxtune.errors import InputError
from voxtune.runtime.model import Model, ModelConfig, workload_contract
from voxtune.runtime.storage import network_from_state
from voxtune.workloads import FAMILIES, NetworkConfig, closest_workload, same_channels

PREFIX = "denoise_fn."
# Buffers of the diffusion in a published state dict.
SCHEDULE_BUFFER = re.compile(r"(betas|\w*alphas_cumprod\w*|posterior_\w+)$")


def load_published(path: Path, size: tuple[int, ...] | None = None) -> Model:
    """A model from a published checkpoint; `size` overrides the volume size that the architecture suggests."""
    state, betas = split_checkpoint(read_checkpoint(path), str(path))
    network = infer_network(state, str(path))
    if size is not None and len(size) != network.dimensions:
        raise InputError(f"size {size}: this network requires {network.dimensions} dimensions, depth first")
    diffusion = _diffusion(betas, network, str(path))
    size = size or likely_size(network)
    config = ModelConfig(network=network, size=size, diffusion=diffusion, data=_contract(network, size))
    return Model(config, network_from_state(network, state, str(path)))


def read_checkpoint(path: Path) -> Any:
    """The object in the file. Only tensors and plain containers are accepted; nothing is executed."""
    _check_file_type(path)
    try:
        _check_uncompressed(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except pickle.UnpicklingError as error:
        reason = " ".join(str(error).split())
        if "weights_only" in reason or "Unsupported" in reason:
            raise InputError(
                f"{path}: this pickle would run code, which is not allowed; nothing was executed"
            ) from None
        raise InputError(f"{path}: not a readable checkpoint ({reason[:200]})") from None
    except Exception as error:
        # Damaged files raise many kinds of errors (EOFError, RuntimeError, KeyError, UnicodeDecodeError, ...).
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: not a readable checkpoint ({type(error).__name__}: {reason})") from None


def _check_file_type(path: Path) -> None:
    """Raises a specific error for a file that is not a checkpoint."""
    if NIFTI_NAME.search(path.name):
        raise InputError(f"{path}: expected a model, got an image; are the arguments swapped?")
    try:
        with path.open("rb") as file:
            head = file.read(2)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    # torch writes a zip archive, or a pickle of protocol 2 or higher.
    if head != b"PK" and head[:1] != b"\x80":
        raise InputError(f"{path}: not a PyTorch checkpoint (neither a zip archive nor a pickle)")


def _check_uncompressed(path: Path) -> None:
    """Raises for compressed records: torch does not write them, and they could expand to any size."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        if any(item.compress_type != zipfile.ZIP_STORED for item in archive.infolist()):
            raise InputError(f"{path}: contains compressed records, which torch does not write; not a checkpoint")


def split_checkpoint(checkpoint: Any, where: str) -> tuple[dict[str, Tensor], Tensor | None]:
    """(weights of the network, betas if stored). Prefers `ema` to `model`, as the published sampling code does."""
    if not isinstance(checkpoint, Mapping):
        raise InputError(f"{where}: expected a dictionary of weights, got {type(checkpoint).__name__}")
    state = next(
        (checkpoint[k] for k in ("ema", "model", "state_dict") if isinstance(checkpoint.get(k), Mapping)), checkpoint
    )
    tensors = {k.removeprefix("module."): v for k, v in state.items() if isinstance(k, str) and isinstance(v, Tensor)}
    if not tensors:
        raise InputError(f"{where}: contains no weights (keys: {', '.join(map(repr, list(checkpoint)[:5]))})")
    betas = tensors.get("betas")
    if any(k.startswith(PREFIX) for k in tensors):
        return {k.removeprefix(PREFIX): v for k, v in tensors.items() if k.startswith(PREFIX)}, betas
    return {k: v for k, v in tensors.items() if not SCHEDULE_BUFFER.fullmatch(k)}, betas


def infer_network(state: Mapping[str, Tensor], where: str) -> NetworkConfig:
    """The architecture that these parameter names and shapes belong to."""
    try:
        for family in FAMILIES.values():
            network = family.infer(state)
            if network is not None:
                return network
    except (KeyError, IndexError, ZeroDivisionError) as error:
        raise InputError(f"{where}: the weights look like a known network, but {error} is missing or empty") from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    names = ", ".join(list(state)[:3])
    raise InputError(f"{where}: unknown network (first parameters: {names}); supported: {', '.join(FAMILIES)}")


def likely_size(network: NetworkConfig) -> tuple[int, ...]:
    """The published size of a published network, else what its architecture suggests."""
    entry = closest_workload(network)
    return entry.size if entry.network == network else network.likely_size()


def _diffusion(betas: Tensor | None, network: NetworkConfig, where: str) -> DiffusionConfig:
    if betas is None:
        entry = closest_workload(network)
        return DiffusionConfig(schedule=entry.schedule, steps=entry.steps)
    if betas.dim() != 1 or not betas.is_floating_point():
        raise InputError(f"{where}: 'betas' has shape {tuple(betas.shape)} and type {betas.dtype}, expected a vector")
    try:
        return recognise(betas)
    except InputError as error:
        raise InputError(f"{where}: betas: {error}") from None


def _contract(network: NetworkConfig, size: tuple[int, ...]) -> DataContract | None:
    if not network.mask_channels or network.dimensions != 3:
        return None
    entry, grid = closest_workload(network), (size[0], size[1], size[2])
    contract = workload_contract(entry)
    if contract is None or not same_channels(entry.network, network):
        return generic_contract(network.mask_channels, network.out_channels, grid)
    return replace(contract, size=grid) if entry.fixed_spacing else contract.resized(grid)
