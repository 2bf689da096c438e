"""`Optimized`: the network that `optimize` returns. It has the original's parameters, names and attributes."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.plan.derivation import StaleError
from voxtune.plan.passes.base import Precision
from voxtune.plan.plan import Plan
from voxtune.plan.run import GraphPool, Inputs, Runner, Signature, leaves_of
from voxtune.precision import HALF

log = logging.getLogger("voxtune")
# Input sizes that one network keeps graphs for.
MAX_VARIANTS = 8
_HALF_NAMES: dict[torch.dtype, Precision] = {dtype: name for name, dtype in HALF.items()}  # type: ignore[misc]


def precision_in_force(weights: torch.dtype | None, device: torch.device) -> Precision:
    """What plain PyTorch would compute in for this call: autocast, the type of the weights, or the flag of TF32."""
    if torch.is_autocast_enabled(device.type):
        return _HALF_NAMES.get(torch.get_autocast_dtype(device.type), "fp32")
    if weights in _HALF_NAMES:
        return _HALF_NAMES[weights]
    return "tf32" if device.type == "cuda" and torch.backends.cudnn.allow_tf32 else "fp32"


def weights_type(model: nn.Module) -> torch.dtype | None:
    """The type of the network's first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


@dataclass
class Variant:
    """A network rewritten for one signature of inputs. Without a `runner` the original network is called.

    `notes` states what each pass did; `rows` what was tried.
    """

    runner: Runner | None
    plan: Plan
    notes: dict[str, str]
    signature: Signature


# Makes a variant of a network for other inputs or another precision; raises InputError with the reason if there is none.
Make = Callable[["Optimized", Inputs, Precision | None], Variant]


class SharesOriginal(nn.Module):
    """A module in place of another one, whose parameters, buffers and submodules are its own."""

    def __init__(self, original: nn.Module):
        super().__init__()
        # The same dictionaries: a replaced parameter or submodule is replaced in both.
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[shared] = original.__dict__[shared]
        self.__dict__["original"] = original
        self.training = original.training

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return self.original.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.original._load_from_state_dict(*args, **kwargs)  # as part of another module

    def train(self, mode: bool = True) -> Self:
        self.original.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__") or "original" not in self.__dict__:
                raise
            return getattr(self.original, name)


class Optimized(SharesOriginal):
    """A network rewritten by a plan. Inference only. `notes` states what each pass did.

    It shares the original's parameters, buffers and submodules: `state_dict`, `load_state_dict`, `to` and `parameters` are the
    original's, and a change of weights is seen at the next call, except for writes that leave no trace (`p.data.copy_(...)`,
    NumPy views): call `refresh()` after these. Other sizes of inputs get a variant of the same plan at their first call.

    The original network runs, with one warning: if an input requires gradients, in training mode, and for inputs of another
    structure, type or device.
    """

    def __init__(
        self,
        original: nn.Module,
        variant: Variant | None,
        *,
        memory_limit: int | None = None,
    ):
        super().__init__(original)
        self.main = variant
        self._stored: Plan | None = None  # that of a copy
        self.memory_limit = memory_limit
        self.make: Make | None = None
        self.precision: Precision | None = None  # that of the example call, if the network follows the caller's
        self._type = weights_type(original)
        self._variants: OrderedDict[Any, Variant] = OrderedDict()
        self._refused: dict[Any, str] = {}
        self._warned: set[str] = set()
        self._lock = threading.RLock()
        if variant is not None:
            self._variants[variant.signature] = variant

    def following(self, make: Make, *, follows_precision: bool = False) -> Optimized:
        """This network, which makes variants of its plan: for other sizes, and if requested in the precision of each call."""
        self.make = make
        if follows_precision and self.main is not None:
            signature = self.main.signature
            self.precision = precision_in_force(self._type, signature.device)
            self._variants = OrderedDict({self._key(signature): self.main})
        return self

    # What was made for the example inputs.

    @property
    def variant(self) -> Variant:
        if self.main is None:
            raise InputError("this copy of an optimized network is rewritten at its first call")
        return self.main

    @property
    def plan(self) -> Plan:
        return self.variant.plan if self.main is not None or self._stored is None else self._stored

    @plan.setter
    def plan(self, plan: Plan) -> None:
        self.variant.plan = plan

    @property
    def notes(self) -> dict[str, str]:
        return self.variant.notes

    @property
    def signature(self) -> Signature:
        return self.variant.signature

    @property
    def runner(self) -> Runner:
        runner = self.variant.runner
        if runner is None:
            raise InputError("the original network runs: it has no plan")
        return runner

    @property
    def pool(self) -> GraphPool | None:
        """The memory of the recorded graphs."""
        return next((v.runner.pool for v in self._variants.values() if v.runner is not None), None)

    # Calls.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(Signature.of(args, kwargs), args, kwargs)

    def run(self, signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """`forward` for a caller that has computed the arguments' signature already."""
        reason = self._why_original(args, kwargs)
        if reason is None:
            key = self._key(signature)
            variant = self._find(key) or self._new(key, signature, args, kwargs)
            if isinstance(variant, Variant):
                if variant.runner is None:
                    return self.original(*args, **kwargs)
                try:
                    return variant.runner(*args, **kwargs)
                except StaleError as error:
                    self._forget(f"{one_line(error)}: the plan is made again")
                    return self.run(signature, args, kwargs)
            reason = variant
        if reason not in self._warned:
            self._warned.add(reason)
            log.warning("the plan is not used: %s; running the original network", reason)
        return self.original(*args, **kwargs)

    def _why_original(self, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        if self.training:
            return "it is in training mode"
        if torch.is_grad_enabled() and any(x.requires_grad for x in leaves_of(args, kwargs) if isinstance(x, Tensor)):
            return "an input requires gradients"
        return None

    def _key(self, signature: Signature) -> Any:
        if self.precision is None:
            return signature
        return signature, precision_in_force(self._type, signature.device)

    def _find(self, key: Any) -> Variant | str | None:
        variant = self._variants.get(key)
        if variant is not None and len(self._variants) > 1:
            with self._lock:
                if key in self._variants:
                    self._variants.move_to_end(key)
        return variant or self._refused.get(key)

    def _new(self, key: Any, signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Variant | str:
        """A variant for inputs that have none yet, or why there is none."""
        with self._lock:
            return self._find(key) or self._made(key, signature, args, kwargs)

    def _made(self, key: Any, signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> Variant | str:
        main = self.main
        precision = None if self.precision is None else key[1]
        if main is not None and not main.signature.differs_in_sizes_only(signature):
            return main.signature.mismatch(signature) or "the inputs differ"
        if self.make is None:
            return (
                "it has no plan" if main is None else main.signature.mismatch(signature) or "the weights have changed"
            )
        try:
            variant = self.make(self, (tuple(args), kwargs), precision)
        except InputError as error:
            self._refused[key] = one_line(error)
            return self._refused[key]
        self._variants[key] = variant
        self.main = self.main or variant
        self._limit()
        return variant

    def _limit(self) -> None:
        """Drops the variants that were not used for longest: those over the number, and over the limit of memory."""
        while len(self._variants) > MAX_VARIANTS:
            self._variants.popitem(last=False)
        pool = self.pool
        if pool is not None and self.memory_limit is not None and pool.bytes > self.memory_limit:
            log.info("over the memory limit of %d bytes: dropping the graphs of other sizes", self.memory_limit)
            newest = next(reversed(self._variants))
            for key in [key for key in self._variants if key != newest]:
                del self._variants[key]

    # LiveWeights.

    def refresh(self) -> None:
        """Takes over the original's weights now, also after writes that leave no trace."""
        for variant in self._variants.values():
            if variant.runner is not None and variant.runner.weights is not None:
                try:
                    variant.runner.weights.repack()
                except StaleError as error:
                    self._forget(f"{one_line(error)}: the plan is made again")
                    return

    def _forget(self, reason: str) -> None:
        log.info("%s", reason)
        self._variants.clear()
        self._refused.clear()
        self._type = weights_type(self.original)

    # Copies hold the original and the plan; they are rewritten at their first call.

    def __reduce__(self) -> Any:
        plan = None if self.main is None else self.main.plan
        return _restored, (self.original, plan, self.make, self.precision, self.memory_limit)

    def report(self) -> str:
        """What was tried, how long it took, what each pass did and gained, and why one did not apply."""
        from voxtune.plan.gains import recorded_gains
        from voxtune.plan.tuner import describe_entry

        rows = [describe_entry(row) for row in self.plan.evidence.get("waterfall", [])]
        title = f"plan: {' + '.join(self.plan.names) or 'the original network'}"
        gains = recorded_gains(self.plan)
        notes = dict(self.notes)
        if "uncaptured" in self.plan.evidence:
            notes["capture"] = f"failed: {self.plan.evidence['uncaptured']}"
        lines = [f"  {'; '.join(filter(None, (f'{name}: {note}', gains.get(name))))}" for name, note in notes.items()]
        if self.plan.steps and "gains" not in self.plan.evidence:
            lines.append('  what each pass gains is measured with search="full" and by voxtune tune')
        return "\n".join([*rows, title, *lines])

    def extra_repr(self) -> str:
        return f"plan={' + '.join(self.plan.names) or 'the original network'}"


def _restored(
    original: nn.Module, plan: Plan | None, make: Make | None, precision: Precision | None, memory_limit: int | None
) -> Optimized:
    network = Optimized(original, None, memory_limit=memory_limit)
    network.make, network.precision = make, precision
    network._stored = plan
    return network
