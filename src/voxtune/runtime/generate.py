"""From mask files to volume files: checks, placement on the model's grid, sampling, and resampling to the mask's grid."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from voxtune.data.contract import DataContract, Shape, encode_mask, unscale_image
from voxtune.data.derivative import check_stems, describe_dataset, mask_stem, output_names, sidecar_path
from voxtune.data.geometry import GeometrySummary
from voxtune.data.grid import Mode, Placement, fit
from voxtune.data.labels import Images, LabelMap, MaskReader
from voxtune.data.legend import contract_legend, first_voxel
from voxtune.data.modality import kind_name
from voxtune.data.nifti import Volume, exact_labels, given_volume, read_labels
from voxtune.data.pixels import check_png, png, to_pixels
from voxtune.data.preflight import check_lost_labels
from voxtune.data.training_data import unlike_masks
from voxtune.diffusion.noise import NoiseRule, check_seed, identity_index
from voxtune.errors import FileProblems, InputError, advice, overwrite_advice
from voxtune.files import write_file
from voxtune.runtime.batching import BatchChoice, choose_batch, pads_last_batch
from voxtune.runtime.model import Model, check_size
from voxtune.runtime.sampling import SamplerSettings

log = logging.getLogger("voxtune")

# What `Model.draw` accepts.
MASKS = "a NIfTI file, a Volume, an image of nibabel, or an array or a tensor with its affine"


@dataclass(frozen=True, kw_only=True)
class MaskRequest:
    """One mask, read, checked and placed on the model's grid.

    Holds the geometry of the file but not its voxels, because thousands of requests may be in memory.
    """

    path: Path
    grid: Volume  # the mask's geometry, without its voxels
    labels_DHW: np.ndarray
    placement: Placement
    warnings: tuple[str, ...]
    images: tuple[Path, ...] = ()  # where a label of the mask was taken from
    file_labels: Mapping[str, str] | None = None  # names of the file's own values, if these were mapped


@dataclass(frozen=True, kw_only=True)
class VolumeJob:
    """One volume to generate: number `replicate` of a mask, with the noise `index`. `names` are relative to the folder."""

    request: MaskRequest
    replicate: int
    index: int
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GeneratedVolume:
    """One generated sample: `images_CDHW` in [0, 1] on the model's grid, and its files on the mask's grid."""

    request: MaskRequest
    replicate: int
    index: int
    images_CDHW: np.ndarray
    files: tuple[Path, ...]


def prepare(
    model: Model,
    masks: Iterable[Path],
    *,
    mode: Mode = "auto",
    size: Shape | None = None,
    labels: LabelMap | None = None,
    images: Mapping[Path, Sequence[Path]] | None = None,
) -> list[MaskRequest]:
    """Reads and checks all masks; raises one FilesError with every invalid mask.

    `labels` is what the values of the masks mean; `images` are those of the masks' subjects, for a label that is taken from
    them.
    """
    masks = list(masks)
    check_stems(masks)
    reader = MaskReader(contract=mask_contract(model), labels=labels)
    reader.check_names()
    fix = advice(
        "pass the folder of the images with --images" if images is None else "add it to the folder of --images",
        "pass it as images",
    )
    requests, problems = [], FileProblems()
    for path in masks:
        try:
            used = tuple((images or {}).get(path, ())) if reader.from_image else ()
            request = prepare_mask(reader.read(path, used, fix=fix), reader, mode, size)
            requests.append(replace(request, images=used))
        except InputError as error:
            problems.add(path, error)
    problems.raise_all()
    return requests


def mask_contract(model: Model) -> DataContract:
    if model.config.data is None:
        raise InputError("this model has no data contract, so it cannot read mask files; use Model.sample from Python")
    return model.config.data


def read_mask(mask: object, affine: np.ndarray | None = None) -> Volume:
    """A mask for `draw_images`: read from its file, or checked in memory."""
    if isinstance(mask, torch.Tensor):
        mask = _array(mask)
    if isinstance(mask, np.ndarray):
        if affine is None:
            raise InputError("missing affine: pass the 4 x 4 matrix from voxels to millimetres with the array")
        try:
            mask = Volume(array=mask, affine=np.array(affine, dtype=np.float64))
        except (TypeError, ValueError):
            raise InputError(f"affine: expected a 4 x 4 matrix of numbers, got {type(affine).__name__}") from None
        affine = None
    given = given_volume(mask, "mask", MASKS)
    if affine is not None:
        raise InputError("affine applies to a mask given as an array or a tensor; omit it")
    if isinstance(given, Path):
        return read_labels(given)
    return replace(given, array=exact_labels(given.array, given.name))


def _array(tensor: torch.Tensor) -> np.ndarray:
    try:
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()
    except (TypeError, RuntimeError):
        raise InputError(f"mask: a tensor of {tensor.dtype}, {tensor.layout} cannot be a mask") from None


def prepare_mask(mask: Volume, reader: MaskReader, mode: Mode = "auto", size: Shape | None = None) -> MaskRequest:
    """Checks a mask that `reader` returned and places it on the model's grid."""
    contract = reader.contract
    report = reader.check(mask)
    report.raise_errors()
    placement = fit(mask, contract, mode, size)
    labels_DHW = placement.apply(mask.array, label=True)
    report += check_lost_labels(mask.array, labels_DHW, contract, mask.name)
    report.raise_errors()
    warnings = tuple(f.message for f in report.warnings)
    grid = replace(mask, array=np.broadcast_to(np.zeros((), np.uint8), mask.shape))
    compact = labels_DHW.astype(np.min_scalar_type(max(contract.all_values)))
    return MaskRequest(
        path=mask.path or Path(mask.name),
        grid=grid,
        labels_DHW=compact,
        placement=placement,
        warnings=warnings,
        file_labels=None if reader.labels is None else reader.labels.file_names(contract),
    )


def common_warnings(model: Model, requests: Sequence[MaskRequest]) -> list[str]:
    """Warnings about all masks together: their geometry, and masks that are unlike those of the training data."""
    placed = ((r.path.name, r.labels_DHW, r.placement.source_spacing) for r in requests)
    unlike = unlike_masks(model.config.training_data, model.config.data, placed)
    return [*GeometrySummary(request.grid for request in requests).lines(), *([] if unlike is None else [unlike])]


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
    progress: Callable[[int, int], None] | None = None,
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
    for warning in (*request.warnings, *common_warnings(model, [request])):
        warn(warning)
    # A mask in memory has no name.
    index = 0 if mask.path is None else identity_index(mask_stem(mask.path), 1)
    job = VolumeJob(request=request, replicate=1, index=index)
    [(_, images_CDHW, _)] = _sampled(model, [job], settings, seed, 1, progress)
    volumes = _on_mask_grid(request, images_CDHW, contract.images)
    # Pictures of the volumes show what the mask is about.
    centre = first_voxel(mask.array, contract_legend(contract))
    return {name: replace(volume, centre=centre) for name, volume in zip(contract.images, volumes, strict=True)}


def generate(
    model: Model,
    requests: list[MaskRequest],
    out: Path,
    *,
    settings: SamplerSettings | None = None,
    count: int = 1,
    seed: int = 0,
    noise: NoiseRule = "identity",
    batch: int = 1,
    flat: bool = False,
    overwrite: bool = False,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[GeneratedVolume]:
    """Generates `count` volumes for each mask and writes them to `out`; yields each volume once its files are written.

    `jobs_of` describes the noise. `settings` default to the model's. `out` is a BIDS derivative dataset; with `flat`, all
    files are directly in it.
    """
    contract = mask_contract(model)
    jobs = jobs_of(requests, count, contract, noise=noise, flat=flat)
    if not overwrite:
        check_new(out / name for job in jobs for name in job.names)
    check_seed(seed)
    settings = settings or model.resolve()
    model.check_settings(settings)
    describe_dataset(out)
    for job, images_CDHW, together in _sampled(model, jobs, settings, seed, batch, progress):
        request = job.request
        record = {
            **(provenance or {}),
            "seed": seed,
            "index": job.index,
            "noise": {"rule": noise, "stem": mask_stem(request.path), "replicate": job.replicate},
            **settings.record(),
            "batch": together,
            "passes": list(getattr(model.network, "passes", ())),
            "mask": request.path.name,
            "Sources": [_relative(out, path) for path in (request.path, *request.images)],
            "labels": {str(value): name for value, name in contract.value_names().items()},
            **({} if request.file_labels is None else {"mask_labels": dict(request.file_labels)}),
            "placement": request.placement.describe(),
        }
        files = _write(_on_mask_grid(request, images_CDHW, contract.images), out, job.names, record)
        yield GeneratedVolume(
            request=request, replicate=job.replicate, index=job.index, images_CDHW=images_CDHW, files=files
        )


def jobs_of(
    requests: list[MaskRequest],
    count: int,
    contract: DataContract,
    *,
    noise: NoiseRule = "identity",
    flat: bool = False,
) -> list[VolumeJob]:
    """`count` volumes for each mask, with their noise and their files.

    The noise of a volume depends on the seed, the mask's name and the number of the volume (`identity_index`), and not on
    other masks; with the rule "position", on the seed and the place among all volumes.
    """
    if noise not in get_args(NoiseRule):
        raise InputError(f"noise {noise!r}: choose from {', '.join(get_args(NoiseRule))}")
    names = output_names([request.path for request in requests], count, contract.images, flat=flat)
    jobs: list[VolumeJob] = []
    for request, names_of_mask in zip(requests, names, strict=True):
        stem = mask_stem(request.path)
        for replicate, files in enumerate(names_of_mask, start=1):
            index = identity_index(stem, replicate) if noise == "identity" else len(jobs)
            jobs.append(VolumeJob(request=request, replicate=replicate, index=index, names=files))
    return jobs


def choose_volume_batch(model: Model, jobs: list[VolumeJob], settings: SamplerSettings) -> BatchChoice:
    """The fastest batch size of the jobs on this machine, measured in a few steps on their first masks."""
    contract = mask_contract(model)

    def condition(batch: int) -> torch.Tensor:
        return torch.from_numpy(np.stack([encode_mask(job.request.labels_DHW, contract) for job in jobs[:batch]]))

    size = jobs[0].request.labels_DHW.shape
    return choose_batch(model, condition, size, volumes=len(jobs), steps=settings.steps)


def _sampled(
    model: Model,
    jobs: list[VolumeJob],
    settings: SamplerSettings,
    seed: int,
    batch: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[tuple[VolumeJob, np.ndarray, int]]:
    """(job, images in [0, 1] on the model's grid, size of the batch it was in)."""
    contract = mask_contract(model)
    done = 0
    while chunk := list(islice(jobs, done, done + batch)):
        pad = batch - len(chunk) if done and pads_last_batch(model) else 0
        padded = [*chunk, *[chunk[-1]] * pad]
        cond = torch.from_numpy(np.stack([encode_mask(job.request.labels_DHW, contract) for job in padded]))
        x = model.sample(
            cond,
            settings=settings,
            seed=seed,
            indices=[job.index for job in padded],
            progress=None
            if progress is None
            else batch_progress(progress, done, len(chunk), len(jobs), settings.steps),
        )
        for job, image in zip(chunk, x[: len(chunk)].cpu().numpy(), strict=True):
            check_finite(image, f"volume {job.replicate} of {job.request.path}")
            yield job, unscale_image(image), len(padded)
        done += len(chunk)


def _on_mask_grid(request: MaskRequest, images_CDHW: np.ndarray, images: tuple[str, ...]) -> list[Volume]:
    """The images as volumes with the size, the position and the header geometry of the mask."""
    arrays = [request.placement.invert(image_DHW, label=False) for image_DHW in images_CDHW]
    return [
        replace(request.grid, array=array, path=None, kind=kind) for array, kind in zip(arrays, images, strict=True)
    ]


def check_new(files: Iterable[Path]) -> None:
    for file in files:
        if file.exists():
            raise InputError(f"{file} already exists; choose another folder, or {overwrite_advice()}")


def check_finite(image: np.ndarray, name: str) -> None:
    """Raises for a sample with NaN or infinity, which must not be written."""
    if not np.isfinite(image).all():
        raise InputError(
            f"{name}: not written, because it contains NaN or infinity; earlier samples are complete. Try --plan "
            "baseline, another sampler or more steps; if these fail too, the weights are invalid"
        )


def batch_progress(
    progress: Callable[[int, int], None], done: int, batch: int, jobs: int, steps: int
) -> Callable[[int, int], None]:
    """The progress of one batch, in steps times volumes of all `jobs`."""
    return lambda step, _total: progress(done * steps + step * batch, jobs * steps)


def _write(volumes: list[Volume], out: Path, names: tuple[str, ...], record: dict[str, Any]) -> tuple[Path, ...]:
    files = []
    for volume, name in zip(volumes, names, strict=True):
        files.append(volume.save(out / name, overwrite=True))
        sidecar = {**record, "Image": kind_name(volume.kind or "")}
        write_file(sidecar_path(files[-1]), (json.dumps(sidecar, indent=2, default=str) + "\n").encode(), state=True)
    return tuple(files)


def _relative(folder: Path, path: Path) -> str:
    """The path of the file relative to the folder, so that both can be moved together."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # on another drive
        return path.resolve().as_posix()


@dataclass(frozen=True, kw_only=True)
class GeneratedImage:
    """One generated image: its pixels and its file."""

    index: int
    pixels_HWC: np.ndarray
    file: Path


def check_image_request(model: Model, out: Path, count: int, size: tuple[int, ...] | None, *, overwrite: bool) -> None:
    """Raises for images that cannot be generated or written."""
    network = model.config.network
    if network.mask_channels or network.dimensions != 2:
        raise InputError(f"a {model.config.family} model generates volumes from masks, not images")
    check_png(network.out_channels)
    check_size(network, size or model.config.size)
    if not overwrite:
        check_new(image_path(out, i) for i in range(count))


def image_path(out: Path, index: int) -> Path:
    return out / f"image-{index:06d}.png"


def generate_images(
    model: Model,
    out: Path,
    *,
    settings: SamplerSettings | None = None,
    count: int = 1,
    seed: int = 0,
    batch: int = 1,
    size: tuple[int, ...] | None = None,
    overwrite: bool = False,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[GeneratedImage]:
    """Generates images 0 .. count - 1 and writes them to `out`; yields each image once its files are written.

    Image i has the noise of (seed, i), independent of the batch size. `settings` default to the model's.
    """
    check_image_request(model, out, count, size, overwrite=overwrite)
    check_seed(seed)
    settings = settings or model.resolve()
    model.check_settings(settings)
    for first in range(0, count, batch):
        indices = range(first, min(first + batch, count))
        x_NCHW = model.sample(
            settings=settings,
            seed=seed,
            indices=indices,
            size=size,
            progress=None if progress is None else batch_progress(progress, first, len(indices), count, settings.steps),
        )
        for i, image_CHW in zip(indices, x_NCHW.float().cpu().numpy(), strict=True):
            check_finite(image_CHW, f"image {i}")
            record = {
                **(provenance or {}),
                "seed": seed,
                "index": i,
                **settings.record(),
                "batch": len(indices),
                "passes": list(getattr(model.network, "passes", ())),
            }
            pixels_HWC, file = to_pixels(image_CHW), image_path(out, i)
            write_file(file, png(pixels_HWC), state=True)
            write_file(
                file.with_suffix(".json"), (json.dumps(record, indent=2, default=str) + "\n").encode(), state=True
            )
            yield GeneratedImage(index=i, pixels_HWC=pixels_HWC, file=file)
