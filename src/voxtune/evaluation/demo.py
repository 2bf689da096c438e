"""Between all the rooms: what `voxtune demo` shows of each, on one subject that no model was trained on."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from voxtune.data import cohort
from voxtune.data.bids import mark_simulated
from voxtune.data.nifti import write_volume
from voxtune.diffusion.noise import check_seed
from voxtune.errors import InputError
from voxtune.evaluation.describe import find_sets
from voxtune.evaluation.evaluate import evaluate, write_result
from voxtune.quality.result import Evaluation
from voxtune.report.picture import SlicePanel, slice_picture
from voxtune.report.view import view_page
from voxtune.runtime.generate import GeneratedVolume, generate, mask_contract, prepare
from voxtune.runtime.model import Model
from voxtune.runtime.planned import example_inputs, optimize, tune_model
from voxtune.runtime.sampling import SamplerSettings
from voxtune.runtime.storage import load, provenance
from voxtune.segmentation.segmenter import load_segmenter, shipped_segmenter

# Of the gate on a CPU, where a step takes seconds: two inputs, and a sampling of four steps.
CHECKS, WALK = 2, 4
# The figures that one volume allows, in the order in which they are told.
TOLD = {
    "dice_brain": "Dice between the brain asked for and the brain drawn",
    "dice_brain_real": "the same for the real image: the segmenter's own limit",
    "dice_tumour": "Dice between the tumour asked for and the tumour drawn",
    "dice_tumour_real": "the same for the real image",
    "ms_ssim": "MS-SSIM to the real image",
    "psnr": "PSNR to the real image, dB",
}


class Voice(Protocol):
    """How the demo tells what it does: `Output` of the command line."""

    def say(self, text: str) -> None: ...
    def warn(self, text: str) -> None: ...
    def progress(self, description: str, total: int) -> AbstractContextManager[Callable[..., None]]: ...


@dataclass(kw_only=True)
class Shown:
    """What was made: files by what they are, figures by name, seconds by part."""

    subject: str
    files: dict[str, Path] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    plan: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        files = {k: str(v) for k, v in self.files.items()}
        return {
            "subject": self.subject,
            **files,
            "plan_passes": self.plan,
            "figures": self.figures,
            "seconds": self.seconds,
        }


def demonstrate(
    path: Path,
    device: str,
    out: Path,
    voice: Voice,
    *,
    subject: int = 0,
    seed: int = 0,
    steps: int | None = None,
    minutes: float = 2.0,
) -> Shown:
    """Draws a held-out subject's image from its mask with the model at `path`; measures it; writes pages to look at.

    The plan is tuned here; `minutes` bounds that on a CPU; 0 draws by the network as it is.
    """
    model = load(path, device=device)
    contract = mask_contract(model)
    if len(contract.images) != 1 or set(contract.values) != {cohort.BRAIN, cohort.TUMOUR}:
        raise InputError("the demo's cohort has one image and the labels 1 brain, 2 tumour: give a model with these")
    person = cohort.subject(
        0, cohort.HELD_OUT + subject, contract.size, spacing=contract.spacing[0], healthy_fraction=0.0
    )
    shown, folder, clock = Shown(subject=person.id), out / person.id, Clock()
    _make(folder)
    mask, real = person.label_volume(), person.image_volume()
    shown.files["mask"] = write_volume(folder / f"{person.id}_dseg.nii.gz", mask.array, mask)
    shown.files["real"] = write_volume(folder / f"{person.id}_T1w.nii.gz", real.array, real)
    mark_simulated(shown.files["real"])
    size = "x".join(map(str, contract.size))
    voice.say(f"subject  {person.id} of the embedded cohort (never trained on), {size} voxels")
    check_seed(seed)
    settings = model.resolve(steps=steps)
    fast = _planned(model, settings, folder / "plan.json", shown, voice, minutes)
    shown.seconds["plan"] = clock.lap()
    drawn = _draw(fast, settings, folder, shown, voice, seed, provenance(path, model))
    shown.seconds["drawing"] = clock.lap()
    panels = [
        SlicePanel(title="mask", volume_DHW=person.labels_DHW, labels=True),
        SlicePanel(title="simulated subject", volume_DHW=person.image_DHW),
        # The cohort is in RAS; a model's grid has an orientation of its own.
        SlicePanel(title="synthetic", volume_DHW=drawn.request.placement.ras_array(drawn.images_CDHW[0])[0]),
    ]
    shown.files["picture"] = slice_picture(panels, folder / "picture.png", around=person.labels_DHW)
    _tell(_measured(folder, model), folder, shown, voice)
    shown.seconds["metrics"] = clock.lap()
    shown.files["view"] = view_page(folder, folder / "view.html").path
    shown.files["study"] = _study(out / "study.html")
    shown.seconds["pages"] = clock.lap()
    return shown


class Clock:
    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        took, self.last = now - self.last, now
        return round(took, 2)


def _planned(model: Model, settings: SamplerSettings, path: Path, shown: Shown, voice: Voice, minutes: float) -> Model:
    from voxtune.plan.tuner import CPU_IN_SHORT

    if minutes <= 0:
        return model
    if model.device.type == "cuda":
        voice.say("plan     auto: gated here when the first step is asked for")
        return optimize(model)
    voice.say(
        f"plan     passes measured on this machine and held against the network itself, {minutes:g} minutes at most"
    )
    fast, plan = tune_model(
        model,
        example_inputs(model),
        cache=settings.cache,
        ladder=CPU_IN_SHORT,
        steps=WALK,
        checks=CHECKS,
        seconds=60 * minutes,
        say=lambda line: voice.say(f"         {line}"),
    )
    plan.save(path)
    shown.files["plan"], shown.plan = path, plan.names
    return fast


def _draw(
    model: Model,
    settings: SamplerSettings,
    folder: Path,
    shown: Shown,
    voice: Voice,
    seed: int,
    made_by: dict[str, Any],
) -> GeneratedVolume:
    [request] = prepare(model, [shown.files["mask"]])
    kept = "" if settings.cache is None else f", deep features kept for {settings.cache.interval} steps"
    voice.say(f"drawing  {settings.sampler}, {settings.steps} steps{kept}, seed {seed}, on {model.device}")
    with voice.progress("sampling", settings.steps) as update:
        [drawn] = generate(
            model,
            [request],
            folder,
            settings=settings,
            seed=seed,
            overwrite=True,
            provenance=made_by,
            progress=lambda done, _n: update(done),
        )
    shown.files["synthetic"] = drawn.files[0]
    return drawn


def _measured(folder: Path, model: Model) -> Evaluation:
    judge = load_segmenter(shipped_segmenter(), device=model.device)
    return evaluate(find_sets(folder, folder, masks=folder), features=judge, segmenter=judge)


def _tell(result: Evaluation, folder: Path, shown: Shown, voice: Voice) -> None:
    shown.files["metrics"] = write_result(result, folder, f"{shown.subject}, drawn and real", folders={})[0]
    found = {f.name: f.value for f in result.figures if f.value is not None}
    shown.figures = {name: round(found[name], 4) for name in TOLD if name in found}
    for number, (name, value) in enumerate(shown.figures.items()):
        voice.say(f"{'metrics' if number == 0 else '':8} {value:7.3f}  {TOLD[name]}")


def _study(path: Path) -> Path:
    """The page of the recorded H200 sessions."""
    from voxtune.profile.session import load_session
    from voxtune.report.build import build
    from voxtune.report.html import render_html
    from voxtune.report.recordings import in_order, recorded_sessions

    page = render_html(build(in_order([load_session(folder) for folder in recorded_sessions()])))
    path.write_text(page, encoding="utf-8")
    return path


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; choose a folder that can be written with -o") from None
