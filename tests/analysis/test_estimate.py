from __future__ import annotations

import functools
import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from voxtune.analysis.estimate import (
    GIB,
    Recipe,
    card,
    cards,
    estimate,
    estimate_step,
    plan_memory,
    training_bytes,
    walk_workload,
)
from voxtune.analysis.walk import walk
from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.profile.session import load_session
from voxtune.report.recordings import recorded_sessions
from voxtune.workloads import MedDDPMConfig, workload

COMPILED = "bf16+channels_last+compile"
# Measured on an H200 in addition to the recordings: forward ms, training ms, forward GiB, training GiB.
ANCHORS = [
    ("med-ddpm", "bf16", 75.0, None, 3.5, None),
    ("med-ddpm-brats", "baseline", 706.7, 3226, None, 69.1),
    ("med-ddpm-brats", "tf32", 311, 788, None, 69.5),
    ("med-ddpm-brats", COMPILED, 90.0, None, 8.3, None),
    ("convnext", "baseline", 5.95, None, None, None),
]


@functools.cache
def _walked(name: str, config: str, train: bool):
    result = workload(name)
    return walk_workload(result.network, result.size, 1, Recipe.parse(config), train=train)


def _walk_for(name: str, config: str, train: bool):
    """Configurations with the same operators share a walk."""
    recipe = Recipe.parse(config)
    if recipe.compiled:
        return _walked(name, "baseline", train)
    return _walked(name, {"tf32": "baseline", "tf32+channels_last": "channels_last"}.get(config, config), train)


@pytest.mark.parametrize("folder", recorded_sessions(), ids=lambda folder: folder.name)
def test_h200_estimates_are_within_20_percent_of_recorded_times_and_10_of_memory(folder):
    session = load_session(folder)
    name, config, train = session.meta["workload"], session.meta["config"], session.meta["mode"] == "train"
    result = estimate_step(_walk_for(name, config, train), card("h200"), Recipe.parse(config), train=train)
    bare = session.timings.loc[session.timings["tier"] == "bare", "step_ms"].median()
    assert result.step_ms == pytest.approx(bare, rel=0.20)
    assert result.peak_bytes == pytest.approx(session.meta["peak_bytes"], rel=0.10)


@pytest.mark.parametrize(("name", "config", "forward", "training", "gib", "train_gib"), ANCHORS)
def test_h200_estimates_are_within_20_percent_of_other_measurements(name, config, forward, training, gib, train_gib):
    for train, ms, peak in ((False, forward, gib), (True, training, train_gib)):
        if ms is None:
            continue
        result = estimate_step(_walk_for(name, config, train), card("h200"), Recipe.parse(config), train=train)
        assert result.step_ms == pytest.approx(ms, rel=0.20)
        if peak is not None:
            assert result.peak_bytes / GIB == pytest.approx(peak, rel=0.10)


def test_a_walk_counts_flops_bytes_and_memory_of_a_layer():
    layer = lambda: nn.Conv3d(2, 3, 3, padding=1, bias=False)  # noqa: E731
    result = walk(layer, lambda: (torch.empty(1, 2, 4, 4, 4),), train=False)
    (op,) = result.ops
    assert op.flops == 2 * 64 * 3 * 2 * 27
    assert op.bytes == 4 * (128 + 192 + 162)
    assert result.timeline == [4 * (128 + 192 + 162)]
    assert (op.rows, op.columns, op.inner) == (64, 3, 2)


def test_a_walk_frees_tensors_and_keeps_those_that_training_saves():
    network = lambda: nn.Sequential(*(nn.SiLU() for _ in range(8)))  # noqa: E731
    inputs = lambda: (torch.empty(256),)  # noqa: E731
    assert max(walk(network, inputs, train=False).timeline) == 3 * 1024
    assert max(walk(lambda: nn.Sequential(nn.Linear(256, 256), network()), inputs, train=True).timeline) > 8 * 1024


def test_channels_last_adds_copies_at_every_norm():
    network = lambda: nn.Sequential(nn.Conv3d(4, 4, 1), nn.GroupNorm(2, 4), nn.Conv3d(4, 4, 1))  # noqa: E731
    inputs = lambda: (torch.empty(1, 4, 4, 4, 4),)  # noqa: E731
    plain = walk(network, inputs, train=False)
    last = walk(network, inputs, train=False, channels_last=True)
    assert not [o for o in plain.ops if o.name == "clone" or o.relayout]
    assert [o.strided for o in last.ops if o.name == "clone"] == [True]
    assert [o.relayout for o in last.ops if o.name == "convolution"] == [0, 4 * 256]


def test_datasheets_are_complete_and_have_aliases():
    assert {"v100", "a100-40", "a100-80", "h100", "h200", "l40s", "rtx3080", "rtx3090", "rtx4090", "orin-nano"} <= set(
        cards()
    )
    for result in cards().values():
        assert result.source and result.memory_gb > 0 and result.bandwidth_gbs > 0 and result.fp32 > 0
    assert card("A100").key == "a100-80" and card("3090").key == "rtx3090"
    with pytest.raises(InputError, match="did you mean 'h200'"):
        card("h20")


def test_missing_tensor_cores_are_noted():
    result = estimate(workload("convnext"), ["v100"], modes=("sample",), config="tf32")
    assert any("no tf32 tensor cores; assuming FP32" in n for n in result.notes)
    assert "estimate" in result.notes[0].lower() and result.extra["estimate"] is True


def test_larger_inputs_take_more_time_and_memory():
    small, large = (estimate(workload("convnext"), ["rtx3080"], size=(s, s), batch=8).rows for s in (64, 128))
    for a, b in zip(small, large, strict=True):
        assert b["step_ms"] > a["step_ms"] and b["peak_gib"] > a["peak_gib"]
    sample, train = small
    assert sample["total_s"] == pytest.approx(sample["step_ms"] * 100 / 1e3) and train["total_s"] is None
    assert train["step_ms"] > sample["step_ms"]


def test_brats_training_does_not_fit_a_small_gpu():
    walked = _walked("med-ddpm-brats", "baseline", True)
    fits = {k: estimate_step(walked, c, Recipe(), train=True).fits for k, c in cards().items()}
    assert fits["h200"] and fits["h100"] and not fits["a100-40"] and not fits["rtx4090"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "tf31"}, "did you mean 'tf32'"),
        ({"config": "tf32+bf16"}, "one precision"),
        ({"size": (64,)}, "requires a size of 2 dimensions"),
        ({"size": (63, 64)}, "multiples of 8"),
        ({"batch": 0}, "batch 0"),
        ({"modes": ("infer",)}, "mode 'infer'"),
    ],
)
def test_wrong_input_is_an_input_error(change, message):
    with pytest.raises(InputError, match=message):
        estimate(workload("convnext"), ["h200"], **change)


def test_command_prints_one_json_object(capsys):
    assert main(["estimate", "convnext", "--gpu", "h200,jetson", "--mode", "sample", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [r["gpu"] for r in result["rows"]] == ["h200", "orin-nano"]
    assert main(["estimate", "convnext", "--gpu", "h200", "--mode", "sample"]) == 0
    assert "estimate" in capsys.readouterr().out.lower()


SMALL = MedDDPMConfig(base=32, multipliers=(1, 1), attention=())


def test_the_plan_voxtune_is_a_simulated_step():
    recipe = Recipe.parse("voxtune")
    assert recipe.plan and recipe.precision == "half" and Recipe.parse("voxtune+tf32").precision == "tf32"
    kept = plan_memory(SMALL, (16, 16, 16), 2, recipe)
    assert training_bytes(SMALL, (16, 16, 16), 2, recipe) == kept.total
    more = plan_memory(SMALL, (16, 16, 16), 2, recipe, accumulated=True)
    assert more.gradients > kept.gradients and more.total > kept.total
    assert kept.total < training_bytes(SMALL, (16, 16, 16), 2, Recipe.parse("bf16"))
    budget = kept.total - 2**18
    assert plan_memory(SMALL, (16, 16, 16), 2, recipe, budget=budget).total <= budget


def test_the_plan_voxtune_has_memory_and_no_time():
    table = estimate(replace(workload("med-ddpm"), network=SMALL), ["h200"], config="voxtune", size=(16, 16, 16))
    (row,) = table.rows
    assert row["mode"] == "train" and row["fits"] and row["step_ms"] is None
    assert row["peak_gib"] == pytest.approx(sum(table.extra["memory_bytes"].values()) / GIB)
    assert "kept" in table.notes[1]
    for text, message in (("voxtune+compile", "cannot be combined with compile"), ("voxtune+baseline", "cannot be")):
        with pytest.raises(InputError, match=message):
            Recipe.parse(text)
    with pytest.raises(InputError, match="plan of training"):
        estimate(workload("med-ddpm"), ["h200"], config="voxtune", modes=("sample",))
