"""How each weight of a rewritten graph follows from the network's own weights, so that it can be computed again.

A pass that derives a weight (casts it, packs it for a kernel, folds operators) records the function and its arguments as a
Derivation. When the network's weights change, `LiveWeights.repack` evaluates the derivations and writes the results into the
same memory: nothing is captured, compiled or recorded again.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Function = Callable[..., Any]
Decorated = TypeVar("Decorated", bound=Function)


@dataclass(frozen=True)
class Ref:
    """A weight by its name: of the network, or of a derivation."""

    name: str


@dataclass(frozen=True, eq=False)
class Derivation:
    """A pure function and its arguments, in which a Ref stands for a weight and a Derivation for its result."""

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def computes_weights(function: Decorated) -> Decorated:
    """Marks a function of a pass that saved graphs may name. Those of the kernels that pack weights are known by their names."""
    function.computes_weights = True  # type: ignore[attr-defined]
    return function


def name_of(function: Function) -> str:
    """module:name of a function that computes weights, for a file."""
    name = f"{function.__module__}:{function.__qualname__}"
    packs = function.__module__.startswith("voxtune.kernels.") and function.__name__.startswith("pack")
    if not (packs or getattr(function, "computes_weights", False)):
        raise ValueError(f"{name} is not marked as a function that computes weights")
    return name


def function_of(name: str) -> Function:
    """The function that `name_of` named."""
    module, _, attribute = name.partition(":")
    if re.fullmatch(r"voxtune\.(kernels|plan\.passes)(\.\w+)+", module) is None or not attribute.isidentifier():
        raise ValueError(f"{name[:80]!r} is not a function of a pass or a kernel")
    function = getattr(importlib.import_module(module), attribute)
    if name_of(function) != name:
        raise ValueError(f"{name[:80]!r} is another function's name")
    return function


@dataclass
class Derived:
    """Recipes by the name of the weight that they compute, and constants of the network's code that they refer to."""

    derivations: dict[str, Derivation] = field(default_factory=dict)
    fixed: dict[str, Tensor] = field(default_factory=dict)

    def copy(self) -> Derived:
        return Derived(dict(self.derivations), dict(self.fixed))


class StaleError(RuntimeError):
    """The network's weights can no longer be written into the rewritten graph: other shapes or types, or missing ones."""


class LiveWeights:
    """The weights of a rewritten graph, and the network that they come from.

    `changed` is a host-side check of object identities, version counters and addresses. It does not see writes that leave
    no trace: `parameter.data.copy_(...)`, NumPy views, kernels of others that write through a pointer.
    """

    def __init__(self, original: nn.Module, module: nn.Module, derived: Derived | None = None):
        self.original, self.module, self.derived = original, module, derived or Derived()
        self._watch()

    def changed(self) -> bool:
        """Whether a parameter or buffer of the network was replaced or written to since the last `repack`."""
        # Loops in C: this runs at every call, beside the GPU's work.
        return not self._same_objects() or list(map(_version, self._tensors)) != self._versions or not self._in_place()

    def _same_objects(self) -> bool:
        """Whether the modules' dictionaries hold the same objects as before."""
        objects = list(chain.from_iterable(self._views))
        try:
            # Python compares what is not identical, which tensors of one value alone answer with a truth value.
            if objects != self._objects:
                return False
        except Exception:
            return False
        return all(objects[i] is self._objects[i] for i in self._of_one_value)

    def _in_place(self) -> bool:
        """Whether each tensor lies where it lay; PyTorch's builds for CUDA have a function for it."""
        if _PLACES_EQUAL is not None:
            return bool(_PLACES_EQUAL(self._tensors, self._places, self._indices))
        return list(map(_place, self._tensors)) == self._places

    def _watch(self) -> None:
        """Takes the network's present weights as those of the graph."""
        of_module: Iterator[tuple[Any, ...]] = (
            (m._parameters, m._buffers, m._modules) for m in self.original.modules()
        )
        # Live views of the modules' dictionaries; the end shows that there are as many objects as before.
        self._views: list[Iterable[Any]] = [*(d.values() for group in of_module for d in group if d), (_END,)]
        self._objects = list(chain.from_iterable(self._views))
        self._of_one_value = [i for i, x in enumerate(self._objects) if isinstance(x, Tensor) and x.numel() == 1]
        # Inference tensors have no version counter; they cannot be written to outside inference mode either.
        self._tensors = [x for x in self._objects if isinstance(x, Tensor) and not x.is_inference()]
        self._versions, self._places = list(map(_version, self._tensors)), list(map(_place, self._tensors))
        self._indices = list(range(len(self._tensors)))

    def repack(self) -> None:
        """Computes the graph's weights again from those of the network; StaleError if these no longer fit."""
        own = dict(named_weights(self.original))
        known = {**self.derived.fixed, **own}
        results: dict[Any, Any] = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, current in named_weights(self.module):
                if name not in own and name not in self.derived.derivations:
                    continue  # a constant of the network's code
                new = self._value(Ref(name), known, results)
                if new.shape != current.shape or new.dtype != current.dtype:
                    raise StaleError(f"{name} is now {new.dtype} {tuple(new.shape)}")
                current.copy_(new)
            kernels = sys.modules.get("voxtune.kernels.ops")
            if kernels is not None:
                kernels.pack_again(tensor for _, tensor in named_weights(self.module))
        self._watch()

    def values(self) -> dict[str, Tensor]:
        """The graph's weights as functions of the network's parameters, through which gradients pass."""
        own = dict(named_weights(self.original))
        known, results = {**self.derived.fixed, **own}, dict[Any, Any]()
        names = [name for name, _ in named_weights(self.module) if name in own or name in self.derived.derivations]
        return {name: self._value(Ref(name), known, results) for name in names}

    def drop_values(self) -> None:
        """Frees the graph's weights for a caller that always asks for `values`; constants of the network's code stay."""
        own = {name for name, _ in named_weights(self.original)}
        for name, tensor in list(named_weights(self.module)):
            if name in own or name in self.derived.derivations:
                path, _, attribute = name.rpartition(".")
                owner = self.module.get_submodule(path)
                delattr(owner, attribute)
                owner.register_buffer(attribute, torch.empty_like(tensor, device="meta"))

    def _value(self, part: Any, own: Mapping[str, Tensor], results: dict[Any, Any]) -> Any:
        """A reference or a derivation evaluated; other values as they are."""
        derivations = self.derived.derivations
        if isinstance(part, Ref) and part.name not in derivations:
            if part.name not in own:
                raise StaleError(f"the network has no {part.name} any more")
            return own[part.name]
        derivation = derivations[part.name] if isinstance(part, Ref) else part
        if not isinstance(derivation, Derivation):
            return part
        key = id(derivation)
        if key not in results:
            args, kwargs = tree_map_only(
                (Ref, Derivation), lambda item: self._value(item, own, results), (derivation.args, derivation.kwargs)
            )
            results[key] = derivation.function(*args, **kwargs)
        return results[key]


_END = object()
_version, _place = attrgetter("_version"), Tensor.data_ptr
_PLACES_EQUAL: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def named_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, each shared one under all of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
