"""Estimates of data sets: the recorded times, and their formulas worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from voxtune.analysis.dataset import DataSetJob, estimate_data_set, recorded, recorded_volume_ms
from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.workloads import workload

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


def row_of(job, gpu="h200", name="med-ddpm", **options):
    table = estimate_data_set(workload(name), [gpu], job, **options)
    return table.rows[0]


def test_the_times_are_those_of_the_results_file():
    known, results = recorded(), json.loads((RESULTS / "volume.json").read_text())
    rows = {row["name"]: row for row in results["rows"]}
    assert known["commit"] == results["commit"] and results["gpu"] == "NVIDIA H200"
    for name in ("voxtune_default", "voxtune_plan_250"):
        row = rows[name]
        assert known["volume_ms"][str(row["steps"])] == row["p50_ms"] and row["shape"] == known["size"]
    assert known["start_ms"] == rows["warm_first_volume"]["p50_ms"]
    assert known["cold_start_ms"] == rows["cold_first_volume"]["p50_ms"]
    assert {k: known[k] for k in ("mask_encoding_ms", "nifti_write_ms")} == {
        k: results[k] for k in ("mask_encoding_ms", "nifti_write_ms")
    }
    # The line between the two is the sustained step, measured on its own.
    sustained = {row["name"]: row for row in json.loads((RESULTS / "sustained.json").read_text())["rows"]}
    step_ms = recorded_volume_ms(101) - recorded_volume_ms(100)
    assert step_ms == pytest.approx(sustained["voxtune_step_128"]["p50_ms"], rel=0.02)


def test_without_failures_by_hand():
    row = row_of(DataSetJob(volumes=1_000_000, gpus=64, price=3.0), steps=15)
    assert row["volume_s"] == pytest.approx(0.185252)
    assert row["gpu_hours"] == pytest.approx((1_000_000 * 0.185252 + 64 * 6.677264) / 3600)
    assert row["hours"] == pytest.approx(row["gpu_hours"] / 64) and row["cost"] == pytest.approx(3 * row["gpu_hours"])
    assert (row["losses"], row["repeated"], row["files"]) == (0, 0, 2_000_000)
    # 64 GPUs finish 345 tasks per second; one driver takes 200.
    assert row["shards"] == 2


def test_losses_by_hand():
    calm, rough = (row_of(DataSetJob(volumes=10_000, gpus=8, failure_rate=rate, batch=4)) for rate in (0.0, 2.0))
    task = 4 * 3.050853
    unwritten = 4 * 0.15762
    wasted = 2.0 * (task / 2 + unwritten + 6.677264) / 3600
    assert rough["gpu_hours"] == pytest.approx(calm["gpu_hours"] / (1 - wasted))
    assert rough["losses"] == pytest.approx(2.0 * rough["gpu_hours"])
    assert rough["repeated"] == round(rough["losses"] * (task / 2 + unwritten) / 3.050853)
    # 2500 tasks on 8 GPUs: some draw 313 of them.
    assert calm["gpu_hours"] == pytest.approx((313 * 8 * task + 8 * 6.677264) / 3600)
    with pytest.raises(InputError, match="the work would not end"):
        row_of(DataSetJob(volumes=10, failure_rate=1000.0))


def test_the_estimate_agrees_with_a_simulation_of_losses():
    """Workers that are lost at random: each loss repeats the task in the network and what was not written."""
    import random

    rate, batch, tasks = 40.0, 2, 4000
    chance = random.Random(3)
    row = row_of(DataSetJob(volumes=batch * tasks, failure_rate=rate, batch=batch), steps=15)
    task = batch * row["volume_s"]
    clock = lost = 0.0
    done = 0.0  # tasks that are written
    next_loss = chance.expovariate(rate / 3600)
    clock += 6.677264
    while done < tasks:
        if clock + task > next_loss:
            # Half a task on average; the volumes of the task before are not yet written.
            lost += 1
            done -= min(1.0, 0.15762 / row["volume_s"]) if done >= 1 else 0.0
            clock = next_loss + 6.677264
            next_loss = clock + chance.expovariate(rate / 3600)
        else:
            clock += task
            done += 1
    assert clock / 3600 == pytest.approx(row["gpu_hours"], rel=0.05)
    assert lost == pytest.approx(row["losses"], rel=0.35)


def test_other_cards_and_sizes_are_scaled_and_say_so():
    job = DataSetJob(volumes=1000)
    table = estimate_data_set(workload("med-ddpm"), ["h200", "a100"], job, steps=15)
    fast, slow = table.rows
    assert slow["volume_s"] > 1.5 * fast["volume_s"] and slow["storage_gb"] == fast["storage_gb"]
    assert any("A100" in note and "not measured" in note for note in table.notes)
    assert not any("H200 SXM" in note and "scaled" in note for note in table.notes)
    small = row_of(job, size=(64, 64, 64), steps=15)
    assert small["storage_gb"] < fast["storage_gb"] / 4 and small["volume_s"] < fast["volume_s"] / 2


def test_storage_is_that_of_volumes_on_disk():
    known = recorded()
    row = row_of(DataSetJob(volumes=1000))
    per_volume = 128**3 * known["storage"]["bytes_per_voxel"] + known["sidecar_bytes"] + known["ledger_bytes"]
    assert row["storage_gb"] == pytest.approx(1000 * per_volume / 1e9) and per_volume > 1e5


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--volumes", "0"], "volumes 0: must be 1"),
        (["--volumes", "5", "--gpus", "0"], "gpus 0: must be 1"),
        (["--volumes", "5", "--failure-rate", "nan"], "failure rate nan"),
        (["--volumes", "5", "--price-per-gpu-hour", "-1"], "price -1.0"),
        (["--gpus", "2"], "require --volumes"),
        (["convnext", "--volumes", "5"], "requires a 3D network"),
        (["--volumes", "5", "--size", "100,100,100"], "multiples of"),
    ],
)
def test_wrong_options_are_one_line(words, problem, capsys):
    assert main(["estimate", *words]) == 2
    err = capsys.readouterr().err
    assert problem in err and err.count("\n") == 1


def test_the_command(capsys):
    options = ["--volumes", "1000000", "--gpu", "h200", "--gpus", "64", "--failure-rate", "0.01"]
    assert main(["estimate", *options, "--price-per-gpu-hour", "2", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["gpus"] == 64 and row["cost"] == pytest.approx(2 * row["gpu_hours"], rel=1e-6)
    assert main(["estimate", *options]) == 0
    assert "1000000 volumes of med-ddpm" in capsys.readouterr().out
