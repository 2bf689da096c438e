"""Voxtune runs 3D diffusion U-Nets for brain MRI fast, and measures that the result stays the same."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from voxtune.errors import InputError
from voxtune.versions import __version__

if TYPE_CHECKING:
    from voxtune.api.functions import evaluate, train, view
    from voxtune.data.nifti import Volume
    from voxtune.runtime.model import Model, ModelConfig
    from voxtune.runtime.planned import optimize
    from voxtune.runtime.storage import load

__all__ = [
    "InputError",
    "Model",
    "ModelConfig",
    "Volume",
    "__version__",
    "evaluate",
    "load",
    "optimize",
    "train",
    "view",
]

# Imported on first use: they import torch, which takes seconds that `voxtune --help` and shell completion do not need.
_PUBLIC = {
    "Model": "voxtune.runtime.model",
    "ModelConfig": "voxtune.runtime.model",
    "Volume": "voxtune.data.nifti",
    "evaluate": "voxtune.api.functions",
    "load": "voxtune.runtime.storage",
    "optimize": "voxtune.runtime.planned",
    "train": "voxtune.api.functions",
    "view": "voxtune.api.functions",
}


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'voxtune' has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Modules that the documentation of version 0.1 named, and where they are now. Removed in 0.3.
_MOVED = {
    "voxtune.runtime.train": "voxtune.training.loop",
    "voxtune.runtime.trainconfig": "voxtune.training.config",
    "voxtune.quality.overlap": "voxtune.quality.per_volume",
    "voxtune.quality.neighbours": "voxtune.quality.per_volume",
    "voxtune.quality.detail": "voxtune.quality.per_volume",
}


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a module of version 0.1 under its old name, with a deprecation warning."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in _MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return ModuleType(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        new = _MOVED[module.__name__]
        message = f"{module.__name__} is now {new}; the old name will be removed in 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        target = importlib.import_module(new)
        module.__dict__.update({k: v for k, v in vars(target).items() if not k.startswith("__")})


sys.meta_path.append(_MovedModules())
