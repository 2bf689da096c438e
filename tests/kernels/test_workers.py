"""Processes that compile: what they make is found in the cache, and what they cannot do is done by who asked."""

from __future__ import annotations

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from tests.kernels.test_ahead import submit
from voxtune.kernels import group_norm
from voxtune.kernels.compile_workers import Worker, active, compiling, describe
from voxtune.kernels.precompile import compiled_ahead, ready

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {"x_ptr": "*bf16", "affine_ptr": "*fp32", "slopes_ptr": "*fp32", "residual_ptr": "*bf16", "y_ptr": "*bf16"}
TYPES |= {"V": "i32", "CS": "i32", "C": "i32", "first": "i32", "slope": "fp32", "slopes_stride": "i32"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def order(block_v, done=None):
    """An order to compile, as Triton gives it: a function that closes over the source."""
    constants = {"ACTIVATION": "silu", "HAS_RESIDUAL": False, "ROWS": 2, "UNIT": 1}
    constants |= {"BLOCK_V": block_v, "BLOCK_C": 32}
    src = ASTSource(group_norm.voxtune_normalize, {**TYPES, **dict.fromkeys(constants, "constexpr")}, constants)
    target = TARGET
    options = make_backend(target).parse_options({"num_warps": 4})

    def async_compile():
        made = triton.compile(src, target=target, options=options.__dict__)
        if done is not None:
            done.append(made)
        return made

    return async_compile


def cubins(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.cubin")}


def test_what_a_worker_compiles_is_what_the_caller_finds(cache):
    worker = Worker()
    try:
        assert worker.compile(order(32))
        [made] = cubins(cache)
        kernel = order(32)()
        assert kernel.asm["cubin"] == made.read_bytes()
        assert len(cubins(cache)) == 1
        assert not worker.compile(lambda: None)  # nothing is known of such an order
        assert not worker.compile(order(3))  # no kernel has a block of 3
        assert worker.compile(order(64))  # and the worker goes on
    finally:
        worker.stop()
    assert not worker.compile(order(16))


class Kernel:
    def __init__(self):
        self.done, self.finished = [], []

    def run(self, block_v, *, grid, warmup):
        assert warmup
        call = order(block_v, self.done)
        submit(str(block_v), call, self.finished.append)


@pytest.mark.parametrize("killed", [False, True])
def test_a_rehearsal_is_compiled_by_them_or_without_them(cache, killed):
    kernel = Kernel()

    def rehearse():
        for block_v in (16, 32):
            ready(kernel)[(1,)](block_v)

    with compiling(1):
        assert len(active()) == 1
        if killed:
            active()[0].stop()
        with compiled_ahead(rehearse):
            pass
    assert not active()
    assert len(kernel.done) == 2
    assert len(kernel.finished) == 2
    assert len(cubins(cache)) == 2


def test_orders_are_told_in_full():
    assert describe(order(32)) == describe(order(32))
    assert describe(order(32)) != describe(order(64))
    assert describe(print) is None
