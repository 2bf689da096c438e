"""The queued step: Adam that is skipped on the device, the moving average, and outcomes that are read one step late."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.factories.tiny_training import Blobs, rows, tiny_config
from voxtune.errors import InputError
from voxtune.runtime.model import Model
from voxtune.training import step as step_module
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.data import Loader
from voxtune.training.loop import train
from voxtune.training.model import model_config
from voxtune.training.step import Ema, Trainer

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")


class Ahead:
    """Outcomes as a device would return them: readable at any time, but not read before the reader wants them."""

    unread: int = 0
    most: int = 0

    def queue(self, outcome):
        Ahead.unread += 1
        Ahead.most = max(Ahead.most, Ahead.unread)
        return outcome.clone()

    @staticmethod
    def read(outcome):
        Ahead.unread -= 1
        loss, norm, skipped = outcome.tolist()
        return loss, norm, skipped != 0.0


@pytest.fixture
def ahead(monkeypatch):
    """Training on the CPU queues its steps, as on a GPU."""
    monkeypatch.setattr(step_module, "runs_ahead", lambda device: True)
    monkeypatch.setattr(step_module, "LateReader", Ahead)
    Ahead.unread = Ahead.most = 0


def tensors(out):
    return read_checkpoint(checkpoints(out / "checkpoints")[-1])


def close(one, two):
    """Equal up to rounding; Adam makes much of a gradient that is only rounding, so parts are compared as a whole."""
    for part in ("model.", "ema.", "optimizer."):
        names = [name for name in one.part(part) if not name.endswith(".step")]
        a, b = (torch.cat([run.part(part)[name].double().flatten() for name in names]) for run in (one, two))
        assert (a - b).norm() < 1e-4 * a.norm(), part
        steps = [name for name in one.part(part) if name.endswith(".step")]
        assert all(torch.equal(one.part(part)[name], two.part(part)[name]) for name in steps)


@pytest.mark.parametrize("settings", [{}, {"clip": 0.05}, {"accumulation": 2}, {"plan": "voxtune"}])
def test_queued_steps_compute_what_plain_steps_do(tmp_path, monkeypatch, settings):
    config = tiny_config(log_every=1, **settings)
    train(config, Blobs(), tmp_path / "plain")
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "runs_ahead", lambda device: True)
        patch.setattr(step_module, "LateReader", Ahead)
        Ahead.most = Ahead.unread = 0
        losses = []
        result = train(config, Blobs(), tmp_path / "queued", lambda step, steps, loss: losses.append((step, loss)))
    close(tensors(tmp_path / "plain"), tensors(tmp_path / "queued"))
    plain, queued = rows(tmp_path / "plain"), rows(tmp_path / "queued")
    assert [row["step"] for row in queued] == list(range(1, 13))
    for a, b in zip(plain, queued, strict=True):
        assert b == pytest.approx(a, rel=1e-4)
    assert Ahead.most == 2 and Ahead.unread == 0
    assert [step for step, _ in losses] == list(range(1, 13))
    known = [row["loss"] for row in queued]
    assert [loss for _, loss in losses] == [known[0], *known[:-1]], (
        "the first is waited for, the others come a step late"
    )
    assert result.loss == known[-1]


def test_a_queued_run_is_resumed_with_the_same_bits(tmp_path, ahead):
    config = tiny_config(clip=1.0, warmup=3, decay="cosine")
    train(config, Blobs(), tmp_path / "whole")
    seen = []
    train(config, Blobs(), tmp_path / "run", lambda *a: seen.append(a), stop=lambda: len(seen) >= 4)
    train(config, Blobs(), tmp_path / "run", resume=True)
    one, two = tensors(tmp_path / "whole"), tensors(tmp_path / "run")
    assert all(torch.equal(v, two.tensors[k]) for k, v in one.tensors.items())
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


def test_a_cpu_run_continues_where_steps_are_queued_and_back(tmp_path, monkeypatch):
    train(tiny_config(), Blobs(), tmp_path / "whole")
    train(tiny_config(steps=4), Blobs(), tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "runs_ahead", lambda device: True)
        patch.setattr(step_module, "LateReader", Ahead)
        train(tiny_config(steps=8), Blobs(), tmp_path / "run", resume=True)
    train(tiny_config(), Blobs(), tmp_path / "run", resume=True)
    close(tensors(tmp_path / "whole"), tensors(tmp_path / "run"))


class Bad(Blobs):
    """Subjects whose images are infinite."""

    def __init__(self, *subjects):
        super().__init__()
        self.subjects = subjects

    def __getitem__(self, index):
        image, mask = super().__getitem__(index)
        return (image + np.inf if index in self.subjects else image), mask


def trainer_of(config, source):
    model = Model(model_config(config))
    loader = Loader(source, seed=config.seed, batch=config.batch, start=0, workers=0, pin=False)
    return Trainer(config, model, len(source), CPU), iter(loader)


@pytest.mark.parametrize("settings", [{}, {"clip": 1.0}, {"autocast": "bf16"}])
def test_a_skipped_step_changes_nothing_on_the_device(ahead, settings):
    config = tiny_config(batch=1, ema_every=1, **settings)
    trainer, batches = trainer_of(config, Bad(2))
    state = lambda: {k: v.clone() for k, v in trainer.checkpoint().tensors.items() if not k.startswith("rng")}  # noqa: E731
    bad = 0
    for _ in range(10):
        batch = next(batches)
        before = state()
        trainer.train_step([batch])
        after = state()
        same = all(torch.equal(v, before[k]) for k, v in after.items() if k in before)
        bad += 2 in batch.indices
        assert same == (2 in batch.indices)
        assert trainer.skipped == bad
    assert bad == 2


def test_many_skipped_steps_stop_a_queued_run_after_the_last_good_step(tmp_path, ahead):
    config = tiny_config(workers=0, max_skipped=3)
    train(tiny_config(steps=4), Blobs(), tmp_path / "run")
    good = tensors(tmp_path / "run")
    with pytest.raises(
        InputError, match=r"not finite at step 7 .* 3 steps in a row were skipped: an image of the batch"
    ) as stop:
        train(config, Bad(*range(5)), tmp_path / "run", resume=True)
    assert "step-00000004" in str(stop.value)
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")][-1] == "step-00000004.safetensors"
    assert all(
        torch.equal(v, tensors(tmp_path / "run").tensors[k])
        for k, v in good.part("model.").items()
        if k in good.tensors
    )


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("step", [1, 3, 4, 5, 6])
def test_the_average_on_a_device_is_the_one_on_the_host(step, skipped):
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv3d(2, 3, 3), torch.nn.BatchNorm3d(3))
    one, two = (Ema(network, decay=0.9, every=2, start=4) for _ in range(2))
    with torch.no_grad():
        for p in network.parameters():
            p.add_(torch.randn(p.shape))
        network[1].num_batches_tracked += 3
    before = {k: v.clone() for k, v in two.network.state_dict().items()}
    one.update(network, step)
    two.update(network, step, torch.tensor(float(skipped)))
    expected = one.network.state_dict()
    if skipped and step >= 4:
        expected = before | {"1.num_batches_tracked": expected["1.num_batches_tracked"]}
    for name, value in two.network.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-7)


def test_the_first_step_is_waited_for(ahead):
    trainer, batches = trainer_of(tiny_config(), Blobs())
    assert math.isfinite(trainer.train_step([next(batches)])) and Ahead.unread == 0
    first = trainer.loss
    assert trainer.train_step([next(batches)]) == first and Ahead.unread == 1
    trainer.settle()
    assert trainer.loss != first and Ahead.unread == 0
