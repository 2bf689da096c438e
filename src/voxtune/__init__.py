"""Voxtune makes 3D diffusion U-Nets run near the hardware's limit, and proves it."""

from __future__ import annotations

from voxtune.errors import InputError
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.planned import optimize
from voxtune.runtime.storage import load
from voxtune.versions import __version__

__all__ = ["InputError", "Model", "ModelConfig", "__version__", "load", "optimize"]
