"""Runs of one process of several that torchrun has started; tests/training/test_distributed.py compares them.

torchrun --nproc-per-node 2 distributed_checks.py FOLDER
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy as np
import torch

from tests.factories.tiny_training import Blobs, tiny_config
from voxtune.errors import InputError
from voxtune.training import checkpoint as disk
from voxtune.training.loop import train

# As published: at a larger one, Adam turns the rounding of gradients that are zero into steps of full size.
PUBLISHED_RATE = 1e-5
# A batch is divided among the processes, or its parts are.
DIVIDED = {"batch": 4, "accumulation": 1, "learning_rate": PUBLISHED_RATE, "steps": 20, "log_every": 1}
PARTS = {"batch": 2, "accumulation": 2, "steps": 20, "clip": 0.5}
# The rewritten network, whose gradients are averaged as those of the original one are.
PLANNED = {"batch": 2, "accumulation": 2, "steps": 6, "plan": "voxtune"}
FIRST = {"batch": 2, "accumulation": 2, "steps": 7}
MINUTES = {"batch": 2, "steps": 10**6, "minutes": 0.01, "decay": "cosine"}


class Unreadable(Blobs):
    """In process 1, a subject cannot be read from its sixth use on."""

    uses = 6

    def __getitem__(self, index):
        self.uses -= os.environ["RANK"] == "1"
        if self.uses < 0:
            raise FileNotFoundError(2, "No such file or directory", "/data/sub-03.nii")
        return super().__getitem__(index)


class Invalid(Blobs):
    """Subjects that process 1 sees as NaN, from their sixth use on."""

    uses = 6

    def __getitem__(self, index):
        self.uses -= os.environ["RANK"] == "1"
        image, mask = super().__getitem__(index)
        return (image * np.nan if self.uses < 0 else image), mask


def expect_error(folder: Path, name: str, source: Blobs, **changes: int) -> None:
    """Runs into `folder`/`name` and writes the error that this process raises."""
    try:
        train(tiny_config(**changes), source, folder / name)
    except InputError as error:
        (folder / f"{name}-{os.environ['RANK']}.txt").write_text(str(error))


def fill_disk(folder: Path) -> None:
    """Only process 0 writes checkpoints, and sees that the second one does not fit."""
    real, written = disk.write_checkpoint, []

    def write(*arguments):
        written.append(1)
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "full")
        return real(*arguments)

    disk.write_checkpoint = write
    try:
        expect_error(folder, "full", Blobs())
    finally:
        disk.write_checkpoint = real


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    steps: list[int] = []
    result = train(tiny_config(**DIVIDED), Blobs(), folder / "divided", lambda step, *_: steps.append(step))
    assert (result.step, result.processes, len(steps)) == (20, 2, 0 if rank else 20)
    assert result.checkpoint.exists() and result.idle is not None and 0 <= result.idle <= 1
    train(tiny_config(**PARTS), Blobs(), folder / "parts")
    train(tiny_config(**PLANNED), Blobs(), folder / "planned")
    train(tiny_config(**FIRST | {"steps": 12}), Blobs(), folder / "one-then-two", resume=True)
    train(tiny_config(**FIRST), Blobs(), folder / "two-then-one")
    timed = train(tiny_config(**MINUTES), Blobs(), folder / "minutes")
    assert timed.ended == "minutes"
    stopped = train(tiny_config(), Blobs(), folder / "stopped", stop=lambda: rank == 1)
    assert (stopped.stopped, stopped.step) == (True, 1)
    expect_error(folder, "unreadable", Unreadable(), workers=0)
    expect_error(folder, "invalid", Invalid(), workers=0, max_skipped=2)
    fill_disk(folder)
    # Only process 0 looks into the folder, which holds a finished run.
    expect_error(folder, "divided", Blobs())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
