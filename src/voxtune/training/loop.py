"""The training run: a folder, a loop, and what stops it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from voxtune.config import to_mapping
from voxtune.data.subjects import Source
from voxtune.errors import InputError
from voxtune.files import replacing, reporting_os_errors
from voxtune.runtime.card import model_card
from voxtune.runtime.model import Model
from voxtune.runtime.storage import load, save
from voxtune.training import checkpoint as disk
from voxtune.training.checkpoint import Checkpoint
from voxtune.training.config import TrainConfig, differences, read_config
from voxtune.training.data import Loader, Warn, check_items, describe_source, open_source, read_item
from voxtune.training.log import TrainLog, image_picture, sample_picture
from voxtune.training.model import model_config
from voxtune.training.step import Trainer
from voxtune.versions import __version__

CONFIG, CHECKPOINTS, MODEL, LOCK = "train.json", "checkpoints", "model", ".lock"
# On the page of images that is drawn while training.
PICTURE_IMAGES = 16

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Where a run stands when `train` returns: done after its `steps` or its `minutes`, or `stopped` early on request."""

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

    def to_json(self) -> dict[str, Any]:
        return {k: str(v) if isinstance(v, Path) else v for k, v in to_mapping(self).items()}


def train(
    config: TrainConfig,
    source: Source | None,
    out: str | Path,
    progress: Progress | None = None,
    *,
    model: Model | None = None,
    device: torch.device | str = "cpu",
    resume: bool = False,
    command: str | None = None,
    stop: Callable[[], bool] | None = None,
    warn: Warn | None = None,
) -> TrainResult:
    """Trains into the run folder `out` and returns when done, or after the step in which `stop()` became true.

    Done is after `config.steps`, or when `config.minutes` are up: counted from here on, and in earlier parts of the run.

    `source` None opens what `config.data` names. `model` starts from a model at hand, of any network; without it the
    config says which. `resume` goes on from the newest checkpoint in `out`, if there is one. `progress(step, steps,
    loss)` is called after every step. torch's global random state is the caller's own again afterwards.
    """
    out, device, warn, began = Path(out), torch.device(device), warn or (lambda text: None), time.monotonic()
    with reporting_os_errors(out), locked(out), _own_random_state(device), _fastest_convolutions(device):
        found = _find_checkpoint(out, resume, warn)
        torch.manual_seed(config.seed)
        model = _starting_model(config, model, found)
        from_python = source is not None
        if source is None:
            source = open_source(config, model.config, warn, check=found is None)
        check_items(source, model.config)
        if found is not None and config.steps < found.state.step:
            raise InputError(
                f"{out}: stands at step {found.state.step} already; give --steps {found.state.step} or more"
            )
        trainer = Trainer(config, model, len(source), device)
        if found is not None:
            trainer.restore(found)
        with replacing(out / CONFIG) as part:
            part.write_text(json.dumps(to_mapping(config), indent=2) + "\n")
        origin = f"{len(source)} subjects given from Python" if from_python else describe_source(config, source)
        card = partial(training_card, config, model, origin=origin, command=command)
        last = None if found is None else found.path
        run = Run(trainer, source, out, warn=warn, card=card, last=last, began=began)
        return run.loop(progress, stop, None if found is None else found.state.step)


class Run:
    """One pass of the loop over a run folder."""

    def __init__(
        self,
        trainer: Trainer,
        source: Source,
        out: Path,
        *,
        warn: Warn,
        card: Callable[[int, float], str],
        last: Path | None,
        began: float,
    ):
        self.trainer, self.config, self.source, self.out = trainer, trainer.config, source, out
        self.card, self.last = card, last
        # As if earlier parts of the run had ended just now.
        self.began = began - trainer.elapsed
        self.log = TrainLog(out, step=trainer.step, tensorboard=self.config.tensorboard, warn=warn)

    def loop(self, progress: Progress | None, stop: Callable[[], bool] | None, resumed: int | None) -> TrainResult:
        trainer, config = self.trainer, self.config
        loader = Loader(
            self.source,
            seed=config.seed,
            batch=config.batch,
            start=trainer.step * config.samples_per_step,
            workers=config.workers,
            pin=trainer.device.type == "cuda",
        )
        loss, stopped = None, False
        # A fresh run takes one step at least, so that there is something to keep.
        over = resumed is not None and self._clock() >= 1
        try:
            with self._saying_how_to_resume():
                batches = iter(loader)
                while trainer.step < config.steps and not stopped and not over:
                    loss = self._step(batches)
                    stopped, over = stop is not None and stop(), self._clock() >= 1
                    self._after_step(last=stopped or over or trainer.step == config.steps)
                    if progress is not None:
                        progress(trainer.step, config.steps, loss)
                if trainer.step == resumed:
                    self._save_model()
        finally:
            loader.close()
            self.log.close()
        assert self.last is not None, "a run ends with a checkpoint"
        return TrainResult(
            out=self.out,
            step=trainer.step,
            steps=config.steps,
            loss=loss,
            seconds=trainer.seconds,
            resumed_from=resumed,
            ended="steps" if trainer.step >= config.steps else "minutes" if over else "request",
            stopped=trainer.step < config.steps and not over,
            checkpoint=self.last,
            model=self.out / MODEL,
        )

    def _step(self, batches: Iterator[Any]) -> float:
        began = time.perf_counter()
        try:
            wanted = [next(batches) for _ in range(self.config.accumulation)]
        except InputError:
            # The weights are those of the last full step: keep the work since the last checkpoint.
            if self.trainer.step:
                self._save()
            raise
        loss = self.trainer.train_step(wanted, self._clock())
        self.trainer.seconds += time.perf_counter() - began
        return loss

    def _clock(self) -> float:
        """The share of the run's minutes that is over."""
        self.trainer.elapsed = time.monotonic() - self.began
        limit = self.config.minutes
        return 0.0 if limit is None else self.trainer.elapsed / (60 * limit)

    def _after_step(self, *, last: bool) -> None:
        step, config = self.trainer.step, self.config
        if step % config.log_every == 0:
            self.log.row(self.trainer.take_log_row())
        if config.sample_every and step % config.sample_every == 0 and self.log.takes_pictures():
            self._picture()
        if last or step % config.checkpoint_every == 0:
            self._save()

    def _save(self) -> None:
        """Log, then checkpoint, then model, each durable before the next: a kill between them loses nothing."""
        self.log.sync()
        self.last = disk.write_checkpoint(self.out / CHECKPOINTS, self.trainer.checkpoint())
        self._save_model()
        disk.prune_checkpoints(self.out / CHECKPOINTS, self.config.keep)

    def _save_model(self) -> None:
        card = self.card(self.trainer.step, self.trainer.seconds)
        save(self._ema_model(), self.out / MODEL, card=card, overwrite=True, half=self.config.store == "bf16")

    def _ema_model(self) -> Model:
        return Model(self.trainer.model.config, self.trainer.ema.network)

    def _picture(self) -> None:
        """A sample for the first subject's mask, or a page of images. Noise has no state: training goes on as if it had
        not been drawn."""
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
        drawn = samples.float().cpu().numpy()
        mask = None if cond is None else cond.numpy()
        contract = self.trainer.model.config.data
        pixels = image_picture(drawn) if flat else sample_picture(mask, drawn[0], image.numpy(), contract)
        self.log.picture(self.trainer.step, pixels)

    @contextmanager
    def _saying_how_to_resume(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            reason = "out of GPU memory: use a smaller batch with more accumulation, a smaller model, or autocast bf16"
            raise InputError(f"{reason}; {self._how_to_resume()}") from error
        except OSError as error:
            reason = f"{error.filename or self.out}: {error.strerror or ' '.join(str(error).split())}"
            raise InputError(f"{reason}; {self._how_to_resume()}") from error
        except InputError as error:
            raise InputError(f"{error}; {self._how_to_resume()}") from error
        except Exception as error:
            # The compiler's errors have no common public class; what it cannot build here is no fault of the loop.
            if not self.config.compile or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            reason = " ".join(str(error).split())[:200]
            raise InputError(
                f"torch.compile cannot build this network here ({reason}): set compile to false"
            ) from error

    def _how_to_resume(self) -> str:
        stopped = f"stopped after step {self.trainer.step}"
        if self.last is None:
            return f"{stopped}, before the first checkpoint; mend this and start again"
        return (
            f"{stopped}; the last good checkpoint is {self.last.name}; mend this, then go on with: "
            f"voxtune train --resume {self.out}"
        )


def read_run(out: Path, overrides: dict[str, Any] | None = None) -> TrainConfig:
    """The config of a run folder, with `overrides` over it."""
    if not (out / CONFIG).is_file():
        raise InputError(f"{out}: no training run here ({CONFIG} is missing); start one with -o {out}")
    return read_config(out / CONFIG, overrides)


def load_init(path: str) -> Model:
    """The model to go on from: a model folder, a run folder, a training checkpoint or a published `.pt`."""
    place = Path(path)
    if disk.NAME.fullmatch(place.name):
        return disk.load_ema(place)
    return load(place / MODEL if (place / MODEL / "config.json").is_file() else place)


def _starting_model(config: TrainConfig, model: Model | None, found: Checkpoint | None) -> Model:
    if found is not None:
        changed = differences(found.config, config)
        if model is not None and replace(found.model, sampling=model.config.sampling) != model.config:
            changed.append("the model's own config")
        if changed:
            raise InputError(
                f"{found.path}: was trained with other settings ({'; '.join(changed)}): resume without changing them, "
                "or start another run with --init"
            )
        return Model(found.model)
    if model is not None:
        return model
    if config.model.init is None:
        return Model(model_config(config))
    start = load_init(config.model.init)
    return Model(model_config(config, start.config), start.network)


def _find_checkpoint(out: Path, resume: bool, warn: Warn) -> Checkpoint | None:
    if resume:
        return disk.newest_checkpoint(out / CHECKPOINTS, warn)
    if disk.checkpoints(out / CHECKPOINTS):
        raise InputError(f"{out}: holds a run already; continue it with --resume {out}, or choose another folder")
    return None


@contextmanager
def _fastest_convolutions(device: torch.device) -> Iterator[None]:
    """Lets cuDNN try its kernels on the run's one shape: worth a third of a step, for seconds at the start."""
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


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Makes the folder and holds it against a second run; clears what a killed run left half-written."""
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with _flock(out):
            for part in out.rglob(".*.part"):
                part.unlink(missing_ok=True)
            yield
    finally:
        # A run that was refused before it wrote anything leaves no folder behind.
        if made and [p.name for p in out.iterdir()] == [LOCK]:
            (out / LOCK).unlink()
            out.rmdir()


@contextmanager
def _flock(out: Path) -> Iterator[None]:
    with (out / LOCK).open("w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{out}: another process is training here; wait for it or choose another folder") from None
        except (ImportError, OSError):
            pass  # Windows and some cluster file systems have no flock: two runs in one folder are the user's to avoid.
        yield


def training_card(
    config: TrainConfig, model: Model, step: int, seconds: float, *, origin: str, command: str | None
) -> str:
    """The card of a run's model after `step`: the data, the recipe and the command."""
    start = "" if config.model.init is None else f", from the weights of `{config.model.init}`"
    device = "a CPU" if model.device.type == "cpu" else torch.cuda.get_device_name(model.device)
    stored = ", stored in BF16" if config.store == "bf16" else ""
    lines = [
        f"Trained with voxtune {__version__} for {step} of {config.steps} steps{start}; {seconds / 60:.1f} minutes on "
        f"{device}. These are the EMA weights{stored}.",
        "",
        f"- Data: {origin}",
        f"- Recipe: Adam, {_describe_rate(config)}, {config.loss.upper()} loss, batch {config.batch} x {config.accumulation} "
        f"accumulated, EMA {config.ema_decay:g} every {config.ema_every} steps from step {config.ema_start}, autocast "
        f"{config.autocast}, gradient clip {config.clip or 'none'}, seed {config.seed}",
    ]
    if command:
        lines += ["", "```", command, "```"]
    return model_card(model, title="A model trained with voxtune", origin="\n".join(lines))


def _describe_rate(config: TrainConfig) -> str:
    warm = f", warmed up over {config.warmup} steps" if config.warmup else ""
    length = f"{config.steps} steps"
    if config.minutes is not None:
        length += f" or {config.minutes:g} minutes, whichever were further along"
    decay = f", decaying along a cosine to a hundredth over {length}" if config.decay == "cosine" else ""
    return f"learning rate {config.learning_rate:g}{warm}{decay}"
