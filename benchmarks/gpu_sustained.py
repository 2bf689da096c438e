"""The share of the card's sustained rate that the plan reaches: BF16 matrix products and the planned step, each for seconds.

A data-centre card is power-limited: a short product runs at a higher clock than one that is repeated for seconds. Each row
therefore runs for `--seconds` without a pause, while nvidia-smi samples SM clock and power. The rate of the step counts the
floating-point operations of the network (a multiply-add counts two), not those that a kernel may add.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from results_file import RESULTS, row, write

from voxtune.plan import optimize
from voxtune.runtime.planned import example_inputs, tuning_target

NOMINAL_TFLOPS = 989.0  # BF16 of the H200's data sheet, without sparsity
SIDE = 8192


class Sensors:
    """SM clock and power while a block runs; the first second is left out, since both readings lag."""

    def __enter__(self) -> Sensors:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "200"]
        self.process = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        lines = (self.process.communicate()[0] or "").splitlines()[5:]
        readings = [[float(value) for value in line.split(",")] for line in lines if line.count(",") == 1]
        self.clock_mhz = statistics.median([r[0] for r in readings]) if readings else None
        self.power_w = statistics.median([r[1] for r in readings]) if readings else None


def sustain(step: Callable[[], Any], seconds: float) -> tuple[list[float], Sensors]:
    """Milliseconds of each call of the second half of the run, when clock and power are steady."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    marks = []
    with Sensors() as sensors:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(20):
                mark = torch.cuda.Event(enable_timing=True)
                mark.record()
                marks.append(mark)
                step()
            torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
    times = [ms for i, ms in enumerate(times) if (i + 1) % 20]  # the gap at a synchronisation is the host's
    return times[len(times) // 2 :], sensors


def add(rows: list[dict[str, Any]], name: str, shape: list[int], teraflop: float, error: float, measured: Any) -> None:
    times, sensors = measured
    entry = row(name, shape, times, torch.cuda.max_memory_allocated() / 2**30, error)
    rate = teraflop / entry["p50_ms"] * 1e3
    entry |= {"tflop": round(teraflop, 4), "tflop_per_s": round(rate, 1), "clock_mhz": sensors.clock_mhz}
    rows.append(entry | {"power_w": sensors.power_w, "share_of_nominal": round(rate / NOMINAL_TFLOPS, 3)})
    print(rows[-1], flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="See the top of this file.")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "h200" / "sustained.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    a, b = operands = tuple(torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exact = a[:64].double() @ b.double()
    error = float((torch.mm(a[:64], b).double() - exact).norm() / exact.norm())
    product = sustain(lambda: torch.mm(*operands), options.seconds)
    add(rows, "bf16_product_8192", [SIDE, SIDE, SIDE], 2 * SIDE**3 / 1e12, error, product)

    from torch.utils.flop_counter import FlopCounterMode

    model = tuning_target("med-ddpm", "cuda")
    inputs = example_inputs(model)
    with FlopCounterMode(display=False) as counter:
        reference = model.network(*inputs)
    fast = optimize(model.network, inputs, "auto", precision="auto", search=False)
    error = float((fast(*inputs).double() - reference.double()).norm() / reference.double().norm())
    teraflop = counter.get_total_flops() / 1e12
    add(rows, "voxtune_step_128", [128, 128, 128], teraflop, error, sustain(lambda: fast(*inputs), options.seconds))

    rows[-1]["share_of_sustained_product"] = round(rows[-1]["tflop_per_s"] / rows[0]["tflop_per_s"], 3)
    print("share of the sustained product rate:", rows[-1]["share_of_sustained_product"])
    about = {
        "weights": "random",
        "nominal_tflop_per_s": NOMINAL_TFLOPS,
        "error_against": "float64 (product), float32 (step)",
    }
    write(options.out, rows, **about)


if __name__ == "__main__":
    main()
