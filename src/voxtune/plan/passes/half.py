"""bf16, fp16: weights and volumes in half precision; float32 where rounding matters. Changes numerics.

Float32 remain: the time embedding and everything else that depends on no volume, statistics and affine part of fused norms,
sums inside products (in hardware), and the network's inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from voxtune.plan.graph import CASTS, Captured, argument, aten, depends_on, is_call, value, volume_inputs
from voxtune.plan.passes.base import Context, Pass, PassOutcome

# Operators that require inputs of one type: all of them become half.
SAME_TYPE = {
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    aten.linear.default,
    aten.matmul.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.addmm.default,
    aten.einsum.default,
    aten.group_norm.default,
    aten.layer_norm.default,
    aten.prelu.default,
    aten.scaled_dot_product_attention.default,
    aten.cat.default,
    aten.add.Tensor,
    aten.mul.Tensor,
    aten.sub.Tensor,
}
# Positions of arguments of the project's operators that stay float32.
STAY = {
    "norm_act": (1, 2, 5, 8, 10),
    "rms_norm_act": (1, 2),
    "conv3d": (2,),
    "doubling_conv": (2,),
    "strided_conv": (2,),
    "pointwise": (2,),
    "add": (2,),
    "stem": (0, 2),
    "head": (2,),
    "conv2d": (2, 3, 4, 5),
    "depthwise2d": (2, 3),
    "gate2d": (3, 4, 5),
    "stem2d": (0, 2),
}


def half(captured: Captured, context: Context, _options: dict[str, Any]) -> PassOutcome:
    dtype = context.dtype
    assert dtype in (torch.bfloat16, torch.float16), "the plan has no half-precision pass"
    outputs = {n: value(n) for n in _outputs(captured)}
    volumes = depends_on(captured.graph, volume_inputs(captured))
    caster = _Caster(captured, dtype)
    for node in list(captured.graph.nodes):
        if node in volumes and node.op == "call_function":
            caster.harmonise(node)
    output = next(n for n in captured.graph.nodes if n.op == "output")
    for node, before in outputs.items():
        if node in volumes and before is not None and before.is_floating_point():
            if len(node.users) == 1 and _has_result_type(node):
                node.kwargs = {**node.kwargs, "dtype": before.dtype}  # the kernel stores its float32 sums
                continue
            back = captured.insert(output, aten.to.dtype, node, before.dtype)
            output.replace_input_with(node, back)
    captured.refresh()
    return PassOutcome(caster.count)


def _has_result_type(node: fx.Node) -> bool:
    """Whether a node is an operator of the project that can store its result in another type."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "voxtune":
        return False
    return any(a.name == "dtype" for a in node.target._schema.arguments)  # type: ignore[union-attr]


def _outputs(captured: Captured) -> list[fx.Node]:
    return list(next(n for n in captured.graph.nodes if n.op == "output").all_input_nodes)


class _Caster:
    """Casts each float32 input of an operator once, where it is first needed; weights are converted."""

    def __init__(self, captured: Captured, dtype: torch.dtype):
        self.captured, self.dtype = captured, dtype
        self.cast: dict[fx.Node, fx.Node] = {}
        self.halves: set[fx.Node] = set()
        self.count = 0

    def harmonise(self, node: fx.Node) -> None:
        ours = getattr(node.target, "namespace", "") == "voxtune"
        casts_inputs = node.target in SAME_TYPE or ours
        if is_call(node, *CASTS):
            # A cast that protects statistics or a softmax stays; an operator that needs one type casts back to half.
            if value(node) is not None and value(node).dtype == self.dtype:  # type: ignore[union-attr]
                self.halves.add(node)
            return
        if casts_inputs:
            stay = STAY.get(node.target._schema.name.split("::")[1], ()) if ours else ()  # type: ignore[union-attr]
            node.args = tuple(a if i in stay else self._half(a) for i, a in enumerate(node.args))
            self.halves.add(node)
            return
        dtype = node.kwargs.get("dtype") or (argument(node, "dtype") if is_call(node, aten.softmax.int) else None)
        if dtype != torch.float32 and any(i in self.halves for i in node.all_input_nodes):
            self.halves.add(node)

    def _half(self, given: Any) -> Any:
        if isinstance(given, list | tuple):
            return type(given)(self._half(a) for a in given)
        fake = value(given)
        if fake is None or fake.dtype not in (torch.float32, torch.float64) or given in self.halves:
            return given
        if given not in self.cast:
            self.cast[given] = self._convert(given)
            self.count += 1
        return self.cast[given]

    def _convert(self, node: fx.Node) -> fx.Node:
        weight = self.captured.constant(node)
        if weight is not None:
            return self.captured.derive("half", aten.to.dtype, node, self.dtype)
        after = node.next
        while after.op in ("placeholder", "get_attr"):
            after = after.next
        return self.captured.insert(after, aten.to.dtype, node, self.dtype)


BF16 = Pass(
    name="bf16",
    summary="BF16 weights and volumes, float32 where rounding matters",
    precision="bf16",
    exact=False,
    excludes=("fp16",),
    rewrite=half,
)
FP16 = Pass(
    name="fp16",
    summary="FP16 weights and volumes, float32 where rounding matters",
    precision="fp16",
    exact=False,
    rewrite=half,
)
