"""The viewer page without a browser: embedded data, limits, escaping and errors."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from importlib import resources

import nibabel as nib
import numpy as np
import pytest

from tests.factories.nifti import write_array
from voxtune.cli.main import main
from voxtune.data.bids import mark_simulated
from voxtune.data.legend import LabelName
from voxtune.data.pixels import label_colour
from voxtune.errors import InputError
from voxtune.report import view
from voxtune.report.embedding import Embedding
from voxtune.report.metrics import read_metrics
from voxtune.report.view import view_page

# Of the file as it is published: see assets/niivue/README.md.
LIBRARY = "47b896b77ec4a5be3ef1949c33ad393b6f45629921f326c279000bcf51bdb4af"


def embedded(page, key):
    text = re.search(rf'<script type="application/octet-stream" id="{key}">([^<]*)</script>', page).group(1)
    return nib.Nifti1Image.from_bytes(gzip.decompress(base64.b64decode(text)))


def data_of(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.S).group(1))


def test_embedded_volumes_equal_the_files(folder, tmp_path):
    written = view_page(folder, tmp_path / "view.html")
    page = written.path.read_text()
    data = data_of(page)
    [case] = data["cases"]
    assert written.cases == ("sub-1 synth01 T1w",) and written.size == written.path.stat().st_size
    assert not written.warnings
    [image] = case["images"]
    assert image["kind"] == "T1w"
    for key, name, step in (("volume", "desc-synth01_T1w", 2e-5), ("reference", "T1w", 0.0)):
        shown, file = embedded(page, image[key]), nib.load(folder / f"sub-1_{name}.nii.gz")
        assert np.abs(shown.get_fdata() - file.get_fdata()).max() <= step
        assert np.array_equal(shown.affine, file.affine)
        assert shown.header["descrip"].item() == b"voxtune"
    assert [(row["value"], row["name"]) for row in data["labels"]] == [(1, "label 1"), (4000, "label 4000")]
    number = {row["value"]: row["number"] for row in data["labels"]}
    mask = np.asarray(embedded(page, case["mask"]).dataobj)
    assert (
        mask.dtype == np.uint8 and mask[3, 3, 3] == number[4000] and mask[2, 2, 2] == number[1] and mask[0, 0, 0] == 0
    )
    assert data["volumes"][case["mask"]]["focus"] == [6.0, 6.0, 9.0]


def test_captions_name_the_origin_of_a_reference(folder, tmp_path):
    page = view_page(folder, tmp_path / "a.html").path.read_text()
    [case] = data_of(page)["cases"]
    assert (case["caption"], case["reference_caption"]) == ("Synthetic", "Reference")
    assert "1 with a reference for comparison" in page
    mark_simulated(folder / "sub-1_T1w.nii.gz")
    page = view_page(folder, tmp_path / "b.html").path.read_text()
    assert data_of(page)["cases"][0]["reference_caption"] == "Simulated subject"
    assert "1 with a simulated subject for comparison" in page


def test_page_has_no_links_and_runs_only_its_own_scripts(folder, tmp_path):
    page = view_page(folder, tmp_path / "view.html").path.read_text()
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert all(link.startswith("#") or link == "data:," for link in re.findall(r'(?:src|href)="([^"]*)"', markup))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    assert policy.startswith("default-src &#x27;none&#x27;")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 3
    for script in scripts:
        assert f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}" in policy
    assert "Copyright (c) 2021, Niivue" in page


def test_niivue_is_the_published_file():
    folder = resources.files("voxtune.report") / "assets" / "niivue"
    assert hashlib.sha256((folder / "niivue.umd.js").read_bytes()).hexdigest() == LIBRARY
    assert all((folder / f).is_file() for f in ("LICENSE", "LICENSES-bundled", "README.md"))


def test_names_of_labels_their_colours_and_kinds():
    legend = {2: LabelName(name="tumour"), 9: LabelName(name="x", colour="#123456"), 3: LabelName(name="brain")}
    volumes = Embedding(limit=10, legend=legend)
    volumes._numbers.update({2: 1, 9: 2, 1: 3})
    assert [(r["value"], r["number"], r["name"], r["colour"], r["kind"]) for r in volumes.labels()] == [
        (1, 3, "label 1", "#5686bc", "other"),
        (2, 1, "tumour", "#e69f00", "pathology"),
        (9, 2, "x", "#123456", "other"),
    ]
    assert len({label_colour(v) for v in range(1, 60)}) == 59


def brats_mask(folder, name="sub-1_dseg.nii.gz"):
    """A brain, label 4, with oedema, 2, around enhancing tumour, 3, around necrosis, 1."""
    mask = np.zeros((16, 16, 16), np.uint8)
    mask[1:15, 1:15, 1:15] = 4
    mask[8:13, 8:13, 8:13], mask[9:12, 9:12, 9:12], mask[10, 10, 10] = 2, 3, 1
    write_array(folder / name, mask)
    return mask


BRATS = {"1": "necrosis", "2": "oedema", "3": "enhancing tumour", "4": "brain"}


def test_the_page_opens_on_the_pathology_not_on_the_highest_value(tmp_path):
    brats_mask(tmp_path)
    write_array(tmp_path / "sub-1_desc-synth01_T1w.nii.gz", np.zeros((16, 16, 16), np.float32))
    (tmp_path / "sub-1_desc-synth01_T1w.json").write_text(json.dumps({"labels": BRATS}))
    data = data_of(view_page(tmp_path, tmp_path / "v.html").path.read_text())
    facts = data["volumes"][data["cases"][0]["mask"]]
    # Voxels of 2 x 2 x 3 mm.
    assert facts["focus"] == [20.0, 20.0, 30.0]
    number = {row["name"]: row["number"] for row in data["labels"]}
    assert sorted(facts["solid"]) == sorted(number[n] for n in ("necrosis", "oedema", "enhancing tumour"))
    # A dseg.tsv replaces the names, and may say what is a pathology.
    (tmp_path / "names.tsv").write_text("index\tname\trole\n1\tA\tpathology\n2\tB\n3\tC\n4\tD\n")
    data = data_of(view_page(tmp_path, tmp_path / "w.html", labels=tmp_path / "names.tsv").path.read_text())
    assert data["volumes"][data["cases"][0]["mask"]]["solid"] == [number["necrosis"]]


def test_details_of_the_sidecar(tmp_path):
    """The noise of a volume is a large number, except where it is that of a position."""
    file = tmp_path / "sub-1_desc-synth01_T1w.nii.gz"
    write_array(file, np.zeros((4, 4, 4), np.float32))
    record = {"sampler": "ddpm", "steps": 3, "index": 7}
    shown = [["sampler", "ddpm"], ["steps", "3"]]
    for noise, rows in (
        (None, [["sample", "7"]]),
        ({"rule": "position"}, [["sample", "7"]]),
        ({"rule": "identity", "stem": "sub-1", "replicate": 1}, []),
    ):
        (tmp_path / "sub-1_desc-synth01_T1w.json").write_text(json.dumps(record | ({"noise": noise} if noise else {})))
        data = data_of(view_page(tmp_path, tmp_path / "v.html", overwrite=True).path.read_text())
        assert data["cases"][0]["details"] == shown + rows


def test_an_organ_is_no_surface(tmp_path):
    write_array(tmp_path / "sub-1_dseg.nii.gz", np.ones((4, 4, 4), np.uint8))
    write_array(tmp_path / "sub-1_T1w.nii.gz", np.zeros((4, 4, 4), np.float32))
    (tmp_path / "dseg.tsv").write_text("index\tname\n1\tbrain\n")
    data = data_of(view_page(tmp_path, tmp_path / "v.html").path.read_text())
    facts = data["volumes"][data["cases"][0]["mask"]]
    assert facts["solid"] == [] and facts["focus"] is not None


def test_images_of_several_kinds_are_one_case(tmp_path):
    """As voxtune sample writes them in BIDS folders, and with references whose names are those of BraTS."""
    folder, real = tmp_path / "out" / "sub-1" / "ses-1" / "anat", tmp_path / "real"
    kinds = {"T1w": "t1", "T1ce": "t1ce", "T2w": "t2", "FLAIR": "flair"}
    for place, (kind, ending) in enumerate(kinds.items()):
        middle = "ce-gadolinium_desc-synth01_T1w" if kind == "T1ce" else f"desc-synth01_{kind}"
        write_array(folder / f"sub-1_ses-1_{middle}.nii.gz", np.full((4, 4, 4), place))
        write_array(real / f"sub-1_ses-1_{ending}.nii.gz", np.full((4, 4, 4), 10 + place))
    written = view_page(tmp_path / "out", tmp_path / "v.html", real=real)
    assert written.cases == ("sub-1_ses-1 synth01 T1w, T1ce, T2w, FLAIR",)
    page = written.path.read_text()
    [case] = data_of(page)["cases"]
    assert [image["kind"] for image in case["images"]] == list(kinds)
    for place, image in enumerate(case["images"]):
        assert embedded(page, image["volume"]).get_fdata().max() == place
        assert embedded(page, image["reference"]).get_fdata().max() == 10 + place
    assert "synth01, 4 images" in page


def test_a_large_page_gives_a_warning_and_a_larger_one_an_error(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(view, "LARGE", 1_000_000)
    assert "browsers open it slowly" in view_page(folder, tmp_path / "a.html").warnings[0]
    monkeypatch.setattr(view, "LARGEST", 1000)
    with pytest.raises(InputError, match=r"larger than the limit of 0 MB; give smaller volumes"):
        view_page(folder, tmp_path / "b.html")
    assert not (tmp_path / "b.html").exists()


def test_nan_is_shown_as_the_minimum_with_a_warning(tmp_path):
    array = np.ones((3, 3, 3), np.float32)
    array[1, 1, 1] = np.nan
    write_array(tmp_path / "in" / "x.nii", array)
    warnings = view_page(tmp_path / "in", tmp_path / "v.html").warnings
    assert any("1 of 27 voxels is NaN" in w for w in warnings)


def test_names_that_are_not_utf8_are_escaped(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    name = os.fsdecode(b"sub-\xff_T1w.nii")
    write_array(folder / "x.nii", np.ones((3, 3, 3), np.float32)).rename(folder / name)
    (tmp_path / "m.json").write_text('{"figures": [{"name": "\\ud800", "value": 1}]}')
    page = view_page(folder, tmp_path / "v.html", metrics=tmp_path / "m.json").path.read_text()
    assert r"sub-\udcff" in page and r"\ud800" in page


def test_invalid_metrics_are_ignored(tmp_path):
    file = tmp_path / "metrics.json"
    figures = [
        {"name": "psnr", "value": 23.41, "low": 22, "high": 24.5, "n": 64, "unit": "dB"},
        {"name": "fid", "value": None},
    ]
    strange = [7, {"value": 1}, {"name": "<b>", "value": "high", "low": "x", "high": True, "n": "many", "unit": 3}]
    rows = [{"file": "a\\b/x.nii", "psnr": 22.1, "dice": {"brain": 0.98, "?": None}, "nearest": "q"}, 3, {"file": 1}]
    file.write_text(json.dumps({"figures": [*figures, *strange], "volumes": rows}))
    read = read_metrics(file)
    assert [(f.name, f.value, f.interval, f.count) for f in read.figures] == [
        ("psnr", "23.41 dB", "22 to 24.5", "64"),
        ("fid", "–", "", ""),
        ("<b>", "high", "", ""),
    ]
    assert read.volumes == {"x.nii": [("psnr", "22.1"), ("dice brain", "0.98")]}
    file.write_text("[]")
    with pytest.raises(InputError, match="no list of metrics"):
        read_metrics(file)


def test_metrics_beside_the_volumes(folder, tmp_path):
    assert 'id="metrics"' not in view_page(folder, tmp_path / "a.html").path.read_text()
    (folder / "metrics.json").write_text('{"figures": [{"name": "ms_ssim", "value": 0.8123}]}')
    page = view_page(folder, tmp_path / "b.html").path.read_text()
    assert 'id="metrics"' in page and "0.8123" in page
    (folder / "metrics.json").write_text("{")
    assert "shows no metrics" in view_page(folder, tmp_path / "c.html").warnings[0]


def test_command(folder, tmp_path, capsys):
    assert main(["view", str(folder), "-o", str(tmp_path / "v.html"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["cases"] == ["sub-1 synth01 T1w"] and result["bytes"] > 2_000_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["absent"], "no such folder"),
        (["in", "--metrics", "absent.json"], "absent.json: no such file"),
        (["in", "--labels", "absent.tsv"], "absent.tsv: no such file"),
        (["in", "--limit", "0"], "limit"),
        (["in", "-o", "in"], "must end in .html"),
        (["in", "-o", "."], "must end in .html"),
        (["in", "-o", "picture.png"], "must end in .html"),
        (["in", "--sheet", "sheet.unknown"], "must end in .png"),
        # Before any work: the folder is not read.
        (["absent", "-o", "there.html"], "already exists; choose another path, or pass --overwrite"),
        (["absent", "--sheet", "there.png"], "already exists; choose another path, or pass --overwrite"),
        (["in", "-o", "folder.html", "--overwrite"], "is a folder"),
    ],
)
def test_invalid_input_exits_with_2_and_one_line(folder, tmp_path, capsys, monkeypatch, options, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.html").mkdir()
    for name in ("there.html", "there.png", "picture.png"):
        (tmp_path / name).write_text("mine")
    assert main(["view", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "view.html").exists(), "no page without the requested contact sheet"
    assert all((tmp_path / name).read_text() == "mine" for name in ("there.html", "there.png", "picture.png"))


def test_overwrite_replaces_page_and_sheet(folder, tmp_path):
    page, sheet = tmp_path / "V.HTML", tmp_path / "sheet.png"
    for _ in range(2):
        assert main(["view", str(folder), "-o", str(page), "--sheet", str(sheet), "--overwrite"]) == 0
    assert "niivue" in page.read_text() and sheet.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match="already exists"):
        view_page(folder, page)
    assert view_page(folder, page, overwrite=True).size == page.stat().st_size
