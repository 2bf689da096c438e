"""Raw recordings of others: values of other types, and pages that grow, are refused; the session stays as it was."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.hostile.kinds import KINDS
from voxtune.errors import InputError
from voxtune.profile.ncu import page_memory, read_raw
from voxtune.profile.replay import replay
from voxtune.profile.session import load_session

RECORDING = KINDS["raw recordings (traces, pages of counters)"]


@pytest.fixture
def session(tmp_path: Path) -> Path:
    RECORDING.write(tmp_path)
    return tmp_path / "session"


def change(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("census.json", "bare", [1.0, "x", []]),
        ("census.json", "bare", [1e300, 1.0]),
        ("census.json", "peak", {}),
        ("census.json", "modules", []),
        ("few.json", "columns", {"name": 3}),
        ("few.json", "unknown", 7),
        ("few.json", "tier", "all"),
        ("few.json", "told", {"failed": [1]}),
    ],
)
def test_values_of_other_types_are_refused_in_one_line(session: Path, file: str, key: str, value: object) -> None:
    change(session / "raw" / file, key, value)
    before = {p.name: p.read_bytes() for p in session.iterdir() if p.is_file()}
    try:
        replay(session)
    except InputError as error:
        assert "raw" in str(error)
        assert {p.name: p.read_bytes() for p in session.iterdir() if p.is_file()} == before
    else:
        load_session(session)


@pytest.mark.parametrize("document", ["7", "[]", "[1]", "true", '"x"', "null", "{}"])
def test_documents_of_other_types_are_refused_in_one_line(session: Path, document: str) -> None:
    for file in ("census.json", "few.json"):
        before = (session / "raw" / file).read_bytes()
        (session / "raw" / file).write_text(document)
        with pytest.raises(InputError, match=file):
            replay(session)
        (session / "raw" / file).write_bytes(before)


def test_a_session_of_very_many_rows_is_refused(session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page of 800,000 launches takes minutes, and their table 400 KB."""
    monkeypatch.setattr("voxtune.profile.session.MAX_ROWS", 5)
    with pytest.raises(InputError, match="6 rows, more than the maximum of 5"):
        load_session(session)


def test_a_page_that_grows_is_refused(session: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of two bytes becomes a row with every column of the header."""
    header = ",".join(f'"{n}"' for n in ("ID", "Kernel Name", *range(500)))
    page = f"{header}\n" + '"1"\n' * 20_000
    assert page_memory(page) > 20_000 * 500 * 8
    assert len(read_raw(page.replace('"1"\n' * 20_000, '"1","k"\n'), {})) == 1
    (session / "raw" / "few-raw.csv.gz").write_bytes(gzip.compress(page.encode()))
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "100MB")
    with pytest.raises(InputError, match=r"few-raw\.csv\.gz: .* --read-limit"):
        replay(session)
