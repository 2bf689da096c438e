"""Chains of elementwise operators in one kernel, compared with PyTorch's operators one by one and with a copy.

`copy_share` is the time of a device-to-device copy of the minimum traffic (each input read once, the result written once),
divided by the time of the chain. Afterwards the chains are timed with other numbers of elements per program; these times are
printed, but not stored.

    python benchmarks/gpu_elementwise.py [--no-trials]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest.mock import patch

import torch
from gpu_group_norm import copy_bandwidth
from gpu_small_kernels import Bench
from results_file import RESULTS, measure, show, write
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels import elementwise as kernels

GATE, GEGLU, ACTIVATION = "sigmoid 0; mul 1 3; add 2 4; mul 5 0.7071", "gelu 0; mul 1 2", "add 0 1; gelu 2"
# (channels of the gate, voxels per side); the second one's are no multiple of 8
GATES = [(48, 96), (20, 96), (128, 32)]
# (tokens, channels) of the two levels of a latent diffusion U-Net
TOKENS = [(4096, 1280), (1024, 2560)]
# (channels, sides) of volumes and images whose convolution has a bias
CONVOLUTIONS = [(64, (128,) * 3), (64, (64, 64)), (512, (8, 8))]


def plain_gate(b: Tensor, a: Tensor, x: Tensor) -> Tensor:
    return (x + a * torch.sigmoid(b)) * 0.7071


def plain_geglu(gate: Tensor, a: Tensor) -> Tensor:
    return a * F.gelu(gate)


def plain_activation(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


def cases(bench: Bench):
    """(label, program, PyTorch's function, inputs)"""
    for channels, side in GATES:
        both, x = (bench.random(1, c, side, side, side) for c in (2 * channels, channels))
        halves = (both[:, channels:], both[:, :channels])
        yield f"gate of {channels} channels at {side}", GATE, plain_gate, (*halves, x)
    for tokens, channels in TOKENS:
        both = bench.random(1, tokens, 2 * channels)
        yield f"GEGLU {tokens} x {channels}", GEGLU, plain_geglu, (both[..., channels:], both[..., :channels])
    for channels, sides in CONVOLUTIONS:
        x = torch.randn(1, *sides, channels, device="cuda", dtype=bench.dtype).movedim(-1, 1)
        bias = bench.random(1, channels, *[1] * len(sides))
        yield f"bias and GELU of {channels} at {sides[0]}", ACTIVATION, plain_activation, (x, bias)


def trials(bench: Bench) -> None:
    for label, program, _, inputs in cases(bench):
        for block in (256, 512, 1024, 2048, 4096):
            kernels.launch_of.cache_clear()
            with patch.object(kernels, "BLOCK", block), patch.object(kernels, "SMALL_BLOCK", block):
                times = sorted(measure(lambda p=program, i=inputs: kernels.elementwise(i, p, bench.dtype)))
            print(f"trial {label:40} {block:5} elements {times[len(times) // 2]:8.4f} ms", flush=True)
    kernels.launch_of.cache_clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "elementwise.json")
    parser.add_argument("--no-trials", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e9:.2f} TB/s")
    bench = Bench(torch.bfloat16, bandwidth)
    for label, program, plain, inputs in cases(bench):
        methods = {
            "torch": lambda plain=plain, inputs=inputs: plain(*inputs),
            "voxtune": lambda p=program, i=inputs: kernels.elementwise(i, p, bench.dtype),
        }
        bench.measure(label, list(inputs), plain(*(x.double() for x in inputs)), methods)
    write(given.out, bench.rows, copy_tb_s=round(bandwidth / 1e9, 3), type="bfloat16")
    if not given.no_trials:
        trials(bench)
    show(bench.rows)


if __name__ == "__main__":
    main()
