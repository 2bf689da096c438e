"""Deprecated: this module is now `voxtune.training.loop`."""

import warnings

from voxtune.training.loop import *  # noqa: F403

warnings.warn("voxtune.runtime.train is now voxtune.training.loop; the old name goes with 0.3", DeprecationWarning, stacklevel=2)
