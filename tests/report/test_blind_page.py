"""The page of `voxtune evaluate --blind`: the order and the key, and the page in a browser."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest

from tests.factories.nifti import write_array
from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.evaluation.blind import choose_blind_pairs, score_answers
from voxtune.evaluation.describe import find_sets
from voxtune.reading import read_json

COUNT = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Volumes in which a synthetic one can be told from its reference: it is bright on the right half."""
    folder = tmp_path_factory.mktemp("blind")
    random = np.random.default_rng(0)
    for number in range(COUNT):
        image = random.random((20, 24, 18)).astype(np.float32) * 0.2
        image[3:-3, 3:-3, 3:-3] += 0.4
        mask = np.zeros(image.shape, np.uint8)
        mask[3:-3, 3:-3, 3:-3], mask[8:11, 9:12, 7:10] = 1, 2
        write_array(folder / "real" / f"sub-{number}_T1w.nii.gz", image)
        bright = image.copy()
        bright[10:] += 0.4
        write_array(folder / "synth" / f"sub-{number}_desc-synth01_T1w.nii.gz", bright)
        write_array(folder / "masks" / f"sub-{number}_dseg.nii.gz", mask)
    return folder


def blind(data, out, *more):
    folders = [str(data / "real"), str(data / "synth"), "--masks", str(data / "masks")]
    return main(["evaluate", *folders, "--blind", "-o", str(out), "--quiet", *more])


@pytest.fixture(scope="module")
def written(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("out")
    assert blind(data, out) == 0
    return out


def bright_side(picture):
    """Whether the right half of the axial slice is brighter than the left."""
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(picture)).convert("L")).astype(float)
    axial = pixels[:, : pixels.shape[1] // 3]
    half = axial.shape[1] // 2
    return axial[:, half:].mean() > axial[:, :half].mean() * 1.2


def embedded(page):
    data = page.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    return json.loads(data)


def pictures(page):
    return [
        {side: base64.b64decode(pair[side].split(",")[1]) for side in ("A", "B")} for pair in embedded(page)["pairs"]
    ]


def test_the_key_is_right_and_the_page_does_not_hold_it(written):
    page, key = (written / "blind.html").read_text(), read_json(written / "blind-key.json")
    assert key["format"] == "voxtune-blind-key/1" and key["page"] == embedded(page)["page"]
    shown = pictures(page)
    assert len(shown) == len(key["pairs"]) == COUNT
    for pair, row in zip(shown, key["pairs"], strict=True):
        assert {side for side in pair if bright_side(pair[side])} == {row["synthetic"]}
        assert row["synthetic_file"].split("_")[0] == row["reference_file"].split("_")[0]
    sides = [row["synthetic"] for row in key["pairs"]]
    assert sides.count("A") == sides.count("B") == COUNT // 2
    # Nothing on the page differs between the sides but the pixels.
    assert set(embedded(page)) == {"page", "pairs"} and all(set(pair) == {"A", "B"} for pair in embedded(page)["pairs"])
    assert "desc-synth" not in page and "sub-" not in page and "blind-key" not in page
    heads = {picture[:61] for pair in shown for picture in pair.values()}
    assert len(heads) == 1


def test_the_order_depends_on_the_seed_only(data, written, tmp_path):
    assert blind(data, tmp_path / "same") == 0 and blind(data, tmp_path / "other", "--seed", "1") == 0
    for name in ("blind.html", "blind-key.json"):
        first, same, other = ((f / name).read_bytes() for f in (written, tmp_path / "same", tmp_path / "other"))
        assert first == same != other
    sets = find_sets(data / "real", data / "synth")
    orders = {tuple((p.real.subject, p.synthetic) for p in choose_blind_pairs(sets, COUNT, seed)) for seed in range(8)}
    assert len(orders) == 8
    assert len(choose_blind_pairs(sets, 4, 0)) == 4


def test_volumes_of_other_subjects_are_paired_at_random(data):
    from dataclasses import replace

    sets = replace(find_sets(data / "real", data / "synth"), pairs=[])
    pairs = choose_blind_pairs(sets, COUNT, 0)
    assert len({p.real.path for p in pairs}) == len({p.synth.path for p in pairs}) == COUNT


def test_nothing_is_overwritten(data, written, capsys):
    assert blind(data, written) == 2
    assert "blind.html" in capsys.readouterr().err
    assert blind(data, written, "--overwrite") == 0


def test_a_person_answers_in_a_browser(open_page, written, tmp_path):
    opened = open_page(written / "blind.html", width=1100)
    page, key = opened.page, read_json(written / "blind-key.json")
    assert opened.requests == [(written / "blind.html").as_uri()] and opened.errors == []
    assert page.locator("#place").inner_text() == f"Pair 1 of {COUNT}" and page.locator("#export").is_disabled()
    assert page.evaluate("document.getElementById('a').naturalWidth") == 3 * 232

    truth = [row["synthetic"] for row in key["pairs"]]
    for number, side in enumerate(truth):
        if number % 2:
            page.keyboard.press(side.lower())
            page.keyboard.press("2")
            page.keyboard.press("ArrowRight")
        else:
            page.click(f"[data-synthetic={side}]")
            page.click("[data-certainty='3']")
            page.click("#next") if number + 1 < COUNT else None
    assert "All pairs answered" in page.locator("#state").inner_text()
    # The last answer is changed to a wrong one, on the way back it is shown as pressed.
    wrong = "B" if truth[-1] == "A" else "A"
    page.click(f"[data-synthetic={wrong}]")
    page.click("#back")
    assert page.locator(f"[data-synthetic={truth[-2]}]").get_attribute("aria-pressed") == "true"
    page.fill("#judge", "a1")
    assert page.locator("#place").inner_text() == f"Pair {COUNT - 1} of {COUNT}", "a key in the field is no answer"

    # Answers survive a reload, and are saved as a file.
    page.reload()
    page.wait_for_selector("html[data-complete]")
    assert page.input_value("#judge") == "a1" and "All pairs answered" in page.locator("#state").inner_text()
    with page.expect_download() as download:
        page.click("#export")
    download.value.save_as(tmp_path / "answers.json")
    assert download.value.suggested_filename == f"blind-answers-{key['page']}.json"
    answers = read_json(tmp_path / "answers.json")
    assert answers["judge"] == "a1" and [row["pair"] for row in answers["answers"]] == list(range(1, COUNT + 1))
    assert [row["synthetic"] for row in answers["answers"]] == [*truth[:-1], wrong]
    assert [row["certainty"] for row in answers["answers"]] == [3, 2] * (COUNT // 2)
    score = score_answers(written / "blind-key.json", tmp_path / "answers.json")
    assert (score.right, score.answered) == (COUNT - 1, COUNT)

    page.click("#reset")
    assert page.locator("#export").is_disabled() and page.input_value("#judge") == ""
    assert opened.errors == []


def test_a_narrow_page_does_not_scroll_sideways(open_page, written):
    page = open_page(written / "blind.html", width=390).page
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_scores():
    key = {"format": "voxtune-blind-key/1", "page": "x", "pairs": [{"pair": n, "synthetic": "A"} for n in range(1, 25)]}
    rows = [{"pair": n, "synthetic": "A" if n <= 12 else "B"} for n in range(1, 25)]
    answers = {"format": "voxtune-blind-answers/1", "page": "x", "answers": rows}
    score = score_answers(key, answers)
    # Wilson 1927 for 12 of 24.
    assert (score.right, round(score.low, 3), round(score.high, 3)) == (12, 0.314, 0.686)
    assert str(score) == "12 of 24 right: 0.50 (0.31 to 0.69); chance is 0.50"
    with pytest.raises(InputError, match="the answers are of page y"):
        score_answers(key, {**answers, "page": "y"})
    with pytest.raises(InputError, match="not answers"):
        score_answers(key, key)
