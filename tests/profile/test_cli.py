from __future__ import annotations

import json

from voxtune.cli.main import main
from voxtune.precision import read_precision
from voxtune.profile import load_session
from voxtune.profile.__main__ import main as plain_main


def test_profile_on_a_cpu_from_the_command_line(tmp_path, capfd, golden_model) -> None:
    before = read_precision()
    arguments = ["profile", str(golden_model), "--mode", "train", "--config", "baseline,bf16+channels_last"]
    assert main([*arguments, "-o", str(tmp_path), "--steps", "1", "--device", "cpu", "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [s["config"] for s in told["sessions"]] == ["baseline", "bf16+channels_last"]
    for row in told["sessions"]:
        session = load_session(row["folder"])
        assert row["step_ms"] > 0 and row["launches"] == len(session.launches)
        assert row["unknown_time_share"] < 0.01
        assert {"forward", "backward", "optimizer"} <= set(session.launches["phase"])
        assert session.meta["flags"]["cudnn.allow_tf32"] is False
    assert read_precision() == before


def test_the_plain_entry_prints_what_is_missing(tmp_path, capfd, golden_model) -> None:
    arguments = [str(golden_model), "-o", str(tmp_path), "--mode", "sample", "--config", "baseline", "--device", "cpu"]
    assert plain_main([*arguments, "--steps", "1", "--self-check"]) == 0
    told = capfd.readouterr().out
    assert "step " in told and "missing: no GPU" in told and "self-check: FAILED: baseline few" in told
    assert plain_main(["nope", "-o", str(tmp_path)]) == 2


def test_wrong_input_is_one_line(tmp_path, capsys) -> None:
    for wrong in (
        ["nope"],
        ["convnext", "--config", "tf23"],
        ["convnext", "--size", "9,9"],
        ["convnext", "--mode", "x"],
    ):
        assert main(["profile", *wrong, "-o", str(tmp_path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
