"""Training runs and sampling jobs that take a third of a second, and checks of what a kill or a failing disk leaves of them."""

from __future__ import annotations

import gzip
import json
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image

from tests.factories import nifti
from tests.factories.kills import Commands, Done
from tests.factories.tiny_training import rows, weights
from voxtune.data.cohort import cohort_contract
from voxtune.errors import InputError
from voxtune.files import PART
from voxtune.reading import read_json
from voxtune.runtime.model import Model, ModelConfig, SamplingConfig
from voxtune.runtime.storage import load, save
from voxtune.tensorfiles import read_safetensors
from voxtune.training.checkpoint import CHECKPOINTS, checkpoints, load_weights, read_checkpoint
from voxtune.workloads import ConvNeXtConfig, MedDDPMConfig

SHAPE = (8, 8, 8)
AFFINE = np.diag([24.0, 24.0, 24.0, 1.0])
STEPS = 4
# Errors of a disk, whether they last, and at which steps a campaign has them: every step, or every third one of those that
# differ from another error in its text only. And the texts.
FAILURES = (("ENOSPC", True, 1), ("ENOSPC", False, 3), ("EIO", True, 3), ("EIO", False, 1))
REASONS = {"ENOSPC": "No space left on device", "EIO": "Input/output error"}
TRAIN = (
    *("--size", "8,8,8", "--base", "32", "--multipliers", "1", "--batch", "2", "--accumulation", "1"),
    *("--steps", str(STEPS), "--checkpoint-every", "2", "--sample-every", "2", "--lr", "1e-3", "--device", "cpu"),
    *("--set", "model.diffusion_steps=10", "--set", "model.attention=[]", "--set", "log_every=1"),
    *("--set", "sample_steps=2", "--set", "workers=0", "--set", "ema_start=2"),
)
SAMPLE = ("--steps", "2", "--batch", "2", "--device", "cpu", "--plan", "baseline", "--picture")
VOLUMES, IMAGES = 3, 5


def write_study(root: Path) -> Path:
    """Three subjects to train on."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for subject in range(3):
        labels = np.zeros(SHAPE, np.uint8)
        labels[2:6, 2:6, 2:6] = 1
        labels[3:5, 3:5, 2 + subject] = 2
        image = (labels * 40 + np.random.default_rng(subject).uniform(0, 5, labels.shape)).astype(np.float32)
        nifti.save(root / "images" / f"sub-{subject}_T1w.nii.gz", image, AFFINE)
        nifti.save(root / "masks" / f"sub-{subject}_dseg.nii.gz", labels, AFFINE)
    return root


def train(study: Path, out: Path, *more: str) -> list[str]:
    """The command of a run with a checkpoint, a picture and a model after steps 2 and 4."""
    folders = ["--images", str(study / "images"), "--masks", str(study / "masks")]
    return ["train", *folders, "-o", str(out), *TRAIN, *more]


def resume_train(commands: Commands, study: Path, out: Path, *more: str, **options: Any) -> Done:
    """Continues a run after whatever happened to it; a run without settings had not begun. `options` of `Commands.run`."""
    begun = (out / "train.json").exists()
    resumed = ["train", "--resume", str(out), "--device", "cpu", *more]
    return commands.run(resumed if begun else train(study, out, *more), **options)


def newest_step(out: Path) -> int | None:
    """The step of the newest checkpoint of a run."""
    files = checkpoints(out / CHECKPOINTS)
    return read_checkpoint(files[-1]).state.step if files else None


def check_failure(done: Done, step: str, reason: str) -> None:
    """A failing disk ends a command with one line and exit code 2, or is ignored where a file is only tidied up."""
    if done.code == 0:
        assert step.split(" ", 1)[0] in ("remove", "rmdir", "truncate"), (step, done.stderr)
        return
    lines = [line for line in done.stderr.splitlines() if line.startswith("voxtune: error")]
    assert (done.code, len(lines)) == (2, 1), (step, done.stderr)
    assert reason in lines[0] and "Traceback" not in done.stderr and len(lines[0]) < 520, (step, done.stderr)


def record_counts(record_property: Callable[[str, object], None], **counts: int) -> None:
    """The counts of a campaign whose cases all ended with the bits of an uninterrupted run; a test with a loss fails."""
    counts |= {"resumed_identical": sum(counts.values()), "lost": 0, "half_files": 0}
    for name, count in counts.items():
        record_property(name, count)


@contextmanager
def small_disk(place: Path, limit: str) -> Iterator[Callable[[], None]]:
    """A file system of its own at `place`, with a limit such as size=64k; yields a function that lifts the limit."""
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", limit, "tmpfs", place], capture_output=True, check=False
    ).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,size=100m,nr_inodes=10000", place], check=True) and None
    finally:
        subprocess.run(["umount", "-l", place], check=False)


def check_model(out: Path) -> None:
    """The model folder is complete, or without weights; never weights with the config or the card of others."""
    try:
        model = load(out / "model")
    except InputError as error:
        assert "not a model folder" in str(error) or "not found" in str(error) or "no such model" in str(error)
        return
    assert model.config.network.base == 32
    card = out / "model" / "README.md"
    if card.exists():
        step = int(card.read_text().split(" for ")[1].split(" of ")[0])
        path = out / CHECKPOINTS / f"step-{step:08d}.safetensors"
        state = model.network.state_dict()
        stored = load_weights(read_checkpoint(path), "ema").network.state_dict() if path.exists() else {}
        assert all(bool((state[name] == value).all()) for name, value in stored.items())


def check_same_run(out: Path, uninterrupted: Path) -> None:
    """Weights, EMA, optimizer, random state, log, model and names of all other files; nothing is left of a kill."""
    assert weights(out) == weights(uninterrupted)
    assert rows(out) == rows(uninterrupted)
    mine, other = (read_checkpoint(checkpoints(run / CHECKPOINTS)[-1]) for run in (out, uninterrupted))
    assert (mine.state.step, mine.state.position) == (other.state.step, other.state.position)
    assert mine.tensors.keys() == other.tensors.keys()
    assert all(torch.equal(tensor, other.tensors[name]) for name, tensor in mine.tensors.items())
    for name in ("config.json", "README.md"):
        assert (out / "model" / name).exists()
    assert (out / "model" / "config.json").read_bytes() == (uninterrupted / "model" / "config.json").read_bytes()
    assert [p.name for p in sorted(out.glob("samples/*"))] == [p.name for p in sorted(uninterrupted.glob("samples/*"))]
    assert not list(out.rglob(".*"))
    check_model(out)


@dataclass(frozen=True)
class SampleInputs:
    """The models and the masks of sampling jobs."""

    root: Path

    def volumes(self, out: Path, *more: str) -> list[str]:
        """The command that draws a volume for each mask, in two batches."""
        return ["sample", str(self.root / "model"), "--mask", str(self.root / "masks"), "-o", str(out), *SAMPLE, *more]

    def images(self, out: Path, *more: str) -> list[str]:
        """The command that draws images, in three batches, and a sheet of them."""
        return ["sample", str(self.root / "planar"), "-n", str(IMAGES), "-o", str(out), *SAMPLE, *more]


def write_sample_inputs(root: Path) -> SampleInputs:
    torch.manual_seed(0)
    contract, sampling = cohort_contract(SHAPE), SamplingConfig(sampler="ddpm", steps=2)
    network = MedDDPMConfig(base=32, multipliers=(1,), attention=())
    save(Model(ModelConfig(network=network, size=SHAPE, data=contract, sampling=sampling)), root / "model", card="")
    planar = ConvNeXtConfig(channels=3, width=8, multipliers=(1, 1))
    save(Model(ModelConfig(network=planar, size=(8, 8), sampling=sampling)), root / "planar", card="")
    (root / "masks").mkdir()
    for number in range(VOLUMES):
        nifti.write_mask(root / "masks" / f"sub-{number}_dseg.nii.gz", SHAPE, AFFINE)
    return SampleInputs(root)


def contents(folder: Path) -> dict[str, bytes]:
    """The files below a folder, except for the lock and the temporary files of a killed process."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and not is_leftover(path))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def is_leftover(path: Path) -> bool:
    return PART.fullmatch(path.name) is not None or path.name.endswith(".voxtune.lock")


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob(".*") if is_leftover(path)]


def identities(folder: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of every file: equal for a file that was not written again."""
    files = (path for path in folder.rglob("*") if path.is_file() and not is_leftover(path))
    return {p.relative_to(folder).as_posix(): (p.stat().st_ino, p.stat().st_mtime_ns) for p in files}


def finished_samples(out: Path) -> set[str]:
    """The files of the samples of a job whose sidecar is there and says nothing of a replacement."""
    sidecars = [p for p in out.rglob("*.json") if p.name != "dataset_description.json"]
    complete = [p for p in sidecars if "incomplete" not in read_json(p)]
    return {f.relative_to(out).as_posix() for p in complete for f in p.parent.glob(f"{p.stem}.*") if f.name[0] != "."}


def half_files(folder: Path) -> list[str]:
    """The files under a final name that cannot be read to their end."""
    return [str(p) for p in folder.rglob("*") if p.is_file() and not p.name.startswith(".") and not is_complete(p)]


def is_complete(path: Path) -> bool:
    try:
        return _reads(path)
    except Exception:
        return False


def _reads(path: Path) -> bool:
    """Whether a file of a known type is complete; raises if it is damaged."""
    name, data = path.name, path.read_bytes()
    if name.endswith(".nii.gz"):
        return bool(np.isfinite(np.asanyarray(nib.load(path).dataobj)).all())
    if name.endswith(".json"):
        json.loads(data)
    elif name.endswith(".safetensors"):
        read_safetensors(path)
    elif name.endswith(".png"):
        Image.open(path).load()
    elif name.endswith(".npz"):
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    elif name.endswith(".gz"):
        gzip.decompress(data)
    elif name.endswith(".parquet"):
        import pyarrow.parquet as pq

        pq.read_table(path)
    elif name.endswith((".html", ".svg")):
        return data.rstrip().endswith((b"</html>", b"</svg>"))
    elif name.endswith((".md", ".tsv", "README")):
        return data.endswith(b"\n")
    # A log may end with a torn record, which the next start removes or skips.
    return True
