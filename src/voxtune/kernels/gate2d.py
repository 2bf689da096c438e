"""An attention gate over two images: sigmoid(v . relu(A x + B skip + bias) + v0) * skip, one value per pixel, in one launch.

Why: these are eight small operations (three 1x1 convolutions among them), each a launch. The kernel is that of
kernels/convnext/gate.py.

Legend: M pixels of all samples, C channels of x, CS channels of the skip, K hidden channels, KP rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from voxtune.kernels.conv2d import TYPES, counters, processors_of
from voxtune.kernels.conv3d_tiles import shared_limit
from voxtune.kernels.convnext.gate import gate_work
from voxtune.kernels.convnext.tiles import divisor, power_of_two
from voxtune.kernels.group_norm import empty_channels_last
from voxtune.kernels.precompile import ready

MOST_HIDDEN, MOST_SKIP = 512, 1024


def chunk(C: int, CS: int, bytes_each: int) -> int:
    """Input channels that the kernel processes at once."""
    return max(16, min(128 if bytes_each == 2 else 32, divisor(C, 128), divisor(CS, 128)))


def padded(hidden: int) -> int:
    """KP of this many hidden channels."""
    return power_of_two(max(16, hidden))


def pack_gate(a_KC: Tensor, b_KS: Tensor, dtype: torch.dtype) -> Tensor:
    """(C padded + CS padded, KP), from the weights of two 1x1 convolutions."""
    block, columns = chunk(a_KC.shape[1], b_KS.shape[1], dtype.itemsize), padded(a_KC.shape[0])
    rows = (w.detach().flatten(1).t() for w in (a_KC, b_KS))
    return torch.cat([F.pad(w, (0, columns - w.shape[1], 0, -w.shape[0] % block)) for w in rows]).to(dtype).contiguous()


def pack_columns(*addends_K: Tensor) -> Tensor:
    """(KP,) float32: the sum of vectors of K values, padded by zeros."""
    total = sum(a.detach().flatten().float() for a in addends_K)
    assert isinstance(total, Tensor)
    return F.pad(total, (0, padded(total.shape[0]) - total.shape[0])).contiguous()


def gate2d_reference(x: Tensor, skip: Tensor, packed: Tensor, bias: Tensor, v: Tensor, v0: Tensor) -> Tensor:
    """The same in plain PyTorch; float32 arithmetic, or float64 for float64 images."""
    wide = torch.promote_types(x.dtype, torch.float32)
    C, CS = x.shape[1], skip.shape[1]
    at = -(-C // (block := chunk(C, CS, packed.element_size()))) * block
    hidden = torch.einsum("nchw,ck->nkhw", x.to(wide), packed[:C].to(wide))
    hidden = hidden + torch.einsum("nchw,ck->nkhw", skip.to(wide), packed[at : at + CS].to(wide))
    hidden = (hidden + bias.to(wide)[:, None, None]).relu()
    logit = torch.einsum("nkhw,k->nhw", hidden, v.to(wide)) + v0.to(wide)
    return (logit.sigmoid()[:, None] * skip.to(wide)).to(skip.dtype)


@triton.jit
def voxtune_gate2d(
    x_ptr, skip_ptr, w_ptr, bias_ptr, v_ptr, v0_ptr, y_ptr, parts_ptr, count_ptr,
    C: tl.constexpr, CS: tl.constexpr, CP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_S: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The arguments are those of `gate_work`; all images are dense."""
    gate_work(
        x_ptr, skip_ptr, w_ptr, bias_ptr, v_ptr, v0_ptr, y_ptr, parts_ptr, count_ptr, C, CS, CP, C, CS, CS,
        BLOCK_M, BLOCK_C, BLOCK_H, BLOCK_S, PRECISION,
    )  # fmt: skip


def unsupported(size: tuple[int, ...], hidden: int, skip_channels: int) -> str | None:
    """The reason why the kernel does not apply to images of this size, or None."""
    if size[0] * size[1] % 16:
        return f"{size[0]}x{size[1]} pixels are not a multiple of 16"
    if hidden > MOST_HIDDEN or skip_channels > MOST_SKIP:
        return f"{hidden} hidden channels, {skip_channels} channels of the skip"
    return None


def why_not(x: Tensor, skip: Tensor, packed: Tensor) -> str | None:
    """The reason why the kernel does not apply, or None."""
    if x.dtype not in TYPES or skip.dtype != x.dtype or packed.dtype != x.dtype:
        return f"types {x.dtype}, {skip.dtype} and {packed.dtype}"
    if any(not image.movedim(1, -1).is_contiguous() for image in (x, skip)):
        return "an image is not channels-last"
    if x.shape[0] != skip.shape[0] or x.shape[2:] != skip.shape[2:]:
        return "the images differ in size"
    return unsupported(tuple(x.shape[2:]), packed.shape[1], skip.shape[1])


def gate2d(
    x: Tensor, skip: Tensor, packed: Tensor, bias: Tensor, v: Tensor, v0: Tensor, *, checked: bool = False
) -> Tensor:
    """The gated skip in channels-last. `why_not` must be None; `checked`: the caller has called it."""
    assert checked or (reason := why_not(x, skip, packed)) is None, reason
    (N, C, H, W), CS, KP = x.shape, skip.shape[1], packed.shape[1]
    rows = N * H * W
    block_m = max(16, min(divisor(H * W, 64), power_of_two(max(1, rows // 128))))
    # With few pixels, weights are most of what a program reads: split them among eight programs.
    few = rows // block_m <= processors_of(x.device) // 16 and KP >= 128
    block_h = KP // 8 if few else KP
    parts = torch.empty(rows * 8 if few else 0, device=x.device)
    count = counters(packed, rows // block_m) if few else bias
    y = empty_channels_last(skip, CS)
    block_c = chunk(C, CS, x.element_size())
    stages = shared_limit(x.device) // ((block_m + block_h) * block_c * x.element_size())
    ready(voxtune_gate2d)[(rows // block_m * (KP // block_h),)](
        x, skip, packed, bias, v, v0, y, parts, count,
        C=C, CS=CS, CP=KP, BLOCK_M=block_m, BLOCK_C=block_c, BLOCK_H=block_h,
        BLOCK_S=power_of_two(CS), PRECISION="ieee", num_warps=8 if block_h >= 128 else 4, num_stages=max(1, min(3, stages)),
    )  # fmt: skip
    return y
