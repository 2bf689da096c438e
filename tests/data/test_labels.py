"""What the values of mask files mean: the parser of --labels, and masks in the values of a contract."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.factories.contracts import BRATS, WHOLE_HEAD
from tests.factories.nifti import save, volume
from voxtune.config import to_mapping
from voxtune.data.contract import PRESETS, Label, generic_contract, label_key
from voxtune.data.labels import LabelEntry, LabelMap, MaskReader, parse_labels
from voxtune.errors import InputError
from voxtune.runtime.model import workload_config

names = st.text(st.characters(categories=["L", "N", "Zs"], include_characters="-_."), min_size=1, max_size=12).map(
    str.strip
)
plain_names = names.filter(lambda name: name and name.isprintable() and label_key(name) != "background")
values = st.lists(st.integers(1, 300), max_size=4, unique=True)
OVERLAP = replace(
    generic_contract(1, 1, (4, 4, 4)),
    labels=(
        Label(name="WT", value=1, more_values=(2, 4), channel=0),
        Label(name="TC", value=1, more_values=(4,), channel=1),
        Label(name="ET", value=4, channel=2),
    ),
    overlapping=True,
)


def grid(*numbers: int) -> np.ndarray:
    array = np.zeros((3, 3, 3), np.int32)
    array.ravel()[: len(numbers)] = numbers
    return array


def refused(function, *arguments, **options) -> str:
    with pytest.raises(InputError) as caught:
        function(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@given(
    st.lists(st.tuples(plain_names, values), min_size=1, max_size=5, unique_by=lambda pair: label_key(pair[0])),
    st.integers(-1, 4),
    st.lists(st.integers(301, 400), max_size=3, unique=True),
)
def test_every_map_is_read_back_from_its_text(pairs, from_image, background):
    entries = tuple(
        LabelEntry(name=name, values=tuple(numbers), from_image=number == from_image)
        for number, (name, numbers) in enumerate(pairs)
    )
    label_map = LabelMap(entries=entries, background=tuple(background))
    assert parse_labels(str(label_map)) == label_map


@given(st.text(max_size=60))
@example("=")
@example("a=1;a=2")
@example("a=1,")
@example("a\0")
@example("../" * 20)
@example("x" * 5000)
@example("/" + "y" * 300)
@example("a=" + "9" * 5000)
@example("background=1")
@example("a=image,none")
def test_hostile_text_is_at_worst_an_input_error(text):
    try:
        label_map = parse_labels(text)
    except InputError as error:
        assert len(str(error)) < 600
    else:
        assert label_map.model_values or label_map.entries


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@example(b"index\tname\n1\t\xff")
@example(b"index\tname\n1\ta\0b")
@example(b'index\tname\n1\t"' + b"a" * 140_000)
def test_hostile_tables_are_at_worst_an_input_error(tmp_path_factory, content):
    for name in ("dseg.tsv", "config.json"):
        file = tmp_path_factory.mktemp("table") / name
        file.write_bytes(content)
        try:
            assert parse_labels(str(file)).entries
        except InputError as error:
            assert name in str(error)


def test_the_forms_of_the_text():
    several = parse_labels("tumour=1,4; oedema=2; brain=image")
    assert several.labels() == (
        Label(name="tumour", value=1, channel=0, more_values=(4,)),
        Label(name="oedema", value=2, channel=1),
        Label(name="brain", value=5, channel=2, from_image=True),
    )
    older = parse_labels("brain=1,tumour=2")
    assert older == parse_labels("brain = 1 ; tumour = 2;")
    assert [(label.name, label.values, label.channel) for label in older.labels()] == [
        ("brain", (1,), 0),
        ("tumour", (2,), 1),
    ]
    assert parse_labels("a=1,4,b=2,background=3").background == (3,)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("brain", "no such preset or file"),
        ("", "no labels"),
        ("=1", "not a name"),
        ("brain=", "whole numbers"),
        ("brain=0", "0 is the background"),
        ("brain=-1", "whole numbers"),
        ("brain=1.5", "whole numbers"),
        ("brain=1,two", "whole numbers"),
        ("a=1;4;b=2", "'4' has no name"),
        ("a=1;A=2", "given twice"),
        ("tumor=1;tumour=2", "given twice"),
        ("a=image;b=image", "only one label"),
        ("a=1;background=1", "both 'a' and background"),
        ("background=image;a=1", "requires values"),
        ("a=none,1", "whole numbers"),
        ("a=3000000000", "whole numbers"),
    ],
)
def test_invalid_text_is_refused_with_the_reason(text, word):
    assert word in refused(parse_labels, text)


def test_a_table_of_bids(tmp_path):
    file = tmp_path / "dseg.tsv"
    file.write_text(
        "index\tname\tcolor\n0\tbackground\t#000000\n1\ttumour\t#ff0000\n4\ttumour\t\n2\toedema\t\n9\tbackground\t\n"
    )
    label_map = parse_labels(str(file))
    assert label_map == parse_labels("tumour=1,4; oedema=2; background=9") and label_map.origin == str(file)
    for content, word in (("name,index\n", "no labels"), ("index\tname\nx\ta\n", "whole numbers"), ("", "no labels")):
        file.write_text(content)
        assert word in refused(parse_labels, str(file)) and str(file) in refused(parse_labels, str(file))


def test_a_model_folder(tmp_path):
    config = workload_config("med-ddpm-brats").to_json()
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parse_labels(str(tmp_path)) == LabelMap.of(BRATS.labels)
    (tmp_path / "config.json").write_text(json.dumps({"data": {"labels": [{"name": "a"}]}}))
    assert "missing setting 'value'" in refused(parse_labels, str(tmp_path))


def test_presets_name_the_labels_of_the_published_models():
    assert [label.name for label in parse_labels("brats").labels()] == [label.name for label in BRATS.ordered]
    assert parse_labels("whole-head").labels() == WHOLE_HEAD.labels
    assert parse_labels("brats").for_contract(BRATS).table == {1: 1, 2: 2, 3: 3}
    assert parse_labels("brats2021").for_contract(BRATS).table == {1: 1, 2: 2, 4: 3}
    for name in ("brats", "brats2021"):
        assert parse_labels(name).for_contract(BRATS).from_image == BRATS.organ
    assert parse_labels("model").for_contract(BRATS).table == {1: 1, 2: 2, 3: 3, 4: 4}
    assert set(PRESETS) == {"brats", "brats2021", "whole-head", "model"}


def test_names_must_be_those_of_the_model():
    assert "no label 'head', only necrotic core, oedema, enhancing tumour, brain" in refused(
        parse_labels("whole-head").for_contract, BRATS
    )
    spelled = parse_labels("Necrotic_Core=7; edema=8; enhancing tumor=9; BRAIN=10")
    assert spelled.for_contract(BRATS).table == {7: 1, 8: 2, 9: 3, 10: 4}
    assert "--labels model requires a model" in refused(parse_labels("model").labels)
    assert "cannot be trained" in refused(parse_labels("a=1; b=none").labels)


def test_overlapping_labels_are_stated():
    text = "WT=1,2,4; TC=1,4; ET=4"
    assert "--overlapping-labels" in refused(parse_labels(text).labels)
    assert parse_labels(text).labels(overlapping=True) == OVERLAP.labels
    # The files of BraTS 2023 for a model of BraTS 2021.
    assert parse_labels("WT=1,2,3; TC=1,3; ET=3").for_contract(OVERLAP).table == {1: 1, 2: 2, 3: 4}
    assert "cannot be ET" in refused(parse_labels("ET=4").for_contract, OVERLAP)
    assert "do not overlap" in refused(parse_labels("necrotic core=1; oedema=1").for_contract, BRATS)


@given(st.lists(st.sampled_from([0, 1, 2, 4, 7, 70_000]), min_size=27, max_size=27))
def test_values_are_mapped_voxel_by_voxel(numbers):
    file_values = parse_labels("necrotic core=1; oedema=2,7; enhancing tumour=4; brain=70000").for_contract(BRATS)
    array = np.array(numbers, np.int32).reshape(3, 3, 3)
    expected = [{0: 0, 1: 1, 2: 2, 4: 3, 7: 2, 70_000: 4}[number] for number in numbers]
    assert file_values.apply(volume(array)).array.ravel().tolist() == expected


def test_values_that_the_map_does_not_name_are_refused():
    file_values = parse_labels("brats2021").for_contract(BRATS)
    message = refused(file_values.apply, volume(grid(1, 3, 9)))
    assert "label 3, 9 is not in --labels brats2021" in message and "background=3,9" in message
    ignoring = parse_labels(f"{PRESETS['brats2021']}; background=3,9").for_contract(BRATS)
    assert ignoring.apply(volume(grid(1, 3, 9, 4))).array.ravel()[:4].tolist() == [1, 0, 0, 3]
    assert "label -1" in refused(file_values.apply, volume(grid(-1)))


def test_the_brain_is_taken_from_the_image(tmp_path):
    mask = save(tmp_path / "sub-1_dseg.nii.gz", grid(1, 2, 4).astype(np.uint8))
    image = save(tmp_path / "sub-1_T1w.nii.gz", grid(5, 5, 5, 5, 5).astype(np.float32))
    reader = MaskReader(contract=BRATS, labels=parse_labels("brats2021"))
    labels = reader.read(mask, image)
    assert labels.array.ravel()[:7].tolist() == [1, 2, 3, 4, 4, 0, 0]
    assert reader.check(labels).ok
    message = refused(reader.read, mask, fix="pass the folder of the images with --images DIR")
    assert str(mask) in message and "brain is taken from the subject's image" in message and "--images DIR" in message
    other_grid = save(tmp_path / "other.nii.gz", np.ones((4, 3, 3), np.float32))
    assert "differs from that of its mask" in refused(reader.read, mask, other_grid)
    full = save(tmp_path / "full.nii.gz", np.ones((3, 3, 3), np.float32))
    assert "no voxel is 0" in refused(reader.read, mask, full)
    # A second image adds the voxels that are 0 in the first one, in either order.
    other = save(tmp_path / "sub-1_FLAIR.nii.gz", grid(0, 0, 0, 0, 5, 5).astype(np.float32))
    for images in ((image, other), (other, image)):
        assert reader.read(mask, images).array.ravel()[:7].tolist() == [1, 2, 3, 4, 4, 4, 0]
    head = np.ones((3, 3, 3), np.float32)
    head[0, 0, 0] = 0
    assert "is not skull-stripped" in refused(reader.read, mask, save(tmp_path / "head.nii.gz", head))
    zeros = save(tmp_path / "zeros.nii.gz", np.zeros((3, 3, 3), np.float32))
    assert refused(reader.read, mask, zeros) == f"{zeros}: all voxels are 0, so brain cannot be taken from it"
    # A healthy subject: the mask has no label at all.
    empty = save(tmp_path / "sub-2_dseg.nii.gz", grid().astype(np.uint8))
    assert set(np.unique(reader.read(empty, image).array)) == {0, 4}


def test_values_of_the_background_do_not_become_brain(tmp_path):
    mask = save(tmp_path / "sub-1_dseg.nii.gz", grid(1, 7, 2, 0, 7).astype(np.uint8))
    image = save(tmp_path / "sub-1_T1w.nii.gz", grid(5, 5, 5, 5, 5).astype(np.float32))
    reader = MaskReader(contract=BRATS, labels=parse_labels(f"{PRESETS['brats']}; background=7"))
    assert reader.read(mask, image).array.ravel()[:6].tolist() == [1, 0, 2, 4, 0, 0]


def test_unknown_values_of_brats_files_have_a_known_cure():
    def cure(text: str, *numbers: int) -> str:
        return refused(parse_labels(text).for_contract(BRATS).apply, volume(grid(*numbers)))

    assert "use --labels brats2021; if it is the brain, write brain=4" in cure("brats", 1, 2, 4)
    assert "use --labels brats" in cure("brats2021", 1, 3)
    for text in ("brats", "brats2021"):
        assert 'enhancing tumour=3; brain=4"' in cure(text, 1, 2, 3, 4)
    assert "background=9" in cure("brats", 1, 9)


def test_a_contract_whose_brain_is_from_the_image_needs_no_option(tmp_path):
    contract = replace(BRATS, labels=parse_labels("brats2021").labels())
    mask = save(tmp_path / "a_dseg.nii.gz", grid(1, 2, 4).astype(np.uint8))
    image = save(tmp_path / "a_T1w.nii.gz", grid(5, 5, 5, 5).astype(np.float32))
    reader = MaskReader(contract=contract)
    assert reader.check(reader.read(mask, image)).findings == ()
    complete = save(tmp_path / "b_dseg.nii.gz", grid(1, 2, 4, 5).astype(np.uint8))
    assert reader.read(complete).array.ravel()[:5].tolist() == [1, 2, 4, 5, 0], "a mask with the brain needs no image"


def test_what_the_user_states_decides_about_masks_with_two_readings(tmp_path):
    mask = save(tmp_path / "sub-1_dseg.nii.gz", grid(1, 2, 4).astype(np.uint8))

    def codes(text: str | None) -> list[str]:
        reader = MaskReader(contract=BRATS, labels=None if text is None else parse_labels(text))
        return [finding.code for finding in reader.check(reader.read(mask)).findings]

    assert codes(None) == ["ambiguous"]
    assert codes("model") == ["missing-label"]
    assert codes("necrotic core=1; oedema=2; enhancing tumour=4; brain=none") == ["missing-label"]
    assert codes("necrotic core=1; oedema=2; enhancing tumour=4") == ["missing-organ"]


def test_names_of_the_file_values_for_sidecars():
    assert parse_labels("brats2021").file_names(BRATS) == {
        "1": "necrotic core",
        "2": "oedema",
        "4": "enhancing tumour",
        "image": "brain",
    }
    assert parse_labels("model").file_names(WHOLE_HEAD) == {"1": "head", "2": "tumour"}
    assert LabelMap.of(OVERLAP.labels).file_names(OVERLAP) == {"1": "WT + TC", "2": "WT", "4": "WT + TC + ET"}


def test_the_labels_of_a_contract_as_a_map():
    contract = replace(BRATS, labels=parse_labels("brain=5,image; a=1,4").labels())
    label_map = LabelMap.of(contract.labels)
    assert label_map.for_contract(contract).table == {5: 5, 1: 1, 4: 1}
    assert label_map.for_contract(contract).from_image == contract.organ
    assert label_map.labels() == contract.labels and to_mapping(contract)["labels"][0]["from_image"] is True
