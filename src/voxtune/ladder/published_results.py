"""Published times of the two student reports, with their hardware. They are shown next to ours; no ratio is computed.

Seconds for 100 sampling steps of the same network, unless stated otherwise.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

DESKTOP = "NVIDIA GeForce RTX 3080, CUDA 11.4"
JETSON = "NVIDIA Jetson Orin Nano"

# Component -> seconds: initial, with shared memory, with the layer norm reduced by warps.
COMPONENTS: dict[str, Any] = {
    "hardware": DESKTOP,
    "columns": ["at first", "shared memory", "layer norm"],
    "rows": {
        "relu": [1.71581, 0.892151, 0.897793],
        "gelu": [0.00920233, 0.00942388, 0.00975135],
        "sigmoid": [0.000942525, 0.000683858, 0.000681296],
        "upsample": [0.0682188, 0.165519, 0.193936],
        "identity": [0.0256201, 0.018709, 0.0212282],
        "linear": [0.0755192, 0.0811167, 0.0811167],
        "element_matmul": [5.0112e-05, 6.48e-05, 6.48e-05],
        "layer_norm": [8.6255, 9.42259, 5.73771],
        "conv2d_pad": [5.61538, 0.0, 0.0],
        # The report's table II omits the convolution (0); its table III contains it.
        "conv2d": [348.01, None, 37.6912],
        "total": [383.032822, 76.029448, 70.623295],
    },
}
# One convolution, milliseconds.
TRANSFERS: dict[str, Any] = {
    "hardware": DESKTOP,
    "total_ms": 0.075513,
    "up_ms": 0.008192,
    "kernel_ms": 0.027648,
    "down_ms": 0.011072,
}
# Seconds: convolution, other, transfers, total.
END_TO_END: dict[str, Any] = {
    "hardware": JETSON,
    "baseline_total_s": 380.3,
    "rows": {
        "CPU program": [25.3, 2.4, 0.3, 28.0],
        "activations copied": [1.79, 0.27, 4.74, 6.8],
        "activations copied asynchronously": [1.79, 0.27, 3.24, 5.3],
        "on the GPU": [1.79, 0.27, 0.44, 2.5],
    },
}
# Milliseconds from the first weight to the end of the first step, of 20 runs: best, worst, average.
FIRST_STEP: dict[str, Any] = {
    "hardware": JETSON,
    "rows": {
        "synchronous": [282.8, 497.7, 345.7],
        "asynchronous": [230.6, 1092.4, 424.989],
        "early": [233.1, 366.6, 266.4],
    },
}
BLOCK: dict[str, Any] = {"hardware": DESKTOP, "gpu_s": 5.2439e-5, "cpu_s": 0.0324831}
SPEEDUPS = {DESKTOP: 383.032822 / 70.623295, JETSON: 152.1}


def published_results() -> dict[str, Any]:
    return {
        "components": COMPONENTS,
        "transfers": TRANSFERS,
        "end_to_end": END_TO_END,
        "first_step": FIRST_STEP,
        "block": BLOCK,
        "speedups": SPEEDUPS,
    }


def recorded_results() -> dict[str, Any]:
    """The rungs as they were measured on an H200, with the reports' values; shipped, so that no GPU is needed."""
    data: dict[str, Any] = json.loads(resources.files("voxtune.ladder").joinpath("data/recorded.json").read_text())
    return data | {"seeds": published_results()}
