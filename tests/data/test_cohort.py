"""Simulated subjects: reproducible, the same at any resolution, complete brains with labelled lesions."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from voxtune.data import anatomy
from voxtune.data.cohort import BRAIN, TUMOUR, cohort_contract, cohort_spacing, subject
from voxtune.errors import InputError

SMALL = (32, 32, 32)


def dice(a, b):
    return 2.0 * (a & b).sum() / (a.sum() + b.sum())


def test_subjects_are_reproducible():
    first = subject(3, 5, SMALL)
    subject(3, 6, SMALL)
    again = subject(3, 5, SMALL)
    assert first.image_DHW.tobytes() == again.image_DHW.tobytes()
    assert first.labels_DHW.tobytes() == again.labels_DHW.tobytes() and first.id == again.id == "sub-0005"


def test_subjects_are_reproducible_in_another_process():
    code = "from voxtune.data.cohort import subject; import hashlib; s = subject(3, 5, (16, 16, 16));"
    code += "print(hashlib.sha256(s.image_DHW.tobytes() + s.labels_DHW.tobytes()).hexdigest())"
    elsewhere = subprocess.check_output([sys.executable, "-c", code], text=True).strip()
    here = subject(3, 5, (16, 16, 16))
    assert elsewhere == hashlib.sha256(here.image_DHW.tobytes() + here.labels_DHW.tobytes()).hexdigest()


@pytest.mark.parametrize("other", [(3, 6), (4, 5)])
def test_other_seeds_and_numbers_differ(other):
    a, b = subject(3, 5, SMALL), subject(*other, SMALL)
    assert np.abs(a.image_DHW - b.image_DHW).mean() > 0.01
    assert 0.7 < dice(a.labels_DHW > 0, b.labels_DHW > 0) < 0.995


@pytest.mark.parametrize("index", range(4))
def test_the_same_anatomy_at_any_resolution(index):
    coarse, fine = subject(0, index, SMALL), subject(0, index, (64, 64, 64))
    blocks = fine.labels_DHW.reshape(32, 2, 32, 2, 32, 2)
    assert dice((blocks > 0).mean(axis=(1, 3, 5)) >= 0.5, coarse.labels_DHW > 0) > 0.97
    if (fine.labels_DHW == TUMOUR).sum() > 400:
        assert dice((blocks == TUMOUR).mean(axis=(1, 3, 5)) >= 0.5, coarse.labels_DHW == TUMOUR) > 0.85
    shrunk = fine.image_DHW.reshape(32, 2, 32, 2, 32, 2).mean(axis=(1, 3, 5))
    assert np.corrcoef(shrunk.ravel(), coarse.image_DHW.ravel())[0, 1] > 0.98


@pytest.mark.parametrize("size", [SMALL, (20, 26, 22), (48, 32, 40)])
def test_image_labels_and_affine(size):
    drawn = subject(1, 2, size)
    assert drawn.image_DHW.shape == drawn.labels_DHW.shape == size
    assert drawn.image_DHW.dtype == np.float32 and drawn.labels_DHW.dtype == np.uint8
    assert drawn.image_DHW.min() == 0.0 and 0.5 < drawn.image_DHW.max() <= 1.0
    assert set(np.unique(drawn.labels_DHW)) <= {0, BRAIN, TUMOUR}
    assert nib.aff2axcodes(drawn.affine) == ("R", "A", "S")
    assert np.allclose(np.diag(drawn.affine)[:3], cohort_spacing(size))
    assert drawn.image_DHW[drawn.labels_DHW > 0].mean() > 10 * drawn.image_DHW[drawn.labels_DHW == 0].mean()


def test_spacing_at_128_voxels_is_one_and_a_half_millimetres():
    assert cohort_spacing((128, 128, 128)) == 1.5 and cohort_contract((64, 64, 64)).spacing == (3.0, 3.0, 3.0)


def test_whole_brains_with_lesions_inside():
    with_lesion = 0
    for index in range(25):
        labels = subject(11, index, SMALL).labels_DHW
        brain_ml = (labels > 0).sum() * 6.0**3 / 1000
        assert 1100 < brain_ml < 2000
        for axis in range(3):
            assert not np.take(labels, [0, -1], axis).any(), "the brain touches the field of view's edge"
        tumour = labels == TUMOUR
        with_lesion += tumour.any()
        assert tumour.sum() < 0.15 * (labels > 0).sum()
        if tumour.sum() > 3:
            centre = np.argwhere(tumour).mean(axis=0).round().astype(int)
            around = labels[tuple(slice(c - 1, c + 2) for c in centre)]
            assert (around > 0).all()
    assert 17 <= with_lesion <= 25


def test_healthy_fraction():
    assert not (subject(0, 0, SMALL, healthy_fraction=1.0).labels_DHW == TUMOUR).any()
    assert all((subject(0, i, SMALL, healthy_fraction=0.0).labels_DHW == TUMOUR).any() for i in range(6))


def test_lesions_change_the_image():
    sick, healthy = (subject(0, 1, SMALL, healthy_fraction=f) for f in (0.0, 1.0))
    changed = np.abs(sick.image_DHW - healthy.image_DHW)
    tumour = sick.labels_DHW == TUMOUR
    assert changed[tumour].mean() > 5 * changed[(sick.labels_DHW == BRAIN)].mean()


@pytest.mark.parametrize("bad", [{"size": (0, 8, 8)}, {"seed": -1}, {"index": -1}, {"healthy_fraction": 1.5}])
def test_invalid_arguments(bad):
    with pytest.raises(InputError):
        subject(**{"seed": 0, "index": 0, "size": (8, 8, 8), **bad})


def test_missing_nilearn_names_the_package_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'pip install "voxtune\[cohort\]"'):
        anatomy.template.__wrapped__()


def test_nilearn_itself_is_not_imported():
    code = "import sys; from voxtune.data.cohort import subject; subject(0, 0, (8, 8, 8));"
    code += "sys.exit('nilearn' in sys.modules or 'sklearn' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_only_numpy_and_torch_are_required_to_import_the_package():
    for path in Path(anatomy.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names}
            assert roots <= {*sys.stdlib_module_names, "numpy", "torch", "voxtune"}, f"{path.name} imports {roots}"
