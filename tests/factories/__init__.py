"""What several test modules build: models, volumes, sessions and stand-ins, one module for each kind."""

from __future__ import annotations

from pathlib import Path

GOLDENS = Path(__file__).parent.parent / "goldens"
