from __future__ import annotations

import re

import pytest

from tests.factories.sessions import counted, kernel, session
from voxtune.analysis.advice import advice
from voxtune.analysis.certificate import window
from voxtune.analysis.components import component_of, component_table, transfer_breakdown
from voxtune.analysis.ledger import layout_ledger, precision_audit
from voxtune.analysis.memory import memory_peak, memory_timeline
from voxtune.analysis.priority import achieved, priority
from voxtune.analysis.roofline import roofline
from voxtune.plan.passes import BY_NAME


def test_priority_score_of_the_paper_and_gain_bounded_by_the_share():
    example = session(
        [
            kernel(0, 10e3, "norm", est_speedup_pct=900.0, est_rule="A"),
            kernel(10e3, 90e3, "conv_fprop", est_speedup_pct=25.0),
        ]
    )
    result = priority(example)
    norm, conv = result.row(**{"class": "norm"}), result.row(**{"class": "convolution"})
    # Clamped to 1: score 10 x 1, gain 10 x 1/2. Convolution: 90 x 0.25 and 90 x 0.25 / 1.25.
    assert (norm["score"], norm["gain_ms"], norm["gain_pct"], norm["rule"]) == (10.0, 5.0, 5.0, "A")
    assert conv["score"] == pytest.approx(22.5) and conv["gain_ms"] == pytest.approx(18)
    assert conv["step_speedup"] == pytest.approx(100 / 82)
    assert all(r["gain_pct"] <= r["share"] for r in result.rows)
    assert priority(session([kernel(0, 1)])).refused


def test_gain_is_bounded_by_throughput():
    example = session(
        [counted(0, 100, "conv_fprop", est_speedup_pct=87.5, est_rule="R (local)", sm_pct=90.0, memory_pct=40.0)]
    )
    row = priority(example, "class").rows[0]
    assert row["score"] == pytest.approx(0.0875)  # the paper's score is not bounded
    assert row["gain_ms"] == pytest.approx(0.010)


def test_estimated_and_achieved_gain():
    before = session([kernel(0, 100e3, "conv_fprop", est_speedup_pct=100.0, module="a")], name="before")
    after = session([kernel(0, 80e3, "conv_fprop", module="a"), kernel(80e3, 5e3, "layout", module="a")], name="after")
    result = achieved(before, after)
    conv = result.row(**{"class": "convolution"})
    assert (conv["estimated_ms"], conv["achieved_ms"], conv["achieved_of_estimate"]) == (50.0, 20.0, 40.0)
    assert result.row(**{"class": "layout"})["achieved_ms"] == -5.0
    assert achieved(before, after, "module").row(module="a")["achieved_ms"] == 15.0
    assert achieved(before, window(after)).refused


def test_the_ledger_charges_the_module_that_caused_the_copy():
    rows = [
        kernel(0, 70, "conv_fprop", module="net.conv", module_type="Conv3d"),
        kernel(70, 20, "copy", module="net.norm", module_type="GroupNorm32"),
        kernel(90, 6, "layout", module="net.conv", module_type="Conv3d"),
        kernel(96, 4, "cast"),
    ]
    result = layout_ledger(session(rows))
    assert [(r["module"], r["total_ms"]) for r in result.rows] == [
        ("net.norm", 0.020),
        ("net.conv", 0.006),
        ("(module unknown)", 0.004),
    ]
    by_type = result.extra.pop("by_type")
    assert by_type == pytest.approx({"GroupNorm32": 0.020, "Conv3d": 0.006, "(module unknown)": 0.004})
    assert result.extra == pytest.approx({"total_ms": 0.030, "step_ms": 0.100})
    assert "GroupNorm32 0.02 ms, Conv3d 0.01 ms" in result.notes[1]
    assert result.rows[0]["type"] == "GroupNorm32"


def test_the_audit_uses_counters_not_names():
    rows = [
        kernel(0, 10, "conv_fprop", module="a", precision="tf32", inst_hmma=0.0, inst_gmma=0.0, tensor_pct=0.0),
        kernel(10, 30, "conv_wgrad", module="a", precision="fp32", inst_hmma=5.0),
        kernel(40, 60, "matmul", module="b", precision="tf32"),
        kernel(100, 100, "norm", module="c", tensor_pct=0.0),
    ]
    # Pipe utilisation by constants alone is not tensor work if instructions were counted.
    loaded = session([kernel(0, 1, "conv_fprop", module="a", inst_hmma=0.0, tensor_pct=2.0)])
    assert precision_audit(loaded).rows[0]["ran_on"] == "CUDA cores"
    result = precision_audit(session(rows))
    assert {(r["module"], r["class"]): r["ran_on"] for r in result.rows} == {
        ("a", "conv_fprop"): "CUDA cores",
        ("a", "conv_wgrad"): "tensor cores",
        ("b", "matmul"): "not measured",
    }
    assert result.extra == {"tensor_time_pct": 75.0, "not_measured_pct": 60.0}


def test_an_audit_without_convolutions_is_refused():
    copies = [kernel(0, 5, kind="memset"), kernel(5, 5, kind="memcpy")]
    for rows in (copies, []):
        assert "no convolution" in (precision_audit(session(rows)).refused or "")
        assert layout_ledger(session(rows)).rows == []


def test_roofline_counts_ffma_twice_and_leaves_uncounted_tensor_work_empty():
    fp32 = {
        "fadd": 1e9,
        "fmul": 1e9,
        "ffma": 4e9,
        "tensor_ops": 0.0,
        "dram_bytes": 1e9,
        "inst_hmma": 0.0,
        "tensor_pct": 0.0,
    }
    rows = [kernel(0, 1000, name="f", **fp32), kernel(1000, 100, name="h", **fp32 | {"inst_hmma": 9.0})]
    result = roofline(session(rows))
    f = result.row(kernel="f")
    assert (f["gflop"], f["gb"], f["intensity"]) == (10.0, 1.0, 10.0)
    assert f["tflops"] == pytest.approx(10) and f["gbs"] == pytest.approx(1000)
    assert f["roof_tflops"] == pytest.approx(48) and f["bound"] == "memory"  # 10 FLOP/B x 4.8 TB/s
    assert result.column("kernel") == ["f"]
    assert "Left out: 1 kernels with 0.1 ms, whose counters were not read." in result.notes
    tensor = {"inst_hmma": 9.0, "tensor_ops": 5e12, "tensor_ops_bf16": 5e12, "dram_bytes": 1e9}
    t = roofline(session([kernel(0, 10e3, name="t", **tensor)])).row(kernel="t")
    assert t["tflops"] == pytest.approx(500) and t["bound"] == "compute" and t["roof_tflops"] == 989.4
    assert roofline(session([kernel(0, 1)])).refused


def test_memory_at_peak_uses_the_last_value_of_each_category():
    gib = 2**30
    rows = [
        {"step": 0, "time_us": 0.0, "category": "weights", "bytes": 1.0 * gib},
        {"step": 0, "time_us": 1.0, "category": "activations", "bytes": 2.0 * gib},
        {"step": 0, "time_us": 2.0, "category": "workspace", "bytes": 4.0 * gib},
        {"step": 0, "time_us": 3.0, "category": "workspace", "bytes": 0.0},
        {"step": 0, "time_us": 4.0, "category": "activations", "bytes": 3.0 * gib},
    ]
    example = session([kernel(0, 5)], memory=rows)
    result = memory_peak(example)
    assert {r["category"]: r["at_peak_gib"] for r in result.rows} == {
        "workspace": 4.0,
        "activations": 2.0,
        "weights": 1.0,
    }
    assert result.row(category="activations")["own_peak_gib"] == 3.0
    assert result.extra == {"peak_bytes": 7.0 * gib, "time_us": 2.0}
    assert len(memory_timeline(example, points=2).rows) == 2
    assert max(sum(v for k, v in r.items() if k != "time_ms") for r in memory_timeline(example, points=2).rows) == 7.0
    assert memory_peak(session([kernel(0, 1)])).refused


@pytest.mark.parametrize(
    ("op", "component"),
    [
        ("aten::cudnn_convolution", "conv"),
        ("aten::native_group_norm", "group_norm"),
        ("aten::native_layer_norm_backward", "layer_norm"),
        ("aten::addmm", "linear"),
        ("aten::bmm", "matmul"),
        ("aten::gelu", "gelu"),
        ("aten::relu_", "relu"),
        ("aten::_softmax", "softmax"),
        ("aten::upsample_nearest2d", "upsample"),
        ("aten::add_", "add"),
        ("aten::constant_pad_nd", "conv pad"),
    ],
)
def test_components_by_operator(op, component):
    assert component_of(op, "elementwise") == component


def test_component_table_counts_calls_not_launches():
    norm = {"op": "aten::native_group_norm", "op_shapes": "[[1]]"}
    rows = [
        kernel(0, 1e6, "norm", module="a", **norm),
        kernel(1e6, 1e6, "norm", module="a", **norm),
        kernel(2e6, 2e6, "norm", module="b", **norm),
    ]
    result = component_table(session(rows)).rows
    assert result == [{"component": "group_norm", "seconds": 4.0, "share": 100.0, "calls": 2.0, "launches": 3.0}]


def test_transfer_breakdown_adds_up_to_the_step():
    rows = [
        kernel(0, 60, "conv_fprop"),
        kernel(60, 20),
        {"kind": "memcpy", "class": "memcpy", "direction": "DtoH", "start_us": 85.0, "duration_us": 15.0},
    ]
    result = {r["part"]: r["share"] for r in transfer_breakdown(session(rows)).rows}
    assert result["convolution"] == pytest.approx(60) and result["transfer to the CPU"] == pytest.approx(15)
    assert result["idle"] == pytest.approx(5) and sum(result.values()) == pytest.approx(100)


def test_advice_is_ranked_and_gains_are_bounded_by_the_step():
    rows = [
        counted(0, 60e3, "conv_fprop", tensor_pct=0.0, inst_hmma=0.0),
        counted(60e3, 20e3, "copy", module="n", module_type="GroupNorm32"),
        counted(80e3, 1e3, "elementwise"),
        counted(90e3, 10e3, "norm", dram_bytes=4.08e9),
    ]
    result = advice(session(rows))
    assert result.column("rank") == list(range(1, len(result.rows) + 1))
    assert result.column("gain_ms") == sorted(result.column("gain_ms"), reverse=True)
    assert result.rows[0]["advice"].startswith("Run convolutions") and result.rows[0]["gain_ms"] < 60
    lines = {r["advice"]: r for r in result.rows}
    assert lines["Keep channels-last through the norms"]["gain_ms"] == pytest.approx(20)
    assert lines["Reduce launch gaps"]["gain_ms"] == pytest.approx(9)
    # 4.08 GB at 85 % of 4.8 TB/s take 1 ms; the norm takes 10 ms.
    assert lines["Fuse norm and activation"]["gain_ms"] == pytest.approx(9)
    assert all(r["gain_pct"] <= 100 for r in result.rows)
    passes = {name for action in result.column("action") for name in re.findall(r"(\w+)(?= pass)", action)}
    assert {"tf32", "fuse_norm", "cuda_graph"} <= passes <= set(BY_NAME)


def test_advice_on_tensor_cores_requires_counters():
    assert not any("tensor" in r["advice"] for r in advice(session([kernel(0, 1e5, "conv_fprop")])).rows)
