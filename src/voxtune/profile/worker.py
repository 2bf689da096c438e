"""The program under the profilers: `python -m voxtune.profile.worker SPEC`.

It loads PyTorch, waits for the file `go` beside SPEC, reads SPEC, sets up the workload's step, and then either takes
the census or runs steps between the start and the stop of counting. It writes result.json beside SPEC.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from voxtune.profile.workers import PARENT

WAIT_LIMIT_S = 1800.0


def main(arguments: list[str]) -> int:
    spec_path = Path(arguments[0])
    import voxtune.profile.census
    import voxtune.profile.op_numbering
    import voxtune.profile.steps  # noqa: F401  loaded now, so that the turn itself is short

    if not _await(spec_path.with_name("go")):
        return 3
    began = time.monotonic()
    spec = json.loads(spec_path.read_text())
    result = census(spec) if spec["action"] == "census" else count(spec, began)
    partial = spec_path.with_name("result.json.part")
    partial.write_text(json.dumps(result))
    partial.replace(spec_path.with_name("result.json"))
    return 0


def _await(go: Path) -> bool:
    """Whether the turn came; a worker whose starter went away leaves by itself."""
    starter, since = int(os.environ.get(PARENT, os.getppid())), time.monotonic()
    while not go.exists():
        if not _alive(starter) or time.monotonic() - since > WAIT_LIMIT_S:
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
    """Takes the census and saves it as the session at `spec["out"]`; gives the numbers of the launches' operators."""
    from voxtune.profile.capture import session_of
    from voxtune.profile.census import take_census
    from voxtune.profile.op_numbering import number_launches

    device, config, step = _step(spec)
    try:
        taken = take_census(
            step.run,
            device,
            network=step.network,
            optimizer=step.optimizer,
            inputs=step.inputs,
            steps=spec["steps"],
            warmup=spec["warmup"],
            repeats=spec["repeats"],
            keep=Path(spec["out"]) / "raw" if spec.get("keep_raw") else None,
        )
        session = session_of(taken, device, {**spec["meta"], "flags": step.flags}, ncu_version=spec.get("ncu_version"))
        session.save(spec["out"])
        numbered: list[Any] = []
        if device.type == "cuda" and spec.get("number") and not config.compile:
            numbered = number_launches(step.run, device)
        return {"numbered": numbered}
    finally:
        step.close()


def count(spec: dict[str, Any], began: float) -> dict[str, Any]:
    """Runs a whole step, or chosen operators of it each alone, between the start and the stop of counting."""
    import gc

    import torch

    from voxtune.profile.isolated_ops import count_alone, note_operators
    from voxtune.profile.op_numbering import Counting

    device, _, step = _step(spec)
    close = step.close
    try:
        for _ in range(spec["warmup"]):
            step.run()
        torch.cuda.synchronize(device)
        counting = Counting(torch.cuda.profiler.start, torch.cuda.profiler.stop)
        operators = spec.get("operators")
        told: dict[str, Any] = {"expired": False}
        if operators is None:
            ready = time.monotonic()
            with counting:
                step.run()
                torch.cuda.synchronize(device)
        else:
            noted = note_operators(step.run, operators)
            del step
            gc.collect()
            torch.cuda.empty_cache()
            ready = time.monotonic()
            deadline = began + spec["deadline_s"] if spec.get("deadline_s") else None
            told = count_alone(operators, noted, counting, deadline, device)
            told["bytes_held"] = torch.cuda.memory_reserved(device)
        return {"setup_s": ready - began, "counting_s": time.monotonic() - ready, **told}
    finally:
        close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
