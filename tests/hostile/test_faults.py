"""voxtune train and sample, killed at random moments and at every write, on failing and full disks, and two at a time.

Whatever happens: a resume gives the bits of an undisturbed run, finished work is kept, no half file has a final name, and
files of others are untouched. The tests of `train` at every write are in tests/training/test_kills.py.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.factories.kills import Commands, Done, Fault
from tests.factories.small_jobs import (
    FAILURES,
    IMAGES,
    REASONS,
    STEPS,
    VOLUMES,
    check_failure,
    check_model,
    check_same_run,
    contents,
    finished_samples,
    half_files,
    identities,
    leftovers,
    newest_step,
    record_counts,
    resume_train,
    small_disk,
    train,
    write_sample_inputs,
    write_study,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs SIGKILL and fork")
# Kills of a test; four such tests are the 100 random moments of a command.
KILLS = 25
# Files of somebody else in the output folder of sampling jobs.
STRANGERS = {"notes.txt": b"mine", ".mine.part": b"mine", "sub-0/anat/sub-0_T2w.nii.gz": b"mine", "a.json": b'{"a": 1}'}
Record = Callable[[str, object], None]


@dataclass(frozen=True)
class Undisturbed:
    """A command that nothing disturbed: how to run it for another folder, what it wrote, its steps and its duration."""

    command: Callable[..., list[str]]
    folder: Path
    steps: tuple[str, ...]
    seconds: float

    @property
    def files(self) -> dict[str, bytes]:
        return contents(self.folder)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Commands, Commands]]:
    """Two processes to run commands from."""
    commands = (Commands(), Commands())
    yield commands
    for one in commands:
        one.close()


@pytest.fixture(scope="module")
def commands(pair: tuple[Commands, Commands]) -> Commands:
    return pair[0]


def undisturbed(
    commands: Commands, command: Callable[..., list[str]], folder: Path, *, strangers: bool = False
) -> Undisturbed:
    for place in (folder.with_name("first"), folder):  # the first one also starts the process
        if strangers:
            add_strangers(place)
        started = time.monotonic()
        done = commands.run(command(place))
        assert done.code == 0, done.stderr
    return Undisturbed(command, folder, done.steps, time.monotonic() - started)


def add_strangers(folder: Path) -> Path:
    for name, content in STRANGERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(tmp_path_factory.mktemp("data") / "study")


@pytest.fixture(scope="module")
def run(commands: Commands, study: Path, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(commands, partial(train, study), tmp_path_factory.mktemp("train") / "run")


@pytest.fixture(scope="module")
def jobs(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Undisturbed]:
    """A job of volumes and a job of images."""
    root = tmp_path_factory.mktemp("sample")
    inputs = write_sample_inputs(root)
    kinds = {"volumes": inputs.volumes, "images": inputs.images}
    return {
        name: undisturbed(commands, command, root / name / "out", strangers=True) for name, command in kinds.items()
    }


def check_untouched(out: Path, job: Undisturbed) -> None:
    """Every file is that of the undisturbed job, or of somebody else."""
    files, expected = contents(out), job.files
    assert half_files(out) == [str(out / "sub-0/anat/sub-0_T2w.nii.gz")], "only that of somebody else"
    assert {name: expected[name] for name in files} == files


def resume_sample(commands: Commands, out: Path, job: Undisturbed) -> None:
    """The rest is drawn: the same bytes, with the finished samples as they are and without leftovers."""
    before = {name: identities(out)[name] for name in finished_samples(out) if name not in STRANGERS}
    done = commands.run(job.command(out, "--resume"))
    assert done.code == 0, done.stderr
    assert contents(out) == job.files
    assert leftovers(out) == []
    assert before.items() <= identities(out).items(), "finished samples are not written again"


CHUNKS = [pytest.param(chunk, marks=pytest.mark.hostile) for chunk in range(4)]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_train_killed_at_random_moments(
    commands: Commands, study: Path, run: Undisturbed, tmp_path: Path, record_property: Record, chunk: int
) -> None:
    rng, kills, runs = random.Random(chunk), 0, 0
    while kills < KILLS:
        runs += 1
        out, fresh = tmp_path / str(runs), runs == 1
        for _ in range(rng.randint(1, 4)):
            before = newest_step(out)
            # A process of its own also has to import everything.
            moment = rng.uniform(2.0, 8.0) if fresh else rng.uniform(0.0, run.seconds)
            if not resume_train(commands, study, out, kill_after=moment, fresh=fresh).killed:
                break
            kills += 1
            check_model(out)
            assert half_files(out) == []
            assert before is None or (newest_step(out) or 0) >= before, "a checkpoint was lost"
        newest = newest_step(out)
        done = resume_train(commands, study, out, "--json")
        assert done.code == 0, done.stderr
        assert json.loads(done.stdout)["resumed_from"] == newest, "the run goes on from its newest checkpoint"
        check_same_run(out, run.folder)
    record_counts(record_property, kills=kills)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", ["volumes", "images"])
def test_sample_killed_at_random_moments(
    commands: Commands,
    jobs: dict[str, Undisturbed],
    tmp_path: Path,
    record_property: Record,
    kind: str,
    chunk: int,
) -> None:
    rng, kills, runs, job = random.Random(chunk), 0, 0, jobs[kind]
    while kills < KILLS:
        runs += 1
        out, fresh = add_strangers(tmp_path / str(runs)), runs == 1
        for _ in range(rng.randint(1, 4)):
            before = {name: identities(out)[name] for name in finished_samples(out)}
            moment = rng.uniform(2.0, 8.0) if fresh else rng.uniform(0.0, job.seconds)
            if not commands.run(job.command(out, "--resume"), kill_after=moment, fresh=fresh).killed:
                break
            kills += 1
            check_untouched(out, job)
            assert before.items() <= identities(out).items(), "a finished sample was lost"
        resume_sample(commands, out, job)
    record_counts(record_property, kills=kills)


@pytest.mark.parametrize(
    ("kind", "every"),
    [("volumes", 25), *(pytest.param(kind, 1, marks=pytest.mark.hostile) for kind in ("volumes", "images"))],
)
@pytest.mark.slow
def test_sample_killed_at_every_step_of_its_writes(
    commands: Commands, jobs: dict[str, Undisturbed], tmp_path: Path, record_property: Record, kind: str, every: int
) -> None:
    job = jobs[kind]
    places = range(1, len(job.steps) + 1, every)
    for at in places:
        out = add_strangers(tmp_path / str(at))
        assert commands.run(job.command(out), Fault(at)).killed
        check_untouched(out, job)
        resume_sample(commands, out, job)
    record_counts(record_property, kills=len(places))


@pytest.mark.parametrize(
    ("error", "lasting", "every"),
    [("ENOSPC", True, 37), *(pytest.param(*failure, marks=pytest.mark.hostile) for failure in FAILURES)],
)
def test_sample_on_a_failing_disk(
    commands: Commands,
    jobs: dict[str, Undisturbed],
    tmp_path: Path,
    record_property: Record,
    error: str,
    lasting: bool,
    every: int,
) -> None:
    job = jobs["volumes"]
    places = range(1, len(job.steps) + 1, every)
    for at in places:
        out = add_strangers(tmp_path / str(at))
        done = commands.run(job.command(out), Fault(at, error, lasting=lasting))
        check_failure(done, job.steps[at - 1], REASONS[error])
        if (error, lasting) != ("EIO", True):  # then files cannot be deleted either
            assert leftovers(out) == [] or job.steps[at - 1].startswith("remove"), job.steps[at - 1]
        check_untouched(out, job)
        resume_sample(commands, out, job)
    record_counts(record_property, faults=len(places))


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param("volumes", "kill", marks=pytest.mark.hostile),
        pytest.param("volumes", "ENOSPC", marks=pytest.mark.hostile),
        pytest.param("images", "kill", marks=pytest.mark.hostile),
    ],
)
def test_sample_that_replaces_and_is_disturbed(
    commands: Commands, jobs: dict[str, Undisturbed], tmp_path: Path, record_property: Record, kind: str, fault: str
) -> None:
    """--overwrite: every file is the old or the new one, and no sidecar says anything of another volume."""
    job, old = jobs[kind], add_strangers(tmp_path / "old")
    assert commands.run(job.command(old, "--seed", "1")).code == 0
    before, after = contents(old), job.files
    shutil.copytree(old, tmp_path / "new")
    steps = commands.run(job.command(tmp_path / "new", "--overwrite")).steps
    assert contents(tmp_path / "new") == after
    places = range(1, len(steps) + 1, 1 if kind == "volumes" and fault == "kill" else 2)
    for at in places:
        out = shutil.copytree(old, tmp_path / str(at))
        done = commands.run(job.command(out, "--overwrite"), Fault(at, fault, lasting=fault != "kill"))
        if fault == "kill":
            assert done.killed
        else:
            check_failure(done, steps[at - 1], REASONS[fault])
        check_replacement(contents(out), before, after)
        # With the old settings, a job goes on only if every finished sample is an old one.
        done = commands.run(job.command(out, "--seed", "1", "--resume"))
        if done.code == 0:
            assert contents(out) == before
        else:
            assert done.code == 2 and "drawn with" in done.stderr, done.stderr
        assert commands.run(job.command(out, "--overwrite")).code == 0
        assert contents(out) == after and leftovers(out) == []
    record_counts(record_property, **{"kills" if fault == "kill" else "faults": len(places)})


def check_replacement(files: dict[str, bytes], before: dict[str, bytes], after: dict[str, bytes]) -> None:
    assert files.keys() == after.keys()
    for name, content in files.items():
        if name in STRANGERS or not name.endswith(".json") or name == "dataset_description.json":
            assert content in (before[name], after[name]), name
            continue
        stem = name.removesuffix(".json")
        for side in (before, after):
            if content == side[name]:
                assert all(files[file] == side[file] for file in files if file.startswith(f"{stem}.")), name
        assert content in (before[name], after[name]) or json.loads(content)["incomplete"], name


@pytest.mark.hostile
def test_train_that_replaces_a_run_and_is_killed(
    commands: Commands, study: Path, run: Undisturbed, tmp_path: Path, record_property: Record
) -> None:
    """--overwrite deletes the files of the old run: whatever is left is a run, and files of others stay."""
    old = shutil.copytree(run.folder, tmp_path / "old")
    (old / "notes.txt").write_text("mine")
    shutil.copytree(old, tmp_path / "new")
    steps = commands.run(train(study, tmp_path / "new", "--overwrite")).steps
    places = [*range(1, 30), *range(30, len(steps) + 1, 5)]
    for at in places:
        out = shutil.copytree(old, tmp_path / str(at))
        assert commands.run(train(study, out, "--overwrite"), Fault(at)).killed
        check_model(out)
        assert half_files(out) == []
        begun = (out / "train.json").exists()
        assert (out / "notes.txt").read_text() == "mine"
        if not begun:  # then a folder with files of others is not one for a new run
            (out / "notes.txt").unlink()
        done = commands.run(train(study, out, "--overwrite")) if at % 2 else resume_train(commands, study, out)
        assert done.code == 0, (at, steps[at - 1], done.stderr)
        check_same_run(out, run.folder)
        assert not begun or (out / "notes.txt").read_text() == "mine"
    record_counts(record_property, kills=len(places))


@pytest.mark.hostile
@pytest.mark.parametrize(
    "limit", [*(f"size={pages * 4}k" for pages in range(1, 25, 2)), *(f"nr_inodes={n}" for n in range(3, 24, 3))]
)
def test_sample_on_a_small_disk(
    commands: Commands, jobs: dict[str, Undisturbed], tmp_path: Path, record_property: Record, limit: str
) -> None:
    job = jobs["volumes"]
    with small_disk(tmp_path / "disk", "size=4m") as enlarge:
        out = add_strangers(tmp_path / "disk" / "out")
        used = len(list(out.rglob("*"))) + 2
        pages = sum(1 for file in out.rglob("*") if file.is_file())
        name, _, value = limit.partition("=")
        room = f"nr_inodes={used + int(value)}" if name == "nr_inodes" else f"size={pages * 4 + int(value[:-1])}k"
        remount(tmp_path / "disk", room)
        done = commands.run(job.command(out))
        check_failure(done, "remove" if contents(out) == job.files else "", REASONS["ENOSPC"])
        assert leftovers(out) == []
        check_untouched(out, job)
        enlarge()
        resume_sample(commands, out, job)
    record_counts(record_property, full_disks=1)


def remount(place: Path, limit: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{limit}", str(place)], check=True)


@pytest.mark.hostile
@pytest.mark.parametrize("kilobytes", [4, 16, 64, 256, 512, 768, 1024, 1536, 2048])
def test_train_on_a_small_disk(
    commands: Commands, study: Path, run: Undisturbed, tmp_path: Path, record_property: Record, kilobytes: int
) -> None:
    with small_disk(tmp_path / "disk", f"size={kilobytes}k") as enlarge:
        out = tmp_path / "disk" / "run"
        done = commands.run(train(study, out))
        reason = "space left" if "os error 28" not in done.stderr else "os error 28"
        check_failure(done, "remove" if (out / "model" / "README.md").exists() else "", reason)
        assert leftovers(out) == [] and half_files(out) == []
        check_model(out)
        enlarge()
        done = resume_train(commands, study, out)
        assert done.code == 0, done.stderr
        check_same_run(out, run.folder)
    record_counts(record_property, full_disks=1)


def together(pair: tuple[Commands, Commands], arguments: list[str], delay: float) -> tuple[Done, Done]:
    """The same command twice, the second one after a delay."""
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(pair[0].run, arguments)
        time.sleep(delay)
        second = threads.submit(pair[1].run, arguments)
        return first.result(), second.result()


def check_one_works(results: tuple[Done, Done], *, resumed: bool) -> tuple[int, ...]:
    """One command works; the other is refused with one line, or, of resumed ones, is late and has nothing to do."""
    codes = tuple(sorted(done.code for done in results))
    assert codes == (0, 2) or (resumed and codes == (0, 0)), [(done.code, done.stderr) for done in results]
    for done in results:
        if done.code:
            lines = [line for line in done.stderr.splitlines() if line.startswith("voxtune: error")]
            assert len(lines) == 1 and "Traceback" not in done.stderr
            assert "in use by another Voxtune process" in lines[0] or "already" in lines[0], done.stderr
    return codes


TRIES = [pytest.param(1), pytest.param(25, marks=pytest.mark.hostile)]


@pytest.mark.parametrize("tries", TRIES)
@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.slow
def test_two_samples_in_one_folder(
    pair: tuple[Commands, Commands],
    jobs: dict[str, Undisturbed],
    tmp_path: Path,
    record_property: Record,
    resumed: bool,
    tries: int,
) -> None:
    rng = random.Random(tries)
    for attempt in range(tries):
        kind = ("volumes", "images")[attempt % 2]
        job, out = jobs[kind], add_strangers(tmp_path / str(attempt))
        if resumed:
            assert pair[0].run(job.command(out), Fault(rng.randint(1, len(job.steps)))).killed
        done_before = len(finished_samples(out)) // (3 if kind == "volumes" else 2)
        more = ["--json", *(["--resume"] if resumed else [])]
        results = together(pair, job.command(out, *more), rng.uniform(0.0, 1.2 * job.seconds))
        check_one_works(results, resumed=resumed)
        drawn = [len(json.loads(done.stdout)[kind]) for done in results if done.code == 0]
        assert sum(drawn) == (VOLUMES if kind == "volumes" else IMAGES) - done_before, "each sample is drawn once"
        assert contents(out) == job.files and leftovers(out) == []
    record_counts(record_property, pairs=tries)


@pytest.mark.hostile
@pytest.mark.parametrize("resumed", [False, True])
def test_two_trainings_in_one_folder(
    pair: tuple[Commands, Commands],
    study: Path,
    run: Undisturbed,
    tmp_path: Path,
    record_property: Record,
    resumed: bool,
) -> None:
    rng, tries = random.Random(resumed), 25
    begin = next(at for at, step in enumerate(run.steps, start=1) if step == "publish train.json") + 1
    for attempt in range(tries):
        out = tmp_path / str(attempt)
        if resumed:
            assert pair[0].run(train(study, out), Fault(rng.randint(begin, len(run.steps)))).killed
        newest = newest_step(out)
        arguments = ["train", "--resume", str(out), "--device", "cpu"] if resumed else train(study, out)
        results = together(pair, [*arguments, "--json"], rng.uniform(0.0, 1.2 * run.seconds))
        codes = check_one_works(results, resumed=resumed)
        starts = [json.loads(done.stdout)["resumed_from"] for done in results if done.code == 0]
        assert sorted(starts, key=lambda step: step or 0) == ([newest, STEPS] if codes == (0, 0) else [newest])
        check_same_run(out, run.folder)
    record_counts(record_property, pairs=tries)
