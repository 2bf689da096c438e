"""The tables of the documentation agree with the results files, and these are of the model that ships."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest

from voxtune.runtime.storage import demo_model, load, weights_sha256

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "h200" / "demo"


@pytest.fixture
def tables():
    spec = importlib.util.spec_from_file_location("quality_tables", ROOT / "benchmarks" / "quality_tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_contain_the_tables_of_the_files(tables):
    pages = dict(tables.pages())
    assert pages
    for path, text in pages.items():
        assert path.read_text() == text, f"{path}: run python benchmarks/quality_tables.py"
    joined = "".join(pages.values())
    changed = joined.replace("| non-inferior |", "| inferior |")
    assert changed != joined and tables.fill(changed, tables.blocks()) == joined


def test_tables_use_the_words_of_today_for_files_of_version_0_1(tables):
    text = "\n".join(tables.blocks().values())
    for phrase in ("not worse", "| worse:", "not told apart", "240 real", "`real`"):
        assert phrase not in text, phrase
    assert "240 simulated + 240 synthetic" in text and "no significant difference" in text


@pytest.mark.parametrize("name", ["steps", "confirmed", "numerics", "usefulness", "usefulness_ddpm"])
def test_results_are_of_the_model_that_ships(name):
    result = json.loads((RESULTS / f"{name}.json").read_text())
    assert result["model_sha256"] == weights_sha256(demo_model())
    assert result["subjects"] >= 64


def test_the_stored_choice_is_that_of_the_table_over_other_subjects():
    auto = load(demo_model()).config.sampling.auto
    data = (RESULTS / "confirmed.json").read_bytes()
    table = json.loads(data)
    assert hashlib.sha256(data).hexdigest() == auto.evidence.sha256
    chosen = next(row for row in table["rows"] if row["name"] == table["chosen"])
    cache = None if auto.cache is None else {"interval": auto.cache.interval, "depth": auto.cache.depth}
    assert chosen["verdict"] == "not worse"
    assert table["subjects"] >= 128 and table["margin"] == 0.5 and "after the first 64" in table["data"]
    assert [chosen[k] for k in ("sampler", "steps", "spacing", "clip")] == [
        auto.sampler,
        auto.steps,
        auto.timestep_spacing,
        auto.clip,
    ]
    assert chosen.get("cache") == cache
    # And what the search passed, on other subjects, at the same margin, against both draws of the reference.
    search = (RESULTS / "steps.json").read_bytes()
    assert table["confirms"]["sha256"] == hashlib.sha256(search).hexdigest()
    for one in (table, json.loads(search)):
        assert one["margin"] == 0.5 and one["reference_draws"] == 2
        assert next(row for row in one["rows"] if row["name"] == table["chosen"])["verdict"] == "not worse"
