"""Whether Voxtune wrote a file, by a mark in the file or a file beside it; `--overwrite` replaces no other files.

| file | mark | without a mark, as version 0.1 wrote it |
|---|---|---|
| .nii, .nii.gz | description in the header | its sidecar, or its cohort |
| .json | "format", "voxtune" or "GeneratedBy" | keys of a sidecar |
| .html | meta name="generator" | the same |
| .svg, .png | a comment | the fonts of a figure; the background of a sheet; the volume or the sidecar beside it |
| .safetensors, .npz | metadata; names of the arrays | the config.json beside it |
| files of a training run, by name | | the train.json of the run |
| .md | a comment at the end; the front matter of a model card | words of the table, beside its JSON file |
| .parquet, .gz | metadata; the name in the header | the session.json that they belong to |
| participants.tsv, dseg.tsv, README | | the dataset_description.json beside it |
"""

from __future__ import annotations

import gzip
import io
import os
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.reading import opening, opening_zip, parse_json, read_file, read_head, read_json

MARK = "voxtune"
# In the field `descrip` of a NIfTI header, at this offset in NIfTI-1 and NIfTI-2.
NIFTI_DESCRIPTION, DESCRIPTION_PLACES = b"voxtune", (148, 240)
# In SVG and Markdown.
COMMENT = "<!-- voxtune -->"
# The beginning of every figure of version 0.1.
OLD_SVG = b"font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif\""
PNG_COMMENT = ("Software", "voxtune")
# RGB with 8 bits, and the first pixel of every contact sheet and picture of version 0.1.
OLD_PNG_FORMAT, OLD_PNG_PIXEL = b"\x08\x02", bytes((10, 11, 14))
OLD_MARKDOWN = re.compile(rb"percentile bootstrap|resamples, seed \d")
CARD_MARK = b"\nlibrary_name: voxtune\n"
MAX_MARKDOWN_BYTES = 16 * 2**20
# In the metadata of a Parquet file, at its end.
PARQUET_MARK = b"voxtune-session"
# The name in the header of a gzip file.
GZIP_NAME = "voxtune"
RAW_FOLDER = "raw"
DATASET_FILES = {"participants.tsv", "dseg.tsv", "README"}
# Keys of a sidecar that Voxtune 0.1 wrote from Python, without its name.
OLD_SIDECAR = {"seed", "index", "sampler", "placement"}
# Settings in every train.json that Voxtune 0.1 wrote.
OLD_RUN = {"data", "model", "accumulation", "ema_every", "ema_start", "checkpoint_every", "sample_every", "tensorboard"}
# Files of a training run without a mark of their own, relative to its folder.
RUN_FILE = re.compile(
    r"commands\.json|metrics\.jsonl|samples/step-\d+\.png|tensorboard/events\.out\.tfevents\.[^/]+"
    r"|checkpoints/step-\d+\.safetensors\.damaged"
)
# Keys of a ladder.json of version 0.1.
OLD_LADDER = {"width", "multipliers", "first_step", "failed", "rows"}
MAX_JSON_BYTES = 64 * 2**20
COHORT_FILE = re.compile(r"sub-\d{4,}_(T1w|dseg)\.(nii\.gz|json)")


def marked_markdown(text: str) -> bytes:
    """Markdown with the mark at its end, which is not shown."""
    return f"{text.rstrip()}\n\n{COMMENT}\n".encode()


def marked_gzip(data: bytes) -> bytes:
    """Compressed data with the mark in the header."""
    buffer = io.BytesIO()
    with gzip.GzipFile(GZIP_NAME, "wb", 6, buffer, mtime=0) as file:
        file.write(data)
    return buffer.getvalue()


def written_by_voxtune(path: Path) -> bool:
    """Whether the regular file at `path` carries a mark of Voxtune, or belongs to a file that does."""
    if _in_run(path):
        return True
    name = path.name.lower()
    for ending, check in _CHECKS.items():
        if name.endswith(ending):
            try:
                return check(path)
            except InputError:
                return False
    return False


def is_marked(data: Any) -> bool:
    """Whether a JSON document says that Voxtune wrote it."""
    if not isinstance(data, dict):
        return False
    if str(data.get("format", "")).startswith(MARK) or isinstance(data.get(MARK), str) or data == {"Simulated": True}:
        return True
    makers = data.get("GeneratedBy")
    names = [maker.get("Name") for maker in makers if isinstance(maker, dict)] if isinstance(makers, list) else []
    return MARK in names or any(data.keys() >= old for old in (OLD_SIDECAR, OLD_RUN, OLD_LADDER))


def _in_run(path: Path) -> bool:
    """Whether the file has the name and the place of a file of a training run."""
    roots = list(path.absolute().parents)[:2]
    return any(
        RUN_FILE.fullmatch(path.absolute().relative_to(root).as_posix()) and _marked_file(root / "train.json")
        for root in roots
    )


def _json(path: Path) -> bool:
    return is_marked(read_json(path, limit=MAX_JSON_BYTES)) or _in_raw_recording(path)


def _beside(path: Path, *names: str) -> bool:
    """Whether one of the JSON files of these names in the folder of `path` is marked."""
    return any(_marked_file(path.with_name(name)) for name in names)


def _marked_file(path: Path) -> bool:
    try:
        return path.is_file() and not path.is_symlink() and is_marked(read_json(path, limit=MAX_JSON_BYTES))
    except InputError:
        return False


def _nifti(path: Path) -> bool:
    head = read_head(path, 4096)
    if head[:2] == b"\x1f\x8b":
        with opening(path, "NIfTI file") as file, gzip.GzipFile(fileobj=file) as stream:
            head = stream.read(540)
    if any(head[place : place + len(NIFTI_DESCRIPTION)] == NIFTI_DESCRIPTION for place in DESCRIPTION_PLACES):
        return True
    stem = re.sub(r"\.nii(\.gz)?$", "", path.name, flags=re.IGNORECASE)
    return _beside(path, f"{stem}.json") or _in_cohort(path) or _of_demo(path)


def _in_cohort(path: Path) -> bool:
    """Whether the file has the name and the place of a subject in a cohort of version 0.1."""
    roots = list(path.absolute().parents)[2:3]
    return COHORT_FILE.fullmatch(path.name) is not None and any(
        _marked_file(root / "dataset_description.json") for root in roots
    )


def _of_demo(path: Path) -> bool:
    """Whether the file is the mask of `voxtune demo`, beside the simulated subject."""
    return COHORT_FILE.fullmatch(path.name) is not None and _beside(path, f"{path.name.partition('_')[0]}_T1w.json")


def _html(path: Path) -> bool:
    return re.search(rb'<meta name="generator" content="voxtune ', read_head(path, 2**14)) is not None


def _svg(path: Path) -> bool:
    head = read_head(path, 4096)
    return COMMENT.encode() in head or (head.startswith(b"<svg ") and OLD_SVG in head)


def _png(path: Path) -> bool:
    head = read_head(path, 4096)
    if not head.startswith(b"\x89PNG"):
        return False
    if b"tEXt" + "\0".join(PNG_COMMENT).encode() in head or _old_sheet(head):
        return True
    stem = path.name[: -len(".png")]
    volumes = [file for file in path.parent.glob("*.nii.gz") if file.name.startswith((f"{stem}.", f"{stem}_"))]
    return _beside(path, f"{stem}.json", "image-000000.json") or any(_nifti(volume) for volume in volumes[:1])


def _old_sheet(head: bytes) -> bool:
    """Whether a PNG begins with the background of the sheets of version 0.1, which no filter changes in the first pixel."""
    data = head.partition(b"IDAT")[2]
    try:
        start = zlib.decompressobj().decompress(data, 4)
    except zlib.error:
        return False
    return head[24:26] == OLD_PNG_FORMAT and start[1:] == OLD_PNG_PIXEL


def _safetensors(path: Path) -> bool:
    head = read_head(path, 2**24)
    if len(head) < 8:
        return False
    size = struct.unpack("<Q", head[:8])[0]
    header = parse_json(head[8 : 8 + size], path) if size <= len(head) - 8 else {}
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    marked = isinstance(metadata, dict) and str(metadata.get("format", "")).startswith(MARK)
    return marked or _beside(path, "config.json")


def _npz(path: Path) -> bool:
    with opening_zip(path, "file of packed subjects") as archive:
        return {"images.npy", "labels.npy", "header.npy"} == set(archive.namelist())


def _markdown(path: Path) -> bool:
    text = read_file(path, limit=MAX_MARKDOWN_BYTES)
    if text.rstrip().endswith(COMMENT.encode()):
        return True
    if path.name == "README.md":
        return CARD_MARK in text[:4096] and _beside(path, "config.json")
    return OLD_MARKDOWN.search(text) is not None and _beside(path, f"{path.stem}.json")


def _dataset_file(path: Path) -> bool:
    return path.name in DATASET_FILES and _beside(path, "dataset_description.json")


def _parquet(path: Path) -> bool:
    with opening(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, size - 8 - min(length, MAX_JSON_BYTES)))
        footer = file.read(MAX_JSON_BYTES)
    return footer.endswith(b"PAR1") and (PARQUET_MARK in footer or _beside(path, "session.json"))


def _gzip(path: Path) -> bool:
    head = read_head(path, 64)
    named = head[:2] == b"\x1f\x8b" and head[3:4] == b"\x08"
    return (named and head[10:].startswith(f"{GZIP_NAME}\0".encode())) or _in_raw_recording(path)


def _in_raw_recording(path: Path) -> bool:
    """Whether the file belongs to the raw recording of a session."""
    folder = path.absolute().parent
    return folder.name == RAW_FOLDER and _marked_file(folder.with_name("session.json"))


# By the end of the name, the first that fits.
_CHECKS: dict[str, Callable[[Path], bool]] = {
    ".nii": _nifti,
    ".nii.gz": _nifti,
    ".json": _json,
    ".html": _html,
    ".svg": _svg,
    ".png": _png,
    ".safetensors": _safetensors,
    ".npz": _npz,
    ".md": _markdown,
    ".tsv": _dataset_file,
    "readme": _dataset_file,
    ".parquet": _parquet,
    ".gz": _gzip,
}
