"""Every command that writes files: what exists is kept, links are not followed, and records name no machine.

Each command runs once; its outputs serve all tests. `sample` and `train` have tests of their own.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import socket
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from tests.factories import analytic
from tests.factories.cli import CHECKPOINT
from tests.factories.report_sessions import make
from voxtune.cli.main import main
from voxtune.data.bids import write_cohort
from voxtune.data.subjects import cohort_sources, pack
from voxtune.marks import written_by_voxtune
from voxtune.plan import tuner
from voxtune.runtime.model import Model
from voxtune.runtime.storage import save
from voxtune.segmentation.segmenter import save_segmenter
from voxtune.workloads import without_zeros

pytestmark = pytest.mark.usefixtures("one_thread")

SECRET = "secret-xyz"
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "unet3d_sample.json"
SIZE = "16,16,16"
# Written by version 0.1 without a mark, so they are recognised by their name and the file that they belong to.
BY_PLACE = re.compile(
    r"participants\.tsv|dseg\.tsv|README|.*\.nii\.gz|.*\.parquet|.*\.safetensors|.*\.gz|picture\.png|.*/raw/.*"
)


@dataclass(frozen=True)
class WritingCommand:
    """`arguments`: {in} is the folder of inputs, {out} that of outputs. `slow`: a run takes more than a few seconds."""

    name: str
    arguments: tuple[str, ...]
    slow: bool = False
    records: bool = False

    def run(self, inputs: Path, out: Path, *more: str) -> int:
        return main([a.format(**{"in": inputs, "out": out}) for a in self.arguments] + list(more))


QUICK = ("--resamples", "20", "--batch", "4", "--device", "cpu", "--plan", "{in}/plan.json")
SEGMENTER = ("--features", "{in}/segmenter", "--segmenter", "{in}/segmenter", "--resamples", "20", "--device", "cpu")
COMMANDS = (
    WritingCommand("report", ("report", "{in}/sessions", "-o", "{out}/report.html")),
    WritingCommand("figures", ("report", "{in}/sessions", "--format", "svg", "-o", "{out}/svg")),
    WritingCommand("waterfall", ("report", "--waterfall", str(RESULTS), "-o", "{out}/w.svg")),
    WritingCommand("cohort", ("cohort", "2", "--size", SIZE, "-o", "{out}")),
    WritingCommand("import", ("import", "{in}/tiny.pt", "--size", SIZE, "-o", "{out}/model")),
    WritingCommand("pack", ("pack", "--cohort", "2", "--held-out", "1", "--size", SIZE, "-o", "{out}/s.npz")),
    WritingCommand("view", ("view", "{in}/synth", "-o", "{out}/v.html", "--sheet", "{out}/v.png")),
    WritingCommand(
        "evaluate",
        (
            "evaluate",
            "{in}/cohort",
            "{in}/synth",
            "--masks",
            "{in}/cohort/derivatives/masks",
            "-o",
            "{out}",
            *SEGMENTER,
        ),
        records=True,
    ),
    WritingCommand("tune", ("tune", "{in}/model", "-o", "{out}/plan.json", "--device", "cpu"), slow=True),
    WritingCommand(
        "profile",
        (
            "profile",
            "{in}/model",
            "--mode",
            "sample",
            "--config",
            "baseline",
            "--steps",
            "1",
            "--device",
            "cpu",
            "--tiers",
            "census",
            "--keep-raw",
            "-o",
            "{out}",
        ),
        records=True,
    ),
    WritingCommand(
        "study",
        (
            "study",
            "--mode",
            "sample",
            "--workload",
            "{in}/model",
            "--config",
            "baseline",
            "--device",
            "cpu",
            "-o",
            "{out}",
        ),
        slow=True,
        records=True,
    ),
    WritingCommand(
        "usefulness",
        (
            "usefulness",
            "{in}/model",
            "--subjects",
            "{in}/s.npz",
            "--volumes",
            "2",
            "--seeds",
            "1",
            "--steps",
            "2",
            "--sampler",
            "ddim",
            "--segment-steps",
            "2",
            "--segment-batch",
            "2",
            "-o",
            "{out}",
            *QUICK,
        ),
        slow=True,
        records=True,
    ),
    WritingCommand(
        "steps",
        (
            "steps",
            "{in}/model",
            "--segmenter",
            "{in}/segmenter",
            "--held-out",
            "2",
            "--samplers",
            "ddim",
            "--steps",
            "1",
            "-o",
            "{out}",
            *QUICK,
        ),
        slow=True,
        records=True,
    ),
    WritingCommand("ladder", ("ladder", "--device", "cpu", "--rungs", "10", "--size", "8x8", "-o", "{out}"), slow=True),
    WritingCommand(
        "demo", ("demo", "--model", "{in}/model", "--steps", "2", "--device", "cpu", "-o", "{out}"), slow=True
    ),
)


@dataclass(frozen=True)
class Written:
    """A command with its inputs, and the folder that a run of it left."""

    command: WritingCommand
    inputs: Path
    folder: Path

    def files(self) -> list[str]:
        return sorted(file.relative_to(self.folder).as_posix() for file in self.folder.rglob("*") if file.is_file())

    def examples(self) -> list[str]:
        """Files to try one by one: of many, the first and the last."""
        files = self.files()
        return files if len(files) <= 12 else [files[0], files[-1]]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp(SECRET))


def write_inputs(root: Path) -> Path:
    """Models, subjects, sessions and volumes for the commands."""
    torch.manual_seed(0)
    model = Model(analytic.model(4).config)
    without_zeros(model.network)
    save(model, root / "model", card="")
    save_segmenter(analytic.segmenter(), root / "segmenter", card="")
    pack(*cohort_sources(analytic.CONTRACT, 0, 2, 2), root / "s.npz")
    make(launches=60).save(root / "sessions" / "a")
    shutil.copy(CHECKPOINT, root / "tiny.pt")
    (root / "plan.json").write_text('{"format": "voxtune-plan/1", "passes": []}')
    (root / "synth").mkdir()
    for pair in write_cohort(root / "cohort", 2, 0, (16, 16, 16), healthy_fraction=0.0):
        shutil.copy(pair.images[0], root / "synth" / f"{pair.id}_desc-synth01_T1w.nii.gz")
    return root


@pytest.fixture(scope="module")
def secret_machine(inputs: Path) -> Iterator[None]:
    """A machine whose user, host and folders have a name that can be searched for; with a short tuning."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("USER", "LOGNAME", "USERNAME", "HOSTNAME"):
            patch.setenv(name, SECRET)
        patch.setenv("HOME", str(inputs / "home"))
        patch.setattr(socket, "gethostname", lambda: SECRET)
        patch.setattr(tuner, "CPU_LADDER", (tuner.TunerRung("channels_last", ("cleanup", "channels_last")),))
        patch.setattr(tuner, "CPU_IN_SHORT", tuner.CPU_IN_SHORT[:1])
        yield


def parameters() -> list[object]:
    return [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.slow else []) for c in COMMANDS]


@pytest.fixture(scope="module", params=parameters())
def written(request: pytest.FixtureRequest, inputs: Path, secret_machine: None) -> Written:
    command: WritingCommand = request.param
    folder = inputs / "out" / command.name
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["voxtune", *[a.format(**{"in": inputs, "out": folder}) for a in command.arguments]])
        assert command.run(inputs, folder) == 0
    return Written(command=command, inputs=inputs, folder=folder)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder; links by their target, folders as None."""
    return {
        path.relative_to(folder).as_posix(): str(path.readlink()).encode()
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in sorted(folder.rglob("*"))
    }


def png(path: Path) -> None:
    from PIL import Image

    Image.new("RGB", (8, 8), (200, 30, 30)).save(path)


def parquet(path: Path) -> None:
    import pandas as pd

    pd.DataFrame({"voxtune": [1, 2]}).to_parquet(path)


def safetensors(path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, path, metadata={"format": "pt"})


# A file of somebody else, of the type that the ending says.
STRANGERS: dict[str, Callable[[Path], object]] = {
    ".nii.gz": lambda path: nib.save(nib.Nifti1Image(np.zeros((4, 4, 4), np.uint8), np.eye(4)), path),
    ".json": lambda path: path.write_text('{"rows": [], "name": "voxtune", "format": "other"}'),
    ".html": lambda path: path.write_text("<html><head><title>voxtune</title></head></html>"),
    ".svg": lambda path: path.write_text('<svg xmlns="http://www.w3.org/2000/svg"><title>voxtune</title></svg>'),
    ".png": png,
    ".npz": lambda path: np.savez(path, images=np.zeros(2), labels=np.zeros(2)),
    ".parquet": parquet,
    ".safetensors": safetensors,
    ".gz": lambda path: path.write_bytes(gzip.compress(b"mine")),
    "": lambda path: path.write_text("# Notes about voxtune\n\nmine\n"),
}


def put_stranger(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    next(write for ending, write in STRANGERS.items() if path.name.endswith(ending))(path)


def refused(written: Written, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> None:
    """The command ends with an input error and changes nothing."""
    before = contents(folder)
    capsys.readouterr()
    assert written.command.run(written.inputs, folder, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("voxtune: error: ") or "\nvoxtune: error: " in error, error
    assert contents(folder) == before


def test_outputs_carry_a_mark(written: Written) -> None:
    assert written.files()
    for name in written.files():
        assert written_by_voxtune(written.folder / name), name


def test_a_file_of_somebody_else_is_kept(written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(written.examples()):
        folder = tmp_path / str(number)
        put_stranger(folder / name)
        refused(written, folder, capsys)
        refused(written, folder, capsys, "--overwrite")


def test_a_file_of_somebody_else_among_earlier_outputs_is_kept(
    written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, name in enumerate(written.examples()):
        if BY_PLACE.fullmatch(name) or BY_PLACE.fullmatch(Path(name).name):
            continue
        folder = shutil.copytree(written.folder, tmp_path / str(number))
        put_stranger(folder / name)
        refused(written, folder, capsys, "--overwrite")


def test_own_outputs_are_replaced_with_overwrite_only(
    written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(written.folder, tmp_path / "out")
    refused(written, folder, capsys)
    assert written.command.run(written.inputs, folder, "--overwrite") == 0
    assert sorted(contents(folder)) == sorted(contents(written.folder))


def test_links_are_not_followed(written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate(written.examples()):
        folder, target = tmp_path / str(number), tmp_path / f"target-{number}" / Path(name).name
        target.parent.mkdir()
        shutil.copy(written.folder / name, target)
        before = target.read_bytes()
        (folder / name).parent.mkdir(parents=True)
        (folder / name).symlink_to(target)
        refused(written, folder, capsys)
        refused(written, folder, capsys, "--overwrite")
        assert target.read_bytes() == before


def test_a_command_that_fails_leaves_nothing(inputs: Path, tmp_path: Path) -> None:
    """Neither a folder nor a lock, if its input cannot be used."""
    for command in COMMANDS:
        if command.name in ("cohort", "pack", "ladder", "waterfall"):  # without an input folder
            continue
        assert command.run(tmp_path / "none", tmp_path / "out" / "deep") == 2, command.name
        assert contents(tmp_path) == {}, command.name


def texts(path: Path) -> Iterator[bytes]:
    """The content of a file in every form that a reader may see."""
    data = path.read_bytes()
    yield data
    if data[:2] == b"\x1f\x8b":
        yield gzip.decompress(data)
    if path.suffix == ".npz":
        with zipfile.ZipFile(path) as archive:
            # Texts are stored with four bytes for each character.
            yield from (archive.read(name).replace(b"\0", b"") for name in archive.namelist())
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        table = pq.read_table(path)
        yield json.dumps(table.to_pylist(), default=str).encode()
        yield str(table.schema.metadata).encode()
    for match in re.finditer(rb"[A-Za-z0-9+/]{64,}={0,2}", data) if path.suffix == ".html" else ():
        decoded = base64.b64decode(match[0] + b"=" * (-len(match[0]) % 4))
        yield gzip.decompress(decoded) if decoded[:2] == b"\x1f\x8b" else decoded


def test_outputs_name_neither_machine_nor_folder(written: Written) -> None:
    for name in written.files():
        for text in texts(written.folder / name):
            place = text.find(SECRET.encode())
            assert place < 0, f"{name}: {text[max(0, place - 100) : place + 100]!r}"


def test_record_paths_keeps_them(written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not written.command.records:
        pytest.skip("the command records no path")
    arguments = [a.format(**{"in": written.inputs, "out": tmp_path / "out"}) for a in written.command.arguments]
    monkeypatch.setattr("sys.argv", ["voxtune", *arguments])
    assert written.command.run(written.inputs, tmp_path / "out", "--record-paths") == 0
    everything = [text for file in (tmp_path / "out").rglob("*") if file.is_file() for text in texts(file)]
    assert any(str(written.inputs).encode() in text for text in everything)
