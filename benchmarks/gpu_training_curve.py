"""Loss curves of training by a plan and in FP32, on the simulated cohort: does the plan train like FP32?

Runs in FP32 (plain PyTorch without TF32) with three random seeds, and a run by the plan with the first of these seeds, thus with
the same initial weights, order, noise and diffusion steps as that one. Curves are smoothed by a moving average. The distance of a
run from the others is its largest distance, over all steps, to the band between the lowest and the highest of them. The plan lies
inside the spread if its distance from the FP32 runs is at most the largest distance of an FP32 run from the other two.

    python benchmarks/gpu_training_curve.py                          # 500 steps at 64 x 64 x 64
    python benchmarks/gpu_training_curve.py --size 128 --steps 50
    python benchmarks/gpu_training_curve.py --subjects subjects.npz  # packed subjects: needs no reader of NIfTI
    python benchmarks/gpu_training_curve.py --device cpu --size 8 --base 32 --multipliers 1 --steps 12 --window 4 --cohort 2
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any

import torch
from results_file import RESULTS, row, write

from voxtune.runtime.model import Model
from voxtune.training.config import DataSettings, ModelSettings, TrainConfig
from voxtune.training.data import Loader, open_source
from voxtune.training.model import model_config
from voxtune.training.plan_choice import choose_plan
from voxtune.training.step import Trainer

Curve = list[float]


def settings(options: argparse.Namespace, seed: int, **how: Any) -> TrainConfig:
    data = DataSettings(cohort=None if options.subjects else options.cohort, subjects=options.subjects)
    size = None if options.subjects else (options.size,) * 3
    multipliers = None if options.multipliers is None else tuple(float(m) for m in options.multipliers.split(","))
    return TrainConfig(
        data=data,
        model=ModelSettings(size=size, base=options.base, multipliers=multipliers),
        steps=options.steps,
        batch=options.batch,
        accumulation=1,
        learning_rate=options.lr,
        warmup=min(options.warmup, options.steps),
        clip=1.0,
        seed=seed,
        tensorboard=False,
        **how,
    )


def run(config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """The loss of every step, the time of a step, and what was printed when the plan was chosen."""
    torch.manual_seed(config.seed)
    model = Model(model_config(config))
    source = open_source(config, model.config, print, check=False)
    plan = choose_plan(config, model, source, device, lambda line: print(f"  {line}", flush=True))
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    trainer = Trainer(config, model, len(source), device, plan)
    loader = Loader(source, seed=config.seed, batch=config.batch, start=0, workers=config.workers, pin=gpu)
    losses: Curve = []
    times: list[float] = []
    batches = iter(loader)
    for _ in range(config.steps):
        started = time.perf_counter()
        trainer.train_step([next(batches)])
        trainer.settle()
        times.append((time.perf_counter() - started) * 1e3)
        if trainer.failure is not None:
            raise trainer.failure
        assert trainer.loss is not None, "the first step was skipped"
        losses.append(trainer.loss)
    loader.close()
    peak = torch.cuda.max_memory_reserved(device) / 2**30 if gpu else 0.0
    return {"plan": plan.describe(), "losses": losses, "times": times, "peak": peak, "skipped": trainer.skipped}


def smoothed(curve: Curve, window: int) -> torch.Tensor:
    values = torch.tensor(curve, dtype=torch.float64)
    return values.unfold(0, min(window, len(values)), 1).mean(dim=1)


def distance(curve: torch.Tensor, others: list[torch.Tensor]) -> float:
    """The largest distance of a curve to the band of others."""
    band = torch.stack(others)
    outside = torch.maximum(curve - band.amax(dim=0), band.amin(dim=0) - curve)
    return float(outside.clamp(min=0).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--window", type=int, default=25, help="steps of the moving average")
    parser.add_argument("--plan", choices=("voxtune", "compile", "baseline"), default="voxtune")
    parser.add_argument("--precision", choices=("auto", "fp32", "tf32", "bf16"), default="auto")
    parser.add_argument("--cohort", type=int, default=32, help="simulated subjects")
    parser.add_argument("--subjects", help="packed subjects, in place of the cohort")
    parser.add_argument("--base", type=int)
    parser.add_argument("--multipliers")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "training_curve.json")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cudnn.benchmark = True
    jobs = [
        (f"fp32, seed {seed}", settings(options, seed, precision="fp32", plan="baseline"))
        for seed in range(options.seeds)
    ]
    jobs.append((options.plan, settings(options, 0, precision=options.precision, plan=options.plan)))
    results, rows = [], []
    for name, config in jobs:
        print(name, flush=True)
        result = run(config, device)
        results.append(result)
        size = list(model_config(config).size)
        # The error of a row is that of the last losses, relative to those of the FP32 run with the same seed.
        reference = results[0] if config.seed == 0 else result
        last, expected = (float(smoothed(r["losses"], options.window)[-1]) for r in (result, reference))
        warm = len(result["times"]) // 3
        entry = row(
            f"{name}: {result['plan']}", size, result["times"][warm:], result["peak"], abs(last - expected) / expected
        )
        rows.append(entry | {"losses": [round(x, 6) for x in result["losses"]], "skipped": result["skipped"]})
        print(f"  {result['plan']}: {entry['p50_ms']:.1f} ms a step, last loss {last:.4f}", flush=True)
        gc.collect()
    *references, own = [smoothed(r["losses"], options.window) for r in results]
    spread = max(distance(r, [o for o in references if o is not r]) for r in references)
    outside = distance(own, references)
    inside = outside <= spread
    verdict = {"inside": inside, "distance": outside, "largest_of_fp32": spread, "window": options.window}
    print(
        f"The curve of the plan lies {'inside' if inside else 'OUTSIDE'} the spread of {options.seeds} FP32 runs: "
        f"distance {outside:.2e}, that of an FP32 run from the others up to {spread:.2e}"
    )
    kept = [] if not options.out.exists() else _others(options.out, rows)
    write(options.out, [*kept, *rows], verdicts={**_verdicts(options.out), f"{rows[-1]['shape']}": verdict})


def _others(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of an earlier call, of other sizes."""
    return [r for r in json.loads(path.read_text())["rows"] if r["shape"] != rows[0]["shape"]]


def _verdicts(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()).get("verdicts", {}) if path.exists() else {}


if __name__ == "__main__":
    main()
