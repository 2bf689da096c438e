"""The wheel in an empty environment: it installs, and its commands run there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.factories.nifti import write_mask

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_wheel_installs_and_runs(tmp_path):
    def run(*command, cwd=tmp_path):
        done = subprocess.run([str(c) for c in command], cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path, cwd=ROOT)
    [wheel] = tmp_path.glob("voxtune-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "env")
    binaries = tmp_path / "env" / "bin"
    run(binaries / "python", "-m", "pip", "install", "--quiet", "torch==2.13.0", wheel)
    # The core alone samples.
    mask = write_mask(tmp_path / "sub-1_dseg.nii.gz")
    find = "from voxtune.runtime.storage import demo_model; print(demo_model())"
    model = run(binaries / "python", "-c", find).strip()
    run(binaries / "voxtune", "sample", model, "--mask", mask, "-o", tmp_path / "core", "--steps", "1")
    assert list((tmp_path / "core").rglob("*.nii.gz"))
    assert (Path(model).parent.parent / "py.typed").is_file()
    run(binaries / "python", "-m", "pip", "install", "--quiet", f"{wheel}[all]")
    assert run(binaries / "voxtune", "--version").startswith("voxtune ")
    assert run(binaries / "python", "-m", "voxtune", "--version").startswith("voxtune ")
    assert json.loads(run(binaries / "voxtune", "doctor", "--json"))["verdict"] == "ok"
    assert json.loads(run(binaries / "voxtune", "info", "med-ddpm", "--json"))["parameters"] == 40_226_433
    study = json.loads(run(binaries / "voxtune", "study", "seed", "--recorded", "-o", tmp_path / "study", "--json"))
    assert len(study["sessions"]) == 6 and Path(study["files"][0]).is_file()
    result = json.loads(
        run(binaries / "voxtune", "demo", "-o", tmp_path / "demo", "--steps", "2", "--minutes", "0", "--json")
    )
    assert Path(result["synthetic"]).is_file()
    assert Path(result["picture"]).is_file() and Path(result["study"]).is_file()
    assert result["figures"]["dice_brain_real"] > 0.9  # the segmenter came along
    page = json.loads(run(binaries / "voxtune", "view", tmp_path / "demo", "-o", tmp_path / "view.html", "--json"))
    assert page["bytes"] > 2_000_000  # the viewer's library is inside
