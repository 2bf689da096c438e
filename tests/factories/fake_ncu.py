"""A stand-in for Nsight Compute and one for the worker, so that the recording runs without a GPU."""

from __future__ import annotations

import csv
import io
import stat
import sys
from pathlib import Path

from tests.factories.traces import text

WORKER = """
import json, pathlib, sys, time
spec = pathlib.Path(sys.argv[1])
while not spec.with_name("go").exists():
    time.sleep(0.01)
told = json.loads(spec.read_text())
here = pathlib.Path(__file__).parent
if told["action"] == "census":
    import shutil
    if (here / "census-fails").exists():
        sys.exit("CUDA out of memory")
    shutil.copytree(here / "census", told["out"], dirs_exist_ok=True)
    result = {"numbered": json.loads((here / "numbered.json").read_text())}
else:
    (here / f"spec-{spec.parent.name}.json").write_text(json.dumps(told))
    if (here / "slow").exists():
        (here / "counting").touch()
        time.sleep(60)
    result = {"setup_s": 1.0, "counting_s": 2.0, "expired": (here / "expired").exists()}
    if told["operators"] is not None and (here / "nothing").exists():
        result |= {"operators": 0, "of_operators": len(told["operators"]), "failed": {}, "expired": True}
    with (here / "turns.txt").open("a") as turns:
        turns.write(f"{told['config']} {spec.parent.name}\\n")
spec.with_name("result.json").write_text(json.dumps(result))
"""

NCU = """
import pathlib, subprocess, sys
here, arguments = pathlib.Path(__file__).parent, sys.argv[1:]
def value(option):
    return arguments[arguments.index(option) + 1]
if "--version" in arguments:
    print("Version 2025.3.1.0 (build 1)")
elif "--help" in arguments:
    print("--disable-extra-suffixes --import-sass arg")
elif "--query-metrics" in arguments:
    print((here / "metrics.txt").read_text())
elif "--import" in arguments:
    tier = pathlib.Path(value("--import")).parent.name.split("-")[0]
    print((here / f"{tier}-{value('--page')}.csv").read_text())
else:
    tier = pathlib.Path(value("--export")).parent.name
    (here / f"command-{tier}.txt").write_text("\\n".join(arguments))
    if (here / "denied").exists():
        print((here / "denied").read_text())
        sys.exit(1)
    if (here / "refused").exists() and "-" not in tier and (here / "refused").read_text() in value("--metrics"):
        print("==ERROR== Failed to find metric " + (here / "refused").read_text())
        sys.exit(1)
    try:
        status = subprocess.run(arguments[arguments.index("--export") + 2 :]).returncode
    except KeyboardInterrupt:  # as Nsight Compute does: what was counted is written
        status = 130
    if not (here / "nothing").exists() or tier == "few":
        pathlib.Path(value("--export")).write_text("report")
    sys.exit(status)
"""


def make_ncu(folder: Path) -> Path:
    """The stand-in, with pages made from a real step: few as recorded, full and opcodes once for each distinct launch."""
    path = folder / "ncu"
    path.write_text(f"#!{sys.executable}\n{NCU}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (folder / "worker.py").write_text(WORKER)
    known = [m for m in text("metrics_gh100.txt.gz").split() if "hmma_hgmma" not in m]
    (folder / "metrics.txt").write_text("".join(f"{m}  Counter\n" for m in known))
    (folder / "few-raw.csv").write_text(text("few.csv.gz"))
    hmma, hfma2 = (f"sm__inst_executed_pipe_tensor_op_hmma{s}.sum" for s in ("", "_type_hfma2"))
    full = {"sm__throughput.avg.pct_of_peak_sustained_elapsed": "50", hmma: "7", hfma2: "7"}
    (folder / "full-raw.csv").write_text(_page(full))
    opcodes = {"sass__inst_executed_per_opcode": "10 (FFMA: 6; IMAD: 4)"}
    (folder / "opcodes-raw.csv").write_text(_page(opcodes))
    rules = {"Rule Name": "CPIStall", "Estimated Speedup Type": "global", "Estimated Speedup": "12.5"}
    (folder / "full-details.csv").write_text(_page(rules))
    return path


def _page(values: dict[str, str]) -> str:
    lines = [line for line in text("few.csv.gz").splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(lines))[1:]
    distinct = {(r["Kernel Name"], r["Grid Size"], r["Block Size"]): r for r in rows}
    out = io.StringIO()
    names = ["ID", "Kernel Name", "Grid Size", "Block Size"]
    writer = csv.DictWriter(out, [*names, *values], quoting=csv.QUOTE_ALL, extrasaction="ignore")
    writer.writeheader()
    writer.writerows({**row, **values} for row in distinct.values())
    return "==PROF== Connected\n" + out.getvalue()
