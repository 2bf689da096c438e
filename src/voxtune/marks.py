"""Whether Voxtune wrote a file, by a mark in the file or a file beside it; `--overwrite` replaces no other files.

| file | mark | without a mark, as version 0.1 wrote it |
|---|---|---|
| .nii, .nii.gz | description in the header | its sidecar, or its cohort |
| .json | "format", "voxtune" or "GeneratedBy" | keys of a sidecar |
| .html | meta name="generator" | the same |
| .svg, .png | a comment | the fonts of a figure; the volume or the sidecar beside it |
| .safetensors, .npz | metadata; names of the arrays | the config.json beside it |
| .md, .tsv, .parquet, README | | the JSON file that they belong to |
"""

from __future__ import annotations

import gzip
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from voxtune.errors import InputError
from voxtune.reading import opening, opening_zip, parse_json, read_head, read_json

MARK = "voxtune"
# In the field `descrip` of a NIfTI header, at this offset in NIfTI-1 and NIfTI-2.
NIFTI_DESCRIPTION, DESCRIPTION_PLACES = b"voxtune", (148, 240)
SVG_COMMENT = b"<!-- voxtune -->"
# The beginning of every figure of version 0.1.
OLD_SVG = b"font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif\""
PNG_COMMENT = ("Software", "voxtune")
# Keys of a sidecar that Voxtune 0.1 wrote from Python, without its name.
OLD_SIDECAR = {"seed", "index", "sampler", "placement"}
MAX_JSON_BYTES = 64 * 2**20
COHORT_FILE = re.compile(r"sub-\d{4,}_(T1w|dseg)\.(nii\.gz|json)")


def written_by_voxtune(path: Path) -> bool:
    """Whether the regular file at `path` carries a mark of Voxtune, or belongs to a file that does."""
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
    return MARK in names or data.keys() >= OLD_SIDECAR


def _json(path: Path) -> bool:
    return is_marked(read_json(path, limit=MAX_JSON_BYTES)) or _beside(path, "config.json", "session.json")


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
    return _beside(path, f"{stem}.json") or _in_cohort(path)


def _in_cohort(path: Path) -> bool:
    """Whether the file has the name and the place of a subject in a cohort of version 0.1."""
    roots = list(path.absolute().parents)[2:3]
    return COHORT_FILE.fullmatch(path.name) is not None and any(
        _marked_file(root / "dataset_description.json") for root in roots
    )


def _html(path: Path) -> bool:
    return re.search(rb'<meta name="generator" content="voxtune ', read_head(path, 2**14)) is not None


def _svg(path: Path) -> bool:
    head = read_head(path, 4096)
    return SVG_COMMENT in head or (head.startswith(b"<svg ") and OLD_SVG in head)


def _png(path: Path) -> bool:
    head = read_head(path, 4096)
    if head.startswith(b"\x89PNG") and b"tEXt" + "\0".join(PNG_COMMENT).encode() in head:
        return True
    stem = path.name[: -len(".png")]
    volumes = [volume for volume in path.parent.glob("*.nii.gz") if volume.name.startswith(stem)]
    return _beside(path, f"{stem}.json", "image-000000.json") or any(_nifti(volume) for volume in volumes[:1])


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
    return _beside(path, f"{path.stem}.json") or (path.name == "README.md" and _beside(path, "config.json"))


def _dataset_file(path: Path) -> bool:
    return _beside(path, "dataset_description.json")


def _session_file(path: Path) -> bool:
    return _beside(path, "session.json")


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
    ".parquet": _session_file,
}
