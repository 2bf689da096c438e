"""Matches launches of one step seen by two tools in two processes, and chooses those worth the slow counters.

The two tools spell a kernel's template arguments differently: its function's bare name, its grid and its block, in
order of launch, are what they agree on.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import NamedTuple

# Share of the step's time that the slow counters go for. A tier is done at 99 and 90 %; the last launches are the many.
SHARES = {"full": 0.992, "opcodes": 0.92}


class Key(NamedTuple):
    function: str
    grid: str
    block: str


@lru_cache(maxsize=16384)
def function_name(name: str) -> str:
    """The bare function of a demangled kernel name: no return type, namespace, template arguments or parameters."""
    depth, kept = 0, []
    text = name.replace("(anonymous namespace)", "_").replace("<unnamed>", "_")
    for i, letter in enumerate(text):
        if letter == "<":
            depth += 1
        elif letter == ">" and text[i - 1] != "-":
            depth -= 1
        elif letter == "(" and depth == 0:
            break
        elif depth == 0:
            kept.append(letter)
    return "".join(kept).strip().split("::")[-1].split(" ")[-1]


def launch_key(name: str, grid: str | None, block: str | None) -> Key:
    return Key(function_name(name), grid or "", block or "")


def align(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[int | None]:
    """For each of `left` the position in `right` of the same launch, in order; None where there is none."""
    if list(left) == list(right):
        return list(range(len(left)))
    found: list[int | None] = [None] * len(left)
    for block in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            found[block.a + offset] = block.b + offset
    return found


def costliest(launches: Sequence[tuple[Hashable, float]], share: float) -> list[Hashable]:
    """The fewest distinct launches that make `share` of the time, the costliest first; `launches` are (what, time)."""
    total: dict[Hashable, float] = {}
    for what, time in launches:
        total[what] = total.get(what, 0.0) + time
    ranked = sorted(total, key=lambda k: -total[k])
    goal, reached = share * sum(total.values()), 0.0
    chosen: list[Hashable] = []
    for what in ranked:
        if reached >= goal and chosen:
            break
        chosen.append(what)
        reached += total[what]
    return chosen


# Launches of one function, grid and block whose times lie within this factor, or this many microseconds, do the same work.
LIKE_FACTOR, LIKE_US = 1.3, 3.0


def occurrence_classes(launches: Sequence[tuple[Hashable, float]]) -> list[tuple[Hashable, int]]:
    """For each (what, time) its class: `what`, and which group of alike times it falls in.

    PyTorch's group norm takes the same grid for a tensor of 512 voxels and one of two million.
    """
    starts: dict[Hashable, list[float]] = {}
    for what, time in sorted(launches, key=lambda launch: launch[1]):
        known = starts.setdefault(what, [])
        if not known or time > max(LIKE_FACTOR * known[-1], known[-1] + LIKE_US):
            known.append(time)
    return [(what, sum(start <= time for start in starts[what])) for what, time in launches]


def choose_operators(launches: Sequence[tuple[Hashable, float]], operators: Sequence[int], share: float) -> list[int]:
    """Numbers of operators, the costliest launch first: together they launch each of the costliest at least once.

    `operators[i]` launched `launches[i]`. Of all that launch a kernel, the operator with least else beside it is taken.
    """
    of_operator: dict[int, list[tuple[Hashable, float]]] = {}
    for launch, number in zip(launches, operators, strict=True):
        if number >= 0:
            of_operator.setdefault(number, []).append(launch)
    cheapest: dict[Hashable, int] = {}
    for number, group in sorted(of_operator.items(), key=lambda kv: (len(kv[1]), sum(t for _, t in kv[1]))):
        for what, _ in group:
            cheapest.setdefault(what, number)
    chosen: list[int] = []
    seen: set[Hashable] = set()
    for what in costliest(launches, share):
        if what in cheapest and what not in seen:
            chosen.append(cheapest[what])
            seen.update(w for w, _ in of_operator[cheapest[what]])
    return chosen
