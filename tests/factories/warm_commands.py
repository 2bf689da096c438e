"""Imports, and data that a process keeps, for commands that are forked from it (`kills.Commands(modules=...)`)."""

import pandas  # noqa: F401
import pyarrow.parquet  # noqa: F401

import voxtune.evaluation.evaluate
import voxtune.plan.tuner
import voxtune.profile.record
import voxtune.profile.worker
import voxtune.report.build
import voxtune.report.contact_sheet
import voxtune.report.html
import voxtune.report.svg
import voxtune.report.view
import voxtune.report.waterfall  # noqa: F401
from voxtune.data.anatomy import lesion_sites

lesion_sites()
