"""Tiles measured on a real GPU: the same result, remembered, and a plan that is not slower with them."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.plan.test_gpu_compete import CUDA, SIDE, Net, median_ms
from voxtune.kernels import measured_tiles
from voxtune.plan.build import PlanTarget
from voxtune.plan.run import compilers, kernels_ready
from voxtune.plan.search import candidates
from voxtune.plan.tiling import measure_tiles

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Measurements: run pytest with --log-cli-level=INFO.
log = logging.getLogger("voxtune")


@pytest.fixture(autouse=True)
def _own_table(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path))
    measured_tiles.forget()
    yield
    measured_tiles.forget()


def test_tiles_are_measured_and_remembered():
    torch.manual_seed(0)
    net = Net().eval().cuda()
    inputs = ((torch.randn(1, 2, SIDE, SIDE, SIDE, device=CUDA), torch.randn(1, 64, device=CUDA)), {})
    target, plan = PlanTarget(net, inputs), candidates("bf16", CUDA)[0].plan

    def built():
        network = target.build(plan)
        with kernels_ready(network, inputs):
            pass
        return network

    with compilers(CUDA):
        before = built()
        first = before(*inputs[0]).clone()
        tiles = measure_tiles(before, inputs, 60.0)
    log.info("%s", tiles.report())
    assert tiles.times and tiles.left == 0 and all(t.tried > 0 and t.after_ms <= t.before_ms for t in tiles.times)
    assert not measure_tiles(before, inputs, 60.0).times, "remembered for the card"
    after = built()
    assert float((after(*inputs[0]) - first).norm() / first.norm()) < 1e-2
    ms_before, ms_after = median_ms([before, after], inputs[0])
    assert ms_after <= 1.03 * ms_before
