"""The log of a run: metrics.jsonl, TensorBoard curves, pictures of samples."""

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
from voxtune.errors import install_command
from voxtune.files import writing
from voxtune.reading import read_file

METRICS, TENSORBOARD, SAMPLES = "metrics.jsonl", "tensorboard", "samples"
CELL_PIXELS = 128
# Background, then labels in channel order; further labels repeat the colours of the labels.
PALETTE = ((0, 0, 0), (105, 130, 170), (230, 90, 70), (240, 190, 70), (110, 180, 110), (170, 110, 190))


class TrainLog:
    """The log of one run. Opening it at `step` deletes the rows that an interrupted run logged after that step."""

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

    def accepts_pictures(self) -> bool:
        """Whether a picture would be written anywhere; warns once if Pillow is missing."""
        if self._pictures and importlib.util.find_spec("PIL") is None:
            self.warn("Pillow is not installed (pip install pillow): sample pictures are not written")
            self._pictures = False
        return self._pictures or self._writer is not None

    def picture(self, step: int, pixels_HW3: np.ndarray) -> None:
        if self._writer is not None:
            self._writer.add_image("sample", pixels_HW3, step, dataformats="HWC")
        if not self._pictures:
            return
        from PIL import Image

        (self.folder / SAMPLES).mkdir(exist_ok=True)
        with writing(self.folder / SAMPLES / f"step-{step:08d}.png", state=True) as part:
            Image.fromarray(pixels_HW3).save(part, format="PNG")

    def sync(self) -> None:
        """Flushes to disk. Called before a checkpoint is written, so that the log is never behind the checkpoint."""
        self._rows.flush()
        os.fsync(self._rows.fileno())
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        # On a full disk this fails like the write before it, which has been reported.
        with contextlib.suppress(OSError):
            self._rows.close()
        with contextlib.suppress(OSError):
            if self._writer is not None:
                self._writer.close()


def _summary_writer(folder: Path, step: int, warn: Callable[[str], None]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        warn(
            f"TensorBoard is not installed ({install_command('tensorboard')}): no curves are written; "
            "the values are in metrics.jsonl"
        )
        return None
    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's log, up to the first line that is not valid (cut off by a kill)."""
    rows = []
    data = read_file(path) if path.exists() else b""
    for line in data.decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows


def truncate_metrics(path: Path, step: int) -> None:
    """Deletes the rows after `step`."""
    if not path.exists():
        return
    rows = [row for row in read_metrics(path) if row["step"] <= step]
    with writing(path, state=True) as part:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))


def image_picture(samples_NCHW: np.ndarray) -> np.ndarray:
    """All samples on one sheet."""
    return sheet(np.stack([to_pixels(image_CHW) for image_CHW in samples_NCHW]))


def sample_picture(
    cond: np.ndarray | None, sample: np.ndarray, image: np.ndarray, contract: DataContract | None = None
) -> np.ndarray:
    """Middle slices of (channel, *size) volumes: mask, sample and training image side by side, one row per plane.

    Without `contract`, volumes are in RAS with isotropic voxels.
    """
    columns = [_grey(sample[0]), _grey(image[0])]
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
    """[-1, 1] to grey levels, RGB in the last axis."""
    pixels = np.clip((np.nan_to_num(image) + 1) * 127.5, 0, 255).astype(np.uint8)
    return np.repeat(pixels[..., None], 3, axis=-1)


def _coloured(cond: np.ndarray) -> np.ndarray:
    pixels = np.zeros((*cond.shape[1:], 3), dtype=np.uint8)
    for channel, present in enumerate(cond > 0):
        pixels[present] = PALETTE[1 + channel % (len(PALETTE) - 1)]
    return pixels


def _slice(volume: np.ndarray, axis: int, spacing: tuple[float, float, float]) -> np.ndarray:
    """The middle slice with superior or anterior at the top, resampled to square pixels."""
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
