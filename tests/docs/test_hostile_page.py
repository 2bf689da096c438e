"""docs/development/hostile.md agrees with the record of the campaign, and the record with the promises."""

from __future__ import annotations

import pytest

from tests.hostile.page import FILE_TESTS, PAGE, RECORD, page, record, rows


def test_the_tables_are_those_of_the_record() -> None:
    assert PAGE.read_text() == page(), "run python -m tests.hostile.page"


@pytest.mark.skipif(not RECORD.exists(), reason="the campaign was not recorded")
def test_the_record_meets_the_promises() -> None:
    counted = [row for row in rows(FILE_TESTS) if "cases" in row]
    assert sum(row["cases"] for row in counted) >= 10_000
    assert sum(row["cases"] for row in counted if row["input"] == "commands") >= 500
    for count in ("tracebacks", "messages", "hangs", "over_memory", "crashes", "files", "replaced"):
        assert not any(row[count] for row in counted), count
    assert max(row["max_mib"] for row in counted) <= 2048
    assert max(row["max_seconds"] for row in counted) <= 60
    assert record()["commit"]
