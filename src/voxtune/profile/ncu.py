"""Nsight Compute as a subprocess: where it is, what it knows, its command lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from voxtune.profile.ncucsv import explain

_PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu", "/usr/local/cuda*/nsight-compute-*/ncu")
# Their rules estimate what a kernel could gain. Those of ComputeWorkloadAnalysis and MemoryWorkloadAnalysis cost replays of
# their own and give estimates of parts of a kernel alone ("local").
SECTIONS = ("SpeedOfLight", "Occupancy", "SchedulerStats", "WarpStateStats")


def find_ncu() -> str | None:
    """Nsight Compute's command: VOXTUNE_NCU, else on the PATH, else where NVIDIA's installers put it (newest first)."""
    told = os.environ.get("VOXTUNE_NCU")
    if told is not None:
        return told if Path(told).is_file() else None
    found = shutil.which("ncu")
    if found:
        return found
    placed = [str(p) for place in _PLACES for p in Path("/").glob(place[1:])]
    return max(placed, key=_numbers, default=None)


def _numbers(path: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", path)]


class NcuError(Exception):
    """Nsight Compute gave nothing; the message says why."""


@dataclass(kw_only=True)
class Ncu:
    """`cache` and `clock` control are Nsight Compute's: none leaves caches warm and clocks free, as in a real step."""

    path: str
    cache_control: str = "none"
    clock_control: str = "none"
    notes: list[str] = field(default_factory=list)

    @cached_property
    def version(self) -> str | None:
        told = re.search(r"Version\s+([\d.]+)", self._ask("--version"))
        return told.group(1) if told else None

    @cached_property
    def _help(self) -> str:
        return self._ask("--help")

    @cached_property
    def metrics(self) -> set[str] | None:
        """Base names of the metrics that this version knows for the GPUs here; None when it cannot say."""
        told = self._ask("--query-metrics")
        names = set(re.findall(r"^(\w+__\w+)\s", told, re.MULTILINE))
        return names or None

    def command(
        self,
        report: Path,
        program: Sequence[str],
        *,
        metrics: Sequence[str],
        sections: Sequence[str] = (),
        functions: Sequence[str] = (),
        once: bool = False,
        source: bool = False,
    ) -> list[str]:
        """`functions`: count only these; `once`: only the first launch of each function, grid and block."""
        command = [self.path, "--config-file", "off", "--profile-from-start", "off"]
        command += ["--target-processes", "application-only"]
        command += ["--cache-control", self.cache_control, "--clock-control", self.clock_control]
        if functions:
            command += ["--kernel-name", f"regex:^({'|'.join(map(re.escape, functions))})$"]
        if once:
            command += ["--filter-mode", "per-launch-config", "--launch-count", "1"]
        if "--disable-extra-suffixes" in self._help:
            command += ["--disable-extra-suffixes"]
        if not source and "--import-sass" in self._help:
            command += ["--import-sass", "no"]
        for section in sections:
            command += ["--section", section]
        return [*command, "--metrics", ",".join(metrics), "--force-overwrite", "--export", str(report), *program]

    def page(self, report: Path, page: str, *, instances: bool = False, limit_s: float = 120) -> str:
        """A page of a report as CSV."""
        command = [self.path, "--config-file", "off", "--import", str(report), "--csv", "--page", page]
        command += ["--print-units", "base"]
        if instances:
            command += ["--print-metric-instances", "details"]
        try:
            # In a group of its own: a signal that asks us to stop is no reason to lose what was read.
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, check=False, process_group=0
            )
        except subprocess.TimeoutExpired:
            raise NcuError(f"Nsight Compute did not print its {page} page within {limit_s:.0f} s") from None
        if '"ID"' not in done.stdout:
            raise NcuError(explain(done.stdout + done.stderr, done.returncode))
        return done.stdout

    def _ask(self, option: str) -> str:
        try:
            done = subprocess.run([self.path, option], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            self.notes.append(f"ncu {option}: {error}")
            return ""
        return done.stdout + done.stderr
