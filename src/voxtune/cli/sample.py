"""voxtune sample: draw volumes from masks, or images from nothing."""

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
    ModelArgument,
    Output,
    PlanOption,
    QuietOption,
    SamplerOption,
    SpacingOption,
    choose_device,
    parse_size,
    sampler_options,
)
from voxtune.errors import InputError

if TYPE_CHECKING:
    from voxtune.runtime.generate import GeneratedImage, MaskRequest
    from voxtune.runtime.model import Model

# Images on the page of --picture.
PICTURE_IMAGES = 64


def command(
    model: ModelArgument,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the volumes or images.")],
    mask: Annotated[
        list[Path] | None,
        typer.Option("--mask", "-m", help="A mask (NIfTI), or a folder of masks; repeatable. None for images."),
    ] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Volumes for each mask; or images.")] = 1,
    sampler: SamplerOption = None,
    steps: Annotated[
        str | None,
        typer.Option(help="Sampling steps; default: auto, the fewest measured to be enough, else the model's own."),
    ] = None,
    spacing: SpacingOption = None,
    clip: ClipOption = None,
    cache: Annotated[
        str | None,
        typer.Option(help="Keep deep features between steps: a full step every 3, say; 3:0 runs the least between."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Volume or image i depends on the seed and i alone.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Volumes or images computed together.")] = 1,
    fit: Annotated[
        str, typer.Option(help="How a mask is fitted to the model's grid: {fit}.", **one_of("fit"))
    ] = "auto",
    size: Annotated[
        str | None, typer.Option(help="Another grid than the model's, as depth,height,width; or height,width.")
    ] = None,
    plan: PlanOption = "auto",
    picture: Annotated[bool, typer.Option("--picture", help="Also write a PNG of mask and volume; or a page.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what exists.")] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Draw MRI volumes from masks, on each mask's own grid and geometry; or images, with a model that takes no mask."""
    from voxtune.diffusion.noise import check_seed
    from voxtune.runtime.generate import check_image_request
    from voxtune.runtime.planned import optimize
    from voxtune.runtime.sampling import AutoSampling
    from voxtune.runtime.storage import load, provenance

    output = Output(json=json, quiet=quiet)
    loaded = load(model, device=choose_device(device))
    images = loaded.config.network.dimensions == 2
    sides = _sides(size, loaded)
    check_seed(seed)
    given = sampler_options(sampler=sampler, steps=steps, spacing=spacing, clip=clip, cache=cache)
    settings = loaded.resolve(warn=output.warn, **given)
    if settings.cache and settings.cache.interval > 1 and not isinstance(settings, AutoSampling):
        output.warn(f"cache {settings.cache} was not measured for this model; measure it with voxtune steps --cache")
    options: dict[str, Any] = {"settings": settings, "count": count, "seed": seed, "batch": batch}
    options |= {"overwrite": overwrite, "provenance": provenance(model, loaded)}
    requests = [] if images else _requests(loaded, mask, fit, sides, output)
    if images:
        if mask or fit != "auto":
            raise InputError(
                f"{model}: takes no mask: leave {'--mask' if mask else '--fit'} away; --count says how many"
            )
        check_image_request(loaded, out, count, sides, overwrite=overwrite)
    if plan != "baseline":
        loaded = optimize(loaded, plan=plan, search=False, say=output.say)
    number = count * (1 if images else len(requests))
    kind = "image" if images else "volume"
    cache_text = "" if settings.cache is None else f", cache {settings.cache}"
    output.say(
        f"generating {number} {kind}(s) with {settings.sampler}, {settings.steps} steps{cache_text}, seed {seed}, "
        f"on {loaded.device}"
    )
    started = time.perf_counter()
    with output.progress("sampling", number * settings.steps) as update:
        options["progress"] = lambda done, _total: update(done)
        if images:
            drawn = _draw_images(loaded, out, picture, {"size": sides, **options})
        else:
            drawn = _draw_volumes(loaded, requests, out, picture, options)
    seconds = time.perf_counter() - started
    for each in drawn:
        output.say("wrote " + ", ".join(each["files"]))
    output.say(f"{seconds:.1f} s")
    output.result(
        {
            f"{kind}s": drawn,
            "sampler": settings.sampler,
            "steps": settings.steps,
            "cache": settings.cache and str(settings.cache),
            "seed": seed,
            "seconds": round(seconds, 3),
        }
    )


def _sides(size: str | None, model: Model) -> tuple[int, ...] | None:
    if size is None:
        return None
    sides, wanted = parse_size(size), model.config.network.dimensions
    if len(sides) != wanted:
        raise InputError(f"--size {size}: give {'height,width' if wanted == 2 else 'three sides, depth,height,width'}")
    return sides


def _requests(
    model: Model, masks: list[Path] | None, fit: str, sides: tuple[int, ...] | None, output: Output
) -> list[MaskRequest]:
    from voxtune.runtime.generate import mask_contract, prepare

    mask_contract(model)
    if not masks:
        raise InputError("this model draws from masks: give --mask, a NIfTI file or a folder of them")
    requests = prepare(model, _masks(masks), mode=fit, size=sides)  # type: ignore[arg-type]
    for request in requests:
        output.say(f"{request.path.name}: {request.placement.describe()}")
        for warning in request.warnings:
            output.warn(warning)
    return requests


def _draw_volumes(
    model: Model, requests: list[MaskRequest], out: Path, picture: bool, options: dict[str, Any]
) -> list[dict[str, Any]]:
    from voxtune.runtime.generate import generate

    volumes = []
    for drawn in generate(model, requests, out, **options):
        files = list(drawn.files)
        if picture:
            files.append(_picture(drawn))
        volumes.append({"mask": str(drawn.request.path), "index": drawn.index, "files": [str(f) for f in files]})
    return volumes


def _draw_images(model: Model, out: Path, picture: bool, options: dict[str, Any]) -> list[dict[str, Any]]:
    from voxtune.runtime.generate import generate_images

    images: list[dict[str, Any]] = []
    page: list[GeneratedImage] = []
    for drawn in generate_images(model, out, **options):
        images.append({"index": drawn.index, "files": [str(drawn.file)]})
        if picture and len(page) < PICTURE_IMAGES:
            page.append(drawn)
    if page:
        images[-1]["files"].append(str(_page(page, out / "picture.png")))
    return images


def _masks(paths: list[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        inside = (
            sorted(p for p in path.rglob("[!.]*") if p.name.lower().endswith((".nii", ".nii.gz")))
            if path.is_dir()
            else [path]
        )
        if not inside:
            raise InputError(f"{path}: holds no .nii or .nii.gz file")
        found += inside
    return found


def _picture(drawn: Any) -> Path:
    from voxtune.report.picture import SlicePanel, slice_picture

    # The model's grid has an orientation and a spacing of its own; pictures are in RAS.
    turn = drawn.request.placement.ras_array
    labels, spacing = turn(drawn.request.labels_DHW)
    images = [turn(image_DHW)[0] for image_DHW in drawn.images_CDHW]
    panels = [SlicePanel(title="mask", volume_DHW=labels, labels=True, spacing_DHW=spacing)]
    panels += [
        SlicePanel(title=file.name, volume_DHW=image, spacing_DHW=spacing)
        for file, image in zip(drawn.files, images, strict=True)
    ]
    return slice_picture(
        panels, drawn.files[0].with_name(drawn.files[0].name.replace(".nii.gz", ".png")), around=labels
    )


def _page(drawn: list[GeneratedImage], path: Path) -> Path:
    import numpy as np

    from voxtune.data.pixels import png, sheet
    from voxtune.files import write_atomic

    write_atomic(path, png(sheet(np.stack([image.pixels_HWC for image in drawn]))))
    return path
