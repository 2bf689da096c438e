from __future__ import annotations

from functools import cache

import pytest

from tests.factories.traces import baseline_session, text
from voxtune.profile import schema
from voxtune.profile.counters import assign_few, assign_full, assign_opcodes, prove_precision
from voxtune.profile.ncu import CountedLaunch, choose_metrics, read_raw
from voxtune.profile.session import Session, load_session


@cache
def counted_text() -> str:
    return text("few.csv.gz")


def counted() -> list[CountedLaunch]:
    known = {m.split(".")[0] for c in schema.FEW for m in c.metric if "hmma_hgmma" not in m}
    return read_raw(counted_text(), choose_metrics(schema.FEW, known)[0])


def kernels(session: Session):
    return session.launches[session.launches["kind"] == "kernel"]


def test_the_few_counters_reach_every_launch_of_the_step(tmp_path) -> None:
    session = baseline_session()
    assignment, identities = assign_few(session, counted())
    assert (assignment.read, assignment.matched, assignment.launches, assignment.time_share) == (1260, 1260, 1260, 1.0)
    assert len(identities) == 1260
    # The times of both tools agree for all but the shortest launches.
    long = kernels(session)[kernels(session)["duration_us"] > 200]
    ratio = long["ncu_time_us"] / long["duration_us"]
    assert len(long) > 100 and 0.98 < ratio.median() < 1.02 and ratio.between(0.8, 1.25).all()
    copies = session.launches[session.launches["kind"] != "kernel"]
    assert copies["counter_tier"].isna().all() and copies["cycles"].isna().all()
    session.save(tmp_path)
    again = load_session(tmp_path).launches
    assert again["instructions"].sum() == session.launches["instructions"].sum()


def test_launches_that_do_not_match_stay_null_and_are_counted() -> None:
    session, launches = baseline_session(), counted()
    replaced = launches[100]
    launches[100] = CountedLaunch("x", "other(int)", replaced.key._replace(function="other"), {"cycles": 1.0})
    del launches[500:510]
    assignment, _ = assign_few(session, launches)
    assert (assignment.read, assignment.matched) == (1250, 1249)
    rows = kernels(session)
    assert rows["counter_tier"].isna().sum() == 11
    assert rows["cycles"].isna().sum() == 11
    assert 0 < assignment.time_share < 1


def test_the_full_set_is_assigned_to_all_similar_launches_and_to_no_other_template() -> None:
    session, launches = baseline_session(), counted()
    _, identities = assign_few(session, launches)
    chosen = next(c for c in launches if "silu_kernel" in c.name)
    full = CountedLaunch("0", chosen.name, chosen.key, {"sm_pct": 50.0, "est_rule": "R"}, {"FFMA": 6.0})
    assignment, matched = assign_full(session, [full], identities)
    assert assignment.matched == sum(c.identity == chosen.identity for c in launches) > 1
    rows = session.launches.loc[list(matched)]
    assert set(rows["counter_tier"]) == {"full"} and set(rows["sm_pct"]) == {50.0} and set(rows["est_rule"]) == {"R"}
    assert rows["name"].str.contains("silu_kernel").all()
    assert session.launches["sm_pct"].notna().sum() == assignment.matched
    assign_opcodes(session, matched)
    assert session.opcodes.to_dict("records") == [
        {
            "name": rows["name"].iloc[0],
            "grid": chosen.key.grid,
            "block": chosen.key.block,
            "opcode": "FFMA",
            "executed": pytest.approx(rows["instructions"].mean()),  # the mix, scaled to each launch's own count
        }
    ]


def test_without_the_few_counters_only_unambiguous_launches_are_matched() -> None:
    session, launches = baseline_session(), counted()
    silu = next(c for c in launches if "silu_kernel" in c.name)  # shares its function and grid with other templates
    moments = next(c for c in launches if "RowwiseMoments" in c.name)
    full = [CountedLaunch("0", c.name, c.key, {"sm_pct": 1.0}) for c in (silu, moments)]
    _, matched = assign_full(session, full, {})
    assert matched and session.launches.loc[list(matched), "name"].str.contains("RowwiseMoments").all()


def test_fp32_is_confirmed_or_refuted_by_counters() -> None:
    session = baseline_session()
    assert prove_precision(session, claims_fp32=True)["holds"] is None
    assign_few(session, counted())
    # The plain tensor metric includes HFMA2.MMA: without the instruction counts the claim fails, with them it holds.
    proof = prove_precision(session, claims_fp32=True)
    assert proof["holds"] is False and proof["tensor_kernels"]
    rows = kernels(session).index
    session.launches.loc[rows, ["inst_hmma", "inst_gmma"]] = 0.0
    proof = prove_precision(session, claims_fp32=True)
    assert proof["holds"] is True and proof["tensor_launches"] == 0 and proof["time_share"] == 1.0
    assert prove_precision(session, claims_fp32=False)["holds"] is None
    # A launch whose instructions were not counted: utilisation decides, and that of rounding is none.
    session.launches.loc[rows[3], ["inst_hmma", "inst_gmma", "tensor_pct"]] = [None, None, 0.01]
    assert prove_precision(session, claims_fp32=True)["holds"] is True
    session.launches.loc[rows[3], "tensor_pct"] = 0.2
    assert prove_precision(session, claims_fp32=True)["holds"] is False
    session.launches.loc[rows[3], ["inst_hmma", "tensor_pct"]] = [100.0, 40.0]
    assert prove_precision(session, claims_fp32=True)["holds"] is False


def test_a_launch_on_a_larger_tensor_does_not_get_the_counters_of_a_smaller_one() -> None:
    session, launches = baseline_session(), counted()
    _, identities = assign_few(session, launches)
    moments = [c for c in launches if "RowwiseMoments" in c.name]
    small, large = (f(moments, key=lambda c: c.values["ncu_time_us"]) for f in (min, max))
    assert small.identity == large.identity
    full = CountedLaunch("0", small.name, small.key, {"sm_pct": 5.0}, time_us=float(small.values["ncu_time_us"] or 0))
    assignment, matched = assign_full(session, [full], identities)
    rows = kernels(session)
    assert 0 < assignment.matched < len(moments)
    assert rows.loc[list(matched), "ncu_time_us"].max() < 2 * float(small.values["ncu_time_us"] or 0) + 4
