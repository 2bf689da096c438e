"""Rehearsals: launches are taken as orders to compile, done by threads when the rehearsal is over, and nothing runs."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.runtime import build
from triton.runtime._async_compile import active_mode
from triton.tools.tensor_descriptor import TensorDescriptor

from voxtune.kernels import precompile
from voxtune.kernels.precompile import compiled_ahead, ready


def submit(key, compile_it, finish):
    """An order to compile, as Triton gives it: newer ones bring a fourth argument, for failures."""
    mode = active_mode.get()
    more = [lambda _future: None] if "cleanup_fn" in inspect.signature(mode.submit).parameters else []
    mode.submit(key, compile_it, finish, *more)


class Kernel:
    """As a Triton kernel is called; notes what became of each call."""

    def __init__(self, fails: bool = False):
        self.launched, self.compiled, self.loaded, self.fails = [], [], [], fails

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

    def run(self, *args, grid, warmup, **kwargs):
        if not warmup:
            self.launched.append((args, grid))
            return
        key = f"{id(self)}{args}"
        submit(key, lambda: self._compile(args), self.compiled.append)

    def _compile(self, args):
        if self.fails:
            raise RuntimeError("no such instruction")
        outer = self

        class Made:
            thread = threading.current_thread()

            @property
            def run(self):
                outer.loaded.append(args)

        return Made()


def test_a_launch_is_a_launch_outside():
    kernel = Kernel()
    ready(kernel)[(3,)](1, 2)
    assert kernel.launched == [((1, 2), (3,))]


def test_tensors_without_memory_are_never_launched():
    kernel, x = Kernel(), torch.zeros(16, 16)
    fake = FakeTensorMode().from_tensor(x)
    for argument in (fake, TensorDescriptor.from_tensor(fake, [16, 16]), torch.nn.Parameter(fake)):
        ready(kernel)[(3,)](x, argument, 2)
        ready(kernel)[(3,)](x, y=argument)
    assert not kernel.launched
    ready(kernel)[(3,)](x, TensorDescriptor.from_tensor(x, [16, 16]), 2)
    assert len(kernel.launched) == 1


def test_kernels_are_launched_in_one_way_only():
    """Where fake tensors are refused, and rehearsals compile."""
    package = Path(precompile.__file__).parents[1]
    launch = re.compile(r"(?<![\w.\]])voxtune_\w+\[[^\]]+\]\s*\(")
    for path in package.rglob("*.py"):
        assert not launch.search(path.read_text()), path


def test_a_rehearsal_compiles_each_once_in_threads_and_launches_nothing():
    kernel, during = Kernel(), []

    def rehearse():
        for value in (1, 2, 2):
            ready(kernel)[(3,)](value)
        during.append(len(kernel.compiled))

    interval = sys.getswitchinterval()
    with compiled_ahead(rehearse):
        assert active_mode.get() is None
        ready(kernel)[(3,)](9)
    assert during == [0]
    assert kernel.launched == [((9,), (3,))]
    assert len(kernel.compiled) == 2
    assert sorted(set(kernel.loaded)) == [(1,), (2,)]
    assert all(made.thread is not threading.main_thread() for made in kernel.compiled)
    assert sys.getswitchinterval() == interval


def test_what_fails_is_left_to_the_launch():
    bad, good = Kernel(fails=True), Kernel()

    def rehearse():
        ready(bad)[(1,)](1)
        ready(good)[(1,)](1)
        raise ValueError("a shape that nobody expected")

    done = []
    with compiled_ahead(rehearse):
        done.append(1)
    assert done
    ready(good)[(1,)](9)
    assert good.launched == [((9,), (1,))]
    assert active_mode.get() is None


def test_errors_of_the_body_pass():
    with pytest.raises(KeyError), compiled_ahead(lambda: None):
        raise KeyError("body")


SOURCE = """
#include <Python.h>
static PyObject* launch(PyObject* self, PyObject* args) {{ return PyLong_FromLong({number}); }}
static PyMethodDef methods[] = {{{{"launch", launch, METH_VARARGS, ""}}, {{0, 0, 0, 0}}}};
static struct PyModuleDef definition = {{PyModuleDef_HEAD_INIT, "__voxtune_launcher", NULL, -1, methods}};
PyMODINIT_FUNC PyInit___voxtune_launcher(void) {{ return PyModule_Create(&definition); }}
"""


def test_launchers_of_one_name_are_built_by_threads_and_loaded_by_one(tmp_path, monkeypatch):
    """As Triton 3.6 makes them: a C module a kernel, all of one name."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    loads = []
    load = build._load_module_from_path
    monkeypatch.setattr(
        build, "_load_module_from_path", lambda *args: loads.append(threading.current_thread()) or load(*args)
    )

    class Made:
        def __init__(self, number):
            self.number = number

        @property
        def run(self):
            source = SOURCE.format(number=self.number)
            return build.compile_module_from_src(source, "__voxtune_launcher").launch

    class Launched(Kernel):
        def _compile(self, args):
            made.append(Made(args[0]))
            return made[-1]

    kernel, made = Launched(), []
    with compiled_ahead(lambda: [ready(kernel)[(1,)](number) for number in range(8)]):
        pass
    assert len(loads) == 8
    assert set(loads) == {threading.main_thread()}
    assert sorted(m.number for m in made) == list(range(8))
    assert all(m.run() == m.number for m in made)
    assert len(list(tmp_path.rglob("*.so"))) == 8
