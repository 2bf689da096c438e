"""Run by test_small_images.py in a separate process: the kernels of small 2D images against float64; prints JSON."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels import conv2d, depthwise2d, embedding, gate2d, stem2d
from voxtune.kernels.convnext.tiles import Tile

DEVICE = "cuda" if sys.argv[1:2] == ["cuda"] else "cpu"


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(DEVICE, dtype)


def image(*shape: int, dtype: torch.dtype, mean: float = 0.0) -> Tensor:
    return (draw(*shape) + mean).to(dtype).contiguous(memory_format=torch.channels_last)


GENERATOR = torch.Generator().manual_seed(0)


def error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth.double()).norm() / truth.double().norm())


def wide(values: Any) -> Any:
    if isinstance(values, tuple | list):
        return type(values)(wide(v) for v in values)
    return values.double() if isinstance(values, Tensor) else values


# name: (channels of the sources, outputs, side, stride, double, size, batch, norm, residual, activation, term, tile)
SMALL, WIDE = Tile(block_m=16, block_k=16, block_c=32), Tile(block_m=32, block_k=32, block_c=128, split=6, stages=2)
CONVOLUTIONS: dict[str, tuple[Any, ...]] = {
    "3x3": ((32,), 32, 3, 1, False, (8, 8), 1, False, (), "none", False, None),
    "norm, gelu": ((24,), 40, 3, 1, False, (4, 8), 2, True, (), "gelu", False, None),
    "norm, residual": ((32,), 16, 3, 1, False, (8, 8), 1, True, (16,), "none", True, None),
    "norm, product of two, split": ((64,), 32, 3, 1, False, (8, 8), 1, True, (32, 16), "none", False, replace(SMALL, split=3)),
    "two, ways": ((32, 64), 32, 3, 1, False, (8, 8), 1, False, (), "silu", True, replace(SMALL, ways=2, split=2)),
    "two, chunks of both": ((24, 16), 16, 3, 1, False, (4, 4), 2, False, (), "relu", False, SMALL),
    "two, a chunk over the seam": ((16, 48), 16, 1, 1, False, (4, 4), 1, False, (8, 8), "none", True, SMALL),
    "1x1 after a norm": ((32,), 16, 1, 1, False, (4, 8), 2, True, (), "none", False, None),
    "2x2": ((8,), 24, 2, 2, False, (16, 16), 2, False, (), "none", False, None),
    "3x3, stride 2": ((16, 16), 16, 3, 2, False, (8, 16), 1, False, (), "gelu_tanh", False, None),
    "1x1, stride 2": ((24,), 16, 1, 2, False, (8, 8), 2, False, (), "none", False, None),
    "1x1, upsampled": ((16,), 16, 1, 1, True, (4, 4), 1, False, (16,), "none", False, None),
    "upsampled": ((32,), 16, 3, 1, True, (4, 4), 2, False, (), "none", False, None),
    "wide": ((256,), 64, 3, 1, False, (8, 8), 1, True, (64, 64), "none", False, WIDE),
}  # fmt: skip


def convolution(name: str, dtype: torch.dtype) -> float:
    sources, K, side, stride, double, size, N, norm, residual, activation, term, tile = CONVOLUTIONS[name]
    C = sum(sources)
    x = tuple(image(N, c, *size, dtype=dtype, mean=0.5) for c in sources)
    weight, bias = draw(K, C, side, side) / (C * side * side) ** 0.5, draw(K)
    gamma, beta = 1 + 0.3 * draw(C), 0.3 * draw(C)
    H, W = conv2d.result_size(x[0], stride, double)
    more = tuple(image(N, c, H, W, dtype=dtype) for c in residual)
    product = len(more) == 2
    w2, b2 = (draw(K, sum(residual), 1, 1) * 0.1, draw(K)) if product else (None, None)
    terms = draw(N, K + 8)[:, 4:-4] if term else None
    # The definition, in float64 and with the weights as they are rounded.
    round_ = lambda w: w.to(dtype).double()  # noqa: E731
    y = torch.cat(x, 1).double()
    if norm:
        y = F.group_norm(y, 1, None, None, 1e-5)
    y = F.interpolate(y, scale_factor=2) if double else y
    scaled = weight.double() * (gamma.double()[None, :, None, None] if norm else 1)
    padding = side // 2 if side % 2 else 0
    y = F.conv2d(y, round_(scaled), bias.double(), stride, padding)
    if norm:
        y = y + F.conv2d(beta.double().view(1, C, 1, 1).expand(N, C, *size), weight.double(), padding=padding)
    y = y if terms is None else y + terms.double()[..., None, None]
    if product:
        y = y + F.conv2d(torch.cat(more, 1).double(), round_(w2), b2.double())
    elif more:
        y = y + more[0].double()
    truth = conv2d.activation_reference(y, activation)

    args = (
        conv2d.pack_weight(weight, gamma if norm else None, dtype),
        conv2d.pack_shift(weight, bias, beta if norm else None, b2),
        conv2d.pack_slope(weight, gamma, dtype) if norm else None,
    )
    left = torch.stack([torch.stack([s.double().sum(), s.double().square().sum()]) for s in torch.cat(x, 1)])
    # Two partial sums, of which the kernel makes one.
    sums = torch.stack([0.25 * left, 0.75 * left], -1).float() if norm else None
    packed2 = conv2d.pack_weight(w2, None, dtype) if product else None
    after = (terms, more, packed2, activation, K, side, stride, double, 1e-5)
    worst = error(conv2d.conv2d_reference(wide(x), *wide(args), *wide(after)), truth)
    assert worst < 1e-6, ("reference", name, worst)
    for _ in range(2):
        # The second launch shows what the first one has left behind.
        result, stored = conv2d.conv2d(x, *args, sums, *after, True, tile=tile)
        assert result.shape == truth.shape and result.is_contiguous(memory_format=torch.channels_last)
        worst = max(worst, error(result, truth))
        assert stored is not None
        total = torch.stack([truth.sum((1, 2, 3)), truth.square().sum((1, 2, 3))], 1)
        scale = truth.square().sum((1, 2, 3)).max()
        assert float((stored.double().sum(-1) - total).abs().max() / scale) < (
            1e-2 if dtype != torch.float32 else 1e-5
        ), name
    return worst


# name: (channels of the sources, side, size, batch, bias, term)
DEPTHWISE: dict[str, tuple[Any, ...]] = {
    "7x7": ((32,), 7, (8, 8), 1, True, True),
    "7x7 over two": ((32, 16), 7, (8, 16), 2, True, True),
    "5x5 over two, a tile of both": ((24, 16), 5, (8, 4), 2, False, True),
    "3x3, odd width": ((20,), 3, (6, 10), 2, True, False),
    "7x7, neither": ((16,), 7, (4, 6), 1, False, False),
}


def depthwise(name: str, dtype: torch.dtype) -> float:
    sources, side, size, N, bias, term = DEPTHWISE[name]
    C = sum(sources)
    x = tuple(image(N, c, *size, dtype=dtype) for c in sources)
    weight, b = draw(C, 1, side, side), draw(C) if bias else None
    terms = draw(N, C + 4)[:, 2:-2] if term else None
    truth = F.conv2d(torch.cat(x, 1).double(), weight.to(dtype).double(), wide(b), padding=side // 2, groups=C)
    truth = truth if terms is None else truth + terms.double()[..., None, None]
    args = (depthwise2d.pack_taps(weight, dtype), b, terms, side)
    assert error(depthwise2d.depthwise2d_reference(wide(x), *wide(args)), truth) < 1e-6, name
    y, stored = depthwise2d.depthwise2d(x, *args)
    total = torch.stack([truth.sum((1, 2, 3)), truth.square().sum((1, 2, 3))], 1)
    assert float((stored.double().sum(-1) - total).abs().max() / total.max()) < 1e-4, name
    return error(y, truth)


# name: (channels, channels of the skip, hidden channels, size, batch)
GATES = {
    "gate": (32, 16, 32, (8, 8), 2),
    "unlike": (24, 8, 20, (4, 4), 1),
    # Rows of a tile divided among programs are covered by the ladder's checks.
    "wide": (128, 64, 128, (4, 8), 1),
}


def gate(name: str, dtype: torch.dtype) -> float:
    C, CS, K, size, N = GATES[name]
    x, skip = image(N, C, *size, dtype=dtype), image(N, CS, *size, dtype=dtype)
    a, b, v = draw(K, C, 1, 1) / C**0.5, draw(K, CS, 1, 1) / CS**0.5, draw(1, K, 1, 1) / K**0.5
    bias_a, bias_b, v0 = draw(K), draw(K), draw(1)
    hidden = F.conv2d(x.double(), a.to(dtype).double(), bias_a.double())
    hidden = F.relu(hidden + F.conv2d(skip.double(), b.to(dtype).double(), bias_b.double()))
    truth = F.conv2d(hidden, v.double(), v0.double()).sigmoid() * skip.double()
    args = (gate2d.pack_gate(a, b, dtype), gate2d.pack_columns(bias_a, bias_b), gate2d.pack_columns(v), v0)
    assert error(gate2d.gate2d_reference(x.double(), skip.double(), *args), truth) < 1e-6, name
    return max(error(gate2d.gate2d(x, skip, *args), truth) for _ in range(2))


# name: (channels, outputs, side, size, batch)
STEMS = {"7x7": (3, 32, 7, (8, 8), 2), "5x5": (1, 24, 5, (6, 10), 1), "3x3": (4, 16, 3, (5, 7), 2)}


def stem(name: str, dtype: torch.dtype) -> float:
    C, K, side, size, N = STEMS[name]
    x = draw(N, C, *size)
    weight, bias = draw(K, C, side, side), draw(K)
    truth = F.conv2d(x.to(dtype).double(), weight.to(dtype).double(), bias.double(), padding=side // 2)
    packed, shift = stem2d.pack_window(weight).to(dtype), conv2d.pack_shift(weight, bias, None, None)
    reference = stem2d.stem2d_reference(x.to(dtype).double(), packed.double(), shift, K, side)
    assert error(reference, truth) < 1e-6, name
    layouts = (x, x.contiguous(memory_format=torch.channels_last))
    return max(error(stem2d.stem2d(layout, packed, shift, K, side), truth) for layout in layouts)


# name: (rows, widths, activation, type of the times; None: rows of other values)
EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "one": (1, (16, 64, 64, 70), "gelu", torch.int64),
    "odd": (3, (10, 24, 40, 33), "silu", None),
    "wide": (2, (32, 256, 256, 40), "relu", torch.float32),
}


def time_network(name: str, _dtype: torch.dtype) -> float:
    rows, widths, activation, times = EMBEDDINGS[name]
    weights = [draw(b, a) / a**0.5 for a, b in itertools.pairwise(widths)]
    layers = weights, [draw(b) for b in widths[1:]], activation
    x = draw(rows, widths[0])
    truth = embedding.embedding_reference(x.double(), None, False, *wide(layers))
    if times is None:
        return error(embedding.embedding(x, None, False, *layers), truth)
    x, frequencies = (50 * draw(rows, 1)).to(times), draw(1, widths[0] // 2)
    # The angle is rounded as float32.
    angle = (x.float() * frequencies).double()
    worst = 0.0
    for cosines_first, order in ((False, (angle.sin(), angle.cos())), (True, (angle.cos(), angle.sin()))):
        truth = embedding.embedding_reference(torch.cat(order, 1), None, False, *wide(layers))
        args = (x, frequencies, cosines_first, *layers)
        both = (embedding.embedding(*args), embedding.embedding_reference(*args))
        worst = max(worst, *(error(y, truth) for y in both))
    return worst


CHECKS = {
    "convolution": (convolution, CONVOLUTIONS),
    "depthwise": (depthwise, DEPTHWISE),
    "gate": (gate, GATES),
    "stem": (stem, STEMS),
    "embedding": (time_network, EMBEDDINGS),
}


def numerics(what: str, *types: str) -> list[dict[str, Any]]:
    check, cases = CHECKS[what]
    return [
        {"name": name, "type": kind, "error": check(name, getattr(torch, kind))}
        for name in cases
        for kind in (types[:1] if what == "embedding" else types)
    ]


if __name__ == "__main__":
    print(json.dumps(numerics(*sys.argv[2:])))
