"""Dice against MONAI's, and nearest neighbours that are known."""

from __future__ import annotations

import pytest
import torch
from monai.metrics import DiceMetric

from voxtune.quality.per_volume import copies, dice, nearest


def test_dice_is_monais():
    random = torch.Generator().manual_seed(0)
    asked, found = (torch.randint(0, 3, (8, 8, 8), generator=random) for _ in range(2))
    onehot = [torch.nn.functional.one_hot(x, 3).movedim(-1, 0)[None] for x in (found, asked)]
    theirs = DiceMetric(include_background=False, reduction="none")(*onehot)[0]
    for value in (1, 2):
        assert dice(asked, found, value) == pytest.approx(float(theirs[value - 1]), abs=1e-6)


def test_dice_of_known_overlaps():
    asked, found = torch.zeros(4, 4, 4), torch.zeros(4, 4, 4)
    asked[:2] = 1
    found[1:3] = 1
    assert dice(asked, asked, 1) == 1.0
    assert dice(asked, found, 1) == 0.5
    assert dice(asked, torch.zeros(4, 4, 4), 1) == 0.0
    assert dice(torch.zeros(4, 4, 4), found, 1) is None


def test_nearest_by_rms_and_never_itself():
    training = torch.tensor([[0.0, 0.0], [3.0, 4.0], [10.0, 0.0]])
    found = nearest(torch.tensor([[3.0, 3.0], [9.0, 0.0]]), training)
    assert found.index == (1, 2)
    assert found.distance == pytest.approx((0.5**0.5, 0.5**0.5))
    unseen = nearest(training, training, skip=[0, 1, 2])
    assert unseen.index == (1, 0, 1)
    assert min(nearest(training, training).distance) == 0.0


def test_copies_are_far_nearer_than_any_unseen_volume():
    assert copies([0.1, 0.49, 0.51, 2.0], [1.0, 3.0]) == [1.0, 1.0, 0.0, 0.0]
