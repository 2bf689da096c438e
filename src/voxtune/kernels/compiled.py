"""What a kernel becomes on a GPU that is not here: compiled by Triton, read off the binary."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True, kw_only=True)
class Compiled:
    name: str
    registers: int
    spills: int  # bytes of stack
    shared: int  # bytes of shared memory
    ptx: str

    def count(self, instruction: str) -> int:
        return self.ptx.count(instruction)


def compiled(kernel, signature: dict[str, str], constants: dict[str, object], *, arch: int, warps: int) -> Compiled:
    """`signature` has the types of the run-time arguments; all others are in `constants`."""
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    registers, stack = resources(made.asm["cubin"])
    return Compiled(
        name=made.metadata.name, registers=registers, spills=stack, shared=made.metadata.shared, ptx=made.asm["ptx"]
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """(registers a thread, bytes of stack a thread), as cuobjdump says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])
