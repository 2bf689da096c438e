"""A segmentation network with its data contract: on disk, and applied to volumes on the contract's grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxtune.config import from_mapping, to_mapping
from voxtune.data.contract import DataContract, Label
from voxtune.data.splits import contract_difference
from voxtune.data.training_data import TrainingData
from voxtune.errors import InputError
from voxtune.files import recorded_path
from voxtune.reading import file_sha256, read_json
from voxtune.runtime.storage import CONFIG, WEIGHTS, check_state, write_model_folder
from voxtune.tensorfiles import read_safetensors
from voxtune.workloads.segment import SegmentConfig, SegmentUNet

FORMAT = "voxtune-segment/1"
PACKAGE = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig:
    """The configuration of a segmenter."""

    network: SegmentConfig = field(default_factory=SegmentConfig)
    data: DataContract
    training_data: TrainingData | None = None

    def __post_init__(self) -> None:
        if any(s % self.network.divisor for s in self.data.size):
            raise InputError(f"size {self.data.size}: every dimension must be a multiple of {self.network.divisor}")
        classes, images = len(self.data.regions), len(self.data.images)
        if (self.network.classes, self.network.in_channels) != (classes + 1, images):
            raise InputError(
                f"the data contract has {classes} {'combinations of ' if self.data.overlapping else ''}labels and {images} "
                f"images, but the network has {self.network.classes - 1} and {self.network.in_channels}"
            )

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **to_mapping(self)}

    @classmethod
    def from_json(cls, data: Any, where: str) -> SegmenterConfig:
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            actual = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError(
                f"{where}: expected a segmenter of format {FORMAT!r}, got {actual!r}; train one with --workload segment"
            )
        return from_mapping(cls, {k: v for k, v in data.items() if k != "format"}, where)


class Segmenter:
    """Computes labels and features of volumes (N, C, D, H, W) in [-1, 1], scaled as in its data contract.

    `sha256` is the hash of the weights' file, None for weights that are not from a file.
    """

    def __init__(
        self,
        config: SegmenterConfig,
        network: SegmentUNet | None = None,
        *,
        path: Path | None = None,
        sha256: str | None = None,
    ):
        self.config, self.path, self.sha256 = config, path, sha256
        self.network = (SegmentUNet(config.network) if network is None else network).eval()
        self._values = torch.tensor((0, *config.data.region_values))

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def name(self) -> str:
        """The name in messages."""
        if self.path is None:
            return "the segmenter"
        folder = self.path.parent
        return "the included segmenter" if folder == shipped_segmenter() else f"the segmenter {folder}"

    def to(self, device: torch.device | str) -> Segmenter:
        self.network.to(device)
        return self

    @torch.inference_mode()
    def describe(self, images_NCDHW: Tensor) -> tuple[Tensor, Tensor]:
        """A value of the contract for each voxel (N, D, H, W) and the features (N, F) in float64, on the CPU."""
        logits, features = self.network.forward_both(images_NCDHW.to(self.device, torch.float32))
        return self._values[logits.argmax(dim=1).cpu()], features.double().cpu()

    def identity(self) -> dict[str, Any]:
        """Identifies the segmenter in a results file."""
        contract = self.config.data
        return {
            "file": None if self.path is None else _portable(self.path),
            "sha256": self.sha256,
            "features": self.config.network.features,
            "size": list(contract.size),
            "spacing_mm": list(contract.spacing),
            "orientation": contract.orientation,
            "images": list(contract.images),
            "labels": {label.name: _values_of(label) for label in contract.labels},
        }


def _values_of(label: Label) -> int | list[int]:
    return list(label.values) if label.more_values else label.value


def shipped_segmenter() -> Path:
    """The folder of the segmenter that ships with the package."""
    return PACKAGE / "models" / "segment"


def _portable(path: Path) -> str:
    """A file of the package relative to it, which is the same on every machine; of any other path, the last name."""
    return str(Path("voxtune") / path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else recorded_path(path)


def load_segmenter(path: str | Path, *, device: torch.device | str = "cpu") -> Segmenter:
    """The segmenter at `path`: its folder, or the model.safetensors in it."""
    path = Path(path)
    folder = path.parent if path.name == WEIGHTS else path
    if not folder.is_dir():
        raise InputError(f"{path}: no such segmenter; pass a folder with {WEIGHTS} and {CONFIG}")
    config = SegmenterConfig.from_json(read_json(folder / CONFIG), str(folder / CONFIG))
    weights = folder / WEIGHTS
    state, _ = read_safetensors(weights)
    network = network_from_state(config.network, state, str(weights))
    return Segmenter(config, network, path=weights, sha256=file_sha256(weights)).to(device)


def network_from_state(config: SegmentConfig, state: Mapping[str, Tensor], where: str) -> SegmentUNet:
    with torch.device("meta"):
        network = SegmentUNet(config)
    check_state({k: tuple(v.shape) for k, v in network.state_dict().items()}, state, where)
    network.load_state_dict({k: v.float() for k, v in state.items()}, assign=True)
    return network


def save_segmenter(segmenter: Segmenter, folder: str | Path, *, card: str, overwrite: bool = False) -> Path:
    """Writes the folder: weights, config, card."""
    folder = Path(folder)
    weights = {k: v.detach().cpu().contiguous() for k, v in segmenter.network.state_dict().items()}
    write_model_folder(folder, weights, segmenter.config.to_json(), card, overwrite=overwrite)
    return folder


def check_segmenter(segmenter: Segmenter, contract: DataContract) -> None:
    """Raises if the segmenter's grid or labels differ from the model's."""
    difference = contract_difference(segmenter.config.data, contract)
    if difference:
        raise InputError(
            f"{segmenter.name}: {difference}; train one on subjects packed for this model (voxtune pack --model "
            "MODEL, voxtune train --workload segment --subjects) and pass it with --segmenter"
        )
