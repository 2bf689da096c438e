"""Dice compared with MONAI, and known nearest neighbours."""

from __future__ import annotations

import pytest
import torch
from monai.metrics import DiceMetric

from voxtune.quality.per_volume import copies, dice, dice_by_label, nearest


def test_dice_is_monais():
    random = torch.Generator().manual_seed(0)
    mask, predicted = (torch.randint(0, 3, (8, 8, 8), generator=random) for _ in range(2))
    onehot = [torch.nn.functional.one_hot(x, 3).movedim(-1, 0)[None] for x in (predicted, mask)]
    theirs = DiceMetric(include_background=False, reduction="none")(*onehot)[0]
    for value in (1, 2):
        assert dice(mask, predicted, (value,)) == pytest.approx(float(theirs[value - 1]), abs=1e-6)


def test_dice_of_known_overlaps():
    mask, predicted = torch.zeros(4, 4, 4), torch.zeros(4, 4, 4)
    mask[:2] = 1
    predicted[1:3] = 1
    assert dice(mask, mask, (1,)) == 1.0
    assert dice(mask, predicted, (1,)) == 0.5
    assert dice(mask, torch.zeros(4, 4, 4), (1,)) == 0.0
    assert dice(torch.zeros(4, 4, 4), predicted, (1,)) is None


def test_nearest_by_rms_and_never_itself():
    training = torch.tensor([[0.0, 0.0], [3.0, 4.0], [10.0, 0.0]])
    result = nearest(torch.tensor([[3.0, 3.0], [9.0, 0.0]]), training)
    assert result.index == (1, 2)
    assert result.distance == pytest.approx((0.5**0.5, 0.5**0.5))
    unseen = nearest(training, training, skip=[0, 1, 2])
    assert unseen.index == (1, 0, 1)
    assert min(nearest(training, training).distance) == 0.0


def test_copies_are_far_nearer_than_any_unseen_volume():
    assert copies([0.1, 0.49, 0.51, 2.0], [1.0, 3.0]) == [1.0, 1.0, 0.0, 0.0]


def test_dice_of_a_label_with_several_values():
    mask, predicted = torch.tensor([0, 1, 2, 4]), torch.tensor([0, 4, 0, 4])
    assert dice(mask, predicted, (1, 2, 4)) == pytest.approx(2 * 2 / 5)
    assert dice(mask, predicted, (1, 4)) == 1.0
    assert dice(mask, predicted, (4,)) == pytest.approx(2 / 3)
    scores = dice_by_label([(mask, predicted)], {"whole": (1, 2, 4), "core": (1, 4), "other": (7,)})
    assert {name: float(values[0]) for name, values in scores.items()} == {"whole": 0.8, "core": 1.0}
