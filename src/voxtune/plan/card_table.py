"""Tables of measurements on this card, in the cache folder: for the card, the versions and the source they were made with."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from voxtune.errors import InputError
from voxtune.files import write_json
from voxtune.plan.cache import cache_folder, device_name, versions
from voxtune.plan.saved_graph import sources_hash
from voxtune.reading import read_json

log = logging.getLogger("voxtune")
MAX_ENTRIES = 4096


@dataclass(frozen=True, kw_only=True)
class CardTable:
    """One kind of measurements: `what` they are, for messages, the format of the file, and the name of its entries."""

    what: str
    format: str
    entries: str
    prefix: str = ""

    def path(self, device: torch.device) -> Path:
        here = json.dumps([device_name(device), versions(), sources_hash()], sort_keys=True)
        return (
            cache_folder()
            / "kernels"
            / f"{self.prefix}{hashlib.blake2b(here.encode(), digest_size=16).hexdigest()}.json"
        )

    def read(self, device: torch.device) -> dict[str, Any]:
        """The entries by their keys; none if there is no file, or a damaged one. The caller checks what an entry is."""
        path = self.path(device)
        if not path.exists():
            return {}
        try:
            content = read_json(path)
        except InputError as error:
            log.warning("ignoring %s: %s", self.what, error)
            return {}
        entries = content.get(self.entries) if isinstance(content, dict) else None
        if not isinstance(entries, dict) or content.get("format") != self.format:
            log.warning("ignoring %s: %s: expected a file of format %r", self.what, path, self.format)
            return {}
        return entries

    def add(self, device: torch.device, new: dict[str, Any]) -> None:
        """Best effort: if the cache cannot be written, only the next search takes longer."""
        path = self.path(device)
        entries = {**self.read(device), **new}
        try:
            latest = dict(list(entries.items())[-MAX_ENTRIES:])
            write_json(path, {"format": self.format, self.entries: latest}, state=True)
        except (OSError, InputError) as error:
            log.warning("%s could not be cached in %s: %s", self.what, path.parent, error)
