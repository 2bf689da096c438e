"""Hostile pickles: nothing is executed, and anything but plain data is rejected."""

from __future__ import annotations

import os
import pickle
import random
import struct
import time

import numpy as np
import pytest

from tests.factories.cifar import pictures, published_pickle
from voxtune.data.cifar import read_batch
from voxtune.data.unpickle import NAMES, StoredArray, stored_array
from voxtune.errors import InputError
from voxtune.reading import reading
from voxtune.unpickle import Interpreter


def unpickle(data: bytes):
    with reading("x", "pickle"):
        return Interpreter(NAMES).run(data)[0]


class Runs:
    """Calls a function when it is unpickled by Python's own unpickler."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def hostile(path: str) -> dict[str, bytes]:
    touch = f"touch {path}".encode()
    text = struct.pack("<B", len(touch)) + touch
    return {
        **{f"system-{p}": pickle.dumps({"data": Runs(os.system, touch.decode())}, p) for p in range(6)},
        "open": pickle.dumps(Runs(open, path, "w"), 4),
        "eval": pickle.dumps(Runs(eval, f"open({path!r}, 'w')"), 4),
        "getattr": b"\x80\x02cbuiltins\ngetattr\ncbuiltins\n__import__\nU\x02os\x85RU\x06system\x86RU"
        + text
        + b"\x85R.",
        "inst": b"(S'touch " + path.encode() + b"'\nios\nsystem\n.",
        "obj": b"(cos\nsystem\nU" + text + b"o.",
        "newobj": b"\x80\x02cos\nsystem\nU" + text + b"\x85\x81.",
        "stack-global": b"\x80\x04\x8c\x02os\x8c\x06system\x93U" + text + b"\x85R.",
        "extension": b"\x80\x02\x82\x01U" + text + b"\x85R.",
        "persistent": b"\x80\x02U\x01xQ.",
        "numpy-load": b"\x80\x02cnumpy\nload\nU" + text + b"\x85R.",
        "dotted": b"\x80\x04\x8c\x05numpy\x8c\x10ndarray.__init__\x93U" + text + b"\x85R.",
        "codecs": b"\x80\x02c_codecs\ndecode\nU" + text + b"\x85R.",
    }


@pytest.mark.parametrize("name", hostile("x"))
def test_nothing_is_executed(tmp_path, name):
    mark = tmp_path / "executed"
    (tmp_path / "data_batch_1").write_bytes(hostile(str(mark))[name])
    with pytest.raises(InputError, match=r"data_batch_1: this pickle .* nothing was executed"):
        read_batch(tmp_path / "data_batch_1")
    assert not mark.exists()


def test_python_itself_executes_them(tmp_path):
    """A check of the test above."""
    mark = tmp_path / "executed"
    pickle.loads(hostile(str(mark))["system-2"])
    assert mark.exists()


def test_stand_ins_cannot_be_changed():
    """BUILD sets attributes of any object on the stack, also of a class."""
    before = dict(vars(StoredArray))
    for state in (b"}U\x05stateK\x01s", b"N}U\x0c__setstate__K\x01s\x86"):
        with pytest.raises(InputError):
            unpickle(b"\x80\x02cnumpy\nndarray\n" + state + b"b.")
    assert dict(vars(StoredArray)) == before


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"K\x01s.",  # a tuple 200,000 deep as a key
        b"\x80\x05\x8e" + struct.pack("<Q", 2**62) + b"x.",  # missing bytes
        b"\x80\x02T" + struct.pack("<i", 2**31 - 1) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 2**63) + b".",
        b"\x80\x02" + b"(" * 100_000 + b".",
        b"\x80\x02" + b"]" * 1000,
        b"\x80\x02" + b"]" * 2**23,  # half a gigabyte of empty lists
        b"\x80\x02I" + b"9" * 100_000 + b"\n.",
        b"\x80\x02h\x05.",
        b"\x80\xff.",
    ],
)
def test_small_files_that_require_much_memory_are_rejected_at_once(content):
    began = time.thread_time()
    with pytest.raises(InputError, match="pickle"):
        unpickle(content)
    assert time.thread_time() - began < 6  # of seconds on a busy machine; it would take hours


def test_a_memo_takes_memory_for_its_entries_only():
    assert unpickle(b"\x80\x02]r\xff\xff\xff\x7f.") == []  # entry number two thousand million


def test_values_that_cannot_be_keys_are_refused():
    """The hash of a tuple of tuples of tuples ... takes for ever, although each has two members."""
    with pytest.raises(InputError, match="a key of type tuple"):
        unpickle(b"\x80\x02)q\x01" + b"h\x01h\x01\x86q\x01" * 60 + b"}h\x01K\x01s.")


@pytest.mark.parametrize(
    "state",
    [
        (1, (2, 3), np.dtype("u1"), False, b"12345"),
        (1, (2**31 - 1, 2**31 - 1), np.dtype("u1"), False, b"123456"),
        (1, (-2, -3), np.dtype("u1"), False, b"123456"),
        (1, (2, "3"), np.dtype("u1"), False, b"123456"),
        (1, (True, 6), np.dtype("u1"), False, b"123456"),
        (1, [2, 3], np.dtype("u1"), False, b"123456"),
        (1, (2, 3), "u1", False, b"123456"),
        (1, (2, 3), np.dtype("u1"), False, "12345\u2026"),
        (1, (2, 3), np.dtype("u1"), False, [1, 2, 3, 4, 5, 6]),
        (1, (2, 3), np.dtype("u2"), False, b"123456"),
        (1, (2, 3)),
        None,
    ],
)
def test_arrays_with_inconsistent_state_are_rejected(state):
    class Lying:
        def __reduce__(self):
            return (np.array(0).__reduce__()[0], (np.ndarray, (0,), b"b"), state)

    value = unpickle(pickle.dumps(Lying(), 4))
    with pytest.raises(InputError, match=r"^x "):
        stored_array(value, "x")


def test_damaged_batches_are_read_or_rejected(tmp_path):
    good = published_pickle(*pictures(2))
    # Except in the pixels, where every byte is valid.
    structure = [i for i in range(len(good)) if i < 330 or i > len(good) - 80]
    path = tmp_path / "data_batch_1"
    outcomes = []
    for seed in range(300):
        chance = random.Random(seed)
        data = bytearray(good)
        for _ in range(chance.randint(1, 3)):
            at = chance.choice(structure)
            data[at] = chance.randrange(256)
        path.write_bytes(data[: chance.randrange(len(data))] if seed % 5 == 0 else data)
        try:
            assert read_batch(path).images_NCHW.shape[1:] == (3, 32, 32)
            outcomes.append(True)
        except InputError as error:
            assert len(str(error)) < 800
            outcomes.append(False)
    assert 0 < sum(outcomes) < 300
