"""What the values of mask files mean: the option --labels, and masks in the values of a data contract.

A `LabelMap` maps the values of a file to names. It is parsed from text ("tumour=1,4; oedema=2; brain=image"), from a BIDS
dseg.tsv, from a model folder, or from the name of a preset.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from voxtune.config import from_mapping
from voxtune.data.contract import PRESETS, DataContract, Kind, Label, check_count, label_key
from voxtune.data.nifti import Volume, read_labels, read_volume
from voxtune.data.preflight import MODEL, Consumer, Report, check_mask, check_pair
from voxtune.errors import InputError
from voxtune.reading import parse_json, read_text, reading, tsv_rows

EXAMPLE = '"tumour=1,4; oedema=2; brain=image"'
FORMS = f"write NAME=VALUES such as {EXAMPLE}, a dseg.tsv, a model folder, or one of {', '.join(PRESETS)}"
# An image with more voxels that are not 0 at the border of its volume is not skull-stripped.
LARGEST_BORDER_SHARE = 0.5
# In place of values: the label is where the subject's images are not 0, or the files do not have it.
IMAGE, NONE = "image", "none"
BACKGROUND = "background"
LARGEST_VALUE = 2**31 - 1
MAX_TEXT, MAX_NAME = 20_000, 100
MAX_FILE_BYTES = 2**20
BRATS_PRESETS = ("brats", "brats2021")
# Values up to this are mapped by a table, larger ones by sorting.
TABLE = 2**16


# Images of one subject.
Images = Volume | str | Path | Sequence[Volume | str | Path]


@dataclass(frozen=True, kw_only=True)
class LabelEntry:
    """A name with its values in files. With `from_image`, masks without them get the label from the image.

    With neither, the files do not have this label.
    """

    name: str
    values: tuple[int, ...] = ()
    from_image: bool = False
    role: Kind | None = field(default=None, compare=False)

    def __str__(self) -> str:
        words = [*map(str, self.values), *([IMAGE] if self.from_image else [])]
        return f"{self.name}={','.join(words) or NONE}"


@dataclass(frozen=True, kw_only=True)
class LabelMap:
    """What the values of mask files mean; `background` are values to ignore. `origin` is the option as the user wrote it.

    With `model_values` there are no entries: the values of the files are those of the model.
    """

    entries: tuple[LabelEntry, ...] = ()
    background: tuple[int, ...] = ()
    model_values: bool = False
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        check_count(sum(max(1, len(entry.values)) for entry in self.entries))
        keys: set[str] = set()
        background = frozenset(self.background)
        for entry in self.entries:
            key = label_key(entry.name)
            if key in keys:
                raise InputError(
                    f"--labels: {entry.name!r} is given twice; write all its values in one place, as {EXAMPLE}"
                )
            keys.add(key)
            both = background.intersection(entry.values)
            if both:
                raise InputError(f"--labels: value {min(both)} is both {entry.name!r} and {BACKGROUND}")
        if sum(entry.from_image for entry in self.entries) > 1:
            raise InputError(f"--labels: only one label can be taken from the image ({IMAGE})")
        if not self.entries and not self.model_values:
            raise InputError(f"--labels: no labels; {FORMS}")

    def __str__(self) -> str:
        """The map as text that `parse_labels` reads back."""
        if self.model_values:
            return "model"
        ignored = [f"{BACKGROUND}={','.join(map(str, self.background))}"] if self.background else []
        return "; ".join([*map(str, self.entries), *ignored])

    @classmethod
    def of(cls, labels: Iterable[Label]) -> LabelMap:
        """The labels of a contract, each with its own values."""
        ordered = sorted(labels, key=lambda label: label.channel)
        return cls(
            entries=tuple(
                LabelEntry(name=label.name, values=label.values, from_image=label.from_image, role=label.role)
                for label in ordered
            )
        )

    def labels(self, *, overlapping: bool = False) -> tuple[Label, ...]:
        """The labels of a new contract, whose values are those of the files. A label from the image gets a value of its own."""
        if self.model_values:
            raise InputError(f"--labels model requires a model; {FORMS}")
        free = max((value for entry in self.entries for value in entry.values), default=0) + 1
        labels: list[Label] = []
        owners: dict[int, str] = {}
        for channel, entry in enumerate(self.entries):
            if not entry.values and not entry.from_image:
                raise InputError(
                    f"--labels: {entry} has no values; a label that no file has cannot be trained, remove it"
                )
            shared = next((value for value in entry.values if value in owners), None)
            if shared is not None and not overlapping:
                raise InputError(
                    f"--labels: value {shared} is in {owners[shared]!r} and in {entry.name!r}; give it to one of them, or pass "
                    "--overlapping-labels"
                )
            owners |= dict.fromkeys(entry.values, entry.name)
            first, *more = entry.values or (free,)
            labels.append(
                Label(
                    name=entry.name,
                    value=first,
                    channel=channel,
                    more_values=tuple(more),
                    from_image=entry.from_image,
                    role=entry.role,
                )
            )
        return tuple(labels)

    def file_names(self, contract: DataContract) -> dict[str, str]:
        """The names of the files' own values, for sidecars; under "image" the label that is taken from the image."""
        if self.model_values:
            return {str(value): name for value, name in contract.value_names().items()}
        names: dict[str, str] = {}
        for entry in self.entries:
            for key in (*map(str, entry.values), *([IMAGE] if entry.from_image else [])):
                names[key] = f"{names[key]} + {entry.name}" if key in names else entry.name
        return names

    def for_contract(self, contract: DataContract, owner: str = "the model") -> FileValues:
        """The map from file values to the values of `contract`; raises InputError unless the names are the contract's."""
        by_key = {label_key(label.name): label for label in contract.ordered}
        channels: dict[int, set[int]] = {value: set() for value in self.background}
        from_image, organ_may_miss = None, self.model_values
        for entry in self.entries:
            label = by_key.get(label_key(entry.name))
            if label is None:
                names = ", ".join(label.name for label in contract.ordered)
                ignore = f", or {BACKGROUND}={','.join(map(str, entry.values))} to ignore them" if entry.values else ""
                raise InputError(
                    f"--labels: {owner} has no label {entry.name!r}, only {names}; give the values to one of these{ignore}"
                )
            if entry.from_image:
                from_image = label
            elif not entry.values and label.kind == "organ":
                organ_may_miss = True
            for value in entry.values:
                channels.setdefault(value, set()).add(label.channel)
        if self.model_values:
            table = {value: value for value in contract.all_values}
        else:
            table = {value: self._value(value, members, contract) for value, members in channels.items()}
        mentioned = {label_key(entry.name) for entry in self.entries}
        if from_image is None:
            stated = next((label for label in contract.ordered if label.from_image), None)
            from_image = stated if stated is not None and label_key(stated.name) not in mentioned else None
        return FileValues(table=table, from_image=from_image, organ_may_miss=organ_may_miss, source=self)

    def _value(self, value: int, members: set[int], contract: DataContract) -> int:
        """The contract's value for a file value that belongs to these channels."""
        if not members:
            return 0
        target = contract.value_of(members)
        if target is None:
            names = " and ".join(label.name for label in contract.ordered if label.channel in members)
            raise InputError(
                f"--labels: value {value} cannot be {names} for this model, whose labels are {contract.describe_labels()}"
                f"{'' if contract.overlapping else ' and do not overlap'}"
            )
        return target


@dataclass(frozen=True, kw_only=True)
class FileValues:
    """The values of files as values of a contract. `from_image`: the label to take from the image where a mask lacks it."""

    table: dict[int, int]
    from_image: Label | None
    organ_may_miss: bool
    source: LabelMap

    def apply(self, mask: Volume) -> Volume:
        """The mask in values of the contract; raises InputError for values that the map does not name."""
        if self.source.model_values:
            return mask
        array = mask.array
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low >= 0 and high < TABLE:
            present = np.flatnonzero(np.bincount(array.ravel(), minlength=1))
            indices = array
        else:
            present, inverse = np.unique(array, return_inverse=True)
            indices = inverse.reshape(array.shape)
        unknown = [int(value) for value in present if value != 0 and int(value) not in self.table]
        if unknown:
            shown = ", ".join(map(str, unknown[:8])) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
            raise InputError(
                f"{mask.name}: label {shown} is not in --labels {self.source.origin or self.source}; "
                f"{self._cure(unknown, {int(value) for value in present})}"
            )
        targets = [self.table.get(int(value), 0) for value in present]
        if indices is array:
            lookup = np.zeros(high + 1, np.int32)
            lookup[present] = targets
        else:
            lookup = np.array(targets, np.int32)
        return replace(mask, array=lookup[indices])

    def _cure(self, unknown: Sequence[int], present: set[int]) -> str:
        """What helps against unknown values, of which 3 and 4 have a known meaning in files of BraTS."""
        origin, others = self.source.origin, present - {0, 1, 2}
        if origin in BRATS_PRESETS and others == {3, 4}:
            text = PRESETS["brats"].replace(f"brain={IMAGE}", "brain=4")
            return f'if 4 is the brain, write brain=4: --labels "{text}"'
        if origin == "brats" and others == {4}:
            return "if 4 is the enhancing tumour (BraTS up to 2021), use --labels brats2021; if it is the brain, write brain=4"
        if origin == "brats2021" and others == {3}:
            return "if 3 is the enhancing tumour (BraTS 2023 and later), use --labels brats"
        ignored = ",".join(map(str, unknown[:8]))
        return f"add it to a label, or write {BACKGROUND}={ignored} to ignore it"


@dataclass(frozen=True, kw_only=True)
class MaskReader:
    """Reads masks in the values of a contract. `labels` is what the user stated about the files, None for nothing."""

    contract: DataContract
    labels: LabelMap | None = None

    @cached_property
    def values(self) -> FileValues | None:
        return None if self.labels is None else self.labels.for_contract(self.contract)

    @property
    def from_image(self) -> Label | None:
        """The label that a mask without it gets from the subject's image."""
        if self.values is not None:
            return self.values.from_image
        return next((label for label in self.contract.ordered if label.from_image), None)

    def check_names(self) -> None:
        """Raises InputError unless the labels are those of the contract."""
        _ = self.values

    def read(self, path: str | Path, images: Images = (), *, fix: str = "") -> Volume:
        """The mask in values of the contract, not checked otherwise. `fix` says how to pass an image that is missing."""
        return self.convert(read_labels(path), images, fix=fix)

    def convert(self, mask: Volume, images: Images = (), *, fix: str = "") -> Volume:
        """As `read`, of a mask in memory: a label from the image is where the file has 0 and any of the images is not 0."""
        # Values that the map sends to the background stay background.
        unlabelled = mask.array == 0
        if self.values is not None:
            mask = self.values.apply(mask)
        label = self.from_image
        if label is None or np.isin(mask.array, label.values).any():
            return mask
        if isinstance(images, Volume | str | Path):
            images = (images,)
        if not images:
            raise InputError(
                f"{mask.name}: {label.name} is taken from the subject's image, and there is none; "
                f"{fix or f'add it, or a mask with {label.describe()}'}"
            )
        inside = _inside(images, mask, label) & unlabelled
        if not inside.any():
            raise InputError(
                f"{mask.name}: the subject's image is 0 wherever the mask is 0, so {label.name} cannot be taken from it "
                f"({label.name}={IMAGE}); check the image"
            )
        value = self.contract.value_of({label.channel})
        if value is None:
            raise InputError(
                f"--labels: {label.name}={IMAGE} requires a value for {label.name} alone; the labels are "
                f"{self.contract.describe_labels()}"
            )
        return replace(mask, array=np.where(inside, np.int32(value), mask.array))

    def check(self, mask: Volume, consumer: Consumer = MODEL) -> Report:
        """Checks a mask that `read` returned."""
        may_miss = self.values is not None and self.values.organ_may_miss
        return check_mask(mask, self.contract, consumer, stated=self.labels is not None, organ_may_miss=may_miss)


def _inside(images: Sequence[Volume | str | Path], mask: Volume, label: Label) -> np.ndarray:
    """Where any of the skull-stripped images of a mask's subject is not 0."""
    inside, names = np.zeros(mask.shape, bool), []
    for each in images:
        image = each if isinstance(each, Volume) else read_volume(each)
        check_pair(image, mask).raise_errors()
        nonzero = image.array != 0
        reason = ""
        if nonzero.all():
            reason = "no voxel is 0"
        elif label.kind == "organ" and _border_share(nonzero) > LARGEST_BORDER_SHARE:
            reason = "the image is not skull-stripped (most voxels at the border of the volume are not 0)"
        if reason:
            raise InputError(
                f"{image.name}: {reason}, so {label.name} cannot be taken from it ({label.name}={IMAGE}); use an image "
                f"with background 0, or masks with {label.name}"
            )
        inside |= nonzero
        names.append(image.name)
    if not inside.any():
        raise InputError(f"{', '.join(names)}: all voxels are 0, so {label.name} cannot be taken from it")
    return inside


def _border_share(inside: np.ndarray) -> float:
    """The part of the outermost voxels of a volume that is inside."""
    border = np.ones(inside.shape, bool)
    border[1:-1, 1:-1, 1:-1] = False
    return float(inside[border].mean())


def parse_labels(text: str) -> LabelMap:
    """The value of --labels: pairs of names and values, a preset, a dseg.tsv or a model folder."""
    if not isinstance(text, str):
        raise InputError(f"labels: expected text, got {type(text).__name__}; {FORMS}")
    text = text.strip()
    if not text or len(text) > MAX_TEXT:
        raise InputError(f"--labels: {'no labels' if not text else 'text is too long'}; {FORMS}")
    if "=" in text:
        return replace(_from_text(text), origin=text)
    if text == "model":
        return LabelMap(model_values=True, origin=text)
    if text in PRESETS:
        return replace(_from_text(PRESETS[text]), origin=text)
    return replace(_from_file(text), origin=text)


def _from_text(text: str) -> LabelMap:
    """Groups are separated by ";" or ","; a part without "=" is another value of the name before it."""
    pairs: list[tuple[str, list[str]]] = []
    for group in text.split(";"):
        names_before = len(pairs)
        for part in group.split(",") if group.strip() else []:
            left, equals, right = part.partition("=")
            if equals:
                pairs.append((_name(left), [right]))
            elif len(pairs) == names_before:
                raise InputError(f"--labels: {_short(part)} has no name; {FORMS}")
            else:
                pairs[-1][1].append(left)
    return _from_pairs(pairs)


def _from_pairs(pairs: Iterable[tuple[str, list[str]]]) -> LabelMap:
    entries: list[LabelEntry] = []
    background: list[int] = []
    for name, words in pairs:
        entry = _entry(name, [word.strip() for word in words])
        if label_key(name) != BACKGROUND:
            entries.append(entry)
        elif entry.from_image or not entry.values:
            raise InputError(f"--labels: {BACKGROUND} requires values to ignore, such as {BACKGROUND}=3")
        else:
            background += entry.values
    return LabelMap(entries=tuple(entries), background=tuple(dict.fromkeys(background)))


def _entry(name: str, words: list[str]) -> LabelEntry:
    if [word.casefold() for word in words] == [NONE]:
        return LabelEntry(name=name)
    numbers = [word for word in words if word.casefold() != IMAGE]
    for word in numbers:
        if not re.fullmatch(r"[0-9]{1,10}", word) or not 1 <= int(word) <= LARGEST_VALUE:
            raise InputError(
                f"--labels: {name}={_short(word)}: values must be whole numbers >= 1 (0 is the background), {IMAGE} or {NONE}"
            )
    values = tuple(dict.fromkeys(int(word) for word in numbers))
    return LabelEntry(name=name, values=values, from_image=len(numbers) < len(words))


def _name(text: str) -> str:
    name = text.strip()
    if not name or len(name) > MAX_NAME or not name.isprintable():
        raise InputError(f"--labels: {_short(text)} is not a name of a label; {FORMS}")
    return name


def _from_file(text: str) -> LabelMap:
    """The labels of a dseg.tsv, where rows with the same name are values of one label, or of a model's config.json."""
    path = Path(text)
    try:
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise InputError(f"--labels {_short(text)}: no such preset or file; {FORMS}")
    except OSError as error:  # a name that is too long
        raise InputError(f"--labels {_short(text)}: {error.strerror}; {FORMS}") from None
    with reading(path, "table of labels"):
        content = read_text(path, limit=MAX_FILE_BYTES, what="table of labels")
        return _from_config(parse_json(content, path)) if path.suffix.lower() == ".json" else _from_table(content)


def _from_table(content: str) -> LabelMap:
    values: dict[str, list[str]] = {}
    for row in tsv_rows(content):
        name, index = row.get("name", "").strip(), row.get("index", "").strip()
        # The background of a table is 0; a row without a name or a value is a comment.
        if name and index and not re.fullmatch(r"0+", index):
            values.setdefault(_name(name), []).append(index)
    if not values:
        raise InputError("no labels; a dseg.tsv has the columns index and name, separated by tabs")
    return _from_pairs(values.items())


def _from_config(config: Any) -> LabelMap:
    try:
        labels = config["data"]["labels"]
    except (LookupError, TypeError):
        raise InputError("no labels; pass a model folder whose config.json has a data contract") from None
    if not isinstance(labels, list):
        raise InputError("data.labels must be a list")
    return LabelMap.of(from_mapping(Label, label, f"labels[{number}]") for number, label in enumerate(labels))


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
