"""voxtune generate: a data set of many volumes, on several devices, that can be continued after any interruption."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.choices import one_of
from voxtune.cli.common import (
    EXIT_INPUT,
    EXIT_NEGATIVE,
    ClipOption,
    DeviceOption,
    JsonOption,
    LabelsOption,
    Output,
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
from voxtune.errors import FilesError, InputError
from voxtune.files import counted, paths_are_recorded

if TYPE_CHECKING:
    from voxtune.runtime.model import Model
    from voxtune.scale.driver import Tally
    from voxtune.scale.manifest import ManifestRow
    from voxtune.scale.worker import WorkerSettings


def command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the data set, a BIDS derivative.")],
    manifest: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MANIFEST|MASK_DIR]",
            help="Table of masks (CSV or Parquet) with the column mask and optionally subject, replicates; or a folder of masks.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Model folder, published .pt checkpoint, or demo (the included model).", show_default=False),
    ] = None,
    per_mask: Annotated[int, typer.Option(min=1, max=100_000, help="Volumes for each mask.")] = 1,
    seed: Annotated[int, typer.Option(help="Random seed of the noise.")] = 0,
    engine: Annotated[str, typer.Option(help="What runs the workers: {engine}.", **one_of("engine"))] = "local",
    address: Annotated[
        str | None,
        typer.Option(
            help="Address of a Ray cluster, such as auto or HOST:6379. Default: RAY_ADDRESS, or this machine alone.",
            show_default=False,
        ),
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs to use, with a worker on each. Default: all.", show_default=False)
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers on a CPU. Default: 1.", show_default=False)
    ] = None,
    shard: Annotated[
        str, typer.Option(help="Draw one part of the data set, such as 3/16: the third of 16 parts.")
    ] = "1/1",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read every volume again and compare its checksum: without MANIFEST only that, with it before drawing, so that "
            "damaged volumes are drawn again.",
        ),
    ] = False,
    sampler: SamplerOption = None,
    steps: Annotated[
        str | None, typer.Option(help="Number of sampling steps, or auto: the settings stored by voxtune steps.")
    ] = None,
    timestep_spacing: TimestepSpacingOption = None,
    clip: ClipOption = None,
    cache: Annotated[
        str | None, typer.Option(help="Reuse deep features between steps, as INTERVAL or INTERVAL:DEPTH.")
    ] = None,
    plan: PlanOption = "auto",
    batch: Annotated[
        str,
        typer.Option(
            help="Volumes of a mask that are drawn together, or auto: the fastest of those measured at first."
        ),
    ] = "auto",
    labels: LabelsOption = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder of the subjects' images, for a label that is taken from them (brain=image)."),
    ] = None,
    fit: Annotated[
        str, typer.Option(help="How a mask is fitted to the model's grid: {fit}.", **one_of("fit"))
    ] = "auto",
    size: Annotated[str | None, typer.Option(help="Size of the grid as D,H,W. Default: the model's.")] = None,
    allow_outside: Annotated[
        bool, typer.Option("--allow-outside", help="Accept masks outside the manifest's folder.")
    ] = False,
    mixed: Annotated[
        bool,
        typer.Option(
            "--mixed",
            help="Continue on another device or with other versions than at the first start; volumes then agree within rounding.",
        ),
    ] = False,
    price_per_gpu_hour: Annotated[
        float | None,
        typer.Option(
            min=0, help="Price of a worker for an hour, to print the cost of 1000 volumes.", show_default=False
        ),
    ] = None,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Generate a data set: several volumes for each of many masks, as a BIDS derivative with a ledger.

    The same command again draws what is missing, after any interruption. A volume does not depend on worker, shard or order.
    """
    output = Output(json=json, quiet=quiet)
    if manifest is None:
        if not verify:
            raise InputError("missing MANIFEST or MASK_DIR; without it, generate can only --verify a data set")
        _verify(out, output)
        return
    if model is None:
        raise InputError("missing --model: a model folder, a published .pt checkpoint, or demo")
    from voxtune.scale.dataset import parse_shard

    part = parse_shard(shard)
    rows = _rows(manifest, per_mask, allow_outside, output)
    devices, cores = _devices(engine, device, gpus, workers, address)
    options = sampler_options(sampler=sampler, steps=steps, timestep_spacing=timestep_spacing, clip=clip, cache=cache)
    loaded, settings = _settings(
        model, out, options, output, seed=seed, plan=plan, batch=batch, labels=labels, fit=fit, size=size
    )
    from dataclasses import replace

    from voxtune.scale.dataset import Generation, identity_of
    from voxtune.scale.engine import EngineOptions, make_engine

    settings = replace(
        settings,
        per_mask=max(row.replicates for row in rows),
        volumes=sum(row.replicates for row in rows),
        threads=None if devices[0] != "cpu" else max(1, cores // len(devices)),
        mixed=mixed,
        record_paths=paths_are_recorded(),
    )
    generation = Generation(
        settings=settings,
        rows=_with_images(rows, images, loaded, settings, output),
        contract=loaded.config.data,  # type: ignore[arg-type]  # checked by mask_contract
        identity=identity_of(loaded, settings),
        shard=part,
        price=price_per_gpu_hour,
        reread=verify,
        say=output.say,
    )
    del loaded
    _generate(generation, make_engine(engine, EngineOptions(devices=devices, address=address)), output)


def _generate(generation: Any, engine: Any, output: Output) -> None:
    from voxtune.scale.dataset import generate
    from voxtune.scale.driver import Stopping

    stopping = Stopping(output.warn)
    with _Bar(output) as bar, stopping.handling():
        tally = generate(generation, engine, stopping=stopping, started=bar.start, report=bar.update)
    _summary(tally, output)
    if stopping:
        output.warn("interrupted; the same command draws the others")
        stopping.raise_interrupt()
    if tally.missing:
        raise typer.Exit(EXIT_NEGATIVE)


class _Bar:
    """The progress of a shard, once its size is known."""

    def __init__(self, output: Output):
        self.output = output
        self._context: Any = nullcontext()
        self._update: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)

    def start(self, tally: Tally) -> None:
        shown = counted(tally.volumes, "volume")
        self.output.say(f"{tally.before} of {shown} finished; {counted(tally.workers, 'worker')}")
        # Only those of this start: the time left follows from them.
        self._context = self.output.progress("generating", tally.missing)
        self._update = self._context.__enter__()

    def update(self, tally: Tally) -> None:
        self._update(tally.drawn, tally.note())


def _summary(tally: Tally, output: Output) -> None:
    before = f", {tally.before} before" if tally.before else ""
    output.say(
        f"generated {counted(tally.drawn, 'volume')} in {tally.seconds:.1f} s{before}: {tally.note() or 'nothing to do'}"
    )
    if tally.idle_share is not None:
        output.say(f"the network waited {100 * tally.idle_share:.1f} % of the time")
    if tally.reduced:
        output.warn(
            f"{counted(tally.reduced, 'volume')} drawn with a smaller batch, because memory was short; their sidecars say so"
        )
    if tally.problems:
        rows = [(str(task.mask), f"{_numbers(task.numbers)}: {reason}") for task, reason in tally.problems.items()]
        print_problems(rows, f"warning: {counted(len(rows), 'task')} failed:", one_line=output.json)
    if tally.missing:
        output.warn(f"{tally.missing} of {counted(tally.volumes, 'volume')} are missing; the same command draws them")
    output.result(tally.to_json())


def _numbers(numbers: tuple[int, ...]) -> str:
    if not numbers:
        return "mask"
    return f"volume {numbers[0]}" if len(numbers) == 1 else f"volumes {', '.join(map(str, numbers))}"


def _verify(out: Path, output: Output) -> None:
    from voxtune.scale.ledger import DatasetLedger
    from voxtune.scale.verify import verify

    ledger = DatasetLedger(out)
    masks = ledger.masks() if ledger.exists() else {}
    with output.progress("verifying", sum(masks.values()) + len(masks)) as update:
        result = verify(out, update)
    if result.problems:
        counts = f"{len(result.missing)} missing, {len(result.damaged)} damaged, {len(result.extra)} extra"
        print_problems(result.problems, f"warning: {out}: {counts}:", one_line=output.json)
    output.say(f"{result.verified} of {counted(result.volumes, 'volume')} verified")
    if result.damaged:
        output.warn("to draw damaged volumes again, start generate with the manifest and --verify")
    output.result({"complete": not result.problems, **result.to_json()})
    if result.problems:
        raise typer.Exit(EXIT_NEGATIVE)


def _rows(manifest: Path, per_mask: int, allow_outside: bool, output: Output) -> list[ManifestRow]:
    from voxtune.scale.manifest import read_manifest

    try:
        return read_manifest(manifest, per_mask=per_mask, allow_outside=allow_outside)
    except FilesError as error:
        headline = f"voxtune: error: {manifest}: {counted(len(error.rows), 'row')} cannot be used; nothing was started:"
        print_problems(error.rows, headline, one_line=output.json)
        raise typer.Exit(EXIT_INPUT) from None


def _devices(
    engine: str, name: str, gpus: int | None, workers: int | None, address: str | None
) -> tuple[tuple[str, ...], int]:
    """(the device of each worker, the cores that workers on a CPU share)."""
    if engine == "ray":
        from voxtune.scale.ray_engine import cluster_devices

        return cluster_devices(name, gpus, workers, address)
    if address is not None:
        raise InputError("--address requires --engine ray")
    return _local_devices(choose_device(name), gpus, workers), os.cpu_count() or 1


def _local_devices(device: str, gpus: int | None, workers: int | None) -> tuple[str, ...]:
    if not device.startswith("cuda"):
        if gpus is not None:
            raise InputError("--gpus requires CUDA devices; pass --workers on a CPU")
        return ("cpu",) * (workers or 1)
    if workers is not None:
        raise InputError("--workers applies to a CPU; on GPUs, pass --gpus")
    import torch

    if ":" in device:
        if gpus not in (None, 1):
            raise InputError(f"--gpus {gpus} cannot be combined with --device {device}")
        return (device,)
    count = torch.cuda.device_count()
    if gpus is not None and gpus > count:
        raise InputError(f"--gpus {gpus}: this machine has {counted(count, 'CUDA device')}")
    return tuple(f"cuda:{number}" for number in range(gpus or count))


def _settings(
    model: Path,
    out: Path,
    options: Any,
    output: Output,
    *,
    seed: int,
    plan: str,
    batch: str,
    labels: str | None,
    fit: str,
    size: str | None,
) -> tuple[Model, WorkerSettings]:
    """The model, which answers questions about itself here, and the settings of the workers."""
    from voxtune.diffusion.noise import check_seed
    from voxtune.runtime.masks import mask_contract
    from voxtune.runtime.model import check_size
    from voxtune.runtime.storage import included, load
    from voxtune.scale.worker import WorkerSettings

    loaded = load(model)
    mask_contract(loaded)
    sampling = loaded.resolve(warn=output.warn, **options)
    unmeasured = loaded.config.sampling.unmeasured(sampling)
    if unmeasured is not None:
        output.warn(unmeasured)
    grid, batch_size = None if size is None else parse_size(size), parse_batch(batch)
    if grid is not None:
        check_size(loaded.config.network, grid)
    return loaded, WorkerSettings(
        model=included(model).absolute(),
        out=out.absolute(),
        sampling=sampling,
        seed=check_seed(seed),
        plan=plan,
        batch=None if batch_size == "auto" else batch_size,
        labels=parse_labels(labels),
        fit=fit,  # type: ignore[arg-type]
        size=grid,  # type: ignore[arg-type]  # three dimensions, as the contract
    )


def _with_images(
    rows: list[ManifestRow], images: Path | None, model: Model, settings: WorkerSettings, output: Output
) -> list[ManifestRow]:
    from voxtune.data.labels import MaskReader
    from voxtune.data.pairing import images_of_masks
    from voxtune.runtime.masks import mask_contract
    from voxtune.scale.manifest import with_images

    if images is None:
        return rows
    contract = mask_contract(model)
    if MaskReader(contract=contract, labels=settings.labels).from_image is None:
        raise InputError(
            "--images applies to a label that is taken from the image, such as --labels brain=image; omit it"
        )
    partners, other_kinds = images_of_masks([row.mask for row in rows], images, contract.images)
    if other_kinds is not None:
        output.warn(other_kinds)
    return with_images(rows, partners)
