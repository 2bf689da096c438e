"""The blocks of a network, and their picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from voxtune.analysis.network import network_plan
from voxtune.cli.main import main
from voxtune.report.network import draw_network, encoder_skips, layout
from voxtune.runtime.describe import forward_flops
from voxtune.workloads import WORKLOADS, workload


@pytest.fixture(scope="module")
def plan():
    return network_plan(workload("med-ddpm").network, (32, 32, 32))


def test_blocks_have_the_flops_of_the_whole_network(plan):
    total = sum(b.flops for b in plan.blocks) + plan.rest.flops
    assert total == forward_flops(workload("med-ddpm").network, (32, 32, 32))
    first = plan.blocks[[b.name for b in plan.blocks].index("input_blocks.0")]
    # One convolution of 3^3 from the image and two mask channels to 64.
    network = workload("med-ddpm").network
    assert first.flops == 2 * 27 * network.in_channels * 64 * 32**3
    elements = (network.in_channels + 64) * 32**3 + 27 * network.in_channels * 64 + 64
    assert first.bytes == 4 * elements
    assert first.shape == (64, 32, 32, 32) and first.kinds == "Conv3d"


def test_every_decoder_block_reads_one_encoder_block(plan):
    names = [b.name for b in plan.blocks]
    skips = {names[reader]: names[source] for source, reader in encoder_skips(plan)}
    count = sum(n.startswith("output_blocks") for n in names)
    assert skips == {f"output_blocks.{i}": f"input_blocks.{count - 1 - i}" for i in range(count)}
    places = layout(plan)
    rows = {names[i]: place for i, place in places.items()}
    for reader, source in skips.items():
        assert rows[reader] == ("right", rows[source][1]) and rows[source][0] == "left"
    assert rows["middle_block"][0] == "middle" and rows["out"] == ("right", 0)


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_no_two_blocks_share_a_place(name):
    network = workload(name).network
    plan = network_plan(network, (2 * network.divisor,) * network.dimensions)
    places = list(layout(plan).values())
    assert len(places) == len(set(places)) == sum(len(b.shape) > 1 for b in plan.blocks)
    ElementTree.fromstring(draw_network(plan, "<title>", "subtitle"))


def test_info_draws_a_picture(tmp_path, capsys):
    target = tmp_path / "net.svg"
    command = ["info", "med-ddpm", "--size", "32,32,32", "--picture", str(target)]
    assert main(command) == 0
    text = "".join(ElementTree.parse(target).getroot().itertext())
    assert "output_blocks.9" in text and "64 channels, 32 × 32 × 32" in text
    assert main(command) == 2
    assert "already exists" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
