"""The tables of docs/reference/what-runs-where.md: kernels from the package's source, devices from the tests, times from records.

A kernel without an entry below is listed too, as untested: add an entry that names its tests.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from voxtune.plan.passes import PASSES, Context, Pass
from voxtune.precision import HALF

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "voxtune" / "kernels"
RECORDS = ROOT / "benchmarks" / "results" / "h200"
LADDER = "convnext"
GPU_TESTS = "tests/kernels/test_gpu.py"


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """`computes` in a few words; `types` of its volumes; tests that compile it, run it on a GPU, and a benchmark's rows."""

    computes: str
    passes: str
    types: str = "BF16, FP16, FP32"
    compiled: Sequence[str] = ()  # file::function below tests/kernels
    gpu: Sequence[str] = ()  # functions of GPU_TESTS, or file::function
    timed: tuple[str, str] | None = None  # results file, pattern of the names of its rows


# What a pass requires of the machine, which is not that of the reader.
MACHINE = {"compile": "a compiler", "heap": "glibc"}
HALVES = "BF16, FP16"
EDGES = ("test_edge_conv::test_compiles",)
NORM = ("test_group_norm::test_compiles_without_spills",)
NORM_GRADIENT = ("test_group_norm_backward::test_compiles_without_spills",)
NORMED = ("test_group_norm", "test_norm_act")
POINTWISE, UPSAMPLE = ("test_pointwise::test_compiles",), ("test_upsample::test_compiles",)
CONV3D = ("test_conv3d::test_compiles_for_hopper", "test_conv3d::test_compiles_for_other_devices")
PARITY = ("test_parity_conv::test_compiles_for_hopper", "test_parity_conv::test_compiles_for_other_devices")
CONVOLVED = "test_conv3d_is_exact_on_integers_and_its_statistics_are_right"
WEIGHT_GRADIENT = "tests/kernels/test_gpu_weight_gradient.py"
SMALL = ("test_small_images::test_compiled_instructions",)
SMALL_GPU = ("tests/plan/test_gpu_small_images.py::test_kernels_against_float64",)
GRADIENTS = "tests/kernels/test_gpu_gradients.py"
PACKING, PACKED = ("test_gradient_kernels::test_packing_compiles",), (f"{GRADIENTS}::test_packing_is_exact",)
KERNELS = {
    "voxtune_moments": Kernel(
        computes="statistics of a norm",
        passes="`fuse_norm`",
        compiled=NORM,
        gpu=NORMED,
        timed=("group_norm", "voxtune"),
    ),
    "voxtune_finalize": Kernel(
        computes="scale and offset of a norm",
        passes="`fuse_norm`",
        compiled=NORM,
        gpu=NORMED,
        timed=("group_norm", "voxtune"),
    ),
    "voxtune_normalize": Kernel(
        computes="norm, residual, activation",
        passes="`fuse_norm`",
        compiled=NORM,
        gpu=NORMED,
        timed=("group_norm", "voxtune"),
    ),
    "voxtune_norm_sums": Kernel(
        computes="sums for the gradients of a norm",
        passes="training",
        compiled=NORM_GRADIENT,
        gpu=(f"{GRADIENTS}::test_norm",),
        timed=("gradients", "voxtune norm"),
    ),
    "voxtune_norm_combine": Kernel(
        computes="gradients of its weights, and coefficients of its source's",
        passes="training",
        compiled=NORM_GRADIENT,
        gpu=(f"{GRADIENTS}::test_norm",),
        timed=("gradients", "voxtune norm"),
    ),
    "voxtune_norm_gradient": Kernel(
        computes="gradients of its source and residual",
        passes="training",
        compiled=NORM_GRADIENT,
        gpu=(f"{GRADIENTS}::test_norm",),
        timed=("gradients", "voxtune norm"),
    ),
    "voxtune_channel_sums": Kernel(
        computes="sums over voxels, gradients of biases",
        passes="training",
        compiled=("test_gradient_kernels::test_sums_compile",),
        gpu=(f"{GRADIENTS}::test_sums_over_voxels",),
        timed=("gradients", "voxtune sum"),
    ),
    "voxtune_tap_sums": Kernel(
        computes="gradients of the weights of stem and head",
        passes="training",
        compiled=("test_gradient_kernels::test_sums_of_taps_compile",),
        gpu=(f"{GRADIENTS}::test_stem", f"{GRADIENTS}::test_head"),
        timed=("gradients", "voxtune stem weight"),
    ),
    "voxtune_upsample_linear_backward": Kernel(
        computes="gradient of trilinear and bilinear x2",
        passes="training",
        compiled=("test_gradient_kernels::test_upsampling_compiles",),
        gpu=(f"{GRADIENTS}::test_upsample",),
        timed=("gradients", "voxtune upsampling"),
    ),
    "voxtune_upsample_nearest_backward": Kernel(
        computes="gradient of nearest x2",
        passes="training",
        compiled=("test_gradient_kernels::test_upsampling_compiles",),
        gpu=(f"{GRADIENTS}::test_upsample",),
    ),
    "voxtune_pack_taps": Kernel(
        computes="weights in the layout of the kernels", passes="training", compiled=PACKING, gpu=PACKED
    ),
    "voxtune_unpack_taps": Kernel(
        computes="gradients of weights in the layout of the network", passes="training", compiled=PACKING, gpu=PACKED
    ),
    "voxtune_opposite_taps": Kernel(
        computes="weights of data gradients", passes="training", compiled=PACKING, gpu=PACKED
    ),
    "voxtune_rms_norm": Kernel(
        computes="RMS norm over channels, activation",
        passes="`fuse_norm`",
        compiled=("test_rms_norm::test_compiles_without_spills",),
        gpu=("test_rms_norm",),
    ),
    "voxtune_conv3d": Kernel(
        computes="convolutions 3x3x3, 1x3x3, 3x1x1",
        passes="`conv3d`",
        types=HALVES,
        compiled=CONV3D,
        gpu=(CONVOLVED, "test_conv3d_of_any_device"),
        timed=("conv3d", "voxtune"),
    ),
    "voxtune_conv3d_halo": Kernel(
        computes="convolution 3x3x3 of large volumes",
        passes="`conv3d`",
        types=HALVES,
        compiled=CONV3D[:1],
        gpu=(CONVOLVED,),
        timed=("conv3d", "voxtune"),
    ),
    "voxtune_conv3d_join": Kernel(
        computes="sum of the parts of a split convolution",
        passes="`conv3d`, `strided`",
        types=HALVES,
        compiled=("test_conv3d::test_join_compiles",),
        gpu=(CONVOLVED,),
        timed=("conv3d", "voxtune"),
    ),
    "voxtune_weight_gradient": Kernel(
        computes="weight gradient of a 3x3x3 convolution",
        passes="training, where it was measured to be faster",
        types=HALVES,
        compiled=("test_weight_gradient::test_compiles",),
        gpu=(f"{WEIGHT_GRADIENT}::test_exact_on_integers",),
        timed=("weight_gradient", "triton"),
    ),
    "voxtune_weight_gradient_join": Kernel(
        computes="sum of its parts",
        passes="training",
        types=HALVES,
        compiled=("test_weight_gradient::test_compiles",),
        gpu=(f"{WEIGHT_GRADIENT}::test_exact_on_integers",),
        timed=("weight_gradient", "hopper|triton"),
    ),
    "voxtune_weight_gradient_hopper": Kernel(
        computes="the same gradient on Hopper",
        passes="training",
        types=HALVES,
        compiled=("test_weight_gradient::test_compiles_for_hopper",),
        gpu=(
            f"{WEIGHT_GRADIENT}::test_exact_on_integers",
            f"{WEIGHT_GRADIENT}::test_any_division_of_the_steps_gives_the_same",
            f"{WEIGHT_GRADIENT}::test_forms_of_the_hopper_kernel",
        ),
        timed=("weight_gradient", "hopper"),
    ),
    "voxtune_doubling_conv": Kernel(
        computes="transposed convolutions; nearest x2 and its convolution",
        passes="`doubling`",
        types=HALVES,
        compiled=PARITY,
        gpu=("test_doubling_conv_is_exact_on_integers", "test_nearest_upsampling_folded_into_a_convolution"),
        timed=("doubling_conv", "voxtune"),
    ),
    "voxtune_strided_conv": Kernel(
        computes="convolutions of stride 2",
        passes="`strided`",
        types=HALVES,
        compiled=PARITY,
        gpu=("test_strided_conv_is_exact_on_integers",),
        timed=("doubling_conv", "voxtune"),
    ),
    "voxtune_pointwise": Kernel(
        computes="1x1x1 convolutions",
        passes="`pointwise`",
        compiled=POINTWISE,
        gpu=("test_pointwise", "test_pointwise_heads_are_stored_in_float32"),
        timed=("small_kernels", "voxtune 1x1"),
    ),
    "voxtune_add": Kernel(
        computes="bias and residual",
        passes="`epilogue`",
        compiled=POINTWISE,
        gpu=("test_add",),
        timed=("small_kernels", "voxtune sum"),
    ),
    "voxtune_upsample_linear": Kernel(
        computes="trilinear and bilinear x2",
        passes="`upsample`",
        compiled=UPSAMPLE,
        gpu=("test_upsample",),
        timed=("small_kernels", "voxtune linear"),
    ),
    "voxtune_upsample_nearest": Kernel(
        computes="nearest x2",
        passes="`upsample`",
        compiled=UPSAMPLE,
        gpu=("test_upsample",),
        timed=("small_kernels", "voxtune nearest"),
    ),
    "voxtune_stem": Kernel(
        computes="3x3x3 with few inputs",
        passes="`edges`",
        compiled=EDGES,
        gpu=("test_stem_and_head",),
        timed=("small_kernels", "voxtune stem"),
    ),
    "voxtune_head": Kernel(
        computes="3x3x3 with few outputs",
        passes="`edges`",
        compiled=EDGES,
        gpu=("test_stem_and_head",),
        timed=("small_kernels", "voxtune head"),
    ),
    "voxtune_head_lines": Kernel(
        computes="the same for volumes in half precision",
        passes="`edges`",
        types=HALVES,
        compiled=("test_edge_conv::test_head_by_lines_compiles",),
        gpu=("test_heads_by_lines",),
        timed=("small_kernels", "voxtune head .* lines"),
    ),
    "voxtune_elementwise": Kernel(
        computes="chains of elementwise operators; one generated kernel for each",
        passes="`elementwise`",
        compiled=("test_elementwise::test_compiles_to_wide_loads_without_spills",),
        gpu=("test_elementwise", "test_elementwise_with_offsets_of_64_bits_and_special_values"),
        timed=("elementwise", "voxtune"),
    ),
    "voxtune_conv2d": Kernel(
        computes="convolutions of small 2D images with what surrounds them",
        passes="`small_images`",
        compiled=SMALL,
        gpu=SMALL_GPU,
    ),
    "voxtune_depthwise2d": Kernel(
        computes="depthwise convolutions of small 2D images", passes="`small_images`", compiled=SMALL, gpu=SMALL_GPU
    ),
    "voxtune_gate2d": Kernel(
        computes="attention gates of small 2D images", passes="`small_images`", compiled=SMALL, gpu=SMALL_GPU
    ),
    "voxtune_stem2d": Kernel(
        computes="5x5 and 7x7 with few inputs", passes="`small_images`", compiled=SMALL, gpu=SMALL_GPU
    ),
    "voxtune_embedding": Kernel(
        computes="three linear layers of the time",
        passes="`small_images`",
        types="FP32",
        compiled=SMALL,
        gpu=SMALL_GPU,
    ),
    "voxtune_noise": Kernel(
        computes="the sampler's noise",
        passes="sampling",
        types="FP32",
        compiled=("test_noise::test_compiles_for_real_gpus",),
        gpu=("test_noise_is_the_same_as_on_a_cpu",),
    ),
}


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def kernels_of(folder: Path) -> dict[str, str]:
    """Name of each kernel -> its file, for the files of a folder."""
    return {
        node.name: file.name
        for file in sorted(folder.glob("*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("voxtune_")
        and any("jit" in ast.unparse(d) for d in node.decorator_list)
    } | {"voxtune_elementwise": "elementwise.py"}  # its kernels are generated


def archs(test: str) -> set[int]:
    """The compute capabilities that a test compiles for: its parameter `arch`, or what its name says."""
    module, _, name = test.partition("::")
    function = getattr(importlib.import_module(f"tests.kernels.{module}"), name)
    values: set[int] = {90} if name.endswith("_for_hopper") else set()
    for mark in getattr(function, "pytestmark", ()):
        names = mark.args[0] if mark.name == "parametrize" else ()
        names = [n.strip() for n in names.split(",")] if isinstance(names, str) else list(names)
        if "arch" in names:
            values |= {_value(given, names.index("arch")) for given in mark.args[1]}
    return values


def _value(given: object, index: int) -> int:
    values = getattr(given, "values", given)
    return int(values[index] if isinstance(values, tuple | list) else values)


@cache
def _passed() -> tuple[dict[str, int], str]:
    """GPU tests that passed on the H200 by function, with the number of cases, and the record's commit."""
    data = json.loads((RECORDS / "gpu_tests.json").read_text())
    counts: dict[str, int] = {}
    for row in data["rows"]:
        file, _, name = row["name"].partition("::")
        if row["outcome"] == "passed":
            function = re.sub(r"\[.*", "", name if file == GPU_TESTS else row["name"])
            counts[function] = counts.get(function, 0) + 1
    return counts, data["commit"]


def on_the_gpu(kernel: Kernel) -> str:
    """The tests that passed on the H200, and the file of times, each with its commit."""
    counts, commit = _passed()
    passed = sum(counts.get(test, 0) for test in kernel.gpu)
    state = (
        f"{passed} test{'s' * (passed > 1)} at {commit[:7]}"
        if passed
        else "tests not recorded yet"
        if kernel.gpu
        else "untested"
    )
    return f"{state}; {times(kernel.timed)}"


def times(timed: tuple[str, str] | None) -> str:
    file = None if timed is None else RECORDS / f"{timed[0]}.json"
    if timed is None or file is None or not file.exists():
        return "not timed alone"
    data = json.loads(file.read_text())
    if not any(re.match(timed[1], row["name"]) for row in data["rows"]):
        return "not timed alone"
    return f"times in `{file.name}` at {data['commit'][:7]}"


def _compiled_for(tests: Sequence[str]) -> str:
    return ", ".join(map(str, sorted(set().union(*map(archs, tests))))) if tests else "untested"


def kernel_table() -> str:
    lines = []
    for name in kernels_of(SOURCE):
        kernel = KERNELS.get(name, Kernel(computes="", passes="", types=""))
        title, what = f"`{name.removeprefix('voxtune_')}`", f"{kernel.computes} ({kernel.passes})"
        lines.append([title, what, kernel.types, _compiled_for(kernel.compiled), on_the_gpu(kernel)])
    return markdown(["kernel", "computes (pass)", "types", "compiled for", "on the H200"], lines)


def pass_table() -> str:
    """Where each pass applies, by its own flags: on a CPU, and on a GPU in float32 and in half precision."""
    others = tuple(p.name for p in PASSES if p.name not in HALF)
    contexts = [
        Context(torch.device(device), names)
        for device, names in (("cpu", others), ("cuda", others), ("cuda", (*others, "bf16")))
    ]
    lines = [[f"`{p.name}`", *(_applies(p, context) for context in contexts)] for p in PASSES]
    return markdown(["pass", "CPU", "GPU, FP32 or TF32", "GPU, BF16 or FP16"], lines)


def _applies(step: Pass, context: Context) -> str:
    if step.name in HALF and context.dtype not in HALF.values():
        return "selects BF16 or FP16"
    if step.name in MACHINE and (context.device.type == "cpu" or not MACHINE[step.name].endswith("glibc")):
        return f"applies with {MACHINE[step.name]}"
    reason = step.why_not(context)
    return "applies" if reason is None else f"no: {reason.partition(';')[0]}"
