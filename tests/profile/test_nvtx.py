"""NVTX ranges per module, with a recorder in place of torch.cuda.nvtx."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from voxtune.profile.ncu import Ncu
from voxtune.profile.nvtx import nvtx_ranges


class Recorder:
    def __init__(self):
        self.events, self.open, self.number = [], [], 0

    def range_push(self, name):
        self.events.append(("push", name))
        self.open.append(name)

    def range_pop(self):
        self.events.append(("pop", self.open.pop()))

    def range_start(self, name):
        self.number += 1
        self.events.append(("start", name, self.number))
        return self.number

    def range_end(self, number):
        self.events.append(("end", number))

    def mark(self, name):
        self.events.append(("mark", name))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2))


def test_forward_ranges_nest_and_backward_ranges_end():
    net, recorder = network(), Recorder()
    x = torch.randn(5, 3)
    expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    with nvtx_ranges(net, recorder):
        gradients = torch.autograd.grad(net(x).sum(), list(net.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
    assert recorder.events[:6] == [
        ("push", "Sequential"), ("push", "0"), ("pop", "0"), ("push", "1"), ("pop", "1"), ("push", "2"),
    ]  # fmt: skip
    backward = [e for e in recorder.events if e[0] not in ("push", "pop")]
    started = {e[2]: e[1] for e in backward if e[0] == "start"}
    ended = [e[1] for e in backward if e[0] == "end"]
    assert sorted(ended) == sorted(started) and set(started.values()) == {"1 (backward)", "2 (backward)"}
    # The image needs no gradient, so the first module and the whole have only a start.
    assert {e[1] for e in backward if e[0] == "mark"} == {"0 (backward)", "Sequential (backward)"}


def test_hooks_are_removed_and_inference_has_forward_ranges_only():
    net, recorder = network(), Recorder()
    with nvtx_ranges(net, recorder), torch.no_grad():
        net(torch.randn(1, 3))
    assert {e[0] for e in recorder.events} == {"push", "pop"} and not recorder.open
    count = len(recorder.events)
    net(torch.randn(1, 3)).sum().backward()
    assert len(recorder.events) == count


def test_an_error_in_a_module_closes_its_ranges():
    net, recorder = network(), Recorder()
    with nvtx_ranges(net, recorder), pytest.raises(RuntimeError):
        net(torch.randn(1, 7))
    assert not recorder.open


def test_nsight_compute_records_nvtx_on_request(tmp_path):
    plain, marked = (Ncu(path="ncu", nvtx=nvtx) for nvtx in (False, True))
    assert "--nvtx" not in plain.command(tmp_path / "r", ["worker"], metrics=["m"])
    assert "--nvtx" in marked.command(tmp_path / "r", ["worker"], metrics=["m"])
