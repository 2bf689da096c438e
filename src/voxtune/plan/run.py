"""Runs a rewritten network: numeric flags, torch.compile, and CUDA graphs in one pool of memory."""

from __future__ import annotations

import functools
import importlib.util
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from voxtune.plan.derivation import LiveWeights
from voxtune.plan.graph import module_of
from voxtune.plan.heap import reuse_memory
from voxtune.plan.measure import clocked
from voxtune.plan.passes.base import Context
from voxtune.precision import tf32_allowed

if TYPE_CHECKING:
    from voxtune.plan.optimized import Optimized

log = logging.getLogger("voxtune")
# Positional and keyword arguments of a call.
Inputs = tuple[tuple[Any, ...], dict[str, Any]]
# Runs before a CUDA graph is recorded: kernels compile and cuDNN selects its algorithms.
WARM_UP = 2
# A graph's memory relative to the peak of its tensors: there are gaps between them.
SLACK = 1.04
# PyTorch's numeric flags belong to the process.
_FLAGS = threading.RLock()
# Types of arguments that contain no others.
_SINGLE = frozenset({Tensor, nn.Parameter, int, float, bool, str, type(None)})


def leaves_of(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """`tree_flatten`'s leaves; where no argument contains others, in a fraction of its time, which every call takes."""
    flat = [*args, *kwargs.values()]
    return flat if _SINGLE.issuperset(map(type, flat)) else tree_flatten((tuple(args), kwargs))[0]


@functools.lru_cache(maxsize=256)
def _flat_structure(positional: int, names: tuple[str, ...]) -> str:
    return str(tree_flatten(((0,) * positional, dict.fromkeys(names, 0)))[1])


@dataclass(frozen=True)
class Signature:
    """The structure of a call's arguments, each tensor's shape, type and device, and the other values."""

    structure: str
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature:
        flat = [*args, *kwargs.values()]
        if _SINGLE.issuperset(map(type, flat)):
            return cls(_flat_structure(len(args), tuple(kwargs)), tuple(map(_form, flat)))
        leaves, structure = tree_flatten((tuple(args), kwargs))
        return cls(str(structure), tuple(map(_form, leaves)))

    @property
    def device(self) -> torch.device:
        for leaf in self.leaves:
            if isinstance(leaf, tuple):
                return torch.device(leaf[2])
        raise ValueError("no tensor among the inputs")

    def mismatch(self, other: Signature) -> str | None:
        if self.structure != other.structure or len(self.leaves) != len(other.leaves):
            return "the inputs have another structure"
        for index, (expected, given) in enumerate(zip(self.leaves, other.leaves, strict=True)):
            if expected != given:
                return f"input {index} is {_describe(given)}, the plan was made for {_describe(expected)}"
        return None

    def differs_in_sizes_only(self, other: Signature) -> bool:
        """Whether only sizes of the batch and of the image differ: the same plan applies."""
        return self.structure == other.structure and [_kind(x) for x in self.leaves] == [_kind(x) for x in other.leaves]


def _form(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else repr(leaf)


def _kind(form: Any) -> Any:
    """What sizes do not change: dimensions, channels, type and device of a tensor."""
    return (len(form[0]), form[0][1:2], *form[1:]) if isinstance(form, tuple) else form


def _describe(form: Any) -> str:
    return (
        f"{str(form[1]).removeprefix('torch.')} {list(form[0])} on {form[2]}" if isinstance(form, tuple) else str(form)
    )


class Runner:
    """Calls the inner network with the plan's flags set; compiled or as a CUDA graph if the plan has these passes.

    `weights` keeps those of the inner network equal to those of the network that it was made from; None if it is that network.
    """

    def __init__(
        self,
        inner: nn.Module,
        in_force: frozenset[str],
        context: Context,
        *,
        weights: LiveWeights | None = None,
        autocast: torch.dtype | None = None,
        pool: GraphPool | None = None,
    ):
        self.inner, self.in_force, self.context, self.autocast = inner, in_force, context, autocast
        self.weights, self.pool = weights, pool or GraphPool()
        self.call: Any = torch.compile(inner, dynamic=False) if "compile" in in_force else inner
        self.graph: _Graph | None = None

    @contextmanager
    def flags(self) -> Iterator[None]:
        # With half precision only the time embedding's float32 products remain, where TF32 gains nothing.
        with _FLAGS:
            benchmark = torch.backends.cudnn.benchmark
            try:
                torch.backends.cudnn.benchmark = "cudnn_benchmark" in self.in_force or benchmark
                # Inference tensors cannot be written to outside inference mode, and a graph's static tensors are.
                with (
                    self._on_device(),
                    tf32_allowed("tf32" in self.in_force),
                    torch.inference_mode(False),
                    torch.no_grad(),
                    # The graph's own types are those of the plan.
                    torch.autocast(self.context.device.type, self.autocast, enabled=self.autocast is not None),
                ):
                    yield
            finally:
                torch.backends.cudnn.benchmark = benchmark

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched, and graphs recorded, on the current GPU: it must be the one the tensors are on."""
        return torch.cuda.device(self.context.device) if self.context.device.type == "cuda" else nullcontext()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.context.device.type == "cpu":
            reuse_memory("heap" in self.in_force)
        if "cuda_graph" not in self.in_force:
            with self.pool.lock:
                self._renew()
                with self.flags():
                    return self._plain(*args, **kwargs)
        with self.pool.lock, self._on_device(), torch.inference_mode(False), torch.no_grad():
            if self.graph is None:
                self._renew()
                with self.flags(), clocked("recorded as a graph"):
                    self.graph = _Graph(self._plain, args, kwargs, self.pool)
            return self.graph(args, kwargs, self._renew)

    def _renew(self) -> bool:
        """Writes the network's weights into the inner network if they have changed; whether they had."""
        if self.weights is None or not self.weights.changed():
            return False
        self.weights.repack()
        return True

    @contextmanager
    def named(self, mark: Callable[[str], AbstractContextManager[Any]]) -> Iterator[dict[str, str]]:
        """Runs each operator by itself inside `mark(path of its module)`; yields {path: class}.

        For profilers: a rewritten graph has no modules to hook.
        """
        if not isinstance(self.inner, fx.GraphModule) or "compile" in self.in_force:
            yield {}
            return
        walker = _Marked(self.inner, mark)
        call, graph, self.call, self.graph = self.call, self.graph, walker.walk, None
        in_force, self.in_force = self.in_force, self.in_force - {"cuda_graph"}
        try:
            yield dict(module_of(n) for n in self.inner.graph.nodes if n.op == "call_function")
        finally:
            self.call, self.graph, self.in_force = call, graph, in_force

    @property
    def graph_gib(self) -> float:
        """Memory of the recorded graph, which the allocator's own statistics do not include."""
        return self.graph.bytes / 2**30 if self.graph is not None else 0.0

    def rehearse(self, inputs: Inputs) -> None:
        """One call outside the graph, to compile kernels and let cuDNN select algorithms; the result is discarded."""
        if "compile" not in self.in_force:
            with self.flags():
                self._plain(*inputs[0], **inputs[1])

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _Marked(fx.Interpreter):
    """Runs a graph node by node, each inside its module's mark."""

    def __init__(self, module: fx.GraphModule, mark: Callable[[str], AbstractContextManager[Any]]):
        super().__init__(module)
        self.rewritten, self.mark = module, mark

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        with self.mark(module_of(n)[0]):
            return super().run_node(n)

    def walk(self, *args: Any, **kwargs: Any) -> Any:
        leaves = tree_flatten((args, kwargs))[0]
        return self.rewritten.graph.process_outputs(self.run(*leaves, enable_io_processing=False))


# The allocator's peak before it was reset to record a graph.
_earlier = {"peak": 0}


def peak_reserved() -> int:
    """Peak bytes reserved by this process on the current GPU, including the time before graphs were recorded."""
    return max(_earlier["peak"], torch.cuda.max_memory_reserved())


class GraphPool:
    """Memory that the recorded graphs of one network share: one runs at a time, and its outputs are copied out at once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.handle: Any = None
        self.bytes = 0
        # The end of the last call's work on the GPU.
        self.finished: torch.cuda.Event | None = None

    def allocate(self, needed: int) -> None:
        """Called while a graph is recorded: extends the pool by one block if none of its blocks is large enough.

        With a block for each tensor, later tensors of other sizes would not fit the freed blocks.
        """
        if needed > self.bytes:
            torch.empty(needed, dtype=torch.uint8, device=torch.cuda.current_device())
            self.bytes = needed


class _Unowned:
    """The memory of a graph's output, described so that a tensor on it does not keep it from being used by other graphs."""

    def __init__(self, x: Tensor):
        kind = {1: "|u1", 2: "<i2", 4: "<i4", 8: "<i8", 16: "<c16"}[x.element_size()]
        strides = tuple(s * x.element_size() for s in x.stride())
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "typestr": kind,
            "data": (x.data_ptr(), False),
            "strides": strides,
            "version": 3,
        }


def _unowned(x: Tensor) -> Tensor:
    if not x.numel() or x.dtype == torch.bool:
        return x
    plain = torch.as_tensor(_Unowned(x), device=x.device)
    return plain if plain.dtype == x.dtype else plain.view(x.dtype)


class _Graph:
    """A call recorded once and replayed: inputs are copied into static tensors, outputs out of them."""

    def __init__(self, call: Any, args: Sequence[Any], kwargs: dict[str, Any], pool: GraphPool):
        copied = lambda x: x.detach().clone(memory_format=torch.preserve_format)  # noqa: E731
        self.pool = pool
        self.args, self.kwargs = tree_map_only(Tensor, copied, (tuple(args), kwargs))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                _earlier["peak"] = peak_reserved()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                call(*self.args, **self.kwargs)
            needed = torch.cuda.max_memory_allocated() - before
        torch.cuda.current_stream().wait_stream(side)
        # Free the warm-up's memory: the graph allocates from a pool of its own.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.bytes = int(needed * SLACK)
        self.recorded = torch.cuda.CUDAGraph()
        if pool.handle is None:
            pool.handle = torch.cuda.graph_pool_handle()
        # On the same stream, where the libraries already have their workspaces.
        with torch.cuda.graph(self.recorded, pool=pool.handle, stream=side):
            pool.allocate(self.bytes)
            output = call(*self.args, **self.kwargs)
        # Inputs that are returned as they are lie outside the pool, and belong to this object.
        self.inputs = [(i, x) for i, x in enumerate(leaves_of(self.args, self.kwargs)) if isinstance(x, Tensor)]
        own = {x.data_ptr() for _, x in self.inputs}
        leaves, self.structure = tree_flatten(output)
        self.single = isinstance(output, Tensor)
        self.outputs = [x if not isinstance(x, Tensor) or x.data_ptr() in own else _unowned(x) for x in leaves]

    def __call__(self, args: Sequence[Any], kwargs: dict[str, Any], renew: Callable[[], bool]) -> Any:
        stream = torch.cuda.current_stream()
        if self.pool.finished is not None:
            stream.wait_event(self.pool.finished)
        given = leaves_of(args, kwargs)
        for index, target in self.inputs:
            target.copy_(given[index])
        self.recorded.replay()
        # LiveWeights are checked while the GPU works; if they have changed, the result is computed again.
        if renew():
            self.recorded.replay()
        copies = [x.clone() if isinstance(x, Tensor) else x for x in self.outputs]
        if self.pool.finished is None:
            self.pool.finished = torch.cuda.Event()
        self.pool.finished.record(stream)
        return copies[0] if self.single else tree_unflatten(copies, self.structure)


def compilers(device: torch.device) -> AbstractContextManager[None]:
    """Worker processes that compile for `kernels_ready`; worth starting when a network's kernels are not cached yet."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return nullcontext()
    from voxtune.kernels.compile_workers import compiling

    return compiling()


def kernels_ready(network: Optimized, inputs: Inputs) -> AbstractContextManager[None]:
    """Compiles the network's kernels in parallel: starts now, finished at the end of the `with` block."""
    if network.runner.context.device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return nullcontext()
    from voxtune.kernels.precompile import compiled_ahead

    return compiled_ahead(lambda: network.runner.rehearse(inputs))
