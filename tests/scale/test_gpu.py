"""Data sets that are drawn on a GPU: the same bytes from every worker process, also after one was killed."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from tests.scale.datasets import Job, contents, write_masks, write_model
from voxtune.scale.engine import EngineOptions
from voxtune.scale.ledger import DatasetLedger
from voxtune.scale.local import LocalEngine
from voxtune.scale.verify import verify

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("plan", ["baseline", "auto"])
def test_bytes_do_not_depend_on_the_worker(plan, tmp_path):
    pytest.importorskip("nibabel")
    job = Job(
        model=write_model(tmp_path / "model"),
        manifest=write_masks(tmp_path / "masks", 8),
        out=tmp_path / "whole",
        per_mask=5,
        batch=2,
        plan=plan,
    )
    assert job.run(LocalEngine(EngineOptions(devices=("cuda:0",)))).missing == 0
    disturbed, killed = job.but(out=tmp_path / "disturbed"), []
    engine = LocalEngine(EngineOptions(devices=("cuda:0", "cuda:0")))

    def kill(tally):
        if tally.drawn >= 5 and not killed:
            killed.append(engine._workers[0].process.pid)
            os.kill(killed[0], signal.SIGKILL)

    tally = disturbed.run(engine, kill)
    assert killed and tally.missing == 0, tally.problems
    assert contents(disturbed.out) == contents(job.out)
    assert verify(disturbed.out).problems == [] and tally.reduced == 0
    settings = [DatasetLedger(folder).settings()["fixed"] for folder in (job.out, disturbed.out)]
    assert settings[0]["passes"] == settings[1]["passes"] and (plan == "auto") == bool(settings[0]["plans"])
