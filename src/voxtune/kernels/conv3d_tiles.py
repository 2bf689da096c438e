"""The tile of each convolution: chosen from measurements, not searched at run time; and what the device allows."""

from __future__ import annotations

import functools
import importlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import triton

from voxtune.files import one_line

log = logging.getLogger("voxtune")
# Bytes of shared memory for one program, by compute capability.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
CUBE = (3, 3, 3)
# Without multiprocessors, where the interpreter runs: enough for several programs.
CPU_PROCESSORS = 4
# Barriers of the kernel, and what the compiler adds.
RESERVE = 1 << 10


@dataclass(frozen=True, kw_only=True)
class Conv3dTile:
    """What a program of voxtune_conv3d computes: two planes of h x w voxels, k output channels, c input channels per step."""

    h: int
    w: int
    k: int = 64
    c: int = 64
    swap: bool = True  # output channels, not voxels, are the rows of the product
    warps: int = 4
    inner_stages: int = 3  # tiles in flight: of the inner input planes, and of the outer ones
    outer_stages: int = 2
    split: int = 1  # programs that share the taps of a tile
    halo: bool = False  # by conv3d_halo.py; then tiles in flight of x (2 or 4), and of weights (3)

    def constants(self) -> dict[str, int | bool]:
        """The kernel's compile-time arguments."""
        return {
            "TH": self.h,
            "TW": self.w,
            "TK": self.k,
            "TC": self.c,
            "SWAP": self.swap,
            "INNER_STAGES": self.inner_stages,
            "OUTER_STAGES": self.outer_stages,
        }


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the choice of a tile depends on."""

    hopper: bool = True
    halo: bool = True  # conv3d_halo.py can be used
    shared: int = SHARED_MEMORY[90]
    processors: int = 132

    @staticmethod
    def of(device: torch.device) -> Device:
        return _simulated.get() or _device_of(device)


_simulated: ContextVar[Device | None] = ContextVar("voxtune_simulated_device", default=None)


@contextmanager
def simulated_device(device: Device) -> Iterator[None]:
    """Tensors of any device inside the block, which are fake, are treated as if they were on this one."""
    token = _simulated.set(device)
    try:
        yield
    finally:
        _simulated.reset(token)


def simulates_device() -> bool:
    return _simulated.get() is not None


@functools.cache
def _device_of(device: torch.device) -> Device:
    hopper = is_hopper(device)
    halo, processors = hopper and has_gluon(), CPU_PROCESSORS
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Device(hopper=hopper, halo=halo, shared=shared_limit(device), processors=processors)


def is_hopper(device: torch.device) -> bool:
    """ROCm devices report compute capability 9 too."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def has_copy_engine(device: torch.device) -> bool:
    """Whether tiles are loaded by descriptors. The interpreter emulates them."""
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a program can use."""
    if device.type != "cuda":
        return SHARED_MEMORY[90]
    if limit := getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0):
        return int(limit)
    major, minor = torch.cuda.get_device_capability(device)
    return (64 << 10) if torch.version.hip else SHARED_MEMORY.get(10 * major + minor, 99 << 10)


@functools.cache
def has_gluon() -> bool:
    """Whether conv3d_halo.py can be loaded: Gluon's names differ between releases, and old ones lack some."""
    try:
        importlib.import_module("voxtune.kernels.conv3d_halo")
    except Exception as error:  # it also runs Gluon's decorators
        log.warning(
            "Triton %s cannot load the Hopper convolution, using the plain one: %s", triton.__version__, one_line(error)
        )
        return False
    return True


def shared_memory(tile: Conv3dTile) -> int:
    """Bytes of the tile's loads in flight; the kernel uses a few more for barriers."""
    x, w = tile.h * tile.w * tile.c * 2, tile.k * tile.c * 2
    if tile.halo:
        x_ring, w_ring = tile.inner_stages * (tile.h + 2) * tile.w * tile.c * 2, tile.outer_stages * 3 * w
        result = 2 * tile.h * tile.w * tile.k * 2
        return x_ring + w_ring + (result if result > max(x_ring, w_ring) else 0)
    return max(tile.inner_stages * (x + 2 * w), tile.outer_stages * (2 * x + 2 * w))


def shape_of_tile(voxels: int, H: int, W: int) -> list[tuple[int, int]]:
    """Every (h, w) with this many voxels: those that waste least at the edges of an H x W plane first, then the widest."""
    shapes = [(voxels // w, w) for w in (64, 32, 16, 8, 4) if w <= voxels]

    def computed(shape: tuple[int, int]) -> int:
        h, w = shape
        return -(-H // h) * h * -(-W // w) * w

    return sorted(shapes, key=computed)


def chunk_of(channels: tuple[int, ...]) -> int:
    """Input channels per step: the most that computes at most a quarter more channels than there are."""

    def computed(chunk: int) -> int:
        return sum(-(-c // chunk) * chunk for c in channels)

    return next(chunk for chunk in (64, 32, 16) if 4 * computed(chunk) <= 5 * computed(16))


def tiles(
    N: int,
    D: int,
    H: int,
    W: int,
    channels: tuple[int, ...],
    K: int,
    *,
    kernel: tuple[int, ...] = CUBE,
    device: Device | None = None,
) -> Conv3dTile:
    """The tile for a convolution with a result of this size over sources of these channels; by default on Hopper.

    Measured on an H200 for multiples of 64 channels, over every shape of the whole-head network
    (benchmarks/results/h200/conv3d.json). Not yet measured, but by arithmetic: fewer channels, kernels other than 3x3x3,
    and other devices.
    """
    device = device or Device()
    C, c = sum(channels), chunk_of(channels)
    few = K <= 32
    k = max(16, 1 << (K - 1).bit_length()) if few else 64
    if not device.hopper:
        return _for_any_device(H, W, k, c, device.shared)
    V = N * D * H * W
    if V >= 32**3 and device.halo and kernel == CUBE:
        # With few output channels, voxels are the rows: the matrix units take output channels as rows in units of 64.
        if few:
            tile = Conv3dTile(h=16, w=16, k=k, c=c, swap=False, outer_stages=3, halo=True)
            return replace(tile, inner_stages=4 if c < 64 else 2, warps=8 if k == 32 or c == 64 else 4)
        h, w = (8, 16) if K <= 64 else (16, 8)
        return Conv3dTile(h=h, w=w, c=c, inner_stages=2, outer_stages=3, halo=True)
    if V >= 32**3:
        h, w = shape_of_tile(128, H, W)[0]
        return Conv3dTile(
            h=h, w=w, k=k, c=c, swap=not few, inner_stages=4 if c < 64 else 3, outer_stages=3 if c < 64 else 2
        )
    # Too few tiles to fill the GPU: several programs share one.
    h, w = shape_of_tile(64, H, W)[0]
    tile = Conv3dTile(h=h, w=w, k=k, c=c, swap=not few, inner_stages=4, outer_stages=3)
    wide = 128 if K > 64 else k
    if V > 12**3:
        return replace(tile, k=wide if C >= 192 else k, split=2 if C >= 192 else 1)
    steps = math.prod(kernel) * sum(-(-s // c) for s in channels)
    return replace(tile, split=min(9 if C <= 256 else 12, steps))


def _for_any_device(H: int, W: int, k: int, c: int, shared: int) -> Conv3dTile:
    """For instructions that every device has: voxels are the rows, and the tiles in flight fit into its shared memory."""
    h, w = shape_of_tile(128, H, W)[0]
    tile = Conv3dTile(h=h, w=w, k=k, c=c, swap=False, warps=8 if k == 64 else 4)
    for inner, outer, chunk in ((3, 2, c), (2, 2, c), (3, 2, min(c, 32))):
        tile = replace(tile, inner_stages=inner, outer_stages=outer, c=chunk)
        if shared_memory(tile) <= shared - RESERVE:
            break
    return tile
