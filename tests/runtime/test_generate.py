"""From mask files to volume files: the geometry is preserved, and invalid input is refused before sampling."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from tests.factories.nifti import write_mask
from voxtune.data.cohort import cohort_contract
from voxtune.errors import FilesError, InputError
from voxtune.runtime.generate import generate, output_names, prepare
from voxtune.runtime.model import Model, ModelConfig, SamplingConfig
from voxtune.runtime.sampling import SamplerSettings
from voxtune.workloads import MedDDPMConfig


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
    record = json.loads((tmp_path / "out" / "sub-1_desc-synth01_T1w.json").read_text())
    assert record["steps"] == 2
    assert record["sampler"] == "ddim"
    # The viewer needs the mask and the names of its labels.
    assert (tmp_path / "out" / record["Sources"][0]).samefile(tmp_path / record["mask"])
    assert set(record["labels"].values()) == {label.name for label in model.config.data.labels}


def test_batch_does_not_change_the_volumes(model, tmp_path):
    masks = [write_mask(tmp_path / f"m{i}.nii.gz") for i in range(3)]
    single = list(generate(model, prepare(model, masks), tmp_path / "a", seed=4))
    batched = list(generate(model, prepare(model, masks), tmp_path / "b", seed=4, batch=3))
    for a, b in zip(single, batched, strict=True):
        np.testing.assert_allclose(a.images_CDHW, b.images_CDHW, atol=1e-5)
    assert np.abs(single[0].images_CDHW - single[1].images_CDHW).max() > 0.01, "every volume has its own noise"


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
    original = type(model).sample

    def sample(self, cond, *, indices, **others):
        return original(self, cond, indices=indices, **others) * (1.0 if list(indices) == [0] else float("nan"))

    monkeypatch.setattr(type(model), "sample", sample)
    with pytest.raises(InputError, match=r"volume 1, for .*m1.nii.gz: not written, because it contains NaN"):
        list(generate(model, prepare(model, masks), tmp_path / "out"))
    assert [f.name for f in (tmp_path / "out").glob("*.nii.gz")] == ["m0_desc-synth01_T1w.nii.gz"]


def test_missing_label_is_a_warning(model, tmp_path):
    [request] = prepare(model, [write_mask(tmp_path / "healthy.nii.gz", values=(0, 1, 1))])
    assert any("tumour" in warning for warning in request.warnings)


def test_existing_volumes_are_not_replaced(model, tmp_path):
    path = write_mask(tmp_path / "m.nii.gz")
    list(generate(model, prepare(model, [path]), tmp_path / "out"))
    with pytest.raises(InputError, match="--overwrite"):
        list(generate(model, prepare(model, [path]), tmp_path / "out"))
    list(generate(model, prepare(model, [path]), tmp_path / "out", overwrite=True))


def test_generic_mask_names_take_the_name_of_the_folder(tmp_path):
    masks = [tmp_path / name / "seg.nii.gz" for name in ("sub-01", "sub-02")]
    assert output_names(masks, ("T1w",)) == [(f"sub-0{n}_desc-synth01_T1w.nii.gz",) for n in (1, 2)]
    with pytest.raises(InputError, match="would overwrite each other"):
        output_names([tmp_path / "a" / "sub-01_dseg.nii.gz", tmp_path / "b" / "sub-01_dseg.nii.gz"], ("T1w",))


def test_output_names(tmp_path):
    masks = [
        tmp_path / "sub-2_dseg.nii.gz",
        tmp_path / "sub-2_dseg.nii.gz",
        tmp_path / "x_seg.nii",
        tmp_path / "y.nii.gz",
    ]
    assert [n[0] for n in output_names(masks, ("T1w", "FLAIR"))] == [
        "sub-2_desc-synth01_T1w.nii.gz",
        "sub-2_desc-synth02_T1w.nii.gz",
        "x_desc-synth01_T1w.nii.gz",
        "y_desc-synth01_T1w.nii.gz",
    ]


@pytest.mark.parametrize(
    "options",
    [
        lambda: {"settings": SamplerSettings(sampler="ddim", steps=10_000)},
        lambda: {"settings": SamplerSettings(sampler="foo", steps=2)},
        lambda: {"seed": -1},
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
