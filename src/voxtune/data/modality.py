"""Image kinds: their names in contracts, in BIDS and in BraTS, and what a file name says about its image."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from voxtune.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ImageKind:
    """One kind of image. `spellings` are the endings of file names, in lower case; `entities` precede the suffix in BIDS."""

    name: str
    suffix: str
    spellings: frozenset[str]
    entities: str = ""


# Spellings: BIDS, BraTS up to 2021, BraTS since 2023, and usual ones of other data sets.
KINDS = (
    ImageKind(name="T1w", suffix="T1w", spellings=frozenset({"t1w", "t1", "t1n"})),
    ImageKind(
        name="T1ce", suffix="T1w", entities="ce-gadolinium", spellings=frozenset({"t1ce", "t1c", "t1gd", "t1wce"})
    ),
    ImageKind(name="T2w", suffix="T2w", spellings=frozenset({"t2w", "t2"})),
    ImageKind(name="FLAIR", suffix="FLAIR", spellings=frozenset({"flair", "t2f", "t2flair"})),
    ImageKind(name="PDw", suffix="PDw", spellings=frozenset({"pdw"})),
    ImageKind(name="T2starw", suffix="T2starw", spellings=frozenset({"t2starw", "t2star"})),
    ImageKind(name="SWI", suffix="swi", spellings=frozenset({"swi"})),
    ImageKind(name="DWI", suffix="dwi", spellings=frozenset({"dwi"})),
    ImageKind(name="ADC", suffix="ADC", spellings=frozenset({"adc"})),
)
_BY_SPELLING = {spelling: kind for kind in KINDS for spelling in kind.spellings}
T1W = _BY_SPELLING["t1w"]

MASK_ENDINGS = frozenset({"dseg", "seg", "mask", "label", "labels", "probseg"})
# Endings of images that do not say their kind.
PLAIN_ENDINGS = frozenset({"image", "img"})
IMAGE_ENDINGS = PLAIN_ENDINGS | _BY_SPELLING.keys()
# Files that data/nifti.py reads: NIfTI, and the MGH format of FreeSurfer.
NIFTI_NAME = re.compile(r"\.(nii(\.gz)?|mgz|mgh(\.gz)?)$", re.IGNORECASE)
NIFTI_ENDINGS = ".nii, .nii.gz, .mgz, .mgh"
# The mark of a generated volume in a file name.
SYNTHETIC = re.compile(r"_desc-(synth\d+)(?=_|\.)", re.IGNORECASE)
# Entities that describe a file, not its subject.
FILE_ENTITY = re.compile(r"ce-|(?i:desc-)")
# The entities that come after ce- in BIDS.
AFTER_CE = re.compile(
    r"(trc|stain|rec|dir|run|mod|echo|flip|inv|mt|part|proc|hemi|space|split|recording|chunk|seg|res|den|label|desc)-"
)
IMAGE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+ -]{0,39}")

# Characters of the suffix of an image kind that is not in KINDS, and so of a part of file names.
MAX_SUFFIX = 60


def find_kind(spelling: str) -> ImageKind | None:
    """The image kind of a name or an ending such as T1w, t1n or FLAIR."""
    return _BY_SPELLING.get(spelling.lower())


def kind_name(name: str) -> str:
    """The canonical name of an image: T2w for t2; an unknown name is its own."""
    kind = find_kind(name)
    return name if kind is None else kind.name


def same_kind(a: str, b: str) -> bool:
    """Whether two names or endings are of the same image kind, such as t1w and t1n."""
    return kind_name(a).lower() == kind_name(b).lower()


def bids_name(image: str) -> tuple[str, str]:
    """(entities, suffix) of an image in BIDS file names: ("ce-gadolinium", "T1w") for T1ce.

    The suffix of an unknown image is its name without the characters that a suffix must not have.
    """
    kind = find_kind(image)
    if kind is not None:
        return kind.entities, kind.suffix
    return "", re.sub(r"[^A-Za-z0-9]+", "", image)[:MAX_SUFFIX] or "image"


def bids_stem(stem: str, image: str, desc: str) -> str:
    """The name, without .nii.gz, of an image of `stem` (sub-01_run-1) with its entities in the order of BIDS."""
    entities, suffix = bids_name(image)
    parts = stem.split("_")
    if entities:
        place = next((i for i, part in enumerate(parts) if i and AFTER_CE.match(part)), len(parts))
        parts.insert(place, entities)
    return "_".join([*parts, f"desc-{desc}", suffix])


def image_kind(path: Path) -> str | None:
    """The image kind that a file name states, such as T1ce for sub-01_ce-gadolinium_T1w.nii.gz; None if it states none."""
    kind = find_kind(split_name(path)[1])
    return None if kind is None else kind.name


def split_name(path: Path, images: Iterable[str] = ()) -> tuple[str, str]:
    """Splits a file name into subject and ending (lower case): sub-01_desc-x_dseg -> (sub-01, dseg).

    The ending of a T1w image with a contrast agent (ce-) is t1ce. `images` are further names that an ending can be.
    """
    # The first part names the subject, whatever it is: a site may be called ce-.
    first, *rest = NIFTI_NAME.sub("", path.name).split("_")
    contrast = any(part.startswith("ce-") for part in rest)
    stem = "_".join([first, *(part for part in rest if not FILE_ENTITY.match(part))])
    known = MASK_ENDINGS | IMAGE_ENDINGS | {name.lower() for name in images}
    ending = ""
    while True:
        head, separator, tail = _last_part(stem, known)
        if not separator and stem.lower() in known and not ending:
            # A file such as t1.nii.gz or seg.nii.gz in a folder named after its subject.
            return path.parent.name, stem.lower()
        if not separator or not head or tail.lower() not in known:
            return stem, "t1ce" if contrast and ending in T1W.spellings else ending
        stem = head
        ending = ending or tail.lower()


def _last_part(stem: str, known: frozenset[str] | set[str]) -> tuple[str, str, str]:
    head, separator, tail = stem.rpartition("_")
    # BraTS since 2023 uses a hyphen before the ending: BraTS-GLI-00000-000-t1n.
    inner_head, inner_separator, inner_tail = tail.rpartition("-")
    if inner_separator and inner_tail.lower() in known:
        return f"{head}{separator}{inner_head}", inner_separator, inner_tail
    return head, separator, tail


def parse_images(text: str | Sequence[str]) -> tuple[str, ...]:
    """Image kinds from text such as T2w or t1,t1ce,t2,flair, or from a sequence of names, by their canonical names."""
    if not isinstance(text, str):
        if not isinstance(text, list | tuple) or not all(isinstance(name, str) for name in text):
            raise InputError(f"image: expected text such as 't1,t2' or a list of names, got {type(text).__name__}")
        text = ",".join(text)
    names = tuple(kind_name(part.strip()) for part in text.split(","))
    wrong = next((name for name in names if not IMAGE_NAME.fullmatch(name)), None)
    if wrong is not None:
        raise InputError(f"--image {text[:80]}: {wrong[:40]!r} is not an image kind; give names such as T1w,T2w")
    repeated = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if repeated is not None:
        raise InputError(f"--image {text[:80]}: {repeated} is given twice")
    return names


def in_order(kinds: Iterable[str]) -> list[str]:
    """Each kind once, in the order of KINDS; others follow."""
    known = [kind.name for kind in KINDS]
    return sorted(dict.fromkeys(kinds), key=lambda kind: (kind not in known, [*known, kind].index(kind)))


def describe_counts(kinds: Iterable[str]) -> str:
    """12 T1w and 12 T2w images."""
    counts = Counter(kinds)
    each = [f"{counts[kind]} {kind}" for kind in in_order(counts)]
    return f"{listed(each)} image{'' if sum(counts.values()) == 1 else 's'}"


def listed(names: Sequence[str], conjunction: str = "and") -> str:
    """A, B and C."""
    return f" {conjunction} ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


def choices(kinds: Sequence[str]) -> str:
    """The ways to choose among several kinds: choose one: --image T1w or --image T2w (both: --image T1w,T2w)."""
    if len(kinds) == 1:
        return f"pass --image {kinds[0]}"
    each = listed([f"--image {kind}" for kind in kinds], "or")
    return f"choose one: {each} ({'both' if len(kinds) == 2 else 'all'}: --image {','.join(kinds)})"
