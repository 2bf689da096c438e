"""Data sets of tiny volumes, generated in this process, and what is compared between two of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.factories.nifti import write_mask
from voxtune.data.cohort import cohort_contract
from voxtune.runtime.model import Model, ModelConfig, SamplingConfig
from voxtune.runtime.storage import load, save
from voxtune.scale.dataset import Generation, generate, identity_of
from voxtune.scale.driver import Tally
from voxtune.scale.engine import Engine
from voxtune.scale.manifest import read_manifest
from voxtune.scale.worker import WorkerSettings
from voxtune.workloads import MedDDPMConfig, without_zeros

SHAPE = (8, 8, 8)
AFFINE = np.diag([24.0, 24.0, 24.0, 1.0])


def write_model(folder: Path) -> Path:
    torch.manual_seed(0)
    network = MedDDPMConfig(base=32, multipliers=(1,), attention=())
    sampling = SamplingConfig(sampler="ddpm", steps=2)
    model = Model(ModelConfig(network=network, size=SHAPE, data=cohort_contract(SHAPE), sampling=sampling))
    without_zeros(model.network)
    return save(model, folder, card="")


def write_masks(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        write_mask(folder / f"sub-{number}_dseg.nii.gz", SHAPE, AFFINE)
    return folder


def write_many_masks(folder: Path, count: int) -> Path:
    """Masks of equal content, as links to one file, and a manifest that lists them."""
    folder.mkdir(parents=True)
    first = write_mask(folder / "sub-0_dseg.nii.gz", SHAPE, AFFINE)
    for number in range(1, count):
        os.link(first, folder / f"sub-{number}_dseg.nii.gz") if number % 30000 else shutil.copy(
            first, folder / f"sub-{number}_dseg.nii.gz"
        )
        if number % 30000 == 0:
            first = folder / f"sub-{number}_dseg.nii.gz"
    manifest = folder / "manifest.csv"
    manifest.write_text("mask\n" + "".join(f"sub-{number}_dseg.nii.gz\n" for number in range(count)))
    return manifest


@dataclass(frozen=True, kw_only=True)
class Job:
    """The options of a data set; `run` starts it with an engine."""

    model: Path
    manifest: Path
    out: Path
    per_mask: int = 1
    batch: int | None = 1
    seed: int = 0
    plan: str = "baseline"
    shard: tuple[int, int] = (1, 1)
    reread: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def generation(self) -> Generation:
        loaded = load(self.model)
        rows = read_manifest(self.manifest, per_mask=self.per_mask)
        settings = WorkerSettings(
            model=self.model,
            out=self.out,
            sampling=loaded.resolve(),
            seed=self.seed,
            plan=self.plan,
            batch=self.batch,
            per_mask=max(row.replicates for row in rows),
            volumes=sum(row.replicates for row in rows),
            threads=1,
        )
        settings = replace(settings, **self.settings)
        return Generation(
            settings=settings,
            rows=rows,
            contract=loaded.config.data,
            identity=identity_of(loaded, settings),
            shard=self.shard,
            reread=self.reread,
            say=self.said.append,
        )

    def run(self, engine: Engine, report: Callable[[Tally], None] = lambda _tally: None) -> Tally:
        return generate(self.generation(), engine, report=report)

    def but(self, **changes: Any) -> Job:
        return replace(self, **changes)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a data set, without its ledger."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    named = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path.read_bytes() for name, path in named.items() if not name.startswith("ledger/")}
