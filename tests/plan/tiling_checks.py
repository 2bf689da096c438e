"""Run by test_tiling.py with Triton's interpreter on: measures the tiles of a small network's own convolutions."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch.nn import functional as F

from tests.factories.networks import REWRITING
from voxtune.kernels import measured_tiles
from voxtune.plan.build import build
from voxtune.plan.plan import Plan
from voxtune.plan.tiling import load_tiles, measure_tiles


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv3d(16, 16, 3, padding=1), nn.Conv3d(16, 16, 3, padding=1)
        self.down, self.up = nn.Conv3d(16, 16, 3, stride=2, padding=1), nn.ConvTranspose3d(16, 16, 2, 2)

    def forward(self, x):
        return self.second(F.relu(self.up(F.relu(self.down(F.relu(self.first(x)))))))


def in_turns(first, second, device, seconds):
    """Every second candidate is reported as faster: times of the interpreter say nothing about a GPU."""
    first(), second()
    return 2.0, 1.0 if next(order) % 2 else 3.0


order = iter(range(1000))
torch.manual_seed(0)
net, x = Net().eval(), torch.randn(1, 16, 4, 6, 8)
fast = build(net, (x,), None, Plan.of("fp16", *REWRITING), twin=True)
before = fast(x)
first = measure_tiles(fast, ((x,), {}), 600.0, timer=in_turns)
after = fast(x)
again = measure_tiles(fast, ((x,), {}), 600.0, timer=in_turns)
with measured_tiles.recording() as choices:
    fast(x)
device = torch.device("cpu")
used = [measured_tiles.chosen(c.kernel, c.shape, x.half(), lambda c=c: c.tile) != c.tile for c in choices.values()]  # type: ignore[misc]
load_tiles(device)
json.dump(
    {
        "measured": len(first.times),
        "changed": len(first.changed),
        "tried": [t.tried for t in first.times],
        "again": len(again.times),
        "used": sum(used),
        "difference": float((after - before).norm() / before.norm()),
        "report": first.report(),
    },
    sys.stdout,
)
