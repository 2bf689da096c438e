"""`steps="auto"`: stored with the model, read back, checked; without a stored value it says so."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import voxtune
from tests.factories import GOLDENS
from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import AutoSampling, Evidence
from voxtune.runtime.storage import read_plainly, read_safetensors, store_auto

EVIDENCE = Evidence(file="steps.json", sha256="0" * 64, subjects=64, summary="ddim, 3 steps: not worse than ddpm, 10")
AUTO = AutoSampling(sampler="ddim", steps=3, spacing="leading", clip=False, evidence=EVIDENCE)


@pytest.fixture
def folder(tmp_path):
    checkpoint = str(GOLDENS / "med_ddpm_tiny.pt")
    assert main(["import", checkpoint, "-o", str(tmp_path / "m"), "--size", "16,16,16", "-q"]) == 0
    return tmp_path / "m"


@pytest.fixture
def cond():
    return torch.sign(torch.randn(1, 2, 16, 16, 16, generator=torch.Generator().manual_seed(0)))


def test_stored_settings_are_what_auto_draws_with(folder, cond):
    plain = voxtune.load(folder)
    store_auto(folder, AUTO)
    model = voxtune.load(folder)
    assert model.config.sampling.auto == AUTO
    assert replace(model.config.sampling, auto=None) == plain.config.sampling
    by_hand = plain.sample(cond, sampler="ddim", steps=3, spacing="leading", clip=False)
    assert torch.equal(model.sample(cond, steps="auto"), by_hand)
    # Nothing said means the stored choice; a sampler, or a number of steps, is something said.
    assert torch.equal(model.sample(cond), by_hand)
    assert torch.equal(model.sample(cond, sampler="ddpm"), plain.sample(cond))
    assert torch.equal(model.sample(cond, steps=2), plain.sample(cond, steps=2))


def test_without_a_stored_choice_auto_says_so_and_is_the_default(folder, cond, caplog):
    model = voxtune.load(folder)
    assert torch.equal(model.sample(cond, steps="auto"), model.sample(cond))
    assert "no settings are stored" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"sampler": "unipc"}, "omit sampler"), ({"clip": True}, "omit clip"), ({"steps": "few"}, "'auto'")],
)
def test_what_does_not_go_with_auto_is_refused(folder, cond, arguments, message):
    config = voxtune.load(folder).config
    model = Model(replace(config, sampling=replace(config.sampling, auto=AUTO)))
    with pytest.raises(InputError, match=message):
        model.sample(cond, **{"steps": "auto", **arguments})


def test_a_config_from_before_has_no_auto_and_loads(folder):
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    del stored["sampling"]["auto"]
    path.write_text(json.dumps(stored))
    assert voxtune.load(folder).config.sampling.auto is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 11}, "exceed the 10"),
        ({"steps": 0}, "at least 1"),
        ({"steps": "3"}, "expected int"),
        ({"sampler": "euler"}, "unknown sampler"),
        ({"clip": 1}, "expected bool"),
        ({"more": 1}, "unknown setting"),
        ({"evidence": None}, "expected a mapping"),
        ({"evidence": {**vars(EVIDENCE), "sha256": "x" * 64}}, "64 hexadecimal"),
        ({"evidence": {**vars(EVIDENCE), "file": "../steps.json"}}, "without a folder"),
        ({"evidence": {**vars(EVIDENCE), "subjects": 0}}, "at least 1"),
        ({"evidence": {**vars(EVIDENCE), "summary": "a\nb"}}, "one line"),
    ],
)
def test_hostile_values_name_the_file_and_the_setting(folder, change, message):
    store_auto(folder, AUTO)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored["sampling"]["auto"] |= change
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=message) as caught:
        voxtune.load(folder)
    assert str(path) in str(caught.value)


def test_a_published_checkpoint_cannot_store_it():
    with pytest.raises(InputError, match="voxtune import"):
        store_auto(GOLDENS / "med_ddpm_tiny.pt", AUTO)


def test_safetensors_without_the_library_are_the_same(folder):
    tensors, _ = read_plainly(folder / "model.safetensors")
    theirs, _ = read_safetensors(folder / "model.safetensors")
    assert tensors.keys() == theirs.keys()
    assert all(torch.equal(tensors[k], theirs[k]) for k in theirs)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x09" + b"\0" * 7 + b'{"a": 12}'])
def test_damaged_safetensors_are_refused_without_the_library_too(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage)
    with pytest.raises(InputError, match="damaged"):
        read_plainly(path)
