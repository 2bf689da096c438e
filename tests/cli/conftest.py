from __future__ import annotations

from pathlib import Path

import pytest

from tests.factories.cli import CHECKPOINT
from voxtune.cli.main import main


@pytest.fixture(scope="session")
def imported_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny published checkpoint as a model folder; tests that change it take a copy."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    assert main(["import", CHECKPOINT, "-o", str(folder), "--size", "16,16,16", "--quiet"]) == 0
    return folder
