"""`Model.draw`: the same voxels as the files of `voxtune sample`, in memory; and values that it refuses."""

from __future__ import annotations

import io
import warnings
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from PIL import Image

from tests.factories.brats import write_brats
from tests.factories.cli import run
from tests.factories.nifti import oriented_affine, write_mask
from voxtune.data.cohort import cohort_contract
from voxtune.data.contract import DataContract, Label
from voxtune.data.grid import fit
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.data.orientation import axis_codes
from voxtune.errors import InputError
from voxtune.runtime.model import Model, ModelConfig, SamplingConfig
from voxtune.runtime.storage import demo_model, load, save
from voxtune.workloads import MedDDPMConfig

SAMPLING = SamplingConfig(sampler="ddim", steps=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    contract = cohort_contract((16, 16, 16))
    network = MedDDPMConfig(base=32, multipliers=(1, 1), attention=())
    model = Model(ModelConfig(network=network, size=contract.size, data=contract, sampling=SAMPLING))
    return save(model, tmp_path_factory.mktemp("model") / "tiny", card="A tiny model.")


@pytest.fixture(scope="module")
def model(folder):
    return load(folder)


@pytest.fixture
def mask(tmp_path):
    return write_mask(tmp_path / "sub-01_dseg.nii.gz", affine=oriented_affine("LPI", (12.0, 11.0, 13.0)))


def written(capsys, folder: Path, mask: Path, out: Path, *options: object) -> Path:
    exact = ("--device", "cpu", "--batch", 1, "--plan", "baseline")
    code, _, err = run(capsys, "sample", folder, "--mask", mask, "-o", out, *exact, *options)
    assert code == 0, err
    [file] = out.rglob("*_T1w.nii.gz")
    return file


def test_draw_equals_the_file_of_the_command(capsys, folder, model, mask, tmp_path):
    file = written(capsys, folder, mask, tmp_path / "out", "--seed", 7)
    volume = model.draw(mask, seed=7)
    np.testing.assert_array_equal(volume.array, read_volume(file).array)
    np.testing.assert_array_equal(volume.affine, nib.load(file).affine)
    assert volume.array.min() >= 0 and volume.array.max() <= 1 and volume.array.std() > 0.01
    saved = volume.save(tmp_path / "mine.nii.gz")
    assert saved.read_bytes() == file.read_bytes(), "the same file, header included"
    with pytest.raises(InputError, match=r"mine.nii.gz: already exists; .* or pass overwrite=True to replace it"):
        volume.save(saved)
    assert volume.save(saved, overwrite=True) == saved


def test_options_are_those_of_the_command(capsys, folder, model, mask, tmp_path):
    options = ("--steps", 3, "--sampler", "sde-dpm++", "--fit", "pad", "--size", "8,16,12", "--no-clip")
    file = written(capsys, folder, mask, tmp_path / "out", *options)
    volume = model.draw(mask, steps=3, sampler="sde-dpm++", fit="pad", size=(8, 16, 12), clip=False)
    np.testing.assert_array_equal(volume.array, read_volume(file).array)
    assert not np.array_equal(volume.array, model.draw(mask, steps=3, sampler="sde-dpm++").array)


def test_a_file_a_volume_and_an_array_give_the_same(model, mask):
    from_file, volume = model.draw(mask, seed=1), read_labels(mask)
    np.testing.assert_array_equal(model.draw(str(mask), seed=1).array, from_file.array)
    np.testing.assert_array_equal(model.draw(volume, seed=1).array, from_file.array)
    for array in (volume.array, volume.array.astype(np.float32)):
        np.testing.assert_array_equal(
            model.draw(Volume(array=array, affine=volume.affine, path=mask), seed=1).array, from_file.array
        )
    in_memory = model.draw(volume.array, volume.affine, seed=1)
    for other in (torch.from_numpy(volume.array), torch.from_numpy(volume.array).to(torch.bfloat16)):
        np.testing.assert_array_equal(model.draw(other, volume.affine, seed=1).array, in_memory.array)
    of_nibabel = model.draw(nib.load(mask), seed=1)
    np.testing.assert_array_equal(of_nibabel.array, in_memory.array)
    assert of_nibabel.header is not None
    assert in_memory.shape == from_file.shape and in_memory.header is None
    np.testing.assert_array_equal(in_memory.affine, from_file.affine)
    np.testing.assert_array_equal(in_memory.array, model.draw(volume.array, volume.affine, seed=1).array)


def test_pictures_show_the_lesion(model, mask):
    volume = model.draw(mask)
    labels = read_labels(mask).array
    assert labels[volume.centre] == 2
    png = Image.open(io.BytesIO(volume._repr_png_()))
    assert png.format == "PNG" and max(png.size) == 256
    assert volume.kind == "T1w" and repr(volume).startswith(
        "Volume(T1w, 14 x 17 x 11, 12 x 11 x 13 mm, LPI, intensities 0"
    )


def test_a_mask_unlike_the_training_data_is_logged(folder, mask, caplog):
    model = load(folder)
    model.draw(mask)
    assert "training data" not in caplog.text
    statistics = load(demo_model()).config.training_data
    model.config = replace(model.config, training_data=statistics)
    model.draw(mask)
    assert caplog.text.count("sub-01_dseg.nii.gz: the mask is far outside the training data of this model: ") == 1
    assert "labels of 72 mm in depth (training: 129 to" in caplog.text


def test_warnings_of_the_mask_are_logged(model, tmp_path, caplog):
    model.draw(write_mask(tmp_path / "healthy.nii.gz", values=(0, 1, 1)), steps=1)
    assert "tumour" in caplog.text


def test_oblique_and_unusual_masks_are_announced(model, tmp_path, caplog):
    affine = oriented_affine("RAS", (12.0, 12.0, 12.0))
    angle = np.deg2rad(12)
    turn = np.eye(4)
    turn[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    model.draw(write_mask(tmp_path / "oblique.nii.gz", affine=turn @ affine), steps=1)
    assert "oblique" in caplog.text
    caplog.clear()
    trained = load("demo").config.training_data
    unusual = Model(replace(model.config, training_data=trained), model.network)
    unusual.draw(write_mask(tmp_path / "small.nii.gz", affine=oriented_affine("RAS", (4.0, 4.0, 4.0))), steps=1)
    assert "small.nii.gz" in caplog.text and "training data" in caplog.text


def test_a_model_of_several_images(mask):
    labels = (Label(name="brain", value=1, channel=0), Label(name="tumour", value=2, channel=1))
    contract = DataContract(
        size=(16, 16, 16), spacing=(12.0,) * 3, orientation="RAS", labels=labels, images=("T1w", "FLAIR")
    )
    network = MedDDPMConfig(base=32, multipliers=(1, 1), attention=(), in_channels=4, out_channels=2)
    model = Model(ModelConfig(network=network, size=contract.size, data=contract, sampling=SAMPLING))
    with pytest.raises(InputError, match=r"2 images \(T1w, FLAIR\); use draw_images"):
        model.draw(mask)
    drawn = model.draw_images(mask)
    assert list(drawn) == ["T1w", "FLAIR"]
    assert [volume.kind for volume in drawn.values()] == ["T1w", "FLAIR"]
    assert not np.array_equal(drawn["T1w"].array, drawn["FLAIR"].array)


def test_draw_images_of_a_model_of_one_image(model, mask):
    assert list(model.draw_images(mask)) == ["T1w"]
    np.testing.assert_array_equal(model.draw_images(mask)["T1w"].array, model.draw(mask).array)


@pytest.mark.parametrize("code", ["RAS", "LPS", "SAR"])
def test_the_example_is_on_the_models_grid(model, code):
    contract = replace(model.config.data, orientation=code, size=(16, 20, 24), spacing=(12.0, 9.0, 7.0))
    example = Model(replace(model.config, data=contract, size=contract.size), model.network).example_labels()
    assert example.shape == (24, 20, 16)
    np.testing.assert_allclose(example.spacing, (7, 9, 12))
    assert axis_codes(example.affine) == code
    np.testing.assert_allclose(example.affine @ [11.5, 9.5, 7.5, 1], [0, 0, 0, 1], atol=1e-12)
    placed = fit(example, contract)
    np.testing.assert_array_equal(placed.apply(example.array, label=True).transpose(2, 1, 0), example.array)


def test_the_example_draws(model):
    assert model.draw(model.example_labels(), steps=1).shape == (16, 16, 16)


ARRAY, AFFINE = np.ones((8, 8, 8), np.uint8), np.diag([20.0, 20.0, 20.0, 1.0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mask": "no-such-file.nii.gz"}, "no such file"),
        ({"mask": "mask.txt"}, "file name must end in"),
        ({"mask": ""}, "not a path"),
        (
            {"mask": 5},
            "expected a NIfTI file, a Volume, an image of nibabel, or an array or a tensor with its affine, got int",
        ),
        ({"mask": None}, "got NoneType"),
        ({"mask": torch.ones(8, 8, 8)}, "missing affine"),
        ({"mask": [[[1]]], "affine": AFFINE}, "mask: expected .* got list"),
        ({"mask": torch.ones(8, 8, 8).to_sparse(), "affine": AFFINE}, "cannot be a mask"),
        ({"image": ARRAY}, "image: expected a NIfTI file, a Volume or an image of nibabel.* got ndarray"),
        ({"image": Volume(array=ARRAY, affine=np.eye(3))}, r"shape \(3, 3\), expected \(4, 4\)"),
        ({"mask": nib.Nifti1Image(ARRAY, AFFINE), "affine": AFFINE}, "omit it"),
        ({"mask": ARRAY}, "missing affine"),
        ({"mask": ARRAY, "affine": "RAS"}, "affine"),
        ({"mask": ARRAY, "affine": np.eye(3)}, r"the affine has shape \(3, 3\), expected \(4, 4\)"),
        ({"mask": ARRAY, "affine": np.zeros((4, 4))}, "affine is singular"),
        ({"mask": ARRAY[0], "affine": AFFINE}, "not a 3D volume of numbers"),
        ({"mask": np.zeros((0, 8, 8)), "affine": AFFINE}, "not a 3D volume of numbers"),
        ({"mask": ARRAY.astype("U1"), "affine": AFFINE}, "not a 3D volume of numbers"),
        ({"mask": ARRAY * 0.5, "affine": AFFINE}, "must contain integers"),
        ({"mask": ARRAY * 0, "affine": AFFINE}, "empty"),
        ({"mask": ARRAY * 7, "affine": AFFINE}, "unknown label 7"),
        ({"mask": Volume(array=ARRAY, affine=AFFINE), "affine": AFFINE}, "omit it"),
        ({"mask": Volume(array=ARRAY, affine="RAS")}, "affine"),  # type: ignore[arg-type]
        ({"seed": -1}, "seed must be a whole number"),
        ({"seed": True}, "seed must be a whole number"),
        ({"seed": "7"}, "seed must be a whole number"),
        ({"steps": "ten"}, "whole number or 'auto'"),
        ({"steps": 0}, "at least 1"),
        ({"steps": True}, "whole number"),
        ({"steps": 10**6}, "1 to 250"),
        ({"sampler": []}, "unknown sampler"),
        ({"clip": "yes"}, "clip must be True or False"),
        ({"fit": "stretch"}, "unknown mode"),
        ({"size": 16}, "size"),
        ({"size": (16, 16)}, "3 dimensions"),
        ({"size": (17, 16, 16)}, "multiple of"),
        ({"progress": "bar"}, "progress"),
    ],
)
def test_invalid_values(model, arguments, message):
    with pytest.raises(InputError, match=message) as caught:
        model.draw(**{"mask": ARRAY, **({"affine": AFFINE} if "mask" not in arguments else {}), **arguments})
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_settings_without_evidence_are_logged(model, caplog):
    model.draw(ARRAY, AFFINE, steps=2)
    assert "measured" not in caplog.text
    model.draw(ARRAY, AFFINE, steps=2, cache=2)
    assert "cache 2 was not measured for this model" in caplog.text


def test_every_whole_number_is_a_seed(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        drawn = [model.draw(ARRAY, AFFINE, steps=1, seed=seed).array for seed in (3, np.int64(3))]
    np.testing.assert_array_equal(*drawn)


def test_a_model_without_masks_draws_no_volumes(tmp_path):
    from voxtune.runtime.model import workload_config

    model = Model(workload_config("convnext"))
    with pytest.raises(InputError, match="no data contract"):
        model.draw(ARRAY, AFFINE)


def test_images_beside_the_masks_are_not_masks(capsys, folder, tmp_path):
    data = tmp_path / "data" / "case_1"
    data.mkdir(parents=True)
    write_mask(data / "case_1_seg.nii.gz")
    write_mask(data / "case_1_t1.nii.gz")
    code, out, err = run(capsys, "sample", folder, "--mask", data.parent, "-o", tmp_path / "out", "--steps", 1)
    assert code == 0, err
    assert "case_1_seg" in out and "case_1_t1" not in out


@pytest.fixture(scope="module")
def brats(tmp_path_factory):
    """A model of the labels of BraTS, and a case whose mask has 1, 2 and 4."""
    torch.manual_seed(0)
    names = ("necrotic core", "oedema", "enhancing tumour", "brain")
    labels = tuple(Label(name=name, value=i + 1, channel=i) for i, name in enumerate(names))
    contract = DataContract(size=(16, 16, 16), spacing=(12.0,) * 3, orientation="LPS", labels=labels)
    network = MedDDPMConfig(base=32, multipliers=(1, 1), attention=(), in_channels=5)
    model = Model(ModelConfig(network=network, size=contract.size, data=contract, sampling=SAMPLING))
    root = tmp_path_factory.mktemp("brats")
    save(model, root / "model", card="A tiny model.")
    write_brats(root / "data", 1)
    return root


def test_labels_and_the_image_of_the_brain(capsys, brats, tmp_path):
    model, case = load(brats / "model"), brats / "data" / "BraTS2021_00000"
    mask, image = case / "BraTS2021_00000_seg.nii.gz", case / "BraTS2021_00000_t1.nii.gz"
    for arguments in ({}, {"labels": "brats2021"}, {"labels": "brats", "image": image}):
        with pytest.raises(InputError, match="BraTS2021_00000_seg"):
            model.draw(mask, **arguments)
    file = written(
        capsys, brats / "model", case.parent, tmp_path / "out", "--labels", "brats2021", "--images", case.parent
    )
    expected = read_volume(file).array
    np.testing.assert_array_equal(model.draw(mask, labels="brats2021", image=image).array, expected)
    np.testing.assert_array_equal(model.draw(mask, labels="brats2021", image=read_volume(image)).array, expected)
    in_nibabel = model.draw(read_labels(mask), labels="brats2021", image=nib.load(image))
    np.testing.assert_array_equal(in_nibabel.array, expected)
    loaded = read_labels(mask)
    np.testing.assert_array_equal(model.draw(loaded, labels="brats2021", image=image).array, expected)
    with pytest.raises(InputError, match="labels"):
        model.draw(mask, labels=4)
    with pytest.raises(InputError, match="image"):
        model.draw(mask, labels="brats2021", image=5)
