"""The weight gradient of the convolution on the CPU: by Triton's interpreter against float64, and compiled for real GPUs."""

from __future__ import annotations

import random
from functools import partial

import pytest

from tests.factories.triton_checks import run_checks

run = partial(run_checks, "kernels/weight_gradient_checks.py")


@pytest.mark.parametrize(
    ("dtype", "kind", "extent"),
    [
        pytest.param("float16", "integers", "quick", marks=pytest.mark.slow),
        pytest.param("float16", "integers", "all", marks=pytest.mark.slow),
        pytest.param("float32", "integers", "all", marks=pytest.mark.slow),
        pytest.param("float32", "random", "all", marks=pytest.mark.slow),
        pytest.param("float16", "random", "all", marks=pytest.mark.slow),
    ],
)
def test_against_float64(dtype, kind, extent):
    rows = run("numerics", dtype, kind, extent, interpret=True)
    assert len(rows) >= (3 if extent == "quick" else 8)
    for row in rows:
        assert row["error"] < 1e-6 and row["reference"] < 1e-12, row
        assert row["exact"] or kind == "random", row
        assert row["pointers"], row


def test_gradient_of_the_operator():
    row = run("operator", interpret=True)
    assert all(error < 1e-3 for error in row["errors"].values()), row
    assert row["types"] == ["torch.float16"], "gradients have the type of the weight"
    assert row["calls"] == [False], "the plain kernel when requested; without a Hopper device its kernel is not used"
    assert row["applies"] is None
    assert all(row["reasons"]), row


@pytest.mark.parametrize("arch", [90, *[pytest.param(a, marks=pytest.mark.slow) for a in (80, 86, 89, 100, 120)]])
def test_compiles(arch):
    rows = run("plain", arch, interpret=False)
    assert len(rows) == (4 if arch >= 90 else 3)
    for row in rows:
        assert row["products"] and (row["bulk"] or row["wide"]) and not row["serialised"], row
        assert row["spills"] <= (32 if arch <= 90 else 128) and row["shared"] <= row["limit"], row


@pytest.mark.parametrize("extent", ["quick", pytest.param("all", marks=pytest.mark.slow)])
def test_compiles_for_hopper(extent):
    rows = run("hopper", extent, interpret=False)
    assert len(rows) == (2 if extent == "quick" else 5)
    for row in rows:
        assert row["products"] == 36 and row["bulk"] and not row["serialised"], row
        assert bool(row["loads_of_operand"]) == row["in_registers"], row
        assert row["spills"] <= 64 and row["steps"] == row["groups"] and not row["spills_in_steps"], row
        assert row["rings"] < row["shared"] <= row["rings"] + 1024 and row["shared"] <= row["limit"], row
        assert row["registers"] * 32 * (16 if row["groups"] == 3 else 8) <= 1 << 16, row


@pytest.mark.parametrize("form", ["", "ahead", "turns"])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
def test_no_plane_is_overwritten_before_it_is_read(stages, form):
    """The barriers of the Hopper kernel, replayed in random orders of the groups of warps and of the copies' completions."""
    from voxtune.kernels.conv3d_weight_gradient_hopper import MORE_PLANES

    for seed in range(30):
        order = random.Random(seed)
        depth = stages + order.choice([0, 0, 1, 5])
        steps = depth * order.randrange(1, 5)
        begin = order.randrange(3 * steps)
        end = order.randrange(begin, 3 * steps) + 1
        Replay(stages, MORE_PLANES, depth, steps, order, form).run(begin, end)
    with pytest.raises(AssertionError, match="overwritten"):
        for seed in range(30):
            Replay(stages, MORE_PLANES - 1, stages, 4 * stages, random.Random(seed), form).run(0, 8 * stages)


class Barrier:
    """Advances when the arrivals of a phase are complete, and the bytes that they announced."""

    def __init__(self, count):
        self.count, self.missing, self.bytes, self.phase = count, count, 0, 0

    def arrive(self, expected=0):
        assert self.missing > 0, "an arrival too many"
        self.missing -= 1
        self.add(expected)

    def add(self, count):
        self.bytes += count
        if not self.missing and not self.bytes:
            self.missing, self.phase = self.count, self.phase + 1

    def passed(self, parity):
        return (self.phase - 1) & 1 == parity


class Replay:
    def __init__(self, stages, more_planes, depth, steps, order, form):
        self.stages, self.depth, self.steps, self.order, self.form = stages, depth, steps, order, form
        self.turns = [Barrier(1) for _ in range(3)]
        self.full = [Barrier(1) for _ in range(stages)]
        self.empty = [Barrier(3) for _ in range(stages)]
        self.planes, self.readers = [None] * (stages + more_planes), [0] * (stages + more_planes)
        self.dy, self.flying = [None] * stages, []

    def copy(self, begin, end):
        plane = 0
        for unit in range(begin, end):
            slot, d = (unit - begin) % self.stages, unit % self.depth
            while not self.empty[slot].passed(((unit - begin) // self.stages & 1) ^ 1):
                yield
            fresh = d == 0 or unit == begin
            self.full[slot].arrive(4 if fresh else 2)
            self.dy[slot] = None
            self.flying.append((self.full[slot], self.dy, slot, unit))
            for dd in (0, 1, 2) if fresh else (2,):
                at = plane % len(self.planes)
                assert not self.readers[at], "a plane is overwritten"
                self.planes[at] = None
                self.flying.append((self.full[slot], self.planes, at, (unit - d, d + dd)))
                plane += 1
                yield

    def multiply(self, group, begin, end):
        plane, reading = 0, []  # of steps that are not released: slot, unit, planes
        for unit in range(begin, end):
            step, d = unit - begin, unit % self.depth
            slot = step % self.stages
            while not self.full[slot].passed(step // self.stages & 1):
                yield
            while self.form == "turns" and not self.turns[group].passed(step & 1 if group else (step & 1) ^ 1):
                yield
            reading.append((slot, unit, [(plane + dd) % len(self.planes) for dd in range(3)]))
            for at in reading[-1][2]:
                self.readers[at] += 1
            if self.form == "turns":
                self.turns[(group + 1) % 3].arrive()
            for _ in range(self.order.randrange(4)):
                for at, of, taps in reading:
                    planes = [(of - of % self.depth, of % self.depth + dd) for dd in range(3)]
                    assert self.dy[at] == of and [self.planes[tap] for tap in taps] == planes, "overwritten"
                yield
            last = (unit + 1) % self.steps == 0 or unit + 1 == end
            for at, _, taps in reading[: None if last or self.form != "ahead" else -1]:
                for tap in taps:
                    self.readers[tap] -= 1
                self.empty[at].arrive()
                yield
            reading = [] if last or self.form != "ahead" else reading[-1:]
            plane += 3 if d + 1 == self.depth else 1

    def run(self, begin, end):
        running = [self.copy(begin, end), *(self.multiply(group, begin, end) for group in range(3))]
        speeds = [self.order.random() + 0.01 for _ in running]
        turns = 0
        while running:
            turns += 1
            assert turns < 10_000 + 2_000 * (end - begin), "a wait that never ends"
            if self.flying and self.order.random() < 0.3:
                full, memory, at, value = self.flying.pop(self.order.randrange(len(self.flying)))
                memory[at] = value
                full.add(-1)
            i = self.order.choices(range(len(running)), speeds)[0]
            try:
                next(running[i])
            except StopIteration:
                del running[i], speeds[i]
        assert not self.flying
