"""Published checkpoints, model folders, and files that are neither."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

import voxtune
from tests.factories import GOLDENS
from tests.factories.contracts import WHOLE_HEAD
from voxtune.errors import InputError
from voxtune.files import writing
from voxtune.runtime import published, storage
from voxtune.workloads import WORKLOADS, ConvNeXtConfig, build

CHECKPOINT = GOLDENS / "med_ddpm_tiny.pt"


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_published_checkpoint_predicts_the_reference_noise(golden):
    _, g = golden
    model = voxtune.load(CHECKPOINT)
    assert model.config.diffusion.steps == 10
    assert model.config.diffusion.schedule == "cosine"
    assert model.config.data.labels == WHOLE_HEAD.labels
    assert relative(model.denoise(g["x_t"], g["t"], g["cond"]), g["eps_pred"]) < 1e-5


def test_a_saved_folder_loads_as_the_same_model(golden, tmp_path):
    _, g = golden
    model = voxtune.load(CHECKPOINT)
    storage.save(model, tmp_path / "m", card="card")
    again = voxtune.load(tmp_path / "m")
    assert again.config == model.config
    assert torch.equal(again.denoise(g["x_t"], 3, g["cond"]), model.denoise(g["x_t"], 3, g["cond"]))
    assert voxtune.load(tmp_path / "m" / "model.safetensors").config == model.config
    with pytest.raises(InputError, match="or pass overwrite=True"):
        storage.save(model, tmp_path / "m", card="card")


@pytest.mark.parametrize("name", WORKLOADS)
def test_architecture_is_inferred_from_names_and_shapes(name):
    workload = WORKLOADS[name]
    with torch.device("meta"):
        state = build(workload.network).state_dict()
    assert published.infer_network(state, "x") == workload.network
    assert published.likely_size(workload.network) == workload.size


def test_raw_state_dict_and_data_parallel_prefix(tmp_path):
    network = build(ConvNeXtConfig(width=8, multipliers=(1, 2)))
    path = tmp_path / "raw.pt"
    torch.save({f"module.{k}": v for k, v in network.state_dict().items()}, path)
    model = voxtune.load(path)
    assert model.config.network == network.config
    assert model.sample(steps=2, sampler="ddim").shape == (1, 3, 16, 16)


class Exploit:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_with_code_is_refused(tmp_path, monkeypatch, protocol):
    monkeypatch.chdir(tmp_path)
    plain, wrapped = tmp_path / "a.pt", tmp_path / "b.pt"
    plain.write_bytes(pickle.dumps({"ema": Exploit()}, protocol=protocol))
    torch.save({"ema": Exploit()}, wrapped)
    for path in (plain, wrapped):
        with pytest.raises(InputError, match=r"nothing was executed|not a readable checkpoint"):
            voxtune.load(path)
    assert not (tmp_path / "executed").exists()


def edited(tmp_path, change):
    checkpoint = torch.load(CHECKPOINT, weights_only=True)
    change(checkpoint["ema"])
    path = tmp_path / "edited.pt"
    torch.save(checkpoint, path)
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("denoise_fn.middle_block.1.qkv.weight"), "'middle_block.1.qkv.weight'"),
        (lambda s: s.update({"denoise_fn.surprise": torch.zeros(2)}), "unknown parameter 'surprise'"),
        (lambda s: s.update({"denoise_fn.out.0.weight": torch.zeros(31)}), "shape"),
        (lambda s: s["denoise_fn.out.0.weight"].fill_(float("nan")), "NaN"),
        (lambda s: s.update({"denoise_fn.out.0.weight": torch.zeros(32, dtype=torch.int64)}), "int64"),
        (lambda s: s.update({"betas": torch.zeros(3, 3)}), "betas"),
        (lambda s: s.update({"betas": torch.full((10,), 7.0)}), "beta"),
        (lambda s: s.update({"betas": torch.tensor([0.0] + [0.1] * 9)}), "greater than 0"),
        (lambda s: s.update({"betas": torch.full((60,), 1 - 1e-7)}), "signal"),
        (lambda s: s.update({"denoise_fn.time_embed.0.weight": torch.zeros(128, 0)}), "."),
        (lambda s: s.pop("denoise_fn.input_blocks.0.0.weight"), "unknown network"),
    ],
)
def test_an_invalid_state_dict_is_refused(tmp_path, change, message):
    with pytest.raises(InputError, match=message):
        voxtune.load(edited(tmp_path, change))


@pytest.mark.parametrize("content", [[], {}, {"ema": {}}, {"ema": {"a": 1}}, 5, None])
def test_other_objects_are_refused(tmp_path, content):
    path = tmp_path / "x.pt"
    torch.save(content, path)
    with pytest.raises(InputError, match=r"x\.pt"):
        voxtune.load(path)


def test_compressed_archive_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", b"0" * 10_000_000)
    with pytest.raises(InputError, match="compressed"):
        voxtune.load(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format="voxtune-model/9"), "voxtune-model/1"),
        (lambda c: c.update(workload="other"), "unknown workload"),
        (lambda c: c["network"].update(base="wide"), "expected int"),
        (lambda c: c["network"].update(depth=3), "unknown setting 'depth'"),
        (lambda c: c["network"].update(multipliers=[1, 3]), "expected"),
        (lambda c: c.update(size=[15, 16, 16]), "multiple of"),
        (lambda c: c.update(size=None), "whole numbers"),
        (lambda c: c["diffusion"].update(steps=-1), "steps"),
        (lambda c: c["diffusion"].update(schedule="wavy"), "'wavy'"),
        (lambda c: c["data"].update(labels=[]), "label"),
        (lambda c: c["sampling"].update(steps=11), "exceed"),
        (lambda c: c.update(extra=1), "unknown setting 'extra'"),
    ],
)
def test_an_invalid_config_is_refused(tmp_path, change, message):
    storage.save(voxtune.load(CHECKPOINT), tmp_path, card="card")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match=message):
        voxtune.load(tmp_path)


def test_missing_files(tmp_path):
    with pytest.raises(InputError, match="no such model"):
        voxtune.load(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"config\.json"):
        voxtune.load(tmp_path)


def test_a_failed_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), writing(path, state=True) as part:
        part.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_other_formats_are_named_in_the_error(tmp_path):
    image = tmp_path / "mask.nii.gz"
    image.write_bytes(b"\x1f\x8b")
    with pytest.raises(InputError, match="swapped"):
        voxtune.load(image)
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    with pytest.raises(InputError, match="neither a zip archive nor a pickle"):
        voxtune.load(text)
    weights = tmp_path / "step-1.safetensors"
    weights.write_bytes(b"x")
    with pytest.raises(InputError, match="weights without a config"):
        voxtune.load(weights)


def test_a_run_folder_loads_its_model(tmp_path):
    model = voxtune.load(CHECKPOINT)
    storage.save(model, tmp_path / "run" / "model", card="card")
    assert voxtune.load(tmp_path / "run").config == model.config


@pytest.mark.parametrize("device", ["cuda:99", "warp"])
def test_an_unavailable_device(device):
    with pytest.raises(InputError, match="device"):
        voxtune.load(CHECKPOINT, device=device)


def test_size_needs_every_dimension():
    with pytest.raises(InputError, match="3 dimensions"):
        published.load_published(CHECKPOINT, size=(32, 32))


def test_private_umask_stays_private(tmp_path):
    before = os.umask(0o077)
    try:
        with writing(tmp_path / "secret", state=True) as part:
            part.write_text("x")
    finally:
        os.umask(before)
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def test_the_included_model_is_loaded_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = voxtune.load("demo")
    mask = model.example_mask()
    assert mask.shape == (1, 2, *model.config.size) and set(mask.unique().tolist()) == {-1.0, 1.0}
    brain, tumour = ((mask[0] > 0).sum(dim=(1, 2, 3))).tolist()
    assert brain > 20 * tumour > 0
    assert storage.weights_sha256(Path("demo")) == storage.weights_sha256(storage.demo_model())
    (tmp_path / "demo").mkdir()  # a folder of that name is what the user means
    with pytest.raises(InputError, match="demo"):
        voxtune.load("demo")


def test_a_folder_without_a_config_is_not_a_model(tmp_path):
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(InputError, match=r"not a model folder \(no config.json\); expected a folder written by"):
            voxtune.load(path)
        (tmp_path / "model.safetensors").write_bytes(b"")
