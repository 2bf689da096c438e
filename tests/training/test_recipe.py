"""Recipes of a run: prediction and noise of a new model, what `--init` goes on from, and averages to choose from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.factories.tiny_training import MODEL, Blobs, tiny_config, weights
from voxtune.diffusion.noise import normal_batch
from voxtune.errors import InputError
from voxtune.runtime.storage import load
from voxtune.training.checkpoint import Checkpoint, averages, checkpoints, read_checkpoint
from voxtune.training.config import ModelSettings, TrainConfig
from voxtune.training.data import Batch, noise_offsets, training_noise
from voxtune.training.loop import train
from voxtune.training.model import model_config
from voxtune.training.plan_step import step_inputs

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
V = replace(MODEL, prediction="v", snr_shift=0.5, zero_terminal_snr=True, offset_noise=0.1)


def newest(out) -> Checkpoint:
    return read_checkpoint(checkpoints(out / "checkpoints")[-1])


def test_a_model_of_v_trains_resumes_and_samples(tmp_path):
    config = tiny_config(steps=6, model=V, learning_rate=2e-3)
    result = train(config, Blobs(), tmp_path / "run")
    train(replace(config, steps=3), Blobs(), tmp_path / "again")
    train(config, Blobs(), tmp_path / "again", resume=True)
    assert weights(tmp_path / "again") == weights(tmp_path / "run")
    model = load(result.model)
    diffusion = model.config.diffusion
    assert (diffusion.prediction, diffusion.snr_shift, diffusion.zero_terminal_snr, diffusion.offset_noise) == (
        "v",
        0.5,
        True,
        0.1,
    )
    assert model.schedule.signal_noise(19) == (0.0, 1.0)
    sample = model.sample(torch.from_numpy(Blobs()[0][1])[None], sampler="dpm++", steps=4)
    assert bool(torch.isfinite(sample).all())
    assert "v-prediction, SNR x 0.5, zero terminal SNR, offset noise 0.1" in (result.model / "README.md").read_text()


def test_v_prediction_learns_the_mean_of_an_image_from_pure_noise(tmp_path):
    """At the last step there is no signal: v is minus the image, so the network learns what an image is on average."""
    config = tiny_config(
        steps=150, batch=4, model=replace(V, offset_noise=None), learning_rate=3e-3, checkpoint_every=150
    )
    model = load(train(config, Blobs(4), tmp_path / "run").model)
    image, mask = (torch.from_numpy(x)[None] for x in Blobs()[4])
    drawn = model.sample(mask, sampler="ddim", steps=1)
    assert torch.corrcoef(torch.stack([drawn.flatten(), image.flatten()]))[0, 1] > 0.7


def test_the_noise_of_a_step_has_the_offsets_of_its_samples():
    batch = Batch(numbers=(7, 9), indices=(0, 1), images=torch.zeros(2, 3, 4, 4, 4), masks=None)
    inputs = step_inputs(batch, tiny_config(), 20, CPU, channels_last=False, offset_noise=0.5)
    added = inputs.noise - training_noise(0, (7, 9), (3, 4, 4, 4), CPU)
    assert torch.allclose(added, 0.5 * noise_offsets(0, (7, 9), 3, 3).expand_as(added), atol=1e-6)
    assert added.std() > 0.1
    # These offsets are no draw of the noise itself.
    assert not torch.equal(noise_offsets(0, (7,), 3, 0), normal_batch(0, (7,), 0, (3,)))


def test_a_fine_tuned_model_keeps_its_prediction_and_may_change_its_noise():
    start = model_config(TrainConfig(model=V))
    again = model_config(TrainConfig(model=ModelSettings(init="m", snr_shift=0.2, offset_noise=0.0)), start)
    assert again.diffusion == replace(start.diffusion, snr_shift=0.2, offset_noise=0.0)
    with pytest.raises(InputError, match=r"base is 32 in m, not 64; multipliers is \(1,\) in m, not \(1, 2\)"):
        model_config(TrainConfig(model=ModelSettings(init="m", base=64, multipliers=(1, 2))), start)
    with pytest.raises(InputError, match="prediction is v in m, not epsilon"):
        model_config(TrainConfig(model=ModelSettings(init="m", prediction="epsilon")), start)
    plain = model_config(TrainConfig(model=MODEL))
    with pytest.raises(InputError, match="init: m: zero_terminal_snr requires prediction v"):
        model_config(TrainConfig(model=ModelSettings(init="m", zero_terminal_snr=True)), plain)
    with pytest.raises(InputError, match="model: zero_terminal_snr requires prediction v"):
        model_config(TrainConfig(model=replace(MODEL, zero_terminal_snr=True)))


def test_a_run_goes_on_from_weights_and_averages_of_a_checkpoint(tmp_path):
    train(tiny_config(ema_candidates=(0.5,)), Blobs(), tmp_path / "first")
    first = newest(tmp_path / "first")
    # Nothing is learned, so that what the run started from is what it ends with.
    config = tiny_config(
        steps=1, learning_rate=1e-12, model=ModelSettings(init=str(first.path)), ema_candidates=(0.5, 0.8), ema_every=5
    )
    train(config, Blobs(), tmp_path / "second")
    second = newest(tmp_path / "second")
    assert second.state.step == 1 and second.config.model.init == first.path.name
    pairs = [("model.", "model."), ("ema.", "ema."), ("ema-0.5.", "ema-0.5."), ("ema-0.8.", "ema.")]
    for here, there in pairs:
        expected = first.part(there)
        assert all(torch.allclose(v, expected[k], atol=1e-9) for k, v in second.part(here).items()), here
    assert any(not torch.equal(v, first.part("ema.")[k]) for k, v in first.part("model.").items())
    # A new optimizer, whose first step is this one.
    assert {float(v) for k, v in second.tensors.items() if k.startswith("optimizer.") and k.endswith(".step")} == {1.0}
    card = (tmp_path / "second" / "model" / "README.md").read_text()
    assert f"from the weights of `{first.path.name}`" in card


def test_averages_of_a_run_that_goes_on_follow_its_weights_from_the_first_step(tmp_path):
    train(tiny_config(steps=3), Blobs(), tmp_path / "first")
    init = str(newest(tmp_path / "first").path)
    config = tiny_config(steps=4, model=ModelSettings(init=init), ema_start=100, ema_every=1)
    train(config, Blobs(), tmp_path / "second")
    result = newest(tmp_path / "second")
    assert any(not torch.equal(v, result.part("ema.")[k]) for k, v in result.part("model.").items())
    train(replace(config, steps=2), Blobs(), tmp_path / "third")
    train(config, Blobs(), tmp_path / "third", resume=True)
    assert weights(tmp_path / "third") == weights(tmp_path / "second")


def test_averages_with_several_decays(tmp_path):
    config = tiny_config(ema_candidates=(0.5, 0.999))
    train(config, Blobs(), tmp_path / "run")
    checkpoint = newest(tmp_path / "run")
    assert averages(checkpoint) == ["ema", "ema-0.5", "ema-0.999"]
    for decay in (0.5, 0.999):
        train(tiny_config(ema_decay=decay), Blobs(), tmp_path / f"{decay}")
        alone = newest(tmp_path / f"{decay}").part("ema.")
        assert all(torch.equal(v, checkpoint.part(f"ema-{decay}.")[k]) for k, v in alone.items())
    train(replace(config, steps=5), Blobs(), tmp_path / "again")
    train(config, Blobs(), tmp_path / "again", resume=True)
    again = newest(tmp_path / "again")
    assert all(torch.equal(v, again.tensors[k]) for k, v in checkpoint.tensors.items() if k.startswith("ema-"))


@pytest.mark.parametrize("decays", [(0.9,), (0.5, 0.5), (1.0,), tuple(n / 10 for n in range(8))])
def test_invalid_decays(decays):
    with pytest.raises(InputError, match="ema_candidates"):
        tiny_config(ema_candidates=decays)


def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    train(tiny_config(steps=1), Blobs(), tmp_path / "first")
    init = str(newest(tmp_path / "first").path)
    config = tiny_config(steps=1, model=ModelSettings(init=init, base=64))
    with pytest.raises(InputError, match=r"base is 32 in .*step-00000001.safetensors, not 64"):
        train(config, Blobs(), tmp_path / "second")
    assert not (tmp_path / "second" / "train.json").exists()
