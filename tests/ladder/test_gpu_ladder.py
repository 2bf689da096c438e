"""The ladder on a real GPU, at full size, in BF16, against float64."""

from __future__ import annotations

import pytest
import torch

from voxtune.diffusion import DiffusionConfig, make_schedule, spaced_steps
from voxtune.workloads.convnext import ConvNeXtConfig, ConvNeXtUNet

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
# Of BF16 weights and activations through the whole network; the first rungs compute in float32.
BARS = {1: 1e-4, 2: 1e-4, 3: 1e-4}
HALF = 3e-2


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
    found = RUNGS[number - 1].make(setting, machine)(x, t)
    assert float((found.double() - truth).norm() / truth.norm()) < BARS.get(number, HALF)
    assert all(event.seconds is not None and event.seconds >= 0 for event in machine.timed_events())
    if 7 <= number <= 10:
        assert (machine.count("up"), machine.count("down")) == (1, 1)


def test_noted_times_are_the_device_s_own(setting):
    """Not the host's for a launch: all kernels of a step together take about a step's share of the graph."""
    from voxtune.ladder.climb import reference, row
    from voxtune.ladder.rungs import RUNGS

    told = row(RUNGS[9], setting, torch.device("cuda"), *reference(setting))
    step = told["total_ms"] / len(setting.timesteps)
    assert 0.5 * step < sum(k["seconds"] for k in told["kernels"].values()) * 1e3 < 1.1 * step
    assert (told["launches"], told["transfers"]) == (75, 0)
    below = row(RUNGS[7], setting, torch.device("cuda"), *reference(setting))
    assert sum(k["seconds"] for k in below["kernels"].values()) * 1e3 < 2 * step


def test_a_plan_s_launches_are_seen(setting):
    from voxtune.ladder.climb import reference, row
    from voxtune.ladder.rungs import RUNGS

    told = row(RUNGS[10], setting, torch.device("cuda"), *reference(setting))
    assert told["launches"] > 10 and told["end_to_end"]["total_s"] > 0 and told["transfers"] == 0
    assert told["measured_steps"] == len(setting.timesteps)


@pytest.mark.parametrize(("whole", "chained"), [(0, False), (0, True), (256, False), (256, True)])
def test_one_graph_draws_what_the_plain_sampler_draws(setting, whole, chained):
    from voxtune.diffusion.noise import noise_source
    from voxtune.diffusion.samplers import ddpm
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import Loop

    if chained and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches overlap from compute capability 9.0")
    loop = Loop(
        Program(setting.network, (64, 64), 2, whole=whole), setting.schedule, setting.timesteps, chained=chained
    )
    assert isinstance(loop.graph, torch.cuda.CUDAGraph)
    first = loop.sample(5, [3, 9])
    noises = noise_source(5, [3, 9], (3, 64, 64), "cuda")
    with torch.no_grad():
        want = ddpm(setting.network, noises(0), setting.schedule, setting.timesteps, noise=noises)
    assert float((first - want).norm() / want.norm()) < 5e-2
    # Nothing is left over from one replay to the next, and the seed is read anew.
    assert torch.equal(first, loop.sample(5, [3, 9]))
    assert not torch.equal(first, loop.sample(6, [3, 9]))


def test_weights_arrive_before_they_are_read(setting):
    from voxtune.ladder.climb import reference
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import begin
    from voxtune.ladder.weights import FORMS, Weights

    x, t, truth = reference(setting)
    program = Program(setting.network, (64, 64), 1)
    held = Weights(program)
    terms = program.time_terms([t])[0]
    program.x.copy_(x.flatten(2))
    begin(program, draw=False)()
    for form in FORMS:
        held.clear()
        program.eps.fill_(float("nan"))
        held.first_step(form, terms)
        found = program.eps.view_as(x).cpu().double()
        assert float((found - truth).norm() / truth.norm()) < HALF, form


def test_a_batch(setting):
    from voxtune.ladder.program import Program
    from voxtune.ladder.sampling import denoise

    x = torch.randn(5, 3, 64, 64, device="cuda")
    found = denoise(Program(setting.network, (64, 64), 5), x, 37)
    with torch.no_grad():
        want = setting.network(x, torch.full((5,), 37, device="cuda"))
    assert float((found - want).norm() / want.norm()) < HALF
