"""Tiles that were measured on a card: for a shape that has one, it replaces the kernel's own rule.

Why: the rules of conv3d_tiles.py and parity_tiles.py come from measurements of one card and one network, and elsewhere from
arithmetic. plan/tiling.py measures `candidates` beside the rule's tile for the shapes of the network at hand; the table is kept.

A shape is (N, D, H, W of the result or source, channels of each source, output channels, extents of the kernel, strides).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch

from voxtune.kernels.conv3d_tiles import CUBE, RESERVE, Conv3dTile, Device, shape_of_tile
from voxtune.kernels.conv3d_tiles import shared_memory as conv3d_memory
from voxtune.kernels.parity_tiles import ParityTile
from voxtune.kernels.parity_tiles import shared_memory as parity_memory

Tile = TypeVar("Tile", Conv3dTile, ParityTile)
Shape = tuple[int, ...]
# From a card's name and a choice's text to the values of a tile.
_tables: dict[str, dict[str, dict[str, int | bool]]] = {}
MAX_CANDIDATES = 8


@dataclass(frozen=True)
class Choice:
    """A kernel's choice of a tile for a shape on a device."""

    kernel: str
    shape: Shape
    dtype: torch.dtype
    tile: Any  # by the kernel's rule
    device: Device

    @property
    def key(self) -> str:
        return f"{self.kernel} {' '.join(map(str, self.shape))} {str(self.dtype).removeprefix('torch.')}"

    def candidates(self) -> list[Any]:
        """Tiles to measure beside the rule's, which fit into the card's shared memory."""
        if isinstance(self.tile, Conv3dTile):
            tiles: Iterator[Any] = _conv3d_candidates(self.tile, self.shape, self.device)
            memory: Callable[[Any], int] = conv3d_memory
        else:
            tiles = _parity_candidates(self.tile, self.shape)
            memory = functools.partial(parity_memory, doubling=self.kernel == "doubling_conv")
        unique = dict.fromkeys(t for t in tiles if t != self.tile and memory(t) <= self.device.shared - RESERVE)
        return list(unique)[:MAX_CANDIDATES]


_choices: ContextVar[dict[str, Choice] | None] = ContextVar("voxtune_tile_choices", default=None)
_forced: ContextVar[dict[str, Any] | None] = ContextVar("voxtune_tiles_forced", default=None)


def chosen(kernel: str, shape: Shape, x: torch.Tensor, rule: Callable[[], Tile]) -> Tile:
    """The tile for a shape on x's card: a measured one, or the rule's."""
    choices, forced = _choices.get(), _forced.get()
    if not _tables and choices is None and forced is None:
        return rule()
    choice = Choice(kernel, shape, x.dtype, rule(), Device.of(x.device))
    if choices is not None:
        choices[choice.key] = choice
    if forced is not None and choice.key in forced:
        return forced[choice.key]
    values = _tables.get(card(x.device), {}).get(choice.key)
    return choice.tile if values is None else replace(choice.tile, **values)


@functools.cache
def card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def use(name: str, table: dict[str, Any]) -> None:
    """Adds measured tiles of a card. Values that are not those of a tile are ignored: a file may be damaged."""
    mine = _tables.setdefault(name, {})
    mine.update({key: values for key, values in table.items() if _is_tile(key, values)})


def forget() -> None:
    _tables.clear()


def _is_tile(key: str, values: Any) -> bool:
    kind = Conv3dTile if key.startswith("conv3d ") else ParityTile
    if not isinstance(values, dict) or values.keys() != {f.name for f in fields(kind)}:
        return False
    numbers = {name: value for name, value in values.items() if name not in ("swap", "halo")}
    flags = [values[name] for name in ("swap", "halo") if name in values]
    in_range = all(type(n) is int and 0 < n <= 256 for n in numbers.values())
    powers = in_range and all(numbers[name] & (numbers[name] - 1) == 0 for name in ("h", "w", "k", "c", "warps"))
    return powers and all(type(flag) is bool for flag in flags)


@contextmanager
def recording() -> Iterator[dict[str, Choice]]:
    """Records the choices that kernels make inside the block, by their keys."""
    choices: dict[str, Choice] = {}
    token = _choices.set(choices)
    try:
        yield choices
    finally:
        _choices.reset(token)


@contextmanager
def forcing(tiles: dict[str, Any]) -> Iterator[None]:
    """Kernels use these tiles, by the keys of their choices, inside the block."""
    token = _forced.set(tiles)
    try:
        yield
    finally:
        _forced.reset(token)


def _conv3d_candidates(tile: Conv3dTile, shape: Shape, device: Device) -> Iterator[Conv3dTile]:
    N, D, H, W, *_ = shape
    K, kernel = shape[-4], tuple(shape[-3:])
    few = not tile.swap and device.hopper
    if tile.halo:
        yield replace(tile, h=tile.w, w=tile.h)
        if few:
            yield replace(tile, warps=12 - tile.warps if tile.warps in (4, 8) else tile.warps)
            yield replace(tile, h=8, w=16)
        plain = replace(tile, halo=False, inner_stages=4 if tile.c < 64 else 3, outer_stages=3 if tile.c < 64 else 2)
        shapes = shape_of_tile(128, H, W)
        yield replace(plain, h=shapes[0][0], w=shapes[0][1], warps=4)
        return
    if device.halo and kernel == CUBE and device.hopper and tile.k <= 64 and not few and N * D * H * W >= 16**3:
        h, w = (8, 16) if K <= 64 else (16, 8)
        yield Conv3dTile(h=h, w=w, c=tile.c, inner_stages=2, outer_stages=3, halo=True)
    voxels = tile.h * tile.w
    for h, w in shape_of_tile(voxels, H, W)[1:3]:
        yield replace(tile, h=h, w=w)
    for h, w in shape_of_tile(voxels * 2 if voxels < 128 else voxels // 2, H, W)[:1]:
        yield replace(tile, h=h, w=w)
    if tile.split > 1:
        yield replace(tile, split=max(1, tile.split // 2))
    if N * D * H * W < 32**3 and tile.split < 8:
        yield replace(tile, split=2 * tile.split)
    if device.hopper and tile.swap and tile.k == 64 and K > 64:
        yield replace(tile, k=128)
    if tile.k == 128:
        yield replace(tile, k=64)
    if not device.hopper:
        yield replace(tile, warps=12 - tile.warps if tile.warps in (4, 8) else tile.warps)


def _parity_candidates(tile: ParityTile, shape: Shape) -> Iterator[ParityTile]:
    _, _, H, W, *_ = shape
    voxels = tile.h * tile.w
    for h, w in shape_of_tile(voxels, H, W)[1:3]:
        yield replace(tile, h=h, w=w)
    for h, w in shape_of_tile(64 if voxels == 128 else 128, H, W)[:1]:
        yield replace(tile, h=h, w=w)
    yield replace(tile, warps=12 - tile.warps if tile.warps in (4, 8) else tile.warps)
    yield replace(tile, stages=tile.stages + 1 if tile.stages < 4 else 3)
    if tile.c == 64:
        yield replace(tile, c=32)
    if tile.split > 1:
        yield replace(tile, split=tile.split // 2)
