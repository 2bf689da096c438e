"""Matches images with masks by file name: plain, BIDS and BraTS names."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from voxtune.data.preflight import Finding, Report, error_finding
from voxtune.errors import InputError

MASK_ENDINGS = frozenset({"dseg", "seg", "mask", "label", "labels", "probseg"})
# Spellings of each modality: BIDS, BraTS up to 2021, BraTS since 2023.
MODALITIES = (
    frozenset({"t1", "t1w", "t1n"}),
    frozenset({"t1ce", "t1c", "t1gd"}),
    frozenset({"t2", "t2w"}),
    frozenset({"flair", "t2f"}),
)
IMAGE_ENDINGS = frozenset({"image", "img"}).union(*MODALITIES)
NIFTI_NAME = re.compile(r"\.nii(\.gz)?$", re.IGNORECASE)
# The mark of a generated volume in a file name.
SYNTHETIC = re.compile(r"_desc-(synth\d+)(?=_|\.)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The files of one subject: the images in the order of the contract, and the mask."""

    id: str
    images: tuple[Path, ...]
    mask: Path


@dataclass(frozen=True, kw_only=True)
class Pairing:
    """All pairs, and a report of the files without a unique partner."""

    pairs: tuple[Pair, ...]
    report: Report


def pair_folders(images_dir: str | Path, masks_dir: str | Path, images: tuple[str, ...] = ("T1w",)) -> Pairing:
    """Matches the NIfTI files below two folders, which may be the same, by name.

    `images` are the image names of the contract. If there are several, each subject requires one file for each, which is
    identified by the ending of its name.
    """
    image_files = [p for p in nifti_files(images_dir) if split_name(p, images)[1] not in MASK_ENDINGS]
    mask_files = nifti_files(masks_dir)
    marked = [p for p in mask_files if split_name(p, images)[1] in MASK_ENDINGS]
    mask_files = marked or [p for p in mask_files if Path(images_dir).resolve() != Path(masks_dir).resolve()]
    if set(image_files) & set(mask_files):
        image_files = [p for p in image_files if p not in set(mask_files)]
    by_image, by_mask = group_by_subject(image_files, images), group_by_subject(mask_files, images)
    pairs, findings = [], []
    for key in sorted(by_image.keys() | by_mask.keys()):
        pair = _pair(key, by_image.get(key, []), by_mask.get(key, []), images)
        if isinstance(pair, Pair):
            pairs.append(pair)
        else:
            findings.append(pair)
    if not pairs and not findings:
        findings.append(
            error_finding("no-files", images_dir, f"{images_dir}: no NIfTI images (.nii, .nii.gz) in this folder")
        )
    return Pairing(pairs=tuple(pairs), report=Report(findings=tuple(findings)))


def _pair(key: str, image_files: list[Path], mask_files: list[Path], images: tuple[str, ...]) -> Pair | Finding:
    if not mask_files:
        return _finding("unmatched", image_files, "no mask with a matching name; add one or remove the image")
    if not image_files:
        return _finding("unmatched", mask_files, "no image with a matching name; add one or remove the mask")
    if len(mask_files) > 1:
        return _finding("ambiguous", mask_files, f"several masks for subject {key}; keep one")
    chosen = []
    for name in images:
        candidates = [p for p in image_files if same_modality(split_name(p, images)[1], name)]
        if not candidates and len(images) == 1:
            candidates = image_files
        if not candidates:
            return _finding(
                "unmatched", mask_files[:1], f"no {name} image for subject {key}, only {_names(image_files)}"
            )
        if len(candidates) > 1:
            return _finding("ambiguous", candidates, f"several {name} images for subject {key}; keep one")
        chosen.append(candidates[0])
    return Pair(id=key, images=tuple(chosen), mask=mask_files[0])


def split_name(path: Path, images: Iterable[str] = ()) -> tuple[str, str]:
    """Splits a file name into subject and ending (lower case): sub-01_desc-x_dseg -> (sub-01, dseg)."""
    stem = NIFTI_NAME.sub("", path.name)
    known = MASK_ENDINGS | IMAGE_ENDINGS | {name.lower() for name in images}
    ending = ""
    while True:
        head, separator, tail = _last_part(stem)
        if not separator and stem.lower() in known and not ending:
            # A file such as t1.nii.gz or seg.nii.gz in a folder named after its subject.
            return path.parent.name, stem.lower()
        if not separator or not head or not (tail.lower() in known or tail.lower().startswith("desc-")):
            return stem, ending
        stem = head
        ending = ending or ("" if tail.lower().startswith("desc-") else tail.lower())


def _last_part(stem: str) -> tuple[str, str, str]:
    head, separator, tail = stem.rpartition("_")
    if tail.lower().startswith("desc-"):
        return head, separator, tail
    # BraTS since 2023 uses a hyphen before the ending: BraTS-GLI-00000-000-t1n.
    inner_head, inner_separator, inner_tail = tail.rpartition("-")
    if inner_separator and inner_tail.lower() in MASK_ENDINGS | IMAGE_ENDINGS:
        return f"{head}{separator}{inner_head}", inner_separator, inner_tail
    return head, separator, tail


def same_modality(ending: str, name: str) -> bool:
    """Whether two endings are spellings of the same modality, such as t1w and t1n."""
    name = name.lower()
    return ending == name or any(ending in group and name in group for group in MODALITIES)


def group_by_subject(files: list[Path], images: tuple[str, ...] = ()) -> dict[str, list[Path]]:
    """Files by the subject in their names."""
    subjects = defaultdict(list)
    for path in files:
        subjects[split_name(path, images)[0]].append(path)
    return subjects


def nifti_files(folder: str | Path) -> list[Path]:
    """Every NIfTI file below `folder`, sorted by path, without hidden files."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder")
    try:
        files = [p for p in folder.rglob("*") if NIFTI_NAME.search(p.name) and not p.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder}: cannot be read ({error.strerror or error})") from None
    return sorted(files)


def _names(paths: list[Path]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(map(str, paths[:4])) + more


def _finding(code: str, files: list[Path], problem: str) -> Finding:
    return error_finding(code, _names(files), f"{_names(files)}: {problem}")
