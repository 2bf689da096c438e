"""voxtune sample: generate volumes from masks, or images with a model that takes no mask."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.choices import one_of
from voxtune.cli.common import (
    ClipOption,
    DeviceOption,
    JsonOption,
    LabelsOption,
    ModelArgument,
    Output,
    PlanOption,
    QuietOption,
    SamplerOption,
    TimestepSpacingOption,
    choose_device,
    parse_batch,
    parse_labels,
    parse_size,
    sampler_options,
)
from voxtune.errors import InputError
from voxtune.files import counted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from voxtune.data.contract import DataContract
    from voxtune.data.labels import LabelMap
    from voxtune.runtime.generate import GeneratedImage, GeneratedVolume, MaskRequest, VolumeJob
    from voxtune.runtime.model import Model
    from voxtune.runtime.sampling import SamplerOptions, SamplerSettings

# Images in the contact sheet of --picture.
MAX_PICTURE_IMAGES = 64
SHEET = "picture.png"


def command(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Output folder.")],
    mask: Annotated[
        list[Path] | None,
        typer.Option(
            "--mask",
            "-m",
            help="Mask (NIfTI or MGH), or folder of masks (files named _dseg, _seg or _mask, else all); repeatable. "
            "Required if the model takes masks.",
        ),
    ] = None,
    labels: LabelsOption = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of the subjects' images, for a label that is taken from them (brain=image)."),
    ] = None,
    count: Annotated[
        int, typer.Option("--count", "-n", min=1, help="Number of volumes for each mask, or number of images.")
    ] = 1,
    sampler: SamplerOption = None,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Number of sampling steps, or auto: the settings stored by voxtune steps. "
            "A number keeps the stored sampler and timestep spacing."
        ),
    ] = None,
    timestep_spacing: TimestepSpacingOption = None,
    clip: ClipOption = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Reuse deep features between steps, as INTERVAL or INTERVAL:DEPTH. 3 runs the full network every 3 steps; "
            "3:0 runs the fewest layers in between. Changes the volumes."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Random seed of the noise.")] = 0,
    noise: Annotated[
        str,
        typer.Option(
            help="What determines the noise of a volume, with the seed: {noise}. identity: the mask's name and the volume's "
            "number for that mask; position: its place in this command, as in version 0.1.",
            **one_of("noise", word="noise rule"),
        ),
    ] = "identity",
    batch: Annotated[
        str, typer.Option(help="Batch size, or auto: the fastest of those measured in a few steps on this machine.")
    ] = "auto",
    fit: Annotated[
        str, typer.Option(help="How a mask is fitted to the model's grid: {fit}.", **one_of("fit"))
    ] = "auto",
    size: Annotated[
        str | None, typer.Option(help="Size of the grid as D,H,W (volumes) or H,W (images). Default: the model's.")
    ] = None,
    plan: PlanOption = "auto",
    picture: Annotated[
        bool, typer.Option("--picture", help="Also write a PNG of each mask and volume, or of the images.")
    ] = False,
    flat: Annotated[
        bool, typer.Option("--flat", help="Write all files directly into the output folder, not in BIDS folders.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print masks, placement, settings and files; write nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Generate MRI volumes from masks, on the grid of each mask; or images, with a model that takes no mask."""
    from voxtune.diffusion.noise import check_seed
    from voxtune.runtime.generate import check_image_request
    from voxtune.runtime.planned import optimize
    from voxtune.runtime.storage import load, provenance

    output = Output(json=json, quiet=quiet)
    loaded = load(model, device=choose_device(device))
    planar = loaded.config.network.dimensions == 2
    grid, batch_size = _grid_size(size, loaded), parse_batch(batch)
    check_seed(seed)
    given = sampler_options(sampler=sampler, steps=steps, timestep_spacing=timestep_spacing, clip=clip, cache=cache)
    settings = _settings(loaded, given, output)
    options: dict[str, Any] = {"settings": settings, "count": count, "seed": seed, "overwrite": overwrite}
    of_masks: dict[str, Any] = {"noise": noise, "flat": flat}
    requests = [] if planar else _requests(loaded, mask, fit, grid, output, parse_labels(labels), images)
    if planar:
        used: dict[str, Any] = {"--mask": mask, "--labels": labels, "--images": images, "--flat": flat}
        used |= {"--fit": fit != "auto", "--noise": noise != "identity"}
        if any(used.values()):
            raise InputError(f"{model} takes no mask; omit {next(name for name in used if used[name])} and set --count")
        check_image_request(loaded, out, count, grid, overwrite=overwrite or dry_run)
        jobs, results = [], _planned_images(out, count, picture)
    else:
        jobs = _jobs(loaded, requests, out, {**options, "overwrite": overwrite or dry_run}, of_masks)
        results = _planned_volumes(jobs, out, picture)
    kind = "image" if planar else "volume"
    about = {
        "sampler": settings.sampler,
        "steps": settings.steps,
        "cache": settings.cache and str(settings.cache),
        "settings": settings.record(),
        "seed": seed,
        "batch": batch_size,
    }
    line = f"{_amount(jobs, results, kind)} with {settings.describe()}, seed {seed}"
    if dry_run:
        existing = _say_files(results, [] if overwrite else _replaced(jobs, out, count), output)
        output.say(
            f"would generate {line}{'' if planar else f', noise by {noise}'}, batch {batch}, plan {plan}, on {loaded.device}"
        )
        planned = {"dry_run": True, f"{kind}s": results, "existing": existing, **about}
        output.result({**planned, "plan": plan, "device": str(loaded.device)})
        return
    options["provenance"] = provenance(model, loaded)
    if plan != "baseline":
        loaded = optimize(loaded, plan=plan, search=False, say=_once(output.say))
    if batch_size == "auto":
        batch_size = about["batch"] = _choose_batch(loaded, jobs, count, grid, settings, output)
    output.say(f"generating {line}, on {loaded.device}")
    started = time.perf_counter()
    with output.progress("sampling", len(results) * settings.steps) as update:
        options |= {"batch": batch_size, "progress": lambda done, _total: update(done)}
        if planar:
            results = _generate_images(loaded, out, picture, {"size": grid, **options})
        else:
            results = _generate_volumes(loaded, requests, out, picture, {**of_masks, **options})
    seconds = time.perf_counter() - started
    for file in (file for result in results for file in result["files"]):
        output.say(f"wrote {file}")
    output.say(f"sampling took {seconds:.1f} s")
    output.result({f"{kind}s": results, **about, "seconds": round(seconds, 3)})


def _amount(jobs: list[VolumeJob], results: list[dict[str, Any]], kind: str) -> str:
    """The volumes or images of this command, and the number of image files if a volume has several."""
    files = sum(len(job.names) for job in jobs)
    return counted(len(results), kind) + (f" ({files} image files)" if files > len(results) else "")


def _settings(model: Model, given: SamplerOptions, output: Output) -> SamplerSettings:
    settings = model.resolve(warn=output.warn, **given)
    unmeasured = model.config.sampling.unmeasured(settings)
    if unmeasured is not None:
        output.warn(unmeasured)
    return settings


def _jobs(
    model: Model, requests: list[MaskRequest], out: Path, options: dict[str, Any], of_masks: dict[str, Any]
) -> list[VolumeJob]:
    from voxtune.runtime.generate import check_new, jobs_of, mask_contract

    jobs = jobs_of(requests, options["count"], mask_contract(model), **of_masks)
    if not options["overwrite"]:
        check_new(out / name for job in jobs for name in job.names)
    return jobs


def _replaced(jobs: list[VolumeJob], out: Path, count: int) -> list[Path]:
    """The volumes or images that `sample` would replace, which requires --overwrite."""
    from voxtune.runtime.generate import image_path

    files = [out / name for job in jobs for name in job.names] or [image_path(out, i) for i in range(count)]
    return [file for file in files if file.exists()]


def _say_files(results: list[dict[str, Any]], refused: list[Path], output: Output) -> list[str]:
    """Prints the files of a dry run; returns those that are refused."""
    for file in (file for result in results for file in result["files"]):
        output.say(f"would write {file}")
    for file in refused:
        output.say(f"{file} exists already; sample would refuse without --overwrite")
    return _texts(refused)


def _choose_batch(
    model: Model,
    jobs: list[VolumeJob],
    count: int,
    size: tuple[int, ...] | None,
    settings: SamplerSettings,
    output: Output,
) -> int:
    from voxtune.runtime.batching import choose_batch
    from voxtune.runtime.generate import choose_volume_batch

    if jobs:
        choice = choose_volume_batch(model, jobs, settings)
    else:
        choice = choose_batch(
            model, lambda _batch: None, size or model.config.size, volumes=count, steps=settings.steps
        )
    output.say(choice.describe())
    return choice.batch


def _once(say: Callable[[str], None]) -> Callable[[str], None]:
    """Prints each line once, because every batch size has a plan of its own."""
    printed: set[str] = set()

    def say_new(text: str) -> None:
        if text not in printed:
            printed.add(text)
            say(text)

    return say_new


def _grid_size(size: str | None, model: Model) -> tuple[int, ...] | None:
    if size is None:
        return None
    values, dimensions = parse_size(size), model.config.network.dimensions
    if len(values) != dimensions:
        raise InputError(f"--size {size}: expected {'H,W' if dimensions == 2 else 'D,H,W'}")
    return values


def _requests(
    model: Model,
    masks: list[Path] | None,
    fit: str,
    size: tuple[int, ...] | None,
    output: Output,
    labels: LabelMap | None,
    images: Path | None,
) -> list[MaskRequest]:
    from voxtune.data.labels import MaskReader
    from voxtune.data.pairing import images_of_masks
    from voxtune.runtime.generate import common_warnings, mask_contract, prepare

    contract = mask_contract(model)
    if not masks:
        raise InputError("this model requires --mask: a NIfTI file or a folder of them")
    if images is not None and MaskReader(contract=contract, labels=labels).from_image is None:
        raise InputError(
            "--images applies to a label that is taken from the image, such as --labels brain=image; omit it"
        )
    files = _mask_files(masks)
    partners = None
    if images is not None:
        partners, other_kinds = images_of_masks(files, images, contract.images)
        if other_kinds is not None:
            output.warn(other_kinds)
    requests = prepare(model, files, mode=fit, size=size, labels=labels, images=partners)  # type: ignore[arg-type]
    for request in requests:
        output.say(f"{request.path.name}: {request.placement.describe()}")
        for warning in request.warnings:
            output.warn(warning)
    for warning in common_warnings(model, requests):
        output.warn(warning)
    return requests


def _mask_files(paths: list[Path]) -> list[Path]:
    """The masks: files as they are, folders by the masks in them. In a folder without mask names, every file is a mask."""
    from voxtune.data.modality import MASK_ENDINGS, NIFTI_ENDINGS, split_name
    from voxtune.data.pairing import nifti_files

    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = nifti_files(path)
        if not inside:
            raise InputError(f"{path}: no NIfTI masks ({NIFTI_ENDINGS}) in this folder")
        files += [p for p in inside if split_name(p)[1] in MASK_ENDINGS] or inside
    return files


def _planned_volumes(jobs: list[VolumeJob], out: Path, picture: bool) -> list[dict[str, Any]]:
    """The results that the jobs will have."""
    results = []
    for job in jobs:
        files = [out / name for name in job.names]
        if picture:
            files.append(_picture_path(files))
        results.append({**_identity(job), "placement": job.request.placement.describe(), "files": _texts(files)})
    return results


def _planned_images(out: Path, count: int, picture: bool) -> list[dict[str, Any]]:
    from voxtune.runtime.generate import image_path

    results: list[dict[str, Any]] = [{"index": i, "files": _texts([image_path(out, i)])} for i in range(count)]
    if picture:
        results[min(count, MAX_PICTURE_IMAGES) - 1]["files"] += _texts([out / SHEET])
    return results


def _identity(volume: VolumeJob | GeneratedVolume) -> dict[str, Any]:
    return {"mask": str(volume.request.path), "index": volume.index, "replicate": volume.replicate}


def _texts(files: Sequence[Path]) -> list[str]:
    return [str(file) for file in files]


def _generate_volumes(
    model: Model, requests: list[MaskRequest], out: Path, picture: bool, options: dict[str, Any]
) -> list[dict[str, Any]]:
    from voxtune.runtime.generate import generate, mask_contract

    results, contract = [], mask_contract(model)
    for volume in generate(model, requests, out, **options):
        files = list(volume.files)
        if picture:
            files.append(_picture(volume, contract))
        results.append({**_identity(volume), "files": _texts(files)})
    return results


def _generate_images(model: Model, out: Path, picture: bool, options: dict[str, Any]) -> list[dict[str, Any]]:
    from voxtune.runtime.generate import generate_images

    results: list[dict[str, Any]] = []
    shown: list[GeneratedImage] = []
    for image in generate_images(model, out, **options):
        results.append({"index": image.index, "files": _texts([image.file])})
        if picture and len(shown) < MAX_PICTURE_IMAGES:
            shown.append(image)
    if shown:
        results[len(shown) - 1]["files"] += _texts([_sheet(shown, out / SHEET)])
    return results


def _picture(volume: GeneratedVolume, contract: DataContract) -> Path:
    from voxtune.data.legend import contract_legend
    from voxtune.report.picture import SlicePanel, slice_picture

    # Pictures are in RAS orientation, whatever the orientation of the model's grid.
    to_ras = volume.request.placement.ras_array
    labels, spacing = to_ras(volume.request.labels_DHW)
    panels = [SlicePanel(title="mask", volume_DHW=labels, labels=True, spacing_DHW=spacing)]
    titles = contract.images if len(contract.images) > 1 else (volume.files[0].name,)
    panels += [
        SlicePanel(title=title, volume_DHW=to_ras(image_DHW)[0], spacing_DHW=spacing)
        for title, image_DHW in zip(titles, volume.images_CDHW, strict=True)
    ]
    path = _picture_path(volume.files)
    return slice_picture(panels, path, around=labels, legend=contract_legend(contract), overwrite=True)


def _picture_path(files: Sequence[Path]) -> Path:
    from voxtune.data.modality import SYNTHETIC

    # A picture of several images has no kind in its name: sub-1_desc-synth01.png.
    first = files[0]
    mark = SYNTHETIC.search(first.name) if len(files) > 1 else None
    return first.with_name((first.name[: mark.end()] if mark else first.name.removesuffix(".nii.gz")) + ".png")


def _sheet(images: list[GeneratedImage], path: Path) -> Path:
    import numpy as np

    from voxtune.data.pixels import png, sheet
    from voxtune.files import write_file

    write_file(path, png(sheet(np.stack([image.pixels_HWC for image in images]))), state=True)
    return path
