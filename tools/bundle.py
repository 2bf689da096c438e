"""Packs Voxtune for a machine without internet: wheels of all dependencies, models, checksums and install.sh.

python tools/bundle.py -o dist [--without-torch] [--model FOLDER ...] [--extras report,scale]

The wheels are those of this machine's kind (operating system, processor, Python), from the package index that pip is
configured with; the versions are those of requirements/dev.txt. PyTorch is included unless --without-torch: for CUDA it and its
libraries are several GB, and many clusters have it as a module. The wheels are the licensed works of their authors.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = "cohort,report,scale,train"
# What comes with PyTorch, or with the PyTorch of the target.
OF_TORCH = re.compile(r"(torch|triton|nvidia[-_].*|cuda[-_].*)-", re.IGNORECASE)


def run(*words: object) -> None:
    subprocess.run([str(word) for word in words], check=True, cwd=ROOT)


def pinned(folder: Path) -> Path:
    """The versions of the development environment as constraints, without those of other builds of PyTorch."""
    lines = (ROOT / "requirements" / "dev.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join(line for line in lines if not line.startswith("triton==")) + "\n")
    return constraints


def checksums(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    lines = []
    for path in files:
        with path.open("rb") as stream:
            lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {path.relative_to(folder).as_posix()}")
    return "\n".join(lines) + "\n"


def make(out: Path, *, torch: bool, models: list[Path], extras: str, archive: bool) -> Path:
    for model in models:
        if not (model / "config.json").is_file() or not (model / "model.safetensors").is_file():
            raise SystemExit(f"{model}: not a model folder (config.json and model.safetensors)")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    bundle = out / "voxtune-bundle"
    if bundle.exists():
        shutil.rmtree(bundle)
    wheels = bundle / "wheels"
    wheels.mkdir(parents=True)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", wheels.resolve())
    [own] = wheels.glob("voxtune-*.whl")
    wanted = f"{own.resolve()}[{extras}]" if extras else str(own.resolve())
    options = ["--quiet", "--only-binary=:all:", "-d", wheels.resolve(), "-c", pinned(out).resolve()]
    run(sys.executable, "-m", "pip", "download", *options, wanted)
    (out / "constraints.txt").unlink()
    if not torch:
        for wheel in wheels.iterdir():
            if OF_TORCH.match(wheel.name):
                wheel.unlink()
        (bundle / "WITHOUT_TORCH").touch()
    for model in models:
        shutil.copytree(model, bundle / "models" / model.resolve().name)
    (bundle / "EXTRAS").write_text(f"[{extras}]" if extras else "")
    (bundle / "PYTHON").write_text(python)
    shutil.copy(ROOT / "deploy" / "install.sh", bundle)
    (bundle / "SHA256SUMS").write_text(checksums(bundle))
    if not archive:
        return bundle
    with tarfile.open(f"{bundle}.tar", "w") as tar:  # wheels are compressed
        tar.add(bundle, bundle.name)
    return Path(f"{bundle}.tar")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch and its CUDA libraries out")
    parser.add_argument("--model", type=Path, action="append", default=[], help="model folder to include; repeatable")
    parser.add_argument("--extras", default=EXTRAS, help="extras to include, separated by commas")
    parser.add_argument("--no-archive", action="store_true", help="leave the folder, without a tar file")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    target = make(
        given.out,
        torch=not given.without_torch,
        models=given.model,
        extras=given.extras,
        archive=not given.no_archive,
    )
    size = sum(f.stat().st_size for f in target.rglob("*") if f.is_file()) if target.is_dir() else target.stat().st_size
    print(f"{target}: {size / 2**20:.0f} MiB")
