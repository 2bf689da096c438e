"""voxtune profile: record whole steps of a workload or a model into sessions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from voxtune.cli.common import DeviceOption, JsonOption, Output, QuietOption, choose_device, parse_size

if TYPE_CHECKING:
    from voxtune.profile.record import Recorded


def command(
    source: Annotated[str, typer.Argument(metavar="WORKLOAD|MODEL", help="A workload's name, or a model's path.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the sessions, one folder each.")],
    mode: Annotated[str, typer.Option(help="train (forward, loss, backward, Adam) or sample (one DDPM step).")] = "train",
    config: Annotated[
        str,
        typer.Option(help="Configurations, by commas: baseline, or tf32, bf16, channels_last, compile joined by +."),
    ] = "baseline,tf32,channels_last,tf32+channels_last",
    size: Annotated[str | None, typer.Option(help="Another size than its own, as depth,height,width.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Samples in a step.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Whole steps in the census.")] = 2,
    repeats: Annotated[int, typer.Option(min=5, help="Bare steps, for the time and its spread.")] = 5,
    tiers: Annotated[str, typer.Option(help="What to record, of census, few, full, opcodes.")] = "census,few,full,opcodes",
    limit: Annotated[float, typer.Option(min=1, help="Seconds for the counters of one session.")] = 600.0,
    window: Annotated[str, typer.Option(help="none or seed: whole steps are recorded; the report cuts them.")] = "none",
    cache_control: Annotated[str, typer.Option(help="Nsight Compute: none keeps caches warm, all flushes them.")] = "none",
    clock_control: Annotated[str, typer.Option(help="Nsight Compute: none, or base to lock the clocks.")] = "none",
    ahead: Annotated[bool, typer.Option(help="Start the workers before their turn, to save time.")] = True,
    self_check: Annotated[
        bool, typer.Option("--self-check", help="A small step, and a verdict on whether every tier works here.")
    ] = False,
    device: DeviceOption = "auto",
    json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Record whole steps: timeline, modules, memory, and the GPU's counters where they can be read."""
    from voxtune.errors import InputError
    from voxtune.profile.configs import parse_configs
    from voxtune.profile.record import RecordOptions, record

    if window not in ("none", "seed"):
        raise InputError(f"--window {window}: choose none or seed")
    output = Output(json=json, quiet=quiet)
    options = RecordOptions(
        mode=mode,
        size=parse_size(size) if size else _small(source) if self_check else None,
        batch=batch,
        steps=steps,
        repeats=repeats,
        tiers=tuple(t.strip() for t in tiers.split(",") if t.strip()),
        limit_s=limit,
        cache_control=cache_control,
        clock_control=clock_control,
        ahead=ahead,
    )
    chosen = [c.name for c in parse_configs(config)]
    recorded = record(source, chosen, out, options=options, device=choose_device(device), say=output.say)
    rows = [_row(r) for r in recorded]
    for row in rows:
        _print(row, output)
    output.result({"out": str(out), "sessions": rows})
    if self_check:
        _verdict(rows, options.tiers, output)
    if any(r.error for r in recorded):
        raise typer.Exit(1)


def _small(source: str) -> tuple[int, ...]:
    """The smallest size at which every level still has two voxels a side."""
    from voxtune.profile.steps import find_target

    network = find_target(source).network
    return (2 * network.divisor,) * network.dimensions


def _row(recorded: Recorded) -> dict[str, Any]:
    row: dict[str, Any] = {"config": recorded.config, "folder": str(recorded.folder), "seconds": recorded.seconds}
    if recorded.session is None:
        return row | {"error": recorded.error}
    session = recorded.session
    bare = session.timings.loc[session.timings["tier"] == "bare", "step_ms"]
    first = session.launches[session.launches["step"] == 0]
    return row | {
        "step_ms": float(bare.median()),
        "step_ms_p20": float(bare.quantile(0.2)),
        "step_ms_p80": float(bare.quantile(0.8)),
        "launches": len(first),
        "unknown_time_share": float(first.loc[first["class"] == "unknown", "duration_us"].sum())
        / max(float(first["duration_us"].sum()), 1e-9),
        "peak_bytes": session.meta.get("peak_bytes"),
        "tiers": session.meta["tiers"],
        "proof": session.meta.get("proof"),
    }


def _print(row: dict[str, Any], output: Output) -> None:
    if "error" in row:
        output.warn(f"{row['config']}: {row['error']}")
        return
    peak = f", peak {row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else ""
    output.say(
        f"{row['config']}: step {row['step_ms']:.2f} ms bare (p20 {row['step_ms_p20']:.2f}, p80 {row['step_ms_p80']:.2f}), "
        f"{row['launches']} launches{peak}, unknown {100 * row['unknown_time_share']:.2f} % of time; {row['folder']}"
    )
    for tier, told in row["tiers"].items():
        share = f"{100 * told['time_share']:.2f} % of kernel time" if "time_share" in told else ""
        why = f"missing: {told['why']}" if told.get("why") else ""
        output.say(f"  {tier:8} {'; '.join(filter(None, [share, why])) or 'done'}")
    proof = row["proof"] or {}
    if proof.get("claim") == "fp32":
        said = {True: "holds", False: "BROKEN: tensor cores were used", None: "not proved"}[proof.get("holds")]
        output.say(f"  fp32     {said}")


def _verdict(rows: list[dict[str, Any]], tiers: tuple[str, ...], output: Output) -> None:
    failed = []
    for row in rows:
        told = row.get("tiers", {})
        failed += [f"{row['config']} {t}" for t in tiers if not told.get(t, {}).get("done")]
        if (row.get("proof") or {}).get("holds") is False:
            failed.append(f"{row['config']} fp32")
    output.say(f"self-check: {'FAILED: ' + ', '.join(failed) if failed else 'passed, every tier works here'}")


if __name__ == "__main__":
    typer.run(command)
