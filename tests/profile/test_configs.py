from __future__ import annotations

import pytest
import torch
from torch import nn

from voxtune.errors import InputError
from voxtune.precision import read_precision
from voxtune.profile.configs import parse_config, parse_configs, precision_flags


def precisions() -> dict[str, object]:
    return {k: v for k, v in read_precision().items() if k.endswith("fp32_precision")}


def test_names_are_parsed_in_any_order_and_once() -> None:
    assert parse_config("channels_last+tf32").name == "tf32+channels_last"
    assert parse_config("baseline").name == "baseline" and parse_config("baseline").fp32
    assert not parse_config("bf16").fp32
    assert [c.name for c in parse_configs("tf32, baseline,tf32")] == ["tf32", "baseline"]


@pytest.mark.parametrize(("text", "message"), [("tf23", "did you mean 'tf32'"), ("", "no configuration"), ("+", "''")])
def test_wrong_names_are_rejected(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_configs(text)


@pytest.mark.parametrize(("name", "on"), [("baseline", False), ("tf32", True), ("bf16+compile", False)])
def test_flags_are_set_and_restored(name: str, on: bool) -> None:
    before = read_precision()
    with precision_flags(parse_config(name)) as flags:
        assert flags["cuda.matmul.allow_tf32"] is on
        assert flags["cudnn.allow_tf32"] is on
        assert ("tf32" in precisions().values()) is on
    assert read_precision() == before
    with pytest.raises(ZeroDivisionError), precision_flags(parse_config(name)):
        1 / 0  # noqa: B018
    assert read_precision() == before


@pytest.mark.skipif(not hasattr(torch.backends.cudnn, "conv"), reason="this version of PyTorch has only the old flags")
def test_new_precision_flags_are_overridden_and_restored() -> None:
    before = precisions()
    try:
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        mixed = precisions()
        with precision_flags(parse_config("baseline")):
            assert "tf32" not in precisions().values()
        assert precisions() == mixed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = True
        for name, value in before.items():
            backend, part, _ = name.split(".")
            getattr(getattr(torch.backends, backend), part).fp32_precision = value


def test_channels_last_applies_to_weights_and_batches() -> None:
    config = parse_config("channels_last")
    network = config.prepare(nn.Sequential(nn.Conv3d(4, 8, 3), nn.Conv2d(2, 4, 3), nn.Linear(3, 3)))
    assert network[0].weight.is_contiguous(memory_format=torch.channels_last_3d)  # type: ignore[union-attr, operator]
    assert network[1].weight.is_contiguous(memory_format=torch.channels_last)  # type: ignore[union-attr, operator]
    assert config.place(torch.zeros(1, 2, 3, 4, 5)).stride()[1] == 1
    assert config.place(torch.zeros(3)).stride() == (1,)
    assert parse_config("baseline").place(torch.zeros(1, 2, 3, 4)).stride()[1] == 12
