"""Data contracts: validation, JSON round trip, and encoding of masks and images."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories.contracts import BRATS, WHOLE_HEAD
from tests.factories.nifti import ORIENTATIONS
from voxtune.config import from_mapping, to_mapping
from voxtune.data.contract import (
    DataContract,
    Label,
    encode_mask,
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
    with pytest.raises(InputError, match=r"unknown label 9.*1 \(brain\)"):
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
