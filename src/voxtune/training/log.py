"""What a run leaves to look at: rows of numbers, TensorBoard curves, pictures of samples."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.data.contract import DataContract
from voxtune.data.orientation import flipped, reorder
from voxtune.data.pixels import sheet, to_pixels
from voxtune.files import replacing

METRICS, TENSORBOARD, SAMPLES = "metrics.jsonl", "tensorboard", "samples"
CELL_PIXELS = 128
# Background, then labels in channel order; further labels start again after the background.
PALETTE = ((0, 0, 0), (105, 130, 170), (230, 90, 70), (240, 190, 70), (110, 180, 110), (170, 110, 190))


class TrainLog:
    """Rows, curves and pictures of one run. Opened at `step`, it forgets what a stopped run had logged after it."""

    def __init__(self, folder: Path, *, step: int, tensorboard: bool, warn: Callable[[str], None]):
        self.folder, self.warn = folder, warn
        truncate_metrics(folder / METRICS, step)
        self._rows = (folder / METRICS).open("a")
        self._writer = _summary_writer(folder / TENSORBOARD, step, warn) if tensorboard else None
        self._pictures = True

    def row(self, values: dict[str, float]) -> None:
        self._rows.write(json.dumps(values) + "\n")
        self._rows.flush()
        if self._writer is not None:
            step = int(values["step"])
            for name, value in values.items():
                if name not in ("step", "epoch"):
                    self._writer.add_scalar(f"train/{name}", value, step)

    def takes_pictures(self) -> bool:
        """Whether a picture would be kept anywhere; says once why none are written."""
        if self._pictures and importlib.util.find_spec("PIL") is None:
            self.warn("Pillow is not installed: sample pictures are not written")
            self._pictures = False
        return self._pictures or self._writer is not None

    def picture(self, step: int, pixels_HW3: np.ndarray) -> None:
        if self._writer is not None:
            self._writer.add_image("sample", pixels_HW3, step, dataformats="HWC")
        if not self._pictures:
            return
        from PIL import Image

        (self.folder / SAMPLES).mkdir(exist_ok=True)
        with replacing(self.folder / SAMPLES / f"step-{step:08d}.png") as part:
            Image.fromarray(pixels_HW3).save(part, format="PNG")

    def sync(self) -> None:
        """On disk before the checkpoint is: a resumed run never finds its log shorter than its state."""
        self._rows.flush()
        os.fsync(self._rows.fileno())
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        # On a full disk the last flush fails as the write before it did, and that one has been reported.
        with contextlib.suppress(OSError):
            self._rows.close()
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()


def _summary_writer(folder: Path, step: int, warn: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn("TensorBoard is not installed (pip install tensorboard): no curves; metrics.jsonl has the numbers")
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's log; a line that a kill cut short, and what follows it, is left out."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def truncate_metrics(path: Path, step: int) -> None:
    """Leaves the rows up to `step`."""
    if not path.exists():
        return
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    with replacing(path) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in kept))


def image_picture(samples_NCHW: np.ndarray) -> np.ndarray:
    """All samples on one page."""
    return sheet(np.stack([to_pixels(image_CHW) for image_CHW in samples_NCHW]))


def sample_picture(
    cond: np.ndarray | None, sample: np.ndarray, real: np.ndarray, contract: DataContract | None = None
) -> np.ndarray:
    """Middle slices of (channel, *size) volumes: mask, sample and real side by side, one row a plane.

    `contract` tells their orientation and spacing; without it they are in RAS, with voxels as wide as high.
    """
    columns = [_grey(sample[0]), _grey(real[0])]
    if cond is not None:
        columns.insert(0, _coloured(cond))
    spacing = (1.0, 1.0, 1.0)
    if contract is not None:
        # The axes of a tensor are those of the file in reverse order.
        axes, flips = reorder(contract.orientation[::-1], "SAR")
        columns = [flipped(c.transpose(*axes, 3), flips) for c in columns]
        spacing = (contract.spacing[axes[0]], contract.spacing[axes[1]], contract.spacing[axes[2]])
    planes = [[_slice(c, axis, spacing) for c in columns] for axis in range(3)]
    side = max(max(cell.shape[:2]) for row in planes for cell in row)
    zoom = max(1, -(-CELL_PIXELS // side))
    rows = [np.concatenate([_cell(cell, side, zoom) for cell in row], axis=1) for row in planes]
    return np.ascontiguousarray(np.concatenate(rows, axis=0))


def _grey(image: np.ndarray) -> np.ndarray:
    """[-1, 1] to grey levels, with a last axis of colours."""
    pixels = np.clip((np.nan_to_num(image) + 1) * 127.5, 0, 255).astype(np.uint8)
    return np.repeat(pixels[..., None], 3, axis=-1)


def _coloured(cond: np.ndarray) -> np.ndarray:
    pixels = np.zeros((*cond.shape[1:], 3), dtype=np.uint8)
    for channel, present in enumerate(cond > 0):
        pixels[present] = PALETTE[1 + channel % (len(PALETTE) - 1)]
    return pixels


def _slice(volume: np.ndarray, axis: int, spacing: tuple[float, float, float]) -> np.ndarray:
    """Tensor axes of a volume in RAS count from inferior and posterior; pictures count from the top, in equal steps."""
    plane = np.take(volume, volume.shape[axis] // 2, axis=axis)[::-1]
    for side, mm in enumerate(s for i, s in enumerate(spacing) if i != axis):
        n, step = plane.shape[side], min(spacing) / mm
        plane = plane.take(np.minimum((np.arange(round(n / step)) + 0.5) * step, n - 1).astype(int), axis=side)
    return plane


def _cell(plane: np.ndarray, side: int, zoom: int) -> np.ndarray:
    cell = np.zeros((side, side, 3), dtype=np.uint8)
    top, left = (side - plane.shape[0]) // 2, (side - plane.shape[1]) // 2
    cell[top : top + plane.shape[0], left : left + plane.shape[1]] = plane
    return cell.repeat(zoom, axis=0).repeat(zoom, axis=1)
