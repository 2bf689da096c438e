from __future__ import annotations

from tests.factories.traces import Events, baseline_trace
from voxtune.profile.attribution import Attribution
from voxtune.profile.memory import SAMPLES, KnownStorages, memory_rows, peak_bytes
from voxtune.profile.trace import NODE, STEP, parse_trace


def test_memory_is_classified_by_address_and_lifetime() -> None:
    events = Events()
    events.range(f"{STEP}0", 0, 1000)
    events.memory(5, 77, -40, 160)  # the gradient of the previous step is freed
    events.host("aten::conv3d", 10, 50)
    events.memory(20, 1, 500, 660)  # workspace
    events.memory(25, 2, 300, 960)  # output: an activation
    events.memory(40, 1, -500, 460)
    events.host(f"{NODE}ConvolutionBackward0", 200, 300, thread=2)
    events.host("aten::convolution_backward", 210, 290, thread=2)
    events.memory(220, 3, 40, 500, thread=2)  # the weight's gradient
    events.memory(230, 4, 70, 570, thread=2)  # an activation's gradient
    events.memory(295, 2, -300, 270, thread=2)
    events.memory(298, 4, -70, 200, thread=2)
    trace = parse_trace(events.events)
    before = KnownStorages({10: ("weights", 100), 11: ("inputs", 60), 77: ("gradients", 40)})
    after = KnownStorages({10: ("weights", 100), 11: ("inputs", 60), 3: ("gradients", 40)})
    rows = memory_rows(trace, [before, after], Attribution(trace, {}).phase_at, device=1)

    def most(category: str) -> float:
        return max(r["bytes"] for r in rows if r["category"] == category)

    assert {c: most(c) for c in ("weights", "inputs", "activations", "workspace", "gradients")} == {
        "weights": 100,
        "inputs": 60,
        "activations": 300,
        "workspace": 500,
        "gradients": 110,
    }
    assert peak_bytes(rows) == 960
    last = max(r["time_us"] for r in rows)
    assert {r["category"]: r["bytes"] for r in rows if r["time_us"] == last and r["bytes"]} == {
        "weights": 100,
        "inputs": 60,
        "gradients": 40,
    }


def test_the_peak_of_a_recorded_step_is_that_of_the_allocator() -> None:
    trace = baseline_trace()
    rows = memory_rows(trace, [KnownStorages(), KnownStorages()], Attribution(trace, {}).phase_at, device=1)
    highest = max(a.total for a in trace.allocations)
    assert peak_bytes(rows) == highest > 18 * 2**30
    assert len({r["time_us"] for r in rows}) <= SAMPLES + 1
    activations = max(r["bytes"] for r in rows if r["category"] == "activations")
    assert activations > 0.7 * highest
