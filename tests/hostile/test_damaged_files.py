"""Damaged and hostile files of every kind of input: each is read or refused in one line, at once and in little memory.

A small fixed part runs with the other tests. The campaign runs with `make test-hostile`; its record is
benchmarks/results/hostile-tests.json, and docs/development/hostile.md shows its counts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile import commands
from tests.hostile.kinds import KINDS, make_case
from tests.hostile.runner import Runner, Tally

# Of cases in this process, 1 test has at most so many, to share the work between processes.
CHUNK = 400
COMMAND_CASES, FRESH_CASES = 480, 40
COMMAND_CHUNK = 60


def check(tally: Tally) -> None:
    assert not tally.failures, f"{len(tally.failures)} failures:\n" + "\n".join(tally.failures[:20])


def chunks() -> list[tuple[str, int, int]]:
    return [
        (kind.name, first, min(CHUNK, kind.cases - first))
        for kind in KINDS.values()
        for first in range(0, kind.cases, CHUNK)
    ]


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_fixed_part(tmp_path: Path, part: int) -> None:
    runner, failures = Runner(), []
    for kind in list(KINDS.values())[part::2]:
        failures += runner.run(kind.name, range(kind.quick), tmp_path, keep=True).failures
    runner.close()
    assert not failures, "\n".join(failures)


def test_commands_of_the_fixed_part(tmp_path: Path) -> None:
    check(Runner().run_commands(range(3, len(commands.COMMANDS), 9), tmp_path))


def test_cases_are_the_same_in_every_run(tmp_path: Path) -> None:
    for kind in map(KINDS.get, ("NIfTI volumes", "file names", "CIFAR-10 batches", "metrics.json", "session.json")):
        assert kind is not None
        contents = []
        for name in ("a", "b"):
            folder = tmp_path / name / kind.name.replace("/", "-")
            folder.mkdir(parents=True)
            path = make_case(kind, 3, folder)
            contents.append((path.relative_to(folder), path.read_bytes() if path.is_file() else None))
        assert contents[0] == contents[1], kind.name


def test_the_campaign_is_large_enough() -> None:
    assert sum(kind.cases for kind in KINDS.values()) >= 10_000
    assert COMMAND_CASES + FRESH_CASES >= 500
    assert {command.kind for command in commands.COMMANDS} >= set(KINDS) - {
        "saved graphs",  # in the cache of the user
        "raw recordings (traces, pages of counters)",  # python -m voxtune.profile.replay
    }


@pytest.mark.hostile
@pytest.mark.parametrize(("kind", "first", "count"), chunks())
def test_files(tmp_path: Path, record_property, kind: str, first: int, count: int) -> None:
    tally = Runner().run(kind, range(first, first + count), tmp_path)
    record_property("input", kind)
    tally.record(record_property)
    check(tally)


@pytest.mark.hostile
@pytest.mark.parametrize("first", range(0, COMMAND_CASES, COMMAND_CHUNK))
def test_commands(tmp_path: Path, record_property, first: int) -> None:
    tally = Runner().run_commands(range(first, first + COMMAND_CHUNK), tmp_path)
    record_property("input", "commands")
    tally.record(record_property)
    check(tally)


@pytest.mark.hostile
@pytest.mark.parametrize("first", range(0, FRESH_CASES, 20))
def test_commands_in_a_process_of_their_own(tmp_path: Path, record_property, first: int) -> None:
    tally = Runner().run_commands(range(5000 + first, 5020 + first), tmp_path, fresh=True)
    record_property("input", "commands")
    tally.record(record_property)
    check(tally)
