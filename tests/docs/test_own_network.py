"""The guide "Speed up your own network": every example runs, with the packages that it names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from voxtune.plan import search as searching
from voxtune.plan.measure import Timing

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "own-network.md"
FIRST = "Five lines"
pytestmark = pytest.mark.usefixtures("one_thread")


def sections() -> dict[str, list[str]]:
    """The Python examples by the title of their section. Blocks that tests cannot run are marked `py`."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)[1:]
    examples = {
        title: re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {title: blocks for title, blocks in examples.items() if blocks}


def run(title: str) -> dict[str, Any]:
    """The names that the examples of a section define; those without imports continue the first one."""
    names: dict[str, Any] = {"__name__": title}
    blocks = sections()[title]
    if "import voxtune" not in blocks[0]:
        blocks = [*sections()[FIRST], *blocks]
    torch.manual_seed(0)
    for block in blocks:
        exec(compile(block, f"{PAGE.name}: {title}", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VOXTUNE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    torch._dynamo.reset()


@pytest.fixture
def rewritten_wins(monkeypatch):
    """The first candidate is the fastest: every example then runs a plan that the gate has accepted, whatever the machine."""

    def times(call, *_, **__):
        call()
        return next(ms)

    def search(*args, **kwargs):
        nonlocal ms
        ms = iter([Timing(*[t] * 3, 0.1, None) for t in (10.0, *(5.0 + k / 10 for k in range(20)))])
        return real(*args, **kwargs)

    ms, real = iter(()), searching.fastest
    monkeypatch.setattr(searching, "measure", times)
    monkeypatch.setattr("voxtune.plan.api.fastest", search)


def check_networks(*optimized):
    def check(names):
        for name in optimized:
            assert names[name].plan.names, f"{name} runs the original network"
            assert "capture" not in names[name].notes

    return check


def check_sliding_window(names):
    check_networks("fast", "faster")(names)
    batches = sorted(variant.signature.leaves[0][0][0] for variant in names["fast"]._variants.values())
    assert batches == [1, 2], "the smaller last batch has a variant of its own"


def check_diffusers(names):
    check_networks("fast", "fast_decoder")(names)
    assert len(names["fast"]._variants) == 1, "all steps are calls of one variant"
    vae, z = names["vae"], torch.randn(1, 4, 3, 8, 8)
    with torch.no_grad():
        expected = vae.decode(z).sample
        assert vae.decoder(vae.post_quant_conv(z)).shape[2] == 3 < expected.shape[2]
        vae.decoder = names["fast_decoder"]
        assert torch.equal(vae.decode(z).sample, expected)
    assert names["fast_decoder"]._warned == {"the inputs have another structure"}


def check_precision(names):
    assert names["exact"].plan.names
    assert names["half"].dtype == torch.float32 == names["bf16"](names["window"]).dtype
    with torch.no_grad():
        y = names["network"](names["window"])
        for close in (names["half"], names["bf16"](names["window"])):
            assert float((close.float() - y).norm() / y.norm()) < 5e-2


def check_sizes(names):
    assert len(names["fast"]._variants) == 2 and names["limited"].memory_limit == 8 << 30


def check_copies(names):
    with torch.no_grad():
        for name in ("again", "loaded", "other"):
            torch.testing.assert_close(names[name](names["window"]), names["fast"](names["window"]))
            assert names[name].plan.names == names["fast"].plan.names


def check_capture(names):
    reason = names["thresholded"].report()
    assert re.search(r"capture: failed: .*own-network.md: What cannot be captured, line 1\d\)", reason), reason


CHECKS = {
    FIRST: check_networks("fast"),
    "nnU-Net": check_networks("fast"),
    "MONAI": check_sliding_window,
    "MAISI": check_networks("fast_unet", "fast_decoder"),
    "diffusers": check_diffusers,
    "Precision": check_precision,
    "When the weights change": check_networks("fast"),
    "Other sizes and memory": check_sizes,
    "Saving, copying, processes and threads": check_copies,
    "What cannot be captured": check_capture,
}
NEEDS = {"nnU-Net": "dynamic_network_architectures", "diffusers": "diffusers"}


@pytest.mark.parametrize("title", sections())
def test_examples(title, rewritten_wins):
    pytest.importorskip("monai")
    pytest.importorskip(NEEDS.get(title, "monai"))
    names = run(title)
    CHECKS.get(title, lambda _names: None)(names)


def test_the_first_example_with_real_times():
    pytest.importorskip("monai")
    names = run(FIRST)
    assert names["fast"].report().startswith("original ")


def test_blocks_that_are_not_run_are_python():
    blocks = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 1, "only nnU-Net's own predictor is not run"
    compile(blocks[0], PAGE.name, "exec")


def test_every_check_belongs_to_a_section():
    assert set(CHECKS) | set(NEEDS) <= set(sections())


def test_the_report_on_the_page_has_todays_form(rewritten_wins):
    """Its lines are those of a report of the first example, apart from numbers, verdicts and what the machine decided."""
    pytest.importorskip("monai")
    shown = re.search(r"^```text\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)[1].splitlines()
    made = run(FIRST)["fast"].report().splitlines()
    names = lambda lines: [re.split(r"\s{2,}|:", line.strip())[0] for line in lines]  # noqa: E731
    assert names(shown) == names(made)
    assert re.sub(r"\d+", "0", shown[-4]) == re.sub(r"\d+", "0", made[-4])


def test_text_between_examples_matches_the_code():
    text = PAGE.read_text()
    gpu, cpu = (f"{searching.QUICK_SECONDS[device]:.0f} s" for device in ("cuda", "cpu"))
    assert f"{gpu} on a GPU, or {cpu} on a CPU" in text
    from voxtune.plan.gate import FACTOR, SAME_LIMIT
    from voxtune.plan.optimized import MAX_VARIANTS

    assert f"{SAME_LIMIT:.0e}".replace("e-04", "e-4") in text and f"{FACTOR} x" in text
    assert {8: "of more than eight sizes"}[MAX_VARIANTS] in text
