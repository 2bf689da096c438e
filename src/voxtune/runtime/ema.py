"""The exponential moving average of a network's weights, which is what gets sampled."""

from __future__ import annotations

import copy

import torch
from torch import nn


class Ema:
    """Is the weights before step `start`; from there on it moves to them by 1 - decay every `every` steps."""

    def __init__(self, network: nn.Module, *, decay: float, every: int, start: int):
        self.decay, self.every, self.start = decay, every, start
        self.network = copy.deepcopy(network).eval().requires_grad_(False)

    @torch.no_grad()
    def update(self, network: nn.Module, step: int) -> None:
        """Takes in the weights after step `step` (the first is 1)."""
        if step >= self.start and step % self.every:
            return
        weight = 1 - self.decay if step >= self.start else 1.0
        pairs = zip(self.network.state_dict().values(), network.state_dict().values(), strict=True)
        for mean, value in pairs:
            if weight == 1.0 or not mean.is_floating_point():
                mean.copy_(value)
            else:
                mean.lerp_(value, weight)
