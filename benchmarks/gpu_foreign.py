"""Networks of other libraries in every way of running them, beside `voxtune.optimize`: benchmarks/results/h200/foreign.json.

Rows are named NETWORK:WAY; all ways of one network are measured in one run, by a process of its own that measures one way after
the other. The weights are random, without zeros. Errors are relative, against float64, or against float32 where a network does
not accept float64. `replay_p50_ms` is the time of the recorded CUDA graph alone. `first_s` is the time to the first answer in a
process that has run the ways before; with `--prepare`, which compiles all networks beforehand, several at a time, kernels are
compiled already. `first_cold_s` and `first_warm_s` (`--first`) are those of Voxtune in a fresh process without any cache, and in
the next one.

    python benchmarks/gpu_foreign.py --networks nnunet_plain_128,segresnet_128 --ways fp32,autocast,voxtune
    python benchmarks/gpu_foreign.py --networks nnunet_plain_128 --profile     # kernels of the plan, in the order of their time
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import functools
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from networks import nnunet_plain, nnunet_resenc_l, segresnet
from results_file import RESULTS, row, timed, write
from torch import Tensor, nn
from torch.nn import functional as F

import voxtune
from voxtune.plan.gate import volumes_of
from voxtune.precision import tf32_allowed
from voxtune.workloads import without_zeros

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
SEED = 0
# The measured calls of one way take at most this long, unless five take longer.
LONGEST_MS = 6000


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(SEED), device="cpu")


def nnunet_plain_128() -> tuple[nn.Module, Inputs]:
    return nnunet_plain(), ((_random(1, 1, 128, 128, 128),), {})


def nnunet_resenc_l_128() -> tuple[nn.Module, Inputs]:
    return nnunet_resenc_l(), ((_random(1, 1, 128, 128, 128),), {})


def segresnet_128() -> tuple[nn.Module, Inputs]:
    return segresnet(), ((_random(1, 4, 128, 128, 128),), {})


def monai_unet_128() -> tuple[nn.Module, Inputs]:
    from monai.networks.nets import UNet

    net = UNet(3, 1, 2, (32, 64, 128, 256, 320), (2, 2, 2, 2), num_res_units=2)
    return net, ((_random(1, 1, 128, 128, 128),), {})


def maisi_unet() -> tuple[nn.Module, Inputs]:
    from monai.apps.generation.maisi.networks.diffusion_model_unet_maisi import DiffusionModelUNetMaisi

    net = DiffusionModelUNetMaisi(
        spatial_dims=3, in_channels=4, out_channels=4, num_channels=(64, 128, 256, 512), num_res_blocks=2,
        attention_levels=(False, False, True, True), num_head_channels=(0, 0, 32, 32), use_flash_attention=True,
        include_top_region_index_input=True, include_bottom_region_index_input=True, include_spacing_input=True,
    )  # fmt: skip
    regions = {"top_region_index_tensor": torch.tensor([[0.0, 1, 0, 0]])}
    regions |= {"bottom_region_index_tensor": torch.tensor([[0.0, 0, 1, 0]]), "spacing_tensor": torch.rand(1, 3)}
    return net, ((_random(1, 4, 64, 64, 32), torch.tensor([120])), regions)


def _maisi_decoder(size: int) -> tuple[nn.Module, Inputs]:
    from monai.apps.generation.maisi.networks.autoencoderkl_maisi import AutoencoderKlMaisi

    net = AutoencoderKlMaisi(
        spatial_dims=3, in_channels=1, out_channels=1, latent_channels=4, num_channels=(64, 128, 256),
        num_res_blocks=(2, 2, 2), norm_num_groups=32, norm_eps=1e-6, attention_levels=(False, False, False),
        with_encoder_nonlocal_attn=False, with_decoder_nonlocal_attn=False, use_checkpointing=False,
        use_convtranspose=False, norm_float16=False, num_splits=1, dim_split=1,
    ).decoder  # fmt: skip
    return net, ((_random(1, 4, *[size // 4] * 3),), {})


class _WanDecoder(nn.Module):
    """A video autoencoder's decoder without its cache: one short clip at once."""

    def __init__(self) -> None:
        from diffusers import AutoencoderKLWan

        super().__init__()
        self.decoder = AutoencoderKLWan().decoder

    def forward(self, z: Tensor) -> Tensor:
        return self.decoder(z)


def wan_decoder() -> tuple[nn.Module, Inputs]:
    return _WanDecoder(), ((_random(1, 16, 3, 32, 32),), {})


def diffusers_unet2d() -> tuple[nn.Module, Inputs]:
    from diffusers import UNet2DConditionModel

    net = UNet2DConditionModel(sample_size=64, cross_attention_dim=768)
    return net, ((_random(1, 4, 64, 64), torch.tensor([120]), _random(1, 77, 768)), {})


def convnext_2d() -> tuple[nn.Module, Inputs]:
    from voxtune.workloads import build, workload

    return build(workload("convnext").network), ((_random(1, 3, 64, 64), torch.tensor([60])), {})


class _Gated(nn.Module):
    """Gated 3D blocks that write in place wherever they can; no library has this network."""

    def __init__(self, width: int = 48, depth: int = 4):
        super().__init__()
        self.stem = nn.Conv3d(2, width, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv3d(width, 2 * width, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.GroupNorm(8, 2 * width) for _ in range(depth))
        self.head = nn.Conv3d(width, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            a, b = norm(conv(x)).chunk(2, dim=1)
            x.add_(a.mul_(b.sigmoid_())).mul_(0.7071)
        return self.head(F.elu_(x)).sub_(0.1)


class _Pyramid(nn.Module):
    """A pyramid with instance norms, PReLU and pooling, in-place residual sums, and two outputs."""

    def __init__(self, width: int = 24):
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.stem = nn.Conv3d(1, width, 3, padding=1)
        self.blocks = nn.ModuleList(self._block(w, w) for w in widths)
        self.down = nn.ModuleList(nn.Conv3d(a, b, 2, stride=2) for a, b in itertools.pairwise(widths))
        self.lateral = nn.ModuleList(nn.Conv3d(w, width, 1) for w in widths)
        self.out = nn.Conv3d(width, 3, 3, padding=1)

    @staticmethod
    def _block(a: int, b: int) -> nn.Module:
        conv = [nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b, affine=True), nn.PReLU(b)]
        return nn.Sequential(*conv, nn.Conv3d(b, b, 3, padding=1), nn.InstanceNorm3d(b, affine=True))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.stem(x)
        levels = []
        for index, block in enumerate(self.blocks):
            x = F.relu_(block(x).add_(x))
            levels.append(self.lateral[index](x))
            if index < len(self.down):
                x = self.down[index](x)
        y = levels.pop()
        while levels:
            y = F.interpolate(y, scale_factor=2, mode="nearest")
            y.add_(levels.pop())
        return {"classes": self.out(y), "mean": y.mean(dim=(2, 3, 4))}


def in_place_gated() -> tuple[nn.Module, Inputs]:
    return _Gated(), ((_random(1, 2, 96, 96, 96),), {})


def in_place_pyramid() -> tuple[nn.Module, Inputs]:
    return _Pyramid(), ((_random(1, 1, 128, 128, 96),), {})


BUILDERS = (nnunet_plain_128, nnunet_resenc_l_128, segresnet_128, maisi_unet, monai_unet_128, wan_decoder)
BUILDERS += (diffusers_unet2d, convnext_2d, in_place_gated, in_place_pyramid)
NETWORKS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {f.__name__: f for f in BUILDERS}
NETWORKS |= {"maisi_decoder_128": lambda: _maisi_decoder(128), "maisi_decoder_256": lambda: _maisi_decoder(256)}


@functools.cache
def built(name: str) -> tuple[nn.Module, Inputs]:
    """Initialised on the GPU, which is faster, and kept in host memory: the ways' own memory is measured."""
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        net, inputs = NETWORKS[name]()
        without_zeros(net)
    return net.eval().cpu(), inputs


def made(name: str) -> tuple[nn.Module, Inputs]:
    net, (args, kwargs) = built(name)
    device = lambda x: x.cuda() if isinstance(x, Tensor) else x  # noqa: E731
    return copy.deepcopy(net).cuda(), (tuple(map(device, args)), {k: device(v) for k, v in kwargs.items()})


def _last(x: Any) -> Any:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if isinstance(x, Tensor) and x.dim() in formats else x


def plain(*, tf32: bool) -> Callable[..., Callable[[], Any]]:
    def make(net: nn.Module, args: tuple, kwargs: dict) -> Callable[[], Any]:
        def step() -> Any:
            with tf32_allowed(tf32):
                return net(*args, **kwargs)

        return step

    return make


def autocast(net: nn.Module, args: tuple, kwargs: dict) -> Callable[[], Any]:
    def step() -> Any:
        with torch.autocast("cuda", torch.bfloat16):
            return net(*args, **kwargs)

    return step


def compiled(mode: str) -> Callable[..., Callable[[], Any]]:
    def make(net: nn.Module, args: tuple, kwargs: dict) -> Callable[[], Any]:
        torch._dynamo.reset()
        torch.backends.cudnn.benchmark = True  # the fastest setting for PyTorch
        for p in net.parameters():
            p.data = _last(p.data)
        fast = torch.compile(net, dynamic=False, mode=mode)
        moved = tuple(map(_last, args))
        return autocast(fast, moved, kwargs)

    return make


def optimized(**options: Any) -> Callable[..., Callable[[], Any]]:
    def make(net: nn.Module, args: tuple, kwargs: dict) -> Callable[[], Any]:
        fast = voxtune.optimize(net, args, example_kwargs=kwargs, **options, say=lambda line: print("   ", line))
        print("   ", fast.report().replace("\n", "\n    "), flush=True)
        step = lambda: fast(*args, **kwargs)  # noqa: E731
        step.passes, step.network = fast.plan.names, fast  # type: ignore[attr-defined]
        return step

    return make


WAYS = {
    "fp32": plain(tf32=False),
    "tf32": plain(tf32=True),
    "autocast": autocast,
    "compile": compiled("default"),
    "compile_reduce_overhead": compiled("reduce-overhead"),
    "compile_max_autotune": compiled("max-autotune-no-cudagraphs"),
    "voxtune": optimized(precision="bf16"),
    "voxtune_same": optimized(),
}


def reference(name: str) -> tuple[list[Tensor], str]:
    net, (args, kwargs) = made(name)
    wide = lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    try:
        output = net.double()(*map(wide, args), **{k: wide(v) for k, v in kwargs.items()})
        return [y.float().cpu() for y in volumes_of(output)], "float64"
    except (RuntimeError, torch.OutOfMemoryError):
        torch.cuda.empty_cache()
        with tf32_allowed(False):
            return [y.float().cpu() for y in volumes_of(net.float()(*args, **kwargs))], "float32"


def error_of(output: Any, expected: list[Tensor]) -> float:
    pairs = zip(volumes_of(output), expected, strict=True)
    return max(float((y.float().cpu() - r).norm() / r.norm()) for y, r in pairs)


@torch.no_grad()
def measure(name: str, way: str, expected: list[Tensor], kind: str, runs: int) -> dict[str, Any]:
    benchmark = torch.backends.cudnn.benchmark
    net, (args, kwargs) = made(name)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    started = time.monotonic()
    try:
        step = WAYS[way](net, args, kwargs)
        output = step()
        torch.cuda.synchronize()
        first = time.monotonic() - started
        error = error_of(output, expected)
        del output
        once = timed(step, 1)[0]
        runs = max(5, min(runs, int(LONGEST_MS / once)))
        times = timed(step, runs, warm=min(5, runs))
        size = list(args[0].shape[2:])
        more = {"first_s": round(first, 2), "error_against": kind, "passes": list(getattr(step, "passes", ()))}
        result = row(f"{name}:{way}", size, times, torch.cuda.max_memory_reserved() / 2**30, error)
        if (replay := _replay(step)) is not None:
            more["replay_p50_ms"] = round(statistics.median(timed(replay, runs, warm=min(5, runs))), 3)
        return result | {k: v for k, v in more.items() if v}
    except Exception as error_:
        return {"name": f"{name}:{way}", "failed": f"{type(error_).__name__}: {str(error_)[:200]}"}
    finally:
        torch.backends.cudnn.benchmark = benchmark


@torch.no_grad()
def profile(name: str) -> None:
    """The kernels of the plan, without its CUDA graph, in the order of their time."""
    net, (args, kwargs) = made(name)
    fast = voxtune.optimize(net, args, example_kwargs=kwargs, precision="bf16", search=False)
    runner = fast.runner
    runner.in_force = runner.in_force - {"cuda_graph"}
    for _ in range(3):
        fast(*args, **kwargs)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], record_shapes=False) as traced:
        for _ in range(5):
            fast(*args, **kwargs)
        torch.cuda.synchronize()
    events = sorted(traced.key_averages(), key=lambda e: -e.self_device_time_total)
    total = sum(e.self_device_time_total for e in events)
    print(f"{name}: {total / 5e3:.3f} ms of kernels a call")
    for event in events[:22]:
        print(f"  {event.self_device_time_total / 5e3:8.3f} ms  {event.count // 5:4d} x  {event.key[:100]}")


def _replay(step: Any) -> Callable[[], None] | None:
    """The recorded graph of Voxtune's plan alone: without the host's work in a call, and the copies in and out."""
    network = getattr(step, "network", None)
    graph = None if network is None or network.variant.runner is None else network.runner.graph
    return None if graph is None else graph.recorded.replay


def measure_here(names: Sequence[str], ways: Sequence[str], runs: int, out: Path, *, profiles: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name in names:
        with torch.no_grad():
            expected, kind = reference(name)
        for way in ways:
            rows.append(measure(name, way, expected, kind, runs))
            show(rows[-1])
            write(out, rows)
        if profiles:
            profile(name)


def show(r: dict[str, Any]) -> None:
    failed = r.get("failed")
    figures = (
        ""
        if failed
        else f"{r['p50_ms']:8.3f} ms  error {r['error']:.1e}  {r['peak_gib']:.2f} GiB  first {r['first_s']} s"
    )
    print(f"{r['name']:44} {failed or figures}", flush=True)


def process(folder: str, *options: str, kernels: bool = False) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a process with a cache of plans of its own and, with `kernels`, of compiled kernels."""
    own = {"VOXTUNE_CACHE": f"{folder}/plans", **({"TRITON_CACHE_DIR": f"{folder}/kernels"} if kernels else {})}
    return [sys.executable, __file__, *options], os.environ | own


def measure_apart(name: str, ways: Sequence[str], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures one network in a process of its own, and notes the ways that did not finish in time."""
    with tempfile.TemporaryDirectory() as folder:
        part = Path(folder) / "rows.json"
        options = [
            "--here",
            "--networks",
            name,
            "--ways",
            ",".join(ways),
            "--out",
            str(part),
            "--runs",
            str(given.runs),
        ]
        command, environment = process(folder, *options, *(["--profile"] if given.profile else []))
        started, ended = time.monotonic(), "failed"
        try:
            subprocess.run(command, timeout=given.limit, check=False, env=environment)
        except subprocess.TimeoutExpired:
            ended = f"did not finish: {name} was stopped after {time.monotonic() - started:.0f} s"
        rows = json.loads(part.read_text())["rows"] if part.is_file() else []
    done = {r["name"] for r in rows}
    return [*rows, *({"name": f"{name}:{w}", "failed": ended} for w in ways if f"{name}:{w}" not in done)]


def first_answers(name: str, way: str, limit: float) -> dict[str, float]:
    """Seconds to the first answer in a process without any cache, and in the next one with its caches."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        command, environment = process(folder, "--first-only", "--networks", name, "--ways", way, kernels=True)
        for state in ("first_cold_s", "first_warm_s"):
            try:
                done = subprocess.run(
                    command, timeout=limit, check=False, env=environment, stdout=subprocess.PIPE, text=True
                )
                seconds[state] = float(done.stdout.splitlines()[-1])
            except (subprocess.TimeoutExpired, IndexError, ValueError):
                break
    print(f"{name}:{way:36} first answers {seconds}", flush=True)
    return seconds


@torch.no_grad()
def first_only(name: str, way: str) -> None:
    net, (args, kwargs) = made(name)
    torch.cuda.synchronize()
    started = time.monotonic()
    WAYS[way](net, args, kwargs)()
    torch.cuda.synchronize()
    print(round(time.monotonic() - started, 2), flush=True)


def prepare(names: Sequence[str], ways: Sequence[str], limit: float) -> None:
    """Compiles what the ways need into the caches of torch.compile and Triton: this takes the CPU, and no measurement runs."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for name in names:
            command, environment = process(folder, "--compile-only", "--ways", ",".join(ways), "--networks", name)
            processes.append(subprocess.Popen(command, env=environment | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}))
        for running in processes:
            try:
                running.wait(max(1.0, limit - (time.monotonic() - started)))
            except subprocess.TimeoutExpired:
                running.kill()
    print(f"compiled ahead in {time.monotonic() - started:.0f} s", flush=True)


@torch.no_grad()
def compile_only(name: str, ways: Sequence[str]) -> None:
    for way in ways:
        net, (args, kwargs) = made(name)
        WAYS[way](net, args, kwargs)()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--ways", default=",".join(w for w in WAYS if w != "compile_max_autotune"))
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="list the kernels of Voxtune's plan")
    parser.add_argument(
        "--prepare", type=float, default=0.0, metavar="SECONDS", help="compile ahead, at most this long"
    )
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="stop a network after this time")
    parser.add_argument("--here", action="store_true", help="measure in this process")
    parser.add_argument(
        "--first", default="", metavar="NETWORKS", help="time Voxtune's first answers in fresh processes"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="keep this file's rows of networks that are not measured"
    )
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--first-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "foreign.json")
    parser.add_argument("--prepare-only", action="store_true", help="measure nothing")
    given = parser.parse_args()
    names, ways = given.networks.split(","), given.ways.split(",")
    if given.compile_only:
        return compile_only(names[0], ways)
    if given.first_only:
        return first_only(names[0], ways[0])
    if given.here:
        # Where a way hangs, if it does.
        faulthandler.dump_traceback_later(90, repeat=True)
        return measure_here(names, ways, given.runs, given.out, profiles=given.profile)
    slow = ("max_autotune", "fp32", "tf32", "autocast")
    if given.prepare:
        prepare(names, [w for w in ways if not w.endswith(slow)], given.prepare)
    if given.prepare_only:
        return None
    rows = kept_rows(given.keep, names) if given.keep else []
    for name in names:
        rows += measure_apart(name, ways, given)
        write(given.out, rows)
        if name in given.first.split(","):
            seconds = first_answers(name, "voxtune", given.limit)
            rows = [r | seconds if r["name"] == f"{name}:voxtune" else r for r in rows]
        write(given.out, rows)
    return None


def kept_rows(file: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a file for other networks, each with the commit at which it was measured."""
    record = json.loads(file.read_text())
    rows = [{"commit": record["commit"], **row} for row in record["rows"]]
    return [row for row in rows if row["name"].partition(":")[0] not in names]


if __name__ == "__main__":
    main()
