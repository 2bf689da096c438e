"""Data contracts: validation, JSON round trip, and encoding of masks and images."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.contracts import BRATS, WHOLE_HEAD
from tests.factories.nifti import ORIENTATIONS
from voxtune.config import from_mapping, to_mapping
from voxtune.data.contract import (
    DataContract,
    Label,
    classes_of,
    encode_channels,
    encode_mask,
    example_labels,
    generic_contract,
    scale_image,
    unscale_image,
)
from voxtune.errors import InputError

GOOD = to_mapping(WHOLE_HEAD)


@pytest.mark.parametrize("contract", [WHOLE_HEAD, BRATS, generic_contract(3, 2, (16, 24, 32))])
def test_json_round_trip(contract):
    assert from_mapping(DataContract, json.loads(json.dumps(to_mapping(contract))), "test") == contract


def test_published_contracts():
    assert WHOLE_HEAD.values == (1, 2) and WHOLE_HEAD.spacing == (1.5, 1.5, 1.5)
    assert BRATS.size == (144, 192, 192) and BRATS.orientation == "LPS" and len(BRATS.images) == 4
    assert BRATS.mask_range == "unit" and BRATS.values == (1, 2, 3, 4)


def label(name="a", value=1, channel=0):
    return {"name": name, "value": value, "channel": channel}


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("size", (0, 4, 4), "size"),
        ("size", (-4, 4, 4), "size"),
        ("spacing", (1.0, 0.0, 1.0), "spacing"),
        ("spacing", (1.0, -1.0, 1.0), "spacing"),
        ("orientation", "RAA", "orientation"),
        ("orientation", "RLS", "orientation"),
        ("orientation", "XYZ", "orientation"),
        ("orientation", "ra", "orientation"),
        ("labels", [], "label"),
        ("labels", [label(), label("b", 1, 1)], "value"),
        ("labels", [label(), label("b", 2, 0)], "channel"),
        ("labels", [label(), label("a", 2, 1)], "name"),
        ("labels", [label(), label("b", 2, 2)], "channels"),
        ("labels", [label(value=0)], "background"),
        ("labels", [label(channel=-1)], "channel"),
        ("labels", [label(name="")], "name"),
        ("mask_range", "both", "mask_range"),
        ("scaling", "voxel", "scaling"),
        ("images", [], "image"),
        ("images", ["T1", "t1"], "image"),
        ("images", ["T1", "T1w"], "different image kinds"),
        ("images", ["../../T1w"], "must not contain"),
        ("images", ["..\\T1w"], "must not contain"),
        ("images", ["T1w\n"], "must not contain"),
    ],
)
def test_invalid_settings_are_rejected(field, value, word):
    with pytest.raises(InputError, match=word):
        from_mapping(DataContract, {**GOOD, field: value}, "model.json")


def test_every_orientation_is_valid():
    assert len(ORIENTATIONS) == 48
    for code in ORIENTATIONS:
        generic_contract(1, 1, (4, 4, 4), orientation=code)


@given(st.integers(1, 5), st.sampled_from(["signed", "unit"]), st.integers(0, 2**32 - 1))
def test_encode_mask_is_one_hot(n_labels, mask_range, seed):
    contract = generic_contract(n_labels, 1, (3, 4, 5), mask_range=mask_range)
    labels_DHW = np.random.default_rng(seed).integers(0, n_labels + 1, (3, 4, 5))
    encoded = encode_mask(labels_DHW, contract)
    assert encoded.shape == (n_labels, 3, 4, 5) and encoded.dtype == np.float32
    on = encoded == 1.0
    assert set(np.unique(encoded)) <= ({-1.0, 1.0} if mask_range == "signed" else {0.0, 1.0})
    decoded = sum(on[i] * value for i, value in enumerate(contract.values))
    assert np.array_equal(decoded, labels_DHW)


def test_channels_in_another_order_than_values():
    labels = (Label(name="a", value=7, channel=1), Label(name="b", value=3, channel=0))
    contract = DataContract(size=(1, 1, 2), spacing=(1.0,) * 3, orientation="RAS", labels=labels, mask_range="unit")
    encoded = encode_mask(np.array([[[7, 3]]]), contract)
    assert np.array_equal(encoded[:, 0, 0], [[0, 1], [1, 0]])


def test_unknown_label_is_named():
    with pytest.raises(InputError, match=r"unknown label 9.*1 \(head\)"):
        encode_mask(np.full((2, 2, 2), 9), WHOLE_HEAD)


@given(st.floats(-1e4, 1e4), st.floats(1e-2, 1e4), st.sampled_from(["volume", "slice"]))
def test_scale_image_fills_the_range(low, span, scaling):
    contract = from_mapping(DataContract, {**GOOD, "scaling": scaling}, "test")
    image = (low + span * np.random.default_rng(0).random((4, 5, 6))).astype(np.float32)
    scaled = scale_image(image, contract)
    parts = scaled if scaling == "slice" else scaled[None]
    assert scaled.dtype == np.float32
    for part in parts:
        assert part.min() == -1.0 and part.max() == 1.0


@pytest.mark.parametrize("scaling", ["volume", "slice"])
def test_constant_image_is_background(scaling):
    contract = from_mapping(DataContract, {**GOOD, "scaling": scaling}, "test")
    assert (scale_image(np.full((3, 3, 3), 42.0), contract) == -1).all()


def test_unscale_clips_to_the_range():
    out = unscale_image(np.array([-3.0, -1.0, 0.0, 1.0, 2.0]), 0.0, 1000.0)
    assert np.allclose(out, [0, 0, 500, 1000, 1000]) and out.dtype == np.float32


@pytest.mark.parametrize(("labels", "images"), [(0, 1), (1, 0)])
def test_generic_contract_requires_labels_and_images(labels, images):
    with pytest.raises(InputError, match="at least one"):
        generic_contract(labels, images, (8, 8, 8))


OVERLAP = replace(
    generic_contract(1, 1, (4, 4, 4)),
    labels=(
        Label(name="WT", value=1, more_values=(2, 4), channel=0),
        Label(name="TC", value=1, more_values=(4,), channel=1),
        Label(name="ET", value=4, channel=2),
    ),
    overlapping=True,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *[
            ("brain", "organ"),
            ("Head", "organ"),
            ("Whole_Brain", "organ"),
            ("brainstem", "other"),
            ("tumor", "pathology"),
        ],
        *[("Necrotic core", "pathology"), ("non-enhancing", "pathology"), ("edema", "pathology"), ("WT", "pathology")],
        *[("ventricles", "other"), ("label1", "other")],
    ],
)
def test_the_kind_of_a_label_follows_from_its_name(name, kind):
    assert Label(name=name, value=1, channel=0).kind == kind
    assert Label(name=name, value=1, channel=0, role="other").kind == "other"


def test_old_labels_are_read_and_new_ones_round_trip():
    old = {**GOOD, "labels": [label("brain"), label("tumour", 2, 1)]}
    old.pop("overlapping")
    contract = from_mapping(DataContract, old, "old")
    assert contract.channel_values == ((1,), (2,)) and not contract.overlapping
    assert contract.classes == {"brain": (1,), "tumour": (2,)} and contract.region_values == (1, 2)
    assert from_mapping(DataContract, json.loads(json.dumps(to_mapping(OVERLAP))), "new") == OVERLAP


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"more_values": [1]}, "twice"),
        ({"more_values": [0]}, "must be 1 or more"),
        ({"role": "leg"}, "role"),
        ({"from_image": 1}, "from_image"),
    ],
)
def test_invalid_labels_are_rejected(change, word):
    with pytest.raises(InputError, match=word):
        from_mapping(DataContract, {**GOOD, "labels": [{**label(), **change}]}, "model.json")


def test_only_overlapping_labels_may_share_a_value():
    with pytest.raises(InputError, match=r"duplicate value 1.*--overlapping-labels"):
        replace(OVERLAP, overlapping=False)
    several = replace(OVERLAP, labels=(Label(name="a", value=3, more_values=(1,), channel=0),), overlapping=False)
    assert several.all_values == (1, 3) and several.region_values == (3,) and several.regions == ((0,),)
    encoded = encode_mask(np.array([[[0, 1, 3]]]), several)
    np.testing.assert_array_equal(encoded[0, 0, 0], [-1, 1, 1])


def test_overlapping_labels_have_a_class_for_each_combination():
    assert OVERLAP.regions == ((0,), (0, 1), (0, 1, 2)) and OVERLAP.region_values == (2, 1, 4)
    assert OVERLAP.classes == {"WT": (1, 2, 3), "TC": (2, 3), "ET": (3,)}
    assert OVERLAP.describe_labels() == "0 (background), 1/2/4 (WT), 1/4 (TC), 4 (ET)"
    assert OVERLAP.name_of(1) == "1 (WT + TC)"
    mask = np.array([[[0, 1, 2, 4]]])
    cond = encode_mask(mask, OVERLAP)
    np.testing.assert_array_equal(cond[:, 0, 0] > 0, [[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]])
    classes = classes_of(torch.from_numpy(cond)[None], OVERLAP)
    assert classes.flatten().tolist() == [0, 2, 1, 3]
    again = encode_channels(classes, OVERLAP.classes.values(), OVERLAP)
    np.testing.assert_array_equal(again[0], cond)
    np.testing.assert_array_equal(
        encode_channels(torch.from_numpy(mask)[None], OVERLAP.channel_values, OVERLAP)[0], cond
    )


def test_a_combination_that_the_contract_does_not_have_is_an_error():
    with pytest.raises(InputError, match="never overlap"):
        classes_of(torch.tensor([-1.0, 1.0, -1.0]).view(1, 3, 1, 1, 1), OVERLAP)


@given(st.lists(st.sets(st.integers(1, 6), min_size=1), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_classes_and_channels_are_inverse(sets, seed):
    labels = tuple(
        Label(name=f"l{c}", value=min(values), more_values=tuple(sorted(values - {min(values)})), channel=c)
        for c, values in enumerate(sets)
    )
    contract = replace(OVERLAP, labels=labels)
    values = np.array((0, *contract.all_values))
    mask = np.random.default_rng(seed).choice(values, (3, 4, 5))
    cond = encode_mask(mask, contract)
    classes = classes_of(torch.from_numpy(cond)[None], contract)
    np.testing.assert_array_equal(encode_channels(classes, contract.classes.values(), contract)[0], cond)
    stored = np.array((0, *contract.region_values))[classes[0].numpy()]
    np.testing.assert_array_equal(encode_mask(stored, contract), cond)


def test_the_example_mask_has_every_combination():
    large = replace(OVERLAP, size=(32, 32, 32))
    assert set(np.unique(example_labels(large))) == {0, 1, 2, 4}
    assert set(np.unique(example_labels(replace(BRATS, size=(32, 32, 32))))) == {0, 1, 2, 3, 4}


def test_long_lists_of_a_configuration_are_refused():
    """Checks compare every value with every other; a config of 16 MiB would take hours."""
    from voxtune.config import MAX_ITEMS

    many = [{"name": f"l{n}", "value": n + 1, "channel": n} for n in range(MAX_ITEMS + 1)]
    contract = {"size": [8, 8, 8], "spacing": [1, 1, 1], "orientation": "RAS", "labels": many}
    with pytest.raises(InputError, match=f"x: labels: a list of {MAX_ITEMS + 1} values"):
        from_mapping(DataContract, contract, "x")
    values = list(range(2, MAX_ITEMS))
    contract["labels"] = [{"name": f"l{n}", "value": 1, "channel": n, "more_values": values} for n in range(2)]
    with pytest.raises(InputError, match="more than 5000"):
        from_mapping(DataContract, contract, "x")
