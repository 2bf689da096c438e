"""A worker: a model in memory that draws the volumes of one task at a time and writes them.

`draw` is a plain function of the worker and the task, and is called from several threads: while the network runs for one
task, others read their masks, compress and write. The network itself runs in one thread.

The volumes of a mask are drawn in fixed batches: numbers 1 to B, then B + 1 to 2 B, and so on, always B of them, also if fewer
are needed. So the bits of a volume depend on its mask, its number and the settings of the data set, and on nothing else.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from voxtune.data.contract import Shape
from voxtune.data.derivative import dataset_mask, mask_stem
from voxtune.data.grid import Mode
from voxtune.data.labels import LabelMap, MaskReader
from voxtune.data.nifti import write_volume
from voxtune.diffusion.noise import identity_index
from voxtune.errors import InputError
from voxtune.files import delete_leftovers, discard, one_line, recording_paths
from voxtune.plan.cache import remember, remembered, versions
from voxtune.plan.plan import Plan
from voxtune.runtime.batching import choose_batch
from voxtune.runtime.generate import VolumeJob, encoded
from voxtune.runtime.job import check_finite
from voxtune.runtime.masks import MaskRequest, Masks, mask_contract
from voxtune.runtime.model import Model
from voxtune.runtime.planned import Planned, example_inputs, optimize
from voxtune.runtime.sampling import SamplerSettings
from voxtune.runtime.storage import load, provenance
from voxtune.scale.ledger import LedgerLine, WrittenFile, volume_name

SWITCH_SECONDS = 5e-4


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """What every worker of a data set is started with. `fixed` is what `prepare` decided at the first start."""

    model: Path
    out: Path
    sampling: SamplerSettings
    seed: int = 0
    plan: str = "auto"
    batch: int | None = None  # None: measured by `prepare`
    labels: LabelMap | None = None
    fit: Mode = "auto"
    size: Shape | None = None
    per_mask: int = 1
    volumes: int = 1  # of the whole data set
    threads: int | None = None  # of each worker on a CPU; None: as many as PyTorch uses
    fixed: Mapping[str, Any] | None = None
    mixed: bool = False  # other devices and versions are accepted
    record_paths: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Volumes of one mask that are drawn in one batch: those of `numbers` are written."""

    mask: Path
    named: Path
    subject: str
    first: int  # number of the first volume of the batch
    numbers: tuple[int, ...]
    images: tuple[Path, ...] = ()
    source_sha256: str | None = None  # of the mask, if volumes of it were written before
    store_mask: bool = False
    damaged: tuple[str, ...] = ()  # files of the data set that are to be replaced
    attempt: int = 1


# What failed: reading the mask, running the network, writing, or the whole worker.
Stage = Literal["mask", "network", "disk", "worker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskProblem:
    stage: Stage
    reason: str
    retry: bool = True


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """The records of the files that were written, and what went wrong with the others.

    `busy` and `idle` are the seconds in which the network ran, and waited since the task before.
    """

    task: Task
    lines: tuple[LedgerLine, ...] = ()
    problem: TaskProblem | None = None
    busy: float = 0.0
    idle: float = 0.0


class VolumeWorker:
    """Loads the model once. Raises InputError if this machine cannot draw the volumes of the data set."""

    def __init__(self, settings: WorkerSettings, device: str):
        self.settings, self.fixed = settings, settings.fixed
        if device.startswith("cuda"):
            torch.cuda.set_device(torch.device(device))
        elif self.fixed is not None:
            torch.set_num_threads(int(self.fixed["threads"]))
        elif settings.threads is not None:
            torch.set_num_threads(settings.threads)
        # Python's lock goes to the thread of the network soon, also while others compress and write.
        sys.setswitchinterval(SWITCH_SECONDS)
        # One thread for the network: its libraries keep state in each thread.
        self._network = ThreadPoolExecutor(1, initializer=_start_thread, initargs=(device,))
        self._idle_since: float | None = None
        self._smaller: Model | None = None
        loaded = load(settings.model, device=device)
        self.reader = MaskReader(contract=mask_contract(loaded), labels=settings.labels)
        if self.fixed is not None and not settings.mixed:
            self._check_machine(loaded, self.fixed)
        self.provenance = provenance(settings.model, loaded)
        self.model = self._planned(loaded)

    def _planned(self, model: Model) -> Model:
        plan = self.settings.plan
        if plan == "baseline":
            return model
        if self.fixed is None:
            # On a CPU a search takes longer than most jobs: `voxtune tune` does it.
            search = "quick" if model.device.type == "cuda" else False
            return optimize(model, plan=plan, search=search)
        if plan != "auto":
            return optimize(model, plan=Plan.from_json(self.fixed["plan_file"], "ledger"), search=False)
        for number, stored in enumerate(self.fixed["plans"]):
            known = Plan.from_json(stored, f"ledger: plan {number + 1}")
            if known.made_for and remembered(known.made_for) is None:
                remember(known)
        return optimize(model, plan="auto", search=False)

    def _check_machine(self, model: Model, fixed: Mapping[str, Any]) -> None:
        here = _machine(model)
        for name in ("device", *here["versions"]):
            now, before = (m[name] if name == "device" else m["versions"].get(name) for m in (here, fixed))
            if now != before:
                raise InputError(
                    f"{self.settings.out}: the data set was started with {name} {before}, this is {now}, so its volumes would "
                    "agree only within rounding; continue on the same kind of machine, or accept that with --mixed"
                )

    def prepare(self) -> dict[str, Any]:
        """Decides plan and batch, which the ledger keeps for all workers."""
        batch = self._network.submit(self._choose_batch).result()
        planned = self.model.network if isinstance(self.model.network, Planned) else None
        plan_file = None if planned is None or self.settings.plan == "auto" else Plan.load(Path(self.settings.plan))
        return {
            "batch": batch,
            "passes": _passes(self.model),
            "plans": [] if planned is None or plan_file is not None else [plan.to_json() for plan in planned.plans],
            "plan_file": None if plan_file is None else plan_file.to_json(),
            "threads": torch.get_num_threads(),
            **_machine(self.model),
        }

    def _choose_batch(self) -> int:
        """Also runs the network once as a task does, so that its plan is known."""
        settings, model = self.settings, self.model
        size = settings.size or model.config.size
        batch = settings.batch

        def condition(count: int) -> torch.Tensor:
            [_, _, mask] = example_inputs(model, size, count)
            outside, inside = mask_contract(model).mask_values
            return torch.where(mask > 0, inside, outside)

        if batch is None:
            # The seconds that a measurement may take are a share of the whole data set's.
            steps = settings.sampling.steps * max(1, settings.volumes // settings.per_mask)
            choice = choose_batch(model, condition, size, volumes=settings.per_mask, steps=steps, padded=True)
            batch = choice.batch
        cache = settings.sampling.cache
        short = min(settings.sampling.steps, 2 if cache is None else cache.interval + 1)
        model.sample(condition(batch), settings=replace(settings.sampling, steps=short), indices=range(batch))
        return batch

    def draw(self, task: Task) -> TaskResult:
        """Reads the mask, draws its volumes and writes them."""
        stage: Stage = "mask"
        lines: list[LedgerLine] = []
        busy = idle = 0.0
        try:
            with recording_paths(self.settings.record_paths):
                job = self._job(task)
                request = job.read(job.items[0])
                stage = "disk"
                lines += self._store_mask(task, job, request)
                if not task.numbers:
                    return TaskResult(task=task, lines=tuple(lines))
                stage = "network"
                whole = int(self.fixed["batch"]) if self.fixed is not None else 1
                # Not in the network's thread, where a GPU would wait for it.
                cond = encoded([request], job.contract).repeat_interleave(whole, dim=0)
                samples, batch, busy, idle = self._network.submit(self._sample, job, task, cond).result()
                stage = "disk"
                for number in task.numbers:
                    sample = samples[number - task.first]
                    check_finite(sample, f"volume {number} of {task.mask}")
                    lines.append(self._write(task, job, number, request, sample, batch))
            problem = None
        except InputError as error:
            problem = TaskProblem(stage=stage, reason=str(error), retry="NaN or infinity" not in str(error))
        except (torch.OutOfMemoryError, MemoryError) as error:
            problem = TaskProblem(stage=stage, reason=f"not enough memory, also with a batch of 1 ({one_line(error)})")
        # Whatever a library raises about this mask must not end the work on the others.
        except Exception as error:
            problem = TaskProblem(stage=stage, reason=f"{type(error).__name__}: {one_line(error)}")
        return TaskResult(task=task, lines=tuple(lines), problem=problem, busy=busy, idle=idle)

    def _job(self, task: Task) -> VolumeJob:
        settings = self.settings
        masks = Masks(reader=self.reader, mode=settings.fit, size=settings.size, checked=[])
        fix = "add it to the folder of --images"
        masks.add(task.mask, task.images, fix=fix, alias=task.named)
        if task.source_sha256 not in (None, masks.checked[0].sha256[0]):
            raise InputError(f"{task.mask}: is not the mask that other volumes of this data set were drawn from")
        return VolumeJob(
            self.model,
            masks,
            settings.out,
            settings=settings.sampling,
            count=max(task.numbers, default=1),
            seed=settings.seed,
            resume=True,
            provenance=self.provenance,
        )

    def _store_mask(self, task: Task, job: VolumeJob, request: MaskRequest) -> list[LedgerLine]:
        """Writes the mask beside its volumes, in the values of the model."""
        if not task.store_mask:
            return []
        name = dataset_mask(task.named)
        file = self.settings.out / name
        mask = self.reader.read(task.mask, task.images)
        self._make_room(task, (name,))
        write_volume(file, mask.array, mask, overwrite=True)
        state = task.mask.stat()
        source = WrittenFile(sha256=request.sha256[0], size=state.st_size, time_ns=state.st_mtime_ns)
        return [LedgerLine(name=task.subject, files={name: WrittenFile.of(file)}, source=source)]

    def _sample(self, job: VolumeJob, task: Task, cond: torch.Tensor) -> tuple[np.ndarray, int, float, float]:
        """(samples of the whole batch, the batch size that fitted into memory, seconds of the network, seconds of waiting)."""
        started = time.monotonic()
        idle = 0.0 if self._idle_since is None else started - self._idle_since
        assert self.fixed is not None
        batch = len(cond)
        indices = [identity_index(mask_stem(task.named), task.first + place) for place in range(batch)]
        while True:
            try:
                job.model = self._model_for(batch)
                samples = self.evaluate(job, cond, indices, batch)
                break
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                if batch == 1:
                    raise
                batch = (batch + 1) // 2
        passes = _passes(job.model)
        if passes != list(self.fixed["passes"]):
            now, before = (", ".join(p) or "none (baseline)" for p in (passes, self.fixed["passes"]))
            raise InputError(f"the data set is drawn with the passes {before}, here they would be {now}")
        self._idle_since = time.monotonic()
        return samples, batch, self._idle_since - started, idle

    def evaluate(self, job: VolumeJob, cond: torch.Tensor, indices: Sequence[int], batch: int) -> np.ndarray:
        """The samples of encoded masks with the noise of `indices`, in calls of `batch`."""
        parts: list[np.ndarray] = []
        for start in range(0, len(indices), batch):
            # The last call has as many as the others: another size would need another plan.
            first = min(start, len(indices) - batch)
            drawn = job.sample(cond[first : first + batch], indices[first : first + batch])
            parts.append(drawn[start - first :])
        return np.concatenate(parts)

    def _model_for(self, batch: int) -> Model:
        """The model; for a smaller batch after running out of memory, with the passes of the data set's plan."""
        network = self.model.network
        assert self.fixed is not None
        if batch == self.fixed["batch"] or not isinstance(network, Planned) or not self.fixed["plans"]:
            return self.model
        if self._smaller is None:
            steps = Plan.from_json(self.fixed["plans"][0], "ledger").steps
            self._smaller = optimize(Model(self.model.config, network.original), plan=Plan(steps), search=False)
        return self._smaller

    def _make_room(self, task: Task, names: Sequence[str]) -> None:
        """Deletes what killed workers left beside files that are to be written, and their damaged versions."""
        delete_leftovers((self.settings.out / names[0]).parent)
        for name in task.damaged:
            if name in names:
                discard(self.settings.out / name)

    def _write(
        self, task: Task, job: VolumeJob, number: int, request: MaskRequest, sample: np.ndarray, batch: int
    ) -> LedgerLine:
        assert self.fixed is not None
        reduced = batch < self.fixed["batch"]
        made_by: dict[str, Any] = {"batch": batch, "passes": _passes(job.model)}
        if reduced:
            made_by["batch_reduced_from"] = self.fixed["batch"]
        out = self.settings.out
        item = job.items[number - 1]
        self._make_room(task, item.outputs)
        job.write(item, request, sample, made_by)
        files = {name: WrittenFile.of(out / name) for name in item.outputs}
        return LedgerLine(name=volume_name(task.subject, number), files=files, reduced=reduced)


def _passes(model: Model) -> list[str]:
    return list(getattr(model.network, "passes", ()))


def _start_thread(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))


def _machine(model: Model) -> dict[str, Any]:
    return {"device": model.device_name, "versions": versions()}
