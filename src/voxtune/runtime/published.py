"""Published `.pt` checkpoints: read without executing pickled code; the architecture is inferred from the weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from voxtune.data.contract import DataContract, generic_contract
from voxtune.data.modality import NIFTI_NAME
from voxtune.diffusion.schedule import DiffusionConfig, recognise
from voxtune.errors import InputError
from voxtune.reading import read_head
from voxtune.runtime.model import Model, ModelConfig, workload_contract
from voxtune.runtime.storage import network_from_state
from voxtune.tensorfiles import read_torch
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
    if NIFTI_NAME.search(path.name):
        raise InputError(f"{path}: expected a model, got an image; are the arguments swapped?")
    head = read_head(path, 2)
    # torch writes a zip archive, or a pickle of protocol 2 or higher.
    if head != b"PK" and head[:1] != b"\x80":
        raise InputError(f"{path}: not a PyTorch checkpoint (neither a zip archive nor a pickle)")
    return read_torch(path)


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
