"""Walks a network on the meta device: FLOPs and bytes of each operator, and the memory allocated while it runs.

Nothing is computed: tensors have shapes and strides but no storage, so the network may be larger than any memory.
Strides are tracked, so that copies between memory formats appear as on a GPU.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
COPIES = {"clone", "_to_copy", "copy_"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty"}


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operator. `bytes` is the size of its operands and results, `elements` that of its first operand.

    `relayout`: bytes to convert to the other memory format first. Convolutions: `rows` are output voxels, `columns` and
    `inner` output and input channels, `activation` the bytes of input (`activation_in`) and output, `biased` whether
    there is a bias (or its gradient). Norms: `rows` are groups (backward: channels).
    """

    name: str
    phase: str
    flops: float
    bytes: float
    elements: float
    relayout: float = 0.0
    strided: bool = False
    rows: int = 0
    columns: int = 0
    inner: int = 0
    activation: float = 0.0
    activation_in: float = 0.0
    depthwise: bool = False
    biased: bool = False


@dataclass(kw_only=True)
class Walk:
    """`timeline`: bytes allocated while each operator runs. `saved_elements`: inputs of matmuls, convolutions and norms
    in the forward pass, which a compiled step saves for the backward pass.
    """

    ops: list[Op] = field(default_factory=list)
    timeline: list[float] = field(default_factory=list)
    parameter_elements: int = 0
    saved_elements: float = 0.0
    widest_norm: float = 0.0


class MetaAutocast(TorchFunctionMode):
    """torch.autocast for the operators of these networks; the original ignores meta tensors."""

    NAMES = frozenset({"conv1d", "conv2d", "conv3d", "linear", "einsum", "bmm", "matmul"})

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in self.NAMES:
            args, kwargs = tree_map(_to_bf16, (args, kwargs or {}))
        return function(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):
    def __init__(self, *, channels_last: bool):
        super().__init__()
        self.walk = Walk()
        self.phase = "forward"
        self.channels_last = channels_last
        self.live = 0.0
        self.tracked: set[int] = set()
        self.saved: set[int] = set()

    def track(self, tensor: Tensor) -> None:
        """Counts the storage of the tensor until it is freed."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.tracked:
            return
        self.tracked.add(key)
        self.live += size

        def release() -> None:
            self.tracked.discard(key)
            self.saved.discard(key)
            self.live -= size

        weakref.finalize(storage, release)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name = function.overloadpacket.__name__
        relayout = 0.0
        if self.channels_last and name in ("convolution", "convolution_backward"):
            relayout, out = _channels_last(name, args, out)
        inputs, outputs = _tensors((args, kwargs)), _tensors(out)
        storages = {t.untyped_storage()._cdata for t in inputs}
        view = not function._schema.is_mutable and any(t.untyped_storage()._cdata in storages for t in outputs)
        for tensor in outputs:
            self.track(tensor)
        if not view and name not in ALLOCATIONS and outputs:
            count = flop_registry.get(function.overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            self._add(name, flops, inputs, outputs, relayout, args)
        return out

    def _add(
        self, name: str, flops: float, inputs: list[Tensor], outputs: list[Tensor], relayout: float, args: Any
    ) -> None:
        if self.phase == "forward" and (name == "convolution" or name in PRODUCTS or name == "native_group_norm"):
            self._save(inputs[0])
        if name == "native_group_norm":
            self.walk.widest_norm = max(self.walk.widest_norm, inputs[0].numel())
        self.walk.ops.append(
            Op(
                name=name,
                phase=self.phase,
                flops=float(flops),
                bytes=float(sum(map(_bytes, inputs + outputs))),
                elements=float(inputs[0].numel() if inputs else outputs[0].numel()),
                relayout=relayout,
                strided=name in COPIES and bool(inputs) and inputs[0].stride() != outputs[0].stride(),
                **_matrix(name, args, inputs, outputs),
            )
        )
        self.walk.timeline.append(self.live + relayout)

    def _save(self, tensor: Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self.saved:
            self.saved.add(key)
            self.walk.saved_elements += tensor.numel()


def walk(
    build: Callable[[], nn.Module],
    inputs: Callable[[], tuple[Tensor | None, ...]],
    *,
    train: bool,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    channels_last: bool = False,
) -> Walk:
    """One step of the network: a forward pass; for training also loss, backward pass and the state of Adam.

    `build` and `inputs` are called under the meta device. The first input, the noisy image, is also the target of the
    loss.
    """
    with torch.device("meta"):
        network = build().to(dtype)
        tensors = [t if t is None or not t.is_floating_point() else t.to(dtype) for t in inputs()]
    if channels_last:
        network, tensors = _to_channels_last(network, tensors)
    casting: contextlib.AbstractContextManager[Any] = MetaAutocast() if autocast else contextlib.nullcontext()
    with casting, Recorder(channels_last=channels_last) as recorder:
        for tensor in [*network.parameters(), *(t for t in tensors if t is not None)]:
            recorder.track(tensor)
        if train:
            _train_step(network, tensors, recorder)
        else:
            with torch.no_grad():
                network(*tensors)
    recorder.walk.parameter_elements = sum(p.numel() for p in network.parameters())
    return recorder.walk


def _train_step(network: nn.Module, tensors: list[Any], recorder: Recorder) -> None:
    # The two moments of Adam stay allocated throughout training.
    moments = [torch.empty_like(p) for p in network.parameters() for _ in range(2)]
    loss = (network(*tensors) - tensors[0]).abs().mean()
    recorder.phase = "backward"
    loss.backward()
    del moments


def _to_channels_last(network: nn.Module, tensors: list[Any]) -> tuple[nn.Module, list[Any]]:
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.dim() in CHANNELS_LAST:
                parameter.data = parameter.data.contiguous(memory_format=CHANNELS_LAST[parameter.dim()])
    formats = [CHANNELS_LAST.get(t.dim()) if t is not None else None for t in tensors]
    moved = [t if f is None else t.contiguous(memory_format=f) for t, f in zip(tensors, formats, strict=True)]
    return network, moved


def _channels_last(name: str, args: Any, out: Any) -> tuple[float, Any]:
    """A channels-last convolution returns channels-last; operands in another format are copied first."""
    operands = args[:1] if name == "convolution" else args[:2]
    fmt = CHANNELS_LAST.get(args[0].dim())
    if fmt is None:
        return 0.0, out
    relayout = sum(_bytes(t) for t in operands if not t.is_contiguous(memory_format=fmt))
    if name == "convolution":
        return relayout, out.contiguous(memory_format=fmt)
    first = out[0].contiguous(memory_format=fmt) if out[0] is not None else None
    return relayout, (first, *out[1:])


def _matrix(name: str, args: Any, inputs: list[Tensor], outputs: list[Tensor]) -> dict[str, Any]:
    if name in ("convolution", "convolution_backward"):
        weight = args[1] if name == "convolution" else args[2]
        out = outputs[0] if name == "convolution" else args[0]
        data = args[0] if name == "convolution" else args[1]
        groups = int(args[-1] if name == "convolution" else args[-2])
        return {
            "rows": out.numel() // out.shape[1],
            "columns": int(out.shape[1]),
            "inner": int(weight.shape[1]),
            "activation": float(_bytes(out) + _bytes(data)),
            "activation_in": float(_bytes(data)),
            "depthwise": groups > 1 and weight.shape[1] == 1,
            "biased": args[2] is not None if name == "convolution" else bool(args[-1][2]),
        }
    if name == "native_group_norm":
        return {"rows": int(args[3] * args[6])}  # (input, weight, bias, N, C, HxW, group, eps)
    if name == "native_group_norm_backward":
        return {"rows": int(args[5] * args[6])}  # one block per channel: (grad, input, mean, rstd, weight, N, C, ...)
    if name in PRODUCTS:
        return {"rows": outputs[0].numel() // outputs[0].shape[-1], "columns": int(outputs[0].shape[-1]), "inner": 64}
    return {}


def _to_bf16(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(torch.bfloat16)
    return value


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
