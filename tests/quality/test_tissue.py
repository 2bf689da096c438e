"""Contrast of tissues and lesions, and scores by the size of lesions, with known truths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from voxtune.quality.metrics import VolumeInput, collect, measure_images, metric_of, metrics_for
from voxtune.quality.tissue import (
    SIZES,
    LesionScore,
    by_size,
    components,
    fit_tissues,
    lesion_contrast,
    lesion_scores,
)

SIDE = 48


def brain(means=(0.2, 0.5, 0.7), spread=0.05, shares=(0.15, 0.45, 0.4), seed=0):
    """An image of three tissues in random places, and where they are healthy."""
    random = np.random.default_rng(seed)
    tissue = random.choice(3, size=(SIDE,) * 3, p=shares)
    image = np.take(means, tissue) + random.normal(0, spread, tissue.shape)
    inside = np.zeros(tissue.shape, bool)
    inside[4:-4, 4:-4, 4:-4] = True
    return torch.from_numpy(np.where(inside, image, 0.0).astype(np.float32)), torch.from_numpy(inside)


@pytest.mark.parametrize(
    ("means", "spread"), [((0.2, 0.5, 0.7), 0.05), ((0.1, 0.55, 0.85), 0.06), ((0.25, 0.6, 0.72), 0.05)]
)
def test_known_tissues_are_recovered(means, spread):
    fit = fit_tissues(*brain(means, spread))
    assert np.allclose(fit.means, means, atol=0.012)
    assert fit.contrast == pytest.approx((means[2] - means[1]) / spread, rel=0.07)
    assert np.allclose(fit.shares, (0.15, 0.45, 0.4), atol=0.03)


def test_bright_fluid():
    image, healthy = brain((0.85, 0.45, 0.3), 0.03)
    fit = fit_tissues(image, healthy, bright_fluid=True)
    assert np.allclose(fit.means, (0.85, 0.45, 0.3), atol=0.012)
    assert fit.shares[0] == pytest.approx(0.15, abs=0.02) and fit.contrast == pytest.approx(5, rel=0.07)


def test_contrast_falls_with_the_difference_and_does_not_depend_on_the_scale():
    contrasts = [fit_tissues(*brain((0.2, 0.6 - d / 2, 0.6 + d / 2), 0.05)).contrast for d in (0.25, 0.18, 0.12)]
    assert contrasts[0] > contrasts[1] > contrasts[2]
    image, healthy = brain()
    assert fit_tissues(image * 0.5 + 0.2, healthy).contrast == pytest.approx(
        fit_tissues(image, healthy).contrast, rel=0.01
    )
    # Grey and white matter alike: far below any image with contrast.
    assert fit_tissues(*brain((0.2, 0.6, 0.6), 0.05)).contrast < 1.5


def test_too_few_voxels_have_no_tissues_and_equal_ones_no_contrast():
    image, healthy = brain()
    constant = fit_tissues(torch.zeros_like(image), healthy)
    assert constant.contrast == 0 and math.isnan(constant.shares[0])
    assert fit_tissues(image, torch.zeros_like(healthy)) is None


def test_lesion_contrast_is_signed_and_in_units_of_the_spread():
    random = np.random.default_rng(1)
    image = torch.from_numpy(random.normal(0.6, 0.05, (SIDE,) * 3))
    lesion = torch.zeros((SIDE,) * 3, dtype=torch.bool)
    lesion[20:30, 20:30, 20:30] = True
    image[lesion] -= 0.2
    assert lesion_contrast(image, lesion, ~lesion) == pytest.approx(-4, rel=0.1)
    # Only the surroundings count.
    far = image.clone()
    far[:8] = 5.0
    assert lesion_contrast(far, lesion, ~lesion) == lesion_contrast(image, lesion, ~lesion)
    assert math.isnan(lesion_contrast(image, torch.zeros_like(lesion), ~lesion))


def test_components_are_those_of_scipy():
    from scipy.ndimage import label

    random = np.random.default_rng(2)
    for share in (0.02, 0.08, 0.3):
        mask = random.random((19, 23, 17)) < share
        expected, count = label(mask, np.ones((3, 3, 3)))
        parts = components(torch.from_numpy(mask))
        assert parts.max() == count and (parts > 0).tolist() == mask.tolist()
        assert len(np.unique(np.stack([parts[mask], expected[mask]]), axis=1)[0]) == count
    assert components(torch.zeros(4, 5, 6)).max() == 0


def test_lesions_are_scored_one_by_one():
    lesion = torch.zeros(40, 40, 40, dtype=torch.bool)
    lesion[2:12, 2:12, 2:12] = True  # 1000 voxels, found shifted by half
    lesion[25:30, 25:30, 25:30] = True  # 125 voxels, missed
    lesion[25:29, 2:6, 2:6] = True  # 64 voxels, found exactly
    predicted = torch.zeros_like(lesion)
    predicted[2:12, 2:12, 7:17] = True
    predicted[25:29, 2:6, 2:6] = True
    predicted[36:39, 36:39, 36:39] = True  # a false positive belongs to no lesion
    scores = sorted(lesion_scores(lesion, predicted, 0.01), key=lambda score: -score.ml)
    assert [score.ml for score in scores] == [10.0, 1.25, 0.64]
    assert [score.dice for score in scores] == [0.5, 0.0, 1.0]
    assert [score.detected for score in scores] == [True, False, True]
    sized = by_size(scores, "dice")
    assert list(sized) == list(SIZES) and math.isnan(sized["over_20_ml"])
    assert (sized["under_1_ml"], sized["1_to_5_ml"], sized["5_to_20_ml"]) == (1.0, 0.0, 0.5)


def test_a_lesion_is_detected_from_a_tenth_on():
    lesion = torch.zeros(12, 12, 12, dtype=torch.bool)
    lesion[:10, :10, :1] = True
    for found, expected in ((9, False), (10, True)):
        predicted = torch.zeros_like(lesion)
        predicted[0, :found, 0] = True
        assert [score.detected for score in lesion_scores(lesion, predicted, 1.0)] == [expected]
    assert by_size([LesionScore(ml=1.0, dice=0.5, detected=True)], "detected")["1_to_5_ml"] == 1.0


def volume(contrast=0.2, **fields):
    image, healthy = brain((0.2, 0.5, 0.5 + contrast), 0.05)
    mask = healthy.long()
    mask[20:30, 20:30, 20:30] = 2
    return VolumeInput(
        image=image,
        mask=mask,
        predicted=mask,
        masked=image,
        healthy=(1,),
        pathology=(2,),
        voxel_ml=0.008,
        classes={"brain": (1,), "tumour": (2,)},
        **fields,
    )


def test_metrics_of_the_registry():
    metrics = [m for m in metrics_for({"masks", "real"}) if "grey" in m.name or "lesion" in m.name or "csf" in m.name]
    rows = [measure_images({"": volume(c)}, metrics) for c in (0.2, 0.25)]
    measured = collect(rows)
    assert measured.values["grey_white"] == pytest.approx([4, 5], rel=0.08)
    assert measured.values["fluid_share"] == pytest.approx([0.15, 0.15], abs=0.02)
    assert list(measured.by_part["lesion_dice"]) == ["5_to_20_ml"]  # 1000 voxels of 8 microlitres
    real = collect([measure_images({"": volume(0.3)}, metrics)] * 2)
    ratio = metric_of("grey_white_ratio")
    value = ratio.build(measured.get(ratio), real.get(ratio))(np.ones(2), np.ones(2))
    assert value == pytest.approx(4.5 / 6, rel=0.06)
    assert metric_of("lesion_detection_under_1_ml").name == "lesion_detection" and metric_of("lesion_dice") is None
    # Several kinds: tissues of each, lesions once.
    both = collect([measure_images({"T1w": volume(kind="T1w"), "FLAIR": volume(kind="FLAIR")}, metrics)] * 2)
    assert set(both.by_part["grey_white"]) == {"T1w", "FLAIR"} and "5_to_20_ml" in both.by_part["lesion_dice"]


def test_volumes_without_a_mask_are_ignored():
    metrics = metrics_for({"masks", "real"})
    bare = VolumeInput(image=volume().image, classes=volume().classes)
    measured = collect([measure_images({"": v}, metrics) for v in (volume(), bare)])
    contrast = metric_of("grey_white_contrast")
    assert np.isnan(measured.values["grey_white"]).tolist() == [False, True]
    assert contrast.build(measured.get(contrast), None)(np.ones(2)) == measured.values["grey_white"][0]
    assert "grey_white" not in collect([measure_images({"": bare}, metrics)]).values
