"""From nothing to image files: what a model without masks draws, as PNG."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.pixels import check_png, png, to_pixels
from voxtune.diffusion.schedule import Spacing
from voxtune.errors import InputError
from voxtune.files import write_whole
from voxtune.runtime.generate import check_finite, overall
from voxtune.runtime.model import Model, check_size
from voxtune.runtime.sampling import Cache, Steps


@dataclass(frozen=True, kw_only=True)
class DrawnImage:
    """One synthetic image: its pixels and its file."""

    index: int
    pixels_HWC: np.ndarray
    file: Path


def check_image_request(model: Model, out: Path, count: int, size: tuple[int, ...] | None, *, overwrite: bool) -> None:
    """Raises for what cannot be drawn or written, before any work."""
    network = model.config.network
    if network.mask_channels or network.dimensions != 2:
        raise InputError(f"a {model.config.family} model draws volumes from masks, not images")
    check_png(network.out_channels)
    check_size(network, size or model.config.size)
    taken = [] if overwrite else [path for i in range(count) if (path := image_path(out, i)).exists()]
    if taken:
        raise InputError(f"{taken[0]}: exists already; choose another folder or pass --overwrite")


def image_path(out: Path, index: int) -> Path:
    return out / f"image-{index:06d}.png"


def generate_images(
    model: Model,
    out: Path,
    *,
    count: int = 1,
    seed: int = 0,
    sampler: str | None = None,
    steps: Steps = None,
    spacing: Spacing | None = None,
    clip: bool | None = None,
    cache: Cache | str | int | None = None,
    batch: int = 1,
    size: tuple[int, ...] | None = None,
    overwrite: bool = False,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[DrawnImage]:
    """Draws images 0 .. count - 1 and writes them into `out`; yields each as soon as it is on disk.

    Image i has the noise of (seed, i), whatever the batch.
    """
    check_image_request(model, out, count, size, overwrite=overwrite)
    drawing = model.check_request(sampler=sampler, steps=steps, seed=seed, spacing=spacing, clip=clip, cache=cache)
    for first in range(0, count, batch):
        indices = range(first, min(first + batch, count))
        x_NCHW = model.sample(
            sampler=drawing.sampler,
            steps=drawing.steps,
            spacing=drawing.spacing,
            clip=drawing.clip,
            cache=drawing.cache,
            seed=seed,
            indices=indices,
            size=size,
            progress=None if progress is None else overall(progress, first, len(indices), count, drawing.steps),
        )
        for i, image_CHW in zip(indices, x_NCHW.float().cpu().numpy(), strict=True):
            check_finite(image_CHW, f"image {i}")
            record = {
                **(provenance or {}),
                "seed": seed,
                "index": i,
                **drawing.record(),
                "passes": list(getattr(model.network, "passes", ())),
            }
            pixels_HWC, file = to_pixels(image_CHW), image_path(out, i)
            write_whole(file, png(pixels_HWC))
            write_whole(file.with_suffix(".json"), (json.dumps(record, indent=2, default=str) + "\n").encode())
            yield DrawnImage(index=i, pixels_HWC=pixels_HWC, file=file)
