"""voxtune sample: generate volumes from masks, or images with a model that takes no mask."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from voxtune.cli.choices import one_of
from voxtune.cli.common import (
    EXIT_NEGATIVE,
    ClipOption,
    DeviceOption,
    JsonOption,
    LabelsOption,
    ModelArgument,
    Output,
    OverwriteOption,
    PlanOption,
    QuietOption,
    RecordPathsOption,
    SamplerOption,
    TimestepSpacingOption,
    choose_device,
    parse_batch,
    parse_labels,
    parse_size,
    sampler_options,
)
from voxtune.cli.problems import print_problems
from voxtune.errors import InputError
from voxtune.files import check_outputs, counted, locked_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from voxtune.runtime.generate import GeneratedVolume
    from voxtune.runtime.images import GeneratedImage
    from voxtune.runtime.job import Job
    from voxtune.runtime.masks import Masks
    from voxtune.runtime.model import Model
    from voxtune.runtime.sampling import SamplerOptions, SamplerSettings

    SampleJob = Job[Any, Any]

# Images in the contact sheet of --picture.
MAX_PICTURE_IMAGES = 64
SHEET = "picture.png"
# Lines of one kind, such as files or warnings, that are printed; of more, only the number.
SHOWN = 20


class OnErrorChoice(StrEnum):
    stop = "stop"
    skip = "skip"


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
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep the finished samples in the output folder and draw the others; refused if these have another seed, "
            "model or settings.",
        ),
    ] = False,
    on_error: Annotated[
        OnErrorChoice,
        typer.Option(help="After a mask or a volume with an error: stop, or skip it and exit with code 3."),
    ] = OnErrorChoice.stop,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print masks, placement, settings and files; write nothing.")
    ] = False,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Generate MRI volumes from masks, on the grid of each mask; or images, with a model that takes no mask.

    All masks are checked before the first volume is drawn, then read again one by one.
    """
    from voxtune.diffusion.noise import check_seed
    from voxtune.runtime.generate import VolumeJob
    from voxtune.runtime.images import ImageJob
    from voxtune.runtime.planned import optimize
    from voxtune.runtime.storage import load, provenance

    output = Output(json=json, quiet=quiet)
    loaded = load(model, device=choose_device(device))
    grid, batch_size = _grid_size(size, loaded), parse_batch(batch)
    check_seed(seed)
    given = sampler_options(sampler=sampler, steps=steps, timestep_spacing=timestep_spacing, clip=clip, cache=cache)
    options: dict[str, Any] = {
        "settings": _settings(loaded, given, output),
        "count": count,
        "seed": seed,
        "overwrite": overwrite,
        "resume": resume,
        "on_error": on_error.value,
        "provenance": provenance(model, loaded),
    }
    planned = loaded
    if plan != "baseline" and not dry_run:
        # On a CPU a search takes longer than most jobs: `voxtune tune` does it.
        search = "quick" if loaded.device.type == "cuda" else False
        planned = optimize(loaded, plan=plan, search=search, say=_once(output.say))
    job: SampleJob
    if loaded.config.network.dimensions == 2:
        used: dict[str, Any] = {"--mask": mask, "--labels": labels, "--images": images, "--flat": flat}
        used |= {"--fit": fit != "auto", "--noise": noise != "identity"}
        if any(used.values()):
            raise InputError(f"{model} takes no mask; omit {next(name for name in used if used[name])} and set --count")
        job = ImageJob(planned, out, size=grid, **options)
    else:
        masks = _read_masks(
            loaded, mask, fit=fit, size=grid, labels=labels, images=images, on_error=on_error, output=output
        )
        options |= {"noise": noise, "flat": flat, "picture": _picture if picture else None}
        job = VolumeJob(planned, masks, out, **options)
    if dry_run:
        _dry_run(job, picture=picture, batch=batch, plan=plan, overwrite=overwrite, output=output)
        return
    with locked_folder(out):
        _run(job, batch_size, picture=picture, output=output)
    if job.problems:
        raise typer.Exit(EXIT_NEGATIVE)


def _dry_run(job: SampleJob, *, picture: bool, batch: str, plan: str, overwrite: bool, output: Output) -> None:
    """Prints what the job would write, and which files it would refuse to replace."""
    from voxtune.runtime.generate import VolumeJob

    if job.resume:
        job.find_finished()
    results = [] if output.quiet and not output.json else _planned(job, picture)
    existing = [] if overwrite or job.resume else job.existing()
    _say_some(output, [f"would write {file}" for result in results for file in result["files"]], "files")
    refused = [f"{file} exists already; sample would refuse without --overwrite or --resume" for file in existing]
    _say_some(output, refused, "files exist already")
    noise = f", noise by {job.noise}" if isinstance(job, VolumeJob) else ""
    output.say(f"would generate {_describe(job)}{noise}, batch {batch}, plan {plan}, on {job.model.device}")
    planned = {"dry_run": True, f"{_kind(job)}s": results, "existing": [str(file) for file in existing]}
    output.result({**planned, **_facts(job), "batch": batch, "plan": plan, "device": str(job.model.device)})


def _run(job: SampleJob, batch_size: int | Literal["auto"], *, picture: bool, output: Output) -> None:
    job.check()
    sheet = job.out / SHEET if picture and _is_planar(job) else None
    if sheet is not None:
        check_outputs([sheet], overwrite=job.replaces, folder=job.out)
    finished = len(job.finished.numbers)
    if job.resume:
        again = f"; {counted(job.finished.incomplete, 'incomplete one')} drawn again" if job.finished.incomplete else ""
        output.say(f"{finished} of {counted(len(job.items), _kind(job))} finished{again}")
    if job.remaining and batch_size == "auto":
        batch_size = job.finished.batch or _choose_batch(job, output)
    batch = 1 if batch_size == "auto" else batch_size
    results: list[dict[str, Any]] = []
    written: list[str] = []
    drawn: set[int] = set()
    started, count = time.perf_counter(), 0
    if job.remaining:
        output.say(f"generating {_describe(job)}, on {job.model.device}")
        with output.progress("sampling", job.remaining * job.settings.steps) as update, _resume_hint(job, output):
            for sample in job.run(batch, lambda done, _total: update(done)):
                count += 1
                result = _result(sample, job, picture)
                if output.json:
                    results.append(result)
                written += [f"wrote {file}" for file in result["files"]][: SHOWN + 1 - len(written)]
                drawn.add(sample.index)
    if sheet is not None and (drawn or not sheet.exists()) and _sheet(job, drawn, sheet):
        written.append(f"wrote {sheet}")
        if results:
            results[min(len(results), MAX_PICTURE_IMAGES) - 1]["files"].append(str(sheet))
    seconds = time.perf_counter() - started
    for line in written[:SHOWN]:
        output.say(line)
    if count and len(written) > SHOWN:
        output.say(f"and more: {counted(count, _kind(job))} in {job.out}")
    output.say(f"sampling took {seconds:.1f} s")
    if job.problems:
        print_problems(
            job.problems.rows, f"warning: {counted(len(job.problems.rows), 'file')} skipped:", one_line=output.json
        )
    about = {**_facts(job), "batch": batch, "finished_before": finished, "seconds": round(seconds, 3)}
    skipped = [{"file": file, "problem": problem} for file, problem in job.problems.rows]
    output.result({f"{_kind(job)}s": results, **about, "skipped": skipped})


@contextmanager
def _resume_hint(job: SampleJob, output: Output) -> Iterator[None]:
    """After an interruption, says how to go on."""
    replaces = job.replaces and not job.resume
    others = (
        "run the same command again to replace all" if replaces else "the same command with --resume draws the others"
    )
    try:
        yield
    except (KeyboardInterrupt, InputError):
        output.warn(f"finished {_kind(job)}s are complete; {others}")
        raise


def _is_planar(job: SampleJob) -> bool:
    return job.model.config.network.dimensions == 2


def _kind(job: SampleJob) -> str:
    return "image" if _is_planar(job) else "volume"


def _facts(job: SampleJob) -> dict[str, Any]:
    settings = job.settings
    return {
        "sampler": settings.sampler,
        "steps": settings.steps,
        "cache": settings.cache and str(settings.cache),
        "settings": settings.record(),
        "seed": job.seed,
    }


def _describe(job: SampleJob) -> str:
    """The samples to draw, and the number of image files if a volume has several."""
    files = sum(len(item.names) for number, item in enumerate(job.items) if number not in job.finished.numbers)
    amount = counted(job.remaining, _kind(job)) + (f" ({files} image files)" if files > job.remaining else "")
    return f"{amount} with {job.settings.describe()}, seed {job.seed}"


def _settings(model: Model, given: SamplerOptions, output: Output) -> SamplerSettings:
    settings = model.resolve(warn=output.warn, **given)
    unmeasured = model.config.sampling.unmeasured(settings)
    if unmeasured is not None:
        output.warn(unmeasured)
    return settings


def _choose_batch(job: SampleJob, output: Output) -> int:
    choice = job.choose_batch()
    output.say(choice.describe())
    return choice.batch


def _say_some(output: Output, lines: list[str], noun: str) -> None:
    for line in lines[:SHOWN]:
        output.say(line)
    if len(lines) > SHOWN:
        output.say(f"and {len(lines) - SHOWN} more {noun}")


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


def _read_masks(
    model: Model,
    masks: list[Path] | None,
    *,
    fit: str,
    size: tuple[int, ...] | None,
    labels: str | None,
    images: Path | None,
    on_error: OnErrorChoice,
    output: Output,
) -> Masks:
    """Checks all masks and prints how they are placed."""
    from voxtune.data.labels import MaskReader
    from voxtune.data.pairing import images_of_masks, mask_files
    from voxtune.runtime.masks import mask_contract, prepare

    contract, label_map = mask_contract(model), parse_labels(labels)
    if not masks:
        raise InputError("this model requires --mask: a NIfTI file or a folder of them")
    if images is not None and MaskReader(contract=contract, labels=label_map).from_image is None:
        raise InputError(
            "--images applies to a label that is taken from the image, such as --labels brain=image; omit it"
        )
    files = mask_files(masks)
    partners = None
    if images is not None:
        partners, other_kinds = images_of_masks(files, images, contract.images)
        if other_kinds is not None:
            output.warn(other_kinds)
    with output.progress("checking masks", len(files)) if len(files) > SHOWN else nullcontext() as update:
        checked = prepare(
            model,
            files,
            mode=fit,  # type: ignore[arg-type]
            size=size,  # type: ignore[arg-type]
            labels=label_map,
            images=partners,
            on_error=on_error.value,
            progress=update,
        )
    _say_placements(checked, output)
    for warning in checked.warnings[:SHOWN]:
        output.warn(warning)
    if len(checked.warnings) > SHOWN:
        output.warn(f"and {len(checked.warnings) - SHOWN} more warnings about masks")
    for warning in checked.common_warnings:
        output.warn(warning)
    return checked


def _say_placements(masks: Masks, output: Output) -> None:
    """How each mask is placed on the model's grid; of many masks, how many are placed in which way."""
    if len(masks) <= SHOWN:
        for mask in masks.checked:
            output.say(f"{mask.path.name}: {mask.placement}")
        return
    counts = Counter(mask.placement for mask in masks.checked)
    _say_some(
        output, [f"{counted(count, 'mask')}: {placement}" for placement, count in counts.most_common()], "placements"
    )


def _planned(job: SampleJob, picture: bool) -> list[dict[str, Any]]:
    """The results that the job will have."""
    from voxtune.runtime.generate import VolumeJob

    results: list[dict[str, Any]] = []
    for number, item in enumerate(job.items):
        if number in job.finished.numbers:
            continue
        files = [str(job.out / name) for name in item.names]
        if isinstance(job, VolumeJob):
            mask = job.masks.checked[item.mask]
            files += [] if item.picture is None else [str(job.out / item.picture)]
            identity = {"mask": str(mask.path), "index": item.index, "replicate": item.replicate}
            results.append({**identity, "placement": mask.placement, "files": files})
        else:
            results.append({"index": item.index, "files": files})
    if picture and results and _is_planar(job):
        results[min(len(results), MAX_PICTURE_IMAGES) - 1]["files"].append(str(job.out / SHEET))
    return results


def _result(sample: GeneratedVolume | GeneratedImage, job: SampleJob, picture: bool) -> dict[str, Any]:
    from voxtune.runtime.generate import GeneratedVolume, picture_name

    if not isinstance(sample, GeneratedVolume):
        return {"index": sample.index, "files": [str(sample.file)]}
    files = [str(file) for file in sample.files]
    if picture:
        files.append(str(sample.files[0].with_name(picture_name([file.name for file in sample.files]))))
    identity = {"mask": str(sample.request.path), "index": sample.index, "replicate": sample.replicate}
    return {**identity, "files": files}


def _picture(volume: GeneratedVolume, path: Path, overwrite: bool) -> None:
    from voxtune.data.legend import contract_legend
    from voxtune.report.picture import SlicePanel, slice_picture

    # Pictures are in RAS orientation, whatever the orientation of the model's grid.
    to_ras, contract = volume.request.placement.ras_array, volume.contract
    labels, spacing = to_ras(volume.request.labels_DHW)
    panels = [SlicePanel(title="mask", volume_DHW=labels, labels=True, spacing_DHW=spacing)]
    titles = contract.images if len(contract.images) > 1 else (volume.files[0].name,)
    panels += [
        SlicePanel(title=title, volume_DHW=to_ras(image_DHW)[0], spacing_DHW=spacing)
        for title, image_DHW in zip(titles, volume.images_CDHW, strict=True)
    ]
    slice_picture(panels, path, around=labels, legend=contract_legend(contract), overwrite=overwrite)


def _sheet(job: SampleJob, drawn: set[int], path: Path) -> bool:
    """Draws the first images of the job, also those of the run that it resumes; whether there are any."""
    import numpy as np

    from voxtune.data.pixels import png, read_png, sheet
    from voxtune.files import write_file
    from voxtune.runtime.images import ImageJob

    assert isinstance(job, ImageJob)
    items = [item for number, item in enumerate(job.items) if item.index in drawn or number in job.finished.numbers]
    pixels = [read_png(job.out / item.names[0], job.size) for item in items[:MAX_PICTURE_IMAGES]]
    if pixels:
        write_file(path, png(sheet(np.stack(pixels))), overwrite=job.replaces)
    return bool(pixels)
