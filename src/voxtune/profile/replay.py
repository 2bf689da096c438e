"""Makes a session again from its raw recording: `python -m voxtune.profile.replay FOLDER...`, no GPU needed.

A session recorded with --keep-raw holds the trace and Nsight Compute's pages in its folder raw/. Whatever is read from
them better than it was on the day of the recording, is read so here.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from voxtune.errors import InputError
from voxtune.profile.census import RawCensus
from voxtune.profile.configs import parse_config
from voxtune.profile.counters import COUNTER_TIERS, Identity, Reading, carry, prove_precision
from voxtune.profile.session import Session, find_sessions, frame, load_session

RAW = "raw"


def replay(folder: str | Path) -> Session:
    """The session of `folder`, made anew and saved."""
    folder = Path(folder)
    raw = folder / RAW
    if not (raw / "census.json").exists():
        raise InputError(f"{folder}: no raw recording in it; record it with --keep-raw")
    session = load_session(folder)
    census = RawCensus.kept(raw).census()
    session.launches, session.memory = frame(census.launches, "launches"), frame(census.memory, "memory")
    session.timings, session.opcodes = frame(census.timings, "timings"), frame([], "opcodes")
    called: dict[int, Identity] = {}
    for tier in COUNTER_TIERS:
        if (raw / f"{tier}.json").exists():
            _, called = carry(session, Reading.kept(raw, tier), called)
    if any((raw / f"{tier}.json").exists() for tier in COUNTER_TIERS):
        claims = parse_config(session.meta["config"]).fp32
        session.meta["proof"] = prove_precision(session, claims_fp32=claims)
    session.save(folder)
    return session


def main(arguments: list[str]) -> int:
    try:
        for folder in (f for a in arguments for f in find_sessions(a)):
            tiers = replay(folder).meta["tiers"]
            print(folder, json.dumps({t: s.get("time_share", s["done"]) for t, s in tiers.items()}))  # noqa: T201
    except InputError as error:
        print(f"voxtune: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
