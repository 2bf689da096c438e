"""What a plan was made for: whatever changes a network's answer makes it another one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.factories.networks import make
from voxtune.plan import tuner
from voxtune.plan.api import optimize
from voxtune.plan.cache import identity, network_hash


@dataclass(frozen=True)
class Settings:
    power: int = 1


class Scaled(nn.Module):
    def __init__(self, scale=1.0, power=1, table=1.0):
        super().__init__()
        self.inner = nn.Conv2d(1, 1, 1)
        nn.init.ones_(self.inner.weight)
        self.scale, self.settings = scale, Settings(power)
        self.register_buffer("table", torch.tensor([table]), persistent=False)

    def forward(self, x):
        return (self.inner(x) * self.scale * self.table) ** self.settings.power


class Doubled(Scaled):
    pass


def test_settings_buffers_and_code_tell_networks_apart():
    torch.manual_seed(0)
    nets = [Scaled(), Scaled(scale=2.0), Scaled(power=2), Scaled(table=3.0), Doubled()]
    for net in nets[1:]:
        net.load_state_dict(nets[0].state_dict())
    assert len({network_hash(net) for net in nets}) == len(nets)
    again = Scaled()
    again.load_state_dict(nets[0].state_dict())
    assert network_hash(again) == network_hash(nets[0])


def test_the_code_of_forward_counts_and_its_place_in_the_file_does_not():
    def made(forward):
        kind = type("Made", (Scaled,), {"forward": forward})
        torch.manual_seed(0)
        return network_hash(kind())

    found = []
    for start, added in (("", 1), ("\n\n", 1), ("", 2)):
        space = {}
        exec(f"{start}def forward(self, x):\n    return x + {added}", space)
        found.append(made(space["forward"]))
    assert found[0] == found[1] != found[2]


def test_a_cached_graph_is_not_used_for_a_network_of_other_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path))
    monkeypatch.setattr(tuner, "CPU_LADDER", tuner.CPU_LADDER[:1])
    x = torch.randn(1, 1, 8, 8)
    nets = [Scaled().eval(), Scaled(scale=2.0).eval()]
    nets[1].load_state_dict(nets[0].state_dict())
    for net in nets:
        fast = optimize(net, (x,))
        with torch.no_grad():
            found, wanted = fast(x), net(x)
        # A processor with BF16 may choose it; the other network's answer lies far beyond that.
        assert (found - wanted).norm() < 0.02 * wanted.norm()


def test_how_inputs_are_named_counts():
    net = Scaled()
    x = torch.randn(1, 1, 2, 2)
    assert identity(net, ((), {"a": x})) != identity(net, ((), {"b": x}))


SAME = """
import sys
from tests.factories.networks import make
from voxtune.plan.cache import network_hash
for name in sys.argv[1:]:
    print(name, network_hash(make(name)[0]))
"""


@pytest.mark.parametrize(
    "names", ["med_ddpm convnext", pytest.param("monai_3d monai_2d diffusers_2d diffusers_3d", marks=pytest.mark.slow)]
)
def test_another_process_finds_the_same(names):
    """Nothing of a process (an address, a set's order) gets into it."""
    done = subprocess.run([sys.executable, "-c", SAME, *names.split()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{name} {network_hash(make(name)[0])}" for name in names.split()]
