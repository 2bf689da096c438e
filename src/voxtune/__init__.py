"""Voxtune makes 3D diffusion U-Nets run near the hardware's limit, and proves it."""

from __future__ import annotations

from voxtune.errors import InputError
from voxtune.optimizing import optimize
from voxtune.runtime.model import Model, ModelConfig
from voxtune.runtime.storage import load

__version__ = "0.1.0"
__all__ = ["InputError", "Model", "ModelConfig", "__version__", "load", "optimize"]
