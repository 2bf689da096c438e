"""Tiles of the project's convolutions, measured on the card at hand for the shapes of a network, and remembered for the card.

Each form in which a network calls an own convolution is timed with its kernel's own tile and with the candidates of
kernels/measured_tiles.py, in turns. A candidate replaces the tile if it is faster by more than 2 % and computes the same.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from voxtune.files import one_line
from voxtune.plan.card_table import CardTable
from voxtune.plan.compete import Timer, race
from voxtune.plan.kernel_forms import Call, KernelForm, kernel_forms, own_call
from voxtune.plan.measure import clocked
from voxtune.plan.optimized import Optimized
from voxtune.plan.passes import PassStage, precision_of, select
from voxtune.plan.plan import Plan
from voxtune.plan.run import Inputs
from voxtune.precision import HALF

if TYPE_CHECKING:
    from voxtune.plan.build import PlanTarget

log = logging.getLogger("voxtune")
TILED = ("conv3d", "doubling_conv", "strided_conv")
# A candidate must be faster by more than this.
WORTH = 0.98
SECONDS_EACH = 0.06
# Of one network, at most.
TILE_SECONDS = 60.0
# Half precision rounds sums of another order differently, by about one unit in the last place.
SAME = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
TABLE = CardTable(what="measured tiles", format="voxtune-tiles/1", entries="tiles", prefix="tiles-")
_loaded: set[Path] = set()


@dataclass(frozen=True)
class TileTimes:
    """One shape: the milliseconds of a call with the kernel's own tile and with the chosen one."""

    key: str
    tried: int
    before_ms: float
    after_ms: float

    def describe(self) -> str:
        return f"{self.key}: {self.before_ms:.3g} ms, {self.after_ms:.3g} ms with another tile"


@dataclass
class TileSearch:
    """`times` of the shapes that were measured now; `left` is the number of those for which there was no time."""

    times: list[TileTimes] = field(default_factory=list)
    left: int = 0

    @property
    def changed(self) -> list[TileTimes]:
        return [t for t in self.times if t.after_ms < t.before_ms]

    def report(self) -> str:
        parts = [t.describe() for t in self.changed] or [f"the tiles of {len(self.times)} shapes stay"]
        return "; ".join(parts + ([f"{self.left} shapes were not measured"] if self.left else []))


def load_tiles(device: torch.device) -> None:
    """Uses the tiles that were measured on this card before; reads the file once per process."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return
    path = TABLE.path(device)
    if path not in _loaded:
        _loaded.add(path)
        _use(device, TABLE.read(device))


def measure_tiles(network: Optimized, inputs: Inputs, seconds: float, *, timer: Timer = race) -> TileSearch:
    """Measures the tiles of a rewritten network's own convolutions for at most `seconds`, those with the most work first.

    They apply to kernels that are launched from now on: a network with a recorded graph must record it again.
    """
    from voxtune.kernels.measured_tiles import Choice, recording

    until = time.monotonic() + seconds
    forms = [(f, count) for f, count in kernel_forms(network, inputs).items() if f.operator in TILED]
    result = TileSearch()
    if not forms:
        return result
    device = network.signature.device
    known = TABLE.read(device)
    jobs: dict[str, tuple[KernelForm, Choice]] = {}
    with network.runner.flags():
        for form, _ in sorted(forms, key=lambda pair: -pair[0].work * pair[1]):
            with recording() as choices:
                own_call(form, form.tensors(device))()
            for key, choice in choices.items():
                if key not in known and key not in jobs:
                    jobs[key] = (form, choice)
        _compile(list(jobs.values()), device, until)
        new: dict[str, Any] = {}
        for key, (form, choice) in jobs.items():
            if time.monotonic() > until:
                result.left += 1
                continue
            times, tile = _best(form, choice, device, timer)
            new[key] = tile
            result.times.append(times)
    if new:
        _use(device, new)
        TABLE.add(device, new)
    return result


def choose_tiles(target: PlanTarget, plan: Plan, seconds: float = TILE_SECONDS) -> str | None:
    """Measures the tiles for a plan's own convolutions and says which changed; None where there are none to choose."""
    names, device = plan.names, target.device
    if device.type != "cuda" or precision_of(names) not in HALF or not set(select(PassStage.CONVOLUTION)) & set(names):
        return None
    try:
        with clocked("tiles measured"):
            return measure_tiles(target.build(plan), target.inputs, seconds).report()
    except Exception as error:  # the plan itself will say what is wrong when it is timed
        return f"{type(error).__name__}: {one_line(error)}"


def _with(call: Call, key: str, tile: Any) -> Call:
    from voxtune.kernels.measured_tiles import forcing

    def forced() -> Any:
        with forcing({key: tile}):
            return call()

    return forced


def _compile(jobs: Sequence[tuple[KernelForm, Any]], device: torch.device, until: float) -> None:
    """Compiles the candidates' kernels in parallel, which would else be compiled one by one."""
    if device.type != "cuda" or not jobs:
        return
    from voxtune.kernels.precompile import compiled_ahead

    def rehearse() -> None:
        for form, choice in jobs:
            call = own_call(form, form.tensors(device))
            for tile in choice.candidates():
                if time.monotonic() > until:
                    return
                try:
                    _with(call, choice.key, tile)()
                except Exception as error:  # a tile that this card refuses is not tried
                    log.info("%s: %s", choice.key, one_line(error))

    with compiled_ahead(rehearse):
        pass


def _best(form: KernelForm, choice: Any, device: torch.device, timer: Timer) -> tuple[TileTimes, dict[str, int | bool]]:
    call = own_call(form, form.tensors(device))
    rule = _with(call, choice.key, choice.tile)
    expected = _result(rule())
    best, best_ms, first_ms, tried = choice.tile, 1.0, None, 0
    for tile in choice.candidates():
        other = _with(call, choice.key, tile)
        try:
            if not _same(_result(other()), expected):
                log.info("%s: %s computes something else", choice.key, tile)
                continue
            before, after = timer(rule, other, device, SECONDS_EACH)
        except Exception as error:  # a tile that this card refuses
            log.info("%s: %s: %s", choice.key, type(error).__name__, one_line(error))
            continue
        tried, first_ms = tried + 1, before if first_ms is None else first_ms
        if after / before < WORTH * best_ms:
            best, best_ms = tile, after / before
    before = first_ms or 0.0
    return TileTimes(choice.key, tried, before, before * best_ms), asdict(best)


def _result(output: Any) -> Tensor:
    y: Tensor = output[0] if isinstance(output, tuple | list) else output
    return y


def _same(y: Tensor, expected: Tensor) -> bool:
    wide, right = y.float(), expected.float()
    return bool(torch.isfinite(wide).all()) and float((wide - right).norm() / right.norm()) < SAME[y.dtype]


def _use(device: torch.device, table: dict[str, Any]) -> None:
    from voxtune.kernels.measured_tiles import card, use

    use(card(device), table)
