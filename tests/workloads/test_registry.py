"""A network is known to every command through its entry in the registry alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import voxtune
from voxtune.runtime.describe import describe
from voxtune.runtime.model import Model, workload_config
from voxtune.runtime.storage import save
from voxtune.training.config import make_config
from voxtune.training.loop import train
from voxtune.workloads import FAMILIES, WORKLOADS, TrainingRecipe, Workload, closest_workload, workload
from voxtune.workloads.base import levels_that_fit


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """One convolution of image and mask, scaled by the time step."""

    family: ClassVar[str] = "plain"

    labels: int = 1
    base: int = 4

    in_channels = property(lambda self: 1 + self.labels)
    out_channels = property(lambda self: 1)
    mask_channels = property(lambda self: self.labels)
    dimensions = property(lambda self: 3)
    divisor = property(lambda self: 2)
    settings = property(lambda self: {"base": self.base})

    def build(self) -> nn.Module:
        return PlainNetwork(self)

    def variant(self, size: tuple[int, ...], *, images: int, labels: int, **settings: Any) -> PlainConfig:
        return PlainConfig(labels=labels, **settings)

    def likely_size(self) -> tuple[int, ...]:
        return (4, 4, 4)

    @classmethod
    def infer(cls, state):
        if "plain.weight" not in state:
            return None
        base, channels = state["plain.weight"].shape[:2]
        return cls(labels=channels - 1, base=base)


class PlainNetwork(nn.Module):
    def __init__(self, config: PlainConfig):
        super().__init__()
        self.config = config
        self.plain = nn.Conv3d(config.in_channels, config.base, 3, padding=1)
        self.out = nn.Conv3d(config.base, 1, 1)

    def forward(self, x, t, cond=None):
        return self.out(self.plain(torch.cat([x, cond], dim=1))) / (1 + t.view(-1, 1, 1, 1, 1))


ENTRY = Workload(
    name="plain-head",
    network=PlainConfig(),
    size=(8, 8, 8),
    steps=10,
    schedule="linear",
    recipe=TrainingRecipe(batch=2, accumulation=1, learning_rate=0.01, loss="l2"),
    contract={
        "spacing": (2.0, 2.0, 2.0),
        "orientation": "LPS",
        "labels": ({"name": "head", "value": 1, "channel": 0},),
    },
)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setitem(WORKLOADS, ENTRY.name, ENTRY)
    monkeypatch.setitem(FAMILIES, PlainConfig.family, PlainConfig)


class OneSubject:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return np.zeros((1, 4, 4, 4), np.float32), np.ones((1, 4, 4, 4), np.float32)


@pytest.mark.usefixtures("registered")
def test_a_new_network_is_described_stored_and_loaded(tmp_path):
    config = workload_config("plain-head")
    assert describe(config)["workload"] == "plain"
    assert (config.data.orientation, config.data.size, config.diffusion.steps) == ("LPS", (8, 8, 8), 10)
    save(Model(config), tmp_path / "model", card="card")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["workload"] == "plain"
    assert voxtune.load(tmp_path / "model").config == config


@pytest.mark.usefixtures("registered")
def test_a_new_network_is_imported_from_its_state_dict(tmp_path):
    torch.save(PlainConfig().build().state_dict(), tmp_path / "published.pt")
    torch.save(PlainConfig(labels=3).build().state_dict(), tmp_path / "variant.pt")
    assert voxtune.load(tmp_path / "published.pt").config == workload_config("plain-head")
    variant = voxtune.load(tmp_path / "variant.pt").config
    assert (variant.size, variant.diffusion.schedule, len(variant.data.labels)) == ((4, 4, 4), "linear", 3)


@pytest.mark.usefixtures("registered")
def test_a_new_network_is_trained_with_its_own_recipe(tmp_path):
    overrides = {"model.workload": "plain-head", "model.size": [4, 4, 4], "steps": 2, "sample_every": 0, "workers": 0}
    config = make_config({}, overrides, "options")
    assert (config.batch, config.learning_rate, config.loss) == (2, 0.01, "l2")
    result = train(config, OneSubject(), tmp_path / "run")
    model = voxtune.load(result.model)
    assert (model.config.family, model.config.data.spacing) == ("plain", (4.0, 4.0, 4.0))
    assert model.sample(torch.ones(1, 1, 4, 4, 4), steps=2).shape == (1, 1, 4, 4, 4)
    with pytest.raises(voxtune.InputError, match="plain-head has no attention"):
        make_config({}, {**overrides, "model.attention": [2]}, "options")


def test_the_closest_workload_is_equal_or_has_the_same_channels():
    brats = workload("med-ddpm-brats").network
    assert closest_workload(brats).name == "med-ddpm-brats"
    assert closest_workload(brats.variant((32, 32, 32), images=4, labels=4)).name == "med-ddpm-brats"
    assert closest_workload(brats.variant((32, 32, 32), images=2, labels=7)).name == "med-ddpm"


def test_levels_stop_where_a_side_is_odd_or_short():
    assert levels_that_fit((1, 2, 3, 4), (64, 64, 8)) == (1, 2)
    assert levels_that_fit((1, 2, 3, 4), (7, 64, 64)) == (1,)
