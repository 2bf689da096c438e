"""The benchmark of training steps: ways, results file, networks, and the breakdown of a trace. Its measurements need a GPU."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from voxtune.plan.training import training_passes

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("gpu_unet3d_train")
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def trace(bench):
    return importlib.import_module("step_breakdown")


def launches(trace, *entries):
    return [trace.Launch(name, float(start), float(end)) for name, start, end in entries]


def step_at(trace, start):
    """A step of 100 us with gaps of 18 us, and two kernels that overlap by 2."""
    names = [
        ("mark_forward", 0, 1),
        ("voxtune_conv3d_halo", 1, 21),
        ("voxtune_normalize", 21, 31),
        ("mark_backward", 33, 34),
        ("voxtune_norm_sums", 34, 44),
        ("voxtune_normalize", 44, 49),
        ("voxtune_conv3d_halo", 49, 69),
        ("voxtune_weight_gradient_hopper", 67, 77),
        ("Memcpy DtoD (Device -> Device)", 77, 78),
        ("mark_update", 80, 81),
        ("multi_tensor_apply_kernel<FusedAdam>", 88, 95),
    ]
    return launches(trace, *((name, start + a, start + b) for name, a, b in names))


def test_a_trace_by_class_of_operation(trace):
    before = launches(trace, ("left_over", -9, -5))
    entry = trace.breakdown_of([*step_at(trace, 100.0), *before, *step_at(trace, 0.0)], 0.1)
    assert entry["classes"] == {
        "forward convolutions": {"ms": 0.02, "launches": 1},
        "data gradients": {"ms": 0.02, "launches": 1},
        "norms forward": {"ms": 0.01, "launches": 1},
        "norms backward": {"ms": 0.01, "launches": 1},
        "weight gradients": {"ms": 0.01, "launches": 1},
        "optimizer": {"ms": 0.007, "launches": 1},
        "norms computed again": {"ms": 0.005, "launches": 1},
        "copies": {"ms": 0.001, "launches": 1},
    }
    assert (entry["step_ms"], entry["launches"]) == (0.1, 8)
    assert entry["kernels_ms"] == pytest.approx(0.083) and entry["gaps_ms"] == pytest.approx(0.019)
    with pytest.raises(ValueError, match="no step"):
        trace.breakdown_of(before, 0.1)


@pytest.mark.parametrize(
    ("name", "phase", "expected"),
    [
        ("sm90_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32", "backward", "weight gradients"),
        ("sm90_xmma_dgrad_implicit_gemm_bf16", "backward", "data gradients"),
        ("sm80_xmma_fprop_implicit_gemm_bf16", "backward", "data gradients"),
        ("sm80_xmma_fprop_implicit_gemm_bf16", "forward", "forward convolutions"),
        ("void cudnn::ops::nchwToNhwcKernel<float>", "forward", "copies"),
        ("nvjet_hsh_128x256_64x4", "forward", "attention and products"),
        ("triton_per_fused_native_group_norm_3", "backward", "fused by torch.compile"),
        ("voxtune_tap_sums", "backward", "weight gradients"),
        ("voxtune_pack_taps", "forward", "weights packed"),
        ("voxtune_upsample_linear_backward", "backward", "upsampling"),
        ("voxtune_add", "forward", "elementwise"),
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>", "forward", "norms forward"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "update", "optimizer"),
    ],
)
def test_classes_of_kernels(trace, name, phase, expected):
    assert trace.class_of(name, phase) == expected


def test_every_kernel_of_the_package_has_a_class(trace):
    from tests.docs.kernel_table import SOURCE, kernels_of

    plain = {n for n in kernels_of(SOURCE) if trace.class_of(n, "forward") == "elementwise"}
    two_dimensional = {"conv2d", "depthwise2d", "gate2d", "stem2d", "embedding"}  # without gradients
    assert {n.removeprefix("voxtune_") for n in plain} - two_dimensional == {"add", "elementwise", "noise"}


def test_ways_that_leave_a_pass_out(bench):
    ways = importlib.import_module("training_ways")
    whole = training_passes("bf16")
    assert bench.ways_of_passes(["fuse_norm", "edges", "bf16"]) == [
        "voxtune_without_fuse_norm",
        "voxtune_without_edges",
        "voxtune_up_to_channels_last",
    ]
    assert ways.plan_up_to("channels_last").names == ("bf16", "channels_last")
    assert set(ways.plan_up_to("epilogue").names) == set(whole)
    assert bench.way_of("voxtune_without_edges", "monai").graph
    assert bench.way_of("voxtune", "monai").chooses and not bench.way_of("voxtune", "med-ddpm").chooses
    for unknown in ("voxtune_without_compile", "fp8"):
        with pytest.raises(SystemExit, match=r"is not a pass|unknown way"):
            bench.way_of(unknown, "monai")


def test_cases_name_networks_and_ways_that_exist(bench):
    networks = importlib.import_module("networks")
    for case in bench.CASES.values():
        assert case.network in networks.FOREIGN or case.network.startswith("med-ddpm")
        assert [bench.way_of(way, case.network) for way in case.ways]


def test_rows_of_other_runs_are_kept(bench, tmp_path):
    def row(name, p50, batch=1):
        return {"name": name, "shape": [8, 8, 8], "batch": batch, "p50_ms": p50}

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    results = bench.Results(first, None)
    results.add(row("voxtune", 1.0) | {"breakdown": {"step_ms": 1.0}})
    results.add(row("voxtune", 2.0, batch=2))
    before = json.loads(first.read_text())
    results = bench.Results(second, first)
    results.add(row("voxtune", 3.0))
    merged = json.loads(second.read_text())
    assert [(r["p50_ms"], r["batch"], r.get("commit")) for r in merged["rows"]] == [
        (2.0, 2, before["commit"]),
        (3.0, 1, None),
    ]
    assert merged["breakdown"] == {"voxtune 8x8x8 batch 1": {"step_ms": 1.0}}
    assert bench.Results(second, tmp_path / "missing.json").rows == []


def test_the_loss_covers_all_results(bench):
    torch.manual_seed(0)
    y, coarse = torch.randn(2, 3, 4, 4, 4, requires_grad=True), torch.randn(2, 3, 2, 2, 2)
    whole, half = (torch.randn_like(x).gt(0).float() for x in (y, coarse))
    perfect = bench.loss_of("nnunet_plain", (20 * (2 * whole - 1)), [whole])
    assert perfect < 1e-2 < bench.loss_of("nnunet_plain", y, [whole])
    both = bench.loss_of("segresnet", [y, coarse], [whole, half])
    parts = [bench.loss_of("segresnet", a, [b]) for a, b in ((y, whole), (coarse, half))]
    assert both.item() == pytest.approx(sum(parts).item())
    both.backward()
    assert y.grad.norm() > 0
    assert bench.loss_of("monai", y.bfloat16(), [whole]).dtype == torch.float32
    assert bench.loss_of("med-ddpm", y.double(), [whole]).dtype == torch.float64


@pytest.mark.parametrize("name", ["nnunet_plain", "nnunet_resenc_l", "segresnet", "monai"])
def test_networks_of_other_libraries_and_their_inputs(bench, name):
    pytest.importorskip("monai")
    pytest.importorskip("dynamic_network_architectures")
    networks = importlib.import_module("networks")
    with torch.device("meta"):
        net = networks.FOREIGN[name]()
    xs = networks.inputs(name, (64, 64, 64))
    y = net(*(x.to("meta") for x in xs))
    outputs = {"nnunet_plain": 4, "nnunet_resenc_l": 4, "segresnet": 3, "monai": 1}
    assert y.shape == (1, outputs[name], 64, 64, 64)
    assert len(xs) == (2 if name == "monai" else 1)
