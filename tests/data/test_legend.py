"""Names and kinds of labels from files, and the voxel to look at first."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from tests.factories.contracts import BRATS
from voxtune.data.contract import DataContract, Label
from voxtune.data.labels import parse_labels
from voxtune.data.legend import (
    LabelName,
    centre_of,
    contract_legend,
    first_labels,
    first_voxel,
    read_legend,
    record_legend,
)
from voxtune.errors import InputError


def test_names_and_colours_of_a_table_or_a_model(tmp_path):
    table = tmp_path / "dseg.tsv"
    table.write_text("index\tname\tcolor\n0\tbackground\t\n1\tbrain\t#ff0000\n2\ttumour\tred\nx\ty\tz\n")
    assert {v: (n.name, n.colour) for v, n in read_legend(table).items()} == {
        0: ("background", ""),
        1: ("brain", "#ff0000"),
        2: ("tumour", ""),
    }
    (tmp_path / "config.json").write_text('{"data": {"labels": [{"name": "brain", "value": 4, "channel": 0}]}}')
    assert read_legend(tmp_path)[4].name == "brain"
    table.write_text("a\tb\n")
    with pytest.raises(InputError, match="contains no label names"):
        read_legend(table)


def test_names_that_share_a_value_are_joined_and_a_pathology_wins(tmp_path):
    """A voxel of a mask has one value, also with overlapping labels."""
    labels = [
        {"name": "brain", "value": 2, "more_values": [1, 4], "channel": 0},
        {"name": "whole tumour", "value": 1, "more_values": [4], "channel": 1},
        {"name": "region", "value": 4, "channel": 2, "role": "other"},
    ]
    (tmp_path / "config.json").write_text(json.dumps({"data": {"labels": labels}}))
    legend = read_legend(tmp_path)
    assert {value: (label.name, label.kind) for value, label in legend.items()} == {
        2: ("brain", "organ"),
        1: ("brain + whole tumour", "pathology"),
        4: ("brain + whole tumour + region", "pathology"),
    }
    (tmp_path / "dseg.tsv").write_text("index\tname\trole\n1\tA\t\n1\tB\tpathology\n2\tC\torgan\n2\tC\torgan\n")
    legend = read_legend(tmp_path / "dseg.tsv")
    assert {value: (label.name, label.kind) for value, label in legend.items()} == {
        1: ("A + B", "pathology"),
        2: ("C", "organ"),
    }


@pytest.mark.parametrize(
    "labels", ["7", "[7]", '[{"name": "x"}]', '[{"name": "x", "value": 1, "more_values": 3}]', '[{"value": [1]}]']
)
def test_an_invalid_model_folder_is_refused_in_one_line(tmp_path, labels):
    (tmp_path / "config.json").write_text(f'{{"data": {{"labels": {labels}}}}}')
    with pytest.raises(InputError, match=r"config\.json: .*label") as error:
        read_legend(tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_names_of_a_contract_and_of_a_sidecar():
    custom = Label(name="region", value=5, channel=1, role="pathology")
    labels = (Label(name="brain", value=1, channel=0, more_values=(7,)), custom)
    contract = DataContract(size=(4, 4, 4), spacing=(1.0, 1.0, 1.0), orientation="RAS", labels=labels)
    assert {v: (n.name, n.kind) for v, n in contract_legend(contract).items()} == {
        1: ("brain", "organ"),
        7: ("brain", "organ"),
        5: ("region", "pathology"),
    }
    legend = record_legend({"labels": {"2": "brain + whole tumour", "?": "no", "image": "brain", "3": " "}})
    assert {v: (n.name, n.kind) for v, n in legend.items()} == {2: ("brain + whole tumour", "pathology")}
    assert record_legend({"labels": ["tumour"]}) == {}
    # The mask file is shown, not what the model was given.
    mapped = {
        "labels": {"3": "enhancing tumour", "4": "brain"},
        "mask_labels": {"4": "enhancing tumour", "image": "brain"},
    }
    assert {v: n.name for v, n in record_legend(mapped).items()} == {4: "enhancing tumour"}


def test_the_text_of_the_option_labels():
    """As the other commands read it; what is taken from the image has no value in the file."""
    legend = read_legend("tumour=1,4; oedema=2; brain=image")
    assert {v: (n.name, n.kind) for v, n in legend.items()} == {
        1: ("tumour", "pathology"),
        4: ("tumour", "pathology"),
        2: ("oedema", "pathology"),
    }
    assert read_legend("brats2021")[4].name == "enhancing tumour"
    with pytest.raises(InputError, match="no such preset or file"):
        read_legend("absent")


def test_the_pathologies_come_first_whatever_their_values():
    mask = np.full((8, 8, 8), 4)
    mask[2:5, 2:5, 2:5], mask[3, 3, 3] = 2, 1
    legend = contract_legend(BRATS)
    assert [legend[v].kind for v in (1, 2, 3, 4)] == ["pathology", "pathology", "pathology", "organ"]
    assert first_labels(mask, legend) == (1, 2)
    assert first_voxel(mask, legend) == (3, 3, 3)
    healthy = np.where(mask == 4, 4, 0)
    assert first_labels(healthy, legend) == (4,)
    # Without names, the label with the fewest voxels; of two, the higher value.
    assert first_labels(mask, {}) == (1,)
    assert first_labels(np.array([[[0, 1, 2, 2, 1]]]), {}) == (2,)
    assert first_labels(np.zeros((2, 2, 2), int), legend) == ()
    assert first_voxel(np.zeros((4, 6, 8), int), legend) == (2, 3, 4)
    assert first_labels(mask, {4: LabelName(name="x", role="pathology")}) == (4,)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2)])
def test_the_slices_show_much_of_a_scattered_lesion(order):
    """A large lesion and two small ones: between them there is nothing to see."""
    mask = np.zeros((20, 22, 24), int)
    mask[2:7, 3:8, 4:9] = 1
    mask[16, 18, 20] = mask[17, 3, 20] = 1
    voxel = centre_of(mask.transpose(order), (1,))
    assert voxel == tuple((4, 5, 6)[axis] for axis in order)
    # The middle of a ring is not in the ring.
    ring = np.zeros((9, 9, 9), int)
    ring[1:8, 1:8, 4] = 1
    ring[2:7, 2:7, 4] = 0
    assert ring[centre_of(ring, (1,))] == 1
    assert centre_of(ring, (7,)) is None and centre_of(ring, ()) is None


@pytest.mark.parametrize("row", ["{n}\tlabel {n}", "{n}\tbrain", "1\tlabel {n}"])
def test_a_table_of_tens_of_thousands_of_labels_is_refused_at_once(tmp_path, row):
    """Comparing every name with every other would take minutes for a file of a mebibyte."""
    path = tmp_path / "dseg.tsv"
    path.write_text("index\tname\n" + "\n".join(row.format(n=n) for n in range(1, 50_000)))
    started = time.monotonic()
    for read in (read_legend, lambda file: parse_labels(str(file))):
        with pytest.raises(InputError, match="values, more than 5000"):
            read(path)
    assert time.monotonic() - started < 20


def test_a_table_of_freesurfers_size_is_read(tmp_path):
    path = tmp_path / "dseg.tsv"
    path.write_text("index\tname\n" + "\n".join(f"{n}\tlabel {n}" for n in range(1, 2000)))
    assert len(read_legend(path)) == 1999
    assert len(parse_labels(str(path)).labels()) == 1999
