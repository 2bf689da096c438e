"""What a pass is: a name, whether it keeps the numbers, a predicate with its reason, and a rewrite of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from voxtune.plan.graph import Captured

Kind = Literal["exact", "gated"]
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Context:
    """What the passes of one plan know of each other: where it runs, in which type, in which memory format.

    A `twin` is rewritten as on a GPU in half precision, whatever it runs on: its operators then run their references.
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
class Outcome:
    """How often a pass found its pattern; with a reason where it did not apply."""

    applied: int
    reason: str | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """`why_not` says why it cannot apply here, before any work; `rewrite` changes the graph.

    A pass without a rewrite acts where the plan runs (numeric flags, CUDA graph, compilation).
    """

    name: str
    what: str
    kind: Kind
    why_not: Callable[[Context], str | None] = lambda _context: None
    rewrite: Callable[[Captured, Context, dict[str, Any]], Outcome] | None = None


def needs_gpu(context: Context) -> str | None:
    return None if context.has_kernels else "its kernels need a CUDA device"


def needs_channels_last(context: Context) -> str | None:
    if not context.channels_last and not context.twin:
        return "its kernels read channels-last: the plan lacks channels_last"
    return None


def fusing(context: Context) -> str | None:
    """For passes whose operators have kernels on a GPU, channels-last."""
    return needs_gpu(context) or needs_channels_last(context)


def needs_half(context: Context) -> str | None:
    if context.dtype not in (torch.bfloat16, torch.float16) and not context.twin:
        return "its kernels compute in BF16 or FP16: the plan has neither"
    return None


def register_operators() -> None:
    """Makes torch.ops.voxtune known; here and not above, since its kernels need Triton."""
    from voxtune.kernels import ops  # noqa: F401
