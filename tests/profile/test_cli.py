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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_kit_records_the_study_in_both_modes_and_names_what_failed(tmp_path, monkeypatch, capsys):
    from tests.factories.report_sessions import make
    from voxtune.profile import record as recording
    from voxtune.report.recordings import KIT_CONFIGS

    def record(source, configs, out, *, options, device, say):
        assert (source, tuple(configs), device) == ("med-ddpm", KIT_CONFIGS, "cuda")
        session = make(launches=40, mode=options.mode, gpu="NVIDIA A100-SXM4-80GB")
        session.save(out / f"{options.mode}-baseline")
        good = recording.RecordResult(config="baseline", folder=out / f"{options.mode}-baseline", session=session)
        return [good, recording.RecordResult(config="tf32", folder=out, error="CUDA out of memory")]

    monkeypatch.setattr(recording, "record", record)
    monkeypatch.setattr("voxtune.cli.profile.choose_device", lambda device: "cuda")
    assert main(["profile", "--kit", "-o", str(tmp_path / "kit")]) == 0
    printed = capsys.readouterr().out
    assert "2 of 4 sessions" in printed and "FAILED: CUDA out of memory" in printed
    study = ["study", "paper", "--recorded", "--add", str(tmp_path / "kit"), "--mode", "train", "--json"]
    assert main([*study, "-o", str(tmp_path / "study")]) == 0
    import json

    table = json.loads(capsys.readouterr().out)["study"]["training"]
    row = next(r for r in table["rows"] if (r["quantity"], r["config"]) == ("convolution_share", "baseline"))
    assert row["H200 step"] > 0 and row["A100-SXM4-80GB step"] > 0
    page = (tmp_path / "study" / "report.html").read_text()
    assert "A100-SXM4-80GB" in page


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kit", "--device", "cpu"], "--kit requires a GPU"),
        (["--kit", "--self-check"], "--kit cannot be combined"),
        ([], "missing WORKLOAD or MODEL"),
        (["med-ddpm", "--continue", "--device", "cpu"], "--continue requires a GPU"),
        (["med-ddpm", "--continue", "--overwrite"], "--continue cannot be combined"),
    ],
)
def test_options_that_cannot_be_used_are_one_line(tmp_path, capsys, arguments, words):
    assert main(["profile", *arguments, "-o", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
