"""Feature caching in the table of steps: chosen only if it is non-inferior and faster."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.factories import analytic
from voxtune.errors import InputError
from voxtune.evaluation.step_search import TableOptions, _cached_candidates, confirm_table, numerics_table, step_table
from voxtune.evaluation.steps import precisions, read_earlier
from voxtune.plan.hazards import slow_half
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.step_table import FORMAT, StepRow
from voxtune.runtime.describe import shallow_share
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import FeatureCache
from voxtune.workloads import without_zeros

QUICK = TableOptions(batch=16, margin=1.5, bootstrap=Bootstrap(resamples=60))
SLOW = 0.01

pytestmark = pytest.mark.usefixtures("one_thread")


class Parted(nn.Module):
    """The best network in two parts. Its deep feature is the mean of each label, which no step changes, so that keeping it is
    exact; a `stale` one is the whole answer, of another noise."""

    def __init__(self, schedule, stale=False, full=SLOW, between=0.0):
        super().__init__()
        self.best = analytic.Best(schedule)
        self.stale, self.full, self.between = stale, full, between

    def forward(self, x, t_N, cond):
        time.sleep(self.full)
        return self.best(x, t_N, cond)

    def split(self, depth):
        return _Full(self), _Between(self)


class _Full(nn.Module):
    def __init__(self, whole):
        super().__init__()
        self.whole = whole

    def forward(self, x, t_N, cond):
        eps = self.whole(x, t_N, cond)
        return eps, eps if self.whole.stale else cond


class _Between(_Full):
    def forward(self, x, t_N, cond, deep):
        time.sleep(self.whole.between)
        return deep if self.whole.stale else self.whole.best(x, t_N, deep)


def table(caches, steps=(20,), options=QUICK, **network):
    model = analytic.model()
    parted = Model(model.config, Parted(model.schedule, **network))
    result = step_table(
        parted,
        analytic.subjects(16),
        analytic.segmenter(),
        samplers=("ddim",),
        steps=steps,
        caches=caches,
        options=options,
    )
    return result, {row.name: row for row in result.rows}


@pytest.mark.slow
def test_an_equal_and_faster_cache_is_chosen():
    result, rows = table([FeatureCache(interval=4), FeatureCache(interval=2, depth=0)])
    assert result.choice.record["cache"] == {"interval": 4, "depth": 1}
    plain = rows[result.chosen.removesuffix(" cache 4")]
    assert result.choice.seconds < plain.seconds
    # The same volumes, so the same figures.
    assert result.choice.metrics["psnr"] == plain.metrics["psnr"]
    assert result.choice.verdict == "non-inferior" and result.refusal() is None
    assert f"{plain.name} cache 2:0" in rows
    assert result.chosen in result.conclusion()


@pytest.mark.slow
def test_a_cache_is_confirmed_together_with_the_row_without_it(tmp_path):
    rows = [
        {
            "name": name,
            "sampler": "ddim",
            "steps": 20,
            "timestep_spacing": "logsnr",
            "clip": True,
            "seed": 0,
            "verdict": verdict,
        }
        for name, verdict in (("plain", "not worse"), ("kept", "not worse"), ("other", "worse: fid"))
    ]
    rows[1]["cache"] = {"interval": 4, "depth": 1}
    about = {"format": FORMAT, "table": "steps", "model_sha256": "a", "subjects": 64, "skip": 0, "margin": 0.5}
    (tmp_path / "steps.json").write_text(json.dumps({**about, "chosen": "kept", "rows": rows}))
    slow = 5 * SLOW  # a difference that the clock can resolve on a busy machine
    model = analytic.model()
    for change, chosen in (({"full": slow}, " cache 4"), ({"full": 0.0, "between": slow}, "")):
        parted = Model(model.config, Parted(model.schedule, **change))
        variants = read_earlier(tmp_path / "steps.json", parted, "a").candidates
        result = confirm_table(parted, analytic.subjects(16), analytic.segmenter(), variants, options=QUICK)
        assert [row.name for row in result.rows[2:]] == ["ddim 20 logsnr cache 4", "ddim 20 logsnr"]
        assert result.chosen == f"ddim 20 logsnr{chosen}"


@pytest.mark.parametrize("interval", [4, 20])
@pytest.mark.slow
def test_a_stale_feature_is_refused(interval):
    result, rows = table([FeatureCache(interval=interval)], stale=True)
    assert result.choice is not None and "cache" not in result.choice.record
    worse = rows[f"{result.chosen} cache {interval}"]
    assert worse.failed and worse.seconds < result.choice.seconds
    assert result.refusal().startswith(f"Feature caching was not chosen: {worse.name} is inferior: ")
    assert result.refusal() in result.markdown("title") and result.to_json()["refusal"] == result.refusal()
    assert result.to_json()["rows"][-1]["cache"] == {"interval": interval, "depth": 1}


@pytest.mark.slow
def test_an_equal_cache_that_is_not_faster_is_refused():
    result, rows = table([FeatureCache(interval=2)], full=0.0, between=SLOW)
    assert "cache" not in result.choice.record
    assert not rows[f"{result.chosen} cache 2"].failed
    assert "non-inferior, but not faster" in result.refusal()


@pytest.mark.slow
def test_caching_is_not_tried_without_a_non_inferior_row():
    result, rows = table([FeatureCache(interval=2)], steps=(1, 2), options=replace(QUICK, margin=0.5), full=0.0)
    assert result.chosen is None and not any("cache" in name for name in rows)
    assert any("feature caching was not tried" in note for note in result.notes)


def test_more_steps_are_tried_where_arithmetic_leaves_them_less_to_do():
    model = analytic.model()
    settings = {"sampler": "ddim", "steps": 6, "timestep_spacing": "leading", "clip": False}
    row = StepRow(name="ddim 6", record=settings, seconds=1.0, metrics={})
    numbers = (4, 6, 8, 12, 24)
    tried = {
        interval: [
            way.steps for way in _cached_candidates(model, FeatureCache(interval=interval, depth=0), row, numbers)
        ]
        for interval in (2, 4, 12)
    }
    # Never fewer steps than the row has, nor than the interval. Of 8 steps with interval 2, five are full.
    assert 0.2 < shallow_share(model.config.network, analytic.SIZE, 0) < 0.3
    assert tried == {2: [6, 8], 4: [6, 8], 12: [12]}
    way, _ = _cached_candidates(model, FeatureCache(interval=2, depth=0), row, numbers)
    assert (way.sampler, way.timestep_spacing, way.clip) == ("ddim", "leading", False)
    assert (
        _cached_candidates(
            model, FeatureCache(interval=2), StepRow(**{**vars(row), "record": {**settings, "steps": 2}}), (2,)
        )
        == []
    )


@pytest.mark.skipif(slow_half("cpu") is not None, reason=str(slow_half("cpu")))
def test_numerics_support_feature_caching():
    torch.manual_seed(0)
    model = Model(analytic.model(4).config)
    without_zeros(model.network)
    (_, fp32), (_, bf16) = precisions(model, "auto")
    cond = analytic.subjects(2).condition([0, 1])
    a, b = (m.sample(cond, sampler="ddim", steps=4, cache=2) for m in (fp32, bf16))
    assert 0 < float((a - b).norm() / a.norm()) < 0.2
    result = numerics_table([("FP32", model)], analytic.subjects(2), analytic.segmenter(), steps=2, options=QUICK)
    assert result.refusal() is None


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (FeatureCache(interval=1), "interval must be >= 2"),
        (FeatureCache(interval=21), "number of steps, 20"),
        (FeatureCache(interval=2, depth=5), "0 to 1"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_any_work(cache, message):
    model = Model(analytic.model().config)
    with pytest.raises(InputError, match=message):
        step_table(
            model,
            analytic.subjects(4),
            analytic.segmenter(),
            samplers=("ddim",),
            steps=(10, 20),
            caches=[cache],
            options=QUICK,
        )


def test_a_network_without_parts_is_refused_before_any_work():
    with pytest.raises(InputError, match="Best"):
        step_table(
            analytic.model(), analytic.subjects(4), analytic.segmenter(), steps=(4,), caches=[FeatureCache(interval=2)]
        )
