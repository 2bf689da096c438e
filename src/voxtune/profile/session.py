"""A Session: the recorded steps of one configuration, as Parquet tables and a JSON file with their provenance.

A session folder holds session.json, launches.parquet and, if recorded, opcodes, memory and timings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxtune.errors import InputError, optional_import
from voxtune.files import write_file, writing
from voxtune.marks import PARQUET_MARK
from voxtune.profile import schema
from voxtune.reading import check_memory, file_size, opening, read_json, reading

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "voxtune-session"
# A step has a few thousand launches. The pages of a report take seconds for each 10,000.
MAX_ROWS = 200_000
# A number with its mask, as pyarrow reads it and as pandas holds it.
BYTES_PER_VALUE = 18
# Tables whose rows have every value.
COMPLETE = ("opcodes", "memory", "timings")
# No time in microseconds or count of instructions is larger.
LARGEST_NUMBER = 1e18


@dataclass(kw_only=True)
class Session:
    """`meta` (all JSON): name, workload, mode (train or sample), config, size, batch, steps, environment (gpu, driver,
    torch, cuda, cudnn, triton, ncu, python), clocks, cache_control, clock_control, commit, command, created, tiers
    ({tier: {"done": bool, "why": str | null}}), window (null, or the part of the step), peak_bytes.
    Tables are pandas frames with exactly the columns of `schema.TABLES`; an unrecorded table is empty.
    """

    meta: dict[str, Any]
    launches: pd.DataFrame
    opcodes: pd.DataFrame = field(default_factory=lambda: empty("opcodes"))
    memory: pd.DataFrame = field(default_factory=lambda: empty("memory"))
    timings: pd.DataFrame = field(default_factory=lambda: empty("timings"))

    @property
    def name(self) -> str:
        return str(self.meta["name"])

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Writes the session's files; `overwrite` replaces those of an earlier session."""
        with optional_import("reading a profiling session"):
            import pyarrow.parquet as pq

        folder = Path(folder)
        for table in schema.TABLES:
            arrow = _to_arrow(getattr(self, table), table)
            with writing(folder / f"{table}.parquet", overwrite=overwrite) as part:
                pq.write_table(arrow, part, compression="zstd", compression_level=12)
        text = json.dumps({"format": FORMAT, "version": schema.VERSION, **self.meta}, indent=2, default=str)
        write_file(folder / "session.json", text + "\n", overwrite=overwrite)
        return folder


def session_files(folder: str | Path) -> list[Path]:
    """The files of the session in `folder`."""
    return [*(Path(folder) / f"{table}.parquet" for table in schema.TABLES), Path(folder) / "session.json"]


def frame(rows: list[dict[str, Any]], table: str) -> pd.DataFrame:
    """The rows as a frame of that table. Missing keys become null; unknown keys are an internal error."""
    with optional_import("reading a profiling session"):
        import pandas as pd

    names = [c.name for c in schema.TABLES[table]]
    unknown = {k for row in rows for k in row} - set(names)
    assert not unknown, f"not columns of {table}: {sorted(unknown)}"
    columns = {c.name: pd.array([row.get(c.name) for row in rows], dtype=_dtype(c.type)) for c in schema.TABLES[table]}
    return pd.DataFrame(columns, columns=names)


def empty(table: str) -> pd.DataFrame:
    return frame([], table)


def load_session(folder: str | Path) -> Session:
    """Reads a session folder. Raises InputError if it is missing, damaged, of another version or not a session."""
    folder = Path(folder)
    meta = _read_meta(folder / "session.json")
    tables = {table: _read_table(folder / f"{table}.parquet", table) for table in schema.TABLES}
    return Session(meta=meta, **tables)


def find_sessions(path: str | Path) -> list[Path]:
    """`path` itself if it is a session, else the sessions one or two folders below it."""
    path = Path(path)
    if (path / "session.json").is_file():
        return [path]
    folders = sorted(p.parent for p in [*path.glob("*/session.json"), *path.glob("*/*/session.json")])
    if not folders:
        raise InputError(
            f"{path}: no session found (a session folder contains session.json); record one with voxtune profile"
        )
    return folders


# What `session.json` may hold besides the required entries; an entry that was not recorded is null or absent.
REQUIRED: dict[str, type] = {"name": str, "mode": str, "config": str, "environment": dict, "tiers": dict}
OPTIONAL: dict[str, Any] = {
    **dict.fromkeys(("workload", "device", "cache_control", "clock_control", "commit", "command", "created"), str),
    **dict.fromkeys(("batch", "steps"), int),
    **dict.fromkeys(("clocks", "window", "proof", "flags"), dict),
    "size": list,
    "peak_bytes": (int, float),
}
TIER = {"done": bool, "why": str, **dict.fromkeys(("time_share", "counting_s", "seconds", "read"), (int, float))}


def _read_meta(path: Path) -> dict[str, Any]:
    meta = read_json(path)
    with reading(path, "session", fix="record it again"):
        if not isinstance(meta, dict) or meta.get("format") != FORMAT:
            raise InputError(f"{path}: not a session of Voxtune")
        version = meta.get("version")
        if version != schema.VERSION:
            raise InputError(
                f"{path}: session version {version!r} is not supported (expected {schema.VERSION}); record it again"
            )
        _check_meta(meta)
    return meta


def check_session(session: Session) -> None:
    """Raises for a session that could be saved but not loaded."""
    _check_meta(session.meta)
    for table in schema.TABLES:
        rows = getattr(session, table)
        if len(rows) > MAX_ROWS:
            raise InputError(f"{len(rows)} rows, more than the maximum of {MAX_ROWS}")
        _check_columns(rows, table)


def _check_meta(meta: dict[str, Any]) -> None:
    _check_entries(meta, REQUIRED, required=True)
    _check_entries(meta, OPTIONAL)
    for tier, state in meta["tiers"].items():
        if not isinstance(state, dict):
            raise InputError(f"tier {tier[:40]!r} is not an object")
        _check_entries(state, TIER)
    if not all(type(n) is int and n > 0 for n in meta.get("size") or []):
        raise InputError("'size' is not a list of whole numbers above 0")
    _check_numbers(meta)


def _check_entries(values: dict[str, Any], kinds: Mapping[str, Any], *, required: bool = False) -> None:
    for key, kind in kinds.items():
        value = values.get(key)
        if (required or value is not None) and (not isinstance(value, kind) or (kind is not bool and value is True)):
            raise InputError(f"{key!r} is missing or has the wrong type")


def _check_numbers(value: Any) -> None:
    """Raises for a number with which sums or squares would be infinite. The depth of a JSON document is limited."""
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_numbers(part)
    elif isinstance(value, int | float) and abs(value) > LARGEST_NUMBER:
        raise InputError(f"the number {str(value)[:20]} is out of range")


def _read_table(path: Path, table: str) -> pd.DataFrame:
    if not path.exists() and table != "launches":
        return empty(table)
    with optional_import("reading a profiling session"):
        import pandas  # noqa: F401  a table becomes a frame
        import pyarrow.parquet as pq

    names = [c.name for c in schema.TABLES[table]]
    texts = [c.name for c in schema.TABLES[table] if c.type == "string"]
    with opening(path, "table", fix="record the session again") as stream:
        # Text is read as a dictionary: a long text that millions of rows share takes its bytes only once.
        file = pq.ParquetFile(stream, read_dictionary=texts)
        rows, size = file.metadata.num_rows, file_size(stream)
        if rows > MAX_ROWS:
            raise InputError(f"{path}: {rows} rows, more than the maximum of {MAX_ROWS}")
        missing = [n for n in names if n not in file.schema_arrow.names]
        if missing:
            raise InputError(f"{path}: column {missing[0]!r} is missing; the session is damaged or of another version")
        groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
        unpacked = sum(group.total_byte_size for group in groups)
        check_memory(path, max(unpacked, rows * len(names) * BYTES_PER_VALUE), size)
        arrow = file.read(columns=names, use_threads=False)
        check_memory(path, sum(_text_bytes(arrow[name]) for name in texts), size)
        frame = arrow.select(names).cast(_arrow_schema(table)).to_pandas(types_mapper=_types_mapper())
        _check_columns(frame, table)
    return frame


def _check_columns(rows: pd.DataFrame, table: str) -> None:
    for column in schema.TABLES[table]:
        if column.type != "string":
            _check_column(rows[column.name])
        if table in COMPLETE and rows[column.name].isna().any():
            raise InputError(f"a row has no {column.name!r}")


def _text_bytes(column: Any) -> int:
    """The bytes of the text in a column, with all repetitions."""
    import pyarrow as pa
    import pyarrow.compute as pc

    total = 0
    for chunk in column.chunks:
        if pa.types.is_dictionary(chunk.type):
            lengths = pc.binary_length(chunk.dictionary.cast(pa.string())).take(chunk.indices)
            total += pc.sum(lengths.cast(pa.int64())).as_py() or 0
    return total


def _check_column(values: pd.Series) -> None:
    """Raises for numbers that are not finite or out of range; a value that was not measured is null."""
    known = values.dropna().to_numpy(dtype="float64")
    wrong = known[~(abs(known) <= LARGEST_NUMBER)]
    if len(wrong):
        raise InputError(f"the column {values.name!r} has the number {wrong[0]}, which is out of range")


def _dtype(kind: str) -> str:
    return {"string": "string", "int64": "Int64", "float64": "Float64"}[kind]


def _arrow_schema(table: str) -> Any:
    import pyarrow as pa

    kinds = {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64()}
    return pa.schema([(c.name, kinds[c.type]) for c in schema.TABLES[table]])


def _to_arrow(rows: pd.DataFrame, table: str) -> Any:
    import pyarrow as pa

    arrow = pa.Table.from_pandas(rows, schema=_arrow_schema(table), preserve_index=False)
    return arrow.replace_schema_metadata({**(arrow.schema.metadata or {}), "format": PARQUET_MARK})


def _types_mapper() -> Any:
    import pandas as pd
    import pyarrow as pa

    return {pa.string(): pd.StringDtype(), pa.int64(): pd.Int64Dtype(), pa.float64(): pd.Float64Dtype()}.get
