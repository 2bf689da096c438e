"""What a run prints before its first step: facts of folders, packed subjects and the cohort, on one screen."""

from __future__ import annotations

import json
from dataclasses import replace

import nibabel
import numpy as np
import pytest

from tests.factories.tiny_training import MODEL, Blobs, tiny_config
from voxtune.data.cohort import LABELS
from voxtune.data.contract import DataContract
from voxtune.data.dataset import CohortSource, PairedFolders
from voxtune.data.subjects import SourceRange, pack
from voxtune.errors import InputError
from voxtune.runtime.storage import load
from voxtune.training.checkpoint import newest_checkpoint
from voxtune.training.config import DataSettings
from voxtune.training.data import PackedSource
from voxtune.training.loop import dry_run, train
from voxtune.training.overview import GridChange, Overview, Unused, duration, measure_source, overview, size_text
from voxtune.workloads import ConvNeXtConfig, MedDDPMConfig

CONTRACT = DataContract(size=(16, 16, 16), spacing=(12.0, 12.0, 12.0), orientation="RAS", labels=LABELS)
NETWORK = MedDDPMConfig()


def facts_of(source, **options) -> Overview:
    return overview(source, NETWORK, CONTRACT.size, CONTRACT, **options)


def write_subject(folder, name, shape=(16, 16, 16), spacing=(12.0, 12.0, 12.0), images=("T1w",)):
    """A brain of half the size of the volume, with a tumour of one voxel in two, as files."""
    labels = np.zeros(shape, np.uint8)
    inside = tuple(slice(n // 4, n - n // 4) for n in shape)
    labels[inside] = 1
    labels[tuple(n // 2 for n in shape)] = 2
    affine = np.diag([*spacing, 1.0])
    nibabel.save(nibabel.Nifti1Image(labels, affine), folder / f"{name}_dseg.nii.gz")
    for image in images:
        values = (labels > 0) * 80.0 + np.random.default_rng(0).uniform(0, 2, shape)
        nibabel.save(nibabel.Nifti1Image(values.astype(np.float32), affine), folder / f"{name}_{image}.nii.gz")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Five subjects: two on the grid, one larger, one of thick slices, one smaller with a second image."""
    root = tmp_path_factory.mktemp("data")
    write_subject(root, "sub-1")
    write_subject(root, "sub-2")
    write_subject(root, "sub-3", shape=(20, 16, 16))
    write_subject(root, "sub-4", shape=(32, 32, 8), spacing=(6.0, 6.0, 24.0))
    write_subject(root, "sub-5", shape=(12, 16, 20), images=("T1w", "T2w"))
    return root


def checked(folder) -> PairedFolders:
    source = PairedFolders(CONTRACT, folder, folder)
    source.check().raise_errors()
    return source


def test_folders(folder):
    facts = facts_of(checked(folder), origin="a folder")
    assert (facts.subjects, facts.held_out) == (5, None)
    assert facts.grids[0] == GridChange(
        files=2, size=(16, 16, 16), spacing=(12.0, 12.0, 12.0), resampled=False, padded=False, cropped=False
    )
    changes = {g.size: (g.resampled, g.padded, g.cropped) for g in facts.grids[1:]}
    assert changes == {
        (20, 16, 16): (False, False, True),
        (32, 32, 8): (True, False, False),
        (12, 16, 20): (False, True, True),
    }
    assert facts.unused == (Unused(reason="T2w images", files=("sub-5_T2w.nii.gz",), other_kind=True),)
    brain, tumour = facts.statistics.labels
    # 8 x 8 x 8 voxels of 12 mm, one of them tumour.
    assert brain.ml.median == pytest.approx(511 * 1.728, rel=1e-3) and brain.subjects == 5
    assert tumour.ml.median == pytest.approx(1.728, rel=1e-3)
    assert facts.statistics.spacing_mm.high == 24.0
    text = "\n".join(facts.lines())
    assert "subjects     5 for training, none held out" in text
    assert "data         a folder" in text
    assert "images       T1w" in text
    assert "labels       1 (brain): median 883 ml (" in text and "in 5 of the 5 measured subjects" in text
    assert "grid         16 x 16 x 16 voxels of 12 x 12 x 12 mm, RAS" in text
    assert "files        2 unchanged, from 16 x 16 x 16 at 12 x 12 x 12 mm" in text
    assert "1 resampled, from 32 x 32 x 8 at 6 x 6 x 24 mm" in text
    assert "1 padded and cropped, from 12 x 16 x 20 at 12 x 12 x 12 mm" in text
    # The check warns of them.
    assert "T2w" not in text


def test_held_out_subjects_of_a_folder(folder):
    source = checked(folder)
    facts = facts_of(SourceRange(source, 0, 3), held_out=2)
    assert (facts.subjects, facts.held_out, facts.statistics.spacing_mm.high) == (3, 2, 12.0)
    assert facts_of(SourceRange(source, 3, 1)).statistics.spacing_mm.low == 24.0
    assert "3 for training, 2 held out" in facts.lines()[0]


def test_packed_subjects_and_the_cohort(folder, tmp_path):
    source = checked(folder)
    path = pack(SourceRange(source, 0, 4), SourceRange(source, 4, 1), tmp_path / "subjects.npz", origin="five")
    packed = PackedSource(path, CONTRACT)
    facts = facts_of(packed, held_out=packed.held_out)
    assert (facts.subjects, facts.held_out, facts.grids, facts.unused) == (4, 1, (), ())
    assert facts.statistics.spacing_mm is None and facts.subject_bytes == 4 * 16**3 * 3
    cohort = facts_of(CohortSource(CONTRACT, 0, 2))
    assert cohort.statistics.spacing_mm.median == 12.0 and 1000 < cohort.statistics.labelled_ml.median < 1900


def test_one_screen_for_any_data(folder):
    facts = facts_of(checked(folder), origin="x" * 300)
    label = facts.statistics.labels[0]
    grid = facts.grids[0]
    many = replace(
        facts,
        statistics=replace(facts.statistics, labels=tuple(replace(label, name="brain") for _ in range(40))),
        grids=tuple(replace(grid, size=(n, n, n)) for n in range(1, 90)),
        unused=tuple(Unused(reason=f"reason {n}", files=("a very long name of a file.nii.gz",) * 50) for n in range(9)),
        memory_bytes=3.0 * 2**30,
    ).with_time(2.0, 100_000, None)
    lines = many.lines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    text = "\n".join(lines)
    assert "35 labels" in text and "86 other sizes" in text and "7 other reasons" in text
    assert "and 47 more" in text
    assert "time         about 56 h (estimated, 2 s per step)" in text
    assert "memory       about 3.0 GiB for a step and" in text
    assert json.loads(json.dumps(many.to_json()))["unused_files"] == 450


def test_json(folder):
    data = json.loads(json.dumps(facts_of(checked(folder)).to_json()))
    assert (data["resampled"], data["padded"], data["cropped"], data["unused_files"]) == (1, 1, 2, 1)
    assert data["statistics"]["labels"][0]["name"] == "brain"
    assert data["contract"]["spacing"] == [12.0, 12.0, 12.0]


def test_a_limit_of_time_shortens_the_estimate(folder):
    facts = facts_of(CohortSource(CONTRACT, 0, 1))
    assert facts.with_time(2.0, 100, None).seconds == 200
    assert facts.with_time(2.0, 100, 1.5).seconds == 90


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (59, "59 s"), (300, "5 min"), (7200, "2 h"), (400_000, "5 days")]
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def test_sizes():
    assert (size_text(100), size_text(2**20 * 7), size_text(2**30 * 1.5)) == ("1 MiB", "7 MiB", "1.5 GiB")


def test_images_without_masks():
    facts = overview(Blobs(masks=False), ConvNeXtConfig(), (24, 32), None, origin="pictures")
    assert facts.lines() == [
        "subjects     5 for training, none held out",
        "data         pictures",
        "grid         32 x 24 pixels",
    ]
    assert facts.to_json()["statistics"] is None


def test_sources_without_masks_and_with_nan():
    assert measure_source(Blobs(masks=False), CONTRACT) is None
    with pytest.raises(InputError, match="subject 0 of the training data contains NaN"):
        measure_source(NotFinite(), CONTRACT)


class NotFinite(Blobs):
    def __getitem__(self, index):
        image, mask = super().__getitem__(index)
        return image * np.nan, mask


@pytest.mark.usefixtures("one_thread")
def test_the_model_of_a_run_and_of_its_continuation_holds_the_statistics(tmp_path):
    data = DataSettings(spacing=(48.0, 48.0, 48.0))
    reports = []
    train(tiny_config(steps=3, data=data), Blobs(), tmp_path / "run", report=reports.append)
    # Before the first step, and when the time is known.
    assert [r.seconds is None for r in reports] == [True, False]
    stored = load(tmp_path / "run" / "model").config.training_data
    assert stored == reports[0].statistics and stored.subjects == 5
    checkpoint = newest_checkpoint(tmp_path / "run" / "checkpoints", print)
    assert checkpoint.model.training_data == stored
    train(tiny_config(steps=5, data=data), Blobs(), tmp_path / "run", resume=True, report=reports.append)
    assert len(reports) == 2
    assert load(tmp_path / "run" / "model").config.training_data == stored


@pytest.mark.usefixtures("one_thread")
def test_fine_tuning_replaces_the_statistics(tmp_path):
    train(tiny_config(steps=1), Blobs(), tmp_path / "first")
    again = tiny_config(steps=1, model=replace(MODEL, init=str(tmp_path / "first"), diffusion_steps=None))
    train(again, Blobs(3), tmp_path / "second")
    assert load(tmp_path / "second" / "model").config.training_data.subjects == 3


@pytest.mark.usefixtures("one_thread")
def test_a_dry_run_times_a_real_step_and_writes_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    size = replace(MODEL, size=(16, 16, 16))
    data = DataSettings(images=str(folder), masks=str(folder), labels=LABELS, spacing=(12.0, 12.0, 12.0))
    data = replace(data, modalities=("T1w",))
    before = sorted(folder.iterdir())
    config = tiny_config(model=size, data=data, steps=50, accumulation=2)
    facts = dry_run(config)
    assert facts.seconds_per_step > 0 and facts.seconds == pytest.approx(50 * facts.seconds_per_step)
    assert facts.subjects == 5 and len(facts.grids) == 4
    assert sorted(folder.iterdir()) == before and list(tmp_path.iterdir()) == []
