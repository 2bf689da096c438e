from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from voxtune.cli.main import main
from voxtune.precision import read_precision
from voxtune.profile import load_session


def test_profile_on_a_cpu_from_the_command_line(tmp_path, capfd, golden_model) -> None:
    before = read_precision()
    arguments = ["profile", str(golden_model), "--mode", "train", "--config", "baseline,bf16+channels_last"]
    arguments += ["--window", "paper"]
    assert main([*arguments, "-o", str(tmp_path), "--steps", "1", "--device", "cpu", "--json"]) == 0
    output = capfd.readouterr()
    result = json.loads(output.out)
    assert [s["config"] for s in result["sessions"]] == ["baseline", "bf16+channels_last"]
    for row in result["sessions"]:
        session = load_session(row["folder"])
        assert row["step_ms"] > 0 and row["launches"] == len(session.launches)
        assert row["unknown_time_share"] < 0.01
        assert {"forward", "backward", "optimizer"} <= set(session.launches["phase"])
        assert session.meta["flags"]["cudnn.allow_tf32"] is False
        window, launches = row["window"], session.launches
        place = {"name": "paper", "skip": 10, "count": 100, "kept": 100}
        assert place.items() <= window.items()
        assert window["of"] == len(launches)
        inside = launches.sort_values("index")["duration_us"].iloc[10:110].sum()
        assert window["time_share"] == pytest.approx(inside / launches["duration_us"].sum())
        assert session.meta["window"] is None  # whole steps are recorded
    assert output.err.count("  window   kernels 11 to 110 of ") == 2
    assert read_precision() == before


def test_the_module_is_the_same_command(tmp_path, golden_model) -> None:
    arguments = [str(golden_model), "-o", str(tmp_path), "--mode", "sample", "--config", "baseline", "--device", "cpu"]
    command = [sys.executable, "-m", "voxtune.profile", *arguments, "--steps", "1", "--self-check", "--window", "5:3"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 3, done.stderr  # the counters need a GPU
    assert "step " in done.stdout and "missing: no GPU" in done.stdout
    assert "self-check: FAILED: baseline few" in done.stdout
    assert "  window   kernels 6 to 8 of " in done.stdout
    recorded = load_session(tmp_path / "sample-baseline").meta["command"]
    assert recorded.startswith(f"python -m voxtune profile {golden_model.name} ")


@pytest.mark.parametrize(
    "wrong",
    [
        ["nope"],
        ["convnext", "--config", "tf23"],
        ["convnext", "--size", "9,9"],
        ["convnext", "--mode", "x"],
        ["convnext", "--tiers", "census,all"],
        ["convnext", "--cache-control", "some"],
        ["convnext", "--window", "seeds"],
        ["convnext", "--window", "10:0"],
    ],
)
def test_wrong_input_is_one_line(tmp_path, capsys, wrong) -> None:
    assert main(["profile", *wrong, "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
