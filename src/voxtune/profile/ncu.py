"""Nsight Compute as a subprocess: its location, metrics, command lines and CSV pages."""

from __future__ import annotations

import csv
import io
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from voxtune.files import paths_are_recorded, recorded_text
from voxtune.profile import schema
from voxtune.profile.align import Key, launch_key
from voxtune.profile.schema import TableColumn

log = logging.getLogger("voxtune")

# A cell with all instances of an opcode metric exceeds the csv module's limit of 128 KiB.
MAX_CELL = 2**27
# Memory of a row and of each of its cells, of which Python holds a text and a place in a dictionary.
ROW_BYTES, CELL_BYTES = 300, 90
PRIVATE_COLUMNS = {"Process ID", "Process Name", "Host Name"}
# An imported report is printed in units of its own choice ("ms", "Gbyte"), whatever --print-units says.
_SCALES = {f"{prefix}byte": 1000.0**power for power, prefix in enumerate(("", "K", "M", "G", "T"))}
_SCALES |= {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3, "s": 1e6, "second": 1e6}


@dataclass
class CountedLaunch:
    """One launch as recorded by Nsight Compute. `values` holds the columns of the launch table that were read."""

    number: str
    name: str
    key: Key
    values: dict[str, float | str | None]
    opcodes: dict[str, float] = field(default_factory=dict)
    passes: int | None = None
    time_us: float | None = None

    @property
    def identity(self) -> tuple[str, str, str]:
        """Distinguishes template instances of one function, which the key does not."""
        return self.name, self.key.grid, self.key.block


def read_raw(text: str, columns: Mapping[str, str]) -> list[CountedLaunch]:
    """The launches of a raw page. `columns` maps a column to its metric; a metric that was not collected is left out."""
    rows = _rows(text)
    units = next(rows, {})
    if units.get("ID"):  # the page has no line of units
        rows, units = iter([units, *rows]), {}
    return [_launch(row, units, columns) for row in rows if row.get("Kernel Name")]


def _launch(row: dict[str, str], units: dict[str, str], columns: Mapping[str, str]) -> CountedLaunch:
    name, grid, block = row["Kernel Name"], _triple(row.get("Grid Size", "")), _triple(row.get("Block Size", ""))
    values: dict[str, float | str | None] = {}
    for column, metric in columns.items():
        value = number(row.get(metric))
        if value is not None:
            values[column] = value * _SCALES.get(units.get(metric, ""), 1.0)
    passes, time = number(row.get("profiler__replayer_passes")), number(row.get(schema.TIME))
    return CountedLaunch(
        number=row["ID"],
        name=name,
        key=launch_key(name, grid, block),
        values=_derived(values),
        opcodes=instances(row.get(schema.OPCODES, "")),
        passes=int(passes) if passes is not None else None,
        time_us=time * _SCALES.get(units.get(schema.TIME, ""), 1.0) if time is not None else None,
    )


def _derived(values: dict[str, float | str | None]) -> dict[str, float | str | None]:
    """Adds the columns that are sums or differences of others."""
    hmma, hfma2 = values.get("inst_hmma"), values.get("inst_hfma2")
    if isinstance(hmma, float) and isinstance(hfma2, float):
        values["inst_hmma"] = max(0.0, hmma - hfma2)
    parts = [values[k] for k in ("tensor_ops_tf32", "tensor_ops_bf16", "tensor_ops_fp16") if k in values]
    if parts:
        values["tensor_ops"] = sum(p for p in parts if isinstance(p, float))
    return values


def read_rules(text: str) -> dict[str, tuple[float, str]]:
    """Launch number -> (largest estimated speed-up in %, rule). Estimates for the whole kernel precede local ones."""
    best: dict[str, tuple[bool, float, str]] = {}
    for row in _rows(text):
        gain, rule = number(row.get("Estimated Speedup")), row.get("Rule Name")
        if gain is None or not rule:
            continue
        is_global = row.get("Estimated Speedup Type", "").lower() != "local"
        candidate = (is_global, gain, rule if is_global else f"{rule} (local)")
        if row["ID"] not in best or candidate[:2] > best[row["ID"]][:2]:
            best[row["ID"]] = candidate
    return {k: (gain, rule) for k, (_, gain, rule) in best.items()}


def page_memory(text: str) -> int:
    """At most the memory of a page as rows, each of which has every column of the header."""
    header = re.search(r'^"ID".*', text, re.MULTILINE)
    columns = 1 if header is None else header[0].count(",") + 1
    return text.count("\n") * (ROW_BYTES + columns * CELL_BYTES) + 4 * len(text)


def _rows(text: str) -> Iterator[dict[str, str]]:
    """The rows of the CSV, without the tool's messages before and after it."""
    lines = text.split("\n")
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return
    with _large_cells():
        table = list(csv.DictReader(line for line in lines[start:] if line.startswith('"')))
    for row in table:
        yield {k: v or "" for k, v in row.items() if k is not None}


def raw_files(folder: Path, tier: str) -> tuple[Path, Path, Path]:
    """The raw recording of a tier: Nsight Compute's two pages, and the rest."""
    return folder / f"{tier}-raw.csv.gz", folder / f"{tier}-details.csv.gz", folder / f"{tier}.json"


@contextmanager
def _large_cells() -> Iterator[None]:
    """Within the block, the csv module reads cells of up to MAX_CELL characters; its limit is one of the whole process."""
    before = csv.field_size_limit(MAX_CELL)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def recorded_page(text: str) -> str:
    """A CSV page for a record: without the tool's messages, which name paths, and without the process and its host."""
    if paths_are_recorded():
        return text
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    with _large_cells():
        rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    hidden = {i for i, name in enumerate(rows[0] if rows else ()) if name in PRIVATE_COLUMNS}
    buffer = io.StringIO()
    writer = csv.writer(buffer, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerows(rows[:1])
    writer.writerows([["" if i in hidden else cell for i, cell in enumerate(row)] for row in rows[1:]])
    return buffer.getvalue()


def _triple(text: str) -> str:
    return text.strip("()").replace(" ", "")


def number(text: str | None) -> float | None:
    """The number in "1,234.5" or "1,234 (12; 34)"; None for anything else (n/a, nan, an empty cell)."""
    match = re.match(r"\s*(-?[\d,]*\.?\d+(?:[eE][-+]?\d+)?)(?=\s*(?:\(|$))", text or "")
    return float(match.group(1).replace(",", "")) if match else None


def instances(text: str) -> dict[str, float]:
    """{opcode: count} of "16,992 (FFMA: 3,584; IMAD.WIDE: 1,824)"; empty for versions that print no names."""
    match = re.search(r"\((.*)\)\s*$", text, re.DOTALL)
    counts: dict[str, float] = {}
    for part in match.group(1).split(";") if match else ():
        name, colon, value = part.rpartition(":")
        count = number(value)
        if colon and count is not None:
            counts[name.strip()] = counts.get(name.strip(), 0.0) + count
    return counts


def choose_metrics(columns: Iterable[TableColumn], known: set[str] | None) -> tuple[dict[str, str], list[str]]:
    """Column -> the first of its metrics that this version supports; and the columns without a supported metric."""
    chosen, missing = {}, []
    for column in columns:
        names = [m for m in column.metric if known is None or m.split(".")[0] in known]
        if names:
            chosen[column.name] = names[0]
        elif column.metric:
            missing.append(column.name)
    return chosen, missing


def explain(log: str, status: int) -> str:
    """One line on why Nsight Compute produced no report and, if known, how to fix it."""
    if "ERR_NVGPUCTRPERM" in log:
        return (
            "no permission to read GPU performance counters (ERR_NVGPUCTRPERM): run as root or with CAP_SYS_ADMIN, or "
            "allow all users with the driver option NVreg_RestrictProfilingToAdminUsers=0 and reload the driver"
        )
    if "ERR_NVGPUCTRNOTAVAIL" in log or "resource unavailable" in log.lower():
        return "another tool (such as DCGM) is using the GPU's performance counters: stop it, or pause it with dcgmi"
    errors = re.findall(r"^==ERROR==\s*(.+)$", log, re.MULTILINE)
    if errors:
        return f"Nsight Compute: {recorded_text(errors[0].strip())}"
    if "No kernels were profiled" in log:
        return "Nsight Compute recorded no kernel while the counters were on"
    last = [line for line in log.strip().splitlines() if line.strip()]
    return f"Nsight Compute exited with status {status}" + (
        f": {recorded_text(last[-1].strip())[:200]}" if last else ""
    )


def unknown_metric(log: str) -> str | None:
    """The base name of the metric that this version refused."""
    match = re.search(r"(?:Failed to find metric|[Uu]nknown metric|metric)[^\n]*?\b(\w+__\w+)", _errors(log))
    return match.group(1) if match else None


def _errors(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if line.startswith("==ERROR=="))


_PLACES = ("/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda*/bin/ncu", "/usr/local/cuda*/nsight-compute-*/ncu")
# Sections whose rules estimate speed-ups. ComputeWorkloadAnalysis and MemoryWorkloadAnalysis are left out: they need more
# replays and give only local estimates.
SECTIONS = ("SpeedOfLight", "Occupancy", "SchedulerStats", "WarpStateStats")


def report_file(folder: Path, tier: str) -> Path:
    """Nsight Compute's own report of a tier, kept for its user interface."""
    return folder / f"{tier}.ncu-rep"


def find_ncu() -> str | None:
    """The path of ncu: VOXTUNE_NCU, else on the PATH, else the newest in the folders of NVIDIA's installers."""
    configured = os.environ.get("VOXTUNE_NCU")
    if configured is not None:
        return configured if Path(configured).is_file() else None
    on_path = shutil.which("ncu")
    if on_path:
        return on_path
    installed = [str(p) for pattern in _PLACES for p in Path("/").glob(pattern[1:])]
    return max(installed, key=_numbers, default=None)


def _numbers(path: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", path)]


class NcuError(Exception):
    """Nsight Compute produced no output; the message gives the reason."""


@dataclass(kw_only=True)
class Ncu:
    """`cache_control` and `clock_control` are Nsight Compute's options: none keeps caches warm and clocks unlocked.

    `nvtx` records NVTX ranges in its reports.
    """

    path: str
    cache_control: str = "none"
    clock_control: str = "none"
    nvtx: bool = False

    @cached_property
    def version(self) -> str | None:
        match = re.search(r"Version\s+([\d.]+)", self._output("--version"))
        return match.group(1) if match else None

    @cached_property
    def _help(self) -> str:
        return self._output("--help")

    @cached_property
    def metrics(self) -> set[str] | None:
        """Base names of the metrics that this version supports on this machine; None if unknown."""
        names = set(re.findall(r"^(\w+__\w+)\s", self._output("--query-metrics"), re.MULTILINE))
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
        """`functions` limits counting to these; `once` to the first launch of each function, grid and block."""
        command = [self.path, "--config-file", "off", "--profile-from-start", "off"]
        command += ["--target-processes", "application-only"]
        command += ["--cache-control", self.cache_control, "--clock-control", self.clock_control]
        if self.nvtx:
            command += ["--nvtx"]
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
            # In its own process group, so that Ctrl-C does not stop the reading of a finished report.
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit_s, check=False, process_group=0
            )
        except subprocess.TimeoutExpired:
            raise NcuError(f"Nsight Compute did not print the {page} page within {limit_s:.0f} s") from None
        if '"ID"' not in done.stdout:
            raise NcuError(explain(done.stdout + done.stderr, done.returncode))
        return done.stdout

    def _output(self, option: str) -> str:
        try:
            done = subprocess.run([self.path, option], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            log.warning("%s %s: %s", self.path, option, error)
            return ""
        return done.stdout + done.stderr
