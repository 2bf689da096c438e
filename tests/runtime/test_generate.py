"""From mask files to volume files: the geometry is preserved, and invalid input is refused before sampling."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

import voxtune
from tests.factories.nifti import write_mask
from voxtune.data.cases import find_cases
from voxtune.data.cohort import cohort_contract
from voxtune.data.contract import encode_mask, unscale_image
from voxtune.data.labels import parse_labels
from voxtune.data.pairing import pair_folders
from voxtune.data.volumeset import find_images, find_masks, masks_of, pair_by_subject
from voxtune.diffusion.noise import identity_index
from voxtune.errors import FilesError, InputError
from voxtune.plan import Plan
from voxtune.runtime.generate import VolumeJob, generate
from voxtune.runtime.masks import prepare
from voxtune.runtime.model import Model, ModelConfig, SamplingConfig
from voxtune.runtime.sampling import SamplerSettings
from voxtune.workloads import MedDDPMConfig, without_zeros


@pytest.fixture(scope="module")
def model():
    contract = cohort_contract((16, 16, 16))
    return Model(
        ModelConfig(
            network=MedDDPMConfig(base=32, multipliers=(1, 1), attention=()),
            size=contract.size,
            data=contract,
            sampling=SamplingConfig(sampler="ddim", steps=2),
        )
    )


@pytest.mark.parametrize("flips", list(itertools.product([1, -1], repeat=3)))
def test_volume_has_the_grid_of_its_mask(model, tmp_path, flips):
    affine = np.zeros((4, 4))
    affine[[0, 1, 2], [1, 2, 0]] = np.array(flips) * 12.0
    affine[:, 3] = [3, -40, 7, 1]
    path = write_mask(tmp_path / "sub-1_dseg.nii.gz", affine=affine)
    [generated] = generate(model, prepare(model, [path]), tmp_path / "out")
    assert [f.name for f in generated.files] == ["sub-1_desc-synth01_T1w.nii.gz"]
    volume, mask = nib.load(generated.files[0]), nib.load(path)
    assert volume.shape == mask.shape
    for form in ("qform", "sform"):
        ours, code = getattr(volume, f"get_{form}")(coded=True)
        theirs, expected = getattr(mask, f"get_{form}")(coded=True)
        assert code == expected
        np.testing.assert_allclose(ours, theirs, atol=1e-4)
    data = volume.get_fdata()
    assert np.isfinite(data).all()
    assert data.min() >= 0
    assert data.max() <= 1
    folder = tmp_path / "out" / "sub-1" / "anat"
    assert generated.files[0].parent == folder
    record = json.loads((folder / "sub-1_desc-synth01_T1w.json").read_text())
    assert record["steps"] == 2
    assert record["sampler"] == "ddim"
    assert record["mask"] == record["Sources"][0] == path.name
    assert record["sources_sha256"] == [hashlib.sha256(path.read_bytes()).hexdigest()]
    assert set(record["labels"].values()) == {label.name for label in model.config.data.labels}


def test_batch_does_not_change_the_volumes(model, tmp_path):
    masks = [write_mask(tmp_path / f"m{i}.nii.gz") for i in range(3)]
    single = list(generate(model, prepare(model, masks), tmp_path / "a", seed=4))
    batched = list(generate(model, prepare(model, masks), tmp_path / "b", seed=4, batch=3))
    for a, b in zip(single, batched, strict=True):
        np.testing.assert_allclose(a.images_CDHW, b.images_CDHW, atol=1e-5)
    assert np.abs(single[0].images_CDHW - single[1].images_CDHW).max() > 0.01, "every volume has its own noise"


def small_model():
    torch.manual_seed(0)
    contract = cohort_contract((8, 8, 8))
    network = MedDDPMConfig(base=32, multipliers=(1,), attention=())
    sampling = SamplingConfig(sampler="ddpm", steps=2)
    return Model(ModelConfig(network=network, size=contract.size, data=contract, sampling=sampling))


def small_masks(folder, number):
    folder.mkdir()
    affine = np.diag([24.0, 24.0, 24.0, 1.0])
    return [write_mask(folder / f"case_{i:04d}_dseg.nii.gz", (8, 8, 8), affine) for i in range(number)]


def contents(folder):
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def check_any_jobs_give_the_same_bytes(tmp_path, number, jobs):
    model, masks = small_model(), small_masks(tmp_path / "masks", number)
    list(generate(model, prepare(model, masks), tmp_path / "one", seed=5))
    for job in range(jobs):
        # Distant masks, in reverse: no mask keeps its place.
        list(generate(model, prepare(model, masks[job::jobs][::-1]), tmp_path / "ten", seed=5))
    one, ten = contents(tmp_path / "one"), contents(tmp_path / "ten")
    assert one == ten and len(one) == 2 * number + 1
    volumes = {data for path, data in one.items() if path.name.endswith(".nii.gz")}
    assert len(volumes) == number, "every volume has its own noise"


def test_volumes_do_not_depend_on_the_job(tmp_path):
    check_any_jobs_give_the_same_bytes(tmp_path, number=12, jobs=3)


@pytest.mark.slow
def test_a_thousand_masks_in_one_job_or_in_ten(tmp_path):
    check_any_jobs_give_the_same_bytes(tmp_path, number=1000, jobs=10)


def test_noise_belongs_to_the_mask_and_the_number_of_the_volume(tmp_path):
    model, masks = small_model(), small_masks(tmp_path / "masks", 2)

    def generated(masks, **options):
        return list(generate(model, prepare(model, masks), tmp_path / "out", overwrite=True, **options))

    first, second = generated(masks, count=2)[2:]
    assert [v.replicate for v in (first, second)] == [1, 2]
    [alone] = generated(masks[1:])
    np.testing.assert_array_equal(alone.images_CDHW, first.images_CDHW)
    assert first.index == alone.index == identity_index("case_0001", 1) and second.index != first.index
    assert np.abs(first.images_CDHW - second.images_CDHW).max() > 0.01
    together = generated(masks, count=2, batch=4)
    np.testing.assert_allclose(together[2].images_CDHW, first.images_CDHW, atol=1e-5)
    record = json.loads((tmp_path / "out/sub-case0001/anat/sub-case0001_desc-synth02_T1w.json").read_text())
    assert record["noise"] == {"rule": "identity", "stem": "case_0001", "replicate": 2}
    assert record["index"] == second.index and record["seed"] == 0


def test_noise_by_position_is_that_of_version_0_1(tmp_path):
    model, masks = small_model(), small_masks(tmp_path / "masks", 2)
    requests = prepare(model, masks)
    volumes = list(generate(model, requests, tmp_path / "out", count=2, noise="position", flat=True))
    assert [volume.index for volume in volumes] == [0, 1, 2, 3]
    cond = torch.from_numpy(encode_mask(requests[1].labels_DHW, model.config.data))[None]
    expected = unscale_image(model.sample(cond, indices=[2]).numpy()[0])
    np.testing.assert_array_equal(volumes[2].images_CDHW, expected)
    record = json.loads((tmp_path / "out" / "case_0001_desc-synth01_T1w.json").read_text())
    assert record["noise"]["rule"] == "position" and record["index"] == 2


def test_masks_of_one_name_are_refused_before_any_is_read(model, tmp_path):
    with pytest.raises(InputError, match="have the same name"):
        prepare(model, [tmp_path / "a" / "sub-01_dseg.nii.gz", tmp_path / "b" / "sub-01_seg.nii"])


def test_every_invalid_mask_is_named(model, tmp_path):
    good = write_mask(tmp_path / "good.nii.gz")
    unknown = write_mask(tmp_path / "unknown.nii.gz", values=(0, 1, 7))
    empty = write_mask(tmp_path / "empty.nii.gz", values=(0, 0, 0))
    with pytest.raises(FilesError, match=r"unknown\.nii\.gz: unknown label 7.*and 2 more files with errors") as caught:
        prepare(model, [good, unknown, empty, tmp_path / "missing.nii.gz"])
    assert [Path(file).name for file, _ in caught.value.rows] == ["unknown.nii.gz", "empty.nii.gz", "missing.nii.gz"]
    assert "no such file" in caught.value.rows[2][1]


def test_a_volume_of_nan_is_not_written(model, tmp_path, monkeypatch):
    """Volumes before it stay on disk."""
    masks = [write_mask(tmp_path / f"m{i}.nii.gz") for i in range(2)]
    original, first = type(model).sample, identity_index("m0", 1)

    def sample(self, cond, *, indices, **others):
        return original(self, cond, indices=indices, **others) * (1.0 if list(indices) == [first] else float("nan"))

    monkeypatch.setattr(type(model), "sample", sample)
    with pytest.raises(InputError, match=r"volume 1 of .*m1.nii.gz: not written, because it contains NaN"):
        list(generate(model, prepare(model, masks), tmp_path / "out"))
    assert [f.name for f in (tmp_path / "out").rglob("*.nii.gz")] == ["sub-m0_desc-synth01_T1w.nii.gz"]


def test_missing_label_is_a_warning(model, tmp_path):
    [request] = prepare(model, [write_mask(tmp_path / "healthy.nii.gz", values=(0, 1, 1))])
    assert any("tumour" in warning for warning in request.warnings)


def test_existing_volumes_are_not_replaced(model, tmp_path):
    path = write_mask(tmp_path / "m.nii.gz")
    list(generate(model, prepare(model, [path]), tmp_path / "out"))
    with pytest.raises(InputError, match="or pass overwrite=True"):
        list(generate(model, prepare(model, [path]), tmp_path / "out"))
    list(generate(model, prepare(model, [path]), tmp_path / "out", overwrite=True))


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"settings": SamplerSettings(sampler="ddim", steps=10_000)},
        lambda: {"settings": SamplerSettings(sampler="foo", steps=2)},
        lambda: {"seed": -1},
        lambda: {"noise": "white"},
    ],
)
def test_invalid_options_write_nothing(model, tmp_path, options):
    requests = prepare(model, [write_mask(tmp_path / "m.nii.gz")])
    with pytest.raises(InputError):
        list(generate(model, requests, tmp_path / "out", **options()))
    assert not (tmp_path / "out").exists()


def test_a_label_lost_on_the_models_grid_is_refused(model, tmp_path):
    path = write_mask(tmp_path / "tiny.nii.gz", affine=np.diag([0.01, 0.01, 0.01, 1.0]), values=(0, 0, 2))
    with pytest.raises(InputError, match="lost"):
        prepare(model, [path])


def test_volumes_with_new_names_are_matched_with_the_files_of_their_mask(tmp_path):
    """`voxtune view`, `evaluate` and `train` find mask and real image of case_12, whose volume is of sub-case12."""
    model, masks = small_model(), tmp_path / "masks"
    masks.mkdir()
    (tmp_path / "real").mkdir()
    mask = write_mask(masks / "case_12_seg.nii.gz", (8, 8, 8), np.diag([24.0, 24.0, 24.0, 1.0]))
    nib.save(nib.load(mask), tmp_path / "real" / "case_12_t1.nii.gz")
    [generated] = generate(model, prepare(model, [mask]), tmp_path / "out")
    assert generated.files[0] == tmp_path / "out/sub-case12/anat/sub-case12_desc-synth01_T1w.nii.gz"
    [case] = find_cases(tmp_path / "out", real=tmp_path / "real", masks=masks).cases
    assert case.subject == "case_12" and case.mask.samefile(mask)
    assert [image.reference.name for image in case.images] == ["case_12_t1.nii.gz"]
    [pair] = pair_folders(tmp_path / "out", masks).pairs
    assert (pair.id, pair.images, pair.mask) == ("case_12", generated.files, mask)
    volumes = find_images(tmp_path / "out", synthetic=True)
    assert masks_of(volumes, find_masks(masks)) == [mask]
    assert len(pair_by_subject(find_images(tmp_path / "real"), volumes)) == 1


def remove_one(out, name):
    [file] = out.rglob(name)
    file.unlink()


def test_resume_draws_what_is_missing_and_nothing_else(tmp_path):
    model, masks = small_model(), small_masks(tmp_path / "masks", 5)
    whole, out = tmp_path / "whole", tmp_path / "out"
    list(generate(model, prepare(model, masks), whole, batch=2, seed=3))
    expected = contents(whole)
    # An interruption after three volumes, in the second of three batches.
    job = VolumeJob(model, prepare(model, masks), out, seed=3)
    for number, _ in enumerate(job.generate(2)):
        if number == 2:
            break
    # A volume without its sidecar, which is written last, is not complete.
    remove_one(out, "sub-case0001_desc-synth01_T1w.json")
    before = {file: file.stat().st_ino for file in out.rglob("*.nii.gz")}
    resumed = VolumeJob(model, prepare(model, masks), out, seed=3, resume=True)
    drawn = list(resumed.generate(2))
    assert [volume.request.path.name[:9] for volume in drawn] == ["case_0001", "case_0003", "case_0004"]
    assert (resumed.finished.batch, resumed.finished.incomplete, resumed.remaining) == (2, 1, 3)
    assert contents(out) == expected, "the same bytes as without the interruption"
    kept = {file: file.stat().st_ino for file in before if "case0001" not in file.name}
    assert kept.items() <= before.items(), "finished volumes are not written again"
    assert list(VolumeJob(model, prepare(model, masks), out, seed=3, resume=True).generate(2)) == []


def test_a_replacement_that_is_interrupted_never_leaves_a_sidecar_of_another_volume(tmp_path, monkeypatch):
    """The new volume is in place, its sidecar is not: a resume with the old settings must not take it for the old one."""
    model, masks, out = small_model(), small_masks(tmp_path / "masks", 2), tmp_path / "out"
    list(generate(model, prepare(model, masks), out, seed=0))
    expected = contents(out)

    def killed(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(voxtune.runtime.generate, "write_json", killed)
        list(generate(model, prepare(model, masks), out, seed=1, overwrite=True))
    job = VolumeJob(model, prepare(model, masks), out, seed=0, resume=True)
    job.check()
    assert (job.finished.numbers, job.finished.incomplete) == ({1}, 1)
    list(job.run())
    assert contents(out) == expected


def test_resume_into_a_new_folder_is_a_start(tmp_path):
    model, masks = small_model(), small_masks(tmp_path / "masks", 1)
    assert len(list(generate(model, prepare(model, masks), tmp_path / "out", resume=True))) == 1


@pytest.mark.parametrize("change", ["seed", "settings", "model", "mask", "labels"])
def test_resume_with_other_options_is_refused(tmp_path, change):
    model, masks = small_model(), small_masks(tmp_path / "masks", 2)
    provenance = {"model": "a", "model_sha256": "1" * 64}
    [first, _] = generate(model, prepare(model, masks), tmp_path / "out", provenance=provenance)
    remove_one(tmp_path / "out", "sub-case0001*.json")
    before = contents(tmp_path / "out")
    options = {"provenance": provenance}
    labels = None
    if change == "seed":
        options["seed"] = 1
    elif change == "settings":
        options["settings"] = SamplerSettings(sampler="ddim", steps=2)
    elif change == "model":
        options["provenance"] = {"model": "a", "model_sha256": "2" * 64}
    elif change == "mask":
        write_mask(masks[0], (8, 8, 8), np.diag([24.0, 24.0, 24.0, 1.0]), values=(0, 1, 1))
    else:
        labels = parse_labels("brain=1; tumour=2")
    masks_now = prepare(model, masks, labels=labels)
    with pytest.raises(FilesError, match=r"T1w\.json: was drawn with .*, not .*; resume with the same options"):
        list(generate(model, masks_now, tmp_path / "out", resume=True, **options))
    assert contents(tmp_path / "out") == before and first.files[0].is_file()


def test_resume_with_another_plan_is_refused(tmp_path):
    model, masks = small_model(), small_masks(tmp_path / "masks", 2)
    without_zeros(model.network)  # the gate judges no constant output
    list(generate(model, prepare(model, masks), tmp_path / "out"))
    remove_one(tmp_path / "out", "sub-case0001*.json")
    fast = voxtune.optimize(model, plan=Plan.of("channels_last"))
    with pytest.raises(InputError, match=r"passes none \(baseline\); now they would be channels_last"):
        list(generate(fast, prepare(model, masks), tmp_path / "out", resume=True))


def test_resume_never_replaces_a_file_of_the_user(tmp_path):
    model, masks = small_model(), small_masks(tmp_path / "masks", 2)
    mine = tmp_path / "out/sub-case0001/anat/sub-case0001_desc-synth01_T1w.nii.gz"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(masks[0].read_bytes())
    for options in ({"resume": True}, {"overwrite": True}):
        with pytest.raises(InputError, match="was not written by Voxtune"):
            list(generate(model, prepare(model, masks), tmp_path / "out", **options))
    assert mine.read_bytes() == masks[0].read_bytes()
    assert [file for file in (tmp_path / "out").rglob("*") if file.is_file()] == [mine]


def test_errors_can_be_skipped(tmp_path, monkeypatch):
    model, masks = small_model(), small_masks(tmp_path / "masks", 4)
    masks[1].write_bytes(b"damaged")
    checked = prepare(model, masks, on_error="skip")
    assert [Path(file).name for file, _ in checked.problems.rows] == ["case_0001_dseg.nii.gz"]
    # One more mask changes after the check; one volume is NaN.
    write_mask(masks[2], (8, 8, 8), np.diag([24.0, 24.0, 24.0, 1.0]), values=(0, 1, 1))
    original, bad = type(model).sample, identity_index("case_0003", 1)

    def sample(self, cond, *, indices, **others):
        drawn = original(self, cond, indices=indices, **others).clone()
        drawn[[index == bad for index in indices]] = float("nan")
        return drawn

    monkeypatch.setattr(type(model), "sample", sample)
    job = VolumeJob(model, checked, tmp_path / "out", on_error="skip")
    assert [volume.request.path.name for volume in job.generate(2)] == ["case_0000_dseg.nii.gz"]
    problems = {Path(file).name: problem for file, problem in job.problems.rows}
    assert list(problems) == ["case_0001_dseg.nii.gz", "case_0002_dseg.nii.gz", "case_0003_dseg.nii.gz"]
    assert "changed while the job was running" in problems["case_0002_dseg.nii.gz"]
    assert "contains NaN" in problems["case_0003_dseg.nii.gz"]
    with pytest.raises(InputError, match="changed while the job"):
        list(generate(model, prepare_then_change(model, masks), tmp_path / "other"))


def prepare_then_change(model, masks):
    checked = prepare(model, [masks[0], masks[3]])
    write_mask(masks[3], (8, 8, 8), np.diag([24.0, 24.0, 24.0, 1.0]), values=(0, 1, 1))
    return checked


def test_a_full_disk_is_not_skipped(tmp_path, monkeypatch):
    model, masks = small_model(), small_masks(tmp_path / "masks", 3)
    job = VolumeJob(model, prepare(model, masks), tmp_path / "out", on_error="skip")
    drawn = job.generate()
    next(drawn)

    def full(_handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        list(drawn)
    assert len(list((tmp_path / "out").rglob("*.nii.gz"))) == 1


def test_names_in_a_model_never_become_paths(tmp_path):
    """A config.json from a stranger names its images; the files stay inside the output folder."""
    contract = cohort_contract((8, 8, 8))
    with pytest.raises(InputError, match="must not contain"):
        replace(contract, images=("x/../../../../elsewhere/y",))
    model, masks = small_model(), small_masks(tmp_path / "masks", 1)
    model.config = replace(model.config, data=replace(model.config.data, images=("..",)))
    for flat in (False, True):
        [volume] = generate(model, prepare(model, masks), tmp_path / f"out{flat}", flat=flat)
        assert volume.files[0].resolve().is_relative_to(tmp_path / f"out{flat}")
        assert ".." not in volume.files[0].name


def test_the_output_folder_may_not_lead_elsewhere(tmp_path):
    model, masks = small_model(), small_masks(tmp_path / "masks", 1)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub-case0000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="outside the output folder"):
        list(generate(model, prepare(model, masks), tmp_path / "out"))
    assert not any((tmp_path / "elsewhere").iterdir())


def test_masks_are_not_held_in_memory(tmp_path):
    model, masks = small_model(), small_masks(tmp_path / "masks", 30)
    tracemalloc.start()
    prepare(model, masks[:1])
    few, _ = tracemalloc.get_traced_memory()
    checked = prepare(model, masks)
    gc.collect()
    many, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(checked) == 30 and (many - few) / 30 < 3000, "bytes of a checked mask"
