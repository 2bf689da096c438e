"""The viewer page in a browser with WebGL: checks of pixels as well as elements."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest

from voxtune.data.nifti import Volume, write_volume
from voxtune.report.view import view_page

HOSTILE = '<img src=x onerror="window.hacked=1">'
SHAPE = (20, 24, 18)
# Stored in LPS orientation: the page has to reorder it.
LPS = np.array([[-4.0, 0, 0, 38], [0, -4, 0, 46], [0, 0, 4, -34], [0, 0, 0, 1]])


def put(path, array):
    write_volume(path, array, Volume(array=array, affine=LPS))


def subject(folder, name, *, level, files=("synth", "real", "mask")):
    """A dim ball with a bright block in the patient's right, front, upper part; the block is label 2, the ball label 1."""
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in SHAPE), indexing="ij")
    ball = x**2 + y**2 + z**2 < 0.9
    block = (x < -0.2) & (x > -0.7) & (y < -0.2) & (y > -0.7) & (z > 0.1) & (z < 0.6)
    image = np.where(block, level, np.where(ball, 0.3, 0.0)).astype(np.float32)
    if "synth" in files:
        put(folder / f"{name}_desc-synth01_T1w.nii.gz", image)
    if "real" in files:
        put(folder / f"{name}_T1w.nii.gz", np.rint(image * 1000).astype(np.int16))
    if "mask" in files:
        put(folder / f"{name}_dseg.nii.gz", np.where(block, 2, ball).astype(np.uint8))


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("view")
    subject(folder / "in", "sub-1", level=0.8)
    subject(folder / "in", "sub-2", level=1.0, files=("synth",))
    figures = [{"name": "psnr", "value": 23.41, "low": 22.9, "high": 24.0, "n": 64, "unit": "dB"}]
    rows = [{"file": "sub-1_desc-synth01_T1w.nii.gz", "dice": {"tumour": 0.81}}]
    (folder / "in" / "metrics.json").write_text(json.dumps({"figures": figures, "volumes": rows}))
    (folder / "in" / "dseg.tsv").write_text("index\tname\n1\tbrain\n2\ttumour\n")
    return view_page(folder / "in", folder / "view.html").path


def faults(opened):
    """Errors of the page, without the driver's messages about reading pixels."""
    return [e for e in opened.errors if "GL Driver Message" not in e]


def pixels(page, pane="volume"):
    from PIL import Image

    # Two frames: the current one, and the one with the changes.
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    shot = page.locator(f"[data-pane={pane}] canvas").screenshot()
    return np.asarray(Image.open(io.BytesIO(shot)).convert("RGB")).astype(int)


def positions(page):
    return page.evaluate("Voxtune.panes.map((p) => Array.from(p.nv.frac2mm(p.nv.scene.crosshairPos)).slice(0, 3))")


def bright_side(page):
    """The horizontal position of the brightest grey in an axial view, as a fraction of the width."""
    image = pixels(page)
    grey = np.ptp(image, axis=2) < 12
    inner = np.zeros(grey.shape, bool)
    inner[40:-40, 40:-40] = True  # without the letters at the edges
    _, columns = np.nonzero(grey & inner & (image.min(axis=2) > 200))
    assert len(columns) > 50
    return float(np.median(columns)) / image.shape[1]


def test_panes_are_drawn_linked_and_show_values(open_page, page_file):
    opened = open_page(page_file, wait="ready", width=800)
    page = opened.page
    assert opened.requests == [page_file.as_uri()]
    assert faults(opened) == []
    images = {pane: pixels(page, pane) for pane in ("volume", "reference")}
    for image in images.values():
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > 50, "blank"

    # The crosshair starts on the tumour in both panes, and the values there are shown.
    readouts = page.locator(".readout").all_inner_texts()
    assert readouts == ["intensity 0.8 · tumour (2)", "intensity 800 · tumour (2)"]
    assert page.locator("#position").inner_text().startswith("R 1")
    assert "23.41 dB" in page.locator("#metrics").inner_text()
    assert "dice tumour" in page.locator("#details").inner_text()

    # A key in one pane moves the crosshair in both.
    page.locator("[data-pane=volume] canvas").focus()
    before = positions(page)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("PageUp")
    after = positions(page)
    assert np.allclose(np.subtract(after, before), [[-4, 0, 4], [-4, 0, 4]], atol=1e-2)
    for pane, image in images.items():
        assert (pixels(page, pane) != image).any(), pane

    # A click does, too: the lower left tile is the axial slice.
    box = page.locator("[data-pane=reference] canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.8)
    assert np.allclose(*positions(page), atol=1e-2)
    assert not np.allclose(positions(page)[0], after[0], atol=1)
    assert faults(opened) == []


def test_mask_window_and_radiological_convention(open_page, page_file):
    page = open_page(page_file, wait="ready", width=800).page
    page.select_option("#layout", "axial")
    with_mask = pixels(page)
    page.uncheck("#outline")
    filled = pixels(page)
    assert (filled != with_mask).any()
    page.get_by_role("button", name="1 brain").click()
    assert (pixels(page) != filled).any()
    page.uncheck("#overlay")
    plain = pixels(page)
    # Without the mask only the crosshair has a colour; with it the block is orange.
    assert (plain[..., 0] - plain[..., 2] > 40).sum() < 20 < (filled[..., 0] - filled[..., 2] > 40).sum()

    page.locator("#window").fill("60")
    assert (pixels(page) != plain).any()
    page.click("#reset-window")
    assert (pixels(page) == plain).all()

    # The patient's right is on the right, except in the radiological convention.
    assert bright_side(page) > 0.52
    page.check("#radiological")
    assert bright_side(page) < 0.48


def test_case_without_reference_and_volume_view(open_page, page_file):
    opened = open_page(page_file, wait="ready", width=390, scheme="dark")
    page = opened.page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.locator("html").get_attribute("data-theme") == "dark"
    page.locator("[data-case='1']").focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("html[data-case='1']")
    assert page.locator("[data-pane=reference]").is_hidden()
    assert page.locator("#overlay").is_disabled() and page.locator("#compare").is_disabled()
    assert "none" in page.locator("#details").inner_text()
    slices = pixels(page)
    page.select_option("#layout", "render")
    volume = pixels(page)
    assert (volume != slices).any() and volume.max() > 60
    page.locator("[data-pane=volume] canvas").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert (pixels(page) != volume).any()
    assert faults(opened) == []


KINDS = ("T1w", "T1ce", "T2w", "FLAIR")
# The brain has the highest value; the pathologies are nested balls in the patient's right.
BRATS = {"1": "necrosis", "2": "oedema", "3": "enhancing tumour", "4": "brain"}


@pytest.fixture(scope="module")
def kinds_page(tmp_path_factory):
    """A subject with four images in BIDS folders, twice generated, and another with a T1w image alone."""
    folder = tmp_path_factory.mktemp("kinds")
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in SHAPE), indexing="ij")
    mask = np.where(x**2 + y**2 + z**2 < 0.9, 4, 0)
    for radius, value in ((0.4, 2), (0.3, 3), (0.2, 1)):
        mask[(x + 0.4) ** 2 + y**2 + z**2 < radius**2] = value
    anat = folder / "out" / "sub-1" / "anat"
    for place, kind in enumerate(KINDS):
        image = np.where(mask > 0, 0.2 + 0.2 * place, 0).astype(np.float32)
        for number in ("01", "02"):
            middle = f"ce-gadolinium_desc-synth{number}_T1w" if kind == "T1ce" else f"desc-synth{number}_{kind}"
            put(anat / f"sub-1_{middle}.nii.gz", image)
        put(folder / "real" / f"sub-1_{kind.lower()}.nii.gz", np.rint(image * 1000).astype(np.int16))
    put(folder / "real" / "sub-1_dseg.nii.gz", mask.astype(np.uint8))
    put(folder / "real" / "sub-2_t1.nii.gz", np.rint(image * 1000).astype(np.int16))
    put(folder / "out" / "sub-2" / "anat" / "sub-2_desc-synth01_T1w.nii.gz", image)
    (anat / "sub-1_desc-synth01_T1w.json").write_text(json.dumps({"labels": BRATS}))
    return view_page(folder / "out", folder / "view.html", real=folder / "real").path


def press(page, *keys, case=None, kind=None):
    """Presses keys, and waits for the case and the image that they lead to."""
    for key in keys:
        page.keyboard.press(key)
    if case is not None:
        page.wait_for_selector(f"html[data-case='{case}'][data-kind='{kind}']")


def coloured(page, colour, pane="volume"):
    """The number of pixels with the hue of a label, of any brightness."""
    image = pixels(page, pane) / 255
    wanted = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    norms = np.linalg.norm(image, axis=2) * np.linalg.norm(wanted)
    return int(((image @ wanted > 0.985 * norms) & (image.max(axis=2) > 0.25)).sum())


OEDEMA, ENHANCING, BRAIN = "#e69f00", "#009e73", "#cc79a7"


def test_the_3d_view_shows_the_pathology_through_the_volume(open_page, kinds_page):
    opened = open_page(kinds_page, wait="ready", width=800)
    page = opened.page
    # The label with the highest value is the brain.
    readouts = page.locator(".readout").all_inner_texts()
    assert readouts == ["intensity 0.2 · necrosis (1)", "intensity 200 · necrosis (1)"]
    press(page, "5")
    for pane in ("volume", "reference"):
        assert coloured(page, OEDEMA, pane) > 300, pane
    assert coloured(page, BRAIN) < 20, "the brain's surface would hide what is inside"
    both = coloured(page, OEDEMA)
    # Without the oedema, the enhancing part inside it is seen better; without the mask, nothing.
    page.get_by_role("button", name="2 oedema").click()
    assert coloured(page, OEDEMA) < both / 4 and coloured(page, ENHANCING) > 200
    press(page, "m")
    assert coloured(page, ENHANCING) < 20 and page.locator("#overlay").is_checked() is False
    # The largest surface is first, so that the smaller ones are drawn over it; it is where the label is: a ball with 0.4 of
    # the half axes of 38, 46 and 34 mm around (15.2, 0, 0) mm.
    number = {row["value"]: row["number"] for row in page.evaluate("Voxtune.data.labels")}
    meshes = page.evaluate("Voxtune.panes[0].nv.meshes.map((m) => [m.label, ...m.extentsMin, ...m.extentsMax])")
    assert [row[0] for row in meshes] == [number[value] for value in (2, 3, 1)]
    assert np.allclose(meshes[0][1:], [0, -18.4, -13.6, 30.4, 18.4, 13.6], atol=4)
    assert faults(opened) == []


def test_hidden_labels_have_no_outline(open_page, kinds_page):
    page = open_page(kinds_page, wait="ready", width=800).page
    press(page, "2")
    assert page.locator("#outline").is_checked() and coloured(page, BRAIN) > 100
    page.get_by_role("button", name="4 brain").click()
    assert coloured(page, BRAIN) < 20 and coloured(page, OEDEMA) > 100
    page.get_by_role("button", name="4 brain").click()
    assert coloured(page, BRAIN) > 100


@pytest.mark.slow
def test_keys_of_cases_and_images(open_page, kinds_page):
    opened = open_page(kinds_page, wait="ready", width=700)
    page = opened.page
    assert page.locator("#place").inner_text() == "1 / 3"
    assert page.locator(".cases li").all_inner_texts()[0].split("\n")[-1] == "synth01, 4 images"
    assert page.locator("#kinds button").all_inner_texts() == list(KINDS)
    press(page, "ArrowLeft", "+")
    place, zoom = positions(page)[0], "Voxtune.panes.map((p) => p.nv.scene.pan2Dxyzmm[3])"
    assert page.evaluate(zoom) == [1.25, 1.25]
    # Another image of the same case at the same place, beside the reference of the same kind.
    for kind, value in (("T1ce", 4), ("T2w", 6), ("FLAIR", 8)):
        press(page, "i", case=0, kind=kind)
        readouts = page.locator(".readout").all_inner_texts()
        assert [r.split(" · ")[0] for r in readouts] == [f"intensity 0.{value}", f"intensity {value}00"]
        assert page.locator("#kinds [aria-pressed=true]").inner_text() == kind
        assert np.allclose(positions(page), [place, place], atol=1e-2) and page.evaluate(zoom) == [1.25, 1.25]
    assert page.locator("[data-pane=reference] .name").inner_text() == "sub-1_flair.nii.gz"
    press(page, "i", case=0, kind="T1w")
    press(page, "Shift+I", case=0, kind="FLAIR")
    # The next case opens on the same kind, at its own lesion; the last one has a T1w image only.
    press(page, "n", case=1, kind="FLAIR")
    assert not np.allclose(positions(page)[0], place, atol=1) and page.evaluate(zoom) == [1, 1]
    press(page, "n", case=2, kind="T1w")
    assert page.locator("#kinds").is_hidden()
    press(page, "n", "i")
    press(page, "p", case=1, kind="FLAIR")
    page.click("#previous")
    page.wait_for_selector("html[data-case='0']")
    # Keys that follow before the first case is drawn.
    press(page, "n", "i", case=1, kind="T1w")
    press(page, "p", case=0, kind="T1w")
    # A click on an image kind keeps the focus there.
    page.get_by_role("button", name="T2w").click()
    page.wait_for_selector("html[data-kind='T2w']")
    assert page.evaluate("document.activeElement.textContent") == "T2w"
    assert faults(opened) == []


@pytest.mark.slow
def test_keys_of_the_view(open_page, kinds_page):
    opened = open_page(kinds_page, wait="ready", width=800)
    page = opened.page
    layouts = []
    for key in "2345":
        press(page, key)
        layouts.append((page.locator("#layout").input_value(), page.evaluate("Voxtune.panes[0].nv.opts.sliceType")))
    assert layouts == [("axial", 0), ("coronal", 1), ("sagittal", 2), ("render", 4)]
    turned = "Voxtune.panes.map((p) => p.nv.scene.renderAzimuth)"
    before = page.evaluate(turned)
    press(page, "ArrowRight")
    assert page.evaluate(turned) == [before[0] + 5] * 2
    press(page, "1")
    # Without the reference the panel is wider; with it, both are at the same place again.
    width = page.locator("[data-pane=volume]").bounding_box()["width"]
    press(page, "c")
    page.wait_for_selector("html[data-case='0']")
    assert page.locator("[data-pane=reference]").is_hidden()
    assert page.locator("[data-pane=volume]").bounding_box()["width"] > 1.5 * width
    press(page, "PageUp", "C")
    page.wait_for_selector("html[data-case='0']")
    assert np.allclose(*positions(page), atol=1e-2)
    place = positions(page)[0]
    press(page, "0")
    assert np.allclose(np.subtract(place, positions(page)[0]), [0, 0, 4], atol=1e-2)
    for key, control in (("o", "#outline"), ("r", "#radiological"), ("m", "#overlay")):
        checked = page.locator(control).is_checked()
        press(page, key)
        assert page.locator(control).is_checked() != checked
    page.locator("#window").fill("50")
    press(page, "w")
    assert page.locator("#window").input_value() == "0"
    # Arrow keys on a slider and letters in a list of choices belong to them.
    page.locator("#level").focus()
    place = positions(page)
    press(page, "ArrowRight")
    assert page.locator("#level").input_value() == "1" and positions(page) == place
    assert faults(opened) == []


def test_the_list_of_keys_is_the_table_of_the_script(open_page, kinds_page):
    opened = open_page(kinds_page, wait="ready", width=420)
    page = opened.page
    page.get_by_role("button", name="Keys").click()
    listed = page.locator("#help dt").all_inner_texts()
    assert page.locator("#help").is_visible() and listed[:3] == ["N", "P", "/"] and "PAGE" in listed[12].upper()
    assert page.evaluate("document.documentElement.scrollWidth") <= 420
    # A key does nothing behind the list; the same key that opens the list closes it.
    press(page, "n", "?")
    assert page.locator("#help").is_hidden() and page.locator("html").get_attribute("data-case") == "0"
    press(page, "?")
    assert page.locator("#help").is_visible()
    press(page, "Escape")
    assert page.locator("#help").is_hidden()
    # With a modifier, a key belongs to the browser.
    press(page, "Control+i")
    assert page.locator("html").get_attribute("data-kind") == "T1w"
    theme = page.locator("html").get_attribute("data-theme")
    press(page, "d")
    assert page.locator("html").get_attribute("data-theme") != theme


def test_a_hundred_cases(open_page, tmp_path):
    array = np.arange(64, dtype=np.int16).reshape(4, 4, 4)
    for number in range(100):
        put(tmp_path / "in" / f"sub-{number:03d}_T1w.nii.gz", array)
    opened = open_page(view_page(tmp_path / "in", tmp_path / "v.html").path, wait="ready", width=1280)
    page = opened.page
    inside = """() => {
      const list = document.querySelector(".cases ol").getBoundingClientRect();
      const box = document.querySelector("[aria-current]").getBoundingClientRect();
      return box.top >= list.top - 1 && box.bottom <= list.bottom + 1 && list.bottom <= innerHeight && scrollY === 0;
    }"""
    assert page.evaluate("document.documentElement.scrollHeight") < 1500, "the list scrolls, not the page"
    assert page.locator("#compare").is_hidden(), "there is nothing to compare with"
    for _ in range(30):
        page.keyboard.press("n")
    page.wait_for_selector("html[data-case='30']")
    assert page.evaluate(inside) and page.locator("#place").inner_text() == "31 / 100"
    press(page, "/")
    page.keyboard.type("07")
    assert page.locator(".cases li:visible").count() == 11
    # Letters go into the field; after Escape they are keys again, and move among the cases that match.
    press(page, "Escape")
    press(page, "n", case=70, kind="T1w")
    press(page, "p", case=7, kind="T1w")
    assert page.evaluate(inside)
    assert faults(opened) == []


def test_hostile_names_are_inert_and_legible(open_page, tmp_path):
    folder = tmp_path / HOSTILE.replace("/", "")
    subject(folder, f"{HOSTILE}-1", level=1.0)
    (folder / "dseg.tsv").write_text(f"index\tname\n1\t{HOSTILE}\n2\t</script><script>window.hacked=1</script>\n")
    (folder / "metrics.json").write_text(
        json.dumps({"figures": [{"name": HOSTILE, "value": HOSTILE, "unit": HOSTILE}]})
    )
    (folder / f"{HOSTILE}-1_desc-synth01_T1w.json").write_text(
        json.dumps({"sampler": HOSTILE, "placement": "</dd><script>"})
    )
    opened = open_page(view_page(folder, tmp_path / "v.html").path, wait="ready", width=700)
    page = opened.page
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, iframe, object, [onerror]").count() == 0
    assert page.locator("script:not([type])").count() == 3
    for place in (".cases", "#labels", "#metrics", "#details"):
        assert HOSTILE in page.locator(place).inner_text(), place
    assert "</script>" in page.locator(".readout").first.inner_text()
    assert faults(opened) == [] and len(opened.requests) == 1


def test_without_webgl2_the_page_shows_a_message(browser, page_file):
    context = browser.new_context()
    context.add_init_script("HTMLCanvasElement.prototype.getContext = () => null")
    page = context.new_page()
    page.goto(page_file.as_uri())
    page.wait_for_selector("html[data-ready]", timeout=60_000)
    assert "no WebGL2" in page.get_by_role("alert").inner_text()
    assert page.locator("canvas").first.is_hidden()
    assert "23.41 dB" in page.locator("#metrics").inner_text()
    context.close()
