"""Input kinds: checkpoints, model folders, configurations and folders of training runs, plans and saved graphs."""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch

from tests.factories import analytic
from tests.hostile import archives, damage, pickles
from tests.hostile.kinds import Kind, register
from tests.hostile.kinds_volumes import BYTES, CONTRACT, JSON, SIZE
from voxtune.errors import InputError
from voxtune.evaluation.steps import read_earlier
from voxtune.marks import written_by_voxtune
from voxtune.plan.cache import remember, remembered
from voxtune.plan.plan import Plan
from voxtune.plan.saved_graph import load_graph, save_graph
from voxtune.runtime.describe import describe
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.published import load_published
from voxtune.runtime.storage import load, save
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, load_segmenter, save_segmenter
from voxtune.tensorfiles import read_torch
from voxtune.training.checkpoint import newest_checkpoint, read_checkpoint, restore_random_state
from voxtune.training.config import make_config, parse_value, read_config, setting_names
from voxtune.training.folder import add_command, read_run
from voxtune.training.log import read_metrics
from voxtune.workloads import MedDDPMConfig, build
from voxtune.workloads.segment import SegmentConfig

CPU = torch.device("cpu")
NETWORK = MedDDPMConfig(base=32, blocks=1, multipliers=(1,), attention=())


def tiny_model() -> Model:
    torch.manual_seed(0)
    return Model(ModelConfig(network=NETWORK, size=SIZE, data=CONTRACT))


def _checkpoints(folder: Path) -> None:
    torch.manual_seed(0)
    weights = build(NETWORK).half().state_dict()
    state = {f"denoise_fn.{name}": value for name, value in weights.items()} | {
        "betas": torch.linspace(1e-4, 0.02, 250)
    }
    torch.save({"step": 7, "ema": state}, folder / "new.pt")
    torch.save({"step": 7, "ema": state}, folder / "old.pt", _use_new_zipfile_serialization=False)
    small = {"w": torch.arange(12.0).reshape(3, 4).t(), "n": [1, 2.5, None, "x"], "h": torch.ones(3).half()}
    torch.save(small, folder / "small.pt")
    torch.save(small, folder / "small_old.pt", _use_new_zipfile_serialization=False)


def read_published(_folder: Path, path: Path) -> None:
    if path.name.startswith("small"):
        read_torch(path)
    load_published(path)


_ZIP = (damage.bytes_damage, archives.archive_damage, pickles.damaged_program, pickles.hostile_checkpoint)
register(
    Kind(
        name="checkpoints",
        make=_checkpoints,
        damages={"new.pt": _ZIP, "small.pt": _ZIP},
        read=lambda folder, path: _tolerant(read_published, folder, path),
        cases=600,
        quick=12,
    )
)
register(
    Kind(
        name="checkpoints before torch 1.6",
        make=_checkpoints,
        damages=dict.fromkeys(
            ("old.pt", "small_old.pt"), (damage.bytes_damage, damage.bytes_damage, pickles.hostile_old_checkpoint)
        ),
        read=lambda folder, path: _tolerant(read_published, folder, path),
        cases=600,
        quick=12,
    )
)


def _tolerant(read: object, folder: Path, path: Path) -> None:
    """The small checkpoints hold no network, which is an error of its own when they are not damaged."""
    try:
        read(folder, path)  # type: ignore[operator]
    except InputError as error:
        if "contains no weights" not in str(error) and "unknown network" not in str(error):
            raise


def _model(folder: Path) -> None:
    save(tiny_model(), folder / "model", card="# A model\n", half=True)


def read_model(folder: Path, path: Path) -> None:
    model = load(folder / "model")
    describe(model.config, None)
    model.resolve()
    written_by_voxtune(path)


register(
    Kind(
        name="weights (safetensors)",
        make=_model,
        damages={"model/model.safetensors": (archives.safetensors_damage,)},
        read=read_model,
        cases=400,
        quick=10,
    )
)
register(
    Kind(
        name="config.json of a model",
        make=_model,
        damages={"model/config.json": JSON, "model/README.md": BYTES},
        read=read_model,
        cases=600,
        quick=12,
    )
)


def _segmenter(folder: Path) -> None:
    torch.manual_seed(0)
    config = SegmenterConfig(network=SegmentConfig(base=4, in_channels=1), data=analytic.CONTRACT)
    save_segmenter(Segmenter(config), folder / "segmenter", card="# A segmenter\n")


register(
    Kind(
        name="segmenters",
        make=_segmenter,
        damages={"segmenter/config.json": JSON, "segmenter/model.safetensors": (archives.safetensors_damage,)},
        read=lambda folder, _path: load_segmenter(folder / "segmenter"),
        cases=250,
    )
)

SETTINGS = """\
data:
  cohort: 4
  cohort_seed: 1
  labels:
    - {name: brain, value: 1, channel: 0}
    - {name: tumour, value: 2, channel: 1}
  spacing: [1.5, 1.5, 1.5]
  orientation: RAS
model:
  workload: med-ddpm
  size: [8, 8, 8]
  multipliers: [1]
  attention: []
steps: 3
batch: 1
learning_rate: 1e-4
autocast: none
tensorboard: false
"""


def _settings(folder: Path) -> None:
    import yaml

    (folder / "train.yaml").write_text(SETTINGS)
    (folder / "train.json").write_text(json.dumps(yaml.safe_load(SETTINGS.replace("1e-4", "0.0001"))))
    (folder / "value.txt").write_text("data.spacing=[1.0, 2.0, 3.0]")


def read_settings(_folder: Path, path: Path) -> None:
    """A config file; of value.txt the content is the value of --set."""
    if path.suffix != ".txt":
        read_config(path, {"steps": 2})
        return
    text = path.read_bytes().decode(errors="surrogateescape")
    name, _, value = text.partition("=")
    names = setting_names()
    for setting in (name,) if name in names else names[:: max(1, len(names) // 8)]:
        try:
            parsed = parse_value(value)
        except InputError as error:  # as the command does
            raise InputError(f"--set {text[:80]}: {error}") from None
        make_config({}, {setting: parsed}, "--set")


def yaml_damage(data: bytes, rng: random.Random) -> bytes:
    """The value of one line becomes something that YAML reads in an unexpected way."""
    values = [
        *(
            "[" * 3000,
            "{" * 3000,
            "- " * 3000,
            "!!python/object/apply:os.system ['touch executed']",
            "!!bool maybe",
            "&a [*a]",
        ),
        *(
            "!!binary x",
            "!!float abc",
            "!!int 0x",
            "!!timestamp x",
            "!!omap x",
            "!!set x",
            "1:" * 20_000 + "1",
            "0b" + "1" * 90_000,
        ),
        *(
            "9" * 5000,
            ".inf",
            ".nan",
            "-.inf",
            "1e400",
            "2001-99-99",
            "2001-01-01",
            "'",
            '"\\uD800"',
            '"\\0"',
            "|",
            ">",
            "? x",
            "<<: x",
        ),
        *(
            "x" * 100_000,
            "null",
            "~",
            "yes",
            "[1, [2, [3]]]",
            "{a: {b: {c: d}}}",
            "/etc/passwd",
            "../../..",
            "0o7",
            "1_0",
            "=",
            "*x",
            "%x",
        ),
    ]
    lines = data.decode().splitlines()
    at = rng.randrange(len(lines))
    key = lines[at].partition(":")[0]
    lines[at] = f"{key}: {rng.choice(values)}"
    return "\n".join(lines).encode()


def set_value(_data: bytes, rng: random.Random) -> bytes:
    values = (
        [str(value) for value in damage.VALUES]
        + list(damage.RAW_VALUES)
        + ["[" * 3000, "!!python/name:os.system", "&a [*a]"]
    )
    return f"{rng.choice(setting_names())}={rng.choice(values)}".encode(errors="surrogatepass")


register(
    Kind(
        name="settings of a training run (YAML, JSON, --set)",
        make=_settings,
        damages={
            "train.yaml": (damage.text_damage, yaml_damage),
            "train.json": JSON,
            "value.txt": (set_value, set_value, damage.text_damage),
        },
        read=read_settings,
        cases=600,
        quick=14,
    )
)


def _run(folder: Path) -> None:
    from tests.factories.tiny_training import Blobs, tiny_config
    from voxtune.training.loop import train

    torch.set_num_threads(1)
    train(tiny_config(steps=2, checkpoint_every=1, log_every=1), Blobs(), folder / "run")
    for path in (folder / "run").rglob("*"):
        if path.name.endswith((".lock", ".part")) or "tensorboard" in path.parts:
            path.unlink(missing_ok=True)
    (folder / "subjects.npz").write_bytes(b"placeholder")
    settings = json.loads((folder / "run" / "train.json").read_text())
    settings["data"]["subjects"] = "subjects.npz"
    (folder / "run" / "train.json").write_text(json.dumps(settings))
    (folder / "run" / "sources.json").write_text(
        json.dumps({"format": "voxtune-sources/1", "data.subjects": "../subjects.npz"})
    )
    (folder / "run" / "commands.json").write_text(json.dumps(["voxtune train -o run"]))


def read_training_run(folder: Path, path: Path) -> None:
    run = folder / "run"
    if path.suffix == ".safetensors":
        checkpoint = read_checkpoint(path)
        restore_random_state(checkpoint.part("rng."), CPU, str(path))
        return
    read_run(run)
    read_metrics(run / "metrics.jsonl")
    add_command(run, None)
    newest_checkpoint(run / "checkpoints", lambda _: None)
    written_by_voxtune(path)


def checkpoint_metadata(data: bytes, rng: random.Random) -> bytes:
    """The state, the settings or the model in a training checkpoint, whose tensors are valid."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header["__metadata__"]
    metadata["run"] = damage.json_damage(metadata["run"].encode(), rng).decode(errors="replace")
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


register(
    Kind(
        name="training runs and their checkpoints",
        make=_run,
        damages={
            "run/train.json": JSON,
            "run/sources.json": JSON,
            "run/commands.json": JSON,
            "run/metrics.jsonl": (damage.lines_damage,),
            "run/checkpoints/step-00000002.safetensors": (
                archives.safetensors_damage,
                checkpoint_metadata,
                checkpoint_metadata,
            ),
        },
        read=read_training_run,
        cases=500,
        quick=12,
    )
)
MADE_FOR = {
    "model": "0" * 32,
    "inputs": [["1, 3", "float32", "cpu"]],
    "arrangement": "*",
    "device": "cpu",
    "versions": {},
}


def _plans(folder: Path) -> None:
    evidence = {
        "gate": {"relative": 1e-6, "psnr": 80.0},
        "waterfall": [{"passes": ["fold"], "p50_ms": 1.5, "kept": True}],
    }
    plan = Plan(Plan.of("channels_last", "time").steps, MADE_FOR, evidence)
    plan.save(folder / "plan.json")


def read_plan(folder: Path, path: Path) -> None:
    plan = Plan.load(path)
    plan.to_json()
    written_by_voxtune(path)
    # The same file as a plan of the cache, which is ignored with a warning if it cannot be used.
    remember(Plan(plan.steps, MADE_FOR, {}))
    for cached in (folder.parent / "cache").rglob("*.json"):
        cached.write_bytes(path.read_bytes())
    assert remembered(MADE_FOR) is None or plan.made_for == MADE_FOR


register(Kind(name="plans", make=_plans, damages={"plan.json": JSON}, read=read_plan, cases=400, quick=10))


def _graph(folder: Path) -> None:
    from voxtune.plan.api import CPU_READY
    from voxtune.plan.build import build as rewrite

    model = tiny_model()
    args = (torch.zeros(1, 1, *SIZE), torch.tensor([1]), torch.zeros(1, 2, *SIZE))
    network = rewrite(model.network, args, None, CPU_READY[0], twin=True)
    save_graph(folder / "network.graph", network)
    assert (folder / "network.graph").exists()


def read_graph(_folder: Path, path: Path) -> None:
    """A graph that cannot be used is ignored; one that can be read is run, as the next sampling would."""
    loaded = load_graph(path, CPU)
    if loaded is None:
        raise InputError(f"{path}: ignored")
    module, notes, derived = loaded
    assert all(name and derivation is not None for name, derivation in derived.derivations.items())
    assert all(isinstance(text, str) for text in [*notes, *notes.values()])
    with torch.no_grad():
        try:
            module(torch.zeros(1, 1, *SIZE), torch.tensor([1]), torch.zeros(1, 2, *SIZE))
        except Exception as error:  # the caller runs the original network
            raise InputError(f"{path}: {type(error).__name__}") from None


def graph_description(data: bytes, rng: random.Random) -> bytes:
    """The description of the graph is damaged as JSON; its tensors are valid."""
    import io

    content = torch.load(io.BytesIO(data), weights_only=True)
    if rng.random() < 0.6:
        content["graph"] = damage.json_damage(content["graph"].encode(), rng).decode(errors="replace")
    else:
        description = json.loads(content["graph"])
        line = rng.choice([n for n in description["nodes"] if n["op"] == "call_function"])
        targets = [
            "os.system.x",
            "aten.from_file.default",
            "aten.nothing.default",
            "eval",
            "aten.zeros.default",
            "aten.full.default",
        ]
        line["target"] = rng.choice(targets)
        line["args"] = rng.choice(
            [
                ["tuple", "executed", True, 10],
                ["tuple", ["list", 2**40]],
                ["tuple"],
                ["tuple", ["list", 2**20, 2**20], 1.0],
            ]
        )
        line["kwargs"] = ["dict"]
        content["graph"] = json.dumps(description)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


register(
    Kind(
        name="saved graphs",
        make=_graph,
        damages={
            "network.graph": (
                damage.bytes_damage,
                graph_description,
                graph_description,
                archives.archive_damage,
                pickles.hostile_checkpoint,
            )
        },
        read=read_graph,
        cases=350,
    )
)


def _steps(folder: Path) -> None:
    row = {
        "name": "ddim 5",
        "sampler": "ddim",
        "steps": 5,
        "timestep_spacing": "trailing",
        "clip": True,
        "seed": 0,
        "verdict": "non-inferior",
        "seconds": 1.5,
    }
    more = {**row, "name": "ddim 8", "steps": 8}
    data = {
        "format": "voxtune-steps/1",
        "table": "steps",
        "voxtune": "0.2.0",
        "model_sha256": "0" * 64,
        "chosen": "ddim 5",
        "subjects": 3,
        "skip": 0,
        "margin": 0.05,
        "rows": [row, more],
    }
    (folder / "steps.json").write_text(json.dumps(data))


def read_steps(_folder: Path, path: Path) -> None:
    read_earlier(path, _model_of_steps(), "0" * 64)
    written_by_voxtune(path)


_STEPS_MODEL: list[Model] = []


def _model_of_steps() -> Model:
    if not _STEPS_MODEL:
        _STEPS_MODEL.append(tiny_model())
    return _STEPS_MODEL[0]


register(Kind(name="steps.json", make=_steps, damages={"steps.json": JSON}, read=read_steps, cases=350))
