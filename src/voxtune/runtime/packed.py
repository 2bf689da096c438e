"""Packed subjects as training data: one file, read and checked once, so that giving a subject out costs little.

Legend: N subjects, C images, L labels, D H W voxels.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np

from voxtune.config import from_mapping
from voxtune.data.contract import DataContract
from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.runtime.heldout import unlike
from voxtune.runtime.subjects import Packed, unpack


class PackedSource(Packed):
    """The subjects to learn from of a file that `voxtune pack` wrote; never its held-out ones."""

    def __init__(self, path: str | Path, contract: DataContract):
        packed, held_out = unpack(path)
        _check_contract(path, packed.contract, contract)
        super().__init__(contract, packed.images_NCDHW, packed.labels_NDHW, packed.origin)
        self.name, self.held_out = Path(path).name, len(held_out)


def packed_contract(path: str | Path) -> DataContract:
    """What a packed file says of itself; its subjects are not read."""
    try:
        with np.load(path, allow_pickle=False) as file:
            contract = json.loads(str(file["header"]))["contract"]
    except (OSError, ValueError, KeyError, TypeError, EOFError, RecursionError, zipfile.BadZipFile) as error:
        reason = one_line(getattr(error, "strerror", None) or error)
        raise InputError(f"{str(path)[:500]}: not a file of packed subjects ({reason})") from None
    return from_mapping(DataContract, contract, f"{path}: contract")


def _check_contract(path: str | Path, found: DataContract, wanted: DataContract) -> None:
    difference = unlike(found, wanted)
    if difference is None and [name.lower() for name in found.images] != [name.lower() for name in wanted.images]:
        difference = f"other images, {', '.join(found.images)} rather than {', '.join(wanted.images)},"
    if difference is None and found.scaling != wanted.scaling:
        difference = f"another scaling, by {found.scaling} rather than by {wanted.scaling},"
    if difference is not None:
        raise InputError(
            f"{path}: its subjects have {difference} than the model's; pack subjects for this model, or leave size, "
            "spacing, labels and the like to the file"
        )
