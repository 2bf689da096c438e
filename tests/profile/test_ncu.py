from __future__ import annotations

import pytest

from tests.factories.traces import text
from voxtune.profile import schema
from voxtune.profile.ncu import choose_metrics, explain, instances, number, read_raw, read_rules, unknown_metric

# As printed by Nsight Compute 2025 in a container without the permission.
NO_PERMISSION = """==PROF== Connected to process 412 (/usr/bin/python3.12)
==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the target \
device 0. For instructions on enabling permissions and to get more information see https://developer.nvidia.com/ERR_NVGPUCTRPERM
==PROF== Disconnected from process 412
==WARNING== No kernels were profiled.
"""
DETAILS = """==PROF== Disconnected from process 4711
"ID","Kernel Name","Section Name","Metric Name","Metric Value","Rule Name","Rule Type","Rule Description",\
"Estimated Speedup Type","Estimated Speedup"
"0","k","SpeedOfLight","","","SOLBottleneck","OPT","balanced, or so","",""
"0","k","Occupancy","","","AchievedOccupancy","OPT","low","local","85.2"
"0","k","WarpStateStats","","","CPIStall","OPT","stalls","global","41.81"
"1","k","Occupancy","","","AchievedOccupancy","OPT","low","local","1,085.2"
"""


def known_to_gh100() -> set[str]:
    return set(text("metrics_gh100.txt.gz").split())


def test_every_counter_of_the_schema_has_a_metric_on_an_h200() -> None:
    chosen, missing = choose_metrics(schema.COUNTERS, known_to_gh100())
    assert missing == []
    assert {"tensor_ops", "est_speedup_pct", "est_rule"} == {c.name for c in schema.COUNTERS} - set(chosen)
    # Without the metric that excludes HFMA2.MMA, the next supported one is used.
    known = {m for m in known_to_gh100() if "hmma_hgmma" not in m}
    assert choose_metrics(schema.FEW, known)[0]["tensor_pct"] == schema.TENSOR_PIPE[0]
    assert choose_metrics(schema.FEW, {"gpu__time_duration"})[1] == [c.name for c in schema.FEW[1:]]


def test_a_recorded_step_is_read_completely() -> None:
    chosen, _ = choose_metrics(schema.FEW, {m for m in known_to_gh100() if "hmma_hgmma" not in m})
    counted = read_raw(text("few.csv.gz"), chosen)
    assert len(counted) == 1260
    launch = counted[40]
    assert launch.key == ("elementwise_kernel", "65536,1,1", "128,1,1")
    assert launch.values == {
        "ncu_time_us": 47.264,  # from nanoseconds with thousands separators
        "cycles": 93333.0,
        "cycles_active": 89192.88,
        "instructions": 29097984.0,
        "ipc": 2.47,
        "tensor_pct": 2.13,  # an FP32 addition: HFMA2.MMA on the tensor pipe
        "dram_bytes": 106628352.0,
    }
    assert {c.passes for c in counted} == {1}


def test_an_imported_report_is_read_in_its_own_units() -> None:
    """Pages of a report from an H200: columns in ms and Gbyte, rules with and without an estimate."""
    chosen, _ = choose_metrics((*schema.FEW, *schema.FULL), known_to_gh100())
    counted = read_raw(text("sample_full_raw.csv.gz"), chosen)
    assert len(counted) == 8 and {c.passes for c in counted} == {23}
    moments = counted[2]
    assert moments.key.function == "RowwiseMomentsCUDAKernel"
    assert moments.time_us == moments.values["ncu_time_us"] == pytest.approx(3376.608)
    assert moments.values["stall_long_scoreboard"] is not None and "dram_bytes" not in moments.values
    page = '"ID","Kernel Name","Block Size","Grid Size","dram__bytes.sum"\n"","","","","Gbyte"\n'
    (launch,) = read_raw(f'{page}"0","k","(1, 1, 1)","(1, 1, 1)","0.563598"\n', {"dram_bytes": "dram__bytes.sum"})
    assert launch.values["dram_bytes"] == pytest.approx(563_598_000)
    rules = read_rules(text("sample_full_details.csv.gz"))
    assert rules["2"] == (81.71, "CPIStall") and rules["1"] == (41.32, "CPIStall")
    assert rules["0"] == (81.25, "TheoreticalOccupancy (local)")
    assert set(rules) <= {c.number for c in counted}


def test_cells_with_all_instances_give_their_total() -> None:
    chosen, _ = choose_metrics((*schema.FULL, *schema.SASS), known_to_gh100())
    counted = read_raw(text("full.csv.gz"), chosen)
    assert len(counted) == 40
    assert counted[7].values["ffma"] == 16777216.0
    assert counted[7].values["stall_long_scoreboard"] == 17.56
    assert "inst_hfma2" not in counted[7].values  # not collected: missing, not zero
    assert counted[7].opcodes == {}  # recorded without the opcodes' names


def test_opcodes_and_derived_columns() -> None:
    header = (
        '"ID","Kernel Name","Block Size","Grid Size","sm__inst_executed_pipe_tensor_op_hmma.sum","hfma2","tf32","bf16",'
        f'"{schema.OPCODES}"'
    )
    row = '"3","k<float>(int)","(64, 1, 1)","(2, 3, 4)","1,000","600","2,048","n/a","10 (FFMA: 6; IMAD.WIDE: 4)"'
    columns = {
        "inst_hmma": "sm__inst_executed_pipe_tensor_op_hmma.sum",
        "inst_hfma2": "hfma2",
        "tensor_ops_tf32": "tf32",
        "tensor_ops_bf16": "bf16",
    }
    (launch,) = read_raw(f"{header}\n{row}\n", columns)
    assert launch.values == {"inst_hmma": 400.0, "inst_hfma2": 600.0, "tensor_ops_tf32": 2048.0, "tensor_ops": 2048.0}
    assert launch.opcodes == {"FFMA": 6.0, "IMAD.WIDE": 4.0}
    assert launch.identity == ("k<float>(int)", "2,3,4", "64,1,1")


@pytest.mark.parametrize(
    ("cell", "value"),
    [("1,234.5", 1234.5), ("0", 0.0), ("12 (3; 4)", 12.0), ("2.5e+10", 2.5e10), ("-3", -3.0)]
    + [(cell, None) for cell in ("", "n/a", "nan", "inf", "No-CC", "all (all)", "1x2", None)],
)
def test_numbers(cell: str | None, value: float | None) -> None:
    assert number(cell) == value


def test_instances_need_names() -> None:
    assert instances("16,992 (FFMA: 3,584; HFMA2.MMA: 8)") == {"FFMA": 3584.0, "HFMA2.MMA": 8.0}
    assert instances("16,992 (3,584; 8)") == {}
    assert instances("") == {}


def test_the_rule_with_the_largest_global_estimate_is_used() -> None:
    assert read_rules(DETAILS) == {"0": (41.81, "CPIStall"), "1": (1085.2, "AchievedOccupancy (local)")}
    assert read_rules("nothing here") == {}


def test_errors_are_explained_with_the_remedy() -> None:
    assert "NVreg_RestrictProfilingToAdminUsers=0" in explain(NO_PERMISSION, 1)
    assert "CAP_SYS_ADMIN" in explain(NO_PERMISSION, 1)
    assert "no kernel" in explain("==WARNING== No kernels were profiled.", 0)
    assert explain("==ERROR== option '--page' cannot be specified more than once.", 1).startswith(
        "Nsight Compute: option"
    )
    assert "status 9" in explain("", 9)
    assert unknown_metric("==ERROR== Failed to find metric sm__no_such_thing.sum\n") == "sm__no_such_thing"
    assert unknown_metric(NO_PERMISSION) is None


def test_an_explanation_contains_no_paths() -> None:
    message = explain("==ERROR== Could not open report file '/tmp/somewhere/full/report.ncu-rep'.", 1)
    assert message == "Nsight Compute: Could not open report file 'report.ncu-rep'."
    assert (
        explain("cannot run /opt/x/ncu: 3/4 done", 1) == "Nsight Compute exited with status 1: cannot run ncu: 3/4 done"
    )
