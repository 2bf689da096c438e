"""A Python process that has imported what tests need, and forks a child for every script that it is given.

Why: `import torch, triton` takes two seconds of a core; many tests need a process of their own and little more.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

SERVER = """
import contextlib, importlib, json, os, runpy, sys, traceback

for name in sys.argv[1].split():
    importlib.import_module(name)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        for stream, name in ((0, os.devnull), (1, job["stdout"]), (2, job["stderr"])):
            os.dup2(os.open(name, os.O_RDWR), stream)
        sys.argv[:] = job["argv"]
        sys.path.insert(0, os.path.dirname(job["argv"][0]))
        code = 0
        try:
            runpy.run_path(job["argv"][0], run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class WarmPython:
    """Starts on the first `run`; `modules` are imported once, under `environment`."""

    def __init__(self, modules: str, environment: Mapping[str, str]):
        self.modules, self.environment = modules, dict(environment)
        self._server: subprocess.Popen[str] | None = None

    def run(self, script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
        """As subprocess.run of `python script arguments`, its output captured as text."""
        argv = [str(script), *map(str, arguments)]
        server = self._start()
        assert server.stdin and server.stdout
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            server.stdin.write(json.dumps({"argv": argv, "stdout": out.name, "stderr": err.name}) + "\n")
            server.stdin.flush()
            code = server.stdout.readline()
            assert code, f"the process that runs {script.name} has ended"
            return subprocess.CompletedProcess(argv, int(code), out.read(), err.read())

    def _start(self) -> subprocess.Popen[str]:
        if self._server is None:
            command = [sys.executable, "-c", SERVER, self.modules]
            environment = {**os.environ, **self.environment}
            self._server = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            atexit.register(self._stop)
        return self._server

    def _stop(self) -> None:
        if self._server is not None and self._server.stdin:
            self._server.stdin.close()
            self._server.wait(60)
