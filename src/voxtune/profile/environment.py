"""Provenance of a session: machine, versions, commit, command."""

from __future__ import annotations

import datetime
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from voxtune.files import recorded_command
from voxtune.versions import commit

_QUERY = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def environment(device: torch.device, ncu_version: str | None = None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
        "triton": _version("triton"),
        "ncu": ncu_version,
        "gpu": None,
        "driver": None,
        "cpu": _processor(),
        "threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "gpu": properties.name,
            "driver": smi(device).get("driver_version"),
            "capability": f"{properties.major}.{properties.minor}",
            "sm_count": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
        }
    return facts


def clocks(device: torch.device) -> dict[str, Any] | None:
    """The current clocks in MHz; None on a CPU."""
    if device.type != "cuda":
        return None
    values = smi(device)
    return {
        "sm_mhz": _number(values.get("clocks.sm")),
        "sm_max_mhz": _number(values.get("clocks.max.sm")),
        "memory_mhz": _number(values.get("clocks.mem")),
        "power_limit_w": _number(values.get("power.limit")),
    }


def smi(device: torch.device) -> dict[str, str]:
    """The values of nvidia-smi by name; empty if it is not installed."""
    command = [
        "nvidia-smi",
        f"--id={device.index or 0}",
        f"--query-gpu={','.join(_QUERY)}",
        "--format=csv,noheader,nounits",
    ]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(_QUERY, (v.strip() for v in output.strip().split(",")), strict=False))


def provenance() -> dict[str, Any]:
    return {
        "commit": commit(),
        "command": _command(),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _command() -> str:
    """The command line, without the path of the program on this machine."""
    program, *rest = sys.argv
    name = {"__main__.py": "python -m voxtune"}.get(Path(program).name, Path(program).name)
    return f"{name} {recorded_command(rest)}".rstrip()
