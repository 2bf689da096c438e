"""Recipes on a GPU: v-prediction with offset noise by the training plans, and a distillation with its teacher's plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.factories.fields import Fields
from tests.factories.tiny_training import tiny_config
from voxtune.runtime.storage import load
from voxtune.training.config import DistillSettings, ModelSettings
from voxtune.training.data import Batch
from voxtune.training.distill import prepared
from voxtune.training.loop import train
from voxtune.training.plan_step import step_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
SIDE = 16
NETWORK = ModelSettings(
    size=(SIDE,) * 3,
    base=64,
    multipliers=(1, 2),
    attention=(),
    diffusion_steps=20,
    prediction="v",
    zero_terminal_snr=True,
    offset_noise=0.1,
)


def test_the_noise_of_a_step_is_that_of_a_cpu():
    batch = Batch(numbers=(7, 9), indices=(0, 1), images=torch.zeros(2, 3, 4, 4, 4), masks=None)
    options = {"channels_last": False, "offset_noise": 0.5}
    here, there = (
        step_inputs(batch, tiny_config(), 20, torch.device(name), **options).noise.cpu() for name in ("cpu", "cuda")
    )
    assert torch.allclose(here, there, atol=1e-4)


@pytest.mark.parametrize("plan", ["baseline", "voxtune"])
def test_a_model_of_v_is_trained_and_distilled(tmp_path, plan):
    config = tiny_config(model=NETWORK, steps=60, batch=4, plan=plan, checkpoint_every=30, ema_candidates=(0.5,))
    losses = []
    teacher = train(
        config, Fields(side=SIDE), tmp_path / "teacher", lambda s, n, loss: losses.append(loss), device=GPU
    ).model
    assert sum(losses[-10:]) < sum(losses[5:15])
    settings = DistillSettings(steps=4, teacher_steps=10)
    student = replace(
        config, model=ModelSettings(init=str(teacher)), distill=settings, steps=30, ema_start=0, ema_candidates=()
    )
    student = prepared(student, Fields(side=SIDE), GPU, print)
    losses.clear()
    result = train(student, Fields(side=SIDE), tmp_path / "student", lambda s, n, loss: losses.append(loss), device=GPU)
    assert sum(losses[-5:]) < sum(losses[2:7])
    model = load(result.model, device="cuda")
    mask = torch.from_numpy(Fields(side=SIDE)[1000][1])[None]
    sample = model.sample(mask)
    assert bool(torch.isfinite(sample).all()) and len(model.resolve().timesteps) == 4
    resumed = train(replace(student, steps=32), Fields(side=SIDE), tmp_path / "student", device=GPU, resume=True)
    assert (resumed.resumed_from, resumed.step) == (30, 32)
