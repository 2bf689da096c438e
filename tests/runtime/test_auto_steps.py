"""Settings for `steps="auto"`: stored with the model, read back and validated; a warning if none are stored."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch

import voxtune
from tests.factories import GOLDENS
from voxtune.cli.main import main
from voxtune.diffusion import SAMPLERS, TIMESTEP_SPACINGS
from voxtune.errors import InputError
from voxtune.runtime.model import Model
from voxtune.runtime.sampling import AutoSampling, Evidence, FeatureCache, SamplerSettings, SamplingConfig
from voxtune.runtime.storage import read_safetensors, store_auto

EVIDENCE = Evidence(file="steps.json", sha256="0" * 64, subjects=64, summary="ddim, 3 steps: non-inferior to ddpm, 10")
AUTO = AutoSampling(sampler="ddim", steps=3, timestep_spacing="leading", clip=False, evidence=EVIDENCE)


@pytest.fixture
def folder(tmp_path):
    checkpoint = str(GOLDENS / "med_ddpm_tiny.pt")
    assert main(["import", checkpoint, "-o", str(tmp_path / "m"), "--size", "16,16,16", "-q"]) == 0
    return tmp_path / "m"


@pytest.fixture
def cond():
    return torch.sign(torch.randn(1, 2, 16, 16, 16, generator=torch.Generator().manual_seed(0)))


def test_auto_uses_the_stored_settings(folder, cond):
    plain = voxtune.load(folder)
    store_auto(folder, AUTO)
    model = voxtune.load(folder)
    assert model.config.sampling.auto == AUTO
    assert replace(model.config.sampling, auto=None) == plain.config.sampling
    explicit = plain.sample(cond, sampler="ddim", steps=3, timestep_spacing="leading", clip=False)
    assert torch.equal(model.sample(cond, steps="auto"), explicit)
    assert torch.equal(model.sample(cond), explicit)
    assert torch.equal(model.sample(cond, sampler="ddpm"), plain.sample(cond))


def plain_settings(**change):
    """The stored settings with a change."""
    stored = {"sampler": "ddim", "steps": 3, "timestep_spacing": "leading", "clip": False}
    return SamplerSettings(**{**stored, **change})


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"steps": 5}, plain_settings(steps=5)),
        ({"steps": 3}, plain_settings()),
        ({"clip": True}, plain_settings(clip=True)),
        ({"timestep_spacing": "linspace", "steps": 4}, plain_settings(timestep_spacing="linspace", steps=4)),
        ({"sampler": "ddim", "steps": 2}, plain_settings(steps=2)),
        ({"cache": 2}, plain_settings(cache=FeatureCache(interval=2))),
        # Another sampler has the model's defaults.
        ({"sampler": "unipc", "steps": 5}, SamplerSettings(sampler="unipc", steps=5)),
        ({"sampler": "ddpm"}, SamplerSettings(sampler="ddpm", steps=10)),
    ],
)
def test_an_option_changes_only_what_it_names(options, expected):
    stored = replace(AUTO, cache=FeatureCache(interval=3, depth=0))
    sampling = SamplingConfig(auto=stored)
    settings = sampling.resolve(10, **options)
    assert settings == expected and type(settings) is SamplerSettings
    assert sampling.resolve(10) is stored and sampling.unmeasured(stored) is None
    note = sampling.unmeasured(settings)
    assert note is not None and "ddim, 3 steps, leading timesteps" in note and settings.describe() in note
    nothing_stored = SamplingConfig().unmeasured(settings)
    assert nothing_stored is None if settings.cache is None else "cache 2 was not measured" in nothing_stored


def test_the_stored_settings_given_by_hand_are_measured():
    sampling = SamplingConfig(auto=AUTO)
    settings = sampling.resolve(10, sampler="ddim", steps=3, timestep_spacing="leading", clip=False)
    assert sampling.unmeasured(settings) is None and settings.describe() in AUTO.describe()
    assert settings.describe() == "ddim, 3 steps, leading timesteps, not clamped"


def test_every_sampler_and_spacing_can_be_stored(folder):
    for sampler, spacing in itertools.zip_longest(SAMPLERS, TIMESTEP_SPACINGS, fillvalue="trailing"):
        auto = AutoSampling(sampler=sampler, steps=2, timestep_spacing=spacing, evidence=EVIDENCE)
        store_auto(folder, auto)
        assert voxtune.load(folder).config.sampling.auto == auto


def test_auto_without_stored_settings_warns_and_uses_the_default(folder, cond, caplog):
    model = voxtune.load(folder)
    assert torch.equal(model.sample(cond, steps="auto"), model.sample(cond))
    assert "no settings are stored" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"sampler": "unipc"}, "omit sampler"), ({"clip": True}, "omit clip"), ({"steps": "few"}, "'auto'")],
)
def test_options_that_contradict_the_stored_settings_are_refused(folder, cond, arguments, message):
    config = voxtune.load(folder).config
    model = Model(replace(config, sampling=replace(config.sampling, auto=AUTO)))
    with pytest.raises(InputError, match=message):
        model.sample(cond, **{"steps": "auto", **arguments})


def test_a_config_without_auto_loads(folder):
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    del stored["sampling"]["auto"]
    path.write_text(json.dumps(stored))
    assert voxtune.load(folder).config.sampling.auto is None


def test_a_config_of_version_0_1_loads(folder):
    """It called the spacing of the timesteps `spacing`, as the contract calls that of the voxels."""
    store_auto(folder, AUTO)
    path = folder / "config.json"
    expected = voxtune.load(folder).config
    text = path.read_text()
    assert text.count('"timestep_spacing"') == 2 and expected.sampling.auto.timestep_spacing == "leading"
    path.write_text(text.replace('"timestep_spacing"', '"spacing"'))
    assert voxtune.load(folder).config == expected
    stored = json.loads(text)
    stored["sampling"]["spacing"] = "linspace"  # both names
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match="unknown setting 'spacing'"):
        voxtune.load(folder)


def test_the_former_name_of_a_keyword_is_deprecated(folder):
    model = voxtune.load(folder)
    with pytest.warns(DeprecationWarning, match="timestep_spacing") as caught:
        assert model.resolve(steps=2, spacing="leading") == model.resolve(steps=2, timestep_spacing="leading")
        model.sample(model.example_mask(), steps=1, spacing="leading")
        model.draw(model.example_labels(), steps=1, spacing="leading")
    # Python shows deprecation warnings only at the line of the caller.
    assert [warning.filename for warning in caught] == [__file__] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 11}, "exceed the 10"),
        ({"steps": 0}, "at least 1"),
        ({"steps": "3"}, "expected int"),
        ({"sampler": "no-such-sampler"}, "unknown sampler 'no-such-sampler'"),
        ({"timestep_spacing": "karras"}, "unknown timestep spacing 'karras'"),
        ({"clip": 1}, "expected bool"),
        ({"more": 1}, "unknown setting"),
        ({"evidence": None}, "expected a mapping"),
        ({"evidence": {**vars(EVIDENCE), "sha256": "x" * 64}}, "64 hexadecimal"),
        ({"evidence": {**vars(EVIDENCE), "file": "../steps.json"}}, "without a folder"),
        ({"evidence": {**vars(EVIDENCE), "subjects": 0}}, "at least 1"),
        ({"evidence": {**vars(EVIDENCE), "summary": "a\nb"}}, "one line"),
    ],
)
def test_invalid_values_are_refused_with_the_file_and_the_setting(folder, change, message):
    store_auto(folder, AUTO)
    path = folder / "config.json"
    stored = json.loads(path.read_text())
    stored["sampling"]["auto"] |= change
    path.write_text(json.dumps(stored))
    with pytest.raises(InputError, match=message) as caught:
        voxtune.load(folder)
    assert str(path) in str(caught.value)


def test_settings_cannot_be_stored_in_a_published_checkpoint():
    with pytest.raises(InputError, match="voxtune import"):
        store_auto(GOLDENS / "med_ddpm_tiny.pt", AUTO)


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x09" + b"\0" * 7 + b'{"a": 12}'])
def test_damaged_weights_are_refused(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage)
    with pytest.raises(InputError, match="damaged"):
        read_safetensors(path)
