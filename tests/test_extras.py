"""The core dependencies are enough to sample; a command that needs an extra names the `pip install`."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.factories.core_only import EXTRAS as EXTRA_LIBRARIES
from tests.factories.core_only import voxtune_core
from tests.factories.nifti import write_mask
from voxtune.errors import EXTRAS
from voxtune.runtime.storage import demo_model

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
CORE = {"torch", "numpy", "nibabel", "pillow", "rich", "safetensors", "typer"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements}


def test_the_extras_are_those_of_the_package():
    assert names(PROJECT["dependencies"]) == CORE
    optional = PROJECT["optional-dependencies"]
    for library, extra in EXTRAS.items():
        assert {"yaml": "pyyaml"}.get(library, library) in names(optional[extra])
    assert optional["all"] == [f"voxtune[{','.join(sorted(set(optional) - {'all'}))}]"]


@pytest.mark.slow
def test_with_the_core_alone(tmp_path):
    mask = write_mask(tmp_path / "sub-1_dseg.nii.gz")
    (tmp_path / "train.yaml").write_text("steps: 1\n")
    needs_extra = {
        "cohort": ["cohort", "1", "-o", tmp_path / "cohort", "--size", "16,16,16"],
        "report": ["report", "--recorded", "-o", tmp_path / "report.html"],
        "train": ["train", "--config", tmp_path / "train.yaml", "-o", tmp_path / "run"],
    }
    sample = ["sample", demo_model(), "--mask", mask, "-o", tmp_path / "out", "--steps", "1", "--device", "cpu"]
    sampled, *failed = voxtune_core([sample, *needs_extra.values()])
    assert sampled["code"] == 0, sampled["err"]
    assert list((tmp_path / "out").rglob("*.nii.gz"))
    for extra, result in zip(needs_extra, failed, strict=True):
        assert result["code"] == 2, (extra, result)
        assert f'pip install "voxtune[{extra}]"' in result["err"] and result["err"].count("\n") == 1, result["err"]


@pytest.mark.slow
def test_the_python_api_with_the_core_alone(tmp_path):
    code = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRA_LIBRARIES.split()!r}))
import torch, voxtune
torch.set_num_threads(1)
model = voxtune.load("demo", device="cpu")
volume = model.draw(model.example_labels(), steps=1)
assert volume._repr_png_().startswith(b"\\x89PNG")
volume.save("sub-01_desc-synth01_T1w.nii.gz")
assert voxtune.view(".").name == "view.html"
for function, arguments in ((voxtune.train, dict(cohort=1, out="run")), (voxtune.train, dict(config="a.yaml", out="run"))):
    try:
        function(**arguments)
    except voxtune.InputError as error:
        print(error)
"""
    (tmp_path / "a.yaml").write_text("steps: 1\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert 'pip install "voxtune[cohort]"' in first and 'pip install "voxtune[train]"' in second
