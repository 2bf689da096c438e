"""In-place writes into views: what functionalisation leaves of them is resolved to reads of the values that were written.

`a, b = x.chunk(2, 1); a.mul_(b.sigmoid_())` is captured as copies of the whole of x with one half replaced, of which later
operators read the halves again. A read of the range that was written is the value itself; a read of any other range skips the
copy; a copy that is still read whole is the concatenation of its parts. Piece of cleanup. Exact."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torch import fx

from voxtune.plan.graph import Captured, argument, aten, is_call, shape, value

SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)


@dataclass(frozen=True)
class ViewRange:
    """The part of `base` that a node reads or replaces: indices of one dimension, which `select` and `unbind` remove."""

    base: fx.Node
    dim: int
    indices: range
    removes: bool

    @property
    def whole(self) -> bool:
        return not self.removes and self.indices == range(shape(self.base)[self.dim])

    def within(self, other: ViewRange) -> range | None:
        """This window's indices as positions in another one that contains them, or None."""
        mine, theirs = self.indices, other.indices
        if not len(mine) or any(i not in theirs for i in (mine[0], mine[-1])):
            return None
        first = theirs.index(mine[0])
        if len(mine) == 1:
            return range(first, first + 1)
        if mine[1] not in theirs:
            return None
        step = theirs.index(mine[1]) - first
        return range(first, first + step * len(mine), step)

    def meets(self, other: ViewRange) -> bool:
        smaller, larger = sorted((self.indices, other.indices), key=len)
        return any(i in larger for i in smaller)


def resolve_scatters(captured: Captured) -> int:
    """Replaces copies with a part replaced; how many there were."""
    before = len(captured.nodes(aten.slice_scatter.default, aten.select_scatter.default))
    if not before:
        return 0
    for node in list(captured.graph.nodes):
        if is_call(node, aten.copy.default) and _alike(node.args[0], node.args[1]):
            captured.replace(node, node.args[1])
        elif (window := _read(node)) is not None and _scatter(window.base) is not None:
            captured.replace(node, _resolved(captured, node, window))
    # The last one first: it takes the values of those before it, which then nothing reads.
    captured.graph.eliminate_dead_code()
    for node in reversed(list(captured.graph.nodes)):
        if (written := _scatter(node)) is not None and node.users and (written.whole or written.indices.step == 1):
            captured.replace(node, node.args[1] if written.whole else _joined(captured, node, written.dim))
        if _scatter(node) is not None and not node.users:
            captured.graph.erase_node(node)
    captured.refresh()
    return before - len(captured.nodes(aten.slice_scatter.default, aten.select_scatter.default))


def _alike(one: Any, other: Any) -> bool:
    a, b = value(one), value(other)
    return a is not None and b is not None and (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _read(node: fx.Node) -> ViewRange | None:
    """What a node reads, if it is a view of one range of a dimension."""
    if is_call(node, aten.slice.Tensor, aten.select.int):
        return _window(node, node.args[0])
    if not is_call(node, operator.getitem) or not is_call(node.args[0], *SPLITS):
        return None
    split: Any = node.args[0]
    index: Any = node.args[1]
    source, dim = split.args[0], argument(split, "dim")
    dim %= len(shape(source))
    size = shape(source)[dim]
    if is_call(split, aten.unbind.int):
        return ViewRange(source, dim, range(size)[index : index + 1], removes=True)
    if is_call(split, aten.split.Tensor):
        step = argument(split, "split_size")
        starts = list(range(0, size, step)) if step else [0]
        ends = [*starts[1:], size]
    else:
        ends = list(accumulate(argument(split, "split_sizes")))
        starts = [0, *ends[:-1]]
    return ViewRange(source, dim, range(starts[index], ends[index]), removes=False)


def _scatter(node: Any) -> ViewRange | None:
    """What a node replaces by its second argument, which is of the same type, in a copy of its first."""
    if not is_call(node, aten.slice_scatter.default, aten.select_scatter.default):
        return None
    base, source = value(node.args[0]), value(node.args[1])
    return (
        _window(node, node.args[0]) if base is not None and source is not None and base.dtype == source.dtype else None
    )


def _window(node: fx.Node, base: Any) -> ViewRange | None:
    dim = argument(node, "dim")
    if not shape(base) or not isinstance(dim, int):
        return None
    dim %= len(shape(base))
    size = shape(base)[dim]
    if is_call(node, aten.select.int, aten.select_scatter.default):
        index = argument(node, "index")
        return (
            ViewRange(base, dim, range(index % size, index % size + 1), removes=True)
            if isinstance(index, int)
            else None
        )
    limits = [argument(node, name) for name in ("start", "end", "step")]
    if not all(limit is None or isinstance(limit, int) for limit in limits):
        return None
    return ViewRange(base, dim, range(size)[slice(*limits)], removes=False)


def _resolved(captured: Captured, node: fx.Node, read: ViewRange) -> fx.Node:
    """The node itself, or an equal one that reads behind the copies."""
    base = read.base
    while (written := _scatter(base)) is not None and written.dim == read.dim:
        if not read.meets(written):
            base = written.base
            continue
        positions = read.within(written)
        if positions is None:
            break
        return _part(captured, node, base.args[1], read, positions, written)
    return node if base is read.base else _view(captured, node, base, read.dim, read.indices, removes=read.removes)


def _part(
    captured: Captured, node: fx.Node, source: Any, read: ViewRange, positions: range, written: ViewRange
) -> fx.Node:
    """The part of a written value that is read."""
    if written.removes:
        return source if read.removes else captured.insert(node, aten.unsqueeze.default, source, read.dim)
    return _view(captured, node, source, read.dim, positions, removes=read.removes)


def _view(captured: Captured, before: fx.Node, source: fx.Node, dim: int, indices: range, *, removes: bool) -> fx.Node:
    if removes:
        return captured.insert(before, aten.select.int, source, dim, indices[0])
    if indices == range(shape(source)[dim]):
        return source
    new = (source, dim, indices.start, indices.stop, *((indices.step,) if indices.step != 1 else ()))
    return captured.insert(before, aten.slice.Tensor, *new)


@dataclass(frozen=True)
class Piece:
    """Consecutive indices of `source`; a source that lacks the dimension is one index."""

    source: fx.Node
    first: int
    length: int
    lacks: bool = False


def _joined(captured: Captured, node: fx.Node, dim: int) -> fx.Node:
    """A copy with parts replaced, as the concatenation of its parts."""
    chain, base = list[fx.Node](), node
    while (written := _scatter(base)) is not None and written.dim == dim and written.indices.step == 1:
        chain.append(base)
        base = written.base
    parts = [Piece(base, 0, shape(base)[dim])]
    for scatter in reversed(chain):
        parts = _replaced(parts, scatter)
    views = [_piece(captured, node, part, dim) for part in parts]
    return views[0] if len(views) == 1 else captured.insert(node, aten.cat.default, views, dim)


def _replaced(parts: list[Piece], scatter: fx.Node) -> list[Piece]:
    written = _scatter(scatter)
    assert written is not None
    start, stop = written.indices.start, max(written.indices.start, written.indices.stop)
    before, after, at = list[Piece](), list[Piece](), 0
    for part in parts:
        if (length := min(part.length, start - at)) > 0:
            before.append(replace(part, length=length))
        if (skipped := max(0, stop - at)) < part.length:
            after.append(replace(part, first=part.first + skipped, length=part.length - skipped))
        at += part.length
    new = [Piece(scatter.args[1], 0, stop - start, written.removes)] if stop > start else []  # type: ignore[arg-type]
    return [*before, *new, *after]


def _piece(captured: Captured, before: fx.Node, part: Piece, dim: int) -> fx.Node:
    if part.lacks:
        return captured.insert(before, aten.unsqueeze.default, part.source, dim)
    return _view(captured, before, part.source, dim, range(part.first, part.first + part.length), removes=False)
