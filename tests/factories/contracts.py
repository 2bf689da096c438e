"""The data contracts of the published networks."""

from __future__ import annotations

from voxtune.runtime.model import workload_config

WHOLE_HEAD = workload_config("med-ddpm").data
BRATS = workload_config("med-ddpm-brats").data
