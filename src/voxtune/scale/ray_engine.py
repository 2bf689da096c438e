"""The Ray engine: workers are actors of a Ray cluster, one for each GPU, or several on CPUs.

Ray places the actors on nodes, and starts a lost one again, on another node if its own is gone. The tasks that it had come
back to the driver, which hands them to other workers: repeated by Ray, they would wait until their own actor runs again.
Masks and volumes pass through the shared file system; Ray carries tasks and checksums only.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from voxtune.errors import InputError, optional_import
from voxtune.files import counted, one_line
from voxtune.scale.engine import IN_HAND, Engine, EngineOptions, MakeWorker
from voxtune.scale.worker import Task, TaskProblem, TaskResult, VolumeWorker, WorkerSettings

log = logging.getLogger("voxtune")

# Times that Ray starts an actor again; then the engine asks for a new one.
RESTARTS = 3
# Actors that may be lost one after the other without any result between them.
MAX_LOSSES = 5
# Of a cluster on this machine alone: nothing large passes through Ray.
OBJECT_STORE_BYTES = 100 * 2**20
CONNECT_SECONDS = 10.0
# Without any worker that is ready, before this is reported.
WAITING_SECONDS = 120.0


def connect(address: str | None, *, cpus: int = 1) -> Any:
    """The ray module, connected to the cluster at `address` or RAY_ADDRESS; without one, to a new one on this machine."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == "local":
        # Whoever reaches a cluster can run code in it, unless it requires a token; Ray would store one in the home folder.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    with optional_import("--engine ray"):
        import ray
    if ray.is_initialized():
        return ray
    if address not in ("local", "auto"):
        _check_reachable(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        options |= {"num_cpus": max(cpus, os.cpu_count() or 1), "include_dashboard": False}
        options["object_store_memory"] = OBJECT_STORE_BYTES
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, **options)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise InputError(
            f"no connection to the Ray cluster at {address[:100]}: {one_line(error)[:200]}; if it requires a token, set "
            "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
        ) from None
    finally:
        # SIGTERM finishes the volumes that are being drawn; Ray's handler would end the driver.
        if main and callable(before):
            signal.signal(signal.SIGTERM, before)
    with suppress(ImportError):
        from ray._private import worker

        # Ray prints notices about lost actors to standard output, where --json prints one object.
        worker.print_to_stdstream = _log_notice
    return ray


def _log_notice(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    log.debug("ray: %s", one_line(RuntimeError(" ".join(map(str, data.get("lines", ()))))))


def _check_reachable(address: str) -> None:
    """Raises if nothing answers at HOST:PORT: Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise InputError(f"--address {address[:100]}: expected auto or HOST:PORT, such as 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"no connection to the Ray cluster at {address[:100]}: {one_line(error)[:200]}") from None


def cluster_devices(
    device: str, gpus: int | None, workers: int | None, address: str | None
) -> tuple[tuple[str, ...], int]:
    """(the devices of the workers, the CPUs that they share). Ray shows each worker its own GPU as the first one."""
    ray = connect(address, cpus=workers or 1)
    total = ray.cluster_resources()
    there = int(total.get("GPU", 0))
    if device == "auto":
        device = "cuda" if there else "cpu"
    if device == "cuda":
        if workers is not None:
            raise InputError("--workers applies to CPUs; on GPUs, pass --gpus")
        if (gpus or 1) > there:
            raise InputError(f"--gpus {gpus or 1}: the Ray cluster has {counted(there, 'GPU')}")
        return ("cuda:0",) * (gpus or there), 0
    if device != "cpu":
        raise InputError(f"--device {device[:40]} cannot be combined with --engine ray; pass auto, cpu or cuda")
    if gpus is not None:
        raise InputError("--gpus requires CUDA devices; pass --workers on CPUs")
    count, cpus = workers or 1, int(total.get("CPU", 0))
    if count > cpus:
        raise InputError(f"--workers {count}: the Ray cluster has {counted(cpus, 'CPU')}")
    # A worker does not extend over nodes.
    nodes = [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]
    return ("cpu",) * count, min(cpus, min((n for n in nodes if n), default=1) * count)


class RayWorker:
    """A worker in the process of an actor. Why it cannot work is a value: an exception would end the actor for good."""

    def __init__(self, make: MakeWorker, settings: WorkerSettings, device: str):
        self._worker: VolumeWorker | str
        try:
            self._worker = make(settings, device)
        except InputError as error:
            self._worker = str(error)
        except (MemoryError, RuntimeError) as error:  # such as a GPU without free memory
            self._worker = f"a worker on {socket.gethostname()} could not load the model: {one_line(error)}"

    def ready(self) -> str:
        """Nothing, or why it cannot work."""
        return self._worker if isinstance(self._worker, str) else ""

    def prepare(self) -> dict[str, Any] | str:
        if isinstance(self._worker, str):
            return self._worker
        try:
            return self._worker.prepare()
        except InputError as error:
            return str(error)

    def draw(self, task: Task) -> TaskResult | str:
        return self._worker if isinstance(self._worker, str) else self._worker.draw(task)


@dataclass(kw_only=True, eq=False)
class ActorHandle:
    """An actor, the reference to its answer that it is ready, and the tasks in its hands by the references to their results."""

    actor: Any
    starting: Any
    ready: bool = False
    tasks: dict[Any, Task] = field(default_factory=dict)
    refused: str = ""

    @property
    def room(self) -> int:
        alone = any(task.attempt > 1 for task in self.tasks.values())
        return 0 if alone or not self.ready else IN_HAND - len(self.tasks)


class RayEngine(Engine):
    def __init__(self, options: EngineOptions):
        super().__init__(options)
        self._ray = connect(options.address, cpus=len(options.devices))
        self._settings: WorkerSettings | None = None
        self._actors: list[ActorHandle] = []
        # Tasks that no ready actor has yet; later attempts wait until one has nothing else.
        self._waiting: deque[Task] = deque()
        self._alone: deque[Task] = deque()
        self._losses = 0
        self._refusals: set[str] = set()
        self._waiting_since: float | None = None

    def prepare(self, settings: WorkerSettings) -> dict[str, Any]:
        actor = self._actor(settings)
        try:
            reply: dict[str, Any] | str = self._ray.get(actor.prepare.options(max_task_retries=RESTARTS).remote())
        except self._ray.exceptions.RayError as error:
            raise InputError(f"the worker ended before it was ready ({_reason(error)})") from None
        finally:
            self._ray.kill(actor)
        if isinstance(reply, str):
            raise InputError(reply)
        return reply

    def start(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._actors = [self._start_actor() for _ in self.options.devices]

    def _actor(self, settings: WorkerSettings) -> Any:
        device = self.options.devices[0]
        threads = settings.threads if settings.fixed is None else int(settings.fixed["threads"])
        resources = {"num_cpus": threads or 1} if device == "cpu" else {"num_cpus": 1, "num_gpus": 1}
        kind = self._ray.remote(RayWorker).options(max_restarts=RESTARTS, max_concurrency=IN_HAND, **resources)
        return kind.remote(self.options.make, settings, device)

    def _start_actor(self) -> ActorHandle:
        assert self._settings is not None
        actor = self._actor(self._settings)
        return ActorHandle(actor=actor, starting=_ask_ready(actor))

    @property
    def room(self) -> int:
        handed = sum(len(actor.tasks) for actor in self._actors)
        return IN_HAND * len(self._actors) - handed - len(self._waiting) - len(self._alone)

    def submit(self, task: Task) -> None:
        (self._alone if task.attempt > 1 else self._waiting).append(task)
        self._hand_out()

    def _hand_out(self) -> None:
        ready = [actor for actor in self._actors if actor.ready]
        for actor in ready:
            if self._alone and not actor.tasks:
                self._send(actor, self._alone.popleft())
        # One actor empties its hands for the tasks that have to run alone.
        open_actors = ready[1 if self._alone else 0 :]
        while self._waiting and open_actors:
            actor = max(open_actors, key=lambda actor: actor.room)
            if actor.room <= 0:
                return
            self._send(actor, self._waiting.popleft())

    def _send(self, actor: ActorHandle, task: Task) -> None:
        actor.tasks[actor.actor.draw.remote(task)] = task

    def wait(self, seconds: float) -> list[TaskResult]:
        self._report_waiting()
        references = [ref for a in self._actors for ref in (*a.tasks, *([a.starting] if a.starting else []))]
        done: set[Any] = set()
        if self._ray.wait(references, num_returns=1, timeout=seconds)[0]:
            done.update(self._ray.wait(references, num_returns=len(references), timeout=0)[0])
        results: list[TaskResult] = []
        for place, actor in enumerate(self._actors):
            try:
                self._receive(actor, done, results)
            except self._ray.exceptions.RayError as error:
                self._lose(place, actor, error, results)
        self._remove_refused(results)
        self._hand_out()
        return results

    def _report_waiting(self) -> None:
        """Warns once if Ray has no room for any worker, such as beside another job."""
        if any(actor.ready for actor in self._actors):
            self._waiting_since = None
        elif self._waiting_since is None:
            self._waiting_since = time.monotonic()
        elif time.monotonic() - self._waiting_since > WAITING_SECONDS:
            self._waiting_since = math.inf
            log.warning("no worker has started for %.0f s: the Ray cluster may be busy", WAITING_SECONDS)

    def _receive(self, actor: ActorHandle, done: set[Any], results: list[TaskResult]) -> None:
        """Adds the results of an actor; raises RayError if it was lost."""
        lost: Exception | None = None
        if actor.starting in done:
            actor.refused = self._ray.get(actor.starting)
            actor.starting, actor.ready = None, not actor.refused
        for ref in [ref for ref in actor.tasks if ref in done]:
            try:
                reply = self._ray.get(ref)
            except self._ray.exceptions.RayTaskError as error:  # an exception in the worker, which goes on
                reply = _lost(actor.tasks[ref], f"the worker failed ({_reason(error)})")
            except self._ray.exceptions.RayError as error:
                lost = error
                continue
            if isinstance(reply, str):
                actor.refused = reply
                continue
            self._losses = 0
            del actor.tasks[ref]
            results.append(reply)
            if reply.problem is not None and "CUDA error" in reply.problem.reason:
                # The device is unusable for the rest of this process.
                self._ray.kill(actor.actor, no_restart=False)
        if lost is not None:
            raise lost

    def _lose(self, place: int, actor: ActorHandle, error: Exception, results: list[TaskResult]) -> None:
        """Returns the tasks of a lost actor, which Ray starts again, or of which a new one takes the place."""
        results += [_lost(task, f"the worker was lost ({_reason(error)})") for task in actor.tasks.values()]
        gone = isinstance(error, self._ray.exceptions.ActorDiedError)
        self._losses += RESTARTS + 1 if gone and not actor.ready else 1
        if self._losses > MAX_LOSSES + self.workers:
            raise InputError(f"workers end before they finish a task: the last one ended with {_reason(error)}")
        if gone:
            self._actors[place] = self._start_actor()
            return
        actor.tasks.clear()
        actor.ready = False
        actor.starting = actor.starting or _ask_ready(actor.actor)

    def _remove_refused(self, results: list[TaskResult]) -> None:
        for actor in [actor for actor in self._actors if actor.refused]:
            self._ray.kill(actor.actor)
            self._actors = [other for other in self._actors if other is not actor]
            results += [_lost(task, actor.refused) for task in actor.tasks.values()]
            # A node that cannot work must not end the work of the others.
            if not self._actors:
                raise InputError(actor.refused)
            if actor.refused not in self._refusals:
                log.warning("going on without a worker: %s", actor.refused)
            self._refusals.add(actor.refused)

    def close(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor.actor)
        self._actors = []


def _ask_ready(actor: Any) -> Any:
    """The reference to the answer of an actor, also if it has to be started again before it can give it."""
    return actor.ready.options(max_task_retries=-1).remote()


def _lost(task: Task, reason: str) -> TaskResult:
    return TaskResult(task=task, problem=TaskProblem(stage="worker", reason=reason))


def _reason(error: Exception) -> str:
    """The kind of the error and the end of its message, which states the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1][:160]}" if lines else type(error).__name__
