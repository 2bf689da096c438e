"""Training steps on a GPU in every way: forward and backward pass, clipping, Adam and the moving average of the weights.

Each way runs in a process of its own, so that its peak memory is its own. Rows are named WAY or NETWORK:WAY; shape and batch are
fields. The error is that of the whole gradient, relative, against float64, or against float32 without TF32 where the volume is
too large for float64.

peak_gib is what PyTorch reserved at most from the first step on, warm-up and recording included; allocated_gib is the part of it
that held tensors. held_gib is what is reserved while steps run, after the cache was emptied once. What `voxtune.optimize` needs
to choose and gate a plan is not part of them.

`voxtune` is the plan of `voxtune train` for this project's networks, and what `voxtune.optimize(net, inputs, train=True)` returns
for others; its step is recorded as a CUDA graph. With `--passes`, every pass that matched is left out once; one without which the
others do not run is measured on top of those before it.

    python benchmarks/gpu_unet3d_train.py --cases 128,monai,nnunet --prepare 150       # compile ahead, several at a time
    python benchmarks/gpu_unet3d_train.py --cases 128 --ways voxtune --passes --breakdown --keep FILE
    python benchmarks/gpu_unet3d_train.py --network segresnet --size 96 --ways torch_compile_bf16,voxtune
    python benchmarks/gpu_unet3d_train.py --size 64 --ways voxtune --profile   # kernels of one step, in the order of their time
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from networks import SEGMENTATION, inputs, network
from results_file import RESULTS, row, show, timed, write
from step_breakdown import breakdown_of, launches_of, mark
from torch import Tensor, nn
from torch.nn import functional as F
from training_ways import UP_TO, WITHOUT, Forward, last, way_of, ways_of_passes

from voxtune.plan.gate import volumes_of
from voxtune.precision import tf32_allowed

# Float64 gradients of larger volumes do not fit, or take minutes.
LARGEST_FLOAT64 = 64**3
# A float32 reference of more volumes of 128^3 than this does not fit; what exceeds KEPT_GIB then waits in host memory.
LARGEST_ON_GPU, KEPT_GIB = 6.0, 85
# The measured steps of one way take at most this long, unless five take longer.
LONGEST_MS = 6000
# Volumes of 128^3 whose steps fit into the memory together, and processes, of `--prepare`.
AT_ONCE, PROCESSES = 10.0, 8


@dataclass(frozen=True)
class Case:
    network: str
    size: tuple[int, ...]
    batch: int
    ways: tuple[str, ...]

    @property
    def volumes(self) -> float:
        return self.batch * math.prod(self.size) / 128**3

    def label(self, way: str) -> str:
        return way if self.network == "med-ddpm" else f"{self.network}:{way}"


RIVALS = ("torch_compile_bf16", "voxtune")
CUBE = (128, 128, 128)
CASES = {
    "128": Case("med-ddpm", CUBE, 1, ("baseline_fp32", "tf32", "autocast_bf16", *RIVALS)),
    "batch_2": Case("med-ddpm", CUBE, 2, RIVALS),
    "batch_4": Case("med-ddpm", CUBE, 4, RIVALS),
    "brats": Case("med-ddpm-brats", (144, 192, 192), 1, RIVALS),
    "256": Case("med-ddpm", (256, 256, 256), 1, RIVALS),
    "monai": Case("monai", CUBE, 1, RIVALS),
    "nnunet": Case("nnunet_plain", CUBE, 1, RIVALS),
    "segresnet": Case("segresnet", CUBE, 1, RIVALS),
}


class Step:
    """What one training step does, whatever computes the network. `marks`: for a breakdown."""

    def __init__(self, case: Case, net: nn.Module, forward: Forward, xs: tuple[Tensor, ...], targets: list[Tensor]):
        self.case, self.forward, self.xs, self.targets = case, forward, xs, targets
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self.average = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-5, fused=True, capturable=True)
        self.marks = False

    def gradients(self) -> None:
        self.mark("forward")
        loss = loss_of(self.case.network, self.forward(*self.xs), self.targets)
        self.mark("backward")
        loss.backward()

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients()
        self.mark("update")
        nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.optimizer.step()
        torch._foreach_lerp_(self.average, self.parameters, 5e-3)

    def mark(self, phase: str) -> None:
        if self.marks:
            mark(phase, self.parameters[0])

    def recorded(self) -> Callable[[], None]:
        """On the current stream, as all that went before: memory that another stream has cached would count twice."""
        for _ in range(3):
            self()
        torch.cuda.synchronize()
        self.optimizer.zero_grad(set_to_none=True)
        release()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            self()
        return graph.replay


def loss_of(name: str, output: Any, targets: Sequence[Tensor]) -> Tensor:
    """L1 of a predicted noise; of a segmentation cross-entropy and soft Dice. Summed where there are several results."""
    results = volumes_of(output)
    wide = [y.to(torch.promote_types(y.dtype, torch.float32)) for y in results]
    loss = segmentation_loss if name in SEGMENTATION else F.l1_loss
    return torch.stack([loss(y, t) for y, t in zip(wide, targets, strict=True)]).sum()


def segmentation_loss(y: Tensor, target: Tensor) -> Tensor:
    """Of labels that may overlap."""
    p, axes = y.sigmoid(), tuple(range(2, y.dim()))
    dice = 1 - (2 * (p * target).sum(axes) + 1) / (p.sum(axes) + target.sum(axes) + 1)
    return F.binary_cross_entropy_with_logits(y, target) + dice.mean()


def targets_of(case: Case, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """For results of these shapes. A batch repeats one sample, so that its gradient is that of the sample."""
    generator = torch.Generator().manual_seed(1)
    noise = [torch.randn(1, *shape[1:], generator=generator) for shape in shapes]
    targets = [(x > 0.5).float() for x in noise] if case.network in SEGMENTATION else noise
    return [repeated(x, case.batch).cuda() for x in targets]


def inputs_of(case: Case) -> tuple[Tensor, ...]:
    return tuple(repeated(x, case.batch).cuda() for x in inputs(case.network, case.size))


def repeated(x: Tensor, batch: int) -> Tensor:
    return x.repeat(batch, *[1] * (x.dim() - 1))


def network_of(case: Case) -> nn.Module:
    """In host memory."""
    return network(case.network).train()


def release() -> None:
    gc.collect()
    torch.cuda.empty_cache()


@contextmanager
def settings(*, tf32: bool, search: bool = True) -> Iterator[None]:
    benchmark = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = search  # the fastest setting of PyTorch; its search takes long in float32
    try:
        with tf32_allowed(tf32):
            yield
    finally:
        torch.backends.cudnn.benchmark = benchmark


def flat(parameters: Sequence[Tensor]) -> Tensor:
    return torch.cat([p.grad.detach().cpu().double().flatten() for p in parameters if p.grad is not None])


def offloaded() -> Any:
    """What a reference keeps for its backward pass, in host memory where the GPU's does not suffice."""

    def pack(x: Tensor) -> tuple[Tensor, bool]:
        away = x.is_cuda and x.numel() > 2**20 and torch.cuda.memory_allocated() > KEPT_GIB * 2**30
        return (x.cpu(), True) if away else (x, False)

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0].cuda() if kept[1] else kept[0])


def true_gradient(case: Case) -> dict[str, Any]:
    """The gradient of the same loss for one sample, its type, and the shapes of the results."""
    case = replace(case, batch=1)
    net, xs = network_of(case).cuda(), inputs_of(case)
    kind = "float64" if math.prod(case.size) <= LARGEST_FLOAT64 else "float32"
    if kind == "float64":
        net = net.double()
        xs = tuple(x.double() if x.is_floating_point() else x for x in xs)
    with settings(tf32=False, search=False), offloaded() if case.volumes > LARGEST_ON_GPU else nullcontext():
        output = net(*xs)
        shapes = [list(y.shape) for y in volumes_of(output)]
        targets = [t.to(y.dtype) for t, y in zip(targets_of(case, shapes), volumes_of(output), strict=True)]
        loss_of(case.network, output, targets).backward()
    gradient = flat(list(net.parameters()))
    return {"gradient": gradient if kind == "float64" else gradient.float(), "kind": kind, "shapes": shapes}


def measure(
    case: Case, way_name: str, net: nn.Module, runs: int, truth: dict[str, Any], *, broken_down: bool
) -> dict[str, Any]:
    way = way_of(way_name, case.network)
    net, xs, targets = net.cuda(), inputs_of(case), targets_of(case, truth["shapes"])
    if way.channels_last:
        xs, targets = tuple(map(last, xs)), list(map(last, targets))
    release()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    started = time.monotonic()
    stream = torch.cuda.Stream() if way.graph else torch.cuda.current_stream()
    with settings(tf32=way.tf32), torch.cuda.stream(stream):
        forward = way.build(net, xs)
        if way.chooses:  # its gate computes in float64, which no step does
            release()
            torch.cuda.reset_peak_memory_stats()
        step = Step(case, net, forward, xs, targets)
        step.gradients()
        own = flat(step.parameters)
        error = float((own - truth["gradient"]).norm() / truth["gradient"].norm())
        run = step.recorded() if way.graph else step
        run()
        torch.cuda.synchronize()
        first = time.monotonic() - started
        peaks = [torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()]
        release()
        torch.cuda.reset_peak_memory_stats()
        once = timed(run, 1)[0]
        times = timed(run, max(5, min(runs, int(LONGEST_MS / once))), warm=2)
        held = torch.cuda.max_memory_reserved()
        reserved, allocated = max(peaks[0], held), max(peaks[1], torch.cuda.max_memory_allocated())
        result = row(case.label(way_name), list(case.size), times, reserved / 2**30, error)
        result |= {"batch": case.batch, "error_against": truth["kind"], "first_s": round(first, 1)}
        result |= {"allocated_gib": round(allocated / 2**30, 3), "held_gib": round(held / 2**30, 3)}
        notes = getattr(forward, "notes", None)
        if notes is not None:
            result["passes"] = [name for name, note in notes.items() if note.startswith(("applied", "in force"))]
        if broken_down:
            del run
            release()
            step.marks = True
            run = step.recorded() if way.graph else step
            result["breakdown"] = breakdown_of(launches_of(run), result["p50_ms"])
    return result


def profile(case: Case, way_name: str) -> None:
    way = way_of(way_name, case.network)
    net, xs = network_of(case).cuda(), inputs_of(case)
    with torch.no_grad():
        targets = targets_of(case, [y.shape for y in volumes_of(net(*xs))])
    if way.channels_last:
        xs, targets = tuple(map(last, xs)), list(map(last, targets))
    with settings(tf32=way.tf32):
        step = Step(case, net, way.build(net, xs), xs, targets)
        for _ in range(3):
            step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as traced:
            for _ in range(3):
                step()
            torch.cuda.synchronize()
    events = sorted(traced.key_averages(), key=lambda e: -e.self_device_time_total)
    print(f"{case.label(way_name)}: {sum(e.self_device_time_total for e in events) / 3e3:.2f} ms of kernels a step")
    for event in events[:40]:
        print(f"  {event.self_device_time_total / 3e3:8.3f} ms  {event.count // 3:4d} x  {event.key[:110]}")


def command_of(case: Case, way: str, *more: str) -> list[str]:
    command = [sys.executable, __file__, "--network", case.network, "--size", ",".join(map(str, case.size))]
    return [*command, "--batch", str(case.batch), "--ways", way, *more]


class Process:
    """Measures one row. It prepares itself in host memory, and uses the GPU when it is its turn."""

    def __init__(self, case: Case, way: str, given: argparse.Namespace, truth: Path):
        self.case, self.way, self.limit = case, way, given.limit
        broken_down = given.breakdown and way.startswith("voxtune") and not way.startswith((WITHOUT, UP_TO))
        more = ["--here", "--truth", str(truth), "--runs", str(given.runs), *(["--breakdown"] if broken_down else [])]
        self.running = subprocess.Popen(
            command_of(case, way, *more), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def row(self) -> dict[str, Any]:
        failed = {"name": self.case.label(self.way), "shape": list(self.case.size), "batch": self.case.batch}
        try:
            output, _ = self.running.communicate("start\n", timeout=self.limit)
            result: dict[str, Any] = json.loads(output.splitlines()[-1])
            return result
        except subprocess.TimeoutExpired:
            return failed | {"failed": f"did not finish within {self.limit:.0f} s"}
        except (IndexError, json.JSONDecodeError):
            return failed | {"failed": f"ended with exit code {self.running.returncode}"}
        finally:
            self.end()

    def end(self) -> None:
        self.running.kill()
        self.running.wait()


def here(case: Case, way: str, runs: int, truth: Path, *, broken_down: bool) -> None:
    import torch._dynamo
    import torch.export

    net, content = network_of(case), torch.load(truth, weights_only=True)
    sys.stdin.readline()
    try:
        result = measure(case, way, net, runs, content, broken_down=broken_down)
    except torch.OutOfMemoryError as error:
        result = {"name": case.label(way), "shape": list(case.size), "batch": case.batch}
        result["failed"] = f"out of memory: {str(error).splitlines()[0][:120]}"
    print(json.dumps(result), flush=True)


def compile_only(case: Case, way_name: str) -> None:
    way = way_of(way_name, case.network)
    net, xs = network_of(case).cuda(), inputs_of(case)
    xs = tuple(map(last, xs)) if way.channels_last else xs
    with settings(tf32=way.tf32, search=False):
        results = volumes_of(way.build(net, xs)(*xs))
        sum(y.float().sum() for y in results).backward()  # type: ignore[union-attr]
    torch.cuda.synchronize()


def prepare(cases: Sequence[Case], seconds: float) -> None:
    """Compiles into the caches of torch.compile and Triton, several processes at a time; no measurement runs meanwhile."""
    started = time.monotonic()
    jobs = [(c, w) for c in sorted(cases, key=lambda c: -c.volumes) for w in c.ways if w.startswith(("torch_c", "vox"))]
    # Kernels of this project are compiled once for all sizes of a network; the gate is not needed for that.
    first = {c.network: c for c in sorted(cases, key=lambda c: -c.volumes)}
    jobs = [(c, "voxtune_ungated" if w == "voxtune" else w) for c, w in jobs if w != "voxtune" or first[c.network] is c]
    running: list[tuple[subprocess.Popen[bytes], float]] = []
    while (jobs or running) and time.monotonic() - started < seconds:
        running = [(p, v) for p, v in running if p.poll() is None]
        taken = sum(v for _, v in running)
        fitting = [j for j in jobs if not running or taken + j[0].volumes <= AT_ONCE]
        if fitting and len(running) < PROCESSES:
            case, way = fitting[0]
            jobs.remove(fitting[0])
            environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
            process = subprocess.Popen(command_of(case, way, "--compile-only"), env=environment)
            running.append((process, case.volumes))
        else:
            time.sleep(0.1)
    for process, _ in running:
        process.kill()
    left = len(jobs) + len(running)
    print(
        f"compiled ahead in {time.monotonic() - started:.0f} s" + (f"; {left} not finished" if left else ""), flush=True
    )


def key_of(r: dict[str, Any]) -> tuple[Any, ...]:
    return r["name"], tuple(r["shape"]), r["batch"]


class Results:
    """The file, and what is kept of an earlier one: rows that are not measured again, with the commit of their measurement."""

    def __init__(self, out: Path, kept: Path | None):
        self.out, self.rows, self.breakdown = out, list[dict[str, Any]](), dict[str, Any]()
        if kept is not None and kept.is_file():
            record = json.loads(kept.read_text())
            self.rows = [{"commit": record["commit"], **r} for r in record["rows"]]
            self.breakdown = dict(record.get("breakdown", {}))

    def add(self, result: dict[str, Any]) -> None:
        broken_down = result.pop("breakdown", None)
        self.rows = [r for r in self.rows if key_of(r) != key_of(result)] + [result]
        if broken_down is not None:
            size = "x".join(map(str, result["shape"]))
            self.breakdown[f"{result['name']} {size} batch {result['batch']}"] = broken_down
        write(self.out, self.rows, breakdown=self.breakdown)


def run_case(case: Case, given: argparse.Namespace, results: Results, truth: Path) -> None:
    print(f"{case.network} {'x'.join(map(str, case.size))}, batch {case.batch}:", flush=True)
    if not truth.is_file():
        torch.save(true_gradient(case), truth)
        release()
    waiting = list(case.ways)
    following: Process | None = None
    try:
        while waiting:
            way = waiting.pop(0)
            process = following or Process(case, way, given, truth)
            following = Process(case, waiting[0], given, truth) if waiting else None
            result = process.row()
            report(result)
            results.add(result)
            if given.passes and way == "voxtune" and "failed" not in result:
                waiting += [w for w in ways_of_passes(result["passes"]) if w not in waiting]
            if way.startswith(WITHOUT) and "failed" in result:
                # What remains does not run: the pass is measured on top of those before it.
                waiting.append(UP_TO + way.removeprefix(WITHOUT))
    finally:
        if following is not None:
            following.end()


def report(result: dict[str, Any]) -> None:
    if "failed" in result:
        print(f"{result['name']}: {result['failed']}", flush=True)
        return
    show([result])
    memory = f"allocated {result['allocated_gib']:.2f} GiB, held while steps run {result['held_gib']:.2f} GiB"
    print(
        f"    {memory}; first step after {result['first_s']:.0f} s; {', '.join(result.get('passes', []))}", flush=True
    )
    for name, entry in result.get("breakdown", {}).get("classes", {}).items():
        print(f"    {entry['ms']:8.3f} ms {entry['launches']:5d} x  {name}", flush=True)
    if "breakdown" in result:
        total = result["breakdown"]
        print(f"    {total['kernels_ms']:8.3f} ms in kernels, {total['gaps_ms']:.3f} ms in gaps", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", help=f"comma-separated, of {', '.join(CASES)}; else one case by the next three options"
    )
    parser.add_argument("--network", default="med-ddpm")
    parser.add_argument("--size", default="128", help="one number, or three: 144,192,192")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ways", help="comma-separated (default: those of each case)")
    parser.add_argument("--passes", action="store_true", help="measure what each pass of `voxtune` gains")
    parser.add_argument("--breakdown", action="store_true", help="time by class of operation, of Voxtune's ways")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--limit", type=float, default=150.0, metavar="SECONDS", help="stop a way after this time")
    parser.add_argument(
        "--prepare", type=float, default=0.0, metavar="SECONDS", help="compile ahead, at most this long"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep this file's rows that are not measured")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--truth", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "unet3d_train.json")
    options = parser.parse_args()
    sides = [int(side) for side in options.size.split(",")]
    ways = tuple(options.ways.split(",")) if options.ways else ()
    alone = Case(
        options.network, tuple(sides * 3 if len(sides) == 1 else sides), options.batch, ways or CASES["128"].ways
    )
    if options.profile:
        return profile(alone, alone.ways[0])
    if options.compile_only:
        return compile_only(alone, alone.ways[0])
    if options.here:
        return here(alone, alone.ways[0], options.runs, options.truth, broken_down=options.breakdown)
    cases = [alone]
    if options.cases:
        cases = [replace(CASES[name], ways=ways or CASES[name].ways) for name in options.cases.split(",")]
    if options.prepare:
        prepare(cases, options.prepare)
    results = Results(options.out, options.keep)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            truth = Path(folder) / f"{case.network}-{'-'.join(map(str, case.size))}.pt"
            try:
                run_case(case, options, results, truth)
            except torch.OutOfMemoryError as error:
                print(f"no reference gradient: {str(error).splitlines()[0]}", flush=True)
            release()
    return None


if __name__ == "__main__":
    main()
