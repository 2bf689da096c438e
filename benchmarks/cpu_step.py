"""One denoising step of a 64^3, base-32 model on this CPU: plain PyTorch, torch.compile and a tuned plan.

Each row runs in a separate process, so that its peak memory is measured separately. The rows alternate, so that a temporary
slowdown of the machine affects all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from results_file import RESULTS, row, show, write

from voxtune.workloads import MedDDPMConfig, build, without_zeros

SIDE, ROUNDS, REPEATS = 64, 3, 3
PLAN = RESULTS / "cpu" / "denoise_step.plan.json"
NETWORK = MedDDPMConfig(base=32, multipliers=(1, 1, 2, 3, 4), attention=(8,))


def inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 1, SIDE, SIDE, SIDE, generator=generator)
    cond = torch.randn(1, 2, SIDE, SIDE, SIDE, generator=generator).sign()
    return x.to(dtype), torch.tensor([120]), cond.to(dtype)


def network() -> torch.nn.Module:
    """Random weights without zeros: the zero-initialised layers would hide every error."""
    torch.manual_seed(0)
    return without_zeros(build(NETWORK)).eval()


def naive() -> Callable[[], torch.Tensor]:
    net, (x, t, cond) = network(), inputs()

    def step() -> torch.Tensor:
        with torch.no_grad():
            return net(x, t, cond)

    return step


def voxtune() -> Callable[[], torch.Tensor]:
    """With the plan that `tune_plan` wrote."""
    from voxtune.plan import optimize

    args = inputs()
    fast = optimize(network(), args, PLAN)
    return lambda: fast(*args)


def tune_plan() -> list[str]:
    """Tunes, saves the plan for the row `voxtune`, and returns the lines of the waterfall."""
    from voxtune.plan import tune

    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    tune(network(), inputs(), say=say).plan.save(PLAN)
    return lines


def channels_last() -> Callable[[], torch.Tensor]:
    net, (x, t, cond) = network().to(memory_format=torch.channels_last_3d), inputs()
    x, cond = (v.to(memory_format=torch.channels_last_3d) for v in (x, cond))

    def step() -> torch.Tensor:
        with torch.inference_mode():
            return net(x, t, cond)

    return step


def torch_compile() -> Callable[[], torch.Tensor]:
    net, (x, t, cond) = torch.compile(network()), inputs()

    def step() -> torch.Tensor:
        with torch.no_grad():
            return net(x, t, cond)

    return step


def float64() -> Callable[[], torch.Tensor]:
    net, (x, t, cond) = network().double(), inputs(torch.float64)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return net(x, t, cond)

    return step


ROWS = {
    "naive_eager_fp32": naive,
    "voxtune": voxtune,
    "channels_last": channels_last,
    "torch_compile": torch_compile,
}


def child(name: str, reference: str) -> None:
    step = ROWS[name]()
    y = step()
    truth = torch.load(reference, weights_only=True)
    error = ((y.double() - truth).norm() / truth.norm()).item()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        step()
        times.append(1e3 * (time.perf_counter() - started))
    print(json.dumps({"times": times, "peak": peak_gib(), "error": error}))


def peak_gib() -> float:
    """Peak memory of this process. getrusage is unsuitable: a child inherits the maximum of its parent."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 2**20


def main() -> None:
    waterfall = tune_plan()
    reference = RESULTS.parent / ".reference.pt"
    torch.save(float64()(), reference)
    results: dict[str, list[dict]] = {name: [] for name in ROWS}
    try:
        for _ in range(ROUNDS):
            for name in ROWS:
                command = [sys.executable, __file__, name, str(reference)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                results[name].append(json.loads(done.stdout.splitlines()[-1]))
    finally:
        reference.unlink()
    rows = [
        row(
            name,
            [1, 1, SIDE, SIDE, SIDE],
            [t for run in runs for t in run["times"]],
            max(run["peak"] for run in runs),
            max(run["error"] for run in runs),
        )
        for name, runs in results.items()
    ]
    write(RESULTS / "cpu" / "denoise_step.json", rows, threads=torch.get_num_threads(), waterfall=waterfall)
    show(rows)


if __name__ == "__main__":
    child(*sys.argv[1:]) if len(sys.argv) > 1 else main()
