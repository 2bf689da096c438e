"""docs/results/study.md agrees with the recordings: all tables, and every number in its prose."""

from __future__ import annotations

import re

import numpy as np
import pytest

from tests.recordings.study_page import PAGE, TABLES, block, number, sessions
from voxtune.analysis.counters import kernels_with_dram
from voxtune.analysis.frame import kernels, numbers
from voxtune.analysis.ledger import precision_audit
from voxtune.analysis.mix import kernel_shares

# Numbers that are not in the recordings: the paper's ratio and DOI, the threshold, the window, the time of both commands.
# The bandwidth of the datasheet, and the agreement of two ways to compute throughput, which a test below checks.
GIVEN = {"4.8", "4", "0.01", "0.02", "10.1145", "3777884.3797012", "99", "409", "533"}
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.\d+|\d[\d,]*(?= (?:ms|%|s|x|GiB|times)\b)")


def prose() -> str:
    return re.sub(r"<!--.*?-->|^\|.*$|^    .*$|!?\[[^\]]*\]\([^)]*\)|`[^`]*`", "", PAGE.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_those_of_the_recordings(name: str) -> None:
    match = block(name).search(PAGE.read_text())
    assert match is not None
    assert match.group().strip() == TABLES[name](), "run python -m tests.recordings.study_page"


def facts() -> set[str]:
    """Numbers in the prose that come from tables of the report."""
    by_config = {s.meta["config"]: s for s in sessions("train")}
    rows = precision_audit(by_config["baseline"]).rows
    beside = next(r for r in rows if (r["module"], r["class"]) == ("output_blocks.8.0.in_layers.2", "conv_wgrad"))
    fused = kernel_shares(by_config["bf16+channels_last+compile"]).rows
    scatter = next(r for r in fused if "unsafe_index_put" in r["kernel"])
    return {number(beside["ms"], 1), number(scatter["ms"], 1)}


def test_every_number_in_the_prose_is_in_a_table() -> None:
    shown = set(re.findall(r"\d[\d,]*(?:\.\d+)?", "\n".join(make() for make in TABLES.values())))
    stated = set(NUMBER.findall(prose()))
    assert len(stated) > 30
    assert not stated - shown - facts() - GIVEN


def test_conclusions_of_the_prose_hold() -> None:
    wall = {s.meta["mode"] + " " + s.meta["config"]: s.timings for m in ("train", "sample") for s in sessions(m)}
    ms = {n: t.loc[t["tier"] == "bare", "step_ms"].median() for n, t in wall.items()}
    for mode in ("train", "sample"):
        assert ms[f"{mode} channels_last"] > 1.1 * ms[f"{mode} baseline"]
        assert ms[f"{mode} tf32+channels_last"] > 1.3 * ms[f"{mode} tf32"]
    launches = sessions("train")[-1].launches
    longest = launches[launches["step"] == 0].nlargest(1, "duration_us").iloc[0]
    assert "wgrad2d_grouped_direct" in longest["name"]
    assert 0.24 < longest["duration_us"] / 1e3 / ms["train bf16+channels_last+compile"] < 0.28


def test_throughput_from_bytes_agrees_with_the_profilers_counter() -> None:
    compared = 0
    for session in (s for m in ("train", "sample") for s in sessions(m)):
        own, derived = kernels(session), kernels_with_dram(session)
        time, counter, bytes_ = (
            numbers(f, c) for f, c in ((own, "duration_us"), (own, "dram_pct"), (derived, "dram_pct"))
        )
        both = ~np.isnan(counter)
        if both.any():
            compared += 1
            left, right = (float((v[both] * time[both]).sum() / time[both].sum()) for v in (counter, bytes_))
            assert right == pytest.approx(left, rel=0.04)
    assert compared > 5


def test_images_exist() -> None:
    for path in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", PAGE.read_text()):
        assert (PAGE.parent / path).read_text().startswith("<svg")
