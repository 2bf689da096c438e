from __future__ import annotations

import pytest
import torch

from voxtune.profile.ncu import find_ncu
from voxtune.profile.record import RecordOptions, record

pytestmark = pytest.mark.gpu


def test_every_tier_on_the_gpu_at_hand(tmp_path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    options = RecordOptions(mode="train", size=(32, 32), limit_s=150)
    (recorded,) = record("convnext", ["baseline"], tmp_path, options=options, say=print)
    session = recorded.session
    assert session is not None, recorded.error
    launches = session.launches
    assert {"forward", "backward", "optimizer"} <= set(launches["phase"])
    assert launches.loc[launches["class"].str.startswith("conv_"), "module"].notna().all()
    if find_ncu() is None or "permission" in str(session.meta["tiers"]["few"]["why"]):
        pytest.skip("no counters here")
    kernels = launches[launches["kind"] == "kernel"]
    assert kernels["cycles"].notna().mean() > 0.99
    assert session.meta["proof"]["holds"] is True
    assert len(session.opcodes) > 0
