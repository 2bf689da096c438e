"""One whole-head volume from a mask: the published way (FP32, DDPM in 250 steps) against this project's default.

A row's time is the wall time of `Model.sample`, from an encoded mask in host memory to the volume in host memory, a volume of
the batch; the network has random weights of a trained one's size, so that this file speaks of time. The error is the relative
difference from the FP32 volume of the same noise, sampler and steps. Encoding the mask and writing the NIfTI file are timed
once for all rows, the latter only where nibabel is installed. `cold_first_volume` and `warm_first_volume` are new processes,
with empty caches and with what the first one left: from their start to the volume in host memory, or in its file.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from results_file import RESULTS, row, write
from torch import Tensor

from voxtune.data.contract import encode_mask, unscale_image
from voxtune.precision import tf32_allowed
from voxtune.runtime.model import Model
from voxtune.runtime.planned import optimize, tuning_target
from voxtune.runtime.storage import demo_model, load, save

PARTS = ("published", "tf32", "plan", "default", "batches", "start")
BATCHES = (2, 4)
TARGET, BEYOND = 120, 250
Way = dict[str, Any]


def head_mask(side: int) -> np.ndarray:
    """A brain and a lesion in it, as label values (D, H, W)."""
    axis = (np.arange(side) - (side - 1) / 2) / side
    z, y, x = np.meshgrid(axis, axis, axis, indexing="ij")
    labels = (np.sqrt((z / 0.9) ** 2 + y**2 + (x / 0.8) ** 2) < 0.42).astype(np.uint8)
    labels[np.sqrt((z - 0.1) ** 2 + (y - 0.1) ** 2 + (x - 0.12) ** 2) < 0.09] = 2
    return labels


def default_way(asked: argparse.Namespace) -> tuple[Way, str]:
    """What `--steps auto` means for the model that ships, or what the command line says; and which of these it is."""
    if asked.steps is not None:
        told = {"sampler": asked.sampler or "ddpm", "steps": asked.steps, "cache": asked.cache}
        return {k: v for k, v in told.items() if v is not None}, "the command line"
    demo = load(demo_model())
    auto = demo.config.sampling.auto
    if auto is None:
        settings = demo.resolve()
        return {
            "sampler": settings.sampler,
            "steps": settings.steps,
        }, "the shipped model's default: no steps are stored with it"
    return auto.to_json() | ({} if auto.cache is None else {"cache": str(auto.cache)}), "stored with the shipped model"


def relative(found: Tensor, wanted: Tensor | None) -> float | None:
    """None where there is nothing to compare with, or where random weights ran out of numbers."""
    if wanted is None or not bool(torch.isfinite(found).all() and torch.isfinite(wanted).all()):
        return None
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


class Bench:
    """The rows measured so far, and what all of them share."""

    def __init__(self, asked: argparse.Namespace):
        self.asked, self.device = asked, torch.device(asked.device)
        self.model = tuning_target("med-ddpm", asked.device)
        contract = self.model.config.data
        assert contract is not None
        self.contract = contract
        self.labels_DHW = head_mask(asked.size)
        self.published: Way = {"sampler": "ddpm", "steps": asked.published_steps}
        self.default, self.default_from = default_way(asked)
        # Noise by one kernel in every row: the published way is not charged for this project's counter-based noise.
        self.eager = Model(self.model.config, self.model.network, optimize(self.model).noise)
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {
            "target": {"speed_up": TARGET, "beyond": BEYOND},
            "default": {**self.default, "from": self.default_from},
            "mask_encoding_ms": self._encoding_ms(),
            "nifti_write_ms": self._writing_ms(),
        }

    def condition(self, count: int) -> Tensor:
        return torch.from_numpy(np.stack([encode_mask(self.labels_DHW, self.contract)] * count))

    def draw(self, model: Model, way: Way, numbers: list[int], *, tf32: bool | None = False) -> Callable[[], Tensor]:
        """A sampling to be timed; `tf32` None leaves the flags to the plan."""
        cond = self.condition(len(numbers))

        def call() -> Tensor:
            if tf32 is None:
                return model.sample(cond, indices=numbers, **way).cpu()
            with tf32_allowed(tf32):
                return model.sample(cond, indices=numbers, **way).cpu()

        return call

    def warm(self, model: Model, way: Way, numbers: list[int], *, tf32: bool | None = False) -> float:
        """Two steps of the row's own sampler, or all of them where features are kept: those steps run other networks, with
        plans of their own. Twice, so that cuDNN, kernels and plans are ready. Seconds of the first call."""
        short = way if "cache" in way else way | {"steps": 2}
        began = time.perf_counter()
        self.draw(model, short, numbers, tf32=tf32)()
        first = time.perf_counter() - began
        self.draw(model, short, numbers, tf32=tf32)()
        return first

    def timed(self, call: Callable[[], Tensor], runs: int) -> tuple[Tensor, list[float], float]:
        """(the volumes, ms of each run, peak GiB)"""
        gc.collect()
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(runs):
            began = time.perf_counter()
            found = call()  # ends in host memory: nothing is left on its way
            times.append((time.perf_counter() - began) * 1e3)
        if not cuda:
            return found, times, 0.0
        torch.cuda.empty_cache()
        # A recorded graph keeps its memory without allocating: what stays reserved is its peak.
        return found, times, max(torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()) / 2**30

    def add(self, name: str, times_ms: list[float], peak: float, error: float | None, **more: Any) -> None:
        size = [self.asked.size] * 3
        made = row(name, size, times_ms * 2 if len(times_ms) == 1 else times_ms, peak, error or 0.0)
        self.rows.append({**made, "error": made["error"] if error is not None else None, "runs": len(times_ms), **more})
        show(self.rows[-1:])
        self.write()

    def write(self) -> None:
        self.more["speed_up"] = self.speed_up()
        write(self.asked.out, self.rows, **self.more)

    def speed_up(self) -> dict[str, float | None]:
        """Of the default against the published way; with mask and file, whose cost no plan lowers, beside it."""
        found = {r["name"]: r["p50_ms"] for r in self.rows}
        fast, mask, file = found.get("voxtune_default"), self.more["mask_encoding_ms"], self.more["nifti_write_ms"]

        def ratio(name: str, around: float | None) -> float | None:
            if fast is None or name not in found or around is None:
                return None
            return round((found[name] + around) / (fast + around), 1)

        return {
            "sampling": ratio("published_fp32_250", 0.0),
            "sampling_against_tf32": ratio("published_tf32_250", 0.0),
            "mask_to_volume": ratio("published_fp32_250", mask),
            "mask_to_nifti": ratio("published_fp32_250", None if file is None else mask + file),
        }

    def _encoding_ms(self) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            encode_mask(self.labels_DHW, self.contract)
            times.append((time.perf_counter() - began) * 1e3)
        return round(statistics.median(times), 2)

    def _writing_ms(self) -> float | None:
        """None where nibabel is missing, without which no file is written."""
        if importlib.util.find_spec("nibabel") is None:
            return None
        from voxtune.data.nifti import Volume, write_volume

        like = Volume(array=self.labels_DHW.transpose(2, 1, 0), affine=np.diag([1.5, 1.5, 1.5, 1.0]))
        noisy = np.random.default_rng(0).standard_normal(like.shape) * 0.02 + like.array / 2.0
        times = []
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(3):
                began = time.perf_counter()
                write_volume(Path(folder) / "volume.nii.gz", unscale_image(noisy), like)
                times.append((time.perf_counter() - began) * 1e3)
        return round(statistics.median(times), 2)


@torch.no_grad()
def published(bench: Bench) -> Tensor:
    """Eager, FP32, every step; TF32, which PyTorch allows to convolutions unless told otherwise, is a row of its own."""
    bench.warm(bench.eager, bench.published, [0])
    found, times, peak = bench.timed(bench.draw(bench.eager, bench.published, [0]), bench.asked.published_runs)
    bench.add("published_fp32_250", times, peak, 0.0, error_against="itself", **bench.published)
    return found


@torch.no_grad()
def published_tf32(bench: Bench, reference: Tensor | None) -> None:
    """The same with TF32, which PyTorch's own flags allow to convolutions unless told otherwise."""
    bench.warm(bench.eager, bench.published, [0], tf32=True)
    call = bench.draw(bench.eager, bench.published, [0], tf32=True)
    found, times, peak = bench.timed(call, bench.asked.published_runs)
    error = relative(found, reference)
    bench.add("published_tf32_250", times, peak, error, error_against="published_fp32_250", **bench.published)


@torch.no_grad()
def few_in_fp32(bench: Bench, count: int) -> Tensor:
    """The default's sampler and steps in FP32: what the fewer steps alone make, and what the plan is held against."""
    bench.warm(bench.eager, bench.default, [0])
    found, times, peaks = [], [], []
    for number in range(count):
        volume, [ms], peak = bench.timed(bench.draw(bench.eager, bench.default, [number]), 1)
        found.append(volume)
        times.append(ms)
        peaks.append(peak)
    bench.add("fp32_default_steps", times, max(peaks), 0.0, error_against="itself", **bench.default)
    return torch.cat(found)


@torch.no_grad()
def planned(bench: Bench, name: str, way: Way, count: int, runs: int, reference: Tensor | None, against: str) -> None:
    """By the plan, `count` volumes at once; times are a volume's."""
    fast, numbers = optimize(bench.model, search=False), list(range(count))
    first = bench.warm(fast, way, numbers, tf32=None)
    found, times, peak = bench.timed(bench.draw(fast, way, numbers, tf32=None), runs)
    error = relative(found, None if reference is None else reference[:count])
    passes = list(getattr(fast.network, "passes", ()))
    facts = {"error_against": against, "batch": count, "first_s": round(first, 2), "passes": passes, **way}
    bench.add(name, [ms / count for ms in times], peak, error, **facts)


FIRST = """
import json, sys, time
from importlib.util import find_spec
from pathlib import Path
import numpy as np
import torch
import voxtune
from voxtune.data.contract import encode_mask, unscale_image
from voxtune.plan.run import peak_reserved
folder, device, way = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
marks = [time.time()]
model = voxtune.optimize(voxtune.load(folder, device=device), search=False)
labels = np.load(folder / "labels.npy")
marks.append(time.time())
x = model.sample(torch.from_numpy(encode_mask(labels, model.config.data))[None], **way).cpu().numpy()
marks.append(time.time())
if find_spec("nibabel") is not None:
    from voxtune.data.nifti import Volume, write_volume
    like = Volume(array=labels.transpose(2, 1, 0), affine=np.diag([1.5, 1.5, 1.5, 1.0]))
    write_volume(folder / "first.nii.gz", unscale_image(x[0, 0]).transpose(2, 1, 0), like)
marks.append(time.time())
peak = peak_reserved() / 2**30 if device != "cpu" else 0.0
np.save(folder / "first.npy", x)
print("FIRST", json.dumps({"marks": marks, "peak": peak, "passes": list(model.network.passes)}))
"""


def starts(bench: Bench, reference: Tensor | None) -> None:
    """The first volume of a new process, from its start: with no cache at all, then with what that one left.

    Python's bytecode is compiled before, as pip leaves an installation.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(bench.model, folder / "model", card="")
        np.save(folder / "model" / "labels.npy", bench.labels_DHW)
        told = {
            "VOXTUNE_CACHE": f"{folder}/cache",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "CUDA_CACHE_PATH": f"{folder}/cuda",
            "PYTHONPYCACHEPREFIX": f"{folder}/bytecode",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        environment = {**os.environ, **told}
        modules = (
            "torch, torch.export, torch._dynamo, torch.distributed.fsdp, voxtune, voxtune.plan, voxtune.runtime.planned"
        )
        if bench.device.type == "cuda":
            modules += ", triton, voxtune.kernels.ops"
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, env=environment)
        for kind in ("cold", "warm"):
            began = time.time()
            arguments = [str(folder / "model"), bench.asked.device, json.dumps(bench.default)]
            done = subprocess.run(
                [sys.executable, "-c", FIRST, *arguments], check=False, env=environment, capture_output=True, text=True
            )
            line = next((x for x in done.stdout.splitlines() if x.startswith("FIRST")), None)
            if line is None:
                print(f"{kind} start failed:", done.stderr[-2000:], flush=True)
                continue
            told_back = json.loads(line.removeprefix("FIRST"))
            imported, loaded, drawn, written = (mark - began for mark in told_back["marks"])
            error = relative(torch.from_numpy(np.load(folder / "model" / "first.npy")), reference)
            bench.add(
                f"{kind}_first_volume",
                [written * 1e3],
                told_back["peak"],
                error,
                error_against="fp32_default_steps",
                imported_s=round(imported, 2),
                loaded_s=round(loaded, 2),
                drawn_s=round(drawn, 2),
                ends_with="the NIfTI file"
                if bench.more["nifti_write_ms"] is not None
                else "the volume: no nibabel here",
                passes=told_back["passes"],
                **bench.default,
            )


def show(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        error = "" if r["error"] is None else f"{r['error']:.1e}"
        print(f"{r['name']:24} {r['p50_ms']:12.2f} ms {r['peak_gib']:8.2f} GiB  error {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("--parts", default=",".join(PARTS), help="of the benchmark, by comma")
    parser.add_argument("--sampler", help="of the default, in place of what is stored with the shipped model")
    parser.add_argument("--steps", type=int, help="likewise")
    parser.add_argument("--cache", help="likewise, where the samplers know caching")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--published-steps", type=int, default=250)
    parser.add_argument("--published-runs", type=int, default=1, help="each is a minute in FP32 on an H200")
    parser.add_argument("--runs", type=int, default=10, help="of the default; of the plan with all steps a third")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "h200" / "volume.json")
    asked = parser.parse_args()
    parts = asked.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts {asked.parts}: known are {','.join(PARTS)}")
    bench = Bench(asked)
    print("default:", bench.more["default"], flush=True)
    whole = published(bench) if "published" in parts else None
    if "tf32" in parts:
        published_tf32(bench, whole)
    if "plan" in parts:
        runs = max(1, asked.runs // 3)
        planned(bench, "voxtune_plan_250", bench.published, 1, runs, whole, "published_fp32_250")
    few = None
    if {"default", "batches", "start"} & set(parts):
        few = few_in_fp32(bench, max(BATCHES) if "batches" in parts else 1)
    if "default" in parts:
        planned(bench, "voxtune_default", bench.default, 1, asked.runs, few, "fp32_default_steps")
    if "batches" in parts:
        for count in BATCHES:
            name = f"voxtune_default_batch_{count}"
            planned(bench, name, bench.default, count, max(1, asked.runs // 2), few, "fp32_default_steps")
    if "start" in parts:
        starts(bench, None if few is None else few[:1])
    bench.write()
    show(bench.rows)
    print(json.dumps({k: bench.more[k] for k in ("speed_up", "mask_encoding_ms", "nifti_write_ms")}))


if __name__ == "__main__":
    main()
