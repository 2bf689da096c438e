"""The house's rules that a machine can check: imports run one way, and the core needs only torch and numpy."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "voxtune"
# Package -> the packages it may import from, besides itself, what those may import from, and the leaves at the root.
MAY_IMPORT: dict[str, set[str]] = {
    "workloads": set(),
    "diffusion": set(),
    "data": set(),
    "kernels": set(),
    "quality": set(),
    "plan": {"workloads", "diffusion", "kernels", "quality"},
    "runtime": {"workloads", "diffusion", "data", "plan", "kernels"},
    "training": {"runtime"},
    "segmentation": {"training"},
    "ladder": {"workloads", "diffusion", "kernels", "plan", "quality"},
    "profile": {"training"},
    "analysis": {"profile"},
    "report": {"analysis", "data"},
    "evaluation": {"segmentation", "quality", "plan", "profile", "report"},
    "scale": {"runtime", "training"},
}
LEAVES = {"config", "errors", "files", "precision", "versions"}


def allowed(package):
    direct = MAY_IMPORT[package]
    return direct.union(*(allowed(other) for other in direct))


def rooms_imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            parts = name.split(".")
            if parts[0] == "voxtune" and len(parts) > 1 and (SOURCE / parts[1]).is_dir():
                yield parts[1]


@pytest.mark.parametrize("room", sorted(p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists()))
def test_imports_run_one_way(room):
    if room == "cli":
        return
    for file in (SOURCE / room).rglob("*.py"):
        if file.read_text().startswith('"""Deprecated:'):  # an old name, kept for one version
            continue
        wrong = set(rooms_imported(file)) - allowed(room) - {room}
        assert not wrong, f"{file.relative_to(SOURCE)} imports from {sorted(wrong)}"


def test_import_needs_only_torch_and_numpy():
    code = """
import sys

REFUSED = set("nibabel scipy nilearn pandas pyarrow safetensors typer rich yaml PIL plotly triton tensorboard".split())

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in REFUSED:
            raise ImportError("refused: " + name)

sys.meta_path.insert(0, Refuse())
import voxtune
import voxtune.workloads, voxtune.diffusion, voxtune.runtime.model, voxtune.data.contract
print(voxtune.__version__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_stay_small():
    for file in SOURCE.rglob("*.py"):
        lines = file.read_text().count("\n")
        assert lines <= 420, f"{file.relative_to(SOURCE)} has {lines} lines: two rooms in one?"


def test_the_project_speaks_of_itself_alone():
    root = SOURCE.parent.parent
    words = ("/" + "work/", "." + "library", "sub" + "agent")
    for file in [*SOURCE.rglob("*.py"), *root.glob("*.md"), *(root / "docs").rglob("*.md")]:
        text = file.read_text()
        for word in words:
            assert word not in text, f"{file}: {word}"
