"""The ladder on a GPU at full size in BF16, compared with float64."""

from __future__ import annotations

import pytest
import torch

from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Largest relative errors: of BF16 weights and activations, and of the first rungs, which compute in float32.
HALF = 3e-2
TOLERANCES = {1: 1e-4, 2: 1e-4, 3: 1e-4}


def relative_error(y, expected):
    return float((y.double() - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def setting():
    from voxtune.ladder.rungs import Setting

    torch.manual_seed(0)
    net = ConvNeXtUNet(ConvNeXtConfig()).eval().requires_grad_(False).cuda()
    schedule = make_schedule(DiffusionConfig(schedule="linear", steps=100))
    return Setting(network=net, size=(64, 64), schedule=schedule, timesteps=spaced_steps(100, 100))


@pytest.mark.parametrize("number", range(1, 12))
def test_every_rung(setting, number):
    from voxtune.ladder.climb import reference
    from voxtune.ladder.machine import Machine
    from voxtune.ladder.rungs import RUNGS

    x, t, truth = reference(setting)
    machine = Machine("cuda", timed=True)
    y = RUNGS[number - 1].make(setting, machine)(x, t)
    assert relative_error(y, truth) < TOLERANCES.get(number, HALF)
    assert all(event.seconds is not None and event.seconds >= 0 for event in machine.timed_events())
    if 7 <= number <= 10:
        assert (machine.count("up"), machine.count("down")) == (1, 1)


@pytest.mark.alone
def test_recorded_times_are_device_times(setting):
    """They exclude the launch overhead of the host: the kernels of a step take about one step of the graph."""
    from voxtune.ladder.climb import reference, row
    from voxtune.ladder.rungs import RUNGS

    entry = row(RUNGS[9], setting, torch.device("cuda"), *reference(setting))
    step = entry["total_ms"] / len(setting.timesteps)
    assert 0.5 * step < sum(k["seconds"] for k in entry["kernels"].values()) * 1e3 < 1.1 * step
    assert (entry["launches"], entry["transfers"]) == (75, 0)
    below = row(RUNGS[7], setting, torch.device("cuda"), *reference(setting))
    assert sum(k["seconds"] for k in below["kernels"].values()) * 1e3 < 2 * step


def test_launches_of_a_plan_are_recorded(setting):
    from voxtune.ladder.climb import reference, row
    from voxtune.ladder.rungs import RUNGS

    entry = row(RUNGS[10], setting, torch.device("cuda"), *reference(setting))
    assert entry["launches"] > 10 and entry["end_to_end"]["total_s"] > 0 and entry["transfers"] == 0
    assert entry["measured_steps"] == len(setting.timesteps)


@pytest.mark.parametrize(("whole", "chained"), [(0, False), (0, True), (256, False), (256, True)])
def test_one_graph_generates_the_same_image_as_the_plain_sampler(setting, whole, chained):
    from voxtune.diffusion.noise import noise_source
    from voxtune.diffusion.samplers import ddpm
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import Loop

    if chained and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("overlapped launches require compute capability 9.0")
    loop = Loop(
        Program(setting.network, (64, 64), 2, whole=whole), setting.schedule, setting.timesteps, chained=chained
    )
    assert isinstance(loop.graph, torch.cuda.CUDAGraph)
    first = loop.sample(5, [3, 9])
    noises = noise_source(5, [3, 9], (3, 64, 64), "cuda")
    with torch.no_grad():
        expected = ddpm(setting.network, noises(0), setting.schedule, setting.timesteps, noise=noises)
    assert relative_error(first, expected) < 5e-2
    # A replay leaves no state behind, and the seed is read again.
    assert torch.equal(first, loop.sample(5, [3, 9]))
    assert not torch.equal(first, loop.sample(6, [3, 9]))


def test_weights_are_copied_before_they_are_read(setting):
    from voxtune.ladder.climb import reference
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import begin
    from voxtune.ladder.weights import FORMS, Weights

    x, t, truth = reference(setting)
    program = Program(setting.network, (64, 64), 1)
    host_weights = Weights(program)
    terms = program.time_terms([t])[0]
    program.x.copy_(x.flatten(2))
    begin(program, draw=False)()
    for form in FORMS:
        host_weights.clear()
        program.eps.fill_(float("nan"))
        host_weights.first_step(form, terms)
        assert relative_error(program.eps.view_as(x).cpu(), truth) < HALF, form


def test_batch(setting):
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import denoise

    x = torch.randn(5, 3, 64, 64, device="cuda")
    y = denoise(Program(setting.network, (64, 64), 5), x, 37)
    with torch.no_grad():
        expected = setting.network(x, torch.full((5,), 37, device="cuda"))
    assert relative_error(y, expected) < HALF
