"""Project rules that a machine can check: layout, imports, file sizes, names and wording (docs/development/architecture.md)."""

from __future__ import annotations

import ast
import collections
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "voxtune"
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
    "api": {"evaluation"},
    "cli": set(),  # may import everything
}
# Third-party libraries of the packages that are limited to some; the others are not checked.
LIBRARIES: dict[str, set[str]] = {
    "workloads": {"torch"},
    "diffusion": {"torch"},
    "data": {"torch", "numpy", "nibabel", "scipy", "nilearn", "PIL"},
    "kernels": {"torch", "triton"},
    "quality": {"torch", "numpy"},
    "plan": {"torch", "triton"},
    "ladder": {"torch", "triton", "numpy"},
}
LEAVES = {"config", "errors", "files", "marks", "precision", "reading", "tensorfiles", "unpickle", "versions"}
# Calls that open or parse a file; a user's file is read through `voxtune.reading`, which limits sizes and guards errors.
READERS = {
    *("open", "os.open", "os.fdopen", "io.open", "read_text", "read_bytes", "json.load", "json.loads"),
    *("np.load", "np.fromfile", "np.memmap", "np.loadtxt", "np.genfromtxt", "torch.load", "safe_open", "load_file"),
    *("gzip.open", "gzip.decompress", "zipfile.ZipFile", "csv.reader", "csv.DictReader", "yaml.load", "nib.load"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "pd.read_parquet", "pd.read_csv", "Image.open"),
}
# Module -> (the readers it calls, why).
MAY_READ: dict[str, tuple[set[str], str]] = {
    "reading.py": ({"os.open", "os.fdopen", "json.loads", "zipfile.ZipFile"}, "the readers"),
    "files.py": ({"os.open"}, "the writer"),
    "cli/main.py": ({"os.open"}, "/dev/null"),
    "cli/problems.py": ({"os.fdopen"}, "a temporary file that it writes"),
    "analysis/dataset.py": ({"read_text", "json.loads"}, "data of the package"),
    "analysis/estimate.py": ({"read_text", "json.loads"}, "data of the package"),
    "analysis/mix.py": ({"read_text", "json.loads"}, "data of the package"),
    "analysis/study.py": ({"read_text", "json.loads"}, "data of the package"),
    "ladder/published_results.py": ({"read_text", "json.loads"}, "data of the package"),
    "report/html.py": ({"read_text"}, "data of the package"),
    "report/view.py": ({"read_text"}, "data of the package"),
    "data/pixels.py": ({"Image.open"}, "within the guard; its size is checked before it is decoded"),
    "data/subjects.py": ({"open"}, "a member of an archive of opening_zip"),
    "tensorfiles.py": ({"open"}, "a member of an archive of opening_zip; the temporary file that it writes"),
    "plan/saved_graph.py": ({"read_bytes"}, "source of the package"),
    "runtime/batching.py": ({"read_text"}, "/proc"),
    "profile/environment.py": ({"read_text"}, "/proc"),
    "profile/worker.py": ({"read_text", "json.loads"}, "files of its own parent process"),
    "profile/worker_pool.py": ({"read_text", "json.loads", "open"}, "files of its own worker processes"),
    "profile/trace.py": (
        {"read_bytes", "json.loads"},
        "a temporary file of the profiler; traces parsed within the guard",
    ),
    "profile/ncu.py": ({"csv.DictReader", "csv.reader"}, "output of Nsight Compute, parsed within the guard"),
    "kernels/compile_workers.py": ({"pickle.loads", "os.fdopen"}, "pipes of its own worker processes"),
    "scale/manifest.py": ({"csv.reader"}, "text that is read and parsed within the guard"),
    "training/config.py": ({"yaml.load"}, "within the guard; its loader limits depth and aliases"),
}
# Modules of fewer lines than this belong in their importer, if they have only one.
SMALL = 60
LARGE = 600
# Many short files hide where a thing is.
MEAN_LINES = 130
# Modules that are loaded by name: by an entry point, by `python -m`, by a worker process or by a registry.
LOADED_BY_NAME = {"plan/passes", "cli", "kernels", "workloads", "report/sections"}
# Phrases of version 0.1 that a reader has to read twice (shared vocabulary: docs/development/contributing.md, "Language").
BANNED = (
    r"\bmend(s|ed|ing)?\b",
    r"\btold apart\b",
    r"\bh(o|e)ld(s|ing)? (\w+ )?against\b",
    r"\bnot worse\b",
    r"\bour fault\b",
    r"\basked for\b",
    r"\bleave \S+ (away|out)\b",
    r"\bunless told\b",
    r"\bwhere to\?",
    r"\bsays so\b",
    r"\bat most of\b",
    r"\bthe house\b",
    r"\bsides that divide\b",
    r"\bthe seed's\b",
    r"\bas its owner wrote\b",
)
BANNED_NAMES = {"found", "told", "asked", "heard", "said", "takes", "wanted"}
# Files that hold a banned phrase for a reason: the test's own list, results files' keys, quotations.
QUOTES_OLD_WORDING = {"CONTRIBUTING.md", "CHANGELOG.md", "src/voxtune/quality/step_table.py"}


def source_files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(file: Path) -> str:
    return file.relative_to(SOURCE).as_posix()


def deprecated(file: Path) -> bool:
    """A module that only forwards an old name, kept for one version."""
    return file.read_text().startswith('"""Deprecated:')


def imports(file: Path) -> set[str]:
    """Dotted names of all modules that a file imports, at any depth of the code."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def packages_imported(file: Path) -> set[str]:
    parts = [name.split(".") for name in imports(file)]
    return {p[1] for p in parts if p[0] == "voxtune" and len(p) > 1 and (SOURCE / p[1]).is_dir()}


def allowed(package: str) -> set[str]:
    direct = MAY_IMPORT[package]
    return direct.union(*(allowed(other) for other in direct))


def packages() -> list[str]:
    return sorted(p.name for p in SOURCE.iterdir() if (p / "__init__.py").exists())


def test_every_package_has_import_rules():
    assert set(packages()) <= set(MAY_IMPORT)


@pytest.mark.parametrize("package", [p for p in packages() if p != "cli"])
def test_imports_run_one_way(package):
    for file in (SOURCE / package).rglob("*.py"):
        if deprecated(file):
            continue
        wrong = packages_imported(file) - allowed(package) - {package}
        assert not wrong, f"{name_of(file)} imports from {sorted(wrong)}"


@pytest.mark.parametrize("package", sorted(LIBRARIES))
def test_packages_use_only_their_libraries(package):
    for file in (SOURCE / package).rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(file)}
        wrong = roots - set(sys.stdlib_module_names) - LIBRARIES[package] - {"voxtune"}
        assert not wrong, f"{name_of(file)} imports {sorted(wrong)}"


def test_the_root_holds_leaves_only():
    modules = {file.stem for file in SOURCE.glob("*.py")} - {"__init__", "__main__"}
    assert modules == LEAVES
    for leaf in LEAVES:
        file = SOURCE / f"{leaf}.py"
        assert not packages_imported(file), f"{leaf}.py imports from a package"


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


def test_the_command_line_starts_without_torch():
    """`voxtune --help` and shell completion answer at once."""
    code = "import sys, voxtune.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_have_a_sensible_size():
    lines = {name_of(file): file.read_text().count("\n") for file in source_files()}
    assert sum(lines.values()) >= MEAN_LINES * len(lines), f"{len(lines)} files: merge small ones"
    for name, count in lines.items():
        assert count <= LARGE, f"{name} has {count} lines: two modules in one?"


def importers() -> dict[str, set[str]]:
    """Module name -> the source files that import it."""
    users: dict[str, set[str]] = collections.defaultdict(set)
    for file in source_files():
        for name in imports(file):
            users[name].add(name_of(file))
    return users


def test_small_modules_with_one_importer_are_merged():
    users = importers()
    splinters = []
    for file in source_files():
        relative = name_of(file)
        if file.name in ("__init__.py", "__main__.py") or file.read_text().count("\n") >= SMALL or deprecated(file):
            continue
        if relative.rsplit("/", 1)[0] in LOADED_BY_NAME:
            continue
        module = "voxtune." + relative.removesuffix(".py").replace("/", ".")
        if len(users[module]) == 1:
            splinters.append(f"{relative} (only importer: {next(iter(users[module]))})")
    assert not splinters, splinters


def readers_called(file: Path) -> set[str]:
    """The names in READERS that a file calls: json.loads, or a method such as path.read_text as read_text."""
    called = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            method = name.rpartition(".")[2]
            called |= {name} & READERS - {"read_text"} or ({method} & READERS if method != name else set())
    return called


def test_files_of_users_are_read_by_one_module():
    wrong = {name_of(f): readers_called(f) - MAY_READ.get(name_of(f), (set(), ""))[0] for f in source_files()}
    assert not {name: sorted(calls) for name, calls in wrong.items() if calls}
    unused = {name: allowed - readers_called(SOURCE / name) for name, (allowed, _) in MAY_READ.items()}
    assert not {name: sorted(calls) for name, calls in unused.items() if calls}


def test_a_class_name_has_one_meaning():
    places: dict[str, list[str]] = collections.defaultdict(list)
    for file in source_files():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name_of(file))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_names_are_domain_nouns():
    wrong = []
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text())):
            name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else None
            if name in BANNED_NAMES:
                wrong.append(f"{name_of(file)}:{node.lineno} {name}")
    assert not wrong, wrong[:20]


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *SOURCE.rglob("*.md")]


def test_wording():
    wrong = []
    for file in [*source_files(), *documents()]:
        if file.relative_to(ROOT).as_posix() in QUOTES_OLD_WORDING or "assets" in file.parts:
            continue
        text = file.read_text()
        for pattern in BANNED:
            wrong += [
                f"{file.relative_to(ROOT)}:{text[: m.start()].count(chr(10)) + 1} {m[0]!r}"
                for m in re.finditer(pattern, text)
            ]
    assert not wrong, "\n".join(wrong[:40])


# Calls that write, move or delete a file. Only `voxtune.files` may make them, so that its rules hold everywhere.
WRITES = {
    "write_text",
    "write_bytes",
    "rmtree",
    "unlink",
    "mkstemp",
    "mkdtemp",
    "rename",
    "renames",
    "remove",
    "copyfile",
}
WRITES |= {"copy2", "copytree", "move", "symlink_to", "savefig", "to_parquet", "to_csv", "touch", "truncate", "link"}
# Libraries whose functions of these names take the file as an argument; `part` is the file that `files.writing` yields.
WRITES_TO = {"save", "savez", "savez_compressed", "save_file", "write_table", "dump", "export_chrome_trace"}
OWN_WRITERS = {
    "files.py": "the writer",
    "cli/problems.py": "the list of many errors, in the system's temporary folder",
    "runtime/storage.py": "weights without their config are deleted first",
    "training/folder.py": "the locked folder of a run",
    "profile/worker.py": "the scratch folder of a worker process",
    "profile/worker_pool.py": "the scratch folder of a worker process",
    "plan/saved_graph.py": "the cache",
    "training/checkpoint.py": "the locked folder of a run",
    "training/log.py": "the locked folder of a run",
    "training/loop.py": "the locked folder of a run",
    "profile/trace.py": "the profiler's trace, in a temporary folder",
}


def writes_directly(node: ast.Call) -> bool:
    """Whether a call writes a file by another function than those of `voxtune.files`."""
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    places = [function.value, *node.args] if isinstance(function, ast.Attribute) else node.args
    if any(isinstance(place, ast.Name) and place.id in ("part", "buffer") for place in places):
        return False
    if name == "open":
        mode = next((a for a in [*node.args, *(k.value for k in node.keywords)] if isinstance(a, ast.Constant)), None)
        return isinstance(mode, ast.Constant) and isinstance(mode.value, str) and bool(set("wax+") & set(mode.value))
    if name == "replace":  # of a path; a text has two arguments, a dataclass keywords
        return isinstance(function, ast.Attribute) and len(node.args) == 1 and not node.keywords
    if name in WRITES_TO:
        owner = function.value if isinstance(function, ast.Attribute) else None
        library = isinstance(owner, ast.Name) and owner.id in ("torch", "np", "nib", "pq", "json", "profiler")
        return (
            library
            or name in ("save_file", "write_table")
            or any(k.arg in ("format", "pnginfo") for k in node.keywords)
        )
    text = bool(node.args) and isinstance(node.args[0], ast.Constant)  # of a column
    return name in WRITES and not (name in ("rename", "remove", "link") and (text or node.keywords or not node.args))


def test_files_are_written_by_the_writer_alone():
    found_in: dict[str, list[str]] = collections.defaultdict(list)
    for file in source_files():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and writes_directly(node):
                found_in[name_of(file)].append(f"{name_of(file)}:{node.lineno} {ast.unparse(node)[:80]}")
    others = [line for name, lines in found_in.items() if name not in OWN_WRITERS for line in lines]
    assert not others, "\n".join(others)


def test_the_test_of_writers_finds_them():
    for text in (
        'path.write_text("x")',
        'open(path, "w")',
        'path.open("ab")',
        'io.open(path, mode="x")',
        "path.replace(other)",
        "shutil.rmtree(folder)",
        "path.unlink(missing_ok=True)",
        "torch.save(state, path)",
        "np.savez_compressed(path, a=a)",
        'image.save(path, format="PNG")',
        "tempfile.mkstemp()",
    ):
        assert writes_directly(ast.parse(text, mode="eval").body), text
    for text in (
        'open(path, "rb")',
        'text.replace("a", "b")',
        "replace(row, a=1)",
        "part.write_bytes(data)",
        "path.open()",
    ):
        assert not writes_directly(ast.parse(text, mode="eval").body), text


def test_the_project_speaks_of_itself_alone():
    words = ("/" + "work/", "." + "library", "sub" + "agent")
    for file in [*source_files(), *documents()]:
        text = file.read_text()
        for word in words:
            assert word not in text, f"{file}: {word}"


FIRST_VERSION = ("runtime.train", "runtime.trainconfig", "quality.overlap", "quality.neighbours")


def test_import_paths_of_the_first_version_resolve_with_a_warning():
    code = """
import importlib, sys, warnings

for name in sys.argv[1:]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        importlib.import_module("voxtune." + name)
    assert any(issubclass(w.category, DeprecationWarning) for w in caught), name
"""
    done = subprocess.run([sys.executable, "-c", code, *FIRST_VERSION], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
