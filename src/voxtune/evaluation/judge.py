"""What the networks of an evaluation can judge: masks with their labels, and volumes like their training data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from voxtune.data.contract import DataContract, encode_mask, unknown_labels
from voxtune.data.labels import LabelMap
from voxtune.data.modality import listed
from voxtune.data.preflight import check_mask, segmenter_consumer
from voxtune.data.training_data import Measurement, differences, measure, unlike
from voxtune.data.volumeset import Placed, VolumeFiles
from voxtune.errors import InputError
from voxtune.quality.bootstrap import MetricValue
from voxtune.segmentation.segmenter import Segmenter

# A segmenter with a smaller mean Dice on the reference volumes cannot tell whether a synthetic volume has the label.
WEAK_DICE = 0.5
# Findings of a mask that make Dice impossible, while everything else can be computed.
LABEL_FINDINGS = ("unknown-label", "ambiguous", "missing-organ")


def other_labels(masks: Iterable[Path], network: Segmenter) -> str | None:
    """Why the segmenter's labels cannot be compared with the masks; None if they can, or if no mask can be read."""
    paths, contract = list(dict.fromkeys(masks)), network.config.data
    from_image = any(label.from_image for label in contract.labels)
    findings = []
    for path in paths:
        consumer = segmenter_consumer(network.name)
        errors = check_mask(path, contract, consumer, organ_may_miss=from_image).errors
        findings += [error for error in errors if error.code in LABEL_FINDINGS][:1]
    if not findings:
        return None
    problem = findings[0].message.split(";")[0]
    count = f"{len(findings)} of {len(paths)} masks do not have the labels of {network.name}"
    cure = "say what their values mean with --labels, or pass a segmenter for these labels with --segmenter"
    return f"{count} ({contract.describe_labels()}), such as {problem}; {cure}"


def other_names(labels: LabelMap, network: Segmenter) -> str | None:
    """Why stated labels are not those of the segmenter; None if they are."""
    try:
        labels.for_contract(network.config.data, network.name)
    except InputError as error:
        cure = "pass a segmenter for these labels with --segmenter"
        return f"{error}; or {cure}"
    return None


class DomainCheck:
    """Compares the reference volumes with the training data of the networks."""

    def __init__(self, references: Sequence[VolumeFiles]):
        self.references = {file.path for files in references for file in files.images.values()}
        self.rows: dict[str, dict[Path, list[str]]] = {}

    def add(self, network: Segmenter, images: Sequence[Placed]) -> None:
        """Measures a volume on the network's grid, if it is a reference volume; `images` are those that the network reads."""
        training, contract, path = network.config.training_data, network.config.data, images[0].file.path
        rows = self.rows.setdefault(network.name, {})
        if training is not None and path in self.references and path not in rows:
            rows[path] = differences(training, contract, _measured(images, contract))

    def warnings(self) -> list[str]:
        """One line for each network that was not trained for these volumes."""
        lines = [
            unlike([(path.name, lines) for path, lines in rows.items()], "reference volume", name)
            for name, rows in self.rows.items()
        ]
        return [line for line in lines if line is not None]


def _measured(images: Sequence[Placed], contract: DataContract) -> Measurement:
    labels = images[0].labels_DHW
    known = labels is not None and bool(labels.any()) and not unknown_labels(labels, contract)
    return measure(
        contract,
        cond_CDHW=encode_mask(labels, contract) if labels is not None and known else None,
        images_CDHW=np.stack([image.image_DHW for image in images]),
        spacing_mm=max(images[0].spacing),
    )


def weak_segmenter(metrics: Iterable[MetricValue], segmenter: Segmenter) -> str | None:
    """A line about labels that the segmenter does not recognise in the reference volumes."""
    weak = {m.name: m.value for m in metrics if m.name.startswith("dice_") and m.name.endswith("_real")}
    rows = [f"{name} is {value:.2f}" for name, value in weak.items() if value is not None and value < WEAK_DICE]
    if not rows:
        return None
    names = listed([row.split("_real")[0] for row in rows])
    verb = "says" if len(rows) == 1 else "say"
    return f"{segmenter.name} is weak on the reference volumes ({', '.join(rows)}), so {names} {verb} little"
