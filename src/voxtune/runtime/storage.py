"""Models on disk: folders with model.safetensors, config.json and a model card. Also reads published checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.errors import InputError, overwrite_advice
from voxtune.files import (
    check_outputs,
    checked_path,
    recorded_path,
    reporting_os_errors,
    write_file,
    write_json,
    writing,
)
from voxtune.marks import marked_markdown
from voxtune.reading import file_sha256, parse_json, read_json
from voxtune.runtime.model import Model, ModelConfig, checked_device
from voxtune.runtime.sampling import AutoSampling
from voxtune.tensorfiles import read_safetensors, save_safetensors
from voxtune.workloads import NetworkConfig, build

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
BUNDLE_WEIGHTS = "models/model.pt"


def load(path: str | Path, *, device: torch.device | str = "cpu") -> Model:
    """Loads the model at `path`: a folder written by `voxtune import` or `voxtune train`, or a published `.pt` checkpoint.

    "demo" is the demonstration model that is included in the package, unless a file or folder of that name exists. `device`
    is "cpu", "cuda", a GPU such as "cuda:1", or "auto": a GPU if there is one, else the CPU.
    """
    path = included(checked_path(path))
    if not path.exists():
        raise InputError(f"{path}: no such model; expected a model folder or a published .pt checkpoint")
    device = checked_device(device)
    model = _read(path).to(device)
    model.weights = f"weights from {path}"
    return model


def _read(path: Path) -> Model:
    if path.is_dir():
        from voxtune.runtime.monai_bundle import is_bundle, read_bundle

        if is_bundle(path):
            return read_bundle(path)
        # A run folder of `voxtune train` has its model in a subfolder.
        inside = path / "model"
        return load_folder(inside if (inside / CONFIG).is_file() and not (path / CONFIG).exists() else path)
    if path.name == WEIGHTS:
        return load_folder(path.parent)
    if path.suffix == ".safetensors":
        raise InputError(f"{path}: weights without a config; pass a model folder with {WEIGHTS} and {CONFIG}")
    from voxtune.runtime.published import load_published

    return load_published(path)


def included(path: Path) -> Path:
    """The model that ships with the package for "demo", unless a file or folder of that name exists."""
    return demo_model() if str(path) == "demo" and not path.exists() else path


def demo_model() -> Path:
    """The folder of the model that ships with the package."""
    folder = Path(__file__).parent.parent / "models" / "demo"
    if not (folder / WEIGHTS).exists():
        raise InputError(
            f"{folder}: the shipped model is missing from this installation; pass another one with --model"
        )
    return folder


def load_folder(folder: Path) -> Model:
    if not (folder / CONFIG).is_file():
        raise InputError(
            f"{folder}: not a model folder (no {CONFIG}); expected a folder written by voxtune import or voxtune train, "
            "or a published .pt checkpoint"
        )
    config = ModelConfig.from_json(read_json(folder / CONFIG), str(folder / CONFIG))
    weights = folder / WEIGHTS
    if not weights.exists():
        raise InputError(f"{weights}: not found; a model folder contains {WEIGHTS} and {CONFIG}")
    state, _ = read_safetensors(weights)
    return Model(config, network_from_state(config.network, state, str(weights)))


def save(
    model: Model, folder: str | Path, *, card: str, overwrite: bool = False, state: bool = False, half: bool = False
) -> Path:
    """Writes the model folder. `half` stores the weights in BF16; they are loaded as float32. For `state` see `files`."""
    folder = Path(folder)
    dtype = torch.bfloat16 if half else torch.float32
    weights = {k: v.detach().to("cpu", dtype).contiguous() for k, v in model.network.state_dict().items()}
    write_model_folder(folder, weights, model.config.to_json(), card, overwrite=overwrite, state=state)
    return folder


def write_model_folder(
    folder: Path,
    weights: dict[str, Tensor],
    config: dict[str, Any],
    card: str,
    *,
    overwrite: bool = False,
    state: bool = False,
) -> None:
    """Writes weights, config and card. After an interruption, weights are never beside a config or a card of other weights."""
    rules = {"overwrite": overwrite, "state": state}
    if not state:
        check_model_folder(folder, overwrite=overwrite)
    with reporting_os_errors(folder):
        if not _holds_json(folder / CONFIG, config):
            (folder / WEIGHTS).unlink(missing_ok=True)
            write_json(folder / CONFIG, config, **rules)
        (folder / CARD).unlink(missing_ok=True)
        write_safetensors(folder / WEIGHTS, weights, {"format": "pt"}, **rules)
        write_file(folder / CARD, marked_markdown(card), **rules)


def check_model_folder(folder: Path, *, overwrite: bool) -> None:
    """Raises if a model must not be written to the folder."""
    if not overwrite and ((folder / WEIGHTS).exists() or (folder / CONFIG).exists()):
        raise InputError(
            f"{folder}: already contains a model; choose another folder, or {overwrite_advice()} to replace it"
        )
    check_outputs(model_files(folder), overwrite=overwrite)


def _holds_json(path: Path, data: dict[str, Any]) -> bool:
    try:
        return bool(read_json(path) == parse_json(json.dumps(data), path))
    except InputError:
        return False


def model_files(folder: Path) -> tuple[Path, ...]:
    """The files of the model folder `folder`."""
    return folder / CONFIG, folder / CARD, folder / WEIGHTS


def network_from_state(config: NetworkConfig, state: Mapping[str, Tensor], where: str) -> nn.Module:
    """The network of `config` with the weights of `state`, whose names, shapes and types are checked."""
    with torch.device("meta"):
        network = build(config)
    check_state({k: tuple(v.shape) for k, v in network.state_dict().items()}, state, where)
    network.load_state_dict({k: v.float() for k, v in state.items()}, assign=True)
    return network.eval()


def check_state(expected: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], where: str) -> None:
    missing = [k for k in expected if k not in state]
    if missing:
        raise InputError(
            f"{where}: does not match the model: parameter {missing[0]!r} and {len(missing) - 1} more are missing"
        )
    extra = [k for k in state if k not in expected]
    if extra:
        raise InputError(f"{where}: does not match the model: unknown parameter {extra[0]!r} and {len(extra) - 1} more")
    for name, shape in expected.items():
        tensor = state[name]
        if tuple(tensor.shape) != shape:
            raise InputError(f"{where}: parameter {name!r} has shape {tuple(tensor.shape)}, expected {shape}")
        if not tensor.is_floating_point():
            raise InputError(f"{where}: parameter {name!r} has type {tensor.dtype}, expected floating point")
        if not torch.isfinite(tensor).all():
            raise InputError(f"{where}: parameter {name!r} contains NaN or infinity; the checkpoint is damaged")


def write_safetensors(
    path: Path, tensors: dict[str, Tensor], metadata: dict[str, str], *, overwrite: bool = False, state: bool = False
) -> None:
    """Writes atomically: after a crash or on a full disk, an existing file is unchanged. The rules are those of `writing`."""
    with writing(path, overwrite=overwrite, state=state) as part:
        save_safetensors(part, tensors, metadata)


def weights_sha256(path: Path) -> str | None:
    """The hash of the weights at `path`: a folder of a model or a run, a MONAI bundle or the weights file; else None."""
    path = included(path)
    weights = next(
        (p for p in (path, path / WEIGHTS, path / "model" / WEIGHTS, path / BUNDLE_WEIGHTS) if p.is_file()), None
    )
    if weights is None:
        return None
    return file_sha256(weights)


def provenance(path: Path, model: Model) -> dict[str, Any]:
    """The origin of a generated volume, for its sidecar: the hash of the weights, the versions and the device."""
    from voxtune.versions import __version__

    return {
        "model": recorded_path(included(path)),
        "model_sha256": weights_sha256(path),
        "voxtune": __version__,
        "torch": torch.__version__,
        "device": model.device_name,
    }


def config_file(path: str | Path) -> Path:
    """The config of the model folder or run folder at `path`."""
    for folder in (Path(path), Path(path) / "model"):
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    raise InputError(f"{path}: contains no {CONFIG}; create a model folder with voxtune import")


def store_auto(path: str | Path, auto: AutoSampling) -> Path:
    """Stores the settings of `steps="auto"` in the config of the model folder at `path`."""
    file = config_file(path)
    config = ModelConfig.from_json(read_json(file), str(file))
    changed = replace(config, sampling=replace(config.sampling, auto=auto))
    return write_file(file, json.dumps(changed.to_json(), indent=2) + "\n", overwrite=True)
