"""One training step of the whole-head network in BF16, channels-last, on a GPU: with PyTorch's gradients of head and doubling,
and with this project's own; then these two layers alone.

A step is forward and backward of the mean absolute error, without optimizer and data. Errors are of all gradients as one
vector, against float32 without TF32.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from results_file import RESULTS, row, show, timed, write
from torch import Tensor, nn
from torch.nn import functional as F

from voxtune.precision import tf32_allowed
from voxtune.workloads import build, gradients, med_ddpm, without_zeros, workload
from voxtune.workloads.gradients import Doubled, Head, doubled

# (batch, side): as published, and as the demonstration model is trained.
SHAPES = ((1, 128), (8, 64))
LAST = torch.channels_last_3d
Gradients = list[Tensor]


def away(found: Gradients, wanted: Gradients) -> float:
    difference = sum(float((a.double() - b.double()).square().sum()) for a, b in zip(found, wanted, strict=True))
    return (difference / sum(float(b.double().square().sum()) for b in wanted)) ** 0.5


def noted(name: str, shape: list[int], run: Callable[[], Gradients], wanted: Gradients) -> dict[str, Any]:
    error = away(run(), wanted)
    torch.cuda.reset_peak_memory_stats()
    times = timed(run, 10, warm=2)
    made = row(name, shape, times, torch.cuda.max_memory_allocated() / 2**30, error)
    print(f"{name}: {made['p50_ms']:.2f} ms, error {error:.1e}", flush=True)
    return made


def gradients_of(
    network: nn.Module, forward: Callable[..., Tensor], given: tuple[Tensor, ...], noise: Tensor
) -> Gradients:
    parameters = [p for p in network.parameters() if p.requires_grad]
    return list(torch.autograd.grad(F.l1_loss(forward(*given).float(), noise), parameters))


def steps(compiled: bool) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    network = build(workload("med-ddpm").network)
    without_zeros(network)
    network = network.cuda().train().to(memory_format=LAST)
    rows = []
    for batch, side in SHAPES:
        voxels = (side,) * 3
        x, noise = (torch.randn(batch, 1, *voxels, device="cuda") for _ in range(2))
        given = (
            x.contiguous(memory_format=LAST),
            torch.arange(batch, device="cuda") * 25,
            torch.randn(batch, 2, *voxels, device="cuda"),
        )
        exact = copy.deepcopy(network)
        with tf32_allowed(False):
            wanted = gradients_of(exact, exact, given, noise)
        del exact
        for name, ours in (("torch", False), ("voxtune", True)):
            for way in ("eager", "compile") if compiled else ("eager",):
                torch._dynamo.reset()
                torch.cuda.empty_cache()
                forward = torch.compile(network, dynamic=False) if way == "compile" else network

                def step(forward: Any = forward, given: Any = given, noise: Tensor = noise) -> Gradients:
                    with torch.autocast("cuda", dtype=torch.bfloat16):
                        return gradients_of(network, forward, given, noise)

                with as_told(ours):
                    rows.append(noted(f"step {way} bf16 {name} {batch} x {side}", [batch, 3, *voxels], step, wanted))
    return rows


@contextmanager
def as_told(ours: bool) -> Iterator[None]:
    """PyTorch's own gradients, or ours."""
    answer = gradients.trained_in_16_bits if ours else lambda _module, _x: False
    with patch.object(gradients, "trained_in_16_bits", answer), patch.object(med_ddpm, "trained_in_16_bits", answer):
        yield


def layers() -> list[dict[str, Any]]:
    torch.manual_seed(0)
    shape = (1, 64, 128, 128, 128)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=LAST).requires_grad_()
    head = Head(64, 1).cuda().to(torch.bfloat16)
    out = torch.randn(1, 1, *shape[2:], device="cuda", dtype=torch.bfloat16)
    wide = copy.deepcopy(head).float()
    with tf32_allowed(False):
        wanted = list(
            torch.autograd.grad(
                F.conv3d(x.float(), wide.weight, wide.bias, padding=1), [wide.weight, wide.bias], out.float()
            )
        )
    rows = []
    for name, form in (("torch", lambda x: F.conv3d(x, head.weight, head.bias, padding=1)), ("voxtune", head.widened)):
        run = lambda form=form: list(torch.autograd.grad(form(x), [head.weight, head.bias], out))  # noqa: E731
        rows.append(noted(f"head 64 -> 1, weight's gradient, {name}", list(out.shape), run, wanted))
    half = (
        torch.randn(1, 64, 64, 64, 64, device="cuda", dtype=torch.bfloat16)
        .contiguous(memory_format=LAST)
        .requires_grad_()
    )
    gradient = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=LAST)
    exact = half.detach().float().requires_grad_()
    wanted = list(torch.autograd.grad(doubled(exact), [exact], gradient.float()))
    for name, form in (("torch", lambda x: doubled(x.float()).to(x.dtype)), ("voxtune", Doubled.apply)):
        run = lambda form=form: list(torch.autograd.grad(form(half), [half], gradient))  # noqa: E731
        rows.append(noted(f"doubling 64 channels to 128, {name}", list(shape), run, wanted))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--compile", action="store_true", help="also compiled steps; each takes most of a minute to make"
    )
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "h200" / "unet3d_train.json")
    asked = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    rows = layers()
    write(asked.out, rows)
    rows += steps(asked.compile)
    write(asked.out, rows)
    show(rows)


if __name__ == "__main__":
    main()
