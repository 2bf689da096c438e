"""Compiles a kernel for a GPU that need not be present, and reads registers, memory and instructions from the binary."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, kw_only=True)
class Compiled:
    name: str
    registers: int
    spills: int  # bytes of stack
    shared: int  # bytes of shared memory
    ptx: str
    sass: str

    @property
    def serialised(self) -> bool:
        """Whether the assembler put waits between matrix products that the kernel issues together."""
        return self.sass.count("WARPGROUP.DEPBAR") > self.ptx.count("wgmma.wait_group")


def compiled(kernel, signature: dict[str, str], constants: dict[str, object], *, arch: int, warps: int) -> Compiled:
    """`signature` gives the types of the run-time arguments; all others are in `constants`."""
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    form = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    # As at a launch with aligned tensors.
    pointers = [i for i, name in enumerate(kernel.arg_names) if types[name].startswith("*")]
    aligned = {"attrs": {(i,): [["tt.divisibility", 16]] for i in pointers}} if form is ASTSource else {}
    source = form(fn=kernel, signature=types, constexprs=constants, **aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    usage, sass = (dump(binary.asm["cubin"], option) for option in ("--dump-resource-usage", "--dump-sass"))
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match, usage
    return Compiled(
        name=binary.metadata.name,
        registers=int(match[1]),
        spills=int(match[2]),
        shared=binary.metadata.shared,
        ptx=binary.asm["ptx"],
        sass=sass,
    )


def dump(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOL, option, file.name], capture_output=True, text=True, check=True).stdout
