"""The state of a training run on disk: one safetensors file per checkpoint, written atomically.

Tensors: `model.*`, `ema.*` and `ema-DECAY.*` (weights), `optimizer.<parameter>.*` (Adam's moments and count), `rng.*`
(torch's random state). Everything else (step, loader position, loss scale, settings) is JSON in the file's metadata, with a
checksum of the tensors that detects damaged files.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.config import from_mapping, to_mapping
from voxtune.errors import InputError
from voxtune.reading import parse_json
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.storage import check_state, network_from_state, write_safetensors
from voxtune.tensorfiles import read_safetensors
from voxtune.training.config import TrainConfig, with_names
from voxtune.training.plan import TrainingPlan

FORMAT = "voxtune-training/1"
CHECKPOINTS = "checkpoints"
NAME = re.compile(r"step-(\d{8,})\.safetensors")
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class ScalerState:
    """The loss scale of fp16 training and the number of steps since it changed."""

    scale: float
    growth_tracker: int


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The state of a run after `step`: the next sample is number `position` of `epoch` over `subjects` subjects.

    `loss_sum` over `loss_count` steps belongs to the next row of the log. `seconds` is the time spent in steps, `elapsed`
    the total time of the run. `skipped` steps changed no weight, the last `skipped_in_row` of them in a row.
    """

    step: int
    epoch: int
    position: int
    subjects: int
    loss_sum: float = 0.0
    loss_count: int = 0
    seconds: float = 0.0
    elapsed: float = 0.0
    scaler: ScalerState | None = None
    skipped: int = 0
    skipped_in_row: int = 0

    def __post_init__(self) -> None:
        counts = (self.step, self.epoch, self.position, self.loss_count, self.skipped, self.skipped_in_row)
        if min(counts) < 0 or self.subjects < 1:
            raise InputError(
                f"step {self.step}, epoch {self.epoch}, position {self.position}: not a valid state of a run"
            )


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Everything that is needed to resume a run with the same result as without the interruption."""

    state: RunState
    config: TrainConfig
    model: ModelConfig
    tensors: Mapping[str, Tensor]
    # None: of a run before there were plans.
    plan: TrainingPlan | None = None
    path: Path | None = None

    def part(self, prefix: str) -> dict[str, Tensor]:
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Writes `folder`/step-N.safetensors; an interrupted write leaves earlier checkpoints unchanged."""
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    header = {
        "state": to_mapping(checkpoint.state),
        "config": to_mapping(with_names(checkpoint.config)),
        "model": checkpoint.model.to_json(),
        "plan": None if checkpoint.plan is None else to_mapping(checkpoint.plan),
        "crc32": checksum(tensors),
    }
    path = checkpoint_path(folder, checkpoint.state.step)
    write_safetensors(path, tensors, {"format": FORMAT, "run": json.dumps(header)}, state=True)
    return path


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.safetensors"


def read_checkpoint(path: Path) -> Checkpoint:
    tensors, metadata = read_safetensors(path)
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path}: not a training checkpoint (expected format {FORMAT})")
    header = parse_json(metadata.get("run", ""), f"{path}: damaged checkpoint: its metadata")
    if not isinstance(header, dict):
        raise InputError(f"{path}: damaged checkpoint: its metadata cannot be read")
    if header.get("crc32") != checksum(tensors):
        raise InputError(f"{path}: damaged checkpoint: the checksum does not match")
    return Checkpoint(
        state=from_mapping(RunState, header.get("state"), f"{path}: state"),
        config=from_mapping(TrainConfig, header.get("config"), f"{path}: config"),
        model=ModelConfig.from_json(header.get("model"), f"{path}: model"),
        tensors=tensors,
        plan=None if header.get("plan") is None else from_mapping(TrainingPlan, header["plan"], f"{path}: plan"),
        path=path,
    )


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 over names and bytes: safetensors detects a truncated file, but not a flipped bit."""
    value = 0
    for name in sorted(tensors):
        raw: Any = tensors[name].reshape(-1).view(torch.uint8).numpy()
        value = zlib.crc32(raw, zlib.crc32(name.encode(), value))
    return value


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in the folder, oldest first."""
    numbered = [(int(m[1]), p) for p in folder.glob("step-*.safetensors") if (m := NAME.fullmatch(p.name))]
    return [path for _, path in sorted(numbered)]


def newest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest readable checkpoint. Damaged ones are reported and renamed to *.damaged."""
    damaged = []
    for path in reversed(checkpoints(folder)):
        try:
            checkpoint = read_checkpoint(path)
        except InputError as error:
            damaged.append((path, str(error)))
            continue
        for file, reason in damaged:
            file.replace(file.with_name(f"{file.name}.damaged"))
            warn(f"{reason}; renamed to {file.name}.damaged, resuming from step {checkpoint.state.step}")
        return checkpoint
    if damaged:
        raise InputError(f"{damaged[0][1]}; no other checkpoint in {folder} can be read")
    return None


def prune_checkpoints(folder: Path, keep: int) -> None:
    for path in checkpoints(folder)[:-keep]:
        path.unlink(missing_ok=True)


def drop_later_checkpoints(folder: Path, step: int) -> Path | None:
    """Deletes the checkpoints after `step`; the newest that is left."""
    left = None
    for path in checkpoints(folder):
        if int(path.stem.removeprefix("step-")) > step:
            path.unlink()
        else:
            left = path
    return left


def average_name(decay: float) -> str:
    """The name in a checkpoint of an average besides `ema`."""
    return f"ema-{decay!r}"


def averages(checkpoint: Checkpoint) -> list[str]:
    """The names of the averages of the weights in a checkpoint."""
    return ["ema", *map(average_name, checkpoint.config.ema_candidates)]


def goes_on_from_checkpoint(init: str | None) -> bool:
    """Whether a run starts from the weights and the averages of a training checkpoint, not from a model."""
    return init is not None and NAME.fullmatch(Path(init).name) is not None


def load_weights(checkpoint: Checkpoint, name: str = "model") -> Model:
    """The model with weights of a training checkpoint: "model", those that are trained, or an average such as "ema"."""
    state = checkpoint.part(f"{name}.")
    if not state:
        raise InputError(f"{checkpoint.path}: contains no weights named {name!r}")
    return Model(checkpoint.model, network_from_state(checkpoint.model.network, state, str(checkpoint.path)))


def optimizer_tensors(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Adam's state by parameter name; nothing for a parameter without an update."""
    return {f"{name}.{key}": value for name, p in named for key, value in optimizer.state.get(p, {}).items()}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]], stored: Mapping[str, Tensor], where: str
) -> None:
    """Restores the stored moments in the memory layout of the parameters."""
    restored = set()
    for name, p in named:
        if f"{name}.step" not in stored:
            continue
        moments = {key: stored.get(f"{name}.{key}") for key in MOMENTS}
        count = stored[f"{name}.step"].clone()
        # A fused optimizer counts on the device.
        state: dict[str, Any] = {"step": count.to(p.device) if optimizer.defaults.get("fused") else count}
        for key, value in moments.items():
            if value is None or value.shape != p.shape:
                raise InputError(f"{where}: the optimizer's {key} of {name!r} is missing or has the wrong shape")
            state[key] = torch.empty_like(p, requires_grad=False).copy_(value)
        optimizer.state[p] = state
        restored |= {f"{name}.{key}" for key in state}
    extra = sorted(set(stored) - restored)
    if extra:
        raise InputError(f"{where}: optimizer state of an unknown parameter {extra[0]!r}")


def restore_network(network: nn.Module, stored: Mapping[str, Tensor], where: str) -> None:
    """Copies stored weights into the network and keeps its memory layout."""
    check_state({k: tuple(v.shape) for k, v in network.state_dict().items()}, stored, where)
    network.load_state_dict(dict(stored))


def random_state(device: torch.device) -> dict[str, Tensor]:
    """torch's random state on the CPU and, for training on a GPU, on that GPU."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_state(states: Mapping[str, Tensor], device: torch.device, where: str) -> None:
    try:
        torch.set_rng_state(states["cpu"].clone())
        if device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"].clone(), device)
    except (KeyError, RuntimeError, TypeError) as error:
        raise InputError(f"{where}: the random state is not valid for this version of torch ({error})") from None
