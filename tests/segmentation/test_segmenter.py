"""The segmenter: training, storage, packed subjects, damaged files."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch

from tests.factories.core_only import voxtune_bare
from voxtune.cli.main import main
from voxtune.data import subjects
from voxtune.data.cohort import cohort_contract
from voxtune.data.contract import DataContract, Label, generic_contract
from voxtune.data.dataset import CohortSource
from voxtune.errors import InputError
from voxtune.segmentation import train as segmenttrain
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig, load_segmenter, save_segmenter, shipped_segmenter
from voxtune.segmentation.train import run_segment, summary
from voxtune.workloads.segment import SegmentConfig

CONTRACT = generic_contract(2, 1, (16, 16, 16))


class Balls:
    """A bright ball in a grey one at random positions, which a segmenter learns in seconds."""

    contract = CONTRACT

    def __init__(self, count, first=0):
        self.count, self.first = count, first

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        rng = np.random.default_rng(self.first + index)
        grid = np.stack(np.meshgrid(*[np.arange(16)] * 3, indexing="ij"))
        centre = rng.uniform(6, 10, 3).reshape(3, 1, 1, 1)
        away = np.sqrt(((grid - centre) ** 2).sum(axis=0))
        labels = (away < 6).astype(int) + (away < 3)
        image = np.choose(labels, [-0.9, 0.0, 0.8]) + rng.normal(0, 0.05, labels.shape)
        cond = np.stack([labels == 1, labels == 2]) * 2.0 - 1.0
        return image[None].astype(np.float32), cond.astype(np.float32)


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("segment") / "balls"
    training = segmenttrain.SegmentTraining(steps=40, batch=4, learning_rate=2e-2)
    result = run_segment(Balls(16), Balls(4, 100), training, folder, data="balls", command="voxtune x", base=8)
    return folder, result


def test_learns_separable_structures(learned):
    folder, result = learned
    assert result.steps == 40
    assert result.dice["label1"]["mean"] > 0.8
    assert result.dice["label2"]["mean"] > 0.7
    # The yardstick of the bar above: the same network before training.
    torch.manual_seed(0)
    fresh = Segmenter(SegmenterConfig(network=SegmentConfig(base=8), data=CONTRACT))
    untrained = summary(segmenttrain.held_out_dice(fresh, Balls(4, 100)))
    assert all(row["mean"] < 0.5 for row in untrained.values())
    assert "not a medical device" in (folder / "README.md").read_text()


def test_round_trip_through_a_folder(learned):
    folder, _ = learned
    segmenter = load_segmenter(folder)
    labels, features = segmenter.describe(torch.from_numpy(Balls(1)[0][0])[None])
    assert set(labels.unique().tolist()) <= {0, 1, 2}
    assert features.shape == (1, 32) and features.dtype == torch.float64
    identity = segmenter.identity()
    assert identity["sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert identity["labels"] == {"label1": 1, "label2": 2}
    again = load_segmenter(folder / "model.safetensors")
    torch.testing.assert_close(
        again.describe(torch.zeros(1, 1, 16, 16, 16))[1], segmenter.describe(torch.zeros(1, 1, 16, 16, 16))[1]
    )


def test_the_same_seed_gives_the_same_weights():
    training = segmenttrain.SegmentTraining(steps=2, batch=2, seed=3)
    states = [
        segmenttrain.train_segmenter(Balls(4), training, network=SegmentConfig(base=4), workers=w).network.state_dict()
        for w in (0, 2)
    ]
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


def test_an_existing_model_is_not_overwritten(learned):
    with pytest.raises(InputError, match="already contains a model"):
        run_segment(Balls(2), Balls(1), segmenttrain.SegmentTraining(steps=1), learned[0], data="", command="")


@pytest.mark.parametrize(
    ("file", "content", "word"),
    [
        ("config.json", b"{}", "format"),
        ("config.json", b"nonsense", "JSON"),
        ("config.json", None, "config.json"),
        ("model.safetensors", b"\x00" * 20, "damaged"),
        ("model.safetensors", None, "no such file"),
    ],
)
def test_damaged_folders_are_errors(learned, tmp_path, file, content, word):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((learned[0] / name).read_bytes())
    (tmp_path / file).unlink()
    if content is not None:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(InputError, match=word):
        load_segmenter(tmp_path)


def test_an_inconsistent_config_is_an_error(learned, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((learned[0] / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    for change in ({"network": {**config["network"], "classes": 5}}, {"network": {**config["network"], "base": 16}}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(InputError):
            load_segmenter(tmp_path)
    with pytest.raises(InputError, match="no such segmenter"):
        load_segmenter(tmp_path / "nowhere")


def test_packed_subjects_round_trip(tmp_path):
    path = subjects.pack(Balls(3), Balls(2, 50), tmp_path / "s.npz", origin="balls")
    train, held_out = subjects.unpack(path)
    assert (len(train), len(held_out), train.contract, train.origin) == (3, 2, CONTRACT, "balls")
    for packed, original in ((train[1], Balls(3)[1]), (held_out[1], Balls(2, 50)[1])):
        np.testing.assert_allclose(packed[0], np.clip(original[0], -1, 1), atol=1.01 / subjects.STEPS)
        np.testing.assert_array_equal(packed[1], original[1])
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match="packed subjects"):
        subjects.unpack(path)


@pytest.mark.slow
def test_training_from_packed_subjects_with_only_the_core_dependencies(tmp_path, capsys):
    subjects.pack(Balls(2), Balls(1), tmp_path / "s.npz", origin="balls")
    command = ["train", "--workload", "segment", "--subjects", str(tmp_path / "s.npz"), "-o", str(tmp_path / "out")]
    command += ["--steps", "1", "--minutes", "5", "--batch", "2", "--base", "4", "--device", "cpu"]
    done = voxtune_bare(*command)
    assert done.returncode == 0, done.stderr
    assert load_segmenter(tmp_path / "out").config.network.base == 4
    card = (tmp_path / "out" / "README.md").read_text()
    assert "- Data: balls." in card and "voxtune train --workload segment --subjects" in card
    assert main(command) == 2
    assert "already contains a model" in capsys.readouterr().err
    for more in (["--cohort", "3"], ["--set", "data.cohort_seed=1"]):
        assert main([*command[:-6], *more, "-o", str(tmp_path / "other")]) == 2
        assert "--subjects cannot be combined" in capsys.readouterr().err


def test_augmentation_changes_intensities_only():
    x = torch.from_numpy(Balls(1)[0][0])[None]
    one, again, other = (segmenttrain.augment(x, torch.Generator().manual_seed(s)) for s in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert np.corrcoef(one.flatten(), x.flatten())[0, 1] > 0.85


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"learning_rate": 2.0}, {"autocast": "fp8"}, {"minutes": 0.0}])
def test_invalid_recipes_are_errors(wrong):
    with pytest.raises(InputError):
        segmenttrain.SegmentTraining(**wrong)


def test_save_to_an_invalid_folder_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    segmenter = Segmenter(SegmenterConfig(network=SegmentConfig(base=4), data=CONTRACT))
    with pytest.raises(InputError, match="file"):
        save_segmenter(segmenter, tmp_path / "file" / "deeper", card="")


def test_the_shipped_segmenter_labels_held_out_subjects():
    shipped = load_segmenter(shipped_segmenter())
    source = CohortSource(shipped.config.data, 0, 100_200, healthy_fraction=0.0)
    rows = segmenttrain.held_out_dice(
        shipped, subjects.SourceRange(source, 100_100, 4)
    )  # nor was measured on for its card
    assert min(row["brain"] for row in rows) > 0.97
    assert np.mean([row["tumour"] for row in rows]) > 0.4


@pytest.mark.slow
def test_lesions_are_reported_by_size(tmp_path, capsys):
    """Through the command line, on simulated subjects of version 2."""
    out = tmp_path / "out"
    command = ["train", "--workload", "segment", "--cohort", "2", "--cohort-version", "2", "--size", "16,16,16"]
    command += ["--steps", "2", "--batch", "1", "--base", "4", "--device", "cpu", "-o", str(out), "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(subjects.COHORT_HELD_OUT, 2, 4)
        patch.setattr("voxtune.cli.train.simulators", lambda _version: 1)
        assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert sum(row["lesions"] for row in result["lesions"].values()) >= 3
    assert all(0 <= row["detection"] <= 1 and 0 <= row["dice"] <= 1 for row in result["lesions"].values())
    card = (out / "README.md").read_text()
    assert (
        "| size of the lesion | lesions | Dice, mean | detected |" in card and "version 2 of the cohort, seed 0" in card
    )


def test_scores_by_size_of_a_perfect_and_a_blind_segmenter():
    class Fixed(Segmenter):
        def describe(self, images):
            labels = torch.zeros(images.shape[0], *images.shape[2:], dtype=torch.long)
            return (labels if blind else (images[:, 0] > 0.5).long() * 2), torch.zeros(1, 1)

    labels = (Label(name="brain", value=1, channel=0), Label(name="tumour", value=2, channel=1))
    contract = DataContract(size=(16,) * 3, spacing=(10.0,) * 3, orientation="RAS", labels=labels)
    image = -np.ones((1, 16, 16, 16), np.float32)
    image[0, 2:4, 2:4, 2:4] = 1  # 8 ml
    image[0, 8:14, 8:14, 8:14] = 1  # 216 ml
    cond = np.stack([-np.ones_like(image[0]), image[0]])
    for blind in (False, True):
        segmenter = Fixed(SegmenterConfig(network=SegmentConfig(base=4), data=contract))
        rows, scores = segmenttrain.held_out_scores(segmenter, [(image, cond)])
        sizes = segmenttrain.lesions_by_size(scores)
        value = 0.0 if blind else 1.0
        row = {"lesions": 1, "dice": value, "detection": value}
        assert sizes == {"5_to_20_ml": row, "over_20_ml": row} and rows == [{"tumour": value}]


def test_large_grids_have_a_level_more():
    contract = cohort_contract((128, 128, 128))
    assert (segmenttrain._network(contract, None).levels, segmenttrain._network(CONTRACT, None).levels) == (4, 3)
