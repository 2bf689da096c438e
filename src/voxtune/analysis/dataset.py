"""Estimates time, cost, storage and repeated work of a data set of many volumes on many GPUs, from recorded times of volumes.

Formulas: docs/reference/analysis.md. The recorded times are of one H200; other GPUs, networks and sizes are scaled by the
ratio of their estimated steps.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from voxtune.analysis.estimate import Recipe, card, estimate_step, walk_workload
from voxtune.analysis.table import Column, Table
from voxtune.errors import InputError
from voxtune.workloads import Workload, workload

# A step of a plan scales with the step of this recipe, the nearest one that the estimate knows.
SCALED_BY = "bf16+channels_last+compile"
MAX_VOLUMES, MAX_GPUS, MAX_BATCH = 10**10, 10**6, 4096
# Tasks whose masks are read or whose volumes are written while the network runs for another one.
BESIDE = 3
# One driver hands out and records at least this many tasks per second (make test-scale).
DRIVER_TASKS_PER_S = 200
FILES_PER_VOLUME = 2


@dataclass(frozen=True, kw_only=True)
class DataSetJob:
    """`failure_rate` is the expected number of losses of a worker per GPU-hour, `price` that of a GPU for an hour."""

    volumes: int
    gpus: int = 1
    failure_rate: float = 0.0
    price: float | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        for name, value, most in (
            ("volumes", self.volumes, MAX_VOLUMES),
            ("gpus", self.gpus, MAX_GPUS),
            ("batch", self.batch, MAX_BATCH),
        ):
            if not 1 <= value <= most:
                raise InputError(f"{name} {value}: must be 1 to {most}")
        for name, number in (("failure rate", self.failure_rate), ("price", self.price or 0.0)):
            if not (math.isfinite(number) and number >= 0):
                raise InputError(f"{name} {number}: must be 0 or more")


COLUMNS = (
    Column("gpu", kind="text"),
    Column("gpus", kind="int"),
    Column("volume_s", "s", better="low", digits=3, doc="of one GPU for a volume"),
    Column("hours", "h", better="low", digits=1, doc="from the start of the workers to the last volume"),
    Column("gpu_hours", "h", better="low", digits=1),
    Column("cost", better="low", digits=0, doc="GPU-hours x price; empty without a price"),
    Column("losses", digits=1, better="low", doc="expected losses of a worker"),
    Column("repeated", kind="int", better="low", doc="volumes that are drawn again after losses"),
    Column("storage_gb", "GB", better="low", digits=1),
    Column("files", kind="int"),
    Column("shards", kind="int", doc="drivers, at least, so that none limits the GPUs"),
)


@functools.cache
def recorded() -> dict[str, Any]:
    return json.loads(resources.files("voxtune.analysis").joinpath("data/throughput.json").read_text())


def recorded_volume_ms(steps: int) -> float:
    """A straight line through the two recorded numbers of steps: a step costs the same in both."""
    (first, first_ms), (last, last_ms) = ((int(n), ms) for n, ms in recorded()["volume_ms"].items())
    return first_ms + (last_ms - first_ms) / (last - first) * (steps - first)


def scale(network: Workload, size: tuple[int, ...], gpu: str) -> float:
    """The estimated time of a step relative to that of the recorded volumes."""
    known = recorded()
    before = workload(known["workload"])
    recipe = Recipe.parse(SCALED_BY)
    steps = []
    for of, at, name in ((network, size, gpu), (before, tuple(known["size"]), known["gpu"])):
        walked = walk_workload(of.network, at, 1, recipe, train=False)
        steps.append(estimate_step(walked, card(name), recipe, train=False).step_ms)
    return steps[0] / steps[1]


def estimate_data_set(
    network: Workload,
    gpus: Sequence[str],
    job: DataSetJob,
    *,
    size: tuple[int, ...] | None = None,
    steps: int | None = None,
) -> Table:
    """Hours, GPU-hours, cost, storage and repeated volumes, with a row for each kind of GPU."""
    known = recorded()
    size, steps = size or network.size, steps or network.steps
    if network.network.dimensions != 3 or len(size) != 3:
        raise InputError(f"{network.name} with size {size}: --volumes requires a 3D network and three dimensions")
    if any(n < 1 or n % network.network.divisor for n in size):
        raise InputError(f"size {','.join(map(str, size))}: dimensions must be multiples of {network.network.divisor}")
    rows, notes = [], [_origin(steps)]
    for name in gpus:
        gpu = card(name)
        same = (network.name, gpu.key, list(size)) == (known["workload"], known["gpu"], known["size"])
        if not same:
            notes.append(f"{gpu.name}: scaled by the ratio of estimated steps ({SCALED_BY}); not measured")
        factor = 1.0 if same else scale(network, size, name)
        rows.append({"gpu": gpu.key, "gpus": job.gpus} | _row(job, size, recorded_volume_ms(steps) * factor / 1e3))
    if job.failure_rate == 0:
        notes.append("failure rate 0: no worker is lost (--failure-rate)")
    dims = "x".join(map(str, size))
    title = f"Estimate: {job.volumes} volumes of {network.name}, {dims}, {steps} steps, batch {job.batch}"
    return Table(title, list(COLUMNS), rows, notes, extra={"estimate": True, "steps": steps})


def _origin(steps: int) -> str:
    known = recorded()
    counts = " and ".join(known["volume_ms"])
    measured = "measured" if str(steps) in known["volume_ms"] else f"by a straight line through those of {counts} steps"
    return (
        f"Time of a volume: {measured}, on one H200 with Voxtune's plan (random weights, 128x128x128); several GPUs, and "
        "reading and writing beside the network, were not measured."
    )


def _row(job: DataSetJob, size: tuple[int, ...], network_s: float) -> dict[str, Any]:
    known = recorded()
    share = math.prod(size) / math.prod(known["size"])
    written_s = share * known["nifti_write_ms"] / 1e3
    # Reading and writing overlap with the network, unless they take longer in all threads together.
    volume_s = max(network_s, (share * known["mask_encoding_ms"] / 1e3 + written_s) / BESIDE)
    task_s, start_s = job.batch * volume_s, known["start_ms"] / 1e3
    tasks = -(-job.volumes // job.batch)
    # A loss costs half a task in the network, the volumes that are not yet written, and the start of a worker.
    unwritten_s = min(job.batch * written_s, BESIDE * task_s)
    lost_s = task_s / 2 + unwritten_s + start_s
    wasted = job.failure_rate * lost_s / 3600
    if wasted >= 1:
        raise InputError(
            f"failure rate {job.failure_rate:g} per GPU-hour: a loss costs {lost_s:.0f} s, so the work would not end"
        )
    # All GPUs run until the last of the equal shares ends.
    gpu_hours = (-(-tasks // job.gpus) * job.gpus * task_s + job.gpus * start_s) / 3600 / (1 - wasted)
    losses = job.failure_rate * gpu_hours
    stored = math.prod(size) * known["storage"]["bytes_per_voxel"] + known["sidecar_bytes"] + known["ledger_bytes"]
    return {
        "volume_s": volume_s,
        "hours": gpu_hours / job.gpus,
        "gpu_hours": gpu_hours,
        "cost": None if job.price is None else job.price * gpu_hours,
        "losses": losses,
        "repeated": round(losses * (task_s / 2 + unwritten_s) / volume_s),
        "storage_gb": job.volumes * stored / 1e9,
        "files": job.volumes * FILES_PER_VOLUME,
        "shards": max(1, math.ceil(job.gpus / task_s / DRIVER_TASKS_PER_S)),
    }
