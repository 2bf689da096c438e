"""A planned network under the profiler: its operators are attributed to the original modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.factories.networks import make
from voxtune.analysis.memory import memory_peak
from voxtune.errors import InputError
from voxtune.plan.build import build
from voxtune.plan.plan import Plan
from voxtune.profile import profile_step
from voxtune.profile.classify import classify
from voxtune.profile.configs import parse_config
from voxtune.profile.steps import find_target, make_step
from voxtune.workloads import MedDDPMConfig

PLAN = Plan.of("cleanup", "sdpa", "time", "fuse_norm", "upsample", "edges", "conv3d", "pointwise", "channels_last")


def test_rewritten_operators_are_attributed_to_their_original_modules():
    net, args = make("med_ddpm")
    fast = build(net, args, None, PLAN, twin=True)
    before = fast(*args)
    session = profile_step(lambda: fast(*args), name="planned", modules=fast, warmup=1, steps=1)
    launches = session.launches
    names = {path for path, _ in net.named_modules()}
    attributed = launches[launches["module"].notna() & (launches["module"] != "")]
    assert set(attributed["module"]) <= names
    total = launches["duration_us"].sum()
    assert attributed["duration_us"].sum() > 0.8 * total
    own = attributed[attributed["op"].str.contains("voxtune::conv3d", na=False)]
    convolutions = {p for p, m in net.named_modules() if isinstance(m, torch.nn.Conv3d)}
    assert set(own["module"]) <= convolutions, "a convolution with its epilogue belongs to the convolution"
    assert torch.equal(fast(*args), before), "the profiler restores what it changed"


def test_plan_cannot_be_combined():
    with pytest.raises(InputError, match="cannot be combined"):
        parse_config("plan+bf16")
    assert not parse_config("plan").fp32


def test_a_training_step_by_the_plan_has_its_memory_by_category():
    """Beside that of plain PyTorch."""
    small = MedDDPMConfig(base=32, multipliers=(1,), attention=())
    target, peaks = replace(find_target("med-ddpm", (16, 16, 16)), network=small, size=(8, 8, 8)), {}
    for config in ("baseline", "plan"):
        step = make_step(target, "train", parse_config(config), batch=1, device=torch.device("cpu"))
        session = profile_step(
            step.run,
            name=config,
            modules=step.network,
            optimizer=step.optimizer,
            inputs=step.inputs,
            steps=1,
            warmup=1,
            repeats=1,
        )
        step.close()
        peaks[config] = {row["category"]: row["own_peak_gib"] for row in memory_peak(session).rows}
    for category in ("weights", "optimizer"):
        assert peaks["plan"][category] == pytest.approx(peaks["baseline"][category], rel=0.02)
    assert {"gradients", "activations", "inputs"} <= set(peaks["plan"]) and min(peaks["plan"].values()) > 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("voxtune_conv3d_halo", "conv_fprop"),
        ("voxtune_conv3d_join", "conv_fprop"),
        ("voxtune_stem", "conv_fprop"),
        ("voxtune_conv2d", "conv_fprop"),
        ("voxtune_depthwise2d", "conv_fprop"),
        ("voxtune_gate2d", "conv_fprop"),
        ("voxtune_embedding", "matmul"),
        ("voxtune_head", "conv_fprop"),
        ("voxtune_pointwise", "conv_fprop"),
        ("voxtune_normalize", "norm"),
        ("voxtune_moments", "norm"),
        ("voxtune_finalize", "norm"),
        ("voxtune_upsample_linear", "upsample"),
        ("voxtune_noise", "random"),
        ("voxtune_add", "elementwise"),
        ("voxtune_elementwise_9b75b5e9bc954210", "elementwise"),
    ],
)
def test_our_kernels_have_the_class_of_what_they_compute(name, expected):
    assert classify(name, "kernel", "voxtune::whatever").kernel_class == expected
