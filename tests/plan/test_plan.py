"""Plan files: read, written by hand, malformed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from voxtune.errors import InputError
from voxtune.plan.passes import BY_NAME
from voxtune.plan.plan import FORMAT, Plan, Step


def test_round_trip(tmp_path):
    plan = Plan((Step("bf16"), Step("conv3d", {"except": [[64, 64, 8, 8, 8]]})), {"device": "x"}, {"gate": {"a": 1.0}})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan


def test_a_plan_may_list_names_only(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps({"format": FORMAT, "passes": ["tf32", {"pass": "cleanup"}]}))
    assert Plan.load(tmp_path / "p.json").names == ("tf32", "cleanup")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "expected a plan of format"),
        ('{"format": "voxtune-plan/9", "passes": []}', "voxtune-plan/9"),
        (f'{{"format": "{FORMAT}", "passes": {{}}}}', "must be a list"),
        (f'{{"format": "{FORMAT}", "passes": ["bf61"]}}', "did you mean 'bf16'"),
        (f'{{"format": "{FORMAT}", "passes": ["bf16", "bf16"]}}', "given twice"),
        (f'{{"format": "{FORMAT}", "passes": ["bf16", "tf32"]}}', "cannot be combined"),
        (f'{{"format": "{FORMAT}", "passes": [{{"pass": "bf16", "option": 1}}]}}', "unknown entry 'option'"),
        (f'{{"format": "{FORMAT}", "passes": [7]}}', "a pass must be a name"),
        (f'{{"format": "{FORMAT}", "passes": [], "extra": 1}}', "unknown entry 'extra'"),
        (f'{{"format": "{FORMAT}", "passes": [], "evidence": 3}}', "evidence must be an object"),
    ],
)
def test_errors_of_malformed_files(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_unreadable_files(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        Plan.load(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not valid JSON"):
        Plan.load(tmp_path / "binary.json")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(passes=json_values | st.lists(st.sampled_from(sorted(BY_NAME)), max_size=4), rest=json_values)
def test_any_content_is_a_plan_or_an_input_error(passes, rest):
    try:
        plan = Plan.from_json({"format": FORMAT, "passes": passes, "made_for": rest}, "here")
    except InputError as error:
        assert "here" in str(error)
    else:
        assert Plan.from_json(plan.to_json(), "again") == plan
