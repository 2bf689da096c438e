"""Fixtures: sessions, report pages, volumes, and a headless Chromium that records requests and errors of a page."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.factories.chromium import NO_BROWSER, chromium
from tests.factories.nifti import write_array

FLAGS = [
    "--no-sandbox",
    "--headless=new",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # WebGL in software, so that the viewer is tested without a GPU.
    "--use-angle=swiftshader",
    "--enable-unsafe-swiftshader",
]


@dataclass
class Opened:
    """A page with its requests and console errors."""

    page: Any
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    program = chromium()
    if program is None:
        if os.environ.get("CI") == "true":
            pytest.fail(NO_BROWSER)
        pytest.skip(NO_BROWSER)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        instance = driver.chromium.launch(executable_path=program, args=FLAGS)
        yield instance
        instance.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    yield from _open_page(browser)


@pytest.fixture(scope="module")
def module_open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    """As open_page, for pages that the tests of a module share."""
    yield from _open_page(browser)


def _open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    contexts = []

    def open_it(path: Path, *, width: int = 1280, scheme: str = "light", wait: str = "complete") -> Opened:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        opened = Opened(page)
        # Only files may be loaded; other requests are recorded and aborted.
        page.route("**/*", lambda route: route.continue_() if route.request.url.startswith("file:") else route.abort())
        page.on("request", lambda request: opened.requests.append(request.url))
        page.on("pageerror", lambda error: opened.errors.append(str(error)))
        page.on("console", lambda m: opened.errors.append(m.text) if m.type in ("error", "warning") else None)
        page.on("dialog", lambda dialog: (opened.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(path.as_uri())
        page.wait_for_selector(f"html[data-{wait}]", timeout=60_000)
        return opened

    yield open_it
    for context in contexts:
        context.close()


def _page(folder: Path, sessions: list[Any], **options: Any) -> Path:
    from voxtune.report.build import build
    from voxtune.report.html import render_html

    path = folder / "report.html"
    path.write_text(render_html(build(sessions, **options)), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def two_sessions() -> list[Any]:
    from tests.factories.report_sessions import make

    return [make("baseline", launches=120), make("tf32", launches=120)]


@pytest.fixture(scope="session")
def document(two_sessions: list[Any]) -> Any:
    from voxtune.report.build import build

    return build(two_sessions)


@pytest.fixture(scope="session")
def two_page(document: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from voxtune.report.html import render_html

    path = tmp_path_factory.mktemp("two") / "report.html"
    path.write_text(render_html(document), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.factories.report_sessions import HOSTILE, make

    sessions = [make(c, launches=60, names=HOSTILE) for c in ("baseline", "tf32")]
    return _page(tmp_path_factory.mktemp("hostile"), sessions)


@pytest.fixture(scope="session")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.factories.report_sessions import make

    return _page(tmp_path_factory.mktemp("large"), [make(launches=5000)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A generated volume, its original and its mask, with a label beyond the palette."""
    rng = np.random.default_rng(0)
    mask = np.zeros((6, 7, 8), np.int32)
    mask[2:5, 2:5, 2:5], mask[3, 3, 3] = 1, 4000
    write_array(tmp_path / "in" / "sub-1_desc-synth01_T1w.nii.gz", rng.random((6, 7, 8), dtype=np.float32))
    write_array(tmp_path / "in" / "sub-1_T1w.nii.gz", rng.integers(0, 1000, (6, 7, 8)))
    write_array(tmp_path / "in" / "sub-1_dseg.nii.gz", mask)
    return tmp_path / "in"
