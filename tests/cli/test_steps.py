"""voxtune steps: the search, its confirmation, stored settings, and the core packages alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch

from tests.factories import analytic
from tests.factories.cli import run
from tests.factories.core_only import voxtune_bare
from tests.factories.nifti import write_mask
from voxtune.data.bids import write_cohort
from voxtune.data.cohort import cohort_contract
from voxtune.data.subjects import cohort_sources, pack, unpack
from voxtune.evaluation.bench import Bench
from voxtune.plan.hazards import slow_half
from voxtune.runtime.model import Model, SamplingConfig
from voxtune.runtime.storage import demo_model, load, save, weights_sha256
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, save_segmenter
from voxtune.workloads import without_zeros
from voxtune.workloads.segment import SegmentConfig

QUICK = ("--resamples", "20", "--batch", "4", "--device", "cpu", "--plan", "baseline")


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(model, segmenter, packed subjects): a random network of 4 steps on 16 voxels a side."""
    root = tmp_path_factory.mktemp("steps")
    torch.manual_seed(0)
    model = Model(analytic.model(4).config)
    without_zeros(model.network)
    save(model, root / "model", card="")
    save_segmenter(analytic.segmenter(), root / "segmenter", card="")
    train, held_out = cohort_sources(analytic.CONTRACT, 0, 1, 3)
    return root / "model", root / "segmenter", pack(train, held_out, root / "subjects.npz")


def copied(model, tmp_path):
    return shutil.copytree(model, tmp_path / "model")


def test_a_choice_is_stored_with_its_evidence_and_sampled_with(capsys, folders, tmp_path):
    model, segmenter = copied(folders[0], tmp_path), folders[1]
    # A margin so wide that any row passes: what is tested here is the storing.
    options = ("--segmenter", segmenter, "--held-out", 3, "--samplers", "ddim,ddpm", "--steps", "1,2", "--margin", 100)
    code, out, err = run(capsys, "steps", model, "-o", tmp_path / "out", "--json", "--store", *options, *QUICK)
    assert code == 0, err
    table = json.loads(out)
    assert table == json.loads((tmp_path / "out" / "steps.json").read_text())
    assert table["subjects"] == 3 and table["data"] == "simulated cohort, seed 0, subjects 100000 to 100002"
    assert len(table["model_sha256"]) == len(table["segmenter_sha256"]) == 64
    assert [row["name"] for row in table["rows"]][:4] == ["ddpm 4, reference", "ddpm 4, seed 1", "ddim 1", "ddim 2"]
    auto = load(model).config.sampling.auto
    chosen = next(row for row in table["rows"] if row["name"] == table["chosen"])
    assert (auto.sampler, auto.steps, auto.timestep_spacing) == (
        chosen["sampler"],
        chosen["steps"],
        chosen["timestep_spacing"],
    )
    assert auto.evidence.sha256 == hashlib.sha256((tmp_path / "out" / "steps.json").read_bytes()).hexdigest()
    assert "non-inferior" in auto.evidence.summary and "3 simulated subjects" in auto.evidence.summary
    mask = write_mask(tmp_path / "a_dseg.nii.gz")
    drawing = (
        "sample",
        model,
        "--mask",
        mask,
        "-o",
        tmp_path / "drawn",
        "--steps",
        "auto",
        "--device",
        "cpu",
        "--json",
    )
    code, out, err = run(capsys, *drawing)
    assert code == 0, err
    assert (json.loads(out)["steps"], json.loads(out)["sampler"]) == (auto.steps, auto.sampler)
    [sidecar] = (tmp_path / "drawn").rglob("sub-a_*.json")
    record = json.loads(sidecar.read_text())
    assert record["steps"] == auto.steps and record["clip"] == auto.clip
    assert record["steps_auto"]["sha256"] == auto.evidence.sha256
    assert record["model_sha256"] == weights_sha256(model) and record["device"] == "cpu"
    code, _, err = run(capsys, *drawing, "--sampler", "unipc")
    assert code == 2 and "omit sampler" in err


def test_the_first_subjects_are_left_out(capsys, folders, tmp_path):
    """Of a file, of the cohort and of folders."""
    model, segmenter, subjects = folders
    requested = (
        "steps",
        model,
        "--segmenter",
        segmenter,
        "--samplers",
        "ddim",
        "--steps",
        "2",
        "--timestep-spacings",
        "logsnr",
        *QUICK,
    )
    write_cohort(tmp_path / "real", 3, 0, analytic.SIZE, healthy_fraction=0.0, first=100_000)
    folder = ("--real", tmp_path / "real", "--masks", tmp_path / "real" / "derivatives" / "masks")
    figures = []
    for name, source in {"file": ("--subjects", subjects), "cohort": ("--held-out", 2), "folder": folder}.items():
        code, out, err = run(capsys, *requested, *source, "--skip", 1, "-o", tmp_path / name, "--json")
        assert code == 0, err
        table = json.loads(out)
        assert table["subjects"] == 2
        figures.append(table["rows"][0]["figures"]["psnr"]["value"])
    assert figures == pytest.approx([figures[0]] * 3, abs=0.01)
    code, _, err = run(capsys, *requested, "--subjects", subjects, "--skip", 2, "-o", tmp_path / "few")
    assert code == 2 and "at least 2" in err


def test_warns_in_one_line_of_subjects_unlike_the_training_data(capsys, folders, tmp_path):
    model, segmenter = copied(folders[0], tmp_path), folders[1]
    options = (
        "--segmenter",
        segmenter,
        "--held-out",
        2,
        "--samplers",
        "ddim",
        "--steps",
        "1",
        "--timestep-spacings",
        "logsnr",
    )
    config = json.loads((model / "config.json").read_text())
    data = json.loads((demo_model() / "config.json").read_text())["training_data"]
    child = {key: value / 3 for key, value in data["labelled_ml"].items()}
    for name, statistics, lines in (("like", data, 0), ("unlike", {**data, "labelled_ml": child}, 1)):
        (model / "config.json").write_text(json.dumps({**config, "training_data": statistics}))
        code, _, err = run(capsys, "steps", model, *options, *QUICK, "-o", tmp_path / name)
        assert code == 0, err
        warnings = [line for line in err.splitlines() if "training data of the model" in line]
        assert len(warnings) == lines, err
    assert "2 of 2 subjects are far outside" in warnings[0] and "ml in total (training: 402 to 575 ml)" in warnings[0]


@pytest.mark.slow
def test_other_subjects_confirm_what_a_search_passed(capsys, folders, tmp_path):
    model, segmenter = copied(folders[0], tmp_path), folders[1]
    requested = ("steps", model, "--segmenter", segmenter, "--held-out", 3, "--margin", 100, *QUICK)
    result = []
    candidates = ("--samplers", "ddim", "--steps", "1,2,3", "--timestep-spacings", "trailing")
    for name, options in {"a": candidates, "b": ("--confirm", tmp_path / "a" / "steps.json", "--store")}.items():
        code, out, err = run(capsys, *requested, *options, "-o", tmp_path / name, "--json")
        assert code == 0, err
        result.append(json.loads(out))
    search, table = result
    chosen = next(row for row in search["rows"] if row["name"] == search["chosen"])
    # The choice, the same in more steps, nothing else; on subjects that the search did not see.
    more = [n for n in (1, 2, 3) if n > chosen["steps"]]
    tail = chosen["name"].removeprefix(f"ddim {chosen['steps']}")
    passed = {row["name"] for row in search["rows"] if row["verdict"] == "non-inferior"}
    expected = [chosen["name"], *(n for n in (f"ddim {m}{tail}" for m in more) if n in passed)]
    assert [row["name"] for row in table["rows"][2:]] == expected
    assert table["data"] == "simulated cohort, seed 0, subjects 100003 to 100005" and (
        search["skip"],
        table["skip"],
    ) == (0, 3)
    digest = hashlib.sha256((tmp_path / "a" / "steps.json").read_bytes()).hexdigest()
    assert (table["confirms"]["sha256"], table["confirms"]["subjects"]) == (digest, 3)
    auto = load(model).config.sampling.auto
    assert (auto.sampler, auto.steps, auto.clip) == ("ddim", chosen["steps"], chosen["clip"])
    assert "over 3 simulated subjects and 3 others" in auto.evidence.summary
    # A third table leaves the subjects of both out.
    third = ("--confirm", tmp_path / "b" / "steps.json", "-o", tmp_path / "c")
    assert run(capsys, *requested, *third)[0] == 0
    assert json.loads((tmp_path / "c" / "steps.json").read_text())["skip"] == 6


PASSED = {"name": "x", "sampler": "ddim", "steps": 2, "spacing": "trailing", "clip": True, "seed": 0}
PASSED |= {"verdict": "not worse"}  # as version 0.1 wrote it


@pytest.mark.parametrize(
    ("change", "options", "word"),
    [
        ({}, (), None),
        ({}, ("--steps", "2"), "cannot be combined with --samplers"),
        ({"format": "other"}, (), "not a steps.json file"),
        ({"table": "numerics"}, (), "not a steps.json file"),
        ({"model_sha256": "0" * 64}, (), "other weights"),
        ({"chosen": None}, (), "no chosen setting"),
        ({"chosen": "no such row"}, (), "damaged"),
        ({"skip": -1}, (), "damaged"),
        ({"subjects": float("inf")}, (), "Infinity is not a number"),
        ({"rows": [7]}, (), "damaged"),
        ({"rows": [PASSED | {"steps": 99}]}, (), "1 to 4"),
        ({"rows": [PASSED | {"clip": "no"}]}, (), "damaged"),
    ],
)
def test_a_table_that_cannot_be_confirmed_is_refused(capsys, folders, tmp_path, change, options, word):
    model, segmenter, subjects = folders
    good = {"format": "voxtune-steps/1", "table": "steps", "model_sha256": weights_sha256(model), "chosen": "x"}
    good |= {"rows": [PASSED], "subjects": 1, "skip": 0, "margin": 0.5}
    (tmp_path / "steps.json").write_text(json.dumps(good | change))
    requested = ("steps", model, "--subjects", subjects, "--segmenter", segmenter, *QUICK)
    requested = (*requested, "--confirm", tmp_path / "steps.json", "-o", tmp_path / "out")
    code, _, err = run(capsys, *requested, *options)
    if word is None:
        assert code == 0, err
    else:
        assert code == 2 and word in err and len(err.strip().splitlines()) == 1


def test_an_interrupted_run_leaves_its_rows(capsys, folders, tmp_path, monkeypatch):
    """And a later run can use the same folder."""
    model, segmenter, subjects = folders
    requested = (
        "steps",
        model,
        "--subjects",
        subjects,
        "--segmenter",
        segmenter,
        "--samplers",
        "ddim",
        "--steps",
        "1,2",
    )
    requested = (*requested, "-o", tmp_path, *QUICK)
    steps = []

    def generate(bench, model, settings, *others):
        steps.append(settings.steps)
        if steps == [4, 4, 1, 2]:
            raise MemoryError("none is left")
        return original(bench, model, settings, *others)

    original = Bench.generate
    with monkeypatch.context() as patch:
        patch.setattr(Bench, "generate", generate)
        assert run(capsys, *requested)[0] != 0
    saved = json.loads((tmp_path / "steps-unfinished.json").read_text())
    assert [row["name"] for row in saved["rows"]] == ["ddpm 4, reference", "ddpm 4, seed 1", "ddim 1"]
    assert "unfinished: the rows so far" in saved["notes"] and len(saved["model_sha256"]) == 64
    assert not (tmp_path / "steps.json").exists()
    assert run(capsys, *requested)[0] == 2, "the rows are not lost without --overwrite"
    code, _, err = run(capsys, *requested, "--overwrite")
    assert code == 0, err
    assert sorted(f.name for f in tmp_path.iterdir()) == ["steps.json", "steps.md"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--samplers", "ddim,"], "comma-separated names"),
        (["--held-out", "-1"], "at least 2"),
        (["--numerics", "--plan", "nosuch.json"], "cannot be combined with --numerics"),
    ],
)
def test_ambiguous_options_are_rejected(capsys, folders, tmp_path, options, word):
    model, segmenter, subjects = folders
    requested = ("steps", model, "--subjects", subjects, "--segmenter", segmenter, "-o", tmp_path / "out")
    code, _, err = run(capsys, *requested, *QUICK, *options)
    assert code == 2 and word in err
    (tmp_path / "file").write_text("x")
    code, _, err = run(capsys, *requested[:-1], tmp_path / "file", *QUICK)
    assert code == 2 and "is not a folder" in err


def test_a_lesion_lost_in_resampling_is_reported(folders, tmp_path, caplog):
    """By whatever command takes the folders."""
    from voxtune.data.splits import held_out_folders

    for pair in write_cohort(tmp_path / "real", 2, 0, (64, 64, 64), healthy_fraction=0.0):
        image = nib.load(pair.mask)
        labels = np.minimum(np.asanyarray(image.dataobj), 1).astype(np.uint8)
        labels[tuple(np.argwhere(labels == 1)[0])] = 2
        nib.save(nib.Nifti1Image(labels, image.affine), pair.mask)
    held_out_folders(load(folders[0]).config.data, tmp_path / "real", tmp_path / "real" / "derivatives")
    assert "tumour" in caplog.text


def by_arithmetic(monkeypatch, cached):
    """Times are counted, not measured: a step takes 1, or `cached` where features are kept."""
    monkeypatch.setattr(Bench, "_now", lambda bench: bench.clock)
    monkeypatch.setattr(Bench, "clock", 0.0, raising=False)
    sample = Bench._sample

    def timed(bench, model, settings, *rest):
        bench.clock += settings.steps if settings.cache is None else cached * settings.steps
        return sample(bench, model, settings, *rest)

    monkeypatch.setattr(Bench, "_sample", timed)


@pytest.mark.slow
def test_feature_caching_is_measured_and_stored(capsys, folders, tmp_path, monkeypatch):
    """With a margin so wide that any row passes, and times that say what the arithmetic says."""
    by_arithmetic(monkeypatch, cached=0.5)
    model = copied(folders[0], tmp_path)
    options = ("--segmenter", folders[1], "--held-out", 3, "--samplers", "ddim", "--steps", "4", "--margin", 100)
    command = ("steps", model, *options, *QUICK, "--cache", "3:0,2", "--store")
    code, out, err = run(capsys, *command, "-o", tmp_path / "out", "--json")
    assert code == 0, err
    table = json.loads(out)
    names = [row["name"] for row in table["rows"]]
    assert names[-2].endswith(" cache 3:0") and names[-1].endswith(" cache 2") and table["chosen"] in names[-2:]
    auto = load(model).config.sampling.auto
    assert vars(auto.cache) == next(row["cache"] for row in table["rows"] if row["name"] == table["chosen"])
    mask = write_mask(tmp_path / "a_dseg.nii.gz")
    drawing = ("sample", model, "--mask", mask, "-o", tmp_path / "drawn", "--steps", "auto", "--device", "cpu")
    code, out, err = run(capsys, *drawing)
    assert code == 0 and f"feature cache {auto.cache} (stored" in out and "not measured" not in err, err
    record = json.loads(next((tmp_path / "drawn").rglob("sub-a_*.json")).read_text())
    assert record["cache"] == vars(auto.cache) and record["steps_auto"]["sha256"] == auto.evidence.sha256


def test_a_rejected_cache_is_reported_and_not_stored(capsys, folders, tmp_path, monkeypatch):
    """Any row passes, and caching is slower."""
    by_arithmetic(monkeypatch, cached=1.5)
    model = copied(folders[0], tmp_path)
    options = ("--segmenter", folders[1], "--held-out", 3, "--samplers", "ddpm", "--steps", "4", "--margin", 100)
    command = ("steps", model, *options, *QUICK, "--cache", "4:0", "--store", "-o", tmp_path / "out")
    code, out, err = run(capsys, *command)
    assert code == 0, err
    assert "Feature caching was not chosen: ddpm 4" in out and "cache 4:0 is non-inferior, but not faster" in out
    assert load(model).config.sampling.auto.cache is None


def test_sampling_warns_without_stored_settings(capsys, folders, tmp_path):
    mask = write_mask(tmp_path / "a_dseg.nii.gz")
    options = ("--mask", mask, "-o", tmp_path / "drawn", "--steps", "auto", "--device", "cpu")
    code, out, err = run(capsys, "sample", folders[0], *options)
    assert code == 0 and "no settings are stored" in err and "4 steps" in out
    assert "steps_auto" not in next((tmp_path / "drawn").rglob("sub-a_*.json")).read_text()


def test_folders_and_numerics(capsys, folders, tmp_path):
    write_cohort(tmp_path / "real", 2, 0, analytic.SIZE, healthy_fraction=0.0)
    data = ("--real", tmp_path / "real", "--masks", tmp_path / "real" / "derivatives" / "masks")
    options = (*data, "--segmenter", folders[1], "--numerics", "--samplers", "ddim", "--steps", "2", *QUICK)
    code, out, err = run(capsys, "steps", folders[0], "-o", tmp_path / "out", *options)
    assert code == 0, err
    assert "BF16 autocast" in out and "at least 64 are required" in err
    stored = json.loads((tmp_path / "out" / "numerics.json").read_text())
    if slow_half("cpu") is None:
        assert stored["rows"][2]["distance"]["relative"] > 0
    else:
        assert "skipped" in out and len(stored["rows"]) == 2
    code, _, err = run(capsys, "steps", folders[0], "-o", tmp_path / "out", *options)
    assert code == 2 and "--overwrite" in err


@pytest.mark.slow
def test_a_bare_machine_makes_the_table_from_packed_subjects(folders, tmp_path):
    model, segmenter, subjects = folders
    options = ("--segmenter", segmenter, "--subjects", subjects, "--samplers", "ddpm,ddim", "--steps", "4", *QUICK)
    options = (*options, "--cache", "2", "--margin", 100)
    done = voxtune_bare("steps", model, "-o", tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert "s left" in done.stdout and " cache 2: " in done.stdout
    assert json.loads((tmp_path / "steps.json").read_text())["subjects"] == 3
    assert (tmp_path / "steps.md").exists()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda a, s: ["--segmenter", a / "none"], "no such segmenter"),
        (lambda a, s: ["--segmenter", s, "--real", a], "--masks"),
        (
            lambda a, s: ["--segmenter", s, "--real", a, "--masks", a, "--held-out", 4],
            "cannot be combined with --subjects",
        ),
        (lambda a, s: ["--segmenter", s, "--subjects", a / "none.npz"], "none.npz"),
        (lambda a, s: ["--segmenter", s, "--held-out", 1], "at least 2"),
        (lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", "5,x"], "whole numbers"),
        (lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", "auto"], "--steps auto cannot be used"),
        (lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", "7"], "1 to 4"),
        (
            lambda a, s: ["--segmenter", s, "--held-out", 2, "--samplers", "no-such-sampler", "--steps", 2],
            "unknown sampler",
        ),
        (lambda a, s: ["--segmenter", s, "--store", "--numerics"], "--numerics"),
        (lambda a, s: ["--segmenter", s, "--numerics", "--held-out", 2, "--steps", "2,3"], "single value"),
        (lambda a, s: ["--segmenter", s, "--resamples", 3], "resamples"),
        (lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", 2, "--cache", "0"], "cache 0"),
        (lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", 2, "--cache", "2,-3"], "cache '-3'"),
        (lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", 2, "--cache", "1"], "must be >= 2"),
        (
            lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", 2, "--cache", "3"],
            "exceeds the number of steps, 2",
        ),
        (lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", 2, "--cache", "2:2"], "depth 2"),
        (lambda a, s: ["--segmenter", s, "--numerics", "--cache", "2"], "--numerics"),
        (lambda a, s: ["--segmenter", s, "--numerics", "--timestep-spacings", "logsnr"], "--numerics"),
        (
            lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", 2, "--timestep-spacings", "karras"],
            "unknown timestep spacing",
        ),
        (
            lambda a, s: ["--segmenter", s, "--held-out", 2, "--steps", 2, "--timestep-spacings", "logsnr,"],
            "comma-separated",
        ),
    ],
)
def test_wrong_requests_end_with_one_line(capsys, folders, tmp_path, change, word):
    arguments = change(tmp_path, folders[1])
    code, _, err = run(capsys, "steps", folders[0], "-o", tmp_path / "out", "--device", "cpu", "-q", *arguments)
    assert code == 2 and word in err and err.count("\n") == 1, err
    assert not (tmp_path / "out").exists()


def test_subjects_and_segmenters_of_another_grid_are_refused(capsys, folders, tmp_path):
    model = analytic.model(4)
    contract = cohort_contract((24, 24, 24))
    other = Model(replace(model.config, size=contract.size, data=contract, sampling=SamplingConfig()))
    save(other, tmp_path / "other", card="")
    options = ("--segmenter", folders[1], "-o", tmp_path / "out", "--steps", 2, "--device", "cpu", "-q")
    code, _, err = run(capsys, "steps", tmp_path / "other", "--subjects", folders[2], *options)
    assert code == 2 and "size (" in err and "differs" in err and "segmenter" in err and "pack --model" in err
    network = SegmentConfig(base=4)
    save_segmenter(Segmenter(SegmenterConfig(network=network, data=contract)), tmp_path / "fits", card="")
    fitting = (*options[2:], "--segmenter", tmp_path / "fits")
    code, _, err = run(capsys, "steps", tmp_path / "other", "--subjects", folders[2], *fitting)
    assert code == 2 and "size (" in err and "differs" in err and "subjects.npz" in err
    # Packed for the model, they fit.
    packed = ("pack", "--cohort", 1, "--held-out", 2, "--model", tmp_path / "other", "-o", tmp_path / "fit.npz", "-q")
    assert run(capsys, *packed)[0] == 0
    result = unpack(tmp_path / "fit.npz")[1]
    assert (result.contract.size, result.contract.spacing) == (contract.size, contract.spacing)
    code, _, err = run(capsys, *packed, "--overwrite", "--size", "16,16,16")
    assert code == 2 and "--model cannot be combined with --size" in err
    code, _, err = run(capsys, "steps", tmp_path / "other", "--held-out", 2, *options)
    assert code == 2 and "size (" in err and "differs" in err and "segmenter" in err


@pytest.mark.parametrize("steps", ["0", "-1", "few", "1e3", "9" * 30, ""])
def test_sampling_steps_that_are_no_number(capsys, folders, tmp_path, steps):
    mask = write_mask(tmp_path / "a_dseg.nii.gz")
    code, _, err = run(capsys, "sample", folders[0], "--mask", mask, "-o", tmp_path / "o", f"--steps={steps}")
    assert code == 2 and err.count("\n") == 1, err
