"""The segmentation network: shapes, lossless blocks, independence of the batch, errors."""

from __future__ import annotations

import pytest
import torch

from voxtune.errors import InputError
from voxtune.workloads.segment import SegmentConfig, SegmentUNet, blocks_to_voxels, voxels_to_blocks


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return SegmentUNet(SegmentConfig(base=8)).eval()


def test_blocks_are_voxels_in_another_order():
    x = torch.randn(2, 3, 4, 6, 8)
    blocks = voxels_to_blocks(x)
    assert blocks.shape == (2, 24, 2, 3, 4)
    assert torch.equal(blocks[0, :8, 0, 0, 0].sort().values, x[0, 0, :2, :2, :2].flatten().sort().values)
    assert torch.equal(blocks_to_voxels(blocks), x)


def test_shapes_and_features(network):
    x = torch.randn(2, 1, 16, 24, 32)
    with torch.inference_mode():
        logits, features = network.forward_both(x)
        assert logits.shape == (2, 3, 16, 24, 32)
        assert features.shape == (2, network.config.features) == (2, 32)
        torch.testing.assert_close(network.features(x), features)
        torch.testing.assert_close(network(x[1:])[0], logits[1], rtol=1e-4, atol=1e-5)


def test_every_weight_has_a_gradient(network):
    network(torch.randn(1, 1, 16, 16, 16)).square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in network.parameters())


@pytest.mark.parametrize("shape", [(1, 2, 16, 16, 16), (1, 1, 16, 16, 12), (1, 16, 16, 16)])
def test_wrong_shapes_are_errors(network, shape):
    with pytest.raises(InputError, match="multiples of 8"):
        network(torch.zeros(shape))


@pytest.mark.parametrize("wrong", [{"base": 6}, {"base": 0}, {"levels": 1}, {"classes": 1}, {"in_channels": 0}])
def test_invalid_configs_are_errors(wrong):
    with pytest.raises(InputError):
        SegmentConfig(**wrong)
