"""The captured graph that passes rewrite, and the operations they use to do so.

torch.export captures a network as PyTorch (aten) operators with its weights as constants. It does not decompose composite
operators (group_norm, silu, conv3d, einsum), whatever module classes they come from: passes match what is computed, not names.
"""

from __future__ import annotations

import copy
import inspect
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportGraphSignature
from torch.utils._pytree import tree_leaves

from voxtune.plan.derivation import Derivation, Derived, Ref, named_weights

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)


@dataclass
class Captured:
    """A graph and the tensors it was captured with, flat and in the order of its placeholders.

    `own` are the names of the network's parameters and buffers; `derived` says how other weights follow from them.
    """

    module: fx.GraphModule
    inputs: tuple[Any, ...]
    own: frozenset[str] = frozenset()
    derived: Derived = field(default_factory=Derived)

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    @property
    def device(self) -> torch.device:
        return next(x.device for x in self.inputs if isinstance(x, Tensor))

    def clone(self) -> Captured:
        """A copy of the graph that shares the weights."""
        with _copies_graphs():
            graph = copy.deepcopy(self.graph)
        return Captured(fx.GraphModule(self.module, graph), self.inputs, self.own, self.derived.copy())

    def nodes(self, *targets: Any) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "call_function" and n.target in targets]

    def placeholders(self) -> list[fx.Node]:
        return [n for n in self.graph.nodes if n.op == "placeholder"]

    def constant(self, node: Any) -> Tensor | None:
        """The tensor of a node that is a weight, or None."""
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return None
        tensor: Any = self.module
        for part in str(node.target).split("."):
            tensor = getattr(tensor, part)
        return tensor if isinstance(tensor, Tensor) else None

    def derive(self, like: str, function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> fx.Node:
        """Adds a weight that a pure function of this package or an operator computes from other weights.

        It is computed again when the network's weights change: see derivation.py.
        """
        parts = fx.map_arg((args, kwargs), self.constant)
        with torch.no_grad():
            value = function(*parts[0], **parts[1])
            sources = {x.untyped_storage().data_ptr() for x in tree_leaves(parts) if isinstance(x, Tensor)}
            if value.untyped_storage().data_ptr() in sources:
                value = value.clone(memory_format=torch.preserve_format)
            node = self.add_constant(value, like)
        references: Any = fx.map_arg((args, kwargs), self.reference)  # type: ignore[arg-type]
        self.derived.derivations[str(node.target)] = Derivation(function, *references)
        return node

    def reference(self, weight: fx.Node) -> Ref:
        """A weight as an argument of a derivation."""
        name = str(weight.target)
        if name not in self.own and name not in self.derived.derivations:
            self.derived.fixed[name] = self.constant(weight)  # type: ignore[assignment]
        return Ref(name)

    def add_constant(self, value: Tensor, like: str = "constant") -> fx.Node:
        """Adds a constant that does not depend on weights, at the start of the graph."""
        name, number = f"_{like}", 0
        while hasattr(self.module, f"{name}_{number}"):
            number += 1
        self.module.register_buffer(f"{name}_{number}", value.detach(), persistent=False)
        first = next(n for n in self.graph.nodes if n.op != "placeholder")
        with self.graph.inserting_before(first):
            node = self.graph.get_attr(f"{name}_{number}")
        self.learn(node)
        return node

    def insert(
        self, before: fx.Node, target: Callable[..., Any], *args: Any, of: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """Adds an operator; its shape and type are inferred without computing.

        It belongs to the module of the operator it replaces: `of`, or `before` by default.
        """
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["nn_module_stack"] = (of or before).meta.get("nn_module_stack", {})
        fakes = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with self.mode, torch.no_grad():
            node.meta["val"] = target(*fakes[0], **fakes[1])
        return node

    @property
    def mode(self) -> FakeTensorMode:
        """The mode in which the capture inferred its shapes."""
        return next(v.fake_mode for n in self.placeholders() if isinstance(v := n.meta.get("val"), FakeTensor))

    def learn(self, weight: fx.Node) -> None:
        """Records the shape and type of a constant."""
        tensor = self.constant(weight)
        weight.meta["val"] = tensor if tensor is None else self.mode.from_tensor(tensor, static_shapes=True)

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Uses `new` instead of `old` everywhere; `refresh` removes what only `old` needed."""
        old.replace_all_uses_with(new)

    def refresh(self) -> None:
        """Removes unused nodes and weights."""
        self.graph.eliminate_dead_code()
        self.module.delete_all_unused_submodules()
        used = {str(n.target) for n in self.graph.nodes if n.op == "get_attr"}
        for name in [n for n, _ in self.module.named_buffers(recurse=False) if n not in used]:
            delattr(self.module, name)  # a weight that a later pass replaced; its derivation may still be referred to
        self.graph.lint()
        self.module.recompile()

    def own_weights(self) -> None:
        """Copies the weights that are still the network's own: a later change must not reach half of a graph."""
        used = {str(n.target) for n in self.graph.find_nodes(op="get_attr")}
        for name, tensor in list(named_weights(self.module)):
            path, _, attribute = name.rpartition(".")
            owner = self.module.get_submodule(path)
            if name in used - self.derived.derivations.keys():
                delattr(owner, attribute)
                owner.register_buffer(attribute, tensor.detach().clone(memory_format=torch.preserve_format))
            elif name not in used:
                delattr(owner, attribute)


@contextmanager
def _copies_graphs() -> Iterator[None]:
    """PyTorch warns about its own class when a graph is copied."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield


def capture(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Captured:
    """Captures a network; raises what torch.export raises for a network without a static graph."""
    with torch.no_grad():
        program = torch.export.export(model, tuple(args), kwargs or {}, strict=False)
        writes = [node for node in program.graph.nodes if _writes(node)]
        for node in writes:
            _check_target(node, program.graph_signature)
        if writes:
            # PyTorch's own functionalisation. It keeps composite operators, because no decomposition is requested.
            with _copies_graphs():
                program = program.run_decompositions({})
    options = {"check_guards": False} if "check_guards" in inspect.signature(program.module).parameters else {}
    module = program.module(**options)
    assert isinstance(module, fx.GraphModule)
    flat = tuple(tree_leaves((tuple(args), kwargs or {})))
    captured = Captured(module, flat, frozenset(name for name, _ in named_weights(model)))
    placeholders = captured.placeholders()
    assert len(placeholders) == len(flat), "one placeholder for each input"
    # These assert properties that passes change.
    guards = [n for n in captured.graph.find_nodes(op="call_module") if "guard" in str(n.target)]
    for node in (*captured.nodes(aten._assert_tensor_metadata.default), *guards):
        captured.graph.erase_node(node)
    for node in captured.graph.find_nodes(op="get_attr"):
        captured.learn(node)
    left = next((node for node in captured.graph.nodes if _writes(node)), None)
    if left is not None:
        raise WritesInPlaceError(f"{left.target} writes in place{source_line(left)}")
    return captured


class WritesInPlaceError(RuntimeError):
    """The network writes to one of its inputs or buffers; passes that move operators would change the result."""


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    return schema is not None and schema.is_mutable


def _check_target(node: fx.Node, signature: ExportGraphSignature) -> None:
    """Raises for an operator that writes to a parameter, a buffer or an input of the network, or to a view of one."""
    base: Any = node.args[0]
    while isinstance(base, fx.Node) and base.op == "call_function" and (_views(base) or _writes(base)):
        base = base.args[0]
    if isinstance(base, fx.Node) and base.op == "placeholder":
        weights = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
        what = f"the network's own {weights[base.name]}" if base.name in weights else f"its input {base.name}"
        raise WritesInPlaceError(f"{node.target} overwrites {what}{source_line(node)}")


def _views(node: fx.Node) -> bool:
    """Whether a node's result shares memory with its input."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def is_weight(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "get_attr"


def source_line(node: fx.Node) -> str:
    """The line of the network's code that an operator comes from, as text to append; empty if it is unknown."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', str(node.meta.get("stack_trace") or ""))
    return f" ({lines[-1][0]}, line {lines[-1][1]})" if lines else ""


def raising_line(error: BaseException | None) -> str:
    """The innermost line outside of PyTorch and this package in an error's traceback, in the form of `source_line`."""
    elsewhere = (str(Path(torch.__file__).parent), str(Path(__file__).parent))
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"{f.filename}, line {f.lineno}" for f in frames if not f.filename.startswith(elsewhere)]
        if lines:
            return f" ({lines[-1]})"
        error = error.__cause__
    return ""


def value(node: Any) -> Tensor | None:
    """A node's fake tensor, or None. It has the type of the capture: half precision is applied last."""
    fake = node.meta.get("val") if isinstance(node, fx.Node) else None
    return fake if isinstance(fake, Tensor | FakeTensor) else None


def shape(node: Any) -> tuple[int, ...]:
    fake = value(node)
    return () if fake is None else tuple(int(s) for s in fake.shape)


def module_of(node: fx.Node) -> tuple[str, str]:
    """Path and class of the module that a node comes from; empty for the network's own `forward`."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    return str(path), kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def sole_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an aten call by its name in the schema: positional, keyword or default."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            if position < len(node.args) and not declared.kwarg_only:
                return node.args[position]
            return node.kwargs.get(name, declared.default_value if declared.has_default_value() else None)
    raise KeyError(f"{node.target} has no argument {name}")


def channel_sources(node: Any) -> list[Any]:
    """The two volumes that a node concatenates along the channels, or the node itself."""
    if is_call(node, aten.cat.default):
        parts: list[Any] = list(node.args[0])
        joined = argument(node, "dim") in (1, 1 - len(shape(node)))
        if joined and len(parts) == 2 and all(len(shape(p)) == len(shape(node)) for p in parts):
            return parts
    return [node]


def depends_on(graph: fx.Graph, roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The roots and all nodes computed from them."""
    dependent = set(roots)
    for node in graph.nodes:
        if any(i in dependent for i in node.all_input_nodes):
            dependent.add(node)
    return dependent


def volume_inputs(captured: Captured) -> list[fx.Node]:
    """The placeholders that are images: floating point with batch, channels and at least two spatial dimensions."""
    return [
        node
        for node, x in zip(captured.placeholders(), captured.inputs, strict=True)
        if isinstance(x, Tensor) and x.is_floating_point() and x.dim() >= 4
    ]
