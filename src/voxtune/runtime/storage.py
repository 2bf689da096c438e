"""Models on disk: a folder with model.safetensors, config.json and a model card; published checkpoints are read too."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.errors import InputError
from voxtune.files import one_line, replacing, reporting_os_errors, write_atomic
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.sampling import AutoSampling
from voxtune.workloads import NetworkConfig, build

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
MAX_CONFIG_BYTES = 16 * 2**20


def load(path: str | Path, *, device: torch.device | str = "cpu") -> Model:
    """The model at `path`: a folder written by `voxtune import` or `voxtune train`, or a published `.pt` checkpoint."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such model; give a model folder or a published .pt checkpoint")
    return _read(path).to(_checked_device(device))


def _read(path: Path) -> Model:
    if path.is_dir():
        # A run folder of `voxtune train` keeps its model beside its checkpoints.
        inside = path / "model"
        return load_folder(inside if (inside / CONFIG).is_file() and not (path / CONFIG).exists() else path)
    if path.name == WEIGHTS:
        return load_folder(path.parent)
    if path.suffix == ".safetensors":
        raise InputError(f"{path}: weights alone; give the model folder that has {CONFIG} beside its {WEIGHTS}")
    from voxtune.runtime.published import load_published

    return load_published(path)


def _checked_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r}: {one_line(error)}") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices; use 'cpu'")
    return found


def demo_model() -> Path:
    """The folder of the model that ships with the package."""
    folder = Path(__file__).parent.parent / "models" / "demo"
    if not (folder / WEIGHTS).exists():
        raise InputError(f"{folder}: the shipped model is missing from this installation; give one with --model")
    return folder


def load_folder(folder: Path) -> Model:
    config = ModelConfig.from_json(read_json(folder / CONFIG), str(folder / CONFIG))
    state, _ = read_safetensors(folder / WEIGHTS)
    return Model(config, network_from_state(config.network, state, str(folder / WEIGHTS)))


def save(model: Model, folder: str | Path, *, card: str, overwrite: bool = False, half: bool = False) -> Path:
    """Writes the model folder; `half` stores the weights in BF16 (they are loaded as float32 again)."""
    folder = Path(folder)
    if (folder / WEIGHTS).exists() and not overwrite:
        raise InputError(f"{folder}: holds a model already; choose another folder or pass --overwrite")
    dtype = torch.bfloat16 if half else torch.float32
    with reporting_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        state = {k: v.detach().to("cpu", dtype).contiguous() for k, v in model.network.state_dict().items()}
        write_safetensors(folder / WEIGHTS, state, {"format": "pt"})
        with replacing(folder / CONFIG) as part:
            part.write_text(json.dumps(model.config.to_json(), indent=2) + "\n")
        with replacing(folder / CARD) as part:
            part.write_text(card)
    return folder


def network_from_state(config: NetworkConfig, state: Mapping[str, Tensor], where: str) -> nn.Module:
    """The network of `config` with the weights of `state`, which must fit by name, shape and kind."""
    with torch.device("meta"):
        network = build(config)
    check_state({k: tuple(v.shape) for k, v in network.state_dict().items()}, state, where)
    network.load_state_dict({k: v.float() for k, v in state.items()}, assign=True)
    return network.eval()


def check_state(expected: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], where: str) -> None:
    missing = [k for k in expected if k not in state]
    if missing:
        raise InputError(
            f"{where}: does not fit the model: parameter {missing[0]!r} and {len(missing) - 1} more are missing"
        )
    extra = [k for k in state if k not in expected]
    if extra:
        raise InputError(f"{where}: does not fit the model: unknown parameter {extra[0]!r} and {len(extra) - 1} more")
    for name, shape in expected.items():
        tensor = state[name]
        if tuple(tensor.shape) != shape:
            raise InputError(f"{where}: parameter {name!r} has shape {tuple(tensor.shape)}, the model needs {shape}")
        if not tensor.is_floating_point():
            raise InputError(f"{where}: parameter {name!r} holds {tensor.dtype}, not floating-point weights")
        if not torch.isfinite(tensor).all():
            raise InputError(f"{where}: parameter {name!r} holds NaN or infinity: this checkpoint is damaged")


def read_json(path: Path) -> Any:
    with reporting_os_errors(path):
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise InputError(f"{path}: larger than any config; is this the right file?")
        raw = path.read_bytes()
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file."""
    if not path.is_file():
        raise InputError(f"{path}: missing; a model folder holds {WEIGHTS} and {CONFIG}")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        return read_plainly(path)
    try:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError) as error:
        raise InputError(f"{path}: damaged or truncated safetensors file ({one_line(error)})") from None


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Writes all or nothing: a killed process or a full disk leaves the old file as it was."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError:
        # GPU machines often hold little but PyTorch, and what was trained there must leave in the same form.
        return _write_plainly(path, tensors, metadata)
    with replacing(path) as part:
        try:
            save_file(tensors, part, metadata=metadata)
        except SafetensorError as error:
            # The library wraps the operating system's error; the rest of this project expects the plain one.
            raise OSError(one_line(error)) from error


KINDS = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def _write_plainly(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """The safetensors format by hand: the header's length in 8 bytes, a JSON header, then every tensor's bytes."""
    header: dict[str, Any] = {"__metadata__": metadata}
    blocks, end = [], 0
    # Wide types first, as the library does, so that every tensor lies on a multiple of its own width.
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
        block = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        offsets = [end, end + len(block)]
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        blocks.append(block)
        end += len(block)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as part:
        part.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blocks))


def read_plainly(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The safetensors format without its library, for machines that hold little but PyTorch."""
    kinds = {name: dtype for dtype, name in KINDS.items()}
    with reporting_os_errors(path):
        data = path.read_bytes()
    try:
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > len(data) - 8:
            raise ValueError("the header is cut off")
        header, body = json.loads(data[8 : 8 + length]), memoryview(data)[8 + length :]
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for name, entry in header.items():
            dtype, shape, (begin, end) = kinds[entry["dtype"]], entry["shape"], entry["data_offsets"]
            if not 0 <= begin <= end <= len(body) or math.prod(shape) * dtype.itemsize != end - begin:
                raise ValueError(f"tensor {name!r} lies outside the file or has another size")
            # A copy of its own: the file's bytes cannot be written to and need not lie on the type's width.
            flat = (
                torch.frombuffer(bytearray(body[begin:end]), dtype=dtype) if begin < end else torch.empty(0).to(dtype)
            )
            tensors[name] = flat.reshape(shape)
        return tensors, dict(metadata)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise InputError(f"{path}: damaged or truncated safetensors file ({one_line(error)})") from None


def weights_sha256(path: Path) -> str | None:
    """The hash of the weights' file behind `path`: of a model folder, a run folder, or the file itself."""
    weights = next((p for p in (path, path / WEIGHTS, path / "model" / WEIGHTS) if p.is_file()), None)
    if weights is None:
        return None
    with reporting_os_errors(weights), weights.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def provenance(path: Path, model: Model) -> dict[str, Any]:
    """What made a volume, for the record beside it: the weights by their hash, the versions, the device."""
    from voxtune.versions import __version__

    return {
        "model": str(path),
        "model_sha256": weights_sha256(path),
        "voxtune": __version__,
        "torch": torch.__version__,
        "device": model.device_name,
    }


def config_file(path: str | Path) -> Path:
    """The config of the model folder at `path`, or of the run folder's model; raises where there is none."""
    for folder in (Path(path), Path(path) / "model"):
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    raise InputError(f"{path}: holds no {CONFIG} to store the steps in; make a model folder with voxtune import")


def store_auto(path: str | Path, auto: AutoSampling) -> Path:
    """Writes what `steps="auto"` means into the model folder's config; nothing else of it changes."""
    file = config_file(path)
    config = ModelConfig.from_json(read_json(file), str(file))
    changed = replace(config, sampling=replace(config.sampling, auto=auto))
    write_atomic(file, (json.dumps(changed.to_json(), indent=2) + "\n").encode())
    return file
