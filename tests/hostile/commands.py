"""Cases through the real command: what it prints, how it ends, and what it leaves on the disk.

A command runs in a child of a process that has imported Voxtune, from `voxtune.__main__.run` on; or, if it is `fresh`, as
`python -m voxtune`. Files of a stranger stand in its output folder, and in a third of the cases at the very path that it is to
write, with --overwrite.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SECONDS = 60
# A row on standard error: an error, or a row of the table of problems.
LONGEST_ROW = 1100
ERROR = "voxtune: error: "
STRANGER = b"This file is not of Voxtune.\n"


@dataclass(frozen=True, kw_only=True)
class Command:
    """`arguments` may hold {in}, {damaged}, {copy} (a copy of {in} in the output folder), {aux} (valid inputs) and {out}.

    `target` is the file that the command writes, below {out}. `text`: the damaged file holds the value of an option.
    """

    kind: str
    arguments: tuple[str, ...]
    target: str = ""
    codes: tuple[int, ...] = (0, 2)
    text: bool = False


TINY = ("--size", "8,8,8", "--base", "32", "--multipliers", "1", "--steps", "1", "--batch", "1", "--device", "cpu")
TRAIN = ("--set", "tensorboard=false", "--set", "attention=[]", "--set", "workers=0", "--dry-run", "--quiet")
DRAW = ("--steps", "1", "--plan", "baseline", "--batch", "1", "--device", "cpu", "--quiet")
SAMPLE = ("sample", "{aux}/model", "-m", "{damaged}", "-o", "{out}/s", *DRAW)
COMMANDS = (
    Command(kind="NIfTI volumes", arguments=SAMPLE, target="s/dataset_description.json"),
    Command(
        kind="NIfTI volumes",
        arguments=("sample", "{aux}/model", "-m", "{in}", "-o", "{out}/s", "--on-error", "skip", *DRAW),
        codes=(0, 2, 3),
    ),
    Command(
        kind="NIfTI volumes",
        arguments=("view", "{in}", "-o", "{out}/v.html", "--sheet", "{out}/v.png"),
        target="v.html",
    ),
    Command(kind="MGH volumes", arguments=SAMPLE),
    Command(kind="pipes, folders, devices and links", arguments=SAMPLE),
    Command(kind="file names", arguments=SAMPLE),
    Command(kind="file names", arguments=("view", "{in}", "-o", "{out}/v.html"), target="v.html"),
    Command(
        kind="folders of images and masks",
        arguments=("pack", "--images", "{in}/images", "--masks", "{in}/masks", "--size", "8,8,8", "-o", "{out}/p.npz"),
        target="p.npz",
    ),
    Command(
        kind="folders of images and masks",
        arguments=("train", "--images", "{in}/images", "--masks", "{in}/masks", *TINY, "-o", "{out}/r", *TRAIN),
    ),
    Command(
        kind="folders of images and masks",
        arguments=(
            "evaluate",
            "{in}/images",
            "{in}/images",
            "--masks",
            "{in}/masks",
            "-o",
            "{out}/e",
            "--resamples",
            "10",
            "--device",
            "cpu",
        ),
        target="e/metrics.json",
    ),
    Command(kind="packed subjects", arguments=("train", "--subjects", "{damaged}", *TINY, "-o", "{out}/r", *TRAIN)),
    Command(
        kind="CIFAR-10 batches",
        arguments=(
            "train",
            "--workload",
            "convnext",
            "--images",
            "{damaged}/..",
            "--size",
            "16,16",
            "--steps",
            "1",
            "--batch",
            "1",
            "--device",
            "cpu",
            "-o",
            "{out}/r",
            *TRAIN[2:],
        ),
    ),
    Command(
        kind="tables and texts of labels",
        arguments=("view", "{aux}/masks", "--labels", "{text}", "-o", "{out}/v.html"),
        target="v.html",
        text=True,
    ),
    Command(
        kind="tables and texts of labels",
        arguments=("sample", "{aux}/model", "-m", "{aux}/masks", "--labels", "{text}", "-o", "{out}/s", *DRAW),
        text=True,
    ),
    Command(kind="sidecars and datasets", arguments=("view", "{in}", "-o", "{out}/v.html", "--json"), target="v.html"),
    Command(
        kind="sidecars and datasets", arguments=("cohort", "1", "--size", "16,16,16", "-o", "{copy}", "--overwrite")
    ),
    Command(
        kind="metrics.json", arguments=("view", "{in}", "--metrics", "{damaged}", "-o", "{out}/v.html"), target="v.html"
    ),
    Command(
        kind="checkpoints", arguments=("import", "{damaged}", "-o", "{out}/m", "--size", "8,8,8"), target="m/README.md"
    ),
    Command(kind="checkpoints", arguments=("info", "{damaged}")),
    Command(
        kind="checkpoints before torch 1.6",
        arguments=("import", "{damaged}", "-o", "{out}/m", "--size", "8,8,8"),
        target="m/config.json",
    ),
    Command(kind="weights (safetensors)", arguments=("info", "{in}/model")),
    Command(kind="config.json of a model", arguments=("info", "{in}/model", "--json")),
    Command(
        kind="config.json of a model", arguments=("sample", "{in}/model", "-m", "{aux}/masks", "-o", "{out}/s", *DRAW)
    ),
    Command(
        kind="segmenters",
        arguments=(
            "evaluate",
            "{aux}/images",
            "{aux}/images",
            "--masks",
            "{aux}/masks",
            "--features",
            "{in}/segmenter",
            "--segmenter",
            "{in}/segmenter",
            "-o",
            "{out}/e",
            "--resamples",
            "10",
            "--device",
            "cpu",
        ),
    ),
    Command(
        kind="settings of a training run (YAML, JSON, --set)",
        arguments=(
            "train",
            "--config",
            "{in}/train.yaml",
            "-o",
            "{out}/r",
            "--device",
            "cpu",
            "--dry-run",
            "--set",
            "{setting}",
        ),
        text=True,
    ),
    Command(
        kind="training runs and their checkpoints",
        arguments=("train", "--resume", "{copy}/run", "--device", "cpu", "--quiet"),
    ),
    Command(kind="training runs and their checkpoints", arguments=("info", "{in}/run")),
    Command(
        kind="plans",
        arguments=(
            "sample",
            "{aux}/model",
            "-m",
            "{aux}/masks/mask_dseg.nii.gz",
            "-o",
            "{out}/s",
            *DRAW[:2],
            "--plan",
            "{damaged}",
            *DRAW[4:],
        ),
    ),
    Command(
        kind="steps.json",
        arguments=(
            "steps",
            "{aux}/model",
            "--confirm",
            "{damaged}",
            "-o",
            "{out}/t",
            "--held-out",
            "1",
            "--device",
            "cpu",
            "--resamples",
            "10",
        ),
        target="t/steps.json",
    ),
    Command(
        kind="session.json", arguments=("report", "{in}/session", "{in}/other", "-o", "{out}/r.html"), target="r.html"
    ),
    Command(kind="session.json", arguments=("check", "{in}/other", "{in}/session"), codes=(0, 1, 2, 3)),
    Command(kind="tables of sessions (Parquet)", arguments=("report", "{in}/session", "--format", "console")),
    Command(
        kind="benchmark results (report --waterfall)",
        arguments=("report", "--waterfall", "{damaged}", "-o", "{out}/w.svg"),
        target="w.svg",
    ),
    Command(
        kind="files to be replaced (--overwrite)",
        arguments=("view", "{aux}/masks", "-o", "{copy}/page.html", "--sheet", "{copy}/sheet.png", "--overwrite"),
    ),
    Command(
        kind="files to be replaced (--overwrite)",
        arguments=("report", "{aux}/session", "-o", "{copy}/page.html", "--overwrite"),
    ),
)


@cache
def auxiliary() -> Path:
    """Valid inputs that the commands need besides the damaged one, in a folder of this process."""
    import atexit

    from tests.factories.nifti import write_mask
    from tests.factories.report_sessions import make
    from tests.hostile.kinds_models import tiny_model
    from voxtune.runtime.storage import save

    folder = Path(tempfile.mkdtemp(prefix="voxtune-hostile-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save(tiny_model(), folder / "model", card="# A model\n")
    for part, name in (("masks", "mask_dseg"), ("images", "mask_T1w")):
        (folder / part).mkdir()
        write_mask(folder / part / f"{name}.nii.gz", (8, 8, 8), values=(0, 1, 2))
    make("baseline", launches=20).save(folder / "session")
    return folder


def prepare(command: Command, case: Path, damaged: Path, rng: random.Random) -> list[str]:
    """The arguments of a case; files of a stranger are put where the command writes."""
    (case / "out" / "notes.txt").write_bytes(STRANGER)
    (case / "out" / "deep").mkdir()
    (case / "out" / "deep" / "volume.nii.gz").write_bytes(STRANGER)
    arguments = list(command.arguments)
    if any("{copy}" in a for a in arguments):
        shutil.copytree(case / "in", case / "out" / "copy", symlinks=True)
    if command.target and rng.random() < 0.33:
        target = case / "out" / command.target
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(STRANGER)
        arguments += ["--overwrite"] if rng.random() < 0.7 else []
    values = {
        "in": case / "in",
        "damaged": damaged,
        "copy": case / "out" / "copy",
        "out": case / "out",
        "aux": auxiliary(),
    }
    content = damaged.read_bytes()[:100_000].decode(errors="surrogateescape").replace("\0", "") if command.text else ""
    is_text = damaged.suffix == ".txt"
    # A folder or a file as the option's value, or the text itself.
    texts = {
        "text": content if is_text else str(damaged),
        "setting": content if is_text and "=" in content else "steps=1",
    }
    return [_filled(argument, {**values, **texts}) for argument in arguments]


def _filled(argument: str, values: dict[str, Any]) -> str:
    # Not by str.format, because the texts hold braces.
    for name, value in values.items():
        if f"{{{name}}}" in argument:
            return argument.replace(f"{{{name}}}", str(value))
    return argument


def strangers(case: Path) -> list[Path]:
    """The files of a stranger that are still there."""
    return [p for p in (case / "out").rglob("*") if p.is_file() and not p.is_symlink() and p.read_bytes() == STRANGER]


def run(arguments: list[str], stdout: int, stderr: int, *, fresh: bool) -> int:
    """Body of a child: the command, as the console script runs it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    if fresh:
        os.execv(sys.executable, [sys.executable, "-m", "voxtune", *map(os.fsencode, arguments)])
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", errors=e) for n, e in ((1, "strict"), (2, "backslashreplace")))
    sys.argv[:] = ["voxtune", *arguments]
    from voxtune.__main__ import run as console_script

    try:
        console_script()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def judge(command: Command, code: int, stdout: str, stderr: str) -> tuple[str, str]:
    """(what is wrong, its column in the record), both empty for a good ending."""
    if "Traceback (most recent" in stderr + stdout or "internal error" in stderr:
        last = [line for line in stderr.splitlines() if line.strip()][-2:]
        return f"{' | '.join(last)[-400:]}", "tracebacks"
    if code not in command.codes:
        return f"exit code {code}: {stderr[-300:]!r}", "crashes"
    for row in stderr.splitlines():
        if len(row) > LONGEST_ROW or not row.isprintable():
            return f"a row of {len(row)} characters: {row[:200]!r}", "messages"
    if code == 2 and ERROR not in stderr:
        return f"no error line: {stderr[-300:]!r}", "messages"
    return "", ""
