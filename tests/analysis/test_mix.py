from __future__ import annotations

import math

import pytest

from tests.factories.sessions import counted, kernel, session
from voxtune.analysis import counters
from voxtune.analysis.frame import geometric_mean, mean, numbers, short
from voxtune.analysis.mix import (
    group_of,
    instruction_mix,
    ipc_stack,
    kernel_mix,
    kernel_shares,
    opcode_counts,
    paper_shares,
    pipe_of,
)
from voxtune.analysis.priority import priority
from voxtune.analysis.study import measure, study_table


@pytest.mark.parametrize(
    ("opcode", "group", "pipe"),
    [
        ("FFMA", "fp32", "fma"),
        ("IMAD", "int", "fma"),
        ("IMAD.MOV.U32", "int", "fma"),
        ("IADD3", "int", "alu"),
        ("HGMMA", "tensor", "tensor"),
        ("HMMA.1688.F32.TF32", "tensor", "tensor"),
        ("UIADD3", "uniform", "uniform"),
        ("ULDC", "uniform", "uniform"),
        ("UTMALDG", "memory", "load/store"),
        ("LDG", "memory", "load/store"),
        ("BRA", "control", "control"),
        ("MUFU", "fp32", "special"),
        ("WHATEVER", "other", "other"),
    ],
)
def test_opcodes(opcode, group, pipe):
    assert (group_of(opcode), pipe_of(opcode)) == (group, pipe)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<float>(long)", "RowwiseMomentsCUDAKernel"),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchw_tilesize256", "sm80_xmma_fprop_implicit_gemm"),
        (
            "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(x)",
            "cutlass_80_simt_sgemm_256x128_8x4_nt_align1",
        ),
        ("triton_poi_fused_add_0", "triton_poi_fused_add_0"),
        ("", ""),
    ],
)
def test_short_names(name, expected):
    assert short(name) == expected


def test_kernel_mix_adds_up_and_reports_unknown_kernels():
    example = session([kernel(0, 60, "norm"), kernel(60, 20, "norm"), kernel(80, 20, "unknown", phase="backward")])
    result = kernel_mix(example)
    assert result.rows[0] == {"class": "norm", "phase": "forward", "ms": 0.08, "share": 80.0, "launches": 2.0}
    assert sum(result.column("share")) == pytest.approx(100)
    assert "20.00 %" in result.notes[0]


def test_kernel_shares_are_by_short_name():
    example = session(
        [kernel(0, 30, name="void a::f<1>()"), kernel(30, 30, name="void a::f<2>()"), kernel(60, 40, name="g")]
    )
    assert [(r["kernel"], r["share"]) for r in kernel_shares(example).rows] == [("f", 60.0), ("g", 40.0)]


def test_opcodes_are_weighted_by_launches_and_grouped():
    opcodes = [
        {"name": "k", "grid": "1,1,1", "block": "32,1,1", "opcode": "FFMA", "executed": 10.0},
        {"name": "k", "grid": "1,1,1", "block": "32,1,1", "opcode": "UIADD3", "executed": 5.0},
        {"name": "j", "grid": "1,1,1", "block": "32,1,1", "opcode": "IMAD", "executed": 70.0},
    ]
    size = {"grid": "1,1,1", "block": "32,1,1"}
    example = session(
        [kernel(0, 1, **size), kernel(1, 1, **size), kernel(2, 2, name="j", **size), kernel(4, 4, name="z")],
        opcodes=opcodes,
    )
    assert {r["group"]: r["share"] for r in instruction_mix(example).rows} == {
        "int": 70.0,
        "fp32": 20.0,
        "uniform": 10.0,
    }
    assert {r["pipe"]: r["share"] for r in instruction_mix(example, "pipe").rows} == {"fma": 90.0, "uniform": 10.0}
    assert "50.0 % of kernel time" in instruction_mix(example).notes[0]
    assert instruction_mix(session([kernel(0, 1)])).refused


def test_ipc_stack_parts_add_up_to_the_ipc():
    opcodes = [
        {"name": "k", "grid": "g", "block": "b", "opcode": "FFMA", "executed": 3.0},
        {"name": "k", "grid": "g", "block": "b", "opcode": "LDG", "executed": 1.0},
    ]
    row = ipc_stack(session([counted(0, 1, ipc=2.0, grid="g", block="b")], opcodes=opcodes)).rows[0]
    assert (row["FP_ipc"], row["LS_ipc"], row["FP_share"]) == (1.5, 0.5, 75.0)
    assert sum(v for k, v in row.items() if k.endswith("_ipc")) == pytest.approx(row["ipc"])
    assert row["cycles"] == 1000


def test_means_are_weighted_as_documented():
    example = session(
        [
            counted(0, 10, tensor_pct=10.0, ipc=1.0, cycles_active=100.0, stall_wait=1.0, instructions=1.0),
            counted(10, 30, tensor_pct=50.0, ipc=4.0, cycles_active=300.0, stall_wait=4.0, instructions=2.0),
            kernel(40, 60),
        ]
    )
    overall = counters.utilisation(example).row(**{"class": "overall"})
    assert overall["tensor_pct"] == pytest.approx((10 * 10 + 50 * 30) / 40)
    assert overall["fma_pct"] is None and overall["measured"] == 0
    assert counters.warps(example).row(**{"class": "overall"})["ipc"] == pytest.approx((100 + 1200) / 400)
    assert counters.stalls(example).row(**{"class": "overall"})["stall_wait"] == pytest.approx((1 + 8) / 3)
    assert counters.overall_ipc(example) == pytest.approx(2.0)  # geometric mean of 1 and 4
    assert counters.stalls(session([kernel(0, 1)])).refused


def test_missing_values_are_none_not_zero():
    example = session([kernel(0, 1)])
    assert counters.totals(example)["cycles"] is None
    assert measure(example, "tensor_pct", plain=False) is None
    assert measure(example, "tensor_pct", plain=True) is None
    assert mean(numbers(example.launches, "ipc")) is None
    assert geometric_mean(numbers(example.launches, "ipc")) is None


def test_the_papers_quantities_are_computed_from_sessions():
    opcodes = [{"name": "k", "grid": "g", "block": "b", "opcode": "FFMA", "executed": 1.0}]
    full = {"grid": "g", "block": "b", "est_speedup_pct": 50.0, "est_rule": "r", "warps_active": 8.0}
    full |= {"stall_long_scoreboard": 2.0, "tensor_pct": 1.0, "l1_hit_pct": 20.0}
    base = session([counted(0, 10, "conv_fprop", **full)], opcodes=opcodes, name="a")
    new = session(
        [counted(0, 5, "conv_fprop", **full | {"warps_active": 12.0})], opcodes=opcodes, name="b", config="tf32"
    )
    for table in (ipc_stack(base), priority(base, "class"), kernel_shares(base), instruction_mix(base)):
        assert table.rows and table.refused is None
    study = study_table([base, new])
    assert study.row(quantity="cycles_ratio", config="tf32")["step"] == 0.5
    assert paper_shares(opcode_counts(base))["FP"] == 100
    assert study.row(quantity="warps_active_ratio", config="tf32", figure=12)["step"] == 1.5
    assert study.row(quantity="stall_math_pipe_throttle_ratio", config="tf32")["step"] is None
    assert math.isclose(study.row(quantity="l1_hit_pct", config="baseline", figure=11)["step"], 20)
