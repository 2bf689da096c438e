"""The feature cache: interval 1 changes nothing, deep levels are skipped between full steps, and sidecars record it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import voxtune
from tests.factories import GOLDENS
from tests.factories.cli import run
from tests.factories.nifti import write_mask
from voxtune.cli.main import main
from voxtune.diffusion import SAMPLERS, full_steps
from voxtune.errors import InputError
from voxtune.runtime.model import Model, workload_config
from voxtune.runtime.sampling import AutoSampling, Evidence, FeatureCache
from voxtune.runtime.storage import store_auto

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = GOLDENS / "med_ddpm_tiny.pt"
EVIDENCE = Evidence(file="steps.json", sha256="0" * 64, subjects=64, summary="ddim, 5 steps, cache 2: non-inferior")


@pytest.fixture(scope="module")
def model():
    return voxtune.load(CHECKPOINT)


@pytest.fixture(scope="module")
def cond():
    return torch.sign(torch.randn(2, 2, 8, 8, 8, generator=torch.Generator().manual_seed(0)))


def test_the_first_and_last_steps_are_full():
    assert full_steps(7, 3) == [True, False, False, True, False, False, True]
    assert full_steps(6, 4) == [True, False, False, False, True, True]
    assert full_steps(5, 5) == [True, False, False, False, True]
    assert full_steps(3, 1) == [True] * 3 and full_steps(1, 1) == [True]


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("depth", [0, 1])
def test_interval_1_equals_sampling_without_a_cache(model, cond, name, depth):
    plain = model.sample(cond, sampler=name, steps=4, seed=3)
    assert torch.equal(model.sample(cond, sampler=name, steps=4, seed=3, cache=f"1:{depth}"), plain)
    cached = model.sample(cond, sampler=name, steps=4, seed=3, cache=f"2:{depth}")
    assert torch.isfinite(cached).all() and not torch.equal(cached, plain)


def test_steps_between_full_steps_skip_the_deep_levels(model, cond):
    network = model.network
    watched = {
        "stem": network.input_blocks[0],
        "outer": network.input_blocks[1],
        "down": network.input_blocks[2],
        "middle": network.middle_block,
        "up": network.output_blocks[-3],
        "outer decoder": network.output_blocks[-2],
        "last": network.output_blocks[-1],
    }
    calls = dict.fromkeys(watched, 0)

    def count(name):
        def hook(*_):
            calls[name] += 1

        return hook

    hooks = [module.register_forward_hook(count(name)) for name, module in watched.items()]
    try:
        progress = []
        model.sample(cond, sampler="ddim", steps=7, cache=3, progress=lambda i, n: progress.append(i))
        assert calls == {"stem": 7, "outer": 7, "down": 3, "middle": 3, "up": 3, "outer decoder": 7, "last": 7}
        assert progress == list(range(1, 8))
        calls.update(dict.fromkeys(watched, 0))
        model.sample(cond, sampler="ddim", steps=7, cache="3:0")
        assert calls == {"stem": 7, "outer": 3, "down": 3, "middle": 3, "up": 3, "outer decoder": 3, "last": 7}
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_the_error_on_a_trained_network_is_small_and_grows_with_the_interval(sampler):
    model = voxtune.load(Path(voxtune.__file__).parent / "models" / "demo")
    cond = -torch.ones(2, 2, 16, 16, 16)
    cond[:, 0, 3:13, 3:13, 3:13] = 1
    plain = model.sample(cond, sampler=sampler, steps=8)
    errors = []
    for interval in (2, 4, 8):
        cached = model.sample(cond, sampler=sampler, steps=8, cache=interval)
        assert torch.isfinite(cached).all()
        errors.append(float((cached - plain).norm() / plain.norm()))
    assert 0 < errors[0] < errors[1] < errors[2] < 0.2
    assert errors[0] < 0.03


def test_features_are_not_reused_between_samplings(model, cond):
    first = model.sample(cond, sampler="ddim", steps=5, cache=2)
    model.sample(-cond, sampler="ddim", steps=5, cache=2, seed=8)
    assert torch.equal(model.sample(cond, sampler="ddim", steps=5, cache=2), first)


def test_a_planned_model_gives_the_same_volumes(model, cond):
    from voxtune.plan import Plan

    fast = voxtune.optimize(model, plan=Plan.of("cleanup", "sdpa", "time", "channels_last"))
    cached = model.sample(cond, sampler="ddim", steps=4, cache=2)
    planned = fast.sample(cond, sampler="ddim", steps=4, cache=2)
    assert float((planned - cached).norm() / cached.norm()) < 1e-4
    assert fast.network.passes == ("cleanup", "sdpa", "time", "channels_last")


@pytest.mark.parametrize("value", [0, -1, "0", "-1", "x", "", "2:", ":1", "2:1:1", "2.5", 2.5, True, "1e3", "9" * 30])
def test_malformed_values(model, cond, value):
    with pytest.raises(InputError, match="cache"):
        model.sample(cond, steps=4, cache=value)


@pytest.mark.parametrize(("cache", "message"), [(5, "number of steps, 4"), ("2:2", "0 to 1")])
def test_values_that_do_not_fit_the_model(model, cond, cache, message):
    with pytest.raises(InputError, match=message):
        model.sample(cond, steps=4, cache=cache)
    with pytest.raises(InputError, match=message):
        model.check_request(sampler=None, steps=4, seed=0, cache=cache)


def test_a_network_that_cannot_be_split_is_refused():
    images = Model(workload_config("convnext"))
    with pytest.raises(InputError, match="ConvNeXtUNet"):
        images.check_request(sampler=None, steps=4, seed=0, cache=2)


def test_stored_settings_include_the_cache(tmp_path, cond):
    folder = tmp_path / "m"
    assert main(["import", str(CHECKPOINT), "-o", str(folder), "--size", "16,16,16", "-q"]) == 0
    auto = AutoSampling(sampler="ddim", steps=5, cache=FeatureCache(interval=2, depth=0), evidence=EVIDENCE)
    store_auto(folder, auto)
    model = voxtune.load(folder)
    assert model.config.sampling.auto == auto
    explicit = model.sample(cond, sampler="ddim", steps=5, cache="2:0")
    assert torch.equal(model.sample(cond, steps="auto"), explicit)
    assert not torch.equal(model.sample(cond, sampler="ddim", steps=5), explicit)
    with pytest.raises(InputError, match="omit cache"):
        model.sample(cond, steps="auto", cache=2)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    for cache, message in (
        ({"interval": 6}, "number of steps, 5"),
        ({"interval": 0}, ">= 1"),
        ({"every": 2}, "unknown setting"),
    ):
        stored["sampling"]["auto"]["cache"] = cache
        path.write_text(json.dumps(stored))
        with pytest.raises(InputError, match=message):
            voxtune.load(folder)


def test_records_name_the_cache_only_if_there_is_one(model):
    assert "cache" not in model.resolve(steps=3).record()
    assert model.resolve(steps=3, cache="2:0").record()["cache"] == {"interval": 2, "depth": 0}


def test_command_line(capsys, tmp_path):
    mask = write_mask(tmp_path / "a_dseg.nii.gz")
    command = ("sample", CHECKPOINT, "--mask", mask, "--steps", 3, "--device", "cpu")
    code, out, err = run(capsys, *command, "-o", tmp_path / "out", "--cache", "2", "--json")
    assert code == 0, err
    assert json.loads(out)["cache"] == "2"
    assert "not measured" in err
    [sidecar] = (tmp_path / "out").rglob("sub-a_*.json")
    assert json.loads(sidecar.read_text())["cache"] == {"interval": 2, "depth": 1}
    for value in ("0", "-1", "few", "4", "2:7"):
        code, _, err = run(capsys, *command, "-o", tmp_path / "bad", f"--cache={value}")
        assert code == 2 and ("cache" in err or "depth" in err) and err.count("\n") == 1, err
    assert not (tmp_path / "bad").exists()
