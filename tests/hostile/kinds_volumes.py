"""Input kinds: volumes, packed subjects, labels, sidecars and datasets."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import nibabel as nib
import numpy as np

from tests.factories.cifar import write_cifar
from tests.factories.nifti import mgh_bytes, write_mask
from tests.factories.subjects import write_subjects
from tests.hostile import archives, damage, pickles
from tests.hostile.kinds import Kind, register, renamed, special_file
from voxtune.data.cifar import Cifar10
from voxtune.data.cohort import cohort_contract
from voxtune.data.grid import fit
from voxtune.data.labels import MaskReader, parse_labels
from voxtune.data.legend import read_legend
from voxtune.data.nifti import read_volume
from voxtune.data.subjects import open_sources, pack, packed_contract, unpack
from voxtune.marks import written_by_voxtune
from voxtune.report.view import view_page

SIZE = (8, 8, 8)
CONTRACT = cohort_contract(SIZE)
BYTES = (damage.bytes_damage,)
JSON = (damage.json_damage, damage.json_damage, damage.json_damage, damage.bytes_damage)
TEXT = (damage.text_damage,)


def _volumes(folder: Path) -> None:
    labels = np.zeros((9, 8, 7), np.int16)
    labels[2:7, 2:6, 2:5] = 1
    labels[3:5, 3:5, 3:4] = 2
    affine = np.diag([20.0, 21.0, 22.0, 1.0])
    write_mask(folder / "mask.nii", (9, 8, 7))
    write_mask(folder / "mask.nii.gz", (9, 8, 7))
    nib.save(nib.Nifti2Image(labels, affine), folder / "second.nii")
    big = nib.Nifti1Image(labels, affine).header.as_byteswapped(">")
    nib.save(nib.Nifti1Image(labels, affine, big), folder / "big.nii")
    (folder / "mask.mgh").write_bytes(mgh_bytes(labels, affine))
    (folder / "mask.mgz").write_bytes(gzip.compress(mgh_bytes(labels, affine)))


def read_mask(_folder: Path, path: Path) -> None:
    """A file as an image, then as the mask of a volume to draw."""
    reader = MaskReader(contract=CONTRACT)
    read_volume(path, allow_nonfinite=True)
    mask = reader.read(path, ())
    reader.check(mask).raise_errors()
    fit(mask, CONTRACT).apply(mask.array, label=True)
    written_by_voxtune(path)


NIFTI1, NIFTI2, BIG, MGH = (
    damage.header_fields(damage.NIFTI1),
    damage.header_fields(damage.NIFTI2),
    damage.header_fields(damage.NIFTI1, ">"),
    damage.header_fields(damage.MGH, ">"),
)
VOLUME_DAMAGES: dict[str, tuple[damage.Callable, ...]] = {
    "mask.nii": (damage.bytes_damage, NIFTI1, NIFTI1),
    "mask.nii.gz": (
        damage.bytes_damage,
        damage.in_gzip(damage.bytes_damage),
        damage.in_gzip(NIFTI1),
        damage.gzip_tricks,
    ),
    "second.nii": (damage.bytes_damage, NIFTI2, NIFTI2),
    "big.nii": (damage.bytes_damage, BIG),
}
register(Kind(name="NIfTI volumes", make=_volumes, damages=VOLUME_DAMAGES, read=read_mask, cases=1000, quick=24))
register(
    Kind(
        name="MGH volumes",
        make=_volumes,
        damages={
            "mask.mgh": (damage.bytes_damage, MGH, MGH),
            "mask.mgz": (
                damage.bytes_damage,
                damage.in_gzip(damage.bytes_damage),
                damage.in_gzip(MGH),
                damage.gzip_tricks,
            ),
        },
        read=read_mask,
        cases=500,
        quick=12,
    )
)
register(
    Kind(
        name="pipes, folders, devices and links",
        make=_volumes,
        damages=dict.fromkeys(("mask.nii", "mask.nii.gz", "mask.mgh"), BYTES),
        read=read_mask,
        place=special_file,
        cases=200,
        quick=10,
    )
)


def _folders(folder: Path) -> None:
    write_subjects(folder, count=3)


def read_named(folder: Path, path: Path) -> None:
    """A file with a hostile name alone, then in its folder."""
    read_mask(folder, path)
    view_page(folder, folder.parent / "out" / "view.html")


register(
    Kind(
        name="file names",
        make=lambda folder: (_volumes(folder), None)[1],
        damages=dict.fromkeys(("mask.nii", "mask.nii.gz", "mask.mgz"), BYTES),
        read=read_named,
        place=renamed,
        cases=300,
        quick=10,
    )
)


def read_folders(folder: Path, _path: Path) -> None:
    """Folders of images and masks, as training and packing read them."""
    train, rest, _ = open_sources(
        SIZE, images=folder / "images", masks=folder / "masks", held_out=1, say=lambda _: None, warn=lambda _: None
    )
    for source in (train, rest):
        for index in range(len(source)):
            source[index]


_VOLUME = (damage.in_gzip(NIFTI1), damage.in_gzip(damage.bytes_damage), damage.bytes_damage, damage.gzip_tricks)
register(
    Kind(
        name="folders of images and masks",
        make=_folders,
        damages={"images/sub-0_T1w.nii.gz": _VOLUME, "masks/sub-1_dseg.nii.gz": _VOLUME},
        read=read_folders,
        cases=350,
    )
)


def _packed(folder: Path) -> None:
    from voxtune.data.subjects import cohort_sources

    train, rest = cohort_sources(CONTRACT, 0, 2, 1)
    pack(train, rest, folder / "subjects.npz")


def read_packed(_folder: Path, path: Path) -> None:
    packed_contract(path)
    for part in unpack(path):
        for index in range(len(part)):
            part[index]
    written_by_voxtune(path)


def packed_header(data: bytes, rng: random.Random) -> bytes:
    """The JSON header, or the header of an array in NumPy's format, of a file that is otherwise valid."""
    import io
    import zipfile

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    if rng.random() < 0.6:
        text = damage.json_damage(str(np.load(io.BytesIO(records["header.npy"]))).encode(), rng)
        buffer = io.BytesIO()
        np.save(buffer, np.array(text.decode(errors="replace")))
        records["header.npy"] = buffer.getvalue()
    else:
        name = rng.choice(["images.npy", "labels.npy"])
        start = 10 + int.from_bytes(records[name][8:10], "little")
        shapes = [
            "(3,)",
            "()",
            "(-1,)",
            "(2**40,)",
            f"({'9' * 3000},)",
            "(1099511627776, 8)",
            "(0,)",
            "(" * 500,
            "'x'",
            "None",
        ]
        types = ["<u2", "|u1", "|O", "<f8", "<U999999999", "V8", ">u2", "<M8[ns]", "<c16", "|S2147483647"]
        descr, order, shape = rng.choice(types), rng.choice([True, False, 3]), rng.choice(shapes)
        header = f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {shape}, }}\n"
        head = b"\x93NUMPY" + rng.choice([b"\x01\0", b"\x01\0", b"\x02\0", b"\x09\0"])
        records[name] = head + len(header).to_bytes(2, "little") + header.encode() + records[name][start:]
    return archives.rewritten(list(records.items()), zipfile.ZIP_DEFLATED)


register(
    Kind(
        name="packed subjects",
        make=_packed,
        damages={"subjects.npz": (damage.bytes_damage, archives.archive_damage, packed_header)},
        read=read_packed,
        cases=500,
        quick=12,
    )
)


def _cifar(folder: Path) -> None:
    write_cifar(folder / "python", batches=2)
    write_cifar(folder / "binary", batches=2, binary=True)


def read_cifar(_folder: Path, path: Path) -> None:
    source = Cifar10(path.parent)
    source[len(source) - 1]


register(
    Kind(
        name="CIFAR-10 batches",
        make=_cifar,
        damages={
            "python/data_batch_1": (damage.bytes_damage, damage.bytes_damage, pickles.hostile_pickle),
            "binary/data_batch_2.bin": BYTES,
        },
        read=read_cifar,
        cases=400,
    )
)

LABELS_JSON = {
    "data": {"labels": [{"name": "brain", "value": 1, "channel": 0}, {"name": "tumour", "value": 2, "channel": 1}]}
}


def _labels(folder: Path) -> None:
    table = (
        "index\tname\tcolor\trole\n0\tbackground\t#000000\t\n1\tbrain\t#112233\torgan\n2\ttumour\t#ff0000\tpathology\n"
    )
    (folder / "dseg.tsv").write_text(table)
    (folder / "config.json").write_text(json.dumps(LABELS_JSON))
    (folder / "labels.txt").write_text("tumour=1,4; oedema=2; brain=image; background=3")


def read_labels_file(_folder: Path, path: Path) -> None:
    """A file of --labels; of labels.txt its content is the value of the option."""
    text = str(path)
    if path.suffix == ".txt":
        text = path.read_bytes().decode(errors="surrogateescape")
    parsed = parse_labels(text)
    parse_labels(str(parsed))
    legend = read_legend(text)
    assert legend
    parsed.labels(overlapping=True)
    parsed.file_names(CONTRACT)


register(
    Kind(
        name="tables and texts of labels",
        make=_labels,
        damages={"dseg.tsv": TEXT, "config.json": JSON, "labels.txt": TEXT},
        read=read_labels_file,
        cases=500,
        quick=10,
    )
)


def _viewed(folder: Path) -> None:
    """Generated volumes with everything that `view` reads beside them."""
    write_mask(folder / "sub-01_dseg.nii.gz", (8, 8, 8))
    image = nib.Nifti1Image(np.random.default_rng(0).random((8, 8, 8)).astype(np.float32), np.diag([12.0, 12, 12, 1]))
    for name in ("sub-01_desc-synth01_T1w", "sub-01_desc-synth02_T1w", "sub-01_T1w"):
        nib.save(image, folder / f"{name}.nii.gz")
    record = {
        "voxtune": "0.2.0",
        "seed": 3,
        "noise": {"rule": "identity", "stem": "sub-01_dseg", "number": 1},
        "index": 0,
        "sampler": "ddim",
        "steps": 5,
        "mask": "sub-01_dseg.nii.gz",
        "labels": {"1": "brain", "2": "tumour"},
        "mask_labels": {"1": "brain", "2": "tumour", "image": "brain"},
        "Sources": ["bids::sub-01_dseg.nii.gz", "sub-01_T1w.nii.gz"],
        "Simulated": True,
        "model": "demo",
        "placement": "unchanged",
    }
    (folder / "sub-01_desc-synth01_T1w.json").write_text(json.dumps(record))
    figures = [{"name": "PSNR", "value": 30.5, "low": 29, "high": 32.0, "n": 4, "unit": "dB"}]
    volumes = [{"file": "sub-01_desc-synth01_T1w.nii.gz", "psnr": 30.1, "dice": {"brain": 0.9}}]
    (folder / "metrics.json").write_text(json.dumps({"figures": figures, "volumes": volumes}))
    made_by = [{"Name": "voxtune", "Version": "0.2.0"}]
    description = {"Name": "Simulated brain MRI", "BIDSVersion": "1.9.0", "DatasetType": "raw", "GeneratedBy": made_by}
    (folder / "dataset_description.json").write_text(json.dumps(description))
    (folder / "dseg.tsv").write_text("index\tname\n1\tbrain\n2\ttumour\n")
    (folder / "participants.tsv").write_text("participant_id\tseed\nsub-01\t0\n")


def read_viewed(folder: Path, path: Path) -> None:
    """A page of the folder, with the metrics given by name so that their errors are errors."""
    if path.name == "metrics.json":
        view_page(folder, folder.parent / "out" / "view.html", metrics=path)
        return
    view_page(folder, folder.parent / "out" / "view.html", labels=path if path.name == "dseg.tsv" else None)
    written_by_voxtune(path)


register(
    Kind(
        name="sidecars and datasets",
        make=_viewed,
        damages={
            "sub-01_desc-synth01_T1w.json": JSON,
            "dataset_description.json": JSON,
            "dseg.tsv": TEXT,
            "participants.tsv": TEXT,
        },
        read=read_viewed,
        cases=400,
    )
)
register(Kind(name="metrics.json", make=_viewed, damages={"metrics.json": JSON}, read=read_viewed, cases=350))
