"""A model: a network, its diffusion and its data contract. `Model.sample` generates volumes or images."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from voxtune.config import from_mapping, to_mapping
from voxtune.data.contract import DataContract, classes_of, encode_mask, example_labels, last_channel
from voxtune.data.orientation import centred_affine
from voxtune.data.training_data import TrainingData
from voxtune.diffusion import (
    DiffusionConfig,
    cached_denoiser,
    full_steps,
    get_sampler,
    make_schedule,
    noise_source,
    spaced_steps,
)
from voxtune.diffusion.noise import check_seed, with_offset
from voxtune.diffusion.samplers import Denoise
from voxtune.diffusion.schedule import noise_in
from voxtune.errors import InputError
from voxtune.files import one_line
from voxtune.runtime.sampling import SamplerOptions, SamplerSettings, SamplingConfig
from voxtune.workloads import FAMILIES, NetworkConfig, Workload, build, split, workload

if TYPE_CHECKING:
    from nibabel.spatialimages import SpatialImage

    from voxtune.data.grid import Mode
    from voxtune.data.labels import Images
    from voxtune.data.nifti import Volume

log = logging.getLogger("voxtune")

FORMAT = "voxtune-model/1"

Progress = Callable[[int, int], None]
# (seed, indices of the samples, shape of one sample, device) -> number of the draw -> noise of the batch
NoiseSource = Callable[[int, Sequence[int], Sequence[int], torch.device], Callable[[int], Tensor]]


def check_size(network: NetworkConfig, size: tuple[int, ...]) -> None:
    """Raises for a size that the network does not support."""
    if len(size) != network.dimensions or any(s < 1 or s % network.divisor for s in size):
        raise InputError(f"size {size}: expected {network.dimensions} dimensions, each a multiple of {network.divisor}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that defines a model, except its weights."""

    network: NetworkConfig
    size: tuple[int, ...]
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    data: DataContract | None = None
    training_data: TrainingData | None = None

    def __post_init__(self) -> None:
        network = self.network
        check_size(network, self.size)
        self.sampling.check(self.diffusion.steps, self.classes)
        if self.data is None:
            return
        if self.data.size != self.size:
            raise InputError(f"data.size {self.data.size} differs from size {self.size}")
        if len(self.data.labels) != network.mask_channels or len(self.data.images) != network.out_channels:
            raise InputError(
                f"the data contract has {len(self.data.labels)} labels and {len(self.data.images)} images, but the "
                f"network has {network.mask_channels} mask channels and {network.out_channels} output channels"
            )

    @property
    def family(self) -> str:
        return self.network.family

    @property
    def classes(self) -> int:
        """The classes of a voxel besides the background: the mask channels, or their combinations if labels overlap."""
        return self.network.mask_channels if self.data is None else len(self.data.regions)

    @property
    def available_steps(self) -> int:
        """The diffusion steps that sampling can use."""
        return self.diffusion.steps if self.sampling.start is None else self.sampling.start + 1

    def to_json(self) -> dict[str, Any]:
        """The content of config.json."""
        return {"format": FORMAT, "workload": self.family, **to_mapping(self)}

    @classmethod
    def from_json(cls, data: Any, where: str) -> ModelConfig:
        """The configuration in the content of a config.json; `where` is the file that error messages name."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            actual = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise InputError(f"{where}: expected a config of format {FORMAT!r}, got {actual!r}")
        family = data.get("workload")
        if not isinstance(family, str) or family not in FAMILIES:
            raise InputError(f"{where}: unknown workload {family!r}; choose from {', '.join(FAMILIES)}")
        rest = {k: v for k, v in data.items() if k not in ("format", "workload")}
        network = from_mapping(FAMILIES[family], rest.pop("network", None), f"{where}: network")
        parts: dict[str, Any] = {
            "diffusion": DiffusionConfig,
            "sampling": SamplingConfig,
            "data": DataContract,
            "training_data": TrainingData,
        }
        values = {k: from_mapping(parts[k], rest.pop(k), f"{where}: {k}") for k in parts if rest.get(k) is not None}
        for optional in ("data", "training_data"):
            rest.pop(optional, None)
        size = rest.pop("size", None)
        if not isinstance(size, list | tuple) or not all(type(s) is int for s in size):
            raise InputError(f"{where}: size must be a list of whole numbers, got {size!r}")
        if rest:
            raise InputError(f"{where}: unknown setting {next(iter(rest))!r}")
        try:
            return cls(network=network, size=tuple(size), **values)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def workload_config(name: str) -> ModelConfig:
    """The configuration of a workload's published model, with its data contract."""
    entry = workload(name)
    diffusion = DiffusionConfig(schedule=entry.schedule, steps=entry.steps)
    return ModelConfig(network=entry.network, size=entry.size, diffusion=diffusion, data=workload_contract(entry))


def workload_contract(entry: Workload) -> DataContract | None:
    """The data contract of a workload, None if it takes no mask."""
    if entry.contract is None:
        return None
    return from_mapping(DataContract, {"size": entry.size, **entry.contract}, f"workload {entry.name}")


def checked_device(device: torch.device | str) -> torch.device:
    """The device of that name, for "auto" a GPU if there is one; raises for a device that this machine does not have."""
    if not isinstance(device, torch.device | str):
        raise InputError(f"device {device!r}: expected a name such as 'cpu' or 'cuda'")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        checked = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {str(device)[:80]!r}: {one_line(error)}") from None
    if checked.type == "cuda" and (checked.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device}: this machine has {torch.cuda.device_count()} CUDA devices; use 'cpu'")
    return checked


class Model:
    """A network with its configuration, for sampling. Returned by `voxtune.load`; without `network`, the weights are random.

    `draw` takes mask files and returns volumes; `sample` and `denoise` are the calls on tensors below it. `noise` computes
    the sampler's noise. Every implementation gives the same noise for a seed, a sample and a draw, up to rounding. `weights`
    tells where the weights are from.
    """

    def __init__(
        self,
        config: ModelConfig,
        network: nn.Module | None = None,
        noise: NoiseSource = noise_source,
        *,
        weights: str | None = None,
    ):
        self.config = config
        self.noise = noise
        self.weights = weights or ("random weights" if network is None else "given weights")
        self.network = (build(config.network) if network is None else network).eval()
        self.schedule = make_schedule(config.diffusion)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def device_name(self) -> str:
        """The name of the GPU, or "cpu"."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type

    def to(self, device: torch.device | str) -> Model:
        """Moves the network to a device and returns the model."""
        self.network.to(checked_device(device))
        return self

    def __repr__(self) -> str:
        data = self.config.data
        parts = [self.config.family, " x ".join(map(str, self.config.size))]
        if data is not None:
            parts.append(f"labels {', '.join(label.describe() for label in data.ordered)}")
            parts.append(f"images {', '.join(data.images)}")
        return f"Model({'; '.join([*parts, str(self.device), self.weights])})"

    def draw(
        self,
        mask: Volume | np.ndarray | Tensor | SpatialImage | str | Path,
        affine: np.ndarray | None = None,
        *,
        seed: int = 0,
        fit: Mode = "auto",
        size: Sequence[int] | None = None,
        labels: str | None = None,
        image: Images | SpatialImage | None = None,
        progress: Progress | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Volume:
        """The volume that the model generates for a mask, on the mask's own grid, with intensities in [0, 1].

        `mask` is a NIfTI file, a Volume, an image of nibabel, or an array or tensor (X, Y, Z) of whole numbers with its
        `affine`. `fit`, `size`, `seed` and
        `labels` are as on the command line; `image` is the subject's image, or several, for a label that is taken from them
        (labels="brats"). `options` are as in `sample`: `steps`, `sampler` and others. The volume is that of the file that
        `voxtune sample` writes with the same options: on a CPU with `--batch 1 --plan baseline` voxel for voxel, otherwise
        within rounding. A model of several images has no single volume; use `draw_images`.
        """
        images = () if self.config.data is None else self.config.data.images
        if len(images) > 1:
            raise InputError(f"this model generates {len(images)} images ({', '.join(images)}); use draw_images")
        inputs: dict[str, Any] = {"seed": seed, "fit": fit, "size": size, "labels": labels, "image": image}
        drawn = self.draw_images(mask, affine, **inputs, progress=progress, **options)
        return next(iter(drawn.values()))

    def draw_images(
        self,
        mask: Volume | np.ndarray | Tensor | SpatialImage | str | Path,
        affine: np.ndarray | None = None,
        *,
        seed: int = 0,
        fit: Mode = "auto",
        size: Sequence[int] | None = None,
        labels: str | None = None,
        image: Images | SpatialImage | None = None,
        progress: Progress | None = None,
        **options: Unpack[SamplerOptions],
    ) -> dict[str, Volume]:
        """The volumes that the model generates for a mask, one for each of its images, by the name of the image.

        The names are those of the model (`config.data.images`): T1w, T1ce, T2w, FLAIR and so on. Other spellings, such as
        "flair", are accepted in options but are not keys of the result. The volumes are on the mask's own grid, with
        intensities in [0, 1].

        `mask` and `affine` are as in `draw`. `fit` and `size` place the mask on the model's grid (`--fit`, `--size`); `seed`
        is the random seed of the noise. `labels` is what the values of the mask mean (`--labels`), such as
        "tumour=1,4; brain=image" or "brats". `image` is the subject's image, or several, from which a label of `labels` is
        taken (brain=image): a NIfTI file, a Volume or an image of nibabel on the grid of the mask. `progress(done, total)` is
        called after every step. `options` are `sampler`, `steps`, `timestep_spacing`, `clip` and `cache`, by default the
        model's settings.
        """
        from voxtune.data.labels import parse_labels
        from voxtune.runtime.generate import draw_images
        from voxtune.runtime.masks import read_mask

        settings = self.check_request(seed=seed, **options)
        unmeasured = self.config.sampling.unmeasured(settings)
        if unmeasured is not None:
            log.warning(unmeasured)
        check_progress(progress)
        grid = None if size is None else _whole("size", size)
        volume = read_mask(mask, affine)
        return draw_images(
            self,
            volume,
            settings=settings,
            seed=seed,
            mode=fit,
            size=grid,
            labels=None if labels is None else parse_labels(labels),
            image=None if image is None else _images(image),
            progress=progress,
        )

    def example_mask(self) -> Tensor:
        """An encoded mask (1, labels, D, H, W) to try `sample` without data: nested ellipsoids, not a real anatomy."""
        if self.config.data is None:
            raise InputError("this model takes no mask (it has no label contract)")
        labels_DHW = example_labels(self.config.data)
        return torch.from_numpy(encode_mask(labels_DHW, self.config.data))[None]

    def example_labels(self) -> Volume:
        """The mask of `example_mask` as a Volume, to try `draw` without data."""
        from voxtune.data.nifti import Volume

        contract = self.config.data
        if contract is None:
            raise InputError("this model takes no mask (it has no label contract)")
        labels = np.ascontiguousarray(example_labels(contract).transpose(2, 1, 0))
        return Volume(array=labels, affine=centred_affine(contract.orientation, contract.spacing[::-1], labels.shape))

    @torch.inference_mode()
    def denoise(self, x: Tensor, t: Tensor | int, cond: Tensor | None = None) -> Tensor:
        """The noise that the model predicts in `x` (N, C, *size), in [-1, 1] where it is free of noise, at step `t`.

        `t` is one step, or one for each sample. `cond` is as in `sample`. A prediction of v is converted to noise.
        """
        x = check_tensor(x, "x").to(self.device)
        cond = None if cond is None else check_tensor(cond, "cond").to(self.device, torch.float32)
        network = self.config.network
        if x.dim() != network.dimensions + 2 or x.shape[1] != network.out_channels or x.shape[0] < 1:
            raise InputError(f"x has shape {tuple(x.shape)}, expected (batch, {network.out_channels}, *size)")
        if not x.is_floating_point():
            raise InputError(f"x has type {x.dtype}, expected floating point")
        t_N = check_tensor(t, "t").to(x.device)
        if t_N.dim() > 1 or (t_N.dim() == 1 and t_N.shape[0] not in (1, x.shape[0])):
            raise InputError(
                f"t has shape {tuple(t_N.shape)}; expected one step, or one for each of {x.shape[0]} samples"
            )
        t_N = t_N.expand(x.shape[0])
        if t_N.is_floating_point() or bool((t_N < 0).any()) or bool((t_N >= len(self.schedule)).any()):
            raise InputError(f"t must hold whole numbers in 0 to {len(self.schedule) - 1}")
        predicted = self.network(x, t_N, cond)
        if self.schedule.prediction == "epsilon":
            return predicted
        alpha, sigma = (level[t_N].view(-1, *[1] * (x.dim() - 1)) for level in self.schedule.levels(x.device))
        return noise_in(predicted, x, alpha, sigma, self.schedule.prediction)

    @torch.inference_mode()
    def sample(
        self,
        cond: Tensor | None = None,
        *,
        settings: SamplerSettings | None = None,
        seed: int = 0,
        indices: Sequence[int] | None = None,
        size: Sequence[int] | None = None,
        progress: Progress | None = None,
        **options: Unpack[SamplerOptions],
    ) -> Tensor:
        """Generates a sample for each mask of `cond` (N, L, *size), or for each of `indices` if the model takes no mask.

        `cond` has a channel for each label, in the range of the data contract (-1 outside and +1 inside, or 0 and 1; see
        `voxtune.data.contract.encode_mask`). The result is (N, C, *size) in the network's range [-1, 1]; `draw` takes files
        and returns intensities in [0, 1]. The noise of sample i depends only on `seed` and `indices[i]` (default: 0, 1,
        ...), so the samples do not depend on the batch size, up to rounding.

        The sampler is given as resolved `settings`, or by these keywords, which `resolve` completes:

        - `sampler`: a name from `voxtune.diffusion.SAMPLERS`;
        - `steps`: a number, or "auto" for the settings that `voxtune steps --store` stored with the model;
        - `timestep_spacing`: a name from `voxtune.diffusion.TIMESTEP_SPACINGS`;
        - `clip`: clamp each step's prediction to [-1, 1];
        - `cache`: reuse deep features between steps, such as 3 for a full step every three; this changes the samples.

        Without settings and keywords, the stored settings are used, or else the model's defaults.
        """
        check_progress(progress)
        if settings is None:
            settings = self.resolve(**options)
        elif not isinstance(settings, SamplerSettings):
            raise InputError(
                f"settings: expected SamplerSettings, got {type(settings).__name__}; Model.resolve makes them"
            )
        elif any(value is not None for value in options.values()):
            raise InputError(f"settings cannot be combined with {', '.join(options)}")
        cond, indices, size = self._inputs(cond, indices, size)
        timesteps = self._timesteps(settings)
        shape = (self.config.network.out_channels, *size)
        noise = self.noise(check_seed(seed), indices, shape, self.device)
        noise = with_offset(noise, self.config.diffusion.offset_noise, seed, indices, shape)
        return get_sampler(settings.sampler)(
            self._denoiser(cond, settings),
            self.start(noise(0), timesteps[0], cond),
            self.schedule,
            timesteps,
            noise=noise,
            clip=settings.clip,
            callback=None if progress is None else lambda i, _x, _x0: progress(i + 1, len(timesteps)),
        )

    def resolve(
        self, *, warn: Callable[[str], None] = log.warning, **options: Unpack[SamplerOptions]
    ) -> SamplerSettings:
        """The keywords of `sample`, completed by the model's stored settings or defaults and checked against the model."""
        settings = self.config.sampling.resolve(self.available_steps, warn=warn, **options)
        self.check_settings(settings)
        return settings

    def check_settings(self, settings: SamplerSettings) -> None:
        """Raises for settings that this model cannot be sampled with."""
        self._timesteps(settings)
        if settings.cache is not None:
            split(self.network, settings.cache.depth)

    def check_request(self, *, seed: int, **options: Unpack[SamplerOptions]) -> SamplerSettings:
        """The settings that `sample` would use; raises for values that it would refuse, before any work."""
        check_seed(seed)
        return self.resolve(**options)

    def _timesteps(self, settings: SamplerSettings) -> list[int]:
        if settings.timesteps is None:
            return spaced_steps(self.available_steps, settings.steps, settings.timestep_spacing, self.schedule)
        if settings.timesteps[0] >= self.available_steps:
            raise InputError(
                f"timesteps {list(settings.timesteps)}: must be below the {self.available_steps} available steps"
            )
        return list(settings.timesteps)

    def _denoiser(self, cond: Tensor | None, settings: SamplerSettings) -> Denoise:
        """The network for one sampling; with a feature cache, in its two parts."""
        if settings.cache is None:
            return lambda x, t_N: self.network(x, t_N, cond)
        full, shallow = split(self.network, settings.cache.depth)
        return cached_denoiser(
            lambda x, t_N: full(x, t_N, cond),
            lambda x, t_N, deep: shallow(x, t_N, cond, deep),
            full_steps(settings.steps, settings.cache.interval),
        )

    @property
    def available_steps(self) -> int:
        return self.config.available_steps

    def start(self, noise: Tensor, t: int, cond: Tensor | None) -> Tensor:
        """The initial x: pure noise as published, or noise around the prior of each class of voxels."""
        prior = self.config.sampling.prior
        if prior is None or cond is None:
            return noise
        signal, spread = self.schedule.signal_noise(t)
        contract = self.config.data
        classes = last_channel(cond > 0) if contract is None else classes_of(cond, contract)
        mean = torch.tensor(prior, device=cond.device)[classes.long()[:, None]]
        return signal * mean + spread * noise

    def _inputs(
        self, cond: Tensor | None, indices: Sequence[int] | None, size: Sequence[int] | None
    ) -> tuple[Tensor | None, list[int], tuple[int, ...]]:
        network = self.config.network
        if network.mask_channels == 0:
            if cond is not None:
                raise InputError("this model takes no mask; omit cond")
            samples = [0] if indices is None else list(_whole("indices", indices))
            return None, samples, self.config.size if size is None else _whole("size", size)
        if cond is None:
            raise InputError(f"this model requires a mask: pass cond of shape (batch, {network.mask_channels}, *size)")
        cond = check_tensor(cond, "cond")
        if cond.dim() != network.dimensions + 2 or cond.shape[1] != network.mask_channels or cond.shape[0] < 1:
            raise InputError(f"cond has shape {tuple(cond.shape)}, expected (batch, {network.mask_channels}, *size)")
        if size is not None and _whole("size", size) != tuple(cond.shape[2:]):
            raise InputError(f"size {tuple(size)} differs from the mask's size {tuple(cond.shape[2:])}")
        samples = list(range(cond.shape[0])) if indices is None else list(_whole("indices", indices))
        if len(samples) != cond.shape[0]:
            raise InputError(f"got {len(samples)} indices for {cond.shape[0]} masks")
        cond = cond.to(self.device, torch.float32)
        # On the device: on the host, checking a large mask takes longer than a sampling step on a GPU.
        if not torch.isfinite(cond).all():
            raise InputError("cond contains NaN or infinity")
        if (contract := self.config.data) is not None:
            outside, inside = contract.mask_values
            if not ((cond == outside) | (cond == inside)).all():
                raise InputError(
                    f"cond holds values other than {outside:g} (outside the label) and {inside:g} (inside); encode it with "
                    "voxtune.data.contract.encode_mask, or give the mask to Model.draw"
                )
        return cond, samples, tuple(cond.shape[2:])


def check_tensor(value: Any, name: str) -> Tensor:
    """`value` as a tensor of real numbers; arrays and lists are converted. Raises for anything else, such as a path."""
    if isinstance(value, str | Path):
        raise InputError(f"{name}: expected a tensor, got the path {str(value)[:80]!r}; Model.draw takes mask files")
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name}: expected a tensor, got {type(value).__name__} ({one_line(error)})") from None
    if tensor.is_complex():
        raise InputError(f"{name} has type {tensor.dtype}, expected real numbers")
    return tensor


def check_progress(progress: Any) -> None:
    if progress is not None and not callable(progress):
        raise InputError(f"progress: expected a function of (done, total), got {type(progress).__name__}")


def _images(given: Any) -> tuple[Volume | Path, ...]:
    """The argument `image`: one image, or a list or tuple of them."""
    from voxtune.data.nifti import given_volume

    images = tuple(given) if isinstance(given, list | tuple) else (given,)
    return tuple(
        given_volume(image, "image", "a NIfTI file, a Volume or an image of nibabel, or several") for image in images
    )


def _whole(name: str, values: Any) -> tuple[int, ...]:
    """A sequence of whole numbers; NumPy's are accepted."""
    try:
        numbers = tuple(operator.index(value) for value in values)
    except TypeError:
        numbers = ()
    if not numbers or any(not 0 <= number < 2**63 for number in numbers):
        raise InputError(f"{name}: expected whole numbers >= 0, got {str(values)[:80]}")
    return numbers
