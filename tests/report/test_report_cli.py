"""voxtune report and voxtune study on the command line, with valid, damaged and missing sessions."""

from __future__ import annotations

import json

import pytest

from tests.factories.report_sessions import HOSTILE, make
from voxtune.cli.main import main
from voxtune.profile.session import Session, empty


@pytest.fixture(scope="module")
def small_sessions():
    return [make(c, launches=40) for c in ("baseline", "tf32")]


@pytest.fixture
def folder(tmp_path, small_sessions):
    for session in small_sessions:
        session.save(tmp_path / "sessions" / session.meta["config"])
    return tmp_path / "sessions"


def test_writes_one_page(folder, tmp_path, capsys):
    assert main(["report", str(folder), "-o", str(tmp_path / "deep" / "r.html"), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert [s["config"] for s in output["sessions"]] == ["baseline", "tf32"]
    assert output["files"] == [str(tmp_path / "deep" / "r.html")]
    assert all(c["covered"] for c in output["coverage"])
    assert (tmp_path / "deep" / "r.html").read_text().startswith("<!doctype html>")


def test_writes_figures(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--format", "svg", "-o", str(tmp_path / "svg")]) == 0
    assert "figures" in capsys.readouterr().out
    assert len(list((tmp_path / "svg").glob("*.svg"))) > 20


def test_prints_tables_and_json(folder, capsys):
    assert main(["report", str(folder), "--format", "console"]) == 0
    assert "Kernel mix" in capsys.readouterr().out
    assert main(["report", str(folder), "--format", "console", "--json"]) == 0
    titles = [t["title"] for t in json.loads(capsys.readouterr().out)["tables"]]
    assert any(t.startswith("Layout ledger") for t in titles)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("truncate", "damaged or truncated"),
        ("version", "session version 99"),
        ("json", "not valid JSON"),
        ("foreign", "not a session"),
        ("missing", "launches.parquet"),
    ],
)
def test_damaged_sessions_are_reported_in_one_line(folder, capsys, damage, words):
    target = folder / "tf32"
    meta, launches = target / "session.json", target / "launches.parquet"
    if damage == "truncate":
        launches.write_bytes(launches.read_bytes()[:-2000])
    elif damage == "version":
        meta.write_text(json.dumps({**json.loads(meta.read_text()), "version": 99}))
    elif damage == "json":
        meta.write_text(meta.read_text()[:-40])
    elif damage == "foreign":
        meta.write_text("{}")
    else:
        launches.unlink()
    assert main(["report", str(folder), "-o", str(folder / "r.html")]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "tf32" in error
    assert error.count("\n") == 1
    assert not (folder / "r.html").exists()


def test_minimal_sessions_make_a_page(tmp_path):
    """Launches with names only: no times, classes, streams or modules."""
    from voxtune.profile.session import frame

    whole = make(launches=30, names=HOSTILE, counters=False)
    bare = [{"step": 0, "index": i, "name": n, "kind": "kernel"} for i, n in enumerate(HOSTILE)]
    for place, rows in enumerate((bare, bare[:1])):
        session = Session(meta={**whole.meta, "tiers": {}, "environment": {}}, launches=frame(rows, "launches"))
        session.save(tmp_path / str(place))
        for form in ("html", "svg", "console"):
            where = str(tmp_path / f"{place}-{form}")
            assert main(["report", str(tmp_path / str(place)), "--format", form, "-o", where, "-q"]) == 0, (place, form)


def test_empty_session_is_an_error(tmp_path, capsys):
    Session(meta=make(launches=12).meta, launches=empty("launches")).save(tmp_path)
    assert main(["report", str(tmp_path)]) == 2
    assert "contains no kernels" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["report"], ["report", "nowhere"], ["report", "--format", "pdf", "x"], ["study", "other"]]
)
def test_wrong_usage_is_an_error(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith("voxtune: error: ")


def test_unwritable_output_is_an_error(folder, capsys):
    (folder / "file").write_text("")
    assert main(["report", str(folder), "-o", str(folder / "file" / "r.html")]) == 2
    assert "is not a folder; choose another output path" in capsys.readouterr().err


def test_missing_recordings_are_an_error(capsys, monkeypatch, tmp_path):
    from voxtune.report import recordings

    monkeypatch.setattr(recordings, "root", lambda: tmp_path)
    for verb in (["report"], ["study", "paper"]):
        assert main([*verb, "--recorded"]) == 2
        assert "contains no recorded sessions" in capsys.readouterr().err


def test_sessions_of_a_folder_are_in_the_order_of_the_study():
    from voxtune.report.recordings import in_order

    configs = ["bf16+channels_last+compile", "bf16", "tf32+channels_last", "channels_last", "tf32", "baseline"]
    result = in_order([make(c, launches=20, mode=m) for m in ("sample", "train") for c in configs])
    assert [s.meta["config"] for s in result[6:]] == [
        "baseline",
        "tf32",
        "channels_last",
        "tf32+channels_last",
        "bf16",
        "bf16+channels_last+compile",
    ]
    assert [s.meta["mode"] for s in result] == ["train"] * 6 + ["sample"] * 6


def test_study_of_recordings_prints_one_table_per_figure(folder, capsys, monkeypatch, tmp_path):
    from voxtune.report import recordings

    folder.rename(tmp_path / "recordings")
    monkeypatch.setattr(recordings, "root", lambda: tmp_path / "recordings")
    out = tmp_path / "study"
    assert main(["study", "paper", "--recorded", "-o", str(out)]) == 0
    output = capsys.readouterr().out
    assert [f"Figure {n}:" in output for n in range(4, 14)] == [True] * 10
    assert (out / "report.html").is_file()
    assert main(["study", "paper", "--recorded", "--mode", "sample", "-o", str(out)]) == 2


def test_study_records_and_reports(small_sessions, capsys, monkeypatch, tmp_path):
    from voxtune.profile import record as capture

    requests = []

    def record(source, configs, out, *, options, device, say):
        requests.append((source, list(configs), options.mode, options.size))
        good = [capture.RecordResult(config="baseline", folder=tmp_path, session=small_sessions[0])]
        return [*good, capture.RecordResult(config="compile", folder=tmp_path, error="no compiler")]

    monkeypatch.setattr(capture, "record", record)
    arguments = ["study", "paper", "--mode", "both", "--size", "16,16,16", "--config", "baseline,compile", "--json"]
    assert main([*arguments, "-o", str(tmp_path / "s")]) == 0
    captured = capsys.readouterr()
    assert requests == [("med-ddpm", ["baseline", "compile"], m, (16, 16, 16)) for m in ("train", "sample")]
    assert "compile was not recorded: no compiler" in captured.err
    assert json.loads(captured.out)["study"]["training"]["rows"]
