"""MONAI bundles: MONAI runs what Voxtune writes, with the same volumes, and Voxtune reads it back."""

from __future__ import annotations

import json

import nibabel as nib
import numpy as np
import pytest
import torch

from tests.factories.nifti import write_mask
from tests.scale.datasets import AFFINE, SHAPE, write_model
from voxtune.cli.main import main
from voxtune.errors import InputError
from voxtune.runtime.monai_bundle import BundleNetwork, bundle_files, read_bundle
from voxtune.runtime.storage import load, weights_sha256

pytestmark = pytest.mark.usefixtures("one_thread")
monai_bundle = pytest.importorskip("monai.bundle")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def bundle(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "b"
    assert main(["export", str(model), "-o", str(folder), "--quiet"]) == 0
    return folder


def network_of(bundle):
    """As MONAI makes it from the bundle's own config."""
    parser = monai_bundle.ConfigParser()
    parser.read_config(bundle / "configs" / "inference.json")
    parser["bundle_root"] = str(bundle)
    return parser


def test_monai_runs_the_bundle_with_the_volume_of_voxtune(bundle, model, tmp_path):
    mask = write_mask(tmp_path / "sub-1_dseg.nii.gz", SHAPE, AFFINE)
    monai_bundle.run(
        config_file=str(bundle / "configs" / "inference.json"),
        bundle_root=str(bundle),
        mask=str(mask),
        output_dir=str(tmp_path / "out"),
        seed=5,
    )
    [file] = (tmp_path / "out").glob("*.nii.gz")
    given = nib.load(mask)
    labels = np.asarray(given.dataobj)
    drawn, expected = nib.load(file), load(model).draw(labels, given.affine, seed=5)
    assert np.allclose(drawn.affine, expected.affine) and np.ptp(expected.array) > 0.1
    np.testing.assert_allclose(drawn.get_fdata(), expected.array, atol=1e-5)


def test_monais_own_scheduler_samples_the_network(bundle, model):
    """MONAI's schedule is that of Voxtune, and every evaluation that its inferer makes gives the noise of `denoise`."""
    from monai.inferers import DiffusionInferer
    from monai.networks.schedulers import DDIMScheduler

    parser = network_of(bundle)
    parser.parse()
    for result in parser.get_parsed_content("initialize"):
        assert not result.missing_keys and not result.unexpected_keys
    network = parser.get_parsed_content("network")
    loaded = load(model)
    scheduler = DDIMScheduler(loaded.config.diffusion.steps, schedule="cosine", clip_sample=True)
    torch.testing.assert_close(scheduler.alphas_cumprod.double(), loaded.schedule.alphas_cumprod, rtol=1e-3, atol=1e-6)
    scheduler.set_timesteps(5)
    evaluations = []
    network.register_forward_hook(
        lambda _m, args, kwargs, out: evaluations.append((args, kwargs, out)), with_kwargs=True
    )
    mask, start = loaded.example_mask(), torch.randn(1, 1, *SHAPE, generator=torch.Generator().manual_seed(1))
    for mode in ("concat", "crossattn"):
        evaluations.clear()
        drawn = DiffusionInferer(scheduler).sample(
            start, network, scheduler, conditioning=mask, mode=mode, verbose=False
        )
        assert torch.isfinite(drawn).all() and drawn.shape == start.shape and drawn.std() > 0.05
        assert len(evaluations) == 5
        for args, kwargs, noise in evaluations:
            x = args[0] if args else kwargs["x"]
            expected = loaded.denoise(x[:, :1], kwargs["timesteps"].long(), mask)
            torch.testing.assert_close(noise, expected)


def test_voxtune_reads_it_back(bundle, model, tmp_path):
    assert main(["import", str(bundle), "-o", str(tmp_path / "again"), "--quiet"]) == 0
    assert weights_sha256(tmp_path / "again") == weights_sha256(model)
    assert load(tmp_path / "again").config == load(model).config == load(bundle).config
    assert weights_sha256(bundle) is not None
    mask = load(model).example_labels()
    assert np.array_equal(load(bundle).draw(mask).array, load(model).draw(mask).array)


def test_the_metadata_has_what_monai_requires(bundle):
    from monai.bundle.properties import MetaProperties

    metadata = json.loads((bundle / "configs" / "metadata.json").read_text())
    for name, rule in MetaProperties.items():
        value = metadata
        for key in rule["id"].split("::")[1:]:
            value = value.get(key) if isinstance(value, dict) else None
        assert value is not None or not rule["required"], name
    data = metadata["network_data_format"]["inputs"]["image"]
    assert data["spatial_shape"] == list(SHAPE) and data["labels"]["0"] == "background"


def test_an_existing_folder_is_not_replaced_and_damage_is_one_line(bundle, model, tmp_path, capsys):
    assert main(["export", str(model), "-o", str(bundle)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["import", str(bundle), "-o", str(tmp_path / "x"), "--size", "8,8,8"]) == 2
    assert "a MONAI bundle has its size" in capsys.readouterr().err
    assert main(["export", str(model), "-o", str(tmp_path / "copy"), "--quiet"]) == 0
    weights = tmp_path / "copy" / "models" / "model.pt"
    weights.write_bytes(weights.read_bytes()[:-500])
    with pytest.raises(InputError, match=r"model\.pt"):
        read_bundle(tmp_path / "copy")
    torch.save([1, 2], weights)
    with pytest.raises(InputError, match="not the weights of a bundle"):
        read_bundle(tmp_path / "copy")
    assert all(file.is_file() for file in bundle_files(bundle))
    with pytest.raises(InputError, match="expected a MetaTensor"):
        BundleNetwork(str(bundle / "configs" / "voxtune.json")).draw(torch.zeros(1, 8, 8, 8))
