from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import voxtune.profile
from voxtune.errors import InputError
from voxtune.profile import capture, load_session, profile_step
from voxtune.profile.census import module_ranges


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)) + x


def training() -> tuple[Tiny, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    network = Tiny()
    return network, torch.optim.Adam(network.parameters()), torch.randn(1, 2, 16, 16)


def test_a_step_on_a_cpu_becomes_a_session(tmp_path) -> None:
    network, optimizer, x = training()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        network(x).abs().mean().backward()
        optimizer.step()

    recorded = profile_step(step, name="tiny", modules=network, optimizer=optimizer, inputs=[x], warmup=1)
    session = load_session(recorded.save(tmp_path))
    launches = session.launches
    assert set(launches["step"]) == {0, 1} and set(launches["kind"]) == {"cpu_op"}
    assert {"forward", "backward", "optimizer"} <= set(launches["phase"])
    for phase in ("forward", "backward"):
        convolution = launches[(launches["phase"] == phase) & launches["class"].str.startswith("conv_")]
        assert {"body.0", "head"} <= set(convolution["module"])
        assert set(convolution["module_type"].dropna()) == {"Conv2d"}
    assert (launches["class"] != "unknown").all()
    assert set(session.timings["tier"]) == {"bare", "census"} and (session.timings["tier"] == "bare").sum() == 5
    assert {"weights", "gradients", "activations"} <= set(session.memory["category"])
    weights = session.memory.loc[session.memory["category"] == "weights", "bytes"]
    assert set(weights) == {float(sum(p.nbytes for p in network.parameters()))}
    assert session.meta["peak_bytes"] > weights.iloc[0]
    assert session.meta["tiers"]["census"]["done"] and not session.meta["tiers"]["few"]["done"]
    assert session.meta["environment"]["torch"] == torch.__version__ and session.meta["commit"]


def test_hooks_are_removed_and_do_not_change_the_result() -> None:
    network, _, x = training()
    before = network(x)
    with module_ranges(network) as named:
        assert named["body.0"] == "Conv2d" and named[""] == "Tiny"
        assert torch.equal(network(x), before)
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in network.modules())
    with module_ranges(None) as named:
        assert named == {}


def test_hooks_are_removed_when_the_step_fails() -> None:
    network, _, _ = training()
    with pytest.raises(RuntimeError), module_ranges(network):
        network(torch.zeros(1, 99, 4, 4))
    assert all(not m._forward_hooks for m in network.modules())


def test_a_users_loop_is_captured(tmp_path) -> None:
    network, optimizer, x = training()
    with voxtune.profile.capture(
        model=network, optimizer=optimizer, out=tmp_path, warmup=1, repeats=2, steps=1
    ) as session:
        for i in range(6):  # more steps than needed are ignored
            optimizer.zero_grad()
            network(x).abs().mean().backward()
            optimizer.step()
            session.step()
            assert session.done == (i >= 3)
    saved = load_session(tmp_path)
    assert session.result is not None and len(saved.launches) == len(session.result.launches) > 20
    assert (saved.timings["tier"] == "bare").sum() == 2
    assert {"forward", "backward", "optimizer"} <= set(saved.launches["phase"])


def test_a_loop_that_is_too_short_is_an_error() -> None:
    network, _, x = training()
    with pytest.raises(InputError, match=r"ran 1 steps but 4 are needed"):  # noqa: SIM117
        with capture(model=network, warmup=0, repeats=3, steps=1) as session:
            network(x)
            session.step()


def test_an_error_in_the_loop_propagates() -> None:
    with pytest.raises(ZeroDivisionError), capture(warmup=0, repeats=1, steps=1, device="cpu") as session:
        session.step()
        1 / 0  # noqa: B018


def test_wrong_counts_are_rejected() -> None:
    with pytest.raises(InputError, match=">= 1"):
        capture(steps=0)


@pytest.mark.slow
def test_a_compiled_network_is_recorded_without_modules() -> None:
    network, optimizer, x = training()
    compiled = torch.compile(network)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(x).abs().mean().backward()
        optimizer.step()

    launches = profile_step(step, name="tiny", modules=compiled, optimizer=optimizer, steps=1).launches  # type: ignore[arg-type]
    convolution = launches[launches["class"].str.startswith("conv_")]
    assert set(convolution["phase"]) == {"forward", "backward"} and convolution["module"].isna().all()
    assert set(launches.loc[launches["phase"] == "optimizer", "module"]) == {""}
