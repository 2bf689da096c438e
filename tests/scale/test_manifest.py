"""Manifests: what a person writes is read, and a table of a stranger is refused before any work, row by row."""

from __future__ import annotations

import pytest

from tests.factories.cli import run
from tests.scale.datasets import write_masks
from voxtune.errors import FilesError, InputError
from voxtune.scale.dataset import parse_shard
from voxtune.scale.manifest import read_manifest


@pytest.fixture
def masks(tmp_path):
    return write_masks(tmp_path / "masks", 3)


def rows_of(path, **options):
    return [(row.subject, row.named.name, row.replicates) for row in read_manifest(path, per_mask=2, **options)]


def manifest(folder, text, name="manifest.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_folder_of_masks(masks):
    assert rows_of(masks) == [(f"sub-{n}", f"sub-{n}_dseg.nii.gz", 2) for n in range(3)]
    assert all(row.mask.is_absolute() for row in read_manifest(masks, per_mask=1))


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_as_spreadsheets_write_it(masks, delimiter):
    lines = [
        "mask,subject,replicates",
        "sub-0_dseg.nii.gz,,",
        "sub-1_dseg.nii.gz,siteA01_ses-2,7",
        ",,",
        '"sub-2_dseg.nii.gz"',
    ]
    text = "\ufeff" + "\r\n".join(lines).replace(",", delimiter) + "\r\n"
    assert rows_of(manifest(masks, text)) == [
        ("sub-0", "sub-0_dseg.nii.gz", 2),
        ("sub-siteA01ses2", "siteA01_ses-2_dseg.nii.gz", 7),
        ("sub-2", "sub-2_dseg.nii.gz", 2),
    ]


def test_a_parquet_table(masks):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = masks / "manifest.parquet"
    table = {"mask": ["sub-0_dseg.nii.gz", "sub-1_dseg.nii.gz"], "subject": [None, "b"], "replicates": [3, None]}
    pq.write_table(pa.table(table), path)
    assert rows_of(path) == [("sub-0", "sub-0_dseg.nii.gz", 3), ("sub-b", "b_dseg.nii.gz", 2)]
    pq.write_table(pa.table({"mask": [b"sub-0_dseg.nii.gz", b"\0"], "replicates": [[1], [2]]}), path)
    with pytest.raises(FilesError) as error:
        rows_of(path)
    assert [name for name, _ in error.value.rows] == ["manifest.parquet row 1", "manifest.parquet row 2"]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"manifest\.parquet: damaged or truncated"):
        rows_of(path)


HOSTILE = {
    "../outside_dseg.nii.gz": "outside the manifest's folder",
    "/etc/passwd": "not a mask",
    "link_dseg.nii.gz": "outside the manifest's folder",
    "linked/outside_dseg.nii.gz": "outside the manifest's folder",
    "absent_dseg.nii.gz": "No such file",
    "folder_dseg.nii.gz": "is not a regular file",
    "pipe_dseg.nii.gz": "is not a regular file",
    "SUB-0_dseg.nii.gz": "has the same name as manifest.csv row 2",
    "sub-0_dseg.nii.gz": "has the same name as manifest.csv row 2",
    "-_dseg.nii.gz": "no letter or digit",
    "": "expected the path of a file",
    "a\0b_dseg.nii.gz": "expected the path of a file",
    "notes.txt": "not a mask",
    "sub-1_dseg.nii.gz,,two": "replicates 'two'",
    "sub-1_dseg.nii.gz,,-1": "replicates '-1'",
    "sub-1_dseg.nii.gz,,1.5": "replicates '1.5'",
    "sub-1_dseg.nii.gz,,100001": "replicates '100001'",
    "sub-1_dseg.nii.gz,../../x,": "subject '../../x'",
    "sub-1_dseg.nii.gz,--out,": "subject '--out'",
    "sub-1_dseg.nii.gz,seg,": "subject 'seg'",
    "sub-1_dseg.nii.gz,sub-0,": "has the same name as manifest.csv row 2",
}


@pytest.fixture
def hostile(masks, tmp_path):
    import os

    write_masks(tmp_path / "elsewhere", 1)
    (tmp_path / "elsewhere" / "sub-0_dseg.nii.gz").rename(tmp_path / "outside_dseg.nii.gz")
    (masks / "link_dseg.nii.gz").symlink_to(tmp_path / "outside_dseg.nii.gz")
    (masks / "linked").symlink_to(tmp_path)
    (masks / "folder_dseg.nii.gz").mkdir()
    os.mkfifo(masks / "pipe_dseg.nii.gz")
    (masks / "-_dseg.nii.gz").write_bytes(b"x")
    (masks / "SUB-0_dseg.nii.gz").write_bytes((masks / "sub-0_dseg.nii.gz").read_bytes())
    return masks


def test_every_hostile_row_is_named(hostile):
    lines = ["mask,subject,replicates", "sub-0_dseg.nii.gz,,", *(row or ",x," for row in HOSTILE)]
    with pytest.raises(FilesError) as error:
        rows_of(manifest(hostile, "\n".join(lines)))
    problems = dict(error.value.rows)
    assert list(problems) == [f"manifest.csv row {number}" for number in range(3, 3 + len(HOSTILE))]
    for problem, expected in zip(problems.values(), HOSTILE.values(), strict=True):
        assert expected in problem and len(problem) <= 500
    outside = "mask\n../outside_dseg.nii.gz\n"
    assert rows_of(manifest(hostile, outside), allow_outside=True) == [("sub-outside", "outside_dseg.nii.gz", 2)]


def test_a_hostile_manifest_ends_the_command_before_any_work(hostile, tmp_path, capsys):
    lines = ["mask", *(row.partition(",")[0] for row in HOSTILE if row), *["absent_dseg.nii.gz"] * 30]
    path = manifest(hostile, "\n".join(lines))
    # The model is not even looked for.
    code, out, err = run(capsys, "generate", path, "--model", tmp_path / "absent", "-o", tmp_path / "out")
    assert code == 2 and not out and not (tmp_path / "out").exists()
    assert "rows cannot be used; nothing was started:" in err and "manifest.csv row 2 " in err
    assert len(err.splitlines()) == 22 and "more; all of them: " in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no column 'mask'"),
        ("path\nx\n", "no column 'mask'"),
        (
            "mask,replicate\nx,1\n",
            "unknown column 'replicate'; the columns are mask and optionally subject, replicates",
        ),
        ("mask,mask\nx,1\n", "column 'mask' is given twice"),
        ("mask\n", "lists no masks"),
        ("mask\na,b,c\n", "row 2 has 3 cells, the header 1"),
        (b"mask\n\xff\xfe\n", "not UTF-8"),
        ('mask\n"' + "x" * 200_000 + '"\n', "field larger than field limit"),
        ('mask\n"unterminated', "damaged or truncated manifest"),
    ],
)
def test_tables_that_are_no_manifest(masks, text, problem):
    with pytest.raises(InputError, match=problem):
        rows_of(manifest(masks, text))


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "a/b", "1/0", "-1/4", "1/1000000", "1/2/3"])
def test_shards_that_do_not_exist(text):
    with pytest.raises(InputError, match="--shard"):
        parse_shard(text)
    assert parse_shard("3/16") == (3, 16)
