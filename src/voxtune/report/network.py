"""The picture of a network: its blocks as a U, with channels, FLOPs and bytes of each."""

from __future__ import annotations

import math

from voxtune.analysis.network import NetworkBlock, NetworkPlan
from voxtune.report.canvas import INK, LINE, MUTED, Canvas
from voxtune.report.numbers import clip, number
from voxtune.report.palette import CLASSES

WIDTH, ROW, HEIGHT, GAP, INDENT = 960.0, 64.0, 52.0, 90.0, 14.0
FLOPS, BYTES = CLASSES["conv_fprop"], CLASSES["layout"]


def draw_network(plan: NetworkPlan, title: str, subtitle: str) -> str:
    """The encoder at the left, the decoder at the right, what is between them below; without skips, one column."""
    places = layout(plan)
    maps = [b for b in plan.blocks if len(b.shape) > 1]
    most_flops = max((b.flops for b in maps), default=0.0) or 1.0
    most_bytes = max((b.bytes for b in maps), default=0.0) or 1.0
    canvas = Canvas(WIDTH)
    canvas.text(0, 16, title, size=16, bold=True)
    canvas.text(0, 36, subtitle, size=12, fill=MUTED)
    canvas.rect(0, 46, 10, 10, FLOPS)
    canvas.text(15, 55, "FLOPs", size=12)
    canvas.rect(75, 46, 10, 10, BYTES)
    canvas.text(90, 55, "bytes of operands and results; bars relative to the largest block", size=12)
    top, width = 76.0, (WIDTH - GAP) / 2
    sides = {b.shape[1] for b in maps}
    levels = {side: level for level, side in enumerate(sorted(sides, reverse=True))}
    boxes: dict[int, tuple[float, float, float]] = {}
    for i, (column, row) in places.items():
        indent = INDENT * levels[plan.blocks[i].shape[1]]
        x = {"left": indent, "right": width + GAP, "middle": (WIDTH - width) / 2}[column]
        box = (x, top + ROW * row, width - (indent if column != "middle" else 0.0))
        boxes[i] = box
        _box(canvas, plan.blocks[i], box, most_flops, most_bytes)
    for source, reader in encoder_skips(plan):
        if source in boxes and reader in boxes:
            (x, y, w), (to_x, to_y, _) = boxes[source], boxes[reader]
            _arrow(canvas, x + w + 2, y + HEIGHT / 2, to_x - 2, to_y + HEIGHT / 2)
    bottom = top + ROW * (max((row for _, row in places.values()), default=0) + 1)
    small = [b for b in plan.blocks if len(b.shape) <= 1]
    for line in _rest(plan, small):
        bottom += 16
        canvas.text(0, bottom, line, size=11, fill=MUTED)
    return canvas.finish(bottom + 14, title)


def encoder_skips(plan: NetworkPlan) -> list[tuple[int, int]]:
    """The skips whose source comes before the first block that reads one: not those within the decoder."""
    first = min((reader for _, reader in plan.skips), default=0)
    return [(source, reader) for source, reader in plan.skips if source < first]


def layout(plan: NetworkPlan) -> dict[int, tuple[str, int]]:
    """The column and row of each block with a feature map; readers of a skip are in the row of its source."""
    maps = [i for i, b in enumerate(plan.blocks) if len(b.shape) > 1]
    source_of = dict(reversed([(reader, source) for source, reader in encoder_skips(plan)]))
    readers = [i for i in maps if i in source_of]
    if not readers:
        return {i: ("middle", row) for row, i in enumerate(maps)}
    last = max(source_of.values())
    left = [i for i in maps if i <= last]
    middle = [i for i in maps if last < i < readers[0]]
    rows = {i: row for row, i in enumerate(left)}
    right: dict[int, int] = {}
    row = len(left)
    for i in (i for i in maps if i >= readers[0]):
        # Upwards from the bottom; a block without a skip of its own is one row above the one before it.
        row = min(rows.get(source_of.get(i, -1), row), row - 1)
        right[i] = row
    shift = max(0, -min(right.values()))
    out = {i: ("left", row + shift) for i, row in rows.items()} | {i: ("right", r + shift) for i, r in right.items()}
    return out | {i: ("middle", len(left) + shift + n) for n, i in enumerate(middle)}


def _box(
    canvas: Canvas, block: NetworkBlock, box: tuple[float, float, float], most_flops: float, most_bytes: float
) -> None:
    x, y, width = box
    tip = f"{block.name}: {block.kinds}; {block.parameters:,} parameters"
    canvas.rect(x, y, width, HEIGHT, "none", edge=LINE, tip=tip)
    kinds = clip(block.kinds, max(10, int((width - 18) / 6.4) - len(block.name) - 2))
    canvas.text(x + 8, y + 15, block.name, size=11.5, bold=True)
    canvas.text(x + width - 8, y + 15, kinds, size=10.5, fill=MUTED, anchor="end")
    canvas.text(x + 8, y + 30, f"{block.channels} channels, {_sides(block.shape[1:])}", size=11, fill=INK)
    facts = f"{_si(block.flops)}FLOP, {_si(block.bytes)}B"
    canvas.text(x + width - 8, y + 30, facts, size=11, fill=INK, anchor="end")
    for part, colour, at in ((block.flops / most_flops, FLOPS, 36.0), (block.bytes / most_bytes, BYTES, 43.0)):
        canvas.rect(x + 8, y + at, (width - 16) * part, 5, colour)


def _arrow(canvas: Canvas, x: float, y: float, to_x: float, to_y: float) -> None:
    canvas.line(x, y, to_x - 5, to_y, stroke=MUTED, dash="4 3")
    angle = math.atan2(to_y - y, to_x - x)
    ends = [(to_x - 7 * math.cos(angle + turn), to_y - 7 * math.sin(angle + turn)) for turn in (0.45, -0.45)]
    canvas.polygon([(to_x, to_y), *ends], MUTED)


def _sides(sides: tuple[int, ...]) -> str:
    return " × ".join(map(str, sides))


def _si(value: float) -> str:
    """A number with its SI prefix, such as "927.7 G"."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{number(value / factor, 1)} {prefix}"
    return f"{number(value, 0)} "


def _rest(plan: NetworkPlan, small: list[NetworkBlock]) -> list[str]:
    lines = (
        [f"Between blocks (concatenations and other operators): {_si(plan.rest.bytes)}B."] if plan.rest.bytes else []
    )
    if small:
        parts = ", ".join(f"{b.name} ({b.kinds}, {_si(b.flops)}FLOP)" for b in small)
        lines.append(f"Without a feature map: {parts}.")
    return lines
