"""The weight gradients of a network's 3x3x3 convolutions: by cuDNN or by the own kernel, as measured on this card.

Why: from 64^3 voxels on the own kernel was faster for every shape that was measured. Below, it depends on the shape: the steps of
a small volume do not fill the card. The shapes of one forward and backward pass are timed with both, as compete.py times
convolutions; the answers are remembered for the card, the versions and the source.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from voxtune.files import one_line
from voxtune.plan.card_table import CardTable
from voxtune.plan.compete import Timer, race
from voxtune.plan.kernel_forms import Call
from voxtune.plan.training_gate import results_of

if TYPE_CHECKING:
    from voxtune.kernels.conv3d_weight_gradient import GradientShape

log = logging.getLogger("voxtune")
# Of one network, and of one of its shapes; a shape for which no time is left keeps the rule.
SECONDS, SECONDS_EACH = 10.0, 0.05
TABLE = CardTable(
    what="measured times of weight gradients",
    format="voxtune-weight-gradients/1",
    entries="times",
    prefix="weight-gradients-",
)
_loaded: set[Path] = set()


@dataclass(frozen=True)
class WeightGradientTimes:
    """Milliseconds of the own kernel and of cuDNN for one shape."""

    key: str
    own: str  # the own kernel's method
    own_ms: float
    cudnn_ms: float

    @property
    def method(self) -> str:
        return self.own if self.own_ms < self.cudnn_ms else "cudnn"

    def describe(self) -> str:
        return f"weight gradient {self.key}: {self.own} {self.own_ms:.3g} ms, cuDNN {self.cudnn_ms:.3g} ms"


def load_weight_gradients(device: torch.device) -> None:
    """Uses what was measured on this card before; reads the file once per process."""
    if importlib.util.find_spec("triton") is None:
        return
    path = TABLE.path(device)
    if path not in _loaded:
        _loaded.add(path)
        _use(device, _known(device))


def measure_weight_gradients(
    network: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    seconds: float = SECONDS,
) -> list[WeightGradientTimes]:
    """Times the weight gradients of a network rewritten for training, of shapes that were not timed on this card before.

    Runs one forward and backward pass. Shapes that the rule gives to the own kernel keep it: their rival needs much memory. On a
    CPU nothing is measured. Deterministic runs keep the rule for all shapes, which does not depend on measurements.
    """
    parameters = [p for p in network.parameters() if p.requires_grad]
    if not parameters or parameters[0].device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return []
    if torch.are_deterministic_algorithms_enabled() or torch.backends.cudnn.deterministic:
        return []
    from voxtune.kernels.conv3d_weight_gradient import by_rule

    device = parameters[0].device
    load_weight_gradients(device)
    try:
        shapes = gradient_shapes(network, parameters, args, kwargs or {})
        torch.cuda.empty_cache()
        left = [s for s in shapes.values() if by_rule(s.N * math.prod(s.voxels), device) == "cudnn"]
        return faster_methods(left, device, seconds)
    except torch.OutOfMemoryError as error:
        log.info("weight gradients were not timed: %s", one_line(error))
        return []
    finally:
        torch.cuda.empty_cache()


def gradient_shapes(
    network: Callable[..., Any], parameters: Sequence[Tensor], args: Sequence[Any], kwargs: dict[str, Any]
) -> dict[str, GradientShape]:
    """The shapes for which one forward and backward pass chooses a method, by their keys."""
    from voxtune.kernels.conv3d_weight_gradient import recording

    with torch.enable_grad(), recording() as shapes:
        results = results_of(network(*args, **kwargs))
        if results:
            # Not into `.grad`, which belongs to the caller.
            starts = [torch.ones_like(y) for y in results]
            torch.autograd.grad(results, list(parameters), starts, allow_unused=True)
    return shapes


def faster_methods(
    shapes: Sequence[GradientShape], device: torch.device, seconds: float, *, timer: Timer = race
) -> list[WeightGradientTimes]:
    """Times the shapes that are not in the table, those with the most work first, for at most `seconds`, and uses the answers."""
    until = time.monotonic() + seconds
    known = _known(device)
    _use(device, known)
    new = []
    for shape in sorted((s for s in shapes if s.key not in known), key=lambda s: -s.products):
        if time.monotonic() > until:
            log.info("no time is left for the weight gradient %s", shape.key)
            continue
        times = _times(shape, device, timer)
        if times is not None:
            log.info(times.describe())
            new.append(times)
    if new:
        table = {t.key: {"own": t.own, "own_ms": t.own_ms, "cudnn_ms": t.cudnn_ms} for t in new}
        TABLE.add(device, table)
        _use(device, table)
    return new


def _times(shape: GradientShape, device: torch.device, timer: Timer) -> WeightGradientTimes | None:
    """None if no own kernel applies, or one of the two fails: then the rule stays."""
    from voxtune.kernels.conv3d_weight_gradient import own_method

    try:
        dy, sources = shape.tensors(device)
        own = own_method(dy, sources, shape.padding)
        if own is None:
            return None
        calls = (own_call(shape, own, dy, sources), cudnn_call(shape, dy, sources))
        with torch.no_grad():
            return WeightGradientTimes(shape.key, own, *timer(*calls, device, SECONDS_EACH))
    except Exception as error:  # out of memory, or an algorithm that fails
        log.info("the weight gradient %s was not timed: %s: %s", shape.key, type(error).__name__, one_line(error))
        return None


def own_call(shape: GradientShape, method: str, dy: Tensor, sources: Sequence[Tensor]) -> Call:
    from voxtune.kernels.conv3d_weight_gradient import weight_gradient

    return lambda: weight_gradient(dy, sources, shape.padding, hopper=method == "hopper")


def cudnn_call(shape: GradientShape, dy: Tensor, sources: Sequence[Tensor]) -> Call:
    from voxtune.kernels.conv3d import CUBE
    from voxtune.kernels.gradients import packed_by_cudnn

    return lambda: packed_by_cudnn(dy, sources, dy.dtype, CUBE, shape.padding)


def _known(device: torch.device) -> dict[str, dict[str, Any]]:
    """The entries of the table; whatever is not a method with two positive times is ignored."""
    return {key: entry for key, entry in TABLE.read(device).items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.get("own") not in ("triton", "hopper"):
        return False
    times = (entry.get("own_ms"), entry.get("cudnn_ms"))
    return all(isinstance(ms, int | float) and not isinstance(ms, bool) and 0 < ms < math.inf for ms in times)


def _use(device: torch.device, table: dict[str, dict[str, Any]]) -> None:
    from voxtune.kernels.conv3d_weight_gradient import use
    from voxtune.kernels.measured_tiles import card

    times = (WeightGradientTimes(key, **entry) for key, entry in table.items())
    use(card(device), {t.key: t.method for t in times})
