from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn

from voxtune.profile.op_numbering import NumberedOperators


def make_step() -> object:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU())
    optimizer = torch.optim.Adam(network.parameters(), foreach=True)
    x = torch.randn(1, 3, 8, 8)

    def step() -> None:
        optimizer.zero_grad()
        network(x).sum().backward()
        optimizer.step()

    step()
    return step


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
