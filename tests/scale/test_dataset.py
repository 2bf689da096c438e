"""Data sets: the same bytes however they are drawn, and every start continues where another ended."""

from __future__ import annotations

import itertools
import json
import os

import nibabel as nib
import numpy as np
import pytest

from tests.factories.small_jobs import identities, small_disk
from tests.scale.datasets import Job, contents, write_masks, write_model
from tests.scale.workers import InlineEngine, InvalidWorker, ShortOfMemoryWorker
from voxtune.data.cases import find_cases
from voxtune.data.labels import parse_labels
from voxtune.data.pairing import pair_folders
from voxtune.errors import FilesError, InputError
from voxtune.files import locked_file
from voxtune.runtime.generate import generate
from voxtune.runtime.masks import prepare
from voxtune.runtime.storage import load, provenance
from voxtune.scale.ledger import DatasetLedger, LedgerLine, split_volume_name, volume_name
from voxtune.scale.verify import verify
from voxtune.scale.worker import VolumeWorker

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(model, tmp_path):
    masks = write_masks(tmp_path / "masks", 3)
    return Job(model=model, manifest=masks, out=tmp_path / "out", per_mask=3, batch=2)


def test_a_data_set_is_complete_and_the_second_start_does_nothing(job):
    tally = job.run(InlineEngine())
    assert (tally.volumes, tally.drawn, tally.missing, tally.problems) == (9, 9, 0, {})
    before = identities(job.out)
    again = InlineEngine()
    tally = job.run(again)
    assert (tally.before, tally.drawn, again.drawn) == (9, 0, [])
    assert {k: v for k, v in identities(job.out).items() if "shard" not in k} == {
        k: v for k, v in before.items() if "shard" not in k
    }
    result = verify(job.out)
    assert (result.verified, result.problems) == (9, [])


def test_the_data_set_is_a_bids_derivative_with_its_masks(job, model):
    job.run(InlineEngine())
    description = json.loads((job.out / "dataset_description.json").read_text())
    assert description["DatasetType"] == "derivative" and description["GeneratedBy"][0]["Name"] == "voxtune"
    assert (job.out / ".bidsignore").read_text() == "ledger/\n"
    assert (job.out / "dseg.tsv").read_text().splitlines()[:2] == ["index\tname", "0\tbackground"]
    folder = job.out / "sub-1" / "anat"
    record = json.loads((folder / "sub-1_desc-synth02_T1w.json").read_text())
    expected = {"seed": 0, "sampler": "ddpm", "steps": 2, "passes": [], "batch": 2, "mask": "sub-1_dseg.nii.gz"}
    assert record | expected == record and len(record["model_sha256"]) == 64 and {"voxtune", "torch"} <= record.keys()
    assert record["noise"] == {"rule": "identity", "stem": "sub-1", "replicate": 2}
    mask, given = (nib.load(f) for f in (folder / "sub-1_dseg.nii.gz", job.manifest / "sub-1_dseg.nii.gz"))
    assert np.array_equal(mask.get_fdata(), given.get_fdata()) and np.allclose(mask.affine, given.affine)
    cases = find_cases(job.out)
    assert len(cases.cases) == 9 and all(case.mask is not None for case in cases.cases)
    assert pair_folders(job.out, job.out).report.findings, "several volumes of a subject share its mask"


def test_volumes_are_those_of_sample(job, model, tmp_path):
    """One path: the files of `voxtune sample --batch 1`, byte for byte."""
    job.but(batch=1, per_mask=2).run(InlineEngine(VolumeWorker))
    loaded = load(model)
    masks = prepare(loaded, sorted(job.manifest.iterdir()))
    list(generate(loaded, masks, tmp_path / "sampled", count=2, provenance=provenance(model, loaded)))
    sampled, generated = contents(tmp_path / "sampled"), contents(job.out)
    assert len(sampled) == 13 and sampled.items() <= generated.items()


def test_bytes_do_not_depend_on_order_shard_or_interruption(job):
    whole = job.but(out=job.out.with_name("whole"))
    whole.run(InlineEngine(VolumeWorker))
    job.but(shard=(2, 2)).run(InlineEngine(VolumeWorker, backwards=True))
    assert verify(job.out).verified == 3
    with pytest.raises(KeyboardInterrupt):
        job.run(InlineEngine(VolumeWorker, drawn=1))
    # One of the two volumes of a batch: the other one is drawn with it again, and not written again.
    lost = job.out / "sub-0" / "anat" / "sub-0_desc-synth01_T1w.nii.gz"
    kept = lost.with_name("sub-0_desc-synth02_T1w.nii.gz")
    if lost.exists():
        lost.unlink()
    inode = kept.stat().st_ino if kept.exists() else None
    job.run(InlineEngine(VolumeWorker))
    assert inode in (None, kept.stat().st_ino)
    assert contents(job.out) == contents(whole.out)
    volumes = {data for name, data in contents(job.out).items() if "synth" in name and name.endswith(".nii.gz")}
    assert len(volumes) == 9, "every volume has its own noise"
    assert verify(job.out).problems == []


def test_more_volumes_later_are_those_of_one_start(job):
    job.but(per_mask=1).run(InlineEngine(VolumeWorker))
    job.but(per_mask=4).run(InlineEngine(VolumeWorker))
    whole = job.but(out=job.out.with_name("whole"), per_mask=4)
    whole.run(InlineEngine(VolumeWorker))
    assert contents(job.out) == contents(whole.out)
    with pytest.raises(InputError, match="the manifest lacks 3 masks of the data set"):
        job.but(per_mask=3).run(InlineEngine())


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_shards_divide_the_volumes(job, shards):
    tallies = [job.but(shard=(n, shards)).run(InlineEngine()) for n in range(1, shards + 1)]
    assert sum(t.volumes for t in tallies) == 9 and all(t.drawn == t.volumes for t in tallies)
    assert verify(job.out).problems == []
    assert job.but(shard=(1, 7)).run(InlineEngine()).drawn == 0, "divided in another way, still complete"


def test_other_settings_are_refused_by_name(job):
    job.run(InlineEngine())
    before = contents(job.out)
    for change, message in (
        ({"seed": 1}, "seed is 0 there, 1 now"),
        ({"batch": 1}, "batch is 2 there, 1 now"),
        ({"plan": "auto"}, '"baseline" there, "auto" now'),
        ({"settings": {"size": (16, 16, 16)}}, r"size is null there, \[16, 16, 16\] now"),
    ):
        with pytest.raises(InputError, match=f"was started with other settings: .*{message}"):
            job.but(**change).run(InlineEngine())
    assert job.but(batch=None).run(InlineEngine()).missing == 0, "auto continues with the batch of the data set"
    assert contents(job.out) == before


def test_another_machine_is_refused_unless_mixed(job, monkeypatch):
    job.run(InlineEngine(drawn=None))
    (job.out / "sub-0" / "anat" / "sub-0_desc-synth01_T1w.json").unlink()
    monkeypatch.setattr("voxtune.scale.worker.versions", lambda: {"voxtune": "9", "torch": "9", "triton": None})
    with pytest.raises(InputError, match=r"started with voxtune .*, this is 9, .*--mixed"):
        job.run(InlineEngine())
    assert job.but(settings={"mixed": True}).run(InlineEngine()).missing == 0


def test_another_model_is_refused(job, tmp_path):
    import torch

    from voxtune.runtime.storage import save

    job.run(InlineEngine())
    other = load(job.model)
    with torch.no_grad():
        next(other.network.parameters()).add_(1)
    with pytest.raises(InputError, match="model_sha256 is"):
        job.but(model=save(other, tmp_path / "other", card="")).run(InlineEngine())


def test_a_folder_with_other_files_is_refused(job):
    job.out.mkdir()
    (job.out / "thesis.txt").write_text("mine")
    with pytest.raises(InputError, match=r"contains thesis\.txt and no data set"):
        job.run(InlineEngine())
    assert [p.name for p in job.out.iterdir()] == ["thesis.txt"]


def test_two_drivers(job):
    job.but(shard=(1, 2)).run(InlineEngine())
    ledger = DatasetLedger(job.out)
    with locked_file(ledger.shard_file(1, 2)):
        with pytest.raises(InputError, match=rf"in use by another Voxtune process \(PID {os.getpid()}\)"):
            job.but(shard=(1, 2)).run(InlineEngine())
        with pytest.raises(InputError, match="--shard 1/1 divides the data set in another way"):
            job.run(InlineEngine())
        with pytest.raises(InputError, match="another manifest"):
            job.but(shard=(2, 2), per_mask=4).run(InlineEngine())
        assert job.but(shard=(2, 2)).run(InlineEngine()).missing == 0
    assert not list(ledger.folder.glob(".*")), "no lock is left behind"


def test_damaged_masks_among_good_ones(job):
    (job.manifest / "sub-1_dseg.nii.gz").write_bytes(b"damaged")
    tally = job.run(InlineEngine())
    assert (tally.drawn, tally.missing) == (6, 3)
    assert {task.subject for task in tally.problems} == {"sub-1"} and tally.retries == 4
    assert all("sub-1_dseg.nii.gz" in p and p.endswith("(3 attempts)") for p in tally.problems.values())
    assert sorted(verify(job.out).missing)[0] == ("mask of sub-1", "is not in the ledger")
    write_masks(job.manifest.with_name("good"), 2)
    (job.manifest.with_name("good") / "sub-1_dseg.nii.gz").replace(job.manifest / "sub-1_dseg.nii.gz")
    assert job.run(InlineEngine()).missing == 0
    assert verify(job.out).problems == []


def test_a_mask_that_changed_is_refused(job):
    job.but(per_mask=1).run(InlineEngine())
    path = job.manifest / "sub-1_dseg.nii.gz"
    data = nib.load(path).get_fdata().astype(np.uint8)
    data[4, 4, 4] = 1
    nib.save(nib.Nifti1Image(data, nib.load(path).affine), path)
    with pytest.raises(FilesError, match="is not the mask that volumes of sub-1 were drawn from"):
        job.run(InlineEngine())


def test_verify_names_what_is_damaged_missing_and_extra(job):
    job.run(InlineEngine())
    whole = contents(job.out)
    anat = job.out / "sub-0" / "anat"
    flipped, absent = anat / "sub-0_desc-synth01_T1w.nii.gz", anat / "sub-0_desc-synth02_T1w.json"
    state, data = flipped.stat(), bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    os.utime(flipped, ns=(state.st_atime_ns, state.st_mtime_ns))  # as a disk flips it
    absent.unlink()
    (anat / "sub-0_dseg.nii.gz").write_bytes(b"short")
    (anat / "sub-0_desc-synth99_T1w.nii.gz").write_bytes(b"extra")
    (job.out / "notes.txt").write_text("extra")
    result = verify(job.out)
    assert result.verified == 7
    assert result.missing == [("sub-0_desc-synth02", "sub-0/anat/sub-0_desc-synth02_T1w.json is missing")]
    assert [name for name, _ in result.damaged] == ["mask of sub-0", "sub-0_desc-synth01"]
    assert "has another checksum" in result.damaged[1][1]
    assert [name for name, _ in result.extra] == ["notes.txt", "sub-0/anat/sub-0_desc-synth99_T1w.nii.gz"]
    for name in ("notes.txt", "sub-0/anat/sub-0_desc-synth99_T1w.nii.gz"):
        (job.out / name).unlink()
    # What can be seen without reading is drawn again at any start, the flipped bit with --verify.
    tally = job.run(InlineEngine())
    assert tally.drawn == 1 and [n for n, _ in verify(job.out).problems] == ["sub-0_desc-synth01"]
    assert job.but(reread=True).run(InlineEngine()).drawn == 1
    assert verify(job.out).problems == [] and contents(job.out) == whole


def test_a_volume_whose_content_changed_is_drawn_again(job):
    job.run(InlineEngine())
    whole = contents(job.out)
    sidecar = job.out / "sub-2" / "anat" / "sub-2_desc-synth03_T1w.json"
    sidecar.write_bytes(b"{" * sidecar.stat().st_size)
    assert job.run(InlineEngine()).drawn == 1
    assert contents(job.out) == whole
    # Copied without its times, the data set is read once and nothing is drawn.
    for file in job.out.rglob("*.nii.gz"):
        os.utime(file)
    assert job.run(InlineEngine()).drawn == 0


TORN = (
    b'{"name": "sub-2_desc-synth03", "fil',
    b"\0\0\0\0\n",
    b"[]\n",
    b'{"name": 1, "files": {"../x": 3}}\n',
)


@pytest.mark.parametrize("end", TORN)
def test_a_torn_or_damaged_line_costs_at_most_its_volume(job, end):
    job.run(InlineEngine())
    whole = contents(job.out)
    file = DatasetLedger(job.out).shard_file(1, 1)
    lines = file.read_bytes().splitlines(keepends=True)
    lost = split_volume_name(json.loads(lines[-1])["name"])
    file.write_bytes(b"".join(lines[:-1]) + end)
    assert lost is not None and verify(job.out).missing == [(volume_name(*lost), "is not in the ledger")]
    assert job.run(InlineEngine()).drawn == 1
    assert contents(job.out) == whole and verify(job.out).problems == []
    assert file.read_bytes().endswith(b"\n")


def test_a_ledger_cannot_vouch_for_other_files(job, tmp_path):
    job.run(InlineEngine())
    outside = tmp_path / "outside"
    outside.write_text("x")
    file = DatasetLedger(job.out).shard_file(1, 1)
    line = next(r for r in map(json.loads, file.read_text().splitlines()) if r["name"].endswith("synth03"))
    for name in line["files"]:
        (job.out / name).unlink()
    state = outside.stat()
    line["files"] = {"../outside": ["0" * 64, state.st_size, state.st_mtime_ns]}
    file.write_text(file.read_text() + json.dumps(line) + "\n")
    assert job.run(InlineEngine()).drawn == 1 and outside.exists()


def test_a_smaller_batch_after_running_out_of_memory_is_marked(job):
    job.run(InlineEngine(VolumeWorker))
    short = job.but(out=job.out.with_name("short"))
    tally = short.run(InlineEngine(ShortOfMemoryWorker))
    assert tally.missing == 0 and tally.reduced == 9 == verify(short.out).reduced
    name = "sub-1/anat/sub-1_desc-synth02_T1w"
    record = json.loads((short.out / f"{name}.json").read_text())
    assert (record["batch"], record["batch_reduced_from"]) == (1, 2)
    volumes = [nib.load(folder / f"{name}.nii.gz").get_fdata() for folder in (job.out, short.out)]
    assert np.abs(volumes[0] - volumes[1]).max() <= 1e-5
    assert {line.reduced for line in DatasetLedger(short.out).lines() if split_volume_name(line.name)} == {True}


def test_volumes_with_nan_are_not_written(job):
    tally = job.run(InlineEngine(InvalidWorker))
    assert tally.drawn == 6 and tally.retries == 0 and len(tally.problems) == 3
    assert {task.numbers for task in tally.problems} == {(2,)}
    assert all("NaN or infinity" in problem for problem in tally.problems.values())
    assert job.run(InlineEngine()).missing == 0


def test_a_full_disk(job, tmp_path):
    masks = write_masks(tmp_path / "many", 40)
    with small_disk(tmp_path / "disk", "size=200k") as grow:
        job = job.but(manifest=masks, out=tmp_path / "disk" / "out", per_mask=1, batch=1)
        with pytest.raises(
            InputError, match=r"stopped: 12 volumes in a row could not be written; .*No space left on device"
        ):
            job.run(InlineEngine())
        done = verify(job.out)
        assert 0 < done.verified < 40 and not done.damaged
        grow()
        assert job.run(InlineEngine()).missing == 0
        assert verify(job.out).problems == []


def test_lines_of_the_ledger_read_back():
    line = LedgerLine.parse(b'{"name": "sub-1_desc-synth01", "files": {"a": ["00", 3, 4]}, "reduced": true}', "test")
    assert line is not None and line.reduced and LedgerLine.parse(line.to_json().encode(), "test") == line
    for name, expected in {"sub-1_desc-synth07": ("sub-1", 7), "sub-1_desc-synth123": ("sub-1", 123)}.items():
        assert split_volume_name(name) == expected and volume_name(*expected) == name
    for name in (
        "sub-1",
        "sub-1_desc-synth7",
        "sub-1_desc-synth00",
        "_desc-synth-1",
        "x_desc-synth007",
        "x_desc-synth٣٣",
    ):
        assert split_volume_name(name) is None


def test_every_batch_is_in_one_shard():
    from pathlib import Path

    from voxtune.scale.driver import WrittenVolumes, shard_counts, tasks
    from voxtune.scale.manifest import ManifestRow

    rows = [
        ManifestRow(mask=Path(f"{n}"), named=Path(f"sub-{n}_dseg.nii.gz"), subject=f"sub-{n}", replicates=n % 5 + 1)
        for n in range(23)
    ]
    expected = {(row.subject, n) for row in rows for n in range(1, row.replicates + 1)}
    for batch, shards in itertools.product((1, 2, 3, 7), (1, 2, 3, 10, 100)):
        drawn = []
        for shard in range(1, shards + 1):
            part = list(tasks(rows, batch, WrittenVolumes(), (shard, shards)))
            drawn += [(task.subject, n) for task in part for n in task.numbers]
            assert shard_counts(rows, batch, WrittenVolumes(), (shard, shards)) == (
                sum(len(t.numbers) for t in part),
                0,
            )
            assert all((task.first - 1) % batch == 0 for task in part)
        assert len(drawn) == len(expected) and set(drawn) == expected


@pytest.mark.slow
def test_a_plan_file_is_kept_in_the_ledger(job, tmp_path):
    from voxtune.plan import Plan

    file = tmp_path / "plan.json"
    Plan.of("cleanup").save(file)
    job = job.but(plan=str(file))
    tally = job.run(InlineEngine(VolumeWorker))
    assert tally.missing == 0, tally.problems
    ledger = DatasetLedger(job.out).settings()
    assert ledger["fixed"]["passes"] == ["cleanup"] and ledger["fixed"]["plan_file"]["passes"] == [{"pass": "cleanup"}]
    record = json.loads((job.out / "sub-0" / "anat" / "sub-0_desc-synth01_T1w.json").read_text())
    assert record["passes"] == ["cleanup"]
    Plan.of("cleanup", "sdpa").save(file, overwrite=True)
    with pytest.raises(InputError, match='plan is "file '):
        job.run(InlineEngine(VolumeWorker))


@pytest.mark.slow
def test_an_automatic_plan_is_fixed_at_the_first_start(job, tmp_path, monkeypatch):
    """A worker whose cache has no plan, or another one, uses that of the ledger."""
    from voxtune.plan import Plan
    from voxtune.plan.api import Request
    from voxtune.plan.cache import identity, remember
    from voxtune.runtime.planned import example_inputs

    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "first"))
    loaded = load(job.model)
    args = tuple(example_inputs(loaded, batch=2))
    made_for = identity(loaded.network, (args, {})) | Request(precision="auto").key(loaded.network, loaded.device)
    remember(Plan(Plan.of("cleanup").steps, made_for, {"gate": {"passed": True}}))
    job = job.but(plan="auto")
    assert job.run(InlineEngine(VolumeWorker)).missing == 0
    fixed = DatasetLedger(job.out).settings()["fixed"]
    assert fixed["passes"] == ["cleanup"] and len(fixed["plans"]) == 1
    whole = contents(job.out)
    next(job.out.rglob("*_T1w.nii.gz")).unlink()
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "second"))
    assert job.run(InlineEngine(VolumeWorker)).drawn == 1
    assert contents(job.out) == whole


def test_damaged_masks_and_volumes_are_replaced_once(job):
    """Files that no longer look like those of Voxtune are replaced if the ledger lists them; other files never are."""
    job.run(InlineEngine())
    whole = contents(job.out)
    anat = job.out / "sub-0" / "anat"
    for file in anat.iterdir():
        file.write_bytes(b"not a file of this project")
    tally = job.run(InlineEngine(backwards=True))
    assert (tally.drawn, tally.missing, tally.retries) == (3, 0, 0), tally.problems
    assert contents(job.out) == whole and verify(job.out).problems == []
    file = DatasetLedger(job.out).shard_file(1, 1)
    kept = [line for line in file.read_bytes().splitlines(keepends=True) if b'"sub-1_desc-synth01"' not in line]
    file.write_bytes(b"".join(kept))
    foreign = job.out / "sub-1" / "anat" / "sub-1_desc-synth01_T1w.json"
    foreign.write_bytes(b"mine")
    tally = job.run(InlineEngine())
    assert tally.missing == 1 and "was not written by Voxtune" in next(iter(tally.problems.values()))
    assert foreign.read_bytes() == b"mine"


def test_the_ledger_names_no_folder(job, tmp_path):
    table = tmp_path / "secret" / "dseg.tsv"
    table.parent.mkdir()
    table.write_text("index\tname\n1\tbrain\n2\ttumour\n")
    labels = parse_labels(str(table))
    (job.manifest / "sub-1_dseg.nii.gz").write_bytes(b"damaged")
    job.but(settings={"labels": labels}).run(InlineEngine())
    for file in job.out.rglob("*.json*"):
        assert str(tmp_path) not in file.read_text(), file
    assert job.but(settings={"labels": parse_labels("brain=1; tumour=2")}).run(InlineEngine()).drawn == 0
    with pytest.raises(InputError, match="labels is"):
        job.run(InlineEngine())
