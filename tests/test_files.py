"""The writer, its rules and its locks (voxtune.files, voxtune.marks)."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from voxtune import files
from voxtune.errors import FilesError, InputError, printable
from voxtune.files import (
    AppendLog,
    check_outputs,
    locked_file,
    locked_folder,
    recorded_command,
    recorded_path,
    recording_paths,
    slug,
    write_file,
    write_json,
    write_output,
    writing,
)
from voxtune.marks import is_marked, written_by_voxtune


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_an_existing_file_is_never_replaced_without_consent(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        write_file(file, "ours")
    with pytest.raises(InputError, match="was not written by Voxtune"):
        write_file(file, "ours", overwrite=True)
    assert file.read_text() == "mine"
    assert names(tmp_path) == ["a.json"]


def test_overwrite_replaces_what_voxtune_wrote(tmp_path):
    file = write_json(tmp_path / "new" / "a.json", {"format": "voxtune-steps/1"})
    write_json(file, {"format": "voxtune-steps/1", "more": 1}, overwrite=True)
    assert json.loads(file.read_text())["more"] == 1
    assert names(file.parent) == ["a.json"]


def test_a_file_that_appears_during_the_work_is_kept(tmp_path):
    file = tmp_path / "a.txt"
    with pytest.raises(InputError, match="already exists"), writing(file) as part:
        part.write_text("ours")
        file.write_text("mine")
    assert file.read_text() == "mine"
    assert names(tmp_path) == ["a.txt"]


def test_without_hard_links_nothing_is_replaced_either(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "no hard links")

    monkeypatch.setattr(os, "link", no_links)
    file = write_file(tmp_path / "a.txt", "first")
    assert file.read_text() == "first"
    with pytest.raises(InputError, match="already exists"):
        write_file(file, "second")


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"state": True}])
def test_nothing_is_written_through_a_symbolic_link(tmp_path, options):
    target = write_json(tmp_path / "target.json", {"format": "voxtune-steps/1"})
    before = target.read_bytes()
    link = tmp_path / "link.json"
    link.symlink_to(target)
    with pytest.raises(InputError, match="symbolic link"):
        write_file(link, "new", **options)
    dangling = tmp_path / "dangling"
    dangling.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="symbolic link"):
        write_file(dangling, "new", **options)
    assert target.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


def test_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="not a regular file"):
        write_file(tmp_path / "pipe", "new", state=True)


@pytest.mark.parametrize("call", ["fsync", "link", "open", "write"])
def test_an_error_at_any_point_leaves_the_folder_as_it_was(tmp_path, monkeypatch, call):
    old = write_file(tmp_path / "old", "old")

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "write":
        monkeypatch.setattr(Path, "write_bytes", fail)
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(InputError, match="new: No space left on device"):
        write_file(tmp_path / "new", "new")
    monkeypatch.undo()
    assert old.read_text() == "old"
    # After the file is in place, only flushing its folder can fail.
    assert set(names(tmp_path)) <= {"old", "new"}


def test_outputs_are_checked_together(tmp_path):
    (tmp_path / "taken").write_text("mine")
    (tmp_path / "folder").mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "folder" / "link").symlink_to(outside)
    inside = tmp_path / "folder"
    check_outputs([inside / "a" / "b.json", inside / "c"], folder=inside)
    bad = [inside / ".." / "x", inside / "link" / "x", tmp_path / "taken" / "x", inside / ("n" * 300)]
    with pytest.raises(FilesError) as caught:
        check_outputs([*bad, inside / "fine"], folder=inside)
    assert len(caught.value.rows) == 4
    with pytest.raises(InputError, match="is a folder"):
        check_outputs([inside])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("T1w", "T1w"),
        ("ce T1/w", "ce-T1-w"),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "unnamed"),
        ("", "unnamed"),
        (".hidden", "hidden"),
        ("a..b", "a.b"),
        ("x\0y\x1b[31m", "x-y-31m"),
        ("ä" * 300, "unnamed"),
        ("a" * 300, "a" * 80),
        ("-o", "o"),
    ],
)
def test_slugs(name, expected):
    assert slug(name) == expected


def test_append_log_drops_a_torn_line_and_undoes_a_failed_one(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n{"a"')
    log = AppendLog(path)
    log.write('{"a": 3}')
    real = os.write

    def half(handle, data):
        real(handle, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(InputError, match="No space left"):
        log.write('{"a": 4}')
    monkeypatch.undo()
    log.write('{"a": 5}')
    log.sync()
    log.close()
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 3, 5]
    (tmp_path / "one").write_bytes(b"x" * 200_000)
    AppendLog(tmp_path / "one").close()
    assert (tmp_path / "one").read_bytes() == b""


def test_a_locked_folder_is_refused_to_a_second_process(tmp_path):
    out = tmp_path / "a" / "b"
    code = f"""
from pathlib import Path
from voxtune.files import locked_folder
with locked_folder(Path({str(out)!r})):
    print("in")
"""
    with locked_folder(out):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert f"in use by another Voxtune process (PID {os.getpid()})" in done.stderr
        (out / "result").write_text("x")
    assert names(out) == ["result"]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "in\n"
    assert names(out) == ["result"]


def test_a_locked_folder_without_a_result_disappears(tmp_path):
    with pytest.raises(RuntimeError), locked_folder(tmp_path / "a" / "b"):
        raise RuntimeError
    assert names(tmp_path) == []


def test_a_lock_removes_only_temporary_files_of_voxtune(tmp_path):
    for name in (".voxtune-abcd1234.part", ".mine.part", "b.part"):
        (tmp_path / name).write_text("x")
    with locked_folder(tmp_path):
        pass
    assert names(tmp_path) == [".mine.part", "b.part"]


def test_a_file_is_locked_by_a_file_beside_it(tmp_path):
    file = tmp_path / ("n" * 250)
    with locked_file(file):
        with pytest.raises(InputError, match="in use"), locked_file(file):
            pass
        with locked_file(tmp_path / "other"):
            pass
    assert names(tmp_path) == []


def test_temporary_files_of_killed_processes_are_deleted_and_those_of_running_ones_kept(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from voxtune.files import writing
with writing(Path({str(tmp_path / "killed")!r})):
    os.kill(os.getpid(), signal.SIGKILL)
"""

    def kill_one() -> None:
        before = names(tmp_path)
        subprocess.run([sys.executable, "-c", code], check=False)
        assert len(names(tmp_path)) == len(before) + 1

    with writing(tmp_path / "running.txt") as part:
        part.write_text("running")
        kill_one()
        with locked_folder(tmp_path):
            assert len([name for name in names(tmp_path) if name.endswith(".part")]) == 1
        kill_one()
        with locked_file(tmp_path / "other"):
            pass
        kill_one()
        write_output(tmp_path / "third", "x")
    assert names(tmp_path) == ["running.txt", "third"]
    assert (tmp_path / "running.txt").read_text() == "running"


@pytest.mark.parametrize("call", ["ftruncate", "write"])
def test_a_lock_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch, call):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(InputError, match="No space left on device"), locked_folder(tmp_path / "out"):
        pass
    monkeypatch.undo()
    assert names(tmp_path) == []
    with locked_folder(tmp_path / "out"):
        pass


def test_a_lock_that_cannot_be_deleted_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    with locked_folder(tmp_path):
        monkeypatch.setattr(os, "unlink", fail)
    monkeypatch.undo()
    assert "cannot be deleted" in caplog.text
    with locked_folder(tmp_path):
        pass
    assert names(tmp_path) == []


def test_many_processes_take_turns_at_one_lock(tmp_path):
    """The lock file is deleted after each turn; nobody may hold a deleted one together with a new one."""
    code = f"""
import os, time
from pathlib import Path
from voxtune.errors import InputError
from voxtune.files import locked_folder
out, turns = Path({str(tmp_path)!r}), 0
end = time.monotonic() + 60
while turns < 30 and time.monotonic() < end:
    try:
        with locked_folder(out):
            handle = os.open(out / "busy", os.O_CREAT | os.O_EXCL)
            os.close(handle)
            (out / "busy").unlink()
            turns += 1
    except InputError:
        time.sleep(0.0005)
assert turns == 30
"""
    runs = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(3)]
    for run in runs:
        _, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors.decode()


def test_records_hold_names_and_no_paths(tmp_path):
    inside, outside = tmp_path / "out" / "sub-1" / "x.nii.gz", tmp_path / "home" / "joe" / "mask.nii.gz"
    assert recorded_path(inside, tmp_path / "out") == "sub-1/x.nii.gz"
    assert recorded_path(outside, tmp_path / "out") == "mask.nii.gz"
    assert recorded_path(tmp_path / "home" / ".." / "home") == "home"
    assert recorded_path(Path("..")) == Path.cwd().parent.name
    command = ["voxtune", "train", "--images", str(outside), f"--config={outside}", "--labels", "a=1; b=2", "../x"]
    assert recorded_command(command) == (
        "voxtune train --images mask.nii.gz --config=mask.nii.gz --labels 'a=1; b=2' x"
    )
    with recording_paths():
        assert recorded_path(outside) == outside.as_posix()
        assert str(outside) in recorded_command(command)
    assert recorded_path(outside) == "mask.nii.gz"


def test_printable_escapes_and_shortens_but_keeps_the_end():
    assert printable("a\x1b[31m\udc80b") == "a\\x1b[31m\\udc80b"
    text = printable("x" * 20_000_000 + "; pass --labels", 500)
    assert len(text) == 500
    assert text.endswith("; pass --labels")


def test_marks(tmp_path):
    assert is_marked({"voxtune": "0.1.0", "seed": 0})
    assert is_marked({"GeneratedBy": [{"Name": "voxtune"}]})
    assert is_marked({"seed": 0, "index": 1, "sampler": "ddpm", "placement": "x"})
    for other in ({}, [], {"format": 3}, {"GeneratedBy": [{"Name": "fmriprep"}]}, {"GeneratedBy": 1}, "voxtune"):
        assert not is_marked(other)
    for name in ("a.nii.gz", "a.json", "a.html", "a.svg", "a.png", "a.safetensors", "a.npz", "a.md", "a.txt", "a"):
        (tmp_path / name).write_bytes(b"\x1f\x8b damaged \xff")
        assert not written_by_voxtune(tmp_path / name)


def test_the_module_names_no_other_package():
    assert "voxtune.data" not in Path(files.__file__).read_text()
