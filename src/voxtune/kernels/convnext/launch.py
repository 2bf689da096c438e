"""A prepared kernel launch: grid, tile and buffers are chosen once, and the launch is repeated for every step."""

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
    part: str = ""  # of the network, as named in the component table
    options: dict[str, Any] = field(default_factory=dict)  # launch options of Triton, such as launch_pdl

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__

    def __call__(self) -> None:
        grid = (self.programs,) if isinstance(self.programs, int) else self.programs
        ready(self.kernel)[grid](
            *self.arguments, **self.constants, num_warps=self.warps, num_stages=self.stages, **self.options
        )

    def with_arguments(self, **changed: Any) -> Launch:
        """The same launch with other tensors; keywords are names of the kernel's arguments."""
        names = list(self.kernel.arg_names)
        arguments = list(self.arguments)
        for name, value in changed.items():
            arguments[names.index(name)] = value
        return replace(self, arguments=tuple(arguments))

    def chained(self) -> Launch:
        """The same launch, started before its predecessor has ended (requires compute capability 9.0)."""
        return replace(self, constants={**self.constants, "CHAINED": True}, options={"launch_pdl": True})
