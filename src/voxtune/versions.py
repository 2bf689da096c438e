"""The version of voxtune, and known defects of PyTorch and cuDNN versions (issue numbers of pytorch/pytorch)."""

from __future__ import annotations

import os
from pathlib import Path

__version__ = "0.2.0"


def commit() -> str:
    """VOXTUNE_COMMIT if set, else the commit of the checkout (with "+changes" if modified), else the version."""
    if os.environ.get("VOXTUNE_COMMIT"):
        return os.environ["VOXTUNE_COMMIT"]
    import subprocess

    root = Path(__file__).resolve().parents[2]
    try:
        if not (root / ".git").exists():
            raise OSError
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return f"voxtune {__version__}"


def _git(root: Path, *arguments: str) -> str:
    import subprocess

    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def cudnn_parts(version: int) -> tuple[int, int]:
    """Major and minor version of cuDNN's version number, whose format changed in version 9."""
    return (version // 10000, version // 100 % 100) if version >= 90000 else (version // 1000, version // 100 % 10)


def wrong_half_conv3d(cudnn: int) -> bool:
    """Whether BF16 3D convolutions can give wrong results (#163539)."""
    major, minor = cudnn_parts(cudnn)
    return major == 9 and 8 <= minor <= 10


def conv3d_without_cudnn(torch_version: str) -> bool:
    """Whether 3D convolutions may run without cuDNN, slowly and with much memory (#166122, #166643)."""
    return tuple(int(p) for p in torch_version.split("+", maxsplit=1)[0].split(".")[:2]) == (2, 9)
