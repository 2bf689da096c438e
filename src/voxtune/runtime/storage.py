"""Models on disk: folders with model.safetensors, config.json and a model card. Also reads published checkpoints."""

from __future__ import annotations

import hashlib
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
    one_line,
    recorded_path,
    reporting_os_errors,
    write_file,
    write_json,
    writing,
)
from voxtune.marks import marked_markdown
from voxtune.runtime.model import Model, ModelConfig, checked_device
from voxtune.runtime.sampling import AutoSampling
from voxtune.workloads import NetworkConfig, build

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
MAX_CONFIG_BYTES = 16 * 2**20


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
    state, _ = read_safetensors(folder / WEIGHTS)
    return Model(config, network_from_state(config.network, state, str(folder / WEIGHTS)))


def save(model: Model, folder: str | Path, *, card: str, overwrite: bool = False, half: bool = False) -> Path:
    """Writes the model folder. `half` stores the weights in BF16; they are loaded as float32."""
    folder = Path(folder)
    if (folder / WEIGHTS).exists() and not overwrite:
        raise InputError(f"{folder}: already contains a model; choose another folder, or {overwrite_advice()}")
    check_outputs(model_files(folder), overwrite=overwrite)
    dtype = torch.bfloat16 if half else torch.float32
    state = {k: v.detach().to("cpu", dtype).contiguous() for k, v in model.network.state_dict().items()}
    # The config first, because it marks the weights as written by Voxtune.
    write_json(folder / CONFIG, model.config.to_json(), overwrite=overwrite)
    write_file(folder / CARD, marked_markdown(card), overwrite=overwrite)
    write_safetensors(folder / WEIGHTS, state, {"format": "pt"}, overwrite=overwrite)
    return folder


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


def read_json(path: Path) -> Any:
    with reporting_os_errors(path):
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"{path}: larger than {MAX_CONFIG_BYTES // 2**20} MiB; not a config")
        raw = path.read_bytes()
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file."""
    if not path.is_file():
        raise InputError(f"{path}: not found; a model folder contains {WEIGHTS} and {CONFIG}")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise InputError(f"{path}: damaged or truncated safetensors file ({one_line(error)})") from None


def write_safetensors(
    path: Path,
    tensors: dict[str, Tensor],
    metadata: dict[str, str],
    *,
    overwrite: bool = False,
    state: bool = False,
) -> None:
    """Writes atomically: after a crash or on a full disk, an existing file is unchanged. The rules are those of `writing`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with writing(path, overwrite=overwrite, state=state) as part:
        try:
            save_file(tensors, part, metadata=metadata)
        except SafetensorError as error:
            # The library wraps the operating system's error; the callers expect OSError.
            raise OSError(one_line(error)) from error


def weights_sha256(path: Path) -> str | None:
    """The hash of the weights at `path`: a model folder, a run folder or the weights file; None if there is none."""
    path = included(path)
    weights = next((p for p in (path, path / WEIGHTS, path / "model" / WEIGHTS) if p.is_file()), None)
    if weights is None:
        return None
    with reporting_os_errors(weights), weights.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance(path: Path, model: Model) -> dict[str, Any]:
    """The origin of a generated volume, for its sidecar: the hash of the weights, the versions and the device."""
    from voxtune.versions import __version__

    return {
        "model": recorded_path(path),
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
