"""Training in several processes that torchrun started: one for each GPU, or several on the CPU.

Every process computes its share of the samples of each step; gradients are averaged while the backward pass still runs. Process
0 leads: it alone locks and writes the run folder, prints and reports. Decisions (stop, time, errors) are taken by all
processes together before and after a step, through a group of their own on the CPU, so that no process waits for another one
that has left.
"""

from __future__ import annotations

import atexit
import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.training.config import TrainConfig

T = TypeVar("T")
# Within a step all processes do the same work at the same time, compilation included.
STEP_TIMEOUT = timedelta(minutes=10)
# Between steps the others wait for process 0, which checks the data, draws pictures and writes checkpoints.
CONTROL_TIMEOUT = timedelta(hours=2)
REPORT_TIMEOUT = timedelta(seconds=20)
# What torchrun sets for every process that it starts.
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a step that one process computes: `accumulation` batches of `batch` samples, from its `first` one on.

    `step_samples` is the number of samples of a step in all processes.
    """

    batch: int
    accumulation: int
    first: int
    step_samples: int

    def numbers(self, start: int) -> Iterator[tuple[int, ...]]:
        """The sample numbers of its batches, without end, from the step on that begins with sample `start`."""
        while True:
            for batch in range(self.accumulation):
                number = start + self.first + batch * self.batch
                yield tuple(range(number, number + self.batch))
            start += self.step_samples


class _Replica(nn.Module):
    """A network that something else computes from its parameters."""

    def __init__(self, network: nn.Module, compute: Callable[..., Any]):
        super().__init__()
        self.network, self._compute = network, compute

    def forward(self, *inputs: Any) -> Any:
        return self._compute(*inputs)


class Processes:
    """The processes of a run, seen from one of them. Collective calls are made by all of them.

    `control` is a group on the CPU; without it, the process is alone and no call communicates.
    """

    def __init__(self, device: torch.device, *, rank: int = 0, count: int = 1, control: Any = None):
        self.device, self.rank, self.count = device, rank, count
        self.alone, self._control = control is None, control

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, config: TrainConfig) -> Share:
        """What this process computes of a step: an equal part, in batches of at most `config.batch` samples."""
        total = config.samples_per_step
        if total % self.count:
            raise InputError(
                f"batch {config.batch} x accumulation {config.accumulation} = {total} samples per step cannot be divided "
                f"among {self.count} processes; the product must be a multiple of {self.count}"
            )
        own = total // self.count
        batch = next(size for size in range(min(config.batch, own), 0, -1) if own % size == 0)
        return Share(batch=batch, accumulation=own // batch, first=self.rank * own, step_samples=total)

    def replicated(self, network: nn.Module, compute: Callable[..., Any] | None = None) -> Any:
        """The network with the same weights in all processes, whose backward pass averages the gradients over them.

        `compute` computes its forward pass from its parameters, by default the network itself. Each bucket of gradients is sent
        as soon as it is complete, so that sending overlaps with the backward pass.
        """
        if self.alone:
            return compute or network
        from torch.nn.parallel import DistributedDataParallel

        devices = [self.device.index] if self.device.type == "cuda" else None
        with self._connected():
            module = network if compute is None else _Replica(network, compute)
            # A rewritten network leaves out parameters without an effect, such as a shift before a norm.
            return DistributedDataParallel(
                module,
                device_ids=devices,
                gradient_as_bucket_view=True,
                find_unused_parameters=compute is not None,
            )

    def accumulating(self, replica: Any, *, last: bool) -> Any:
        """Around a forward and backward pass of a `replicated` network: only those of the `last` batch of a step send."""
        return nullcontext() if self.alone or last else replica.no_sync()

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a tensor on the device over all processes. The GPU computes it in order with its other work."""
        if not self.alone:
            torch.distributed.all_reduce(value)
            value /= self.count
        return value

    def agree(self, stop: int, clock: float) -> tuple[int, float]:
        """(the largest `stop` of any process, the clock of process 0)."""
        if self.alone:
            return stop, clock
        values = torch.tensor([stop, clock if self.leads else 0.0], dtype=torch.float64)
        with self._connected():
            torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX, group=self._control)
        return int(values[0]), float(values[1])

    def any(self, flag: bool) -> bool:
        """Whether `flag` is set in any process."""
        return self.agree(int(flag), 0.0)[0] > 0

    def check(self, error: Exception | None) -> None:
        """Raises in all processes the first error that any of them has."""
        if self.any(error is not None):
            self.raise_first(error)

    def raise_first(self, error: Exception | None) -> NoReturn:
        """The second half of `check`, once all processes know that `any` of them has an error."""
        errors = [error]
        if not self.alone:
            errors = [None] * self.count
            with self._connected():
                torch.distributed.all_gather_object(errors, error, group=self._control)
        raise next(e for e in errors if e is not None)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Raises an InputError within the block in all processes, at its end. The block makes no collective calls."""
        error: Exception | None = None
        try:
            yield
        except (InputError, OSError) as caught:
            error = caught
        self.check(error)

    def lead(self, work: Callable[[], T]) -> T:
        """What `work` returns, or raises, in process 0, which alone calls it."""
        if self.alone:
            return work()
        result: list[Any] = [None]
        error: Exception | None = None
        if self.leads:
            try:
                result = [work()]
            except (InputError, OSError) as caught:
                error = caught
        self.check(error)
        with self._connected():
            torch.distributed.broadcast_object_list(result, 0, group=self._control)
        return result[0]

    def wait(self) -> None:
        """Returns once all processes are here."""
        self.any(False)

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Around work that also communicates: the loss of another process is an InputError."""
        if self.alone:
            yield
            return
        with self._connected(only=_is_lost):
            yield

    @contextmanager
    def _connected(self, only: Callable[[Exception], bool] = lambda _: True) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if not only(error):
                raise
            global _healthy  # noqa: PLW0603
            _healthy = False
            reason = re.sub(r"\[[^]]*\.\w+:\d+\] *", "", one_line(error))  # places in the source of torch
            raise InputError(
                f"process {self.rank} of {self.count} lost the connection to another one, which has ended or does not "
                f"answer ({reason.partition('. ')[0][:120]})"
            ) from error


def _is_lost(error: Exception) -> bool:
    """Whether an error of a step is one of the connection between processes."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return any(word in text for word in ("gloo", "nccl", "connection closed by peer", "connection reset by peer"))


def process_count() -> int:
    """How many processes torchrun has started, or a launcher that sets the same variables; 1 without one."""
    if not all(name in os.environ for name in VARIABLES):
        return 1
    try:
        rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError:
        rank, count = -1, 0
    if not 0 <= rank < count:
        raise InputError(
            f"RANK={os.environ['RANK'][:20]} and WORLD_SIZE={os.environ['WORLD_SIZE'][:20]} in the environment are not a "
            "process of a job; start the command with torchrun, or unset them"
        )
    return count


def is_leader() -> bool:
    """Whether this process is the one that prints and writes."""
    return process_count() == 1 or os.environ["RANK"] == "0"


def local_count() -> int:
    """How many processes of the run share this machine's cores and memory."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "") if process_count() > 1 else ""
    return max(1, int(count)) if count.isdigit() else 1


def was_restarted(device: torch.device) -> bool:
    """Whether torchrun has started the processes of the run again, after one of them was lost (--max-restarts)."""
    count, limit = (os.environ.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    if limit == "0":
        return False
    # Each machine counts its own restarts.
    return join_processes(device).any(count.isdigit() and int(count) > 0)


_joined: Processes | None = None
_healthy = True


def join_processes(device: torch.device, *, connect: bool = True) -> Processes:
    """The processes that torchrun started, connected, each with its own GPU if `device` is one; alone without torchrun.

    Without `connect`, to compute the share of one of them.
    """
    count = process_count()
    if count == 1:
        return Processes(device)
    global _joined  # noqa: PLW0603
    device = _own_device(device)
    if not connect:
        return Processes(device, rank=int(os.environ["RANK"]), count=count)
    if _joined is None or _joined.device != device:
        _joined = _connect(device, count)
    return _joined


def wait_for_all() -> None:
    """Returns once all processes of the run are here: torchrun ends the others when one ends with an error or a signal."""
    if _joined is not None:
        _joined.wait()


def is_connected() -> bool:
    """Whether this process has joined others."""
    return _joined is not None


def _own_device(device: torch.device) -> torch.device:
    if device.type != "cuda":
        return device
    local, gpus = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), torch.cuda.device_count()
    if device.index is not None and device.index != local:
        raise InputError(
            f"--device {device} cannot be combined with several processes, which take one GPU each; pass --device cuda"
        )
    if local >= gpus:
        raise InputError(
            f"torchrun started more processes than this machine has GPUs ({gpus}); pass --nproc-per-node {max(1, gpus)}"
        )
    own = torch.device("cuda", local)
    torch.cuda.set_device(own)
    return own


def _connect(device: torch.device, count: int) -> Processes:
    from torch import distributed

    if not distributed.is_available():
        raise InputError(
            "this PyTorch has no support for several processes (torch.distributed); start without torchrun"
        )
    if local_count() == count and sys.platform == "linux":
        # All on one machine: its own name may not resolve, and other interfaces may have a firewall.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    rank = int(os.environ["RANK"])
    try:
        if not distributed.is_initialized():
            atexit.register(_leave_group)
            distributed.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                timeout=STEP_TIMEOUT,
                **_store_of_restart(rank, count),
                device_id=device if device.type == "cuda" else None,
            )
        control = distributed.new_group(backend="gloo", timeout=CONTROL_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"process {rank} of {count} cannot connect to the others at {os.environ['MASTER_ADDR'][:80]}, port "
            f"{os.environ['MASTER_PORT'][:10]} ({one_line(error)[:120]})"
        ) from error
    return Processes(device, rank=rank, count=count, control=control)


def _store_of_restart(rank: int, count: int) -> dict[str, Any]:
    """Arguments of init_process_group after a restart on one machine: there torchrun keeps its store, which still holds the
    addresses of the processes that have ended."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts == "0" or local_count() != count:
        return {}
    from torch import distributed

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(host, port, is_master=False, timeout=STEP_TIMEOUT)
    return {"store": distributed.PrefixStore(f"voxtune/restart/{restarts}", store), "rank": rank, "world_size": count}


def _leave_group() -> None:
    """Closes the connections at the end of the process, unless another one was lost: closing could wait for it."""
    global _joined  # noqa: PLW0603
    _joined = None
    gc.collect()  # the groups have threads, which must end before the interpreter does
    if _healthy and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def ignore_signals() -> None:
    """From now on, torchrun cannot end this process before it has printed and written what it still has to."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def reporting_once() -> Iterator[bool]:
    """Yields whether this process is to print the error that ends the run: the first one to fail.

    The others wait until it has done so, because torchrun ends all processes when the first one has ended.
    """
    try:
        alone = process_count() == 1
    except InputError:  # an environment that is not one of torchrun is the error to report
        alone = True
    if alone:
        yield True
        return
    global _healthy  # noqa: PLW0603
    _healthy = False
    ignore_signals()
    store = _store()
    try:
        first = store is None or store.add("failed", 1) == 1
    except RuntimeError:
        first = True
    yield first
    try:
        if store is not None and first:
            store.set("reported", "1")
        elif store is not None:
            store.wait(["reported"], REPORT_TIMEOUT)
    except RuntimeError:  # the process that holds the store has ended, or the report takes too long
        return


def _store() -> Any:
    """The store of torchrun, which outlives its processes; None if it does not answer."""
    from torch import distributed

    run = "/".join(os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT"))
    try:
        store = distributed.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=5)
        )
        return distributed.PrefixStore(f"voxtune/{run}", store)
    except (RuntimeError, ValueError):
        return None
