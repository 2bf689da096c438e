"""The training plan on a GPU: the recorded step, skipped steps, resuming, the choice of the fastest plan, no waiting."""

from __future__ import annotations

import gc
import json
import time
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.factories.tiny_training import Blobs, tiny_config
from voxtune.errors import InputError
from voxtune.plan.training_memory import TrainingMemory
from voxtune.precision import deterministic_algorithms
from voxtune.runtime.model import Model
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.config import ModelSettings
from voxtune.training.data import Batch, Loader
from voxtune.training.fit import MOST_FITS
from voxtune.training.folder import read_run
from voxtune.training.loop import train
from voxtune.training.model import model_config
from voxtune.training.plan import RewrittenForward, rewriting_plan, zeros
from voxtune.training.plan_choice import _Choice, choose_plan
from voxtune.training.plan_step import WARM_UP
from voxtune.training.step import Trainer
from voxtune.workloads import without_zeros

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GPU = torch.device("cuda")
SIZE = (16, 16, 16)
NETWORK = ModelSettings(size=SIZE, base=64, multipliers=(1, 2), attention=(), diffusion_steps=20)


def config_of(**changes):
    return tiny_config(**{"model": NETWORK, "batch": 1, "learning_rate": 1e-4, "clip": 1.0, **changes})


def model_of(config):
    torch.manual_seed(0)
    return Model(model_config(config), without_zeros(Model(model_config(config)).network))


def trained(config, steps, *, record=True, source=None):
    """(the trainer after some steps by the plan voxtune, its losses)"""
    source = source or Blobs(size=SIZE)
    trainer = Trainer(config, model_of(config), len(source), GPU, rewriting_plan("bf16"))
    trainer._queue.record = record
    loader, losses = batches_of(config, source), []
    for _ in range(steps):
        trainer.train_step([next(loader) for _ in range(config.accumulation)])
        trainer.settle()
        losses.append(trainer.loss)
    return trainer, losses


def batches_of(config, source):
    return iter(Loader(source, seed=0, batch=config.batch, start=0, workers=0, pin=True))


def weights_of(trainer):
    return torch.cat([p.detach().double().flatten() for p in trainer.network.parameters()])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_recorded_step_gives_the_weights_of_the_uncaptured_one(accumulation):
    """Without operators that sum in no fixed order: in BF16 their differences grow from step to step."""
    config = config_of(accumulation=accumulation, ema_start=2, ema_every=1)
    steps = WARM_UP + 5
    with deterministic_algorithms(True):
        recorded, losses = trained(config, steps)
        plain, expected = trained(config, steps, record=False)
    assert recorded._queue._recorded is not None and plain._queue._recorded is None
    assert torch.equal(weights_of(recorded), weights_of(plain)) and losses == expected
    means = [torch.cat([v.double().flatten() for v in t.ema.network.parameters()]) for t in (recorded, plain)]
    assert torch.equal(*means)
    counts = {float(s["step"]) for s in recorded.optimizer.state.values()}
    assert counts == {float(steps)}


class Nan(Blobs):
    """Subject 2 is NaN."""

    def __getitem__(self, index):
        image, mask = super().__getitem__(index)
        return (image * np.nan if index == 2 else image), mask


def test_a_step_with_nan_is_skipped_inside_the_graph():
    config = config_of(ema_start=2, ema_every=1)
    source = Nan(size=SIZE)
    trainer = Trainer(config, model_of(config), len(source), GPU, rewriting_plan("bf16"))
    loader, bad = batches_of(config, source), 0
    for step in range(14):
        batch = next(loader)
        before = weights_of(trainer), float(next(iter(trainer.optimizer.state.values()))["step"]) if step else 0.0
        mean = torch.cat([v.clone().flatten() for v in trainer.ema.network.parameters()])
        trainer.train_step([batch])
        trainer.settle()
        skipped = 2 in batch.indices
        bad += skipped
        assert torch.equal(weights_of(trainer), before[0]) == skipped
        assert torch.equal(torch.cat([v.flatten() for v in trainer.ema.network.parameters()]), mean) == skipped
        assert float(next(iter(trainer.optimizer.state.values()))["step"]) == before[1] + (not skipped)
        assert trainer.skipped == bad
    assert trainer._queue._recorded is not None and bad >= 2
    assert bool(torch.isfinite(weights_of(trainer)).all())


def test_a_batch_of_another_shape_runs_uncaptured_and_the_recording_stays_valid():
    config = config_of(batch=2)
    trainer, _ = trained(config, WARM_UP + 2)
    loader = batches_of(config, Blobs(size=SIZE))
    batch = next(loader)
    half = Batch(numbers=batch.numbers[:1], indices=batch.indices[:1], images=batch.images[:1], masks=batch.masks[:1])
    before = weights_of(trainer)
    for part in (half, batch):
        trainer.train_step([part])
        trainer.settle()
        assert trainer.skipped == 0 and not torch.equal(weights_of(trainer), before)
        before = weights_of(trainer)


def test_the_host_does_not_wait_in_a_step():
    trainer, _ = trained(config_of(), WARM_UP + 2)
    loader = batches_of(config_of(), Blobs(size=SIZE))
    batches = [next(loader) for _ in range(6)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            trainer.train_step([batch])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(trainer._waiting) == 1
    trainer.settle()


def test_resume_equals_uninterrupted(tmp_path):
    config = config_of(plan="voxtune", precision="bf16", steps=12, deterministic=True)
    source = Blobs(size=SIZE)
    train(config, source, tmp_path / "whole", model=model_of(config), device="cuda")
    seen = []
    stop = lambda: len(seen) >= 4  # noqa: E731
    train(config, source, tmp_path / "run", lambda *a: seen.append(a), stop=stop, model=model_of(config), device="cuda")
    said = []
    train(config, source, tmp_path / "run", device="cuda", resume=True, say=said.append)
    assert not said, "the plan of the checkpoint is used without measuring again"
    whole, run = (read_checkpoint(checkpoints(tmp_path / name / "checkpoints")[-1]) for name in ("whole", "run"))
    for part in ("model.", "ema.", "optimizer."):
        expected, given = whole.part(part), run.part(part)
        assert expected.keys() == given.keys()
        assert [k for k in expected if not torch.equal(expected[k], given[k])] == [], part
    assert (run.plan.name, run.plan.precision, run.state.step) == ("voxtune", "bf16", 12)


def test_the_fastest_plan_is_chosen_measured(record_property):
    config, said = config_of(steps=10**7), []
    plan = choose_plan(config, model_of(config), Blobs(size=SIZE), GPU, said.append)
    record_property("said", said)
    assert plan.precision == "bf16" and sum(c.kept for c in plan.candidates) == 1
    names = {c.name for c in plan.candidates}
    assert {"autocast", "autocast, channels-last", "voxtune", "torch.compile, channels-last"} == names
    kept = next(c for c in plan.candidates if c.kept)
    assert kept.p50_ms > 0 and kept.peak_gib > 0
    faster = [c for c in plan.candidates if c.p50_ms is not None and c.p50_ms < kept.p50_ms]
    assert all("refused" in c.why for c in faster)


@pytest.mark.parametrize("precision", ["bf16", "tf32", "fp32"])
def test_the_gate_accepts_the_rewritten_network(precision, record_property):
    config, said = config_of(plan="voxtune", precision=precision), []
    plan = choose_plan(config, model_of(config), Blobs(size=SIZE), GPU, said.append)
    record_property("said", said)
    assert (plan.name, plan.precision) == ("voxtune", precision)


@pytest.mark.alone
def test_recording_saves_time(record_property):
    config = config_of()
    search = _Choice(config, model_of(config), Blobs(size=SIZE), GPU, print)
    recorded = search._timed(rewriting_plan("bf16"))
    plain = search._timed(replace(rewriting_plan("bf16"), name="baseline", passes=()))
    record_property("recorded_ms", recorded.p50_ms)
    record_property("autocast_ms", plain.p50_ms)
    assert recorded.p50_ms < plain.p50_ms, "a small step is limited by launches, which a graph saves"
    trainer, _ = trained(config, WARM_UP + 2)
    batch = next(batches_of(config, Blobs(size=SIZE)))
    torch.cuda.synchronize()
    started = time.perf_counter()
    trainer.train_step([batch])
    record_property("host_ms", (time.perf_counter() - started) * 1e3)


def test_out_of_memory_names_settings_that_fit(tmp_path):
    """With a fraction of the memory, which a step of eight volumes exceeds; by the settings that are named it does not."""
    big = ModelSettings(size=(64, 64, 64), base=64, multipliers=(1, 2), attention=(), diffusion_steps=20)
    config = config_of(model=big, batch=8, steps=4, plan="baseline", precision="bf16")
    source = Blobs(size=(64, 64, 64))
    total = torch.cuda.get_device_properties(GPU).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + 3 * 2**30) / total)
    try:
        with pytest.raises(InputError, match=r"out of GPU memory: ") as refused:
            train(config, source, tmp_path / "run", device=GPU)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "resume" in str(refused.value) or "start again" in str(refused.value)


@contextmanager
def little_memory(gib):
    """This process may use so much more than it uses now."""
    total = torch.cuda.get_device_properties(GPU).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(GPU) + gib * 2**30) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_auto_fit_continues_with_settings_that_fit(tmp_path, record_property):
    """Eight volumes at once exceed the memory; the run goes on with the same samples in a step, and can be resumed."""
    big = ModelSettings(size=(64, 64, 64), base=64, multipliers=(1, 2), attention=(), diffusion_steps=20)
    config = config_of(model=big, batch=8, steps=6, plan="baseline", precision="bf16")
    source, said = Blobs(size=(64, 64, 64)), []
    with little_memory(3):
        result = train(config, source, tmp_path / "run", device=GPU, say=said.append, auto_fit=True)
    record_property("said", said)
    lines = [line for line in said if line.startswith("out of GPU memory: continuing with")]
    assert 1 <= len(lines) <= MOST_FITS and result.step == 6
    stored = read_run(tmp_path / "run")
    assert stored.samples_per_step == 8 and stored != config
    assert len(json.loads((tmp_path / "run" / "fits.json").read_text())) == len(lines)
    with little_memory(3):
        more = train(replace(stored, steps=8), source, tmp_path / "run", device=GPU, resume=True)
    assert more.step == 8 and more.resumed_from == 6


@pytest.mark.parametrize("budget", [None, 0.85])
def test_the_simulated_memory_is_that_of_the_gpu(budget, record_property):
    """The peak of uncaptured steps. Workspaces of cuDNN and cuBLAS are not simulated: a fixed allowance beside 10 %."""
    size, allowance = (64, 64, 64), 64 * 2**20
    config = config_of(model=replace(NETWORK, size=size, multipliers=(1, 1, 2)), batch=2)
    model, plan = model_of(config), rewriting_plan("bf16")
    model.network.to(GPU)
    network = RewrittenForward(plan, model.network).rewrite(zeros(model, 2))
    memory = TrainingMemory(network, zeros(model, 2))
    groups = () if budget is None else memory.within(int(budget * memory.step().total))
    estimated = memory.step(groups)
    del network, memory
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(GPU) - sum(p.nbytes for p in model.network.parameters())
    if budget is not None:
        plan = replace(plan, memory_budget=estimated.total)
    source = Blobs(size=size)
    trainer = Trainer(config, model, len(source), GPU, plan)
    trainer._queue.record = False
    batches = batches_of(config, source)
    for _ in range(2):
        trainer.train_step([next(batches)])
        trainer.settle()
    torch.cuda.reset_peak_memory_stats(GPU)
    trainer.train_step([next(batches)])
    trainer.settle()
    measured = torch.cuda.max_memory_allocated(GPU) - before
    record_property("estimated", estimated.by_category())
    record_property("measured", measured)
    assert estimated.total * 0.9 <= measured <= estimated.total * 1.1 + allowance
