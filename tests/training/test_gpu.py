"""Training on a GPU: the same data, steps and noise as on the CPU, loss scaling, memory formats, compilation."""

from __future__ import annotations

import pytest
import torch

from tests.factories.tiny_training import Blobs, rows, tiny_config
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def newest(out):
    return read_checkpoint(checkpoints(out / "checkpoints")[-1])


def test_the_gpu_sees_the_same_run(tmp_path):
    config = tiny_config(steps=4, log_every=1, precision="fp32")
    train(config, Blobs(), tmp_path / "cpu")
    train(config, Blobs(), tmp_path / "cuda", device="cuda")
    losses = [[row["loss"] for row in rows(tmp_path / name)] for name in ("cpu", "cuda")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert "rng.cuda" in newest(tmp_path / "cuda").tensors


@pytest.mark.parametrize("autocast", ["none", "bf16", "fp16"])
@pytest.mark.parametrize("channels_last", [False, True])
def test_arithmetic_and_memory_formats(tmp_path, autocast, channels_last):
    config = tiny_config(steps=4, autocast=autocast, channels_last=channels_last, sample_every=4)
    result = train(config, Blobs(), tmp_path / "run", device="cuda")
    assert 0 < result.loss < 2
    assert (newest(tmp_path / "run").state.scaler is not None) == (autocast == "fp16")


def test_the_loss_scale_is_resumed(tmp_path):
    config = tiny_config(autocast="fp16")
    train(config, Blobs(), tmp_path / "whole", device="cuda")
    seen = []
    train(config, Blobs(), tmp_path / "run", lambda *a: seen.append(a), stop=lambda: len(seen) >= 4, device="cuda")
    assert newest(tmp_path / "run").state.step == 5
    train(config, Blobs(), tmp_path / "run", device="cuda", resume=True)
    one, two = newest(tmp_path / "whole"), newest(tmp_path / "run")
    assert one.state.scaler == two.state.scaler
    assert one.state.scaler.growth_tracker > 0
    for name, value in one.part("ema.").items():
        torch.testing.assert_close(two.part("ema.")[name], value, rtol=1e-2, atol=1e-3)


def test_compiled(tmp_path):
    together = {"compile": True, "autocast": "bf16", "channels_last": True, "clip": 1.0, "warmup": 1, "decay": "cosine"}
    result = train(tiny_config(steps=3, **together), Blobs(), tmp_path / "run", device="cuda")
    assert 0 < result.loss < 2
    assert not any("_orig_mod" in name for name in newest(tmp_path / "run").tensors)
