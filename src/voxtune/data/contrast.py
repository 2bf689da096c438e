"""The signal of tissues in T1w, T1ce, T2w and FLAIR images: relaxation times and the equations of the sequences.

Times are in ms at 1.5 T. The values of healthy tissue and of oedema's upper end are those of the BrainWeb simulator
(Kwan, Evans and Pike 1999; its sequence parameters are used, too). Tumours are in proportion to white matter as measured
by MR fingerprinting (de Blank et al. 2019): T1 of the tumour 1.5 (low grade) to 2 times, of the white matter around it
1.3 times that of the other side; T2 1.6 to 2.4 times and 1.7 times. Necrosis is set between tumour and cerebrospinal
fluid. Gadolinium shortens T1 by 4.1 per mM and second (gadopentetate in plasma at 1.5 T, Rohrer et al. 2005).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from voxtune.data.modality import kind_name
from voxtune.errors import InputError

KINDS = ("T1w", "T1ce", "T2w", "FLAIR")
RELAXIVITY = 4.1  # per mM and second


@dataclass(frozen=True, kw_only=True)
class Tissue:
    """Relaxation times in ms and the density of protons relative to cerebrospinal fluid."""

    t1: float
    t2: float
    t2_star: float
    density: float
    source: str


BRAINWEB = "BrainWeb (Kwan et al. 1999)"
FINGERPRINTING = "ratios to white matter by MR fingerprinting (de Blank et al. 2019)"
TISSUES: dict[str, Tissue] = {
    "fluid": Tissue(t1=2569, t2=329, t2_star=58, density=1.0, source=BRAINWEB),
    "grey": Tissue(t1=833, t2=83, t2_star=69, density=0.86, source=BRAINWEB),
    "white": Tissue(t1=500, t2=70, t2_star=61, density=0.77, source=BRAINWEB),
    "oedema": Tissue(
        t1=700, t2=130, t2_star=80, density=0.84, source=f"{FINGERPRINTING}; below the MS lesion of BrainWeb"
    ),
    "rim": Tissue(t1=1000, t2=150, t2_star=90, density=0.9, source=FINGERPRINTING),
    "core": Tissue(t1=1800, t2=250, t2_star=95, density=0.95, source="set between tumour and fluid"),
}


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """`inversion` is the inversion time of FLAIR; `flip` the angle of a spoiled gradient echo, in degrees. Times in ms."""

    repetition: float
    echo: float
    inversion: float = 0.0
    flip: float = 90.0

    def signal(self, tissue: Tissue, gadolinium: float = 0.0) -> float:
        """The signal of a tissue with `gadolinium` in mM, in units of fully relaxed protons of fluid."""
        t1 = 1000.0 / (1000.0 / tissue.t1 + RELAXIVITY * gadolinium)
        recovered = math.exp(-self.repetition / t1)
        if self.flip < 90.0:
            # Ernst: the steady state of a spoiled gradient echo.
            angle = math.radians(self.flip)
            magnetisation = math.sin(angle) * (1 - recovered) / (1 - math.cos(angle) * recovered)
            return tissue.density * magnetisation * math.exp(-self.echo / tissue.t2_star)
        magnetisation = 1 - recovered
        if self.inversion:
            magnetisation = abs(1 - 2 * math.exp(-self.inversion / t1) + recovered)
        return tissue.density * magnetisation * math.exp(-self.echo / tissue.t2)


# BrainWeb's T1 and T2 sequences. FLAIR's inversion time cancels the fluid of TISSUES.
SEQUENCES: dict[str, Sequence] = {
    "T1w": Sequence(repetition=18, echo=10, flip=30),
    "T1ce": Sequence(repetition=18, echo=10, flip=30),
    "T2w": Sequence(repetition=3300, echo=100),
    "FLAIR": Sequence(repetition=9000, echo=110, inversion=1704),
}


def signals(
    kind: str,
    factors: Mapping[str, tuple[float, float, float]] | None = None,
    sequence: tuple[float, float] = (1.0, 1.0),
    gadolinium: float = 0.5,
) -> dict[str, float]:
    """The signal of each tissue in an image of this kind.

    `factors` multiply a tissue's T1, T2 and density, `sequence` the echo time and the flip angle or repetition time.
    `gadolinium` is the concentration in mM in the rim, where T1ce shows it.
    """
    base = SEQUENCES[check_kind(kind)]
    echo, other = base.echo * sequence[0], sequence[1]
    gradient = base.flip < 90.0
    played = Sequence(
        repetition=base.repetition * (1.0 if gradient else other),
        echo=echo,
        inversion=base.inversion,
        flip=base.flip * other if gradient else base.flip,
    )
    result = {}
    for name, tissue in TISSUES.items():
        t1, t2, density = (1.0, 1.0, 1.0) if factors is None else factors[name]
        varied = Tissue(
            t1=tissue.t1 * t1,
            t2=tissue.t2 * t2,
            t2_star=tissue.t2_star * t2,
            density=tissue.density * density,
            source=tissue.source,
        )
        result[name] = played.signal(varied, gadolinium if kind == "T1ce" and name == "rim" else 0.0)
    return result


def check_kind(kind: str) -> str:
    """The canonical name of an image kind that can be simulated."""
    name = kind_name(kind)
    if name not in SEQUENCES:
        raise InputError(f"simulated subjects have {', '.join(KINDS)} images, not {kind}")
    return name
