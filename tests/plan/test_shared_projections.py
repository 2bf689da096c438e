"""Projections of one input, reshapes of reshapes and casts without effect: what is left in the graph, and the results."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.plan.test_resampling_passes import calls, run

aten, ops = torch.ops.aten, torch.ops.voxtune


class Attention(nn.Module):
    def __init__(self, channels: int = 16, heads: int = 2, *, bias: bool = False):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(channels, channels, bias=bias) for _ in range(3))
        self.out = nn.Linear(channels, channels)

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = (layer(tokens).unflatten(2, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(y).transpose(1, 2).view_as(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("names", [("time",), ("bf16", "time")])
def test_queries_keys_and_values_are_one_product(bias, names):
    torch.manual_seed(0)
    fast, error = run(Attention(bias=bias), torch.randn(2, 16, 3, 4, 5), names=names)
    assert fast.notes["time"] == "applied 3 x"
    assert len(calls(fast, aten.linear.default)) == 2, "one for all three, and the output's"
    assert error < (1e-2 if "bf16" in names else 1e-6)


class Mixed(nn.Module):
    """One projection has a bias and one has none; a third has another input."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x) + self.b(x) + self.c(2 * x)


def test_projections_with_and_without_bias_or_of_other_inputs_are_left():
    fast, error = run(Mixed(), torch.randn(2, 5, 8), names=("time",))
    assert fast.notes["time"].startswith("no effect") and error < 1e-6


class Grouped(nn.Module):
    """A group norm in basic operators that goes from groups to channels and back, then its activation."""

    def forward(self, x):
        groups = x.view(2, 4, 4, *x.shape[2:])
        mean = groups.mean(dim=(2, 3, 4, 5), keepdim=True)
        variance = groups.var(dim=(2, 3, 4, 5), unbiased=False, keepdim=True)
        y = (groups - mean) / torch.sqrt(variance + 1e-5)
        return F.silu(y.view(x.shape).view(groups.shape).view(x.shape))


def test_an_activation_behind_reshapes_is_the_norms_own():
    torch.manual_seed(0)
    fast, error = run(Grouped(), torch.randn(2, 16, 3, 4, 5))
    (norm,) = calls(fast, ops.norm_act.default)
    assert "silu" in norm.args and not calls(fast, aten.silu.default) and not calls(fast, aten.reshape.default)
    assert error < 1e-6


class Video(nn.Module):
    """Frames as images: nearest upsampling behind casts, and a convolution; then a causal head of 3 channels."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(16, 8, 3, padding=1), nn.Conv3d(8, 3, 3)

    def forward(self, x):
        n, c, t, h, w = x.shape
        frames = x.permute(0, 2, 1, 3, 4).reshape(n * t, c, h, w)
        large = F.interpolate(frames.float(), scale_factor=(2.0, 2.0), mode="nearest-exact").type_as(frames)
        video = self.conv(large).view(n, t, 8, 2 * h, 2 * w).permute(0, 2, 1, 3, 4)
        return self.head(F.pad(video, (1, 1, 1, 1, 2, 0)))


@pytest.mark.parametrize("half", [None, "bf16"])
def test_frames_are_doubled_and_a_causal_head_has_any_number_of_outputs(half):
    from tests.factories.networks import REWRITING

    torch.manual_seed(0)
    fast, error = run(Video(), torch.randn(2, 16, 3, 4, 4), names=REWRITING if half is None else (half, *REWRITING))
    assert len(calls(fast, ops.doubling_conv.default)) == 1 and not calls(fast, aten.type_as.default)
    (head,) = calls(fast, ops.conv3d.default)
    assert head.kwargs["padding"] == [2, 0, 1, 1, 1, 1] and not calls(fast, aten.conv3d.default)
    assert error < (1e-6 if half is None else 1e-2)


def test_a_head_of_three_channels_follows_changed_weights():
    from tests.factories.networks import REWRITING

    torch.manual_seed(0)
    network, x = Video().eval(), torch.randn(1, 16, 2, 4, 4)
    fast, _ = run(network, x, names=REWRITING)
    with torch.no_grad():
        network.head.bias.add_(3.0)
        network.head.weight.mul_(-2.0)
        expected = network(x)
    torch.testing.assert_close(fast(x), expected, rtol=1e-5, atol=1e-5)
