"""The commands from a user's view: what they print and write, and how they fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import typer

import voxtune
from tests.factories.cli import CHECKPOINT, run
from tests.factories.nifti import write_mask
from voxtune.cli.choices import OLD_OPTIONS, REGISTRIES
from voxtune.cli.common import EXIT_CODES
from voxtune.cli.main import COMMANDS, app
from voxtune.config import to_mapping
from voxtune.diffusion import SAMPLERS
from voxtune.runtime.sampling import AutoSampling, Evidence
from voxtune.runtime.storage import store_auto


@pytest.fixture
def model(imported_model):
    return imported_model


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_lists_every_command(capsys, arguments):
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    for name in COMMANDS:
        assert name in out


def test_version_and_module(capsys):
    assert run(capsys, "--version")[1].startswith("voxtune ")
    done = subprocess.run([sys.executable, "-m", "voxtune", "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("voxtune ")


def test_help_lists_the_choices_of_every_registry(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    texts = {name: run(capsys, name, "--help")[1] for name in COMMANDS}
    used = {
        "sample": ("sampler", "timestep_spacing", "noise", "fit"),
        "generate": ("engine", "sampler", "timestep_spacing", "fit"),
        "usefulness": ("sampler", "timestep_spacing"),
        "steps": ("sampler", "timestep_spacing"),
        "train": ("trainable", "decay", "loss", "precision", "training_plan", "autocast"),
        "profile": ("workload", "configuration", "tier"),
        "study": ("workload", "configuration", "study"),
        "estimate": ("workload", "estimate", "gpu"),
    }
    for name, kinds in used.items():
        for kind in kinds:
            assert ", ".join(REGISTRIES[kind]()) in texts[name], (name, kind)
    assert {kind for kinds in used.values() for kind in kinds} == set(REGISTRIES)
    for name, text in texts.items():
        assert not re.search(r"\{[a-z_]+\}", text.split("╭", 2)[-1]), f"{name}: a name was not replaced"


@pytest.mark.parametrize("name", COMMANDS)
def test_option_names_are_the_same_everywhere(name):
    command = typer.main.get_command(app).commands[name]
    options = {o for p in command.params if not getattr(p, "hidden", False) for o in p.opts}
    assert not options & set(OLD_OPTIONS)
    assert ("-o" in options) == ("--out" in options)


def test_deprecated_spellings_still_work(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for old in (["--output", "x.html"], ["--output=x.html"]):
        code, _, err = run(capsys, "report", "nowhere", *old)
        warning, error = err.splitlines()
        assert code == 2 and warning == "warning: --output is deprecated; use --out" and "nowhere" in error
    assert "--output" not in run(capsys, "report", "--help")[1]
    for command in ("sample", "usefulness"):
        code, _, err = run(capsys, command, "nowhere", "-o", "x", "--spacing", "karras")
        assert code == 2 and err.startswith(
            "warning: --spacing is deprecated; use --timestep-spacing (the spacing of the timesteps; "
        )
        assert "unknown timestep spacing" in err
    code, _, err = run(capsys, "steps", "nowhere", "-o", "x", "--spacings=karras")
    assert code == 2 and err.startswith("warning: --spacings is deprecated; use --timestep-spacings\n")
    code, _, err = run(capsys, "report", "nowhere", "--window", "seed")
    assert code == 2 and err.startswith("warning: --window seed is deprecated; use --window paper\n")
    code, _, err = run(capsys, "study", "seed", "--size", "1,two")
    assert code == 2 and err.startswith("warning: seed is deprecated; use paper\n")


def test_shell_completion():
    def complete(**variables):
        command = [sys.executable, "-m", "voxtune"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
        assert done.returncode == 0, done.stderr
        return done.stdout

    script = complete(_VOXTUNE_COMPLETE="source_bash")
    assert "_VOXTUNE_COMPLETE=complete_bash" in script and "complete -o default -F" in script
    commands = complete(_VOXTUNE_COMPLETE="complete_bash", COMP_WORDS="voxtune ", COMP_CWORD="1")
    assert set(COMMANDS) <= set(commands.split())
    samplers = complete(_VOXTUNE_COMPLETE="complete_bash", COMP_WORDS="voxtune sample --sampler d", COMP_CWORD="3")
    assert samplers.split() == [name for name in SAMPLERS if name.startswith("d")]


def test_completion_script_is_shown_for_the_current_shell():
    command = f"{sys.executable} -m voxtune --show-completion; exit $?"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "_VOXTUNE_COMPLETE" in done.stdout


def test_internal_error_is_exit_1(capsys, monkeypatch):
    from voxtune.runtime import doctor

    def broken():
        raise RuntimeError("a defect")

    monkeypatch.setattr(doctor, "examine", broken)
    code, _, err = run(capsys, "doctor")
    assert code == 1 and "RuntimeError: a defect" in err
    assert err.endswith("voxtune: error: internal error; please report it with the traceback above\n")


def test_doctor_exits_with_3_if_a_problem_is_found(capsys, monkeypatch):
    from voxtune.runtime import doctor

    monkeypatch.setattr(doctor, "wrong_half_conv3d", lambda version: True)
    monkeypatch.setattr(doctor.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(doctor.torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(doctor.torch.backends.cudnn, "version", lambda: 91000)
    monkeypatch.setattr(doctor, "_arithmetic", lambda: iter(()))
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 3 and json.loads(out)["verdict"] == "error"


def test_exit_codes_are_in_the_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    text = run(capsys, "--help")[1]
    for code, meaning in EXIT_CODES.items():
        assert f"{code} {meaning}" in text


def test_import_then_info(capsys, model):
    code, out, _ = run(capsys, "info", model, "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["parameters"] == 1_773_281
    assert facts["size"] == [16, 16, 16]
    assert "voxtune sample" in (model / "README.md").read_text()


def test_info_of_a_published_workload(capsys):
    code, out, _ = run(capsys, "info", "med-ddpm", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["parameters"] == 40_226_433
    assert 5.5e12 < facts["flop_per_step"] < 5.6e12


def test_info_names_the_start_the_axes_and_the_images(capsys):
    _, out, _ = run(capsys, "info", "demo")
    assert "250 steps, sampling starts at step 235 (236 steps available)" in out
    assert "64 x 64 x 64 (D x H x W)" in out and "spacing 3 x 3 x 3 mm (D x H x W), orientation RAS" in out
    _, out, _ = run(capsys, "info", "med-ddpm-brats")
    assert "workload    med-ddpm-brats" in out and "T1w, T1ce, T2w, FLAIR" in out
    code, _, err = run(capsys, "info", "segment")
    assert code == 2 and "med-ddpm, med-ddpm-brats, convnext" in err


def test_info_shows_the_default_settings_of_sample(capsys):
    demo = Path(voxtune.__file__).parent / "models" / "demo"
    settings = voxtune.load(demo).resolve()
    assert json.loads(run(capsys, "info", demo, "--json")[1])["sampling"] == settings.record()
    assert settings.describe() in run(capsys, "info", demo)[1]


def test_info_sample_and_sidecar_agree_on_the_settings(capsys, model, tmp_path):
    folder, mask = shutil.copytree(model, tmp_path / "model"), write_mask(tmp_path / "sub-1_dseg.nii.gz")
    evidence = Evidence(file="steps.json", sha256="0" * 64, subjects=64, summary="made up")
    auto = AutoSampling(sampler="sde-dpm++", steps=2, timestep_spacing="logsnr", clip=False, evidence=evidence)
    store_auto(folder, auto)
    line = "sde-dpm++, 2 steps, logsnr timesteps, not clamped (stored by voxtune steps, measured on 64 subjects)"
    assert line in run(capsys, "info", folder)[1]
    command = ("sample", folder, "--mask", mask, "--device", "cpu")
    code, out, err = run(capsys, *command, "-o", tmp_path / "a")
    assert code == 0 and line in out and "evidence" not in err, err
    [sidecar] = (tmp_path / "a").rglob("sub-1_*.json")
    record = json.loads(sidecar.read_text())
    described = json.loads(run(capsys, "info", folder, "--json")[1])["sampling"]
    assert {name: record[name] for name in described} == described == auto.record()
    # Another number of steps keeps the rest, and its evidence is not that of the stored settings.
    code, out, err = run(capsys, *command, "-o", tmp_path / "b", "--steps", "3")
    assert code == 0 and "sde-dpm++, 3 steps, logsnr timesteps, not clamped, seed" in out
    assert err.count("the stored evidence is for sde-dpm++, 2 steps") == 1
    record = json.loads(next((tmp_path / "b").rglob("sub-1_*.json")).read_text())
    assert (record["sampler"], record["steps"], record["timestep_spacing"]) == ("sde-dpm++", 3, "logsnr")
    assert record["clip"] is False and "steps_auto" not in record


def test_a_dry_run_says_what_sample_does_and_writes_nothing(capsys, model, tmp_path):
    masks = [write_mask(tmp_path / name) for name in ("sub-1_ses-2_dseg.nii.gz", "case_12_seg.nii.gz")]
    before = sorted(tmp_path.rglob("*"))
    command = ("sample", model, "--mask", masks[0], "--mask", masks[1], "-o", tmp_path / "out", "--steps", "2")
    command = (*command, "--device", "cpu", "--count", "2", "--seed", "7", "--picture", "--plan", "baseline")
    code, out, err = run(capsys, *command, "--dry-run")
    assert code == 0, err
    assert "would generate 4 volumes with ddpm, 2 steps, trailing timesteps, seed 7, noise by identity" in out
    assert f"would write {tmp_path}/out/sub-case12/anat/sub-case12_desc-synth02_T1w.nii.gz" in out
    code, out, err = run(capsys, *command, "--dry-run", "--json")
    planned = json.loads(out)
    assert code == 0 and planned["dry_run"] is True and sorted(tmp_path.rglob("*")) == before
    code, out, err = run(capsys, *command, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert result["batch"] == 1 and planned["batch"] == "auto"
    for name in ("sampler", "steps", "cache", "settings", "seed"):
        assert planned[name] == result[name], name
    for would, did in zip(planned["volumes"], result["volumes"], strict=True):
        placement = would.pop("placement")
        assert would == did
        sidecar = json.loads(Path(did["files"][0].replace(".nii.gz", ".json")).read_text())
        assert sidecar["placement"] == placement and sidecar["index"] == did["index"]
        assert {name: sidecar[name] for name in result["settings"]} == result["settings"]
        assert all(Path(file).exists() for file in did["files"])
    code, out, err = run(capsys, *command, "--dry-run", "--json", "--flat", "--noise", "position")
    flat = json.loads(out)["volumes"]
    assert code == 0 and [volume["index"] for volume in flat] == [0, 1, 2, 3]
    assert flat[2]["files"][0] == f"{tmp_path}/out/case_12_desc-synth01_T1w.nii.gz"


def test_a_dry_run_lists_the_files_that_are_not_replaced(capsys, model, tmp_path):
    mask, there = write_mask(tmp_path / "m_dseg.nii.gz"), tmp_path / "out" / "m_desc-synth02_T1w.nii.gz"
    there.parent.mkdir()
    there.write_bytes(b"a volume")
    command = ("sample", model, "--mask", mask, "--count", "2", "-o", tmp_path / "out", "--flat", "--dry-run")
    code, out, err = run(capsys, *command)
    assert code == 0 and f"{there} exists already; sample would refuse without --overwrite" in out, err
    assert out.count("exists already") == 1 and "would generate 2 volumes" in out
    assert json.loads(run(capsys, *command, "--json")[1])["existing"] == [str(there)]
    assert json.loads(run(capsys, *command, "--json", "--overwrite")[1])["existing"] == []
    assert there.read_bytes() == b"a volume" and list(there.parent.iterdir()) == [there]


@pytest.mark.slow
def test_sample_chooses_the_batch(capsys, model, tmp_path):
    for i in range(7):
        write_mask(tmp_path / f"sub-{i}_dseg.nii.gz")
    command = ("sample", model, "--mask", tmp_path, "--steps", "10", "--device", "cpu", "--plan", "baseline")
    volumes = {}
    for name, options in {"auto": (), "four": ("--batch", "4"), "one": ("--batch", "1")}.items():
        code, out, err = run(capsys, *command, "-o", tmp_path / name, *options)
        assert code == 0, err
        assert ("seconds per step and volume: 1: " in out) == (name == "auto")
        files = sorted((tmp_path / name).rglob("*.nii.gz"))
        volumes[name] = np.stack([nib.load(file).get_fdata() for file in files])
    np.testing.assert_allclose(volumes["auto"], volumes["one"], atol=1e-4)
    np.testing.assert_allclose(volumes["four"], volumes["one"], atol=1e-4)
    for value in ("0", "many", "-1", "1.5"):
        code, _, err = run(capsys, *command, "-o", tmp_path / "x", f"--batch={value}")
        assert code == 2 and "must be a whole number >= 1, or auto" in err


def test_sample_uses_the_given_spacing_and_clipping(capsys, model, tmp_path):
    mask = write_mask(tmp_path / "sub-1_dseg.nii.gz")
    arguments = (
        "sample",
        model,
        "--mask",
        mask,
        "--sampler",
        "ddim",
        "--steps",
        "3",
        "--plan",
        "baseline",
        "--device",
        "cpu",
    )
    variants = {"plain": (), "logsnr": ("--timestep-spacing", "logsnr"), "free": ("--no-clip",)}
    volumes = {}
    for name, more in variants.items():
        code, _, err = run(capsys, *arguments, *more, "-o", tmp_path / name)
        assert code == 0, err
        [sidecar] = (tmp_path / name).rglob("sub-1_*.json")
        record = json.loads(sidecar.read_text())
        assert (record["timestep_spacing"], record["clip"]) == (
            "logsnr" if name == "logsnr" else "trailing",
            name != "free",
        )
        volumes[name] = nib.load(sidecar.with_suffix(".nii.gz")).get_fdata()
    assert not np.array_equal(volumes["plain"], volumes["logsnr"])
    assert not np.array_equal(volumes["plain"], volumes["free"])
    code, _, err = run(capsys, *arguments, "--timestep-spacing", "karras", "-o", tmp_path / "out")
    assert code == 2 and "unknown timestep spacing 'karras'" in err and not (tmp_path / "out").exists()


def test_sample_writes_on_the_masks_grid(capsys, model, tmp_path):
    mask = write_mask(tmp_path / "sub-9_dseg.nii.gz")
    arguments = ("sample", model, "--mask", mask, "-o", tmp_path / "out", "--steps", "2", "--picture", "--json")
    code, out, err = run(capsys, *arguments)
    assert code == 0, err
    [volume] = json.loads(out)["volumes"]
    nifti, picture = volume["files"]
    assert nib.load(nifti).shape == nib.load(mask).shape
    assert picture.endswith(".png")
    first = nib.load(nifti).get_fdata()
    assert run(capsys, *arguments, "--overwrite")[0] == 0
    np.testing.assert_array_equal(first, nib.load(nifti).get_fdata())


def test_cohort_is_bids(capsys, tmp_path):
    code, out, _ = run(capsys, "cohort", 2, "-o", tmp_path / "c", "--size", "16,16,16", "--json")
    assert code == 0
    assert len(json.loads(out)["subjects"]) == 2
    assert json.loads((tmp_path / "c" / "dataset_description.json").read_text())["GeneratedBy"]
    assert len(list((tmp_path / "c").rglob("*_T1w.nii.gz"))) == 2
    code, out, _ = run(capsys, "cohort", 1, "--first", 1, "-o", tmp_path / "d", "--size", "16,16,16", "--json")
    assert code == 0 and json.loads(out)["subjects"] == ["sub-0001"]
    same = [next((tmp_path / folder).rglob("sub-0001_T1w.nii.gz")).read_bytes() for folder in "cd"]
    assert same[0] == same[1]
    assert "\t1\t" in (tmp_path / "d" / "participants.tsv").read_text()


def test_doctor_lists_its_checks(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0
    names = {check["name"] for check in json.loads(out)["checks"]}
    assert {"python", "torch", "conv3d float32", "nsight compute"} <= names


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["frobnicate"], "frobnicate"),
        (["sample"], "model"),
        (["sample", "nowhere", "-m", "x", "-o", "y"], "nowhere"),
        (["info", "med-dpm"], "med-dpm"),
        (["import", "nothing.pt", "-o", "x"], "nothing.pt"),
        (["cohort", "0", "-o", "x"], "count"),
        (["cohort", "1", "-o", "x", "--size", "1,two"], "two"),
        (["info", "med-ddpm", "--size", "100,100,100"], "16"),
        (["sample", CHECKPOINT, "-m", CHECKPOINT, "-o", "x"], "med_ddpm_tiny.pt"),
        (["sample", CHECKPOINT, "-m", "x", "-o", "y", "--device", "tpu"], "tpu"),
        (
            ["sample", "m", "-o", "x", "--sampler", "no-such-sampler"],
            "unknown sampler 'no-such-sampler'; choose from ddpm, ",
        ),
        (["sample", "m", "-o", "x", "--fit", "stretch"], "unknown fit 'stretch'; choose from auto, pad, resample"),
        (
            ["usefulness", "m", "-o", "x", "--timestep-spacing", "karras"],
            "unknown timestep spacing 'karras'; choose from trailing, ",
        ),
        (["train", "--cohort", "1", "-o", "x", "--autocast", "fp8"], "fp8"),
        (["estimate", "resnet"], "unknown workload 'resnet'; choose from med-ddpm, "),
        (["estimate", "convnext", "--mode", "infer"], "infer"),
        (["estimate", "convnext", "--gpu", "k80"], "k80"),
        (["profile", "convnext", "--mode", "infer", "-o", "x"], "infer"),
        (["study", "other"], "unknown study 'other'; choose from paper"),
        (["report", "--format", "pdf"], "pdf"),
        (["report", "x", "--window", "100"], "unknown window '100'; choose from paper"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(capsys, tmp_path, monkeypatch, arguments, word):
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert err.count("\n") == 1
    assert err.startswith("voxtune: error: ")
    assert word in err
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_unwritable_folder(capsys, model, tmp_path):
    mask = write_mask(tmp_path / "m.nii.gz")
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, _, err = run(capsys, "sample", model, "-m", mask, "-o", blocked / "out", "--steps", "1")
    assert code == 2
    assert str(blocked) in err


def test_broken_pipe_is_quiet(model):
    shell = f"{shutil.which('env')} {sys.executable} -m voxtune info {model} | true"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", shell], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_training_with_worker_processes_for_the_cohort(tmp_path):
    """Started as a module, which the worker processes import again."""
    arguments = "--cohort 4 --size 16,16,16 --base 32 --multipliers 1,1 --steps 1 --batch 2 --sample-every 0 --quiet"
    command = [
        sys.executable,
        "-m",
        "voxtune",
        "train",
        *arguments.split(),
        "--set",
        "workers=3",
        "-o",
        tmp_path / "run",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_ctrl_c_exits_with_130(tmp_path):
    arguments = ["cohort", "500", "-o", str(tmp_path / "c"), "--size", "64,64,64"]
    # The shell that started the tests may ignore the signal.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{start}; import sys; sys.argv[1:] = {arguments!r}; from voxtune.__main__ import run; run()"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "c").is_dir() and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert "interrupted" in process.communicate(timeout=60)[1] and process.returncode == 130


def test_sample_warns_in_one_line_of_masks_unlike_the_training_data(capsys, imported_model, tmp_path):
    model = shutil.copytree(imported_model, tmp_path / "model")
    masks = [write_mask(tmp_path / f"sub-0{n}_dseg.nii.gz") for n in (1, 2)]
    config = json.loads((model / "config.json").read_text())
    data = to_mapping(voxtune.load("demo").config.training_data)
    for labelled_ml, lines in ((760.0, 0), (250.0, 1)):
        statistics = {**data, "labelled_ml": dict.fromkeys(data["labelled_ml"], labelled_ml)}
        statistics["extent_mm"] = [dict.fromkeys(data["labelled_ml"], mm) for mm in (60.0, 132.0, 96.0)]
        statistics["labels"] = []
        (model / "config.json").write_text(json.dumps({**config, "training_data": statistics}))
        options = ("--steps", 1, "--plan", "baseline", "--device", "cpu", "--overwrite")
        code, _, err = run(capsys, "sample", model, "-m", masks[0], "-m", masks[1], "-o", tmp_path / "out", *options)
        assert code == 0, err
        warnings = [line for line in err.splitlines() if "training data" in line]
        assert len(warnings) == lines, err
    assert "2 of 2 masks are far outside the training data of this model, such as" in warnings[0]
    assert "sub-01_dseg.nii.gz: labels of 760 ml in total (training: 250 ml); results may be invalid" in warnings[0]
