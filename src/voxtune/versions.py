"""Which code this is; and known defects of versions of others (issue numbers of pytorch/pytorch), for whoever has to warn
of them or to keep clear of them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

__version__ = "0.1.0"


def commit() -> str:
    """The checkout's commit, marked if files differ from it; outside a checkout, VOXTUNE_COMMIT or the version."""
    if os.environ.get("VOXTUNE_COMMIT"):
        return os.environ["VOXTUNE_COMMIT"]
    root = Path(__file__).resolve().parents[2]
    try:
        if not (root / ".git").exists():
            raise OSError
        head = _git(root, "rev-parse", "HEAD")
        return head + ("+changes" if _git(root, "status", "--porcelain", "--untracked-files=no", "--", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return f"voxtune {__version__}"


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()


def cudnn_parts(version: int) -> tuple[int, int]:
    """Major and minor of the number that cuDNN gives; its form changed with 9."""
    return (version // 10000, version // 100 % 100) if version >= 90000 else (version // 1000, version // 100 % 10)


def wrong_half_conv3d(cudnn: int) -> bool:
    """BF16 3D convolutions can be wrong (#163539)."""
    major, minor = cudnn_parts(cudnn)
    return major == 9 and 8 <= minor <= 10


def conv3d_without_cudnn(torch_version: str) -> bool:
    """3D convolutions may run without cuDNN, slowly and in much memory (#166122, #166643)."""
    return tuple(int(p) for p in torch_version.split("+", maxsplit=1)[0].split(".")[:2]) == (2, 9)
