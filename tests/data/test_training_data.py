"""Statistics of training data: what they hold, and which inputs are far outside those of the included model."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from voxtune.config import from_mapping, to_mapping
from voxtune.data.cohort import HELD_OUT, cohort_contract
from voxtune.data.contract import encode_mask
from voxtune.data.dataset import CohortSource
from voxtune.data.training_data import (
    MaskComparison,
    Quantiles,
    TrainingData,
    differences,
    measure,
    measured_numbers,
    summarise,
    unlike,
    unlike_subjects,
)
from voxtune.errors import InputError
from voxtune.runtime.model import ModelConfig
from voxtune.runtime.storage import demo_model, load
from voxtune.segmentation.segmenter import SegmenterConfig, load_segmenter, shipped_segmenter

CONTRACT = replace(cohort_contract((8, 8, 8)), spacing=(10.0, 20.0, 5.0))


def box(contract, brain, tumour=0):
    """A condition: a box of `brain` voxels a side, and one of `tumour` voxels in its corner."""
    labels = np.zeros(contract.size, np.uint8)
    labels[:brain, :brain, :brain] = 1
    labels[:tumour, :tumour, :tumour] = 2
    return labels


def subject(brain, tumour=0, skull=0):
    labels = box(CONTRACT, brain, tumour)
    image = np.where(labels > 0, 0.5, -1.0).astype(np.float32)
    image[-skull:] = np.where(skull, 0.5, image[-skull:])
    return {"cond_CDHW": encode_mask(labels, CONTRACT), "images_CDHW": image[None]}


def test_quantities_of_a_subject():
    measured = measure(CONTRACT, **subject(4, 2, skull=1))
    # 64 voxels of 1 ml, 8 of them tumour; the last of 8 slices is bright without a label.
    assert measured.labels_ml == {"brain": 56.0, "tumour": 8.0}
    assert (measured.labelled_ml, measured.image_ml) == (64.0, 128.0)
    assert measured.outside_share == 0.5
    assert measured.extent_mm == (40.0, 80.0, 20.0)


def test_an_image_without_a_mask_and_an_empty_one():
    assert measure(CONTRACT, images_CDHW=subject(4)["images_CDHW"]).image_ml == 64.0
    empty = measure(
        CONTRACT, cond_CDHW=encode_mask(box(CONTRACT, 0), CONTRACT), images_CDHW=np.full((1, 8, 8, 8), -1.0)
    )
    assert (empty.labelled_ml, empty.image_ml, empty.outside_share, empty.extent_mm) == (0, 0, 0, (0, 0, 0))


def test_statistics_and_their_json():
    rows = [measure(CONTRACT, **subject(n, t), spacing_mm=1.0) for n, t in ((4, 2), (4, 0), (5, 0))]
    data = summarise(rows, CONTRACT, 30)
    assert (data.subjects, data.measured, data.images) == (30, 3, ("T1w",))
    brain, tumour = data.labels
    assert (brain.subjects, brain.ml.low, brain.ml.median, brain.ml.high) == (3, 56.0, 64.0, 125.0)
    assert (tumour.subjects, tumour.ml.high) == (1, 8.0)
    assert data.spacing_mm == Quantiles.of([1.0])
    again = from_mapping(TrainingData, json.loads(json.dumps(to_mapping(data))), "config.json: training_data")
    assert again == data


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"measured": 31}, "measured 31"),
        ({"measured": 0}, "measured 0"),
        ({"labels": [{"name": 3, "subjects": 1}]}, r"labels\[0\]: name"),
        ({"image_ml": {"low": 2.0, "p5": 1.0, "median": 1.0, "p95": 1.0, "high": 1.0}}, "ascending"),
        ({"extent_mm": []}, "expected 3 values"),
        ({"labelled_ml": {"low": -1.0, "p5": 1.0, "median": 1.0, "p95": 1.0, "high": 1.0}}, "0 or more"),
        ({"outside_share": 1e300}, "mapping"),
        ({"weights": 1}, "unknown setting"),
    ],
)
def test_damaged_statistics_are_refused(change, word):
    data = to_mapping(summarise([measure(CONTRACT, **subject(4))], CONTRACT, 30))
    with pytest.raises(InputError, match=word):
        from_mapping(TrainingData, {**data, **change}, "config.json: training_data")


def test_measured_subjects_are_spread_evenly_and_fewer_of_large_volumes():
    assert measured_numbers(3, CONTRACT) == [0, 1, 2]
    assert measured_numbers(640, CONTRACT) == list(range(0, 640, 10))
    assert len(measured_numbers(640, cohort_contract((128, 128, 128)))) == 27
    assert len(measured_numbers(640, cohort_contract((256, 256, 256)))) == 8


@pytest.mark.parametrize(
    ("outside", "words"),
    [
        (subject(7), ["labels of 343 ml in total (training: 64 to 125 ml), as in a mask of the whole head"]),
        (subject(3), ["labels of 27 ml in total"]),
        (subject(5, 4), ["tumour of 64 ml (training: 1 to 8 ml)"]),
        (subject(4, skull=2), ["67% of the bright voxels without a label (training: 0% to 0%; skull?)"]),
    ],
)
def test_differences_from_the_training_data(outside, words):
    rows = [measure(CONTRACT, **subject(n, t)) for n, t in ((4, 2), (4, 1), (5, 2))]
    data = summarise(rows, CONTRACT, 3)
    assert all(differences(data, CONTRACT, row) == [] for row in rows)
    lines = differences(data, CONTRACT, measure(CONTRACT, **outside))
    assert len(lines) == len(words) and all(word in line for word, line in zip(words, lines, strict=True))


def test_coarse_voxels_and_a_different_field_of_view():
    data = summarise([measure(CONTRACT, **subject(4), spacing_mm=25.0)], CONTRACT, 1)
    cond = subject(4)["cond_CDHW"]
    assert differences(data, CONTRACT, measure(CONTRACT, cond_CDHW=cond, spacing_mm=50.0)) == []
    assert differences(data, CONTRACT, measure(CONTRACT, cond_CDHW=cond, spacing_mm=51.0)) == [
        "voxels of 51 mm (training: up to 25 mm)"
    ]
    flat = np.full(CONTRACT.size, 0, np.uint8)
    flat[:8, :4, :2] = 1
    lines = differences(data, CONTRACT, measure(CONTRACT, cond_CDHW=encode_mask(flat, CONTRACT)))
    assert lines == ["labels of 80 mm in depth (training: 40 mm)", "labels of 10 mm in width (training: 20 mm)"]


def test_one_line_for_any_number_of_subjects():
    assert unlike([("a", [])], "mask", "this model") is None
    assert unlike([("a", ["x"])], "mask", "this model") == (
        "a: the mask is far outside the training data of this model: x; results may be invalid"
    )
    rows = [("a", []), ("b", ["x", "y"]), ("c", ["z"])]
    assert unlike(rows, "mask", "this model").startswith("2 of 3 masks are far outside")
    assert "such as b: x, y;" in unlike(rows, "mask", "this model")


def unlike_masks(training, contract, masks):
    comparison = MaskComparison(training, contract)
    for mask in masks:
        comparison.add(*mask)
    return comparison.line()


def test_no_statistics_no_check():
    assert unlike_masks(None, CONTRACT, [("a", box(CONTRACT, 1), (1, 1, 1))]) is None
    assert unlike_subjects(None, CONTRACT, [measure(CONTRACT, **subject(1))], "this model") is None


@pytest.fixture(scope="module")
def shipped():
    """The configs of both networks of the package."""
    return load(demo_model()).config, load_segmenter(shipped_segmenter()).config


def held_out(contract, count):
    source = CohortSource(contract, 0, HELD_OUT + count, healthy_fraction=0.0)
    for number in range(HELD_OUT, HELD_OUT + count):
        image, cond = source[number]
        yield measure(contract, cond_CDHW=cond, images_CDHW=image, spacing_mm=max(contract.spacing))


def check_held_out(shipped, count):
    rows = list(held_out(shipped[0].data, count))
    for config in shipped:
        assert unlike_subjects(config.training_data, config.data, rows, "it") is None
        without_masks = [replace(row, outside_share=None, labels_ml=None, labelled_ml=None) for row in rows]
        assert unlike_subjects(config.training_data, config.data, without_masks, "it") is None


def test_included_networks_accept_held_out_subjects(shipped):
    check_held_out(shipped, 6)


@pytest.mark.slow
def test_included_networks_accept_64_held_out_subjects(shipped):
    check_held_out(shipped, 64)


def head(contract, ml):
    """An ellipsoid of `ml` in the proportions of a head, as brain, with a tumour of 14 ml in it."""
    scale = (ml * 1000 / (4 / 3 * math.pi * 1.15 * 1.0 * 0.8)) ** (1 / 3)
    axes = [(np.arange(n) - (n - 1) / 2) * mm for n, mm in zip(contract.size, contract.spacing, strict=True)]
    z, y, x = np.meshgrid(*axes, indexing="ij", sparse=True)
    labels = ((z / 1.0) ** 2 + (y / 1.15) ** 2 + (x / 0.8) ** 2 < scale**2).astype(np.uint8)
    labels[(z - 20) ** 2 + (y - 20) ** 2 + x**2 < 15**2] = 2
    return labels


def test_whole_head_mask_in_the_skull_stripped_model(shipped):
    for config in shipped:
        masks = [("sub-01_dseg.nii.gz", head(config.data, 3700), (1.0, 1.0, 1.0))]
        line = unlike_masks(config.training_data, config.data, masks)
        low, high = config.training_data.labelled_ml.low, config.training_data.labelled_ml.high
        assert line.startswith("sub-01_dseg.nii.gz: the mask is far outside")
        assert f"labels of 3573 ml in total (training: {low:.0f} to {high:.0f} ml)" in line
        assert unlike_masks(config.training_data, config.data, [("a", head(config.data, 1500), (1, 1, 1))]) is None


def test_statistics_of_the_included_networks(shipped):
    for config, subjects in zip(shipped, (480, 240), strict=True):
        data = config.training_data
        assert (data.subjects, data.measured, data.images) == (subjects, 64, ("T1w",))
        assert 1000 < data.labelled_ml.median < 1800 and data.outside_share.high < 0.1
        row = next(iter(CohortSource(config.data, 0, 1)[n] for n in range(1)))
        measured = measure(config.data, cond_CDHW=row[1], images_CDHW=row[0])
        assert data.labelled_ml.low <= measured.labelled_ml <= data.labelled_ml.high


def test_configs_with_and_without_statistics(shipped):
    for config, read in zip(shipped, (ModelConfig.from_json, SegmenterConfig.from_json), strict=True):
        data = json.loads(json.dumps(config.to_json()))
        assert read(data, "config.json") == config
        del data["training_data"]
        assert read(data, "config.json") == replace(config, training_data=None)
        with pytest.raises(InputError, match="training_data"):
            read({**data, "training_data": {"subjects": "many"}}, "config.json")
