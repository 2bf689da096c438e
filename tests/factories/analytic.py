"""A model whose truth is known: volumes are a mean for each label plus white texture, and the network is the best there is."""

from __future__ import annotations

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


class Best(nn.Module):
    """E[noise | x] where x_0 is N(mean of the label, TEXTURE^2)."""

    def __init__(self, schedule):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.levels = schedule.levels(torch.device("cpu"))

    def forward(self, x, t_N, cond):
        alpha, sigma = (level[t_N].view(-1, 1, 1, 1, 1) for level in self.levels)
        classes = (cond > 0).long() * torch.arange(1, 3).view(1, 2, 1, 1, 1)
        mean = torch.tensor(MEANS)[classes.amax(dim=1, keepdim=True)]
        gain = alpha * TEXTURE**2 / (alpha**2 * TEXTURE**2 + sigma**2)
        x0 = mean + gain * (x - alpha * mean)
        return (x - alpha * x0) / sigma


def model(steps=24):
    network = MedDDPMConfig(base=32, blocks=1, multipliers=(1, 1), attention=())
    config = ModelConfig(network=network, size=SIZE, data=CONTRACT, diffusion=DiffusionConfig(steps=steps))
    made = Model(config, nn.Linear(1, 1))
    return Model(config, Best(made.schedule))


def subjects(count=10):
    rng = np.random.default_rng(0)
    classes = np.zeros((count, *SIZE), np.uint8)
    for mask in classes:
        a, b = rng.integers(2, 4, 3), rng.integers(12, 14, 3)
        mask[a[0] : b[0], a[1] : b[1], a[2] : b[2]] = 1
        c = rng.integers(5, 8, 3)
        mask[c[0] : c[0] + 3, c[1] : c[1] + 3, c[2] : c[2] + 3] = 2
    images = np.array(MEANS)[classes] + TEXTURE * rng.standard_normal(classes.shape)
    images = torch.from_numpy(images.clip(-1, 1).astype(np.float32))
    return HeldOut(contract=CONTRACT, images_NDHW=images, classes_NDHW=torch.from_numpy(classes), origin="made")


def segmenter():
    torch.manual_seed(0)
    return Segmenter(SegmenterConfig(network=SegmentConfig(base=4), data=CONTRACT))
