from __future__ import annotations

import time

import torch
from torch import nn

from voxtune.profile.isolated_ops import count_alone, note_operators, tensor_like
from voxtune.profile.op_numbering import Counting

CPU = torch.device("cpu")


def a_step():
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
    counting = Counting(lambda: log.append("on"), lambda: log.append("off"))
    return count_alone(order, note_operators(step, order), counting, deadline, CPU), log


def test_every_operator_of_a_training_step_runs_alone() -> None:
    numbers = list(range(1000))
    step = a_step()
    noted = note_operators(step, numbers)
    assert any("convolution_backward" in str(n.function) for n in noted.values())
    assert any("_foreach" in str(n.function) for n in noted.values())
    told, log = count(step, list(noted))
    assert told["failed"] == {} and told["operators"] == len(noted) and not told["expired"]
    assert log == ["on", "off"] * len(noted)


def test_tensors_are_made_in_the_form_they_had() -> None:
    base = torch.randn(4, 6)
    index = torch.tensor([2, 0, 3])
    seen = note_operators(lambda: (base[:, 1:].t().add(1), base.index_select(0, index)), range(100))
    forms = {str(n.function): n for n in seen.values()}
    (made, _), _ = forms["aten.add.Tensor"].arguments()
    assert made.shape == (5, 4) and made.stride() == (1, 6) and made.storage_offset() == 1
    (table, _, kept), _ = forms["aten.index_select.default"].arguments()
    assert torch.equal(kept, index) and table.shape == base.shape
    assert not torch.equal(table, base)  # values are no part of the form, indices are


def test_arguments_that_shared_memory_share_it_again() -> None:
    base = torch.zeros(8)
    seen = note_operators(lambda: torch.add(base[:4], base[4:]), range(100))
    (left, right), _ = next(n for n in seen.values() if "add" in str(n.function)).arguments()
    assert left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    assert tensor_like(torch.zeros(0, 3)).extent == 0


def test_counting_stops_between_operators_at_the_deadline() -> None:
    told, log = count(a_step(), [2, 0, 1], deadline=time.monotonic() - 1)
    assert told["expired"] and told["operators"] == 0 and log == []


def test_an_operator_that_fails_costs_itself_alone() -> None:
    step = a_step()
    noted = note_operators(step, range(6))
    noted[1].args = ("no tensor",)
    log: list[str] = []
    counting = Counting(lambda: log.append("on"), lambda: log.append("off"))
    told = count_alone([0, 1, 99, 2], noted, counting, None, CPU)
    assert told["operators"] == 2 and set(told["failed"]) == {"1", "99"}
    assert log.count("on") == log.count("off") == 3
