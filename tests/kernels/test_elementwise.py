"""The elementwise kernel on the CPU: programs and layouts, interpreted against float64, compiled for real GPUs without one."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from functools import partial

import pytest
import torch

from tests.factories.triton_checks import INTERPRETER_ERRORS, run_checks
from voxtune.kernels import elementwise as kernels
from voxtune.kernels import ops  # noqa: F401 - registers the operator
from voxtune.kernels.elementwise_program import OPERATIONS, parse, result_layout, text_of

run = partial(run_checks, "kernels/elementwise_checks.py")
GATE = "sigmoid 1; mul 0 3; add 4 2; mul 5 0.7071"


def check(rows, count):
    assert len(rows) >= count
    for row in rows:
        assert row["error"] < 1.5 * INTERPRETER_ERRORS[row["type"]], row
        assert row["written"] and row["as_pytorch"], row


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_operation_against_float64(dtype):
    rows = run("operations", dtype, interpret=True)
    check(rows, len(OPERATIONS))
    assert {row["case"][0].split()[0] for row in rows} == set(OPERATIONS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_chains_in_every_layout_against_float64(dtype):
    check(run("chains", dtype, interpret=True), 80)


def test_offsets_of_64_bits():
    check(run("wide", interpret=True), 80)


def test_special_values_are_those_of_pytorch():
    for row in run("special", interpret=True):
        assert not row["wrong"], row


@pytest.mark.parametrize("arch", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_compiles_to_wide_loads_without_spills(arch):
    rows = run("compile", arch, interpret=False)
    assert len(rows) == 5
    for row in rows:
        # The last program keeps the results of all operations until it adds them.
        assert row["spills"] == 0 and row["registers"] <= (200 if row is rows[-1] else 64), row
        assert len(row["moves"]) >= 3 and not row["narrow"], row


HOSTILE = [
    *(
        "",
        " ",
        ";",
        "sigmoid",
        "sigmoid 0 0",
        "sigmoid 0;",
        "; sigmoid 0",
        "sigmoid 0.5",
        "add 0.5 0.5",
        "add 0",
        "mul 0 1 2",
    ),
    *("sigmoid 1", "sigmoid 0; add 0 2", "add 0 -1", "sigmoid 0; sigmoid 0", "neg 0x0", "neg 0_0", "add 0 1_0.0"),
    *(
        "add 0 inf",
        "add 0 nan",
        "add 0 1e400",
        "add 0 1e39",
        "add 0 1e-300",
        "add 0 1e99999999",
        "add 0 0.5j",
        "add 0 +1.0",
    ),
    *("add 0 .5", "add 0 1.", "add 0 1000", "add 0 1.0" + "0" * 60, "neg ٠", "add 0 ١.٠", "Sigmoid 0", "__import__ 0"),
    *(
        "add 0 __import__('os').system('true')",
        "neg 0\nimport os",
        "neg 0)#",
        "leaky_relu 0 0",
        "leaky_relu 0",
        "elu 0 1.0 1.0",
    ),
    *("neg 0; " * 80 + "neg 0", "tl.load 0", "exp(0)", "{0} 0"),
]


@pytest.mark.parametrize("program", HOSTILE)
def test_anything_but_a_program_is_refused(program):
    with pytest.raises(ValueError):
        parse(program, 1)
    with pytest.raises((ValueError, RuntimeError)):
        torch.ops.voxtune.elementwise([torch.ones(3)], program, torch.float32)
    with pytest.raises(ValueError):
        kernels.kernel_of(program, 1, "c")
    assert not hasattr(kernels, kernels.PREFIX + f"1 c {program}".encode().hex())


def test_values_that_are_not_used_are_refused():
    for program in ("neg 0", "neg 0; neg 1", "add 0 1; mul 0 1"):
        with pytest.raises(ValueError, match="does not use"):
            parse(program, 2)
    with pytest.raises(ValueError, match="inputs"):
        parse("neg 0", 9)


def test_names_that_encode_no_kernel_are_refused():
    for name in (
        "other",
        "voxtune_elementwise_",
        "voxtune_elementwise_zz",
        "voxtune_elementwise_" + b"9 c neg 0".hex(),
    ):
        assert not hasattr(kernels, name), name


def test_programs_are_written_in_one_way():
    assert text_of(parse("add   0 1e-3;leaky_relu 1  0.10", 1)) == "add 0 0.001; leaky_relu 1 0.1"


def test_another_process_makes_the_same_kernel():
    kernel = kernels.kernel_of(GATE, 2, "csb")
    name = kernel.fn.lookup_name
    assert len(kernel.fn.__name__) < 64, "it is part of file names"
    script = (
        f"from voxtune.kernels import elementwise as e; k = getattr(e, {name!r}); print(k.fn.__name__, k.cache_key)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [kernel.fn.__name__, kernel.cache_key]
    assert getattr(kernels, name) is kernel
    assert kernels.kernel_of(GATE, 2, "ccc").cache_key != kernel.cache_key


def test_workers_compile_generated_kernels(tmp_path, monkeypatch):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    from voxtune.kernels.compile_workers import Worker, describe

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, target = kernels.kernel_of(GATE, 1, "ccc"), GPUTarget("cuda", 90, 32)
    types = {name: "*bf16" if name.endswith("ptr") else "i32" for name in kernel.arg_names}
    constants = {"WIDE": False, "UNIT": 8, "ROWS": 128}
    src = ASTSource(kernel, {**types, **dict.fromkeys(constants, "constexpr")}, constants)
    options = make_backend(target).parse_options({"num_warps": 4})

    def call():
        return src, target, options

    module, name = pickle.loads(describe(call))[1]
    assert (module, getattr(kernels, name)) == ("voxtune.kernels.elementwise", kernel)
    worker = Worker()
    try:
        assert worker.compile(call)
    finally:
        worker.stop()
    assert [path.stem for path in tmp_path.rglob("*.cubin")] == [kernel.fn.__name__]


def scattered(rng, shape):
    """A tensor of this shape, or one that broadcasts to it, with gaps and its dimensions in any order."""
    sizes = [s if rng.random() < 0.8 else 1 for s in shape]
    sizes = sizes[rng.randrange(len(sizes)) :] if rng.random() < 0.2 else sizes
    order = rng.sample(range(len(sizes)), len(sizes)) if rng.random() < 0.6 else list(range(len(sizes)))
    base = torch.ones([sizes[d] + rng.choice((0, 0, 2)) for d in order]).permute(
        [order.index(d) for d in range(len(sizes))]
    )
    part = base[tuple(slice(0, s) for s in sizes)]
    return part.expand(shape[-len(sizes) :]) if rng.random() < 0.1 else part


def test_the_layout_of_a_result_is_that_of_pytorch():
    rng = random.Random(0)
    for _ in range(1500):
        shape = [rng.choice((1, 2, 3, 4, 5)) for _ in range(rng.choice((1, 2, 3, 4, 5)))]
        a, b, c = inputs = [scattered(rng, shape) for _ in range(3)]
        y = (a * b.sigmoid()) + c
        program = "sigmoid 1; mul 0 3; add 4 2"
        size, strides = result_layout(program, *kernels._forms(inputs))
        assert size == tuple(y.shape)
        assert all(s == t for s, t, n in zip(strides, y.stride(), y.shape, strict=True) if n > 1), (y.stride(), strides)


def test_the_operator_on_a_cpu_and_its_inferred_result():
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(1, 96, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    given = [x[:, :48], x[:, 48:], torch.randn(1, 48, 4, 5, 6)]
    y = torch.ops.voxtune.elementwise(given, GATE, torch.bfloat16)
    truth = (given[0] * given[1].sigmoid() + given[2]) * 0.7071
    torch.testing.assert_close(y, truth.bfloat16())
    with FakeTensorMode() as mode:
        fake = torch.ops.voxtune.elementwise([mode.from_tensor(t) for t in given], GATE, torch.bfloat16)
    assert (fake.shape, fake.stride(), fake.dtype) == (y.shape, y.stride(), y.dtype)


def test_reasons_against_the_kernel():
    x = torch.ones(2, 3)
    assert kernels.why_not([x, x], "add 0 1", torch.float32) is None
    assert "float64" in kernels.why_not([x, x.double()], "add 0 1", torch.float32)
    assert "float64" in kernels.why_not([x], "neg 0", torch.float64)
    assert "int64" in kernels.why_not([x.long()], "neg 0", torch.float32)
    assert "devices" in kernels.why_not([x, x.to("meta")], "add 0 1", torch.float32)
    assert "empty" in kernels.why_not([x[:0]], "neg 0", torch.float32)
    many = torch.ones(*[4] * 12)[(slice(0, 2),) * 12]
    assert "dimensions" in kernels.why_not([many], "neg 0", torch.float32)
    y = torch.ops.voxtune.elementwise([many], "neg 0", torch.float32)
    assert torch.equal(y, -many)
