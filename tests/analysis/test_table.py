from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from voxtune.analysis.table import Column, Table, as_text, plain, refuse


def test_round_trips_through_json():
    table = Table(
        "t", [Column("a", kind="text"), Column("b", "ms")], [{"a": "x", "b": np.float64(1.5)}, {"a": "y"}], ["n"]
    )
    again = Table.from_json(json.loads(json.dumps(table.to_json())))
    assert again == table
    assert again.rows == [{"a": "x", "b": 1.5}, {"a": "y", "b": None}]


@pytest.mark.parametrize("value", [None, pd.NA, float("nan"), np.float32("inf"), np.nan])
def test_missing_and_infinite_values_are_none(value):
    assert plain(value) is None


def test_a_row_with_an_unknown_column_is_an_assertion_error():
    with pytest.raises(AssertionError, match="not columns"):
        Table("t", [Column("a")], [{"b": 1}])


def test_a_refusal_is_printed_instead_of_rows():
    assert as_text(refuse("t", "because")) == "t\n  refused: because"


def test_text_shows_missing_as_a_dash_and_hides_control_characters():
    shown = as_text(Table("t", [Column("a", kind="text"), Column("b", "ms", digits=1)], [{"a": "x\x1b[2J", "b": None}]))
    assert "\x1b" not in shown
    assert shown.splitlines()[-1].split() == ["x?[2J", "-"]
