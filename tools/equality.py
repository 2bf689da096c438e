"""Hashes of what the commands write and print, to prove that a refactoring changed nothing.

    python tools/equality.py --source OLD/src -o before.json
    python tools/equality.py --source src --baseline before.json

Each scenario runs `python -m voxtune` in a process of its own with one thread. NIfTI voxels, weights and PNG pixels are hashed as
they are; JSON is hashed after the fields that differ between any two runs (times, versions, commits, paths) are removed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# Keys whose values differ between two runs of the same code, or name the code itself.
VOLATILE = re.compile(
    r"seconds|_ms$|^ms|time|commit|version|host|platform|memory|peak|created|date|command|gib|speed|faster|torch$|total_seconds|sha256$"
    r"|^GeneratedBy$|^machine$|bytes$|^lr$|^size_mb$|^summary$|^steps_auto$"
    # Absent in version 0.1.
    r"|^noise$|^replicate$|^settings$|^batch$",
    re.IGNORECASE,
)
# Keys with another name in version 0.1.
RENAMED = {"timestep_spacing": "spacing"}
PICKLED = 2  # protocol of the CIFAR-10 batches


def clean(value: Any, root: str) -> Any:
    """A JSON value without volatile fields and without the run's own folder."""
    if isinstance(value, dict):
        kept = {RENAMED.get(k, k): v for k, v in value.items() if not VOLATILE.search(str(k))}
        return {k.replace(root, "ROOT"): clean(v, root) for k, v in kept.items()}
    if isinstance(value, list):
        return [clean(v, root) for v in value]
    if isinstance(value, str):
        return value.replace(root, "ROOT")
    return value


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def json_digest(text: str, root: str) -> str:
    return digest(json.dumps(clean(json.loads(text), root), sort_keys=True).encode())


def file_digest(path: Path, root: str) -> str:
    """Hash of a file's content; archives by their members, gzip by what it holds."""
    if path.name.endswith(".nii.gz"):
        return digest(gzip.decompress(path.read_bytes()))
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            return digest(b"".join(n.encode() + archive.read(n) for n in sorted(archive.namelist())))
    if path.suffix == ".json":
        return json_digest(path.read_text(), root)
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = {k: v for k, v in json.loads(data[8 : 8 + length]).items() if k != "__metadata__"}
        return digest(json.dumps(header, sort_keys=True).encode() + data[8 + length :])
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return json_digest(json.dumps(rows), root)
    return digest(path.read_bytes())


class Runner:
    """Runs commands against one source tree and collects hashes by name."""

    def __init__(self, source: Path, root: Path):
        self.source, self.root = source, root
        self.hashes: dict[str, str] = {}
        # Noise, file names and batches of version 0.1, which had no options for them.
        options = (source / "voxtune" / "cli" / "sample.py").read_text()
        self.sampling = ("--noise", "position", "--flat") if '"--flat"' in options else ()
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(source),
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "VOXTUNE_CACHE": str(root / "cache"),
            "PYTHONHASHSEED": "0",
        }

    def run(self, name: str, *arguments: str | Path, code: int = 0) -> None:
        done = subprocess.run(
            [sys.executable, "-c", "import torch; torch.set_num_threads(1); from voxtune.cli.main import run; run()"]
            + [str(a) for a in arguments],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != code:
            raise SystemExit(f"{name}: exit code {done.returncode}\n{done.stderr}")
        if "--json" in arguments:
            self.hashes[f"{name} | output"] = json_digest(done.stdout, str(self.root))
            if os.environ.get("EQUALITY_KEEP"):
                keep = Path(os.environ["EQUALITY_KEEP"]) / f"{name.replace(' ', '_')}.json"
                keep.parent.mkdir(parents=True, exist_ok=True)
                keep.write_text(json.dumps(clean(json.loads(done.stdout), str(self.root)), indent=1, sort_keys=True))

    def collect(self, name: str, folder: str | Path, patterns: tuple[str, ...]) -> None:
        base = self.root / folder
        files = sorted({file for pattern in patterns for file in base.rglob(pattern) if file.is_file()})
        if not files:
            raise SystemExit(f"{name}: no file matches {patterns} in {base}")
        for file in files:
            self.hashes[f"{name} | {file.relative_to(base)}"] = file_digest(file, str(self.root))


def write_subjects(root: Path) -> None:
    """Three subjects of 8 voxels a side, and two masks of 16, as NIfTI."""
    import nibabel

    for name in ("images", "masks", "wide"):
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
    for subject in range(2):
        labels = np.zeros((15, 16, 17), np.uint8)
        labels[3:12, 3:13, 3:14] = 1
        labels[6:9, 6:9, 6 + subject : 9 + subject] = 2
        affine = np.array([[-1.5, 0, 0, 9], [0, 1.5, 0, -8], [0, 0, 1.5, -7], [0, 0, 0, 1.0]])
        nibabel.save(nibabel.Nifti1Image(labels, affine), root / "wide" / f"sub-w{subject}_dseg.nii.gz")


def write_cifar(folder: Path) -> None:
    """CIFAR-10 batches with the published layout: five of eight images and a test batch."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        pixels = rng.integers(0, 256, (8, 3072), dtype=np.uint8)
        batch = {b"batch_label": name.encode(), b"labels": list(range(8)), b"data": pixels, b"filenames": [b"x"] * 8}
        (folder / name).write_bytes(pickle.dumps(batch, protocol=PICKLED))


def scenarios(run: Runner) -> Iterator[str]:  # noqa: PLR0915
    """Every scenario in turn; yields its name when it is done."""
    root, goldens = run.root, ROOT / "tests" / "goldens"
    cpu = ("--device", "cpu")
    tiny = (
        "--size",
        "8,8,8",
        "--base",
        "32",
        "--multipliers",
        "1",
        "--batch",
        "2",
        "--accumulation",
        "1",
        "--lr",
        "1e-3",
    )
    settings = ("--set", "model.diffusion_steps=10", "--set", "tensorboard=false")
    write_subjects(root)
    write_cifar(root / "cifar")

    run.run("import", "import", goldens / "med_ddpm_tiny.pt", "-o", "head", "--size", "16,16,16", "--json")
    run.collect("import", "head", ("config.json", "model.safetensors"))
    yield "import"

    for name in ("med-ddpm", "med-ddpm-brats", "convnext", "head"):
        run.run(f"info {name}", "info", name, "--json")
    run.run("estimate", "estimate", "med-ddpm", "--gpu", "h200,rtx4090", "--json")
    run.run("estimate convnext", "estimate", "convnext", "--config", "tf32+channels_last", "--json")
    yield "info and estimate"

    draws = {
        "default": ("--steps", "3"),
        "ddpm all": ("--sampler", "ddpm", "--steps", "5", "--count", "2", "--batch", "2", "--seed", "3"),
        "ddim logsnr": ("--sampler", "ddim", "--steps", "4", "--spacing", "logsnr", "--no-clip"),
        "dpm++ cache": ("--sampler", "dpm++", "--steps", "4", "--cache", "2"),
        "sde-dpm++": ("--sampler", "sde-dpm++", "--steps", "4", "--spacing", "linspace"),
        "unipc": ("--sampler", "unipc", "--steps", "4", "--spacing", "leading"),
        "ipndm": ("--sampler", "ipndm", "--steps", "4", "--picture"),
        "auto plan": ("--sampler", "ddim", "--steps", "2", "--plan", "auto"),
    }
    for name, options in draws.items():
        plan = () if "--plan" in options else ("--plan", "baseline")
        batch = () if "--batch" in options else ("--batch", "1")
        arguments = (
            "head",
            "--mask",
            "wide",
            "-o",
            f"out/{name}",
            *run.sampling,
            *batch,
            *plan,
            *cpu,
            *options,
            "--json",
        )
        run.run(f"sample {name}", "sample", *arguments)
        run.collect(f"sample {name}", f"out/{name}", ("*.nii.gz", "*.json", "*.png"))
    yield "sample"

    run.run("cohort", "cohort", "3", "-o", "cohort", "--size", "24,24,24", "--healthy", "0.3", "--json")
    run.collect("cohort", "cohort", ("*.nii.gz", "*.json", "*.tsv"))
    run.run("pack", "pack", "--cohort", "4", "--held-out", "6", "--size", "16,16,16", "-o", "subjects.npz", "--json")
    run.collect("pack", ".", ("subjects.npz",))
    yield "cohort and pack"

    folders = ("--images", "images", "--masks", "masks")
    run.run(
        "train", "train", *folders, "-o", "run", *tiny, *settings, "--steps", "4", "--sample-every", "4", *cpu, "--json"
    )
    run.run("train resumed", "train", "--resume", "run", "--steps", "6", *cpu, "--json")
    run.collect("train", "run", ("config.json", "*.safetensors", "metrics.jsonl", "*.png"))
    sampled = ("sample", "run", "--mask", "masks", "-o", "out/trained", *run.sampling, "--batch", "1")
    run.run("sample trained", *sampled, *cpu, "--plan", "baseline", "--json")
    run.collect("sample trained", "out/trained", ("*.nii.gz", "*.json"))
    yield "train"

    packed = ("--subjects", "subjects.npz")
    small = ("--base", "32", "--multipliers", "1,1", "--batch", "2", "--accumulation", "1", "--lr", "1e-3")
    run.run("train packed", "train", *packed, "-o", "packed", *small, *settings, "--steps", "3", *cpu, "--json")
    run.collect("train packed", "packed", ("config.json", "*.safetensors", "metrics.jsonl"))
    segment = ("--workload", "segment", "--base", "4", "--steps", "3", "--batch", "2")
    run.run("train segment", "train", *segment, *packed, "-o", "segmenter", *cpu, "--json")
    run.collect("train segment", "segmenter", ("config.json", "*.safetensors"))
    images = ("--base", "8", "--multipliers", "1,1", "--batch", "3", "--set", "model.diffusion_steps=6")
    run.run(
        *("train convnext", "train", "--workload", "convnext", "--images", "cifar", "-o", "images-run", *images),
        *("--set", "tensorboard=false", "--steps", "3", "--sample-every", "0", *cpu, "--json"),
    )
    run.collect("train convnext", "images-run", ("config.json", "*.safetensors", "metrics.jsonl"))
    run.run(
        *("sample images", "sample", "images-run", "--count", "3", "--batch", "1", "-o", "out/png"),
        *("--plan", "baseline", *cpu, "--json"),
    )
    run.collect("sample images", "out/png", ("*.png", "*.json"))
    yield "train from packed subjects, a segmenter, images"

    quick = ("--resamples", "20", "--batch", "4", *cpu, "--plan", "baseline")
    judge = ("--segmenter", "segmenter")
    rows = ("--samplers", "ddim,sde-dpm++", "--steps", "1,2", "--margin", "100", "--store", "--cache", "2")
    run.run(
        "steps", "steps", "packed/model", *packed, "-o", "steps", *judge, "--held-out", "3", *rows, *quick, "--json"
    )
    run.collect("steps", "steps", ("steps.json",))
    run.collect("steps stored", "packed/model", ("config.json",))
    confirm = ("--confirm", "steps/steps.json", "--held-out", "3", *judge, *quick, "--json")
    run.run("steps confirm", "steps", "packed/model", *packed, "-o", "confirmed", *confirm)
    run.collect("steps confirm", "confirmed", ("*.json",))
    run.run(
        "sample stored",
        "sample",
        "packed/model",
        "--mask",
        "wide",
        "-o",
        "out/stored",
        *run.sampling,
        "--batch",
        "1",
        *cpu,
        "--plan",
        "baseline",
        "--json",
    )
    run.collect("sample stored", "out/stored", ("*.nii.gz", "*.json"))
    learn = ("--volumes", "4", "--few", "2", "--seeds", "1", "--segment-steps", "2", "--segment-batch", "2")
    # With a number of steps alone, version 0.1 used the model's own sampler and not the stored one.
    learn = (*learn, "--sampler", "ddpm", "--steps", "2")
    run.run("usefulness", "usefulness", "packed/model", *packed, "-o", "useful", *learn, *quick, "--json")
    run.collect("usefulness", "useful", ("*.json",))
    yield "steps and usefulness"

    networks = ("--features", "segmenter", "--segmenter", "segmenter", "--resamples", "20", *cpu)
    masks = ("--masks", "cohort/derivatives/masks", "--training", "cohort")
    run.run("evaluate", "evaluate", "cohort", "cohort", *masks, *networks, "-o", "metrics", "--json")
    run.collect("evaluate", "metrics", ("*.json",))
    run.run("view", "view", "out/default", "--masks", "wide", "-o", "view.html", "--sheet", "sheet.png", "--json")
    run.collect("view", ".", ("sheet.png",))
    yield "evaluate and view"

    run.run("report", "report", "--recorded", "--format", "console", "--json")
    run.run("report svg", "report", "--recorded", "--format", "svg", "-o", "svg", "--json")
    run.collect("report svg", "svg", ("*.svg",))
    run.run("study", "study", "seed", "--recorded", "--json")
    yield "report and study"


def compare(before: dict[str, str], after: dict[str, str]) -> int:
    """Prints what differs; 0 where nothing does."""
    names = sorted(set(before) | set(after))
    different = [name for name in names if before.get(name) != after.get(name)]
    for name in different:
        state = "missing" if name not in after else "new" if name not in before else "differs"
        print(f"{state:8} {name}")
    print(f"{len(names) - len(different)} of {len(names)} hashes are equal")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=ROOT / "src", help="the src folder of the checkout to run")
    parser.add_argument("-o", "--out", type=Path, help="write the hashes to this JSON file")
    parser.add_argument(
        "--baseline", type=Path, help="compare with the hashes in this file; exit code 1 if any differs"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(options.source.resolve(), Path(folder).resolve())
        for name in scenarios(runner):
            print(f"done: {name}", file=sys.stderr, flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(runner.hashes, indent=1, sort_keys=True) + "\n")
    if options.baseline is not None:
        return compare(json.loads(options.baseline.read_text()), runner.hashes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
