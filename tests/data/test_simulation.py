"""Version 2 of the simulated cohort, and that version 1 stays as it is."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.factories.core_only import voxtune_bare
from voxtune.data import atlas as atlases
from voxtune.data.cohort import BRAIN, TUMOUR, cohort_contract, subject
from voxtune.data.contrast import KINDS, SEQUENCES, TISSUES, Sequence, signals
from voxtune.data.dataset import CohortSource
from voxtune.data.simulation import draw_phenotype, field_values, simulate, simulated_subject
from voxtune.errors import InputError

SMALL = (32, 32, 32)


def dice(a, b):
    return 2.0 * (a & b).sum() / (a.sum() + b.sum())


def digest(*arrays):
    return hashlib.sha256(b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)).hexdigest()


def test_version_1_is_unchanged():
    """Stored tables depend on it. Images in hundredths: the last digit of a float may differ between processors."""
    drawn = [subject(seed, index, (24, 24, 24)) for seed, index in ((0, 0), (0, 100_003), (7, 12))]
    parts = [part for s in drawn for part in (np.rint(s.image_DHW * 100).astype(np.uint8), s.labels_DHW)]
    assert digest(*parts) == "ae9e779d0e4605502d4c513f30b7078a4a4a8c8716c7dcd49ce049d4dd09dd86"
    assert digest(subject(0, 0, (24, 24, 24)).labels_DHW) == digest(simulated_subject(1, 0, 0, (24, 24, 24)).labels_DHW)


@pytest.mark.slow
def test_reproducible_alone_in_other_processes_and_with_other_kinds():
    code = "import torch; torch.set_num_threads({}); from voxtune.data.simulation import simulate; import hashlib;"
    code += "s = simulate(3, 5, (32, 32, 32), kinds=('T1w', 'FLAIR'));"
    code += "print(hashlib.sha256(s.image_DHW.tobytes() + s.labels_DHW.tobytes()).hexdigest())"
    runs = [subprocess.check_output([sys.executable, "-c", code.format(n)], text=True).strip() for n in (1, 2)]
    here = simulate(3, 5, SMALL)
    assert runs == [digest(here.image_DHW, here.labels_DHW)] * 2
    every = simulate(3, 5, SMALL, kinds=KINDS)
    assert every.images_DHW["T1w"].tobytes() == here.image_DHW.tobytes() and every.kinds == KINDS
    flair = simulate(3, 5, SMALL, kinds=("flair",))
    assert flair.image_DHW.tobytes() == every.images_DHW["FLAIR"].tobytes()


@pytest.mark.parametrize("other", [(3, 6), (4, 5)])
def test_other_seeds_and_numbers_differ(other):
    a, b = simulate(3, 5, SMALL), simulate(*other, SMALL)
    assert np.abs(a.image_DHW - b.image_DHW).mean() > 0.01
    assert 0.7 < dice(a.labels_DHW > 0, b.labels_DHW > 0) < 0.995


def test_the_same_anatomy_at_any_resolution():
    for index in range(2):
        coarse, fine = (
            simulate(0, index, SMALL, healthy_fraction=0.0),
            simulate(0, index, (64,) * 3, healthy_fraction=0.0),
        )
        blocks = fine.labels_DHW.reshape(32, 2, 32, 2, 32, 2)
        assert dice((blocks > 0).mean(axis=(1, 3, 5)) >= 0.5, coarse.labels_DHW > 0) > 0.97
        if (fine.labels_DHW == TUMOUR).sum() > 400:
            assert dice((blocks == TUMOUR).mean(axis=(1, 3, 5)) >= 0.5, coarse.labels_DHW == TUMOUR) > 0.85
        shrunk = fine.image_DHW.reshape(32, 2, 32, 2, 32, 2).mean(axis=(1, 3, 5))
        assert np.corrcoef(shrunk.ravel(), coarse.image_DHW.ravel())[0, 1] > 0.97


def test_whole_brains_inside_the_field_of_view():
    for index in range(6):
        drawn = simulate(11, index, SMALL)
        assert drawn.image_DHW.dtype == np.float32 and drawn.labels_DHW.dtype == np.uint8
        assert drawn.image_DHW.min() == 0.0 and 0.5 < drawn.image_DHW.max() <= 1.0
        assert set(np.unique(drawn.labels_DHW)) <= {0, BRAIN, TUMOUR}
        assert 1000 < (drawn.labels_DHW > 0).sum() * 6.0**3 / 1000 < 1900
        for axis in range(3):
            assert not np.take(drawn.labels_DHW, [0, -1], axis).any(), "the brain touches the field of view's edge"


def test_lesion_volumes_are_log_uniform():
    rng = np.random.Generator(np.random.Philox(1))
    lesions = [t for _ in range(400) for t in draw_phenotype(rng, 0.0).tumours]
    # The radius is in MNI space, about a tenth larger than the subject's.
    logs = np.log([4 / 3000 * np.pi * t.radius_mm**3 for t in lesions])
    share = [np.mean(logs < np.log(0.2) + f * np.log(300)) for f in (0.25, 0.5, 0.75)]
    assert 1.1 < len(lesions) / 400 < 1.3
    assert np.allclose(share, (0.2, 0.45, 0.7), atol=0.09)
    assert all(abs(np.linalg.det(t.shape) - 1) < 1e-9 for t in lesions)


def test_drawn_lesions_have_their_volume():
    """The volume in the labels is near the one that was drawn, except where the brain ends."""
    ratios = []
    for index in range(6):
        drawn = simulate(5, index, (64, 64, 64), healthy_fraction=0.0)
        rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([5, index, 2]).spawn(2)[0]))
        who = draw_phenotype(rng, 0.0)
        scale = np.linalg.det(who.linear)
        expected = sum(4 / 3000 * np.pi * t.radius_mm**3 for t in who.tumours) / scale
        actual = (drawn.labels_DHW == TUMOUR).sum() * 3.0**3 / 1000
        ratios.append(actual / expected)
        assert 0.1 < actual < 130
    assert 0.7 < np.median(ratios) < 1.3, ratios


def test_lesions_have_parts_and_the_contrast_of_their_kind():
    drawn, well = (simulate(0, 4, (64,) * 3, kinds=KINDS, healthy_fraction=f) for f in (0.0, 1.0))
    tumour = drawn.labels_DHW == TUMOUR
    change = {k: (drawn.images_DHW[k] - well.images_DHW[k])[tumour] for k in KINDS}
    assert change["T1w"].mean() < -0.05 and change["FLAIR"].mean() > 0.05 and change["T2w"].mean() > 0.05
    assert change["T1ce"].max() > 0.2 and change["T1ce"].min() < -0.1  # a bright rim, a dark core
    from scipy.ndimage import binary_dilation

    shell = binary_dilation(tumour, iterations=2) & ~tumour & (drawn.labels_DHW == BRAIN)
    assert (drawn.images_DHW["FLAIR"] - well.images_DHW["FLAIR"])[shell].mean() > 0.02  # oedema


def test_grey_matter_is_between_fluid_and_white_matter():
    order = {kind: sorted(("fluid", "grey", "white"), key=signals(kind).__getitem__) for kind in KINDS}
    assert order["T1w"] == order["T1ce"] == ["fluid", "grey", "white"]
    assert order["T2w"] == ["white", "grey", "fluid"] and order["FLAIR"] == ["fluid", "white", "grey"]
    assert signals("FLAIR")["fluid"] < 0.02 * signals("FLAIR")["white"]
    assert signals("T1ce")["rim"] > 1.2 * signals("T1ce")["white"] > signals("T1w")["rim"]
    with pytest.raises(InputError, match="not PDw"):
        signals("PDw")
    assert all(tissue.source for tissue in TISSUES.values())


def test_the_equations_of_the_sequences():
    tissue = TISSUES["white"]
    long = Sequence(repetition=1e6, echo=0.0)
    assert np.isclose(long.signal(tissue), tissue.density)
    assert np.isclose(Sequence(repetition=1e6, echo=tissue.t2).signal(tissue), tissue.density / np.e)
    assert np.isclose(Sequence(repetition=tissue.t1, echo=0.0).signal(tissue), tissue.density * (1 - 1 / np.e))
    null = Sequence(repetition=1e6, echo=0.0, inversion=tissue.t1 * np.log(2))
    assert null.signal(tissue) < 1e-9
    # The Ernst angle gives a spoiled gradient echo its largest signal.
    best = np.degrees(np.arccos(np.exp(-SEQUENCES["T1w"].repetition / tissue.t1)))
    of = [Sequence(repetition=18, echo=0.0, flip=f).signal(tissue) for f in (best - 3, best, best + 3)]
    assert of[1] > of[0] and of[1] > of[2]


def test_fields_are_those_of_numpy():
    rng = np.random.Generator(np.random.Philox(2))
    field = draw_phenotype(rng, 1.0).warps[1]
    axes = [np.linspace(-80, 80, n) for n in (5, 6, 7)]
    values = field_values(field, axes, torch.device("cpu")).numpy()
    assert np.allclose(values, field.at(*axes), atol=1e-5)


@pytest.mark.parametrize("bad", [{"size": (0, 8, 8)}, {"seed": -1}, {"index": -1}, {"healthy_fraction": 1.5}])
def test_invalid_arguments(bad):
    with pytest.raises(InputError):
        simulate(**{"seed": 0, "index": 0, "size": (8, 8, 8), **bad})


def test_versions_and_kinds():
    with pytest.raises(InputError, match="choose from 1, 2"):
        simulated_subject(3, 0, 0, SMALL)
    with pytest.raises(InputError, match="--cohort-version 2"):
        simulated_subject(1, 0, 0, SMALL, kinds=("T2w",))
    assert simulated_subject(2, 0, 0, SMALL, kinds=("T2w",)).kinds == ("T2w",)


@pytest.mark.slow
def test_a_source_of_four_kinds():
    from dataclasses import replace

    contract = replace(cohort_contract(SMALL), images=("T1w", "T1ce", "T2w", "FLAIR"))
    source = CohortSource(contract, 0, 4, version=2)
    image, cond = source[1]
    assert image.shape == (4, *SMALL) and cond.shape == (2, *SMALL)
    drawn = simulate(0, 1, SMALL, kinds=KINDS)
    assert np.corrcoef(image[2].ravel(), drawn.images_DHW["T2w"].ravel())[0, 1] > 0.9999
    source.warm(2, first=2)
    assert source.cached == 3 and source[3][0].tobytes() == CohortSource(contract, 0, 4, version=2)[3][0].tobytes()
    with pytest.raises(InputError, match="one T1w image"):
        CohortSource(contract, 0, 4)


@pytest.mark.slow
def test_a_machine_without_nilearn_simulates_from_the_template_file(tmp_path, monkeypatch):
    file = atlases.write_template(tmp_path / "template.safetensors")
    monkeypatch.setenv("VOXTUNE_TEMPLATE", str(file))
    packed = [tmp_path / "bare.npz", tmp_path / "here.npz"]
    arguments = ["pack", "--cohort", "2", "--held-out", "1", "--cohort-version", "2", "--size", "16,16,16", "--quiet"]
    done = voxtune_bare(*arguments, "-o", packed[0])
    assert done.returncode == 0, done.stderr
    monkeypatch.delenv("VOXTUNE_TEMPLATE")
    from voxtune.cli.main import main

    assert main([*arguments, "-o", str(packed[1])]) == 0
    bare, here = (np.load(path) for path in packed)
    assert (bare["labels"] == here["labels"]).all() and (bare["images"] == here["images"]).all()


def test_the_template_file_gives_the_same_atlas(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_TEMPLATE", str(atlases.write_template(tmp_path / "template.safetensors")))
    stored, here = atlases.atlas.__wrapped__(), atlases.atlas()
    assert torch.equal(stored.maps, here.maps) and (stored.sites == here.sites).all()
    assert np.allclose(stored.origin, here.origin)


def test_damaged_template(tmp_path, monkeypatch):
    from voxtune.files import writing
    from voxtune.tensorfiles import save_safetensors

    file = tmp_path / "other.safetensors"
    with writing(file) as part:
        save_safetensors(part, {"grey": torch.zeros(2, 2, 2)}, {})
    monkeypatch.setenv("VOXTUNE_TEMPLATE", str(file))
    with pytest.raises(InputError, match="not a template"):
        atlases.atlas.__wrapped__()
