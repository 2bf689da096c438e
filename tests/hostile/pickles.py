"""Hostile pickles: programs that run commands, allocate, recurse or refer to what is not there; alone and in checkpoints.

A program that is executed leaves a file `executed` in the current folder.
"""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from collections.abc import Callable

from tests.hostile.archives import rewritten
from tests.hostile.damage import bytes_damage

Random = random.Random
TOUCH = b"touch executed"


def _number(value: int) -> bytes:
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def _text(text: str) -> bytes:
    raw = text.encode(errors="surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def call(module: str, name: str, *arguments: bytes) -> bytes:
    return f"c{module}\n{name}\n(".encode() + b"".join(arguments) + b"tR"


def storage(kind: str = "FloatStorage", key: str = "0", count: int = 16, device: str = "cpu") -> bytes:
    return b"(" + _text("storage") + f"ctorch\n{kind}\n".encode() + _text(key) + _text(device) + _number(count) + b"tQ"


def tensor(offset: int, shape: tuple[int, ...], stride: tuple[int, ...], source: bytes | None = None) -> bytes:
    sizes = [b"(" + b"".join(map(_number, numbers)) + b"t" for numbers in (shape, stride)]
    empty = b"ccollections\nOrderedDict\n)R"
    return call("torch._utils", "_rebuild_tensor_v2", source or storage(), _number(offset), *sizes, b"\x89", empty)


def commands(rng: Random) -> bytes:
    """Calls of functions that must never be called."""
    touch = _text(TOUCH.decode())
    return rng.choice(
        [
            call("os", "system", touch),
            call("posix", "system", touch),
            call("builtins", "eval", _text("open('executed', 'w')")),
            call("builtins", "exec", _text("open('executed', 'w')")),
            call("builtins", "open", _text("executed"), _text("w")),
            call("subprocess", "Popen", b"]" + _text("touch") + b"a" + _text("executed") + b"a"),
            call("torch.serialization", "load", _text("executed")),
            call("torch.hub", "load", _text("x"), _text("y")),
            call("numpy", "save", _text("executed"), _number(1)),
            call("pathlib", "PosixPath.touch", _text("executed")),
            b"\x8c\x02os\x8c\x06system\x93" + touch + b"\x85R",
            b"cos\nsystem\n" + touch + b"\x85R",
            b"(cos\nsystem\n" + touch + b"o",
            b"(" + touch + b"ios\nsystem\n",
            call("builtins", "getattr", b"cos\nsystem\n", _text("__call__")),
            call("torch._utils", "_rebuild_tensor_v2", b"cos\nsystem\n", touch),
            call("functools", "partial", b"cos\nsystem\n", touch),
            b"ccollections\nOrderedDict\n)R(" + _text("__reduce__") + b"cos\nsystem\n" + b"ub",
        ]
    )


def allocations(rng: Random) -> bytes:
    """Gigabytes from a few bytes."""
    size = rng.choice([2**31 - 1, 2**33, 2**40])
    repeated = b"]q\x00" + b"(" + b"h\x00" * 50 + b"e" * 1
    doubled = b"X\x10\x00\x00\x00" + b"x" * 16 + b"q\x00" + b"".join(b"(h%ch%cl" % (n % 250, n % 250) for n in range(3))
    return rng.choice(
        [
            call("builtins", "bytearray", _number(size)),
            call("builtins", "range", _number(size)),
            call("numpy", "zeros", _number(size)),
            call("torch", "zeros", _number(size)),
            b"\x8e" + struct.pack("<Q", size) + b"abc",
            b"B" + struct.pack("<I", 2**32 - 1) + b"abc",
            b"X" + struct.pack("<I", 2**31) + b"abc",
            b"\x96" + struct.pack("<Q", 2**33) + b"abc",
            b"\x8b" + struct.pack("<i", 2**31 - 1) + b"\x01" * 100,
            b"\x8a\xff" + b"\x7f" * 255,
            b"Nr" + struct.pack("<I", 2**32 - 1),
            b"Nr" + struct.pack("<I", 2**31) + b"0j" + struct.pack("<I", 2**31),
            b"N\x94" * 300_000,
            b"]" * 500_000,
            b"(" * 500_000 + b"t" * 500_000,
            b")" + b"\x85" * 500_000,
            b"N" + b"2" * 500_000,
            b"I" + b"9" * 100_000 + b"\n",
            b"L" + b"9" * 100_000 + b"L\n",
            b"F" + b"9" * 100_000 + b"\n",
            repeated,
            doubled,
            b"\x95" + struct.pack("<Q", 2**40) + b"N",
            _tuples(30),
            _tuples(200) + b"N" + b"\x86q\x01}h\x01Ns",
            b"}" + _tuples(60) + b"Ns",
            b"]q\x00h\x00a",
            b"}q\x00(" + _text("a") + b"h\x00u",
        ]
    )


def _tuples(depth: int) -> bytes:
    """A tuple of two equal tuples of two equal tuples: it prints, and hashes, in time that doubles with every level."""
    return b")q\x00" + b"".join(b"h%ch%c\x86q%c" % (n % 250, n % 250, (n + 1) % 250) for n in range(depth))


def tensors(rng: Random) -> bytes:
    """Tensors that do not lie in their storage, or claim more memory than it has."""
    big = rng.choice([2**31, 2**40, 2**47, 2**62])
    return rng.choice(
        [
            tensor(0, (big,), (0,)),
            tensor(0, (big, big), (0, 0)),
            tensor(0, (17,), (1,)),
            tensor(big, (1,), (1,)),
            tensor(-1, (4,), (1,)),
            tensor(0, (4,), (-1,)),
            tensor(0, (-4,), (1,)),
            tensor(0, (0, big), (1, 1)),
            tensor(0, (1,) * 200, (1,) * 200),
            tensor(0, (2, 2), (1,)),
            tensor(0, (16,), (1,), storage(count=big)),
            tensor(0, (16,), (1,), storage(count=-1)),
            tensor(0, (16,), (1,), storage(key="../../outside")),
            tensor(0, (16,), (1,), storage(key="9" * 5000)),
            tensor(0, (16,), (1,), storage(kind="ComplexFloatStorage")),
            tensor(0, (16,), (1,), storage(kind="DoubleStorage")),
            tensor(0, (16,), (1,), storage(device="cuda:9" + "9" * 3000)),
            tensor(0, (16,), (1,), b"N"),
            call("torch._utils", "_rebuild_parameter", b"N", b"\x88", b"N"),
            call("torch", "Size", _number(2**62)),
            call("torch._utils", "_rebuild_sparse_tensor", b"N"),
            b"(" + b"".join(tensor(0, (16,), (0,)) for _ in range(500)) + b"l",
            b"N" * 1000 + tensor(0, (4, 4), (4, 1)),
        ]
    )


def broken(rng: Random) -> bytes:
    """Programs that are not valid: missing values, unknown opcodes, surprising types."""
    return rng.choice(
        [
            *(
                b"",
                b"R",
                b"t",
                b"e",
                b"u",
                b"b",
                b"Q",
                b"0",
                b"1",
                b"h\x05",
                b"\x93",
                b"N)R",
                b"(",
                b"}Ns",
                b"]}s",
                b"N\x85b",
            ),
            *(
                b"\x82\x01",
                b"\x83\xff\xff",
                b"\x84\xff\xff\xff\x7f",
                b"\x97",
                b"\x98",
                b"\x92",
                b"\x81",
                b"\x8f",
                b"\x91",
            ),
            *(
                b"P1\n",
                b"S'\n",
                b'S"x\n',
                b"Vx\\ud800\n",
                b"X\x03\x00\x00\x00\xed\xa0\x80",
                b"X\x02\x00\x00\x00\xff\xff",
            ),
            *(
                b"c\n\n",
                b"cx\xff\nsystem\n",
                b"c" + b"x" * 100_000 + b"\ny\n",
                _text("\0" * 100),
                b"}(]Nu",
                b"}(}Nu",
                b"}(" + tensor(0, (4,), (1,)) + b"Nu",
            ),
            rng.randbytes(rng.randrange(200)),
        ]
    )


PROGRAMS: tuple[Callable[[Random], bytes], ...] = (commands, allocations, tensors, broken)


def program(rng: Random) -> bytes:
    """A pickle, alone or as the value of a key that checkpoints and batches have."""
    body = rng.choice(PROGRAMS)(rng)
    key = rng.choice(["ema", "model", "state_dict", "data", "labels", "betas", "denoise_fn.x"])
    wrapped = b"}" + _text(key) + body + b"s" if rng.random() < 0.5 else body
    return (
        rng.choice([b"\x80\x02", b"\x80\x02", b"\x80\x04", b"\x80\x05", b""])
        + wrapped
        + rng.choice([b".", b".", b".", b""])
    )


def hostile_pickle(_data: bytes, rng: Random) -> bytes:
    return program(rng)


def hostile_checkpoint(_data: bytes, rng: Random) -> bytes:
    """An archive as torch.save writes it, around a hostile program."""
    records = [("x/data.pkl", program(rng)), ("x/data/0", bytes(64)), ("x/version", b"3\n")]
    if rng.random() < 0.3:
        records.insert(1, ("x/byteorder", rng.choice([b"little", b"big", b"", b"\xff"])))
    return rewritten(records, rng.choice([zipfile.ZIP_STORED] * 5 + [zipfile.ZIP_DEFLATED]))


def damaged_program(data: bytes, rng: Random) -> bytes:
    """A valid checkpoint whose pickle is damaged; its archive and the checksums are valid."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    return rewritten([(n, bytes_damage(c, rng) if n.endswith("data.pkl") else c) for n, c in records])


def hostile_old_checkpoint(_data: bytes, rng: Random) -> bytes:
    """The format before torch 1.6, with a hostile program as one of its five pickles."""
    magic, version, system = (pickle.dumps(v, 2) for v in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
    keys = pickle.dumps(rng.choice([["0"], [], "0", ["0"] * 1000, [None], {"0": 1}, ["../x"]]), 2)
    parts = [magic, version, system, program(rng), keys]
    if rng.random() < 0.3:
        parts[rng.randrange(5)] = program(rng)
    return b"".join(parts) + struct.pack("<q", rng.choice([16, -1, 2**40, 0])) + bytes(rng.choice([0, 63, 64, 1000]))
