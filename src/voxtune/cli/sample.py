"""voxtune sample: draw volumes from masks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device, parse_size


def command(
    model: Annotated[Path, typer.Argument(help="A model folder, or a published .pt checkpoint.")],
    mask: Annotated[list[Path], typer.Option("--mask", "-m", help="A mask (NIfTI), or a folder of masks; repeatable.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the volumes.")],
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Volumes for each mask.")] = 1,
    sampler: Annotated[str | None, typer.Option(help="ddpm, ddim, dpm++, unipc or ipndm; else the model's.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps; default: the model's.")] = None,
    seed: Annotated[int, typer.Option(help="Volume i depends on the seed and i alone.")] = 0,
    batch: Annotated[int, typer.Option(min=1, help="Volumes computed together.")] = 1,
    fit: Annotated[str, typer.Option(help="How a mask goes to the model's grid: auto, pad or resample.")] = "auto",
    size: Annotated[str | None, typer.Option(help="Another grid than the model's, as depth,height,width.")] = None,
    plan: Annotated[
        str, typer.Option(help="auto (the fastest known that gives the same answer), baseline, or a plan's file.")
    ] = "auto",
    picture: Annotated[bool, typer.Option("--picture", help="Also write a PNG of mask and volume.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace volumes that exist.")] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Draw MRI volumes from masks, on each mask's own grid and geometry."""
    from voxtune.errors import InputError
    from voxtune.optimizing import optimize
    from voxtune.runtime.generate import generate, prepare
    from voxtune.runtime.storage import load

    output = Output(json=json, quiet=quiet)
    loaded = load(model, device=choose_device(device))
    sides = parse_size(size) if size else None
    if sides is not None and len(sides) != 3:
        raise InputError(f"--size {size}: give three sides, depth,height,width")
    requests = prepare(loaded, _masks(mask), mode=fit, size=sides)  # type: ignore[arg-type]
    for request in requests:
        output.say(f"{request.path.name}: {request.placement.describe()}")
        for warning in request.warnings:
            output.warn(warning)
    if plan != "baseline":
        loaded = optimize(loaded, plan=plan, search=False, say=output.say)
    total = steps or loaded.default_steps
    used = sampler or loaded.config.sampling.sampler
    output.say(f"drawing {len(requests) * count} volume(s) with {used}, {total} steps, seed {seed}, on {loaded.device}")
    started = time.perf_counter()
    volumes: list[dict[str, Any]] = []
    with output.progress("sampling", len(requests) * count * total) as update:
        for drawn in generate(
            loaded,
            requests,
            out,
            count=count,
            seed=seed,
            sampler=sampler,
            steps=steps,
            batch=batch,
            overwrite=overwrite,
            provenance={"model": str(model)},
            progress=lambda done, _total: update(done),
        ):
            files = list(drawn.files)
            if picture:
                files.append(_picture(drawn))
            volumes.append({"mask": str(drawn.request.path), "index": drawn.index, "files": [str(f) for f in files]})
    seconds = time.perf_counter() - started
    for volume in volumes:
        output.say("wrote " + ", ".join(volume["files"]))
    output.say(f"{seconds:.1f} s")
    output.result({"volumes": volumes, "sampler": used, "steps": total, "seed": seed, "seconds": round(seconds, 3)})


def _masks(paths: list[Path]) -> list[Path]:
    from voxtune.errors import InputError

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
    from voxtune.report.picture import Panel, contact_sheet

    labels = drawn.request.labels_DHW
    panels = [Panel(title="mask", volume_DHW=labels, labels=True)]
    panels += [Panel(title=file.name, volume_DHW=i) for file, i in zip(drawn.files, drawn.images_CDHW, strict=True)]
    return contact_sheet(
        panels, drawn.files[0].with_name(drawn.files[0].name.replace(".nii.gz", ".png")), around=labels
    )
