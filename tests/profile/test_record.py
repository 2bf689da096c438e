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
from tests.profile.test_ncu import NO_PERMISSION
from voxtune.errors import InputError
from voxtune.profile import budget, gpu_recording, schema
from voxtune.profile.configs import parse_config
from voxtune.profile.counters import TierReport, kernel_rows, keys
from voxtune.profile.merge import COUNTERS
from voxtune.profile.ncu import Ncu, find_ncu
from voxtune.profile.record import RecordOptions, RecordResult, SessionJob, record
from voxtune.profile.replay import replay
from voxtune.profile.session import Session, load_session
from voxtune.profile.steps import find_target


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a fake ncu, a worker that needs no GPU, and a census recorded on a GPU."""
    folder = tmp_path / "tools"
    folder.mkdir()
    make_ncu(folder)
    session = baseline_session()
    session.save(folder / "census")
    numbered = [(key, number) for number, key in enumerate(keys(kernel_rows(session, 0)))]
    (folder / "numbered.json").write_text(json.dumps(numbered))
    program = [sys.executable, str(folder / "worker.py")]
    monkeypatch.setattr(gpu_recording, "worker_program", lambda spec: [*program, str(spec)])
    return folder


def run(
    folder: Path, *configs: str, earlier: Session | None = None, continues: Path | None = None, **options: object
) -> tuple[list[RecordResult], list[str]]:
    lines: list[str] = []
    out = "part" if continues else "out"
    jobs = [
        SessionJob(
            target=find_target("med-ddpm"),
            source="med-ddpm",
            config=parse_config(config),
            options=RecordOptions(**options),  # type: ignore[arg-type]
            device=torch.device("cuda"),
            folder=folder / out / config,
            scratch=folder / "scratch" / out / config,
            ncu=Ncu(path=str(folder / "ncu")),
            say=lines.append,
            earlier=earlier,
            continues=continues,
        )
        for config in configs
    ]
    return gpu_recording.record_on_gpu(jobs), lines


def test_all_tiers_are_recorded_and_assigned(tools: Path) -> None:
    recorded, lines = run(tools, "baseline", "tf32")
    assert [r.error for r in recorded] == [None, None]
    session = load_session(tools / "out" / "baseline")
    assert {t: state["done"] for t, state in session.meta["tiers"].items()} == dict.fromkeys(
        session.meta["tiers"], True
    )
    kernels = kernel_rows(session, 0)
    assert (kernels["counter_tier"] == "full").all() and (kernels["sm_pct"] == 50).all()
    assert set(kernels["est_rule"]) == {"CPIStall"} and set(kernels["est_speedup_pct"]) == {12.5}
    assert set(session.opcodes["opcode"]) == {"FFMA", "IMAD"}
    assert "few" in set(session.timings["tier"])
    # The plain metric includes HFMA2.MMA in an FP32 step; the instruction counts without HFMA2.MMA decide.
    assert session.meta["proof"]["holds"] is True
    assert any("few: counters on 1260 of 1260 launches" in line for line in lines)


def test_a_recording_continues_with_what_it_lacks(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tools, "baseline")
    folder = tools / "out" / "baseline"
    whole = load_session(folder)
    first = json.loads((tools / "spec-full.json").read_text())["operators"]
    rows = whole.launches
    lost = rows["name"].str.contains("gemm") & (rows["counter_tier"] == "full").fillna(False)
    few = {c.name for c in schema.FEW}
    for column in (c for c in COUNTERS if c not in few):
        rows.loc[lost, column] = None
    rows.loc[lost, "counter_tier"] = "few"
    whole.meta["tiers"]["full"] |= {"done": False, "why": "its time ran out"}
    whole.save(folder, overwrite=True)
    recorded, lines = run(tools, "baseline", earlier=load_session(folder), continues=folder)
    assert recorded[0].error is None and recorded[0].folder == folder
    again = json.loads((tools / "spec-full.json").read_text())["operators"]
    kernels = kernel_rows(baseline_session(), 0)
    assert 0 < len(again) < len(first) and again[0] in first
    assert "gemm" in kernels.iloc[again[0]]["name"]
    merged = load_session(folder)
    assert (kernel_rows(merged, 0)["counter_tier"] == "full").all() and merged.meta["tiers"]["full"]["done"]
    assert len(merged.meta["parts"]) == 2
    assert any("opcodes: complete in the earlier recording" in line for line in lines)


def test_another_step_is_not_continued(tools: Path) -> None:
    run(tools, "baseline")
    folder = tools / "out" / "baseline"
    earlier = load_session(folder)
    earlier.meta["environment"]["driver"] = "999"
    before = (folder / "launches.parquet").read_bytes()
    recorded, _ = run(tools, "baseline", earlier=earlier, continues=folder)
    assert "cannot continue baseline: driver '999'" in str(recorded[0].error)
    assert (folder / "launches.parquet").read_bytes() == before


def test_the_slow_tiers_count_selected_operators_most_expensive_first(tools: Path) -> None:
    run(tools, "baseline")
    few, full, opcodes = (json.loads((tools / f"spec-{t}.json").read_text()) for t in ("few", "full", "opcodes"))
    assert few["operators"] is None and few["deadline_s"] is None
    kernels = kernel_rows(baseline_session(), 0)
    cost = kernels.groupby(["name", "grid", "block"])["duration_us"].sum()
    first = kernels.iloc[full["operators"][0]]  # the fake worker numbers operators like launches
    assert (first["name"], first["grid"], first["block"]) == cost.idxmax()
    assert 100 < len(full["operators"]) < 130 and 25 < len(opcodes["operators"]) < 40
    assert full["operators"][:5] == opcodes["operators"][:5]
    command = (tools / "command-few.txt").read_text().splitlines()
    for option, value in (("--profile-from-start", "off"), ("--clock-control", "none"), ("--cache-control", "none")):
        assert command[command.index(option) + 1] == value
    assert "--section" not in command and "--kernel-name" not in command
    assert "SpeedOfLight" in (tools / "command-full.txt").read_text()


def test_every_session_is_counted_before_the_slow_tiers_of_any(tools: Path) -> None:
    run(tools, "baseline", "tf32")
    turns = (tools / "turns.txt").read_text().splitlines()
    assert turns == [
        f"{config} {t}" for ts in (("few",), ("full", "opcodes")) for config in ("baseline", "tf32") for t in ts
    ]


def test_time_that_ran_out_before_the_first_operator_is_reported(tools: Path) -> None:
    (tools / "nothing").touch()
    run(tools, "baseline")
    tiers = load_session(tools / "out" / "baseline").meta["tiers"]
    assert tiers["few"]["done"]
    for tier in ("full", "opcodes"):
        assert tiers[tier]["why"].startswith("its time ran out before the first operator was counted: after")
        assert tiers[tier]["why"].endswith("s, 1 s of it set-up")


def test_a_compiled_step_is_filtered_by_function(tools: Path) -> None:
    (tools / "numbered.json").write_text("[]")
    run(tools, "compile", ahead=False)
    command = (tools / "command-full.txt").read_text().splitlines()
    assert command[command.index("--filter-mode") + 1] == "per-launch-config"
    assert "RowwiseMomentsCUDAKernel" in command[command.index("--kernel-name") + 1]
    assert json.loads((tools / "spec-full.json").read_text())["operators"] is None


def test_without_permission_the_census_is_valid_and_the_remedy_is_reported(tools: Path) -> None:
    (tools / "denied").write_text(NO_PERMISSION)
    recorded, _ = run(tools, "baseline")
    tiers = load_session(tools / "out" / "baseline").meta["tiers"]
    assert recorded[0].error is None and tiers["census"]["done"]
    for tier in ("few", "full", "opcodes"):
        assert not tiers[tier]["done"] and "NVreg_RestrictProfilingToAdminUsers=0" in tiers[tier]["why"]


@pytest.mark.slow
def test_a_raw_recording_gives_the_same_session_again(tools: Path, golden_model: Path) -> None:
    options = RecordOptions(mode="train", steps=1, warmup=1, keep_raw=True, tiers=("census",))
    (here,) = record(str(golden_model), ["baseline"], tools, options=options, device="cpu")
    run(tools, "baseline", keep_raw=True)
    for part in ("trace.json.gz", "census.json"):
        shutil.copy(here.folder / "raw" / part, tools / "out" / "baseline" / "raw")
    first = load_session(here.folder)
    again = replay(here.folder)
    assert again.launches.equals(first.launches) and again.memory.equals(first.memory)
    assert again.timings.equals(first.timings)
    report = TierReport.load(tools / "out" / "baseline" / "raw", "full")
    assert report.columns["sm_pct"].startswith("sm__throughput") and report.details is not None
    assert replay(tools / "out" / "baseline").meta["tiers"]["few"]["read"] == 1260
    with pytest.raises(InputError, match="--keep-raw"):
        replay(tools / "census")


def test_a_metric_refused_at_run_time_is_left_out(tools: Path) -> None:
    (tools / "refused").write_text("dram__bytes")
    run(tools, "baseline", tiers=("census", "few"))
    session = load_session(tools / "out" / "baseline")
    assert "dram_bytes" in session.meta["tiers"]["few"]["why"]
    assert "dram__bytes" not in (tools / "command-few-1.txt").read_text()
    assert kernel_rows(session, 0)["cycles"].notna().all()


def test_a_tier_that_runs_out_of_time_keeps_what_was_read(tools: Path) -> None:
    (tools / "expired").touch()
    run(tools, "baseline", tiers=("census", "few"))
    few = load_session(tools / "out" / "baseline").meta["tiers"]["few"]
    assert not few["done"] and "time ran out" in few["why"] and few["matched"] == 1260
    _, lines = run(tools, "tf32", limit_s=5)
    assert any("limit of 5 s" in line for line in lines)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_what_was_read_and_ends_within_seconds(tools: Path, number: int) -> None:
    (tools / "slow").touch()

    def interrupt() -> None:
        while not (tools / "counting").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    began = time.monotonic()
    recorded, _ = run(tools, "baseline", "tf32")
    assert time.monotonic() - began < 15
    tiers = load_session(tools / "out" / "baseline").meta["tiers"]
    assert tiers["few"]["matched"] == 1260 and "interrupted" in tiers["few"]["why"]
    assert tiers["full"]["why"] == tiers["opcodes"]["why"] == "interrupted before it started"
    assert [r.error for r in recorded] == [None, "interrupted before it started"]


@pytest.mark.slow
def test_a_tier_that_is_stopped_at_its_limit_keeps_what_was_read(tools: Path) -> None:
    (tools / "slow").touch()
    run(tools, "baseline", tiers=("census", "few"), limit_s=8.5)
    few = load_session(tools / "out" / "baseline").meta["tiers"]["few"]
    assert few["matched"] == 1260 and "time ran out" in few["why"]


def test_a_budget_too_small_for_a_session_is_reported(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "SESSION_S", 29.0)
    recorded, lines = run(tools, "baseline", budget_s=31)
    assert "budget of 31 s" in (recorded[0].error or "") and any("budget of 31 s" in line for line in lines)


def test_a_census_that_fails_fails_only_its_session(tools: Path) -> None:
    (tools / "census-fails").touch()
    recorded, _ = run(tools, "baseline", "tf32")
    assert [r.session for r in recorded] == [None, None]
    assert "out of memory" in (recorded[0].error or "")


def test_nsight_compute_is_searched_for_and_its_absence_reported(tmp_path, monkeypatch, golden_model) -> None:
    monkeypatch.setenv("VOXTUNE_NCU", str(tmp_path / "absent"))
    assert find_ncu() is None
    lines: list[str] = []
    options = RecordOptions(mode="sample", size=(8, 8, 8), warmup=1, steps=1)
    (recorded,) = record(str(golden_model), ["baseline"], tmp_path, options=options, device="cpu", say=lines.append)
    session = load_session(tmp_path / "sample-baseline")
    assert "no GPU" in session.meta["tiers"]["few"]["why"] and "no GPU" in lines[0]
    assert session.meta["workload"] == golden_model.name and session.meta["size"] == [8, 8, 8]
    assert set(session.launches["phase"]) == {"forward"}
    assert recorded.session is not None and session.meta["proof"]["holds"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VOXTUNE_NCU")
    from voxtune.profile import ncu
    from voxtune.profile.record import _counters

    monkeypatch.setattr(ncu, "_PLACES", ())
    none, missing = _counters(RecordOptions(), torch.device("cuda"), lines.append)
    assert none is None and "VOXTUNE_NCU" in missing["few"]
    monkeypatch.setattr(ncu, "_PLACES", (f"{tmp_path}/*/ncu",))
    for version in ("2024.9.0", "2025.3.1"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "ncu").touch()
    assert find_ncu() == str(tmp_path / "2025.3.1" / "ncu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "infer"}, "unknown mode 'infer'; choose from train, sample"),
        ({"tiers": ("census", "many")}, "tier 'many'"),
        ({"tiers": ("few",)}, "must include census"),
        ({"batch": 0}, ">= 1"),
        ({"limit_s": 0}, "> 0 seconds"),
        ({"budget_s": 5}, ">= 30"),
        ({"clock_control": "max"}, "clock control"),
    ],
)
def test_wrong_options_are_rejected(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RecordOptions(**options)  # type: ignore[arg-type]


def test_targets_are_checked() -> None:
    assert find_target("convnext", (16, 16)).size == (16, 16)
    with pytest.raises(InputError, match="multiple of 16"):
        find_target("med-ddpm", (30, 32, 32))
    with pytest.raises(InputError, match="unknown workload"):
        find_target("no-such-thing")
