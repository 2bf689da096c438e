"""Memory reuse between CPU steps: no page faults for reused memory, and it can be turned off."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from voxtune.plan import heap
from voxtune.plan.build import build
from voxtune.plan.plan import Plan

pytestmark = pytest.mark.skipif(heap.why_no_heap() is not None, reason="not glibc")

CODE = """
import json, resource, statistics, torch
from torch import nn
from voxtune.plan import heap
from voxtune.plan.build import build
from voxtune.plan.plan import Plan

def faults(call):
    for _ in range(6):
        call()
    counts = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        call()
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return statistics.median(counts)  # the heap may grow once more by one volume

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

torch.set_num_threads(1)
net = nn.Sequential(*[nn.Conv3d(1, 1, 1) for _ in range(3)]).eval()  # 64 MiB a volume
x = torch.randn(1, 1, 256, 256, 256)
plans = {name: build(net, (x,), None, Plan.of(*passes)) for name, passes in {"reused": ("heap",), "plain": ("strict",)}.items()}
result = {"first": faults(lambda: plans["plain"](x)), "reused": faults(lambda: plans["reused"](x))}
result["held"] = resident()
small = torch.randn(1, 1, 4, 4, 4)
build(nn.Conv3d(1, 1, 1).eval(), (small,), None, Plan.of("strict"))(small)
result["left"] = resident()
result["notes"] = plans["reused"].notes
print(json.dumps(result))
"""


def test_memory_is_reused():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["notes"]["heap"] == "in force"
    assert result["first"] > 90  # three volumes of 64 MiB, by pages of 2 MiB at the largest
    assert result["reused"] < result["first"] / 20
    # Returned to the system by the next plan without it. Faults do not show this: free blocks below a live one may be reused.
    assert result["left"] < result["held"] - 100 * 2**20


def test_it_does_not_apply_to_a_gpu(monkeypatch):
    from voxtune.plan.passes import BY_NAME, Context

    assert "PyTorch already" in BY_NAME["heap"].why_not(Context(torch.device("cuda"), ("heap",)))
    monkeypatch.setattr(heap, "_library", lambda: None)
    assert "glibc" in BY_NAME["heap"].why_not(Context(torch.device("cpu"), ("heap",)))
    x = torch.randn(1, 1, 4, 4, 4)
    fast = build(torch.nn.Conv3d(1, 1, 1).eval(), (x,), None, Plan.of("heap"))
    assert fast.notes["heap"].startswith("does not apply")
    assert fast(x).shape == x.shape
