"""Tables of the documentation agree with code and records: what-runs-where.md, own-network.md, training.md."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.docs import tables
from tests.docs.kernel_table import GPU_TESTS, KERNELS, SOURCE, archs, kernels_of
from tests.docs.tables import ROOT, TABLES, WHAT_RUNS_WHERE, page
from voxtune.plan.passes import PASSES

TYPES = {"BF16": torch.bfloat16, "FP16": torch.float16, "FP32": torch.float32}


@pytest.mark.parametrize("path", TABLES, ids=lambda p: p.stem)
def test_the_tables_are_those_of_code_and_records(path):
    assert path.read_text() == page(path), "run python -m tests.docs.tables"


def test_the_table_of_networks(tmp_path, monkeypatch):
    """A record as benchmarks/gpu_foreign.py writes it, with a way that failed and one that was not measured."""
    rows = [
        {"name": "net_a:autocast", "shape": [8], "p20_ms": 9.0, "p50_ms": 10.04, "p80_ms": 11.0, "error": 0.0123},
        {"name": "net_a:voxtune", "shape": [8], "p20_ms": 2.0, "p50_ms": 2.5, "p80_ms": 3.0, "error": 0.0099},
        {"name": "net_b:voxtune", "failed": "RuntimeError: out of memory"},
    ]
    record = tmp_path / "foreign.json"
    record.write_text(json.dumps({"gpu": "GPU", "commit": "abc1234", "versions": {"torch": "2"}, "rows": rows}))
    monkeypatch.setattr(tables, "NETWORKS", record)
    assert tables.networks_table().splitlines() == [
        "| network | BF16 autocast | Voxtune, BF16 |",
        "| --- | --- | --- |",
        "| `net_a` | 10 (1.2e-02) | 2.5 (9.9e-03) |",
        "| `net_b` | not measured | failed |",
    ]
    assert tables.networks_origin().endswith("commit abc1234, GPU, torch 2.")


def test_the_tables_of_training(tmp_path, monkeypatch):
    """A record as benchmarks/gpu_unet3d_train.py writes it, of two runs, with a way that failed."""

    def row(name, ms, *, shape=(128, 128, 128), batch=1, **more):
        figures = {"p50_ms": ms, "peak_gib": ms / 10, "held_gib": 4.0, "error": 0.02, "error_against": "float32"}
        return {"name": name, "shape": list(shape), "batch": batch, **figures, **more}

    monai = {"name": "monai:torch_compile_bf16", "shape": [128] * 3, "batch": 1, "failed": "out of memory: 1 GiB"}
    rows = [row("voxtune", 40.0), row("voxtune_without_edges", 42.5), row("voxtune_without_time", 50.0, commit="0ld")]
    rows += [row("torch_compile_bf16", 90.0), monai, row("monai:voxtune", 20.0)]
    rows += [row("nnunet_plain:torch_compile_bf16", 30.0), row("nnunet_plain:voxtune", 20.0)]
    rows += [row("torch_compile_bf16", 180.0, batch=2, commit="0ld"), row("voxtune", 80.0, batch=2)]
    breakdown = {
        "kernels_ms": 39.0,
        "gaps_ms": 1.0,
        "launches": 7,
        "classes": {"optimizer": {"ms": 39.0, "launches": 7}},
    }
    content = {"gpu": "GPU", "commit": "abc1234", "versions": {"torch": "2"}, "rows": rows}
    record = tmp_path / "unet3d_train.json"
    monkeypatch.setattr(tables, "TRAIN", record)
    assert tables.train_table() == tables.train_breakdown_table() == "" and "Not recorded" in tables.train_origin()
    record.write_text(json.dumps(content | {"breakdown": {"voxtune 128x128x128 batch 1": breakdown}}))
    assert tables.train_table().splitlines()[2:] == [
        "| `torch_compile_bf16` | 90.0 | 9.0 | 4.0 | 2.0e-02 (float32) |",
        "| `voxtune` | 40.0 | 4.0 | 4.0 | 2.0e-02 (float32) |",
    ]
    assert tables.train_others_table().splitlines()[2:] == [
        "| `monai` | 128 x 128 x 128 | 1 | out of memory: 1 GiB |  | 20.0 | 2.0 | 4.0 |  | 2.0e-02 (float32) |",
        "| `nnunet_plain` | 128 x 128 x 128 | 1 | 30.0 | 3.0 | 20.0 | 2.0 | 4.0 | 1.50 | 2.0e-02 (float32) |",
        "| `med-ddpm` | 128 x 128 x 128 | 2 | 180.0 | 18.0 | 80.0 | 8.0 | 4.0 |  | 2.0e-02 (float32) |",
    ]
    # A pass is compared with the whole plan of the same commit.
    assert tables.train_passes_table().splitlines()[2:] == ["| without `edges` | 42.5 | +2.5 | 4.2 | +0.2 |"]
    assert tables.train_breakdown_table().splitlines()[2:] == [
        "| optimizer | 39.00 | 7 |",
        "| all kernels | 39.00 | 7 |",
        "| gaps | 1.00 |  |",
    ]
    assert "commits abc1234, 0ld, GPU, torch 2." in tables.train_origin()


def test_every_kernel_of_the_package_has_an_entry():
    assert set(kernels_of(SOURCE)) == set(KERNELS), "add the kernel and its tests to tests/docs/kernel_table.py"


def functions(folder: str) -> set[str]:
    files = (ROOT / folder).rglob("*.py")
    return {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}


def test_tests_named_by_the_page_exist():
    named = set(re.findall(r"`(test_\w+)`", WHAT_RUNS_WHERE.read_text()))
    assert named and named <= functions("tests")
    for name, kernel in KERNELS.items():
        for test in kernel.gpu:
            file, _, function = test.rpartition("::")
            assert f"\ndef {function}(" in (ROOT / (file or GPU_TESTS)).read_text(), (name, test)
        assert archs("test_conv3d::test_compiles_for_hopper") == {90}
        for test in kernel.compiled:
            assert archs(test), f"{test} has no parameter `arch`"


def test_passes_named_with_kernels_exist():
    names = {p.name for p in PASSES}
    for kernel in KERNELS.values():
        assert set(re.findall(r"`(\w+)`", kernel.passes)) <= names


def reasons(dtype):
    """Why each operator's kernel does not take volumes of this type, or None."""
    from voxtune.kernels import (
        channel_sums,
        conv2d,
        conv3d,
        conv3d_weight_gradient,
        depthwise2d,
        doubling_conv,
        edge_gradients,
        elementwise,
        embedding,
        gate2d,
        group_norm,
        head_conv,
        head_lines,
        packing,
        pointwise,
        rms_norm,
        stem2d,
        stem_conv,
        strided_conv,
        upsample,
        upsample_backward,
    )

    x = torch.zeros(1, 16, 4, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last_3d)
    weight = lambda m, c, k: torch.zeros(m, c, k, k, k, dtype=dtype)  # noqa: E731
    cube, two = (3, 3, 3), (2, 2, 2)
    image = x[:, :, 0].contiguous(memory_format=torch.channels_last)
    matrix = torch.zeros(16, 16, dtype=dtype)
    packed_head = head_conv.pack_head(weight(2, 16, 3), dtype)
    found = {
        "norm": group_norm.why_not((x,), 4),
        "rms_norm": rms_norm.why_not(x),
        "conv3d": conv3d.why_not((x,), conv3d.pack(weight(8, 16, 3))),
        "weight_gradient": conv3d_weight_gradient.why_not(x, (x,), cube, conv3d.AROUND),
        "doubling_conv": doubling_conv.why_not((x,), doubling_conv.pack_transposed(weight(16, 8, 2)), two, two),
        "strided_conv": strided_conv.why_not(x, strided_conv.pack_strided(weight(8, 16, 3)), cube, two),
        "pointwise": pointwise.why_not((x,), weight(8, 16, 1).flatten(1)),
        "add": pointwise.why_not_add(x, x),
        "upsample_linear": upsample.why_not(x, "linear"),
        "upsample_nearest": upsample.why_not(x, "nearest"),
        "upsample_linear_backward": upsample_backward.why_not(x, "linear"),
        "upsample_nearest_backward": upsample_backward.why_not(x, "nearest"),
        "channel_sums": channel_sums.why_not(x),
        "tap_sums": edge_gradients.why_not(x[:, :1], x),
        "stem": stem_conv.why_not_stem((x[:, :1],), stem_conv.pack_stem(weight(16, 1, 3), (1,), dtype)),
        "head": head_conv.why_not_head(x, packed_head),
        "head_lines": head_lines.why_not_lines(x, 2),
        "elementwise": elementwise.why_not((x, x), "add 0 1; relu 2", dtype),
        "conv2d": conv2d.why_not((image,), (), "relu", 3, 1, False),
        "depthwise2d": depthwise2d.why_not((image,), 7),
        "gate2d": gate2d.why_not(image, image, matrix),
        "stem2d": stem2d.why_not(image[:, :3], matrix, 7),
        "embedding": embedding.why_not(matrix, None, [matrix] * 3, [matrix[0]] * 3, "gelu"),
    }
    norm = found.pop("norm")
    gradient = ("norm_sums", "norm_combine", "norm_gradient")
    found |= dict.fromkeys(("moments", "finalize", "normalize", *gradient), norm)
    found |= dict.fromkeys(("pack_taps", "unpack_taps", "opposite_taps"), packing.why_not(weight(8, 16, 3), dtype))
    conv, weight_gradient = found["conv3d"], found["weight_gradient"]
    found |= dict.fromkeys(("weight_gradient_join", "weight_gradient_hopper"), weight_gradient)
    return found | {"conv3d_halo": conv, "conv3d_join": conv}


@pytest.mark.parametrize("name", TYPES)
def test_types_of_the_kernels(name):
    given = reasons(TYPES[name])
    assert {f"voxtune_{kernel}" for kernel in given} == set(KERNELS) - {"voxtune_noise"}
    for kernel, reason in given.items():
        assert (reason is None) == (name in KERNELS[f"voxtune_{kernel}"].types), (kernel, reason)


def test_statements_of_the_page():
    from tests.ladder.test_program import test_compiled_instructions as ladder
    from voxtune.kernels.conv3d_tiles import SHARED_MEMORY

    text = WHAT_RUNS_WHERE.read_text()
    (mark,) = [m for m in ladder.pytestmark if m.name == "parametrize"]
    compiled = {getattr(given, "values", given)[0] for given in mark.args[1]}
    assert f"compiled for {min(compiled)} and {max(compiled)}, measured" in text and len(compiled) == 2
    assert {arch for arch, size in SHARED_MEMORY.items() if size == 99 << 10} == {86, 89, 120}
    assert "on 8.6, 8.9 and 12.0 with 99 KiB" in text
    assert archs("test_conv3d::test_compiles_for_other_devices") == {80, 86, 89, 100, 120}
    gluon = {f.name for f in SOURCE.rglob("*.py") if "@gluon.jit" in f.read_text()}
    assert gluon == {"conv3d_halo.py", "conv3d_weight_gradient_hopper.py"}
