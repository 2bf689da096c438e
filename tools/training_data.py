"""Writes the `training_data` block of the models that ship with the package, from the simulated subjects of their cards.

.venv/bin/python tools/training_data.py
"""

from __future__ import annotations

import json
from pathlib import Path

from voxtune.config import to_mapping
from voxtune.data.dataset import CohortSource
from voxtune.data.training_data import TrainingData, measure, measured_numbers, summarise
from voxtune.files import write_file
from voxtune.runtime.storage import demo_model, load, read_json
from voxtune.segmentation.segmenter import load_segmenter, shipped_segmenter

# Subjects 0 to N - 1 of cohort seed 0, as in the model cards.
SUBJECTS = {demo_model(): 480, shipped_segmenter(): 240}


def statistics(folder: Path, subjects: int) -> TrainingData:
    load_any = load_segmenter if folder == shipped_segmenter() else load
    contract = load_any(folder).config.data
    assert contract is not None
    source = CohortSource(contract, 0, subjects)
    measured = []
    for number in measured_numbers(subjects, contract):
        images_CDHW, cond_CDHW = source[number]
        spacing = max(contract.spacing)
        measured.append(measure(contract, cond_CDHW=cond_CDHW, images_CDHW=images_CDHW, spacing_mm=spacing))
    return summarise(measured, contract, subjects)


def main() -> None:
    for folder, subjects in SUBJECTS.items():
        file = folder / "config.json"
        data = {**read_json(file), "training_data": to_mapping(statistics(folder, subjects))}
        write_file(file, (json.dumps(data, indent=2) + "\n").encode(), state=True)
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
