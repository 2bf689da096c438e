"""Bounded reading (voxtune.reading)."""

from __future__ import annotations

import gzip
import json
import os
import sys
import time

import pytest

from voxtune.errors import InputError
from voxtune.reading import (
    check_memory,
    gunzip,
    json_memory,
    parse_bytes,
    parse_json,
    read_file,
    read_head,
    read_json,
    read_text,
    reading,
    tsv_rows,
)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        '{"a": Infinity}',
        "[NaN]",
        "1e999",
        '"open',
        '"' + '\\"' * 500_000,
        "",
        "\x00",
        '{"a": 1,}',
    ],
)
def test_bad_json_is_one_short_line_at_once(text):
    started = time.monotonic()
    with pytest.raises(InputError) as caught:
        parse_json(text, "x.json")
    message = str(caught.value)
    assert message.startswith("x.json: not valid JSON")
    assert "\n" not in message
    assert len(message) < 500
    assert time.monotonic() - started < 5


def test_json_of_other_tools_is_read(tmp_path):
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5, "[[[[", null, true]}', "x") == {"a": [1, 2.5, "[[[[", None, True]}
    with pytest.raises(InputError, match="not valid JSON"):
        parse_json(b'{"a": "\xff"}', "x")
    (tmp_path / "a.json").write_text("{}")
    assert read_json(tmp_path / "a.json") == {}
    with pytest.raises(InputError, match="more than a JSON file can have"):
        read_json(tmp_path / "a.json", limit=1)


def test_only_regular_files_are_read_and_nothing_blocks(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "is a folder"),
        (tmp_path / "missing", "no such file"),
        (tmp_path / "a\0b", "null byte"),
        (tmp_path / ("n" * 300), "name too long"),
    ):
        with pytest.raises(InputError, match=reason):
            read_file(path)
        with pytest.raises(InputError, match=reason):
            read_head(path, 10)
    (tmp_path / "latin").write_bytes("é".encode("latin1"))
    with pytest.raises(InputError, match="not UTF-8"):
        read_text(tmp_path / "latin")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a\nb" * 1000),
        KeyError("x"),
        MemoryError(),
        RecursionError("deep"),
        OverflowError(),
        OSError("odd"),
        OSError(5, "I/O"),
    ],
)
def test_whatever_a_library_raises_becomes_one_line(error):
    with pytest.raises(InputError) as caught, reading("file.nii", "NIfTI file", fix="export it again"):
        raise error
    assert str(caught.value).startswith("file.nii: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_interruption_is_no_damaged_file():
    with pytest.raises(KeyboardInterrupt), reading("file"):
        raise KeyboardInterrupt


def test_memory_follows_the_size_of_the_file(monkeypatch):
    check_memory("x", 2**30, 100)
    check_memory("x", 15 * 2**30, 2**30)
    with pytest.raises(InputError, match=r"voxtune --read-limit 3GiB"):
        check_memory("x", 2 * 2**30, 100)
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "4 GB")
    check_memory("x", 2 * 2**30, 100)
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "much")
    with pytest.raises(InputError, match="expected a size such as 4GB"):
        check_memory("x", 1, 1)


def held(value) -> int:
    """The bytes of a value of a JSON document in memory."""
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sys.getsizeof(value) + sum(held(part) for part in parts)


@pytest.mark.parametrize(
    "part", ["[]", "{}", '{"a":1}', '"é€"', "1.5", "12345678901", "[[1]]", '{"a":[],"b":{"c":""}}']
)
def test_the_memory_of_a_document_is_known_before_it_is_parsed(part, monkeypatch):
    text = f"[{','.join([part] * 1000)}]"
    assert held(json.loads(text)) <= json_memory(text) <= 8 * held(json.loads(text)) + 1000
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "1KB")
    with pytest.raises(InputError, match=r"x\.json: .* --read-limit"):
        parse_json("[" + "[]," * 1000 + "0]", "x.json")


def test_a_compressed_document_is_compared_with_the_compressed_size(monkeypatch, tmp_path):
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "1KB")
    text = '"' + "x" * 5000 + '"'
    assert parse_json(text, "x") == "x" * 5000
    with pytest.raises(InputError, match="--read-limit"):
        parse_json(text, "x", file_bytes=100)
    (tmp_path / "x.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(InputError, match="--read-limit"):
        gunzip(tmp_path / "x.gz")


def test_sizes():
    assert parse_bytes("1.5 GiB", "x") == 3 * 2**29
    assert parse_bytes("512mb", "x") == 512_000_000
    for bad in ("", "0", "-1GB", "1e9", "9" * 400, "GB", "1TBs"):
        with pytest.raises(InputError, match="expected a size"):
            parse_bytes(bad, "x")


def test_tables(tmp_path):
    assert tsv_rows("index\tname\n1\tbrain\n\n2\n") == [
        {"index": "1", "name": "brain"},
        {"index": "2", "name": ""},
    ]
    assert tsv_rows("") == []
    for bad in ("a\n1\t2\n", "a\n" + "x" * 200_000 + "\n"):
        with pytest.raises(InputError, match="line 2"):
            tsv_rows(bad)
