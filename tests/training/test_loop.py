"""The training loop: learning, EMA, accumulation, data order, errors, log and pictures."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.factories.tiny_training import MODEL, SIZE, Blobs, rows, tiny_config, weights
from voxtune.data.contract import generic_contract
from voxtune.errors import InputError
from voxtune.files import locked_folder
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.storage import load
from voxtune.training import step as trainer_module
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.config import DataSettings, ModelSettings, TrainConfig
from voxtune.training.data import Loader, epoch_order, timesteps, training_noise
from voxtune.training.folder import read_run
from voxtune.training.log import sample_picture
from voxtune.training.loop import train
from voxtune.training.model import model_config
from voxtune.training.step import Ema
from voxtune.workloads import ConvNeXtConfig

pytestmark = pytest.mark.usefixtures("one_thread")


def tensors(out, prefix="model."):
    return read_checkpoint(checkpoints(out / "checkpoints")[-1]).part(prefix)


def test_the_loss_goes_down_and_samples_follow_the_mask(tmp_path):
    losses = []
    config = tiny_config(steps=80, batch=4, checkpoint_every=80, log_every=1, learning_rate=2e-3)
    result = train(config, Blobs(4), tmp_path / "run", lambda step, steps, loss: losses.append(loss))
    assert np.mean(losses[-10:]) < 0.65 * np.mean(losses[:10])
    assert result.loss == losses[-1]
    assert result.step == len(losses) == len(rows(tmp_path / "run")) == 80
    assert [row["loss"] for row in rows(tmp_path / "run")] == losses
    image, mask = Blobs()[4]
    drawn = load(result.model).sample(torch.from_numpy(mask)[None], sampler="ddim", steps=10)[0].numpy()
    assert np.corrcoef(drawn.ravel(), image.ravel())[0, 1] > 0.7, "a mask it has not seen gives the image that fits it"


def test_the_model_folder_is_usable(tmp_path):
    train(tiny_config(steps=3), Blobs(), tmp_path / "run", command="voxtune train --steps 3")
    model = load(tmp_path / "run" / "model")
    sample = model.sample(torch.from_numpy(Blobs()[0][1])[None], sampler="ddim", steps=2)
    assert sample.shape == (1, 1, *SIZE)
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    for fact in ("voxtune train --steps 3", "5 subjects from Python", "learning rate 0.001", "3 of 3 steps"):
        assert fact in card


def test_the_card_lists_every_command_of_a_run(tmp_path):
    run = tmp_path / "run"
    train(tiny_config(steps=1), Blobs(), run, command="voxtune train -o run --steps 1")
    train(tiny_config(steps=2), Blobs(), run, resume=True, command="voxtune train --resume run --steps 2")
    commands = "```\nvoxtune train -o run --steps 1\nvoxtune train --resume run --steps 2\n```"
    assert commands in (run / "model" / "README.md").read_text()


def test_ema_is_the_weights_then_their_average():
    network = torch.nn.Linear(1, 1, bias=False)
    ema = Ema(network, decay=0.9, every=2, start=4)
    expected = None
    for step in range(1, 9):
        with torch.no_grad():
            network.weight.fill_(float(step))
        ema.update(network, step)
        if step < 4:
            expected = float(step)
        elif step % 2 == 0:
            expected = 0.9 * expected + 0.1 * step
        assert ema.network.weight.item() == pytest.approx(expected, rel=1e-6)
    assert not ema.network.weight.requires_grad


def test_the_stored_model_has_the_ema_weights(tmp_path):
    train(tiny_config(), Blobs(), tmp_path / "run")
    stored = load(tmp_path / "run" / "model").network.state_dict()
    average, last = tensors(tmp_path / "run", "ema."), tensors(tmp_path / "run")
    assert all(torch.equal(stored[k], v) for k, v in average.items())
    assert any(not torch.equal(stored[k], v) for k, v in last.items())


def test_accumulation_equals_a_larger_batch(tmp_path):
    for name, batch, accumulation in (("batch", 4, 1), ("parts", 1, 4)):
        config = tiny_config(steps=1, batch=batch, accumulation=accumulation)
        model = Model(model_config(config))
        generator = torch.Generator().manual_seed(1)
        for p in model.network.parameters():
            # Fresh networks end in zeros, which let no gradient through.
            p.data = 0.1 * torch.randn(p.shape, generator=generator)
        train(config, Blobs(), tmp_path / name, model=model)
    one, many = (tensors(tmp_path / name, "optimizer.") for name in ("batch", "parts"))
    gradients = {name: value for name, value in one.items() if name.endswith("exp_avg")}
    largest = max(value.abs().max().item() for value in gradients.values())
    for name, value in gradients.items():
        torch.testing.assert_close(many[name], value, rtol=1e-4, atol=1e-6 * largest)


def test_every_subject_once_per_epoch_in_a_different_order():
    orders = [epoch_order(3, epoch, 50) for epoch in range(4)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    assert orders[0] == epoch_order(3, 0, 50) != epoch_order(4, 0, 50)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_the_loader_returns_the_same_batches_with_any_number_of_workers(workers):
    loader = Loader(Blobs(5), seed=1, batch=3, start=4, workers=workers, pin=False)
    batches = iter(loader)
    got = [next(batches) for _ in range(4)]
    loader.close()
    order = [i for epoch in range(4) for i in epoch_order(1, epoch, 5)]
    assert [i for batch in got for i in batch.indices] == order[4:16]
    assert [n for batch in got for n in batch.numbers] == list(range(4, 16))
    assert all(np.array_equal(b.images[0], Blobs()[b.indices[0]][0]) for b in got)


def test_timesteps_and_noise_depend_on_the_sample_number_alone():
    t = timesteps(0, tuple(range(4000)), 250)
    assert (t.min(), t.max()) == (0, 249)
    assert abs(t.double().mean() - 124.5) < 4
    assert torch.equal(timesteps(0, (17, 2**40), 250)[:1], t[17:18])
    noise = training_noise(0, (5, 6), (1, *SIZE), torch.device("cpu"))
    assert torch.equal(noise[1], training_noise(0, (6,), (1, *SIZE), torch.device("cpu"))[0])


@pytest.mark.parametrize("autocast", ["bf16", "fp16"])
def test_autocast_on_the_cpu(tmp_path, autocast):
    config = tiny_config(steps=4, autocast=autocast, sample_every=4)
    result = train(config, Blobs(), tmp_path / "run")
    assert math.isfinite(result.loss)
    assert all(v.dtype == torch.float32 for v in tensors(tmp_path / "run").values())


def test_clip_and_channels_last_and_l2(tmp_path):
    train(tiny_config(steps=3, loss="l2"), Blobs(), tmp_path / "plain")
    train(tiny_config(steps=3, loss="l2", channels_last=True), Blobs(), tmp_path / "last")
    train(tiny_config(steps=3, loss="l2", clip=1e-4), Blobs(), tmp_path / "clip")
    plain, last, clip = (tensors(tmp_path / name, "optimizer.") for name in ("plain", "last", "clip"))
    name = "out.2.bias.exp_avg"
    torch.testing.assert_close(last[name], plain[name], rtol=1e-3, atol=1e-5)
    assert clip[name].abs().max() < 1e-4 < plain[name].abs().max()
    assert load(tmp_path / "plain" / "model").config.diffusion.loss == "l2"


def test_the_global_random_state_is_restored(tmp_path):
    torch.manual_seed(99)
    before = torch.get_rng_state()
    train(tiny_config(steps=1), Blobs(), tmp_path / "run")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_without_masks_trains_from_python(tmp_path):
    network = ConvNeXtConfig(channels=1, width=8, multipliers=(1,))
    model = Model(ModelConfig(network=network, size=(8, 8)))
    source = Blobs(3, size=(8, 8), masks=False)
    train(tiny_config(steps=2, sample_every=2), source, tmp_path / "run", model=model)
    assert load(tmp_path / "run" / "model").config.family == "convnext"
    assert (tmp_path / "run" / "samples" / "step-00000002.png").exists()


def test_fine_tuning_starts_from_a_model(tmp_path):
    train(tiny_config(steps=3), Blobs(), tmp_path / "first")
    start = str(tmp_path / "first" / "model")
    config = tiny_config(steps=1, learning_rate=1e-12, model=ModelSettings(init=start))
    train(config, Blobs(), tmp_path / "second")
    first, second = (load(tmp_path / run / "model").network.state_dict() for run in ("first", "second"))
    assert all(torch.allclose(second[k], v, atol=1e-9) for k, v in first.items())
    with pytest.raises(InputError, match="model: base is 32"):
        train(replace(config, model=ModelSettings(init=start, base=64)), Blobs(), tmp_path / "third")


class Failing(Blobs):
    """Fails, or gives NaN, from the n-th look at a subject on."""

    def __init__(self, looks: int, error: Exception | None):
        super().__init__()
        self.looks, self.error = looks, error

    def __getitem__(self, index):
        self.looks -= 1
        image, mask = super().__getitem__(index)
        if self.looks >= 0:
            return image, mask
        if self.error is not None:
            raise self.error
        return image * np.nan, mask


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InputError("sub-03.nii.gz: no such file"), "sub-03.nii.gz: no such file"),
        (FileNotFoundError(2, "No such file or directory", "/data/sub-03.nii"), "/data/sub-03.nii: No such file"),
    ],
)
def test_a_missing_file_stops_after_a_checkpoint(tmp_path, error, message):
    """Subject 0 is checked, all 5 are measured, then 2 are read per step: step 5 fails, the checkpoint is of step 4."""
    with pytest.raises(InputError, match="stopped after step 4") as stopped:
        train(tiny_config(workers=0), Failing(14, error), tmp_path / "run")
    assert message in str(stopped.value)
    assert "step-00000004" in str(stopped.value)
    assert f"voxtune train --resume {tmp_path / 'run'}" in str(stopped.value)
    train(tiny_config(), Blobs(), tmp_path / "run", resume=True)
    train(tiny_config(), Blobs(), tmp_path / "uninterrupted")
    assert weights(tmp_path / "run") == weights(tmp_path / "uninterrupted")


class Nan(Blobs):
    """Gives NaN for the looks at a subject that are numbered, the first is 0."""

    def __init__(self, *looks: range):
        super().__init__()
        self.nan, self.look = {n for span in looks for n in span}, -1

    def __getitem__(self, index):
        self.look += 1
        image, mask = super().__getitem__(index)
        return (image * np.nan if self.look in self.nan else image), mask


# Looks at subjects before the first step; then two for each step.
BEFORE = 6


def steps(first: int, last: int) -> range:
    return range(BEFORE + 2 * (first - 1), BEFORE + 2 * last)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_bad_batch_is_skipped_and_counted(tmp_path, clip):
    config = tiny_config(workers=0, log_every=1, clip=clip, checkpoint_every=1, keep=12)
    train(config, Nan(steps(5, 6)), tmp_path / "run")
    files = [read_checkpoint(path) for path in checkpoints(tmp_path / "run" / "checkpoints")]
    assert [(f.state.skipped, f.state.skipped_in_row) for f in files[3:7]] == [(0, 0), (1, 1), (2, 2), (2, 0)]
    for part in ("model.", "ema.", "optimizer."):
        good, bad, after = (files[step - 1].part(part) for step in (4, 6, 8))
        assert all(torch.equal(bad[k], v) for k, v in good.items()), part
        assert any(not torch.equal(after[k], v) for k, v in good.items()), part
    log = rows(tmp_path / "run")
    assert [row.get("skipped", 0) for row in log] == [0] * 4 + [1] + [2] * 7
    assert ["loss" in row for row in log] == [n not in (5, 6) for n in range(1, 13)]


def test_a_run_with_skipped_steps_is_resumed_with_the_same_bits(tmp_path):
    config, bad = tiny_config(workers=0, log_every=4), (steps(3, 4), steps(8, 8))
    train(config, Nan(*bad), tmp_path / "whole")
    seen = []
    train(config, Nan(*bad), tmp_path / "run", lambda *a: seen.append(a), stop=lambda: len(seen) >= 2)
    assert read_checkpoint(checkpoints(tmp_path / "run" / "checkpoints")[-1]).state.step == 3
    # The subject that a resume looks at, then steps 4 and 8.
    train(config, Nan(range(1, 3), range(9, 11)), tmp_path / "run", resume=True)
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert rows(tmp_path / "run")[-1]["skipped"] == 3


def test_many_bad_batches_stop_the_run_after_the_last_good_step(tmp_path):
    config = tiny_config(workers=0, max_skipped=4)
    with pytest.raises(InputError, match="the loss is not finite at step 8") as stopped:
        train(config, Nan(steps(5, 20)), tmp_path / "run")
    last = tmp_path / "run" / "checkpoints" / "step-00000004.safetensors"
    subjects = ", ".join(str(i) for i in [i for epoch in range(4) for i in epoch_order(0, epoch, 5)][14:16])
    for part in ("4 steps in a row were skipped", "an image of the batch", f"subjects {subjects}", last.name):
        assert part in str(stopped.value)
    good = read_checkpoint(last)
    assert (good.state.step, good.state.position, good.state.skipped) == (4, 3, 0)
    train(tiny_config(workers=0), Blobs(), tmp_path / "run", resume=True)
    train(tiny_config(workers=0), Blobs(), tmp_path / "uninterrupted")
    assert weights(tmp_path / "run") == weights(tmp_path / "uninterrupted")
    assert rows(tmp_path / "run") == rows(tmp_path / "uninterrupted")


class Stuck(torch.autograd.Function):
    """NaN in the forward or in the backward pass."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.nan = math.nan if not forward else 1.0
        return x * (math.nan if forward else 1.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.nan, None


@pytest.mark.parametrize("forward", [False, True])
def test_the_module_that_is_not_finite_is_named(tmp_path, forward):
    config = tiny_config(checkpoint_every=1, max_skipped=2)
    model = Model(model_config(config))
    for p in model.network.parameters():
        p.data = 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
    module = model.network.middle_block[0]
    original = module.forward
    module.forward = lambda *args: Stuck.apply(original(*args), forward)
    with pytest.raises(InputError, match=r"is not finite at step 2 .*before the first checkpoint") as stopped:
        train(config, Blobs(), tmp_path / "run", model=model)
    where = "value that is not finite is in" if forward else "gradient that is not finite is that of"
    assert f"the first {where} the output of middle_block.0" in str(stopped.value)
    assert not checkpoints(tmp_path / "run" / "checkpoints")


def test_a_nan_gradient_or_weight_never_reaches_a_checkpoint(tmp_path, monkeypatch):
    real = trainer_module.training_loss
    monkeypatch.setattr(trainer_module, "training_loss", lambda *a: Stuck.apply(real(*a), False))
    with pytest.raises(InputError, match=r"the gradient is not finite at step 3 .*before the first checkpoint"):
        train(tiny_config(checkpoint_every=1, max_skipped=3), Blobs(), tmp_path / "run")
    assert not checkpoints(tmp_path / "run" / "checkpoints")


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_an_unwritable_folder(tmp_path, place):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"run|file"):
        train(tiny_config(), Blobs(), tmp_path / place)


def test_a_run_is_not_overwritten(tmp_path):
    train(tiny_config(steps=1), Blobs(), tmp_path / "run")
    with pytest.raises(InputError, match="already contains a run; continue it with --resume"):
        train(tiny_config(steps=1), Blobs(), tmp_path / "run")
    with pytest.raises(InputError, match="not a training run"):
        read_run(tmp_path / "nothing")


def test_two_runs_do_not_share_a_folder(tmp_path):
    pytest.importorskip("fcntl")
    with locked_folder(tmp_path / "run"), pytest.raises(InputError, match="in use by another Voxtune process"):
        train(tiny_config(steps=1), Blobs(), tmp_path / "run")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Blobs(3, size=(4, 4, 8)), r"image of the first subject has shape \(1, 4, 4, 8\)"),
        (Blobs(3, masks=False), "mask of the first subject has shape None"),
        (Blobs(0), "no subjects"),
    ],
)
def test_data_of_the_wrong_shape_is_an_error(tmp_path, source, message):
    with pytest.raises(InputError, match=message):
        train(tiny_config(), source, tmp_path / "run")


def test_tensorboard_curves_and_pictures(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_config(steps=4, sample_every=4, tensorboard=True)
    train(config, Blobs(), tmp_path / "run")
    train(replace(config, steps=8), Blobs(), tmp_path / "run", resume=True)
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [2, 4, 6, 8]
    assert [e.step for e in events.Images("sample")] == [4, 8]


def test_without_tensorboard_it_warns_once(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    warnings = []
    train(tiny_config(steps=2, tensorboard=True), Blobs(), tmp_path / "run", warn=warnings.append)
    assert [w for w in warnings if "TensorBoard is not installed" in w] == warnings
    assert len(warnings) == 1


def test_the_picture_shows_mask_sample_and_image():
    cond = -np.ones((2, 4, 6, 8), np.float32)
    cond[1, 2, 3, 4] = 1
    sample, real = np.full((1, 4, 6, 8), -1, np.float32), np.ones((1, 4, 6, 8), np.float32)
    picture = sample_picture(cond, sample, real)
    side = picture.shape[0] // 3
    assert picture.dtype == np.uint8
    assert picture.shape == (3 * side, 3 * side, 3)
    assert side >= 128
    assert picture[:, :side].any()
    assert not picture[:, side : 2 * side].any()
    assert picture[:, 2 * side :].max() == 255


def on_axes(orientation, array_DHW):
    """An array in RAS as a model of this orientation has it, and where its axes went."""
    pairs = ("RL", "AP", "SI")
    axes = [next(i for i, pair in enumerate(pairs) if letter in pair) for letter in orientation]
    flips = tuple(slice(None, None, -1 if letter in "LPI" else 1) for letter in orientation)
    return array_DHW.T.transpose(axes)[flips].T, axes


@pytest.mark.parametrize(
    "orientation",
    ["".join(o) for pairs in itertools.permutations(("RL", "AP", "SI")) for o in itertools.product(*pairs)],
)
def test_the_picture_is_upright_in_any_orientation(orientation):
    size, spacing = (5, 7, 9), (3.0, 1.0, 2.0)
    image = np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)
    image[4, 3, :], image[2, 6, 4] = 1, 1
    expected = sample_picture(image[None], image[None], -image[None], generic_contract(1, 1, size, spacing=spacing))
    turned, axes = on_axes(orientation, image)
    contract = generic_contract(
        1, 1, turned.shape, spacing=tuple(spacing[::-1][a] for a in axes)[::-1], orientation=orientation
    )
    picture = sample_picture(turned[None], turned[None], -turned[None], contract)
    np.testing.assert_array_equal(picture, expected)


def test_the_picture_has_superior_up_and_isotropic_pixels():
    image = np.full((5, 7, 9), 0.0, np.float32)
    image[4] = 1  # the topmost slice
    picture = sample_picture(None, image[None], image[None], generic_contract(1, 1, (5, 7, 9), spacing=(3, 1, 2)))
    side = picture.shape[1] // 2
    zoom = side // 18  # 15 mm high, 7 mm deep, 18 mm wide, in steps of 1 mm
    coronal, sagittal = picture[side : 2 * side, :side, 0], picture[2 * side :, :side, 0]
    for plane, width in ((coronal, 18), (sagittal, 7)):
        rows, columns = np.nonzero(plane)
        assert (np.ptp(rows) + 1, np.ptp(columns) + 1) == (15 * zoom, width * zoom)
        bright = np.nonzero(plane == 255)[0]
        assert (bright.min(), np.ptp(bright) + 1) == (rows.min(), 3 * zoom)


def test_cohort_and_brats_contracts_follow_the_size():
    cohort = model_config(TrainConfig(data=DataSettings(cohort=2), model=replace(MODEL, size=(32, 32, 32))))
    assert cohort.data.spacing == (6.0, 6.0, 6.0)
    brats = model_config(TrainConfig(model=ModelSettings(workload="med-ddpm-brats")))
    assert (brats.size, brats.network.in_channels, brats.network.blocks) == ((144, 192, 192), 8, 2)
    head = model_config(TrainConfig())
    assert (head.network.attention, head.network.multipliers) == ((8,), (1, 1, 2, 3, 4))


@pytest.mark.parametrize(("side", "levels"), [(4, 1), (8, 2), (32, 4), (64, 4), (96, 4), (128, 5), (20, 3)])
def test_default_levels_fit_the_size(side, levels):
    config = model_config(TrainConfig(model=ModelSettings(size=(side,) * 3)))
    assert len(config.network.multipliers) == levels


def test_the_effective_config_is_written(tmp_path):
    train(tiny_config(steps=1), Blobs(), tmp_path / "run")
    assert read_run(tmp_path / "run") == tiny_config(steps=1)
    assert json.loads((tmp_path / "run" / "train.json").read_text())["learning_rate"] == 1e-3
