"""Matches the launches of one step as two tools recorded them, and selects launches for the slow counters.

torch.profiler and Nsight Compute spell template arguments differently. They agree on the function's bare name, the grid,
the block and the order of launch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from functools import lru_cache
from typing import NamedTuple

# Share of the step's time to count, a little more than the 99 and 90 % at which the tier is done.
SHARES = {"full": 0.992, "opcodes": 0.92}


class Key(NamedTuple):
    function: str
    grid: str
    block: str


@lru_cache(maxsize=16384)
def function_name(name: str) -> str:
    """The function of a demangled kernel name, without return type, namespace, template arguments and parameters."""
    depth, letters = 0, []
    text = name.replace("(anonymous namespace)", "_").replace("<unnamed>", "_")
    for i, letter in enumerate(text):
        if letter == "<":
            depth += 1
        elif letter == ">" and text[i - 1] != "-":
            depth -= 1
        elif letter == "(" and depth == 0:
            break
        elif depth == 0:
            letters.append(letter)
    return "".join(letters).strip().split("::")[-1].split(" ")[-1]


def launch_key(name: str, grid: str | None, block: str | None) -> Key:
    return Key(function_name(name), grid or "", block or "")


def align(left: Sequence[Hashable], right: Sequence[Hashable]) -> list[int | None]:
    """The position in `right` of each launch of `left`, in order; None where there is no match."""
    if list(left) == list(right):
        return list(range(len(left)))
    matches: list[int | None] = [None] * len(left)
    for block in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            matches[block.a + offset] = block.b + offset
    return matches


def most_expensive(launches: Sequence[tuple[Hashable, float]], share: float) -> list[Hashable]:
    """The fewest distinct launches that make up `share` of the time, longest first; `launches` are (launch, time)."""
    total: dict[Hashable, float] = {}
    for launch, time in launches:
        total[launch] = total.get(launch, 0.0) + time
    ranked = sorted(total, key=lambda k: -total[k])
    goal, reached = share * sum(total.values()), 0.0
    chosen: list[Hashable] = []
    for launch in ranked:
        if reached >= goal and chosen:
            break
        chosen.append(launch)
        reached += total[launch]
    return chosen


# Launches of one function, grid and block do the same work if their times differ by less than this factor, or this many
# microseconds.
LIKE_FACTOR, LIKE_US = 1.3, 3.0


def occurrence_classes(launches: Sequence[tuple[Hashable, float]]) -> list[tuple[Hashable, int]]:
    """The class of each (launch, time): the launch, and the number of its group of similar times.

    The times are needed: PyTorch's group norm uses the same grid for a tensor of 512 voxels and one of two million.
    """
    starts: dict[Hashable, list[float]] = {}
    for launch, time in sorted(launches, key=lambda item: item[1]):
        known = starts.setdefault(launch, [])
        if not known or time > max(LIKE_FACTOR * known[-1], known[-1] + LIKE_US):
            known.append(time)
    return [(launch, sum(start <= time for start in starts[launch])) for launch, time in launches]


def choose_operators(launches: Sequence[tuple[Hashable, float]], operators: Sequence[int], share: float) -> list[int]:
    """Numbers of operators, most expensive launch first, that together launch each of the most expensive at least once.

    `operators[i]` launched `launches[i]`. Of several operators with the same launch, the one with the fewest others is
    chosen.
    """
    of_operator: dict[int, list[tuple[Hashable, float]]] = {}
    for timed_launch, number in zip(launches, operators, strict=True):
        if number >= 0:
            of_operator.setdefault(number, []).append(timed_launch)
    cheapest: dict[Hashable, int] = {}
    for number, group in sorted(of_operator.items(), key=lambda kv: (len(kv[1]), sum(t for _, t in kv[1]))):
        for launch, _ in group:
            cheapest.setdefault(launch, number)
    chosen: list[int] = []
    seen: set[Hashable] = set()
    for launch in most_expensive(launches, share):
        if launch in cheapest and launch not in seen:
            chosen.append(cheapest[launch])
            seen.update(other for other, _ in of_operator[cheapest[launch]])
    return chosen
