"""A job of `voxtune sample`: many samples that are drawn in batches and written, and that can be resumed.

Every sample has its own files and its own noise. Its sidecars are written last: a sample with all of its files is complete,
whatever happens to the job afterwards. While a sample is replaced, its sidecars say that it is incomplete.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from voxtune.diffusion.noise import check_seed
from voxtune.errors import FileProblems, InputError, advice, overwrite_advice
from voxtune.files import check_outputs, counted, write_json
from voxtune.reading import parse_json, read_json
from voxtune.runtime.batching import BatchChoice, pads_last_batch
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import SamplerSettings
from voxtune.versions import __version__

# In the sidecars of a sample whose files are being replaced; with this entry, the sample is not complete.
INCOMPLETE = "incomplete"
# What happens after a sample that cannot be drawn: the job stops, or goes on without it.
OnError = Literal["stop", "skip"]
Progress = Callable[[int, int], None]

# Entries of a sidecar that a resumed job may change; its samples are then equal within rounding.
MAY_DIFFER = frozenset({"batch", "passes", "voxtune", "torch", "device", "model", "Sources", "Image", "steps_auto"})
MAX_SIDECAR_BYTES = 2**20


class Item(Protocol):
    """One sample of a job; the names are relative to the output folder."""

    @property
    def index(self) -> int:
        """Determines the noise, with the seed."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Its images."""
        ...

    @property
    def sidecars(self) -> tuple[str, ...]: ...

    @property
    def outputs(self) -> tuple[str, ...]:
        """All of its files."""
        ...


ItemT = TypeVar("ItemT", bound=Item)
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The complete samples of an earlier run of a job, and what their sidecars say about that run."""

    numbers: frozenset[int] = frozenset()
    batch: int | None = None
    passes: tuple[str, ...] | None = None
    # Samples with some of their files, which are drawn again.
    incomplete: int = 0


class Job(ABC, Generic[ItemT, ResultT]):
    """`check` before any work, then `run`.

    `resume` keeps the complete samples of an earlier run and refuses those of other settings. `on_error` "skip" goes on
    after a sample that cannot be drawn, which `problems` then lists; a file that cannot be written always ends the job.
    """

    def __init__(
        self,
        model: Model,
        out: Path,
        items: Sequence[ItemT],
        *,
        settings: SamplerSettings | None,
        seed: int,
        overwrite: bool,
        resume: bool,
        on_error: OnError,
        provenance: Mapping[str, Any] | None,
    ):
        if overwrite and resume:
            raise InputError("--overwrite cannot be combined with --resume, which keeps the finished samples")
        self.model, self.out, self.items = model, out, items
        self.settings, self.seed = settings or model.resolve(), check_seed(seed)
        self.resume, self.replaces, self.on_error = resume, overwrite or resume, on_error
        # The version also marks the sidecars as files of Voxtune.
        self.provenance = {"voxtune": __version__, **(provenance or {})}
        self.problems, self.finished = FileProblems(), Finished()
        model.check_settings(self.settings)

    @abstractmethod
    def record(self, item: ItemT) -> dict[str, Any]:
        """What the sidecars of a sample say, except for the batch and the plan."""

    @abstractmethod
    def name(self, item: ItemT) -> str:
        """The sample in messages."""

    @abstractmethod
    def source(self, item: ItemT) -> Path:
        """The file in messages: that of the mask, or that of the image."""

    @abstractmethod
    def read(self, item: ItemT) -> Any:
        """What the sample is drawn from."""

    @abstractmethod
    def draw(self, inputs: Sequence[Any], indices: Sequence[int], progress: Progress | None) -> np.ndarray:
        """The samples, in the range of the model."""

    @abstractmethod
    def write(self, item: ItemT, given: Any, sample: np.ndarray, made_by: dict[str, Any]) -> ResultT:
        """Writes the files of a sample, the sidecars with `made_by` last."""

    @abstractmethod
    def choose_batch(self) -> BatchChoice:
        """The fastest batch size on this machine, measured in a few steps."""

    def prepare_folder(self) -> None:
        """Called before the first sample is drawn."""

    @property
    def remaining(self) -> int:
        """The number of samples to draw."""
        return len(self.items) - len(self.finished.numbers)

    def check(self) -> None:
        """Raises for every output that must not be written. To resume, finds the finished samples first."""
        if self.resume:
            self.find_finished()
        existing = [] if self.replaces else self.existing()
        if existing:
            more = f", and {counted(len(existing) - 1, 'more file')}" if len(existing) > 1 else ""
            keep = advice("pass --resume to keep it and go on", "pass resume=True to keep it and go on")
            raise InputError(
                f"{existing[0]}: already exists{more}; choose another folder, {keep}, or {overwrite_advice()} to replace it"
            )
        # What a resumed job finds of an incomplete sample is replaced if Voxtune wrote it.
        check_outputs(self._unfinished(), overwrite=self.replaces, folder=self.out)

    def existing(self) -> list[Path]:
        """The files that this job would replace."""
        return [file for file in self._unfinished() if file.exists()]

    def _unfinished(self) -> Iterator[Path]:
        for number, item in enumerate(self.items):
            if number not in self.finished.numbers:
                yield from (self.out / name for name in item.outputs)

    def generate(self, batch: int = 1, progress: Progress | None = None) -> Iterator[ResultT]:
        """`check` and `run`."""
        self.check()
        yield from self.run(batch, progress)

    def run(self, batch: int = 1, progress: Progress | None = None) -> Iterator[ResultT]:
        """Draws the samples in batches and writes them; yields each one once its files are written."""
        self.prepare_folder()
        done = 0
        # A batch has the same samples in a resumed job, so that these do not depend on where the job was interrupted.
        for first in range(0, len(self.items), batch):
            numbers = range(first, min(first + batch, len(self.items)))
            missing = len(set(numbers) - self.finished.numbers)
            if not missing:
                continue
            inputs = self._read(numbers)
            if inputs:
                update = None if progress is None else self._progress_of_batch(progress, done, missing)
                pad = batch - len(inputs) if first and pads_last_batch(self.model) else 0
                padded = [*inputs, *[next(reversed(inputs))] * pad]
                indices = [self.items[number].index for number in padded]
                samples = self.draw([inputs[number] for number in padded], indices, update)
                self._check_passes()
                made_by = {"batch": len(padded), "passes": self._passes()}
                for number, sample in zip(inputs, samples, strict=False):
                    if number not in self.finished.numbers and self._is_finite(number, sample):
                        self._mark_incomplete(self.items[number])
                        yield self.write(self.items[number], inputs[number], sample, made_by)
            done += missing

    def _mark_incomplete(self, item: ItemT) -> None:
        """Until the new sidecars are written, earlier ones must not vouch for a mixture of old and new files."""
        for name in item.sidecars:
            if (self.out / name).exists():
                # The version marks the file, and images of version 0.1 beside it, as those of Voxtune.
                write_json(self.out / name, {"voxtune": __version__, INCOMPLETE: True}, overwrite=self.replaces)

    def _read(self, numbers: Iterable[int]) -> dict[int, Any]:
        inputs = {}
        for number in numbers:
            try:
                inputs[number] = self.read(self.items[number])
            except InputError as error:
                self._skip(number, error)
        return inputs

    def _is_finite(self, number: int, sample: np.ndarray) -> bool:
        try:
            check_finite(sample, self.name(self.items[number]))
        except InputError as error:
            self._skip(number, error)
            return False
        return True

    def _skip(self, number: int, error: InputError) -> None:
        if self.on_error == "stop":
            raise error
        self.problems.add(self.source(self.items[number]), error)

    def _progress_of_batch(self, progress: Progress, done: int, samples: int) -> Progress:
        """The progress of one batch, in steps times samples of the job."""
        steps = self.settings.steps
        return lambda step, _total: progress(done * steps + step * samples, self.remaining * steps)

    def _passes(self) -> list[str]:
        return list(getattr(self.model.network, "passes", ()))

    def _check_passes(self) -> None:
        """Raises if the plan is not the one of the finished samples; it is known after the first batch."""
        earlier, now = self.finished.passes, tuple(self._passes())
        if earlier is not None and earlier != now:
            was, is_now = (", ".join(passes) or "none (baseline)" for passes in (earlier, now))
            raise InputError(
                f"{self.out}: the finished samples were computed with the passes {was}; now they would be {is_now}; resume "
                "with the same --plan and on the same kind of device, or choose another folder"
            )

    def find_finished(self) -> None:
        """Sets `finished`; raises if a complete sample has another seed, model or settings."""
        numbers, batches, incomplete, problems = set(), [0], 0, FileProblems()
        passes: tuple[str, ...] | None = None
        for number, item in enumerate(self.items):
            present = [(self.out / name).exists() for name in item.outputs]
            if not all(present):
                incomplete += any(present)
                continue
            records = {name: _read_record(self.out / name) for name in item.sidecars}
            if any(record.get(INCOMPLETE) for record in records.values()):
                incomplete += 1
                continue
            for name, record in records.items():
                difference = self._difference(item, record)
                if difference is not None:
                    problems.add(
                        self.out / name, f"{difference}; resume with the same options, or choose another folder"
                    )
            numbers.add(number)
            if isinstance(record.get("batch"), int):
                batches.append(record["batch"])
            if passes is None and isinstance(record.get("passes"), list):
                passes = tuple(map(str, record["passes"]))
        problems.raise_all()
        self.finished = Finished(
            numbers=frozenset(numbers), batch=max(batches) or None, passes=passes, incomplete=incomplete
        )

    def _difference(self, item: ItemT, record: dict[str, Any]) -> str | None:
        """How the sidecar of a sample differs from what this job would write, or None."""
        expected = parse_json(json.dumps(self.record(item), default=str), "record")
        for key in sorted((expected.keys() | record.keys()) - MAY_DIFFER):
            if record.get(key) != expected.get(key):
                return f"was drawn with {key} {str(record.get(key))[:60]}, not {str(expected.get(key))[:60]}"
        return None


def _read_record(sidecar: Path) -> dict[str, Any]:
    record = read_json(sidecar, limit=MAX_SIDECAR_BYTES)
    if not isinstance(record, dict):
        raise InputError(f"{sidecar}: not a sidecar of Voxtune; choose another folder")
    return record


def check_finite(sample: np.ndarray, name: str) -> None:
    """Raises for a sample with NaN or infinity, which must not be written."""
    if not np.isfinite(sample).all():
        raise InputError(
            f"{name}: not written, because it contains NaN or infinity; earlier samples are complete. Try --plan "
            "baseline, another sampler or more steps; if these fail too, the weights are invalid"
        )
