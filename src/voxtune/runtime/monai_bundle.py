"""MONAI bundles: a model as a folder that MONAI runs (`voxtune export`), and that Voxtune reads again.

BUNDLE/configs/metadata.json     MONAI's description: versions, task, formats of input and output
BUNDLE/configs/inference.json    a workflow: MONAI loads the mask, the network draws, MONAI saves the volume
BUNDLE/configs/voxtune.json      the config.json of the model
BUNDLE/models/model.pt           the weights as a state dict
BUNDLE/docs/README.md            how it runs

The network is `BundleNetwork`, so Voxtune has to be installed where the bundle runs. It takes its inputs as the generative
networks of MONAI do, so MONAI's own `DiffusionInferer` and schedulers run it, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.errors import InputError, install_command
from voxtune.files import check_outputs, locked_folder, recorded_path, write_file, write_json, writing
from voxtune.marks import marked_markdown
from voxtune.reading import read_json
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.storage import BUNDLE_WEIGHTS, network_from_state
from voxtune.tensorfiles import read_torch
from voxtune.versions import __version__
from voxtune.workloads import build

METADATA, INFERENCE, SETTINGS = "configs/metadata.json", "configs/inference.json", "configs/voxtune.json"
DOCUMENT = "docs/README.md"
PREFIX = "network."
NETWORK = "voxtune.runtime.monai_bundle.BundleNetwork"


class BundleNetwork(nn.Module):
    """The network of a bundle, with random weights until `load_state_dict`. `config` is its voxtune.json."""

    def __init__(self, config: str):
        super().__init__()
        self.config = ModelConfig.from_json(read_json(Path(config)), config)
        self.network = build(self.config.network).eval()

    def forward(self, x: Tensor, timesteps: Tensor, context: Tensor | None = None) -> Tensor:
        """The noise in `x` (N, C, D, H, W) at `timesteps` (N). The encoded mask is `context`, or the last channels of `x`."""
        images = self.config.network.out_channels
        cond = x[:, images:] if context is None and x.shape[1] > images else context
        return self.network(x[:, :images], timesteps, cond)

    def draw(self, mask: Tensor, seed: int = 0, steps: int | str | None = None) -> Tensor:
        """The volumes for a mask that MONAI has loaded, (1, X, Y, Z) with its affine, as (images, X, Y, Z) on its grid."""
        from monai.data import MetaTensor

        affine = getattr(mask, "affine", None)
        if mask.dim() != 4 or mask.shape[0] != 1 or affine is None:
            raise InputError(f"mask of shape {tuple(mask.shape)}: expected a MetaTensor (1, X, Y, Z) with its affine")
        options: dict[str, Any] = {} if steps is None else {"steps": steps}
        labels = torch.as_tensor(mask[0]).cpu().numpy()
        model = Model(self.config, self.network, weights="weights of a MONAI bundle")
        volumes = model.draw_images(labels, affine.cpu().numpy(), seed=seed, **options)
        arrays = [torch.from_numpy(volume.array.copy()) for volume in volumes.values()]
        meta = {name: value for name, value in mask.meta.items() if name != "affine"}  # type: ignore[attr-defined]
        return MetaTensor(torch.stack(arrays), affine=affine, meta=meta)


def bundle_files(folder: Path) -> tuple[Path, ...]:
    return tuple(folder / name for name in (SETTINGS, METADATA, INFERENCE, BUNDLE_WEIGHTS, DOCUMENT))


def is_bundle(folder: Path) -> bool:
    """Whether a folder is a bundle that Voxtune wrote."""
    return (folder / SETTINGS).is_file() and (folder / METADATA).is_file()


def write_bundle(model: Model, folder: Path, *, document: str) -> Path:
    """Writes the model as a MONAI bundle, to a new folder."""
    contract = model.config.data
    if contract is None or model.config.network.dimensions != 3:
        raise InputError("this model takes no 3D mask; a bundle requires one")
    check_outputs(bundle_files(folder), folder=folder)
    state = {f"{PREFIX}{k}": v.detach().float().cpu() for k, v in model.network.state_dict().items()}
    with locked_folder(folder):
        with writing(folder / BUNDLE_WEIGHTS) as part:
            torch.save(state, part)
        documents = {METADATA: _metadata(model), INFERENCE: _inference(), SETTINGS: model.config.to_json()}
        for name, content in documents.items():
            write_json(folder / name, content)
        write_file(folder / DOCUMENT, marked_markdown(document))
    return folder


def read_bundle(folder: Path) -> Model:
    """The model of a bundle that `write_bundle` wrote. Nothing in it is executed."""
    config = ModelConfig.from_json(read_json(folder / SETTINGS), str(folder / SETTINGS))
    weights = folder / BUNDLE_WEIGHTS
    state = read_torch(weights)
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise InputError(f"{weights}: not the weights of a bundle; write it again with voxtune export")
    named = {str(k).removeprefix(PREFIX): v for k, v in state.items()}
    return Model(config, network_from_state(config.network, named, str(weights)))


def _metadata(model: Model) -> dict[str, Any]:
    import numpy

    contract = model.config.data
    assert contract is not None
    size = [int(n) for n in reversed(contract.size)]
    names = {str(value): name for value, name in contract.value_names().items()}
    common = {"spatial_shape": size, "modality": "MR", "num_channels": 1, "is_patch_data": False}
    mask = {"type": "image", "format": "segmentation", **common, "dtype": "uint8"}
    mask |= {"value_range": [0, max((int(v) for v in names), default=0)]}
    image = {"type": "image", "format": "magnitude", **common, "dtype": "float32", "value_range": [0, 1]}
    image |= {"num_channels": len(contract.images)}
    return {
        "schema": "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json",
        "version": "1.0.0",
        "changelog": {"1.0.0": f"written by voxtune {__version__}"},
        "monai_version": _monai_version(),
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": numpy.__version__,
        "required_packages_version": {"voxtune": __version__, "nibabel": "5.2"},
        "name": f"voxtune {model.config.family}",
        "task": "generation of MRI volumes from segmentation masks",
        "description": "A diffusion model that draws MRI volumes from masks. For research, not for clinical use.",
        "authors": "see docs/README.md",
        "copyright": "see docs/README.md",
        "network_data_format": {
            "inputs": {"image": {**mask, "channel_def": {"0": "mask"}, "labels": {"0": "background", **names}}},
            "outputs": {"pred": {**image, "channel_def": {str(n): name for n, name in enumerate(contract.images)}}},
        },
    }


def _monai_version() -> str:
    try:
        from importlib.metadata import version

        return version("monai")
    except ModuleNotFoundError:
        # The first version with the transforms and options of inference.json.
        return "1.4.0"


def _inference() -> dict[str, Any]:
    checkpoint = "torch.load(@checkpoint, map_location=@device, weights_only=True)"
    return {
        "imports": ["$import torch"],
        "bundle_root": ".",
        "mask": "",
        "output_dir": "$@bundle_root + '/eval'",
        "seed": 0,
        "steps": None,
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "checkpoint": f"$@bundle_root + '/{BUNDLE_WEIGHTS}'",
        "network_def": {"_target_": NETWORK, "config": f"$@bundle_root + '/{SETTINGS}'"},
        "network": "$@network_def.to(@device)",
        "preprocessing": {
            "_target_": "Compose",
            "transforms": [
                {"_target_": "LoadImage", "image_only": True},
                {"_target_": "EnsureChannelFirst"},
            ],
        },
        "saver": {
            "_target_": "SaveImage",
            "output_dir": "@output_dir",
            "output_postfix": "synth",
            "separate_folder": False,
        },
        "initialize": [f"$@network.load_state_dict({checkpoint})"],
        "run": ["$@saver(@network.draw(@preprocessing(@mask), @seed, @steps))"],
    }


def bundle_document(path: Path) -> str:
    """How the bundle of the model at `path` runs."""
    return "\n".join(
        [
            f"# MONAI bundle of {recorded_path(path)}",
            "",
            f"Written by voxtune {__version__} (`voxtune export`). It needs MONAI and Voxtune ({install_command('voxtune')}):",
            "",
            "```",
            "python -m monai.bundle run --config_file configs/inference.json --bundle_root . --mask sub-01_dseg.nii.gz",
            "```",
            "",
            "Synthetic images are for research, not for clinical use.",
            "",
        ]
    )
