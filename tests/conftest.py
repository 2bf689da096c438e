"""Fixtures that many tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from voxtune.workloads import MedDDPMConfig, build

GOLDENS = Path(__file__).parent / "goldens"


@pytest.fixture(scope="session")
def golden():
    """(the tiny published-format network, its golden tensors)"""
    g = {k: torch.from_numpy(v) for k, v in np.load(GOLDENS / "med_ddpm_tiny.npz").items()}
    network = build(MedDDPMConfig(base=32, multipliers=(1, 2), attention=(2,)))
    state = torch.load(GOLDENS / "med_ddpm_tiny.pt", weights_only=True)["ema"]
    network.load_state_dict({k.removeprefix("denoise_fn."): v for k, v in state.items() if k.startswith("denoise_fn.")})
    return network, g
