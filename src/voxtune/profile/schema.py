"""The columns of a session's tables: types and meanings. A value that was not measured is null, never zero.

Counter columns come from Nsight Compute. `metric` lists the metrics of a column; the first one that the installed version
supports is used.
"""

from __future__ import annotations

from dataclasses import dataclass

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    name: str
    type: str  # Arrow type: string, int64 or float64
    doc: str
    metric: tuple[str, ...] = ()


def _column(name: str, kind: str, doc: str, *metric: str) -> TableColumn:
    return TableColumn(name=name, type=kind, doc=doc, metric=metric)


# One row per launch: a kernel, copy or fill on a GPU; an operator on a CPU.
LAUNCH = (
    _column("step", "int64", "which recorded step, from 0"),
    _column("index", "int64", "order of launch within the step, from 0"),
    _column("name", "string", "full name of the kernel or operator"),
    _column("kind", "string", "kernel, memcpy, memset or cpu_op"),
    _column("start_us", "float64", "start, microseconds since the step began"),
    _column("duration_us", "float64", "time on the device (on a CPU: the operator's own time)"),
    _column("launch_us", "float64", "time of the launch on the host, microseconds since the step began"),
    _column("stream", "int64", "CUDA stream"),
    _column("grid", "string", "x,y,z"),
    _column("block", "string", "x,y,z"),
    _column("registers", "int64", "registers per thread"),
    _column("shared_bytes", "int64", "static and dynamic shared memory per block"),
    _column("bytes", "int64", "bytes moved by a memcpy or memset"),
    _column("direction", "string", "direction of a copy: HtoD, DtoH or DtoD"),
    _column("op", "string", "the PyTorch operator that launched it"),
    _column("op_shapes", "string", "that operator's input shapes, JSON"),
    _column("module", "string", "dotted path of the module, also for backward; empty outside of any module"),
    _column("module_type", "string", "class of that module"),
    _column("phase", "string", "forward, backward, optimizer, transfer or other"),
    _column("class", "string", "kernel class, see classify.CLASSES"),
    _column("precision", "string", "fp32, tf32, bf16, fp16, fp64, int, or null if the name does not contain it"),
    _column("layout", "string", "ncdhw, ndhwc, or null if the name does not contain it"),
    _column("architecture", "string", "architecture the kernel was built for, such as sm80, if the name contains it"),
)

_STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
STALLS = (
    "long_scoreboard",
    "short_scoreboard",
    "math_pipe_throttle",
    "branch_resolving",
    "barrier",
    "wait",
    "lg_throttle",
    "mio_throttle",
    "tex_throttle",
    "not_selected",
    "no_instruction",
    "dispatch_stall",
    "drain",
    "imc_miss",
    "membar",
    "sleeping",
    "gmma",
)

TENSOR_PIPE = (
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
)
_TENSOR_OPS = {
    "tf32": ("sm__ops_path_tensor_src_tf32_dst_fp32.sum", "sm__ops_path_tensor_src_tf32.sum"),
    "bf16": ("sm__ops_path_tensor_src_bf16_dst_fp32.sum", "sm__ops_path_tensor_src_bf16.sum"),
    "fp16": ("sm__ops_path_tensor_src_fp16.sum", "sm__ops_path_tensor_src_fp16_dst_fp32.sum"),
}

TIME = "gpu__time_duration.sum"

# Read on every launch: one pass over the kernel, so that no memory has to be saved and restored.
FEW = (
    _column("ncu_time_us", "float64", "time under the profiler, microseconds", TIME),
    _column("cycles", "float64", "elapsed cycles, slowest SM", "sm__cycles_elapsed.max"),
    _column("cycles_active", "float64", "active cycles, mean over SMs", "sm__cycles_active.avg"),
    _column(
        "instructions", "float64", "warp instructions executed", "smsp__inst_executed.sum", "sm__inst_executed.sum"
    ),
    _column("ipc", "float64", "instructions per active cycle", "sm__inst_executed.avg.per_cycle_active"),
    _column(
        "tensor_pct",
        "float64",
        "tensor pipes busy with matrix products, % of elapsed peak",
        # The plain tensor metrics include HFMA2.MMA, which compilers use to load constants: an FP32 addition shows 2 %.
        "sm__pipe_tensor_type_hmma_hgmma_qgmma_imma_igmma_bmma_bgmma_cycles_active.avg.pct_of_peak_sustained_elapsed",
        *TENSOR_PIPE,
    ),
    _column("dram_bytes", "float64", "bytes to and from device memory", "dram__bytes.sum"),
)

# Needs many passes: read once per distinct launch and assigned to all launches like it.
FULL = (
    _column("fma_pct", "float64", "FMA pipes", "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_elapsed"),
    _column(
        "alu_pct", "float64", "integer and logic pipes", "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_elapsed"
    ),
    _column("sm_pct", "float64", "SM throughput, % of peak", "sm__throughput.avg.pct_of_peak_sustained_elapsed"),
    _column(
        "memory_pct", "float64", "memory throughput", "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed"
    ),
    _column("l1_hit_pct", "float64", "L1 hit rate", "l1tex__t_sector_hit_rate.pct"),
    _column("l2_hit_pct", "float64", "L2 hit rate", "lts__t_sector_hit_rate.pct"),
    _column("dram_pct", "float64", "DRAM throughput", "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed"),
    _column("warps_active", "float64", "active warps per SM and cycle", "sm__warps_active.avg.per_cycle_active"),
    _column("occupancy_pct", "float64", "active warps, % of peak", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    _column("tensor_pipe_pct", "float64", "tensor pipes busy, including HFMA2.MMA, as in Ryoo et al.", *TENSOR_PIPE),
    _column(
        "inst_hmma",
        "float64",
        "HMMA and HGMMA instructions, without HFMA2.MMA",
        "sm__inst_executed_pipe_tensor_op_hmma.sum",
    ),
    _column(
        "inst_hfma2",
        "float64",
        "HFMA2.MMA instructions: half-precision pairs or constants on the tensor pipe, not a matrix product",
        "sm__inst_executed_pipe_tensor_op_hmma_type_hfma2.sum",
    ),
    _column("inst_gmma", "float64", "warp-group HGMMA instructions", "sm__inst_executed_pipe_tensor_op_gmma.sum"),
    *(
        _column(f"tensor_ops_{source}", "float64", f"operations on tensor cores, {source} sources", *names)
        for source, names in _TENSOR_OPS.items()
    ),
    _column("tensor_ops", "float64", "operations on tensor cores: the sum of the above"),
    *(_column(f"stall_{s}", "float64", f"warps stalled on {s} per issue", _STALL.format(s)) for s in STALLS),
    _column("est_speedup_pct", "float64", "largest speed-up estimated by a rule of Nsight Compute, %"),
    _column("est_rule", "string", "name of that rule"),
)

# Counted by patching the kernel's code, which is slow: read only on the most expensive launches.
SASS = (
    _column("fadd", "float64", "thread-level FP32 additions", "smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"),
    _column(
        "fmul", "float64", "thread-level FP32 multiplications", "smsp__sass_thread_inst_executed_op_fmul_pred_on.sum"
    ),
    _column(
        "ffma",
        "float64",
        "thread-level FP32 fused multiply-adds",
        "smsp__sass_thread_inst_executed_op_ffma_pred_on.sum",
    ),
)
OPCODES = "sass__inst_executed_per_opcode"

COUNTERS = (*FEW, *FULL, *SASS)
TIER = _column(
    "counter_tier", "string", "few (this launch was counted), full (this or a similar launch), or null (no counters)"
)

LAUNCH_COLUMNS = (*LAUNCH, *COUNTERS, TIER)

# One row per distinct launch and opcode: the instruction mix, from sass__inst_executed_per_opcode.
OPCODE_COLUMNS = (
    _column("name", "string", "name of the kernel"),
    _column("grid", "string", "x,y,z"),
    _column("block", "string", "x,y,z"),
    _column("opcode", "string", "SASS opcode, such as FFMA"),
    _column("executed", "float64", "warp instructions of this opcode in one launch"),
)

# The memory in use during a step, by category.
MEMORY_COLUMNS = (
    _column("step", "int64", "which recorded step"),
    _column("time_us", "float64", "microseconds since the step began"),
    _column("category", "string", "weights, gradients, optimizer, activations, workspace, inputs or other"),
    _column("bytes", "float64", "bytes in use at that time"),
)

# Wall times of whole steps, unprofiled ("bare") and in each tier: the overhead of profiling and the spread of the times.
TIMING_COLUMNS = (
    _column("tier", "string", "bare, census, few, full or opcodes"),
    _column("repeat", "int64", "number of the repetition, from 0"),
    _column("step_ms", "float64", "wall time of one whole step"),
)

TABLES: dict[str, tuple[TableColumn, ...]] = {
    "launches": LAUNCH_COLUMNS,
    "opcodes": OPCODE_COLUMNS,
    "memory": MEMORY_COLUMNS,
    "timings": TIMING_COLUMNS,
}
