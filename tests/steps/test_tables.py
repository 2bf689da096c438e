"""The tables of steps and of numerics, for a model with a known distribution."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.factories import analytic
from voxtune.errors import InputError
from voxtune.evaluation.step_search import TableOptions, distances, numerics_table, step_table
from voxtune.evaluation.steps import precisions
from voxtune.plan.hazards import slow_half
from voxtune.quality.bootstrap import Bootstrap
from voxtune.quality.step_table import closest_row, fewest_steps
from voxtune.runtime.model import Model
from voxtune.workloads import without_zeros

QUICK = TableOptions(batch=8, margin=1.5, bootstrap=Bootstrap(resamples=60))


pytestmark = pytest.mark.usefixtures("one_thread")


UPDATES = []


@pytest.fixture(scope="module")
def table():
    UPDATES.clear()
    result = step_table(
        analytic.model(),
        analytic.subjects(16),
        analytic.segmenter(),
        samplers=("ddpm", "ddim"),
        steps=(1, 20, 24),
        options=QUICK,
        on_update=UPDATES.append,
    )
    return result, {row.name: row for row in result.rows}


def test_too_few_steps_are_inferior(table):
    for name in ("ddpm 1", "ddim 1"):
        worse = table[1][name].failed
        assert {"detail", "histogram_w1", "diversity"} <= set(worse), name
        assert table[1][name].verdict.startswith("inferior: ")


def test_equal_volumes_are_non_inferior(table):
    row, again = table[1]["ddpm 24"], table[0].rows[1]
    assert not row.failed
    # Compared with the mean of the two reference runs, of which it is one: better by half of their difference.
    for name, compared in row.compared.items():
        assert compared.worsening.value == pytest.approx(-again.compared[name].worsening.value / 2, abs=1e-12)
    assert row.metrics["ms_ssim_reference"].value == pytest.approx(1)
    assert row.metrics["psnr_reference"].value == math.inf


def test_another_seed_of_the_reference_is_non_inferior(table):
    assert table[0].rows[1].name == "ddpm 24, seed 1"
    assert not table[0].rows[1].failed


def test_the_fewest_steps_are_chosen_and_varied(table):
    result, rows = table
    assert result.choice is not None and result.choice.record["steps"] == 20
    assert {"ddim 20 linspace", "ddim 20 leading", "ddim 20 logsnr"} <= set(rows)
    assert "non-inferior to ddpm 24 over 16 subjects" in result.conclusion()
    assert any("at least 64 are required" in note for note in result.notes)


def test_every_sampler_is_tried_without_clamping_and_non_inferior_rows_in_fewer_steps(table):
    result, rows = table
    for name in ("ddim", "ddpm"):
        own = [row for row in result.rows if row.name.startswith(f"{name} 20")]
        clamped = [row for row in own if row.record["clip"]]
        # The best that clamps, whatever its spacing, is the one that is tried without.
        best = fewest_steps(clamped) or closest_row(clamped)
        assert {row.name for row in own} - {row.name for row in clamped} == {f"{best.name} no clip"}
    for row in result.rows:
        fewer = row.name.replace(" 20", " 1")
        if row.name.startswith(
            ("ddim 20 ", "ddpm 20 ")
        ):  # a variant: one step fewer was tried exactly where it is fine
            assert (fewer in rows) == (not row.failed), row.name
    names = [row.name for row in result.rows]
    assert len(names) == len(set(names))


def test_one_spacing_is_compared_alone():
    result = step_table(
        analytic.model(),
        analytic.subjects(4),
        analytic.segmenter(),
        samplers=("ddim",),
        steps=(3, 20),
        timestep_spacings=("logsnr",),
        options=QUICK,
    )
    assert [row.record["timestep_spacing"] for row in result.rows] == ["trailing"] * 2 + ["logsnr"] * (
        len(result.rows) - 2
    )
    assert [row.name for row in result.rows[2:4]] == ["ddim 3 logsnr", "ddim 20 logsnr"]
    assert result.rows[4].name in ("ddim 3 logsnr no clip", "ddim 20 logsnr no clip")


def test_the_table_is_updated_after_every_row(table):
    result = table[0]
    assert [len(saved.rows) for saved in UPDATES] == list(range(2, len(result.rows) + 1))
    assert UPDATES[-1].chosen == result.chosen and "unfinished: the rows so far" in UPDATES[-1].notes
    assert not any("unfinished" in note for note in result.notes)


def test_files_are_complete(table):
    result = table[0].to_json()
    assert result["margins"]["dice_brain"]["floor"] == 0.01
    for row in result["rows"]:
        for name, span in row["figures"].items():
            assert span["low"] is None or span["low"] <= span["value"] <= span["high"], (row["name"], name)
    page = table[0].markdown("title")
    assert "| margin |" in page and "| ddim 20 leading |" in page
    assert len(table[0].text()) == len(table[0].rows) + 1


def timeless(result):
    rows = [{k: v for k, v in row.items() if k != "seconds_per_volume"} for row in result.to_json()["rows"]]
    return {**result.to_json(), "rows": rows}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_table_whatever_the_batch():
    def again(**options):
        return step_table(
            analytic.model(8),
            analytic.subjects(6),
            analytic.segmenter(),
            samplers=("ddim",),
            steps=(4,),
            options=replace(QUICK, **options),
        )

    first = again()
    assert timeless(first) == timeless(again())
    # The last batch of 4 is short.
    for a, b in zip(first.rows, again(batch=4).rows, strict=True):
        assert a.metrics["psnr"].value == pytest.approx(b.metrics["psnr"].value, rel=1e-4)
    assert again(seed=3).rows[0].metrics != first.rows[0].metrics


class Broken(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x, t_N, cond):
        # The reference takes every step; a single step starts from the last one and lands here alone.
        return self.network(x, t_N, cond) * (math.nan if bool((t_N == 3).any()) else 1.0)


def test_volumes_with_nan_are_inferior():
    model = analytic.model(8)
    broken = Model(model.config, Broken(model.network))
    result = numerics_table(
        [("fine", model), ("broken", broken)], analytic.subjects(4), analytic.segmenter(), options=QUICK
    )
    assert result.rows[2].broken == 4 and "NaN" in result.rows[2].failed
    assert result.chosen is None
    result.markdown("still a page")


def test_a_reference_with_nan_is_no_reference():
    model = analytic.model(8)
    broken = Model(model.config, Broken(model.network))
    with pytest.raises(InputError, match="of the reference contain NaN"):
        step_table(broken, analytic.subjects(4), analytic.segmenter(), samplers=("ddim",), steps=(1,), options=QUICK)


def test_numerics_from_the_same_noise():
    torch.manual_seed(0)
    model = Model(analytic.model(4).config)
    without_zeros(model.network)
    candidates = [*precisions(model, "auto"), ("the same", model)]
    result = numerics_table(
        candidates, analytic.subjects(2), analytic.segmenter(), sampler="ddim", steps=2, options=QUICK
    )
    rows = {row.name: row for row in result.rows}
    if slow_half("cpu") is None:
        assert 0 < rows["BF16 autocast"].distance["relative"] <= rows["BF16 autocast"].distance["relative_worst"] < 0.2
    assert rows["the same"].distance["relative"] == rows["the same"].distance["worst_voxel"] == 0
    assert not rows["the same"].failed
    assert rows["the same"].record["steps"] == 2
    assert result.to_json()["rows"][-1]["distance"]["psnr"] is None
    assert "Distance from the reference" in result.markdown("numerics")


@pytest.mark.slow
def test_two_images_have_their_own_metrics():
    images = ("T1w", "T2")
    model = analytic.model(4, images)
    result = step_table(
        model,
        analytic.subjects(8, images),
        analytic.segmenter(images),
        samplers=("ddim",),
        steps=(1, 4),
        timestep_spacings=("trailing",),
        options=replace(QUICK, margin=0.5),
    )
    one = step_table(
        analytic.model(4),
        analytic.subjects(8),
        analytic.segmenter(),
        samplers=("ddim",),
        steps=(1,),
        timestep_spacings=("trailing",),
        options=replace(QUICK, margin=0.5),
    )
    names = set(result.rows[0].metrics)
    # Those of single volumes and sets of volumes by the kind of the image; those of the segmenter once.
    assert {"psnr_T1w", "psnr_T2w", "histogram_w1_T1w", "histogram_w1_T2w", "diversity_T2w", "detail_T2w"} <= names
    assert {"fid", "mmd", "dice_brain"} <= names
    assert not {"psnr", "psnr_T2", "dice_brain_T1w", "fid_T1w"} & names
    single = set(one.rows[0].metrics)
    whole = ("dice_", "lesion_dice_", "lesion_detection_")
    split = {name for name in single if name not in ("fid", "mmd") and not name.startswith(whole)}
    assert names == {f"{name}_{kind}" for name in split for kind in ("T1w", "T2w")} | (single - split)
    assert {"histogram_w1_T1w", "histogram_w1_T2w"} <= set(result.rows[2].failed)
    stored = result.to_json()
    assert stored["images"] == list(images)
    assert stored["margins"]["histogram_w1_T2w"]["better"] == "lower"
    assert stored["margins"]["histogram_w1_T2w"]["floor"] == one.to_json()["margins"]["histogram_w1"]["floor"]
    assert "psnr_T2w" in result.markdown("title")


def test_a_segmenter_of_other_images_is_refused():
    images = ("T1w", "T2w")
    for others in (("T1w",), ("T2w", "T1w")):
        with pytest.raises(InputError, match="differ from the model's T1w, T2w"):
            step_table(analytic.model(4, images), analytic.subjects(4, images), analytic.segmenter(others), steps=(2,))


def test_distances_are_those_of_the_worst_volume():
    a = torch.zeros(2, 4, 4, 4)
    a[:, 0] = 1
    b = a.clone()
    b[1, 0, 0, 0] = 0.5
    assert distances(b, a)["worst_voxel"] == 0.5
    assert distances(b, a)["relative_worst"] == 2 * distances(b, a)["relative"] == 0.125


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samplers": ("no-such-sampler",)}, "unknown sampler"),
        ({"steps": (99,)}, "1 to 24"),
        ({"steps": ()}, "no sampler, timestep spacing or steps"),
        ({"options": {"batch": 0}}, "batch"),
        ({"options": {"margin": -1.0}}, "margin"),
    ],
)
def test_what_cannot_be_compared_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        options = TableOptions(**change.pop("options", {}))
        step_table(analytic.model(), analytic.subjects(4), analytic.segmenter(), options=options, **change)
