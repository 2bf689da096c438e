"""The forms in which a rewritten graph calls the project's convolutions, and what computes the same without them.

A form is an operator with its arguments, a shape, a memory format and a type standing for each tensor. `own_call` calls the
operator on random tensors; `rival_call` is what the graph would hold without it: the convolution by cuDNN, and the operators that
then add the shift and the residual and compute the next norm's statistics.
"""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from voxtune.plan.derivation import Derivation, Derived, Ref
from voxtune.plan.graph import argument, is_call, sole_user
from voxtune.plan.optimized import Optimized
from voxtune.plan.passes.layout import lasting
from voxtune.plan.run import Inputs, Runner

# The operators of own convolutions, and the pass that inserts each.
PASS_OF = {
    "conv3d": "conv3d",
    "doubling_conv": "doubling",
    "strided_conv": "strided",
    "pointwise": "pointwise",
    "stem": "edges",
    "head": "edges",
}
# Products that a GPU computes in the time in which it moves one byte, for the order in which forms are timed.
PRODUCTS_A_BYTE = 150

Call = Callable[[], Any]
# A convolution of given sources and weights, called with a bias or None.
Convolution = Callable[[Tensor | None], Tensor]


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor) -> TensorForm:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype)

    def random(self, device: torch.device) -> Tensor:
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return torch.randn(span, device=device, dtype=self.dtype).as_strided(self.shape, self.stride)

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class KernelForm:
    """One form in which a graph calls an own convolution: its arguments, with a TensorForm for each tensor.

    `scale`: of the nearest upsampling that is folded into it. `norm_shifts`: without the kernel, the pass epilogue would make the
    shift part of the norm that reads the result.
    """

    operator: str
    arguments: tuple[tuple[str, Any], ...]
    result: TensorForm
    scale: tuple[int, ...] | None = None
    norm_shifts: bool = False

    def __getitem__(self, name: str) -> Any:
        return dict(self.arguments)[name]

    @property
    def sources(self) -> tuple[TensorForm, ...]:
        given = dict(self.arguments)
        return tuple(given["sources"]) if "sources" in given else (given["x"],)

    @property
    def excepted(self) -> tuple[str, tuple[int, ...]]:
        """The pass, and how its option names this convolution: inputs, outputs, result size."""
        inputs = sum(source.shape[1] for source in self.sources)
        return PASS_OF[self.operator], (inputs, self.result.shape[1], *self.result.shape[2:])

    @property
    def suits_conv3d(self) -> bool:
        """Whether the pass conv3d would take the convolution if this form's own pass left it."""
        _, (inputs, _, *size) = self.excepted
        own = self.scale is not None or self.operator in ("stem", "head")
        return own and len(size) == 3 and inputs % 8 == 0

    @property
    def key(self) -> str:
        parts = [self.operator, self.arguments, self.result, self.scale, self.norm_shifts]
        return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    @property
    def work(self) -> float:
        """About proportional to its time: bytes moved, or products if they take longer."""
        tensors = [x for x in tree_leaves([value for _, value in self.arguments]) if isinstance(x, TensorForm)]
        weight = self["weight" if self.operator in ("pointwise", "stem", "head") else "packed"]
        voxels = self.result.shape[0] * prod(self.result.shape[2:])
        products = prod(weight.shape) * voxels / (prod(self["stride"]) if self.operator == "doubling_conv" else 1)
        return max(sum(x.bytes for x in tensors) + self.result.bytes, products / PRODUCTS_A_BYTE)

    def tensors(self, device: torch.device) -> dict[str, Any]:
        """The arguments, with random tensors."""
        return {
            name: tree_map_only(TensorForm, lambda form: form.random(device), value) for name, value in self.arguments
        }


def own_convolutions(network: Optimized) -> int:
    """The number of calls of own convolutions in a rewritten network."""
    inner = None if network.variant.runner is None else network.variant.runner.inner
    return sum(_operator(n) is not None for n in inner.graph.nodes) if isinstance(inner, fx.GraphModule) else 0


def kernel_forms(network: Optimized, inputs: Inputs) -> Counter[KernelForm]:
    """The forms of own convolutions in a rewritten network, each with the number of its calls. Runs the network once."""
    if not own_convolutions(network):
        return Counter()
    recorder = _Recorder(network.runner)
    with network.runner.flags():
        recorder.run(*tree_flatten(inputs)[0], enable_io_processing=False)
    return recorder.forms


def _operator(node: fx.Node) -> str | None:
    """The name of the own convolution that a node calls, or None."""
    if node.op != "call_function" or getattr(node.target, "namespace", "") != "voxtune":
        return None
    name = node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    return name if name in PASS_OF else None


class _Recorder(fx.Interpreter):
    """Runs a graph and records what its own convolutions are called with: half precision is not in the graph's metadata."""

    def __init__(self, runner: Runner):
        super().__init__(runner.inner)
        self.derived = runner.weights.derived if runner.weights is not None else Derived()
        self.forms: Counter[KernelForm] = Counter()

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        name = _operator(n)
        if name is not None:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            declared = n.target._schema.arguments  # type: ignore[union-attr]
            names = [a.name for a in declared]
            given = {a.name: a.default_value for a in declared if a.has_default_value()}
            given |= dict(zip(names, args, strict=False)) | kwargs
            arguments = tuple((a, _form(given[a])) for a in names)
            y = result[0] if isinstance(result, tuple | list) else result
            scale = _folded(n.args[1], self.derived) if name == "doubling_conv" else None
            # The bias of a transposed convolution does not move into the norm, one beside a residual is added with it.
            plain = given.get("residual") is None and (name != "doubling_conv" or scale is not None)
            shifts = plain and _only_normed(n)
            self.forms[KernelForm(name, arguments, TensorForm.of(y), scale, shifts)] += 1
        return result


def _form(value: Any) -> Any:
    """An argument with hashable forms instead of tensors and lists."""
    if isinstance(value, Tensor):
        return TensorForm.of(value)
    return tuple(map(_form, value)) if isinstance(value, list | tuple) else value


def _only_normed(node: fx.Node) -> bool:
    """Whether a norm over this result alone is its only reader."""
    result = next((u for u in node.users if is_call(u, operator.getitem) and u.args[1] == 0), node)
    norm = sole_user(result)
    if norm is None or not is_call(norm, torch.ops.voxtune.norm_act.default):
        return False
    return list(argument(norm, "sources")) == [result] and argument(norm, "residual") is not result


def _folded(weight: Any, derived: Derived) -> tuple[int, ...] | None:
    """The scale of the nearest upsampling that was folded into a packed weight, or None."""
    part: Any = Ref(str(weight.target))
    while part is not None:
        derivation = derived.derivations.get(part.name) if isinstance(part, Ref) else part
        if not isinstance(derivation, Derivation):
            return None
        if derivation.function.__name__ == "pack_nearest":
            return tuple(derivation.args[1])
        part = next((a for a in derivation.args if isinstance(a, Ref | Derivation)), None)
    return None


def own_call(form: KernelForm, given: dict[str, Any]) -> Call:
    """The operator as the graph calls it."""
    function = getattr(torch.ops.voxtune, form.operator).default
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    return lambda: function(**lists)


def rival_call(form: KernelForm, given: dict[str, Any]) -> Call:
    """What the graph would hold without the operator, for the same arguments.

    It returns the result, and statistics if the operator does. A shift that the norm would add is left to the norm.
    """
    convolution = _RIVALS[form.operator](form, given)
    add = torch.ops.voxtune.add.default
    shift, residual = given.get("shift", given.get("bias")), given.get("residual")
    dtype, axes = form.result.dtype, len(form.result.shape) - 2
    bias, addend = None, None
    if shift is not None and residual is None and not form.norm_shifts:
        # Rows that differ come from a time embedding, which is added after the convolution.
        if shift.dim() == 1 or shift.shape[0] == 1:
            bias = shift.flatten().to(form.sources[0].dtype if form.operator != "stem" else dtype)
        else:
            addend = shift.to(dtype).view(*shift.shape, *[1] * axes)

    def call() -> Any:
        y = convolution(bias)
        if residual is not None:
            y = add(y, residual, shift)
        elif addend is not None:
            y = y + addend
        y = y.to(dtype)
        return (y, _statistics(y)) if given.get("statistics") else y

    return call


def _statistics(y: Tensor) -> Tensor:
    """What the norm would compute by itself."""
    if y.is_cuda:
        from voxtune.kernels.group_norm import moments

        return moments(lasting(y))
    from voxtune.kernels.doubling_conv import statistics_reference

    return statistics_reference(y)


def _joined(sources: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(sources), dim=1) if len(sources) > 1 else sources[0]


def _plain(x: Tensor, weight: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return (F.conv3d if x.dim() == 5 else F.conv2d)(x, weight, bias, **options)


def _rival_of_conv3d(_form: KernelForm, given: dict[str, Any]) -> Convolution:
    from voxtune.kernels.conv3d import unpack

    weight = lasting(unpack(given["packed"], given["kernel"]))
    before, after = given["padding"][::2], given["padding"][1::2]
    if before == after:
        return lambda bias: _plain(_joined(given["sources"]), weight, bias, padding=before)
    # PyTorch lists the last axis first.
    zeros = [p for pair in list(zip(before, after, strict=True))[::-1] for p in pair]
    return lambda bias: _plain(F.pad(_joined(given["sources"]), zeros), weight, bias)


def _rival_of_doubling(form: KernelForm, given: dict[str, Any]) -> Convolution:
    from voxtune.kernels.doubling_conv import paddings, unpack

    kernel, stride, scale = given["kernel"], given["stride"], form.scale
    if scale is None:
        weight = lasting(unpack(given["packed"], kernel))
        padding, more = paddings(kernel, stride)
        convolve = F.conv_transpose3d if len(kernel) == 3 else F.conv_transpose2d
        return lambda bias: convolve(
            _joined(given["sources"]), weight, bias, stride=stride, padding=padding, output_padding=more
        )
    # The folded weight does not determine the convolution's own; their values do not affect the time.
    sizes = tuple(3 if factor == 2 else size for size, factor in zip(kernel, scale, strict=True))
    _, K, C = given["packed"].shape
    weight = lasting(given["packed"].new_empty(K, C, *sizes).normal_())
    padding = tuple(size // 2 for size in sizes)
    if set(scale) == {2}:
        up = torch.ops.voxtune.upsample.default
        return lambda bias: _plain(up(_joined(given["sources"]), "nearest"), weight, bias, padding=padding)
    return lambda bias: _plain(
        F.interpolate(_joined(given["sources"]), scale_factor=[float(s) for s in scale], mode="nearest"),
        weight,
        bias,
        padding=padding,
    )


def _rival_of_strided(_form: KernelForm, given: dict[str, Any]) -> Convolution:
    from voxtune.kernels.strided_conv import unpack

    weight = lasting(unpack(given["packed"], given["kernel"]))
    padding = tuple(size // 2 for size in given["kernel"])
    return lambda bias: _plain(given["x"], weight, bias, stride=given["stride"], padding=padding)


def _rival_of_pointwise(form: KernelForm, given: dict[str, Any]) -> Convolution:
    matrix = given["weight"]
    weight = lasting(matrix.view(*matrix.shape, *[1] * (len(form.result.shape) - 2)))
    return lambda bias: _plain(_joined(given["sources"]), weight, bias)


def _rival_of_stem(_form: KernelForm, given: dict[str, Any]) -> Convolution:
    weight = lasting(given["weight"])
    return lambda bias: _plain(
        _joined([lasting(source).to(weight.dtype) for source in given["sources"]]), weight, bias, padding=1
    )


def _rival_of_head(_form: KernelForm, given: dict[str, Any]) -> Convolution:
    weight = lasting(given["weight"])
    return lambda bias: _plain(given["x"], weight, bias, padding=1)


_RIVALS: dict[str, Callable[[KernelForm, dict[str, Any]], Convolution]] = {
    "conv3d": _rival_of_conv3d,
    "doubling_conv": _rival_of_doubling,
    "strided_conv": _rival_of_strided,
    "pointwise": _rival_of_pointwise,
    "stem": _rival_of_stem,
    "head": _rival_of_head,
}
