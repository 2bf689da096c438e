"""A model whose truth is known: volumes are a mean for each label plus white texture, and the network is the best there is.

With several images, every second one is inverted, as T2w is to T1w.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from voxtune.data.cohort import cohort_contract
from voxtune.data.splits import HeldOut
from voxtune.diffusion import DiffusionConfig
from voxtune.runtime.model import Model, ModelConfig
from voxtune.segmentation.segmenter import Segmenter, SegmenterConfig
from voxtune.workloads import MedDDPMConfig
from voxtune.workloads.segment import SegmentConfig

SIZE = (16, 16, 16)
CONTRACT = cohort_contract(SIZE)
MEANS = (-0.7, 0.0, 0.5)
TEXTURE = 0.1
ONE = ("T1w",)


def means(images):
    """The mean of each class in each image, (C, K)."""
    return np.array([np.array(MEANS) * (-1) ** channel for channel in range(images)])


def contract(images=ONE):
    return replace(CONTRACT, images=images)


class Best(nn.Module):
    """E[noise | x] where x_0 is N(mean of the label, TEXTURE^2)."""

    def __init__(self, schedule):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.levels = schedule.levels(torch.device("cpu"))

    def forward(self, x, t_N, cond):
        alpha, sigma = (level[t_N].view(-1, 1, 1, 1, 1) for level in self.levels)
        classes = (cond > 0).long() * torch.arange(1, 3).view(1, 2, 1, 1, 1)
        mean = torch.from_numpy(means(x.shape[1])).float()[:, classes.amax(dim=1)].transpose(0, 1)
        gain = alpha * TEXTURE**2 / (alpha**2 * TEXTURE**2 + sigma**2)
        x0 = mean + gain * (x - alpha * mean)
        return (x - alpha * x0) / sigma


def model(steps=24, images=ONE):
    channels = {"in_channels": 2 + len(images), "out_channels": len(images)}
    network = MedDDPMConfig(base=32, blocks=1, multipliers=(1, 1), attention=(), **channels)
    config = ModelConfig(network=network, size=SIZE, data=contract(images), diffusion=DiffusionConfig(steps=steps))
    made = Model(config, nn.Linear(1, 1))
    return Model(config, Best(made.schedule))


def subjects(count=10, images=ONE):
    rng = np.random.default_rng(0)
    classes = np.zeros((count, *SIZE), np.uint8)
    for mask in classes:
        a, b = rng.integers(2, 4, 3), rng.integers(12, 14, 3)
        mask[a[0] : b[0], a[1] : b[1], a[2] : b[2]] = 1
        c = rng.integers(5, 8, 3)
        mask[c[0] : c[0] + 3, c[1] : c[1] + 3, c[2] : c[2] + 3] = 2
    volumes = [row[classes] + TEXTURE * rng.standard_normal(classes.shape) for row in means(len(images))]
    return HeldOut(
        contract=contract(images),
        images_NCDHW=torch.from_numpy(np.stack(volumes, axis=1).clip(-1, 1).astype(np.float32)),
        classes_NDHW=torch.from_numpy(classes),
        origin="made",
    )


def segmenter(images=ONE):
    torch.manual_seed(0)
    return Segmenter(SegmenterConfig(network=SegmentConfig(base=4, in_channels=len(images)), data=contract(images)))
