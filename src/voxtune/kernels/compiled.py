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
        """The assembler put waits between matrix products that the kernel has in flight together."""
        return self.sass.count("WARPGROUP.DEPBAR") > self.ptx.count("wgmma.wait_group")


def compiled(kernel, signature: dict[str, str], constants: dict[str, object], *, arch: int, warps: int) -> Compiled:
    """`signature` has the types of the run-time arguments; all others are in `constants`."""
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    form = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = form(fn=kernel, signature=types, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": warps})
    usage, sass = (dump(made.asm["cubin"], what) for what in ("--dump-resource-usage", "--dump-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Compiled(
        name=made.metadata.name,
        registers=int(found[1]),
        spills=int(found[2]),
        shared=made.metadata.shared,
        ptx=made.asm["ptx"],
        sass=sass,
    )


def dump(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOL, what, file.name], capture_output=True, text=True, check=True).stdout
