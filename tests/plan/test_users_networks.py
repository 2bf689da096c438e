"""Networks of nnU-Net, MONAI and diffusers: captured whole, rewritten by the passes for a GPU, and the same."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only

import voxtune
from tests.factories.users_networks import USERS_NETWORKS, make_users
from voxtune.plan import Plan
from voxtune.plan.api import CPU_READY, READY
from voxtune.plan.build import PlanTarget
from voxtune.plan.gate import volumes_of

# Passes that must find something, by network.
FUSED = {
    "nnunet_plain": ("fuse_norm", "conv3d", "pointwise"),
    "nnunet_residual": ("fuse_norm", "conv3d", "pointwise"),
    "monai_dynunet": ("fuse_norm", "conv3d", "pointwise"),
    "monai_unet": ("fuse_norm", "conv3d"),
    "monai_segresnet": ("fuse_norm", "conv3d", "pointwise", "upsample", "edges"),
    "maisi_unet": ("sdpa", "time", "fuse_norm", "conv3d", "pointwise", "edges"),
    "maisi_decoder": ("fuse_norm", "conv3d", "edges"),
    "wan_decoder": ("fuse_norm", "pointwise"),
    "diffusers_conditional": ("time", "small_images", "fuse_norm", "edges"),
}
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))


def truth(net, args, kwargs):
    """In float64, or in float32 for networks that cast to it."""
    wide = lambda x: x.double() if x.is_floating_point() else x  # noqa: E731
    with torch.no_grad():
        try:
            return volumes_of(
                copy.deepcopy(net).double()(
                    *tree_map_only(torch.Tensor, wide, args), **tree_map_only(torch.Tensor, wide, kwargs)
                )
            )[0]
        except RuntimeError:
            return volumes_of(net(*args, **kwargs))[0].double()


def error(output, expected):
    return float((volumes_of(output)[0].double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", USERS_NETWORKS)
def test_rewritten_for_a_gpu(name):
    net, args, kwargs = make_users(name)
    expected = truth(net, args, kwargs)
    fast = PlanTarget(net, (args, kwargs)).build(READY[0].without("bf16", "cuda_graph", "cudnn_benchmark"), twin=True)
    assert "capture" not in fast.notes
    for passed in FUSED[name]:
        assert fast.notes[passed].startswith("applied"), (passed, fast.notes[passed])
    with torch.no_grad():
        assert error(fast(*args, **kwargs), expected) < 1e-5
        for p in net.parameters():
            p.mul_(1.03)
        assert error(fast(*args, **kwargs), truth(net, args, kwargs)) < 1e-5, "changed weights"


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS_NETWORKS)
def test_optimized_on_a_cpu(name):
    net, args, kwargs = make_users(name)
    fast = voxtune.optimize(net, args, CPU_READY[0], example_kwargs=kwargs)
    with torch.no_grad():
        assert error(fast(*args, **kwargs), truth(net, args, kwargs)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS_NETWORKS)
def test_torch_compile_backend(name, capfd):
    net, args, kwargs = make_users(name)
    torch._dynamo.reset()
    fast = torch.compile(net, backend="voxtune", dynamic=False, options={"plan": CPU_READY[0]})
    with torch.no_grad():
        assert error(fast(*args, **kwargs), truth(net, args, kwargs)) < 1e-5
    assert "Traceback" not in capfd.readouterr().err


def test_monai_sliding_window():
    """As MONAI's users infer: windows in batches, the last batch smaller."""
    inferers = pytest.importorskip("monai.inferers")
    net, args, _ = make_users("monai_segresnet")
    fast = voxtune.optimize(net, args[0].expand(2, -1, -1, -1, -1), Plan.of("cleanup", "channels_last"))
    image = torch.randn(1, 1, 24, 16, 16)
    windows = {"roi_size": (16, 16, 16), "sw_batch_size": 2, "overlap": 0.5}
    with torch.no_grad():
        left = inferers.sliding_window_inference(image, predictor=fast, **windows)
        right = inferers.sliding_window_inference(image, predictor=net, **windows)
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


def test_as_the_network_of_a_predictor():
    """nnU-Net's predictor loads each fold's weights into its network, and sets an attribute of the decoder."""
    net, args, _ = make_users("nnunet_plain")
    folds = [{k: v * scale for k, v in net.state_dict().items()} for scale in (1.0, 1.1)]
    predictor_network = voxtune.optimize(net, args, Plan.of("cleanup", "channels_last"))
    assert isinstance(predictor_network, nn.Module) and predictor_network.decoder.deep_supervision is False
    for fold in folds:
        predictor_network.load_state_dict(fold)
        with torch.inference_mode():
            torch.testing.assert_close(predictor_network(*args), net(*args), rtol=1e-4, atol=1e-4)
