from __future__ import annotations

from collections import Counter

import pytest

from tests.factories.traces import baseline_trace, channels_last_trace, text
from voxtune.profile.attribution import launch_rows
from voxtune.profile.classify import CLASSES, classify
from voxtune.profile.ncu import read_raw

XMMA = "sm80_xmma_{}_implicit_gemm_{}_nhwckrsc_nhwc_tilesize128x128x16_stage4_g1_execute_kernel__5x_cudnn"
COPY = "void at::native::{}<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda({})#1}}{}>(int, T)"


@pytest.mark.parametrize(
    ("name", "op", "phase", "expected"),
    [
        (XMMA.format("fprop", "tf32f32_tf32f32_f32"), "aten::cudnn_convolution", "forward", "conv_fprop"),
        (XMMA.format("wgrad", "f32f32_f32f32_f32"), "aten::convolution_backward", "backward", "conv_wgrad"),
        (XMMA.format("dgrad", "f32f32_f32f32_f32"), None, "backward", "conv_dgrad"),
        (XMMA.format("fprop", "bf16bf16_bf16f32_f32"), "aten::convolution_backward", "backward", "conv_dgrad"),
        ("nvjet_tst_128x64_64x6_1x2_h_bz_TNT", "aten::convolution_backward", "backward", "conv_backward"),
        ("nvjet_tst_128x64_64x6_1x2_h_bz_TNT", "aten::mm", "forward", "matmul"),
        ("void cudnn::engines_precompiled::nchwToNhwcKernel<float>(T)", "aten::cudnn_convolution", "forward", "layout"),
        ("void nhwcAddPaddingKernel<float, float, true>(int)", "aten::convolution_backward", "backward", "padding"),
        (
            "void cudnn::engines_precompiled::setTensor5d_kernel<float>(T)",
            "aten::convolution_backward",
            None,
            "elementwise",
        ),
        ("_5x_cudnn_volta_scudnn_128x64_relu_xregs_large_nn_v1", None, "forward", "conv_fprop"),
        ("void implicit_convolveNd_sgemm<float, 3, 1024>(int)", None, "forward", "conv_fprop"),
        ("void at::native::elementwise_kernel<128, 2, GroupNormKernelImplInternal>(int)", None, None, "norm"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_kernel0_0", None, None, "attention"),
        ("void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nt_align1>(P)", "aten::bmm", None, "matmul"),
        ("void at::native::multi_tensor_apply_kernel<TensorListMetadata<3>>(T)", None, "optimizer", "optimizer"),
        ("triton_poi_fused_add_silu_3", "CompiledFunctionBackward", "backward", "triton"),
        ("triton_red_fused_native_group_norm_0", None, "forward", "triton"),
        ("voxtune_norm_act_forward", None, "forward", "triton"),
        (COPY.format("elementwise_kernel", "float", ""), "aten::copy_", "forward", "copy"),
        (COPY.format("unrolled_elementwise_kernel", "float", ", LoadWithCast<1>"), "aten::copy_", "forward", "cast"),
        ("void at::native::bfloat16_copy_kernel_cuda<float>(int)", "aten::copy_", "forward", "cast"),
        (COPY.format("elementwise_kernel", "float", ""), "aten::cat", "forward", "cat"),
        ("void at::native::distribution_elementwise_grid_stride_kernel<float, 4>(int)", None, None, "random"),
        ("something_never_seen", None, "forward", "unknown"),
        ("something_never_seen", None, "optimizer", "optimizer"),
    ],
)
def test_class(name: str, op: str | None, phase: str | None, expected: str) -> None:
    assert classify(name, "kernel", op, phase).kernel_class == expected


@pytest.mark.parametrize(
    ("name", "precision", "layout", "architecture"),
    [
        (XMMA.format("fprop", "f32f32_tf32f32_f32"), "tf32", "ndhwc", "sm80"),
        (XMMA.format("fprop", "f32f32_f32f32_f32").replace("nhwckrsc_nhwc", "nchwkcrs_nchw"), "fp32", "ncdhw", "sm80"),
        (XMMA.format("fprop", "bf16bf16_bf16f32_f32").replace("sm80", "sm90"), "bf16", "ndhwc", "sm90"),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x4_tn_align4", "tf32", None, "sm80"),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(P)",
            "bf16",
            None,
            "sm80",
        ),
        ("nvjet_tst_128x64_64x6_1x2_h_bz_TNT", "bf16", None, None),
        ("nvjet_hsh_128x64_64x6_1x2_h_bz_TNT", "fp16", None, None),
        ("nvjet_sss_128x64", None, None, None),  # FP32 or TF32: not in the name
        ("ampere_sgemm_128x64_nn", "fp32", None, "sm80"),
        ("void cudnn::engines_precompiled::nhwcToNchwKernel<float, float>(T)", "fp32", None, None),
        (
            "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<c10::Half>>(int)",
            "fp16",
            None,
            None,
        ),
        ("void at::native::vectorized_elementwise_kernel<2, at::native::AddFunctor<double>>(int)", "fp64", None, None),
        ("triton_poi_fused_bf16_add_3", None, None, None),
    ],
)
def test_precision_layout_and_architecture(
    name: str, precision: str | None, layout: str | None, architecture: str | None
) -> None:
    kernel = classify(name, "kernel")
    assert (kernel.precision, kernel.layout, kernel.architecture) == (precision, layout, architecture)


@pytest.mark.parametrize("op", ["aten::mkldnn_convolution", "aten::native_group_norm", "aten::bmm", "aten::empty"])
def test_a_host_operator_has_a_class(op: str) -> None:
    expected = {"aten::mkldnn_convolution": "conv_fprop", "aten::native_group_norm": "norm", "aten::bmm": "matmul"}
    assert classify(op, "cpu_op", op, "forward").kernel_class == expected.get(op, "host")


@pytest.mark.parametrize("trace", [baseline_trace, channels_last_trace])
def test_every_recorded_kernel_has_a_class(trace: object) -> None:
    rows = launch_rows(trace(), {})  # type: ignore[operator]
    time = Counter[str]()
    for row in rows:
        assert row["class"] in CLASSES
        time[row["class"]] += row["duration_us"]
    assert time["unknown"] < 0.01 * time.total()


@pytest.mark.parametrize("file", ["few.csv.gz", "full.csv.gz"])
def test_names_as_printed_by_nsight_compute_have_a_class(file: str) -> None:
    assert {classify(c.name, "kernel").kernel_class for c in read_raw(text(file), {})} <= {*CLASSES} - {"unknown"}
