"""Files of tensors (voxtune.tensorfiles): equal to what torch and safetensors read, and nothing is taken on trust."""

from __future__ import annotations

import collections
import json
import math
import pickle
import random
import struct
import zipfile

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.factories import GOLDENS
from voxtune.errors import InputError
from voxtune.tensorfiles import read_safetensors, read_torch, save_safetensors

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


def same(a, b) -> bool:
    if isinstance(b, torch.Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        return equal and torch.equal(a.nan_to_num(7), b.detach().nan_to_num(7))
    if isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in b)
    if isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def checkpoints() -> dict[str, object]:
    base = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.Linear(3, 5))
    optimizer = torch.optim.Adam(network.parameters())
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "types": {str(kind): base.to(kind) for kind in (*TYPES, *WHOLE)},
        "views": {"t": base.t(), "part": base[1:3, ::2], "row": base[2], "all": base, "again": base},
        "layout": torch.randn(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d),
        "empty": {"none": torch.zeros(0, 3), "scalar": torch.tensor(3.5), "nan": torch.tensor([math.nan, math.inf])},
        "run": {"step": 7, "model": network.state_dict(), "ema": network.state_dict(), "opt": optimizer.state_dict()},
        "parameter": {"w": nn.Parameter(base), "size": torch.Size([1, 2]), "dtype": torch.bfloat16},
        "plain": {"a": [1, -5, 2**40, -(2**70), 1.5, True, None, "é", (1, (2,))], 3: {}, None: []},
        "ordered": collections.OrderedDict(a=base),
    }


@pytest.mark.parametrize("old", [False, True], ids=["zip", "before-1.6"])
@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", checkpoints())
def test_as_torch_reads_it(tmp_path, name, protocol, old):
    torch.manual_seed(0)
    path = tmp_path / "x.pt"
    content = checkpoints()[name]
    torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=not old)
    # torch's own restricted reader knows protocol 2 only.
    assert same(read_torch(path), torch.load(path, weights_only=protocol == 2))


def test_bytes_do_not_prevent_reading(tmp_path):
    torch.save({"rng": b"abc", "w": torch.ones(2)}, tmp_path / "x.pt")
    assert read_torch(tmp_path / "x.pt")["w"].tolist() == [1, 1]


def test_the_published_checkpoint():
    path = GOLDENS / "med_ddpm_tiny.pt"
    assert same(read_torch(path), torch.load(path, weights_only=True))


def test_tensors_that_share_a_storage_share_memory(tmp_path):
    big = torch.zeros(1000, 1000)
    torch.save({f"w{n}": big for n in range(50)}, tmp_path / "x.pt")
    content = read_torch(tmp_path / "x.pt")
    assert len({tensor.data_ptr() for tensor in content.values()}) == 1


def sparse() -> torch.Tensor:
    return torch.eye(3).to_sparse()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        sparse,
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.zeros(3, device="meta"),
        lambda: torch.zeros(3).to(torch.float8_e4m3fn),
        lambda: torch.zeros(3, dtype=torch.complex64),
        lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        lambda: nn.Linear(2, 2),
        lambda: collections.Counter("aa"),
        lambda: {1, 2},
        lambda: bytearray(10),
    ],
)
def test_other_objects_are_refused_in_one_line(tmp_path, make):
    torch.save({"ema": make()}, tmp_path / "x.pt")
    with pytest.raises(InputError, match=r"x\.pt: this pickle .* not allowed; nothing was executed"):
        read_torch(tmp_path / "x.pt")


def archive(path, program: bytes, storages: dict[str, bytes] | None = None) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data.pkl", program)
        for key, data in (storages or {}).items():
            file.writestr(f"x/data/{key}", data)


def stored(key: str = "0", count: int = 16) -> bytes:
    text = f"(U\x07storagectorch\nFloatStorage\nU{chr(len(key))}{key}U\x03cpuJ"
    return text.encode() + struct.pack("<i", count) + b"tQ"


def tensor(offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    def number(value: int) -> bytes:
        return b"\x8a\x08" + struct.pack("<q", value)

    sizes = [b"(" + b"".join(map(number, numbers)) + b"t" for numbers in (shape, stride)]
    end = b"\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored() + number(offset) + b"".join(sizes) + end


@pytest.mark.parametrize(
    "wrong",
    [
        (0, (17,), (1,)),
        (1, (16,), (1,)),
        (-1, (4,), (1,)),
        (0, (4,), (-1,)),
        (0, (2**40,), (0,)),
        (0, (4, 4), (1,)),
        (0, (4, 4), (4, 5)),
        (0, (0, 2**50, 2**50), (1, 1, 1)),
        (0, (2**47, 2**47), (0, 0)),
        (2**60, (1,), (1,)),
        (0, (1,) * 40, (1,) * 40),
    ],
)
def test_a_tensor_outside_its_storage_is_refused(tmp_path, wrong):
    path = tmp_path / "x.pt"
    archive(path, b"\x80\x02" + tensor(4, (3, 4), (4, 1)) + b".", {"0": bytes(64)})
    assert read_torch(path).shape == (3, 4)
    archive(path, b"\x80\x02" + tensor(*wrong) + b".", {"0": bytes(64)})
    with pytest.raises(InputError, match=r"x\.pt: damaged or truncated checkpoint"):
        read_torch(path)


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x40\x01\x85R.",  # 5 GB from 30 bytes
        b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.",
        b"ctorch\nSize\n(" + b"K\x01" * 1000 + b"tq\x00\x85q\x01R" + b"ctorch\nSize\nh\x01R" * 1000 + b"]R.",
        b"ctorch._utils\n_rebuild_parameter\n(" + b"N" * 1000 + b"tR.",
        b"\x8a\xff" + b"\x7f" * 255 + b".",
        b"]]\x93.",
        b"U\x01aQ.",
        b"(U\x07storageNU\x010NNtQ.",
        b"ctorch\nFloatStorage\n)R.",
        b"ccollections\nOrderedDict\n]\x85R.",
        b"ctorch\nfloat32\n}b.",
        b"",
    ],
)
def test_hostile_pickles_are_refused(tmp_path, program):
    path = tmp_path / "x.pt"
    for content in (program, b"\x80\x02" + program):
        archive(path, content)
        with pytest.raises(InputError, match=r"x\.pt: "):
            read_torch(path)
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"x\.pt: "):
            read_torch(path)


def test_many_views_of_one_storage_are_counted(tmp_path, monkeypatch):
    """A copy of each would need memory that the file does not have."""
    path, size = tmp_path / "x.pt", 2**18
    torch.save({f"w{n}": torch.zeros(1) for n in range(3)}, path)
    data = torch.zeros(size)
    torch.save({f"w{n}": data.view(512, -1) for n in range(40)}, path)
    assert len(read_torch(path)) == 40
    monkeypatch.setenv("VOXTUNE_READ_LIMIT", "4MiB")
    with pytest.raises(InputError, match="--read-limit"):
        read_torch(path)


def damaged(good: bytes, seed: int) -> bytes:
    chance, data = random.Random(seed), bytearray(good)
    if seed % 4 == 0:
        return bytes(data[: chance.randrange(len(data))])
    for _ in range(chance.randint(1, 4)):
        # Mostly in the structure: the beginning and the end.
        place = chance.choice([chance.randrange(len(data)), chance.randrange(3000), -1 - chance.randrange(2000)])
        data[place % len(data)] = chance.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("kind", ["zip", "old", "safetensors"])
def test_damaged_files_are_read_or_refused(tmp_path, kind):
    path, state = tmp_path / "x", nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4)).state_dict()
    if kind == "safetensors":
        save_file(state, path, metadata={"format": "pt"})
    else:
        torch.save({"ema": state}, path, _use_new_zipfile_serialization=kind == "zip")
    good, outcomes, read = path.read_bytes(), [], read_safetensors if kind == "safetensors" else read_torch
    for seed in range(300):
        path.write_bytes(damaged(good, seed))
        try:
            read(path)
            outcomes.append(True)
        except InputError as error:
            outcomes.append(False)
            assert len(str(error)) < 500 + len(str(path))
            assert "\n" not in str(error)
    assert 0 < sum(outcomes) < 300


def test_as_safetensors_reads_it(tmp_path):
    tensors = {str(kind): torch.arange(24).reshape(2, 3, 4).to(kind) for kind in (*TYPES, *WHOLE)}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "run": '{"a": 1}'})
    content, metadata = read_safetensors(tmp_path / "x.safetensors")
    assert {name: content[name].tolist() for name in tensors} == {name: t.tolist() for name, t in tensors.items()}
    assert {name: t.dtype for name, t in content.items()} == {name: t.dtype for name, t in tensors.items()}
    assert metadata == {"format": "pt", "run": '{"a": 1}'}


def test_written_as_safetensors_does(tmp_path):
    """The file can be read by the library, and writing it makes no other file, which a kill would leave behind."""
    part, folder = tmp_path / "part", [tmp_path / "part"]
    part.touch()
    identity = part.stat().st_ino
    tensors = {str(kind): torch.arange(24).reshape(2, 3, 4).to(kind) for kind in (*TYPES, *WHOLE)}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), "ä": torch.arange(6.0).reshape(2, 3).T}
    listings = []

    class Listing(dict):
        def __getitem__(self, name):
            listings.append(list(tmp_path.iterdir()))
            return super().__getitem__(name)

    save_safetensors(part, Listing(tensors), {"format": "pt", "run": '{"a": "ä"}'})
    assert part.stat().st_ino == identity and all(files == folder for files in listings)
    for content in (load_file(part), read_safetensors(part)[0]):
        assert content.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert content[name].dtype == tensor.dtype and torch.equal(content[name], tensor)
    assert read_safetensors(part)[1] == {"format": "pt", "run": '{"a": "ä"}'}
    written = part.read_bytes()
    save_safetensors(part, dict(reversed(tensors.items())), {"format": "pt", "run": '{"a": "ä"}'})
    assert part.read_bytes() == written, "whatever the order of the tensors"


def header(entries: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        struct.pack("<Q", 2**63),
        header({}, length=2**40),
        header(b"[" * 100_000),
        header([]),
        header({"a": 5}),
        header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        header({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]}}, bytes(8)),
        header({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}, bytes(8)),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}, bytes(12)),
        header({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in "ab"}, bytes(8)),
        header({"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}, bytes(8)),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, "__metadata__": {"x": 5}}, bytes(8)),
        header({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, bytes(8)),
        header({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(9)),
    ],
)
def test_a_safetensors_file_with_wrong_sizes_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"x\.safetensors: "):
        read_safetensors(path)


def test_other_archives_and_pickles(tmp_path):
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme", "x")
    with pytest.raises(InputError, match=r"not a checkpoint of torch\.save"):
        read_torch(path)
    path.write_bytes(pickle.dumps({"a": 1}, 2) * 5)
    with pytest.raises(InputError, match="a pickle of another program"):
        read_torch(path)
