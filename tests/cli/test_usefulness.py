"""voxtune usefulness: subjects of every origin, the core packages alone, and invalid requests."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.factories import analytic
from tests.factories.cli import run
from tests.factories.core_only import voxtune_bare
from voxtune.data.bids import write_cohort
from voxtune.data.cohort import cohort_contract
from voxtune.data.subjects import cohort_sources, pack, unpack
from voxtune.runtime.model import Model, SamplingConfig
from voxtune.runtime.storage import save
from voxtune.workloads import without_zeros

QUICK = ("--resamples", 20, "--batch", 4, "--segment-steps", 2, "--segment-batch", 2, "--device", "cpu")

pytestmark = pytest.mark.usefixtures("one_thread")


def errors_of(err: str) -> list[str]:
    """The lines on standard error, without warnings."""
    return [line for line in err.splitlines() if not line.startswith("warning:")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """(model, packed subjects): a random network of 4 steps on 16 voxels a side."""
    root = tmp_path_factory.mktemp("usefulness")
    torch.manual_seed(0)
    model = Model(analytic.model(4).config)
    without_zeros(model.network)
    save(model, root / "model", card="")
    learn, held_out = cohort_sources(analytic.CONTRACT, 0, 4, 3)
    return root / "model", pack(learn, held_out, root / "subjects.npz", origin="made for tests")


@pytest.mark.slow
def test_a_bare_machine_learns_from_packed_subjects(folders, tmp_path):
    model, subjects = folders
    options = ("--subjects", subjects, "--volumes", 4, "--few", 2, "--seeds", 2, "--steps", 2, "--sampler", "ddim")
    done = voxtune_bare("usefulness", model, "-o", tmp_path, *options, *QUICK)
    assert done.returncode == 0, done.stderr
    assert "s left" in done.stdout and "few_and_synthetic" in done.stdout
    result = json.loads((tmp_path / "usefulness.json").read_text())
    arms = {arm["name"]: (arm["real"], arm["synthetic"]) for arm in result["arms"]}
    assert arms == {
        "real": (4, 0),
        "synthetic": (0, 4),
        "both": (4, 4),
        "few": (2, 0),
        "few_and_synthetic": (2, 4),
    }
    assert (result["subjects"], result["seeds"], result["data"]) == (3, 2, "4 packed subjects (made for tests)")
    assert len(result["model_sha256"]) == 64
    assert (result["drawing"]["sampler"], result["drawing"]["steps"], result["drawing"]["broken"]) == ("ddim", 2, 0)
    assert (result["training"]["steps"], result["training"]["batch"]) == (2, 2)
    assert any("at least 64 are required" in note for note in result["notes"])
    assert "| both | 4 real + 4 synthetic |" in (tmp_path / "usefulness.md").read_text()


def test_the_cohort_and_more_volumes_than_subjects(capsys, folders, tmp_path):
    options = ("--volumes", 2, "--held-out", 2, "--seeds", 1, "--json", *QUICK)
    code, out, err = run(capsys, "usefulness", folders[0], "-o", tmp_path, *options)
    assert code == 0, err
    result = json.loads(out)
    assert result == json.loads((tmp_path / "usefulness.json").read_text())
    assert result["held_out"] == "simulated cohort, seed 0, subjects 100000 to 100001"
    assert [(a["name"], a["simulated"], a["synthetic"]) for a in result["arms"]] == [
        ("simulated", 2, 0),
        ("synthetic", 0, 2),
        ("both", 2, 2),
    ]
    assert {gain["against"] for arm in result["arms"] for gain in arm["gains"]} == {"simulated"}
    page = (tmp_path / "usefulness.md").read_text()
    assert "| both | 2 simulated + 2 synthetic |" in page and "real" not in page
    assert result["drawing"]["steps"] == 4 and "no settings are stored" in err and "one seed" in err
    code, _, err = run(capsys, "usefulness", folders[0], "-o", tmp_path, *options)
    assert code == 2 and "--overwrite" in err
    (tmp_path / "file").write_text("x")
    code, _, err = run(capsys, "usefulness", folders[0], "-o", tmp_path / "file", *options)
    assert code == 2 and "is not a folder" in err
    more = ("--subjects", folders[1], "--volumes", 6, "--seeds", 1, "--steps", 1, "--overwrite", "--json", *QUICK)
    code, out, err = run(
        capsys, "usefulness", folders[0], "-o", tmp_path, *more, "--timestep-spacing", "logsnr", "--no-clip"
    )
    assert code == 0, err
    result = json.loads(out)
    assert [(a["real"], a["synthetic"]) for a in result["arms"]] == [(4, 0), (0, 6), (4, 6)]
    assert [result["drawing"][k] for k in ("sampler", "steps", "timestep_spacing", "clip")] == [
        "ddpm",
        1,
        "logsnr",
        False,
    ]


def test_folders_hold_out_their_last_subjects(capsys, folders, tmp_path):
    write_cohort(tmp_path / "real", 5, 0, analytic.SIZE, healthy_fraction=0.0)
    data = ("--real", tmp_path / "real", "--masks", tmp_path / "real" / "derivatives" / "masks")
    options = (*data, "--volumes", 8, "--seeds", 1, "--steps", 1, "--json", *QUICK)
    code, out, err = run(capsys, "usefulness", folders[0], "-o", tmp_path / "out", *options)
    assert code == 0, err
    result = json.loads(out)
    assert result["subjects"] == 2 and [(a["real"], a["synthetic"]) for a in result["arms"]] == [(3, 0), (0, 8), (3, 8)]
    code, _, err = run(capsys, "usefulness", folders[0], "-o", tmp_path / "b", *data, "--held-out", 4, *QUICK)
    assert code == 2 and "too few to train on some" in err


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda a, s: ["--real", a], "--masks"),
        (lambda a, s: ["--real", a, "--masks", a, "--subjects", s], "cannot be combined with --subjects"),
        (lambda a, s: ["--subjects", a / "none.npz"], "none.npz"),
        (lambda a, s: ["--subjects", s, "--held-out", 4], "3 held-out subjects"),
        (lambda a, s: ["--subjects", s, "--held-out", 0], "at least 2"),
        (lambda a, s: ["--subjects", s, "--few", 4], "--few 4"),
        (lambda a, s: ["--subjects", s, "--volumes", 1], "volumes must be >= 2"),
        (lambda a, s: ["--subjects", s, "--seeds", 0], "seeds 0"),
        (lambda a, s: ["--subjects", s, "--segment-steps", 0], "steps 0"),
        (lambda a, s: ["--subjects", s, "--steps", "few"], "whole number"),
        (lambda a, s: ["--subjects", s, "--steps", 9], "1 to 4"),
        (lambda a, s: ["--subjects", s, "--sampler", "no-such-sampler"], "unknown sampler"),
        (lambda a, s: ["--subjects", s, "--resamples", 3], "resamples"),
    ],
)
def test_wrong_requests_end_with_one_line(capsys, folders, tmp_path, change, word):
    arguments = change(tmp_path, folders[1])
    code, _, err = run(capsys, "usefulness", folders[0], "-o", tmp_path / "out", "--device", "cpu", "-q", *arguments)
    assert code == 2 and word in err and len(errors_of(err)) == 1, err
    assert not (tmp_path / "out").exists()


def repacked(path, out, **changes):
    """The same packed subjects with other arrays or another header."""
    with np.load(path) as file:
        parts = {name: file[name] for name in file.files}
    header = {**json.loads(str(parts["header"])), **changes.pop("header", {})}
    np.savez(out, **{**parts, **changes, "header": json.dumps(header)})
    return out


def test_subjects_that_cannot_serve_are_refused(capsys, folders, tmp_path):
    model, subjects = folders
    none = repacked(subjects, tmp_path / "none.npz", header={"held_out": 0})
    single = repacked(subjects, tmp_path / "single.npz", header={"held_out": 1})
    empty = repacked(subjects, tmp_path / "empty.npz", labels=np.zeros((7, *analytic.SIZE), np.uint8))
    assert len(unpack(single)[1]) == 1
    for path, word in ((none, "0 of its 7 subjects are held out"), (single, "at least 2"), (empty, "contain no label")):
        code, _, err = run(capsys, "usefulness", model, "--subjects", path, "-o", tmp_path / "out", "-q", *QUICK)
        assert code == 2 and word in err and len(errors_of(err)) == 1, err


def test_a_model_of_another_grid_is_refused(capsys, folders, tmp_path):
    contract = cohort_contract((24, 24, 24))
    other = Model(replace(analytic.model(4).config, size=contract.size, data=contract, sampling=SamplingConfig()))
    save(other, tmp_path / "other", card="")
    options = ("--subjects", folders[1], "-o", tmp_path / "out", "--device", "cpu", "-q")
    code, _, err = run(capsys, "usefulness", tmp_path / "other", *options)
    assert code == 2 and "size (" in err and "differs" in err and "subjects.npz" in err and len(errors_of(err)) == 1
