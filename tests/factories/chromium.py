"""The Chromium that browser tests use."""

from __future__ import annotations

import os
import shutil

NO_BROWSER = "no Chromium: run .ci/browser, or set VOXTUNE_CHROMIUM to its program"


def chromium() -> str | None:
    """The program: VOXTUNE_CHROMIUM, or one of the usual names on PATH."""
    named = os.environ.get("VOXTUNE_CHROMIUM")
    names = [named] if named else ["chromium", "chromium-browser", "google-chrome"]
    return next((path for n in names if (path := shutil.which(n))), None)
