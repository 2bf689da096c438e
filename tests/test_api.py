"""The public names of `voxtune`: a subject from training to its page, wrong values, and what the names show of themselves."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import typing
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from torch import nn

import voxtune
from tests.factories.nifti import oriented_affine
from voxtune.data.cohort import cohort_contract
from voxtune.errors import InputError
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, save_segmenter
from voxtune.workloads.segment import SegmentConfig

ROOT = Path(__file__).parent.parent
SIZE = (16, 16, 16)
FAST = {"model.diffusion_steps": 10, "tensorboard": False, "workers": 0, "log_every": 1}
TINY = {
    "size": SIZE,
    "base": 32,
    "multipliers": (1, 1),
    "batch": 1,
    "accumulation": 1,
    "sample_every": 0,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three subjects, images and masks in one folder."""
    root = tmp_path_factory.mktemp("data")
    affine = oriented_affine("RAS", (12.0, 12.0, 12.0))
    for number in range(3):
        labels = np.zeros((14, 17, 13), np.uint8)
        labels[2:-2, 2:-2, 2:-2] = 1
        labels[5:8, 5 + number : 8 + number, 5:8] = 2
        image = (labels * 400.0 + np.random.default_rng(number).uniform(0, 40, labels.shape)).astype(np.float32)
        nib.save(nib.Nifti1Image(image, affine), root / f"sub-{number}_T1w.nii.gz")
        nib.save(nib.Nifti1Image(labels, affine), root / f"sub-{number}_dseg.nii.gz")
    return root


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    torch.manual_seed(0)
    config = SegmenterConfig(network=SegmentConfig(base=4), data=cohort_contract(SIZE))
    return save_segmenter(Segmenter(config), tmp_path_factory.mktemp("judge"), card="")


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    steps: list[tuple[int, int]] = []
    result = voxtune.train(
        images=data,
        masks=data,
        image=["t1"],
        out=tmp_path_factory.mktemp("runs") / "mine",
        steps=np.int64(3),
        seed=1,
        settings=FAST,
        progress=lambda step, total, loss: steps.append((step, total)),
        **TINY,
    )
    assert steps == [(1, 3), (2, 3), (3, 3)]
    return result


@pytest.mark.usefixtures("one_thread")
def test_train_draw_evaluate_view(data, trained, judge, tmp_path):
    assert (trained.step, trained.steps, trained.stopped) == (3, 3, False)
    assert str(trained.model) in repr(trained) and "step 3 of 3" in repr(trained)
    model = voxtune.load(trained.model)
    assert repr(model).startswith("Model(med-ddpm; 16 x 16 x 16; labels 1 (")
    for number in range(3):
        mask = data / f"sub-{number}_dseg.nii.gz"
        saved = model.draw(mask, steps=2, seed=number).save(
            tmp_path / "synth" / f"sub-{number}_desc-synth01_T1w.nii.gz"
        )
        assert nib.load(saved).shape == (14, 17, 13)

    options = {"features": judge, "segmenter": judge, "resamples": 20, "device": "cpu"}
    done: list[int] = []
    result = voxtune.evaluate(
        data, tmp_path / "synth", masks=data, out=tmp_path / "eval", progress=lambda n, total: done.append(n), **options
    )
    assert done == list(range(1, 10)), "3 volumes, 3 references and 3 pairs"
    assert result.counts["pairs"] == 3 and 0 < result["ms_ssim"].value < 1
    stored = json.loads((tmp_path / "eval" / "metrics.json").read_text())
    assert stored["figures"] == result.to_json()["figures"]
    table = repr(result).splitlines()
    assert table[0].startswith("Evaluation(3 real, 3 synth")
    assert table[1].split() == ["metric", "value", "reference", "interval", "n", "better"]
    assert any(line.startswith("psnr") for line in table)
    assert "<td>ms_ssim</td>" in result._repr_html_()
    with pytest.raises(KeyError, match="ssim: unknown metric; this evaluation has psnr"):
        result["ssim"]
    with pytest.raises(InputError, match="already exists"):
        voxtune.evaluate(data, tmp_path / "synth", out=tmp_path / "eval", **options)

    page = voxtune.view(
        tmp_path / "synth", tmp_path / "view.html", real=data, masks=data, metrics=tmp_path / "eval" / "metrics.json"
    )
    assert page == tmp_path / "view.html" and page.stat().st_size > 1e6
    with pytest.raises(InputError, match="already exists"):
        voxtune.view(tmp_path / "synth", page)
    assert voxtune.view(tmp_path / "synth", page, limit=1, overwrite=True) == page


@pytest.mark.usefixtures("one_thread")
def test_a_run_stops_and_resumes(data, tmp_path):
    run = tmp_path / "run"
    first = voxtune.train(images=str(data), masks=data, out=run, steps=4, settings=FAST, stop=lambda: True, **TINY)
    assert first.stopped and first.step == 1 and "stopped" in repr(first)
    second = voxtune.train(resume=run, steps=2, device="cpu")
    assert (second.resumed_from, second.step, second.stopped) == (1, 2, False)
    straight = voxtune.train(images=data, masks=data, out=tmp_path / "straight", steps=2, settings=FAST, **TINY)
    weights = [(result.model / "model.safetensors").read_bytes() for result in (second, straight)]
    assert weights[0] == weights[1]


def test_a_config_file_with_keywords_over_it(data, tmp_path, caplog):
    caplog.set_level("INFO", logger="voxtune")
    (tmp_path / "train.json").write_text(json.dumps({"data": {"images": str(data), "masks": str(data)}, "steps": 50}))
    result = voxtune.train(config=tmp_path / "train.json", out=tmp_path / "run", steps=1, settings=FAST, **TINY)
    assert result.steps == 1
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(set(lines)) and any("3 subjects" in line for line in lines), lines


NETWORK = nn.Conv3d(1, 1, 1).eval()
REFUSED = [
    ("train", {}, "missing output folder"),
    ("train", {"out": 5}, "out: expected a path, got int"),
    ("train", {"out": "run", "resume": "run"}, "cannot be combined"),
    ("train", {"out": "run", "images": ["a"], "masks": "b"}, "images: expected a path, got list"),
    ("train", {"out": "run", "images": "a"}, "masks is missing"),
    ("train", {"out": "run", "images": "absent", "masks": "absent"}, "no such folder"),
    ("train", {"out": "run", "cohort": "2"}, "cohort: expected int, got '2'"),
    ("train", {"out": "run", "cohort": 2, "steps": "ten"}, "steps: expected int, got 'ten'"),
    ("train", {"out": "run", "cohort": 2, "steps": True}, "steps: expected int, got 'True'"),
    ("train", {"out": "run", "cohort": 2, "steps": -1}, "steps -1"),
    ("train", {"out": "run", "cohort": 2, "batch": 0}, "batch 0"),
    ("train", {"out": "run", "cohort": 2, "seed": -1}, "seed"),
    ("train", {"out": "run", "cohort": 2, "learning_rate": float("nan")}, "learning_rate"),
    ("train", {"out": "run", "images": ".", "masks": ".", "labels": 3}, "labels: expected text, got int"),
    ("train", {"out": "run", "images": ".", "masks": ".", "labels": "brain"}, "brain"),
    (
        "train",
        {"out": "run", "images": ".", "masks": ".", "overlapping_labels": 1},
        "overlapping_labels: expected bool",
    ),
    (
        "train",
        {"out": "run", "cohort": 2, "image": 3},
        "image: expected text such as 't1,t2' or a list of names, got int",
    ),
    ("train", {"out": "run", "cohort": 2, "image": ["t1", "T1w"]}, "T1w is given twice"),
    ("train", {"out": "run", "images": ".", "masks": ".", "image": ["t1", 2]}, "image: expected text"),
    ("train", {"out": "run", "cohort": 2, "image": "t1,t1w"}, "T1w is given twice"),
    ("train", {"out": "run", "cohort": 2, "size": 64}, "size: expected a list, got 64"),
    ("train", {"out": "run", "cohort": 2, "loss": "l3"}, "loss: 'l3' is not one of"),
    ("train", {"out": "run", "cohort": 2, "workload": "unet"}, "unknown workload"),
    ("train", {"out": "run", "cohort": 2, "workload": "segment"}, "voxtune train --workload segment"),
    ("train", {"out": "run", "cohort": 2, "settings": {"speed": 1}}, "unknown setting 'speed'"),
    ("train", {"out": "run", "cohort": 2, "settings": ["ema_decay=1"]}, "settings: expected a mapping"),
    ("train", {"out": "run", "cohort": 2, "progress": True}, "progress: expected a function"),
    ("train", {"out": "run", "cohort": 2, "stop": 3}, "stop: expected a function"),
    ("train", {"out": "run", "cohort": 2, "device": "gpu"}, "device 'gpu'"),
    ("train", {"resume": "absent"}, "not a training run"),
    ("train", {"out": "run", "config": "absent.yaml"}, "no such file"),
    ("evaluate", {"reference": None, "synthetic": "b"}, "reference: expected a path, got NoneType"),
    ("evaluate", {"reference": "absent", "synthetic": "absent"}, "no such folder"),
    ("evaluate", {"reference": ".", "synthetic": ".", "masks": 5}, "masks: expected a path, got int"),
    ("evaluate", {"reference": ".", "synthetic": ".", "resamples": "all"}, "resamples: expected int"),
    ("evaluate", {"reference": ".", "synthetic": ".", "resamples": 1}, "resamples must be 10"),
    ("evaluate", {"reference": ".", "synthetic": ".", "seed": -1}, "seed"),
    ("evaluate", {"reference": ".", "synthetic": ".", "max_pairs": 0}, "max_pairs 0"),
    ("evaluate", {"reference": ".", "synthetic": ".", "image": 1}, "image: expected str"),
    ("evaluate", {"reference": ".", "synthetic": ".", "device": 3}, "device 3"),
    ("view", {"folder": 5}, "folder: expected a path, got int"),
    ("view", {"folder": "."}, "no volumes"),
    ("view", {"folder": "absent"}, "absent"),
    ("view", {"folder": ".", "out": "page.pdf"}, "must end in .html"),
    ("view", {"folder": ".", "limit": 0}, "limit 0"),
    ("view", {"folder": ".", "limit": True}, "limit: expected int"),
    ("load", {"path": 5}, "path: expected a path, got int"),
    ("load", {"path": None}, "path: expected a path, got NoneType"),
    ("load", {"path": "no-such-model"}, "no such model"),
    ("load", {"path": "demo", "device": "gpu"}, "device 'gpu'"),
    ("load", {"path": "demo", "device": None}, "device None"),
    ("load", {"path": "demo", "device": "cuda:99"}, "device cuda:99"),
    ("optimize", {"model": "demo"}, "requires a torch.nn.Module or a voxtune.Model, got str"),
    ("optimize", {"model": NETWORK}, "missing example_inputs"),
    ("optimize", {"model": NETWORK, "example_inputs": "x.pt"}, "example_inputs: expected tensors, got str"),
    ("optimize", {"model": NETWORK, "example_inputs": []}, "no tensor"),
    ("optimize", {"model": NETWORK, "example_inputs": torch.zeros(1, 1, 4, 4, 4), "plan": 5}, "plan: expected"),
    (
        "optimize",
        {"model": NETWORK, "example_inputs": torch.zeros(1, 1, 4, 4, 4), "plan": "absent.json"},
        "absent.json",
    ),
]


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSED)
def test_wrong_values_are_input_errors(function, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        getattr(voxtune, function)(**arguments)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir()), "nothing is written"


def test_the_name_of_every_option_is_that_of_the_command():
    """Keywords are options of the command; the exceptions are functions, and values that Python does not pass as text."""
    import typer.main

    from voxtune.cli.main import app

    commands = typer.main.get_command(app).commands
    only_python = {"progress", "stop", "settings", "reference", "synthetic"}
    only_command = {"json", "quiet", "set", "lr", "dry_run", "real", "synth", "sheet", "record_paths"}
    # In Python: voxtune.evaluation.blind.write_blind.
    only_command |= {"blind", "blind_pairs"}
    for name in ("train", "evaluate", "view"):
        keywords = set(inspect.signature(getattr(voxtune, name)).parameters) - only_python
        options: set[str] = set()
        for parameter in commands[name].params:
            spellings = [text.removeprefix("--").replace("-", "_") for text in parameter.opts if text.startswith("--")]
            options |= set(spellings or [parameter.name])
        assert keywords <= options, (name, keywords - options)
        assert options - keywords <= only_command, (name, options - keywords)


@pytest.mark.parametrize("name", [name for name in voxtune.__all__ if callable(getattr(voxtune, name))])
def test_public_names_are_documented_and_typed(name):
    item = getattr(voxtune, name)
    assert inspect.getdoc(item) and f"::: voxtune.{name}\n" in (ROOT / "docs" / "reference" / "api.md").read_text()
    functions = (
        [item]
        if inspect.isfunction(item)
        else [
            f
            for n, f in vars(item).items()
            if inspect.isfunction(f) and not n.startswith("_") and f.__module__.startswith("voxtune")
        ]
    )
    for function in functions:
        hints = function.__annotations__
        missing = set(inspect.signature(function).parameters) - {"self", "cls"} - hints.keys()
        assert not missing and "return" in hints, (function, missing)
        assert inspect.getdoc(function), function


def test_the_import_is_fast_and_light():
    code = """
import sys, voxtune
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert set(voxtune.__all__) <= set(dir(voxtune))
import voxtune.training, voxtune.evaluation, voxtune.api
assert callable(voxtune.train) and callable(voxtune.evaluate) and callable(voxtune.view)
assert voxtune.training.__name__ == "voxtune.training"
unwanted = {"nibabel", "scipy", "nilearn", "pandas", "typer", "rich", "PIL", "matplotlib"} & set(sys.modules)
assert not unwanted, unwanted
"""
    subprocess.run([sys.executable, "-c", code], check=True)


TYPED = """
import numpy as np
import voxtune

model: voxtune.Model = voxtune.load("demo", device="cpu")
volume: voxtune.Volume = model.draw("sub-01_dseg.nii.gz", steps=5, seed=0)
again = model.draw(volume.array.astype(np.int32), volume.affine, sampler="ddim", size=(64, 64, 64))
path = volume.save("out.nii.gz")
for name, image in model.draw_images(path).items():
    print(name.upper(), image.spacing[0] + 1.0)
result = voxtune.train(images="data", masks="data", image=["t1"], out="runs/mine", steps=10, size=(32, 32, 32), loss="l1")
print(result.model.name, result.step + 1)
evaluation = voxtune.evaluate("data", "out", masks="data", resamples=100)
print(evaluation["psnr"].value + 1.0, evaluation.counts)
page = voxtune.view("out", out="view.html", limit=3)
print(page.name)
"""
WRONG = (
    TYPED
    + """
voxtune.view("out").upper()
voxtune.train(out="runs/mine", steps="ten")
model.draw(5)
"""
)


@pytest.mark.slow
def test_a_type_checker_accepts_the_example(tmp_path):
    errors = []
    for name, text in {"good": TYPED, "wrong": WRONG}.items():
        (tmp_path / f"{name}.py").write_text(text)
        command = [sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", tmp_path / f"{name}.py"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        errors.append([line for line in done.stdout.splitlines() if ": error:" in line])
    assert errors[0] == [] and len(errors[1]) == 3, errors


def test_the_types_of_the_functions_resolve():
    for name in ("train", "evaluate", "view", "load"):
        hints = typing.get_type_hints(getattr(voxtune, name))
        assert "return" in hints and hints["return"] is not typing.Any
