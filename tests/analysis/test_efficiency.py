from __future__ import annotations

import pytest

from tests.factories.sessions import counted, session
from voxtune.analysis.efficiency import efficiency
from voxtune.runtime.describe import forward_flops
from voxtune.workloads import workload


def make(name, mode="sample", **more):
    phases = ("forward", "backward", "optimizer") if mode == "train" else ("forward",)
    rows = [counted(i * 10, 10, "conv_fprop", ipc=2.0, phase=p) for i, p in enumerate(phases)]
    return session(rows, name=f"{name} {mode}", workload=name, mode=mode, bare=[2.0] * 3, **more)


def test_share_of_peak_comes_from_the_networks_flops():
    table = efficiency([make("med-ddpm", size=[32, 32, 32]), make("med-ddpm", "train", size=[32, 32, 32], batch=1)])
    flops = forward_flops(workload("med-ddpm").network, (32, 32, 32))
    sample, train = table.rows
    assert sample["tflops"] == pytest.approx(flops / 2e-3 / 1e12) and train["tflop"] == pytest.approx(3 * flops / 1e12)
    assert sample["of_half"] == pytest.approx(100 * sample["tflops"] / 989.4) and sample["ipc"] == 2.0


def test_unknown_networks_and_missing_counters_stay_empty():
    (row,) = efficiency([make("own network")]).rows
    assert row["tflop"] is None and row["of_half"] is None and row["ipc"] == 2.0
    bare = make("med-ddpm", size=[32, 32, 32])
    bare.launches["counter_tier"] = None
    assert efficiency([bare]).rows[0]["ipc"] is None
    impossible = make("med-ddpm", size=[3, 3, 3])
    assert efficiency([impossible]).rows[0]["tflop"] is None
