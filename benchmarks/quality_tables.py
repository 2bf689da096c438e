"""The tables of docs/quality.md, made from the results they speak of: `python benchmarks/quality_tables.py` writes them anew.

A table stands between `<!-- NAME -->` and `<!-- end of NAME -->`. A test holds the page against the files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from voxtune.quality.bootstrap import Interval
from voxtune.quality.paired import Comparison

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "results" / "quality.md"
RESULTS = ROOT / "benchmarks" / "results"
Data = dict[str, Any]


def read(name: str) -> Data:
    found: Data = json.loads((RESULTS / name).read_text())
    return found


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    return f"{value:.3f}" if 0.1 <= abs(value) < 10 else f"{value:.3g}"


def span(figure: Data) -> str:
    return f"{number(figure['value'])} ({number(figure['low'])} to {number(figure['high'])})"


def change(figure: Data | None, form: str) -> str:
    return (
        ""
        if figure is None
        else "{:{f}} ({:{f}} to {:{f}})".format(*(figure[k] for k in ("value", "low", "high")), f=form)
    )


def told(row: Data) -> str:
    """The figure that comes nearest to its margin, or goes furthest beyond it, and the share of the margin."""
    compared = {
        name: Comparison(worsening=Interval(**{k: one[k] for k in ("value", "low", "high")}), margin=one["margin"])
        for name, one in row["worsening"].items()
    }
    name = max(compared, key=lambda n: compared[n].share_of_margin)
    text = f"{max(0.0, compared[name].share_of_margin):.2f} {name}"
    return f"**{text}**" if row["verdict"] == "not worse" else text


def steps_grid(data: Data) -> str:
    plain = [r for r in data["rows"] if r.get("worsening") and r["clip"] and r["spacing"] == "trailing"]
    plain = [r for r in plain if not r.get("cache") and r["seed"] == data["seed"]]
    numbers = sorted({r["steps"] for r in plain})
    rows = []
    for sampler in dict.fromkeys(r["sampler"] for r in plain):
        by_steps = {r["steps"]: r for r in plain if r["sampler"] == sampler}
        rows.append([sampler, *(told(by_steps[n]) if n in by_steps else "" for n in numbers)])
    return table(["sampler", *(f"{n} steps" for n in numbers)], rows)


def steps_varied(data: Data) -> str:
    rows = []
    for r in data["rows"]:
        varied = not r["clip"] or r["spacing"] != "trailing" or r.get("cache")
        if varied or (r.get("worsening") and r["seed"] != data["seed"]):
            rows.append([r["name"], f"{r['seconds_per_volume'] * 1e3:.1f}", told(r), r["verdict"]])
    return table(["row", "ms a volume", "nearest to its margin", "verdict"], rows)


def confirmed(data: Data) -> str:
    """Every row of a table, with the tumour's Dice, which decides here."""
    rows = []
    for r in data["rows"]:
        chosen = r["name"] == data["chosen"]
        lower = r["worsening"].get("dice_tumour") if r.get("worsening") else None
        rows.append(
            [
                f"**{r['name']}**, chosen" if chosen else r["name"],
                f"{r['seconds_per_volume'] * 1e3:.1f}",
                number(r["figures"]["dice_tumour"]["value"]),
                change(lower, ".3f"),
                told(r) if r.get("worsening") else "",
                r["verdict"],
            ]
        )
    return table(["row", "ms a volume", "tumour's Dice", "lower by", "nearest to its margin", "verdict"], rows)


def steps_figures(data: Data) -> str:
    """The choice beside the reference's two draws, and how much worse than their mean it is."""
    first, again = data["rows"][:2]
    chosen = next(r for r in data["rows"] if r["name"] == data["chosen"])
    lines = []
    for name, rule in data["margins"].items():
        ways = [span(r["figures"][name]) for r in (first, again, chosen)]
        lines.append([f"`{name}`", *ways, change(chosen["worsening"][name], "+.2g"), number(rule["margin"])])
    lines.append(["ms a volume", *(f"{r['seconds_per_volume'] * 1e3:.1f}" for r in (first, again, chosen)), "", ""])
    return table(["figure", first["name"], again["name"], chosen["name"], "worse by", "margin"], lines)


def numerics(data: Data) -> str:
    rows = []
    for r in data["rows"]:
        far = r.get("distance")
        rows.append(
            [
                r["name"],
                f"{r['seconds_per_volume'] * 1e3:.1f}",
                told(r) if r.get("worsening") else "",
                "" if far is None else f"{far['relative']:.1e} (worst {far['relative_worst']:.1e})",
                "" if far is None else f"{far['psnr']:.1f} (worst {far['psnr_worst']:.1f})",
                r["verdict"],
            ]
        )
    return table(["", "ms a volume", "nearest to its margin", "relative error of volumes", "PSNR, dB", "verdict"], rows)


def usefulness(data: Data, whole: Data) -> str:
    """`whole` is the same with volumes that were drawn by the reference, in all steps."""
    rows = []
    for arm, other in zip(data["arms"], whole["arms"], strict=True):
        learned = " + ".join(f"{arm[kind]} {kind}" for kind in ("real", "synthetic") if arm[kind])
        seeds = ", ".join(f"{v:.3f}" for v in arm["dice"]["tumour"]["by_seed"])
        gain = next((g for g in arm["gains"] if g["label"] == "tumour"), None)
        dice = [span(arm["dice"][label]) for label in ("brain", "tumour")]
        verdict = "" if gain is None else gain["verdict"]
        all_steps = number(other["dice"]["tumour"]["value"]) if arm["synthetic"] else ""
        rows.append([f"`{arm['name']}`", learned, *dice, seeds, change(gain, "+.3f"), verdict, all_steps])
    head = ["arm", "learned from", "Dice of brain", "Dice of tumour", "by seed", "tumour against `real`", "verdict"]
    how = whole["drawing"]
    return table([*head, f"tumour, drawn by {how['sampler']} {how['steps']}"], rows)


def volume(data: Data) -> str:
    rows = []
    first = next(r for r in data["rows"] if r["name"] == "published_fp32_250")
    for r in data["rows"]:
        kept = f", cache {r['cache']}" if "cache" in r else ""
        times = "" if r["name"].endswith("first_volume") else f"{first['p50_ms'] / r['p50_ms']:.1f} x"
        error = "" if r["error"] in (None, 0.0) else f"{r['error']:.1e}"
        how = f"{r['sampler']} {r['steps']}{kept}"
        rows.append([f"`{r['name']}`", how, f"{r['p50_ms']:,.0f}", times, f"{r['peak_gib']:.1f}", error])
    return table(["row", "sampling", "ms a volume", "", "GiB", "error"], rows)


def evaluation(data: Data) -> str:
    """Each figure beside its yardstick, what the same is for real volumes."""
    found = {f["name"]: f for f in data["figures"]}
    pairs = [("dice_brain", "dice_brain_real"), ("dice_tumour", "dice_tumour_real"), ("diversity", "diversity_real")]
    pairs += [("nearest_voxel", "nearest_voxel_real"), ("nearest_feature", "nearest_feature_real")]
    rows = [[f"`{a}`", span(found[a]), span(found[b])] for a, b in pairs]
    rows += [[f"`{n}`", span(found[n]), ""] for n in ("nearest_voxel_ratio", "nearest_feature_ratio")]
    rows += [[f"`{n}`", number(found[n]["value"]), ""] for n in ("nearest_voxel_copies", "nearest_feature_copies")]
    return table(["figure", "drawn", "real"], rows)


def blocks() -> dict[str, str]:
    search, other = read("h200/demo/steps.json"), read("h200/demo/confirmed.json")
    return {
        "steps": steps_grid(search),
        "steps, varied": steps_varied(search),
        "steps, confirmed": confirmed(other),
        "steps, figures": steps_figures(other),
        "numerics": numerics(read("h200/demo/numerics.json")),
        "usefulness": usefulness(read("h200/demo/usefulness.json"), read("h200/demo/usefulness_ddpm.json")),
        "evaluation": evaluation(read("cpu/demo_metrics.json")),
        "volume": volume(read("h200/volume.json")),
    }


def filled(page: str) -> str:
    for name, text in blocks().items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        assert page.count(start) == page.count(end) == 1, f"{PAGE}: the table {name} has no place"
        page = re.sub(f"{re.escape(start)}.*?{re.escape(end)}", lambda _: f"{start}\n{text}\n{end}", page, flags=re.S)  # noqa: B023
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
