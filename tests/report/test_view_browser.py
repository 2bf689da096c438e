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
    assert page.locator("#overlay").is_disabled()
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
