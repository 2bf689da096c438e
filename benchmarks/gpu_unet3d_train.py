"""One training step on a GPU in every way: forward and backward pass, clipping, Adam and the moving average of the weights.

Each way runs in a process of its own, so that its peak memory is its own. Rows are named WAY or NETWORK:WAY. The error is that of
the whole gradient, relative, against float64, or against float32 without TF32 where the volume is too large for float64.

    python benchmarks/gpu_unet3d_train.py --size 128 --ways torch_compile_bf16,voxtune
    python benchmarks/gpu_unet3d_train.py --size 64 --ways voxtune --profile   # kernels of one step, in the order of their time
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from networks import inputs, network
from results_file import RESULTS, row, show, timed, write
from torch import Tensor, nn

from voxtune.plan.plan import Plan
from voxtune.plan.training import training_network, training_passes
from voxtune.precision import tf32_allowed

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
# Float64 gradients of larger volumes do not fit, or take minutes.
LARGEST_FLOAT64 = 64**3
Forward = Callable[..., Any]


def last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=FORMATS[x.dim()]) if x.dim() in FORMATS else x


def plain(net: nn.Module, _xs: tuple[Tensor, ...]) -> Forward:
    return net


def autocast(net: nn.Module, _xs: tuple[Tensor, ...]) -> Forward:
    def forward(*xs: Tensor) -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return net(*xs)

    return forward


def compiled(net: nn.Module, xs: tuple[Tensor, ...]) -> Forward:
    for p in net.parameters():
        p.data = last(p.data)
    return autocast(torch.compile(net, dynamic=False), xs)


def voxtune(net: nn.Module, xs: tuple[Tensor, ...]) -> Forward:
    return training_network(net, xs, None, Plan.of(*training_passes("bf16")))


def cudnn_weight_gradients(net: nn.Module, xs: tuple[Tensor, ...]) -> Forward:
    from voxtune.kernels import conv3d_weight_gradient

    conv3d_weight_gradient.METHOD = "cudnn"
    return voxtune(net, xs)


# The forward pass, whether TF32 is on, whether the volumes are channels-last, and whether the step is one CUDA graph.
WAYS: dict[str, tuple[Callable[..., Forward], bool, bool, bool]] = {
    "baseline_fp32": (plain, False, False, False),
    "tf32": (plain, True, False, False),
    "autocast_bf16": (autocast, True, False, False),
    "torch_compile_bf16": (compiled, True, True, False),
    "voxtune_eager": (voxtune, True, True, False),
    "voxtune": (voxtune, True, True, True),
    "voxtune_cudnn_weight_gradients": (cudnn_weight_gradients, True, True, True),
}


class Step:
    """What one training step does, whatever computes the network."""

    def __init__(self, net: nn.Module, forward: Forward, xs: tuple[Tensor, ...], target: Tensor):
        self.forward, self.xs, self.target = forward, xs, target
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-5, fused=True, capturable=True)

    def gradients(self) -> Tensor:
        y = self.forward(*self.xs)
        y = y[0] if isinstance(y, tuple) else y
        loss = (y.float() - self.target).abs().mean()
        loss.backward()
        return loss

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients()
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        torch._foreach_lerp_(self.average, self.parameters, 5e-3)

    def recorded(self) -> Callable[[], None]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph, stream=side):
            self()
        return graph.replay


@contextmanager
def settings(*, tf32: bool, search: bool = True) -> Iterator[None]:
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = search  # the fastest setting of PyTorch; its search takes long in float32
    try:
        with tf32_allowed(tf32):
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark


def given(name: str, size: Sequence[int], batch: int, *, channels_last: bool) -> tuple[tuple[Tensor, ...], Tensor]:
    xs = tuple(x.repeat(batch, *[1] * (x.dim() - 1)).cuda() for x in inputs(name, tuple(size)))
    target = torch.randn(xs[0].shape, generator=torch.Generator().manual_seed(1)).cuda()
    return (tuple(map(last, xs)), last(target)) if channels_last else (xs, target)


def flat(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.grad.detach().double().flatten().cpu() for p in parameters if p.grad is not None])


def true_gradient(name: str, size: Sequence[int], batch: int) -> tuple[Tensor, str]:
    xs, target = given(name, size, batch, channels_last=False)
    kind = "float64" if xs[0].numel() <= LARGEST_FLOAT64 else "float32"
    net = network(name).cuda()
    if kind == "float64":
        net, target = net.double(), target.double()
        xs = tuple(x.double() if x.is_floating_point() else x for x in xs)
    with settings(tf32=False, search=False):
        y = net(*xs)
        (y - target).abs().mean().backward()
    return flat(list(net.parameters())), kind


def measure(
    name: str, way: str, size: Sequence[int], batch: int, runs: int, expected: Tensor, kind: str
) -> dict[str, Any]:
    build, tf32, channels_last, graph = WAYS[way]
    net = network(name).cuda()
    xs, target = given(name, size, batch, channels_last=channels_last)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with settings(tf32=tf32):
        step = Step(net, build(net, xs), xs, target)
        step.gradients()
        own = flat(step.parameters)
        error = float((own - expected).norm() / expected.norm())
        run = step.recorded() if graph else step
        times = timed(run, runs, warm=3)
    peak = torch.cuda.max_memory_reserved() / 2**30
    label = way if name == "med-ddpm" else f"{name}:{way}"
    return row(label, list(size), times, peak, error) | {"batch": batch, "error_against": kind}


def profile(name: str, way: str, size: Sequence[int], batch: int) -> None:
    build, tf32, channels_last, _ = WAYS[way]
    net = network(name).cuda()
    xs, target = given(name, size, batch, channels_last=channels_last)
    with settings(tf32=tf32):
        step = Step(net, build(net, xs), xs, target)
        for _ in range(3):
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
    events = sorted(traced.key_averages(), key=lambda e: -e.self_device_time_total)
    print(f"{name}:{way}: {sum(e.self_device_time_total for e in events) / 3e3:.2f} ms of kernels a step")
    for event in events[:40]:
        print(f"  {event.self_device_time_total / 3e3:8.3f} ms  {event.count // 3:4d} x  {event.key[:110]}")


def apart(name: str, way: str, size: Sequence[int], batch: int, runs: int, limit: float, truth: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--here", "--network", name, "--ways", way, "--runs", str(runs)]
    command += ["--size", ",".join(map(str, size)), "--truth", str(truth), "--batch", str(batch)]
    label = way if name == "med-ddpm" else f"{name}:{way}"
    try:
        done = subprocess.run(command, timeout=limit, check=False, stdout=subprocess.PIPE, text=True)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    except subprocess.TimeoutExpired:
        return {"name": label, "failed": f"did not finish within {limit:.0f} s"}
    except (IndexError, json.JSONDecodeError):
        return {"name": label, "failed": f"ended with exit code {done.returncode}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="med-ddpm")
    parser.add_argument("--size", default="128", help="one number, or three: 144,192,192")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=240.0, metavar="SECONDS", help="stop a way after this time")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--truth", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "unet3d_train.json")
    options = parser.parse_args()
    sides = [int(side) for side in options.size.split(",")]
    size = sides * 3 if len(sides) == 1 else sides
    ways = options.ways.split(",")
    if options.profile:
        return profile(options.network, ways[0], size, options.batch)
    if options.here:
        content = torch.load(options.truth, weights_only=True)
        result = measure(
            options.network, ways[0], size, options.batch, options.runs, content["gradient"], content["kind"]
        )
        print(json.dumps(result), flush=True)
        return None
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        truth = Path(folder) / "gradient.pt"
        gradient, kind = true_gradient(options.network, size, options.batch)
        torch.save({"gradient": gradient, "kind": kind}, truth)
        del gradient
        torch.cuda.empty_cache()
        for way in ways:
            rows.append(apart(options.network, way, size, options.batch, options.runs, options.limit, truth))
            if "failed" in rows[-1]:
                print(rows[-1], flush=True)
            else:
                show(rows[-1:])
            write(options.out, rows)
    return None


if __name__ == "__main__":
    main()
