from __future__ import annotations

from pathlib import Path

import pytest

from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.storage import save
from voxtune.workloads import MedDDPMConfig


@pytest.fixture(scope="session")
def golden_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A minimal Med-DDPM as a model on disk."""
    network = MedDDPMConfig(base=32, multipliers=(1, 1), attention=(2,))
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save(Model(ModelConfig(network=network, size=(8, 8, 8))), folder, card="tiny")
    return folder
