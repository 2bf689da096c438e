"""The input of a run on a GPU: batches copied in advance, the idle share, and several processes with NCCL (one of them here)."""

from __future__ import annotations

import socket
import time

import pytest
import torch

from tests.factories.tiny_training import SIZE, Blobs, tiny_config
from voxtune.runtime.model import Model
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.data import Loader
from voxtune.training.distributed import Processes
from voxtune.training.loop import train
from voxtune.training.model import model_config
from voxtune.training.prefetch import DEPTH, Prefetch
from voxtune.training.step import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)


class Delayed(Blobs):
    """Takes `seconds` to read a subject."""

    def __init__(self, seconds: float, count: int = 5, size=SIZE):
        super().__init__(count, size)
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


def loaded(source, workers: int = 2) -> Loader:
    return Loader(source, seed=1, batch=2, start=3, workers=workers, pin=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_arrive_in_order_with_their_content(workers):
    source = Blobs(7, size=(32, 32, 32))
    prefetch = Prefetch(loaded(source, workers), CUDA, threaded=workers > 0)
    kept = []
    for step in range(20):
        (batch,) = prefetch.take(1)
        assert batch.numbers == (3 + 2 * step, 4 + 2 * step)
        images, masks = batch.on(CUDA)
        # Work that is still queued when the batch itself is gone: its memory must not be used for the next copies.
        torch.cuda._sleep(2_000_000)
        kept.append((batch.indices, images.clone(), masks.clone()))
        del batch, images, masks
    prefetch.close()
    for indices, images, masks in kept:
        for row, index in enumerate(indices):
            image, mask = source[index]
            assert torch.equal(images[row].cpu(), torch.from_numpy(image))
            assert torch.equal(masks[row].cpu(), torch.from_numpy(mask))


def test_copies_run_ahead_of_the_steps():
    prefetch = Prefetch(loaded(Blobs(7, size=(32, 32, 32))), CUDA, threaded=True)
    prefetch.take(1)
    deadline = time.monotonic() + 10
    while prefetch._ahead.qsize() < DEPTH:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    prefetch.close()
    assert not prefetch._thread.is_alive()


def test_queued_work_counts_as_busy():
    """Reading takes 30 ms a step: idle time without work on the GPU, none if each step keeps it busy for longer."""
    idle = {}
    for name, cycles in (("idle", 0), ("busy", 200_000_000)):  # at about 2 GHz, 100 ms
        prefetch = Prefetch(loaded(Delayed(0.015), workers=1), CUDA, threaded=True)
        prefetch.take(1)
        torch.cuda.synchronize()
        before, started = prefetch.idle_seconds(wait=True), time.perf_counter()
        for _ in range(10):
            torch.cuda._sleep(cycles)
            prefetch.take(1)
        idle[name] = (prefetch.idle_seconds(wait=True) - before) / (time.perf_counter() - started)
        prefetch.close()
    assert idle["idle"] > 0.5 and idle["busy"] < 0.05, idle


def test_a_run_does_not_wait_for_fast_input(tmp_path):
    slow = train(tiny_config(steps=6, workers=1), Delayed(0.2), tmp_path / "slow", device="cuda")
    assert slow.idle > 0.5
    config = tiny_config(steps=40, checkpoint_every=40)
    fast = train(config, Blobs(5), tmp_path / "fast", device="cuda")
    assert fast.idle < 0.3


def test_workers_do_not_change_what_is_learned(tmp_path):
    for name, workers in (("none", 0), ("two", 2), ("auto", None)):
        config = tiny_config(steps=6, workers=workers, deterministic=True)
        train(config, Blobs(), tmp_path / name, device="cuda")
    stored = [
        read_checkpoint(checkpoints(tmp_path / n / "checkpoints")[-1]).part("model.") for n in ("none", "two", "auto")
    ]
    for other in stored[1:]:
        assert all(torch.equal(value, other[name]) for name, value in stored[0].items())


@pytest.fixture(scope="module")
def connected():
    """One process with the groups that several have: NCCL on the GPU, and one for decisions on the CPU."""
    from torch import distributed

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    distributed.init_process_group("nccl", init_method=address, rank=0, world_size=1, device_id=CUDA)
    yield Processes(CUDA, control=distributed.new_group(backend="gloo"))
    distributed.destroy_process_group()


@pytest.mark.parametrize("changes", [{}, {"autocast": "bf16", "channels_last": True, "accumulation": 2, "clip": 1.0}])
def test_replicas_learn_what_the_network_learns(connected, changes):
    """DistributedDataParallel, its communication included, gives the weights of a step without it."""
    trained = []
    for processes in (None, connected):
        config = tiny_config(**changes)
        torch.manual_seed(0)
        trainer = Trainer(config, Model(model_config(config)), 5, CUDA, processes=processes)
        share = (processes or Processes(CUDA)).share(config)
        prefetch = Prefetch(Loader(Blobs(), seed=0, start=0, workers=2, pin=True, share=share), CUDA, threaded=True)
        losses = [trainer.train_step(prefetch.take(share.accumulation)) for _ in range(6)]
        prefetch.close()
        trained.append((losses, trainer.network.state_dict()))
    assert trained[0][0] == pytest.approx(trained[1][0], rel=1e-3)
    for name, value in trained[0][1].items():
        torch.testing.assert_close(trained[1][1][name], value, rtol=1e-2, atol=1e-3)


def test_decisions_of_processes_on_a_gpu(connected):
    assert connected.agree(15, 0.5) == (15, 0.5)
    assert connected.lead(lambda: "plan") == "plan"
    assert connected.mean(torch.full((2,), 3.0, device=CUDA)).tolist() == [3.0, 3.0]
    with pytest.raises(OSError, match="disk"), connected.together():
        raise OSError("disk")
