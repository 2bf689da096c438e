"""The summary at the start of the report, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from voxtune.analysis.summary import Summary, summaries
from voxtune.report.charts import MODES
from voxtune.report.document import Section, Text
from voxtune.report.numbers import number

if TYPE_CHECKING:
    from voxtune.profile.session import Session

STEP = {
    "train": "A training step computes one batch forward and backward and updates the weights.",
    "sample": "A sampling step is one denoising step; a volume takes as many as the sampler has.",
}


def summary(names: Sequence[str], sessions: Sequence[Session]) -> Section:
    """`names` are not used: sentences name configurations."""
    blocks = [Text(text=_sentences(s), title=_title(s)) for s in summaries(sessions)]
    return Section(
        id="summary",
        title="In short",
        lead="For readers who do not work with GPUs. A configuration is a set of PyTorch options; bf16 computes with fewer "
        "digits than fp32 and tf32, so its results differ slightly.",
        blocks=[*blocks],
    )


def _title(s: Summary) -> str:
    return f"{MODES.get(s.mode, s.mode).capitalize()} of {s.workload} on {s.gpu}"


def _sentences(s: Summary) -> str:
    out = [STEP.get(s.mode, "")]
    if s.first_ms is None or s.fastest_ms is None:
        return " ".join([*out, "No step time was recorded."])
    memory = f" and at most {number(s.first_gib, 1)} GiB of GPU memory" if s.first_gib else ""
    out.append(f"With {_name(s.first)} it takes {number(s.first_ms, 1)} ms{memory}.")
    if s.first_work:
        out.append(f"Most of it is {_parts(s.first_work)}.")
    if s.fastest != s.first:
        memory = f" and {number(s.fastest_gib, 1)} GiB" if s.fastest_gib else ""
        out.append(
            f"The fastest recorded configuration, {s.fastest}, takes {number(s.fastest_ms, 1)} ms{memory}: "
            f"{number(s.speedup, 1)} times as fast."
        )
    if s.slowest not in (s.first, s.fastest):
        out.append(f"The slowest, {s.slowest}, takes {number(s.slowest_ms, 1)} ms.")
    if s.fastest_idle_pct is not None and s.fastest_idle_pct >= 5:
        out.append(f"In the fastest, the GPU waits {number(s.fastest_idle_pct, 0)} % of the time for the program.")
    if s.advice:
        change = s.advice[:1].lower() + s.advice[1:]
        out.append(
            f"The largest estimated gain that is left in {s.fastest}: {change} (about {number(s.advice_ms, 1)} ms a step)."
        )
    return " ".join(filter(None, out))


def _name(config: str) -> str:
    return "PyTorch in full precision (baseline)" if config == "baseline" else config


def _parts(work: list[tuple[str, float]]) -> str:
    words = [f"{name} ({number(share, 0)} %)" for name, share in work]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
