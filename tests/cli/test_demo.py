"""voxtune demo with a tiny random model: every part runs and reports its result."""

from __future__ import annotations

import json
import re
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from tests.factories import analytic
from voxtune.cli.main import main
from voxtune.plan import tuner
from voxtune.plan.plan import Plan
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import AutoSampling, Evidence, FeatureCache
from voxtune.runtime.storage import save, store_auto
from voxtune.workloads import without_zeros

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    model = Model(analytic.model(4).config)
    without_zeros(model.network)
    return save(model, tmp_path / "model", card="")


def run(capsys, *arguments):
    code = main([str(a) for a in ("demo", "--device", "cpu", *arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
def test_every_phase_on_one_subject(capsys, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tuner, "CPU_IN_SHORT", tuner.CPU_IN_SHORT[:2])
    monkeypatch.setattr(tuner, "_faster", lambda *_: True)
    code, out, err = run(capsys, "--model", folder, "-o", tmp_path / "out", "--steps", 2, "--json")
    assert code == 0, err
    result = json.loads(out)
    for name in ("mask", "simulated", "synthetic", "picture", "plan", "metrics", "view", "study"):
        assert (tmp_path / "out") in list((tmp_path / result[name]).parents), name
    assert result["real"] == result["simulated"], "the key of version 0.1 stays"
    assert "kept" in err and "gate: " in err and "passed" in err
    for phase in ("tuning", "sampling", "metrics", "pages"):
        assert re.search(rf"^{phase} \d+/\d+", err, flags=re.MULTILINE), f"progress of {phase}"
    assert "simulated subject" in err and not re.search(r"\breal\b", err)
    plan = Plan.load(Path(result["plan"]))
    assert plan.names == tuple(result["plan_passes"])
    assert [row["passed"] for row in plan.evidence["waterfall"] if "passed" in row] == [True, True], "baseline and plan"
    assert {"dice_brain", "dice_brain_real", "ms_ssim", "psnr"} <= set(result["figures"])
    metrics = json.loads((tmp_path / result["metrics"]).read_text())
    assert metrics["segmenter"]["sha256"]
    assert "niivue" in (tmp_path / result["view"]).read_text().lower()
    assert "H200" in (tmp_path / result["study"]).read_text()


@pytest.mark.slow
def test_a_model_with_a_feature_cache_is_tuned_in_both_parts(capsys, folder, tmp_path, monkeypatch):
    evidence = Evidence(file="steps.json", sha256="0" * 64, subjects=64, summary="made up")
    store_auto(
        folder, AutoSampling(sampler="ddim", steps=3, cache=FeatureCache(interval=2, depth=0), evidence=evidence)
    )
    monkeypatch.setattr(tuner, "CPU_IN_SHORT", tuner.CPU_IN_SHORT[1:2])
    monkeypatch.setattr(tuner, "_faster", lambda *_: True)
    code, out, err = run(capsys, "--model", folder, "-o", tmp_path / "out", "--json")
    assert code == 0, err
    assert "feature cache 2:0" in err
    assert "the outer levels" in err and "same passes" in err
    assert err.count("kept\n") == 4, "baseline and plan of either part"
    result = json.loads(out)
    side = json.loads(next((tmp_path / "out").rglob("*synth*.json")).read_text())
    assert side["cache"] == {"interval": 2, "depth": 0}
    plain = tmp_path / "plain"
    assert main(["sample", str(folder), "--mask", result["mask"], "-o", str(plain), "--device", "cpu", "--quiet"]) == 0
    [by_itself] = plain.rglob("*.nii.gz")
    np.testing.assert_allclose(
        nibabel.load(result["synthetic"]).get_fdata(), nibabel.load(by_itself).get_fdata(), atol=1e-3
    )


def test_an_unwritable_folder_is_an_input_error(capsys, folder, tmp_path):
    (tmp_path / "file").write_text("x")
    code, _, err = run(capsys, "--model", folder, "-o", tmp_path / "file" / "deeper")
    assert code == 2
    assert "file: is not a folder; choose another output path" in err
