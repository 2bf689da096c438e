"""The simulated cohort, version 1: subject i of a seed, at any resolution, without a download.

A subject is the MNI152 template under a random smooth deformation, with its own contrast and bias field, and with lesions
that displace the tissue around them. All random values are drawn once per subject and are in millimetres, so a subject
has the same anatomy at every resolution; only the noise depends on the grid.

Legend: points (3, X, Y, Z) in millimetres; arrays of a Subject are (D, H, W) = (Z, Y, X).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from voxtune.data.anatomy import BRAIN_CENTRE, Anatomy, SmoothField, anatomy, lesion_sites
from voxtune.data.contract import DataContract, Label, Shape, check_size
from voxtune.data.nifti import Volume
from voxtune.errors import InputError

# Stored results depend on version 1, which stays as it is; version 2 is in simulation.py.
VERSIONS = (1, 2)
# Subjects with this number or higher are never used for training.
HELD_OUT = 100_000
BRAIN, TUMOUR = 1, 2
LABELS = (Label(name="brain", value=BRAIN, channel=0), Label(name="tumour", value=TUMOUR, channel=1))
# Field of view (Z, Y, X) in mm that contains the brain of every subject; a cubic grid covers 192 mm, as 128 x 1.5 mm.
FIELD_OF_VIEW = (176.0, 192.0, 168.0)
REACH_MM = 110.0
# Centre of the lateral ventricles in MNI space, in mm; their size varies most between people.
VENTRICLES = np.array([0.0, -14.0, 14.0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Subject:
    """A simulated subject: images in [0, 1] and its labels (0 background, 1 brain, 2 tumour) in RAS."""

    id: str
    image_DHW: np.ndarray
    labels_DHW: np.ndarray
    affine: np.ndarray
    # By kind, in version 2 of the cohort; `image_DHW` is the first.
    images_DHW: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.images_DHW) or ("T1w",)

    def image_volume(self, kind: str | None = None) -> Volume:
        """The image of a kind, by default the first, as a volume (X, Y, Z)."""
        image_DHW = self.image_DHW if kind is None else self.images_DHW.get(kind, self.image_DHW)
        return Volume(array=np.ascontiguousarray(image_DHW.transpose(2, 1, 0)), affine=self.affine)

    def label_volume(self) -> Volume:
        """The label map as a volume (X, Y, Z)."""
        return Volume(array=np.ascontiguousarray(self.labels_DHW.transpose(2, 1, 0)), affine=self.affine)


@dataclass(frozen=True, kw_only=True, eq=False)
class Lesion:
    centre: np.ndarray  # MNI space, mm
    stretch: np.ndarray  # (3, 3): rotation and scaling of a unit ball
    radius_mm: float
    push: float
    core: float
    rim: float
    oedema: float
    shape: SmoothField


@dataclass(frozen=True, kw_only=True, eq=False)
class Traits:
    """All random properties of a subject except the noise."""

    linear: np.ndarray
    shift: np.ndarray
    warps: tuple[SmoothField, ...]
    gamma: float
    tissue: tuple[float, float, float]
    texture: SmoothField
    bias: SmoothField
    noise: float
    ventricles: float
    lesions: tuple[Lesion, ...]


def subject(
    seed: int, index: int, size: Shape, *, spacing: float | None = None, healthy_fraction: float = 0.1
) -> Subject:
    """Simulates subject `index` of cohort `seed` on a grid (D, H, W) of isotropic `spacing` (default: `cohort_spacing`)."""
    check_size(size)
    if seed < 0 or index < 0:
        raise InputError(f"cohort seed {seed}, subject {index}: both must be 0 or more")
    if not 0.0 <= healthy_fraction <= 1.0:
        raise InputError(f"healthy_fraction is {healthy_fraction}, must be from 0 to 1")
    spacing = cohort_spacing(size) if spacing is None else spacing
    traits_seed, noise_seed = np.random.SeedSequence([seed, index]).spawn(2)
    traits = draw_traits(np.random.Generator(np.random.Philox(traits_seed)), healthy_fraction)
    coords = tuple((np.arange(n) - (n - 1) / 2) * spacing for n in size[::-1])
    maps = anatomy(round(spacing, 3))
    points = _warp(traits, coords)
    levels = [_lesion_level(lesion, points, coords) for lesion in traits.lesions]
    points = _push_aside(points, VENTRICLES, 28.0, traits.ventricles)
    for lesion in traits.lesions:
        points = _push_aside(points, lesion.centre, lesion.radius_mm, lesion.push)
    brain = maps.at("brain", points)
    image = _image(traits, maps, points, brain, levels, coords)
    image = _noisy(image, traits.noise, np.random.Generator(np.random.Philox(noise_seed)))
    labels = (brain > 0.5).astype(np.uint8) * BRAIN
    for level in levels:
        labels[(level < 1.0) & (brain > 0.5)] = TUMOUR
    affine = np.diag([spacing, spacing, spacing, 1.0])
    affine[:3, 3] = [axis[0] for axis in coords]
    return Subject(
        id=f"sub-{index:04d}", image_DHW=_DHW(image * (brain > 0.05)), labels_DHW=_DHW(labels), affine=affine
    )


def cohort_spacing(size: Shape) -> float:
    """The smallest isotropic spacing in mm at which a grid (D, H, W) contains a whole brain."""
    return max(extent / n for extent, n in zip(FIELD_OF_VIEW, size, strict=True))


def cohort_contract(size: Shape) -> DataContract:
    """The data contract of a model trained on the cohort at `size`."""
    check_size(size)
    spacing = cohort_spacing(size)
    return DataContract(size=size, spacing=(spacing,) * 3, orientation="RAS", labels=LABELS)


def draw_traits(rng: np.random.Generator, healthy_fraction: float) -> Traits:
    """Draws the random properties of a subject; the order of the draws must not change, or subject i would."""
    angles = rng.uniform(-1, 1, 3) * np.radians([5.0, 3.0, 3.0])
    # MNI152 is larger than most heads, so subjects are scaled down.
    scales = rng.uniform(0.88, 0.96) * rng.uniform(0.97, 1.015, 3)
    shift = rng.uniform(-1.5, 1.5, 3)
    warps = tuple(SmoothField.draw(rng, REACH_MM, step, sd, 3) for step, sd in ((45.0, 1.8), (20.0, 1.3)))
    gamma = rng.uniform(0.8, 1.3)
    grey, white, fluid = rng.uniform([-0.05, -0.06, -0.1], [0.05, 0.08, 0.04])
    texture = SmoothField.draw(rng, REACH_MM, 7.0, 0.012)
    bias = SmoothField.draw(rng, REACH_MM, 75.0, rng.uniform(0.04, 0.12))
    noise = rng.uniform(0.006, 0.02)
    ventricles = rng.uniform(-0.1, 0.35)
    count = 0 if rng.random() < healthy_fraction else 1 + int(rng.random() < 0.2)
    return Traits(
        linear=rotation(angles) @ np.diag(1.0 / scales),
        shift=shift,
        warps=warps,
        gamma=gamma,
        tissue=(grey, white, fluid),
        texture=texture,
        bias=bias,
        noise=noise,
        ventricles=ventricles,
        lesions=tuple(_draw_lesion(rng) for _ in range(count)),
    )


def _draw_lesion(rng: np.random.Generator) -> Lesion:
    sites = lesion_sites()
    centre = sites[rng.integers(len(sites))] + rng.uniform(-1.5, 1.5, 3)
    turn = rotation(rng.uniform(-np.pi, np.pi, 3))
    return Lesion(
        centre=centre,
        stretch=np.diag(rng.uniform(0.75, 1.3, 3)) @ turn,
        radius_mm=rng.uniform(9.0, 22.0),
        push=rng.uniform(0.1, 0.4),
        core=rng.uniform(0.22, 0.48),
        rim=rng.uniform(0.55, 1.0),
        oedema=rng.uniform(0.0, 0.22),
        shape=SmoothField.draw(rng, REACH_MM, 8.0, 0.14),
    )


def _warp(traits: Traits, coords: tuple[np.ndarray, ...]) -> np.ndarray:
    """The position of each voxel in MNI space."""
    linear = traits.linear.astype(np.float32)
    offset = (BRAIN_CENTRE + traits.shift).astype(np.float32)
    x, y, z = (
        axis.astype(np.float32).reshape([-1 if i == a else 1 for i in range(3)]) for a, axis in enumerate(coords)
    )
    points = np.stack([linear[i, 0] * x + linear[i, 1] * y + linear[i, 2] * z + offset[i] for i in range(3)])
    for warp in traits.warps:
        points += warp.at(*coords)
    return points


def _lesion_level(lesion: Lesion, points: np.ndarray, coords: tuple[np.ndarray, ...]) -> np.ndarray:
    """Relative distance from the lesion's centre: 0 at the centre, 1 on its irregular surface."""
    away = points - lesion.centre.astype(np.float32).reshape(3, 1, 1, 1)
    stretched = (
        sum(factor * part for factor, part in zip(row, away, strict=True)) for row in lesion.stretch.astype("f4")
    )
    distance = np.sqrt(sum(part**2 for part in stretched)) / np.float32(lesion.radius_mm)
    return distance * (1.0 + lesion.shape.at(*coords)[0])


def _push_aside(points: np.ndarray, centre_mm: np.ndarray, radius_mm: float, push: float) -> np.ndarray:
    """Mass effect: displaces tissue outwards from the centre; monotone for push below 1."""
    centre = centre_mm.astype(np.float32).reshape(3, 1, 1, 1)
    away = points - centre
    squared = (away**2).sum(axis=0) / np.float32((1.5 * radius_mm) ** 2)
    return centre + away * (1.0 - np.float32(push) * np.exp(-squared))


def _image(
    traits: Traits,
    maps: Anatomy,
    points: np.ndarray,
    brain: np.ndarray,
    levels: list[np.ndarray],
    coords: tuple[np.ndarray, ...],
) -> np.ndarray:
    grey, white = maps.at("grey", points), maps.at("white", points)
    fluid = np.clip(brain - grey - white, 0.0, 1.0)
    image = np.maximum(maps.at("t1", points), 0.0) ** np.float32(traits.gamma)
    for amount, tissue in zip(traits.tissue, (grey, white, fluid), strict=True):
        image += np.float32(amount) * tissue
    image += traits.texture.at(*coords)[0] * brain
    for lesion, level in zip(traits.lesions, levels, strict=True):
        image = _with_lesion(image, lesion, level, brain, white)
    return np.clip(image * np.exp(traits.bias.at(*coords)[0]), 0.0, None)


def _with_lesion(
    image: np.ndarray, lesion: Lesion, level: np.ndarray, brain: np.ndarray, white: np.ndarray
) -> np.ndarray:
    """Adds dark oedema in the surrounding white matter, a brighter rim, and a dark core with attenuated texture."""
    oedema = np.float32(lesion.oedema) * _below(level, 1.45, 0.12) * white
    image = image - oedema
    for target, edge, width, strength in ((lesion.rim, 1.0, 0.03, 0.85), (lesion.core, 0.74, 0.06, 0.9)):
        weight = np.float32(strength) * _below(level, edge, width) * brain
        image = image * (1.0 - weight) + np.float32(target) * weight
    return image


def _below(level: np.ndarray, edge: float, width: float) -> np.ndarray:
    """A smooth step from 1 below `edge` to 0 above it."""
    return 1.0 / (1.0 + np.exp(np.clip((level - edge) / width, -30.0, 30.0)))


def _noisy(image: np.ndarray, sd: float, rng: np.random.Generator) -> np.ndarray:
    """Rician noise, as in magnitude images."""
    noise = rng.standard_normal((2, *image.shape), dtype=np.float32) * np.float32(sd)
    return np.clip(np.sqrt((image + noise[0]) ** 2 + noise[1] ** 2), 0.0, 1.0)


def rotation(angles: np.ndarray) -> np.ndarray:
    (cx, cy, cz), (sx, sy, sz) = np.cos(angles), np.sin(angles)
    about_x = np.array([[1, 0, 0], [0, cx, -sx], [0, sx, cx]])
    about_y = np.array([[cy, 0, sy], [0, 1, 0], [-sy, 0, cy]])
    about_z = np.array([[cz, -sz, 0], [sz, cz, 0], [0, 0, 1]])
    return about_z @ about_y @ about_x


def _DHW(array_XYZ: np.ndarray) -> np.ndarray:  # noqa: N802
    dtype = np.uint8 if array_XYZ.dtype == np.uint8 else np.float32
    return np.ascontiguousarray(array_XYZ.transpose(2, 1, 0), dtype=dtype)
