"""CIFAR-10 in both published formats: exact pixels, no test batch, and errors that name the file."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from tests.factories.cifar import PIXELS, pictures, published_pickle, published_records, write_cifar
from voxtune.data.cifar import Cifar10, read_batch
from voxtune.errors import InputError


@pytest.mark.parametrize("binary", [False, True])
def test_reads_all_batches_except_the_test_batch(tmp_path, binary):
    source = Cifar10(write_cifar(tmp_path / "cifar", binary=binary), mirror=False)
    expected = [pictures(4, seed=n) for n in range(1, 6)]
    assert len(source) == 20
    assert source.missing == ()
    np.testing.assert_array_equal(source.images_NCHW.reshape(20, PIXELS), np.concatenate([d for d, _ in expected]))
    assert source.labels_N.tolist() == [label for _, labels in expected for label in labels]


def test_images_are_channels_first_and_scaled_to_plus_minus_one(tmp_path):
    data = np.zeros((1, PIXELS), np.uint8)
    data[0, 0] = 255  # red, first row, first column
    data[0, 1024 + 32 + 5] = 51  # green, second row, sixth column
    (tmp_path / "data_batch_1").write_bytes(published_pickle(data, [3]))
    image, mask = Cifar10(tmp_path)[0]
    assert mask is None
    assert image.dtype == np.float32
    assert image.shape == (3, 32, 32)
    assert (image[0, 0, 0], image[2, 31, 31]) == (1, -1)
    assert image[1, 1, 5] == pytest.approx(-0.6)


def test_mirror_images_follow_the_images(tmp_path):
    source = Cifar10(write_cifar(tmp_path / "cifar", batches=1))
    assert len(source) == 8
    for i in range(4):
        np.testing.assert_array_equal(source[i + 4][0], source[i][0][:, :, ::-1])
    for index in (-1, 8):
        with pytest.raises(IndexError):
            source[index]


def test_images_are_resized(tmp_path):
    folder = write_cifar(tmp_path / "cifar", batches=1, count=2)
    small, large = Cifar10(folder)[0][0], Cifar10(folder, size=(64, 64))[0][0]
    assert large.shape == (3, 64, 64)
    assert np.abs(large.reshape(3, 32, 2, 32, 2).mean(axis=(2, 4)) - small).mean() < 0.02
    assert Cifar10(folder, size=(16, 24))[0][0].shape == (3, 16, 24)


@pytest.mark.parametrize("binary", [False, True])
def test_parent_folder_is_accepted_and_missing_batches_are_listed(tmp_path, binary):
    name = "cifar-10-batches-bin" if binary else "cifar-10-batches-py"
    folder = write_cifar(tmp_path / name, batches=3, binary=binary)
    (folder / f"data_batch_2{'.bin' if binary else ''}").unlink()
    source = Cifar10(tmp_path)
    assert [f.name.removesuffix(".bin") for f in source.files] == ["data_batch_1", "data_batch_3"]
    assert source.missing == (2, 4, 5)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("key", [str, str.encode])
def test_pickles_written_by_python_3(tmp_path, protocol, order, key):
    data, labels = pictures(3)
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({key("data"): np.asarray(data, order=order), key("labels"): labels}, protocol))
    batch = read_batch(path)
    np.testing.assert_array_equal(batch.images_NCHW.reshape(3, PIXELS), data)
    assert batch.labels_N.tolist() == labels


def rejected(path) -> str:
    with pytest.raises(InputError) as caught:
        Cifar10(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folders_without_batches(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "data_batch_1 to data_batch_5" in rejected(tmp_path / "empty")
    assert "data_batch_5.bin" in rejected(tmp_path / "empty")
    assert "no such folder" in rejected(tmp_path / "absent")
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    assert "unpack the archive" in rejected(tmp_path / "cifar-10-python.tar.gz")
    only_test = write_cifar(tmp_path / "test", batches=0)
    assert "contains no CIFAR-10 batches" in rejected(only_test)
    write_cifar(tmp_path / "both" / "cifar-10-batches-py")
    write_cifar(tmp_path / "both" / "cifar-10-batches-bin", binary=True)
    assert "more than once" in rejected(tmp_path / "both")


DATA, LABELS = pictures(3)
RECORDS = published_records(DATA, LABELS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (published_pickle(DATA, LABELS)[:-1], "truncated"),
        (published_pickle(DATA, LABELS)[:5000], "truncated"),
        (b"", "truncated"),
        (b"<html>not found</html>", "pickle"),
        (published_pickle(DATA[:, :3071], LABELS), r"shape \(3, 3071\), expected \(images, 3072\)"),
        (published_pickle(DATA[:0], []), r"shape \(0, 3072\)"),
        (published_pickle(DATA, LABELS, code=b"f4"), "dtype 'f4', expected 'u1'"),
        (published_pickle(DATA, LABELS, code=b"O8"), "dtype 'O8'"),
        (published_pickle(DATA, LABELS[:2]), "2 labels for 3 images"),
        (published_pickle(DATA, [1, 2, 10]), "label 10 is not from 0 to 9"),
        (published_pickle(DATA, LABELS, name=b"fine_labels"), "CIFAR-100"),
        (published_pickle(DATA, LABELS).replace(b"data", b"dada"), "no 'data'"),
        (pickle.dumps([1, 2], 2), "got list"),
        (pickle.dumps({"data": b"x", "labels": [1]}, 4), "'data' is not a NumPy array"),
        (pickle.dumps({"data": DATA, "labels": ["a", 1, 2]}, 4), "not a list of integers"),
        (pickle.dumps({"data": DATA, "labels": DATA}, 4), "not a list of integers"),
    ],
)
def test_invalid_pickles_are_rejected(tmp_path, content, message):
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        Cifar10(tmp_path)
    assert str(tmp_path / "data_batch_1") in str(caught.value)
    assert "download it again" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (RECORDS[:-1], "not a multiple of the record size"),
        (b"", "not a multiple of the record size"),
        (b"\x0a" + RECORDS[1:], "label 10 is not from 0 to 9"),
    ],
)
def test_invalid_records_are_rejected(tmp_path, content, message):
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    assert message in rejected(tmp_path)
