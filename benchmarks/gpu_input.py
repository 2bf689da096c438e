"""`voxtune train` on compressed NIfTI files: time of a step, and the share of it in which the device waits for data.

Ways: `cached` keeps subjects in memory after the first epoch, `read` reads the files in every epoch, `memory` has all subjects in
memory from the start (what input costs at the least), `deterministic` is `cached` with deterministic algorithms. Steps before
`--warm` compile, and fill the cache. `idle` is the share in the steps after them, `idle_first` that before.

    python benchmarks/gpu_input.py --size 128 --subjects 24 --steps 300
    python benchmarks/gpu_input.py --size 8 --subjects 3 --steps 12 --warm 4 --set base=32 --device cpu   # to try it
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results_file import RESULTS, row, write

from voxtune.data.dataset import PairedFolders
from voxtune.data.nifti import Volume, write_volume
from voxtune.training.config import TrainConfig, make_config, parse_value
from voxtune.training.log import read_metrics
from voxtune.training.loop import train
from voxtune.training.model import model_config

WAYS = ("memory", "cached", "read", "deterministic")
# Voxels of 1 mm of a published head, X x Y x Z.
HEAD = (240, 240, 155)


class InMemory:
    """All subjects of a source, as its loader stores them."""

    def __init__(self, source: Any):
        self.source, self.contract = source, source.contract
        self.items = [source.stored((index,)) for index in range(len(source))]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.source[index]

    def stored(self, indices: Any) -> tuple[torch.Tensor, torch.Tensor]:
        images, masks = zip(*(self.items[index] for index in indices), strict=True)
        return torch.cat(images), torch.cat(masks)

    def unfold(self, images: torch.Tensor, masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.source.unfold(images, masks)


def write_subjects(folder: Path, count: int, shape: tuple[int, int, int]) -> int:
    """Simulated heads as .nii.gz; returns their bytes."""
    axes = [np.linspace(-1, 1, n) for n in shape]
    radius = np.sqrt(sum(a**2 for a in np.meshgrid(*axes, indexing="ij", sparse=True)))
    affine, total = np.diag([*(240 / n for n in shape), 1.0]), 0
    for number in range(count):
        rng = np.random.default_rng(number)
        labels = np.where(radius < 0.8, 1, 0).astype(np.uint8)
        labels[radius < 0.1 + 0.01 * (number % 7)] = 2
        # Noise in the last bits, as scanners have it: compression and decompression take their usual time.
        image = ((labels > 0) * (900 + 200 * labels.astype(np.int16)) + rng.integers(0, 60, shape)).astype(np.int16)
        for name, array in (("T1w", image), ("dseg", labels)):
            path = folder / f"sub-{number:03d}_{name}.nii.gz"
            total += write_volume(path, array, Volume(array=array, affine=affine)).stat().st_size
    return total


def measure(way: str, config: TrainConfig, folder: Path, warm: int, device: str) -> dict[str, Any]:
    config = replace(
        config, cache="none" if way == "read" else "auto", deterministic=way == "deterministic", log_every=warm
    )
    source = None
    if way == "memory":
        assert config.data.images is not None and config.data.masks is not None
        contract = model_config(config).data
        assert contract is not None
        source = InMemory(PairedFolders(contract, config.data.images, config.data.masks))
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    marks: list[float] = []
    started = time.perf_counter()
    result = train(
        config, source, folder / way, lambda *_: marks.append(time.perf_counter()), device=device, overwrite=True
    )
    first, *logged = [r["idle"] for r in read_metrics(folder / way / "metrics.jsonl") if "idle" in r]
    times = [1e3 * (b - a) for a, b in itertools.pairwise(marks[warm:])]
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    assert result.idle is not None
    more = {
        "idle": round(float(np.mean(logged)), 4),
        "idle_first": first,
        "idle_whole": round(result.idle, 4),
        "steps_per_second": round((len(marks) - warm - 1) / (marks[-1] - marks[warm]), 3),
        "seconds": round(time.perf_counter() - started, 1),
        "loss": result.loss,
    }
    return row(f"train_{way}", list(model_config(config).size), times, peak, 0.0) | more


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--subjects", type=int, default=24)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warm", type=int, default=60, help="steps that are not counted; a divisor of --steps")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ways", default="memory,cached,read")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="settings, such as autocast=bf16"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "train_input.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        shape = HEAD if options.size >= 64 else (options.size,) * 3
        total = write_subjects(folder, options.subjects, shape)
        settings: dict[str, Any] = {"data.images": str(folder), "data.masks": str(folder), "data.modalities": ["T1w"]}
        settings |= {"model.size": [options.size] * 3, "data.spacing": [240 / options.size] * 3}
        settings |= {"batch": options.batch, "accumulation": 1, "steps": options.steps, "tensorboard": False}
        settings |= {"sample_every": 0, "checkpoint_every": options.steps}
        for text in options.set:
            name, _, value = text.partition("=")
            settings["model.base" if name == "base" else name] = parse_value(value)
        config = make_config({}, settings, "options")
        print(
            f"{options.subjects} subjects, {total / 2**20:.0f} MiB of .nii.gz, {' x '.join(map(str, shape))}",
            flush=True,
        )
        rows = []
        for way in options.ways.split(","):
            rows.append(measure(way, config, folder / "runs", options.warm, options.device))
            r = rows[-1]
            print(
                f"{r['name']:24} p50 {r['p50_ms']:.1f} ms, {r['steps_per_second']} steps/s, idle {r['idle']:.2%} (first "
                f"{options.warm} steps {r['idle_first']:.2%}), peak {r['peak_gib']} GiB",
                flush=True,
            )
            if options.device == "cuda":
                write(options.out, rows, subjects=options.subjects, bytes=total, steps=options.steps)


if __name__ == "__main__":
    main()
