"""Images of a model that takes no mask: PNG files with a sidecar each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.pixels import check_png, png, to_pixels
from voxtune.errors import InputError
from voxtune.files import write_file, write_json
from voxtune.runtime.batching import BatchChoice, choose_batch
from voxtune.runtime.job import Job, OnError, Progress
from voxtune.runtime.model import Model, check_size
from voxtune.runtime.sampling import SamplerSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedImage:
    """Image number `index` of a job, which is also the index of its noise."""

    index: int

    @property
    def names(self) -> tuple[str, ...]:
        return (f"image-{self.index:06d}.png",)

    @property
    def sidecars(self) -> tuple[str, ...]:
        return (f"image-{self.index:06d}.json",)

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*self.names, *self.sidecars)


@dataclass(frozen=True, kw_only=True)
class GeneratedImage:
    """One generated image: its pixels and its file."""

    index: int
    pixels_HWC: np.ndarray
    file: Path


class ImageJob(Job[PlannedImage, GeneratedImage]):
    """Images 0 .. count - 1. Image i has the noise of (seed, i), whatever the batch size."""

    def __init__(
        self,
        model: Model,
        out: Path,
        *,
        settings: SamplerSettings | None = None,
        count: int = 1,
        seed: int = 0,
        size: tuple[int, ...] | None = None,
        overwrite: bool = False,
        resume: bool = False,
        on_error: OnError = "stop",
        provenance: Mapping[str, Any] | None = None,
    ):
        network = model.config.network
        if network.mask_channels or network.dimensions != 2:
            raise InputError(f"a {model.config.family} model generates volumes from masks, not images")
        check_png(network.out_channels)
        self.size = size or model.config.size
        check_size(network, self.size)
        super().__init__(
            model,
            out,
            [PlannedImage(index=index) for index in range(count)],
            settings=settings,
            seed=seed,
            overwrite=overwrite,
            resume=resume,
            on_error=on_error,
            provenance=provenance,
        )

    def record(self, item: PlannedImage) -> dict[str, Any]:
        return {**self.provenance, "seed": self.seed, "index": item.index, **self.settings.record()}

    def name(self, item: PlannedImage) -> str:
        return f"image {item.index}"

    def source(self, item: PlannedImage) -> Path:
        return self.out / item.names[0]

    def read(self, item: PlannedImage) -> None:
        return None

    def draw(self, inputs: Sequence[None], indices: Sequence[int], progress: Progress | None) -> np.ndarray:
        drawn = self.model.sample(
            settings=self.settings, seed=self.seed, indices=indices, size=self.size, progress=progress
        )
        return drawn.float().cpu().numpy()

    def write(self, item: PlannedImage, given: None, sample: np.ndarray, made_by: dict[str, Any]) -> GeneratedImage:
        pixels_HWC, file = to_pixels(sample), self.out / item.names[0]
        write_file(file, png(pixels_HWC), overwrite=self.replaces)
        write_json(self.out / item.sidecars[0], {**self.record(item), **made_by}, overwrite=self.replaces)
        return GeneratedImage(index=item.index, pixels_HWC=pixels_HWC, file=file)

    def choose_batch(self) -> BatchChoice:
        return choose_batch(
            self.model, lambda _batch: None, self.size, volumes=len(self.items), steps=self.settings.steps
        )
