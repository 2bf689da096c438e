"""The data of a training run: what its settings name, opened and held against the model before any work."""

from __future__ import annotations

from collections.abc import Callable

from voxtune.errors import InputError
from voxtune.runtime.loader import Source, read_item
from voxtune.runtime.model import ModelConfig
from voxtune.runtime.packed import PackedSource
from voxtune.runtime.trainconfig import TrainConfig

Warn = Callable[[str], None]


def open_source(config: TrainConfig, model: ModelConfig, warn: Warn, *, check: bool) -> Source:
    """What `config.data` names, on the model's grid; `check` looks into every file before any work."""
    if model.network.dimensions == 2:
        return _open_images(config, model, warn)
    data, contract = config.data, model.data
    if contract is None:
        raise InputError("this model takes no mask, and the data gives some: train it from Python")
    if data.subjects is not None:
        return PackedSource(data.subjects, contract)
    from voxtune.data.dataset import CohortSource, PairedFolders

    if data.cohort is not None:
        cohort = CohortSource(contract, data.cohort_seed, data.cohort)
        if config.workers > 2:
            cohort.warm(config.workers, warn)
        return cohort
    if data.images is None or data.masks is None:
        raise InputError(
            "no data: give folders (--images DIR --masks DIR), packed subjects (--subjects FILE) or the embedded cohort "
            "(--cohort 64)"
        )
    source = PairedFolders(contract, data.images, data.masks, mode=data.fit)
    if check:
        source.check().tell(warn)
    return source


def _open_images(config: TrainConfig, model: ModelConfig, warn: Warn) -> Source:
    from voxtune.data.cifar import Cifar10

    folder = config.data.images
    if folder is None:
        raise InputError("no data: give the folder of the CIFAR-10 batches (--images DIR)")
    height, width = model.size
    source = Cifar10(folder, size=(height, width), mirror=config.data.mirror is not False)
    if source.missing:
        missing = ", ".join(f"data_batch_{n}" for n in source.missing)
        warn(f"{folder}: training on {len(source.files)} of CIFAR-10's batches; {missing} not found")
    return source


def check_items(source: Source, model: ModelConfig) -> None:
    """The first subject against the model, so that a wrong shape is told before any work."""
    if len(source) < 1:
        raise InputError("the data holds no subjects")
    image, cond = read_item(source, 0)
    network = model.network
    wanted = [
        (network.out_channels, *model.size),
        (network.mask_channels, *model.size) if network.mask_channels else None,
    ]
    found = [tuple(image.shape), None if cond is None else tuple(cond.shape)]
    for what, want, have in zip(("image", "mask"), wanted, found, strict=True):
        if want != have:
            raise InputError(f"the data's {what} has shape {have}, the model takes {want}")


def describe_source(config: TrainConfig, source: Source) -> str:
    """The data of a run in words, for the model card."""
    data, subjects = config.data, len(source)
    if isinstance(source, PackedSource):
        return f"{subjects} subjects packed in `{source.name}`: {source.origin or f'{source.held_out} more held out'}"
    if config.model.dimensions == 2:
        mirrored = " and their mirror images" if data.mirror is not False else ""
        return f"CIFAR-10's training images of `{data.images}`{mirrored}, {subjects} in all; class labels are not used"
    if data.cohort is not None:
        return f"{subjects} subjects of the embedded cohort, seed {data.cohort_seed}"
    return f"{subjects} subjects: images of `{data.images}`, masks of `{data.masks}`"
