"""voxtune train: from folders, from a config file, stopped, resumed, with invalid options."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import voxtune
from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.training.config import read_config, setting_names
from voxtune.training.folder import read_run
from voxtune.training.log import read_metrics
from voxtune.training.model import model_config

GOOD = """\
# A small run
data:
  images: images
  masks: masks
  labels:
    - {name: brain, value: 1, channel: 0}
    - {name: tumour, value: 2, channel: 1}
  spacing: [2.0, 2, 2.5]
  orientation: LAS
model:
  size: [8, 8, 8]
  base: 32
  multipliers: [1]
  attention: []
  diffusion_steps: 10
steps: 4
batch: 2
accumulation: 1
learning_rate: 1e-3
clip: 1.0
checkpoint_every: 2
log_every: 1
sample_every: 4
sample_steps: 2
tensorboard: no
"""
TINY = ["--size", "8,8,8", "--base", "32", "--multipliers", "1", "--batch", "2", "--accumulation", "1"]
TINY += ["--lr", "1e-3", "--device", "cpu", "--set", "model.diffusion_steps=10", "--set", "tensorboard=false"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three subjects as NIfTI, image and mask in two folders."""
    nibabel = pytest.importorskip("nibabel")
    root = tmp_path_factory.mktemp("data")
    for name in ("images", "masks"):
        (root / name).mkdir()
    for subject in range(3):
        rng = np.random.default_rng(subject)
        labels = np.zeros((8, 8, 8), np.uint8)
        labels[2:6, 2:6, 2:6] = 1
        labels[3:5, 3:5, 2 + subject] = 2
        image = (labels * 40 + rng.uniform(0, 5, labels.shape)).astype(np.float32)
        affine = np.diag([24.0, 24.0, 24.0, 1.0])
        nibabel.save(nibabel.Nifti1Image(image, affine), root / "images" / f"sub-{subject}_T1w.nii.gz")
        nibabel.save(nibabel.Nifti1Image(labels, affine), root / "masks" / f"sub-{subject}_dseg.nii.gz")
    return root


def from_folders(folders: Path, out: Path, *more: str) -> list[str]:
    data = ["--images", str(folders / "images"), "--masks", str(folders / "masks")]
    return ["train", *data, "-o", str(out), *TINY, *more]


def refused(capsys, *arguments: str) -> str:
    assert main(["train", *arguments]) == 2
    title, *rows = capsys.readouterr().err.strip().splitlines()
    assert title.startswith("voxtune: error: ") and title.endswith(" files cannot be used:") == bool(rows)
    return "\n".join([title, *rows])


@pytest.mark.usefixtures("one_thread")
def test_trains_from_folders_and_samples(folders, tmp_path, capsys):
    assert main(from_folders(folders, tmp_path / "run", "--steps", "4", "--sample-every", "4")) == 0
    out = capsys.readouterr().out
    assert "Trained 4 steps" in out
    assert str(tmp_path / "run" / "model") in out
    model = voxtune.load(tmp_path / "run" / "model")
    assert model.config.data.values == (1, 2)
    assert (tmp_path / "run" / "samples" / "step-00000004.png").exists()
    assert "images of `images`, masks of `masks`" in (tmp_path / "run" / "model" / "README.md").read_text()


@pytest.mark.usefixtures("one_thread")
def test_options_override_the_config_file(folders, tmp_path, capsys):
    (tmp_path / "train.yaml").write_text(GOOD.replace("images: images", f"images: {folders}/images"))
    arguments = ["-c", str(tmp_path / "train.yaml"), "-o", str(tmp_path / "run"), "--device", "cpu", "--json"]
    options = ["--masks", str(folders / "masks"), "--steps", "3", "--set", "data.orientation=RAS", "--set", "clip=null"]
    assert main(["train", *arguments, *options, "--set", "data.spacing=[24, 24, 24]"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["step"], printed["stopped"]) == (3, False)
    config = read_run(tmp_path / "run")
    assert (config.steps, config.clip, config.learning_rate, config.data.orientation) == (3, None, 1e-3, "RAS")
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "4", "--quiet", "--device", "cpu"]) == 0
    assert capsys.readouterr() == ("", "")
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.usefixtures("one_thread")
def test_cohort(tmp_path):
    pytest.importorskip("nilearn")
    assert main(["train", "--cohort", "1", "-o", str(tmp_path / "run"), *TINY, "--steps", "1", "--quiet"]) == 0
    assert (
        "1 simulated subjects of the embedded cohort, seed 0" in (tmp_path / "run" / "model" / "README.md").read_text()
    )


def test_invalid_options_are_errors(folders, tmp_path, capsys):
    out = ["-o", str(tmp_path / "run")]
    assert "missing output folder" in refused(capsys, "--cohort", "2")
    assert "no data" in refused(capsys, *out, *TINY)
    assert "convnext" in refused(capsys, *out, "--workload", "convnext", "--cohort", "2")
    assert "cannot be combined" in refused(capsys, *out, "--cohort", "2", "--images", "a", "--masks", "b")
    assert "masks is missing" in refused(capsys, *out, "--images", "a")
    assert "--size" in refused(capsys, *out, "--cohort", "2", "--size", "8,8,x")
    assert "--labels" in refused(capsys, *out, "--cohort", "2", "--labels", "brain")
    assert "--multipliers" in refused(capsys, *out, "--cohort", "2", "--multipliers", "1,a")
    assert "steps -1" in refused(capsys, *out, "--cohort", "2", "--steps", "-1")
    assert "loss: 'l3'" in refused(capsys, *out, "--cohort", "2", "--loss", "l3")
    assert "NAME=VALUE" in refused(capsys, *out, "--cohort", "2", "--set", "speed=1")
    assert "not a training run" in refused(capsys, "--resume", str(tmp_path))
    assert "--resume cannot be combined with --config" in refused(capsys, "--resume", str(tmp_path), "-c", "x.yaml")
    assert "absent.yaml" in refused(capsys, *out, "-c", str(tmp_path / "absent.yaml"))
    assert "no such model" in refused(capsys, *out, "--cohort", "2", "--init", str(tmp_path / "absent"))
    unknown = from_folders(folders, tmp_path / "run", "--labels", "brain=1")
    assert "label 2 is not in --labels brain=1" in refused(capsys, *unknown[1:])
    assert not (tmp_path / "run").exists(), "no folder is left behind"


def start(arguments: list[str]) -> subprocess.Popen:
    program = (
        "import sys, torch; torch.set_num_threads(1); from voxtune.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_rows(process: subprocess.Popen, out: Path, count: int) -> None:
    deadline = time.monotonic() + 300
    while len(read_metrics(out / "metrics.jsonl")) < count and process.poll() is None:
        assert time.monotonic() < deadline, "no progress"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX signals")
def test_killed_stopped_and_resumed_by_the_command(folders, tmp_path):
    """SIGKILL, then SIGTERM, then to the end: the same bits as an uninterrupted run."""
    intervals = ["--steps", "16", "--checkpoint-every", "3", "--sample-every", "0", "--set", "log_every=1"]
    process = start(from_folders(folders, tmp_path / "run", *intervals))
    wait_for_rows(process, tmp_path / "run", 4)
    process.kill()
    assert process.wait(300) == -signal.SIGKILL
    process = start(["train", "--resume", str(tmp_path / "run"), "--device", "cpu"])
    wait_for_rows(process, tmp_path / "run", 7)
    process.terminate()
    stdout, _ = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert f"voxtune train --resume {tmp_path / 'run'}" in stdout
    last, uninterrupted = (
        ["train", "--resume", str(tmp_path / "run")],
        from_folders(folders, tmp_path / "uninterrupted", *intervals),
    )
    both = [start([*last, "--device", "cpu"]), start(uninterrupted)]
    assert [p.communicate(timeout=300) and p.returncode for p in both] == [0, 0]
    stored = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("run", "uninterrupted")]
    assert stored[0] == stored[1]
    steps = [
        [row["step"] for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("run", "uninterrupted")
    ]
    assert steps[0] == steps[1] == list(range(1, 17))


def test_every_setting_of_the_file_is_documented():
    guide = Path(__file__).parents[2] / "docs" / "guide"
    for name in setting_names():
        page = guide / ("distillation.md" if name.startswith("distill.") else "training.md")
        assert f"`{name}`" in page.read_text(), f"{page} does not explain {name}"


def outcome(path: Path) -> bool:
    """True for a config that was taken, False for one that was refused in one line that names the file."""
    try:
        model_config(read_config(path))
    except InputError as error:
        assert len(str(error)) < 1500
        return False
    return True


def test_the_valid_config_is_valid(tmp_path):
    (tmp_path / "train.yaml").write_text(GOOD)
    config = read_config(tmp_path / "train.yaml")
    assert config.data.images == str(tmp_path / "images")
    assert model_config(config).data.spacing == (2.0, 2.0, 2.5)


def damaged(raw: bytes, seed: int) -> bytes:
    chance = random.Random(seed)
    data = bytearray(raw)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(max(1, len(data)))
        kind = chance.randrange(6)
        if kind == 0:
            del data[at : at + chance.randint(1, 40)]
        elif kind == 1 and data:
            data[at % len(data)] = chance.randrange(256)
        elif kind == 2:
            data[at:at] = chance.choice(
                [b"[", b"{", b"}", b": ", b"\n", b"- ", b"&a ", b"*a", b"!!x ", b'"', b"\t", b"\0"]
            )
        elif kind == 3:
            data[at:at] = data[at : at + chance.randint(1, 60)]
        elif kind == 4:
            data[at:at] = chance.choice([b"1e999", b"-", b"9" * 400, b".nan", b"null", b"\xff\xfe", "é".encode()])
        else:
            del data[at:]
    return bytes(data)


@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_damaged_configs_are_read_or_input_errors(tmp_path, ending):
    yaml = pytest.importorskip("yaml")
    good = GOOD if ending == "yaml" else json.dumps({**yaml.safe_load(GOOD), "learning_rate": 1e-3}, indent=1)
    path = tmp_path / f"train.{ending}"
    taken = []
    for seed in range(150):
        path.write_bytes(damaged(good.encode(), seed))
        taken.append(outcome(path))
    assert not all(taken)


HOSTILE = [
    "null", "true", "-1", "0", "1e999", ".nan", "-.inf", "9" * 400, "9" * 5000, "''", "a: b", "[]", "[[1]]", "{a: {}}",
    "2020-99-99", "2020-01-01", "!!python/object/apply:os.system ['true']", "!!bool maybe", "!!timestamp x", "!!int ''",
    "!!binary '*'", "!!set {a, b}", "&a [*a]", '"\\0"', "'" + "x" * 2000 + "'", "{? [a] : b}", "0x10", "1_0",
]  # fmt: skip


@pytest.mark.parametrize("name", setting_names())
def test_hostile_values_of_every_setting(tmp_path, name):
    section, _, key = name.rpartition(".")
    path = tmp_path / "train.yaml"
    for value in HOSTILE:
        path.write_text(f"{section}:\n  {key}: {value}\n" if section else f"{key}: {value}\n")
        outcome(path)


def test_large_files_and_aliases_are_errors(tmp_path):
    path = tmp_path / "train.yaml"
    path.write_bytes(b"#" * (2**20 + 1))
    assert not outcome(path)
    layers = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 30))
    path.write_text(f"l0: &l0 [x]\n{layers}")
    began = time.monotonic()
    assert not outcome(path)
    assert time.monotonic() - began < 20
    path.write_text("steps: " + "[" * 3000)
    assert not outcome(path)
    path.write_text("steps: 3\nsteps: 4\n")
    with pytest.raises(InputError, match=r"train.yaml: line 2: setting 'steps' is given twice"):
        read_config(path)
    (tmp_path / "train.json").write_text('{"data": {"images": "\\ud800", "masks": "m"}}')
    assert not outcome(tmp_path / "train.json")


@pytest.mark.parametrize("zero", ["model.base=0", "model.blocks=0", "model.multipliers=[]", "model.diffusion_steps=0"])
def test_zero_is_not_the_default(tmp_path, capsys, zero):
    arguments = [
        "train",
        "--cohort",
        "2",
        "--size",
        "8,8,8",
        "--set",
        zero,
        "--steps",
        "1",
        "-o",
        str(tmp_path / "run"),
    ]
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("voxtune: error: ")


def test_a_run_cannot_be_resumed_with_fewer_steps_than_done(tmp_path, capsys):
    run = tmp_path / "run"
    arguments = ["--sample-every", "0", "--checkpoint-every", "1", "--quiet", "-o", str(run)]
    # The grid must cover a brain of the cohort.
    assert main(["train", "--cohort", "2", *TINY, "--set", "data.spacing=[24,24,24]", "--steps", "3", *arguments]) == 0
    before = (run / "train.json").read_bytes()
    assert main(["train", "--resume", str(run), "--steps", "2"]) == 2
    assert "step 3" in capsys.readouterr().err
    assert (run / "train.json").read_bytes() == before


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("workload", [[], ["--workload", "segment"]])
def test_a_dry_run_prints_the_facts_and_writes_nothing(folders, tmp_path, capsys, monkeypatch, workload):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "--images", str(folders / "images"), "--masks", str(folders / "masks"), *workload]
    arguments += [
        "--labels",
        "brain=1,tumour=2",
        "--size",
        "8,8,8",
        "--batch",
        "2",
        "--steps",
        "500",
        "--device",
        "cpu",
    ]
    more = [] if workload else ["--base", "32", "--multipliers", "1"]
    assert main([*arguments, *more, "--dry-run"]) == 0
    out = capsys.readouterr().out
    lines = out.strip().splitlines()
    assert lines[-1] == "Dry run: nothing was written."
    trained, held_out = (2, "1 held out") if workload else (3, "none held out")
    assert f"subjects     {trained} for training, {held_out}" in lines
    assert f"in {trained} of the {trained} measured subjects" in out and "2 (tumour): median" in out
    assert "files        3 " in out and "from 8 x 8 x 8 at 24 x 24 x 24 mm" in out
    assert "time         about" in out and "s per step)" in out
    assert "memory       about" in out
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert main([*arguments, *more, "--dry-run", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["dry_run"] is True and data["overview"]["subjects"] == trained
    assert data["overview"]["memory_bytes"] > 0 and data["overview"]["seconds"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("one_thread")
def test_the_facts_come_before_the_first_step_and_in_the_json(folders, tmp_path, capsys):
    assert main(from_folders(folders, tmp_path / "run", "--steps", "5")) == 0
    out = capsys.readouterr().out
    assert out.index("subjects     3 for training") < out.index("memory") < out.index("time") < out.index("Trained 5")
    assert out.count("subjects     ") == out.count("time     ") == 1
    assert main(from_folders(folders, tmp_path / "again", "--steps", "3", "--json")) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["step"] == 3 and data["overview"]["subjects"] == 3 and data["overview"]["seconds_per_step"] > 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--steps", "6", "--json", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["overview"] is None
    assert "--dry-run cannot be combined with --resume" in refused(
        capsys, "--resume", str(tmp_path / "run"), "--dry-run"
    )


@pytest.mark.usefixtures("one_thread")
def test_the_plan_and_the_precision_are_options(folders, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(from_folders(folders, run, "--steps", "2", "--plan", "voxtune", "--precision", "bf16")) == 0
    out = capsys.readouterr().out
    assert "gate: gradients of 4 batches of 2 at 8 x 8 x 8" in out and "voxtune in BF16: gradient error" in out
    config = read_run(run)
    assert (config.plan, config.precision, config.autocast) == ("voxtune", "bf16", None)
    assert "voxtune in BF16" in (run / "model" / "README.md").read_text()
    for wrong, message in (
        (["--plan", "voxtune", "--autocast", "bf16"], "autocast bf16 cannot be combined with plan voxtune"),
        (["--precision", "fp32", "--autocast", "bf16"], "autocast bf16 contradicts precision fp32"),
        (["--precision", "fp16"], "'fp16' is not one of"),
        (["--plan", "baseline", "--set", "compile=true"], "compile cannot be combined with plan baseline"),
    ):
        assert message in refused(capsys, *from_folders(folders, tmp_path / "other", *wrong)[1:])
