"""Measured tiles: which tile a kernel takes, what a table of a file may hold, and what is measured beside the rule's tile."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch

from voxtune.kernels import measured_tiles
from voxtune.kernels.conv3d_tiles import RESERVE, SHARED_MEMORY, Conv3dTile, Device, tiles
from voxtune.kernels.conv3d_tiles import shared_memory as conv3d_memory
from voxtune.kernels.measured_tiles import Choice, chosen, forcing, recording, use
from voxtune.kernels.parity_tiles import ParityTile, doubling_tile, strided_tile

RULE = Conv3dTile(h=8, w=16)
OTHER = replace(RULE, h=16, w=8)
SHAPE = (1, 16, 16, 16, 64, 64, 3, 3, 3)


@pytest.fixture(autouse=True)
def _empty():
    measured_tiles.forget()
    yield
    measured_tiles.forget()


def choice(shape=SHAPE, tile=RULE, kernel="conv3d", device=None):
    return Choice(kernel, shape, torch.bfloat16, tile, device or Device())


def ask(dtype=torch.bfloat16, shape=SHAPE):
    return chosen("conv3d", shape, torch.zeros(1, dtype=dtype), lambda: RULE)


def test_a_measured_tile_replaces_the_rules_for_its_shape_and_type_alone():
    assert ask() == RULE
    use("cpu", {choice().key: asdict(OTHER)})
    assert ask() == OTHER
    assert ask(dtype=torch.float16) == ask(shape=(2, *SHAPE[1:])) == RULE


def test_choices_are_recorded_and_can_be_forced():
    with recording() as choices:
        ask()
    assert list(choices) == [choice().key] and choices[choice().key].tile == RULE
    with forcing({choice().key: OTHER}):
        assert ask() == OTHER
        assert ask(dtype=torch.float16) == RULE
    assert ask() == RULE


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        "tile",
        {},
        {"h": 8},
        {**asdict(RULE), "h": 7},
        {**asdict(RULE), "h": 0},
        {**asdict(RULE), "w": -8},
        {**asdict(RULE), "k": 1 << 40},
        {**asdict(RULE), "c": 64.0},
        {**asdict(RULE), "warps": True},
        {**asdict(RULE), "swap": 1},
        {**asdict(RULE), "halo": "yes"},
        {**asdict(RULE), "more": 1},
        asdict(ParityTile(h=8, w=8)),
    ],
)
def test_values_of_a_damaged_file_are_ignored(values):
    use("cpu", {choice().key: values})
    assert ask() == RULE


def rules(device):
    """The rule's tile for shapes of many kinds."""
    for side, channels, K in [
        (128, (64,), 64),
        (128, (32,), 32),
        (64, (96,), 96),
        (32, (128, 64), 128),
        (8, (256,), 256),
    ]:
        for kernel in ((3, 3, 3), (1, 3, 3), (3, 1, 1)):
            tile = tiles(1, side, side, side, channels, K, kernel=kernel, device=device)
            yield "conv3d", (1, side, side, side, *channels, K, *kernel), tile
        doubling = doubling_tile(1, side, side, side, channels[0], K, False)
        yield "doubling_conv", (1, side, side, side, *channels, K, 4, 4, 4, 2, 2, 2, 0), doubling
        strided = strided_tile(1, side, side, side, channels[0], K, 27)
        yield "strided_conv", (1, side, side, side, channels[0], K, 3, 3, 3, 2, 2, 2), strided


@pytest.mark.parametrize("arch", [80, 86, 90])
def test_candidates_differ_from_the_rule_and_fit_into_the_card(arch):
    device = Device(hopper=arch == 90, halo=arch == 90, shared=SHARED_MEMORY[arch])
    for kernel, shape, tile in rules(device):
        others = choice(shape, tile, kernel, device).candidates()
        assert 0 < len(others) <= measured_tiles.MAX_CANDIDATES, (kernel, shape, tile)
        assert tile not in others and len(set(others)) == len(others)
        for other in others:
            use("cpu", {choice(shape, tile, kernel, device).key: asdict(other)})
            assert chosen(kernel, shape, torch.zeros(1, dtype=torch.bfloat16), lambda: tile) == other  # noqa: B023
            if kernel == "conv3d":
                assert conv3d_memory(other) <= device.shared - RESERVE
                assert device.halo or not other.halo
