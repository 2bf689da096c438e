"""Ways to damage files. Every function takes the content and a random generator, and returns other content.

`bytes_damage` fits every format. The others know a format: headers of NIfTI and MGH, JSON, tables, archives, gzip.
"""

from __future__ import annotations

import gzip
import json
import random
import string
import struct
import zlib
from collections.abc import Callable
from typing import Any

Random = random.Random
# Numbers at the limits of integer types, and sizes that no machine has.
EXTREME = (0, -1, 1, 2, 127, 255, 256, 32767, -32768, 65535, 2**31 - 1, -(2**31), 2**32, 2**40, 2**48, 2**62, 2**63 - 1)
FLOATS = (0.0, -1.0, 1e-45, 1e-6, 1e30, 3.4e38, -1e6, float("nan"), float("inf"), float("-inf"))
# The characters that a terminal or another tool interprets.
ESCAPES = "\x1b[31mred\x1b[0m\x1b]0;title\x07\r\n\x08"
# Of a small file, damage at the beginning and at the end is the most revealing, because headers and directories are there.
EDGE = 512


def _place(data: bytes | bytearray, rng: Random) -> int:
    if not data:
        return 0
    edge = min(len(data), EDGE)
    return rng.choice([rng.randrange(len(data)), rng.randrange(edge), len(data) - 1 - rng.randrange(edge)])


def truncated(data: bytes, rng: Random) -> bytes:
    return data[: rng.choice([_place(data, rng), rng.randrange(16)])]


def flipped(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 40]) if data else 0):
        changed[_place(data, rng)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwritten(data: bytes, rng: Random) -> bytes:
    at, length = _place(data, rng), rng.choice([1, 2, 4, 8, 64, 1024])
    return data[:at] + rng.randbytes(min(length, len(data) - at)) + data[at + length :]


def zeroed(data: bytes, rng: Random) -> bytes:
    at, length = _place(data, rng), rng.choice([1, 4, 16, 256, 4096])
    fill = rng.choice([b"\0", b"\xff", b" "])
    return data[:at] + fill * min(length, len(data) - at) + data[at + length :]


def duplicated(data: bytes, rng: Random) -> bytes:
    at, length = _place(data, rng), rng.choice([1, 8, 100, 4096, len(data)])
    return data[: at + length] + data[at : at + length] * rng.choice([1, 2, 20]) + data[at + length :]


def moved(data: bytes, rng: Random) -> bytes:
    """A range of the file in the place of another one."""
    at, other, length = _place(data, rng), _place(data, rng), rng.choice([4, 16, 128, 1024])
    return data[:at] + data[other : other + length] + data[at + length :]


def deleted(data: bytes, rng: Random) -> bytes:
    at = _place(data, rng)
    return data[:at] + data[at + rng.choice([1, 2, 7, 64, 1000]) :]


def extended(data: bytes, rng: Random) -> bytes:
    return data + rng.choice([b"\0" * 100_000, rng.randbytes(3000), b"\n" * 1000, data])


def extreme_integer(data: bytes, rng: Random) -> bytes:
    """An aligned number of the file at the limit of its type."""
    size, code = rng.choice([(2, "h"), (4, "i"), (8, "q")])
    at = _place(data, rng) // size * size
    value = rng.choice(EXTREME) & (2 ** (8 * size) - 1)
    return data[:at] + struct.pack(f"{rng.choice('<>')}{code.upper()}", value) + data[at + size :]


def replaced(data: bytes, rng: Random) -> bytes:
    """Content of another format."""
    others = [
        b"",
        b"\0",
        b"\0" * 5000,
        b"PK\x03\x04" + b"\0" * 60,
        b"\x1f\x8b\x08",
        b"\x80\x02.",
        b"null",
        b"[]",
        b"{}",
        b"\n",
    ]
    others += [
        b"PK\x05\x06" + b"\xff" * 18,
        b"PAR1PAR1",
        b"\x89PNG\r\n\x1a\n",
        b"\xef\xbb\xbf",
        b"\xff\xfe{\0}\0",
        data[::-1],
    ]
    others += [gzip.compress(data[:5000]), gzip.compress(b""), rng.randbytes(2000), b"\x93NUMPY\x01\0\x76\0{"]
    return rng.choice(others)


BYTES: tuple[Callable[[bytes, Random], bytes], ...] = (
    *(truncated, truncated, flipped, flipped, flipped, overwritten, zeroed, duplicated, moved, deleted, extended),
    *(extreme_integer, extreme_integer, replaced),
)


def bytes_damage(data: bytes, rng: Random) -> bytes:
    return rng.choice(BYTES)(data, rng)


def in_gzip(inner: Callable[[bytes, Random], bytes]) -> Callable[[bytes, Random], bytes]:
    """The damage within a gzip file, whose checksum is that of the damaged content."""

    def damage(data: bytes, rng: Random) -> bytes:
        return gzip.compress(inner(gzip.decompress(data), rng), 1)

    return damage


def gzip_bomb(head: bytes, mebibytes: int) -> bytes:
    """A gzip file of `head` and zeros, of which a mebibyte takes a kilobyte."""
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = stream.compress(head) + stream.flush(zlib.Z_FULL_FLUSH)
    # After a full flush, the same input gives the same bytes: they can be repeated.
    zeros = stream.compress(bytes(2**20)) + stream.flush(zlib.Z_FULL_FLUSH)
    return b"\x1f\x8b\x08" + bytes(6) + b"\xff" + start + zeros * mebibytes + stream.flush(zlib.Z_FINISH) + bytes(8)


def gzip_tricks(data: bytes, rng: Random) -> bytes:  # noqa: PLR0911  a trick for each number
    """Bombs, several members, a wrong checksum or length, an unfinished header."""
    content = gzip.decompress(data)
    kind = rng.randrange(7)
    if kind == 0:  # behind a valid beginning, 64 MiB or 3 GiB of zeros
        return gzip_bomb(content[:352], rng.choice([64, 64, 64, 3072]))
    if kind == 1:
        return data + gzip.compress(bytes(2**22)) * 3
    if kind == 2:
        return data[:-8] + rng.randbytes(8)
    if kind == 3:  # a header with a name that does not end
        return b"\x1f\x8b\x08\x08" + b"\0" * 6 + b"n" * rng.choice([10, 100_000])
    if kind == 4:  # gzip within gzip
        return gzip.compress(data)
    if kind == 5:
        return gzip.compress(content) + b"garbage"
    return b"".join(gzip.compress(content[n : n + 1]) for n in range(min(len(content), 3000)))


# Name: (offset, struct format) of the fields of a NIfTI-1 header, little-endian.
NIFTI1 = {
    **{f"dim{n}": (40 + 2 * n, "h") for n in range(8)},
    "datatype": (70, "h"),
    "bitpix": (72, "h"),
    "slice_start": (74, "h"),
    "sizeof_hdr": (0, "i"),
    **{f"pixdim{n}": (76 + 4 * n, "f") for n in range(8)},
    "vox_offset": (108, "f"),
    "scl_slope": (112, "f"),
    "scl_inter": (116, "f"),
    "slice_end": (120, "h"),
    "xyzt_units": (123, "B"),
    "qform_code": (252, "h"),
    "sform_code": (254, "h"),
    **{f"quatern{n}": (256 + 4 * n, "f") for n in range(6)},
    **{f"srow{n}": (280 + 4 * n, "f") for n in range(12)},
    "magic": (344, "4s"),
    "extension": (348, "i"),
    "esize": (352, "i"),
}
NIFTI2 = {
    **{f"dim{n}": (16 + 8 * n, "q") for n in range(8)},
    "datatype": (12, "h"),
    "bitpix": (14, "h"),
    "sizeof_hdr": (0, "i"),
    "vox_offset": (168, "q"),
    **{f"pixdim{n}": (104 + 8 * n, "d") for n in range(8)},
    "scl_slope": (176, "d"),
    "scl_inter": (184, "d"),
    "qform_code": (344, "i"),
    "sform_code": (348, "i"),
    **{f"srow{n}": (400 + 8 * n, "d") for n in range(12)},
    "xyzt_units": (500, "i"),
    "magic": (4, "8s"),
    "extension": (540, "i"),
}
MGH = {
    "version": (0, "i"),
    "width": (4, "i"),
    "height": (8, "i"),
    "depth": (12, "i"),
    "frames": (16, "i"),
    "type": (20, "i"),
    "dof": (24, "i"),
    "ras": (28, "h"),
    **{f"geometry{n}": (30 + 4 * n, "f") for n in range(15)},
}


def header_fields(fields: dict[str, tuple[int, str]], order: str = "<") -> Callable[[bytes, Random], bytes]:
    """Sets one or several fields of a header to extreme values."""

    def damage(data: bytes, rng: Random) -> bytes:
        changed = bytearray(data)
        for name in rng.sample(sorted(fields), rng.choice([1, 1, 1, 2, 3, 8])):
            at, code = fields[name]
            changed[at : at + struct.calcsize(code)] = struct.pack(f"{order}{code}", _value(name, code, rng))
        return bytes(changed)

    return damage


def _value(name: str, code: str, rng: Random) -> Any:
    if code.endswith("s"):
        return rng.randbytes(int(code[:-1]))
    if code in "fd":
        return rng.choice([*FLOATS, rng.uniform(-1e4, 1e4)])
    if name == "datatype":
        value = rng.choice([0, 1, 2, 4, 8, 16, 32, 64, 128, 255, 256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2304, -1])
    else:
        value = rng.choice([*EXTREME, rng.randrange(-10, 2000)])
    bits = 8 * struct.calcsize(code)
    value &= 2**bits - 1
    return value if code in "BHIQ" or value < 2 ** (bits - 1) else value - 2**bits


class _Raw(str):
    """Text that stands in a JSON document as it is."""


# Documents that no writer produces; "json.dumps" cannot write most of them.
RAW_VALUES = (
    *(
        "NaN",
        "Infinity",
        "-Infinity",
        "1e400",
        "-1e400",
        "1e-400",
        "9" * 5000,
        "-" + "9" * 400,
        "1" + "0" * 299,
        "1e308",
    ),
    *('"\\ud800"', '"\\udc00\\ud800"', '"\\u0000"', '"\\u0000.nii"', '"\\u001b[31m"', "[" * 100_000, '{"a":' * 100_000),
    *(
        "[" * 90 + "]" * 90,
        '"' + "x" * 1_000_000 + '"',
        '{"a": 1, "a": 2}',
        '{"": {}}',
        "-0",
        "0.0",
        "-0.0",
        "01",
        "+1",
        ".5",
    ),
    *(
        "[1,2,",
        "'text'",
        "undefined",
        "True",
        "0x10",
        "1_000",
        '"\\x41"',
        "12345678901234567890",
        "18446744073709551616",
    ),
)
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        10**9,
        10**12,
        2**31,
        2**63,
        10**30,
        10**299,
        0.5,
        -0.5,
        1e-300,
        1e308,
        -1e308,
    ),
    *(
        "",
        " ",
        "x",
        "x" * 5000,
        "x" * 70_000,
        "../../../outside",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "\0",
        ESCAPES,
        "\u202e",
        "é" * 300,
    ),
    *(
        "1",
        "nan",
        "-inf",
        "1e400",
        "true",
        "null",
        "\ud800",
        "{}",
        "%s%n",
        "${HOME}",
        "<script>alert(1)</script>",
        "\u2028",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [{}],
        {"": ""},
        [1, "a", None],
        [0] * 1000,
        [[0] * 100] * 100,
        {"a": None},
        [-1, 2**40, 1e300],
    ),
    *([True], ["x"] * 50, {str(n): n for n in range(200)}, [1e308] * 20, [2**62, 2**62], list(range(-3, 3))),
)


def json_damage(data: bytes, rng: Random) -> bytes:
    """Changes one to three things anywhere in a document, or its text."""
    if rng.random() < 0.12:
        return bytes_damage(data, rng)
    if rng.random() < 0.02:
        return large_json(data, rng)
    raws: dict[str, str] = {}
    value = json.loads(data.decode())
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = mutated(value, rng, raws)
    text = json.dumps(value, indent=rng.choice([None, 1]))
    for mark, raw in raws.items():
        text = text.replace(f'"{mark}"', raw)
    if rng.random() < 0.04:
        text = rng.choice(
            ["\ufeff" + text, text + text, text.replace(":", " ", 1), text.replace('"', "'"), f"/* */{text}"]
        )
    return text.encode(rng.choice(["utf-8"] * 20 + ["utf-16", "utf-32"]), errors="surrogatepass")


def large_json(data: bytes, rng: Random) -> bytes:
    """A document of megabytes: very many small values, or a list or an object of the document many times longer."""
    kind = rng.randrange(6)
    if kind < 3:
        part = [b"[]", b'{"a":1}', b'""', b"0", b"{}", b'"\\u00e9"'][rng.randrange(6)]
        return b"[" + (part + b",") * (rng.choice([10**6, 2**24]) // (len(part) + 1)) + b"0]"
    value = json.loads(data.decode())
    places = [value]
    for place in places:
        children = place.values() if isinstance(place, dict) else place
        places += [child for child in children if isinstance(child, dict | list)]
    target = rng.choice(places)
    count = rng.choice([3000, 50_000])
    if isinstance(target, dict):
        pattern = next(iter(target.values()), 1)
        target |= {f"{n}": pattern for n in range(count)}
    else:
        pattern = json.dumps(target[0] if target else 1)
        if len(pattern) * count < 2**23:
            # Names and numbers that differ, because values given twice are refused early.
            target += [_numbered(json.loads(pattern), n) for n in range(count)]
    return json.dumps(value).encode()


def _numbered(value: Any, number: int) -> Any:
    if isinstance(value, dict):
        return {key: _numbered(part, number) for key, part in value.items()}
    if isinstance(value, str):
        return f"{value}{number}"
    return value + number if type(value) in (int, float) else value


def mutated(value: Any, rng: Random, raws: dict[str, str]) -> Any:  # noqa: PLR0912  a kind of change for each number
    """`value` with one thing replaced, removed, renamed, repeated or moved. `raws` collects text to insert later."""
    if isinstance(value, dict) and value and rng.random() < 0.88:
        key = rng.choice(list(value))
        changed, action = dict(value), rng.random()
        if action < 0.10:
            del changed[key]
        elif action < 0.14:
            changed[rng.choice(["", key.upper(), "x" * 3000, "\0", "__class__", ESCAPES])] = changed.pop(key)
        elif action < 0.17:
            changed["".join(rng.choices(string.ascii_letters, k=5))] = rng.choice(VALUES)
        elif action < 0.21:
            changed[key] = changed[rng.choice(list(value))]
        else:
            changed[key] = mutated(value[key], rng, raws)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        rows, action, at = list(value), rng.random(), rng.randrange(len(value))
        if action < 0.08:
            del rows[at]
        elif action < 0.14:
            rows.insert(at, rng.choice([rows[at], rng.choice(VALUES)]))
        elif action < 0.17:
            rows = rows * rng.choice([2, 50])
        elif action < 0.2:
            rng.shuffle(rows)
        else:
            rows[at] = mutated(rows[at], rng, raws)
        return rows
    if rng.random() < 0.25:
        mark = f"@raw{len(raws)}@"
        raws[mark] = rng.choice(RAW_VALUES)
        return mark
    if type(value) in (int, float) and rng.random() < 0.5:
        return rng.choice([-value, value * 1000, value + 1, value / 7, int(value) * 10**9, str(value), [value], 0])
    return rng.choice(VALUES)


def lines_damage(data: bytes, rng: Random) -> bytes:
    """A JSON object on each line: one line is damaged, repeated, or removed."""
    lines = data.splitlines()
    at = rng.randrange(len(lines))
    kind = rng.random()
    if kind < 0.1:
        return bytes_damage(data, rng)
    if kind < 0.7:
        lines[at] = json_damage(lines[at], rng)
    elif kind < 0.8:
        rng.shuffle(lines)
    else:
        lines.insert(at, rng.choice([b"", b"\0", b"{", b"[]", b"[" * 100_000, lines[at], b"x" * 10**6, b"\xff\xfe"]))
    return b"\n".join(lines) + b"\n"


def text_damage(data: bytes, rng: Random) -> bytes:
    """A cell, a word or a line of a table or text file becomes something else."""
    if rng.random() < 0.3:
        return bytes_damage(data, rng)
    if rng.random() < 0.03:
        return large_text(data, rng)
    text = data.decode("utf-8")
    separator = rng.choice(["\n", "\t", ",", ":", "=", ";", " "])
    parts = text.split(separator)
    values = [str(value) for value in VALUES if not isinstance(value, list | dict)]
    values += [
        "9" * 5000,
        "x" * 200_000,
        "\t" * 50_000,
        '"',
        "'",
        "#",
        "&a [*a]",
        "*a",
        "!!python/object/apply:os.system [id]",
        "[" * 3000,
    ]
    values += [
        "{" * 500,
        "1:" * 3000,
        "- " * 3000,
        "!!binary x",
        "!!float x",
        "? ",
        "|",
        ">",
        "---",
        "%YAML 9",
        "0o777",
        ".inf",
        "-.NaN",
        "2001-99-99",
    ]
    parts[rng.randrange(len(parts))] = rng.choice(values)
    return separator.join(parts).encode(errors="surrogatepass")


def large_text(data: bytes, rng: Random) -> bytes:
    """A table or text of up to a mebibyte: one of its lines or words many times, with other numbers."""
    lines = data.splitlines(keepends=True)
    line = rng.choice(lines).rstrip(b"\n")
    count = min(rng.choice([1000, 200_000]), (2**20 - len(data)) // (len(line) + 8))
    kind = rng.randrange(3)
    if kind == 0:
        return data + b"\n".join(b"%d\t%b%d" % (n, line, n) for n in range(1, count // 2))
    if kind == 1:
        return data + b"\n".join(line for _ in range(count))
    return data + b"x: [" + b"1," * count + b"1]\n"
