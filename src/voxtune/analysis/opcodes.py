"""SASS opcodes: what an instruction does, and the pipe it runs on."""

from __future__ import annotations

import functools
import json
from importlib import resources


@functools.cache
def _groups() -> dict[str, frozenset[str]]:
    data = json.loads(resources.files("voxtune.analysis").joinpath("data/opcodes.json").read_text())
    return {name: frozenset(stems.split()) for name, stems in data.items() if name != "about"}


def group_of(opcode: str) -> str:
    """tensor, fp32, fp16, fp64, int, convert, memory, move, predicate, control, uniform or other.

    Memory and control opcodes that start with U are what they do; any other U-opcode runs on the uniform datapath,
    which computes addresses and loop counters once a warp and is not tensor work.
    """
    stem = _stem(opcode)
    for group, members in _groups().items():
        if group != "fma_pipe" and stem in members:
            return group
    return "uniform" if stem.startswith("U") else "other"


def pipe_of(opcode: str) -> str:
    """The execution pipe. IMAD is integer arithmetic on the FMA pipe: counting it as integer hides what busies FMA."""
    stem = _stem(opcode)
    if stem in _groups()["fma_pipe"]:
        return "fma"
    if stem == "MUFU":
        return "special"
    group = group_of(opcode)
    pipes = {"fp32": "alu", "fp16": "fma", "int": "alu", "predicate": "alu", "convert": "special", "move": "alu"}
    return pipes.get(group, "load/store" if group == "memory" else group)


def _stem(opcode: str) -> str:
    return opcode.partition(".")[0].strip().upper()
