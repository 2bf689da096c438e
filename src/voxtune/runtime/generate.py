"""From mask files to volume files: pre-flight, placement on the model's grid, sampling, and the way back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from voxtune.data.contract import DataContract, Shape, encode_mask, unscale_image
from voxtune.data.grid import Mode, Placement, fit
from voxtune.data.nifti import Volume, read_labels, write_volume
from voxtune.data.pixels import check_png, png, to_pixels
from voxtune.data.preflight import check_lost_labels, check_mask
from voxtune.diffusion.noise import check_seed
from voxtune.errors import InputError
from voxtune.files import write_atomic
from voxtune.runtime.model import Model, check_size
from voxtune.runtime.sampling import SamplerSettings

BARE = re.compile(r"dseg|seg|mask|labels?", re.IGNORECASE)
MASK_ENDING = re.compile(r"(_(dseg|seg|mask|labels?))?\.nii(\.gz)?$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class MaskRequest:
    """One mask, read, checked and placed. Thousands may wait for their turn: of the file only its geometry is kept."""

    path: Path
    grid: Volume  # the mask's own, without its voxels
    labels_DHW: np.ndarray
    placement: Placement
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class GeneratedVolume:
    """One synthetic sample: `images_CDHW` in [0, 1] on the model's grid, and the files on the mask's own."""

    request: MaskRequest
    index: int
    images_CDHW: np.ndarray
    files: tuple[Path, ...]


def prepare(
    model: Model, masks: Iterable[Path], *, mode: Mode = "auto", size: Shape | None = None
) -> list[MaskRequest]:
    """Reads and checks every mask before any work; raises once, with all that is wrong."""
    contract = mask_contract(model)
    requests, faults = [], []
    for path in masks:
        try:
            requests.append(_prepare_one(path, contract, mode, size))
        except InputError as error:
            faults.append(str(error))
    if faults:
        raise InputError("; ".join(faults))
    return requests


def mask_contract(model: Model) -> DataContract:
    if model.config.data is None:
        raise InputError("this model takes no mask file (it has no label contract); use Model.sample from Python")
    return model.config.data


def _prepare_one(path: Path, contract: DataContract, mode: Mode, size: Shape | None) -> MaskRequest:
    mask = read_labels(path)
    report = check_mask(mask, contract)
    report.raise_errors()
    placement = fit(mask, contract, mode, size)
    labels_DHW = placement.apply(mask.array, label=True)
    report += check_lost_labels(mask.array, labels_DHW, contract, mask.name)
    report.raise_errors()
    warnings = tuple(f.message for f in report.warnings)
    grid = replace(mask, array=np.broadcast_to(np.zeros((), np.uint8), mask.shape))
    small = labels_DHW.astype(np.min_scalar_type(max(contract.values)))
    return MaskRequest(path=path, grid=grid, labels_DHW=small, placement=placement, warnings=warnings)


def generate(
    model: Model,
    requests: list[MaskRequest],
    out: Path,
    *,
    settings: SamplerSettings | None = None,
    count: int = 1,
    seed: int = 0,
    batch: int = 1,
    overwrite: bool = False,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[GeneratedVolume]:
    """Draws `count` volumes for each mask and writes them into `out`; yields each as soon as it is on disk.

    Volume i (masks in order, `count` for each) has the noise of (seed, i), whatever the batch.
    """
    contract = mask_contract(model)
    jobs = [(i, request) for i, request in enumerate(r for r in requests for _ in range(count))]
    names = output_names([request.path for _, request in jobs], contract.images)
    if not overwrite:
        taken = [n for group in names for n in group if (out / n).exists()]
        if taken:
            raise InputError(f"{out / taken[0]}: exists already; choose another folder or pass --overwrite")
    check_seed(seed)
    settings = settings or model.resolve()
    model.check_settings(settings)
    _describe_folder(out)
    done = 0
    while chunk := list(islice(jobs, done, done + batch)):
        cond = torch.from_numpy(np.stack([encode_mask(request.labels_DHW, contract) for _, request in chunk]))
        x = model.sample(
            cond,
            settings=settings,
            seed=seed,
            indices=[i for i, _ in chunk],
            progress=None if progress is None else overall(progress, done, len(chunk), len(jobs), settings.steps),
        )
        for (i, request), image in zip(chunk, x.cpu().numpy(), strict=True):
            check_finite(image, f"volume {i}, for {request.path}")
            record = {
                **(provenance or {}),
                "seed": seed,
                "index": i,
                **settings.record(),
                "passes": list(getattr(model.network, "passes", ())),
                "mask": request.path.name,
                "Sources": [_from(out, request.path)],
                "labels": {str(label.value): label.name for label in contract.labels},
                "placement": request.placement.describe(),
            }
            yield _write(request, i, unscale_image(image), out, names[i], record)
        done += len(chunk)


def check_finite(image: np.ndarray, what: str) -> None:
    """Raises rather than let a volume be written that holds no image."""
    if not np.isfinite(image).all():
        raise InputError(
            f"{what}: the model drew NaN or infinity, so it is not written; those before it are. Try --plan baseline, "
            "another sampler or more steps; if that fails too, the weights are broken"
        )


def output_names(masks: list[Path], images: tuple[str, ...]) -> list[tuple[str, ...]]:
    """File names of each sample: the mask's name without its ending, numbered where a mask is used again."""
    names = []
    seen: dict[str, int] = {}
    places: dict[str, Path] = {}
    for path in masks:
        stem = MASK_ENDING.sub("", path.name)
        if not stem or BARE.fullmatch(stem):  # seg.nii.gz in a folder of its subject
            stem = path.absolute().parent.name or "mask"
        if places.setdefault(stem, path.absolute()) != path.absolute():
            raise InputError(
                f"{places[stem]}, {path}: masks of one name, whose volumes could not be told apart; draw them into folders of "
                "their own"
            )
        number = seen[stem] = seen.get(stem, 0) + 1
        names.append(tuple(f"{stem}_desc-synth{number:02d}_{image}.nii.gz" for image in images))
    return names


def overall(
    progress: Callable[[int, int], None], done: int, batch: int, jobs: int, steps: int
) -> Callable[[int, int], None]:
    """Steps of one batch as volume-steps of the whole run."""
    return lambda step, _total: progress(done * steps + step * batch, jobs * steps)


def _write(
    request: MaskRequest, index: int, images_CDHW: np.ndarray, out: Path, names: tuple[str, ...], record: dict[str, Any]
) -> GeneratedVolume:
    files = []
    for image_DHW, name in zip(images_CDHW, names, strict=True):
        files.append(write_volume(out / name, request.placement.invert(image_DHW, label=False), request.grid))
        sidecar = out / name.replace(".nii.gz", ".json")
        write_atomic(sidecar, (json.dumps(record, indent=2, default=str) + "\n").encode())
    return GeneratedVolume(request=request, index=index, images_CDHW=images_CDHW, files=tuple(files))


def _from(folder: Path, path: Path) -> str:
    """The way from the folder to the file, so that both can move together."""
    try:
        return Path(os.path.relpath(path.resolve(), folder.resolve())).as_posix()
    except ValueError:  # another drive: there is no way
        return path.resolve().as_posix()


def _describe_folder(out: Path) -> None:
    """The BIDS description of a derivative, once."""
    from voxtune.versions import __version__

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{out}: {error.strerror}; choose a folder that can be written") from None
    description = {
        "Name": "Synthetic MRI",
        "BIDSVersion": "1.10.0",
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": "voxtune", "Version": __version__}],
    }
    if not (out / "dataset_description.json").exists():
        write_atomic(out / "dataset_description.json", (json.dumps(description, indent=2) + "\n").encode())


@dataclass(frozen=True, kw_only=True)
class GeneratedImage:
    """One synthetic image: its pixels and its file."""

    index: int
    pixels_HWC: np.ndarray
    file: Path


def check_image_request(model: Model, out: Path, count: int, size: tuple[int, ...] | None, *, overwrite: bool) -> None:
    """Raises for what cannot be drawn or written, before any work."""
    network = model.config.network
    if network.mask_channels or network.dimensions != 2:
        raise InputError(f"a {model.config.family} model draws volumes from masks, not images")
    check_png(network.out_channels)
    check_size(network, size or model.config.size)
    taken = [] if overwrite else [path for i in range(count) if (path := image_path(out, i)).exists()]
    if taken:
        raise InputError(f"{taken[0]}: exists already; choose another folder or pass --overwrite")


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
    """Draws images 0 .. count - 1 and writes them into `out`; yields each as soon as it is on disk.

    Image i has the noise of (seed, i), whatever the batch.
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
            progress=None if progress is None else overall(progress, first, len(indices), count, settings.steps),
        )
        for i, image_CHW in zip(indices, x_NCHW.float().cpu().numpy(), strict=True):
            check_finite(image_CHW, f"image {i}")
            record = {
                **(provenance or {}),
                "seed": seed,
                "index": i,
                **settings.record(),
                "passes": list(getattr(model.network, "passes", ())),
            }
            pixels_HWC, file = to_pixels(image_CHW), image_path(out, i)
            write_atomic(file, png(pixels_HWC))
            write_atomic(file.with_suffix(".json"), (json.dumps(record, indent=2, default=str) + "\n").encode())
            yield GeneratedImage(index=i, pixels_HWC=pixels_HWC, file=file)
