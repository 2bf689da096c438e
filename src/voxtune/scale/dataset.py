"""`voxtune generate`: a data set from a manifest. Settings, plan and batch are fixed at the first start; later starts continue.

All files appear atomically, and a volume is recorded after its files are on disk. So a start after any interruption draws what
is missing, and gives the bytes of an uninterrupted run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from voxtune.data.contract import DataContract
from voxtune.data.derivative import describe_dataset
from voxtune.data.labels import MaskReader
from voxtune.errors import InputError
from voxtune.files import AppendLog, counted, is_locked, locked_file, write_file
from voxtune.plan.plan import Plan
from voxtune.reading import file_sha256
from voxtune.runtime.masks import mask_contract
from voxtune.runtime.model import Model
from voxtune.runtime.storage import included, weights_sha256
from voxtune.scale.driver import (
    ShardDriver,
    Stopping,
    Tally,
    WrittenVolumes,
    check_sources,
    shard_counts,
    tasks,
    written_volumes,
)
from voxtune.scale.engine import Engine
from voxtune.scale.ledger import FOLDER, DatasetLedger
from voxtune.scale.manifest import ManifestRow
from voxtune.scale.worker import WorkerSettings

MAX_SHARDS = 100_000
# Settings that need not be given again to continue: None or "auto" accepts the recorded value.
OPEN = (None, "auto")
LABEL_TABLE, IGNORED = "dseg.tsv", ".bidsignore"

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One start of a shard. `identity` is what the ledger compares with the first start (`identity_of`)."""

    settings: WorkerSettings
    rows: Sequence[ManifestRow]
    contract: DataContract
    identity: Mapping[str, Any]
    shard: tuple[int, int] = (1, 1)
    price: float | None = None
    reread: bool = False  # compare the content of all volumes before drawing
    say: Say = field(default=lambda _line: None)


def parse_shard(text: str) -> tuple[int, int]:
    """(number, of how many) from text such as 3/16; numbers start with 1."""
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text)
    shard, shards = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 1 <= shard <= shards <= MAX_SHARDS:
        raise InputError(f"--shard {text[:40]}: expected NUMBER/COUNT, such as 1/16 to 16/16")
    return shard, shards


def identity_of(model: Model, settings: WorkerSettings) -> dict[str, Any]:
    """What decides the bytes of the volumes, as far as the command states it."""
    MaskReader(contract=mask_contract(model), labels=settings.labels).check_names()
    config = model.config.to_json()
    # Stored settings take part as those of this data set.
    config["sampling"] = {**config.get("sampling", {}), "auto": None}
    file = None if settings.plan in ("auto", "baseline") else Path(settings.plan)
    if file is not None:
        Plan.load(file)
    return {
        "model_sha256": weights_sha256(included(settings.model)),
        "config_sha256": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "sampling": settings.sampling.to_json(),
        "seed": settings.seed,
        "plan": settings.plan if file is None else f"file {file_sha256(file)}",
        "batch": settings.batch,
        "labels": None if settings.labels is None else str(settings.labels),
        "fit": settings.fit,
        "size": None if settings.size is None else list(settings.size),
        "images": list(mask_contract(model).images),
    }


@contextmanager
def continuing(generation: Generation, engine: Engine) -> Iterator[tuple[WorkerSettings, WrittenVolumes, AppendLog]]:
    """Locks a shard, and checks or fixes the settings of its data set; yields them, what is written, and the shard's ledger."""
    root, say = generation.settings.out, generation.say
    ledger = DatasetLedger(root)
    file = ledger.shard_file(*generation.shard)
    if not ledger.exists():
        _check_new(root)
    with locked_file(file):
        _check_other_drivers(ledger, generation)
        waited: list[bool] = []

        def waiting() -> None:
            if not waited:
                say("waiting for another process to choose plan and batch")
            waited.append(True)

        with locked_file(ledger.settings_file, waiting=waiting):
            fixed = _fixed_settings(ledger, generation, engine)
            _update_masks(ledger, generation)
            _describe(root, generation.contract)
        written = written_volumes(ledger, generation.rows, generation.contract.images, read=generation.reread)
        check_sources(generation.rows, written)
        log = AppendLog(file)
        try:
            yield replace(generation.settings, fixed=fixed, batch=int(fixed["batch"])), written, log
        finally:
            log.close()


def generate(
    generation: Generation,
    engine: Engine,
    *,
    stopping: Stopping | None = None,
    started: Callable[[Tally], None] = lambda _tally: None,
    report: Callable[[Tally], None] = lambda _tally: None,
) -> Tally:
    """Draws what is missing in a shard. `started` and `report` receive the state, at the beginning and whenever it changed."""
    with continuing(generation, engine) as (settings, written, log):
        assert settings.batch is not None
        volumes, before = shard_counts(generation.rows, settings.batch, written, generation.shard)
        tally = Tally(volumes=volumes, before=before, workers=engine.workers, price=generation.price)
        started(tally)
        missing = tasks(generation.rows, settings.batch, written, generation.shard)
        ShardDriver(engine, log, tally, report=report, stopping=stopping).run(settings, missing)
        tally.end()
        return tally


def _check_new(root: Path) -> None:
    """A new data set needs a folder of its own: what else is in it could not be told from volumes of the data set."""
    if root.exists() and not root.is_dir():
        raise InputError(f"{root}: is not a folder; choose another output path")
    others = [path.name for path in root.iterdir() if path.name != FOLDER] if root.is_dir() else []
    # Another shard may have begun the data set meanwhile.
    if others and not DatasetLedger(root).exists():
        raise InputError(
            f"{root}: contains {sorted(others)[0]} and no data set of voxtune generate; choose a new folder"
        )


def _check_other_drivers(ledger: DatasetLedger, generation: Generation) -> None:
    """Raises while drivers run that divide the data set in another way."""
    shard, shards = generation.shard
    changed = ledger.masks_file.exists() and ledger.masks() != _counts(generation.rows)
    for file in ledger.shard_files():
        same = file.name.endswith(f"-of-{shards}.jsonl")
        if file == ledger.shard_file(shard, shards) or (same and not changed):
            continue
        if is_locked(file):
            reason = "another manifest" if same else f"--shard {shard}/{shards} divides the data set in another way"
            raise InputError(f"{file}: in use by another Voxtune process, and {reason}; wait for it")


def _counts(rows: Sequence[ManifestRow]) -> dict[str, int]:
    return {row.subject: row.replicates for row in rows}


def _fixed_settings(ledger: DatasetLedger, generation: Generation, engine: Engine) -> dict[str, Any]:
    given = generation.identity
    if ledger.exists():
        recorded = ledger.settings()
        differences = [
            f"{name} is {_shown(recorded.get(name))} there, {_shown(value)} now"
            for name, value in given.items()
            if recorded.get(name) != value and not (name == "batch" and value in OPEN)
        ]
        if differences:
            raise InputError(
                f"{ledger.root}: the data set was started with other settings: {'; '.join(differences)}; start with the same "
                "settings, or choose another folder"
            )
        return dict(recorded["fixed"])
    generation.say("first start: choosing plan and batch")
    fixed = engine.prepare(generation.settings)
    ledger.write_settings({**given, "batch": fixed["batch"], "fixed": fixed})
    return fixed


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}..."


def _update_masks(ledger: DatasetLedger, generation: Generation) -> None:
    """Writes the list of masks. It may grow; volumes that are no longer listed would be foreign to the data set."""
    counts = _counts(generation.rows)
    before = ledger.masks() if ledger.masks_file.exists() else {}
    if before == counts:
        return
    lost = [subject for subject, number in before.items() if counts.get(subject, 0) < number]
    if lost:
        raise InputError(
            f"{ledger.root}: the manifest lacks {counted(len(lost), 'mask')} of the data set, or volumes of them, such as "
            f"{lost[0]}; list them again, or choose another folder"
        )
    ledger.write_masks(generation.rows)


def _describe(root: Path, contract: DataContract) -> None:
    describe_dataset(root)
    rows = ["index\tname", "0\tbackground", *(f"{value}\t{name}" for value, name in contract.value_names().items())]
    for name, text in ((LABEL_TABLE, "\n".join(rows)), (IGNORED, f"{FOLDER}/")):
        if not (root / name).exists():
            write_file(root / name, f"{text}\n")
