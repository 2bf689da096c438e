"""Matches images with masks by file name: plain, BIDS and BraTS names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from voxtune.data.derivative import subject_of
from voxtune.data.modality import (
    MASK_ENDINGS,
    NIFTI_ENDINGS,
    NIFTI_NAME,
    SYNTHETIC,
    choices,
    describe_counts,
    find_kind,
    image_kind,
    in_order,
    kind_name,
    listed,
    same_kind,
    split_name,
)
from voxtune.data.preflight import Finding, Report, error_finding
from voxtune.errors import InputError, advice


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

    `images` are the image names of the contract. Each subject requires one file for each, which is identified by the
    ending of its name; a single image may also have a name that states no kind.
    """
    image_files, mask_files = _find_files(images_dir, masks_dir, images)
    wrong, ignored = _check_kinds(images_dir, image_files, images)
    if wrong is not None:
        return Pairing(pairs=(), report=Report(findings=(wrong,)))
    by_image, by_mask = group_by_subject(image_files, images), group_by_subject(mask_files, images)
    pairs, findings = [], [] if ignored is None else [ignored]
    for key in sorted(by_image.keys() | by_mask.keys()):
        pair = _pair(key, by_image.get(key, []), by_mask.get(key, []), images)
        if isinstance(pair, Pair):
            pairs.append(pair)
        else:
            findings.append(pair)
    if not by_image and not by_mask:
        findings.append(
            error_finding("no-files", images_dir, f"{images_dir}: no NIfTI images ({NIFTI_ENDINGS}) in this folder")
        )
    return Pairing(pairs=tuple(pairs), report=Report(findings=tuple(findings)))


def folder_images(images_dir: str | Path, masks_dir: str | Path, default: str) -> tuple[str, str]:
    """(the one image kind of a folder, where it is from in one sentence).

    The kind is what the file names state, else `default`. Raises InputError if they state several.
    """
    image_files, _ = _find_files(images_dir, masks_dir, ())
    kinds = [kind for path in image_files if (kind := image_kind(path)) is not None]
    names = in_order(kinds)
    if len(names) > 1:
        raise InputError(f"{images_dir}: {describe_counts(kinds)}; {choices(names)}")
    if not names:
        cure = advice("choose another kind with --image", "name the files as in sub-01_T2w.nii.gz for another kind")
        return default, f"Images: {default}, because no file name in {images_dir} states a kind; {cure}."
    return names[0], f"Images: {names[0]}, from the file names in {images_dir}."


def images_of_masks(
    masks: Iterable[Path], images_dir: str | Path, images: tuple[str, ...]
) -> tuple[dict[Path, tuple[Path, ...]], str | None]:
    """(the images of each mask's subject, a warning if some are of other kinds).

    These are its images of the kinds `images`; a subject without them has those of the first kind that it has. Masks
    without an image are omitted.
    """
    files = [p for p in nifti_files(images_dir) if split_name(p, images)[1] not in MASK_ENDINGS]
    by_subject = group_by_subject([p for p in files if not SYNTHETIC.search(p.name)], images)
    partners, others = {}, []
    for mask in masks:
        candidates = by_subject.get(split_name(mask, images)[0], [])
        chosen = [p for name in images for p in _of_kind(candidates, name, images)]
        chosen = chosen or [p for p in candidates if _plain(split_name(p, images)[1], images)]
        if candidates and not chosen:
            kind = in_order(kind_name(split_name(p, images)[1]) for p in candidates)[0]
            chosen = _of_kind(candidates, kind, images)
            others.append(kind)
        if chosen:
            partners[mask] = tuple(chosen)
    if not others:
        return partners, None
    missing = listed([kind_name(name) for name in images], "or")
    count = f"{len(others)} of the masks {'has' if len(others) == 1 else 'have'} no {missing} image"
    return partners, f"{images_dir}: {count}; using {listed(in_order(others), 'or')} instead"


def _of_kind(files: Iterable[Path], name: str, images: tuple[str, ...]) -> list[Path]:
    return [p for p in files if same_kind(split_name(p, images)[1], name)]


def _find_files(
    images_dir: str | Path, masks_dir: str | Path, images: tuple[str, ...]
) -> tuple[list[Path], list[Path]]:
    """(image files, mask files)."""
    files = nifti_files(images_dir)
    image_files = [p for p in files if split_name(p, images)[1] not in MASK_ENDINGS]
    if files and not image_files:
        raise InputError(f"{images_dir}: no images, only masks; give the folder of the images")
    mask_files = nifti_files(masks_dir)
    marked = [p for p in mask_files if split_name(p, images)[1] in MASK_ENDINGS]
    mask_files = marked or [p for p in mask_files if Path(images_dir).resolve() != Path(masks_dir).resolve()]
    if set(image_files) & set(mask_files):
        image_files = [p for p in image_files if p not in set(mask_files)]
    return image_files, mask_files


def _check_kinds(
    images_dir: str | Path, image_files: list[Path], images: tuple[str, ...]
) -> tuple[Finding | None, Finding | None]:
    """(an error if the folder lacks an image of the contract, a warning if it has images of other kinds)."""
    endings = [split_name(p, images)[1] for p in image_files]
    unnamed = [ending for ending in endings if _plain(ending, images)]
    needed = [kind_name(name) for name in images]
    missing = [name for name in needed if not any(same_kind(ending, name) for ending in endings)]
    if image_files and missing and not (len(images) == 1 and unnamed):
        counts = describe_counts([kind_name(e) for e in endings if e not in unnamed] + ["unnamed"] * len(unnamed))
        kinds = in_order(kind.name for e in endings if (kind := find_kind(e)) is not None)
        cures = [choices(kinds)] if kinds else []
        cure = advice(*cures, f"give a folder with {listed(missing)} images")
        verb = "is" if len(needed) == 1 else "are"
        message = f"{images_dir}: {counts}, but no {listed(missing, 'or')}; {listed(needed)} {verb} required; {cure}"
        return error_finding("image-kind", images_dir, message), None
    others = [kind_name(e) for e in endings if e not in unnamed and not any(same_kind(e, name) for name in images)]
    if others:
        message = f"{images_dir}: ignoring {describe_counts(others)}; using only {listed(needed)}"
        return None, Finding(level="warning", code="other-kinds", message=message, file=str(images_dir))
    return None, None


def _plain(ending: str, images: tuple[str, ...]) -> bool:
    """Whether an ending states no image kind and is no name in `images`."""
    return find_kind(ending) is None and not any(same_kind(ending, name) for name in images)


def _pair(key: str, image_files: list[Path], mask_files: list[Path], images: tuple[str, ...]) -> Pair | Finding:
    if not mask_files:
        return _finding("unmatched", image_files, "no mask with a matching name; add one or remove the image")
    if not image_files:
        return _finding("unmatched", mask_files, "no image with a matching name; add one or remove the mask")
    if len(mask_files) > 1:
        return _finding("ambiguous", mask_files, f"several masks for subject {key}; keep one")
    chosen = []
    for name in images:
        candidates = _of_kind(image_files, name, images)
        if not candidates and len(images) == 1:
            candidates = [p for p in image_files if _plain(split_name(p, images)[1], images)]
        if not candidates:
            return _finding(
                "unmatched", mask_files[:1], f"no {kind_name(name)} image for subject {key}, only {_names(image_files)}"
            )
        if len(candidates) > 1:
            return _finding("ambiguous", candidates, f"several {kind_name(name)} images for subject {key}; keep one")
        chosen.append(candidates[0])
    return Pair(id=key, images=tuple(chosen), mask=mask_files[0])


def group_by_subject(files: list[Path], images: tuple[str, ...] = ()) -> dict[str, list[Path]]:
    """Files by their subject."""
    subjects = defaultdict(list)
    for path in files:
        subjects[subject_of(path, images)].append(path)
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


def mask_files(paths: Iterable[Path]) -> list[Path]:
    """The masks: files as they are, folders by the masks in them. In a folder without mask names, every file is a mask."""
    files: list[Path] = []
    for path in paths:
        if not path.is_dir():
            files.append(path)
            continue
        inside = nifti_files(path)
        if not inside:
            raise InputError(f"{path}: no NIfTI masks ({NIFTI_ENDINGS}) in this folder")
        files += [p for p in inside if split_name(p)[1] in MASK_ENDINGS] or inside
    return files


def _names(paths: list[Path]) -> str:
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return ", ".join(map(str, paths[:4])) + more


def _finding(code: str, files: list[Path], problem: str) -> Finding:
    return error_finding(code, _names(files), f"{_names(files)}: {problem}")
