"""The model of a run for images, and the labels of a run for volumes; for its training see test_loop.py."""

from __future__ import annotations

import pytest

from voxtune.data.contract import Label
from voxtune.errors import InputError
from voxtune.runtime.model import Model, ModelConfig, workload_config
from voxtune.training.config import DataSettings, ModelSettings, TrainConfig, make_config
from voxtune.training.model import model_config
from voxtune.workloads import ConvNeXtConfig, workload


def images(**settings) -> ModelConfig:
    return model_config(TrainConfig(model=ModelSettings(workload="convnext", **settings)))


def test_the_published_network_at_the_size_of_the_data():
    config = images()
    assert config.network == workload("convnext").network
    assert config.size == (32, 32)
    assert (config.diffusion.schedule, config.diffusion.steps, config.data) == ("linear", 100, None)


@pytest.mark.parametrize(
    ("size", "multipliers"), [((64, 64), (1, 2, 4, 8)), ((16, 16), (1, 2, 4)), ((20, 32), (1, 2, 4)), ((4, 4), (1,))]
)
def test_as_many_levels_as_the_size_allows(size, multipliers):
    config = images(size=size)
    assert (config.size, config.network.multipliers) == (size, multipliers)


def test_width_and_levels_from_the_settings():
    config = images(base=8, multipliers=(1.0, 3.0), schedule="cosine", diffusion_steps=7)
    assert config.network == ConvNeXtConfig(width=8, multipliers=(1, 3))
    assert (config.diffusion.schedule, config.diffusion.steps) == ("cosine", 7)
    with pytest.raises(InputError, match="whole numbers"):
        images(multipliers=(1, 1.5))
    with pytest.raises(InputError, match="requires 2 dimensions"):
        images(size=(8, 8, 8))
    with pytest.raises(InputError, match="multiple of 8"):
        images(size=(20, 20), multipliers=(1, 2, 4, 8))


def test_a_stored_model_keeps_its_network():
    start = Model(ModelConfig(network=ConvNeXtConfig(width=8, multipliers=(1, 2)), size=(64, 64))).config
    config = TrainConfig(model=ModelSettings(workload="convnext", init="m"), loss="l2")
    tuned = model_config(config, start)
    assert (tuned.network, tuned.size, tuned.diffusion.loss) == (start.network, (64, 64), "l2")
    smaller = TrainConfig(model=ModelSettings(workload="convnext", init="m", size=(32, 32), base=8, multipliers=(1, 2)))
    assert model_config(smaller, start).size == (32, 32)
    with pytest.raises(InputError, match="base is 8 in m"):
        model_config(TrainConfig(model=ModelSettings(workload="convnext", init="m", base=16)), start)
    with pytest.raises(InputError, match="m is a convnext model; pass --workload convnext"):
        model_config(TrainConfig(model=ModelSettings(init="m")), start)
    with pytest.raises(InputError, match="pass --workload med-ddpm"):
        model_config(config, workload_config("med-ddpm"))


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"images": "a", "masks": "b"}, {}, "convnext has no masks"),
        ({"cohort": 2}, {}, "the simulated subjects are volumes"),
        ({"fit": "pad"}, {}, "convnext has no fit"),
        ({"spacing": (1.0, 1.0, 1.0)}, {}, "convnext has no spacing"),
        ({}, {"attention": (2,)}, "convnext has no attention"),
        ({}, {"blocks": 1}, "convnext has no blocks"),
    ],
)
def test_settings_of_volumes_are_errors_for_images(data, model, message):
    with pytest.raises(InputError, match=message):
        TrainConfig(data=DataSettings(**data), model=ModelSettings(workload="convnext", **model))


def test_settings_of_images_are_errors_for_volumes():
    with pytest.raises(InputError, match="mirror applies to images"):
        TrainConfig(data=DataSettings(mirror=True))
    with pytest.raises(InputError, match="requires 3 dimensions"):
        ModelSettings(size=(32, 32))
    with pytest.raises(InputError, match="images alone train --workload convnext"):
        TrainConfig(data=DataSettings(images="a"))


def test_the_recipe_of_the_workload_is_the_default():
    plain = make_config({}, {"model.workload": "convnext", "batch": 64}, "options")
    assert (plain.batch, plain.accumulation, plain.learning_rate, plain.loss) == (64, 1, 2e-4, "l2")
    volumes = make_config({}, {}, "options")
    assert (volumes.batch, volumes.accumulation, volumes.learning_rate, volumes.loss) == (1, 2, 1e-5, "l1")


def labels_of(start=None, init=None, **data):
    small = {"size": (16, 16, 16), "base": 32, "multipliers": (1,), "attention": ()} if init is None else {}
    settings = ModelSettings(**small, init=init)
    return model_config(TrainConfig(data=DataSettings(**data), model=settings), start).data.labels


FOLDERS = {"images": "images", "masks": "masks"}


def test_the_labels_of_a_new_model():
    head = (Label(name="head", value=1, channel=0), Label(name="tumour", value=2, channel=1))
    assert labels_of(**FOLDERS) == labels_of(**FOLDERS, label_map="model") == head
    # Simulated subjects are skull-stripped.
    assert [label.name for label in labels_of(cohort=2)] == ["brain", "tumour"]
    several = labels_of(**FOLDERS, label_map="tumour=1,4; brain=image")
    assert several == (
        Label(name="tumour", value=1, channel=0, more_values=(4,)),
        Label(name="brain", value=5, channel=1, from_image=True),
    )
    assert labels_of(**FOLDERS, label_map="a=1; b=1,2", overlapping=True)[1].values == (1, 2)
    with pytest.raises(InputError, match="overlapping-labels"):
        labels_of(**FOLDERS, label_map="a=1; b=1,2")
    with pytest.raises(InputError, match="requires folders"):
        labels_of(cohort=2, label_map="a=1")


def test_fine_tuning_keeps_the_labels_of_the_model():
    start = workload_config("med-ddpm")
    assert labels_of(start, "model", **FOLDERS, label_map="head=3; tumor=1,4") == start.data.labels
    with pytest.raises(InputError, match="no label 'brain', only head, tumour"):
        labels_of(start, "model", **FOLDERS, label_map="brain=1,tumour=2")
