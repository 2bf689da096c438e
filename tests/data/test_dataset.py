"""Sources of training subjects: scaled images and encoded masks on the contract's grid, from folders or the cohort."""

from __future__ import annotations

import dataclasses
import os
import pickle
import time
from functools import partial

import numpy as np
import pytest

from tests.factories.contracts import BRATS
from tests.factories.nifti import oriented_affine, save
from voxtune.data import dataset
from voxtune.data.bids import write_cohort
from voxtune.data.cohort import cohort_contract, subject
from voxtune.data.contract import DataContract, generic_contract
from voxtune.data.dataset import CohortSource, PairedFolders, map_in_processes
from voxtune.errors import InputError

SIZE = (16, 16, 16)
CONTRACT = cohort_contract(SIZE)


@pytest.fixture
def cohort(tmp_path):
    write_cohort(tmp_path / "c", 3, 7, SIZE)
    return tmp_path / "c"


def check_item(item, contract: DataContract):
    image, cond = item
    assert image.shape == (len(contract.images), *contract.size) and image.dtype == np.float32
    assert cond.shape == (len(contract.labels), *contract.size) and cond.dtype == np.float32
    assert image.min() == -1.0 and image.max() == 1.0


def test_cohort_and_its_files_are_the_same_source(cohort):
    simulated = CohortSource(CONTRACT, seed=7, count=3)
    read = PairedFolders(CONTRACT, cohort, cohort / "derivatives")
    assert len(simulated) == len(read) == 3 and read.check().ok
    for i in range(3):
        check_item(simulated[i], CONTRACT)
        assert np.array_equal(simulated[i][1], read[i][1])
        assert np.abs(simulated[i][0] - read[i][0]).max() < 0.005


def test_cohort_source_matches_the_subject():
    image, cond = CohortSource(CONTRACT, seed=7, count=1)[0]
    expected = subject(7, 0, SIZE)
    assert np.array_equal(cond[1] > 0, expected.labels_DHW == 2)
    assert np.array_equal(cond[0] > 0, expected.labels_DHW == 1)
    assert np.corrcoef(image.ravel(), expected.image_DHW.ravel())[0, 1] > 0.9999


@pytest.mark.parametrize("orientation", ["LPS", "SAR", "PIR"])
def test_cohort_in_another_orientation(orientation):
    size = (20, 22, 24)
    contract = dataclasses.replace(CONTRACT, size=size, spacing=(12.0,) * 3, orientation=orientation)
    image, cond = CohortSource(contract, seed=7, count=1)[0]
    check_item((image, cond), contract)
    assert (cond[0] > 0).sum() > 100


def test_changing_an_item_does_not_change_the_source():
    source = CohortSource(CONTRACT, seed=7, count=1)
    image, _ = source[0]
    image[:] = 0
    assert source[0][0].min() == -1.0


def test_the_cache_stays_below_its_limit(monkeypatch):
    one = 16**3 * 5
    source = CohortSource(CONTRACT, seed=7, count=3, cache_bytes=2 * one)
    before = [source[i][0] for i in range(3)]
    assert source._cache.bytes == 2 * one
    calls = []
    monkeypatch.setattr("voxtune.data.simulation.subject", lambda *a, **k: calls.append(a[1]) or subject(*a, **k))
    assert all(np.array_equal(source[i][0], before[i]) for i in range(3)) and calls == [2]


def test_index_out_of_range():
    source = CohortSource(CONTRACT, seed=7, count=2)
    for index in (2, -1):
        with pytest.raises(IndexError):
            source[index]


@pytest.mark.parametrize(
    ("contract", "message"),
    [
        (BRATS, "use your own images and masks"),
        (dataclasses.replace(CONTRACT, spacing=(1.0, 1.0, 1.0)), "spacing to 12 mm"),
        (dataclasses.replace(CONTRACT, spacing=(12.0, 13.0, 12.0)), "isotropic voxels"),
    ],
)
def test_contracts_that_the_cohort_does_not_support(contract, message):
    with pytest.raises(InputError, match=message):
        CohortSource(contract, seed=0, count=1)


def test_missing_and_damaged_files_are_named(cohort):
    source = PairedFolders(CONTRACT, cohort, cohort / "derivatives", cache_bytes=0)
    source[0]
    source.pairs[0].images[0].unlink()
    with pytest.raises(InputError, match=r"sub-0000_T1w\.nii\.gz: no such file"):
        source[0]
    mask = source.pairs[1].mask
    mask.write_bytes(mask.read_bytes()[:100])
    with pytest.raises(InputError, match=r"sub-0001_dseg\.nii\.gz"):
        source[1]
    assert [f.code for f in source.check().errors] == ["unusable", "unreadable"]


def make_pair(folder, name, image, labels, image_affine, mask_affine):
    folder.mkdir(exist_ok=True)
    save(folder / f"{name}_t1.nii.gz", image.astype(np.float32), image_affine)
    save(folder / f"{name}_seg.nii.gz", labels.astype(np.uint8), mask_affine)


def test_pairs_with_different_affines_are_rejected(tmp_path):
    labels = np.ones((6, 6, 6))
    make_pair(tmp_path, "a", labels, labels, oriented_affine("RAS"), oriented_affine("LAS"))
    source = PairedFolders(generic_contract(1, 1, (8, 8, 8)), tmp_path, tmp_path)
    with pytest.raises(InputError, match="affines differ"):
        source[0]
    assert not source.check().ok


def test_image_and_mask_are_placed_alike(tmp_path):
    """An image that equals its mask is equal to it on the model's grid, too."""
    labels = np.random.default_rng(0).integers(0, 2, (5, 6, 7))
    affine = oriented_affine("PIR")
    make_pair(tmp_path, "a", labels, labels, affine, affine)
    image, cond = PairedFolders(generic_contract(1, 1, (9, 8, 8)), tmp_path, tmp_path)[0]
    assert np.array_equal(image, cond)


def test_size_replaces_that_of_the_contract(tmp_path):
    labels = np.ones((6, 6, 6))
    make_pair(tmp_path, "a", labels, labels, np.eye(4), np.eye(4))
    source = PairedFolders(generic_contract(1, 1, (4, 4, 4)), tmp_path, tmp_path, size=(8, 8, 8))
    assert source[0][0].shape == (1, 8, 8, 8)
    with pytest.raises(InputError, match="extends over 6 voxels"):
        PairedFolders(generic_contract(1, 1, (4, 4, 4)), tmp_path, tmp_path)[0]


def test_four_images(tmp_path):
    contract = dataclasses.replace(BRATS, size=(8, 8, 8))
    labels = np.random.default_rng(0).integers(0, 5, (6, 7, 8)).astype(np.uint8)
    affine = oriented_affine("LPS")
    for i, ending in enumerate(("t1", "t1ce", "t2", "flair")):
        save(tmp_path / f"x_{ending}.nii.gz", (labels == i + 1).astype(np.float32), affine)
    save(tmp_path / "x_seg.nii.gz", labels, affine)
    image, cond = PairedFolders(contract, tmp_path, tmp_path)[0]
    check_item((image, cond), contract)
    assert np.array_equal((image + 1) / 2, cond)


@pytest.mark.slow
def test_subjects_simulated_in_parallel_are_the_same():
    contract = cohort_contract((16, 16, 16))
    serial, parallel = CohortSource(contract, 3, 4), CohortSource(contract, 3, 4)
    parallel.warm(2)
    assert len(parallel._cache._items) == 4
    for i in range(4):
        for a, b in zip(serial[i], parallel[i], strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_cache_is_not_pickled_for_processes():
    source = CohortSource(cohort_contract((16, 16, 16)), 3, 40)
    for index in range(40):
        source._cache.put(index, (np.zeros((1, 16, 16, 16), np.float32), np.zeros((16, 16, 16), np.uint8)))
    assert len(pickle.dumps(source.simulation())) < 2000 < source._cache.bytes


def test_only_subjects_that_fit_into_the_cache_are_simulated_ahead(monkeypatch):
    counts = []
    monkeypatch.setattr(dataset, "map_in_processes", lambda work, count, processes: counts.append(count) or [])
    contract = cohort_contract((16, 16, 16))
    CohortSource(contract, 3, 40, cache_bytes=3 * 5 * 16**3).warm(4)
    CohortSource(contract, 3, 40, cache_bytes=100).warm(4)
    assert counts == [3]


def hang(index: int) -> None:
    time.sleep(600)


@pytest.mark.parametrize(("work", "reason"), [(os._exit, "a process died"), (hang, "timeout")])
def test_a_process_that_dies_or_hangs_gives_a_warning(monkeypatch, work, reason):
    source = CohortSource(cohort_contract((16, 16, 16)), 3, 2)
    monkeypatch.setattr(source, "simulation", lambda: work)
    monkeypatch.setattr(dataset, "map_in_processes", partial(map_in_processes, timeout_s=0.5 if work is hang else 60))
    warnings = []
    start = time.monotonic()
    source.warm(2, warnings.append)
    assert time.monotonic() - start < 60
    assert len(warnings) == 1
    assert reason in warnings[0]
    assert not source._cache._items
