"""Pictures and contact sheets: orientation, proportions, colours, titles and warnings."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from PIL import Image

from tests.factories.nifti import write_array
from voxtune.cli.main import main
from voxtune.cli.sample import _picture
from voxtune.data.contract import DataContract, Label, generic_contract
from voxtune.data.grid import fit
from voxtune.data.nifti import Volume
from voxtune.data.pixels import PALETTE, label_colour
from voxtune.errors import InputError
from voxtune.report.contact_sheet import MAX_COLUMNS, case_sheet
from voxtune.report.picture import CAPTION, GAP, SlicePanel, slice_picture
from voxtune.runtime.generate import GeneratedVolume, picture_name
from voxtune.runtime.masks import MaskRequest

SIDE, STEP = 150, 150 + GAP
GRID = np.diag([2.0, 2, 3, 1])


def tile(path, row, column):
    sheet = np.asarray(Image.open(path))
    return sheet[CAPTION + row * STEP :, CAPTION + column * STEP :][:SIDE, :SIDE]


def colours(pixels):
    return {tuple(int(c) for c in colour) for colour in pixels.reshape(-1, 3)}


def rgb(value):
    return tuple(bytes.fromhex(label_colour(value)[1:]))


def sampled(folder, orientation):
    """The picture of a volume that equals its mask, for a model of this orientation."""
    labels = np.zeros((12, 9, 10), np.uint8)
    labels[1:11, 1:8, 1:9] = 1
    labels[8:11, 5:8, 6:9] = 2  # right, anterior, superior
    mask = Volume(array=labels, affine=np.diag([1.0, 2, 4, 1]))
    axes = [next(i for i, pair in enumerate(("RL", "AP", "SI")) if letter in pair) for letter in orientation]
    size, spacing = ([values[a] for a in axes][::-1] for values in (labels.shape, mask.spacing))
    contract = generic_contract(2, 1, tuple(size), spacing=tuple(spacing), orientation=orientation)
    placement = fit(mask, contract)
    placed = placement.apply(labels, label=True)
    request = MaskRequest(path=folder / "m.nii.gz", grid=mask, labels_DHW=placed, placement=placement, warnings=())
    file = folder / f"{orientation}.nii.gz"
    volume = GeneratedVolume(
        request=request, replicate=1, index=0, images_CDHW=placed[None] / 2, files=(file,), contract=contract
    )
    _picture(volume, file.with_suffix(".png"), True)
    return np.asarray(Image.open(file.with_suffix(".png")))


@pytest.mark.parametrize(
    "orientation",
    ["".join(o) for pairs in itertools.permutations(("RL", "AP", "SI")) for o in itertools.product(*pairs)],
)
def test_pictures_do_not_depend_on_the_orientation_of_the_model(tmp_path, orientation):
    picture = sampled(tmp_path, orientation)[CAPTION:]
    np.testing.assert_array_equal(picture, sampled(tmp_path, "RAS")[CAPTION:])


def test_pictures_have_correct_proportions_and_right_on_the_right(tmp_path):
    picture = sampled(tmp_path, "LPS")
    # 12 mm from left to right, 18 from back to front, 40 from bottom to top.
    for row, (wide, high) in enumerate(((12, 18), (12, 40), (18, 40))):
        plane = picture[CAPTION + row * (256 + GAP) :, GAP:][:256, :256]
        ys, xs = np.nonzero((plane != (10, 11, 14)).any(axis=2))
        assert abs((np.ptp(xs) + 1) / (np.ptp(ys) + 1) - wide / high) < 0.02
        up, right = (np.nonzero((plane == PALETTE[2]).all(axis=2))[i].mean() for i in (0, 1))
        assert up < 118 and right > 138


def test_labels_have_the_colours_of_the_page(tmp_path):
    labels = np.arange(64).reshape(4, 4, 4)
    labels[:] = labels[2]
    path = slice_picture(
        [SlicePanel(title="mask", volume_DHW=labels, labels=True)], tmp_path / "p.png", around=labels, legend={}
    )
    axial = np.asarray(Image.open(path))[CAPTION : CAPTION + 256, GAP : GAP + 256]
    assert colours(axial) == {rgb(v) for v in range(32, 48)} and len(colours(axial)) == 16
    assert rgb(0) == PALETTE[0] and len({label_colour(v) for v in range(60)}) == 60


def test_mask_reference_and_synthetic_volume(folder, tmp_path, capsys):
    write_array(folder / "sub-2_desc-synth01_T1w.nii.gz", np.zeros((6, 7, 8), np.float32))
    path = tmp_path / "sheet.png"
    assert main(["view", str(folder), "-o", str(tmp_path / "view.html"), "--sheet", str(path)]) == 0
    output = capsys.readouterr()
    assert "contact sheet of 2 cases" in output.out and output.err.count("no unique mask (sub-2)") == 1
    assert np.asarray(Image.open(path)).shape == (CAPTION + 6 * STEP, CAPTION + 2 * STEP, 3)
    assert {PALETTE[0], PALETTE[1], rgb(4000)} <= colours(tile(path, 0, 0))
    assert tile(path, 1, 0).std() > 10 and tile(path, 2, 0).std() > 10
    # The second case has neither mask nor reference, and a constant volume.
    assert len(colours(tile(path, 0, 1)) | colours(tile(path, 1, 1))) == 1
    assert len(colours(tile(path, 2, 1))) == 2
    # 6 x 7 x 8 voxels of 2 x 2 x 3 mm: a sagittal slice is 14 mm wide and 24 mm high.
    sagittal = tile(path, 3, 0)
    columns = (sagittal == PALETTE[1]).all(axis=2).any(axis=0) | (sagittal == PALETTE[0]).all(axis=2).any(axis=0)
    assert abs(columns.sum() - SIDE * 14 / 24) < 2


def test_nan_gives_one_warning(folder, tmp_path, capsys):
    array = np.random.default_rng(1).random((6, 7, 8), dtype=np.float32)
    array[3, 3, 3], array[3, 4, 3] = np.nan, np.inf
    write_array(folder / "sub-1_desc-synth01_T1w.nii.gz", array)
    path = tmp_path / "sheet.png"
    assert main(["view", str(folder), "-o", str(tmp_path / "v.html"), "--sheet", str(path), "--json"]) == 0
    output = capsys.readouterr()
    assert output.err.count("2 of 336 voxels are NaN") == 1
    assert len(json.loads(output.out)["warnings"]) == 1
    assert tile(path, 2, 0).std() > 10


def moved(mm):
    affine = GRID.copy()
    affine[0, 3] = mm
    return affine


@pytest.mark.parametrize(
    ("name", "row", "shape", "affine"),
    [
        ("T1w", 1, (6, 7, 9), GRID),
        ("T1w", 1, (6, 7, 8), moved(20)),
        ("T1w", 1, (6, 7, 8), np.diag([2.0, 2, 4, 1])),
        ("dseg", 0, (6, 7, 8), moved(20)),
    ],
)
def test_partners_on_another_grid_are_omitted_with_a_warning(folder, tmp_path, capsys, name, row, shape, affine):
    # With a second case, which keeps the row.
    for file in ("desc-synth01_T1w", "T1w", "dseg"):
        (folder / f"sub-2_{file}.nii.gz").write_bytes((folder / f"sub-1_{file}.nii.gz").read_bytes())
    write_array(folder / f"sub-1_{name}.nii.gz", np.arange(np.prod(shape)).reshape(shape) % 5, affine)
    path = tmp_path / "sheet.png"
    assert main(["view", str(folder), "-o", str(tmp_path / "v.html"), "--sheet", str(path), "--json"]) == 0
    [warning] = json.loads(capsys.readouterr().out)["warnings"]
    assert f"sub-1_{name}.nii.gz: not on the grid of" in warning and "omitted from the contact sheet" in warning
    for each in range(3):
        assert (len(colours(tile(path, each, 0))) == 1) == (each == row)
        assert len(colours(tile(path, each, 1))) > 1


def test_a_file_with_reordered_axes_is_on_the_same_grid(folder, tmp_path):
    path = folder / "sub-1_T1w.nii.gz"
    real = np.arange(6 * 7 * 8).reshape(6, 7, 8)
    write_array(path, real)
    assert not case_sheet(folder, tmp_path / "a.png").warnings
    affine = np.array([[0, -2.0, 0, 10], [0, 0, 2, 0], [3, 0, 0, 0], [0, 0, 0, 1]])
    write_array(path, real[::-1].transpose(2, 0, 1), affine)
    assert not case_sheet(folder, tmp_path / "b.png").warnings
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_titles_of_volumes_of_one_subject_differ(folder, tmp_path):
    write_array(folder / "sub-1_desc-synth02_T1w.nii.gz", np.zeros((6, 7, 8), np.float32))
    contact_sheet = case_sheet(folder, tmp_path / "sheet.png")
    assert contact_sheet.cases == ("sub-1 synth01 T1w", "sub-1 synth02 T1w")
    captions = np.asarray(Image.open(contact_sheet.path))[:CAPTION, CAPTION:]
    first, second = captions[:, :SIDE], captions[:, STEP : STEP + SIDE]
    assert first.std() > 10 and (first != second).any()


def kinds_of_one_subject(folder, size=8):
    """Four images with constant intensities beside a pathology of low value near a corner; the highest label is the brain."""
    mask = np.full((size, size, size), 4, np.uint8)
    mask[1:3, 1:3, 5:7] = 1
    write_array(folder / "sub-1_dseg.nii.gz", mask)
    for number, kind in enumerate(("T1w", "T1ce", "T2w", "FLAIR")):
        image = np.full((size, size, size), number, np.float32)
        image[1:3, 1:3, 5:7] = 9
        path = write_array(folder / f"sub-1_desc-synth01_{kind}.nii.gz", image)
        record = {"labels": {"1": "necrosis", "4": "brain"}}
        path.with_name(path.name.replace(".nii.gz", ".json")).write_text(json.dumps(record))


def test_a_contact_sheet_has_a_column_for_each_kind_through_the_pathology(tmp_path):
    kinds_of_one_subject(tmp_path / "in")
    contact_sheet = case_sheet(tmp_path / "in", tmp_path / "sheet.png")
    assert contact_sheet.cases == ("sub-1 synth01 T1w, T1ce, T2w, FLAIR",) and not contact_sheet.warnings
    sheet = np.asarray(Image.open(contact_sheet.path))
    # Two lines of titles, the mask and the volume in two views; four columns.
    assert sheet.shape == (2 * CAPTION + 4 * STEP, CAPTION + 4 * STEP, 3)
    tiles = [[sheet[2 * CAPTION + r * STEP :, CAPTION + c * STEP :][:SIDE, :SIDE] for c in range(4)] for r in range(4)]
    for view in (0, 2):
        assert {PALETTE[1], rgb(4)} <= colours(tiles[view][0])
        assert all(len(colours(tiles[view][c])) == 1 for c in (1, 2, 3)), "the mask is shown once"
        assert all(tiles[view + 1][c].max() == 255 for c in range(4)), "the bright pathology is in the slice"
    titles = [sheet[CAPTION : 2 * CAPTION, CAPTION + c * STEP :][:, :SIDE] for c in range(4)]
    assert all(title.std() > 5 for title in titles) and (titles[0] != titles[3]).any()


def test_columns_of_several_kinds_are_limited(tmp_path):
    for number in range(1, 6):
        for kind in ("T1w", "T2w", "FLAIR"):
            write_array(tmp_path / "in" / f"sub-{number}_desc-synth01_{kind}.nii.gz", np.zeros((2, 2, 2), np.float32))
    contact_sheet = case_sheet(tmp_path / "in", tmp_path / "sheet.png")
    assert len(contact_sheet.cases) == 4 and "only the first 4 of 5 cases" in contact_sheet.warnings[-1]


def test_names_given_for_the_page_count_for_the_sheet(tmp_path):
    kinds_of_one_subject(tmp_path / "in")
    (tmp_path / "names.tsv").write_text("index\tname\trole\n1\tx\tother\n4\ty\tpathology\n")
    sheets = [tmp_path / "a.png", tmp_path / "b.png"]
    for sheet, options in zip(sheets, ([], ["--labels", str(tmp_path / "names.tsv")]), strict=True):
        command = ["view", str(tmp_path / "in"), "-o", str(tmp_path / "v.html"), "--overwrite", "--sheet", str(sheet)]
        assert main([*command, *options]) == 0
    assert sheets[0].read_bytes() != sheets[1].read_bytes()


def test_the_picture_of_a_sample_has_a_column_for_each_kind(tmp_path):
    labels = np.full((12, 12, 12), 2, np.uint8)
    labels[1:4, 1:4, 1:4] = 1
    mask = Volume(array=labels, affine=np.eye(4))
    contract = DataContract(
        size=labels.shape,
        spacing=(1.0, 1.0, 1.0),
        orientation="RAS",
        labels=(Label(name="lesion", value=1, channel=0), Label(name="brain", value=2, channel=1)),
        images=("T1w", "FLAIR"),
    )
    placement = fit(mask, contract)
    placed = placement.apply(labels, label=True)
    request = MaskRequest(path=tmp_path / "m.nii.gz", grid=mask, labels_DHW=placed, placement=placement, warnings=())
    files = tuple(tmp_path / f"m_desc-synth01_{kind}.nii.gz" for kind in contract.images)
    images = np.stack([placed == 1, placed == 2]).astype(np.float32)
    volume = GeneratedVolume(request=request, replicate=1, index=0, images_CDHW=images, files=files, contract=contract)
    path = tmp_path / picture_name([file.name for file in files])
    _picture(volume, path, False)
    picture = np.asarray(Image.open(path))
    assert path.name == "m_desc-synth01.png"
    assert picture.shape == (CAPTION + 3 * (256 + GAP), 3 * (256 + GAP) + GAP, 3)
    mask_tile, first, second = (picture[CAPTION:, GAP + c * (256 + GAP) :][:256, :256] for c in range(3))
    assert colours(mask_tile) == {PALETTE[1], PALETTE[2]}, (
        "the slice passes through the lesion, which is not the highest label"
    )
    assert first.max() == second.max() == 255 and (first != second).any()


def test_long_titles_stay_in_their_column(folder, tmp_path):
    long = "sub-" + "W" * 80
    write_array(folder / f"{long}_desc-synth01_T1w.nii.gz", np.zeros((6, 7, 8), np.float32))
    write_array(folder / f"{long}_desc-synth02_T1w.nii.gz", np.zeros((6, 7, 8), np.float32))
    captions = np.asarray(Image.open(case_sheet(folder, tmp_path / "sheet.png").path))[:CAPTION, CAPTION:]
    columns = [captions[:, i * STEP : (i + 1) * STEP] for i in range(3)]
    assert all(len(colours(column[:, SIDE + 1 :])) == 1 for column in columns)
    assert (columns[1] != columns[2]).any(), "names differ at the end"


def test_the_number_of_cases_is_limited(folder, tmp_path, capsys):
    for i in range(2, MAX_COLUMNS + 4):
        write_array(folder / f"sub-{i}_desc-synth01_T1w.nii.gz", np.zeros((2, 2, 2), np.float32))
    command = ["view", str(folder), "-o", str(tmp_path / "v.html"), "--sheet", str(tmp_path / "s.png"), "--overwrite"]
    assert main(command) == 0
    output = capsys.readouterr()
    assert "shows only the first 12 of 15 cases" in output.err and "sheet of 12 cases" in output.out
    assert main([*command, "--limit", "5"]) == 0
    output = capsys.readouterr()
    assert "shows only" not in output.err and "5 of 15 cases shown" in output.err and "sheet of 5 cases" in output.out


def test_a_path_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="file"):
        case_sheet(folder, tmp_path / "file" / "sheet.png")
    with pytest.raises(InputError, match="already exists"):
        case_sheet(folder, tmp_path / "file")
