from __future__ import annotations

from collections import Counter

from tests.factories.traces import Events, baseline_trace, channels_last_trace
from voxtune.profile.attribution import launch_rows
from voxtune.profile.trace import MODULE, NODE, STEP, parse_trace


def test_a_recorded_training_step_is_attributed() -> None:
    rows = launch_rows(baseline_trace(), {})
    assert Counter(r["phase"] for r in rows) == {"backward": 851, "forward": 430, "optimizer": 32, "transfer": 1}
    assert Counter(r["kind"] for r in rows) == {"kernel": 1260, "memset": 31, "memcpy": 23}
    assert [r["index"] for r in rows] == list(range(len(rows)))
    convolutions = [r for r in rows if r["class"].startswith("conv_")]
    # Every convolution, and every layout copy inside one, has a module, also in the backward pass.
    assert all(r["module"] for r in convolutions)
    assert all(r["module"] for r in rows if r["class"] == "layout")
    forward = {r["module"] for r in convolutions if r["phase"] == "forward"}
    assert {r["module"] for r in convolutions if r["phase"] == "backward"} == forward
    assert all(r["grid"] and r["block"] for r in rows if r["kind"] == "kernel")
    assert {r["direction"] for r in rows if r["kind"] == "memcpy"} == {"HtoD", "DtoD"}


def test_copies_of_a_group_norm_in_channels_last_are_attributed_to_it() -> None:
    rows = launch_rows(channels_last_trace(), {"input_blocks.1.0.in_layers.0": "GroupNorm32"})
    norm = [r for r in rows if r["module"] == "input_blocks.1.0.in_layers.0"]
    assert {"copy", "norm"} <= {r["class"] for r in norm}
    assert {r["module_type"] for r in norm} == {"GroupNorm32"}
    assert any(r["op_shapes"] and "128, 128, 128" in r["op_shapes"] for r in norm)


def synthetic_step() -> Events:
    events = Events()
    events.range(f"{STEP}0", 0, 1000)
    events.range("Optimizer.zero_grad#Adam.zero_grad", 5, 9)
    events.kernel("fill", 6)
    events.range(MODULE, 10, 300)
    events.range(f"{MODULE}block.conv", 100, 200)
    events.host("aten::conv3d", 110, 190, Sequence_number=7)
    events.host("aten::convolution", 112, 188, Sequence_number=7)
    events.host("aten::cudnn_convolution", 120, 180, Sequence_number=8)
    events.kernel("conv_fprop_kernel", 130)
    events.host("aten::add", 250, 260, Sequence_number=8)
    events.kernel("add_kernel", 255)
    return events


def test_backward_launches_find_the_module_of_their_forward_operator() -> None:
    events = synthetic_step()
    events.host(f"{NODE}AddBackward0", 400, 420, thread=2, Sequence_number=8)
    events.kernel("add_backward", 410, thread=2)
    events.host(f"{NODE}ConvolutionBackward0", 430, 480, thread=2, Sequence_number=7)
    events.host("aten::convolution_backward", 440, 470, thread=2)
    events.kernel("wgrad_kernel", 450, thread=2)
    events.host(f"{NODE}torch::autograd::AccumulateGrad", 490, 510, thread=2)
    events.host("aten::copy_", 495, 505, thread=2)
    events.kernel("gradient_layout_copy", 500, thread=2)
    events.kernel("clip_gradients", 600)
    events.range("Optimizer.step#Adam.step", 700, 800)
    events.kernel("adam", 750)
    events.kernel("outside", 1500)
    rows = {r["name"]: r for r in launch_rows(parse_trace(events.events), {"": "Net", "block.conv": "Conv3d"})}
    places = {name: (r["module"], r["phase"]) for name, r in rows.items()}
    assert places == {
        "fill": ("", "other"),
        "conv_fprop_kernel": ("block.conv", "forward"),
        "add_kernel": ("", "forward"),
        "add_backward": ("", "backward"),
        "wgrad_kernel": ("block.conv", "backward"),
        "gradient_layout_copy": ("block.conv", "backward"),
        "clip_gradients": ("", "other"),
        "adam": ("", "optimizer"),
    }
    assert rows["conv_fprop_kernel"]["op"] == "aten::cudnn_convolution"
    assert rows["wgrad_kernel"]["module_type"] == "Conv3d"
    assert rows["add_kernel"]["module_type"] == "Net"


def test_modules_in_a_compiled_region_are_unknown() -> None:
    events = Events()
    events.range(f"{STEP}0", 0, 1000)
    events.range("Torch-Compiled Region: 0/0", 10, 100)
    events.host("CompiledFunction", 20, 90, Sequence_number=3)
    events.kernel("triton_poi_fused_0", 50)
    events.host(f"{NODE}CompiledFunctionBackward", 200, 300, thread=2, Sequence_number=3)
    events.kernel("triton_red_fused_1", 250, thread=2)
    events.host("aten::abs", 120, 130)
    events.kernel("abs", 125)
    rows = {r["name"]: r for r in launch_rows(parse_trace(events.events), {})}
    assert rows["triton_poi_fused_0"]["module"] is None
    assert (rows["triton_red_fused_1"]["module"], rows["triton_red_fused_1"]["phase"]) == (None, "backward")
    assert (rows["abs"]["module"], rows["abs"]["phase"]) == ("", "forward")


def test_without_a_device_the_rows_are_the_self_times_of_operators() -> None:
    events = Events()
    events.range(f"{STEP}0", 0, 100)
    events.range(f"{MODULE}fc", 5, 60)
    events.host("aten::linear", 10, 50)
    events.host("aten::addmm", 15, 45)
    rows = {r["name"]: r for r in launch_rows(parse_trace(events.events), {"fc": "Linear"})}
    assert {n: r["duration_us"] for n, r in rows.items()} == {"aten::linear": 10.0, "aten::addmm": 30.0}
    assert (rows["aten::addmm"]["kind"], rows["aten::addmm"]["module"]) == ("cpu_op", "fc")
