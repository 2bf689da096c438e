"""voxtune tune, and voxtune sample with a plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.factories.cli import CHECKPOINT, run
from tests.factories.nifti import write_mask
from voxtune.plan import gains, tuner
from voxtune.runtime.sampling import AutoSampling, Evidence, FeatureCache
from voxtune.runtime.storage import store_auto


@pytest.fixture
def model(imported_model):
    return imported_model


@pytest.fixture(autouse=True)
def _quick(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        tuner, "CPU_LADDER", (tuner.TunerRung("channels_last", ("cleanup", "sdpa", "time", "channels_last")),)
    )
    real = tuner.measure
    # Channels-last wins here whatever the machine does, so that there is a plan to use.
    times = iter([3.0, 1.0, 3.0, 1.0] * 20)

    def measured(call, device, **_):
        real(call, device, repeats=1, seconds=0.0)
        ms = next(times)
        return tuner.Timing(ms, ms, ms, 0.0, None)

    monkeypatch.setattr(tuner, "measure", measured)
    monkeypatch.setattr(gains, "measure", lambda *_, **__: tuner.Timing(1.0, 1.0, 1.0, 0.0, None))


def volume_of(out: Path) -> np.ndarray:
    return nib.load(next(out.rglob("*.nii.gz"))).get_fdata()


@pytest.mark.slow
def test_tune_prints_the_waterfall_and_sample_uses_it(capsys, model, tmp_path):
    plan, mask = tmp_path / "plan.json", write_mask(tmp_path / "sub-9_dseg.nii.gz")
    code, out, err = run(capsys, "tune", model, "--size", "16,16,16", "-o", plan)
    assert code == 0, err
    assert "baseline" in out and "channels_last" in out and "kept" in out and "error" in out
    assert "channels_last                        1.000 ms (best so far     3.000)" in out
    assert out.splitlines()[-1].endswith("+ channels_last (1.000 ms; the best before it, timed beside it: 3.000 ms)")
    plan_json = json.loads(plan.read_text())
    assert [p["pass"] for p in plan_json["passes"]] == ["strict", "cleanup", "sdpa", "time", "channels_last"]
    gained = [line.split(":")[0] for line in out.splitlines() if line.startswith("gain of ")]
    assert gained == [f"gain of {name}" for name in plan_json["evidence"]["gains"]] and len(gained) == 4
    sample = ("sample", model, "--mask", mask, "--size", "16,16,16", "--steps", "2")
    for name, choice in (("auto", "auto"), ("given", plan), ("base", "baseline")):
        code, out, err = run(capsys, *sample, "-o", tmp_path / name, "--plan", choice)
        assert code == 0, err
    sidecar = json.loads(next((tmp_path / "auto").rglob("*T1w.json")).read_text())
    assert "channels_last" in sidecar["passes"]
    base = volume_of(tmp_path / "base")
    for name in ("auto", "given"):
        assert np.abs(volume_of(tmp_path / name) - base).max() < 1e-3


@pytest.mark.slow
def test_a_model_with_a_feature_cache_is_tuned_in_both_parts(capsys, model, tmp_path, monkeypatch):
    evidence = Evidence(file="steps.json", sha256="0" * 64, subjects=64, summary="made up")
    folder = shutil.copytree(model, tmp_path / "model")
    store_auto(
        folder, AutoSampling(sampler="ddim", steps=3, cache=FeatureCache(interval=2, depth=0), evidence=evidence)
    )
    monkeypatch.setattr(tuner, "_faster", lambda *_: True)
    code, out, err = run(capsys, "tune", folder, "--size", "16,16,16")
    assert code == 0, err
    assert "the outer levels" in out
    assert sum(line.endswith("kept") for line in out.splitlines()) == 4, "baseline and plan, of each part"
    mask = write_mask(tmp_path / "sub-9_dseg.nii.gz")
    code, out, err = run(capsys, "sample", folder, "--mask", mask, "--size", "16,16,16", "-o", tmp_path / "out")
    assert code == 0, err
    assert "voxtune tune" not in out, "both plans are found"
    sidecar = json.loads(next((tmp_path / "out").rglob("*T1w.json")).read_text())
    assert "channels_last" in sidecar["passes"] and sidecar["cache"] == {"interval": 2, "depth": 0}


def test_sampling_without_a_tuned_plan_says_how_to_get_one(capsys, model, tmp_path):
    mask = write_mask(tmp_path / "sub-9_dseg.nii.gz")
    code, out, err = run(capsys, "sample", model, "--mask", mask, "-o", tmp_path / "out", "--steps", "1")
    assert code == 0, err
    assert "voxtune tune" in out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("tune", "nowhere"), "nowhere"),
        (("tune", CHECKPOINT, "--size", "15,16,16"), "multiple of"),
        (("tune", CHECKPOINT, "--size", "16,16"), "3 dimensions"),
    ],
)
def test_wrong_tuning_is_one_line_and_exit_2(capsys, arguments, word):
    code, _, err = run(capsys, *arguments)
    assert code == 2 and word in err and err.count("\n") == 1


def test_a_plan_from_elsewhere_that_fails_is_exit_2(capsys, model, tmp_path):
    mask = write_mask(tmp_path / "sub-9_dseg.nii.gz")
    plan = tmp_path / "plan.json"
    plan.write_text('{"format": "voxtune-plan/1", "passes": ["speed"]}')
    code, _, err = run(capsys, "sample", model, "--mask", mask, "-o", tmp_path / "out", "--plan", plan)
    assert code == 2 and "unknown pass 'speed'" in err
    assert not list((tmp_path / "out").rglob("*.nii.gz"))
