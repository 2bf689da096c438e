"""Sessions of several GPUs: labels, refused ratios, columns of the study; DRAM traffic."""

from __future__ import annotations

import pytest

from tests.factories.sessions import counted, session
from voxtune.analysis.compare import compare_modules, normalised, side_by_side
from voxtune.analysis.counters import kernels_with_dram
from voxtune.analysis.frame import labels, labels_on_gpu
from voxtune.analysis.priority import achieved
from voxtune.analysis.study import study_table
from voxtune.analysis.summary import summaries
from voxtune.analysis.traffic import traffic
from voxtune.errors import InputError


def make(gpu, config="baseline", us=10.0, **more):
    rows = [counted(i * us, us, "conv_fprop", tensor_pct=2.0, dram_bytes=2.4e7, module="m") for i in range(120)]
    rows += [counted(120 * us + i * us, us, "copy", dram_bytes=1.2e7, module="m") for i in range(10)]
    environment = {"gpu": gpu}
    return session(rows, name=config, config=config, environment=environment, bare=[1.0, 1.1, 0.9], **more)


H200, A100 = "NVIDIA H200", "NVIDIA A100-SXM4-80GB"


def test_labels_name_the_gpu():
    both = [make(H200), make(A100), make(None)]
    assert labels(both) == ["baseline (H200)", "baseline (A100-SXM4-80GB)", "baseline (CPU)"]
    assert labels_on_gpu(both) == labels(both) and labels_on_gpu(both[:1]) == ["baseline"]


def test_ratios_across_gpus_require_a_request():
    pair = [make(H200), make(A100)]
    for compare in (compare_modules, normalised, lambda p, **k: achieved(*p, **k)):
        assert "require --across-gpus" in compare(pair).refused
        assert compare(pair, across_gpus=True).refused is None
    row = side_by_side(pair).rows[1]
    assert row["device_ms_step"] is None and side_by_side(pair, across_gpus=True).rows[1]["device_ms_step"] == 1.0


def test_study_has_columns_per_gpu_with_ratios_within_each():
    sessions = [make(H200), make(H200, "tf32", 5.0), make(A100, us=20.0), make(A100, "tf32", 5.0)]
    row = study_table(sessions).row(figure=8, quantity="cycles_ratio", config="tf32")
    assert (row["H200 step"], row["A100-SXM4-80GB step"]) == (0.5, 0.25)
    assert row["A100"] == "0.18"
    assert {c.title for c in study_table(sessions[:1]).columns} >= {"H200 step", "H200 window"}
    with pytest.raises(InputError, match="baseline of A100"):
        study_table([*sessions[:2], sessions[3]])


def test_traffic_and_throughput_come_from_bytes():
    table = traffic([make(H200), make(H200, "tf32", 5.0)])
    row = table.row(session="tf32 (H200)")
    assert (row["gb"], row["ratio"], row["convolution_gb"], row["movement_gb"]) == pytest.approx((3.0, 1.0, 2.88, 0.12))
    # 3 GB in 130 x 5 us, of 4.8 TB/s
    assert row["gbs"] == pytest.approx(3.0 / 650e-6) and row["dram_pct"] == pytest.approx(100 * 3.0 / 650e-6 / 4800)
    assert kernels_with_dram(make(H200))["dram_pct"].iloc[0] == pytest.approx(100 * 2.4e7 / 10e-6 / 4.8e12)
    unknown = make("Another GPU")
    assert kernels_with_dram(unknown)["dram_pct"].isna().all()
    assert traffic([unknown]).rows[0]["dram_pct"] is None


def test_summary_names_the_fastest_per_gpu():
    first, second = summaries([make(H200), make(H200, "tf32", 5.0), make(A100)])
    assert (first.gpu, first.first, second.gpu) == ("H200", "baseline", "A100-SXM4-80GB")
    assert first.first_work[0] == ("convolutions", pytest.approx(100 * 120 / 130))
