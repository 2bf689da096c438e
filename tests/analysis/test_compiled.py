"""Modules of the launches of compiled steps."""

from __future__ import annotations

import json

import pytest

from tests.factories.sessions import kernel, session
from voxtune.analysis.compare import compare_modules
from voxtune.analysis.compiled import kind_of, with_modules

SMALL, LARGE = json.dumps([[1, 8, 4, 4, 4], [8, 8, 3, 3, 3], []]), json.dumps([[1, 8, 8, 8, 8], [8, 8, 3, 3, 3], []])


def conv(start, shapes, module, **more):
    return kernel(
        start,
        10,
        "conv_fprop",
        op="aten::cudnn_convolution",
        op_shapes=shapes,
        module=module,
        module_type="Conv3d",
        **more,
    )


def plain():
    rows = [conv(0, LARGE, "a"), kernel(10, 5, "norm", module="n"), conv(20, LARGE, "b"), conv(40, SMALL, "c")]
    return session(rows, name="work baseline", config="baseline", workload="w")


def compiled(*rows):
    return session(list(rows), name="work compile", config="compile", workload="w")


def test_convolutions_belong_to_the_module_of_the_same_shape_and_place():
    name = "triton_poi_fused_native_group_norm_silu_1"
    step = compiled(
        conv(0, LARGE, None),
        kernel(10, 2, "layout", op="aten::cudnn_convolution", op_shapes=LARGE, module=None),
        kernel(15, 5, "triton", name=name, op=name, module=None),
        conv(20, LARGE, None),
        conv(40, SMALL, None),
    )
    _, result = with_modules([plain(), step])
    assert result.launches["module"].tolist() == ["a", "a", "(compiled) group norm and activation", "b", "c"]
    assert result.launches["module_type"].tolist()[0] == "Conv3d"
    assert step.launches["module"].isna().all()


def test_shapes_that_occur_at_other_counts_stay_unattributed():
    step = compiled(conv(0, LARGE, None), conv(40, SMALL, None))
    _, result = with_modules([plain(), step])
    assert result.launches["module"].tolist() == ["(compiled) convolutions", "c"]
    (alone,) = with_modules([step])
    assert set(alone.launches["module"]) == {"(compiled) convolutions"}


def test_partly_attributed_steps_have_no_ratios_by_module():
    step = compiled(
        conv(0, LARGE, None), kernel(60, 7, "triton", module=None), conv(20, LARGE, None), conv(40, SMALL, None)
    )
    table = compare_modules(with_modules([plain(), step]))
    row = table.row(module="a")
    assert (row["compile (H200) ms"], row["compile (H200) ratio"]) == (pytest.approx(0.01), None)
    assert table.row(module="n")["compile (H200) ms"] is None
    assert table.row(module="(compiled) triton")["baseline (H200) ms"] is None
    assert table.row(module="all")["compile (H200) ratio"] == pytest.approx(37 / 35)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_red_fused_native_group_norm_native_group_norm_backward_51", "group norm, backward"),
        ("triton_poi_fused__to_copy__unsafe_index_put_mul_new_zeros_31", "interpolation, backward"),
        ("triton_poi_fused__to_copy_convolution_7", "operands of convolutions"),
        ("triton_poi_fused_silu_10", "elementwise"),
        ("wgrad_engine", "convolutions"),
    ],
)
def test_kinds_of_work_come_from_names(name, kind):
    assert kind_of(name, "triton" if name.startswith("triton") else "conv_wgrad") == kind
