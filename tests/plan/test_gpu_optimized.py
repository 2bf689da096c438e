"""Optimized networks on a real GPU: recorded graphs that share memory, follow weights, streams and threads."""

from __future__ import annotations

import copy
import threading
import time

import pytest
import torch
from torch import nn

import voxtune
from tests.factories.networks import make
from tests.factories.users_networks import USERS_NETWORKS, make_users
from voxtune.plan.api import READY
from voxtune.plan.gate import volumes_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))


def on_gpu(name):
    net, args = make(name)
    return net.cuda(), tuple(a.cuda() for a in args)


def relative(a, b):
    return float((a.float() - b.float()).norm() / b.float().norm())


@pytest.fixture
def fast():
    net, args = on_gpu("med_ddpm")
    return net, args, voxtune.optimize(net, args, READY[0])


def close(fast, net, *args):
    with torch.no_grad():
        return relative(fast(*args), net(*args)) < 3e-2


def test_changed_weights_are_used_in_the_same_call(fast):
    net, args, network = fast
    assert close(network, net, *args)
    graph = network.runner.graph
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.2)
    assert close(network, net, *args), "the stem's and the head's packed weights included"
    for p in net.parameters():
        p.data = p.data * 0.8
    assert close(network, net, *args)
    network.load_state_dict({k: v * 1.1 for k, v in net.state_dict().items()})
    assert close(network, net, *args)
    net.load_state_dict({k: v * 1.1 for k, v in net.state_dict().items()}, assign=True)
    assert close(network, net, *args)
    assert network.runner.graph is graph, "nothing was recorded again"


def test_sizes_share_one_pool(fast):
    net, args, network = fast
    shapes = [(8, 8, 8), (16, 16, 16), (8, 16, 8)]
    inputs = [(torch.randn(2, 1, *s, device="cuda"), args[1], torch.randn(2, 2, *s, device="cuda")) for s in shapes]
    kept = []
    for _ in range(3):
        for given in inputs:
            kept.append((given, network(*given)))
    assert all(relative(y, net(*given)) < 3e-2 for given, y in kept), "an output is not overwritten by other graphs"
    runners = [v.runner for v in network._variants.values()]
    assert len(runners) == 3 and len({id(r.pool) for r in runners}) == 1


def test_a_memory_limit_drops_other_sizes():
    net, args = on_gpu("med_ddpm")
    network = voxtune.optimize(net, args, READY[0], memory_limit=1)
    larger = (torch.randn(2, 1, 16, 16, 16, device="cuda"), args[1], torch.randn(2, 2, 16, 16, 16, device="cuda"))
    network(*args)
    assert close(network, net, *larger) and close(network, net, *args)
    assert len(network._variants) <= 2


def test_moving_the_original_is_safe(fast):
    net, args, network = fast
    before = network(*args)
    net.to("cpu")
    taken = [torch.full((2**22,), 7.0, device="cuda") for _ in range(16)]  # what was freed is used again
    assert relative(network(*args), before) < 1e-6
    net.to("cuda")
    del taken
    assert close(network, net, *args)


def test_threads_and_streams(fast):
    net, args, network = fast
    inputs = [torch.randn_like(args[0]) for _ in range(6)]
    with torch.no_grad():
        truths = [net(x, *args[1:]) for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def work(k):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(20):
                if not relative(network(inputs[k], *args[1:]), truths[k]) < 3e-2:
                    wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_copies_and_gradients(fast, caplog):
    net, args, network = fast
    other = copy.deepcopy(network)
    assert close(other, net, *args)
    x = args[0].clone().requires_grad_()
    network(x, *args[1:]).sum().backward()
    assert x.grad is not None and "requires gradients" in caplog.text


@pytest.mark.alone
def test_the_check_of_the_weights_takes_little_time():
    from voxtune.plan.derivation import LiveWeights
    from voxtune.workloads import MedDDPMConfig, build

    net = build(MedDDPMConfig()).cuda().eval()
    weights = LiveWeights(net, copy.deepcopy(net))
    times = []
    for _ in range(200):
        started = time.perf_counter()
        assert not weights.changed()
        times.append(time.perf_counter() - started)
    micro = sorted(times)[len(times) // 5] * 1e6
    assert micro < 60, f"{len(weights._objects)} objects in {micro:.1f} microseconds"


def test_same_precision_is_that_of_the_flags():
    net, args = on_gpu("med_ddpm")
    exact = copy.deepcopy(net).double()(*(a.double() if a.is_floating_point() else a for a in args))
    allowed = torch.backends.cudnn.allow_tf32
    try:
        torch.backends.cudnn.allow_tf32 = False
        network = voxtune.optimize(net, args)
        with torch.no_grad():
            assert relative(network(*args), net(*args)) < 1e-4 and "bf16" not in network.plan.names
            torch.backends.cudnn.allow_tf32 = True
            plain, planned = relative(net(*args), exact), relative(network(*args), exact)
            assert planned <= max(1e-4, 1.5 * plain), (planned, plain)
            with torch.autocast("cuda", torch.bfloat16):
                assert network(*args).dtype == net(*args).dtype or relative(network(*args), exact) < 3e-2
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


def test_half_precision_weights():
    net = nn.Sequential(
        nn.Conv3d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(), nn.Conv3d(32, 16, 3, padding=1)
    )
    net, x = net.eval().cuda().bfloat16(), torch.randn(1, 16, 24, 24, 24, device="cuda").bfloat16()
    network = voxtune.optimize(net, x)
    with torch.no_grad():
        assert relative(network(x), net(x)) < 2e-2 and network(x).dtype == torch.bfloat16


@pytest.mark.parametrize("name", USERS_NETWORKS)
def test_users_networks_in_bf16(name):
    net, args, kwargs = make_users(name)
    move = lambda x: x.cuda() if isinstance(x, torch.Tensor) else x  # noqa: E731
    net, args, kwargs = net.cuda(), tuple(map(move, args)), {k: move(v) for k, v in kwargs.items()}
    network = voxtune.optimize(net, args, READY[0], example_kwargs=kwargs)
    with torch.no_grad():
        y, truth = (volumes_of(f(*args, **kwargs))[0] for f in (network, net))
    assert relative(y, truth) < 5e-2 and "capture" not in network.notes
