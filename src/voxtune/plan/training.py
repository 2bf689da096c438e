"""A network rewritten for training: the plan's operators with their gradients, and the network's own parameters.

The graph is the one that inference plans rewrite. Its weights are not stored in it: packed, cast and merged weights are computed
from the parameters in every step, by the functions that the passes recorded, so that gradients reach the parameters through them.

What is kept for the backward pass are the sources of norms; their results, which convolutions need for their weights' gradients,
are computed again from these.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

from voxtune.errors import InputError
from voxtune.plan.build import PlanTarget, rewrite
from voxtune.plan.derivation import Derivation, LiveWeights, Ref
from voxtune.plan.graph import Captured
from voxtune.plan.passes import BY_NAME, Context, PassStage, Precision, select
from voxtune.plan.plan import Plan
from voxtune.plan.recompute import Group, Recomputation, recomputation
from voxtune.plan.run import leaves_of
from voxtune.plan.weight_gradients import load_weight_gradients

# Their results depend on the batch, or on chance, in training mode: an inference graph computes something else.
_DIFFERS = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd, nn.AlphaDropout)


# Those with passes whose operators have gradients.
_STAGES = (
    PassStage.LAYOUT,
    PassStage.CLEANUP,
    PassStage.SHARING,
    PassStage.NORM,
    PassStage.FUSION,
    PassStage.EDGES,
    PassStage.CONVOLUTION,
)


def training_passes(precision: Precision) -> tuple[str, ...]:
    """The passes of a network that is trained in this precision."""
    return tuple(name for name in select(precision, *_STAGES) if BY_NAME[name].has_gradients)


class TrainingNetwork(nn.Module):
    """Computes what the network computes, with the plan's operators; gradients go to the network's parameters.

    It shares the network's parameters and buffers.
    """

    original: nn.Module
    rewritten: fx.GraphModule
    notes: dict[str, str]
    groups: tuple[Group, ...]
    _live: LiveWeights
    _without_effect: tuple[str, ...]
    _execution: Execution

    def __init__(
        self, original: nn.Module, captured: Captured, notes: dict[str, str], without_effect: Sequence[str] = ()
    ):
        """`without_effect` are parameters whose gradient is zero, which the rewritten graph does not contain."""
        super().__init__()
        for shared in ("_parameters", "_buffers", "_modules"):
            self.__dict__[shared] = original.__dict__[shared]
        # Not as submodules: their parameters are not this network's.
        live = LiveWeights(original, captured.module, captured.derived)
        live.drop_values()
        names = tuple(without_effect)
        self.__dict__.update(
            original=original, rewritten=captured.module, notes=notes, _live=live, _without_effect=names
        )
        self.recompute(())

    def recompute(self, groups: Sequence[Group]) -> None:
        """From the next step on: what the operators of these groups need for gradients is computed again."""
        self.__dict__.update(groups=tuple(groups), _execution=self.execution(groups))

    def execution(self, groups: Sequence[Group]) -> Execution:
        return Execution(self.rewritten, groups)

    def weights(self) -> dict[str, Tensor]:
        """The graph's weights, computed from the parameters."""
        return self._live.values()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self._execution, args, kwargs)

    def run(self, execution: Execution, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The network's result by an execution of its graph."""
        output = execution(leaves_of(args, kwargs), self.weights())
        idle = [p for p in map(self.original.get_parameter, self._without_effect) if p.requires_grad]
        if idle and torch.is_grad_enabled():
            output = list(output)
            at = next((i for i, y in enumerate(output) if isinstance(y, Tensor) and y.requires_grad), None)
            if at is not None:
                output[at] = _ZeroGradients.apply(output[at], *idle)
        return self.rewritten.graph.process_outputs(output)


class _ZeroGradients(torch.autograd.Function):
    """Its first argument, and gradients of zero for the others: an optimizer treats a missing gradient differently."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(*parameters)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return dy, *(torch.zeros_like(p) for p in ctx.saved_tensors)


class Execution:
    """One forward pass of the graph with given weights; what gradients need of the groups is computed again."""

    def __init__(self, module: fx.GraphModule, groups: Sequence[Group]):
        self.module = module
        self.nodes = list(module.graph.nodes)
        position = {node: i for i, node in enumerate(self.nodes)}
        # What is used for the last time, by position.
        self.ends: dict[int, list[fx.Node]] = {}
        for node, i in position.items():
            self.ends.setdefault(max((position[user] for user in node.users), default=i), []).append(node)
        # Of each norm the sources that are read again after it.
        self.read_later = {
            norm: {s for s in norm.all_input_nodes if any(position[user] > position[norm] for user in s.users)}
            for norm in module.graph.find_nodes(op="call_function", target=torch.ops.voxtune.norm_act.default)
        }
        self.groups = {group.first: again for group in groups if (again := recomputation(self.nodes, group)).results}
        # Called before each operator, with its position.
        self.watch: Callable[[int, dict[fx.Node, Any]], None] | None = None
        self.hooks: Callable[[], AbstractContextManager[Any]] = _recomputing_results

    def __call__(self, leaves: Sequence[Any], values: dict[str, Tensor]) -> Any:
        given = iter(leaves)
        known: dict[fx.Node, Any] = {}
        training = torch.is_grad_enabled()
        later: _GroupValues | None = None
        with self.hooks() if training else nullcontext():
            for i, node in enumerate(self.nodes):
                if self.watch is not None:
                    self.watch(i, known)
                if training and i in self.groups:
                    later = _GroupValues(self, self.groups[i], known, values)
                if node.op == "placeholder":
                    known[node] = next(given)
                elif training and node in self.read_later:
                    known[node] = self.normalize(node, known)
                else:
                    known[node] = self.compute(node, known, values)
                if later is not None and node in later.group.results:
                    later.promise(node, known[node])
                if node.op != "output":
                    self.forget(i, known)
        return known[self.nodes[-1]]

    def forget(self, i: int, known: dict[fx.Node, Any]) -> None:
        for ended in self.ends.get(i, ()):
            known.pop(ended, None)

    def compute(self, node: fx.Node, known: dict[fx.Node, Any], values: dict[str, Tensor]) -> Any:
        if node.op == "get_attr":
            name = str(node.target)
            return values[name] if name in values else self._constant(name)
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        if node.op == "output":
            return args[0]
        assert node.op == "call_function" and callable(node.target), node.format_node()
        return _call(node.target, args, kwargs)

    def normalize(self, node: fx.Node, known: dict[fx.Node, Any]) -> Tensor:
        """A norm's result. Operators that read a source later read it from the norm, whose gradient adds theirs.

        Not the result is kept for gradients, but how to compute it again.
        """
        from voxtune.kernels.gradients import RecomputedNorm, norm_before, recipe_or_value, recompute_later

        args: Any = fx.map_arg(node.args, known.__getitem__)
        nodes: list[fx.Node] = node.args[0]  # type: ignore[assignment]
        # A source that occurs twice could be handed on only once.
        handed_on = [
            value.requires_grad and source in self.read_later[node] and nodes.count(source) == 1
            for source, value in zip(nodes, args[0], strict=True)
        ]
        y, affine, again = norm_before(handed_on, *args)
        # Sources; activation, slope, slopes, residual.
        sources, after = tuple(map(recipe_or_value, args[0])), tuple(map(recipe_or_value, args[6:10]))
        recompute_later(y, RecomputedNorm(sources, affine, after))
        known.update(zip((source for source, on in zip(nodes, handed_on, strict=True) if on), again, strict=True))
        return y

    def _constant(self, name: str) -> Any:
        value: Any = self.module
        for part in name.split("."):
            value = getattr(value, part)
        return value


class _GroupValues:
    """The results of a group that gradients need, computed again when the first of them is needed."""

    def __init__(
        self, execution: Execution, group: Recomputation, known: dict[fx.Node, Any], weights: dict[str, Tensor]
    ):
        from voxtune.kernels.gradients import recipe_or_value

        self.execution, self.group, self.weights = execution, group, weights
        # Those that exist already; others are weights, or follow inside.
        self.given = {node: recipe_or_value(known[node]) for node in group.inputs}
        self.values: dict[fx.Node, Tensor] = {}

    def promise(self, node: fx.Node, y: Tensor) -> None:
        from voxtune.kernels.gradients import RecomputedInGroup, recompute_later

        recipe = RecomputedInGroup(self, node)
        weakref.finalize(recipe, self.values.pop, node, None)
        recompute_later(y, recipe)

    def __call__(self, node: fx.Node) -> Tensor:
        """Operators need the values one after the other; each is kept until none can ask for it any more."""
        from voxtune.kernels.gradients import computed

        if node not in self.values:
            known = {n: computed(x) for n, x in self.given.items()}
            with torch.no_grad():
                for inner in self.group.nodes:
                    known[inner] = self.execution.compute(inner, known, self.weights)
                    if inner in self.group.results:
                        self.values[inner] = known[inner]
                    for ended in self.group.ends[inner]:
                        known.pop(ended, None)
        return self.values[node]


def _recomputing_results() -> AbstractContextManager[None]:
    from voxtune.kernels.gradients import recomputing_results

    return recomputing_results()


def _call(target: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The operator; of an upsampling not the result is kept for gradients, but how to compute it again."""
    from voxtune.kernels.gradients import RecomputedUpsampling, recipe_or_value, recompute_later

    y = target(*args, **kwargs)
    if torch.is_grad_enabled() and target is torch.ops.voxtune.upsample.default:
        recompute_later(y, RecomputedUpsampling(recipe_or_value(args[0]), args[1]))
    return y


def _pack_in_one_step(captured: Captured) -> None:
    """Weights of convolutions are packed and cast by one kernel, and so are their gradients on the way back."""
    from voxtune.kernels import conv3d
    from voxtune.kernels.packing import pack_as

    derivations = captured.derived.derivations
    for name, derivation in list(derivations.items()):
        part = derivation.args[0] if derivation.args else None
        inner = derivations.get(part.name) if isinstance(part, Ref) else part
        functions = derivation.function, inner.function if isinstance(inner, Derivation) else None
        if inner is not None and functions == (torch.ops.aten.to.dtype, conv3d.pack):
            derivations[name] = Derivation(pack_as, (inner.args[0], derivation.args[1]), {})


def training_network(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any] | None, plan: Plan
) -> TrainingNetwork:
    """The network rewritten by a plan's passes, for these sizes of inputs; InputError if it cannot be."""
    differs = next((n for n, m in model.named_modules() if isinstance(m, _DIFFERS) and getattr(m, "p", 1) != 0), None)
    if differs is not None:
        raise InputError(
            f"{differs} computes something else in training mode: dropout and batch norm are not supported"
        )
    target = PlanTarget(model, (tuple(args), kwargs or {}))
    captured = target.captured()
    if isinstance(captured, str):
        raise InputError(f"the network cannot be captured: {captured}")
    from voxtune.kernels.gradients import differentiable, register_gradients

    register_gradients()
    if target.device.type == "cuda":
        load_weight_gradients(target.device)
    captured.graph.eliminate_dead_code()
    # A module may have several names, of which the graph has any.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    before = {name: parameters[name] for name in sorted(_used(captured) & parameters.keys())}
    notes = rewrite(captured, plan, Context(target.device, plan.names, twin=target.device.type != "cuda"))
    for node in captured.graph.nodes:
        if node.op == "call_function" and not differentiable(node.target):
            raise InputError(f"{node.target} has no gradient")
    _pack_in_one_step(captured)
    effective = {id(parameters[name]) for name in _used(captured) & parameters.keys()}
    idle = {id(p): name for name, p in before.items() if id(p) not in effective}
    return TrainingNetwork(model, captured, notes, tuple(idle.values()))


def _used(captured: Captured) -> set[str]:
    """Weights of the network that its graph refers to, also through those that are computed from them."""
    waiting: list[Any] = [Ref(str(node.target)) for node in captured.graph.find_nodes(op="get_attr")]
    used: set[str] = set()
    while waiting:
        part = waiting.pop()
        derivation = captured.derived.derivations.get(part.name) if isinstance(part, Ref) else part
        if isinstance(derivation, Derivation):
            leaves = tree_flatten((derivation.args, derivation.kwargs))[0]
            waiting += [x for x in leaves if isinstance(x, Ref | Derivation)]
        elif part.name in captured.own:
            used.add(part.name)
    return used
