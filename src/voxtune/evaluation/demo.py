"""`voxtune demo`: tunes a plan, generates a volume from the mask of a held-out subject, measures it and writes pages."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from voxtune.data import cohort
from voxtune.data.bids import mark_simulated
from voxtune.data.derivative import output_names, sidecar_path
from voxtune.data.legend import contract_legend
from voxtune.data.nifti import volume_bytes
from voxtune.diffusion.noise import check_seed
from voxtune.errors import InputError
from voxtune.evaluation.describe import find_sets
from voxtune.evaluation.evaluate import evaluate, result_files, write_result
from voxtune.files import check_outputs, locked_folder, write_file
from voxtune.quality.result import Evaluation
from voxtune.report.picture import SlicePanel, slice_picture
from voxtune.report.view import view_page
from voxtune.runtime.generate import GeneratedVolume, generate
from voxtune.runtime.masks import mask_contract, prepare
from voxtune.runtime.model import Model
from voxtune.runtime.planned import example_inputs, optimize, tune_model
from voxtune.runtime.sampling import SamplerSettings
from voxtune.runtime.storage import load, provenance
from voxtune.segmentation.segmenter import load_segmenter, shipped_segmenter

# The gate's inputs and the steps of its trajectory: few, since a step takes about a second on a CPU, and six in float64.
GATE_INPUTS, GATE_STEPS = 1, 3
# The metrics that one volume allows, in the order in which they are printed.
METRICS = {
    "dice_brain": "Dice of the brain: mask and generated volume",
    "dice_brain_real": "the same segmenter on the simulated subject, for comparison",
    "dice_tumour": "Dice of the tumour: mask and generated volume",
    "dice_tumour_real": "the same for the simulated subject",
    "ms_ssim": "MS-SSIM of the generated volume and the simulated subject",
    "psnr": "PSNR of the generated volume and the simulated subject, dB",
}


class DemoOutput(Protocol):
    """Where the demo prints: `Output` of the command line."""

    def say(self, text: str) -> None: ...
    def progress(self, description: str, total: int) -> AbstractContextManager[Callable[..., None]]: ...


@dataclass(kw_only=True)
class DemoResult:
    """Files by content, metrics by name, seconds by phase, and the passes of the plan."""

    subject: str
    files: dict[str, Path] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    plan: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        files = {k: str(v) for k, v in self.files.items()}
        return {
            "subject": self.subject,
            **files,
            "real": files["simulated"],  # the key of version 0.1
            "plan_passes": self.plan,
            "figures": self.metrics,
            "seconds": self.seconds,
        }


def demonstrate(
    path: Path,
    device: str,
    out: Path,
    output: DemoOutput,
    *,
    subject: int = 0,
    seed: int = 0,
    steps: int | None = None,
    minutes: float = 1.0,
    overwrite: bool = False,
) -> DemoResult:
    """Generates a volume from the mask of a held-out subject with the model at `path`, measures it and writes pages.

    On a CPU the plan is tuned first; no candidate is started after `minutes`, and 0 disables tuning. `overwrite` replaces
    the files of an earlier demo.
    """
    model = load(path, device=device)
    contract = mask_contract(model)
    if len(contract.images) != 1 or set(contract.values) != {cohort.BRAIN, cohort.TUMOUR}:
        raise InputError(f"{path}: the demo requires a model with one image and the labels 1 (brain) and 2 (tumour)")
    folder = out / f"sub-{cohort.HELD_OUT + subject:04d}"
    files = _files(out, folder, model)
    check_outputs(files.values(), overwrite=overwrite, folder=out)
    check_seed(seed)
    settings = model.resolve(steps=steps)
    with locked_folder(out):
        simulated = cohort.subject(
            0, cohort.HELD_OUT + subject, contract.size, spacing=contract.spacing[0], healthy_fraction=0.0
        )
        result, clock = DemoResult(subject=simulated.id), Clock()
        _write_subject(simulated, files, result, overwrite=overwrite)
        size = "x".join(map(str, contract.size))
        output.say(f"subject  {simulated.id}: held-out simulated subject of the cohort, {size} voxels")
        planned = _planned(model, settings, files["plan"], result, output, minutes, overwrite=overwrite)
        result.seconds["plan"] = clock.lap()
        volume = _generate(
            planned, settings, folder, result, output, seed, provenance(path, model), overwrite=overwrite
        )
        result.seconds["drawing"] = clock.lap()
        panels = [
            SlicePanel(title="mask", volume_DHW=simulated.labels_DHW, labels=True),
            SlicePanel(title="simulated subject", volume_DHW=simulated.image_DHW),
            # The cohort is in RAS; a model's grid has an orientation of its own.
            SlicePanel(title="synthetic", volume_DHW=volume.request.placement.ras_array(volume.images_CDHW[0])[0]),
        ]
        result.files["picture"] = slice_picture(
            panels,
            files["picture"],
            around=simulated.labels_DHW,
            legend=contract_legend(contract),
            overwrite=overwrite,
        )
        _report_metrics(_evaluate(folder, model, output), folder, result, output, overwrite=overwrite)
        result.seconds["metrics"] = clock.lap()
        _write_pages(folder, files, result, output, overwrite=overwrite)
        result.seconds["pages"] = clock.lap()
    return result


def _files(out: Path, folder: Path, model: Model) -> dict[str, Path]:
    """All files of the demo by content."""
    names = {
        "mask": f"{folder.name}_dseg.nii.gz",
        "simulated": f"{folder.name}_T1w.nii.gz",
        "plan": "plan.json",
        "picture": "picture.png",
        "view": "view.html",
    }
    files = {content: folder / name for content, name in names.items()}
    files["simulated_sidecar"] = sidecar_path(files["simulated"])
    [[images]] = output_names([files["mask"]], 1, mask_contract(model).images, flat=True)
    files["synthetic"] = folder / images[0]
    files["synthetic_sidecar"] = sidecar_path(files["synthetic"])
    files["metrics"], files["metrics_table"] = result_files(folder)
    return files | {"study": out / "study.html"}


def _write_subject(simulated: cohort.Subject, files: dict[str, Path], result: DemoResult, *, overwrite: bool) -> None:
    mask, image = simulated.label_volume(), simulated.image_volume()
    # The image and its sidecar first, because they mark the mask.
    mark_simulated(files["simulated"], overwrite=overwrite)
    result.files["mask"] = write_file(files["mask"], volume_bytes(mask.array, mask), overwrite=overwrite)
    result.files["simulated"] = write_file(files["simulated"], volume_bytes(image.array, image), overwrite=overwrite)


class Clock:
    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return round(seconds, 2)


def _planned(
    model: Model,
    settings: SamplerSettings,
    path: Path,
    result: DemoResult,
    output: DemoOutput,
    minutes: float,
    *,
    overwrite: bool,
) -> Model:
    from voxtune.plan.tuner import CPU_IN_SHORT

    if minutes <= 0:
        return model
    if model.device.type == "cuda":
        output.say("plan     auto: gated at the first step")
        return optimize(model)
    output.say("plan     step times of several plans on this machine; the gate compares the fastest with the original")
    with output.progress("tuning", 100) as update:
        planned, plan = tune_model(
            model,
            example_inputs(model),
            cache=settings.cache,
            ladder=CPU_IN_SHORT,
            steps=GATE_STEPS,
            checks=GATE_INPUTS,
            seconds=60 * minutes,
            gate_last=True,
            quick=True,
            say=lambda line: output.say(f"         {line}"),
            progress=lambda fraction: update(round(100 * fraction)),
        )
    plan.save(path, overwrite=overwrite)
    result.files["plan"], result.plan = path, plan.names
    return planned


def _generate(
    model: Model,
    settings: SamplerSettings,
    folder: Path,
    result: DemoResult,
    output: DemoOutput,
    seed: int,
    made_by: dict[str, Any],
    *,
    overwrite: bool,
) -> GeneratedVolume:
    masks = prepare(model, [result.files["mask"]])
    output.say(f"sampling {settings.describe()}, seed {seed}, on {model.device}")
    with output.progress("sampling", settings.steps) as update:
        [volume] = generate(
            model,
            masks,
            folder,
            settings=settings,
            seed=seed,
            flat=True,
            overwrite=overwrite,
            provenance=made_by,
            progress=lambda done, _total: update(done),
        )
    result.files["synthetic"] = volume.files[0]
    return volume


def _evaluate(folder: Path, model: Model, output: DemoOutput) -> Evaluation:
    segmenter = load_segmenter(shipped_segmenter(), device=model.device)
    sets = find_sets(folder, folder, masks=folder)
    with output.progress("metrics", 100) as update:
        return evaluate(
            sets,
            features=segmenter,
            segmenter=segmenter,
            progress=lambda done, total: update(100 * done // total),
        )


def _report_metrics(
    evaluation: Evaluation, folder: Path, result: DemoResult, output: DemoOutput, *, overwrite: bool
) -> None:
    title = f"{result.subject}, generated volume and simulated subject"
    result.files["metrics"] = write_result(evaluation, folder, title, folders={"subject": folder}, overwrite=overwrite)[
        0
    ]
    values = {m.name: m.value for m in evaluation.metrics if m.value is not None}
    result.metrics = {name: round(values[name], 4) for name in METRICS if name in values}
    for number, (name, value) in enumerate(result.metrics.items()):
        output.say(f"{'metrics' if number == 0 else '':8} {value:7.3f}  {METRICS[name]}")


def _write_pages(
    folder: Path, files: dict[str, Path], result: DemoResult, output: DemoOutput, *, overwrite: bool
) -> None:
    """The viewer's page, and the page of the recorded H200 sessions."""
    from voxtune.profile.session import load_session
    from voxtune.report.build import build
    from voxtune.report.html import render_html
    from voxtune.report.recordings import in_order, recorded_sessions

    folders = recorded_sessions()
    with output.progress("pages", len(folders) + 3) as update:
        result.files["view"] = view_page(folder, files["view"], overwrite=overwrite).path
        update(1)
        sessions = []
        for number, session in enumerate(folders):
            sessions.append(load_session(session))
            update(number + 2)
        document = build(in_order(sessions))
        update(len(folders) + 2)
        result.files["study"] = write_file(files["study"], render_html(document), overwrite=overwrite)
        update(len(folders) + 3)
