"""A Session: the recorded steps of one configuration, as Parquet tables and a JSON file with their provenance.

A session folder holds session.json, launches.parquet and, if recorded, opcodes, memory and timings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from voxtune.errors import InputError, optional_import
from voxtune.files import write_file, writing
from voxtune.marks import PARQUET_MARK
from voxtune.profile import schema

if TYPE_CHECKING:
    import pandas as pd

FORMAT = "voxtune-session"
MAX_ROWS = 2_000_000


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


def _read_meta(path: Path) -> dict[str, Any]:
    try:
        meta = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}; a session folder contains session.json") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error}); the session is damaged, record it again") from None
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise InputError(f"{path}: not a session of Voxtune")
    version = meta.get("version")
    if version != schema.VERSION:
        raise InputError(
            f"{path}: session version {version!r} is not supported (expected {schema.VERSION}); record it again"
        )
    for key, kind in (("name", str), ("mode", str), ("config", str), ("environment", dict), ("tiers", dict)):
        if not isinstance(meta.get(key), kind):
            raise InputError(f"{path}: {key!r} is missing or not a {kind.__name__}; the session is damaged")
    return meta


def _read_table(path: Path, table: str) -> pd.DataFrame:
    if not path.exists() and table != "launches":
        return empty(table)
    with optional_import("reading a profiling session"):
        import pandas  # noqa: F401  a table becomes a frame
        import pyarrow as pa
        import pyarrow.parquet as pq

    with _reporting(path, (OSError, pa.ArrowException)):
        file = pq.ParquetFile(path)
        if file.metadata.num_rows > MAX_ROWS:
            raise InputError(f"{path}: {file.metadata.num_rows} rows, more than the maximum of {MAX_ROWS}")
        arrow = file.read()
    names = [c.name for c in schema.TABLES[table]]
    missing = [n for n in names if n not in arrow.column_names]
    if missing:
        raise InputError(f"{path}: column {missing[0]!r} is missing; the session is damaged or of another version")
    with _reporting(path, (pa.ArrowException, ValueError, TypeError, OverflowError)):
        cast = arrow.select(names).cast(_arrow_schema(table))
        return cast.to_pandas(types_mapper=_types_mapper())


@contextmanager
def _reporting(path: Path, errors: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except errors as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: damaged or truncated table ({reason}); record the session again") from None


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
