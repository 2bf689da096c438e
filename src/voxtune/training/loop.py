"""The training run: its folder, its loop, and its model card."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch

from voxtune.config import to_mapping
from voxtune.data.subjects import Source
from voxtune.errors import InputError
from voxtune.files import locked_folder, reporting_os_errors
from voxtune.precision import deterministic_algorithms
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.storage import load, save
from voxtune.training import checkpoint as disk
from voxtune.training.checkpoint import CHECKPOINTS, Checkpoint
from voxtune.training.config import TrainConfig, differences, with_steps
from voxtune.training.data import (
    Batch,
    Loader,
    PackedSource,
    Warn,
    check_items,
    describe_source,
    open_source,
    read_item,
    worker_count,
)
from voxtune.training.distributed import Processes, join_processes
from voxtune.training.fit import Fit, naming_settings, train_fitting
from voxtune.training.folder import CONFIG, MODEL, add_command, add_fits, check_new_run, delete_run, write_settings
from voxtune.training.log import TrainLog, image_picture, sample_picture
from voxtune.training.model import model_config, training_card, with_folder_image
from voxtune.training.overview import Overview, Progress, overview, timing
from voxtune.training.plan import unmeasured_plan
from voxtune.training.plan_choice import choose_plan
from voxtune.training.plan_step import WARM_UP
from voxtune.training.prefetch import Prefetch
from voxtune.training.step import Trainer

# Number of sampled images on a picture during training.
PICTURE_IMAGES = 16


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult:
    """The state of a run when `train` returns: complete after its `steps` or `minutes`, or `stopped` on request.

    `idle` is the share of the time of this call's steps in which the device waited for batches; None without a step.
    """

    out: Path
    step: int
    steps: int
    loss: float | None
    seconds: float
    resumed_from: int | None
    ended: Literal["steps", "minutes", "request"]
    stopped: bool
    checkpoint: Path
    model: Path
    idle: float | None = None
    processes: int = 1

    def to_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in to_mapping(self).items()}

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", last loss {self.loss:.4f}"
        stopped = f", stopped: {self.ended}" if self.stopped else ""
        return (
            f"TrainResult(step {self.step} of {self.steps}{loss}, {self.seconds:.0f} s{stopped}; model: {self.model})"
        )


def train(
    config: TrainConfig,
    source: Source | None,
    out: str | Path,
    progress: Progress | None = None,
    *,
    model: Model | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
    overwrite: bool = False,
    command: str | None = None,
    stop: Callable[[], bool] | None = None,
    warn: Warn | None = None,
    report: Callable[[Overview], None] | None = None,
    say: Callable[[str], None] | None = None,
    auto_fit: bool = False,
) -> TrainResult:
    """Trains into the run folder `out` until the run is complete or `stop()` returns true after a step.

    A run is complete after `config.steps` steps (or `config.epochs` epochs) or `config.minutes` minutes, including those
    before a resume.

    `source` None opens the source in `config.data`. `model` is the model to start from, by default the one in `config`.
    `resume` continues from the newest checkpoint in `out`, if any; `overwrite` replaces an earlier run in `out`.
    `progress(step, steps, loss)` is called after every step; `stop()` also before the first one, without effect. A new run
    calls `report` before its first step, and again when the time of its first steps is known. `say` receives what is measured
    and decided when the plan is chosen. torch's global random state is restored afterwards.

    `auto_fit`: a step that runs out of GPU memory changes the settings of the run to some with which a step is estimated to
    fit, which train on the same samples, and the run continues; `say` is told.

    In processes that torchrun started, every one calls `train` with the same arguments; `stop` is called in all of them, the
    other functions in process 0 alone.
    """
    out = Path(out)
    train_once = partial(_train, out=out, progress=progress, device=device, command=command, stop=stop, report=report)
    options: dict[str, Any] = {
        "source": source,
        "model": model,
        "resume": resume,
        "overwrite": overwrite,
        "warn": warn,
        "say": say,
    }
    return train_fitting(train_once, config, **options) if auto_fit else train_once(config, **options)


def _train(
    config: TrainConfig,
    source: Source | None,
    out: Path,
    progress: Progress | None,
    *,
    model: Model | None,
    device: torch.device | str,
    resume: bool,
    overwrite: bool,
    command: str | None,
    stop: Callable[[], bool] | None,
    warn: Warn | None,
    report: Callable[[Overview], None] | None,
    say: Callable[[str], None] | None,
    fits: Sequence[Fit] = (),
) -> TrainResult:
    """One attempt of `train`; `fits` are settings that earlier ones changed."""
    started = time.monotonic()
    processes = join_processes(torch.device(device))
    device = processes.device
    if warn is None or not processes.leads:
        warn = lambda text: None  # noqa: E731
    if not processes.leads:
        progress = None
    with (
        reporting_os_errors(out),
        ExitStack() as stack,
        _own_random_state(device),
        _fastest_convolutions(device),
        deterministic_algorithms(config.deterministic),  # after cuDNN's choice by time, which it switches off
    ):
        resume, checkpoint = processes.lead(lambda: _open_run(stack, out, warn, resume=resume, overwrite=overwrite))
        with processes.together():
            if (
                source is None
                and model is None
                and (checkpoint is None or checkpoint.config.data.modalities is not None)
            ):
                config, _ = with_folder_image(config)
            if checkpoint is not None:
                config = with_steps(config, checkpoint.state.subjects)
            torch.manual_seed(config.seed)
            model = _starting_model(config, model, checkpoint)
            from_python = source is not None
            if source is None:
                check, workers = checkpoint is None and processes.leads, worker_count(config, device)
                source = open_source(config, model.config, warn, check=check, workers=workers)
            check_items(source, model.config)
            config = with_steps(config, len(source))
            origin = f"{len(source)} subjects from Python" if from_python else describe_source(config, source)
            new = config.model.init is None and not from_python
            facts = None
            if checkpoint is None and processes.leads:
                facts = _facts(model, source, origin, config, new=new)
            if checkpoint is not None and config.steps < checkpoint.state.step:
                step = checkpoint.state.step
                raise InputError(f"{out}: already at step {step}; pass --steps {step} or more")
            share = processes.share(config)
        for line in () if facts is None else facts.warnings:
            warn(line)
        if facts is not None and report is not None:
            report(facts)
            progress = timing(progress, facts, config, report, WARM_UP + 1 if device.type == "cuda" else 0)
        # Of what one process computes in a step.
        own, opened, start = replace(config, batch=share.batch, accumulation=share.accumulation), source, model
        memory: dict[str, Any] = {"alone": processes.alone, "before": fits}
        with naming_settings(own, model, unmeasured_plan(own, device), device, **memory):
            plan = processes.lead(
                lambda: choose_plan(own, start, opened, device, say or (lambda line: None), checkpoint)
            )
        with naming_settings(own, model, plan, device, **memory):
            trainer = Trainer(config, model, len(source), device, plan, processes)
        if checkpoint is not None:
            trainer.restore(checkpoint)
        commands = processes.lead(lambda: _write_run(out, config, command, fits, resume=resume))
        card = partial(
            training_card,
            config,
            model,
            plan=plan.describe(),
            origin=origin,
            commands=commands,
            processes=processes.count,
        )
        last = None if checkpoint is None else checkpoint.path
        run = Run(trainer, source, out, processes=processes, warn=warn, card=card, last=last, started=started)
        with naming_settings(own, model, plan, device, **memory, hint=run.how_to_resume):
            return run.loop(progress, stop, None if checkpoint is None else checkpoint.state.step)


def _open_run(
    stack: ExitStack, out: Path, warn: Warn, *, resume: bool, overwrite: bool
) -> tuple[bool, Checkpoint | None]:
    """Locks the run folder; (whether it holds a run to resume, its newest checkpoint)."""
    stack.enter_context(locked_folder(out))
    resume = resume and (out / CONFIG).exists()
    if not resume:
        check_new_run(out, overwrite=overwrite)
    return resume, disk.newest_checkpoint(out / CHECKPOINTS, warn) if resume else None


def _write_run(out: Path, config: TrainConfig, command: str | None, fits: Sequence[Fit], *, resume: bool) -> list[str]:
    """Writes the settings of the run and its commands, which are returned; a new run replaces an earlier one here."""
    if not resume:
        delete_run(out)
    write_settings(out, config)
    add_fits(out, [{**fit.settings(), "estimated_bytes": fit.bytes} for fit in fits])
    return add_command(out, command)


def dry_run(
    config: TrainConfig,
    *,
    device: torch.device | str = "cpu",
    warn: Warn | None = None,
    say: Callable[[str], None] | None = None,
) -> Overview:
    """The overview of a run, with the time of one real step; nothing is written.

    In a process that torchrun started, the step is its share of one, measured without the others.
    """
    processes, warn = join_processes(torch.device(device), connect=False), warn or (lambda text: None)
    device = processes.device
    config, _ = with_folder_image(config)
    with (
        _own_random_state(device),
        _fastest_convolutions(device),
        deterministic_algorithms(config.deterministic),  # after cuDNN's choice by time, which it switches off
    ):
        torch.manual_seed(config.seed)
        model = _starting_model(config, None, None)
        source = open_source(config, model.config, warn, check=True)
        check_items(source, model.config)
        config = with_steps(config, len(source))
        share = processes.share(config)
        facts = _facts(model, source, describe_source(config, source), config, new=config.model.init is None)
        for line in facts.warnings:
            warn(line)
        own = replace(config, batch=share.batch, accumulation=share.accumulation)
        plan = choose_plan(own, model, source, device, say or (lambda line: None))
        trainer = Trainer(config, model, len(source), device, plan)
        loader = Loader(source, seed=config.seed, start=0, workers=0, pin=device.type == "cuda", share=share)
        batch, seconds = next(iter(loader)), 0.0
        # The first steps on a GPU or with torch.compile also choose or compile kernels, and record a graph.
        for _ in range(5 if device.type == "cuda" else 2 if plan.name == "compile" else 1):
            started = time.perf_counter()
            trainer.train_step([batch])
            trainer.settle()
            seconds = time.perf_counter() - started
    return facts.with_time(seconds * share.accumulation, config.steps, config.minutes)


def _facts(model: Model, source: Source, origin: str, settings: TrainConfig, *, new: bool) -> Overview:
    """The overview of a new run; the model gets the statistics of its training data."""
    held_out = source.held_out if isinstance(source, PackedSource) else None
    config = model.config
    facts = overview(source, config.network, config.size, config.data, held_out=held_out, origin=origin, new=new)
    model.config = replace(model.config, training_data=facts.statistics)
    return replace(facts, steps=settings.steps, samples_per_step=settings.samples_per_step)


class Run:
    """The training loop of one call of `train`."""

    def __init__(
        self,
        trainer: Trainer,
        source: Source,
        out: Path,
        *,
        processes: Processes,
        warn: Warn,
        card: Callable[[int, float], str],
        last: Path | None,
        started: float,
    ):
        self.trainer, self.config, self.source, self.out = trainer, trainer.config, source, out
        self.processes, self.card, self.last = processes, card, last
        # Time before a resume counts as if it had passed just now.
        self.started = started - trainer.elapsed
        self.share = processes.share(self.config)
        self.prefetch: Prefetch | None = None
        self.log: TrainLog | None = None
        if processes.leads:
            self.log = TrainLog(out, step=trainer.step, tensorboard=self.config.tensorboard, warn=warn)
        # Idle seconds and seconds of steps: at the start, and at the last row of the log.
        self._first = self._logged = (0.0, trainer.seconds)

    def loop(self, progress: Progress | None, stop: Callable[[], bool] | None, resumed: int | None) -> TrainResult:
        trainer, config, processes = self.trainer, self.config, self.processes
        prefetch = self.prefetch = self._started_prefetch()
        if stop is not None:
            stop()  # from now on, a signal is a request that the run handles
        try:
            with self._resume_hint(), processes.connected():
                # A fresh run takes at least one step, so that there is a checkpoint.
                over, stopped = self._agree(None) if resumed is not None else (False, False)
                stopped = False
                while trainer.step < config.steps and not stopped and not over:
                    loss = self._step(prefetch)
                    # The other processes learn of an error of process 0 before the next step, or after the last one.
                    with self._leading():
                        if trainer.failure is not None:
                            self._fail(trainer.failure)
                    over, stopped = self._agree(stop)
                    with self._leading():
                        self._after_step(last=stopped or over or trainer.step == config.steps)
                        if progress is not None:
                            progress(trainer.step, config.steps, loss)
                with self._leading():
                    if trainer.step == resumed:
                        self._save_model()
                processes.check(None)
            idle = self._idle_share(self._first, wait=True)[0]
        finally:
            prefetch.close()
            if self.log is not None:
                self.log.close()
        assert self.last is not None, "a run ends with a checkpoint"
        return TrainResult(
            out=self.out,
            step=trainer.step,
            steps=config.steps,
            loss=trainer.loss,
            seconds=trainer.seconds,
            resumed_from=resumed,
            ended="steps" if trainer.step >= config.steps else "minutes" if over else "request",
            stopped=trainer.step < config.steps and not over,
            checkpoint=self.last,
            model=self.out / MODEL,
            idle=idle,
            processes=processes.count,
        )

    def _started_prefetch(self) -> Prefetch:
        config, device = self.config, self.trainer.device
        workers = worker_count(config, device)
        loader = Loader(
            self.source,
            seed=config.seed,
            start=self.trainer.step * config.samples_per_step,
            workers=workers,
            pin=device.type == "cuda",
            share=self.share,
        )
        return Prefetch(loader, device, threaded=workers > 0)

    def _step(self, prefetch: Prefetch) -> float:
        started = time.perf_counter()
        batches: list[Batch] = []
        error: Exception | None = None
        try:
            batches = prefetch.take(self.share.accumulation)
        except InputError as caught:
            error = caught
        failed, clock = self.processes.agree(int(error is not None), self._clock())
        if failed:
            # The weights are those of the last complete step: save the work since the last checkpoint.
            if self.trainer.step:
                self._save()
            self.processes.raise_first(error)
        loss = self.trainer.train_step(batches, clock)
        self.trainer.seconds += time.perf_counter() - started
        return loss

    def _agree(self, stop: Callable[[], bool] | None) -> tuple[bool, bool]:
        """(whether the time of the run is over, whether any process is asked to stop), the same in all processes."""
        stopped, clock = self.processes.agree(int(stop is not None and bool(stop())), self._clock())
        return clock >= 1, stopped > 0

    @contextmanager
    def _leading(self) -> Iterator[None]:
        """Around work of process 0 between two steps: the other processes come to their next `check`, and raise its error."""
        try:
            yield
        except (InputError, OSError) as error:
            self.processes.check(error)
            raise

    def _fail(self, failure: InputError) -> NoReturn:
        """Saves the state after the last good step; too many steps after it were skipped. Called in all processes."""
        if self.processes.leads:
            self.last = disk.drop_later_checkpoints(self.out / CHECKPOINTS, self.trainer.step)
            if self.trainer.step:
                self._write()
        # Only the processes in whose batch a value is not finite can name it.
        cause = self.trainer.failed_here
        known = self.processes.any(cause)
        self.processes.raise_first(failure if cause or not known else None)

    def _clock(self) -> float:
        """The elapsed fraction of the run's time limit; 0 without one."""
        self.trainer.elapsed = time.monotonic() - self.started
        limit = self.config.minutes
        return 0.0 if limit is None else self.trainer.elapsed / (60 * limit)

    def _after_step(self, *, last: bool) -> None:
        step, config = self.trainer.step, self.config
        if self.log is None:
            if last or step % config.checkpoint_every == 0:
                self._save()
            return
        self._log_rows()
        if config.sample_every and step % config.sample_every == 0 and self.log.accepts_pictures():
            self._picture()
        if last or step % config.checkpoint_every == 0:
            self._save()

    def _log_rows(self) -> None:
        rows = self.trainer.take_log_rows()
        if self.log is None or not rows:
            return
        idle, self._logged = self._idle_share(self._logged)
        for row in rows:
            self.log.row(row | ({} if idle is None else {"idle": round(idle, 4)}))

    def _save(self) -> None:
        self.trainer.settle()
        if self.trainer.failure is not None:
            self._fail(self.trainer.failure)
        self._write()

    def _write(self) -> None:
        """Log, then checkpoint, then model, each on disk before the next: a kill between them loses nothing."""
        if self.log is None:
            self.last = disk.checkpoint_path(self.out / CHECKPOINTS, self.trainer.step)
            return
        self._log_rows()
        self.log.sync()
        self.last = disk.write_checkpoint(self.out / CHECKPOINTS, self.trainer.checkpoint())
        self._save_model()
        disk.prune_checkpoints(self.out / CHECKPOINTS, self.config.keep)

    def _idle_share(
        self, since: tuple[float, float], *, wait: bool = False
    ) -> tuple[float | None, tuple[float, float]]:
        """The share of the steps' time in which the device waited for batches, since (idle seconds, seconds); these now."""
        assert self.prefetch is not None
        now = (self.prefetch.idle_seconds(wait=wait), self.trainer.seconds)
        seconds = now[1] - since[1]
        return (min(1.0, (now[0] - since[0]) / seconds) if seconds > 0 else None), now

    def _save_model(self) -> None:
        if not self.processes.leads:
            return
        card = self.card(self.trainer.step, self.trainer.seconds)
        save(self._ema_model(), self.out / MODEL, card=card, state=True, half=self.config.store == "bf16")

    def _ema_model(self) -> Model:
        return Model(self.trainer.model.config, self.trainer.ema.network)

    def _picture(self) -> None:
        """Writes a sample for the first subject's mask, or a page of images. Does not change the random state."""
        assert self.log is not None
        image, cond = read_item(self.source, 0)
        flat = self.trainer.model.config.network.dimensions == 2
        with self.trainer.autocast():
            samples = self._ema_model().sample(
                None if cond is None else cond[None],
                sampler=self.config.sampler,
                steps=min(self.config.sample_steps, len(self.trainer.model.schedule)),
                seed=self.config.seed,
                indices=range(PICTURE_IMAGES if flat else 1),
            )
        volumes = samples.float().cpu().numpy()
        mask = None if cond is None else cond.numpy()
        contract = self.trainer.model.config.data
        pixels = image_picture(volumes) if flat else sample_picture(mask, volumes[0], image.numpy(), contract)
        self.log.picture(self.trainer.step, pixels)

    @contextmanager
    def _resume_hint(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = f"{error.filename or self.out}: {error.strerror or ' '.join(str(error).split())}"
            raise InputError(f"{reason}; {self.how_to_resume()}") from error
        except InputError as error:
            raise InputError(f"{error}; {self.how_to_resume()}") from error
        except Exception as error:
            text = " ".join(str(error).split())
            if self.config.deterministic and "does not have a deterministic implementation" in text:
                raise InputError(
                    f"PyTorch {torch.__version__} has no deterministic {text.split()[0]} on this device: train without "
                    "--deterministic"
                ) from error
            # Errors of torch.compile have no common public class.
            if self.trainer.plan.name != "compile" or not type(error).__module__.startswith(
                ("torch._dynamo", "torch._inductor")
            ):
                raise
            raise InputError(
                f"torch.compile cannot compile this network on this machine ({text[:200]}): pass --plan baseline"
            ) from error

    def how_to_resume(self) -> str:
        stopped = f"stopped after step {self.trainer.step}"
        # Process 0 may have failed to write the last one.
        last = self.last if self.processes.leads else next(reversed(disk.checkpoints(self.out / CHECKPOINTS)), None)
        if last is None:
            return f"{stopped}, before the first checkpoint; fix this and start again"
        return (
            f"{stopped}; the last checkpoint is {last.name}; fix this, then resume with: "
            f"voxtune train --resume {self.out}"
        )


def load_init(path: str) -> Model:
    """The model to fine-tune: a model folder, a run folder, a training checkpoint or a published `.pt`."""
    location = Path(path)
    if disk.NAME.fullmatch(location.name):
        return disk.load_ema(location)
    return load(location / MODEL if (location / MODEL / "config.json").is_file() else location)


def _starting_model(config: TrainConfig, model: Model | None, checkpoint: Checkpoint | None) -> Model:
    if checkpoint is not None:
        checkpoint = _with_image_kinds(checkpoint, config)
        changed = differences(checkpoint.config, config)
        if model is not None and _like(checkpoint.model, model.config) != model.config:
            changed.append("the config of the model")
        if changed:
            raise InputError(
                f"{checkpoint.path}: was trained with other settings ({'; '.join(changed)}): resume without changing "
                "them, or start another run with --init"
            )
        return Model(checkpoint.model)
    if model is not None:
        return model
    if config.model.init is None:
        return Model(model_config(config))
    start = load_init(config.model.init)
    return Model(model_config(config, start.config), start.network)


def _like(stored: ModelConfig, other: ModelConfig) -> ModelConfig:
    """A stored config with the parts of another one that do not affect training."""
    return replace(stored, sampling=other.sampling, training_data=other.training_data)


def _with_image_kinds(checkpoint: Checkpoint, config: TrainConfig) -> Checkpoint:
    """A run whose settings do not name its images is resumed with the kinds that are given now, such as --image T2w."""
    old, kinds, contract = checkpoint.config, config.data.modalities, checkpoint.model.data
    if old.data.modalities is not None or kinds is None or contract is None or len(kinds) != len(contract.images):
        return checkpoint
    named = replace(old, data=replace(old.data, modalities=kinds))
    return replace(checkpoint, config=named, model=replace(checkpoint.model, data=replace(contract, images=kinds)))


@contextmanager
def _fastest_convolutions(device: torch.device) -> Iterator[None]:
    """Lets cuDNN select the fastest kernel for the run's input shape, which saves about a third of a step."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = before or device.type == "cuda"
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _own_random_state(device: torch.device) -> Iterator[None]:
    devices = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
