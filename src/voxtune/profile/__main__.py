"""`python -m voxtune.profile`: the verb profile with Python's own parser, for machines that hold little but PyTorch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from voxtune.errors import InputError
from voxtune.profile.configs import parse_configs
from voxtune.profile.record import TIERS, RecordOptions, lines, record, summary, verdict
from voxtune.profile.steps import smallest_size


def main(arguments: Sequence[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    try:
        size = tuple(map(int, asked.size.split(","))) if asked.size else None
        options = RecordOptions(
            mode=asked.mode,
            size=size or (smallest_size(asked.source) if asked.self_check else None),
            batch=asked.batch,
            steps=asked.steps,
            tiers=tuple(asked.tiers.split(",")),
            limit_s=asked.limit,
            budget_s=asked.budget,
            ahead=not asked.no_ahead,
            keep_raw=asked.keep_raw,
        )
        configs = [c.name for c in parse_configs(asked.config)]
        recorded = record(asked.source, configs, asked.out, options=options, device=asked.device, say=_say)
    except InputError as error:
        print(f"voxtune: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    rows = [summary(r) for r in recorded]
    for row in rows:
        for line in lines(row):
            _say(line)
    if asked.self_check:
        _say(verdict(rows, options.tiers))
    return 1 if any(r.error for r in recorded) else 0


def _say(line: str) -> None:
    print(line, flush=True)  # noqa: T201


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m voxtune.profile", description="See voxtune profile --help.")
    parser.add_argument("source", metavar="WORKLOAD|MODEL")
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--mode", default="train")
    parser.add_argument("--config", default="baseline,tf32,channels_last,tf32+channels_last")
    parser.add_argument("--size")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--tiers", default=",".join(TIERS))
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--budget", type=float)
    parser.add_argument("--device")
    parser.add_argument("--self-check", action="store_true")
    parser.add_argument("--no-ahead", action="store_true")
    parser.add_argument("--keep-raw", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
