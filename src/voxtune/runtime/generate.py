"""From mask files to volume files: sampling in batches, resampling to the mask's grid, and jobs that can be resumed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from voxtune.data.contract import DataContract, encode_mask, unscale_image
from voxtune.data.derivative import describe_dataset, mask_stem, output_names, sidecar_path
from voxtune.data.grid import Mode
from voxtune.data.labels import Images, LabelMap, MaskReader
from voxtune.data.legend import contract_legend, first_voxel
from voxtune.data.modality import SYNTHETIC, kind_name
from voxtune.data.nifti import Volume, write_volume
from voxtune.diffusion.noise import NoiseRule, identity_index
from voxtune.errors import InputError
from voxtune.files import recorded_path, write_json
from voxtune.runtime.batching import BatchChoice, choose_batch
from voxtune.runtime.job import Job, OnError, Progress, check_finite
from voxtune.runtime.masks import MaskRequest, Masks, common_warnings, mask_contract, prepare_mask
from voxtune.runtime.model import Model, check_size
from voxtune.runtime.sampling import SamplerSettings

log = logging.getLogger("voxtune")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedVolume:
    """One volume to generate: number `replicate` of mask number `mask`, with the noise `index`.

    `names` are the files of its images and `picture` is a PNG of them, relative to the output folder.
    """

    mask: int
    replicate: int
    index: int
    names: tuple[str, ...]
    picture: str | None = None

    @property
    def sidecars(self) -> tuple[str, ...]:
        return tuple(sidecar_path(Path(name)).as_posix() for name in self.names)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*self.names, *(() if self.picture is None else (self.picture,)), *self.sidecars)


@dataclass(frozen=True, kw_only=True)
class GeneratedVolume:
    """One generated sample: `images_CDHW` in [0, 1] on the model's grid, and its files on the mask's grid."""

    request: MaskRequest
    replicate: int
    index: int
    images_CDHW: np.ndarray
    files: tuple[Path, ...]
    contract: DataContract


def draw_images(
    model: Model,
    mask: Volume,
    *,
    settings: SamplerSettings,
    seed: int = 0,
    mode: Mode = "auto",
    size: tuple[int, ...] | None = None,
    labels: LabelMap | None = None,
    image: Images | None = None,
    progress: Progress | None = None,
    warn: Callable[[str], None] = log.warning,
) -> dict[str, Volume]:
    """The images that `generate` writes for one mask, by name and in memory.

    `labels` is what the mask's values mean, `image` the subject's image or images for a label that is taken from them.
    """
    contract = mask_contract(model)
    if size is not None:
        check_size(model.config.network, size)
    reader = MaskReader(contract=contract, labels=labels)
    mask = reader.convert(mask, () if image is None else image, fix="pass it as image")
    request = prepare_mask(mask, reader, mode, size)  # type: ignore[arg-type]  # three dimensions, as the contract
    for warning in (*request.warnings, *common_warnings(model, request)):
        warn(warning)
    # A mask in memory has no name.
    index = 0 if mask.path is None else identity_index(mask_stem(mask.path), 1)
    [images_CDHW] = _draw(model, encoded([request], contract), [index], settings, seed, progress)
    check_finite(images_CDHW, f"the volume of {mask.name}")
    volumes = _on_mask_grid(request, unscale_image(images_CDHW), contract.images)
    # Pictures of the volumes show what the mask is about.
    centre = first_voxel(mask.array, contract_legend(contract))
    return {name: replace(volume, centre=centre) for name, volume in zip(contract.images, volumes, strict=True)}


def plan_volumes(
    masks: Sequence[Path],
    count: int,
    contract: DataContract,
    *,
    noise: NoiseRule = "identity",
    flat: bool = False,
    picture: bool = False,
) -> list[PlannedVolume]:
    """`count` volumes for each mask, with their noise and their files.

    The noise of a volume depends on the seed, the mask's name and the number of the volume (`identity_index`), and not on
    other masks; with the rule "position", on the seed and the place among all volumes.
    """
    if noise not in get_args(NoiseRule):
        raise InputError(f"noise {noise!r}: choose from {', '.join(get_args(NoiseRule))}")
    volumes: list[PlannedVolume] = []
    for mask, (path, names) in enumerate(
        zip(masks, output_names(masks, count, contract.images, flat=flat), strict=True)
    ):
        stem = mask_stem(path)
        for replicate, files in enumerate(names, start=1):
            index = identity_index(stem, replicate) if noise == "identity" else len(volumes)
            drawing = picture_name(files) if picture else None
            volumes.append(PlannedVolume(mask=mask, replicate=replicate, index=index, names=files, picture=drawing))
    return volumes


def picture_name(files: Sequence[str]) -> str:
    """The PNG of a volume; that of several images has no image kind in its name: sub-1_desc-synth01.png."""
    first = files[0]
    mark = SYNTHETIC.search(first) if len(files) > 1 else None
    return (first[: mark.end()] if mark else first.removesuffix(".nii.gz")) + ".png"


class VolumeJob(Job[PlannedVolume, GeneratedVolume]):
    """Volumes of masks; `out` becomes a BIDS derivative dataset. With `flat`, all files are directly in it.

    `picture(volume, file, overwrite)` draws a picture of a volume.
    """

    def __init__(
        self,
        model: Model,
        masks: Masks,
        out: Path,
        *,
        settings: SamplerSettings | None = None,
        count: int = 1,
        seed: int = 0,
        noise: NoiseRule = "identity",
        flat: bool = False,
        overwrite: bool = False,
        resume: bool = False,
        on_error: OnError = "stop",
        provenance: Mapping[str, Any] | None = None,
        picture: Callable[[GeneratedVolume, Path, bool], None] | None = None,
    ):
        self.masks, self.noise, self.picture, self.contract = masks, noise, picture, mask_contract(model)
        volumes = plan_volumes(masks.names, count, self.contract, noise=noise, flat=flat, picture=picture is not None)
        super().__init__(
            model,
            out,
            volumes,
            settings=settings,
            seed=seed,
            overwrite=overwrite,
            resume=resume,
            on_error=on_error,
            provenance=provenance,
        )
        # Also lists the masks that were skipped before.
        self.problems = masks.problems

    def record(self, item: PlannedVolume) -> dict[str, Any]:
        mask = self.masks.checked[item.mask]
        return {
            **self.provenance,
            "seed": self.seed,
            "index": item.index,
            "noise": {"rule": self.noise, "stem": mask_stem(mask.named), "replicate": item.replicate},
            **self.settings.record(),
            "mask": mask.path.name,
            "Sources": [recorded_path(path, self.out) for path in (mask.path, *mask.images)],
            "sources_sha256": list(mask.sha256),
            "labels": {str(value): name for value, name in self.contract.value_names().items()},
            **({} if self.masks.file_labels is None else {"mask_labels": dict(self.masks.file_labels)}),
            "placement": mask.placement,
        }

    def name(self, item: PlannedVolume) -> str:
        return f"volume {item.replicate} of {self.source(item)}"

    def source(self, item: PlannedVolume) -> Path:
        return self.masks.checked[item.mask].path

    def read(self, item: PlannedVolume) -> MaskRequest:
        return self.masks[item.mask]

    def draw(self, inputs: Sequence[MaskRequest], indices: Sequence[int], progress: Progress | None) -> np.ndarray:
        return self.sample(encoded(inputs, self.contract), indices, progress)

    def sample(self, cond: torch.Tensor, indices: Sequence[int], progress: Progress | None = None) -> np.ndarray:
        """As `draw`, from encoded masks."""
        return _draw(self.model, cond, indices, self.settings, self.seed, progress)

    def write(
        self, item: PlannedVolume, given: MaskRequest, sample: np.ndarray, made_by: dict[str, Any]
    ) -> GeneratedVolume:
        files, images_CDHW = tuple(self.out / name for name in item.names), unscale_image(sample)
        for volume, file in zip(_on_mask_grid(given, images_CDHW, self.contract.images), files, strict=True):
            write_volume(file, volume.array, volume, overwrite=self.replaces)
        generated = GeneratedVolume(
            request=given,
            replicate=item.replicate,
            index=item.index,
            images_CDHW=images_CDHW,
            files=files,
            contract=self.contract,
        )
        if self.picture is not None and item.picture is not None:
            self.picture(generated, self.out / item.picture, self.replaces)
        record = {**self.record(item), **made_by}
        for name, image in zip(item.sidecars, self.contract.images, strict=True):
            write_json(self.out / name, {**record, "Image": kind_name(image)}, overwrite=self.replaces)
        return generated

    def choose_batch(self) -> BatchChoice:
        def condition(batch: int) -> torch.Tensor:
            return encoded([self.read(item) for item in self.items[:batch]], self.contract)

        size = self.masks[0].labels_DHW.shape
        return choose_batch(self.model, condition, size, volumes=len(self.items), steps=self.settings.steps)

    def prepare_folder(self) -> None:
        describe_dataset(self.out)


def generate(
    model: Model,
    masks: Masks,
    out: Path,
    *,
    batch: int = 1,
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[GeneratedVolume]:
    """Generates and writes the volumes of a `VolumeJob`, which takes the `options`; yields each one once it is written."""
    yield from VolumeJob(model, masks, out, **options).generate(batch, progress)


def encoded(requests: Sequence[MaskRequest], contract: DataContract) -> torch.Tensor:
    """The masks as the network takes them (N, L, D, H, W)."""
    return torch.from_numpy(np.stack([encode_mask(request.labels_DHW, contract) for request in requests]))


def _draw(
    model: Model,
    cond: torch.Tensor,
    indices: Sequence[int],
    settings: SamplerSettings,
    seed: int,
    progress: Progress | None,
) -> np.ndarray:
    """Images (N, C, D, H, W) in the range of the model, on its grid."""
    return model.sample(cond, settings=settings, seed=seed, indices=indices, progress=progress).cpu().numpy()


def _on_mask_grid(request: MaskRequest, images_CDHW: np.ndarray, images: tuple[str, ...]) -> list[Volume]:
    """The images as volumes with the size, the position and the header geometry of the mask."""
    arrays = [request.placement.invert(image_DHW, label=False) for image_DHW in images_CDHW]
    return [
        replace(request.grid, array=array, path=None, kind=kind) for array, kind in zip(arrays, images, strict=True)
    ]
