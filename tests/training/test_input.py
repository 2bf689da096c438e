"""How batches reach the device: workers, the cache, the idle share; the length of a run in epochs; deterministic runs."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.factories.tiny_training import Blobs, rows, tiny_config, weights
from voxtune.cli.main import main
from voxtune.data.cohort import cohort_contract
from voxtune.data.contract import Label
from voxtune.data.dataset import CACHE_BYTES, PairedFolders
from voxtune.data.subjects import Compact
from voxtune.errors import InputError
from voxtune.precision import deterministic_algorithms
from voxtune.training import data
from voxtune.training.checkpoint import checkpoints, read_checkpoint
from voxtune.training.config import DEFAULT_STEPS, DataSettings, make_config, with_steps
from voxtune.training.data import Loader, cache_limit, worker_count
from voxtune.training.folder import read_run
from voxtune.training.log import read_metrics
from voxtune.training.loop import train
from voxtune.training.prefetch import Prefetch

SIZE = (8, 8, 8)
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three subjects, images and masks in one folder, off the model's grid."""
    nibabel = pytest.importorskip("nibabel")
    root = tmp_path_factory.mktemp("data")
    for number in range(3):
        rng = np.random.default_rng(number)
        labels = np.zeros((14, 17, 13), np.uint8)
        labels[2:-2, 2:-2, 2:-2] = 1
        labels[5:8, 5 + number : 8 + number, 5:8] = 2
        image = (labels * 400.0 + rng.uniform(0, 40, labels.shape)).astype(np.float32)
        affine = np.diag([12.0, 12.0, 12.0, 1.0])
        nibabel.save(nibabel.Nifti1Image(image, affine), root / f"sub-{number}_T1w.nii.gz")
        nibabel.save(nibabel.Nifti1Image(labels, affine), root / f"sub-{number}_dseg.nii.gz")
    return root


def settings(folder, **changes):
    values = {"data": DataSettings(images=str(folder), masks=str(folder)), "batch": 2, "steps": 5}
    base = tiny_config(**values | changes)
    return replace(base, model=replace(base.model, size=SIZE))


def test_cached_subjects_equal_those_that_are_read(folder):
    contract = cohort_contract(SIZE)
    source, uncached = (PairedFolders(contract, folder, folder, cache_bytes=n) for n in (CACHE_BYTES, 0))
    assert isinstance(source, Compact)
    for _ in range(2):
        images, masks = source.stored((2, 0))
        unfolded, conds = source.unfold(images, masks)
        assert (images.dtype, masks.dtype) == (torch.float32, torch.uint8)
        for row, index in enumerate((2, 0)):
            for read in (source[index], uncached[index]):
                np.testing.assert_array_equal(unfolded[row].numpy(), read[0])
                np.testing.assert_array_equal(conds[row].numpy(), read[1])
    assert (source.cached, uncached.cached) == (2, 0)


def test_labels_above_255_do_not_wrap_around(folder):
    contract = cohort_contract(SIZE)
    large = replace(contract, labels=(*contract.labels, Label(name="far", value=258, channel=2)))
    source = PairedFolders(large, folder, folder)
    _, conds = source.unfold(*source.stored((0,)))
    np.testing.assert_array_equal(conds[0].numpy(), source[0][1])
    assert (conds[0, 2] < 0).all() and (conds[0, 1] > 0).any(), "258 is 2 in eight bits"


def test_the_cache_does_not_change_a_run(folder, tmp_path):
    for name, cache in (("auto", "auto"), ("none", "none"), ("one", "3KB"), ("threads", "auto")):
        train(settings(folder, cache=cache, workers=4 if name == "threads" else None), None, tmp_path / name)
    expected = weights(tmp_path / "none")
    assert all(weights(tmp_path / name) == expected for name in ("auto", "one", "threads"))


def test_the_limit_of_the_cache(monkeypatch):
    monkeypatch.setattr(data, "available_memory", lambda _device: 8 * 2**30)
    assert (cache_limit("none"), cache_limit("2GiB"), cache_limit("auto")) == (0, 2 * 2**30, 4 * 2**30)
    monkeypatch.setattr(data, "local_count", lambda: 4)
    assert cache_limit("auto") == 2**30
    monkeypatch.setattr(data, "available_memory", lambda _device: None)
    assert cache_limit("auto") == CACHE_BYTES
    for text in ("much", "-1GB", "0", ""):
        with pytest.raises(InputError, match=r"cache .*: must be auto, none or a size such as 8GB"):
            tiny_config(cache=text)


def test_the_overview_says_what_is_cached(folder, capsys):
    arguments = ["train", "--images", str(folder), "--masks", str(folder), "--size", "8,8,8", "--base", "32"]
    arguments += ["--multipliers", "1", "--batch", "2", "--epochs", "4", "--device", "cpu", "--dry-run"]
    for cache, line in (
        ("1GiB", "all subjects, in memory after their first use (limit 1.0 GiB)"),
        ("6KB", "2 of 3 subjects, in memory after their first use (limit 1 MiB)"),
        ("none", "off: subjects are read again in each epoch"),
    ):
        assert main([*arguments, "--cache", cache]) == 0
        out = capsys.readouterr().out
        assert f"cache        {line}" in out
        assert "length       3 steps of 4 samples, 4 epochs" in out


def test_workers_by_default(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(6), raising=False)
    assert (worker_count(tiny_config(), CPU), worker_count(tiny_config(), cuda)) == (2, 6)
    assert (worker_count(tiny_config(workers=0), cuda), worker_count(tiny_config(workers=11), CPU)) == (0, 11)
    monkeypatch.setattr(data, "local_count", lambda: 4)
    assert worker_count(tiny_config(), cuda) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: range(256), raising=False)
    assert worker_count(tiny_config(), cuda) == data.MAX_AUTO_WORKERS


class Slow(Blobs):
    """Takes a while to read."""

    seconds = 0.05

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


def test_waiting_for_batches_is_measured():
    loader = Loader(Slow(), seed=0, batch=2, start=0, workers=0, pin=False)
    prefetch = Prefetch(loader, CPU, threaded=False)
    batches = prefetch.take(3)
    assert [batch.numbers for batch in batches] == [(0, 1), (2, 3), (4, 5)]
    assert prefetch.idle_seconds(wait=True) >= 6 * Slow.seconds
    time.sleep(0.1)
    assert prefetch.idle_seconds() < 6 * Slow.seconds + 0.1, "only within `take`"
    prefetch.close()


def test_the_idle_share_is_logged_and_returned(tmp_path, capsys):
    slow = train(tiny_config(steps=4, workers=0, log_every=1), Slow(), tmp_path / "slow")
    fast = train(tiny_config(steps=4, workers=0, log_every=1), Blobs(), tmp_path / "fast")
    assert 0 <= fast.idle < 0.5 < slow.idle <= 1
    logged = [row["idle"] for row in read_metrics(tmp_path / "slow" / "metrics.jsonl")]
    assert len(logged) == 4 and all(0.5 < share <= 1 for share in logged)
    again = train(tiny_config(steps=4), Blobs(), tmp_path / "fast", resume=True)
    assert again.idle is None, "without a step"
    assert slow.to_json()["idle"] == slow.idle


def in_epochs(**changes):
    return replace(tiny_config(**changes), steps=DEFAULT_STEPS)


def test_epochs_are_a_number_of_steps(tmp_path):
    result = train(in_epochs(epochs=2, batch=2, accumulation=2), Blobs(5), tmp_path / "run")
    assert (result.step, result.steps, result.ended) == (3, 3, "steps")  # 10 samples in steps of 4
    stored = read_run(tmp_path / "run")
    assert (stored.epochs, stored.steps) == (2, 3)
    seen = [row["epoch"] for row in rows(tmp_path / "run")]
    assert seen == [1]
    more = train(read_run(tmp_path / "run", {"epochs": 4}), Blobs(5), tmp_path / "run", resume=True)
    assert (more.step, more.resumed_from) == (5, 3)
    whole = train(in_epochs(epochs=4, batch=2, accumulation=2), Blobs(5), tmp_path / "whole")
    assert whole.step == 5 and weights(tmp_path / "whole") == weights(tmp_path / "run")
    config = read_run(tmp_path / "run", {"steps": 6})
    assert (config.epochs, config.steps) == (None, 6)
    assert train(config, Blobs(5), tmp_path / "run", resume=True).step == 6
    with pytest.raises(InputError, match="already at step 6"):
        train(read_run(tmp_path / "run", {"epochs": 1}), Blobs(5), tmp_path / "run", resume=True)


def test_a_learning_rate_decays_over_the_epochs(tmp_path):
    config = in_epochs(epochs=2, decay="cosine", log_every=1)
    train(config, Blobs(5), tmp_path / "epochs")
    train(tiny_config(steps=5, decay="cosine", log_every=1), Blobs(5), tmp_path / "steps")
    assert rows(tmp_path / "epochs") == rows(tmp_path / "steps")
    with pytest.raises(InputError, match="steps: 5 -> 8, over which the learning rate decays"):
        train(read_run(tmp_path / "epochs", {"epochs": 3}), Blobs(5), tmp_path / "epochs", resume=True)


def test_contradictions_between_steps_and_epochs(tmp_path, capsys):
    assert with_steps(in_epochs(epochs=3), 5).steps == 8  # 15 samples in steps of 2
    with pytest.raises(
        InputError, match="steps 12 and epochs 3 contradict each other: 3 epochs of 5 subjects are 8 steps"
    ):
        train(tiny_config(epochs=3), Blobs(5), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match="steps and epochs cannot be combined"):
        make_config({}, {"steps": 2, "epochs": 3}, "options")
    file = {"steps": 7, "epochs": 3}
    assert make_config(file, {"epochs": 4}, "file").steps == DEFAULT_STEPS
    assert make_config(file, {"steps": 4}, "file").epochs is None
    assert main(["train", "--cohort", "2", "--steps", "3", "--epochs", "2", "-o", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == (
        "voxtune: error: steps and epochs cannot be combined: each sets the length of the run\n"
    )
    with pytest.raises(InputError, match="epochs 0"):
        tiny_config(epochs=0)


def test_deterministic_algorithms_are_restored(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn

    def state():
        flags = (torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark)
        return (*flags, os.environ.get("CUBLAS_WORKSPACE_CONFIG"), torch.utils.deterministic.fill_uninitialized_memory)

    before, during = state(), []
    config = tiny_config(steps=3, deterministic=True)
    train(config, Blobs(), tmp_path / "run", lambda *_: during.append(state()))
    assert during == [(True, True, False, ":4096:8", False)] * 3
    assert state() == before != during[0]
    train(tiny_config(steps=3), Blobs(), tmp_path / "plain")
    assert weights(tmp_path / "run") == weights(tmp_path / "plain"), "on a CPU"
    with pytest.raises(ZeroDivisionError), deterministic_algorithms(True):
        raise ZeroDivisionError
    assert state() == before


def test_an_operator_without_a_deterministic_implementation_is_one_line(tmp_path, monkeypatch):
    from voxtune.training import step

    def loss(*_):
        # On a CPU every operator of the networks is deterministic.
        raise RuntimeError("upsample_backward_cuda does not have a deterministic implementation, but you set ...")

    monkeypatch.setattr(step, "training_loss", loss)
    with pytest.raises(
        InputError, match="has no deterministic upsample_backward_cuda on this device: train without --det"
    ):
        train(tiny_config(deterministic=True), Blobs(), tmp_path / "run")


def test_settings_of_the_input_may_change_on_resume(tmp_path):
    train(tiny_config(steps=4), Blobs(), tmp_path / "run")
    changed = tiny_config(steps=6, workers=0, cache="none", deterministic=True)
    train(changed, Blobs(), tmp_path / "run", resume=True)
    train(tiny_config(steps=6), Blobs(), tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    assert read_checkpoint(checkpoints(tmp_path / "run" / "checkpoints")[-1]).config.cache == "none"
