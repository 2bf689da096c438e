"""The two parts of a network for the feature cache: full steps and shallow steps."""

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
def test_both_parts_equal_the_network_exactly(network, inputs, depth, deep_shape):
    full, shallow = split(network, depth)
    expected = network(*inputs)
    output, deep = full(*inputs)
    assert torch.equal(output, expected)
    assert torch.equal(shallow(*inputs, deep), expected)
    assert deep.shape[1:] == (deep_shape[0], *[deep_shape[1]] * 3)


@pytest.mark.parametrize(("depth", "skips"), [(0, 1), (1, 3), (2, 6)])
def test_the_shallow_part_has_only_the_outer_blocks(network, depth, skips):
    full, shallow = split(network, depth)
    assert list(shallow.input_blocks) == list(network.input_blocks[:skips])
    assert list(shallow.output_blocks) == list(network.output_blocks[-skips:])
    parameters = {id(p) for p in network.parameters()}
    assert {id(p) for p in shallow.parameters()} < parameters, "shared, not copied"
    assert {id(p) for p in full.parameters()} == parameters
    assert not full.training and not shallow.training


@torch.no_grad()
def test_the_output_depends_on_the_deep_feature(network, inputs):
    full, shallow = split(network, 1)
    expected, deep = full(*inputs)
    assert not torch.equal(shallow(*inputs, deep * 2), expected)


def test_parts_of_each_depth_have_their_own_hash(network):
    from voxtune.plan.cache import network_hash

    assert len({network_hash(part) for depth in (0, 1, 2) for part in split(network, depth)}) == 6


@pytest.mark.parametrize("depth", [-1, 3])
def test_invalid_depths_are_errors(network, depth):
    with pytest.raises(InputError, match="0 to 2"):
        split(network, depth)


def test_networks_without_split_are_errors():
    with pytest.raises(InputError, match="ConvNeXtUNet"):
        split(build(ConvNeXtConfig(width=8, multipliers=(1, 2))), 1)
