"""Damage to files that hold several parts: zip archives, safetensors and Parquet files."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile

from tests.hostile.damage import EXTREME, bytes_damage, json_damage

Random = random.Random


def archive_damage(data: bytes, rng: Random) -> bytes:
    """Tricks with a zip archive: other sizes, names, methods and flags, repeated records, bombs, a moved directory."""
    # A field of the directory or of a local header, or the records.
    return _archive_field(data, rng) if rng.random() < 0.3 else _archive_records(data, rng)


def _archive_records(data: bytes, rng: Random) -> bytes:
    kind = rng.randrange(3, 10)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    at = rng.randrange(len(records))
    name, content = records[at]
    method = zipfile.ZIP_STORED
    if kind == 3:
        records[at] = name, bytes_damage(content, rng)
    elif kind == 4:
        del records[at]
    elif kind == 5:
        evil = [
            "../../outside",
            "/etc/outside",
            "a\\..\\b",
            "",
            "x" * 60_000,
            "data.pkl",
            f"{name}/{name}",
            "\x1b[31m",
            "con",
        ]
        records[at] = rng.choice(evil), content
    elif kind == 6:  # zeros, compressed by a factor of a thousand
        records[at], method = (name, content + bytes(rng.choice([2**20, 2**26]))), rng.choice([8, 12, 14])
    elif kind == 7:
        records.insert(at, (name, rng.choice([b"", content, content * 2])))
    elif kind == 8:
        method = rng.choice([8, 12, 14])
    else:
        records += [(f"extra{n}", b"x") for n in range(rng.choice([1, 3000]))]
    return rewritten(records, method)


def rewritten(records: list[tuple[str, bytes]], method: int = zipfile.ZIP_STORED) -> bytes:
    """An archive of these records; names can be repeated."""
    import warnings

    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w", method) as archive:
        warnings.simplefilter("ignore")
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return buffer.getvalue()


def _archive_field(data: bytes, rng: Random) -> bytes:
    signature, fields = rng.choice(
        [
            (
                b"PK\x01\x02",
                [(8, "H"), (10, "H"), (16, "I"), (20, "I"), (24, "I"), (28, "H"), (30, "H"), (32, "H"), (42, "I")],
            ),
            (b"PK\x03\x04", [(6, "H"), (8, "H"), (14, "I"), (18, "I"), (22, "I"), (26, "H"), (28, "H")]),
            (b"PK\x05\x06", [(8, "H"), (10, "H"), (12, "I"), (16, "I"), (20, "H")]),
        ]
    )
    places = (
        [n for n in range(len(data)) if data.startswith(signature, n)]
        if len(data) < 2**16
        else _find_all(data, signature)
    )
    if not places:
        return bytes_damage(data, rng)
    at, (offset, code) = rng.choice(places), rng.choice(fields)
    size = struct.calcsize(code)
    value = rng.choice([*EXTREME, rng.randrange(len(data))]) & (2 ** (8 * size) - 1)
    changed = bytearray(data)
    changed[at + offset : at + offset + size] = struct.pack(f"<{code}", value)
    return bytes(changed[: max(len(data), at + offset + size)])


def _find_all(data: bytes, part: bytes) -> list[int]:
    places, at = [], data.find(part)
    while at >= 0:
        places.append(at)
        at = data.find(part, at + 1)
    return places


def safetensors_damage(data: bytes, rng: Random) -> bytes:
    """The header of a safetensors file is damaged as JSON, with its length set to match or not."""
    if rng.random() < 0.35:
        return bytes_damage(data, rng)
    length = struct.unpack("<Q", data[:8])[0]
    header, rest = data[8 : 8 + length], data[8 + length :]
    header = safetensors_header(header, rng) if rng.random() < 0.5 else json_damage(header, rng)
    stated = len(header) if rng.random() < 0.9 else rng.choice(EXTREME) & (2**64 - 1)
    return struct.pack("<Q", stated) + header + rest


def safetensors_header(header: bytes, rng: Random) -> bytes:
    """One entry of a header has another type, shape or place."""
    entries = json.loads(header)
    name = rng.choice([key for key in entries if key != "__metadata__"] or ["__metadata__"])
    entry = entries[name]
    if name == "__metadata__":
        return json_damage(header, rng)
    key = rng.choice(["dtype", "shape", "data_offsets", "data_offsets"])
    kinds = ["F64", "F16", "I8", "BOOL", "U64", "F8_E4M3", "C64", "", "x" * 1000, None, 7, ["F32"]]
    shapes = [[], [0], [2**40], [-1], [-1, -1], [2**62, 4], [1] * 40, [1.5], ["1"], None, [0, 2**60], [True]]
    start, end = entry["data_offsets"]
    offsets = [
        [end, start],
        [0, 2**50],
        [-1, end],
        [start, end + 1],
        [start + 1, end],
        [start],
        [],
        None,
        [0, 0],
        [0.5, 1],
    ]
    entry[key] = rng.choice({"dtype": kinds, "shape": shapes, "data_offsets": offsets}[key])
    return json.dumps(entries).encode()


def parquet_damage(data: bytes, rng: Random) -> bytes:
    """The footer of a Parquet file, which holds all sizes, or any bytes."""
    if rng.random() < 0.4:
        return bytes_damage(data, rng)
    length = struct.unpack("<I", data[-8:-4])[0]
    start = len(data) - 8 - length
    footer = bytearray(data[start:-8])
    for _ in range(rng.choice([1, 1, 2, 6])):
        footer[rng.randrange(len(footer))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    stated = length if rng.random() < 0.9 else rng.choice(EXTREME) & 0xFFFFFFFF
    return data[:start] + bytes(footer) + struct.pack("<I", stated) + b"PAR1"
