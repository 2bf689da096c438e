"""The gate of training: are the gradients of a rewritten network as accurate as plain PyTorch's?

The gradient of each layer (the parameters of one module) is compared with float64 on real batches. Its error may be at most 1.5
times that of plain PyTorch in the same precision (autocast for half precision) on the same batches. Errors below the rounding of
the precision's own format are accepted: a layer that plain PyTorch happens to compute exactly sets no limit.

All gradients start from the loss's gradient at the float64 output. From each network's own output, an L1 loss would judge by
chance: its gradient is a sign, and one voxel that rounding moves across zero weighs more than all other errors together.

Layers that are initialised to zero let no gradient through, so the gate judges a copy of the network in which they are filled.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from voxtune.files import one_line
from voxtune.plan.gate import FACTOR, STEP_FLOOR, TF32_FLOOR, Verdict, volumes_of
from voxtune.precision import HALF, tf32_allowed
from voxtune.workloads import without_zeros

log = logging.getLogger("voxtune")
# The unit roundoff of half precision; the floors of float32 and TF32 are those of the gate of inference.
FLOORS = {"fp32": STEP_FLOOR, "default": STEP_FLOOR * TF32_FLOOR, "tf32": STEP_FLOOR * TF32_FLOOR}
FLOORS |= {name: torch.finfo(dtype).eps / 2 for name, dtype in HALF.items()}
# A gradient that is zero in exact arithmetic has less than this norm, relative to the whole gradient, by the references' type.
NO_GRADIENT = {"float64": 1e-10, "float32": 1e-5}
# Layers in a report, the worst ones, and the names on a line.
REPORTED, NAMED = 5, 3

Call = Callable[..., Any]
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class GateBatch:
    """The arguments of the network, and the loss of its results: of those that have a gradient."""

    args: tuple[Any, ...]
    loss: Callable[[list[Tensor]], Tensor]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LayerError:
    """The relative error of a layer's gradient, plain PyTorch's, and the limit."""

    name: str
    error: float
    plain: float
    limit: float

    @property
    def excess(self) -> float:
        return self.error / self.limit


def describe_layers(figures: dict[str, Any]) -> str:
    """The layers of a verdict in one line: how many were judged, the worst ones, and those that were not."""
    worst = [f"{w['name']} {w['error']:.1e} (at most {w['limit']:.1e})" for w in figures["worst"][:NAMED]]
    line = f"{figures['judged']} layers judged, the worst: {', '.join(worst)}"
    left = figures["excluded"]
    more = f" and {len(left) - NAMED} more" if len(left) > NAMED else ""
    return line + (f"; gradients of {', '.join(left[:NAMED])}{more} are zero or constant" if left else "")


class GradientGate:
    """References and plain PyTorch's errors for one network and its batches, computed on first use."""

    def __init__(self, model: nn.Module, batches: Sequence[GateBatch], precision: str, factor: float = FACTOR):
        assert batches, "a gate needs batches"
        self.precision, self.factor, self.batches = precision, factor, list(batches)
        device = next(model.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            self.model = without_zeros(copy.deepcopy(model))
        self._references: list[Gradients] | None = None
        self._starts: list[list[Tensor]] = []
        self.reference_type = "float64"
        self._plain: dict[str, float] | None = None
        self.excluded: list[str] = []

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def prepare(self) -> None:
        """Computes everything that does not need a candidate."""
        self._plain_errors()

    def judge(self, make: Callable[[nn.Module], Call]) -> Verdict:
        """`make` rewrites the gate's copy of the network; its result is called with the batches' arguments."""
        figures: dict[str, Any] = {"precision": self.precision, "batches": len(self.batches)}
        try:
            return self._judge(make, figures)
        except torch.OutOfMemoryError as error:
            return Verdict(False, f"out of memory: {one_line(error)}", figures)

    def _judge(self, make: Callable[[nn.Module], Call], figures: dict[str, Any]) -> Verdict:
        plain = self._plain_errors()
        figures |= {"excluded": self.excluded, "reference": self.reference_type}
        if len(plain) < 2:
            return Verdict(False, "every gradient is zero or constant, so errors cannot be seen", figures)
        candidate = make(self.model)
        errors = self._errors(candidate)
        del candidate
        floor = FLOORS[self.precision]
        layers = [LayerError(n, errors[n], plain[n], max(floor, self.factor * plain[n])) for n in plain]
        whole = layers.pop()
        layers.sort(key=lambda layer: -layer.excess)
        figures |= {"relative": whole.error, "limit": whole.limit, "plain": whole.plain, "judged": len(layers)}
        figures["worst"] = [asdict(layer) for layer in layers[:REPORTED]]
        for layer in layers:
            log.info("gradient of %s: error %.1e, plain PyTorch's %.1e", layer.name, layer.error, layer.plain)
        for layer in (layers[0], whole):
            if not layer.error <= layer.limit:
                return Verdict(
                    False, f"gradient of {layer.name}: error {layer.error:.1e} exceeds {layer.limit:.1e}", figures
                )
        return Verdict(True, None, figures)

    def _plain_errors(self) -> dict[str, float]:
        """Plain PyTorch's errors by layer, that of the whole gradient last."""
        if self._plain is None:

            def plain(*args: Any, **kwargs: Any) -> Any:
                with self._plain_precision():
                    return self.model(*args, **kwargs)

            self._plain = self._errors(plain)
        return self._plain

    @contextmanager
    def _plain_precision(self) -> Iterator[None]:
        half = HALF.get(self.precision)
        flags = nullcontext() if self.precision == "default" else tf32_allowed(self.precision != "fp32")
        with flags, nullcontext() if half is None else torch.autocast(self.device.type, half):
            yield

    @property
    def references(self) -> list[Gradients]:
        """Gradients by parameter, on the CPU, without those that are zero or constant.

        In float64, or in float32 if the network requires that type.
        """
        if self._references is None:
            try:
                wide = copy.deepcopy(self.model).double()
                gradients = [self._reference(wide, batch, _to_float64) for batch in self.batches]
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:
                log.info("no float64 reference (%s): using float32", one_line(error))
                self.reference_type, self._starts = "float32", []
                with tf32_allowed(False):
                    gradients = [self._reference(self.model, batch, lambda parts: parts) for batch in self.batches]
            size = math.hypot(*(float(g.norm()) for g in gradients[0].values())) if gradients[0] else 0.0
            nothing = size * NO_GRADIENT[self.reference_type]
            judged = {name for name, g in gradients[0].items() if not _constant(g, nothing)}
            self.excluded = [name for name, _ in self.model.named_parameters() if name not in judged]
            self._references = [{name: g[name].cpu() for name in g if name in judged} for g in gradients]
        return self._references

    def _reference(self, model: nn.Module, batch: GateBatch, typed: Callable[[Any], Any]) -> Gradients:
        args, kwargs = typed((batch.args, batch.kwargs))
        results = results_of(model(*args, **kwargs))
        start = list(torch.autograd.grad(batch.loss(results), results, retain_graph=True))
        self._starts.append(start)
        return _gradients(model, results, start)

    def _errors(self, call: Call) -> dict[str, float]:
        """Relative errors by layer over all batches, that of the whole gradient last."""
        gaps: dict[str, float] = {}
        sizes: dict[str, float] = {}
        references = self.references
        for batch, start, reference in zip(self.batches, self._starts, references, strict=True):
            own = _gradients(self.model, results_of(call(*batch.args, **batch.kwargs)), start)
            for name, expected in reference.items():
                exact = expected.to(self.device)
                gap = own[name].double() - exact if name in own else torch.full_like(exact, math.inf)
                for layer in (name.rpartition(".")[0] or name, "the whole network"):
                    gaps[layer] = gaps.get(layer, 0.0) + float(gap.square().sum())
                    sizes[layer] = sizes.get(layer, 0.0) + float(exact.square().sum())
        whole = "the whole network"
        order = [name for name in gaps if name != whole] + [whole] * (whole in gaps)
        return {name: _finite(math.sqrt(gaps[name] / sizes[name])) for name in order}


def results_of(output: Any) -> list[Tensor]:
    """The results of a network that have a gradient."""
    return [y for y in volumes_of(output) if y.requires_grad]


def _gradients(model: nn.Module, results: list[Tensor], start: list[Tensor]) -> Gradients:
    for p in model.parameters():
        p.grad = None
    torch.autograd.backward(results, [s.to(y.dtype) for s, y in zip(start, results, strict=True)])
    gradients = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return gradients


def _to_float64(parts: Any) -> Any:
    return tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, parts)


def _constant(gradient: Tensor, nothing: float) -> bool:
    same = gradient.numel() > 1 and bool((gradient == gradient.flatten()[0]).all())
    return same or not float(gradient.norm()) > nothing


def _finite(error: float) -> float:
    return math.inf if math.isnan(error) else error
