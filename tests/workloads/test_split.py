"""The network in two parts: a full step that also gives the deep feature, and the outer levels around a given one."""

from __future__ import annotations

import pytest
import torch

from voxtune.errors import InputError
from voxtune.workloads import ConvNeXtConfig, MedDDPMConfig, build, split, without_zeros

pytestmark = pytest.mark.usefixtures("one_thread")

CONFIG = MedDDPMConfig(base=32, blocks=2, multipliers=(1, 1, 2), attention=(4,))


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return without_zeros(build(CONFIG)).eval()


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(0)
    mask = torch.randn(2, 2, 8, 8, 8, generator=generator).sign()
    return torch.randn(2, 1, 8, 8, 8, generator=generator), torch.tensor([120, 30]), mask


@pytest.mark.parametrize(("depth", "deep_shape"), [(0, (32, 8)), (1, (32, 8)), (2, (64, 4))])
@torch.no_grad()
def test_both_parts_are_the_network_bit_for_bit(network, inputs, depth, deep_shape):
    full, shallow = split(network, depth)
    expected = network(*inputs)
    found, deep = full(*inputs)
    assert torch.equal(found, expected)
    assert torch.equal(shallow(*inputs, deep), expected)
    assert deep.shape[1:] == (deep_shape[0], *[deep_shape[1]] * 3)


@pytest.mark.parametrize(("depth", "skips"), [(0, 1), (1, 3), (2, 6)])
def test_the_shallow_part_holds_the_outer_blocks_alone(network, depth, skips):
    full, shallow = split(network, depth)
    assert list(shallow.input_blocks) == list(network.input_blocks[:skips])
    assert list(shallow.output_blocks) == list(network.output_blocks[-skips:])
    ours = {id(p) for p in network.parameters()}
    assert {id(p) for p in shallow.parameters()} < ours, "shared, not copied"
    assert {id(p) for p in full.parameters()} == ours
    assert not full.training and not shallow.training


@torch.no_grad()
def test_another_deep_feature_gives_another_answer(network, inputs):
    full, shallow = split(network, 1)
    expected, deep = full(*inputs)
    assert not torch.equal(shallow(*inputs, deep * 2), expected)


def test_parts_of_another_depth_are_another_network_to_a_plan(network):
    from voxtune.plan.cache import network_hash

    assert len({network_hash(part) for depth in (0, 1, 2) for part in split(network, depth)}) == 6


@pytest.mark.parametrize("depth", [-1, 3])
def test_depths_that_the_network_has_not(network, depth):
    with pytest.raises(InputError, match="0 to 2"):
        split(network, depth)


def test_networks_without_outer_levels_are_refused():
    with pytest.raises(InputError, match="ConvNeXtUNet"):
        split(build(ConvNeXtConfig(width=8, multipliers=(1, 2))), 1)
