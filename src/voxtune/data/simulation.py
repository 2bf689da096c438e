"""Version 2 of the simulated cohort: tissues, folds, lesions and four image kinds, on any torch device.

A subject has the tissue maps of MNI152 under a smooth random deformation. Random sulci are cut into its cortex, lesions with
core, rim and oedema are placed in its white matter, and every voxel gets the signal of its mixture of tissues
(contrast.py). All random properties are drawn once per subject, in millimetres, so a subject has the same anatomy at every
resolution; only blur and noise depend on the grid.

Legend: arrays and tensors are (D, H, W) = (Z, Y, X); points (3, D, H, W) are X, Y, Z in MNI space in mm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxtune.data.anatomy import BRAIN_CENTRE, SmoothField
from voxtune.data.atlas import atlas, blurred
from voxtune.data.cohort import BRAIN, REACH_MM, TUMOUR, VERSIONS, Subject, cohort_spacing, rotation, subject
from voxtune.data.contract import Shape, check_size
from voxtune.data.contrast import KINDS, TISSUES, check_kind, signals
from voxtune.errors import InputError

# Half axes of an ellipsoid about as large as the brain: sulci run from its surface to the centre.
HALF_AXES = (66.0, 86.0, 62.0)
# Volumes of lesions in ml, log-uniform.
LESION_ML = (0.2, 60.0)
# Standard deviation of a lesion's radius over its surface.
IRREGULAR = 0.16
VENTRICLE_CENTRES = ((-14.0, -14.0, 14.0), (14.0, -14.0, 14.0))
VENTRICLE_AXES = (12.0, 34.0, 14.0)
# The signal of the brightest healthy tissue, where 1 is the largest intensity: lesions are brighter in T1ce and FLAIR.
LEVELS = {"T1w": (0.75, 0.92), "T1ce": (0.55, 0.7), "T2w": (0.75, 0.92), "FLAIR": (0.42, 0.55)}
# The lattice on which the pattern of the sulci is evaluated, in mm.
PATTERN_STEP = 3.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Tumour:
    """A lesion; its surface is where the relative distance from its centre is 1."""

    centre: np.ndarray  # MNI space, mm
    shape: np.ndarray  # (3, 3): rotation and scaling of a unit ball, of determinant 1
    radius_mm: float
    irregular: SmoothField
    push: float
    core: float  # the core's surface, as a relative distance; 0: no core
    core_shape: SmoothField
    oedema_mm: float
    oedema: float
    gadolinium: float
    edge_mm: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Phenotype:
    """All random properties of a subject except the noise."""

    linear: np.ndarray
    shift: np.ndarray
    torque: np.ndarray
    warps: tuple[SmoothField, ...]
    ventricles: tuple[float, float]
    pattern: SmoothField
    sulcus_depth: SmoothField
    sulcus_mm: float
    cortex_mm: float
    sharpness: float
    tissues: dict[str, tuple[float, float, float]]
    sequences: dict[str, tuple[float, float]]
    texture: SmoothField
    bias: SmoothField
    kind_bias: dict[str, SmoothField]
    blur_mm: dict[str, float]
    noise: dict[str, float]
    level: dict[str, float]
    tumours: tuple[Tumour, ...]


def simulate(
    seed: int,
    index: int,
    size: Shape,
    *,
    spacing: float | None = None,
    healthy_fraction: float = 0.1,
    kinds: Sequence[str] = ("T1w",),
    device: torch.device | str = "cpu",
) -> Subject:
    """Simulates subject `index` of cohort `seed` in version 2, as `cohort.subject` does in version 1.

    A subject's images do not depend on which others are simulated. On another device they differ by rounding.
    """
    check_size(size)
    if seed < 0 or index < 0:
        raise InputError(f"cohort seed {seed}, subject {index}: both must be 0 or more")
    if not 0.0 <= healthy_fraction <= 1.0:
        raise InputError(f"healthy_fraction is {healthy_fraction}, must be from 0 to 1")
    names = [check_kind(kind) for kind in kinds]
    spacing = cohort_spacing(size) if spacing is None else spacing
    # The third number separates the versions: the same seed gives other subjects.
    traits_seed, noise_seed = np.random.SeedSequence([seed, index, 2]).spawn(2)
    phenotype = draw_phenotype(np.random.Generator(np.random.Philox(traits_seed)), healthy_fraction)
    axes = [(np.arange(n) - (n - 1) / 2) * spacing for n in size]
    with torch.inference_mode():
        maps = _tissues(phenotype, axes, spacing, torch.device(device))
        # Each kind has its own noise, whichever others are simulated.
        seeds = dict(zip(KINDS, noise_seed.spawn(len(KINDS)), strict=True))
        images = {
            name: _image(phenotype, maps, name, spacing, np.random.Generator(np.random.Philox(seeds[name])))
            .cpu()
            .numpy()
            for name in names
        }
        labels = maps.labels.cpu().numpy()
    affine = np.diag([spacing, spacing, spacing, 1.0])
    affine[:3, 3] = [axis[0] for axis in axes[::-1]]
    return Subject(
        id=f"sub-{index:04d}",
        image_DHW=images[names[0]],
        labels_DHW=labels,
        affine=affine,
        images_DHW=images,
    )


def simulated_subject(
    version: int,
    seed: int,
    index: int,
    size: Shape,
    *,
    spacing: float | None = None,
    healthy_fraction: float = 0.1,
    kinds: Sequence[str] = ("T1w",),
) -> Subject:
    """Subject `index` of cohort `seed` in a version of the cohort; version 1 has T1w images only."""
    check_version(version, kinds)
    if version == 1:
        return subject(seed, index, size, spacing=spacing, healthy_fraction=healthy_fraction)
    return simulate(seed, index, size, spacing=spacing, healthy_fraction=healthy_fraction, kinds=kinds)


def check_version(version: int, kinds: Sequence[str]) -> None:
    """Raises unless this version of the cohort exists and has these image kinds."""
    if version not in VERSIONS:
        raise InputError(f"cohort version {version}: choose from {', '.join(map(str, VERSIONS))}")
    names = [check_kind(kind) for kind in kinds]
    if version == 1 and names != ["T1w"]:
        raise InputError(
            f"version 1 of the simulated cohort has T1w images only; for {', '.join(names)} use version 2 "
            "(--cohort-version 2)"
        )


def draw_phenotype(rng: np.random.Generator, healthy_fraction: float) -> Phenotype:
    """Draws the random properties of a subject; the order of the draws must not change, or subject i would."""
    angles = rng.uniform(-1, 1, 3) * np.radians([6.0, 4.0, 4.0])
    scales = rng.uniform(0.87, 0.96) * rng.uniform(0.96, 1.03, 3)
    shift = rng.uniform(-1.5, 1.5, 3)
    torque = rng.normal(0.0, 1.5, 3)
    warps = tuple(SmoothField.draw(rng, REACH_MM, step, sd, 3) for step, sd in ((45.0, 2.0), (20.0, 1.4), (10.0, 0.6)))
    atrophy = rng.uniform(0.0, 1.0)
    ventricles = 0.05 + 0.45 * atrophy * rng.uniform(0.6, 1.0) + rng.normal(0.0, 0.06, 2)
    pattern = _band_pass(SmoothField.draw(rng, REACH_MM, rng.uniform(6.0, 7.5), 1.0))
    sulcus_depth = SmoothField.draw(rng, REACH_MM, 18.0, 4.0)
    sulcus_mm = 1.0 + 0.8 * atrophy + rng.uniform(0.0, 0.3)
    cortex_mm = rng.uniform(2.6, 3.2) - 0.4 * atrophy
    sharpness = rng.uniform(1.3, 1.7)
    tissues = {name: tuple(np.exp(rng.normal(0.0, [0.05, 0.04, 0.015])).tolist()) for name in TISSUES}
    sequences = {kind: (rng.uniform(0.9, 1.1), rng.uniform(0.85, 1.15)) for kind in KINDS}
    texture = SmoothField.draw(rng, REACH_MM, 7.0, 0.018)
    bias = SmoothField.draw(rng, REACH_MM, 75.0, rng.uniform(0.03, 0.1))
    kind_bias = {kind: SmoothField.draw(rng, REACH_MM, 60.0, 0.03) for kind in KINDS}
    # Full width at half maximum of the point spread function.
    blur_mm = {kind: rng.uniform(1.0, 2.2) for kind in KINDS}
    noise = {kind: math.exp(rng.uniform(math.log(0.006), math.log(0.03))) for kind in KINDS}
    level = {kind: rng.uniform(*LEVELS[kind]) for kind in KINDS}
    count = 0 if rng.random() < healthy_fraction else 1 + int(rng.random() < 0.2)
    linear = rotation(angles) @ np.diag(1.0 / scales)
    magnification = float(np.linalg.det(linear)) ** (1 / 3)
    return Phenotype(
        linear=linear,
        shift=shift,
        torque=torque,
        warps=warps,
        ventricles=(float(ventricles[0]), float(ventricles[1])),
        pattern=pattern,
        sulcus_depth=sulcus_depth,
        sulcus_mm=sulcus_mm,
        cortex_mm=cortex_mm,
        sharpness=sharpness,
        tissues=tissues,
        sequences=sequences,
        texture=texture,
        bias=bias,
        kind_bias=kind_bias,
        blur_mm=blur_mm,
        noise=noise,
        level=level,
        tumours=tuple(_draw_tumour(rng, magnification) for _ in range(count)),
    )


def _draw_tumour(rng: np.random.Generator, magnification: float) -> Tumour:
    """`magnification` is the length in MNI space of one millimetre of the subject."""
    sites = atlas().sites
    centre = sites[rng.integers(len(sites))] + rng.uniform(-1.5, 1.5, 3)
    turn = rotation(rng.uniform(-np.pi, np.pi, 3))
    stretch = rng.uniform(0.8, 1.25, 3)
    volume_ml = math.exp(rng.uniform(*np.log(LESION_ML)))
    radius = (3000.0 * volume_ml / (4.0 * math.pi)) ** (1 / 3)
    irregular = SmoothField.draw(rng, REACH_MM, max(4.0, 0.55 * radius), IRREGULAR)
    necrotic = rng.random() < 0.8
    core = rng.uniform(0.45, 0.8)
    return Tumour(
        centre=centre,
        shape=np.diag(stretch / np.prod(stretch) ** (1 / 3)) @ turn,
        # An irregular surface encloses more than a ball of its mean radius: by 1 + 6 IRREGULAR^2, to second order.
        radius_mm=radius * magnification * (1.0 - 2.0 * IRREGULAR**2),
        irregular=irregular,
        push=rng.uniform(0.05, 0.3),
        core=core if necrotic else 0.0,
        core_shape=SmoothField.draw(rng, REACH_MM, max(3.0, 0.45 * radius), 0.16),
        oedema_mm=rng.uniform(0.1, 0.7) * radius + rng.uniform(0.0, 4.0),
        oedema=rng.uniform(0.3, 1.0),
        gadolinium=rng.uniform(0.2, 0.8),
        edge_mm=rng.uniform(0.4, 1.2),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Maps:
    """Fractions of tissues (D, H, W) by name, the brain, labels, and fields that all images share."""

    fractions: dict[str, Tensor]
    brain: Tensor
    labels: Tensor
    gain: Tensor
    axes: list[np.ndarray]
    device: torch.device


def _tissues(who: Phenotype, axes: list[np.ndarray], spacing: float, device: torch.device) -> _Maps:
    maps = atlas().smoothed(round(spacing, 3)).to(device)
    points = _points(who, axes, device)
    levels = [_level(tumour, points, axes) for tumour in who.tumours]
    for centre, amount in zip(VENTRICLE_CENTRES, who.ventricles, strict=True):
        points = _push_aside(points, centre, VENTRICLE_AXES, amount)
    for tumour in who.tumours:
        points = _push_aside(points, tumour.centre, (1.5 * tumour.radius_mm,) * 3, tumour.push)
    grey, white, brain, depth = maps.at(points)
    fluid, grey, white = _folded(who, points, axes, spacing, grey, white, brain, depth * maps.depth_unit)
    fractions = {"fluid": fluid, "grey": grey, "white": white}
    labels = (brain > 0.5).to(torch.uint8) * BRAIN
    for tumour, (level, core_level) in zip(who.tumours, levels, strict=True):
        fractions = _with_tumour(fractions, tumour, level, core_level, spacing)
        labels[(level < 1.0) & (brain > 0.5)] = TUMOUR
    texture = field_values(who.texture, axes, device)[0]
    bias = field_values(who.bias, axes, device)[0]
    return _Maps(fractions=fractions, brain=brain, labels=labels, gain=(texture + bias).exp(), axes=axes, device=device)


def _points(who: Phenotype, axes: list[np.ndarray], device: torch.device) -> Tensor:
    """The position of each voxel in MNI space."""
    z, y, x = (
        torch.from_numpy(axis.astype(np.float32)).to(device).reshape([-1 if i == a else 1 for i in range(3)])
        for a, axis in enumerate(axes)
    )
    offset = BRAIN_CENTRE + who.shift
    linear = who.linear
    points = torch.stack(
        [
            float(linear[i, 0]) * x + float(linear[i, 1]) * y + float(linear[i, 2]) * z + float(offset[i])
            for i in range(3)
        ]
    )
    # The hemispheres are displaced in opposite directions.
    side = torch.tanh(points[0] / 25.0)
    for i in range(3):
        points[i] += float(who.torque[i]) * (side.abs() if i == 0 else side)
    for warp in who.warps:
        points += field_values(warp, axes, device)
    return points


def _folded(
    who: Phenotype,
    points: Tensor,
    axes: list[np.ndarray],
    spacing: float,
    grey: Tensor,
    white: Tensor,
    brain: Tensor,
    depth: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fractions of fluid, grey and white matter: the maps of the average brain, sharpened, with random sulci.

    A sulcus is a sheet where the pattern is 0. Its distance, and that of the brain's surface, divide the cortex into fluid,
    grey and white matter; where the average brain is certain, as in the deep white matter, its maps decide.
    """
    distance = _distance_to_sheet(who.pattern, points, spacing)
    limit = (15.0 + field_values(who.sulcus_depth, axes, points.device)[0]).clamp(3.0, 24.0)
    beyond = (depth - limit).clamp(min=0.0)
    width = who.sulcus_mm * (1.0 - 0.6 * (depth / limit).clamp(0.0, 1.0))
    inside = torch.minimum((distance**2 + beyond**2).sqrt() - width, depth - 1.6)
    soft = 0.3 + 0.2 * spacing
    fluid_fold = torch.sigmoid(-inside / soft)
    white_fold = torch.sigmoid((inside - who.cortex_mm) / soft)
    grey_fold = (1.0 - fluid_fold - white_fold).clamp(min=0.0)
    # Not in the cerebellum, in the brainstem and in the deep nuclei.
    zone = torch.sigmoid((24.0 - depth) / 1.5) * _cerebrum(points) * 1.4
    average = torch.stack([1.4 * (brain - grey - white).clamp(min=0.0), grey, white]) + 0.02
    fold = torch.stack([fluid_fold, grey_fold, white_fold]) + 0.02
    weights = (who.sharpness * average.log() + zone * fold.log()).exp()
    fractions = weights / weights.sum(dim=0)
    return fractions[0], fractions[1], fractions[2]


def _distance_to_sheet(pattern: SmoothField, points: Tensor, spacing: float) -> Tensor:
    """The distance in mm, to first order, of each voxel to the sheets where the pattern is 0."""
    n = 2 * math.ceil(REACH_MM / PATTERN_STEP) + 1
    lattice = (np.arange(n) - n // 2) * PATTERN_STEP
    values = field_values(pattern, [lattice] * 3, points.device)[None]
    centre = torch.tensor(BRAIN_CENTRE, dtype=torch.float32, device=points.device).reshape(3, 1, 1, 1)
    axes = torch.tensor(HALF_AXES, device=points.device).reshape(3, 1, 1, 1)
    away = points - centre
    radius = (away / axes).square().sum(dim=0).sqrt().clamp(min=0.05)
    # Points on a ray from the centre come close to each other, so sheets run from the surface inwards.
    shared = away * (0.4 + 0.6 / radius)
    grid = (shared / ((n // 2) * PATTERN_STEP)).permute(1, 2, 3, 0)[None]
    value = F.grid_sample(values, grid, mode="bilinear", padding_mode="border", align_corners=True)[0, 0]
    slopes = torch.gradient(value, spacing=spacing)
    steepness = (slopes[0] ** 2 + slopes[1] ** 2 + slopes[2] ** 2).sqrt()
    return (value.abs() / (steepness + 0.02)).clamp(max=12.0)


def _cerebrum(points: Tensor) -> Tensor:
    """1 above the tentorium and outside the brainstem, 0 below it, with a smooth step."""
    x, y, z = points
    tentorium = -24.0 + 0.42 * (y + 90.0) - 0.22 * x.abs()
    below = torch.sigmoid((tentorium - z) / 2.0) * torch.sigmoid((-36.0 - y) / 2.0)
    stem = torch.sigmoid((20.0 - x.abs()) / 2.0) * torch.sigmoid((-6.0 - z) / 2.0) * torch.sigmoid((-6.0 - y) / 2.0)
    return (1.0 - below) * (1.0 - stem)


def _level(tumour: Tumour, points: Tensor, axes: list[np.ndarray]) -> tuple[Tensor, Tensor]:
    """The relative distance from the lesion's centre (1 on its surface), and the same for its core."""
    away = points - torch.tensor(tumour.centre, dtype=torch.float32, device=points.device).reshape(3, 1, 1, 1)
    squared = torch.zeros_like(away[0])
    for row in tumour.shape:
        squared += (float(row[0]) * away[0] + float(row[1]) * away[1] + float(row[2]) * away[2]) ** 2
    distance = squared.sqrt() / tumour.radius_mm
    level = distance * (1.0 + field_values(tumour.irregular, axes, points.device)[0])
    core_level = level * (1.0 + field_values(tumour.core_shape, axes, points.device)[0])
    return level, core_level


def _push_aside(
    points: Tensor, centre_mm: Sequence[float] | np.ndarray, axes_mm: Sequence[float], push: float
) -> Tensor:
    """Mass effect: displaces tissue outwards from the centre; monotone for push below 1."""
    centre = torch.tensor(np.asarray(centre_mm), dtype=torch.float32, device=points.device).reshape(3, 1, 1, 1)
    widths = torch.tensor(axes_mm, dtype=torch.float32, device=points.device).reshape(3, 1, 1, 1)
    away = points - centre
    return centre + away * (1.0 - push * torch.exp(-(away / widths).square().sum(dim=0)))


def _with_tumour(
    fractions: dict[str, Tensor], tumour: Tumour, level: Tensor, core_level: Tensor, spacing: float
) -> dict[str, Tensor]:
    """Replaces tissue by oedema in the white matter around the lesion, by its rim and by its core."""
    edge = math.sqrt(tumour.edge_mm**2 + (0.3 * spacing) ** 2) / tumour.radius_mm
    whole = _below(level, 1.0, 0.6 * edge)
    core = whole * _below(core_level, tumour.core, edge) if tumour.core else torch.zeros_like(whole)
    reach = 1.0 + tumour.oedema_mm / tumour.radius_mm
    around = _below(level, reach, (0.5 + 0.2 * tumour.oedema_mm) / tumour.radius_mm) * (1.0 - whole) * tumour.oedema
    result = dict(fractions)
    # Oedema spreads along white matter; the cortex takes up little.
    oedema = around * fractions["white"] + 0.2 * around * fractions["grey"]
    result["white"] = fractions["white"] * (1.0 - around)
    result["grey"] = fractions["grey"] * (1.0 - 0.2 * around)
    result["oedema"] = fractions.get("oedema", torch.zeros_like(whole)) + oedema
    result = {name: fraction * (1.0 - whole) for name, fraction in result.items()}
    result["core"] = result.get("core", torch.zeros_like(whole)) + core
    result["rim"] = result.get("rim", torch.zeros_like(whole)) + whole - core
    return result


def _image(who: Phenotype, maps: _Maps, kind: str, spacing: float, rng: np.random.Generator) -> Tensor:
    """An image in [0, 1]: the mixture of signals, bias field, blur, Rician noise, without what is outside the brain."""
    largest = max((tumour.gadolinium for tumour in who.tumours), default=0.5)
    table = signals(kind, who.tissues, who.sequences[kind], largest)
    brightest = max(table[name] for name in ("fluid", "grey", "white"))
    scale = who.level[kind] / brightest
    image = sum(fraction * (table[name] * scale) for name, fraction in maps.fractions.items())
    assert isinstance(image, Tensor)
    gain = maps.gain * field_values(who.kind_bias[kind], maps.axes, maps.device)[0].exp()
    image = blurred(image * gain * maps.brain, who.blur_mm[kind] / 2.355 / spacing)
    noise = torch.from_numpy(rng.standard_normal((2, *image.shape), dtype=np.float32)).to(maps.device)
    noise *= who.noise[kind] * who.level[kind]
    image = ((image + noise[0]) ** 2 + noise[1] ** 2).sqrt().clamp(0.0, 1.0)
    return torch.where(maps.brain > 0.05, image, torch.zeros_like(image))


def _below(level: Tensor, edge: float, width: float) -> Tensor:
    """A smooth step from 1 below `edge` to 0 above it."""
    return torch.sigmoid((edge - level) / width)


def _band_pass(field: SmoothField) -> SmoothField:
    """The field without its slow variations, so that its zeros are about equally far from each other."""
    slow = field.controls
    for axis in (1, 2, 3):
        slow = (np.roll(slow, 1, axis) + slow + np.roll(slow, -1, axis)) / 3.0
    return SmoothField(controls=field.controls - slow, step_mm=field.step_mm)


def field_values(field: SmoothField, axes: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Values (components, D, H, W) of a field on the grid of the coordinates z, y, x in mm: `SmoothField.at` in torch.

    The controls are taken in the order of `axes`. Sums in a fixed order, so that the number of threads does not matter.
    """
    values = torch.from_numpy(field.controls.astype(np.float32)).to(device)
    n = field.controls.shape[1]
    for coords in axes:
        taps = field.taps(coords, n)
        result = None
        for index, weight in taps:
            part = values.index_select(1, torch.from_numpy(index).to(device))
            part = part * torch.from_numpy(weight).to(device).reshape(1, -1, 1, 1)
            result = part if result is None else result + part
        assert result is not None
        # Contracts the first control axis and appends the coordinates: after three rounds the order is D, H, W.
        values = result.permute(0, 2, 3, 1).contiguous()
    return values
