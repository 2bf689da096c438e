"""Plausible sessions of any size, made by hand: a U-Net's step with counters, memory, timings and opcodes."""

from __future__ import annotations

import random
from typing import Any

from voxtune.profile import schema
from voxtune.profile.session import Session, frame

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    '"><svg onload="window.hacked=1">',
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::FillFunctor<float> >&>",
    "kernel' onmouseover='window.hacked=1",
    "line\u2028separator\u2029 <!-- --> ]]> {{7*7}} ${7*7}",
    "javascript:window.hacked=1",
)
# class: (kernel's name, operator, weight in time, tensor pipe %, flops a byte)
KERNELS: dict[str, tuple[str, str, float, float, float]] = {
    "conv_fprop": (
        "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize128x128",
        "aten::cudnn_convolution",
        26.0,
        0.0,
        60.0,
    ),
    "conv_dgrad": (
        "void cudnn::cnn::dgrad_sm80_xmma_implicit<float, 128, 5, 5, 3>",
        "aten::convolution_backward",
        30.0,
        0.0,
        55.0,
    ),
    "conv_wgrad": (
        "void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>",
        "aten::convolution_backward",
        34.0,
        0.0,
        50.0,
    ),
    "norm": (
        "void at::native::RowwiseMomentsCUDAKernel<float>(long, float, float const*, float*, float*)",
        "aten::native_group_norm",
        5.0,
        0.0,
        0.8,
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, silu_kernel>(int, silu_kernel, at::detail::Array<char*, 2>)",
        "aten::silu",
        3.0,
        0.0,
        0.3,
    ),
    "layout": (
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>",
        "aten::cudnn_convolution",
        2.0,
        0.0,
        0.0,
    ),
    "copy": ("void at::native::direct_copy_kernel_cuda", "aten::copy_", 1.0, 0.0, 0.0),
    "reduce": ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >", "aten::sum", 1.0, 0.0, 0.2),
    "matmul": ("ampere_sgemm_128x64_tn", "aten::addmm", 0.4, 0.0, 20.0),
    "optimizer": ("void at::native::multi_tensor_apply_kernel<AdamFunctor>", "aten::_foreach_addcdiv_", 0.6, 0.0, 0.4),
    "memset": ("Memset (Device)", "aten::zero_", 0.05, 0.0, 0.0),
}
CYCLE = (
    "layout",
    "conv_fprop",
    "norm",
    "elementwise",
    "elementwise",
    "copy",
    "conv_dgrad",
    "conv_wgrad",
    "norm",
    "elementwise",
    "reduce",
    "matmul",
)
# config: (how much faster than baseline a class becomes)
CONFIGS: dict[str, dict[str, float]] = {
    "baseline": {},
    "tf32": {"conv_fprop": 4.0, "conv_dgrad": 6.5, "conv_wgrad": 7.0, "matmul": 3.0},
    "channels_last": {"conv_fprop": 1.1, "norm": 0.4, "layout": 0.3},
    "tf32+channels_last": {"conv_fprop": 5.0, "conv_dgrad": 7.0, "conv_wgrad": 8.0, "norm": 0.4, "layout": 0.3},
}
OPCODES = {"FFMA": 0.45, "LDG": 0.08, "STS": 0.05, "IMAD": 0.2, "IADD3": 0.1, "BRA": 0.04, "MOV": 0.05, "ISETP": 0.03}
STEP_MS = 1223.0


def make(
    config: str = "baseline",
    *,
    launches: int = 1263,
    mode: str = "train",
    counters: bool = True,
    names: tuple[str, ...] = (),
    steps: int = 1,
    seed: int = 0,
    gpu: str | None = "NVIDIA H200",
) -> Session:
    """`names` replace the kernels' own in turn, such as HOSTILE ones; without `counters` only the census was taken."""
    dice = random.Random(f"{config}{launches}{mode}{seed}")
    rows = [row for step in range(steps) for row in _step(dice, config, launches, mode, counters, names, step)]
    length_ms = max(r["start_us"] + r["duration_us"] for r in rows) / 1000
    return Session(
        meta=_meta(config, mode, counters, gpu, names),
        launches=frame(rows, "launches"),
        opcodes=frame(_opcodes(rows) if counters else [], "opcodes"),
        memory=frame(_memory(length_ms, steps), "memory"),
        timings=frame(_timings(dice, length_ms, counters), "timings"),
    )


def _step(
    dice: random.Random, config: str, launches: int, mode: str, counters: bool, names: tuple[str, ...], step: int
) -> list[dict[str, Any]]:
    cycle = CYCLE if mode == "train" else tuple(c for c in CYCLE if c not in ("conv_dgrad", "conv_wgrad"))
    classes = [cycle[i % len(cycle)] for i in range(launches)]
    if mode == "train":
        classes[-launches // 20 :] = ["optimizer"] * len(classes[-launches // 20 :])
    weights = [KERNELS[c][2] * dice.uniform(0.3, 1.7) for c in classes]
    unit = STEP_MS * 1000 / sum(weights) * 0.95
    clock, rows = 12.0, []
    for index, (kind, weight) in enumerate(zip(classes, weights, strict=True)):
        duration = weight * unit / CONFIGS.get(config, {}).get(kind, 1.0)
        gap = dice.choice((0.4, 0.6, 0.9)) if index % 97 else dice.uniform(100, 900)
        row = _launch(dice, index, kind, duration, launches, mode, config, counters)
        row |= {"step": step, "start_us": clock, "launch_us": max(0.0, clock - dice.uniform(5, 900))}
        if names:
            row["name"] = names[index % len(names)]
            row["module"] = f"{row['module']}.{names[(index + 1) % len(names)]}" if index % 50 == 0 else row["module"]
        rows.append(row)
        clock += duration + gap
    return rows


def _launch(
    dice: random.Random, index: int, kind: str, us: float, launches: int, mode: str, config: str, counters: bool
) -> dict[str, Any]:
    name, op, _, _, intensity = KERNELS[kind]
    part = index / launches
    phase = "forward" if mode == "sample" or part < 0.35 else "optimizer" if kind == "optimizer" else "backward"
    depth = int(part * 8) if phase == "forward" else int((1 - part) * 8)
    place = ("input_blocks", "middle_block", "output_blocks")[0 if depth < 3 else 1 if depth == 3 else 2]
    module = (
        "" if kind == "optimizer" else f"{place}.{depth}.{index % 2}.{'in' if index % 3 else 'out'}_layers.{index % 4}"
    )
    tf32 = "tf32" in config and kind.startswith("conv")
    row: dict[str, Any] = {
        "index": index,
        "name": name.replace("f32f32_f32f32_f32", "tf32f32_tf32f32_f32") if tf32 else name,
        "kind": "memset" if kind == "memset" else "kernel",
        "duration_us": us,
        "stream": 7,
        "grid": f"{64 + index % 7 * 32},1,1",
        "block": "128,1,1",
        "registers": 128,
        "op": op,
        "module": module,
        "module_type": {"norm": "GroupNorm", "elementwise": "SiLU"}.get(kind, "Conv3d"),
        "phase": phase,
        "class": kind,
        "precision": "tf32" if tf32 else "fp32",
        "layout": "ndhwc" if "channels_last" in config else "ncdhw",
    }
    return row | (_counters(dice, kind, us, tf32, intensity) if counters else {})


def _counters(dice: random.Random, kind: str, us: float, tf32: bool, intensity: float) -> dict[str, Any]:
    heavy = kind.startswith("conv") or kind == "matmul"
    read = us * 1e-6 * 4.0e12 * (0.25 if heavy else 0.7)
    ipc = dice.uniform(1.8, 2.6) if heavy else dice.uniform(0.4, 1.2)
    cycles = us * 1755
    values: dict[str, Any] = {c.name: dice.uniform(1, 60) for c in schema.FULL if c.type == "float64"}
    values |= {
        "ncu_time_us": us,
        "cycles": cycles,
        "cycles_active": cycles * 0.93,
        "instructions": cycles * ipc * 132,
        "ipc": ipc,
        "tensor_pct": dice.uniform(30, 55) if tf32 else 0.0,
        "dram_bytes": read,
        "fadd": read * intensity * 0.1,
        "fmul": read * intensity * 0.1,
        "ffma": 0.0 if tf32 else read * intensity * 0.4,
        "tensor_ops": read * intensity * 4 if tf32 else 0.0,
        "inst_hmma": read / 1e4 if tf32 else 0.0,
        "inst_gmma": 0.0,
        "est_speedup_pct": dice.uniform(2, 60),
        "est_rule": dice.choice(("SOLBottleneck", "Occupancy", "MemoryCacheAccessPattern")),
        "counter_tier": "full",
    }
    return values | {f"stall_{s}": dice.uniform(0, 2.5) for s in schema.STALLS}


def _opcodes(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    distinct = {(r["name"], r["grid"], r["block"]): r["instructions"] for r in rows}
    return [
        {"name": n, "grid": g, "block": b, "opcode": opcode, "executed": total * share}
        for (n, g, b), total in distinct.items()
        for opcode, share in OPCODES.items()
    ]


def _memory(length_ms: float, steps: int) -> list[dict[str, Any]]:
    gib, rows = 1024.0**3, []
    for step in range(steps):
        for i in range(120):
            rise = 1 - abs(i / 119 * 2 - 1)
            held = {
                "weights": 0.11,
                "gradients": 0.11 * (i > 60),
                "optimizer": 0.22,
                "activations": 16 * rise,
                "workspace": 1.5 * (i % 3 == 0),
            }
            at = length_ms * 1000 * i / 119
            rows += [{"step": step, "time_us": at, "category": c, "bytes": v * gib} for c, v in held.items()]
    return rows


def _timings(dice: random.Random, length_ms: float, counters: bool) -> list[dict[str, Any]]:
    cost = {"bare": 1.0, "census": 1.04, **({"few": 9.0, "full": 60.0} if counters else {})}
    return [
        {"tier": tier, "repeat": i, "step_ms": length_ms * factor * dice.uniform(0.985, 1.015)}
        for tier, factor in cost.items()
        for i in range(5 if tier in ("bare", "census") else 1)
    ]


def _meta(config: str, mode: str, counters: bool, gpu: str | None, names: tuple[str, ...]) -> dict[str, Any]:
    why = None if counters else "ERR_NVGPUCTRPERM: this user may not read GPU counters"
    return {
        "name": f"{mode} {config}" if not names else f"{mode} {config} {names[0]}",
        "workload": "med-ddpm",
        "mode": mode,
        "config": config,
        "size": [128, 128, 128],
        "batch": 1,
        "steps": 1,
        "environment": {
            "gpu": gpu,
            "driver": "580.65",
            "torch": "2.11.0",
            "cuda": "13.0",
            "cudnn": "9.19",
            "triton": "3.6",
            "ncu": "2026.1" if counters else None,
            "python": "3.12",
        },
        "clocks": {"sm_mhz": 1755, "memory_mhz": 3201},
        "cache_control": "none",
        "clock_control": "none",
        "commit": "0123456789abcdef",
        "command": f"voxtune profile med-ddpm --mode {mode} --config {config}",
        "created": "2026-11-15T03:00:00Z",
        "tiers": {
            t: {"done": counters or t == "census", "why": None if t == "census" else why}
            for t in ("census", "few", "full")
        },
        "window": None,
        "peak_bytes": 19.3 * 1024**3,
    }
