"""The log of a run: metrics.jsonl, TensorBoard curves, pictures of samples."""

from __future__ import annotations

import importlib.util
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from voxtune.data.contract import DataContract
from voxtune.data.orientation import flipped, reorder
from voxtune.data.pixels import png, sheet, to_pixels
from voxtune.errors import InputError, install_command
from voxtune.files import AppendLog, write_file
from voxtune.reading import parse_json, read_file

METRICS, TENSORBOARD, SAMPLES = "metrics.jsonl", "tensorboard", "samples"
EVENTS = re.compile(r"events\.out\.tfevents\.(\d+)\.")
CELL_PIXELS = 128
# Background, then labels in channel order; further labels repeat the colours of the labels.
PALETTE = ((0, 0, 0), (105, 130, 170), (230, 90, 70), (240, 190, 70), (110, 180, 110), (170, 110, 190))


class TrainLog:
    """The log of one run. Opening it at `step` deletes the rows that an interrupted run logged after that step."""

    def __init__(self, folder: Path, *, step: int, tensorboard: bool, warn: Callable[[str], None]):
        self.folder, self.warn = folder, warn
        truncate_metrics(folder / METRICS, step)
        self._rows = AppendLog(folder / METRICS)
        self._events = _event_log(folder / TENSORBOARD, step, warn) if tensorboard else None
        self._pictures = True

    def row(self, values: dict[str, float]) -> None:
        self._rows.write(json.dumps(values))
        if self._events is not None:
            self._events.scalars(values)

    def accepts_pictures(self) -> bool:
        """Whether a picture would be written anywhere; warns once if Pillow is missing."""
        if self._pictures and importlib.util.find_spec("PIL") is None:
            self.warn("Pillow is not installed (pip install pillow): sample pictures are not written")
            self._pictures = False
        return self._pictures or self._events is not None

    def picture(self, step: int, pixels_HW3: np.ndarray) -> None:
        if self._events is not None:
            self._events.image(step, pixels_HW3)
        if self._pictures:
            write_file(self.folder / SAMPLES / f"step-{step:08d}.png", png(pixels_HW3), state=True)

    def sync(self) -> None:
        """Flushes to disk. Called before a checkpoint is written, so that the log is never behind the checkpoint."""
        self._rows.sync()
        if self._events is not None:
            self._events.log.sync()

    def close(self) -> None:
        self._rows.close()
        if self._events is not None:
            self._events.log.close()


class EventLog:
    """Curves and pictures for TensorBoard, in a new file for each start of a run.

    torch's SummaryWriter is not used, because it puts the host name into the name of its file and writes in another thread.
    A record that a kill cut off ends the file: TensorBoard reads up to it, then the file of the resumed run.
    """

    def __init__(self, folder: Path, step: int):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        # TensorBoard reads the files in the order of their names.
        starts = [int(match[1]) for path in folder.glob("events.out.tfevents.*") if (match := EVENTS.match(path.name))]
        start = max([int(time.time()), *(n + 1 for n in starts)])
        self.log = AppendLog(folder / f"events.out.tfevents.{start:010d}.voxtune", new=True)
        self._event, self._records = Event, RecordWriter(SimpleNamespace(write=self.log.append))
        self._write(step + 1, file_version="brain.Event:2")
        if step:  # what an interrupted run logged after this step is not valid
            self._write(step + 1, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, values: dict[str, float]) -> None:
        from torch.utils.tensorboard.summary import scalar

        step = int(values["step"])
        for name, value in values.items():
            if name not in ("step", "epoch"):
                self._write(step, summary=scalar(f"train/{name}", value))

    def image(self, step: int, pixels_HW3: np.ndarray) -> None:
        from torch.utils.tensorboard.summary import image

        self._write(step, summary=image("sample", pixels_HW3, dataformats="HWC"))

    def _write(self, step: int, **content: Any) -> None:
        event = self._event(wall_time=time.time(), step=step, **content)
        self._records.write(event.SerializeToString())


def _event_log(folder: Path, step: int, warn: Callable[[str], None]) -> EventLog | None:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        warn(
            f"TensorBoard is not installed ({install_command('tensorboard')}): no curves are written; "
            "the values are in metrics.jsonl"
        )
        return None
    return EventLog(folder, step)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a run's log, up to the first line that is not valid (cut off by a kill)."""
    rows = []
    for line in read_file(path).decode(errors="replace").splitlines() if path.exists() else ():
        try:
            row = parse_json(line, path)
        except InputError:
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
    write_file(path, "".join(json.dumps(row) + "\n" for row in rows), state=True)


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
