"""Version 2 of the simulated cohort on a GPU: the same subject as on a CPU, up to rounding. Needs no template files."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from voxtune.data import simulation
from voxtune.data.atlas import DEPTH_STEP, Atlas
from voxtune.data.contrast import KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Balls(Atlas):
    """A ball of white matter in a shell of grey matter in one of fluid."""

    def smoothed(self, spacing_mm):
        return self


def balls():
    z, y, x = np.meshgrid(*[np.arange(-80.0, 81.0)] * 3, indexing="ij")
    radius = np.sqrt(x**2 + y**2 + z**2)
    brain, grey = radius < 70, (radius < 66) & (radius > 58)
    depth = np.clip((70 - radius) / (255 * DEPTH_STEP), 0, 1)
    maps = np.stack([grey, radius <= 58, brain, depth]).astype(np.float32)
    sites = np.array([[0.0, 20.0, 10.0], [30.0, -20.0, 0.0]])
    return Balls(maps=torch.from_numpy(maps), origin=np.array([-80.0, -97.0, -75.0]), sites=sites)


def test_a_gpu_simulates_the_same_subject(monkeypatch):
    shared = balls()
    monkeypatch.setattr(simulation, "atlas", lambda: shared)
    here, there = (
        simulation.simulate(0, 3, (64,) * 3, kinds=KINDS, healthy_fraction=0.0, device=d) for d in ("cpu", "cuda")
    )
    assert (here.labels_DHW != there.labels_DHW).mean() < 1e-4 and (here.labels_DHW == 2).any()
    for kind in KINDS:
        gap = np.abs(here.images_DHW[kind] - there.images_DHW[kind])
        assert gap.mean() < 1e-4 and np.quantile(gap, 0.999) < 0.01, kind


def test_a_gpu_takes_less_than_a_second(monkeypatch, record_property):
    shared = balls()
    monkeypatch.setattr(simulation, "atlas", lambda: shared)
    for index in range(2):
        simulation.simulate(0, index, (128,) * 3, kinds=KINDS, device="cuda")
    started = time.perf_counter()
    for index in range(8):
        simulation.simulate(0, index, (128,) * 3, kinds=KINDS, device="cuda")
    seconds = (time.perf_counter() - started) / 8
    record_property("seconds_per_subject", round(seconds, 3))
    assert seconds < 1.0
