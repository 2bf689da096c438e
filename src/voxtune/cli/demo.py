"""voxtune demo: the main job on an embedded default."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device

# Training drew subjects of this seed from 0 up; the demo shows one that it never saw.
HELD_OUT = 100_000


def command(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write.")] = Path("out/demo"),
    model: Annotated[Path | None, typer.Option(help="Another model than the shipped one.")] = None,
    subject: Annotated[int, typer.Option(min=0, help="Which held-out subject of the cohort.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the synthetic volume.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Sampling steps; default: the model's.")] = None,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Draw a held-out subject's MRI from its mask with the shipped model; write NIfTI and a picture."""
    from voxtune.data import cohort
    from voxtune.data.nifti import write_volume
    from voxtune.errors import InputError
    from voxtune.report.picture import Panel, contact_sheet
    from voxtune.runtime.generate import generate, mask_contract, prepare
    from voxtune.runtime.storage import demo_model, load

    output = Output(json=json, quiet=quiet)
    started = time.perf_counter()
    drawing = load(demo_model() if model is None else model, device=choose_device(device))
    contract = mask_contract(drawing)
    if len(contract.images) != 1 or set(contract.values) != {cohort.BRAIN, cohort.TUMOUR}:
        raise InputError("the demo's cohort has one image and the labels 1 brain, 2 tumour: give a model with these")
    person = cohort.subject(0, HELD_OUT + subject, contract.size, spacing=contract.spacing[0], healthy_fraction=0.0)
    folder = out / person.id
    _make(folder)
    mask, real = person.label_volume(), person.image_volume()
    mask_path = write_volume(folder / f"{person.id}_dseg.nii.gz", mask.array, mask)
    real_path = write_volume(folder / f"{person.id}_T1w.nii.gz", real.array, real)
    output.say(
        f"subject  {person.id} of the embedded cohort (never trained on), {'x'.join(map(str, contract.size))} voxels"
    )
    [request] = prepare(drawing, [mask_path])
    total = steps or drawing.default_steps
    output.say(f"drawing  {drawing.config.sampling.sampler}, {total} steps, seed {seed}, on {drawing.device}")
    with output.progress("sampling", total) as update:
        [drawn] = generate(
            drawing, [request], folder, seed=seed, steps=steps, overwrite=True, progress=lambda done, _n: update(done)
        )
    panels = [
        Panel(title="mask", volume_DHW=person.labels_DHW, labels=True),
        Panel(title="real", volume_DHW=person.image_DHW),
        Panel(title="synthetic", volume_DHW=drawn.images_CDHW[0]),
    ]
    picture = contact_sheet(panels, folder / "picture.png", around=person.labels_DHW)
    seconds = time.perf_counter() - started
    for what, path in (("mask", mask_path), ("real", real_path), ("drawn", drawn.files[0]), ("picture", picture)):
        output.say(f"{what:8} {path}")
    output.say(f"done in {seconds:.0f} s. A synthetic image for research: not for clinical use.")
    files = {"mask": mask_path, "real": real_path, "synthetic": drawn.files[0], "picture": picture}
    output.result({"subject": person.id, "seconds": round(seconds, 2), **{k: str(v) for k, v in files.items()}})


def _make(folder: Path) -> None:
    from voxtune.errors import InputError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; choose a folder that can be written with -o") from None
