"""Checks of masks and pairs: each problem is one finding with the name of the file and the values."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.factories.contracts import BRATS, WHOLE_HEAD
from tests.factories.nifti import oriented_affine, save, volume
from voxtune.data.preflight import NEW_MODEL, Report, check_lost_labels, check_mask, check_pair
from voxtune.errors import InputError, command_options


def mask(*values, shape=(4, 4, 4), dtype=np.int32):
    array = np.zeros(shape, dtype)
    array.ravel()[: len(values)] = values
    return array


def only(report: Report, level: str, code: str) -> str:
    assert [(f.level, f.code) for f in report.findings] == [(level, code)]
    return report.findings[0].message


def test_good_mask_has_no_findings():
    assert check_mask(volume(mask(1, 2)), WHOLE_HEAD) == Report()


def test_missing_label_is_a_warning_with_its_name():
    report = check_mask(volume(mask(1)), WHOLE_HEAD)
    message = only(report, "warning", "missing-label")
    assert "2 (tumour)" in message and "the mask has 0, 1, the model" in message and report.ok
    report.raise_errors()


def test_each_missing_label_has_a_warning():
    report = check_mask(volume(mask(4)), BRATS, stated=True)
    assert len(report.warnings) == 3 and report.ok


@pytest.mark.parametrize("values", [(1, 2, 4), (1, 4), (4,)])
def test_masks_with_two_readings_are_refused_with_both(values):
    with command_options(["--labels"]):
        message = only(check_mask(volume(mask(*values)), BRATS), "error", "ambiguous")
    assert "BraTS 2021 (4 = enhancing tumour, no brain label)" in message
    assert "the model's own labels without 3 (enhancing tumour), 4 = brain" in message
    assert "--labels brats2021 or --labels model" in message and "\n" not in message
    assert check_mask(volume(mask(*values)), BRATS, stated=True).ok
    other = replace(BRATS, labels=tuple(replace(label, name=f"part {label.value}") for label in BRATS.labels))
    assert check_mask(volume(mask(*values)), other).ok, "the contract's 4 is no organ"


def test_masks_without_the_organ_are_refused_with_the_fix():
    with command_options(["--labels"]):
        message = only(check_mask(volume(mask(1, 2, 3)), BRATS), "error", "missing-organ")
        whole_head = only(check_mask(volume(mask(2)), WHOLE_HEAD), "error", "missing-organ")
    assert "4 (brain) is not in the mask" in message and "--labels brats, or accept" in message
    assert '--labels "head=image; tumour=2"' in whole_head
    with command_options(["--labels", "--images"]):
        new = only(check_mask(volume(mask(2)), WHOLE_HEAD, NEW_MODEL), "error", "missing-organ")
        stated = only(check_mask(volume(mask(2)), WHOLE_HEAD, stated=True), "error", "missing-organ")
    assert new.endswith('with --labels "head=image; tumour=2"')
    assert stated.endswith("--images DIR, or accept the mask with head=none in --labels")
    accepted = check_mask(volume(mask(2)), WHOLE_HEAD, organ_may_miss=True)
    assert "1 (head)" in only(accepted, "warning", "missing-label")


def test_unknown_label_lists_the_labels_of_mask_and_model():
    with command_options(["--labels"]):
        message = only(check_mask(volume(mask(1, 2, 7)), WHOLE_HEAD), "error", "unknown-label")
    assert "unknown label 7" in message and "the mask has 0, 1, 2, 7" in message and "1 (head), 2 (tumour)" in message
    assert '--labels "head=...; tumour=...; background=..."' in message


def test_many_unknown_labels_stay_one_short_line():
    report = check_mask(volume(np.arange(64, dtype=np.int32).reshape(4, 4, 4)), WHOLE_HEAD)
    assert "and 53 more" in report.errors[0].message and "\n" not in report.errors[0].message


def test_other_numbering_is_an_error():
    only(check_mask(volume(mask(10, 11)), WHOLE_HEAD), "error", "unknown-label")


def test_empty_mask():
    assert "empty" in only(check_mask(volume(mask()), WHOLE_HEAD), "error", "empty")


@pytest.mark.parametrize("shape", [(4, 4), (4, 4, 4, 2), (0, 4, 4)])
def test_wrong_dimension(shape):
    only(check_mask(volume(np.ones(shape)), WHOLE_HEAD), "error", "dimension")


def test_nan_and_fractions():
    only(check_mask(volume(mask(1, np.nan, dtype=np.float64)), WHOLE_HEAD), "error", "nan")
    assert "0.5" in only(check_mask(volume(mask(1, 0.5, dtype=np.float64)), WHOLE_HEAD), "error", "values")


@pytest.mark.parametrize("affine", [np.full((4, 4), np.inf), np.zeros((4, 4)), np.diag([1.0, np.nan, 1.0, 1.0])])
def test_bad_affine(affine):
    only(check_mask(volume(mask(1, 2), affine), WHOLE_HEAD), "error", "affine")


def test_file_that_cannot_be_read_is_a_finding(tmp_path):
    assert "gone.nii" in only(check_mask(tmp_path / "gone.nii", WHOLE_HEAD), "error", "unreadable")
    assert check_mask(save(tmp_path / "ok.nii", mask(1, 2, dtype=np.uint8)), WHOLE_HEAD).ok


def test_raise_errors_gives_all_messages_on_one_line():
    findings = check_mask(volume(mask(9)), WHOLE_HEAD) + check_mask(volume(mask()), WHOLE_HEAD)
    with pytest.raises(InputError, match=r"unknown label.*the mask is empty") as caught:
        findings.raise_errors()
    assert "\n" not in str(caught.value)


def test_report_as_json():
    data = json.loads(json.dumps(check_mask(volume(mask(1)), WHOLE_HEAD).to_dict()))
    assert data["ok"] is True and data["findings"][0]["code"] == "missing-label"


def test_pairs_on_the_same_grid():
    affine = oriented_affine("LPS", (1, 2, 3))
    nudged = affine + 1e-5
    assert check_pair(volume(mask(), affine), volume(mask(), nudged)) == Report()


def test_pairs_that_differ():
    other_shape = volume(mask(shape=(4, 4, 5)))
    only(check_pair(other_shape, volume(mask())), "error", "pair-shape")
    for code, spacing in (("LAS", (1, 1, 1)), ("RAS", (1.1, 1, 1))):
        moved = volume(mask(), oriented_affine(code, spacing))
        only(check_pair(moved, volume(mask(), oriented_affine("RAS"))), "error", "pair-affine")


def test_label_lost_in_resampling_gives_a_warning():
    message = only(check_lost_labels(mask(1, 2), mask(1), WHOLE_HEAD, "m.nii"), "warning", "lost-label")
    assert "2 (tumour)" in message
