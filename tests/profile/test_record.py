from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from tests.factories.fake_ncu import make_ncu
from tests.factories.traces import baseline_session
from tests.profile.test_ncucsv import NO_PERMISSION
from voxtune.errors import InputError
from voxtune.profile import budget, recording
from voxtune.profile.configs import parse_config
from voxtune.profile.counters import Reading, kernel_rows, keys
from voxtune.profile.ncu import Ncu, find_ncu
from voxtune.profile.record import Plan, Recorded, RecordOptions, record
from voxtune.profile.replay import replay
from voxtune.profile.session import load_session
from voxtune.profile.steps import find_target


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a stand-in for ncu, a worker that needs no GPU, and a census recorded on one."""
    folder = tmp_path / "tools"
    folder.mkdir()
    make_ncu(folder)
    session = baseline_session()
    session.save(folder / "census")
    numbered = [(key, number) for number, key in enumerate(keys(kernel_rows(session, 0)))]
    (folder / "numbered.json").write_text(json.dumps(numbered))
    program = [sys.executable, str(folder / "worker.py")]
    monkeypatch.setattr(recording, "worker_program", lambda spec: [*program, str(spec)])
    return folder


def run(folder: Path, *configs: str, **options: object) -> tuple[list[Recorded], list[str]]:
    said: list[str] = []
    plans = [
        Plan(
            target=find_target("med-ddpm"),
            source="med-ddpm",
            config=parse_config(config),
            options=RecordOptions(**options),  # type: ignore[arg-type]
            device=torch.device("cuda"),
            folder=folder / "out" / config,
            scratch=folder / "scratch" / config,
            ncu=Ncu(path=str(folder / "ncu")),
            say=said.append,
        )
        for config in configs
    ]
    return recording.record_on_gpu(plans), said


def test_all_tiers_are_recorded_and_carried(stand_in: Path) -> None:
    recorded, said = run(stand_in, "baseline", "tf32")
    assert [r.error for r in recorded] == [None, None]
    session = load_session(stand_in / "out" / "baseline")
    assert {t: told["done"] for t, told in session.meta["tiers"].items()} == dict.fromkeys(session.meta["tiers"], True)
    kernels = kernel_rows(session, 0)
    assert (kernels["counter_tier"] == "full").all() and (kernels["sm_pct"] == 50).all()
    assert set(kernels["est_rule"]) == {"CPIStall"} and set(kernels["est_speedup_pct"]) == {12.5}
    assert set(session.opcodes["opcode"]) == {"FFMA", "IMAD"}
    assert "few" in set(session.timings["tier"])
    # The pipe's plain metric sees HFMA2.MMA in an FP32 step; the instructions less HFMA2.MMA clear it.
    assert session.meta["proof"]["holds"] is True
    assert any("few: counters on 1260 of 1260 launches" in line for line in said)


def test_the_slow_tiers_count_chosen_operators_the_costliest_first(stand_in: Path) -> None:
    run(stand_in, "baseline")
    few, full, opcodes = (json.loads((stand_in / f"spec-{t}.json").read_text()) for t in ("few", "full", "opcodes"))
    assert few["operators"] is None and few["deadline_s"] is None
    kernels = kernel_rows(baseline_session(), 0)
    cost = kernels.groupby(["name", "grid", "block"])["duration_us"].sum()
    first = kernels.iloc[full["operators"][0]]  # the stand-in numbers operators as launches
    assert (first["name"], first["grid"], first["block"]) == cost.idxmax()
    assert 100 < len(full["operators"]) < 130 and 25 < len(opcodes["operators"]) < 40
    assert full["operators"][:5] == opcodes["operators"][:5]
    command = (stand_in / "command-few.txt").read_text().splitlines()
    for option, value in (("--profile-from-start", "off"), ("--clock-control", "none"), ("--cache-control", "none")):
        assert command[command.index(option) + 1] == value
    assert "--section" not in command and "--kernel-name" not in command
    assert "SpeedOfLight" in (stand_in / "command-full.txt").read_text()


def test_every_session_is_counted_before_the_slow_tiers_of_any(stand_in: Path) -> None:
    run(stand_in, "baseline", "tf32")
    turns = (stand_in / "turns.txt").read_text().splitlines()
    assert turns == [
        f"{config} {t}" for ts in (("few",), ("full", "opcodes")) for config in ("baseline", "tf32") for t in ts
    ]


def test_time_that_ran_out_before_the_first_operator_is_said_plainly(stand_in: Path) -> None:
    (stand_in / "nothing").touch()
    run(stand_in, "baseline")
    tiers = load_session(stand_in / "out" / "baseline").meta["tiers"]
    assert tiers["few"]["done"]
    for tier in ("full", "opcodes"):
        assert tiers[tier]["why"].startswith("its time ran out before the first operator was counted: after")
        assert tiers[tier]["why"].endswith("of which 1 s were set-up")


def test_a_compiled_step_is_filtered_by_function(stand_in: Path) -> None:
    (stand_in / "numbered.json").write_text("[]")
    run(stand_in, "compile", ahead=False)
    command = (stand_in / "command-full.txt").read_text().splitlines()
    assert command[command.index("--filter-mode") + 1] == "per-launch-config"
    assert "RowwiseMomentsCUDAKernel" in command[command.index("--kernel-name") + 1]
    assert json.loads((stand_in / "spec-full.json").read_text())["operators"] is None


def test_without_permission_the_census_stands_and_the_remedy_is_told(stand_in: Path) -> None:
    (stand_in / "denied").write_text(NO_PERMISSION)
    recorded, _ = run(stand_in, "baseline")
    tiers = load_session(stand_in / "out" / "baseline").meta["tiers"]
    assert recorded[0].error is None and tiers["census"]["done"]
    for tier in ("few", "full", "opcodes"):
        assert not tiers[tier]["done"] and "NVreg_RestrictProfilingToAdminUsers=0" in tiers[tier]["why"]


def test_a_kept_recording_gives_the_same_session_again(stand_in: Path, golden_model: Path) -> None:
    options = RecordOptions(mode="train", steps=1, warmup=1, keep_raw=True, tiers=("census",))
    (here,) = record(str(golden_model), ["baseline"], stand_in, options=options, device="cpu")
    run(stand_in, "baseline", keep_raw=True)
    for part in ("trace.json.gz", "census.json"):
        shutil.copy(here.folder / "raw" / part, stand_in / "out" / "baseline" / "raw")
    first = load_session(here.folder)
    again = replay(here.folder)
    assert again.launches.equals(first.launches) and again.memory.equals(first.memory)
    assert again.timings.equals(first.timings)
    reading = Reading.kept(stand_in / "out" / "baseline" / "raw", "full")
    assert reading.columns["sm_pct"].startswith("sm__throughput") and reading.details is not None
    assert replay(stand_in / "out" / "baseline").meta["tiers"]["few"]["read"] == 1260
    with pytest.raises(InputError, match="--keep-raw"):
        replay(stand_in / "census")


def test_a_metric_refused_at_run_time_is_left_out(stand_in: Path) -> None:
    (stand_in / "refused").write_text("dram__bytes")
    run(stand_in, "baseline", tiers=("census", "few"))
    session = load_session(stand_in / "out" / "baseline")
    assert "dram_bytes" in session.meta["tiers"]["few"]["why"]
    assert "dram__bytes" not in (stand_in / "command-few-1.txt").read_text()
    assert kernel_rows(session, 0)["cycles"].notna().all()


def test_time_that_runs_out_keeps_what_was_read(stand_in: Path) -> None:
    (stand_in / "expired").touch()
    run(stand_in, "baseline", tiers=("census", "few"))
    few = load_session(stand_in / "out" / "baseline").meta["tiers"]["few"]
    assert not few["done"] and "time ran out" in few["why"] and few["matched"] == 1260
    _, said = run(stand_in, "tf32", limit_s=5)
    assert any("limit of 5 s" in line for line in said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_what_was_read_and_ends_within_seconds(stand_in: Path, number: int) -> None:
    (stand_in / "slow").touch()

    def interrupt() -> None:
        while not (stand_in / "counting").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    recorded, _ = run(stand_in, "baseline", "tf32")
    assert time.monotonic() - began < 15
    tiers = load_session(stand_in / "out" / "baseline").meta["tiers"]
    assert tiers["few"]["matched"] == 1260 and "interrupted" in tiers["few"]["why"]
    assert tiers["full"]["why"] == tiers["opcodes"]["why"] == "interrupted before it"
    assert [r.error for r in recorded] == [None, "interrupted before it"]


def test_a_tier_that_is_stopped_at_its_time_keeps_what_was_read(stand_in: Path) -> None:
    (stand_in / "slow").touch()
    run(stand_in, "baseline", tiers=("census", "few"), limit_s=8.5)
    few = load_session(stand_in / "out" / "baseline").meta["tiers"]["few"]
    assert few["matched"] == 1260 and "time ran out" in few["why"]


def test_a_budget_too_small_for_a_session_says_so(stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SESSION_S", 29.0)
    recorded, said = run(stand_in, "baseline", budget_s=31)
    assert "budget of 31 s" in (recorded[0].error or "") and any("budget of 31 s" in line for line in said)


def test_a_census_that_fails_costs_its_session_alone(stand_in: Path) -> None:
    (stand_in / "census-fails").touch()
    recorded, _ = run(stand_in, "baseline", "tf32")
    assert [r.session for r in recorded] == [None, None]
    assert "out of memory" in (recorded[0].error or "")


def test_nsight_compute_is_looked_for_and_its_absence_told(tmp_path, monkeypatch, golden_model) -> None:
    monkeypatch.setenv("VOXTUNE_NCU", str(tmp_path / "absent"))
    assert find_ncu() is None
    said: list[str] = []
    options = RecordOptions(mode="sample", size=(8, 8, 8), warmup=1, steps=1)
    (recorded,) = record(str(golden_model), ["baseline"], tmp_path, options=options, device="cpu", say=said.append)
    session = load_session(tmp_path / "sample-baseline")
    assert "no GPU" in session.meta["tiers"]["few"]["why"] and "no GPU" in said[0]
    assert session.meta["workload"] == golden_model.name and session.meta["size"] == [8, 8, 8]
    assert set(session.launches["phase"]) == {"forward"}
    assert recorded.session is not None and session.meta["proof"]["holds"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VOXTUNE_NCU")
    from voxtune.profile import ncu
    from voxtune.profile.record import _counters

    monkeypatch.setattr(ncu, "_PLACES", ())
    none, missing = _counters(RecordOptions(), torch.device("cuda"), said.append)
    assert none is None and "VOXTUNE_NCU" in missing["few"]
    monkeypatch.setattr(ncu, "_PLACES", (f"{tmp_path}/*/ncu",))
    for version in ("2024.9.0", "2025.3.1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    assert find_ncu() == str(tmp_path / "2025.3.1" / "ncu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "infer"}, "train or sample"),
        ({"tiers": ("census", "many")}, "tier 'many'"),
        ({"tiers": ("few",)}, "census is always needed"),
        ({"batch": 0}, "at least 1"),
        ({"limit_s": 0}, "above 0"),
        ({"budget_s": 5}, "at least 30"),
        ({"clock_control": "max"}, "clock control"),
    ],
)
def test_wrong_options_are_told(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RecordOptions(**options)  # type: ignore[arg-type]


def test_targets_are_checked() -> None:
    assert find_target("convnext", (16, 16)).size == (16, 16)
    with pytest.raises(InputError, match="divide by 16"):
        find_target("med-ddpm", (30, 32, 32))
    with pytest.raises(InputError, match="unknown workload"):
        find_target("no-such-thing")
