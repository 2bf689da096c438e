"""--labels on the commands that read masks: files of BraTS, tables, overlapping labels."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace

import nibabel as nib
import numpy as np
import pytest
import torch

import voxtune
from tests.factories import analytic
from tests.factories.cli import run
from tests.factories.contracts import BRATS
from tests.factories.nifti import save
from voxtune.data.contract import encode_mask
from voxtune.data.labels import MaskReader, parse_labels
from voxtune.data.splits import held_out_folders
from voxtune.data.subjects import unpack
from voxtune.diffusion import DiffusionConfig
from voxtune.errors import InputError
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.storage import load
from voxtune.runtime.storage import save as save_model
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, load_segmenter, save_segmenter
from voxtune.training.folder import read_run
from voxtune.workloads import MedDDPMConfig
from voxtune.workloads.segment import SegmentConfig

SIDE = 16
AFFINE = np.diag([12.0, 12.0, 12.0, 1.0])
OVERLAPPING = "WT=1,2,4; TC=1,4; ET=4"
TINY = ["--base", "32", "--multipliers", "1", "--batch", "2", "--accumulation", "1", "--size", "16,16,16"]
TINY += ["--steps", "2", "--set", "model.diffusion_steps=10", "--set", "tensorboard=false", "--device", "cpu"]


def tumour_mask(subject: int, parts: tuple[int, int, int], brain: int = 0) -> np.ndarray:
    """Oedema around an enhancing ring around necrosis, in values (necrosis, oedema, enhancing); in a brain if it has a value."""
    mask = np.zeros((SIDE,) * 3, np.uint8)
    mask[2:14, 2:14, 2:14] = brain
    low = 4 + subject % 3
    for border, value in enumerate((parts[1], parts[2], parts[0])):
        mask[(slice(low + border, low + 6 - border),) * 3] = value
    return mask


def write_folders(root, parts, *, kinds=("T1w",), subjects=4, brain=0):
    """Skull-stripped images and their masks: root/images, root/masks."""
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    for subject in range(subjects):
        rng = np.random.default_rng(subject)
        mask = tumour_mask(subject, parts, brain)
        inside = np.zeros((SIDE,) * 3, bool)
        inside[2:14, 2:14, 2:14] = True
        save(root / "masks" / f"sub-{subject}_dseg.nii.gz", mask, AFFINE)
        for kind in kinds:
            image = np.where(inside, 50 + 20 * mask + rng.uniform(0, 5, mask.shape), 0).astype(np.float32)
            save(root / "images" / f"sub-{subject}_{kind}.nii.gz", image, AFFINE)
    return root


@pytest.fixture(scope="module")
def brats_model(tmp_path_factory):
    """A tiny network of random weights with the labels and images of BraTS."""
    torch.manual_seed(0)
    contract = replace(BRATS, size=(SIDE,) * 3, spacing=(12.0, 12.0, 12.0))
    network = MedDDPMConfig(in_channels=8, out_channels=4, base=32, blocks=1, multipliers=(1,), attention=())
    folder = tmp_path_factory.mktemp("model") / "brats"
    save_model(Model(ModelConfig(network=network, size=contract.size, data=contract)), folder, card="a test")
    return folder


@pytest.fixture(scope="module")
def brats2021(tmp_path_factory):
    return write_folders(tmp_path_factory.mktemp("brats2021"), (1, 2, 4), kinds=("t1", "t1ce", "t2", "flair"))


def folders(root):
    return ["--images", root / "images", "--masks", root / "masks"]


def sample(capsys, model, root, out, *more):
    arguments = ["--steps", "1", "--batch", "4", "--device", "cpu", "--quiet", *more]
    return run(capsys, "sample", model, "--mask", root / "masks", "-o", out, *arguments)


def sidecars(out):
    return [json.loads(path.read_text()) for path in sorted(out.rglob("sub-*.json"))]


def test_sample_refuses_masks_with_two_readings(capsys, brats_model, brats2021, tmp_path):
    code, _, err = sample(capsys, brats_model, brats2021, tmp_path / "out")
    assert code == 2 and not (tmp_path / "out").exists()
    for part in ("BraTS 2021 (4 = enhancing tumour, no brain label)", "the model's own labels", "4 = brain"):
        assert part in err
    assert "--labels brats2021 or --labels model" in err


def test_sample_with_the_brain_of_the_images(capsys, brats_model, brats2021, tmp_path):
    code, _, err = sample(capsys, brats_model, brats2021, tmp_path / "no", "--labels", "brats2021")
    assert code == 2 and "brain is taken from the subject's image" in err and "--images" in err
    out = tmp_path / "out"
    images = ["--labels", "brats2021", "--images", brats2021 / "images"]
    assert sample(capsys, brats_model, brats2021, out, *images)[0] == 0
    record = sidecars(out)[0]
    assert record["mask_labels"] == {"1": "necrotic core", "2": "oedema", "4": "enhancing tumour", "image": "brain"}
    assert record["labels"] == {"1": "necrotic core", "2": "oedema", "3": "enhancing tumour", "4": "brain"}
    assert [source.rsplit("/", 1)[-1] for source in record["Sources"]] == [
        "sub-0_dseg.nii.gz",
        *(f"sub-0_{kind}.nii.gz" for kind in ("t1", "t1ce", "t2", "flair")),
    ]
    # The same masks with the values of the model give the same volumes.
    own = write_folders(tmp_path / "own", (1, 2, 3), brain=4)
    assert sample(capsys, brats_model, own, tmp_path / "out2")[0] == 0
    first, second = sorted(out.rglob("sub-*.nii.gz")), sorted((tmp_path / "out2").rglob("sub-*.nii.gz"))
    assert len(first) == 16 and [p.name for p in first] == [p.name for p in second]
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(first, second, strict=True))
    assert "mask_labels" not in sidecars(tmp_path / "out2")[0]


def test_sample_with_masks_without_the_brain(capsys, brats_model, tmp_path):
    root = write_folders(tmp_path / "brats2023", (1, 2, 3))
    code, _, err = sample(capsys, brats_model, root, tmp_path / "out")
    assert code == 2 and "4 (brain) is not in the mask" in err and "--labels brats --images DIR" in err
    code, _, err = sample(capsys, brats_model, root, tmp_path / "out", "--labels", "model")
    assert code == 0 and "4 (brain) is not in the mask" in err and "warning" in err
    images = ["--labels", "brats", "--images", root / "images", "--overwrite"]
    assert sample(capsys, brats_model, root, tmp_path / "out", *images)[0] == 0


def test_sample_options_that_do_not_fit(capsys, brats_model, brats2021, tmp_path):
    def refused(*more):
        code, _, err = sample(capsys, brats_model, brats2021, tmp_path / "out", *more)
        assert code == 2
        return err

    assert "no label 'head', only necrotic core, oedema, enhancing tumour, brain" in refused("--labels", "whole-head")
    assert "--images applies to a label that is taken from the image" in refused("--images", brats2021 / "images")
    assert "label 4 is not in --labels" in refused("--labels", "necrotic core=1; oedema=2; brain=image")
    (tmp_path / "empty").mkdir()
    assert "brain is taken from the subject's image" in refused("--labels", "brats2021", "--images", tmp_path / "empty")
    assert "no such folder" in refused("--labels", "brats2021", "--images", tmp_path / "absent")


def test_sample_reads_a_table(capsys, brats_model, brats2021, tmp_path):
    table = tmp_path / "dseg.tsv"
    table.write_text("index\tname\n1\toedema\n2\toedema\n4\tnecrotic core\n9\tbrain\n")
    code, _, err = sample(capsys, brats_model, brats2021, tmp_path / "out", "--labels", table)
    assert code == 2 and "9 (brain)" not in err and "4 (brain) is not in the mask" in err
    table.write_text("index\tname\n1\tbrain\n2\tbrain\n4\tnecrotic core\n")
    assert sample(capsys, brats_model, brats2021, tmp_path / "out", "--labels", table)[0] == 0
    assert sidecars(tmp_path / "out")[0]["mask_labels"] == {"1": "brain", "2": "brain", "4": "necrotic core"}


def test_python_draws_with_labels_and_an_image(brats_model, brats2021, tmp_path):
    model = load(brats_model)
    mask, image = brats2021 / "masks" / "sub-1_dseg.nii.gz", brats2021 / "images" / "sub-1_t1.nii.gz"
    drawn = model.draw_images(mask, labels="brats2021", image=image, steps=1)
    own = save(tmp_path / mask.name, tumour_mask(1, (1, 2, 3), brain=4), AFFINE)
    for name, volume in model.draw_images(own, steps=1).items():
        np.testing.assert_array_equal(drawn[name].array, volume.array)


@pytest.mark.usefixtures("one_thread")
def test_train_and_sample_with_several_values_to_a_channel(capsys, brats2021, tmp_path):
    out = tmp_path / "run"
    labels = "tumour=1,4; oedema=2; brain=image"
    arguments = [*folders(brats2021), "--image", "flair", "--labels", labels, "--sample-every", "0"]
    assert run(capsys, "train", *arguments, "-o", out, *TINY, "--quiet")[0] == 0
    contract = load(out / "model").config.data
    assert contract.channel_values == ((1, 4), (2,), (5,)) and contract.organ.from_image
    assert read_run(out).data.label_map == labels
    assert run(capsys, "train", "--resume", out, "--steps", "3", "--quiet", "--device", "cpu")[0] == 0
    # The files need no option, because the model's labels are theirs; the brain still needs the images.
    code, _, err = sample(capsys, out / "model", brats2021, tmp_path / "volumes")
    assert code == 2 and "--images" in err
    assert sample(capsys, out / "model", brats2021, tmp_path / "volumes", "--images", brats2021 / "images")[0] == 0
    assert sidecars(tmp_path / "volumes")[0]["labels"] == {"1": "tumour", "2": "oedema", "4": "tumour", "5": "brain"}


@pytest.mark.usefixtures("one_thread")
def test_fine_tuning_maps_the_masks_to_the_labels_of_the_model(capsys, brats_model, brats2021, tmp_path):
    start = [*folders(brats2021), "--init", brats_model, "--workload", "med-ddpm", "--sample-every", "0"]
    short = ["--steps", "1", "--batch", "1", "--accumulation", "1", "--device", "cpu", "--set", "tensorboard=false"]
    code, _, err = run(capsys, "train", *start, "-o", tmp_path / "run", *short, "--quiet")
    assert code == 2 and "two readings" in err
    code, _, err = run(capsys, "train", *start, "-o", tmp_path / "run", *short, "--labels", "brain=1")
    assert code == 2 and "label 2, 4 is not in --labels" in err
    code, _, err = run(capsys, "train", *start, "-o", tmp_path / "run", *short, "--labels", "tumour=1")
    assert code == 2 and "no label 'tumour'" in err
    done = run(capsys, "train", *start, "-o", tmp_path / "run", *short, "--labels", "brats2021", "--quiet")
    assert done[0] == 0, done[2]
    assert load(tmp_path / "run" / "model").config.data == load(brats_model).config.data


def test_train_refuses_labels_of_data_that_has_its_own(capsys, tmp_path):
    def refused(*more):
        code, _, err = run(capsys, "train", "-o", tmp_path / "run", *more)
        assert code == 2
        return err

    assert "requires folders" in refused("--cohort", "2", "--labels", "brain=1,tumour=2")
    assert "--labels model requires a model" in refused(
        "--workload", "segment", "--images", tmp_path, "--masks", tmp_path, "--labels", "model"
    )
    root = write_folders(tmp_path / "data", (1, 2, 4), subjects=2)
    assert "--overlapping-labels" in refused(*folders(root), "--labels", OVERLAPPING)


def test_the_labels_model_are_those_of_the_workload(capsys, tmp_path):
    root = write_folders(tmp_path, (2, 2, 2), brain=1)
    arguments = [*folders(root), "--labels", "model", "--sample-every", "0"]
    assert run(capsys, "train", *arguments, "-o", tmp_path / "run", *TINY, "--quiet")[0] == 0
    assert [label.name for label in load(tmp_path / "run" / "model").config.data.labels] == ["head", "tumour"]


def test_packed_subjects_have_the_labels_of_the_option(capsys, tmp_path):
    root = write_folders(tmp_path / "data", (1, 2, 4))
    labels = "tumour=1,4; oedema=2; brain=image"
    file = tmp_path / "subjects.npz"
    packing = ["pack", *folders(root), "--size", "16,16,16", "--held-out", "1", "-o", file, "--quiet"]
    assert run(capsys, *packing, "--labels", labels)[0] == 0
    train, held_out = unpack(file)
    assert train.contract.channel_values == ((1, 4), (2,), (5,))
    # 4 is stored as the first value of its label.
    assert set(np.unique(train.labels_NDHW)) == {0, 1, 2, 5}
    reader = MaskReader(contract=train.contract)
    mask = reader.read(root / "masks" / "sub-3_dseg.nii.gz", root / "images" / "sub-3_T1w.nii.gz")
    expected = encode_mask(mask.array.transpose(2, 1, 0), train.contract)
    np.testing.assert_array_equal(held_out[0][1], expected)
    code, _, err = run(capsys, *packing, "--labels", labels, "--overlapping-labels", "--cohort", "3", "--overwrite")
    assert code == 2
    code, _, err = run(capsys, *packing, "--overlapping-labels", "--overwrite")
    assert code == 2 and "--overlapping-labels requires --labels" in err


@pytest.mark.usefixtures("one_thread")
def test_overlapping_labels_from_packing_to_sampling(capsys, tmp_path):
    root = write_folders(tmp_path / "data", (1, 2, 4))
    file = tmp_path / "subjects.npz"
    packing = ["pack", *folders(root), "--size", "16,16,16", "--held-out", "1", "-o", file, "--labels", OVERLAPPING]
    code, _, err = run(capsys, *packing)
    assert code == 2 and "--overlapping-labels" in err
    assert run(capsys, *packing, "--overlapping-labels", "--quiet")[0] == 0
    train, held_out = unpack(file)
    contract = train.contract
    assert contract.overlapping and contract.regions == ((0,), (0, 1), (0, 1, 2))
    raw = tumour_mask(3, (1, 2, 4)).transpose(2, 1, 0)
    whole, core, enhancing = held_out[0][1] > 0
    np.testing.assert_array_equal(whole, raw > 0)
    np.testing.assert_array_equal(core, (raw == 1) | (raw == 4))
    np.testing.assert_array_equal(enhancing, raw == 4)
    images, masks = train.stored([0, 2])
    np.testing.assert_array_equal(train.unfold(images, masks)[1][1], train[2][1])

    training = ["train", "--subjects", file, "-o", tmp_path / "run", *TINY, "--sample-every", "0", "--quiet"]
    assert run(capsys, *training)[0] == 0
    model = load(tmp_path / "run" / "model")
    assert model.config.data.overlapping and model.config.network.mask_channels == 3
    assert sample(capsys, tmp_path / "run" / "model", root, tmp_path / "volumes")[0] == 0
    assert sidecars(tmp_path / "volumes")[0]["labels"] == {"1": "WT + TC", "2": "WT", "4": "WT + TC + ET"}
    # Masks of BraTS 2023 for the same model.
    newer = write_folders(tmp_path / "newer", (1, 2, 3))
    map_2023 = ["--labels", "WT=1,2,3; TC=1,3; ET=3", "--overwrite"]
    assert sample(capsys, tmp_path / "run" / "model", newer, tmp_path / "newer" / "out", *map_2023)[0] == 0
    names = [path.name for path in sorted((tmp_path / "volumes").rglob("sub-*.nii.gz"))]
    for name in names:
        one, other = (
            next(folder.rglob(name)).read_bytes() for folder in (tmp_path / "volumes", tmp_path / "newer" / "out")
        )
        assert one == other


def test_a_new_model_without_the_organ_and_a_brain_of_implausible_volume_are_warnings(capsys, brats2021, tmp_path):
    data = [*folders(brats2021), "--image", "t1"]
    start = ["train", *data, *TINY, "--dry-run"]
    code, _, err = run(capsys, *start, "--labels", OVERLAPPING, "--overlapping-labels")
    assert code == 0 and err.count("no label is the brain or the head, only WT, TC, ET") == 1
    packing = ["pack", *data, "--size", "16,16,16", "-o", tmp_path / "a.npz", "--labels", "tumour=1,4; oedema=2"]
    code, _, err = run(capsys, *packing)
    assert code == 0 and err.count("no label is the brain or the head, only tumour, oedema") == 1
    code, _, err = run(capsys, *start, "--labels", REAL)
    assert code == 0 and "no label is the brain" not in err
    assert err.count("(brain) has a median of") == 1 and "a human brain 400 to 2500 ml" in err


def test_a_new_model_of_brats_files_without_labels_names_the_preset(capsys, brats2021, tmp_path):
    code, _, err = run(capsys, "train", *folders(brats2021), "--image", "t1", *TINY, "-o", tmp_path / "run")
    assert code == 2 and "pass --labels brats2021" in err and '--labels "head=...; tumour=...' in err
    newer = write_folders(tmp_path / "newer", (1, 2, 3))
    for command in (["train", "-o", tmp_path / "run", *TINY], ["pack", "-o", tmp_path / "a.npz"]):
        code, _, err = run(capsys, *command, *folders(newer))
        assert code == 2 and "pass --labels brats;" in err and "--labels model" not in err


@pytest.mark.usefixtures("one_thread")
def test_a_segmenter_of_overlapping_labels(capsys, tmp_path):
    root = write_folders(tmp_path / "data", (1, 2, 4), subjects=6)
    options = ["--labels", OVERLAPPING, "--overlapping-labels", "--size", "16,16,16", "--steps", "60", "--batch", "2"]
    arguments = [
        "train",
        "--workload",
        "segment",
        *folders(root),
        *options,
        "--device",
        "cpu",
        "-o",
        tmp_path / "segmenter",
    ]
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert set(result["dice"]) == {"WT", "TC", "ET"} and result["dice"]["WT"]["mean"] > 0.3
    segmenter = load_segmenter(tmp_path / "segmenter")
    assert segmenter.config.network.classes == 4 and segmenter.identity()["labels"] == {
        "WT": [1, 2, 4],
        "TC": [1, 4],
        "ET": 4,
    }
    labels, _ = segmenter.describe(torch.zeros(1, 1, 16, 16, 16))
    assert set(labels.unique().tolist()) <= {0, 1, 2, 4}
    masks = ["--masks", root / "masks", "--segmenter", tmp_path / "segmenter", "--features", tmp_path / "segmenter"]
    volumes = ["evaluate", root / "images", root / "images", "-o", tmp_path / "quality", "--resamples", "20"]
    assert run(capsys, *volumes, *masks, "--device", "cpu", "--quiet")[0] == 0
    figures = json.loads((tmp_path / "quality" / "metrics.json").read_text())["figures"]
    assert {"dice_WT", "dice_TC", "dice_ET"} <= {figure["name"] for figure in figures}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model and a segmenter of random weights with the labels 1 brain, 2 tumour, and skull-stripped data of BraTS 2021."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("small")
    contract = analytic.CONTRACT
    network = MedDDPMConfig(base=32, blocks=1, multipliers=(1,), attention=())
    config = ModelConfig(network=network, size=contract.size, data=contract, diffusion=DiffusionConfig(steps=3))
    save_model(Model(config), root / "model", card="a test")
    save_segmenter(analytic.segmenter(), root / "segmenter", card="a test")
    write_folders(root / "data", (1, 2, 4), subjects=5)
    return root


REAL = "tumour=1,2,4; brain=image"


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_steps_with_labels(capsys, small, tmp_path):
    data = ["--real", small / "data" / "images", "--masks", small / "data" / "masks"]
    quick = [
        "--samplers",
        "ddim",
        "--steps",
        "1",
        "--timestep-spacings",
        "trailing",
        "--resamples",
        "20",
        "--batch",
        "5",
    ]
    command = [
        "steps",
        small / "model",
        "--segmenter",
        small / "segmenter",
        "--device",
        "cpu",
        "--plan",
        "baseline",
        *quick,
    ]
    code, _, err = run(capsys, *command, *data, "-o", tmp_path)
    assert code == 2 and "unknown label 4" in err and '--labels "brain=...; tumour=...; background=..."' in err
    code, _, err = run(capsys, *command, "-o", tmp_path, "--labels", REAL)
    assert code == 2 and "--labels requires --real" in err
    code, _, err = run(capsys, *command, *data, "-o", tmp_path, "--labels", "lesion=1,2,4; brain=image")
    assert code == 2 and "no label 'lesion', only brain, tumour" in err
    code, _, err = run(capsys, *command, *data, "-o", tmp_path, "--labels", REAL)
    assert code == 0, err
    assert json.loads((tmp_path / "steps.json").read_text())["subjects"] == 5


@pytest.mark.usefixtures("one_thread")
def test_usefulness_with_labels(capsys, small, tmp_path):
    data = ["--real", small / "data" / "images", "--masks", small / "data" / "masks"]
    quick = ["--volumes", "2", "--segment-steps", "1", "--segment-batch", "1", "--seeds", "1", "--held-out", "2"]
    quick += ["--steps", "1", "--batch", "2", "--resamples", "20", "--plan", "baseline", "--device", "cpu", "--quiet"]
    command = ["usefulness", small / "model", *quick, "-o", tmp_path]
    code, _, err = run(capsys, *command, "--labels", REAL)
    assert code == 2 and "--labels requires --real" in err
    code, _, err = run(capsys, *command, *data)
    assert code == 2 and "unknown label 4" in err
    code, _, err = run(capsys, *command, *data, "--labels", REAL)
    assert code == 0, err
    arms = json.loads((tmp_path / "usefulness.json").read_text())["arms"]
    assert set(arms[0]["dice"]) == {"brain", "tumour"}


def test_packed_subjects_of_a_model_are_mapped_to_its_labels(capsys, small, tmp_path):
    data = ["--images", small / "data" / "images", "--masks", small / "data" / "masks", "--held-out", "2"]
    command = ["pack", "--model", small / "model", *data, "-o", tmp_path / "subjects.npz", "--quiet"]
    code, _, err = run(capsys, *command)
    assert code == 2 and "unknown label 4" in err and '--labels "brain=...; tumour=...; background=..."' in err
    code, _, err = run(capsys, *command, "--labels", REAL, "--overlapping-labels")
    assert code == 2 and "--model cannot be combined" in err
    assert run(capsys, *command, "--labels", REAL)[0] == 0
    train, held_out = unpack(tmp_path / "subjects.npz")
    assert train.contract == analytic.CONTRACT and set(np.unique(held_out.labels_NDHW)) == {0, 1, 2}


def test_held_out_subjects_of_mapped_masks(small):
    contract = analytic.CONTRACT
    subjects = held_out_folders(
        contract, small / "data" / "images", small / "data" / "masks", labels=parse_labels(REAL)
    )
    raw = tumour_mask(2, (1, 2, 4)).transpose(2, 1, 0)
    expected = np.where(raw > 0, 2, 0)
    expected[2:14, 2:14, 2:14] = np.maximum(expected[2:14, 2:14, 2:14], 1)
    np.testing.assert_array_equal(subjects.classes_NDHW[2], expected)


@pytest.mark.usefixtures("one_thread")
def test_evaluate_takes_the_brain_from_the_reference(capsys, small, tmp_path):
    synth = tmp_path / "synth"
    synth.mkdir()
    rng = np.random.default_rng(0)
    for subject in range(4):
        image = rng.uniform(0.1, 1, (SIDE,) * 3).astype(np.float32)  # no voxel is 0, as in generated volumes
        save(synth / f"sub-{subject}_desc-synth01_T1w.nii.gz", image, AFFINE)
    networks = ["--segmenter", small / "segmenter", "--features", small / "segmenter", "--device", "cpu", "--quiet"]
    command = ["evaluate", small / "data" / "images", synth, "-o", tmp_path / "out", "--resamples", "20", *networks]
    masks = ["--masks", small / "data" / "masks"]
    code, _, err = run(capsys, *command, *masks)
    reason = json.loads((tmp_path / "out" / "metrics.json").read_text())["left_out"]["dice"]
    assert code == 0 and "unknown label 4" in reason and "say what their values mean with --labels" in reason
    command.append("--overwrite")
    code, _, err = run(capsys, *command, "--labels", REAL)
    assert code == 2 and "no masks; pass their folder with --masks" in err
    code, _, err = run(capsys, *command, *masks, "--labels", "head=image")
    reason = json.loads((tmp_path / "out" / "metrics.json").read_text())["left_out"]["dice"]
    assert code == 0 and "the segmenter segmenter has no label 'head', only brain, tumour" in reason
    code, _, err = run(capsys, *command, *masks, "--labels", REAL)
    assert code == 0, err
    figures = json.loads((tmp_path / "out" / "metrics.json").read_text())["figures"]
    assert {"dice_brain", "dice_tumour"} <= {figure["name"] for figure in figures}
    # A synthetic volume without a reference has no image to take the brain from.
    (synth / "sub-0_desc-synth01_T1w.nii.gz").rename(synth / "sub-9_desc-synth01_T1w.nii.gz")
    (small / "data" / "masks" / "sub-0_dseg.nii.gz").rename(tmp_path / "sub-9_dseg.nii.gz")
    (tmp_path / "more").mkdir()
    for path in [tmp_path / "sub-9_dseg.nii.gz", *(small / "data" / "masks").glob("*.nii.gz")]:
        (tmp_path / "more" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "sub-9_dseg.nii.gz").rename(small / "data" / "masks" / "sub-0_dseg.nii.gz")
    code, _, err = run(capsys, *command, "--masks", tmp_path / "more", "--labels", REAL)
    assert code == 2 and "add an image of subject sub-9 to the reference volumes" in err


def test_view_names_the_values_of_the_files(capsys, small, tmp_path):
    folder = small / "data"
    for number, labels in enumerate(("tumour=1,4; oedema=2", "brats2021")):
        page = tmp_path / f"view{number}.html"
        code, _, err = run(
            capsys, "view", folder / "images", "--masks", folder / "masks", "--labels", labels, "-o", page
        )
        assert code == 0, err
        assert "oedema" in page.read_text()
    code, _, err = run(capsys, "view", folder / "images", "--labels", "tumour", "-o", tmp_path / "no.html")
    assert code == 2 and "no such preset or file" in err


def page_data(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S).group(1))


def test_view_shows_the_brain_that_was_taken_from_the_image(capsys, small, tmp_path):
    out, data = tmp_path / "out", small / "data"
    options = ["--labels", REAL, "--images", data / "images"]
    assert sample(capsys, small / "model", data, out, *options)[0] == 0
    masks = ["--masks", data / "masks"]
    code, _, err = run(capsys, "view", out, *masks, "-o", tmp_path / "a.html")
    assert code == 0 and "brain was taken from the image" in err and "--real DIR" in err
    case = page_data(tmp_path / "a.html")["cases"][0]
    assert ["note", "brain was taken from the image and is not in this mask"] in case["details"]
    arguments = [*masks, "--real", data / "images", "-o", tmp_path / "b.html", "--sheet", tmp_path / "b.png"]
    code, _, err = run(capsys, "view", out, *arguments)
    assert code == 0 and "brain" not in err
    page = page_data(tmp_path / "b.html")
    assert ["note", "brain was taken from sub-0_T1w.nii.gz"] in page["cases"][0]["details"]
    number = {row["name"]: row["number"] for row in page["labels"]}
    assert set(number) == {"tumour", "brain"}
    text = re.search(rf'id="{page["cases"][0]["mask"]}">([^<]*)</script>', (tmp_path / "b.html").read_text()).group(1)
    shown = np.asarray(nib.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(text))).dataobj)
    image = nib.load(data / "images" / "sub-0_T1w.nii.gz").get_fdata()
    mask = np.asarray(nib.load(data / "masks" / "sub-0_dseg.nii.gz").dataobj)
    assert np.array_equal(shown == number["brain"], (mask == 0) & (image != 0)) and (shown == number["brain"]).any()


def test_view_warns_of_values_without_a_name(capsys, small, tmp_path):
    folder = small / "data"
    arguments = ["--masks", folder / "masks", "--labels", "tumour=1; oedema=2", "-o", tmp_path / "v.html"]
    code, _, err = run(capsys, "view", folder / "images", *arguments)
    assert code == 0 and "--labels tumour=1; oedema=2: no name for value 4 of the masks" in err


def test_python_functions_take_labels(small, tmp_path):
    root = small / "data"
    with pytest.raises(InputError, match="--overlapping-labels"):
        voxtune.train(
            images=root / "images", masks=root / "masks", labels=OVERLAPPING, out=tmp_path / "run", size=(16, 16, 16)
        )
    with pytest.raises(InputError, match="no masks; pass masks"):
        voxtune.evaluate(root / "images", root / "images", labels=REAL)
    with pytest.raises(InputError, match="labels"):
        voxtune.train(images=root / "images", masks=root / "masks", labels=5, out=tmp_path / "run")


@pytest.fixture(scope="module")
def regions(tmp_path_factory):
    """A model and a segmenter of random weights with the overlapping regions of BraTS 2021, and data with its values."""
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("regions")
    labels = parse_labels(OVERLAPPING).labels(overlapping=True)
    contract = replace(analytic.CONTRACT, labels=labels, overlapping=True)
    network = MedDDPMConfig(in_channels=4, base=32, blocks=1, multipliers=(1,), attention=())
    config = ModelConfig(network=network, size=contract.size, data=contract, diffusion=DiffusionConfig(steps=3))
    save_model(Model(config), root / "model", card="a test")
    judge = SegmenterConfig(network=SegmentConfig(base=4, classes=1 + len(contract.regions)), data=contract)
    save_segmenter(Segmenter(judge), root / "segmenter", card="a test")
    write_folders(root / "data", (1, 2, 4), subjects=5)
    return root


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_steps_and_usefulness_of_overlapping_labels(capsys, regions, tmp_path):
    data = ["--real", regions / "data" / "images", "--masks", regions / "data" / "masks"]
    quick = ["--resamples", "20", "--plan", "baseline", "--device", "cpu", "--quiet", "--batch", "5"]
    search = ["--samplers", "ddim", "--steps", "1", "--timestep-spacings", "trailing"]
    steps = ["steps", regions / "model", "--segmenter", regions / "segmenter", *data, *quick, *search, "-o", tmp_path]
    code, _, err = run(capsys, *steps)
    assert code == 0, err
    assert all(f'"dice_{name}"' in (tmp_path / "steps.json").read_text() for name in ("WT", "TC", "ET"))
    teaching = ["--volumes", "2", "--segment-steps", "1", "--segment-batch", "1", "--seeds", "1", "--held-out", "2"]
    code, _, err = run(
        capsys, "usefulness", regions / "model", *data, *quick, *teaching, "--steps", "1", "-o", tmp_path
    )
    assert code == 0, err
    arms = json.loads((tmp_path / "usefulness.json").read_text())["arms"]
    assert set(arms[0]["dice"]) == {"WT", "TC", "ET"}


def test_a_segmenter_must_have_the_same_regions(capsys, regions, small, tmp_path):
    data = ["--real", regions / "data" / "images", "--masks", regions / "data" / "masks"]
    steps = ["steps", regions / "model", "--segmenter", small / "segmenter", *data, "--device", "cpu", "-o", tmp_path]
    code, _, err = run(capsys, *steps)
    assert (
        code == 2
        and "labels 0 (background), 1 (brain), 2 (tumour) differ" in err
        and "1/2/4 (WT), 1/4 (TC), 4 (ET)" in err
    )
