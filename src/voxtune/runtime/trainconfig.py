"""Deprecated: this module is now `voxtune.training.config`."""

import warnings

from voxtune.training.config import *  # noqa: F403

warnings.warn("voxtune.runtime.trainconfig is now voxtune.training.config; the old name goes with 0.3", DeprecationWarning, stacklevel=2)
