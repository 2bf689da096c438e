"""Damaged files through the real commands: every outcome is success or exit 2 with one line, never a traceback.

180 damaged masks, 120 damaged checkpoints and 120 damaged configs, each made from a good file by a numbered mutation.
"""

from __future__ import annotations

import json
import random
import string

import pytest

from tests.factories import GOLDENS
from tests.factories.nifti import write_mask
from voxtune.cli.main import main

CHUNKS = [pytest.param(n, marks=[pytest.mark.slow] if n >= 2 else []) for n in range(6)]


def mutate(data, seed):
    """One of seven kinds of damage: cut, flipped bits, zeroed, doubled, swapped, random, or emptied."""
    rng = random.Random(seed)
    data = bytearray(data)
    kind = seed % 7
    at = rng.randrange(min(len(data), 400) if rng.random() < 0.7 else len(data))
    length = rng.randrange(1, 64)
    if kind == 0:
        del data[at:]
    elif kind == 1:
        for _ in range(rng.randrange(1, 12)):
            i = rng.randrange(min(len(data), 400) if rng.random() < 0.8 else len(data))
            data[i] ^= 1 << rng.randrange(8)
    elif kind == 2:
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == 3:
        data[at:at] = data[at : at + length]
    elif kind == 4:
        data[at : at + length] = data[-length:]
    elif kind == 5:
        data[at : at + length] = rng.randbytes(length)
    else:
        data = data[: rng.randrange(16)]
    return bytes(data)


def outcome(capsys, *arguments):
    code = main([str(a) for a in arguments])
    err = capsys.readouterr().err
    assert "Traceback" not in err, err
    assert code in (0, 2), err
    if code == 2:
        lines = [line for line in err.splitlines() if line.startswith("voxtune: error: ")]
        assert len(lines) == 1, err
    return code


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    assert main(["import", str(GOLDENS / "med_ddpm_tiny.pt"), "-o", str(folder), "--size", "8,8,8", "--quiet"]) == 0
    return folder


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_damaged_masks(capsys, model, tmp_path, ending, chunk):
    good = write_mask(tmp_path / f"good{ending}", shape=(8, 8, 8)).read_bytes()
    codes = []
    for seed in range(chunk * 15, chunk * 15 + 15):
        bad = tmp_path / f"bad{ending}"
        bad.write_bytes(mutate(good, seed))
        codes.append(
            outcome(capsys, "sample", model, "-m", bad, "-o", tmp_path / "o", "--steps", 1, "--overwrite", "--quiet")
        )
    assert 2 in codes


@pytest.mark.parametrize("chunk", CHUNKS)
def test_damaged_checkpoints(capsys, tmp_path, chunk):
    good = (GOLDENS / "med_ddpm_tiny.pt").read_bytes()
    codes = []
    for seed in range(chunk * 20, chunk * 20 + 20):
        # The archive's directory stands at its end: damage there as well as at the front.
        damaged = mutate(good, seed) if seed % 2 else good[:-4000] + mutate(good[-4000:], seed)
        bad = tmp_path / "bad.pt"
        bad.write_bytes(damaged)
        codes.append(outcome(capsys, "import", bad, "-o", tmp_path / "o", "--overwrite", "--quiet"))
    assert 2 in codes


HOSTILE = (
    None,
    -1,
    0,
    10**30,
    10**400,
    1e308,
    "",
    "x" * 5000,
    [],
    {},
    [[]],
    True,
    "NaN",
    [1, "a"],
    {"a": None},
    -0.5,
    "\u0000",
)


def mutate_json(value, rng):
    """Replaces, removes or renames one thing anywhere in the tree."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        action = rng.random()
        changed = dict(value)
        if action < 0.2:
            del changed[key]
        elif action < 0.3:
            changed["".join(rng.choices(string.ascii_letters, k=5))] = changed.pop(key)
        else:
            changed[key] = mutate_json(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.6:
        changed = list(value)
        i = rng.randrange(len(changed))
        changed[i] = mutate_json(changed[i], rng)
        return changed
    return rng.choice(HOSTILE)


@pytest.mark.parametrize("chunk", CHUNKS)
def test_damaged_configs(capsys, model, tmp_path, chunk):
    file = model / "config.json"
    good = file.read_text()
    codes = []
    try:
        for seed in range(chunk * 20, chunk * 20 + 20):
            rng = random.Random(seed)
            damaged = (
                json.dumps(mutate_json(json.loads(good), rng)).encode() if seed % 3 else mutate(good.encode(), seed)
            )
            file.write_bytes(damaged)
            codes.append(outcome(capsys, "info", model, "--quiet"))
    finally:
        file.write_text(good)
    assert 2 in codes


@pytest.mark.parametrize("seed", range(21))
def test_damaged_weights(capsys, model, tmp_path, seed):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(mutate((model / "model.safetensors").read_bytes(), seed))
    outcome(capsys, "info", folder, "--quiet")
