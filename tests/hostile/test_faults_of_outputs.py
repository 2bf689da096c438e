"""The other commands that write files, killed and on failing disks at the steps of the writer.

No half file has a final name, nothing is written outside of the output folder, and the same command with --overwrite then
gives the files of an undisturbed run. `train` and `sample` are in test_faults.py.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cli import test_outputs as outputs
from tests.factories.kills import MODULES, Commands, Fault
from tests.factories.small_jobs import (
    REASONS,
    check_failure,
    contents,
    half_files,
    identities,
    leftovers,
    record_counts,
)
from tests.hostile.test_faults import Record

pytestmark = [
    pytest.mark.hostile,
    pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL and fork"),
]
# Of commands that write many files in the same way, every n-th step.
EVERY = dict.fromkeys(("report", "waterfall", "import", "pack", "view", "evaluate", "tune"), 1)
EVERY |= {"cohort": 2, "profile": 7, "figures": 11}


@dataclass(frozen=True)
class Example:
    """A command that ran twice undisturbed: its steps, what it wrote, and whether that was the same both times."""

    command: outputs.WritingCommand
    inputs: Path
    steps: tuple[str, ...]
    files: dict[str, bytes]
    deterministic: bool

    def run(self, out: Path, *more: str) -> list[str]:
        words = [word.format(**{"in": self.inputs, "out": out}) for word in self.command.arguments]
        return [*words, *(["--minutes", "0"] if self.command.name == "tune" else []), *more]

    @property
    def places(self) -> range:
        return range(1, len(self.steps) + 1, EVERY[self.command.name])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Commands, Commands]]:
    cache = {"VOXTUNE_CACHE": str(tmp_path_factory.mktemp("cache"))}
    commands = tuple(Commands([*MODULES, "tests.factories.warm_commands"], cache) for _ in range(2))
    yield commands[0], commands[1]
    for one in commands:
        one.close()


@pytest.fixture(scope="module")
def commands(pair: tuple[Commands, Commands]) -> Commands:
    return pair[0]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outputs.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module", params=[c for c in outputs.COMMANDS if c.name in EVERY], ids=lambda c: c.name)
def example(
    request: pytest.FixtureRequest, commands: Commands, inputs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Example:
    root = tmp_path_factory.mktemp("undisturbed")
    example = Example(request.param, inputs, (), {}, False)
    done = [commands.run(example.run(root / name)) for name in ("a", "b")]
    assert [one.code for one in done] == [0, 0], done[0].stderr
    files = contents(root / "b")
    return Example(request.param, inputs, done[1].steps, files, contents(root / "a") == files)


def check_files(out: Path, example: Example) -> None:
    """Every file that is there is complete."""
    files = contents(out)
    assert files.keys() <= example.files.keys()
    if example.deterministic:
        assert {name: example.files[name] for name in files} == files
    else:
        assert half_files(out) == []


def check_again(commands: Commands, out: Path, example: Example) -> None:
    """The same command with --overwrite succeeds, and nothing is left of the disturbed one."""
    done = commands.run(example.run(out, "--overwrite"))
    assert done.code == 0, done.stderr
    assert contents(out).keys() == example.files.keys()
    check_files(out, example)
    assert leftovers(out) == []


def check_nothing_else(place: Path, out: Path) -> None:
    assert [path for path in place.iterdir() if path != out] == []


@pytest.mark.parametrize("replaces", [False, True])
def test_killed_at_the_steps_of_its_writes(
    commands: Commands, example: Example, tmp_path: Path, record_property: Record, replaces: bool
) -> None:
    before, steps = identities(example.inputs), example.places
    if replaces:
        old = tmp_path / "old"
        assert commands.run(example.run(old)).code == 0
        again = shutil.copytree(old, tmp_path / "again")
        count = len(commands.run(example.run(again, "--overwrite")).steps)
        steps = range(1, count + 1, 2 * EVERY[example.command.name])
    for at in steps:
        place = tmp_path / str(at)
        place.mkdir()
        out = shutil.copytree(old, place / "out") if replaces else place / "out"
        assert commands.run(example.run(out, *(["--overwrite"] if replaces else [])), Fault(at)).killed
        check_files(out, example)
        check_again(commands, out, example)
        check_nothing_else(place, out)
    assert identities(example.inputs) == before
    record_counts(record_property, kills=len(steps))


@pytest.mark.parametrize(("error", "lasting"), [("ENOSPC", True), ("EIO", False)])
def test_on_a_failing_disk(
    commands: Commands, example: Example, tmp_path: Path, record_property: Record, error: str, lasting: bool
) -> None:
    before = identities(example.inputs)
    for at in example.places:
        place = tmp_path / str(at)
        place.mkdir()
        out, step = place / "out", example.steps[at - 1]
        done = commands.run(example.run(out), Fault(at, error, lasting=lasting))
        if example.command.name != "tune" or done.code:  # tune goes on without its cache
            check_failure(done, step, REASONS[error])
        assert leftovers(out) == [] or step.startswith("remove"), step
        check_files(out, example)
        check_again(commands, out, example)
        check_nothing_else(place, out)
    assert identities(example.inputs) == before
    record_counts(record_property, faults=len(example.places))


def test_two_cohorts_in_one_folder(pair: tuple[Commands, Commands], tmp_path: Path, record_property: Record) -> None:
    """Different ones: the folder holds one of them, as a whole."""
    tries = 12

    def cohort(seed: int, out: Path, *more: str) -> list[str]:
        return ["cohort", "2", "--size", outputs.SIZE, "--seed", str(seed), "-o", str(out), *more]

    expected = []
    for seed in range(2):
        assert pair[0].run(cohort(seed, tmp_path / f"alone-{seed}")).code == 0
        assert pair[1].run(cohort(seed, tmp_path / f"warm-{seed}")).code == 0
        expected.append(contents(tmp_path / f"alone-{seed}"))
    for attempt in range(tries):
        out = tmp_path / str(attempt)
        more = ["--overwrite"] if attempt % 2 else []
        with ThreadPoolExecutor(2) as threads:
            both = [threads.submit(pair[seed].run, cohort(seed, out, *more)) for seed in range(2)]
            results = [one.result() for one in both]
        codes = [done.code for done in results]
        assert sorted(codes) == [0, 2] or (more and codes == [0, 0]), [done.stderr for done in results]
        assert contents(out) in ([expected[codes.index(0)]] if 2 in codes else expected)
        assert leftovers(out) == []
    record_counts(record_property, pairs=tries)
