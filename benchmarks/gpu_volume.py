"""One whole-head volume from a mask: the published sampling (FP32, DDPM with 250 steps), its fair competitors and Voxtune.

The time of a row is the wall time of `Model.sample` per volume, from an encoded mask in host memory to the volume in host memory.
The network has random weights, so this file describes time, not quality. The error is the relative difference from the FP32
volume with the same noise, sampler and steps. Encoding the mask and writing the NIfTI file are timed once for all rows, the
latter only if nibabel is installed. `cold_first_volume` and `warm_first_volume` are new processes, with empty caches and with
those of the first one: from process start to the volume in host memory, or in its file.
"""

from __future__ import annotations

import argparse
import copy
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
from torch import Tensor, nn

from voxtune.data.contract import encode_mask, unscale_image
from voxtune.precision import tf32_allowed
from voxtune.runtime.model import Model
from voxtune.runtime.planned import optimize, tuning_target
from voxtune.runtime.storage import demo_model, load, save

PARTS = ("published", "tf32", "ipndm", "plan", "default", "compile", "start", "batches")
BATCHES = (2, 4)
TARGET, BEYOND = 120, 250
Options = dict[str, Any]  # keywords of Model.sample
# The publication also ships a script with 10 steps of a multistep solver; Voxtune has the same kind as `ipndm`.
IPNDM_10: Options = {"sampler": "ipndm", "steps": 10}


def head_mask(side: int) -> np.ndarray:
    """A brain with a lesion, as label values (D, H, W)."""
    axis = (np.arange(side) - (side - 1) / 2) / side
    z, y, x = np.meshgrid(axis, axis, axis, indexing="ij")
    labels = (np.sqrt((z / 0.9) ** 2 + y**2 + (x / 0.8) ** 2) < 0.42).astype(np.uint8)
    labels[np.sqrt((z - 0.1) ** 2 + (y - 0.1) ** 2 + (x - 0.12) ** 2) < 0.09] = 2
    return labels


def default_options(arguments: argparse.Namespace) -> tuple[Options, str]:
    """What `steps="auto"` means for the included model, or the command line's options; and which of the two."""
    if arguments.steps is not None:
        given = {"sampler": arguments.sampler or "ddpm", "steps": arguments.steps, "cache": arguments.cache}
        return {k: v for k, v in given.items() if v is not None}, "the command line"
    demo = load(demo_model())
    auto = demo.config.sampling.auto
    if auto is None:
        return demo.resolve().to_json(), "the included model's default: no steps are stored with it"
    cache = {} if auto.cache is None else {"cache": str(auto.cache)}
    return auto.to_json() | cache, "stored with the shipped model"


def relative(x: Tensor, reference: Tensor | None) -> float | None:
    """Relative L2 error; None without a reference, or where random weights led to values that are not finite."""
    if reference is None or not bool(torch.isfinite(x).all() and torch.isfinite(reference).all()):
        return None
    return float((x.double() - reference.double()).norm() / reference.double().norm())


class CompiledNetwork(nn.Module):
    """torch.compile in its strongest measured form: BF16 weights, channels-last, cuDNN autotuned."""

    def __init__(self, network: nn.Module):
        super().__init__()
        half = copy.deepcopy(network).to(torch.bfloat16)
        for parameter in half.parameters():
            if parameter.dim() == 5:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
        self.network = torch.compile(half, dynamic=False)

    def forward(self, x: Tensor, t: Tensor, cond: Tensor | None = None) -> Tensor:
        def convert(v: Tensor | None) -> Tensor | None:
            return None if v is None else v.to(torch.bfloat16).contiguous(memory_format=torch.channels_last_3d)

        return self.network(convert(x), t, convert(cond)).float()


class Bench:
    """The rows measured so far, and what they share."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments, self.device = arguments, torch.device(arguments.device)
        self.model = tuning_target("med-ddpm", arguments.device)
        contract = self.model.config.data
        assert contract is not None
        self.contract = contract
        self.labels_DHW = head_mask(arguments.size)
        self.published: Options = {"sampler": "ddpm", "steps": arguments.published_steps}
        self.default, self.default_from = default_options(arguments)
        # All rows generate noise with one kernel, so that the baseline does not pay for counter-based noise.
        self.eager = Model(self.model.config, self.model.network, optimize(self.model).noise)
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {
            "weights": "random",
            "target": {"speed_up": TARGET, "beyond": BEYOND},
            "default": {**self.default, "from": self.default_from},
            "mask_encoding_ms": self._encoding_ms(),
            "nifti_write_ms": self._writing_ms(),
        }

    def condition(self, count: int) -> Tensor:
        return torch.from_numpy(np.stack([encode_mask(self.labels_DHW, self.contract)] * count))

    def sampling(
        self, model: Model, options: Options, numbers: list[int], *, tf32: bool | None = False
    ) -> Callable[[], Tensor]:
        """A call to be timed; `tf32` None leaves the flags to the plan."""
        cond = self.condition(len(numbers))

        def call() -> Tensor:
            if tf32 is None:
                return model.sample(cond, indices=numbers, **options).cpu()
            with tf32_allowed(tf32):
                return model.sample(cond, indices=numbers, **options).cpu()

        return call

    def warm(self, model: Model, options: Options, numbers: list[int], *, tf32: bool | None = False) -> float:
        """Warm-up, twice: two steps of the row's sampler, or all of them with feature caching, whose steps run other networks.

        Returns the seconds of the first call.
        """
        short = options if "cache" in options else options | {"steps": 2}
        began = time.perf_counter()
        self.sampling(model, short, numbers, tf32=tf32)()
        first = time.perf_counter() - began
        self.sampling(model, short, numbers, tf32=tf32)()
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
            volumes = call()  # ends in host memory, so the device is done
            times.append((time.perf_counter() - began) * 1e3)
        if not cuda:
            return volumes, times, 0.0
        torch.cuda.empty_cache()
        # A recorded graph keeps its memory without allocating: what stays reserved is its peak.
        return volumes, times, max(torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()) / 2**30

    def add(self, name: str, times_ms: list[float], peak: float, error: float | None, **more: Any) -> None:
        size = [self.arguments.size] * 3
        entry = row(name, size, times_ms * 2 if len(times_ms) == 1 else times_ms, peak, error or 0.0)
        self.rows.append(
            {**entry, "error": entry["error"] if error is not None else None, "runs": len(times_ms), **more}
        )
        show(self.rows[-1:])
        self.write()

    def write(self) -> None:
        self.more["speed_up"] = self.speed_up()
        write(self.arguments.out, self.rows, **self.more)

    def speed_up(self) -> dict[str, float | None]:
        """Ratios between rows; also with mask encoding and file writing, which cost the same in all rows."""
        times = {r["name"]: r["p50_ms"] for r in self.rows}
        mask, file = self.more["mask_encoding_ms"], self.more["nifti_write_ms"]

        def ratio(slow: str, fast: str, extra: float | None = 0.0) -> float | None:
            if slow not in times or fast not in times or extra is None:
                return None
            return round((times[slow] + extra) / (times[fast] + extra), 1)

        return {
            "sampling": ratio("published_fp32_250", "voxtune_default"),
            "sampling_against_tf32": ratio("published_tf32_250", "voxtune_default"),
            "sampling_against_compile": ratio("compile_bf16_250", "voxtune_default"),
            "same_steps_against_compile": ratio("compile_bf16_default_steps", "voxtune_default"),
            "imported_default_against_fp32": ratio("published_fp32_250", "voxtune_plan_250"),
            "imported_default_against_tf32": ratio("published_tf32_250", "voxtune_plan_250"),
            "imported_default_against_compile": ratio("compile_bf16_250", "voxtune_plan_250"),
            "mask_to_volume": ratio("published_fp32_250", "voxtune_default", mask),
            "mask_to_nifti": ratio("published_fp32_250", "voxtune_default", None if file is None else mask + file),
        }

    def _encoding_ms(self) -> float:
        times = []
        for _ in range(5):
            began = time.perf_counter()
            encode_mask(self.labels_DHW, self.contract)
            times.append((time.perf_counter() - began) * 1e3)
        return round(statistics.median(times), 2)

    def _writing_ms(self) -> float | None:
        """None without nibabel."""
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
def eager(
    bench: Bench,
    name: str,
    options: Options,
    runs: int,
    *,
    tf32: bool,
    reference: Tensor | None = None,
    against: str = "itself",
) -> Tensor:
    """Plain PyTorch, FP32 weights; TF32, which PyTorch allows in convolutions by default, is a separate row."""
    bench.warm(bench.eager, options, [0], tf32=tf32)
    volumes, times, peak = bench.timed(bench.sampling(bench.eager, options, [0], tf32=tf32), runs)
    error = 0.0 if against == "itself" else relative(volumes, reference)
    bench.add(name, times, peak, error, error_against=against, **options)
    return volumes


@torch.no_grad()
def few_in_fp32(bench: Bench, count: int) -> Tensor:
    """The default sampler and steps in FP32: the effect of fewer steps alone, and the reference for the plan."""
    bench.warm(bench.eager, bench.default, [0])
    volumes, times, peaks = [], [], []
    for number in range(count):
        volume, [ms], peak = bench.timed(bench.sampling(bench.eager, bench.default, [number]), 1)
        volumes.append(volume)
        times.append(ms)
        peaks.append(peak)
    bench.add("fp32_default_steps", times, max(peaks), 0.0, error_against="itself", **bench.default)
    return torch.cat(volumes)


@torch.no_grad()
def compiled(bench: Bench, runs: int, whole: Tensor | None, few: Tensor | None) -> None:
    """torch.compile, with all steps and with the default's steps."""
    torch.backends.cudnn.benchmark = True
    model = Model(bench.model.config, CompiledNetwork(bench.model.network), bench.eager.noise)
    first = bench.warm(model, bench.published, [0], tf32=None)
    cases = (
        ("compile_bf16_250", bench.published, whole, "published_fp32_250", max(1, runs // 3)),
        ("compile_bf16_default_steps", bench.default, few, "fp32_default_steps", runs),
    )
    for name, options, reference, against, count in cases:
        bench.warm(model, options, [0], tf32=None)
        volumes, times, peak = bench.timed(bench.sampling(model, options, [0], tf32=None), count)
        error = relative(volumes, None if reference is None else reference[:1])
        bench.add(name, times, peak, error, error_against=against, first_s=round(first, 2), **options)
    torch.backends.cudnn.benchmark = False
    torch._dynamo.reset()


@torch.no_grad()
def planned(
    bench: Bench, name: str, options: Options, count: int, runs: int, reference: Tensor | None, against: str
) -> None:
    """Voxtune's plan, `count` volumes per batch; times are per volume."""
    fast, numbers = optimize(bench.model, search=False), list(range(count))
    first = bench.warm(fast, options, numbers, tf32=None)
    volumes, times, peak = bench.timed(bench.sampling(fast, options, numbers, tf32=None), runs)
    error = relative(volumes, None if reference is None else reference[:count])
    passes = list(getattr(fast.network, "passes", ()))
    facts = {"error_against": against, "batch": count, "first_s": round(first, 2), "passes": passes, **options}
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
folder, device, options = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
marks = [time.time()]
model = voxtune.optimize(voxtune.load(folder, device=device), search=False)
labels = np.load(folder / "labels.npy")
marks.append(time.time())
x = model.sample(torch.from_numpy(encode_mask(labels, model.config.data))[None], **options).cpu().numpy()
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
    """The first volume of a new process, from its start: with empty caches, then with those of the first one.

    Python's bytecode is compiled before, as after an installation by pip.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(bench.model, folder / "model", card="")
        np.save(folder / "model" / "labels.npy", bench.labels_DHW)
        caches = {
            "VOXTUNE_CACHE": f"{folder}/cache",
            "TRITON_CACHE_DIR": f"{folder}/triton",
            "CUDA_CACHE_PATH": f"{folder}/cuda",
            "PYTHONPYCACHEPREFIX": f"{folder}/bytecode",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        environment = {**os.environ, **caches}
        modules = (
            "torch, torch.export, torch._dynamo, torch.distributed.fsdp, voxtune, voxtune.plan, voxtune.runtime.planned"
        )
        if bench.device.type == "cuda":
            modules += ", triton, voxtune.kernels.ops"
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, env=environment)
        for kind in ("cold", "warm"):
            began = time.time()
            inputs = [str(folder / "model"), bench.arguments.device, json.dumps(bench.default)]
            done = subprocess.run(
                [sys.executable, "-c", FIRST, *inputs], check=False, env=environment, capture_output=True, text=True
            )
            line = next((x for x in done.stdout.splitlines() if x.startswith("FIRST")), None)
            if line is None:
                print(f"{kind} start failed:", done.stderr[-2000:], flush=True)
                continue
            result = json.loads(line.removeprefix("FIRST"))
            imported, loaded, drawn, written = (mark - began for mark in result["marks"])
            error = relative(torch.from_numpy(np.load(folder / "model" / "first.npy")), reference)
            bench.add(
                f"{kind}_first_volume",
                [written * 1e3],
                result["peak"],
                error,
                error_against="fp32_default_steps",
                imported_s=round(imported, 2),
                loaded_s=round(loaded, 2),
                drawn_s=round(drawn, 2),
                ends_with="the NIfTI file"
                if bench.more["nifti_write_ms"] is not None
                else "the volume: no nibabel here",
                passes=result["passes"],
                **bench.default,
            )


def show(rows: list[dict[str, Any]]) -> None:
    for r in rows:
        error = "" if r["error"] is None else f"{r['error']:.1e}"
        print(f"{r['name']:24} {r['p50_ms']:12.2f} ms {r['peak_gib']:8.2f} GiB  error {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("--parts", default=",".join(PARTS), help="parts of the benchmark, separated by commas")
    parser.add_argument("--sampler", help="instead of the default stored with the included model")
    parser.add_argument("--steps", type=int, help="likewise")
    parser.add_argument("--cache", help="likewise: feature caching")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--published-steps", type=int, default=250)
    parser.add_argument("--published-runs", type=int, default=3, help="each takes 50 s in FP32 on an H200")
    parser.add_argument(
        "--runs", type=int, default=10, help="of rows with the default's steps; rows with all steps: a third"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "h200" / "volume.json")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--parts {arguments.parts}: choose from {','.join(PARTS)}")
    bench, runs = Bench(arguments), arguments.published_runs
    print("default:", bench.more["default"], flush=True)
    whole = eager(bench, "published_fp32_250", bench.published, runs, tf32=False) if "published" in parts else None
    if "tf32" in parts:
        against = {"reference": whole, "against": "published_fp32_250"}
        eager(bench, "published_tf32_250", bench.published, runs, tf32=True, **against)
    if "ipndm" in parts:
        few_steps = eager(bench, "fp32_ipndm_10", IPNDM_10, runs, tf32=False)
        eager(bench, "tf32_ipndm_10", IPNDM_10, runs, tf32=True, reference=few_steps, against="fp32_ipndm_10")
    if "plan" in parts:
        third = max(1, arguments.runs // 3)
        planned(bench, "voxtune_plan_250", bench.published, 1, third, whole, "published_fp32_250")
    few = None
    if {"default", "batches", "start", "compile"} & set(parts):
        few = few_in_fp32(bench, max(BATCHES) if "batches" in parts else 1)
    if "default" in parts:
        planned(bench, "voxtune_default", bench.default, 1, arguments.runs, few, "fp32_default_steps")
    if "compile" in parts:
        compiled(bench, arguments.runs, whole, few)
    if "start" in parts:
        starts(bench, None if few is None else few[:1])
    if "batches" in parts:
        for count in BATCHES:
            name = f"voxtune_default_batch_{count}"
            planned(bench, name, bench.default, count, max(1, arguments.runs // 2), few, "fp32_default_steps")
    bench.write()
    show(bench.rows)
    print(json.dumps({k: bench.more[k] for k in ("speed_up", "mask_encoding_ms", "nifti_write_ms")}))


if __name__ == "__main__":
    main()
