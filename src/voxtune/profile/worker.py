"""The program that the profilers run: `python -m voxtune.profile.worker SPEC`.

It imports PyTorch, waits for the file `go` next to SPEC, reads SPEC and sets up the workload's step. Then it either
takes the census or runs a step with the counters switched on. It writes result.json next to SPEC.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from voxtune.files import recording_paths
from voxtune.profile.worker_pool import PARENT

WAIT_LIMIT_S = 1800.0


def main(arguments: list[str]) -> int:
    spec_path = Path(arguments[0])
    import voxtune.profile.census
    import voxtune.profile.operators
    import voxtune.profile.steps  # noqa: F401  imported now to keep the turn itself short

    if not _await(spec_path.with_name("go")):
        return 3
    began = time.monotonic()
    spec = json.loads(spec_path.read_text())
    with recording_paths(spec.get("record_paths", False)):
        result = census(spec) if spec["action"] == "census" else count(spec, began)
    partial = spec_path.with_name("result.json.part")
    partial.write_text(json.dumps(result))
    partial.replace(spec_path.with_name("result.json"))
    return 0


def _await(go: Path) -> bool:
    """Whether the turn came. A worker ends by itself if the process that started it is gone."""
    parent, started = int(os.environ.get(PARENT, os.getppid())), time.monotonic()
    while not go.exists():
        if not _alive(parent) or time.monotonic() - started > WAIT_LIMIT_S:
            return False
        time.sleep(0.02)
    return True


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _step(spec: dict[str, Any]) -> tuple[Any, Any, Any]:
    import torch

    from voxtune.profile.configs import parse_config
    from voxtune.profile.steps import find_target, make_step

    device = torch.device(spec["device"])
    target = find_target(spec["target"], tuple(spec["size"]) if spec.get("size") else None)
    config = parse_config(spec["config"])
    return device, config, make_step(target, spec["mode"], config, batch=spec["batch"], device=device)


def census(spec: dict[str, Any]) -> dict[str, Any]:
    """Takes the census and saves it as the session at `spec["out"]`; returns the operator numbers of the launches."""
    from voxtune.profile.capture import session_of
    from voxtune.profile.census import RAW, take_census
    from voxtune.profile.operators import number_launches

    device, config, step = _step(spec)
    overwrite = spec.get("overwrite", False)
    try:
        result = take_census(
            step.run,
            device,
            network=step.network,
            optimizer=step.optimizer,
            inputs=step.inputs,
            steps=spec["steps"],
            warmup=spec["warmup"],
            repeats=spec["repeats"],
            raw=Path(spec["out"]) / RAW if spec.get("keep_raw") else None,
            overwrite=overwrite,
        )
        session = session_of(result, device, {**spec["meta"], "flags": step.flags}, ncu_version=spec.get("ncu_version"))
        session.save(spec["out"], overwrite=overwrite)
        numbered: list[Any] = []
        if device.type == "cuda" and spec.get("number") and not config.compile:
            numbered = number_launches(step.run, device)
        return {"numbered": numbered}
    finally:
        step.close()


def count(spec: dict[str, Any], began: float) -> dict[str, Any]:
    """Runs a whole step, or each of the selected operators in isolation, with the counters switched on."""
    import gc

    import torch

    from voxtune.profile.nvtx import nvtx_ranges
    from voxtune.profile.operators import CounterSwitch, count_isolated, record_calls

    device, _, step = _step(spec)
    close = step.close
    marks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if spec.get("nvtx") and spec.get("operators") is None:
        marks = nvtx_ranges(step.network)
    try:
        for _ in range(spec["warmup"]):
            step.run()
        torch.cuda.synchronize(device)
        counters = CounterSwitch(torch.cuda.profiler.start, torch.cuda.profiler.stop)
        operators = spec.get("operators")
        result: dict[str, Any] = {"expired": False}
        if operators is None:
            ready = time.monotonic()
            with marks, counters:
                step.run()
                torch.cuda.synchronize(device)
        else:
            calls = record_calls(step.run, operators)
            del step
            gc.collect()
            torch.cuda.empty_cache()
            ready = time.monotonic()
            deadline = began + spec["deadline_s"] if spec.get("deadline_s") else None
            result = count_isolated(operators, calls, counters, deadline, device)
            result["bytes_held"] = torch.cuda.memory_reserved(device)
        return {"setup_s": ready - began, "counting_s": time.monotonic() - ready, **result}
    finally:
        close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
