"""The HTML page in a browser: interaction, narrow screens, hostile names, loading time."""

from __future__ import annotations

import pytest

from tests.factories.report_sessions import HOSTILE

SECTIONS = [
    *(
        "summary",
        "time",
        "mix",
        "phases",
        "modules",
        "timeline",
        "ledger",
        "precision",
        "memory",
        "roofline",
        "instructions",
    ),
    *(
        "ipc",
        "pipes",
        "caches",
        "warps",
        "stalls",
        "priority",
        "components",
        "compare",
        "window",
        "networks",
        "study",
        "advice",
    ),
    *("coverage", "environment"),
]


@pytest.fixture(scope="module")
def shared_page(module_open_page, two_page):
    """One page for the tests that each use a section of their own."""
    return module_open_page(two_page).page


@pytest.fixture
def page(shared_page):
    shared_page.mouse.move(0, 0)
    return shared_page


def column(page, table: str, n: int) -> list[str]:
    return page.locator(f'[data-table="{table}"] tbody tr td:nth-child({n})').all_inner_texts()


def numbers(texts: list[str]) -> list[float]:
    return [float(t.replace(",", "")) for t in texts]


def test_opens_without_network_or_errors(open_page, two_page):
    opened = open_page(two_page)
    assert opened.requests == [two_page.as_uri()]
    assert opened.errors == []
    assert [s.get_attribute("id") for s in opened.page.locator("section").all()] == SECTIONS
    undrawn = opened.page.locator("figure:visible:not([data-drawn])")
    assert undrawn.count() == 0
    assert opened.page.locator(".badge.good").count() >= 2


def test_page_forbids_all_requests(open_page, two_page):
    opened = open_page(two_page)
    tried = "fetch('https://example.org/').then(() => 'sent', () => 'refused')"
    assert opened.page.evaluate(tried) == "refused"
    assert all(r.startswith("file:") for r in opened.requests)
    assert any("Content Security Policy" in e for e in opened.errors)


def test_sorts_by_keyboard_and_pointer(page):
    button = page.locator('[data-table="mix-table-0"] th button').nth(1)
    button.focus()
    page.keyboard.press("Enter")
    falling = numbers(column(page, "mix-table-0", 2))
    assert falling == sorted(falling, reverse=True)
    assert page.locator('[data-table="mix-table-0"] th').nth(1).get_attribute("aria-sort") == "descending"
    button.click()
    rising = numbers(column(page, "mix-table-0", 2))
    assert rising == sorted(rising)
    assert rising != falling


def test_missing_values_sort_last_both_ways(page):
    button = page.locator('[data-table="coverage-table-0"] th button').nth(1)
    for _ in range(2):
        button.click()
        shares = column(page, "coverage-table-0", 2)
        measured = [s != "–" for s in shares]
        assert any(measured)
        assert not all(measured)
        assert measured == sorted(measured, reverse=True)


def test_filters_and_opens_long_tables(page):
    study = page.locator('[data-table="study-table-0"]')
    assert study.locator("tbody tr").count() == 40
    study.get_by_role("button", name="Show all").click()
    assert study.locator("tbody tr").count() > 60
    host = page.locator('[data-table="modules-table-0"]')
    # A few more than 40 rows are shown at once.
    assert 40 < host.locator("tbody tr").count() <= 45
    host.get_by_role("searchbox").fill("middle_block")
    names = column(page, "modules-table-0", 1)
    assert names
    assert all("middle_block" in n for n in names)
    host.get_by_role("searchbox").fill("no such module")
    assert host.locator("tbody tr").count() == 0


def test_columns_of_detail_are_shown_on_request(page):
    host = page.locator('[data-table="time-table-0"]')
    heads = host.locator("th").count()
    host.get_by_role("button", name="more columns").click()
    assert host.locator("th").count() > heads
    assert "host bound" in host.locator("thead").inner_text()
    host.get_by_role("button", name="Fewer columns").click()
    assert host.locator("th").count() == heads


OVERFLOWING = """[...document.querySelectorAll('.scroll')]
    .filter((s) => s.offsetParent && !s.closest('details:not([open])') && s.scrollWidth > s.clientWidth + 1)
    .map((s) => s.closest('[data-table]').dataset.table)"""


def test_no_table_needs_sideways_scrolling_at_1280(open_page, two_page):
    page = open_page(two_page, width=1280).page
    for tab in page.locator("[role=tab]").all():
        tab.click()
        assert page.evaluate(OVERFLOWING) == []


def test_the_path_of_the_treemap_starts_at_the_root(page):
    option = "Voxtune.charts.build.tree(Voxtune.data.figures['modules-tree-0'], Voxtune.charts.theme(), 800).option.series[0]"
    # Without a leaf depth, ECharts shows the path of whatever is in the middle of the chart.
    assert page.evaluate(f"{option}.leafDepth") == 99
    assert page.evaluate(f"{option}.name") == "all modules"


def test_legend_hides_and_shows_a_series(page):
    figure = page.locator('[data-figure="mix-ms"]')
    plot = figure.locator(".plot")
    plot.scroll_into_view_if_needed()
    before = plot.screenshot()
    button = figure.get_by_role("button", name="norm", exact=True)
    button.click()
    page.mouse.move(0, 0)
    assert button.get_attribute("aria-pressed") == "false"
    assert plot.screenshot() != before
    button.click()
    page.mouse.move(0, 0)
    assert button.get_attribute("aria-pressed") == "true"
    assert plot.screenshot() == before


def test_hover_shows_values(page):
    plot = page.locator('[data-figure="time-wall"] .plot')
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 20)
    tip = plot.locator(".tip")
    tip.wait_for(state="visible")
    assert "baseline" in tip.inner_text()
    assert "ms" in tip.inner_text()


def test_timeline_names_the_launch_and_zooms(page):
    figure = page.locator('[data-figure="timeline-0"]')
    plot = figure.locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 35)
    tip = figure.locator(".float .tip")
    tip.wait_for(state="visible")
    assert "µs" in tip.inner_text()
    page.mouse.move(0, 0)
    before = plot.screenshot()
    figure.get_by_role("button", name="Zoom in").click()
    page.mouse.move(0, 0)
    assert plot.screenshot() != before
    figure.get_by_role("button", name="Reset zoom").click()
    page.mouse.move(0, 0)
    assert plot.screenshot() == before


@pytest.mark.slow
def test_the_recorded_sessions_open(open_page, tmp_path):
    """The page of the shipped sessions opens quickly and is complete."""
    from voxtune.cli.main import main

    path = tmp_path / "recorded.html"
    assert main(["report", "--recorded", "-o", str(path), "-q"]) == 0
    assert path.stat().st_size < 6e6
    opened = open_page(path, scheme="dark")
    page = opened.page
    assert not opened.errors
    assert float(page.locator("html").get_attribute("data-ready")) < 5000
    assert "12 of 12 sessions" in page.locator(".badges").inner_text()
    assert page.evaluate(OVERFLOWING) == []
    for section in page.locator("section:not(#summary)").all():
        assert section.locator("figure, table").count() >= 1, section.get_attribute("id")
    page.locator("#window [role=tab]", has_text="sampling").click()
    assert page.locator("#window-panel1 table").first.is_visible()


def test_tabs_show_another_configuration(page):
    tabs = page.locator("#pipes [role=tab]")
    assert tabs.all_inner_texts() == ["baseline (H200)", "tf32 (H200)"]
    tabs.first.focus()
    page.keyboard.press("ArrowRight")
    assert tabs.nth(1).get_attribute("aria-selected") == "true"
    assert page.locator("#pipes-panel0").is_hidden()
    assert page.locator("#pipes-panel1 canvas").first.is_visible()


def test_theme_follows_the_system_and_the_button(open_page, two_page):
    opened = open_page(two_page, scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = opened.page.evaluate(ground)
    assert opened.page.locator("html").get_attribute("data-theme") == "dark"
    plot = opened.page.locator('[data-figure="time-wall"] .plot')
    before = plot.screenshot()
    opened.page.locator("#theme").click()
    assert opened.page.locator("html").get_attribute("data-theme") == "light"
    assert opened.page.evaluate(ground) != dark
    assert plot.screenshot() != before
    assert opened.errors == []


def test_fits_a_phone(open_page, two_page):
    page = open_page(two_page, width=390).page
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    widest = page.evaluate("Math.max(...[...document.querySelectorAll('.plot canvas')].map(c => c.clientWidth))")
    assert 0 < widest <= 390


def test_prints(open_page, two_page):
    opened = open_page(two_page, scheme="dark")
    assert len(opened.page.pdf()) > 50_000
    assert opened.errors == []


def test_hostile_names_are_inert_and_legible(open_page, hostile_page):
    opened = open_page(hostile_page)
    page = opened.page
    for tab in page.locator("[role=tab]").all():
        tab.click()
    for plot in page.locator(".plot:visible").all():
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, svg, iframe, object").count() == 0
    assert page.locator("[onerror], [onload], [onmouseover], [onclick]").count() == 0
    assert page.locator("script").count() == 4
    assert opened.requests == [hostile_page.as_uri()]
    assert opened.errors == []
    assert any(HOSTILE[0] in text for text in page.locator("h3").all_inner_texts())
    names = page.evaluate("Voxtune.data.figures['timeline-0'].names")
    assert set(names) == set(HOSTILE)


def test_five_thousand_launches_open_in_two_seconds(open_page, large_page):
    times = []
    while len(times) < 3 and min(times, default=2000) >= 2000:
        opened = open_page(large_page, wait="ready")
        times.append(float(opened.page.locator("html").get_attribute("data-ready")))
    # From the start of navigation; the best of three, since the machine may be busy.
    assert min(times) < 2000, times
    assert large_page.stat().st_size < 3_000_000
