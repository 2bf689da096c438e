"""Rung 0: the network as a CPU program, multi-threaded and vectorised by PyTorch, and one block on CPU and GPU.

The reports compare their kernels with a CPU program. This one runs on the processor of the machine that runs the rungs.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from voxtune.diffusion.noise import noise_source
from voxtune.diffusion.samplers import ddpm
from voxtune.workloads.convnext import ConvNextBlock

if TYPE_CHECKING:
    from voxtune.ladder.rungs import Setting

# Seconds of sampling that are measured; the time of the remaining steps is extrapolated.
MEASURED_S = 2.0
REPEATS, BLOCK_CALLS = 5, 20


def cpu_program(setting: Setting, x: Tensor, t: int, truth: Tensor, *, repeats: int = REPEATS) -> dict[str, Any]:
    """Milliseconds of all sampling steps with update and noise in float32, and the error of one step against `truth`."""
    network = copy.deepcopy(setting.network).float().cpu().eval()
    steps = len(setting.timesteps)
    noises = noise_source(0, range(setting.batch), (setting.network.config.channels, *setting.size))
    draws = [noises(number) for number in range(steps + 1)]

    @torch.no_grad()
    def run(count: int) -> None:
        ddpm(network, draws[0], setting.schedule, setting.timesteps[:count], noise=draws.__getitem__)

    with torch.no_grad():
        output = network(x, torch.full((setting.batch,), t))
    error = float((output.double() - truth).norm() / truth.norm())
    one = _seconds(lambda: run(1))
    some = max(1, min(steps, int(MEASURED_S / one)))
    totals = [1e3 * _seconds(lambda: run(some)) * steps / some for _ in range(repeats)]
    return {
        "threads": torch.get_num_threads(),
        "total_ms": statistics.median(totals),
        "totals_ms": totals,
        "measured_steps": some,
        "error": error,
    }


def block_times(setting: Setting, device: torch.device) -> dict[str, Any] | None:
    """Seconds of the first ConvNeXt block on the GPU and on the CPU, float32, batch as in `setting`; None without a GPU."""
    if device.type != "cuda":
        return None
    calls: list[tuple[nn.Module, list[Tensor]]] = []
    network = copy.deepcopy(setting.network).float().to(device).eval()
    block = next(m for m in network.modules() if isinstance(m, ConvNextBlock))
    handle = block.register_forward_pre_hook(lambda m, inputs: calls.append((m, list(inputs))))
    image = torch.zeros(setting.batch, setting.network.config.channels, *setting.size, device=device)
    with torch.no_grad():
        network(image, torch.zeros(setting.batch, dtype=torch.int64, device=device))
        handle.remove()
        inputs = calls[0][1]
        on_cpu, host = copy.deepcopy(block).cpu(), [t.cpu() for t in inputs]

        def on_gpu() -> None:
            for _ in range(BLOCK_CALLS):
                block(*inputs)
            torch.cuda.synchronize(device)

        on_gpu()
        on_cpu(*host)
        return {
            "gpu_s": statistics.median(_seconds(on_gpu) / BLOCK_CALLS for _ in range(REPEATS)),
            "cpu_s": statistics.median(_seconds(lambda: on_cpu(*host)) for _ in range(REPEATS)),
            "shape": list(inputs[0].shape),
        }


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
