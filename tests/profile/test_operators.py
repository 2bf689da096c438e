from __future__ import annotations

import time
from contextlib import nullcontext

import torch
from torch import nn

from voxtune.profile.operators import CounterSwitch, NumberedOperators, count_isolated, record_calls, tensor_spec

CPU = torch.device("cpu")


def make_step():
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    optimizer = torch.optim.Adam(network.parameters(), foreach=True)
    x = torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last)

    def step() -> None:
        optimizer.zero_grad()
        network(x).sum().backward()
        optimizer.step()

    step()
    return step


def count(step, order, *, deadline=None):
    log: list[str] = []
    counters = CounterSwitch(lambda: log.append("on"), lambda: log.append("off"))
    return count_isolated(order, record_calls(step, order), counters, deadline, CPU), log


def test_operators_have_the_same_numbers_in_every_step() -> None:
    step, seen = make_step(), []

    class Recorder(NumberedOperators):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return super().__torch_dispatch__(func, types, args, kwargs)

    counts = []
    for _ in range(2):
        mode = Recorder(lambda _n: nullcontext())
        with mode:
            step()
        counts.append(mode.count)
    assert counts[0] == counts[1] > 10
    assert any("convolution_backward" in s for s in seen)  # the backward pass is numbered too


def test_every_operator_of_a_training_step_runs_in_isolation() -> None:
    numbers = list(range(1000))
    step = make_step()
    calls = record_calls(step, numbers)
    assert any("convolution_backward" in str(n.function) for n in calls.values())
    assert any("_foreach" in str(n.function) for n in calls.values())
    result, log = count(step, list(calls))
    assert result["failed"] == {} and result["operators"] == len(calls) and not result["expired"]
    assert log == ["on", "off"] * len(calls)


def test_new_tensors_have_the_recorded_form() -> None:
    base = torch.randn(4, 6)
    index = torch.tensor([2, 0, 3])
    seen = record_calls(lambda: (base[:, 1:].t().add(1), base.index_select(0, index)), range(100))
    forms = {str(n.function): n for n in seen.values()}
    (tensor, _), _ = forms["aten.add.Tensor"].arguments()
    assert tensor.shape == (5, 4) and tensor.stride() == (1, 6) and tensor.storage_offset() == 1
    (table, _, indices), _ = forms["aten.index_select.default"].arguments()
    assert torch.equal(indices, index) and table.shape == base.shape
    assert not torch.equal(table, base)  # floating-point values are not copied, indices are


def test_arguments_that_shared_memory_share_it_again() -> None:
    base = torch.zeros(8)
    seen = record_calls(lambda: torch.add(base[:4], base[4:]), range(100))
    (left, right), _ = next(n for n in seen.values() if "add" in str(n.function)).arguments()
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert tensor_spec(torch.zeros(0, 3)).extent == 0


def test_counting_stops_between_operators_at_the_deadline() -> None:
    result, log = count(make_step(), [2, 0, 1], deadline=time.monotonic() - 1)
    assert result["expired"] and result["operators"] == 0 and log == []


def test_an_operator_that_fails_does_not_affect_the_others() -> None:
    step = make_step()
    calls = record_calls(step, range(6))
    calls[1].args = ("no tensor",)
    log: list[str] = []
    counters = CounterSwitch(lambda: log.append("on"), lambda: log.append("off"))
    result = count_isolated([0, 1, 99, 2], calls, counters, None, CPU)
    assert result["operators"] == 2 and set(result["failed"]) == {"1", "99"}
    assert log.count("on") == log.count("off") == 3
