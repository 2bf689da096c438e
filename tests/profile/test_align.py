from __future__ import annotations

import pytest

from voxtune.profile.align import align, choose_operators, function_name, most_expensive, occurrence_classes


@pytest.mark.parametrize(
    ("name", "function"),
    [
        (
            "void at::native::vectorized_elementwise_kernel<4, F<float>, A<char*, 2ul> >(int, F)",
            "vectorized_elementwise_kernel",
        ),
        (
            "void at::vectorized_elementwise_kernel<4, F, std::array<char *, 2>>(int, T2)",
            "vectorized_elementwise_kernel",
        ),
        ("void (anonymous namespace)::softmax_warp_forward<float, 9>(float*)", "softmax_warp_forward"),
        ("void <unnamed>::softmax_warp_forward<float, 9>(float *)", "softmax_warp_forward"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(P)", "kernel"),
        ("std::enable_if<!T7, void>::type internal::kernel<int>(P)", "kernel"),
        ("sm80_xmma_gemm_f32f32_execute_kernel__5x_cublas", "sm80_xmma_gemm_f32f32_execute_kernel__5x_cublas"),
        ("triton_poi_fused_add_3", "triton_poi_fused_add_3"),
    ],
)
def test_names_of_both_tools_give_the_same_function(name: str, function: str) -> None:
    assert function_name(name) == function


def test_alignment_keeps_the_order_and_skips_launches_without_a_match() -> None:
    assert align("abcd", "abcd") == [0, 1, 2, 3]
    assert align("abXcd", "abcYd") == [0, 1, None, 2, 4]
    assert align("ab", "") == [None, None]
    assert align("", "ab") == []


def test_the_most_expensive_launches_come_first() -> None:
    launches = [("a", 5.0), ("b", 1.0), ("a", 5.0), ("c", 89.0)]
    assert most_expensive(launches, 0.5) == ["c"]
    assert most_expensive(launches, 0.99) == ["c", "a"]
    assert most_expensive([], 0.9) == []


def test_operators_cover_each_expensive_launch_once_most_expensive_first() -> None:
    launches = [("conv", 40.0), ("layout", 5.0), ("conv", 40.0), ("add", 10.0), ("tiny", 0.1), ("lost", 4.9)]
    operators = [0, 0, 1, 2, 3, -1]
    # Operator 1 launches only the convolution. It is preferred to 0, which also launches a layout copy.
    assert choose_operators(launches, operators, 0.8) == [1]
    assert choose_operators(launches, operators, 0.96) == [1, 2, 0]
    assert choose_operators(launches, operators, 1.0) == [1, 2, 0, 3]


def test_one_grid_on_tensors_of_different_size_is_several_classes() -> None:
    launches = [("moments", 3385.0), ("moments", 4.3), ("moments", 3390.0), ("moments", 6.2), ("add", 5.0)]
    classes = occurrence_classes(launches)
    assert classes[0] == classes[2] != classes[1] == classes[3]
    assert len(set(classes)) == 3
    assert occurrence_classes([]) == []
