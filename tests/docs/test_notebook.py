"""The notebooks of the guide run from start to end, and the page of the first one on the site shows its cells."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import voxtune

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK, OWN_NETWORK = (ROOT / "docs" / "guide" / f"{name}.ipynb" for name in ("example", "own-network"))


def cells(kind: str, notebook: Path = NOTEBOOK) -> list[str]:
    return ["".join(c["source"]) for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == kind]


def run_cell(source: str, namespace: dict[str, Any]) -> Any:
    """Runs a cell and returns the value of its last line if that is an expression, which a notebook shows."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, str(NOTEBOOK), "exec"), namespace)
    return None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), namespace)


@pytest.mark.slow
def test_the_notebook_runs_from_start_to_end(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    namespace: dict[str, Any] = {}
    shown = [run_cell(source, namespace) for source in cells("code")]
    model, mask, volume = (value for value in shown if isinstance(value, voxtune.Model | voxtune.Volume))
    assert "64 x 64 x 64" in repr(model) and "labels 0, 1, 2" in repr(mask) and "T1w, 64 x 64 x 64" in repr(volume)
    for picture in (mask._repr_html_(), volume._repr_html_()):
        assert "data:image/png;base64" in picture
    printed = capsys.readouterr().out
    for refusal in ("whole number or 'auto'", "seed must be a whole number", "unknown sampler 'euler'"):
        assert refusal in printed
    folder = namespace["folder"]
    assert folder.parent == tmp_path
    assert {p.name for p in folder.iterdir()} == {
        *("sub-01_dseg.nii.gz", "sub-01_desc-synth01_T1w.nii.gz", "view.html")
    }


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_the_notebook_of_own_networks_runs(tmp_path, monkeypatch, capsys):
    pytest.importorskip("monai")
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    namespace: dict[str, Any] = {}
    shown = [run_cell(source, namespace) for source in cells("code", OWN_NETWORK)]
    (error,) = (value for value in shown if isinstance(value, float))
    assert error < 1e-4
    printed = capsys.readouterr().out
    assert namespace["fast"].report() in printed and "ms, fast " in printed


@pytest.mark.parametrize("path", [NOTEBOOK, OWN_NETWORK], ids=lambda p: p.stem)
def test_the_notebook_is_stored_without_outputs(path):
    notebook = json.loads(path.read_text())
    assert all(
        c["outputs"] == [] and c["execution_count"] is None for c in notebook["cells"] if c["cell_type"] == "code"
    )
    assert len({c["id"] for c in notebook["cells"]}) == len(notebook["cells"])


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "tools" / "docs_hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_every_cell(hooks):
    source = "guide/notebook.md"
    markdown = (ROOT / "docs" / source).read_text()
    page = hooks.on_page_markdown(markdown, SimpleNamespace(file=SimpleNamespace(src_uri=source)))
    for cell in cells("markdown"):
        assert cell in page
    for cell in cells("code"):
        assert f"```python\n{cell}\n```" in page
    assert page.startswith("# Voxtune in a notebook"), "the title is that of the notebook"
