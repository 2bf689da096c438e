"""Files of tensors: PyTorch checkpoints and safetensors, read without executing or trusting anything in them; safetensors
are also written.

Sizes in a file are compared with the bytes present and with the memory limit before a tensor is made.
"""

from __future__ import annotations

import json
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from voxtune.errors import InputError
from voxtune.reading import (
    MAX_JSON_BYTES,
    check_memory,
    file_size,
    opening,
    opening_zip,
    parse_json,
    read_head,
    read_into,
)
from voxtune.unpickle import Interpreter, StandIn

if TYPE_CHECKING:
    from torch import Tensor, dtype

# What torch writes in front of the pickle of a checkpoint, in the format that it used before version 1.6.
OLD_MAGIC, OLD_VERSION, OLD_PICKLES = 0x1950A86A20F9469CFC6C, 1001, 5
# The pickle of a checkpoint holds names and shapes only.
MAX_PICKLE_BYTES = 64 * 2**20
MAX_DIMENSIONS = 16
STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
SAFETENSORS_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}


@dataclass(frozen=True)
class StorageType:
    """The type of a storage in a pickle."""

    type: dtype


@dataclass(frozen=True)
class Storage:
    """The numbers of one or more tensors, one-dimensional."""

    numbers: Tensor


@dataclass
class _Checkpoint:
    """The bytes of the storages by key, of which it makes tensors; `needed` is the sum of their bytes."""

    path: Path
    size: int
    raw: dict[str, Tensor] = field(default_factory=dict)
    needed: int = 0

    def names(self) -> dict[tuple[str, str], Any]:
        """What the pickle may name."""
        import torch

        return {
            ("collections", "OrderedDict"): _ordered,
            ("torch", "Size"): _size,
            ("_codecs", "encode"): StandIn,  # bytes, as Python 3 writes them at protocol 2
            ("torch._utils", "_rebuild_tensor_v2"): self.tensor,
            ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
            **{("torch", name): StorageType(getattr(torch, kind)) for name, kind in STORAGES.items()},
            **{("torch", kind): getattr(torch, kind) for kind in STORAGES.values()},
        }

    def tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
        """A view of the storage, which must lie within it and be no larger than it."""
        if not isinstance(storage, Storage):
            raise TypeError("a tensor without a storage")
        if not (_whole(shape) and _whole(stride) and _whole((offset,)) and len(shape) == len(stride)):
            raise ValueError("a tensor with an invalid shape")
        stored, count = storage.numbers.numel(), math.prod(shape)
        end = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) + 1 if count else offset
        if count > stored or end > stored:
            raise ValueError(f"a tensor of {count} numbers in {stored} stored ones")
        self.needed += count * storage.numbers.itemsize
        check_memory(self.path, self.needed, self.size)
        return storage.numbers.as_strided(shape, stride, offset)


def _whole(numbers: Any) -> bool:
    return (
        isinstance(numbers, tuple)
        and len(numbers) <= MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n < 2**48 for n in numbers)
    )


def _ordered(*arguments: Any) -> dict[Any, Any]:
    if arguments:
        raise InputError("this checkpoint was written by Python 2; load it with torch.load and save it again")
    return {}


def _size(shape: Any) -> Any:
    if not isinstance(shape, tuple):
        raise TypeError("a size that is not a tuple")
    return shape


def read_torch(path: Path) -> Any:
    """The object in a file of torch.save, with tensors on the CPU; plain containers, numbers and text only."""
    if read_head(path, 2) == b"PK":
        with opening_zip(path, "checkpoint") as archive:
            return _read_archive(path, archive)
    with opening(path, "checkpoint") as file:
        return _read_old(path, file)


def _read_archive(path: Path, archive: zipfile.ZipFile) -> Any:
    records = {record.filename: record for record in archive.infolist()}
    if any(record.compress_type != zipfile.ZIP_STORED for record in records.values()):
        raise InputError(f"{path}: contains compressed records, which torch does not write; not a checkpoint")
    if any(record.file_size != record.compress_size for record in records.values()):
        raise ValueError("a record with two sizes")
    pickles = [name for name in records if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1 or records[pickles[0]].file_size > MAX_PICKLE_BYTES:
        raise InputError(f"{path}: not a checkpoint of torch.save (no data.pkl, or a very large one, in the archive)")
    folder = pickles[0].removesuffix("data.pkl")
    order = records.get(f"{folder}byteorder")
    if order is not None and archive.read(order) != b"little":
        raise InputError(f"{path}: was saved on a big-endian machine; load it there and save it as safetensors")
    checkpoint = _Checkpoint(path, path.stat().st_size)

    def stored(identity: Any) -> Storage:
        kind, key, _ = _identity(identity)
        if key not in checkpoint.raw:
            record = records[f"{folder}data/{key}"]
            with archive.open(record) as stream:
                checkpoint.raw[key] = _read_bytes(stream, record.file_size)
        return Storage(checkpoint.raw[key].view(kind))

    return Interpreter(checkpoint.names(), stored).run(archive.read(pickles[0]))[0]


def _identity(identity: Any) -> tuple[dtype, str, int]:
    """(type, key, count of numbers) of a storage that a pickle refers to."""
    name, kind, key, _, count, *view = identity
    if name != "storage" or not isinstance(kind, StorageType) or not isinstance(key, str) or not _whole((count,)):
        raise ValueError("data that is not a storage of numbers")
    if any(part is not None for part in view):
        raise InputError("has views of storages, which are not supported; load it with torch.load and save it again")
    return kind.type, key, count


def _read_bytes(stream: IO[bytes], size: int) -> Tensor:
    """`size` bytes of a stream; the caller has compared `size` with the bytes present."""
    import torch

    raw = torch.empty(size, dtype=torch.uint8)
    read_into(stream, raw.numpy().data)
    return raw


def _read_old(path: Path, file: BufferedReader) -> Any:
    """The format before torch 1.6: five pickles (magic number, version, system, object, keys), then the storages."""
    checkpoint, size = _Checkpoint(path, file_size(file)), file_size(file)
    bytes_of: dict[str, int] = {}

    def empty(identity: Any) -> Storage:
        kind, key, count = _identity(identity)
        bytes_of[key] = count * kind.itemsize
        return Storage(_no_numbers(kind))

    # The storages follow the pickles, so the object is first interpreted without them, for their types.
    head = file.read(MAX_PICKLE_BYTES)
    names = {**checkpoint.names(), ("torch._utils", "_rebuild_tensor_v2"): lambda *_: None}
    values, starts = [], [0]
    for number in range(OLD_PICKLES):
        value, length = Interpreter(names, empty).run(head[starts[-1] :])
        values.append(value)
        starts.append(starts[-1] + length)
        if number == 1 and values != [OLD_MAGIC, OLD_VERSION]:
            raise InputError(f"{path}: not a PyTorch checkpoint (a pickle of another program)")
    file.seek(starts[-1])
    for key in values[-1]:
        if not isinstance(key, str):
            raise TypeError("a key of a storage that is not text")
        count = struct.unpack("<q", file.read(8))[0]
        if bytes_of[key] > size - file.tell():
            raise EOFError(f"a storage of {count} numbers")
        checkpoint.raw[key] = _read_bytes(file, bytes_of[key])

    def stored(identity: Any) -> Storage:
        kind, key, _ = _identity(identity)
        return Storage(checkpoint.raw[key].view(kind))

    return Interpreter(checkpoint.names(), stored).run(head[starts[3] :])[0]


def _no_numbers(kind: dtype) -> Tensor:
    import torch

    return torch.empty(0, dtype=kind)


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file."""
    with opening(path, "safetensors file") as file:
        size = file_size(file)
        length = struct.unpack("<Q", file.read(8))[0]
        if length > min(size - 8, MAX_JSON_BYTES):
            raise ValueError(f"a header of {length} bytes")
        header = parse_json(file.read(length), path)
        metadata = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("metadata that is not text")
        places = sorted((_place(name, entry) for name, entry in header.items()), key=lambda place: place.start)
        # As the format requires, the tensors fill the file without gaps; so their sum is the size of the file.
        ends = [0, *(place.end for place in places)]
        if [place.start for place in places] != ends[:-1] or ends[-1] != size - 8 - length:
            raise ValueError("tensors that do not fill the file")
        tensors = {p.name: _read_bytes(file, p.end - p.start).view(p.type).reshape(p.shape) for p in places}
        return {name: tensors[name] for name in header}, metadata


@dataclass(frozen=True, kw_only=True)
class _Place:
    name: str
    type: dtype
    shape: tuple[int, ...]
    start: int
    end: int


def save_safetensors(part: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a safetensors file to `part`, the temporary file of `voxtune.files.writing`, one tensor after the other.

    The library's own writer makes a temporary file of another name, which a killed process leaves behind for ever.
    """
    import torch

    types = {getattr(torch, kind): name for name, kind in SAFETENSORS_TYPES.items()}
    # The largest numbers first, so that all are aligned; then by name, so that the same tensors give the same bytes.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, types[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": types[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with part.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            numbers: Any = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            file.write(numbers)


def _place(name: str, entry: Any) -> _Place:
    import torch

    if entry["dtype"] not in SAFETENSORS_TYPES:
        raise InputError(f"tensor {name[:80]!r} has the type {str(entry['dtype'])[:20]}, which is not supported")
    kind = getattr(torch, SAFETENSORS_TYPES[entry["dtype"]])
    shape, (start, end) = tuple(entry["shape"]), entry["data_offsets"]
    if not _whole(shape) or not _whole((start, end)) or math.prod(shape) * kind.itemsize != end - start:
        raise ValueError(f"tensor {name[:80]!r} of {shape} in {end - start} bytes")
    return _Place(name=name, type=kind, shape=shape, start=start, end=end)
