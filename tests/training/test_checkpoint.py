"""Checkpoints: complete, checked when read; damaged ones are skipped."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch

from tests.factories.tiny_training import SIZE, Blobs, rows, tiny_config, weights
from voxtune.errors import InputError
from voxtune.runtime.storage import read_safetensors, write_safetensors
from voxtune.training.checkpoint import (
    Checkpoint,
    RunState,
    ScalerState,
    averages,
    checkpoints,
    load_weights,
    newest_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from voxtune.training.log import METRICS, read_metrics, truncate_metrics
from voxtune.training.loop import load_init, train
from voxtune.training.model import model_config

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run with its checkpoints of steps 9 and 12."""
    out = tmp_path_factory.mktemp("done") / "run"
    train(tiny_config(), Blobs(), out)
    return out


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def small_checkpoint(**state) -> Checkpoint:
    config = tiny_config()
    known = {"step": 3, "epoch": 1, "position": 1, "subjects": 5, **state}
    tensors = {"model.w": torch.arange(6.0).view(2, 3), "rng.cpu": torch.get_rng_state()}
    return Checkpoint(state=RunState(**known), config=config, model=model_config(config), tensors=tensors)


def test_round_trip_is_exact(tmp_path):
    written = small_checkpoint(loss_sum=0.1 + 0.2, loss_count=2, scaler=ScalerState(scale=65536.0, growth_tracker=7))
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, written))
    assert (checkpoint.state, checkpoint.config, checkpoint.model) == (written.state, written.config, written.model)
    assert all(torch.equal(checkpoint.tensors[k], v) for k, v in written.tensors.items())


def test_contains_the_complete_state(run):
    checkpoint = read_checkpoint(checkpoints(run / "checkpoints")[-1])
    names = {name.split(".")[0] for name in checkpoint.tensors}
    assert names == {"model", "ema", "optimizer", "rng"}
    parameters = set(checkpoint.part("model."))
    assert {k.rsplit(".", 1)[0] for k in checkpoint.part("optimizer.")} == parameters
    assert {k.rsplit(".", 1)[1] for k in checkpoint.part("optimizer.")} == {"exp_avg", "exp_avg_sq", "step"}
    assert (checkpoint.state.step, checkpoint.state.epoch, checkpoint.state.position, checkpoint.state.subjects) == (
        12,
        4,
        4,
        5,
    )
    assert checkpoint.config == tiny_config()


def test_old_checkpoints_are_deleted(run):
    assert [p.name for p in checkpoints(run / "checkpoints")] == [
        "step-00000009.safetensors",
        "step-00000012.safetensors",
    ]


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped bit", "other file", "bad header"])
def test_damaged_newest_falls_back(copy, damage):
    newest = checkpoints(copy / "checkpoints")[-1]
    raw = bytearray(newest.read_bytes())
    if damage == "truncated":
        del raw[len(raw) // 3 :]
    elif damage == "empty":
        raw.clear()
    elif damage == "flipped bit":
        raw[-1000] ^= 16
    elif damage == "bad header":
        raw[20:40] = b"\xff" * 20
    newest.write_bytes(raw)
    if damage == "other file":
        write_safetensors(newest, {"x": torch.zeros(2)}, {"format": "pt"}, state=True)
    warnings, before = [], (weights(copy), rows(copy))
    result = train(tiny_config(), Blobs(), copy, resume=True, warn=warnings.append)
    assert result.resumed_from == 9
    assert len(warnings) == 1
    assert str(newest) in warnings[0]
    assert "resuming from step 9" in warnings[0]
    assert (weights(copy), rows(copy)) == before
    assert newest.with_name(f"{newest.name}.damaged").exists()


def test_every_checkpoint_damaged(copy):
    for path in checkpoints(copy / "checkpoints"):
        path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="no other checkpoint"):
        train(tiny_config(), Blobs(), copy, resume=True)


def test_every_mutation_of_a_checkpoint_is_an_input_error(tmp_path):
    """Bits flipped and pieces cut anywhere: read as it was, or refused."""
    path = write_checkpoint(tmp_path, small_checkpoint())
    good, chance = path.read_bytes(), random.Random(3)
    for _ in range(120):
        raw = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        if chance.random() < 0.3:
            del raw[chance.randrange(len(raw)) :]
        path.write_bytes(raw)
        try:
            read_checkpoint(path)
        except InputError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"learning_rate": 1e-4}, "learning_rate: 0.001 -> 0.0001"),
        ({"seed": 5}, "seed: 0 -> 5"),
        ({"batch": 1}, "batch: 2 -> 1"),
        ({"model": replace(tiny_config().model, base=64)}, "model.base: 32 -> 64"),
    ],
)
def test_changed_settings_are_named(run, change, named):
    with pytest.raises(InputError, match="other settings") as refused:
        train(tiny_config(**change), Blobs(), run, resume=True)
    assert named in str(refused.value)


def test_another_number_of_subjects_is_named(run):
    with pytest.raises(InputError, match="data now has 6 subjects"):
        train(tiny_config(steps=20), Blobs(6), run, resume=True)


def test_wrong_tensors_are_named(copy):
    path = checkpoints(copy / "checkpoints")[-1]
    good = read_checkpoint(path)
    for drop, named in (
        ("model.out.2.bias", "out.2.bias"),
        ("optimizer.out.2.bias.exp_avg", "exp_avg"),
        ("rng.cpu", "random"),
    ):
        write_checkpoint(path.parent, replace(good, tensors={k: v for k, v in good.tensors.items() if k != drop}))
        with pytest.raises(InputError, match=named):
            train(tiny_config(steps=14), Blobs(), copy, resume=True)
    extra = {**good.tensors, "optimizer.ghost.step": torch.tensor(1.0)}
    write_checkpoint(path.parent, replace(good, tensors=extra))
    with pytest.raises(InputError, match="ghost"):
        train(tiny_config(steps=14), Blobs(), copy, resume=True)


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert newest_checkpoint(tmp_path / "nowhere", print) is None


def test_a_checkpoint_or_a_run_can_be_fine_tuned(run):
    """A run gives its model, a checkpoint the trained weights; the average of that checkpoint is that of the model."""
    checkpoint = read_checkpoint(checkpoints(run / "checkpoints")[-1])
    stored, _ = read_safetensors(run / "model" / "model.safetensors")
    for model in (load_init(str(run)), load_weights(checkpoint, "ema")):
        state = model.network.state_dict()
        assert all(torch.equal(state[k], v) for k, v in stored.items())
    trained = load_init(str(checkpoint.path)).network.state_dict()
    assert all(torch.equal(trained[k], v) for k, v in checkpoint.part("model.").items())
    assert any(not torch.equal(trained[k], v) for k, v in stored.items())
    assert load_init(str(run)).config.size == SIZE
    assert averages(checkpoint) == ["ema"]
    with pytest.raises(InputError, match=r"contains no weights named 'ema-0.9'"):
        load_weights(checkpoint, "ema-0.9")


def test_metrics_after_the_checkpoint_are_deleted(tmp_path):
    path = tmp_path / METRICS
    lines = [json.dumps({"step": n, "loss": 0.5}) for n in (2, 4, 6)]
    path.write_text("\n".join([*lines, '{"step": 8, "lo']))
    truncate_metrics(path, 4)
    assert [row["step"] for row in read_metrics(path)] == [2, 4]
    assert path.read_text().endswith("}\n")
