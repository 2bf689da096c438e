"""Own convolutions against cuDNN on a real GPU: the same result, times that agree, and a plan that is never slower for it."""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import voxtune
from voxtune.plan.build import PlanTarget
from voxtune.plan.compete import compete, race
from voxtune.plan.gains import gains, timed_passes
from voxtune.plan.kernel_forms import PASS_OF, kernel_forms, own_call, rival_call
from voxtune.plan.measure import measure
from voxtune.plan.run import kernels_ready
from voxtune.plan.search import candidates
from voxtune.plan.tuner import BY_CUDNN, GPU_LADDER, TunerRung, tune

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Measurements: run pytest with --log-cli-level=INFO.
log = logging.getLogger("voxtune")
CUDA = torch.device("cuda")
ROOT = Path(__file__).parents[2]
SIDE = 32


class Net(nn.Module):
    """A small U-Net with 64 and 128 channels, every own convolution, and a head of 4 channels."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(2, 64, 3, padding=1)
        self.first, self.second = nn.Conv3d(64, 64, 3, padding=1), nn.Conv3d(64, 64, 3, padding=1)
        self.down, self.deep = nn.Conv3d(64, 128, 3, stride=2, padding=1), nn.Conv3d(128, 128, 3, padding=1)
        self.up, self.transposed = nn.Conv3d(128, 64, 3, padding=1), nn.ConvTranspose3d(128, 64, 2, 2)
        self.join, self.both = nn.Conv3d(128, 64, 1), nn.Conv3d(128, 64, 3, padding=1)
        self.head = nn.Conv3d(64, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, c) for c in (64, 64, 64, 128, 128, 64, 64))

    def forward(self, x, t):
        s = self.stem(x)
        a = self.first(F.silu(self.norms[0](s))) + t[:, :, None, None, None]
        a = self.second(F.silu(self.norms[1](a))) + s
        d = self.down(F.silu(self.norms[2](a)))
        d = self.deep(F.silu(self.norms[3](d))) + d
        d = F.silu(self.norms[4](d))
        u = self.up(F.interpolate(d, scale_factor=2.0, mode="nearest"))
        j = self.join(torch.cat([u, self.transposed(d)], dim=1))
        h = self.both(torch.cat([F.silu(self.norms[5](j)), a], dim=1))
        return self.head(F.silu(self.norms[6](h)))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)


def network_and_inputs(side=SIDE):
    return Net().cuda().eval(), (torch.randn(1, 2, side, side, side, device=CUDA), torch.randn(1, 64, device=CUDA))


def own_kernels(net, args):
    network = PlanTarget(net, (args, {})).build(candidates("bf16", CUDA)[0].plan)
    with kernels_ready(network, (args, {})):
        return network


def median_ms(networks, args, rounds=5):
    """Medians of networks that are timed in turns."""
    times = [[] for _ in networks]
    for _ in range(rounds):
        for network, own in zip(networks, times, strict=True):
            own.append(measure(lambda network=network: network(*args), CUDA, repeats=30, seconds=0.3).p50_ms)
    return [statistics.median(own) for own in times]


def test_a_rival_computes_the_same():
    net, args = network_and_inputs()
    forms = kernel_forms(own_kernels(net, args), (args, {}))
    assert {f.operator for f in forms} == set(PASS_OF)
    compared = 0
    for form in forms:
        given = form.tensors(CUDA)
        own, rival = own_call(form, given)(), rival_call(form, given)()
        y, z = (r[0] if isinstance(r, tuple) else r for r in (own, rival))
        assert (y.shape, y.dtype) == (z.shape, z.dtype), form.operator
        assert y.movedim(1, -1).is_contiguous() and z.movedim(1, -1).is_contiguous(), form.operator
        if form.scale is None:
            z = z.float()
            if form.norm_shifts and given["shift"] is not None:
                z = z + given["shift"][:, :, None, None, None]
            assert float((y.float() - z).norm() / z.norm()) < 1e-2, form.operator
            compared += 1
    assert compared == len(forms) - 1


def test_the_timer_agrees_with_itself_and_with_the_length_of_the_work():
    x = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
    same = race(lambda: x @ x, lambda: x @ x, CUDA, 0.2)
    assert same[0] == pytest.approx(same[1], rel=0.05)
    twice = race(lambda: x @ x, lambda: (x @ x) @ x, CUDA, 0.2)
    assert twice[1] / twice[0] == pytest.approx(2.0, rel=0.15)
    small = torch.randn(64, device=CUDA)
    assert race(lambda: small + 1, lambda: small + 1, CUDA, 0.05)[0] < 0.02, "the start of a graph is not part of it"


def test_the_competition_is_cached_and_ends_in_time():
    net, args = network_and_inputs()
    network = own_kernels(net, args)
    network(*args)
    started = time.monotonic()
    result = compete(network, (args, {}), 20.0)
    took = time.monotonic() - started
    assert result.times and not result.untimed and took < 25.0, (took, result.report())
    log.info(f"compared in {took:.1f} s: {result.report()}")
    for t in sorted(result.times, key=lambda t: -t.count * t.own_ms):
        log.info(f"{t.count} x {t.form.operator} {t.form.excepted[1]}: {t.own_ms:.4f} ms, cuDNN {t.rival_ms:.4f} ms")

    def never(*_):
        raise AssertionError("timed again")

    started = time.monotonic()
    again = compete(network, (args, {}), 20.0, timer=never)
    assert not again.untimed and time.monotonic() - started < 2.0
    assert {(t.form.key, t.own_ms, t.rival_ms) for t in again.times} == {
        (t.form.key, t.own_ms, t.rival_ms) for t in result.times
    }
    started = time.monotonic()
    compete(network, (args, {}), 0.5, timer=never)
    assert time.monotonic() - started < 2.0


FIRST_ANSWER = """
import time

import torch

import voxtune
from tests.plan.test_gpu_compete import network_and_inputs

torch.manual_seed(0)
net, args = network_and_inputs()
torch.cuda.synchronize()
started = time.monotonic()
fast = voxtune.optimize(net, args, precision="bf16")
fast(*args)
torch.cuda.synchronize()
print(fast.report())
print(time.monotonic() - started)
"""


def test_the_first_answer_comes_in_time(tmp_path):
    """In a process of its own: without any compiled kernel or plan, then with those of the first process."""
    folders = {name: str(tmp_path / name) for name in ("TRITON_CACHE_DIR", "VOXTUNE_CACHE")}
    environment = {**os.environ, **folders, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    seconds = []
    for state in ("cold", "warm"):
        command = [sys.executable, "-c", FIRST_ANSWER]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        seconds.append(float(done.stdout.splitlines()[-1]))
        log.info(f"{state}: first answer after {seconds[-1]:.1f} s\n{done.stdout}")
    assert BY_CUDNN in done.stdout
    assert seconds[0] < 30.0 and seconds[1] < 3.0


def test_the_kept_plan_is_not_slower_for_it(tmp_path):
    net, args = network_and_inputs()
    own = own_kernels(net, args)
    fast = voxtune.optimize(net, args, precision="bf16")
    log.info(fast.report())
    assert list((tmp_path / "cache" / "kernels").glob("*.json"))
    row = next(r for r in fast.plan.evidence["waterfall"] if r["name"] == BY_CUDNN)
    assert "time limit" not in row.get("why", ""), row
    kept_ms, own_ms = median_ms((fast, own), args)
    log.info(f"kept plan {kept_ms:.4f} ms, all own kernels {own_ms:.4f} ms")
    assert kept_ms <= 1.03 * own_ms
    # Every convolution of the competition's plan left out by hand gives the same result.
    plan = compete(own, (args, {}), 20.0).excepting(candidates("bf16", CUDA)[0].plan)
    if plan is not None:
        network = PlanTarget(net, (args, {})).build(plan)
        y, truth = network(*args), net(*args)
        assert float((y - truth).norm() / truth.norm()) < 3e-2
    started = time.monotonic()
    again = voxtune.optimize(net, args, precision="bf16")
    assert again.plan == fast.plan and time.monotonic() - started < 3.0
    small = tuple(torch.randn(*a.shape[:2], 16, 16, 16, device=CUDA) if a.dim() == 5 else a for a in args)
    assert float((again(*small) - net(*small)).norm() / net(*small).norm()) < 3e-2


def test_the_tuner_compares_too():
    net, args = network_and_inputs()
    ladder = (TunerRung("own kernels", candidates("bf16", CUDA)[0].plan.names, apart=True), GPU_LADDER[-1])
    lines = []
    tuned = tune(net, args, ladder=ladder, checks=1, say=lines.append)
    log.info("\n".join(lines))
    assert tuned.rows[1].kept and tuned.rows[2].name == BY_CUDNN
    assert tuned.rows[2].why or tuned.rows[2].note
    assert list(tuned.plan.evidence["gains"]) == timed_passes(tuned.plan.names)


def test_own_convolutions_and_the_graph_gain_time():
    net, args = network_and_inputs()
    target, lines = PlanTarget(net, (args, {})), []
    result = gains(target, own_kernels(net, args), 60.0, lines.append)
    log.info("\n".join(lines))
    assert result["cuda_graph"] > 0 and result["conv3d"] > 0 and result["fuse_norm"] > 0
