"""Bootstrap intervals: coverage, repeatability, and when there is none."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from voxtune.errors import InputError
from voxtune.quality.bootstrap import Bootstrap, mean_value, metric_value
from voxtune.quality.distributions import fid_statistic
from voxtune.quality.result import Evaluation


def test_the_interval_of_a_mean_is_that_of_theory():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    metric = mean_value("x", values, Bootstrap(resamples=4000))
    half = 1.96 * values.std() / 20
    assert metric.value == pytest.approx(values.mean())
    assert metric.low == pytest.approx(values.mean() - half, abs=0.03)
    assert metric.high == pytest.approx(values.mean() + half, abs=0.03)
    assert (metric.n, metric.resamples, metric.seed, metric.level) == (400, 4000, 0, 0.95)


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    rng = np.random.default_rng(1)
    metric = [mean_value("x", rng.normal(size=40), Bootstrap(resamples=200)) for _ in range(200)]
    covered = sum(f.low <= 0 <= f.high for f in metric)
    assert 175 <= covered <= 199


def test_the_seed_fixes_the_interval():
    values = np.random.default_rng(2).normal(size=10)
    one, again, other = (mean_value("x", values, Bootstrap(seed=s)) for s in (5, 5, 6))
    assert one == again
    assert one.low != other.low


def test_a_centred_interval_contains_a_value_that_resampling_inflates():
    a, b = (torch.randn(24, 16, generator=torch.Generator().manual_seed(s)).double() for s in (0, 1))
    settings = Bootstrap(resamples=100)
    plain = metric_value("fid", fid_statistic(a, b), [24, 24], settings)
    centred = metric_value("fid", fid_statistic(a, b), [24, 24], settings, centred=True)
    assert plain.low > plain.value
    assert centred.low < centred.value < centred.high
    assert "centred" in centred.interval
    same = metric_value("fid", fid_statistic(a, a), [24, 24], settings, centred=True, minimum=0.0)
    assert same.low == 0.0 and same.value == pytest.approx(0.0, abs=1e-9)


def test_one_volume_and_infinities_have_no_interval_and_are_json():
    lonely = mean_value("x", [1.0], Bootstrap())
    assert (lonely.low, lonely.high, lonely.resamples) == (None, None, 0)
    infinite = mean_value("psnr", [math.inf, 20.0], Bootstrap(), note="equal")
    assert infinite.low is None
    text = json.dumps([lonely.to_json(), infinite.to_json()], allow_nan=False)
    assert json.loads(text)[1]["value"] is None


def test_settings_are_checked():
    for wrong in ({"resamples": 1}, {"seed": -1}, {"level": 1.0}):
        with pytest.raises(InputError, match="bootstrap"):
            Bootstrap(**wrong)


def test_the_page_names_metrics_hash_and_reasons():
    metric = mean_value("a|b", [1.0, 2.0], Bootstrap())
    network = {"file": "f", "sha256": "abc"}
    result = Evaluation(
        metrics=(metric,),
        left_out={"fid": "no network", "psnr": "no pairs", "mmd": "no network"},
        warnings=("few",),
        counts={},
        images=(),
        volumes=(),
        features=network,
        segmenter=None,
    )
    page = result.markdown("title")
    assert "a\\|b" in page and "`abc`" in page and "- fid, mmd: no network" in page and "- few" in page
    assert result["a|b"] is metric
    assert result.to_json(extra=1)["versions"]["torch"] == torch.__version__
