"""What a pass is: its name, its flags, and its rewrite of the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Literal

import torch
from torch import nn

from voxtune.errors import InputError
from voxtune.plan.graph import Captured
from voxtune.precision import HALF

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
# The option of a pass that leaves some convolutions to PyTorch, and the reason that it then reports.
EXCEPT, EXCEPTED = "except", "excepted by the plan"


class PassStage(Enum):
    """What ready-made plans (plan/api.py) and the tuner's rungs (plan/tuner.py) are composed of; each has its passes."""

    CLEANUP = auto()
    SHARING = auto()
    LAYOUT = auto()
    NORM = auto()
    FUSION = auto()
    EDGES = auto()
    CONVOLUTION = auto()
    AUTOTUNING = auto()
    COMPILER = auto()
    CUDA_GRAPH = auto()
    MEMORY = auto()


@dataclass(frozen=True)
class Context:
    """What a pass knows about its plan: the device, the other passes, and from these the data type and memory format.

    A `twin` is rewritten as if it ran on a GPU in half precision, on any device: its operators then run their references.
    """

    device: torch.device
    passes: tuple[str, ...]
    twin: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return next((HALF[n] for n in self.passes if n in HALF), torch.float32)

    @property
    def channels_last(self) -> bool:
        return "channels_last" in self.passes

    @property
    def has_kernels(self) -> bool:
        return self.device.type == "cuda" or self.twin


@dataclass
class PassOutcome:
    """How many times a pass was applied; the reason if it was not."""

    applied: int
    reason: str | None = None
    notes: list[str] = field(default_factory=list)


def why_excepted(options: dict[str, Any], inputs: int, outputs: int, size: Sequence[int]) -> str | None:
    """The reason why a convolution of these channels and this result size is left to PyTorch, or None.

    The option names them: {"except": [[inputs, outputs, *size], ...]}.
    """
    shapes = options.get(EXCEPT, ())
    if not isinstance(shapes, list | tuple) or not all(isinstance(s, list | tuple) for s in shapes):
        raise InputError(
            f"option {EXCEPT!r} of a pass: expected a list of [inputs, outputs, *size], got {shapes!r:.80}"
        )
    return EXCEPTED if [inputs, outputs, *size] in map(list, shapes) else None


def outcome_of(count: int, skipped: Iterable[str], missing: str) -> PassOutcome:
    """How often a pass was applied, and why it skipped some; `missing` if it had nothing to skip."""
    reasons = sorted(set(skipped), key=lambda reason: (reason != EXCEPTED, reason))
    return PassOutcome(count, None if count else (reasons or [missing])[0], notes=reasons)


Rewrite = Callable[[Captured, Context, dict[str, Any]], PassOutcome]


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass. A pass without `rewrite` acts when the plan runs (numeric flags, compilation, CUDA graph)."""

    name: str
    summary: str
    # None: the pass is selected by its precision.
    stage: PassStage | None = None
    rewrite: Rewrite | None = None
    # The same on the modules of a copy of the network, for a network that cannot be captured as a graph.
    rewrite_module: Callable[[nn.Module], None] | None = None
    # False: changes numerics, so the gate applies the limit of `precision`.
    exact: bool = True
    # Restructures the graph: the gate checks the result in float32 too, without the passes that do not.
    structural: bool = False
    # The precision that the pass selects; in a plan with several the last one counts.
    precision: Precision | None = None
    # Passes that cannot be in the same plan, and passes that must be; one side of a pair is enough.
    excludes: tuple[str, ...] = ()
    requires: tuple[str, ...] = ()
    needs_gpu: bool = False
    needs_channels_last: bool = False
    needs_half: bool = False
    # False: its operators have no gradients, so a network that is trained cannot have it.
    has_gradients: bool = True
    # Any other condition: the reason why the pass cannot apply, or None.
    unavailable: Callable[[Context], str | None] = lambda _context: None

    def why_not(self, context: Context) -> str | None:
        """The reason why the pass cannot apply in this context, or None."""
        if self.needs_gpu and not context.has_kernels:
            return "requires a CUDA device"
        if self.needs_channels_last and not context.channels_last and not context.twin:
            return "its kernels read channels-last volumes; add channels_last to the plan"
        if self.needs_half and context.dtype not in HALF.values() and not context.twin:
            return "its kernels compute in BF16 or FP16; add bf16 or fp16 to the plan"
        missing = [name for name in self.requires if name not in context.passes]
        if missing:
            return f"requires {missing[0]}, which is not in the plan"
        return self.unavailable(context)


def register_operators() -> None:
    """Registers torch.ops.voxtune. Imported here because its kernels need Triton."""
    from voxtune.kernels import ops  # noqa: F401
