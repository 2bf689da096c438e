"""Rebuilds sessions from their raw recordings, without a GPU: `python -m voxtune.profile.replay FOLDER...`.

A session recorded with --keep-raw holds the trace and Nsight Compute's pages in its folder raw/. Rebuilding applies later
improvements of the parsers to an old recording.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from voxtune.errors import InputError, printable
from voxtune.profile.census import RAW, RawCensus
from voxtune.profile.configs import parse_config
from voxtune.profile.counters import COUNTER_TIERS, Identity, TierReport, assign_counters, prove_precision
from voxtune.profile.session import Session, check_session, find_sessions, frame, load_session
from voxtune.reading import reading


def replay(folder: str | Path) -> Session:
    """Rebuilds the session in `folder` and saves it."""
    folder = Path(folder)
    raw = folder / RAW
    if not (raw / "census.json").exists():
        raise InputError(f"{folder}: no raw recording; record the session with --keep-raw")
    session = load_session(folder)
    recording = RawCensus.load(raw)
    # Its values, of any type, are used in many places before they are columns with a type.
    with reading(raw, "recording", fix="record the session again"):
        _rebuild(session, recording, raw)
        check_session(session)
    session.save(folder, overwrite=True)
    return session


def _rebuild(session: Session, recording: RawCensus, raw: Path) -> None:
    """Replaces the session's tables by those of the recording in `raw`."""
    census = recording.census()
    session.launches, session.memory = frame(census.launches, "launches"), frame(census.memory, "memory")
    session.timings, session.opcodes = frame(census.timings, "timings"), frame([], "opcodes")
    identities: dict[int, Identity] = {}
    for tier in COUNTER_TIERS:
        if (raw / f"{tier}.json").exists():
            _, identities = assign_counters(session, TierReport.load(raw, tier), identities)
    if any((raw / f"{tier}.json").exists() for tier in COUNTER_TIERS):
        claims = parse_config(session.meta["config"]).fp32
        session.meta["proof"] = prove_precision(session, claims_fp32=claims)


def main(arguments: list[str]) -> int:
    try:
        for folder in (f for a in arguments for f in find_sessions(a)):
            tiers = replay(folder).meta["tiers"]
            print(printable(str(folder)), json.dumps({t: s.get("time_share", s["done"]) for t, s in tiers.items()}))  # noqa: T201
    except InputError as error:
        print(f"voxtune: error: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
