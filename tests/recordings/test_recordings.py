"""The shipped sessions: complete, small, without paths of a machine; class, phase, precision and module of each launch."""

from __future__ import annotations

import functools
import json
import re

import pandas as pd
import pytest

from voxtune.analysis.certificate import certify
from voxtune.profile.classify import classify
from voxtune.profile.session import Session, load_session
from voxtune.report.recordings import recorded_sessions, root

FOLDERS = recorded_sessions()
NAMES = [f.name for f in FOLDERS]
EAGER = [n for n in NAMES if "compile" not in n]
# Sessions without counters on every launch: ratios of counters are refused.
TIMES_ALONE: set[str] = set()
each = pytest.mark.parametrize("name", NAMES)


@functools.cache
def session(name: str) -> Session:
    return load_session(root() / name)


def step(name: str) -> pd.DataFrame:
    launches = session(name).launches
    return launches[launches["step"] == 0]


def test_sessions_are_those_of_the_study() -> None:
    configs = {"baseline", "tf32", "channels_last", "tf32+channels_last", "bf16+channels_last"}
    configs |= {"bf16+channels_last+compile"}
    assert set(NAMES) == {f"{mode}-{c}" for mode in ("train", "sample") for c in configs}
    files = [p for p in root().rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in files) < 10e6
    assert not [p for p in files if "raw" in p.parts or p.suffix not in (".json", ".parquet")]


@each
def test_sessions_contain_no_paths(name: str) -> None:
    texts = [json.dumps(session(name).meta)]
    for table in (session(name).launches, session(name).opcodes, session(name).timings):
        texts += [str(v) for c in table for v in table[c].dropna().unique() if not pd.api.types.is_number(v)]
    assert not [t for t in texts if re.search(r"(?<![\w.])/(tmp|home|root|usr|opt|work|mnt|var)\b|\.ncu-rep", t)]


@each
def test_sessions_cover_their_step(name: str) -> None:
    assert certify(session(name)).covers("few") == (name not in TIMES_ALONE)
    assert certify(session(name)).covers("time")
    for tier, state in session(name).meta["tiers"].items():
        assert state["done"] or state["why"], tier


@each
def test_every_kernel_has_the_class_of_the_current_rules(name: str) -> None:
    rows = session(name).launches
    columns = (rows[c].astype(object).where(rows[c].notna(), None) for c in ("name", "kind", "op", "phase"))
    results = [classify(*row) for row in zip(*columns, strict=True)]
    unknown = {n for n, t in zip(rows["name"], results, strict=True) if t.kernel_class == "unknown"}
    assert not unknown
    assert [t.kernel_class for t in results] == list(rows["class"])
    assert [t.precision for t in results] == list(
        rows["precision"].astype(object).where(rows["precision"].notna(), None)
    )


# Checked by hand: part of a name, the operator that launched it (None: any), its class and precision.
CHECKED = [
    ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw", None, "conv_fprop", "fp32"),
    ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nchw", None, "conv_fprop", "tf32"),
    ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32", None, "conv_fprop", "bf16"),
    ("sm90_xmma_dgrad_implicit_gemm_indexed_f32f32_tf32f32", None, "conv_dgrad", "tf32"),
    ("sm80_xmma_wgrad_implicit_gemm_indexed_f32f32_f32f32", None, "conv_wgrad", "fp32"),
    ("sm80_xmma_wgrad_implicit_gemm_indexed_wo_smem_tf32f32", None, "conv_wgrad", "tf32"),
    ("wgrad2d_grouped_direct_kernel<true, true, int, __nv_bfloat16", None, "conv_wgrad", "fp32"),
    ("implicit_convolveNd_sgemm<__nv_bfloat16", None, "conv_fprop", "fp32"),
    ("convolveNd_dgrad_float_engine", None, "conv_dgrad", "fp32"),
    ("reduce_wgrad_nchw_helper<float, __nv_bfloat16>", None, "conv_wgrad", "bf16"),
    ("init_device_workspace_kernel<xmma__5x_cudnn::implicit_gemm::dgrad", None, "conv_dgrad", None),
    ("cutlass_80_tensorop_s1688gemm_", "aten::cudnn_convolution", "conv_fprop", "tf32"),
    ("cutlass_80_tensorop_s1688gemm_", "aten::convolution_backward", "conv_backward", "tf32"),
    ("cutlass_80_tensorop_s1688gemm_", "aten::bmm", "matmul", "tf32"),
    ("cutlass_75_tensorop_bf16_s1688gemm_bf16", "aten::mm", "matmul", "bf16"),
    ("cutlass_80_simt_sgemm_", "aten::bmm", "matmul", "fp32"),
    ("nvjet_sm90_tst_", "aten::convolution_backward", "conv_backward", "bf16"),
    ("nvjet_sm90_tst_", "aten::bmm", "matmul", "bf16"),
    ("internal::gemvx::kernel<int, int, float", "aten::addmm", "matmul", "fp32"),
    ("splitKreduce_kernel<32, 16, int, float, float", "aten::bmm", "matmul", "fp32"),
    ("splitKreduce_kernel<32, 16, int, float, float", "aten::convolution_backward", "conv_backward", "fp32"),
    ("nchwToNhwcKernel<float", None, "layout", "fp32"),
    ("nhwcToNchwKernel<__nv_bfloat16", None, "layout", "bf16"),
    ("tensorTransformGeneric<", None, "layout", "bf16"),
    ("nhwcAddPaddingKernel<", None, "padding", "bf16"),
    ("setTensor5d_kernel", "aten::convolution_backward", "elementwise", "fp32"),
    ("RowwiseMomentsCUDAKernel<float>", None, "norm", "fp32"),
    ("ComputeInternalGradientsCUDAKernel<float>", None, "norm", "fp32"),
    ("GroupNormBackwardKernelImplInternal<float>", None, "norm", "fp32"),
    ("cunn_SoftMaxForwardReg<float", None, "attention", "fp32"),
    ("direct_copy_kernel_cuda", "aten::cat", "cat", "bf16"),
    ("bfloat16_copy_kernel_cuda", "aten::copy_", "cast", "bf16"),
    ("unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda", "aten::copy_", "cast", "fp32"),
    ("gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda", "aten::copy_", "copy", "bf16"),
    ("CatArrayBatchedCopy", None, "cat", None),
    ("upsample_trilinear3d_backward_out_frame<float", None, "upsample", "fp32"),
    ("distribution_elementwise_grid_stride_kernel<float", None, "random", "fp32"),
    ("multi_tensor_apply_kernel", None, "optimizer", "fp32"),
    ("reduce_kernel<512, 1, at::native::ReduceOp<float", "aten::sum", "reduce", "fp32"),
    ("CUDAFunctor_add<c10::BFloat16>", "aten::add_", "elementwise", "bf16"),
    ("silu_backward_kernel", "aten::silu_backward", "elementwise", "fp32"),
    ("triton_red_fused__to_copy_add_clone_convolution_native_group_norm_silu", None, "triton", None),
    ("triton_poi_fused__to_copy__unsafe_index_put_add_mul_neg_new_zeros", None, "triton", None),
    ("triton_red_fused_convolution_backward", None, "triton", None),
]


@functools.cache
def every_kernel() -> pd.DataFrame:
    rows = pd.concat([step(n) for n in NAMES])
    return rows.loc[rows["kind"] == "kernel", ["name", "op", "class", "precision"]].drop_duplicates()


@pytest.mark.parametrize(("part", "op", "kernel_class", "precision"), CHECKED)
def test_names_checked_by_hand(part: str, op: str | None, kernel_class: str, precision: str | None) -> None:
    rows = every_kernel()
    rows = rows[rows["name"].str.contains(part, regex=False) & ((rows["op"] == op) | (op is None))]
    assert set(rows["class"]) == {kernel_class}
    precisions = {None if pd.isna(p) else p for p in rows["precision"]}
    assert precision in precisions


@each
def test_phases_are_in_order(name: str) -> None:
    rows = step(name)
    order = {"sample": ["forward"], "train": ["forward", "backward", "optimizer"]}[session(name).meta["mode"]]
    assert list(dict.fromkeys(rows["phase"])) == order
    assert rows["phase"].map(order.index).is_monotonic_increasing
    gradients = rows["class"].isin(["conv_wgrad", "conv_dgrad", "conv_backward"])
    assert set(rows.loc[gradients, "phase"]) <= {"backward"}
    assert not (rows.loc[rows["phase"] == "backward", "class"] == "conv_fprop").any()
    assert set(rows.loc[rows["phase"] == "optimizer", "class"]) <= {"optimizer"}


@pytest.mark.parametrize("name", [n for n in EAGER if n.startswith("train-")])
def test_the_forward_pass_of_training_equals_a_sampling_step(name: str) -> None:
    """Same kernels and classes, apart from loss and update. Two GPUs differ by up to 2 %."""
    train, sample = step(name), step(name.replace("train-", "sample-"))
    forward = train[train["phase"] == "forward"]
    assert forward["duration_us"].sum() == pytest.approx(sample["duration_us"].sum(), rel=0.02)
    counts = (rows["class"].value_counts() for rows in (forward, sample))
    left, right = (
        c.drop(["elementwise", "reduce", "random", "cast", "memset"], errors="ignore").to_dict() for c in counts
    )
    assert left == right


@pytest.mark.parametrize("name", EAGER)
def test_launches_have_a_module(name: str) -> None:
    rows = step(name)
    assert rows["module"].notna().all()
    outside = rows[(rows["module"] == "") & (rows["phase"] != "optimizer")]
    # Code of the network outside its modules, the loss or the update.
    assert outside["duration_us"].sum() < 0.02 * rows["duration_us"].sum()
    assert not outside["class"].str.startswith("conv").any() and "norm" not in set(outside["class"])
    convolutions = rows[rows["module_type"] == "Conv3d"].groupby("module")["class"].agg(set)
    assert len(convolutions) == 57 and convolutions.map(lambda c: "conv_fprop" in c).all()
    norms = rows[rows["class"] == "norm"]
    assert set(norms["module_type"]) == {"GroupNorm32"}


def test_every_convolution_has_its_gradients() -> None:
    rows = step("train-baseline")
    classes = rows[rows["module_type"] == "Conv3d"].groupby("module")["class"].agg(set)
    assert classes.map(lambda c: "conv_wgrad" in c).all()
    # The image needs no gradient.
    assert list(classes.index[~classes.map(lambda c: "conv_dgrad" in c)]) == ["input_blocks.0.0"]


@pytest.mark.parametrize("name", [n for n in NAMES if n not in TIMES_ALONE])
def test_counters_agree_with_the_precision_in_names(name: str) -> None:
    rows = step(name)
    heavy = rows[rows["class"].str.startswith("conv") | (rows["class"] == "matmul")]
    # Reductions of partial sums and workspace initialisation, without matrix multiplication.
    heavy = heavy[~heavy["name"].str.contains("splitKreduce|split_k_kernel|reduce_wgrad|init_device_workspace")]
    busy = heavy["tensor_pct"] > 0
    assert set(heavy.loc[busy, "precision"]) <= {"tf32", "bf16"}
    assert set(heavy.loc[~busy, "precision"]) <= {"fp32"}


def test_fp32_is_proved() -> None:
    for name in NAMES:
        proof = session(name).meta["proof"]
        assert (proof["claim"] == "fp32") == ("tf32" not in name and "bf16" not in name)
        assert proof["claim"] is None or proof["holds"] is True
