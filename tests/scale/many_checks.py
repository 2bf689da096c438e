"""A data set of many tasks without a network: what start, tasks, verification and a second start take, as JSON.

python -m tests.scale.many_checks FOLDER TASKS
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from tests.scale.datasets import Job, write_many_masks, write_model
from tests.scale.workers import BareWorker
from voxtune.scale.driver import Tally
from voxtune.scale.engine import EngineOptions
from voxtune.scale.local import LocalEngine
from voxtune.scale.verify import verify

# The driver, and its worker, which has ended.
BOTH = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)


def measure(folder: Path, count: int) -> dict[str, float]:
    manifest = write_many_masks(folder / "masks", count)
    job = Job(model=write_model(folder / "model"), manifest=manifest, out=folder / "out")
    engine = EngineOptions(devices=("cpu",), make=BareWorker)
    began, first = time.monotonic(), []

    def report(tally: Tally) -> None:
        if tally.drawn and not first:
            first.append((time.monotonic(), tally.drawn, time.process_time()))

    cpu_before = time.process_time()
    tally = job.run(LocalEngine(engine), report)
    ended = time.monotonic()
    [(drawing, drawn, cpu)] = first
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    result = {
        "tasks": count,
        "drawn": tally.drawn,
        "start_s": drawing - began,
        "start_cpu_s": cpu - cpu_before,
        "task_ms": 1000 * (ended - drawing) / (count - drawn),
        "driver_task_ms": 1000 * (time.process_time() - cpu) / (count - drawn),
        "cpu_s": sum(resource.getrusage(who).ru_utime + resource.getrusage(who).ru_stime for who in BOTH),
        "driver_peak_gib": peak,
    }
    began = time.monotonic()
    verified = verify(job.out)
    result |= {"verified": verified.verified, "problems": len(verified.problems), "verify_s": time.monotonic() - began}
    began = time.monotonic()
    again = job.run(LocalEngine(engine))
    return {**result, "again_drawn": again.drawn, "again_s": time.monotonic() - began}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
