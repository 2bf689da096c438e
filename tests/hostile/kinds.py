"""The kinds of input of Voxtune: a valid example of each, the ways to damage its files, and the functions that read them.

A case is a kind and a number; the same case is the same bytes on every machine with the same libraries.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.hostile.damage import bytes_damage

Damage = Callable[[bytes, random.Random], bytes]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`make` writes valid files into an empty folder. `damages` maps each file to damage to ways of damage, of which one is
    drawn. `read(folder, damaged)` reads the case as the commands do. `place` replaces the damaged file by something else
    than a file. `cases` and `quick` are the numbers of cases in the campaign and in every run of the tests.
    """

    name: str
    make: Callable[[Path], None]
    damages: dict[str, tuple[Damage, ...]]
    read: Callable[[Path, Path], object]
    place: Callable[[Path, random.Random], Path] | None = None
    cases: int = 400
    quick: int = 8

    def contents(self) -> dict[str, bytes]:
        return _contents(self.name)

    def write(self, folder: Path) -> None:
        for name, data in self.contents().items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


KINDS: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    assert kind.name not in KINDS
    KINDS[kind.name] = kind


@cache
def _contents(name: str) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        KINDS[name].make(folder)
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def random_of(kind: Kind, number: int) -> random.Random:
    return random.Random(f"{kind.name}/{number}")


def make_case(kind: Kind, number: int, folder: Path) -> Path:
    """Writes the case into `folder` and returns the damaged file."""
    rng = random_of(kind, number)
    kind.write(folder)
    name = rng.choice(sorted(kind.damages))
    path = folder / name
    if kind.place is not None:
        return kind.place(path, rng)
    way = rng.choice(kind.damages[name])
    path.write_bytes(way(path.read_bytes() if path.exists() else b"", rng))
    return path


def special_file(path: Path, rng: random.Random) -> Path:
    """In place of a file: a pipe, a folder, a device, a link to one of them or to itself, no file, or a file no one may read."""
    path.unlink()
    way = rng.randrange(9)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.mkdir()
    elif way == 2:
        path.symlink_to(rng.choice(["/dev/zero", "/dev/random", "/dev/full", "/dev/stdin", "/dev/tty"]))
    elif way == 3:
        path.symlink_to(path.name)
    elif way == 4:
        path.symlink_to("/")
    elif way == 5:
        os.mkfifo(path.with_name("pipe"))
        path.symlink_to("pipe")
    elif way == 6:
        path.symlink_to(
            rng.choice(["absent", "../../../../../absent", "/proc/self/mem", "/proc/kmsg", "/proc/self/environ"])
        )
    elif way == 7:
        path.mkdir()
        (path / "inside").write_bytes(bytes_damage(b"x" * 100, rng))
    return path


# Names that a file of a stranger can have. Linux allows every byte but "/" and NUL, and 255 of them.
NAMES: tuple[bytes, ...] = (
    *(
        b"n" * 240,
        b"\xff\xfe\xfa",
        b"\x1b[31mred\x1b[0m",
        b"a\nb",
        b"a\rb",
        b"\x07\x08\x7f",
        b"\xc3\xa9" * 100,
        b" ",
        b"-rf",
        b"--help",
    ),
    *(
        b"a'b\"c",
        b"$(touch executed)",
        b"`touch executed`",
        b"%s%n%x",
        b"a;b",
        b"..",
        b"...",
        b"\xe2\x80\xae",
        b"<script>",
        b"a\\b",
    ),
    *(
        b"*",
        b"?",
        b"[x]",
        b"{x}",
        b"~",
        b"con",
        b"\xed\xa0\x80",
        b"a\tb",
        b"\xe2\x80\xa8",
        b"'",
        b'"',
        b"=1",
        b"sub-01_desc-synth01",
    ),
)


def renamed(path: Path, rng: random.Random) -> Path:
    """The file under a hostile name with the same ending."""
    ending = b"".join(os.fsencode(suffix) for suffix in path.suffixes[-2:])
    name = rng.choice(NAMES)
    stem = rng.choice([name, b"sub-01_" + name, name + os.fsencode(path.name.split(".")[0])])[: 255 - len(ending)]
    target = os.fsencode(path.parent) + b"/" + stem + ending
    if not os.path.lexists(target):
        os.rename(path, target)  # noqa: PTH104  bytes
    return Path(os.fsdecode(target))


def _load() -> None:
    """The modules register their kinds when they are imported."""
    from tests.hostile import kinds_models, kinds_records, kinds_volumes  # noqa: F401


_load()
