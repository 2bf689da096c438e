"""Sessions of your own steps: a function that runs a step, and a context manager for a loop.

with voxtune.profile.capture(model=net, optimizer=opt, out="session") as session:
    for batch in loader:
        ...
        session.step()
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from voxtune.errors import InputError
from voxtune.files import check_outputs
from voxtune.profile.census import Census, StepRecorder, synchronize, take_census
from voxtune.profile.counters import COUNTER_TIERS
from voxtune.profile.environment import clocks, environment, provenance
from voxtune.profile.session import Session, frame, session_files

_ONLY_CENSUS = "not available for steps recorded in this process; use voxtune profile for counters"


def session_of(census: Census, device: torch.device, meta: dict[str, Any], ncu_version: str | None = None) -> Session:
    """The session of a census, with its provenance. `meta` holds at least name, mode and config."""
    full_meta = {
        "workload": None,
        "size": None,
        "batch": None,
        "steps": len({r["step"] for r in census.launches}),
        "device": str(device),
        "environment": environment(device, ncu_version),
        "clocks": clocks(device),
        "cache_control": None,
        "clock_control": None,
        "window": None,
        "peak_bytes": census.peak_bytes,
        "proof": None,
        **provenance(),
        **meta,
    }
    full_meta["tiers"] = {"census": {"done": True, "why": None}} | {
        tier: {"done": False, "why": _ONLY_CENSUS} for tier in COUNTER_TIERS
    }
    full_meta["tiers"] |= meta.get("tiers", {})
    return Session(
        meta=full_meta,
        launches=frame(census.launches, "launches"),
        memory=frame(census.memory, "memory"),
        timings=frame(census.timings, "timings"),
    )


def profile_step(
    step: Callable[[], Any],
    *,
    name: str,
    mode: str = "train",
    config: str = "own",
    modules: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Iterable[Tensor] = (),
    device: torch.device | str | None = None,
    steps: int = 2,
    warmup: int = 3,
    repeats: int = 5,
) -> Session:
    """Records `step()`, one whole step, as a Session: census, memory and timings.

    `modules` is the network to whose modules the launches are attributed; `mode` is "train" or "sample".
    """
    _check_counts(steps, repeats, warmup)
    torch_device = _device(device, modules)
    census = take_census(
        step,
        torch_device,
        network=modules,
        optimizer=optimizer,
        inputs=inputs,
        steps=steps,
        warmup=warmup,
        repeats=repeats,
    )
    return session_of(census, torch_device, {"name": name, "mode": mode, "config": config})


class capture:  # noqa: N801  used as a verb: with capture(...) as session
    """Records steps of the loop inside it: `warmup` steps, `repeats` timed without the profiler, `steps` recorded.

    Call `step()` at the end of each step of the loop. `done` is true when everything is recorded; further steps are
    ignored. On exit, the session is stored as `result`, and saved to `out` if given; `overwrite` replaces an earlier session.
    """

    def __init__(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        out: str | Path | None = None,
        overwrite: bool = False,
        name: str = "own loop",
        mode: str = "train",
        config: str = "own",
        device: torch.device | str | None = None,
        steps: int = 2,
        warmup: int = 3,
        repeats: int = 5,
    ):
        _check_counts(steps, repeats, warmup)
        self.device = _device(device, model)
        self.meta = {"name": name, "mode": mode, "config": config}
        self.out, self.overwrite = Path(out) if out is not None else None, overwrite
        if self.out is not None:
            check_outputs(session_files(self.out), overwrite=overwrite)
        self.warmup, self.repeats, self.steps = warmup, repeats, steps
        self.result: Session | None = None
        self._recorder = StepRecorder(self.device, network=model, optimizer=optimizer)
        self._range: Any = None
        self._passed, self._since = 0, 0.0
        self._bare: list[float] = []
        self._peak: int | None = None

    @property
    def done(self) -> bool:
        return self._passed >= self.warmup + self.repeats + self.steps

    def __enter__(self) -> capture:
        self._since = time.perf_counter()
        self._before_step()
        return self

    def step(self) -> None:
        """Ends one step of the loop and begins the next."""
        if self.done:
            return
        recording = self._range is not None
        if recording:
            self._range.__exit__(None, None, None)
        else:
            synchronize(self.device)
        now = time.perf_counter()
        if self.warmup <= self._passed < self.warmup + self.repeats:
            self._bare.append(1e3 * (now - self._since))
        self._passed += 1
        if self.done:
            self._recorder.__exit__(None, None, None)
            self._range = None
        else:
            self._before_step()
        self._since = time.perf_counter()

    def _before_step(self) -> None:
        """Prepares the next step: resets the memory peak, or starts the recorder and the step's range."""
        cuda = self.device.type == "cuda"
        if self._passed == self.warmup and cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        if self._passed < self.warmup + self.repeats:
            return
        if self._passed == self.warmup + self.repeats:
            self._peak = torch.cuda.max_memory_allocated(self.device) if cuda else None
            self._recorder.__enter__()
        self._range = self._recorder.step()
        self._range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self.done and self._range is not None:
            self._range.__exit__(None, None, None)
            self._recorder.__exit__(kind, error, traceback)
        if kind is not None:
            return
        if not self.done:
            needed = self.warmup + self.repeats + self.steps
            raise InputError(
                f"the loop ran {self._passed} steps but {needed} are needed ({self.warmup} warm-up, {self.repeats} timed, "
                f"{self.steps} recorded); call session.step() in each step, or reduce warmup, repeats or steps"
            )
        census = self._recorder.census(bare=self._bare, peak=self._peak)
        self.result = session_of(census, self.device, self.meta)
        if self.out is not None:
            self.result.save(self.out, overwrite=self.overwrite)


def _check_counts(steps: int, repeats: int, warmup: int) -> None:
    if min(steps, repeats) < 1 or warmup < 0:
        raise InputError(f"steps ({steps}) and repeats ({repeats}) must be >= 1, warmup ({warmup}) >= 0")


def _device(device: torch.device | str | None, network: nn.Module | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    parameter = next(network.parameters(), None) if network is not None else None
    if parameter is not None:
        return parameter.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
