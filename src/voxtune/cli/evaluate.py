"""voxtune evaluate: quality metrics of synthetic volumes, with confidence intervals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from voxtune.cli.common import (
    DeviceOption,
    JsonOption,
    LabelsOption,
    Output,
    OverwriteOption,
    QuietOption,
    RecordPathsOption,
    ResamplesOption,
    choose_device,
    parse_labels,
)
from voxtune.errors import printable
from voxtune.files import check_outputs, counted, locked_folder, recorded_path

if TYPE_CHECKING:
    from voxtune.evaluation.describe import EvaluationSets
    from voxtune.quality.result import Evaluation


def command(
    real: Annotated[
        Path,
        typer.Argument(help="Folder of reference volumes, your scans or simulated subjects (NIfTI; BIDS or plain)."),
    ],
    synth: Annotated[
        Path, typer.Argument(help="Folder of synthetic volumes; matched with the reference volumes by file name.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for metrics.json and metrics.md.")],
    masks: Annotated[
        Path | None,
        typer.Option(help="Folder of the masks that the synthetic volumes were generated from; enables Dice."),
    ] = None,
    labels: LabelsOption = None,
    training: Annotated[
        Path | None,
        typer.Option(help="Folder of the training volumes, for memorisation. Default: the reference volumes."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="Image kind, such as T2w, or several: t1,t1ce,t2,flair. Default: those that all folders have."
        ),
    ] = None,
    features: Annotated[
        Path | None, typer.Option(help="Feature network folder. Default: the one that ships with Voxtune.")
    ] = None,
    segmenter: Annotated[
        Path | None, typer.Option(help="Segmenter folder. Default: the one that ships with Voxtune.")
    ] = None,
    resamples: ResamplesOption = 1000,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the bootstrap, or of the order of --blind.")] = 0,
    max_pairs: Annotated[int, typer.Option(min=1, help="Most pairs of volumes compared for diversity.")] = 100,
    blind: Annotated[
        bool,
        typer.Option(
            "--blind",
            help="Instead of metrics, write a page on which a person judges which volume of a pair is synthetic, and its key.",
        ),
    ] = False,
    blind_pairs: Annotated[int, typer.Option(min=1, max=200, help="Most pairs on the page of --blind.")] = 24,
    overwrite: OverwriteOption = False,
    record_paths: RecordPathsOption = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare synthetic volumes with reference volumes: similarity, distribution, mask adherence, memorisation."""
    from voxtune.data.modality import listed
    from voxtune.evaluation.describe import find_sets
    from voxtune.evaluation.evaluate import (
        evaluate,
        open_networks,
        recorded_folders,
        result_files,
        without_paths,
        write_result,
    )
    from voxtune.quality.bootstrap import Bootstrap

    output = Output(json=json, quiet=quiet)
    if blind:
        _write_blind(find_sets(real, synth, masks, None, image), out, blind_pairs, seed, overwrite, output)
        return
    label_map = parse_labels(labels)
    settings = Bootstrap(resamples=resamples, seed=seed)
    check_outputs(result_files(out), overwrite=overwrite, folder=out)
    sets = find_sets(real, synth, masks, training, image)
    feature_network, segmenter_network = open_networks(features, segmenter, choose_device(device))
    images = f" of {listed(sets.kinds)} images" if len(sets.kinds) > 1 else ""
    output.say(
        f"{counted(len(sets.real), 'reference volume')}, {counted(len(sets.synth), 'synthetic volume')}, "
        f"{counted(len(sets.pairs), 'pair')}{images}"
    )
    started = time.perf_counter()
    total = len(sets.real) + len(sets.synth) + len(sets.training or []) + len(sets.pairs)
    with locked_folder(out), output.progress("reading", total) as update:
        result = evaluate(
            sets,
            features=feature_network,
            segmenter=segmenter_network,
            labels=label_map,
            settings=settings,
            max_pairs=max_pairs,
            progress=lambda done, _total: update(done),
            warn=output.warn,
        )
        folders = {"real": real, "synth": synth, "masks": masks, "training": training}
        title = f"{recorded_path(synth)} compared with {recorded_path(real)}"
        files = write_result(result, out, title, folders=folders, overwrite=overwrite, max_pairs=max_pairs)
    _print(result, output)
    output.say(f"wrote {files[0]}, {files[1]} in {time.perf_counter() - started:.1f} s")
    recorded = without_paths(result, folders)
    output.result(recorded.to_json(folders=recorded_folders(folders), max_pairs=max_pairs))


def _write_blind(sets: EvaluationSets, out: Path, pairs: int, seed: int, overwrite: bool, output: Output) -> None:
    from voxtune.evaluation.blind import blind_files, write_blind

    check_outputs(blind_files(out), overwrite=overwrite, folder=out)
    for warning in sets.warnings:
        output.warn(warning)
    page, key, count = write_blind(sets, out, count=pairs, seed=seed, overwrite=overwrite)
    if count < pairs:
        output.warn(f"the volumes give only {counted(count, 'pair')}")
    output.say(f"wrote {page} with {counted(count, 'pair')}; the answers are in {key}, which the judge must not see")
    output.result({"page": str(page), "key": str(key), "pairs": count, "seed": seed})


def _print(result: Evaluation, output: Output) -> None:
    if output.quiet or output.json:
        return
    from rich.table import Table
    from rich.text import Text

    from voxtune.quality.result import HEADER
    from voxtune.report.console import make_console

    console = make_console()
    table = Table(box=None, pad_edge=False)
    for number, name in enumerate(HEADER[:-1]):
        table.add_column(name, justify="right" if number in (1, 2, 3, 4) else "left", no_wrap=True, header_style="dim")
    for row in result.rows():
        table.add_row(*(Text(printable(cell)) for cell in row[:-1]))
    console.print(table)
    for names, reason in result.skipped():
        console.print(Text(printable(f"skipped {names}: {reason}"), style="dim"))
