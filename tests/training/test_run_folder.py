"""Files of a training run that somebody else changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile.kinds import KINDS
from voxtune.errors import InputError
from voxtune.training.config import MAX_FILE_BYTES, read_config
from voxtune.training.folder import read_run


@pytest.mark.parametrize("place", ["x" * 5000, "../" * 2000 + "x", "\0", "/absent"])
def test_a_place_of_the_data_that_cannot_exist_is_refused(tmp_path: Path, place: str) -> None:
    KINDS["training runs and their checkpoints"].write(tmp_path)
    sources = tmp_path / "run" / "sources.json"
    assert read_run(tmp_path / "run").data.subjects == str(tmp_path / "subjects.npz")
    sources.write_text(json.dumps({**json.loads(sources.read_text()), "data.subjects": place}))
    with pytest.raises(InputError, match=r"sources\.json: .* not found, but the run needs it"):
        read_run(tmp_path / "run")


def test_a_config_of_a_size_that_takes_minutes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train.yaml"
    path.write_text("steps: [" + "1," * MAX_FILE_BYTES + "1]\n")
    with pytest.raises(InputError, match="more than a config of a training run can have"):
        read_config(path)
