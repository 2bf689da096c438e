"""The registry of metrics: every entry can be computed by a command, and is documented."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from voxtune.evaluation.bench import PROVIDED
from voxtune.evaluation.evaluate import POSSIBLE
from voxtune.quality.metrics import (
    MEASUREMENTS,
    METRICS,
    NEEDS,
    NEIGHBOUR_MEASUREMENTS,
    PAIR_MEASUREMENTS,
    PairValues,
    VolumeInput,
    choose_pairs,
    collect,
    measure,
    metric_of,
    metrics_for,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_every_metric_has_a_measurement_and_a_command(metric):
    assert metric.measurement in MEASUREMENTS | PAIR_MEASUREMENTS | NEIGHBOUR_MEASUREMENTS
    assert metric.needs <= set(NEEDS)
    assert metric.needs <= POSSIBLE or metric.needs <= PROVIDED | {"partner", "reference"}
    assert metric.uses_real or metric.sets == 1


def test_names_are_unique_and_documented():
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    page = PAGE.read_text()
    for name in names:
        family = name.replace("nearest_voxel_", "nearest_*_").replace("nearest_feature_", "nearest_*_")
        documented = (f"`{name}`", f"`{name}_LABEL`", f"`{family}`", f"`{name.removesuffix('_reference')}`")
        assert any(text in page for text in documented), name


def test_metrics_by_the_names_of_a_result():
    assert metric_of("fid").name == "fid"
    assert metric_of("dice_white_matter").name == "dice"
    assert metric_of("unknown") is None and metric_of("dice") is None
    assert metric_of("psnr_reference").better is None


def test_volumes_are_measured_for_the_metrics_that_need_no_more():
    image = torch.rand(12, 12, 12, generator=torch.Generator().manual_seed(0))
    mask = (image > 0.5).long()
    rows = [
        measure(
            VolumeInput(image=image, mask=m, predicted=p, classes={"brain": 1, "tumour": 2}), metrics_for({"masks"})
        )
        for m, p in ((mask, mask), (mask, None))
    ]
    names = {"dice", "grey_white", "fluid_share", "lesion_contrast", "lesion_dice", "lesion_detection"}
    assert [set(row) for row in rows] == [names, names]
    result = collect(rows)
    # The second volume has no labels; no mask has a tumour.
    assert list(result.by_part["dice"]) == ["brain"]
    assert result.by_part["dice"]["brain"][0] == 1.0 and math.isnan(result.by_part["dice"]["brain"][1])


def test_both_forms_of_diversity_agree():
    metric = metric_of("diversity")
    pairs = np.array(choose_pairs(9, 20, seed=1))
    values = PairValues(values_P=np.random.default_rng(0).random(len(pairs)), pairs_P2=pairs, count=9)
    counts = np.array([2.0, 0, 1, 1, 3, 0, 1, 0, 1])
    forms = [metric.build(values, None, paired=paired)(counts) for paired in (False, True)]
    assert forms[0] == pytest.approx(forms[1], rel=1e-12)
