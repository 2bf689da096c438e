"""A kernel's launch, prepared: what is decided once (grid, tile, buffers) apart from what happens a hundred times."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from voxtune.kernels.precompile import ready


@dataclass(frozen=True, kw_only=True)
class Launch:
    kernel: Any
    programs: int | tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    part: str = ""  # of the network, as the component table names it
    options: dict[str, Any] = field(default_factory=dict)  # of the launch itself

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def __call__(self) -> None:
        grid = (self.programs,) if isinstance(self.programs, int) else self.programs
        ready(self.kernel)[grid](
            *self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages, **self.options
        )

    def with_arguments(self, **changed: Any) -> Launch:
        """The same launch on other tensors, named as the kernel's arguments."""
        names = list(self.kernel.arg_names)
        arguments = list(self.arguments)
        for name, value in changed.items():
            arguments[names.index(name)] = value
        return replace(self, arguments=tuple(arguments))

    def chained(self) -> Launch:
        """Started before its predecessor has ended, on cards that can (compute capability 9.0)."""
        return replace(self, constants={**self.constants, "CHAINED": True}, options={"launch_pdl": True})
