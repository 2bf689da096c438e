"""Writes the tables of measured quality into the pages of docs/ from the results files: python benchmarks/quality_tables.py.

A table stands between `<!-- NAME -->` and `<!-- end of NAME -->`, in any page of docs/. A test checks that pages and files agree.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from voxtune.quality.bootstrap import Interval
from voxtune.quality.paired import Comparison
from voxtune.quality.step_table import NON_INFERIOR
from voxtune.quality.usefulness_table import NOT_SIGNIFICANT, arm_name, describe_training, training_counts

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
Data = dict[str, Any]


def read(name: str) -> Data:
    data: Data = json.loads((RESULTS / name).read_text())
    return data


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float) -> str:
    return f"{value:.3f}" if 0.1 <= abs(value) < 10 else f"{value:.3g}"


def interval(metric: Data) -> str:
    return f"{number(metric['value'])} ({number(metric['low'])} to {number(metric['high'])})"


def change(metric: Data | None, form: str) -> str:
    if metric is None:
        return ""
    value, low, high = (f"{metric[key]:{form}}" for key in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def verdict(text: str) -> str:
    """A verdict of a results file in today's words; files of version 0.1 have others."""
    if text in NON_INFERIOR:
        return NON_INFERIOR[0]
    if text == "not told apart":
        return NOT_SIGNIFICANT
    return re.sub("^worse: ", "inferior: ", text)


def limiting(row: Data) -> str:
    """The largest share of a margin, and its metric; bold if the row is non-inferior."""
    compared = {
        name: Comparison(worsening=Interval(**{k: one[k] for k in ("value", "low", "high")}), margin=one["margin"])
        for name, one in row["worsening"].items()
    }
    name = max(compared, key=lambda n: compared[n].share_of_margin)
    text = f"{max(0.0, compared[name].share_of_margin):.2f} {name}"
    return f"**{text}**" if row["verdict"] in NON_INFERIOR else text


def timestep_spacing(row: Data) -> str:
    """The spacing of the row's timesteps; files of version 0.1 call it spacing."""
    return row["timestep_spacing"] if "timestep_spacing" in row else row["spacing"]


def steps_grid(data: Data) -> str:
    plain = [r for r in data["rows"] if r.get("worsening") and r["clip"] and timestep_spacing(r) == "trailing"]
    plain = [r for r in plain if not r.get("cache") and r["seed"] == data["seed"]]
    numbers = sorted({r["steps"] for r in plain})
    rows = []
    for sampler in dict.fromkeys(r["sampler"] for r in plain):
        by_steps = {r["steps"]: r for r in plain if r["sampler"] == sampler}
        rows.append([sampler, *(limiting(by_steps[n]) if n in by_steps else "" for n in numbers)])
    return table(["sampler", *(f"{n} steps" for n in numbers)], rows)


def steps_varied(data: Data) -> str:
    rows = []
    for r in data["rows"]:
        varied = not r["clip"] or timestep_spacing(r) != "trailing" or r.get("cache")
        if varied or (r.get("worsening") and r["seed"] != data["seed"]):
            rows.append([r["name"], f"{r['seconds_per_volume'] * 1e3:.1f}", limiting(r), verdict(r["verdict"])])
    return table(["setting", "ms per volume", "share of margin", "verdict"], rows)


def confirmed(data: Data) -> str:
    """Every row of a table, with the tumour's Dice, the metric that decides here."""
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
                limiting(r) if r.get("worsening") else "",
                verdict(r["verdict"]),
            ]
        )
    return table(["setting", "ms per volume", "tumour Dice", "lower by", "share of margin", "verdict"], rows)


def steps_figures(data: Data) -> str:
    """The chosen setting and both runs of the reference; how much worse than their mean it is."""
    first, again = data["rows"][:2]
    chosen = next(r for r in data["rows"] if r["name"] == data["chosen"])
    lines = []
    for name, margin in data["margins"].items():
        cells = [interval(r["figures"][name]) for r in (first, again, chosen)]
        lines.append([f"`{name}`", *cells, change(chosen["worsening"][name], "+.2g"), number(margin["margin"])])
    lines.append(["ms per volume", *(f"{r['seconds_per_volume'] * 1e3:.1f}" for r in (first, again, chosen)), "", ""])
    return table(["metric", first["name"], again["name"], chosen["name"], "worse by", "margin"], lines)


def numerics(data: Data) -> str:
    rows = []
    for r in data["rows"]:
        distance = r.get("distance")
        rows.append(
            [
                r["name"],
                f"{r['seconds_per_volume'] * 1e3:.1f}",
                limiting(r) if r.get("worsening") else "",
                "" if distance is None else f"{distance['relative']:.1e} (worst {distance['relative_worst']:.1e})",
                "" if distance is None else f"{distance['psnr']:.1f} (worst {distance['psnr_worst']:.1f})",
                verdict(r["verdict"]),
            ]
        )
    return table(["", "ms per volume", "share of margin", "relative error of volumes", "PSNR, dB", "verdict"], rows)


def usefulness(data: Data, all_steps: Data) -> str:
    """`all_steps`: the same with volumes that the reference generated, with all steps."""
    rows = []
    for arm, other in zip(data["arms"], all_steps["arms"], strict=True):
        seeds = ", ".join(f"{v:.3f}" for v in arm["dice"]["tumour"]["by_seed"])
        gain = next((g for g in arm["gains"] if g["label"] == "tumour"), None)
        dice = [interval(arm["dice"][label]) for label in ("brain", "tumour")]
        rows.append(
            [
                f"`{arm_name(data, arm['name'])}`",
                describe_training(training_counts(data, arm)),
                *dice,
                seeds,
                change(gain, "+.3f"),
                "" if gain is None else verdict(gain["verdict"]),
                number(other["dice"]["tumour"]["value"]) if arm["synthetic"] else "",
            ]
        )
    reference = arm_name(data, data["arms"][0]["name"])
    header = [
        "arm",
        "trained on",
        "Dice of brain",
        "Dice of tumour",
        "by seed",
        f"tumour, minus `{reference}`",
        "verdict",
    ]
    settings = all_steps["drawing"]
    return table([*header, f"tumour, with {settings['sampler']} {settings['steps']}"], rows)


def volume(data: Data) -> str:
    rows = []
    first = next(r for r in data["rows"] if r["name"] == "published_fp32_250")
    for r in data["rows"]:
        cache = f", cache {r['cache']}" if "cache" in r else ""
        speedup = "" if r["name"].endswith("first_volume") else f"{first['p50_ms'] / r['p50_ms']:.1f} x"
        error = "" if r["error"] in (None, 0.0) else f"{r['error']:.1e}"
        settings = f"{r['sampler']} {r['steps']}{cache}"
        rows.append([f"`{r['name']}`", settings, f"{r['p50_ms']:,.0f}", speedup, f"{r['peak_gib']:.1f}", error])
    return table(["row", "sampling", "ms per volume", "", "GiB", "error"], rows)


def evaluation(data: Data) -> str:
    """Each metric beside that of the subjects, which are simulated."""
    metrics = {metric["name"]: metric for metric in data["figures"]}
    pairs = [(name, f"{name}_real") for name in ("dice_brain", "dice_tumour", "diversity")]
    pairs += [(name, f"{name}_real") for name in ("nearest_voxel", "nearest_feature")]
    rows = [[f"`{a}`", interval(metrics[a]), interval(metrics[b])] for a, b in pairs]
    rows += [[f"`{n}`", interval(metrics[n]), ""] for n in ("nearest_voxel_ratio", "nearest_feature_ratio")]
    rows += [[f"`{n}`", number(metrics[n]["value"]), ""] for n in ("nearest_voxel_copies", "nearest_feature_copies")]
    return table(["metric", "generated", "simulated subjects"], rows)


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


def pages() -> Iterator[tuple[Path, str]]:
    """Every page that has tables, as it should be."""
    texts = {path: path.read_text() for path in sorted(DOCS.rglob("*.md"))}
    tables = blocks()
    for name in tables:
        places = [path for path, text in texts.items() if f"<!-- {name} -->" in text]
        assert len(places) == 1, f"the table {name} must stand in one page of docs/, not in {len(places)}"
    for path, text in texts.items():
        if any(f"<!-- {name} -->" in text for name in tables):
            yield path, fill(text, tables)


def fill(page: str, tables: dict[str, str]) -> str:
    for name, text in tables.items():
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        assert page.count(start) == page.count(end), f"the table {name} has no end"
        pattern = f"{re.escape(start)}.*?{re.escape(end)}"
        page = re.sub(pattern, f"{start}\n{text}\n{end}".replace("\\", r"\\"), page, flags=re.S)
    return page


if __name__ == "__main__":
    for path, text in pages():
        path.write_text(text)
