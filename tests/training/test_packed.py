"""Training from a file of packed subjects, also with only the core dependencies."""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.factories.core_only import voxtune_bare
from voxtune.cli.main import main
from voxtune.data.contract import DataContract, Label, classes_of, encode_mask
from voxtune.data.splits import Volumes
from voxtune.data.subjects import pack, packed_contract, unpack
from voxtune.errors import InputError
from voxtune.runtime.storage import load
from voxtune.training.config import DataSettings, ModelSettings, TrainConfig, make_config
from voxtune.training.data import Loader, PackedSource
from voxtune.training.folder import read_run
from voxtune.training.loop import train
from voxtune.training.model import model_config

SIZE = (8, 8, 8)
CONTRACT = DataContract(
    size=SIZE,
    spacing=(24.0, 24.0, 24.0),
    orientation="LAS",
    labels=(Label(name="brain", value=1, channel=1), Label(name="tumour", value=5, channel=0)),
    images=("FLAIR",),
)
TINY = ["--base", "32", "--multipliers", "1", "--set", "model.attention=[]", "--set", "model.diffusion_steps=10"]
TINY += ["--batch", "2", "--accumulation", "1", "--device", "cpu"]


class Made:
    """Subjects whose image says who they are."""

    def __init__(self, numbers, contract: DataContract = CONTRACT):
        self.numbers, self.contract = list(numbers), contract

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        labels = np.random.default_rng(self.numbers[index]).choice([0, 1, 5], SIZE)
        image = np.full((1, *SIZE), self.numbers[index] / 100, np.float32)
        return image, encode_mask(labels, self.contract)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed") / "subjects.npz"
    return pack(Made(range(6)), Made([90, 91]), path, origin="made of numbers")


def test_training_subjects_exclude_the_held_out_ones(file):
    source = PackedSource(file, CONTRACT)
    assert (len(source), source.held_out, source.origin) == (6, 2, "made of numbers")
    for index in range(6):
        image, cond = source[index]
        wanted_image, wanted_cond = Made(range(6))[index]
        assert image.dtype == cond.dtype == np.float32
        np.testing.assert_allclose(image, wanted_image, atol=1.01 / 4095)
        np.testing.assert_array_equal(cond, wanted_cond)
        np.testing.assert_array_equal(image, unpack(file)[0][index][0])
    assert max(source[i][0].max() for i in range(len(source))) < 0.1, "90 and 91 are held out"


@pytest.mark.parametrize("mask_range", ["signed", "unit"])
def test_a_compact_batch_unfolds_to_exactly_the_subjects(file, mask_range):
    source = PackedSource(file, replace(CONTRACT, mask_range=mask_range))
    images, masks = source.stored((4, 1, 4))
    assert (images.element_size(), masks.element_size()) == (2, 1), "six times fewer bytes than float32 of both labels"
    volumes = Volumes(
        contract=source.contract,
        images_NCDHW=torch.from_numpy(np.stack([source[i][0] for i in range(6)])),
        classes_NDHW=classes_of(torch.from_numpy(np.stack([source[i][1] for i in range(6)])), CONTRACT),
    )
    loader = Loader(source, seed=0, batch=3, start=0, workers=1, pin=False)
    batch = next(iter(loader))
    loader.close()
    for (unfolded, conds), indices in (
        (source.unfold(images, masks), (4, 1, 4)),
        (volumes.unfold(*volumes.stored((4, 1, 4))), (4, 1, 4)),
        (batch.on(torch.device("cpu")), batch.indices),
    ):
        assert unfolded.dtype == conds.dtype == torch.float32
        for row, index in enumerate(indices):
            np.testing.assert_array_equal(unfolded[row].numpy(), source[index][0])
            np.testing.assert_array_equal(conds[row].numpy(), source[index][1])


def test_training_on_packed_subjects_equals_training_on_the_subjects(file, tmp_path):
    class Plain:
        """The same subjects, one by one."""

        def __init__(self):
            self.packed = PackedSource(file, CONTRACT)

        def __len__(self):
            return len(self.packed)

        def __getitem__(self, index):
            return self.packed[index]

    config = TrainConfig(
        data=DataSettings(subjects=str(file)),
        model=ModelSettings(base=32, multipliers=(1,), attention=(), diffusion_steps=10),
        steps=3,
        batch=2,
        accumulation=1,
        ema_start=1,
        sample_every=0,
        tensorboard=False,
    )
    train(config, None, tmp_path / "packed")
    train(config, Plain(), tmp_path / "plain")
    one, other = (load(tmp_path / name).network.state_dict() for name in ("packed", "plain"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_condition_is_in_the_range_of_the_model(file):
    unit = PackedSource(file, replace(CONTRACT, mask_range="unit"))
    signed = PackedSource(file, CONTRACT)
    np.testing.assert_array_equal(unit[0][1], (signed[0][1] + 1) / 2)


def test_a_fresh_model_has_the_contract_of_the_file(file):
    config = TrainConfig(data=DataSettings(subjects=str(file)), model=ModelSettings(base=32, multipliers=(1,)))
    assert model_config(config).data == packed_contract(file) == CONTRACT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": (8, 8, 16)}, r"size \(8, 8, 8\) differs from the model\'s \(8, 8, 16\)"),
        ({"spacing": (24.0, 24.0, 20.0)}, "spacing .* differs"),
        ({"orientation": "RAS"}, "orientation LAS differs from the model's RAS"),
        ({"labels": (*CONTRACT.labels[:1], Label(name="tumour", value=2, channel=0))}, "labels .* differ"),
        ({"images": ("T1w",)}, "images FLAIR differ from the model's T1w"),
        ({"scaling": "slice"}, "scaling by volume differs"),
    ],
)
def test_a_model_of_another_contract_is_an_error(file, change, message):
    with pytest.raises(InputError, match=message) as refused:
        PackedSource(file, replace(CONTRACT, **change))
    assert "do not set size, spacing" in str(refused.value)


def test_invalid_files_are_errors(tmp_path, file):
    (tmp_path / "text.npz").write_text("no")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    np.savez(tmp_path / "deep.npz", header="[" * 100_000)
    np.save(tmp_path / "array.npz.npy", np.zeros(3))
    os.mkfifo(tmp_path / "pipe.npz")
    not_packed = dict.fromkeys(("text.npz", "other.npz", "deep.npz", "array.npz.npy"), "not a file of packed subjects")
    others = {"absent.npz": "no such file", ".": "is a folder", "pipe.npz": "not a regular file"}
    for name, message in (not_packed | others).items():
        for read in (packed_contract, unpack):
            with pytest.raises(InputError, match=message):
                read(tmp_path / name)
    with np.load(file) as good:
        parts = {**good, "labels": good["labels"] + 7}
        bright = {**good, "images": good["images"] + np.uint16(9000)}
        wide = {**good, "images": good["images"].astype(np.float32)}
    for name, broken, message in (
        ("labels.npz", parts, "labels that are not in its contract"),
        ("bright.npz", bright, "must be integers from 0 to 4095"),
        ("wide.npz", wide, "must be integers from 0 to 4095"),
    ):
        np.savez(tmp_path / name, **broken)
        for read in (unpack, lambda path: PackedSource(path, CONTRACT)):
            with pytest.raises(InputError, match=message):
                read(tmp_path / name)


def test_randomly_damaged_files_are_read_or_refused(tmp_path, file):
    good, path, outcomes = file.read_bytes(), tmp_path / "damaged.npz", []
    for seed in range(300):
        chance, data = random.Random(seed), bytearray(good)
        for _ in range(chance.randint(1, 8)):
            # In a record, or in the directory at the end.
            place = chance.choice([chance.randrange(len(data)), chance.randrange(300), -1 - chance.randrange(300)])
            data[place] = chance.randrange(256)
        path.write_bytes(data[: chance.randrange(len(data))] if seed % 10 == 0 else data)
        try:
            unpack(path)
            outcomes.append(True)
        except InputError as error:
            outcomes.append(False)
            assert str(error).startswith(f"{path}: ")
            assert "\n" not in str(error)
    assert 0 < sum(outcomes) < 300


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize(
    "images",
    [
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (1099511627776,), }"),
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (-1, -5), }", bytes(10)),
        npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", bytes(8)),
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (" + "9" * 5000 + ",), }"),
        npy("(" * 3000),
        npy("{'descr': [('a', '<u2')], 'fortran_order': False, 'shape': (5,), }", bytes(10)),
        npy("{'descr': '<u2', 'fortran_order': False, 'shape': (5,), }", bytes(9)),
        npy("{'descr': " + "'" * 3),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        b"",
    ],
)
def test_headers_of_arrays_are_checked(tmp_path, file, images):
    with zipfile.ZipFile(file) as good, zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for name in good.namelist():
            archive.writestr(name, images if name == "images.npy" else good.read(name))
    with pytest.raises(InputError, match=r"x\.npz: damaged"):
        unpack(tmp_path / "x.npz")


def test_a_small_file_that_unpacks_to_gigabytes_is_refused(tmp_path, file, monkeypatch):
    """Zeros compress by a factor of a thousand; those of a cohort with a large background by less than 16."""
    with np.load(file) as good:
        np.savez_compressed(tmp_path / "x.npz", **{**good, "images": np.zeros((1, 1, 200, 200, 200), np.uint16)})
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "10MB")
    with pytest.raises(InputError, match="--read-limit"):
        unpack(tmp_path / "x.npz")
    assert len(unpack(file)[0])


def test_a_data_source_in_the_options_replaces_that_of_the_file():
    for old in ({"cohort": 3}, {"images": "i", "masks": "m"}, {"subjects": "old.npz"}):
        data = make_config({"data": old}, {"data.subjects": "new.npz"}, "here").data
        assert (data.subjects, data.cohort, data.images, data.masks) == ("new.npz", None, None, None)
    assert make_config({"data": {"subjects": "old.npz"}}, {"data.cohort": 3}, "here").data.subjects is None
    for other in ({"data.cohort": 3}, {"data.images": "i", "data.masks": "m"}):
        with pytest.raises(InputError, match="cannot be combined"):
            make_config({}, {"data.subjects": "new.npz", **other}, "here")
    with pytest.raises(InputError, match="convnext trains on images"):
        make_config({}, {"data.subjects": "new.npz", "model.workload": "convnext"}, "here")


def test_errors_of_the_command_are_one_line(file, tmp_path, capsys):
    out = ["-o", str(tmp_path / "run")]
    wrong = ["train", "--subjects", str(file), "--size", "16,16,16", *TINY, *out, "--quiet"]
    assert main(wrong) == 2
    assert "differs from the model's" in capsys.readouterr().err
    assert main(["train", "--subjects", str(tmp_path / "absent.npz"), *TINY, *out]) == 2
    assert "absent.npz: no such file" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_command_with_only_the_core_dependencies(file, tmp_path):
    recipe = ["--steps", "2", "--minutes", "9", "--warmup", "1", "--decay", "cosine", "--autocast", "bf16"]
    settings = ["clip=1.0", "channels_last=true", "store=bf16", "ema_start=1", "sampler=ddim", "sample_every=2"]
    command = ["train", "--subjects", str(file), *TINY, *recipe, "-o", str(tmp_path / "run")]
    command += [part for setting in settings for part in ("--set", setting)]
    done = voxtune_bare(*command)
    assert done.returncode == 0, done.stderr
    assert "Trained 2 steps" in done.stdout
    for line in ("subjects     6 for training, 2 held out", "data         6 subjects packed in", "images       FLAIR"):
        assert line in done.stdout
    assert "1 (brain): median" in done.stdout and "memory       about" in done.stdout
    for message in ("TensorBoard is not installed", "Pillow is not installed", "training 2/2"):
        assert done.stderr.count(message) == 1, done.stderr
    assert load(tmp_path / "run").config.data == CONTRACT
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "6 subjects packed in `subjects.npz`: made of numbers" in card
    assert "warmed up over 1 steps, decaying along a cosine" in card
    assert read_run(tmp_path / "run").data.subjects == str(file)


def test_values_of_options_without_yaml(monkeypatch):
    from voxtune.training.config import parse_value

    with_yaml = [parse_value(text) for text in ("1.5", "true", "[8]", "ddim", "null")]
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert [parse_value(text) for text in ("1.5", "true", "[8]", "ddim", "null")] == with_yaml
    with pytest.raises(InputError, match="not valid JSON, and YAML requires PyYAML"):
        parse_value("[1,")


def test_the_pack_command_with_simulated_subjects_and_folders(tmp_path, capsys):
    from voxtune.data.bids import write_cohort

    file = tmp_path / "cohort.npz"
    command = ["pack", "--size", "16,16,16", "-o", str(file), "--json"]
    assert main([*command, "--cohort", "3", "--held-out", "2"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["subjects"], result["held_out"]) == (3, 2) and "subjects 0 to 2" in result["origin"]
    learn, last = unpack(file)
    assert (len(learn), len(last), learn.contract.size) == (3, 2, (16, 16, 16))
    assert main([*command, "--cohort", "3"]) == 2
    assert "--overwrite" in capsys.readouterr().err

    write_cohort(tmp_path / "bids", 4, 0, (16, 16, 16))
    for path in sorted((tmp_path / "bids").rglob("*.nii.gz")):
        kind = "masks" if "dseg" in path.name else "images"
        (tmp_path / kind).mkdir(exist_ok=True)
        path.rename(tmp_path / kind / path.name)
    folders = ["--images", str(tmp_path / "images"), "--masks", str(tmp_path / "masks"), "--overwrite"]
    assert main([*command, *folders, "--held-out", "1", "--labels", "brain=1,tumour=2"]) == 0
    assert json.loads(capsys.readouterr().out)["subjects"] == 3
    assert [label.name for label in unpack(file)[0].contract.labels] == ["brain", "tumour"]
    for wrong, word in (
        (["--held-out", "4"], "must be from 1 to 3"),
        (["--cohort", "3"], "cannot be combined"),
        (["--labels", "brain=1,tumour=2,other=300"], "up to 255"),
        (["--seed", "0"], "--seed requires --cohort"),
    ):
        assert main([*command, *folders, *wrong]) == 2
        assert word in capsys.readouterr().err
    assert main([*command, "--cohort", "3", "--labels", "brain=1", "--overwrite"]) == 2
    assert "--labels cannot be combined with --cohort" in capsys.readouterr().err
    assert len(unpack(file)[0]) == 3
