"""Sustained volumes per hour of `voxtune generate`, from mask files to compressed NIfTI on disk, against sampling alone.

Both run the same network with the same plan, batch and settings. `sampling` is `Model.sample` in a loop, from an encoded mask
in host memory to volumes in host memory; `generate` is the command, without the start of its workers. The network has random
weights unless --model is given, so this file describes time. Requires nibabel.

    python benchmarks/gpu_generate.py --volumes 120 --steps 25
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_volume import head_mask
from results_file import RESULTS, write

from voxtune.data.contract import encode_mask
from voxtune.data.nifti import Volume, write_volume
from voxtune.runtime.masks import mask_contract
from voxtune.runtime.planned import optimize, tuning_target
from voxtune.runtime.storage import load, save


def write_masks(folder: Path, count: int, side: int) -> Path:
    """Masks of a brain with a lesion, in the values 1 and 2, as (X, Y, Z) with voxels of 1 mm or more."""
    labels_XYZ = np.ascontiguousarray(head_mask(side).transpose(2, 1, 0))
    spacing = 192 / side
    volume = Volume(array=labels_XYZ, affine=np.diag([spacing, spacing, spacing, 1.0]))
    for number in range(count):
        write_volume(folder / f"sub-{number:04d}_dseg.nii.gz", labels_XYZ, volume)
    return folder


def options(arguments: argparse.Namespace) -> list[str]:
    given = {"--sampler": arguments.sampler, "--steps": arguments.steps, "--plan": arguments.plan}
    return [word for name, value in given.items() if value is not None for word in (name, str(value))]


def generated(model: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The summary of `voxtune generate`, whose data set is then verified."""
    masks = write_masks(folder / "masks", -(-arguments.volumes // arguments.per_mask), arguments.side)
    command = [sys.executable, "-m", "voxtune", "generate"]
    out = ["-o", str(folder / "out"), "--json"]
    more = ["--model", str(model), "--per-mask", str(arguments.per_mask), "--batch", arguments.batch]
    labels = [] if arguments.labels is None else ["--labels", arguments.labels]
    machine = ["--device", arguments.device]
    start = subprocess.run(
        [*command, str(masks), *out, *more, *options(arguments), *labels, *machine], stdout=subprocess.PIPE, check=True
    )
    checked = subprocess.run([*command, "--verify", *out], stdout=subprocess.PIPE, check=True)
    settings = json.loads((folder / "out" / "ledger" / "settings.json").read_text())["fixed"]
    files = list((folder / "out").rglob("*_T1w.nii.gz"))
    return {
        **json.loads(start.stdout),
        "verified": json.loads(checked.stdout)["verified"],
        "batch": settings["batch"],
        "passes": settings["passes"],
        "mb_per_volume": round(sum(file.stat().st_size for file in files) / len(files) / 1e6, 3),
    }


def sampled(model: Path, batch: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Volumes per hour of sampling alone, with the plan that `generate` left in the cache."""
    loaded = load(model, device=arguments.device)
    settings = loaded.resolve(**{k: v for k in ("sampler", "steps") if (v := getattr(arguments, k)) is not None})
    planned = loaded if arguments.plan == "baseline" else optimize(loaded, plan=arguments.plan, search=False)
    contract = mask_contract(loaded)
    labels_DHW = head_mask(loaded.config.size[0])
    cond = torch.from_numpy(np.stack([encode_mask(labels_DHW, contract)] * batch))
    calls = max(3, arguments.volumes // batch // 2)
    seconds = []
    for call in range(calls + 1):
        began = time.perf_counter()
        planned.sample(cond, settings=settings, indices=range(call * batch, (call + 1) * batch)).cpu()
        seconds.append(time.perf_counter() - began)
    each = np.sort(np.array(seconds[1:])) / batch
    low, middle, high = np.quantile(each, (0.2, 0.5, 0.8))
    return {
        "volumes_per_hour": round(3600 / float(each.mean()), 1),
        "p20_ms": round(1000 * float(low), 2),
        "p50_ms": round(1000 * float(middle), 2),
        "p80_ms": round(1000 * float(high), 2),
        "passes": list(getattr(planned.network, "passes", ())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder; default: med-ddpm with random weights")
    parser.add_argument("--labels", help="as of voxtune generate, for masks with the values 1 and 2")
    parser.add_argument("--side", type=int, default=128, help="voxels along each axis of a mask")
    parser.add_argument("--volumes", type=int, default=120)
    parser.add_argument("--per-mask", type=int, default=10)
    parser.add_argument("--sampler", default="dpm++")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--batch", default="auto")
    parser.add_argument("--plan", default="auto")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "h200" / "generate.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        model = arguments.model
        if model is None:
            model = save(tuning_target("med-ddpm", "cpu"), folder / "model", card="random weights")
        result = generated(model, folder, arguments)
        sampling = sampled(model, result["batch"], arguments)
    rate = result["sustained_per_hour"]
    shape = [result["batch"], arguments.side, arguments.side, arguments.side]
    common = {"shape": shape, "steps": arguments.steps, "sampler": arguments.sampler}
    rows = [
        {"name": "sampling", **common, **sampling},
        {"name": "generate", **common, **result, "share_of_sampling": round(rate / sampling["volumes_per_hour"], 4)},
    ]
    write(arguments.out, rows)
    print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
