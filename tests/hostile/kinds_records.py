"""Input kinds: sessions, raw recordings, results files, and files that a command is to replace."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from tests.factories.report_sessions import make
from tests.hostile import archives, damage
from tests.hostile.kinds import Kind, register
from tests.hostile.kinds_volumes import BYTES, JSON, TEXT
from voxtune.analysis.check import check
from voxtune.data.nifti import Volume, write_volume
from voxtune.marks import marked_gzip, marked_markdown, written_by_voxtune
from voxtune.profile.replay import replay
from voxtune.profile.session import load_session
from voxtune.report.build import build
from voxtune.report.html import render_html
from voxtune.report.waterfall import write_waterfall

TABLES = ("launches", "opcodes", "memory", "timings")


def _session(folder: Path) -> None:
    make("baseline", launches=12).save(folder / "session")
    make("tf32", launches=12).save(folder / "other")


def read_session(folder: Path, _path: Path) -> None:
    """A report of the session, and the comparison of its time with that of another one."""
    session, other = load_session(folder / "session"), load_session(folder / "other")
    render_html(build([session]))
    check(other, session, 0.05)


register(
    Kind(
        name="session.json",
        make=_session,
        damages={"session/session.json": JSON},
        read=read_session,
        cases=300,
        quick=3,
    )
)
register(
    Kind(
        name="tables of sessions (Parquet)",
        make=_session,
        damages={f"session/{table}.parquet": (archives.parquet_damage,) for table in TABLES},
        read=read_session,
        cases=300,
        quick=4,
    )
)


def _recording(folder: Path) -> None:
    """A session with a raw recording: a trace, what else the census took, and a page of counters."""
    from tests.factories.traces import Events

    made = Events()
    for step in range(2):
        at = 1000.0 * step
        made.range(f"voxtune::step#{step}", at, at + 900)
        made.range("module::conv", at + 10, at + 800)
        for call in range(3):
            made.host("aten::conv3d", at + 20 + 50 * call, at + 60 + 50 * call, Sequence_number=call)
            made.kernel("void conv_kernel(float*)", at + 30 + 50 * call)
            made.memory(at + 25 + 50 * call, 64 + call, 1024, 1024 * (call + 1))
    make("baseline", launches=6, counters=False).save(folder / "session")
    raw = folder / "session" / "raw"
    raw.mkdir()
    (raw / "trace.json.gz").write_bytes(marked_gzip(json.dumps({"traceEvents": made.events}).encode()))
    census = {
        "format": "voxtune-census/1",
        "modules": {"conv": "Conv3d"},
        "bare": [1.0, 1.1],
        "peak": 4096,
        "on_gpu": True,
    }
    (raw / "census.json").write_text(json.dumps({**census, "holders": [[[64, "weights", 1024]]] * 3}))
    names = ["ID", "Kernel Name", "Grid Size", "Block Size", "sm__cycles_elapsed.max", "gpu__time_duration.sum"]
    lines = [",".join(f'"{name}"' for name in names), '"","","","","cycle","ns"']
    lines += [f'"{n}","void conv_kernel(float*)","(1, 1, 1)","(128, 1, 1)","{1000 + n}","2000"' for n in range(6)]
    (raw / "few-raw.csv.gz").write_bytes(marked_gzip("\n".join(lines).encode()))
    few = {
        "format": "voxtune-counters/1",
        "tier": "few",
        "columns": {"cycles": "sm__cycles_elapsed.max"},
        "unknown": [],
    }
    (raw / "few.json").write_text(json.dumps({**few, "told": {"counting_s": 1.5}, "seconds": 2.5}))


def csv_damage(data: bytes, rng: random.Random) -> bytes:
    return marked_gzip(damage.text_damage(gzip.decompress(data), rng))


def trace_damage(data: bytes, rng: random.Random) -> bytes:
    return marked_gzip(damage.json_damage(gzip.decompress(data), rng))


def read_recording(folder: Path, _path: Path) -> None:
    """Rebuilds a copy of the session, because that replaces its tables."""
    import shutil

    copy = folder.parent / "out" / "session"
    shutil.copytree(folder / "session", copy)
    try:
        replay(copy)
    finally:
        shutil.rmtree(copy)


register(
    Kind(
        name="raw recordings (traces, pages of counters)",
        make=_recording,
        damages={
            "session/raw/trace.json.gz": (damage.bytes_damage, trace_damage, trace_damage, damage.gzip_tricks),
            "session/raw/census.json": JSON,
            "session/raw/few.json": JSON,
            "session/raw/few-raw.csv.gz": (damage.bytes_damage, csv_damage, csv_damage, damage.gzip_tricks),
        },
        read=read_recording,
        cases=500,
        quick=10,
    )
)


def _results(folder: Path) -> None:
    row = {
        "name": "baseline_fp32",
        "shape": [128, 128, 128],
        "p20_ms": 9.5,
        "p50_ms": 10.0,
        "p80_ms": 10.5,
        "error": 0.0,
    }
    rows = [{**row, "network": "med-ddpm", "weights": "random", "error_against": "float64"}]
    rows += [{**row, "name": name, "p50_ms": 5.0, "error": 1e-4} for name in ("tf32", "voxtune", "torch_compile_bf16")]
    versions = {"torch": "2.8.0", "cudnn": 91002, "python": "3.12", "cuda": "12.8"}
    content = {"gpu": "NVIDIA H200", "cpu": "x", "versions": versions, "commit": "0" * 12, "rows": rows}
    (folder / "results.json").write_text(json.dumps(content))


register(
    Kind(
        name="benchmark results (report --waterfall)",
        make=_results,
        damages={"results.json": JSON},
        read=lambda folder, path: write_waterfall(path, folder.parent / "out" / "waterfall.svg"),
        cases=350,
    )
)


def _outputs(folder: Path) -> None:
    """One file of each format that a command may be asked to replace."""
    import numpy as np

    from voxtune.data.pixels import png
    from voxtune.files import write_file

    volume = Volume(array=np.zeros((4, 4, 4), np.uint8), affine=np.eye(4))
    write_volume(folder / "volume.nii.gz", volume.array, volume)
    write_volume(folder / "volume.nii", volume.array, volume)
    write_file(folder / "page.html", '<!doctype html><meta name="generator" content="voxtune 0.2.0"><p>x')
    write_file(folder / "figure.svg", '<svg xmlns="http://www.w3.org/2000/svg"><!-- voxtune --></svg>')
    write_file(folder / "sheet.png", png(np.zeros((4, 4, 3), np.uint8)))
    write_file(folder / "table.md", marked_markdown("# A table"))
    write_file(folder / "ladder.json", json.dumps({"format": "voxtune-ladder/1", "rows": []}))
    write_file(folder / "page.csv.gz", marked_gzip(b"a,b\n"))
    write_file(folder / "dataset_description.json", json.dumps({"GeneratedBy": [{"Name": "voxtune"}]}))
    write_file(folder / "participants.tsv", "participant_id\n")
    make("baseline", launches=4, counters=False).save(folder / "session")


register(
    Kind(
        name="files to be replaced (--overwrite)",
        make=_outputs,
        damages={
            **dict.fromkeys(("volume.nii", "page.html", "figure.svg", "sheet.png", "table.md"), BYTES),
            "volume.nii.gz": (damage.bytes_damage, damage.gzip_tricks),
            "page.csv.gz": (damage.bytes_damage, damage.gzip_tricks),
            **dict.fromkeys(("ladder.json", "dataset_description.json"), JSON),
            "participants.tsv": TEXT,
            "session/memory.parquet": (archives.parquet_damage,),
        },
        read=lambda _folder, path: written_by_voxtune(path),
        cases=400,
    )
)
