"""Run by test_gradient_kernels.py in processes of their own: prints its findings as one line of JSON."""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

import torch

from tests.kernels.small_kernels_checks import (
    ALL_TYPES,
    KINDS,
    PRODUCT_TYPES,
    Draw,
    build,
    channels_last,
    finding,
    typed,
)
from voxtune.kernels import channel_sums, conv3d, edge_gradients, group_norm, packing, upsample, upsample_backward
from voxtune.kernels import pointwise as pointwise_kernels

# (batch, channels, voxels of the source)
UPSAMPLE = [
    (1, 64, (4, 5, 6)),
    (2, 10, (3, 3, 3)),
    (1, 192, (1, 1, 2)),
    (1, 16, (17, 2, 3)),
    (1, 7, (2, 1, 9)),
    (2, 32, (5, 7)),
    (1, 129, (1, 1)),
    (2, 64, (9, 8)),
    (1, 64, (2, 9, 11)),
]


def of_upsample(draw, mode):
    for case in UPSAMPLE[:4] if draw.whole else UPSAMPLE:
        batch, channels, voxels = case
        dy = channels_last(draw(batch, channels, *(2 * side for side in voxels)))
        x = torch.zeros(batch, channels, *voxels, dtype=torch.float64, requires_grad=True)
        (truth,) = torch.autograd.grad(upsample.upsample_reference(x, mode), x, dy.double())
        with patch.object(upsample_backward, "ENOUGH", 1 if draw.whole else 10**6):  # long walks, and the shortest
            yield finding((*case, mode), upsample_backward.upsample_backward(dy, mode), truth)
        expected = upsample_backward.upsample_backward_reference(dy.double(), mode)
        yield finding((*case, mode, "reference"), channels_last(expected), truth)


def of_sums(draw):
    for batch, channels, voxels in UPSAMPLE:
        x = channels_last(draw(batch, channels, *(3 * side for side in voxels)))
        sums = channel_sums.channel_sums(x)
        truth = x.double().flatten(2).sum(2)
        assert torch.equal(sums, channel_sums.channel_sums(x)), "two runs differ"
        size = x.double().flatten(2).abs().sum(2).norm()
        error = float((sums.sum(1).double() - truth).norm() / size)
        yield finding((batch, channels, voxels), sums.sum(1), truth) | {"error": error, "last": True}
        reference = channel_sums.channel_sums_reference(x.double())
        assert reference.shape == (batch, 1, channels) and torch.allclose(reference[:, 0], truth, atol=1e-9)


def compile_sums(arch, kinds):
    for kind in kinds:
        constants = {"UNIT": 1, "BLOCK_C": 64, "BLOCK_V": channel_sums.TILE // (64 * KINDS[kind].itemsize)}
        constants |= {"STAGES": channel_sums.STAGES}
        pointers = typed("x_ptr", kind) | typed("sums_ptr", "fp32")
        yield build(channel_sums.voxtune_channel_sums, arch, pointers, constants, num_warps=8)


# (batch, channels of the narrow tensor, channels-last, of the wide tensor, voxels, whether taps are ahead)
EDGES = [
    (1, 1, False, 64, (3, 4, 5), True),
    (2, 3, True, 64, (2, 3, 6), True),
    (2, 1, False, 64, (3, 2, 33), False),
    (1, 4, True, 40, (4, 3, 17), False),
    (1, 8, False, 72, (2, 2, 3), True),
    (1, 1, True, 128, (1, 1, 1), False),
    (2, 3, True, 16, (7, 5), True),
    (1, 4, False, 32, (3, 130), False),
    (1, 2, False, 7, (2, 3, 5), False),
]


def of_edges(draw):
    for case in EDGES:
        batch, few, last, many, voxels, ahead = case
        # The narrow tensor is float32 whatever the wide one is: the kernel casts it.
        narrow = draw(batch, few, *voxels, dtype=torch.float32)
        narrow, wide = channels_last(narrow) if last else narrow, channels_last(draw(batch, many, *voxels))
        cast = narrow.to(draw.dtype).double().requires_grad_(False)
        convolution = torch.nn.functional.conv3d if len(voxels) == 3 else torch.nn.functional.conv2d
        x, y = (cast, wide.double()) if ahead else (wide.double(), cast)
        weight = torch.zeros(y.shape[1], x.shape[1], *[3] * len(voxels), dtype=torch.float64, requires_grad=True)
        (dw,) = torch.autograd.grad(convolution(x, weight, padding=1), weight, y)
        truth = dw.flatten(2).permute(2, 1, 0) if ahead else dw.flatten(2).permute(2, 0, 1)
        columns = wide.double().transpose(0, 1).flatten(1)
        # Sums of random signs: relative to those of the absolute values.
        y_sums, size = columns.sum(1), columns.abs().sum(1).norm()
        for sums, ones in (
            edge_gradients.tap_sums(narrow, wide, ahead=ahead),
            edge_gradients.tap_sums_reference(narrow.to(draw.dtype).double(), wide.double(), ahead=ahead),
        ):
            yield finding(case, ones[None], y_sums[None]) | {
                "last": True,
                "error": float((ones - y_sums).norm() / size),
            }
            yield finding(case, sums, truth) | {"last": True}
        again = edge_gradients.tap_sums(narrow, wide, ahead=ahead)
        assert all(map(torch.equal, again, edge_gradients.tap_sums(narrow, wide, ahead=ahead))), "two runs differ"


def compile_edges(arch, kinds):
    for kind in kinds:
        for F, C, ahead in ((1, 64, False), (3, 64, True), (4, 64, True), (8, 64, True)):
            tile = edge_gradients.tile_of(F, 27, C, 128, KINDS[kind])
            constants = {"F": F, "TAPS": 27, "AHEAD": ahead, "PRECISION": "ieee", "s_w": 1}
            pointers = typed("wide_ptr", kind) | typed("narrow_ptr sums_ptr", "fp32")
            yield build(edge_gradients.voxtune_tap_sums, arch, pointers, constants, **tile)


# (channels out, channels in, taps along each axis)
PACKED = [(64, 64, (3, 3, 3)), (48, 20, (3, 3, 3)), (7, 130, (1, 3, 3)), (70, 9, (3, 1, 1)), (1, 1, (1, 1, 1))]


def packing_is_exact():
    """Whether weights are moved as PyTorch moves them, bit by bit, for each pair of types."""
    rows = []
    for K, C, taps in PACKED:
        for own in ALL_TYPES:
            weight = torch.randn(K, C, *taps, dtype=own)
            for dtype in ALL_TYPES:
                packed, expected = packing.pack_taps(weight, dtype), conv3d.pack(weight).to(dtype)
                back = packing.unpack_taps(packed, weight.shape, own)
                first = C // 3
                opposite = packing.opposite_taps(packed, first, C - first)
                # The interpreter truncates where a GPU rounds to nearest.
                step = 2**-7 if dtype == torch.bfloat16 else 0.0
                rows.append(
                    {
                        "case": [K, C, *taps, str(own), str(dtype)],
                        "packed": bool(torch.allclose(packed.float(), expected.float(), rtol=step, atol=0.0)),
                        "back": bool(torch.equal(back, conv3d.unpack(packed.to(own), taps))) or own == torch.bfloat16,
                        "opposite": bool(torch.equal(opposite, packing.opposite_reference(packed, first, C - first))),
                    }
                )
    return rows


def compile_packing(arch, _kinds):
    tile = packing._taps_tile(64 * 64, 27)[1] | {"T": 27}
    yield build(packing.voxtune_pack_taps, arch, {"weight_ptr": "*fp32", "packed_ptr": "*bf16"}, {}, **tile)
    yield build(packing.voxtune_unpack_taps, arch, {"weight_ptr": "*fp32", "packed_ptr": "*bf16"}, {}, **tile)
    tile = {"BLOCK_K": 64, "BLOCK_C": 64}
    yield build(packing.voxtune_opposite_taps, arch, typed("packed_ptr opposite_ptr", "bf16"), {}, **tile)


def remembered():
    """How often sums are computed for the shifts of operators, whose gradients come from norms, sums and other operators."""
    from voxtune.kernels import gradients

    gradients.register_gradients()
    generator = torch.Generator().manual_seed(0)
    counted = []
    counting = channel_sums.channel_sums

    def counted_sums(x):
        counted.append(tuple(x.shape))
        return counting(x)

    def draw(*shape):
        x = torch.randn(*shape, generator=generator)
        return (channels_last(x) if len(shape) > 2 else x).requires_grad_()

    ops = torch.ops.voxtune
    N, C, voxels = 2, 16, (3, 4, 5)
    a, b, skip = (draw(N, C, *voxels) for _ in range(3))
    one, each, weight, bias, matrix = draw(1, C), draw(N, C), draw(C), draw(C), draw(C, C)
    target = draw(N, C, *voxels).detach()

    def norm(x):
        return ops.norm_act_kept([x], weight, bias, 4, 1e-5, None, "silu", 0.0, None, None, [])[0]

    def norm_reference(x):
        return group_norm.norm_act_reference((x,), weight.double(), bias.double(), 4, 1e-5, None, "silu")

    def once(add, norm, pointwise):
        return norm(add(a, b, one))

    def of_the_batch(add, norm, pointwise):
        return norm(add(a, b, each))

    def twice(add, norm, pointwise):
        y = add(a, b, one)
        return norm(y) + norm(y * 1.0)

    def handed_on(add, norm, pointwise):
        # The residual receives the gradient that the product receives.
        return pointwise(a, matrix, one, pointwise(skip, matrix, each, None))

    def plain_add(x, y, shift):
        return pointwise_kernels.add_reference(x.double(), y.double(), shift.double())

    def plain_pointwise(x, matrix, shift, residual):
        residual = None if residual is None else residual.double()
        return pointwise_kernels.pointwise_reference((x.double(),), matrix.double(), shift.double(), residual)

    def own_pointwise(x, matrix, shift, residual):
        return ops.pointwise([x], matrix, shift, residual)

    rows = []
    for case in (once, of_the_batch, twice, handed_on):
        shifts = {once: [one], of_the_batch: [each], twice: [one], handed_on: [one, each]}[case]
        with patch.object(channel_sums, "channel_sums", counted_sums):
            counted.clear()
            y = case(ops.add, norm, own_pointwise)
            own = torch.autograd.grad((y * target).sum(), shifts)
        z = case(plain_add, norm_reference, plain_pointwise)
        true = torch.autograd.grad((z * target.double()).sum(), shifts)
        rows.append(
            {
                "case": case.__name__,
                "sums": len(counted),
                "error": max(float((p.double() - q).norm() / q.norm()) for p, q in zip(own, true, strict=True)),
                "apart": len({g.untyped_storage().data_ptr() for g in own}) == len(own),
            }
        )
    x = torch.randn(1, 2, 3, 4, 5)
    channel_sums.remember_sums(x, x.new_zeros(1, 1, 2))
    held = channel_sums.remembered_sums(x) is not None
    x.add_(1.0)
    rows.append({"case": "written to", "held": held, "holds": channel_sums.remembered_sums(x) is not None})
    return rows


def trained():
    """Whether stem and head follow a weight that an optimizer writes to: the error of each before and after."""
    from voxtune.kernels import ops

    rows = []
    generator = torch.Generator().manual_seed(0)
    x, y = (channels_last(torch.randn(1, c, 2, 3, 4, generator=generator)) for c in (2, 16))
    stem, head = (torch.randn(k, c, 3, 3, 3, generator=generator) for k, c in ((16, 2), (2, 16)))
    for step in range(3):
        for name, z, source, weight in (
            ("stem", ops.stem([x], stem, None), x, stem),
            ("head", ops.head(y, head, None), y, head),
        ):
            truth = torch.nn.functional.conv3d(source, weight, padding=1)
            rows.append({"name": name, "step": step, "error": float((z - truth).norm() / truth.norm())})
            weight.mul_(-0.5)
    return rows


def compile_upsample(arch, kinds):
    for kind in kinds:
        constants = {"VOLUME": True, "BLOCK_C": 64}
        pointers = typed("dy_ptr dx_ptr", kind)
        voxels = upsample_backward.TILE // (64 * KINDS[kind].itemsize)
        h, w = upsample_backward.tile_of(voxels)
        tile = {"WALK": 8, "BLOCK_H": h, "BLOCK_W": w, "num_warps": 8}
        yield build(upsample_backward.voxtune_upsample_linear_backward, arch, pointers, constants, **tile)
        tile = {"BLOCK_Q": voxels, "num_warps": 8}
        yield build(upsample_backward.voxtune_upsample_nearest_backward, arch, pointers, constants, **tile)


def numerics(what, whole):
    # Poison what is not written: fresh memory is filled with NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    cases = {
        "linear": [(lambda draw: of_upsample(draw, "linear"), t) for t in ALL_TYPES],
        "nearest": [(lambda draw: of_upsample(draw, "nearest"), t) for t in ALL_TYPES],
        "sums": [(of_sums, t) for t in ALL_TYPES],
        "edges": [(of_edges, t) for t in PRODUCT_TYPES],
    }[what]
    return [{"type": str(t), **row} for function, t in cases for row in function(Draw(t, whole))]


if __name__ == "__main__":
    job, what, option, *kinds = [*sys.argv[1:], "", ""]
    if job in ("remembered", "trained", "packing"):
        result = {"remembered": remembered, "trained": trained, "packing": packing_is_exact}[job]()
    elif job == "numerics":
        result = numerics(what, option == "whole")
    else:
        kernels = {
            "upsample": compile_upsample,
            "sums": compile_sums,
            "edges": compile_edges,
            "packing": compile_packing,
        }
        result = list(kernels[what](int(option), kinds[0].split(",")))
    print(json.dumps(result))
