"""Both networks: golden tensors, published parameter names, sizes, batches and channels."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.factories import GOLDENS
from voxtune.diffusion import DiffusionConfig, add_noise, make_schedule, prediction_loss
from voxtune.errors import InputError
from voxtune.workloads import WORKLOADS, ConvNeXtConfig, MedDDPMConfig, build, workload
from voxtune.workloads.med_ddpm import published_config


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_golden_prediction_loss_and_gradients(golden):
    network, g = golden
    network.zero_grad()
    x_t = add_noise(make_schedule(DiffusionConfig(steps=10)), g["x0"], g["t"], g["noise"])
    assert relative(x_t, g["x_t"]) < 1e-5
    predicted = network(x_t, g["t"], g["cond"])
    assert relative(predicted.detach(), g["eps_pred"]) < 1e-5
    loss = prediction_loss(predicted, g["noise"])
    assert abs(loss.item() - g["l1_loss"].item()) < 1e-5 * g["l1_loss"].item()
    loss.backward()
    parameters = dict(network.named_parameters())
    assert relative(parameters["input_blocks.0.0.weight"].grad, g["grad_first_conv"]) < 1e-5
    assert relative(parameters["middle_block.1.qkv.weight"].grad, g["grad_mid_qkv"]) < 1e-5


def test_golden_convnext():
    g = np.load(GOLDENS / "convnext_unet_tiny.npz")
    network = build(ConvNeXtConfig(width=8, multipliers=(1, 2)))
    network.load_state_dict({k[2:]: torch.from_numpy(v) for k, v in g.items() if k.startswith("w/")})
    with torch.inference_mode():
        y = network(torch.from_numpy(g["x"]), torch.from_numpy(g["t"]))
    assert relative(y, torch.from_numpy(g["y"])) < 1e-5


@pytest.mark.parametrize(
    ("name", "file", "key"),
    [
        ("med-ddpm", "med_ddpm_state_dict.json", "whole_head_128"),
        ("med-ddpm-brats", "med_ddpm_state_dict.json", "brats_192"),
        ("convnext", "convnext_unet_state_dict.json", None),
    ],
)
def test_parameters_are_named_and_shaped_as_published(name, file, key):
    published = json.loads((GOLDENS / file).read_text())
    published = published[key]["parameters"] if key else published
    with torch.device("meta"):
        network = build(workload(name).network)
    assert {k: list(v.shape) for k, v in network.state_dict().items()} == published


@settings(max_examples=12, deadline=None)
@given(
    levels=st.tuples(*[st.integers(1, 3)] * 3),
    batch=st.integers(1, 2),
    images=st.integers(1, 3),
    labels=st.integers(0, 5),
    multipliers=st.sampled_from([(1,), (1, 2), (1, 1, 2)]),
    blocks=st.integers(1, 2),
    attend=st.booleans(),
)
def test_any_size_batch_and_channels(levels, batch, images, labels, multipliers, blocks, attend):
    divisor = 2 ** (len(multipliers) - 1)
    config = MedDDPMConfig(
        in_channels=images + labels,
        out_channels=images,
        base=32,
        blocks=blocks,
        multipliers=multipliers,
        attention=(divisor,) if attend else (),
    )
    network = build(config)
    size = [s * divisor for s in levels]
    x = torch.randn(batch, images, *size)
    cond = torch.randn(batch, labels, *size) if labels else None
    with torch.inference_mode():
        y = network(x, torch.arange(batch), cond)
    assert y.shape == x.shape
    assert torch.equal(y, torch.zeros_like(y)), "the head starts at zero"


def test_a_sample_does_not_depend_on_its_batch(golden):
    network, g = golden
    with torch.inference_mode():
        together = network(g["x_t"], g["t"], g["cond"])
        alone = torch.cat([network(g["x_t"][i : i + 1], g["t"][i : i + 1], g["cond"][i : i + 1]) for i in range(2)])
    assert relative(alone, together) < 1e-5


def test_half_multiplier_halves_stem_and_head():
    with torch.device("meta"):
        network = build(published_config(512, in_channels=3, out_channels=1, base=64, blocks=1))
    assert network.input_blocks[0][0].weight.shape[0] == 32
    assert network.out[2].weight.shape[1] == 32


@pytest.mark.parametrize(
    ("shape", "cond_shape", "message"),
    [
        ((1, 1, 16, 16), None, "expected volumes"),
        ((1, 1, 16, 16, 16), None, "3 channels"),
        ((1, 1, 16, 15, 16), (1, 2, 16, 15, 16), "must be a multiple of 2"),
        ((1, 1, 16, 16, 16), (1, 2, 8, 16, 16), "differ"),
    ],
)
def test_wrong_inputs_are_errors(golden, shape, cond_shape, message):
    cond = None if cond_shape is None else torch.zeros(cond_shape)
    with pytest.raises(InputError, match=message):
        golden[0](torch.zeros(shape), torch.zeros(1, dtype=torch.int64), cond)


def test_convnext_accepts_multiples_of_its_divisor():
    network = build(ConvNeXtConfig(width=8, multipliers=(1, 2, 4)))
    with torch.inference_mode():
        assert network(torch.randn(3, 3, 12, 20), torch.tensor([0, 5, 99])).shape == (3, 3, 12, 20)
    with pytest.raises(InputError, match="must be a multiple of 4"):
        network(torch.randn(1, 3, 10, 8), torch.tensor([0]))
    with pytest.raises(InputError, match="unconditional"):
        network(torch.randn(1, 3, 8, 8), torch.tensor([0]), torch.randn(1, 1, 8, 8))


@pytest.mark.parametrize(
    "bad", [{"base": 20}, {"multipliers": ()}, {"attention": (3,)}, {"in_channels": 0}, {"out_channels": 4}]
)
def test_config_is_checked_when_constructed(bad):
    with pytest.raises(InputError):
        MedDDPMConfig(**bad)


def test_unknown_workload_suggests_the_closest():
    with pytest.raises(InputError, match="did you mean 'med-ddpm'"):
        workload("med-dpm")
    assert {"med-ddpm", "med-ddpm-brats", "convnext"} <= set(WORKLOADS)
