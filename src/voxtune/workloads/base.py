"""The interface of a network to the rest of the package: its configuration, and its entry in the registry.

A network is one file of this package: a configuration class that implements `NetworkConfig`, the `nn.Module`, and one
`Workload` for each published version. `WORKLOADS` in `__init__.py` lists these; no other code names a network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from torch import Tensor, nn

T = TypeVar("T", bound=float)

# Voxels: a level with shorter sides has too few values for its normalisation.
SMALLEST_LEVEL = 4


class NetworkConfig(Protocol):
    """The architecture of a network: a frozen dataclass whose fields are stored in `config.json`.

    The network is called as `network(x, t, cond)` with `out_channels` images and, for `mask_channels` > 0, a mask.
    """

    # Stored as "workload" in config.json.
    family: ClassVar[str]

    @property
    def in_channels(self) -> int: ...

    @property
    def out_channels(self) -> int: ...

    @property
    def mask_channels(self) -> int:
        """0 for an unconditional network."""

    @property
    def dimensions(self) -> int:
        """2 for images, 3 for volumes."""

    @property
    def divisor(self) -> int:
        """Every dimension of the input must be a multiple of this."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of a training run that describe this network, by their name in `ModelSettings`."""

    def build(self) -> nn.Module:
        """The network, freshly initialised."""

    def variant(self, size: tuple[int, ...], *, images: int, labels: int, **settings: Any) -> NetworkConfig:
        """This network for another size and other channels; `settings` replace values of `self.settings`."""

    def likely_size(self) -> tuple[int, ...]:
        """The size that a network of this architecture was most likely trained at."""

    @classmethod
    def infer(cls, state: Mapping[str, Tensor]) -> NetworkConfig | None:
        """The configuration of a state dict; None if the parameters belong to another network.

        May raise KeyError, IndexError or ZeroDivisionError for an incomplete state dict.
        """


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """The defaults of the settings of a training run that depend on the network."""

    batch: int
    accumulation: int
    learning_rate: float
    loss: Literal["l1", "l2"]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A published network with the size, the diffusion and the data that it was published for.

    `size` is in tensor order; `steps` is the length of the diffusion. `contract` holds the fields of the data contract
    (`voxtune.data.contract.DataContract`) except the size, None for a network that takes no mask. At another size the
    contract's grid covers the same field of view, or keeps the voxel spacing if `fixed_spacing`.
    """

    name: str
    network: NetworkConfig
    size: tuple[int, ...]
    steps: int
    schedule: Literal["cosine", "linear"]
    recipe: TrainingRecipe
    contract: Mapping[str, Any] | None = None
    fixed_spacing: bool = False


def levels_that_fit(multipliers: tuple[T, ...], size: tuple[int, ...]) -> tuple[T, ...]:
    """As many of the outermost levels as the size allows."""
    levels = len(multipliers)
    while levels > 1 and any(s % 2 ** (levels - 1) or s // 2 ** (levels - 1) < SMALLEST_LEVEL for s in size):
        levels -= 1
    return multipliers[:levels]
