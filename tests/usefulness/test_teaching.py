"""The arms of usefulness: they differ by their volumes alone, and useless volumes are detected."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.factories import analytic
from voxtune.data.splits import Volumes
from voxtune.errors import InputError
from voxtune.evaluation import usefulness as teaching
from voxtune.evaluation.usefulness import arm_data, generate_volumes, measure_dice, scaled, train_arms
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.usefulness_table import Arm, UsefulnessTable, arm_name, training_counts
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import AutoSampling, Evidence
from voxtune.segmentation.train import SegmentTraining

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = SegmentTraining(steps=40, batch=4, learning_rate=3e-2)


def volumes(count=10, images=analytic.ONE):
    outcome = analytic.subjects(count, images)
    return Volumes(contract=outcome.contract, images_NCDHW=outcome.images_NCDHW, classes_NDHW=outcome.classes_NDHW)


def held_out(count=6, images=analytic.ONE):
    """Other subjects of the same kind."""
    outcome = analytic.subjects(20 + count, images)
    return replace(outcome, images_NCDHW=outcome.images_NCDHW[20:], classes_NDHW=outcome.classes_NDHW[20:])


def noise(like):
    images = torch.randn(like.images_NCDHW.shape, generator=torch.Generator().manual_seed(0))
    return replace(like, images_NCDHW=scaled(images / 4))


def taught(arms, seeds=1, training=QUICK, **more):
    *_, last = train_arms(arms, held_out(), training, seeds, base=4, **more)
    return UsefulnessTable(arms=last, settings=Bootstrap(resamples=50), about={})


@pytest.fixture(scope="module")
def against_noise():
    real = volumes()
    return taught(arm_data(replace(real, images_NCDHW=scaled(real.images_NCDHW)), noise(real)), seeds=2)


def test_noise_is_worth_less_than_subjects(against_noise):
    arms = {arm.name: arm for arm in against_noise.arms}
    assert against_noise.dice(arms["real"], "brain").value > 0.8
    # Where a brain lies can be learned from masks alone; where a lesion lies cannot.
    assert against_noise.dice(arms["real"], "tumour").value > 0.45
    gains = {g.label: g for g in against_noise.gains() if g.arm == "synthetic"}
    assert gains["tumour"].verdict == "lower"
    assert gains["tumour"].difference.high < -0.2 and len(gains["tumour"].by_seed) == 2


def test_every_metric_has_interval_and_count(against_noise):
    outcome = against_noise.to_json()
    assert [arm["name"] for arm in outcome["arms"]] == ["real", "synthetic", "both"]
    assert (outcome["subjects"], outcome["seeds"]) == (6, 2)
    for arm in outcome["arms"]:
        for label, figure in arm["dice"].items():
            assert figure["low"] <= figure["value"] <= figure["high"], (arm["name"], label)
            assert figure["n"] == 6 and len(figure["by_seed"]) == 2
            assert np.mean(figure["by_seed"]) == pytest.approx(figure["value"])
            assert np.shape(arm["dice_by_seed_and_subject"][label]) == (2, 6)
        assert {gain["against"] for gain in arm["gains"]} == (set() if arm["name"] == "real" else {"real"})
    page = against_noise.markdown("title")
    assert "| synthetic | 10 synthetic |" in page and "| both | 10 real + 10 synthetic |" in page
    assert "6 held-out subjects, 2 seeds" in page


def test_the_same_volumes_in_another_arm_teach_the_same_to_the_bit():
    real = volumes(6)
    quick = replace(QUICK, steps=6)
    outcome = taught(arm_data(real, real, few=5), seeds=2, training=quick)
    arms = {arm.name: arm.dice_SN for arm in outcome.arms}
    assert list(arms) == ["real", "synthetic", "both", "few", "few_and_synthetic"]
    for label in outcome.labels:
        assert np.array_equal(arms["real"][label], arms["synthetic"][label])
        assert not np.array_equal(arms["real"][label], arms["both"][label])
    gains = {(g.arm, g.against): g for g in outcome.gains() if g.label == "brain"}
    assert gains["synthetic", "real"].verdict == "no significant difference"
    assert ("few_and_synthetic", "few") in gains and ("few", "real") in gains


def test_every_arm_has_the_same_recipe_network_and_seeds(monkeypatch):
    calls, train = [], teaching.train_segmenter

    def listening(source, training, **options):
        calls.append((training, options))
        return train(source, replace(training, steps=1), **options)

    monkeypatch.setattr(teaching, "train_segmenter", listening)
    taught(arm_data(volumes(4), noise(volumes(4)), few=2), seeds=2)
    assert [c[0].seed for c in calls] == [0] * 5 + [1] * 5
    assert all(replace(c[0], seed=0) == replace(QUICK, seed=0) and c[1] == calls[0][1] for c in calls)


def test_results_are_yielded_after_each_seed():
    outcome = [
        arms[0].dice_SN["brain"].shape
        for arms in train_arms(arm_data(volumes(4), volumes(4)), held_out(2), replace(QUICK, steps=1), 3, base=4)
    ]
    assert outcome == [(1, 2), (2, 2), (3, 2)]


def test_generated_volumes_belong_to_their_masks_for_any_batch():
    model, masks = analytic.model(4), volumes(3)
    options = model.resolve(steps=4)
    one = generate_volumes(model, masks, 5, options, seed=0, batch=1, say=lambda _: None)
    many = generate_volumes(model, masks, 5, options, seed=0, batch=4, say=lambda _: None)
    assert torch.allclose(one.volumes.images_NCDHW, many.volumes.images_NCDHW, atol=1e-4)
    assert torch.equal(one.volumes.classes_NDHW, masks.classes_NDHW[[0, 1, 2, 0, 1]])
    # The second volume for a mask has noise of its own, and every volume its own extremes at -1 and 1.
    assert not torch.allclose(one.volumes.images_NCDHW[0], one.volumes.images_NCDHW[3], atol=0.05)
    assert torch.equal(one.volumes.images_NCDHW.amax((1, 2, 3, 4)), torch.ones(5))
    assert torch.equal(one.volumes.images_NCDHW.amin((1, 2, 3, 4)), -torch.ones(5))


def test_volumes_of_two_images():
    images = ("T1w", "T2w")
    model, masks = analytic.model(4, images), volumes(4, images)
    synthetic = generate_volumes(model, masks, 4, model.resolve(steps=4), seed=0, batch=4, say=lambda _: None)
    made = synthetic.volumes.images_NCDHW
    assert made.shape == (4, 2, *analytic.SIZE)
    # Each image has its own extremes, and the tumour is bright in one and dark in the other.
    assert torch.equal(made.amax((2, 3, 4)), torch.ones(4, 2))
    tumour = masks.classes_NDHW == 2
    first, second = (made[:, channel][tumour].mean() for channel in (0, 1))
    assert first > 0.4 and second < -0.4
    *_, arms = train_arms(arm_data(masks, synthetic.volumes), held_out(2, images), replace(QUICK, steps=30), 1, base=4)
    assert {arm.name for arm in arms} == {"real", "synthetic", "both"}
    assert min(float(np.nanmean(arm.dice_SN["brain"])) for arm in arms) > 0.7


class Sometimes(nn.Module):
    def __init__(self, network, broken):
        super().__init__()
        self.network, self.broken, self.calls = network, broken, 0

    def forward(self, x, t_N, cond):
        outcome = self.network(x, t_N, cond)
        outcome[self.broken] = torch.nan
        return outcome


def test_broken_volumes_are_left_out_and_counted():
    model = analytic.model(2)
    options = model.resolve(steps=2)

    def generated(broken):
        return generate_volumes(
            Model(model.config, Sometimes(model.network, broken)),
            volumes(4),
            4,
            options,
            seed=0,
            batch=4,
            say=lambda _: None,
        )

    outcome = generated([1])
    assert outcome.broken == 1 and len(outcome.volumes) == 3
    assert torch.equal(outcome.volumes.classes_NDHW, volumes(4).classes_NDHW[[0, 2, 3]])
    with pytest.raises(InputError, match="every synthetic volume"):
        generated([0, 1, 2, 3])


def test_dice_leaves_out_subjects_without_the_label():
    test = held_out(3)
    classes = test.classes_NDHW.clone()
    classes[0] = classes[0].clamp(max=1)
    outcome = measure_dice(analytic.segmenter(), replace(test, classes_NDHW=classes))
    assert np.isnan(outcome["tumour"][0]) and not np.isnan(outcome["tumour"][1:]).any()
    arms = tuple(Arm(name=n, subjects=3, synthetic=0, dice_SN={k: v[None] for k, v in outcome.items()}) for n in "ab")
    result = UsefulnessTable(arms=arms, settings=Bootstrap(resamples=20), about={})
    assert result.dice(arms[0], "tumour").n == 2 and result.dice(arms[0], "brain").n == 3
    assert result.to_json()["arms"][0]["dice_by_seed_and_subject"]["tumour"][0][0] is None


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ([[0.1, 0.2, 0.1], [0.1, 0.1, 0.2]], "higher"),
        ([[-0.1, -0.2, -0.1], [-0.1, -0.1, -0.2]], "lower"),
        # Seeds alone cause as much; subjects disagree; a single seed.
        ([[0.4, 0.5, 0.4], [0.1, 0.1, 0.1]], "no significant difference"),
        ([[0.1, -0.1, 0.1], [0.1, -0.1, 0.0]], "no significant difference"),
        ([[0.1, 0.2, 0.1]], "no significant difference"),
    ],
)
def test_a_verdict_needs_subjects_and_seeds(gaps, verdict):
    base = np.full(np.shape(gaps), 0.5)
    arms = (
        Arm(name="real", subjects=3, synthetic=0, dice_SN={"brain": base}),
        Arm(name="both", subjects=3, synthetic=3, dice_SN={"brain": base + np.array(gaps)}),
    )
    result = UsefulnessTable(arms=arms, settings=Bootstrap(resamples=200), about={})
    [gain] = result.gains()
    assert gain.verdict == verdict and verdict in gain.text()
    assert (gain.seed_error is None) == (len(gaps) == 1)
    assert "no significant difference" not in verdict or "higher" not in result.markdown("title")


@pytest.mark.parametrize("few", [0, 4, -1])
def test_few_must_be_fewer(few):
    with pytest.raises(InputError, match="--few"):
        arm_data(volumes(4), volumes(4), few=few)


def test_stored_settings_are_used():
    model, masks = analytic.model(4), volumes(2)
    evidence = Evidence(file="steps.json", sha256="0" * 64, subjects=64, summary="")
    auto = AutoSampling(sampler="ddim", steps=2, timestep_spacing="leading", clip=False, evidence=evidence)
    stored = Model(replace(model.config, sampling=replace(model.config.sampling, auto=auto)), model.network)
    outcome = generate_volumes(stored, masks, 2, stored.resolve(steps="auto"), seed=0, batch=2, say=lambda _: None)
    explicit = model.resolve(sampler="ddim", steps=2, timestep_spacing="leading", clip=False)
    expected = generate_volumes(model, masks, 2, explicit, seed=0, batch=2, say=lambda _: None)
    assert torch.equal(outcome.volumes.images_NCDHW, expected.volumes.images_NCDHW)


@pytest.mark.parametrize(
    ("data", "arm", "name", "counts"),
    [
        # Files of version 0.1 call simulated subjects real.
        (
            "240 packed subjects (subjects 0 to 239 of the embedded cohort, seed 0)",
            {"real": 240},
            "simulated",
            "simulated",
        ),
        ("6 subjects of the embedded cohort, seed 0", {"real": 6}, "simulated", "simulated"),
        ("6 subjects of the folder cohort", {"real": 6}, "real", "real"),
        ("6 simulated subjects of the cohort, seed 0", {"simulated": 6}, "simulated", "simulated"),
    ],
)
def test_results_of_version_0_1_are_read_by_todays_names(data, arm, name, counts):
    [count] = arm.values()
    arm = {"name": next(iter(arm)), **arm, "synthetic": 2}
    assert arm_name({"data": data}, arm["name"]) == name
    assert training_counts({"data": data}, arm) == {counts: count, "synthetic": 2}
