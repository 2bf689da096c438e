"""A training run small enough for tests, and child processes that run it and die in it."""

from __future__ import annotations

import json
import multiprocessing
import signal
from pathlib import Path

import numpy as np
import torch

from voxtune.errors import InputError
from voxtune.training.config import ModelSettings, TrainConfig
from voxtune.training.log import read_metrics
from voxtune.training.loop import train

SIZE = (4, 4, 4)
MODEL = ModelSettings(size=SIZE, base=32, multipliers=(1,), attention=(), diffusion_steps=20)


class Blobs:
    """Subjects made of nothing but their number."""

    def __init__(self, count: int = 5, size=SIZE, masks: bool = True):
        self.count, self.size, self.masks = count, size, masks

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if not 0 <= index < self.count:
            raise IndexError(index)
        rng = np.random.default_rng(index)
        mask = np.where(rng.random((2, *self.size)) > 0.5, 1.0, -1.0).astype(np.float32)
        image = (0.8 * mask[:1] + rng.uniform(-0.1, 0.1, (1, *self.size))).astype(np.float32)
        return image, mask if self.masks else None


def tiny_config(**changes) -> TrainConfig:
    settings = {
        "model": MODEL,
        "steps": 12,
        "batch": 2,
        "accumulation": 1,
        "learning_rate": 1e-3,
        "ema_start": 4,
        "ema_every": 2,
        "ema_decay": 0.9,
        "checkpoint_every": 3,
        "keep": 2,
        "log_every": 2,
        "sample_every": 0,
        "sample_steps": 3,
        "tensorboard": False,
    }
    return TrainConfig(**{**settings, **changes})


def weights(out: Path) -> bytes:
    return (Path(out) / "model" / "model.safetensors").read_bytes()


def rows(out: Path) -> list[dict]:
    """The log without what a clock has measured."""
    found = read_metrics(Path(out) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in ("seconds", "idle")} for row in found]


def run_tiny(out: str, changes: dict, resume: bool = True) -> None:
    """Body of a child process."""
    torch.set_num_threads(1)
    train(tiny_config(**changes), Blobs(), out, resume=resume)


def run_limited(out: str, changes: dict, limit_after_step: int, report: str) -> None:
    """Body of a child process that may write no file over 64 KiB after a step; its error goes into `report`."""
    import resource

    torch.set_num_threads(1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(step, steps, loss):
        if step == limit_after_step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    try:
        train(tiny_config(**changes), Blobs(), out, limit)
    except InputError as error:
        Path(report).write_text(json.dumps(str(error)))


def child(target, *arguments) -> multiprocessing.Process:
    """A process forked from a server that has torch loaded already, and has never computed anything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def finish(target, *arguments) -> int:
    """The exit code of a child; minus the signal that ended it."""
    process = child(target, *arguments)
    process.join(300)
    assert process.exitcode is not None, "the child hangs"
    return process.exitcode
